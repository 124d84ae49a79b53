"""Carries weights into and out of replaced modules: what Transformers calls to load and save comes through here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelpatch import _transformers
from modelpatch.errors import ArgumentTypeError, LayoutError, NoReportError, WeightsError
from modelpatch.patch.construction import Site, site_of
from modelpatch.patch.identity import built_under, sites
from modelpatch.patch.initialisation import own_initialiser
from modelpatch.weights.layout import Layout, compile_layout
from modelpatch.weights.ledger import Ledger
from modelpatch.weights.loading import plan_load
from modelpatch.weights.receiving import receive
from modelpatch.weights.registered import may_concern, registered_layout
from modelpatch.weights.saving import to_stock
from modelpatch.weights.sites import LayoutSite, check_sites

_OWN = "modelpatch"  # in the metadata that torch keeps with a state dict
_LEDGERS: dict[int, tuple[weakref.ref[nn.Module], Ledger]] = {}  # by identity of the model


def ledger(model: nn.Module) -> Ledger:
    """Return the account of the load that built `model`: what filled each tensor, and what was left over.

    Args:
        model: A model that `from_pretrained` loaded under `patched` or a registered patch.

    Raises:
        ArgumentTypeError: `model` is no nn.Module.
        NoReportError: It was not loaded from files, or under no patch, or it is a copy.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"ledger() takes a model, got {type(model).__name__}")
    found = find_ledger(model)
    if found is None:
        raise NoReportError(
            f"{type(model).__name__} was not loaded under a patch in this process: from_pretrained under `patched(...)`, or "
            f"with a registered patch, keeps a ledger."
        )
    return found


def find_ledger(model: nn.Module) -> Ledger | None:
    """Return the account of the load that built `model`, if there is one."""
    entry = _LEDGERS.get(id(model))
    return entry[1] if entry is not None else None


def load(
    stock: Callable[..., Any],
    model: nn.Module,
    state_dict: Mapping[str, Any],
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Fill a model from files, as Transformers does, through the layouts of its replaced modules.

    Args:
        stock: What Transformers does.
        model: The model, on `meta`.
        state_dict: All tensors of the files by key, not yet read.
        load_config: Transformers' own config of the load.
        *args: What else it is called with.
        **kwargs: What else it is called with.

    Raises:
        LayoutError: A layout doesn't fit, or has no way back. Nothing was read.
        WeightsError: What the files hold doesn't fit. Nothing was read.
    """
    under_patches = built_under(model)
    if not under_patches or _transformers.has_adapter(
        model
    ):  # an adapter's file holds what the adapter is called
        return stock(model, state_dict, load_config, *args, **kwargs)
    mapping = load_config.weight_mapping or []
    conversions = _transformers.Conversions(model, mapping)
    found = weight_sites(model, conversions)
    _refuse_unsupported(found, load_config)
    check_sites(found)
    plan, account = plan_load(model, state_dict, found, mapping)
    faults = [*_index_faults(state_dict, load_config), *plan.faults]
    if faults:
        raise WeightsError(
            f"The files don't fit {type(model).__name__} as it is patched, and nothing was loaded. (patched(..., "
            f"strict=False) loads what fits, and the ledger has the rest.)",
            faults=faults,
        )
    files = {key: value for key, value in state_dict.items() if key not in plan.aside}
    result = stock(
        model, files, _transformers.carried(load_config, plan.takes, plan.fill), *args, **kwargs
    )
    _transformers.forget_carrier(model)
    identity = id(model)
    _LEDGERS[identity] = (weakref.ref(model, lambda _: _LEDGERS.pop(identity, None)), account)
    return result


def revert(
    stock: Callable[..., dict[str, torch.Tensor]],
    model: nn.Module,
    state_dict: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Give the tensors of a model the names and shapes of a file, through the layouts of its replaced modules.

    Args:
        stock: What Transformers does.
        model: The model.
        state_dict: Its tensors by name; maybe one shard of it.

    Raises:
        LayoutError: A layout has no way back.
    """
    if not any(True for _ in sites(model)):
        return stock(model, state_dict)
    conversions = _transformers.Conversions.at_save(model)
    found = [site for site in weight_sites(model, conversions) if site.layout is not None]
    if not found:
        return stock(model, state_dict)
    faults = [f"{site.path}, {site.title}: {f}" for site in found for f in site.layout.faults]  # type: ignore[union-attr]  # just seen
    faults += _quantised_faults(model, found)
    if faults:
        raise LayoutError("Nothing was saved in the stock layout:", faults=faults)
    return to_stock(
        state_dict,
        found,
        lambda part: stock(model, part),
        # Transformers up to 5.12 or later reads what is on disk afterwards, by names that are the file's by then.
        read=lambda name: _transformers.read_offloaded(model, name),
    )


def accept_stock_state_dicts(model: nn.Module) -> None:
    """Let `load_state_dict` of replaced modules with a layout take the stock model's tensors. Repeating is harmless."""
    for _, module, site in sites(model):
        hooks = module._load_state_dict_pre_hooks.values()
        is_known = any(getattr(hook, "hook", None) is _receive for hook in hooks)
        if declared_layout(site) is not None and not is_known:
            module.register_load_state_dict_pre_hook(_receive)  # type: ignore[no-untyped-call]  # torch's
            module._register_state_dict_hook(_mark_own)  # type: ignore[no-untyped-call]  # torch's


def _mark_own(
    _module: nn.Module, _state_dict: dict[str, Any], _prefix: str, metadata: dict[str, Any]
) -> None:
    """Mark a state dict as one in the replacement's layout, for names and shapes that are the same in both."""
    metadata[_OWN] = True


def _receive(  # as torch calls it
    module: nn.Module,
    state_dict: dict[str, torch.Tensor],
    prefix: str,
    local_metadata: dict[str, Any],
    _strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    site = None if local_metadata.get(_OWN) else local_site(module)
    if site is not None:
        receive(site, state_dict, prefix, missing_keys)


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


def _refuse_unsupported(found: Sequence[LayoutSite], config: Any) -> None:
    """Refuse loads that don't come by the way that layouts take."""
    moved = [site for site in found if site.is_declared]
    if not moved:
        return
    reason = ""
    if config.device_mesh is not None:
        reason = "tensor parallelism places slices of the stock model's tensors"
    elif config.hf_quantizer is not None and config.hf_quantizer.pre_quantized:
        name = type(config.hf_quantizer).__name__
        reason = (
            f"the files are quantised already ({name}), in tensors that the layout doesn't know"
        )
    if reason:
        raise LayoutError(f"{moved[0].path}, {moved[0].title}: {reason}. Nothing was loaded.")


def _quantised_faults(model: nn.Module, found: Sequence[LayoutSite]) -> list[str]:
    if getattr(model, "hf_quantizer", None) is None:
        return []
    return [
        f"{site.path}, {site.title}: its weights are quantised, and can't be taken apart. "
        f"save_original_format=False saves the model's own layout."
        for site in found
    ]


def _index_faults(files: Mapping[str, Any], config: Any) -> list[str]:
    """Return what an index of shards promises and no shard has."""
    index = (config.sharded_metadata or {}).get("weight_map", {})
    return [
        f"{key}: the index has it in {shard}, and it is in no shard"
        for key, shard in index.items()
        if key not in files
    ]
