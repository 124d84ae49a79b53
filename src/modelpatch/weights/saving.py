"""The way back: from the tensors of a patched model to those of the stock model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from modelpatch.errors import LayoutError
from modelpatch.weights.equations import Equation
from modelpatch.weights.expressions import Tensors
from modelpatch.weights.sites import LayoutSite
from modelpatch.weights.trials import fingerprint, scaled, scales, shrunk

Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def to_stock(
    tensors: Tensors,
    sites: Sequence[LayoutSite],
    revert: Revert,
    *,
    only_moves: Callable[[str], bool],
    read: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Give tensors of a patched model the names and shapes that the stock model's file has.

    Args:
        tensors: By name in the model; maybe one shard of it.
        sites: The replaced modules with a layout.
        revert: What Transformers does to get from the stock model's tensors to the file's.
        only_moves: Tells whether that does the same to a tensor of this name whatever its size.
        read: Returns a tensor that is on `meta` here, because it is offloaded to disk.

    Raises:
        LayoutError: A layout has no way back, or the tensors hold a part only of what it needs.
    """
    rest = dict(tensors)
    equations = [
        (site, equation)
        for site in sites
        for equation in _present(site, rest)
        if not equation.is_kept
    ]
    movable = [
        (site, equation)
        for site, equation in equations
        if all(only_moves(site.full(name)) for name in equation.sources)
    ]
    unconverted = _unconverted(movable, revert)
    done: dict[str, torch.Tensor] = {}
    stock: dict[str, torch.Tensor] = {}
    for site, equation in equations:
        taken = {name: (site.full(name), rest.pop(site.full(name))) for name in equation.targets}
        targets = {name: read(full) if t.is_meta else t for name, (full, t) in taken.items()}
        names = [unconverted.get(site.full(name)) for name in targets]
        if None not in names:
            done |= dict(zip(names, targets.values(), strict=True))  # type: ignore[arg-type]  # just seen
            continue
        shapes = {name: tensor.shape for name, tensor in site.original.items()}
        try:
            sources = equation.backward(targets, shapes)
        except (RuntimeError, ValueError) as error:
            raise LayoutError(
                f"{site.path or '(root)'}, {site.title}: {equation} can't be taken back ({error}), so the stock layout "
                f"can't be saved. save_original_format=False saves the model's own."
            ) from error
        stock |= {site.full(name): tensor for name, tensor in sources.items()}
    return revert(rest | stock) | done


def _present(site: LayoutSite, tensors: Tensors) -> Iterator[Equation]:
    """Yield the equations of a site of which the tensors hold the targets."""
    for equation in site.layout.equations if site.layout else ():
        there = [name for name in equation.targets if site.full(name) in tensors]
        if len(there) == len(equation.targets):
            yield equation
        elif there:
            lacking = next(name for name in equation.targets if name not in there)
            raise LayoutError(
                f"{site.path or '(root)'}, {site.title}: {equation} needs {site.full(lacking)} beside "
                f"{site.full(there[0])}, and only the latter is to be saved. Save all of the module's tensors together."
            )


def _unconverted(
    equations: Sequence[tuple[LayoutSite, Equation]], revert: Revert
) -> dict[str, str]:
    """Return the file's name for each tensor that the way back only renames in the end.

    A layout may stack what Transformers takes apart again. Seen by taking small random tensors the whole way.
    """
    small: dict[str, tuple[object, ...]] = {}
    stock: dict[str, torch.Tensor] = {}
    for site, equation in equations:
        own = {name: site.replacement[name] for name in equation.targets}
        scale = next(scales(dim for tensor in own.values() for dim in tensor.shape))
        originals = {name: scaled(site.original[name].shape, scale) for name in equation.sources}
        targets = shrunk(own, scale)
        try:
            sources = equation.backward(targets, originals)
        except (RuntimeError, ValueError, IndexError):
            continue
        stock |= {site.full(name): tensor for name, tensor in sources.items()}
        small |= {site.full(name): fingerprint(tensor) for name, tensor in targets.items()}
    if not stock:
        return {}
    made = revert(stock)
    by_value = {fingerprint(tensor): name for name, tensor in made.items()}
    if len(by_value) < len(made) or len(set(small.values())) < len(small):
        return {}  # tensors too small to tell apart
    return {name: by_value[value] for name, value in small.items() if value in by_value}
