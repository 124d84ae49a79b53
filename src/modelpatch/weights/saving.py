"""The way back: from the tensors of a patched model to those of the stock model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from modelpatch.errors import LayoutError
from modelpatch.weights.equations import Equation
from modelpatch.weights.expressions import Tensors
from modelpatch.weights.mosaic import pieced, whole
from modelpatch.weights.sites import LayoutSite

Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def to_stock(
    tensors: Tensors,
    sites: Sequence[LayoutSite],
    revert: Revert,
    *,
    read: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Give tensors of a patched model the names and shapes that the stock model's file has.

    Args:
        tensors: By name in the model; maybe one shard of it.
        sites: The replaced modules with a layout.
        revert: What Transformers does to get from the stock model's tensors to the file's.
        read: Returns a tensor that is on `meta` here, because it is offloaded to disk.

    Raises:
        LayoutError: A layout has no way back, or the tensors hold a part only of what it needs.
    """
    rest = dict(tensors)
    stock: dict[str, torch.Tensor] = {}
    for site in sites:
        shapes = {name: tensor.shape for name, tensor in site.original.items()}
        for equation in _present(site, rest):
            if equation.is_kept:
                continue
            taken = {name: rest.pop(site.full(name)) for name in equation.targets}
            targets = {n: read(site.full(n)) if t.is_meta else t for n, t in taken.items()}
            try:
                sources = equation.backward(pieced(targets), shapes)
            except (RuntimeError, ValueError) as error:
                raise LayoutError(
                    f"{site.path or '(root)'}, {site.title}: {equation} can't be taken back ({error}), so the stock layout "
                    f"can't be saved. save_original_format=False saves the model's own."
                ) from error
            stock |= {site.full(name): tensor for name, tensor in sources.items()}
    # A layout may have stacked what Transformers takes apart again, so only now.
    return {name: whole(tensor) for name, tensor in revert(rest | stock).items()}


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
