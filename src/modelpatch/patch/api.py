"""The functions of the specification, and the scoped form."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from modelpatch import _transformers
from modelpatch.errors import ArgumentError, ArgumentTypeError, EngineConflictError
from modelpatch.patch import construction, identity, registry, scope
from modelpatch.patch.construction import Site
from modelpatch.patch.initialisation import complete, initialise
from modelpatch.patch.rules import (
    Key,
    Patch,
    Replacements,
    Rule,
    RuleSet,
    Where,
    compile_rules,
)

_lock = threading.Lock()
_undo: dict[
    str, _transformers.Undo
] = {}  # what is connected: "loading"; after install() "functions"
_taken: dict[str, type[nn.Module]] = {}  # registrations that were Transformers' before install()


def register_patch_mapping(mapping: Replacements, overwrite: bool = False) -> None:
    """Register replacements for every later `from_pretrained`, `from_config` and `apply_patches` block.

    Prefer `patched`, which is scoped and raises when a key replaced nothing. All entries are registered or none. The
    first call imports Transformers.

    Args:
        mapping: From keys to replacement classes. A key is an nn.Module class, a dotted path, an exact class name, or
            a pattern searched in class names (`re.search`); they take precedence in this order, patterns among
            themselves in the order of registration. Names and patterns reach model code only.
        overwrite: Replace entries whose key is registered already.

    Raises:
        TypeError: A key or replacement has the wrong type. The registry is unchanged.
        ValueError: A key is taken, a pattern invalid, or a replacement its own original. The registry is unchanged.

    Example:
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> class MyMLP(LlamaMLP):
        ...     pass
        >>> register_patch_mapping({"LlamaMLP": MyMLP})
        >>> list(get_patch_mapping())
        ['LlamaMLP']
        >>> unregister_patch_mapping(["LlamaMLP"])
    """
    registry.register(mapping, overwrite=overwrite)
    _hook()


def unregister_patch_mapping(keys: Iterable[Key]) -> None:
    """Remove keys from the registry, given as they were registered.

    Raises:
        TypeError: `keys` is a single key.
        ValueError: A key is not registered. The registry is unchanged.
    """
    registry.unregister(keys)


def get_patch_mapping() -> dict[Key, type[nn.Module]]:
    """Return a copy of the registry, from keys to replacement classes."""
    return registry.registered()


def clear_patch_mapping() -> None:
    """Remove all keys from the registry."""
    registry.clear()


def apply_patches() -> AbstractContextManager[None]:
    """Apply the registered patches to models that are constructed by hand in the block.

    `from_pretrained` and `from_config` do this by themselves. The block belongs to its thread or task.

    Example:
        >>> from modelpatch.testing import tiny_config
        >>> from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel
        >>> class MyMLP(LlamaMLP):
        ...     pass
        >>> register_patch_mapping({"LlamaMLP": MyMLP})
        >>> with apply_patches():
        ...     model = LlamaModel(tiny_config("llama"))
        >>> type(model.layers[0].mlp).__name__
        'MyMLP'
        >>> clear_patch_mapping()
    """
    return _connected(scope.registered)


def patched(
    *patches: Patch | Replacements, where: Where | None = None, strict: bool = True
) -> AbstractContextManager[None]:
    """Replace classes in models that are built or loaded in the block, by this thread or task.

    Blocks nest: an inner key wins over an outer one, and any scoped key over a registered one. Nothing outside of the
    block sees them; a generator that is suspended inside the block keeps it open for its caller.

    Args:
        *patches: Mappings as for `register_patch_mapping`, or `Patch` values.
        where: Limits them to some sites: called with those of the original constructor's arguments that it names, by
            keyword, and true where to replace. A `Patch` with a `where` of its own keeps to both.
        strict: Raise on leaving when a key replaced nothing.

    Raises:
        TypeError: A key or replacement has the wrong type, or `where` asks for an argument that a site doesn't have.
        ValueError: Two patches claim one key, a pattern is invalid, or a pattern matches a class and one inside it.
        NothingReplacedError: On leaving without another error, when `strict`.

    Example:
        >>> from modelpatch.testing import tiny_config
        >>> from transformers import AutoModelForCausalLM
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> class MyMLP(LlamaMLP):
        ...     pass
        >>> with patched({LlamaMLP: MyMLP}):
        ...     model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        >>> type(model.model.layers[0].mlp).__name__
        'MyMLP'
    """
    rules: dict[Key, Rule] = {}
    for given in patches:
        patch = given if isinstance(given, Patch) else Patch("", given)
        wheres = tuple(w for w in (where, patch.where) if w is not None)
        for rule in compile_rules(patch.replace, wheres=wheres, patch=patch.name):
            if rule.key in rules:
                names = [repr(r.patch) if r.patch else "a mapping" for r in (rules[rule.key], rule)]
                raise ArgumentError(f"Two patches claim {rule.key_text}: {' and '.join(names)}")
            rules[rule.key] = rule
    if not rules:
        raise ArgumentError("patched() needs at least one key")
    return _connected(functools.partial(scope.scoped, RuleSet(rules.values()), strict=strict))


def patch_output_recorders(model: nn.Module) -> None:
    """Record outputs of `model` from its replacements, also where a key was registered after it was built.

    Happens by itself when outputs are first asked for; here for models whose modules were exchanged by hand. Other
    models of the family are not affected.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"expected a model, got {type(model).__name__}")
    _hook()
    rules = registry.rules()
    for original in _transformers.recorded_classes(model):
        for rule in rules.matching(original):
            for module in model.modules():
                if type(module) is rule.replacement and construction.site_of(module) is None:
                    vars(module)[construction.MARK] = Site(
                        rule=rule,
                        rules=rules,
                        original=original,
                        args=None,
                        kwargs={},
                        on_meta=False,
                    )
                    _transformers.forget_recorders(model)
    identity.follow_all(model, ())


