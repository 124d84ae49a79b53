"""The replaced modules of a model, and how their weights see them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from modelpatch import _transformers
from modelpatch.errors import LayoutError
from modelpatch.patch.construction import Site, site_of
from modelpatch.patch.initialisation import own_initialiser
from modelpatch.weights.layout import Layout, compile_layout
from modelpatch.weights.registered import may_concern, registered_layout
from modelpatch.weights.sites import LayoutSite


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module, Site]]:
    """Yield path, module and record of each replaced site of `model`, in the order of `named_modules`."""
    for path, module in model.named_modules():
        if (site := site_of(module)) is not None:
            yield path, module, site


def weight_sites(
    model: nn.Module, conversions: _transformers.Conversions | None = None
) -> list[LayoutSite]:
    """Return the replaced modules of `model` as their weights see them, the outermost first.

    Raises:
        LayoutError: One with a layout is inside another, or the original of one can't be built.
    """
    found: list[LayoutSite] = []
    outer: str | None = None
    for path, module, site in sites(model):
        declared = declared_layout(site)
        if outer is not None and f"{path}.".startswith(outer):
            if declared is not None:
                raise LayoutError(
                    f"{path}, {_title(site)}: has a layout, and is inside of {outer[:-1] or 'the model'}, which has one "
                    f"too. Give one layout for both, or patch one of them."
                )
            continue
        found.append(_weight_site(path, module, site, declared, conversions))
        if declared is not None:
            outer = f"{path}." if path else ""
    return found


def declared_layout(site: Site) -> Layout | None:
    """Return the layout that the patch gives to the replacement at a site."""
    if site.rule.patch is None:
        return None
    return site.rule.patch.layout.get(site.rule.replacement)


def local_site(module: nn.Module) -> LayoutSite | None:
    """Return a replaced module with a layout as its weights see it, or None."""
    site = site_of(module)
    declared = declared_layout(site) if site else None
    return _weight_site("", module, site, declared, None) if site and declared is not None else None


def _weight_site(
    path: str,
    module: nn.Module,
    site: Site,
    declared: Layout | None,
    conversions: _transformers.Conversions | None,
) -> LayoutSite:
    replacement = dict(module.state_dict())
    prefix = f"{path}." if path else ""
    layout = None
    original: dict[str, torch.Tensor] = {}
    if site.args is None and declared is None:
        pass  # unpickled, or exchanged by hand: what it was built from is not known
    elif declared is not None:
        original = _original(path, site)
        layout = compile_layout(declared, original, replacement)
    elif conversions is not None and may_concern(conversions, [prefix + n for n in replacement]):
        original = _original(path, site)
        layout = registered_layout(path, original, replacement, conversions)
    elif not path:  # of the whole model, only what differs from the original is the replacement's
        original = _original(path, site)
    if not path and declared is None:
        replacement = {
            name: tensor
            for name, tensor in replacement.items()
            if name not in original or original[name].shape != tensor.shape
        }
    return LayoutSite(
        path=path,
        title=_title(site),
        replacement=replacement,
        original=original,
        layout=layout,
        is_declared=declared is not None,
        initialised=frozenset(replacement) if own_initialiser(module, site) else frozenset(),
        strict=site.rules.strict if site.rules is not None else True,
        allow_irreversible=site.rule.patch is not None and site.rule.patch.allow_irreversible,
    )


def _original(path: str, site: Site) -> dict[str, torch.Tensor]:
    """Return names and shapes of what the original would have had here."""
    if site.args is None:
        raise LayoutError(
            f"{path or '(root)'}, {_title(site)}: the model was unpickled, and doesn't know what it was built from"
        )
    try:
        with _transformers.constructing, torch.device("meta"):
            return dict(site.build(site.original).state_dict())
    except Exception as error:
        raise LayoutError(
            f"{path or '(root)'}, {_title(site)}: a {site.original.__name__} can't be built from the same arguments, to see its "
            f"tensors: {error}"
        ) from error


def _title(site: Site) -> str:
    patch = f" of patch {site.rule.patch.name!r}" if site.rule.patch else ""
    return f"{site.rule.replacement.__name__} in the place of {site.original.__name__}{patch}"
