"""What Transformers and others know of a class by its name follows the replacement, for one model.

Sharding by `_no_split_modules` (and FSDP wrapping, which reads it), the architecture written to `config.json`, and
whether a model counts as custom code, which decides over built-in weight conversions.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from modelpatch import _transformers
from modelpatch.errors import LayoutError
from modelpatch.patch.construction import Scope, site_of
from modelpatch.patch.rules import RuleSet
from modelpatch.patch.sites import sites, weight_sites

# Models by identity, with the rules that they were built under.
_BUILT_UNDER: dict[int, tuple[weakref.ref[nn.Module], tuple[RuleSet, ...]]] = {}


def original_name(name: str) -> str:
    """Return the name of the class that a live replaced model of class `name` stands for, or `name`."""
    for reference, _ in list(_BUILT_UNDER.values()):
        model = reference()
        if model is not None and type(model).__name__ == name and (site := site_of(model)):
            return site.original.__name__
    return name


def built_under(model: nn.Module) -> tuple[RuleSet, ...]:
    """Return the rules that `model` was built under, none for a model that was built plain."""
    entry = _BUILT_UNDER.get(id(model))
    return entry[1] if entry is not None else ()


def follow(model: nn.Module, scopes: Iterable[Scope]) -> None:
    """Let names follow the replacements made under `scopes`, in one model and not in those inside it.

    Also remembers the rules it was built under. Repeating is harmless.
    """
    scopes = tuple(scopes)
    identity = id(model)
    known = dict.fromkeys((*built_under(model), *(scope.rules for scope in scopes)))
    reference = weakref.ref(model, lambda _: _BUILT_UNDER.pop(identity, None))
    _BUILT_UNDER[identity] = (reference, tuple(known))
    names = getattr(model, "_no_split_modules", None) or ()
    renamed = {
        (original.__name__, rule.replacement.__name__)
        for scope in scopes
        for rule, originals in scope.replaced.items()
        for original in originals
        if original.__name__ in names
    }
    if renamed:
        present = {type(module).__name__ for module in model.modules()}
        gone = {old for old, _ in renamed} - present
        new = {new for _, new in renamed if new in present}
        vars(model)["_no_split_modules"] = new.union(set(names) - gone)
    site = site_of(model)
    is_replaced = site is not None and _transformers.is_model_class(site.original)
    if is_replaced or (_transformers.is_model(model) and record(model)):
        original = site.original if site is not None and is_replaced else type(model)
        vars(model)["save_pretrained"] = functools.partial(save_as, model, original)
        if is_replaced and hasattr(original, "is_custom_code"):  # since 5.20 or later
            vars(model)["is_custom_code"] = original.is_custom_code


def record(model: nn.Module) -> dict[str, str]:
    """Return names and versions of the patches that replaced something in `model`."""
    patches = [site.rule.patch for _, _, site in sites(model)]
    return {patch.name: patch.version for patch in patches if patch is not None and patch.name}


def follow_all(model: nn.Module, scopes: Iterable[Scope]) -> None:
    """Do as `follow` in `model` and in the models inside it."""
    scopes = tuple(scopes)
    for module in reversed(list(model.modules())):  # inner ones first, as they are built
        if module is model or _transformers.is_model(module):
            follow(module, scopes)


def save_as(model: Any, original: type, *args: Any, **kwargs: Any) -> None:
    """Save a patched model so that `config.json` names the original, which engines look up, and the patches.

    The patches are a record for people; nothing is run from it.

    Raises:
        LayoutError: The file is to be in the model's own layout, and would look like one in the stock layout.
    """
    if not kwargs.get("save_original_format", True):
        _refuse_ambiguous(model)
    config = model.config
    auto_map = copy.deepcopy(vars(config).get("auto_map"))
    patches = record(model)

    def save_config(folder: Any, *args: Any, **kwargs: Any) -> None:
        del vars(config)["save_pretrained"]  # before the config is written
        if original is not type(model):
            config.architectures = [original.__name__]
            vars(config).pop("auto_map", None)
            if auto_map is not None:
                config.auto_map = auto_map
            _transformers.save_code(original, folder, config)
        if patches:
            config.modelpatch = patches
        try:
            config.save_pretrained(folder, *args, **kwargs)
        finally:
            vars(config).pop("modelpatch", None)

    vars(config).pop("modelpatch", None)  # of the file that it was loaded from
    vars(config)["save_pretrained"] = save_config
    try:
        type(model).save_pretrained(model, *args, **kwargs)
    finally:
        vars(config).pop("save_pretrained", None)


def _refuse_ambiguous(model: nn.Module) -> None:
    """Refuse own layouts in which a tensor with a name and shape of the stock model's holds something else."""
    faults = [
        f"{site.full(name)}, {site.title}: has one name and shape in both, and other values"
        for site in weight_sites(model)
        if site.is_declared
        for name in site.moved
        if name in site.replacement and site.replacement[name].shape == site.original[name].shape
    ]
    if faults:
        raise LayoutError(
            "Nothing was saved: a file in the model's own layout couldn't be told from one in the stock layout.",
            faults=faults,
        )
