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
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from modelpatch.errors import ArgumentError, ContainerMatchError, EngineConflictError
from modelpatch.patch.rules import Form, Rule, RuleSet, constructor, is_model_module


class Scope:
    """One open block: its rules, and what happened under them. Belongs to the thread or task that opened it."""

    __slots__ = ("closed", "excluded", "is_global", "matched", "models", "replaced", "rules")

    def __init__(self, rules: RuleSet, *, is_global: bool = False) -> None:
        self.rules = rules
        self.is_global = is_global
        self.closed = False
        self.matched = False  # whether a rule named any class that was built
        self.replaced: dict[Rule, set[type]] = {}  # the classes that each rule replaced
        self.excluded: Counter[Rule] = Counter()  # constructions that `where` turned down
        self.models: list[weakref.ref[nn.Module]] = []


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One replaced construction. The module that came of it carries it, and so do copies of the module.

    It pickles as a plain string, so that a pickled model needs no modelpatch, unless a layout says how it is saved.

    Attributes:
        rule: The rule that asked for it.
        rules: The rules of its block; None in an unpickled copy.
        original: The class that was asked for.
        args: Positional arguments of the constructor; None where they are not known.
        kwargs: Keyword arguments of the constructor.
        on_meta: Whether its tensors had no memory yet.
    """

    rule: Rule
    rules: RuleSet | None
    original: type[nn.Module]
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    on_meta: bool

    def build(self, cls: type[nn.Module]) -> nn.Module:
        """Build a `cls` from the arguments that this site got, with all rules off."""
        return without_rules(cls, *(self.args or ()), **self.kwargs)[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return self


MARK = "_modelpatch_site"  # the attribute in which a replaced module carries its site
_ACTIVE: ContextVar[tuple[Scope, ...]] = ContextVar("modelpatch_scopes", default=())
_NEEDS_ARGUMENTS: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_BUILDS: WeakKeyDictionary[type, frozenset[tuple[str, str]]] = WeakKeyDictionary()
# Callers that allocate a copy of an existing object, and names of methods that do. The C unpickler leaves no frame.
_COPIERS = {
    id(function.__code__): function.__code__
    for function in (
        copyreg.__newobj__,  # type: ignore[attr-defined]  # not in typeshed; what copy.deepcopy calls
        copyreg.__newobj_ex__,  # type: ignore[attr-defined]
        pickle._Unpickler.load_newobj,  # type: ignore[attr-defined]
        pickle._Unpickler.load_newobj_ex,  # type: ignore[attr-defined]
        nn.Module._replicate_for_data_parallel,
    )
}
_COPYING_METHODS = ("__copy__", "__deepcopy__", "__setstate__")


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
    site: Site | str | None = vars(module).get(MARK)
    if isinstance(site, str):  # from a pickle
        key, package, path = site.split("|")[-3:]
        original: Any = sys.modules.get(package)
        for name in path.split("."):
            original = getattr(original, name, None)
        if original is None:
            original = type(path, (nn.Module,), {"__module__": package})
        rule = Rule(key, type(module), Form.NAME, key_text=key)
        site = vars(module)[MARK] = Site(rule, None, original, None, {}, on_meta=False)
    # Others make modules from the attributes of one: what they make is not what the rule built.
    return site if site is not None and isinstance(module, site.rule.replacement) else None


def install() -> None:
    """Make `nn.Module` construction look for active scopes. Calling it again does nothing.

    Raises:
        EngineConflictError: Another library has put an allocator there that doesn't call ours.
    """
    current = vars(nn.Module).get("__new__")
    if current is None:
        nn.Module.__new__ = _DISPATCHER  # type: ignore[assignment]  # the one assignment this library is about
    elif current is not _DISPATCHER and not without_rules(nn.Identity)[1]:
        raise EngineConflictError(
            f"nn.Module.__new__ belongs to another library ({current!r}), so no patch can take effect. Where it calls "
            f"what was there before, use modelpatch first: register a patch or enter a block before importing it."
        )


def without_rules(
    build: Callable[..., nn.Module], *args: Any, **kwargs: Any
) -> tuple[nn.Module, list[type]]:
    """Build something with all rules off; also return the classes that were built."""
    probe = Scope(RuleSet(()))
    token = _ACTIVE.set((probe,))
    try:
        return build(*args, **kwargs), probe.rules.seen()
    finally:
        _ACTIVE.reset(token)


def _new(cls: type[nn.Module], /, *args: Any, **kwargs: Any) -> nn.Module:
    # Dynamo traces constructions too (slicing a ModuleList); it folds this to True and can't trace a ContextVar.
    if is_dynamo_compiling():
        return _BARE(cls)
    # The quick way, spelt out: every module that is built anywhere comes through here.
    for scope in _ACTIVE.get():
        if id(cls) not in scope.rules.unnamed:
            return _construct(cls, args, kwargs)
    allocate: Callable[..., nn.Module] = super(nn.Module, cls).__new__
    return allocate(cls) if allocate is _BARE else allocate(cls, *args, **kwargs)


def _construct(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Let every open scope see `cls`, and the first one that has a rule for it here replace it."""
    module = None
    scopes = _ACTIVE.get()
    for scope in scopes:
        candidates = () if scope.closed else scope.rules.matching(cls)
        if candidates:
            scope.matched = True
            if module is None:
                module = _replace(cls, scope, candidates, args, kwargs)
    if module is None:
        module = _allocate(cls, args, kwargs)
    if hasattr(cls, "post_init"):
        for scope in scopes:
            if not scope.closed:
                scope.models.append(weakref.ref(module))
    return module


