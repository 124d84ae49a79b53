"""The process-wide registry behind the specification's functions. It only stores: loading applies it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from torch import nn

from modelpatch import _transformers
from modelpatch.errors import ArgumentError, ArgumentTypeError, ModelPatchError
from modelpatch.patch.rules import Key, Rule, RuleSet, compile_rules, key_text

_lock = threading.Lock()
_rules: dict[Key, Rule] = {}
# The compiled registry and what Transformers' own registry held then; None after a change of ours.
_compiled: tuple[RuleSet, dict[str, type[nn.Module]]] | None = None


def register(entries: Iterable[Rule], *, overwrite: bool = False) -> None:
    """Add entries, all or none.

    Raises:
        ArgumentError: A key is taken; the registry is unchanged.
    """
    global _compiled
    new = {rule.key: rule for rule in entries}
    with _lock:
        taken = [] if overwrite else [key_text(key) for key in new if key in _rules]
        if taken:
            owners = {rule.patch.name for rule in map(_rules.get, new) if rule and rule.patch}
            by = f" by patch {', '.join(map(repr, sorted(owners)))}" if owners else ""
            raise ArgumentError(
                f"{', '.join(taken)} already has a patch mapping registered{by}. Use overwrite=True to replace it."
            )
        _rules.update(new)
        _compiled = None


def adopt(theirs: Mapping[str, type[nn.Module]]) -> dict[str, type[nn.Module]]:
    """Take over the entries of another registry that can be used, except where a key is registered here already.

    Returns:
        All that can be used, those that ours shadow too.
    """
    usable = {key: value for key, value in theirs.items() if _usable(key, value)}
    register(compile_rules({key: value for key, value in usable.items() if key not in _rules}))
    return usable


def unregister(keys: Iterable[Key]) -> None:
    """Remove entries, all or none.

    Raises:
        ArgumentTypeError: `keys` is a single key.
        ArgumentError: A key is not registered; the registry is unchanged.
    """
    global _compiled
    if isinstance(keys, (str, type)):
        raise ArgumentTypeError(
            f"keys must be a list of keys, got {keys!r}; did you mean [{keys!r}]?"
        )
    wanted = list(keys)
    with _lock:
        unknown = [key_text(key) for key in wanted if key not in _rules]
        if unknown:
            known = ", ".join(map(key_text, _rules)) or "none"
            raise ArgumentError(
                f"{', '.join(unknown)} is not registered, so it can't be removed. Registered: {known}."
            )
        for key in wanted:
            _rules.pop(key, None)
        _compiled = None


def registered() -> dict[Key, type[nn.Module]]:
    """Return a copy of the registry."""
    with _lock:
        return {key: rule.replacement for key, rule in _rules.items()}


def clear() -> None:
    """Remove all entries."""
    global _compiled
    with _lock:
        _rules.clear()
        _compiled = None


def rules() -> RuleSet:
    """Return the compiled registry, followed by what was registered with Transformers itself."""
    global _compiled
    compiled = _compiled
    foreign = _transformers.registered_there()
    if compiled is None or compiled[1] != foreign:
        with _lock:
            theirs = [
                rule
                for key, value in foreign.items()
                if key not in _rules
                for rule in _usable(key, value)
            ]
            compiled = _compiled = (RuleSet([*_rules.values(), *theirs]), dict(foreign))
    return compiled[0]


def _usable(key: str, replacement: type[nn.Module]) -> list[Rule]:
    """Compile an entry that Transformers took; it ignores one that can't be used, and so do we."""
    try:
        return compile_rules({key: replacement})
    except ModelPatchError:
        return []
