"""The one place where a class is exchanged: `nn.Module.__new__`.

`install` puts a dispatcher there once and for all. It looks at the scopes that are active in this thread or task, and
without a rule for the class it allocates exactly as before. It is never taken away again: CPython doesn't restore a
type's allocator when `__new__` is deleted (seen on 3.6 to 3.13), so undoing would break every later construction.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from modelpatch.errors import ContainerMatchError, EngineConflictError
from modelpatch.patch.rules import Form, Rule, RuleSet, constructor, is_model_module, key_text


class Scope:
    """One open block: its rules, and what happened under them. Belongs to the thread or task that opened it."""

    __slots__ = ("candidates", "closed", "excluded", "hits", "is_global", "models", "rules")

    def __init__(self, rules: RuleSet, *, is_global: bool = False) -> None:
        self.rules = rules
        self.is_global = is_global
        self.closed = False
        # Its keys are the classes that were built in the block.
        self.candidates: dict[type, tuple[Rule, ...]] = {}
        self.hits: Counter[Rule] = Counter()
        self.excluded: Counter[Rule] = Counter()
        self.models: list[weakref.ref[nn.Module]] = []

    def matching(self, cls: type) -> tuple[Rule, ...]:
        """Return the rules that name `cls`, and note that it was built."""
        found = self.candidates[cls] = self.rules.matching(cls)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One replaced construction: what was asked for, and whether its tensors had no memory yet."""

    rule: Rule
    rules: RuleSet
    original: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_meta: bool

    def build(self, cls: type[nn.Module]) -> nn.Module:
        """Build a `cls` from the arguments that this site got, with all rules off."""
        args = [_resolve(value) for value in self.args]
        kwargs = {name: _resolve(value) for name, value in self.kwargs.items()}
        return without_rules(cls, *args, **kwargs)[0]


_ACTIVE: ContextVar[tuple[Scope, ...]] = ContextVar("modelpatch_scopes", default=())
# Keyed by identity: a module may be unhashable (class M(nn.Module, dict)).
_SITES: dict[int, tuple[weakref.ref[nn.Module], Site]] = {}
_NEEDS_ARGUMENTS: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_BUILDS: WeakKeyDictionary[type, frozenset[tuple[str, str]]] = WeakKeyDictionary()
# Callers that allocate a copy of an existing object. The C unpickler leaves no frame.
_COPIERS = {
    function.__code__
    for function in (
        copyreg.__newobj__,  # type: ignore[attr-defined]  # not in typeshed; what copy.deepcopy calls
        copyreg.__newobj_ex__,  # type: ignore[attr-defined]
        pickle._Unpickler.load_newobj,  # type: ignore[attr-defined]
        pickle._Unpickler.load_newobj_ex,  # type: ignore[attr-defined]
        nn.Module._replicate_for_data_parallel,
    )
}


def active() -> tuple[Scope, ...]:
    """Return the open scopes of this thread or task, the strongest first."""
    return tuple(scope for scope in _ACTIVE.get() if not scope.closed)


def activate(scope: Scope) -> None:
    """Put `scope` first among its kind: scoped blocks before global ones, inner before outer."""
    scopes = active()
    at = (
        next((i for i, other in enumerate(scopes) if other.is_global), len(scopes))
        if scope.is_global
        else 0
    )
    _ACTIVE.set((*scopes[:at], scope, *scopes[at:]))


def deactivate(scope: Scope) -> None:
    """Take `scope` away by identity: blocks may close out of order, or in another task than they were opened in."""
    scope.closed = True
    _ACTIVE.set(tuple(other for other in _ACTIVE.get() if other is not scope))


def site_of(module: nn.Module) -> Site | None:
    """Return the record of the construction that put `module` in the place of another, or None."""
    entry = _SITES.get(id(module))
    return entry[1] if entry is not None else None


def install() -> None:
    """Make `nn.Module` construction look for active scopes. Calling it again does nothing.

    An allocator that another library put there before is called after ours.

    Raises:
        EngineConflictError: Another library exchanged the dispatcher for one that doesn't call it.
    """
    current = vars(nn.Module).get("__new__")
    if current is _DISPATCHER:
        return
    if _DISPATCHER in _CHAIN:
        _, probe = without_rules(nn.Identity)
        if not probe.candidates:
            raise EngineConflictError(
                f"{current!r} took the place of modelpatch's nn.Module.__new__ and doesn't call it, so no patch can "
                f"take effect. Import that library first: modelpatch then calls its function."
            )
        return
    _CHAIN.extend([_DISPATCHER] if current is None else [_DISPATCHER, current])
    nn.Module.__new__ = _DISPATCHER  # type: ignore[assignment]  # the one assignment this library is about


def without_rules(
    build: Callable[..., nn.Module], *args: Any, **kwargs: Any
) -> tuple[nn.Module, Scope]:
    """Build something with all rules off; the scope returned knows the classes that were built."""
    probe = Scope(RuleSet(()))
    token = _ACTIVE.set((probe,))
    try:
        return build(*args, **kwargs), probe
    finally:
        _ACTIVE.reset(token)


def _new(cls: type[nn.Module], /, *args: Any, **kwargs: Any) -> nn.Module:
    # Dynamo traces constructions too (slicing a ModuleList); it folds this to True and can't trace a ContextVar.
    if is_dynamo_compiling():
        return object.__new__(cls)
    scopes = _ACTIVE.get()
    if not scopes:
        return _allocate(cls, args, kwargs)
    module = None
    for scope in scopes:
        if scope.closed:
            continue
        candidates = scope.candidates.get(cls)
        if candidates is None:
            candidates = scope.matching(cls)
        if candidates and module is None:
            module = _replace(cls, scope, candidates, args, kwargs)
    if module is None:
        module = _allocate(cls, args, kwargs)
    if hasattr(cls, "post_init"):
        for scope in scopes:
            scope.models.append(weakref.ref(module))
    return module


