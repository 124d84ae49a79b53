"""Blocks in which rules are active: the scoped `patched`, and the global one around every load."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from modelpatch.errors import NothingReplacedError, NothingReplacedWarning
from modelpatch.patch import construction, identity, registry
from modelpatch.patch.construction import Scope
from modelpatch.patch.rules import Rule, RuleSet, key_text, nearest

_warned: RuleSet | None = None


@contextmanager
def opened(scope: Scope) -> Iterator[None]:
    """Keep `scope` active for the block; after a block without an error its models are finished."""
    try:
        construction.activate(scope)
        yield
    finally:
        construction.deactivate(scope)
    for reference in scope.models:
        if (model := reference()) is not None:
            identity.follow(model, scope.rules)


@contextmanager
def scoped(rules: RuleSet, *, strict: bool) -> Iterator[None]:
    """Apply `rules` in the block.

    Raises:
        NothingReplacedError: The block ended without an error, `strict` is set, and a key replaced nothing.
    """
    scope = Scope(rules)
    with opened(scope):
        yield
    unused = [rule for rule in rules.rules if not scope.hits[rule]]
    if strict and unused:
        faults = [f"{_subject(rule)} {_reason(rule, scope)}" for rule in unused]
        if len(faults) == 1:
            raise NothingReplacedError(faults[0])
        raise NothingReplacedError(f"{len(faults)} keys replaced nothing:", faults=faults)


@contextmanager
def registered() -> Iterator[None]:
    """Apply the global registry in the block, outside of every scoped block."""
    global _warned
    rules = registry.rules()
    if not rules.rules or any(scope.rules is rules for scope in construction.active()):
        yield
        return
    scope = Scope(rules, is_global=True)
    with opened(scope):
        yield
    ours = registry.registered()
    built_a_model = any(hasattr(cls, "post_init") for cls in scope.candidates)
    if any(scope.candidates.values()) or not ours or rules is _warned or not built_a_model:
        return
    _warned = rules
    faults = [
        f"\n  - {_subject(rule)} {_reason(rule, scope)}" for rule in rules.rules if rule.key in ours
    ]
    warnings.warn(
        f"No registered key matched the model:{''.join(faults)}",
        NothingReplacedWarning,
        stacklevel=2,
    )


def _subject(rule: Rule) -> str:
    return f"Key {key_text(rule.key)}" + (f" of patch {rule.patch!r}" if rule.patch else "")


def _reason(rule: Rule, scope: Scope) -> str:
    if scope.excluded[rule]:
        return f"replaced nothing: where= turned down all {scope.excluded[rule]} constructions that it matches."
    if not scope.candidates:
        return "replaced nothing: no module was built."
    taken = [cls.__name__ for cls, rules in scope.candidates.items() if rule in rules]
    if taken:
        return f"replaced nothing: a stronger key took {', '.join(taken)}, or an outer replacement left it out."
    near = nearest(rule.key, (cls.__name__ for cls in scope.candidates))
    return "replaced nothing. " + (
        f"Nearest classes that were built: {', '.join(near)}."
        if near
        else "No class that was built has a similar name."
    )