def _allocate(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Do what Python does without the dispatcher: call the next `__new__`, which may be a mixin's."""
    allocate: Callable[..., nn.Module] = super(nn.Module, cls).__new__
    return allocate(cls) if allocate is _BARE else allocate(cls, *args, **kwargs)


def _replace(
    cls: type[nn.Module],
    scope: Scope,
    candidates: tuple[Rule, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> nn.Module | None:
    """Build the replacement of the strongest rule that applies here, or return None."""
    asker = caller = sys._getframe(3)  # who asked for a `cls`
    while caller.f_back is not None and caller.f_code.co_name in ("__new__", "__call__"):
        caller = caller.f_back  # a class's or metaclass's own stands between
    if caller.f_code is _build.__code__:  # what a rule builds is never replaced
        return None
    is_bare = not args and not kwargs
    is_copier = id(caller.f_code) in _COPIERS or caller.f_code.co_name in _COPYING_METHODS
    if is_bare and (is_copier or (caller is asker and _needs_arguments(cls))):
        return None
    for rule in candidates:
        if rule.wheres and not rule.admits(cls, args, kwargs):
            scope.excluded[rule] += 1
        elif rule.replacement.__init__ is cls.__init__ or not _is_building(rule, caller):
            if rule.form is Form.PATTERN:
                _refuse_container(rule, cls, args, kwargs)
            _refuse_rival(rule, candidates, cls, args, kwargs)
            return _build(cls, scope, rule, args, kwargs)
    return None


def _build(
    cls: type[nn.Module], scope: Scope, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> nn.Module:
    replacement = rule.replacement
    # Python runs `__init__` after this when the object is an instance of `cls` (an ABC's virtual subclass is not).
    python_continues = cls in replacement.__mro__
    if python_continues and replacement.__new__ is cls.__new__:
        module = _allocate(replacement, args, kwargs)
    elif python_continues or type(replacement).__call__ is type.__call__:
        module = replacement.__new__(replacement, *args, **kwargs)
    else:  # a metaclass has its own way
        module = replacement(*args, **kwargs)
        python_continues = True
    # Asking for the default device is slow, and without a mode it is not meta.
    on_meta = torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type == "meta"
    if isinstance(module, nn.Module):  # a `__new__` may return anything
        module.__dict__[MARK] = Site(rule, scope.rules, cls, args, kwargs, on_meta)
    if not python_continues and isinstance(module, replacement):
        module.__init__(*args, **kwargs)  # type: ignore[misc]  # as type.__call__ does
    scope.replaced.setdefault(rule, set()).add(cls)
    return module


def under_construction(
    frame: FrameType | None, inits: Container[int] | None = None
) -> Iterator[nn.Module]:
    """Yield the modules whose `__init__` is running, the innermost first.

    Args:
        frame: Where to begin.
        inits: Identities of the code to look for, whatever its name; None for all that is called `__init__`.
    """
    while frame is not None:
        code = frame.f_code
        is_init = code.co_name == "__init__" if inits is None else id(code) in inits
        if is_init and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module):
                yield owner
        frame = frame.f_back


def _is_building(rule: Rule, frame: FrameType) -> bool:
    """Tell whether a replacement of `rule` is under construction: what it builds of its original is meant."""
    for owner in under_construction(frame, rule.inits):
        if rule.replacement in type(owner).__mro__:
            site = site_of(owner)
            if site is None or site.rule is rule:  # None: built by hand
                return True
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


def _refuse_rival(
    rule: Rule,
    candidates: tuple[Rule, ...],
    cls: type[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise when another patch claims the same construction, under whatever key."""
    for other in candidates:
        is_rival = rule.patch and other.patch and other.patch is not rule.patch
        if is_rival and other.admits(cls, args, kwargs):
            names = [f"{one.patch.name!r} ({one.key_text})" for one in (rule, other) if one.patch]
            raise ArgumentError(
                f"Two patches claim {cls.__name__}: {' and '.join(names)}. Use one of them, or keep them apart with where="
            )


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
            f"Pattern {rule.key_text} matches {cls.__name__} and also {', '.join(inner)}, which {cls.__name__} "
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
            _, built = without_rules(cls, *args, **kwargs)
    except Exception:  # noqa: BLE001  # a constructor that needs real tensors: its code has to do
        return set()
    return {(inner.__module__, inner.__name__) for inner in built if inner is not cls}


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


_BARE = object.__new__  # takes no arguments of the constructor
_DISPATCHER = staticmethod(_new)
