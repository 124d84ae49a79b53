"""What a key means: keys are compiled into rules, and a set of rules tells which of them want a class.

Pure: nothing is built, imported or changed here.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import CodeType, FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from modelpatch.errors import ArgumentError, ArgumentTypeError, ModelPatchError
from modelpatch.weights.layout import Layout

Key = str | type[nn.Module]
Replacements = (
    Mapping[str, type[nn.Module]]
    | Mapping[type[nn.Module], type[nn.Module]]
    | Mapping[Key, type[nn.Module]]
)
Where = Callable[..., bool]


class Form(IntEnum):
    """How a key names classes, in order of precedence."""

    CLASS = 0
    PATH = 1
    NAME = 2
    PATTERN = 3


class Owner(Protocol):
    """What a rule knows of the patch that it belongs to."""

    @property
    def name(self) -> str:
        """What errors, reports and saved configs call it."""

    @property
    def version(self) -> str:
        """Written to saved configs with the name."""

    @property
    def layout(self) -> Mapping[type[nn.Module], Layout]:
        """The layouts of its replacements."""

    @property
    def allow_irreversible(self) -> bool:
        """Whether a layout may lose something."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A compiled key.

    Attributes:
        key: The key as it was given.
        replacement: The class to build instead.
        form: How the key names classes.
        key_text: The key as messages show it.
        pattern: The compiled pattern, if it is one.
        wheres: What limits the sites, by the constructor's arguments; all of them hold.
        patch: The patch that it belongs to, if any.
        inits: Code of the constructors of the replacement, by identity: the hash of a code object is slow.
    """

    key: Key
    replacement: type[nn.Module]
    form: Form
    key_text: str
    pattern: re.Pattern[str] | None = None
    wheres: tuple[Where, ...] = ()
    patch: Owner | None = None
    inits: Mapping[int, CodeType] = field(default_factory=dict)

    def matches(self, cls: type) -> bool:
        """Tell whether the key names `cls`, leaving `where` aside."""
        if self.form is Form.CLASS:
            return cls is self.key
        if self.form is Form.PATH:
            return _has_path(cls, str(self.key))
        if not is_model_module(cls.__module__):
            return False
        return (
            cls.__name__ == self.key if self.form is Form.NAME else self.pattern_finds(cls.__name__)
        )

    def pattern_finds(self, name: str) -> bool:
        """Tell whether the key is a pattern that is found in a class name."""
        return self.pattern is not None and self.pattern.search(name) is not None

    def admits(self, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether every `where` accepts a construction `cls(*args, **kwargs)`.

        Raises:
            ArgumentTypeError: A `where` names an argument that the constructor doesn't have.
        """
        if not self.wheres:
            return True
        try:
            bound = constructor(cls).bind(None, *args, **kwargs)
        except TypeError:  # the constructor itself gives the better message
            return True
        bound.apply_defaults()
        given: dict[str, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            given |= value if is_rest else {name: value}
        return all(self._accepts(where, cls, given) for where in self.wheres)

    def _accepts(self, where: Where, cls: type, given: Mapping[str, Any]) -> bool:
        wanted = inspect.signature(where).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in wanted):
            return bool(where(**given))
        missing = [p.name for p in wanted if p.name not in given and p.default is p.empty]
        if missing:
            raise ArgumentTypeError(
                f"where= of key {self.key_text} asks for {', '.join(missing)}, and {cls.__name__} is built "
                f"from {', '.join(given) or 'no arguments'}. Name only those, or give the others a default."
            )
        return bool(where(**{p.name: given[p.name] for p in wanted if p.name in given}))


class RuleSet:
    """Rules in order of precedence, with the answer for each class kept as long as the class lives.

    Attributes:
        rules: The rules, the strongest first.
        strict: Whether what doesn't fit is an error.
        unnamed: The classes seen so far that no rule names and that are no models, by identity: for those there is
            nothing to do.
        warned: Whether it was said that the rules matched nothing.
    """

    __slots__ = ("_named", "rules", "strict", "unnamed", "warned")

    def __init__(self, rules: Iterable[Rule], *, strict: bool = True) -> None:
        self.strict = strict
        self.rules: tuple[Rule, ...] = tuple(sorted(rules, key=lambda rule: rule.form))
        self.unnamed: dict[int, weakref.ref[type]] = {}
        self.warned = False
        self._named: WeakKeyDictionary[type, tuple[Rule, ...]] = WeakKeyDictionary()

    def matching(self, cls: type) -> tuple[Rule, ...]:
        """Return the rules that name `cls`, the strongest first."""
        found = self._named.get(cls)
        if found is None and id(cls) not in self.unnamed:
            found = tuple(
                rule for rule in self.rules if rule.replacement is not cls and rule.matches(cls)
            )
            if found or hasattr(cls, "post_init"):
                self._named[cls] = found
            else:
                identity, unnamed = id(cls), self.unnamed
                unnamed[identity] = weakref.ref(cls, lambda _: unnamed.pop(identity, None))
        return found or ()

    def seen(self) -> list[type]:
        """Return the classes that were looked up and are still alive."""
        unnamed = [reference() for reference in list(self.unnamed.values())]
        return [*self._named, *(cls for cls in unnamed if cls is not None)]