def install() -> None:
    """Let `transformers.monkey_patching` use this engine, so that code written for it gains it unchanged.

    Its functions are exchanged wherever they were imported to, and its registrations move here. Also bridges names
    that moved between versions of Transformers. Calling it again does nothing.
    """
    _hook()
    with _lock:
        if "functions" in _undo:
            return
        theirs = _transformers.registered_there()
        _taken.update(registry.adopt(theirs))
        for key in _taken:
            del theirs[key]
        _undo["functions"] = _transformers.install_functions(
            (
                register_patch_mapping,
                unregister_patch_mapping,
                get_patch_mapping,
                clear_patch_mapping,
                apply_patches,
                patch_output_recorders,
            )
        )


def uninstall() -> None:
    """Give Transformers its functions back, and its registrations that are still registered; empty the registry.

    Afterwards nothing of this library takes part in a load, until the next registration or block. Calling it again
    does nothing.

    Raises:
        EngineConflictError: A block is open in this thread or task; nothing was changed.
    """
    if construction.active():
        raise EngineConflictError(
            "uninstall() inside an open block would leave it half applied. Leave the block first."
        )
    with _lock:
        for undo in reversed(_undo.values()):
            undo()
        _undo.clear()
        mine = registry.registered()
        _transformers.registered_there().update({k: v for k, v in _taken.items() if k in mine})
        _taken.clear()
        registry.clear()


@contextmanager
def _connected(block: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `block` with the engine connected: it may have been uninstalled since the block was made."""
    _hook()
    with block():
        yield


def _hook() -> None:
    """Connect the engine to torch and Transformers, once."""
    with _lock:
        construction.install()
        if "loading" not in _undo:
            _undo["loading"] = _transformers.hook_loading(
                apply_patches=scope.registered,
                patch_output_recorders=_loaded,
                mark=construction.MARK,
                initialise=initialise,
                built=_built,
                stands_for=_stands_for,
                original_name=identity.original_name,
            )


def _built(model: nn.Module) -> None:
    if scopes := construction.active():
        identity.follow(model, scopes)
    complete(model)


def _loaded(model: nn.Module) -> None:
    """Finish a model that Transformers has constructed, unless its constructor came to its end itself."""
    scopes = construction.active()
    if not all(scope.rules in identity.built_under(model) for scope in scopes):
        identity.follow_all(model, scopes)
    complete(model)


def _stands_for(module: nn.Module, original: type) -> bool:
    site = construction.site_of(module)
    return site is not None and issubclass(site.original, original)
