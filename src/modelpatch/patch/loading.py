"""Carries weights into and out of replaced modules: what Transformers calls to load and save comes through here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelpatch import _transformers
from modelpatch.errors import ArgumentTypeError, LayoutError, NoReportError, WeightsError
from modelpatch.patch.identity import built_under
from modelpatch.patch.sites import declared_layout, local_site, sites, weight_sites
from modelpatch.weights.ledger import Ledger
from modelpatch.weights.loading import plan_load
from modelpatch.weights.receiving import receive
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


def load_partitioned(stock: Callable[..., Any], model: nn.Module, *args: Any) -> Any:
    """Do what Transformers does to fill a model that DeepSpeed has partitioned, unless it has layouts.

    Raises:
        LayoutError: It has; nothing was loaded.
    """
    _refuse(weight_sites(model), "DeepSpeed's ZeRO-3 places the stock model's tensors")
    return stock(model, *args)


def _refuse_unsupported(found: Sequence[LayoutSite], config: Any) -> None:
    """Refuse loads that don't come by the way that layouts take."""
    reason = ""
    if config.device_mesh is not None:
        reason = "tensor parallelism places slices of the stock model's tensors"
    elif config.hf_quantizer is not None and config.hf_quantizer.pre_quantized:
        name = type(config.hf_quantizer).__name__
        reason = (
            f"the files are quantised already ({name}), in tensors that the layout doesn't know"
        )
    if reason:
        _refuse(found, reason)


def _refuse(found: Sequence[LayoutSite], reason: str) -> None:
    if site := next((site for site in found if site.is_declared), None):
        raise LayoutError(f"{site.path or '(root)'}, {site.title}: {reason}. Nothing was loaded.")


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