def compile_rules(
    mapping: Replacements,
    *,
    wheres: tuple[Where, ...] = (),
    patch: Owner | None = None,
) -> list[Rule]:
    """Check a mapping whole and compile it.

    Raises:
        ArgumentTypeError: A key is no string or module class, a replacement no module class.
        ArgumentError: A pattern doesn't compile, or a replacement is its own original.
    """
    if not isinstance(mapping, Mapping):
        raise ArgumentTypeError(
            f"expected a mapping from keys to replacement classes, got {type(mapping).__name__}"
        )
    rules, faults = [], []
    for key, replacement in mapping.items():
        try:
            rules.append(_compile(key, replacement, wheres, patch))
        except ModelPatchError as fault:
            faults.append(fault)
    if faults:
        error = (
            ArgumentTypeError
            if any(isinstance(fault, TypeError) for fault in faults)
            else ArgumentError
        )
        if len(faults) == 1:
            raise error(str(faults[0]))
        raise error(
            f"{len(faults)} entries can't be used:", faults=[str(fault) for fault in faults]
        )
    return rules


def _compile(
    key: Key, replacement: type[nn.Module], wheres: tuple[Where, ...], patch: Owner | None
) -> Rule:
    if not isinstance(replacement, type):
        raise ArgumentTypeError(
            f"Replacement for {key_text(key)} must be a class, got an object of type {type(replacement).__name__}"
        )
    if not issubclass(replacement, nn.Module):
        raise ArgumentTypeError(
            f"Replacement class for {key_text(key)} must be a subclass of nn.Module, got {replacement.__name__} "
            f"which inherits from {[base.__name__ for base in replacement.__mro__[1:]]}"
        )
    for where in wheres:
        _check_where(where)
    form, pattern = _form(key)
    inits = [vars(base).get("__init__") for base in replacement.__mro__]
    codes = {id(init.__code__): init.__code__ for init in inits if isinstance(init, FunctionType)}
    rule = Rule(key, replacement, form, key_text(key), pattern, wheres, patch, codes)
    if form is not Form.PATTERN and rule.matches(replacement):
        raise ArgumentError(
            f"The replacement for {key_text(key)} is the original itself, so nothing would change"
        )
    return rule


def _check_where(where: Where) -> None:
    try:
        parameters = inspect.signature(where).parameters.values()
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"where= must be a function with a signature: {error}") from error
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if by_position:
        raise ArgumentTypeError(
            f"where= gets the constructor's arguments by keyword, and takes {', '.join(by_position)} by position only"
        )


def _form(key: Key) -> tuple[Form, re.Pattern[str] | None]:
    if isinstance(key, type) and issubclass(key, nn.Module):
        return Form.CLASS, None
    if not isinstance(key, str):
        raise ArgumentTypeError(
            f"A key is a class name, a pattern, a dotted path or an nn.Module class, got {key!r}"
        )
    if key.isidentifier():
        return Form.NAME, None
    if all(part.isidentifier() for part in key.split(".")):
        return Form.PATH, None
    if not key:
        raise ArgumentError("An empty key would match every class")
    try:
        return Form.PATTERN, re.compile(key)
    except re.error as error:
        raise ArgumentError(
            f"Key {key!r} is neither a class name nor a valid pattern: {error}"
        ) from error


def is_model_module(module: str) -> bool:
    """Tell whether names and patterns reach the classes of a module: model code and activations, no quantisers' own."""
    return (
        module.startswith(("transformers.models.", "transformers_modules."))
        or module == "transformers.activations"
    )


def _has_path(cls: type, path: str) -> bool:
    module, _, name = path.rpartition(".")
    if name != cls.__name__:
        return False
    # A package often exports a class under a shorter path than the one it was defined in.
    return (
        f"{cls.__module__}.{cls.__qualname__}" == path
        or getattr(sys.modules.get(module), name, None) is cls
    )


def constructor(cls: type) -> inspect.Signature:
    """Return the signature of `cls.__init__`, `self` included."""
    return inspect.signature(cls.__init__)  # type: ignore[misc]  # of the class itself, not of an instance


def key_text(key: object) -> str:
    """Show a key in a message: strings quoted, classes by their path."""
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else repr(key)


def nearest(key: Key, names: Iterable[str], *, count: int = 3) -> list[str]:
    """Return up to `count` of `names` that look most like `key`, the nearest first."""
    wanted = (
        key.__name__ if isinstance(key, type) else re.sub(r"\W+", "", key.rpartition(".")[2] or key)
    )
    return difflib.get_close_matches(wanted, sorted(set(names)), n=count, cutoff=0.6)
