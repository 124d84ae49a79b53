"""State dicts of the stock model, put into a patched one by `load_state_dict`."""

from __future__ import annotations

import torch

from modelpatch.errors import WeightsError
from modelpatch.weights.equations import Equation
from modelpatch.weights.sites import LayoutSite


def receive(
    site: LayoutSite, state_dict: dict[str, torch.Tensor], prefix: str, missing: list[str]
) -> None:
    """Turn the original's tensors in a state dict into the replacement's, in place.

    What the state dict lacks keeps its value, and is named as missing: a sharded file comes in pieces.

    Args:
        site: The replaced module.
        state_dict: By name in the model; one in the replacement's own layout is left alone.
        prefix: Of the module's names.
        missing: Names that the state dict lacks, to be added to.

    Raises:
        WeightsError: It holds tensors of both layouts, or of a wrong shape, or which layout it is can't be told.
    """
    layout = site.layout
    given = {
        name.removeprefix(prefix): tensor
        for name, tensor in state_dict.items()
        if name.startswith(prefix)
    }
    if layout is None or not _is_stock(site, given, prefix):
        return
    made: dict[str, torch.Tensor] = {}
    for equation in layout.equations:
        if equation.is_kept or not any(n in given for n in equation.sources):
            continue
        sources = _completed(site, equation, given, prefix, missing)
        if sources is not None:
            shapes = {name: site.replacement[name].shape for name in equation.targets}
            made |= equation.forward(sources, shapes)
    for name in (*site.moved, *layout.dropped):
        state_dict.pop(prefix + name, None)
    state_dict.update({prefix + name: tensor for name, tensor in made.items()})
    for name in layout.created:
        state_dict.setdefault(prefix + name, site.replacement[name])


def _is_stock(site: LayoutSite, given: dict[str, torch.Tensor], prefix: str) -> bool:
    """Tell whether tensors are in the original's layout: by their names, or else by their shapes."""
    only_original = [n for n in given if n in site.original and n not in site.replacement]
    only_replacement = [
        n
        for n in given
        if n in site.replacement and n not in site.original and n not in _created(site)
    ]
    if only_original and only_replacement:
        raise WeightsError(
            f"The state dict holds {prefix}{only_original[0]} of the stock layout and {prefix}{only_replacement[0]} of the "
            f"patched one ({site.title}); nothing of this module was loaded."
        )
    if only_original or only_replacement:
        return bool(only_original)
    shared = [name for name in site.moved if name in given and name in site.replacement]
    stock = all(given[n].shape == site.original[n].shape for n in shared)
    own = all(given[n].shape == site.replacement[n].shape for n in shared)
    if shared and stock and own:
        raise WeightsError(
            f"{prefix}{shared[0]} has one name and shape in the stock layout and in the patched one ({site.title}), so the "
            f"state dict doesn't tell which it is in. Load the files with from_pretrained."
        )
    return bool(shared) and stock


def _created(site: LayoutSite) -> tuple[str, ...]:
    return site.layout.created if site.layout else ()


def _completed(
    site: LayoutSite,
    equation: Equation,
    given: dict[str, torch.Tensor],
    prefix: str,
    missing: list[str],
) -> dict[str, torch.Tensor] | None:
    """Return all sources of an equation, those that were not given from the module; None where it has none yet."""
    for name in equation.sources:
        if name in given and given[name].shape != site.original[name].shape:
            raise WeightsError(
                f"{prefix}{name}: {list(given[name].shape)} in the state dict, {list(site.original[name].shape)} in the stock "
                f"model ({site.title}); nothing of this module was loaded."
            )
    lacking = [name for name in equation.sources if name not in given]
    missing += [prefix + name for name in lacking]
    sources = {name: given[name] for name in equation.sources if name in given}
    if lacking:
        current = {name: site.replacement[name] for name in equation.targets}
        if any(tensor.is_meta for tensor in current.values()):
            return None
        shapes = {name: site.original[name].shape for name in equation.sources}
        back = equation.backward(current, shapes)
        sources |= {name: back[name].to(next(iter(given.values())).device) for name in lacking}
    return sources
