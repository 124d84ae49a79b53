"""What Transformers and others know of a class by its name follows the replacement, for one model.

Sharding by `_no_split_modules` (and FSDP wrapping, which reads it), the architecture written to `config.json`, and
whether a model counts as custom code, which decides over built-in weight conversions.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from modelpatch import _transformers
from modelpatch.patch.construction import Site, active, site_of
from modelpatch.patch.rules import RuleSet

# Models by identity, with the rules that they were built under.
_BUILT_UNDER: dict[int, tuple[weakref.ref[nn.Module], tuple[RuleSet, ...]]] = {}
# Class names of models that were replaced, by the names of their replacements.
_ORIGINAL_NAMES: dict[str, str] = {}


def original_name(name: str) -> str:
    """Return the name of the model class that a class called `name` stands for, or `name`."""
    return _ORIGINAL_NAMES.get(name, name)


def sites(model: nn.Module) -> Iterator[tuple[str, nn.Module, Site]]:
    """Yield path, module and record of each replaced site of `model`, in the order of `named_modules`."""
    for path, module in model.named_modules():
        if (site := site_of(module)) is not None:
            yield path, module, site


def built_under(model: nn.Module) -> tuple[RuleSet, ...]:
    """Return the rules that `model` was built under, none for a model that was built plain."""
    entry = _BUILT_UNDER.get(id(model))
    return entry[1] if entry is not None else ()


def follow(model: nn.Module, *rules: RuleSet) -> None:
    """Let names follow the replacements in `model`, and remember the rules it was built under.

    Repeating is harmless.
    """
    identity = id(model)
    known = (*built_under(model), *rules, *(scope.rules for scope in active()))
    reference = weakref.ref(model, lambda _: _BUILT_UNDER.pop(identity, None))
    _BUILT_UNDER[identity] = (reference, tuple(dict.fromkeys(known)))
    renamed = {site.original.__name__: type(module).__name__ for _, module, site in sites(model)}
    if not renamed:
        return
    present = {type(module).__name__ for module in model.modules()}
    for module in model.modules():
        if not _transformers.is_model(module):
            continue
        if names := getattr(module, "_no_split_modules", None):
            kept = [name for name in names if name not in renamed or name in present]
            new = [renamed[name] for name in names if name in renamed]
            module._no_split_modules = type(names)(dict.fromkeys([*kept, *new]))
        if (site := site_of(module)) is not None and _transformers.is_model_class(site.original):
            _ORIGINAL_NAMES[type(module).__name__] = site.original.__name__
            if hasattr(site.original, "is_custom_code"):  # since 5.20 or later
                vars(module)["is_custom_code"] = site.original.is_custom_code
            vars(module)["save_pretrained"] = functools.partial(
                save_as, module, site.original.__name__
            )


def save_as(model: Any, architecture: str, *args: Any, **kwargs: Any) -> None:
    """Save a model whose class was replaced so that `config.json` names the original, which engines look up."""
    config = model.config
    auto_map = copy.deepcopy(vars(config).get("auto_map"))

    def save_config(*args: Any, **kwargs: Any) -> None:
        del vars(config)["save_pretrained"]  # before the config is written
        config.architectures = [architecture]
        if auto_map is not None:
            config.auto_map = auto_map
        else:
            vars(config).pop("auto_map", None)
        config.save_pretrained(*args, **kwargs)

    vars(config)["save_pretrained"] = save_config
    try:
        type(model).save_pretrained(model, *args, **kwargs)
    finally:
        vars(config).pop("save_pretrained", None)
