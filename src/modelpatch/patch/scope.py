"""Blocks in which rules are active: the scoped `patched`, and the global one around every load."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from modelpatch import _transformers
from modelpatch.errors import NothingReplacedError, NothingReplacedWarning
from modelpatch.patch import construction, identity, initialisation, loading, registry
from modelpatch.patch.construction import Scope
from modelpatch.patch.rules import Form, Rule, RuleSet, nearest

_INSIDE = ("contextlib", "modelpatch", "transformers")


@contextmanager
def opened(scope: Scope) -> Iterator[None]:
    """Keep `scope` active for the block; after a block without an error its models are finished."""
    try:
        construction.activate(scope)
        yield
    finally:
        construction.deactivate(scope)
    for reference in scope.models:
        model = reference()
        if model is None:
            continue
        if scope.rules not in identity.built_under(model):
            identity.follow(model, [scope])
            loading.accept_stock_state_dicts(model)
        initialisation.complete(model)  # what its constructor added after the family's turn


@contextmanager
def scoped(rules: RuleSet) -> Iterator[None]:
    """Apply `rules` in the block.

    Raises:
        NothingReplacedError: The block ended without an error, the rules are strict, and a key replaced nothing.
    """
    scope = Scope(rules)
    with opened(scope):
        yield
    unused = [rule for rule in rules.rules if rule not in scope.replaced]
    if rules.strict and unused:
        faults = [f"{_subject(rule)} {_reason(rule, scope)}" for rule in unused]
        if len(faults) == 1:
            raise NothingReplacedError(faults[0])
        raise NothingReplacedError(f"{len(faults)} keys replaced nothing:", faults=faults)


@contextmanager
def registered() -> Iterator[None]:
    """Apply the global registry in the block, outside of every scoped block."""
    rules = registry.rules()
    scopes = construction.active()
    is_inner = any(scope.rules is rules or not scope.rules.rules for scope in scopes)
    if not rules.rules or is_inner:  # or a build with all rules off
        yield
        return
    scope = Scope(rules, is_global=True)
    with opened(scope):
        yield
    is_unmatched_model = scope.models and not scope.matched
    if is_unmatched_model and not rules.warned and not _is_part_of_model():
        _warn(scope)


def _is_part_of_model() -> bool:
    """Tell whether a model's constructor is running: what one part doesn't match, another may."""
    return any(map(_transformers.is_model, construction.under_construction(sys._getframe())))


def _warn(scope: Scope) -> None:
    """Say, once for a state of the registry, that its keys matched nothing."""
    ours = registry.registered()
    unused = [rule for rule in scope.rules.rules if rule.key in ours]
    if unused:
        scope.rules.warned = True
        faults = [f"\n  - {_subject(rule)} {_reason(rule, scope)}" for rule in unused]
        message = f"No registered key matched the model:{''.join(faults)}"
        warnings.warn(message, NothingReplacedWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """Return the `stacklevel` at which neither this package nor Transformers is the one that called."""
    frame: FrameType | None = sys._getframe()
    level = 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
        level += 1
    return level


def _subject(rule: Rule) -> str:
    return f"Key {rule.key_text}" + (f" of patch {rule.patch.name!r}" if rule.patch else "")


def _reason(rule: Rule, scope: Scope) -> str:  # noqa: PLR0911  # one for each reason
    if scope.excluded[rule]:
        return f"replaced nothing: where= turned down all {scope.excluded[rule]} constructions that it matches."
    seen = scope.rules.seen()
    if not seen:
        return "replaced nothing: no module was built."
    taken = [cls.__name__ for cls in seen if rule in scope.rules.matching(cls)]
    if taken:
        return f"replaced nothing: a stronger key took {', '.join(taken)}, or an outer replacement left it out."
    names = [cls.__name__ for cls in seen]
    if rule.key in names:
        return (
            "replaced nothing: names and patterns reach model code of Transformers only. Give the class itself, or its "
            "dotted path."
        )
    near = nearest(rule.key, names)
    if near:
        return f"replaced nothing. Nearest classes that were built: {', '.join(near)}."
    if rule.form is Form.NAME and any(str(rule.key) in name for name in names):
        return f"replaced nothing: it is an exact name. As a pattern, write '.*{rule.key}'."
    return "replaced nothing. No class that was built has a similar name."