def _allocate(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Do what Python does without the dispatcher: call the next `__new__`, which may be a mixin's."""
    allocate: Callable[..., nn.Module] = super(nn.Module, cls).__new__
    if len(_CHAIN) > 1:
        allocate = getattr(_CHAIN[1], "__func__", _CHAIN[1])
    return object.__new__(cls) if allocate is object.__new__ else allocate(cls, *args, **kwargs)


def _replace(
    cls: type[nn.Module],
    scope: Scope,
    candidates: tuple[Rule, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> nn.Module | None:
    """Build the replacement of the strongest rule that applies here, or return None."""
    asker = caller = sys._getframe(2)
    while caller.f_back is not None and caller.f_code.co_name in ("__new__", "__call__"):
        caller = caller.f_back  # a class's or metaclass's own stands between
    if caller.f_code is _build.__code__:  # what a rule builds is never replaced
        return None
    is_bare = not args and not kwargs
    if is_bare and (caller.f_code in _COPIERS or (caller is asker and _needs_arguments(cls))):
        return None
    for rule in candidates:
        if not rule.admits(cls, args, kwargs):
            scope.excluded[rule] += 1
        elif not _is_building(rule.replacement, caller):
            if rule.form is Form.PATTERN:
                _refuse_container(rule, cls, args, kwargs)
            return _build(cls, scope, rule, args, kwargs)
    return None


def _build(
    cls: type[nn.Module], scope: Scope, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> nn.Module:
    replacement = rule.replacement
    # Python runs `__init__` after this when the object is an instance of `cls` (an ABC's virtual subclass is not).
    if cls not in replacement.__mro__:
        module = replacement(*args, **kwargs)
    elif replacement.__new__ is cls.__new__:
        module = _allocate(replacement, args, kwargs)
    else:
        module = replacement.__new__(replacement, *args, **kwargs)
    scope.hits[rule] += 1
    on_meta = torch.get_default_device().type == "meta"
    kept = {name: _weak(value) for name, value in kwargs.items()}
    remember(module, Site(rule, scope.rules, cls, tuple(map(_weak, args)), kept, on_meta))
    return module


def remember(module: nn.Module, site: Site) -> None:
    """Keep the record of a site as long as its module lives."""
    identity = id(module)
    _SITES[identity] = (weakref.ref(module, lambda _: _SITES.pop(identity, None)), site)


def _weak(value: Any) -> Any:
    """Hold a module only weakly: it may be one that contains the site, which would then never be freed."""
    return weakref.ref(value) if isinstance(value, nn.Module) else value


def _resolve(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def _is_building(replacement: type[nn.Module], frame: FrameType | None) -> bool:
    """Tell whether an `__init__` of a `replacement` is running: what it builds of its original is meant."""
    inits = [vars(base).get("__init__") for base in replacement.__mro__]
    codes = {init.__code__ for init in inits if isinstance(init, FunctionType)}
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and (code.co_name == "__init__" or code in codes):
            owner = frame.f_locals.get(code.co_varnames[0])
            if replacement in type(owner).__mro__:
                return True
        frame = frame.f_back
    return False


def _needs_arguments(cls: type) -> bool:
    """Tell whether `cls()` is an error, so that an allocation without arguments must be a copy."""
    needs = _NEEDS_ARGUMENTS.get(cls)
    if needs is None:
        parameters = list(constructor(cls).parameters.values())[1:]
        needs = _NEEDS_ARGUMENTS[cls] = any(
            p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in parameters
        )
    return needs


def _refuse_container(
    rule: Rule, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise when the pattern of `rule` also matches something that a `cls` builds."""
    built = _BUILDS.get(cls)
    if built is None:
        built = _BUILDS[cls] = frozenset(_named_in_init(cls) | _built_by(cls, args, kwargs))
    inner = sorted(
        name for module, name in built if is_model_module(module) and rule.pattern_finds(name)
    )
    if inner:
        raise ContainerMatchError(
            f"Pattern {key_text(rule.key)} matches {cls.__name__} and also {', '.join(inner)}, which {cls.__name__} "
            f"builds: replacing the outer one would drop what is inside. Use a narrower pattern, or the exact name of "
            f"the class that is meant.",
            container=cls.__name__,
            inner=inner,
        )


def _built_by(
    cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[tuple[str, str]]:
    """Build one on the meta device and return module and name of the classes inside."""
    try:
        with torch.device("meta"):
            _, probe = without_rules(cls, *args, **kwargs)
    except Exception:  # noqa: BLE001  # a constructor that needs real tensors: its code has to do
        return set()
    return {(inner.__module__, inner.__name__) for inner in probe.candidates if inner is not cls}


def _named_in_init(cls: type[nn.Module]) -> set[tuple[str, str]]:
    """Return module and name of the classes that the constructors of `cls` name, in a table too."""
    found: set[tuple[str, str]] = set()
    for init in (vars(base).get("__init__") for base in cls.__mro__):
        if not isinstance(init, FunctionType):
            continue
        for name in _names(init.__code__):
            value = init.__globals__.get(name)
            for inner in value.values() if isinstance(value, dict) else (value,):
                if (
                    isinstance(inner, type)
                    and issubclass(inner, nn.Module)
                    and inner not in cls.__mro__
                ):
                    found.add((inner.__module__, inner.__name__))
    return found


def _names(code: CodeType) -> set[str]:
    """Return the names that a function uses, in the comprehensions and functions inside it too."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inside)


_DISPATCHER = staticmethod(_new)
_CHAIN: list[Any] = []  # once installed: the dispatcher, and the allocator that was there before it
