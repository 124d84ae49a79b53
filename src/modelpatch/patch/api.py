"""The functions of the specification, and the scoped form."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType

from torch import nn

from modelpatch import _transformers
from modelpatch.errors import ArgumentError, ArgumentTypeError
from modelpatch.patch import construction, engine, identity, registry, scope
from modelpatch.patch.construction import Site
from modelpatch.patch.engine import connect, connected
from modelpatch.patch.rules import Key, Replacements, Rule, RuleSet, Where, compile_rules
from modelpatch.weights.layout import Layout, check_layout


@dataclass(frozen=True)
class Patch:
    """A named set of replacements, with where the weights of each come from.

    Args:
        name: What errors, reports and saved configs call it.
        replace: From keys (a class, a dotted path, an exact class name, or a pattern) to the classes that are built
            instead.
        layout: For each replacement whose parameters differ from the original's, how they come from them: a mapping
            from names of the replacement to names of the original, relative to the module, or expressions over them
            (`modelpatch.weights`: `fuse`, `stack`, `transpose`, ...). Only what has one name and shape on both sides
            needs no mention.
        version: Written to saved configs with the name.
        where: Limits the patch to some sites: called with those of the constructor's arguments that it names.
        allow_irreversible: Load even where a layout can't give the original back bit for bit.

    Raises:
        ArgumentTypeError: A layout is no mapping between expressions.
        ArgumentError: There is no name, or a layout belongs to no replacement of the patch.

    Example:
        >>> from torch import nn
        >>> class Quiet(nn.Dropout):
        ...     def forward(self, input):
        ...         return input
        >>> Patch("quiet", {nn.Dropout: Quiet}).name
        'quiet'
    """

    name: str
    replace: Replacements
    layout: Mapping[type[nn.Module], Layout] = field(default_factory=dict)
    _: KW_ONLY
    version: str = "1"
    where: Where | None = None
    allow_irreversible: bool = False

    def __post_init__(self) -> None:
        for argument in ("replace", "layout"):
            value: object = getattr(self, argument)
            if isinstance(value, Mapping):
                object.__setattr__(self, argument, MappingProxyType(dict(value)))
            elif argument == "layout":
                raise ArgumentTypeError(
                    f"layout= maps replacement classes to their layouts, got {type(value).__name__}"
                )
        names: tuple[object, ...] = (self.name, self.version)
        for name in names:
            if not isinstance(name, str):
                raise ArgumentTypeError(f"name and version of a patch are strings, got {name!r}")
        replace: object = self.replace
        replacements = [*replace.values()] if isinstance(replace, Mapping) else []
        for cls, layout in self.layout.items():
            if cls not in replacements:
                known = ", ".join(getattr(one, "__name__", repr(one)) for one in replacements)
                raise ArgumentError(
                    f"layout= of patch {self.name!r} names {getattr(cls, '__name__', cls)!r}, which replaces nothing in it; "
                    f"its replacements: {known or 'none'}"
                )
            check_layout(layout)

    def register(self) -> None:
        """Register the patch for every later `from_pretrained`, `from_config` and `apply_patches` block.

        Raises:
            TypeError: A key or replacement has the wrong type. The registry is unchanged.
            ValueError: A key is taken or invalid. The registry is unchanged.
        """
        registry.register(self._rules())
        connect()

    def unregister(self) -> None:
        """Remove the patch from the registry.

        Raises:
            ValueError: It isn't registered. The registry is unchanged.
        """
        registry.unregister(self.replace)

    def _rules(self, *more: Where) -> list[Rule]:
        wheres = (*more, *(() if self.where is None else (self.where,)))
        return compile_rules(self.replace, wheres=wheres, patch=self)


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
    registry.register(compile_rules(mapping), overwrite=overwrite)
    connect()


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
    return connected(scope.registered)


def _compiled(given: Patch | Replacements, wheres: tuple[Where, ...]) -> list[Rule]:
    if isinstance(given, Patch):
        return given._rules(*wheres)
    return compile_rules(given, wheres=wheres)


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
        strict: Raise on leaving when a key replaced nothing, and from a load when weights under a replaced site are
            missing, left over, used twice, or of a wrong shape or dtype. Otherwise the ledger has these.

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
    wheres = () if where is None else (where,)
    for given in patches:
        for rule in _compiled(given, wheres):
            if rule.key in rules:
                names = [
                    repr(r.patch.name) if r.patch else "a mapping" for r in (rules[rule.key], rule)
                ]
                raise ArgumentError(f"Two patches claim {rule.key_text}: {' and '.join(names)}")
            rules[rule.key] = rule
    if not rules:
        raise ArgumentError("patched() needs at least one key")
    return connected(functools.partial(scope.scoped, RuleSet(rules.values(), strict=strict)))


def patch_output_recorders(model: nn.Module) -> None:
    """Record outputs of `model` from its replacements, also where a key was registered after it was built.

    Happens by itself when outputs are first asked for; here for models whose modules were exchanged by hand. Other
    models of the family are not affected.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"expected a model, got {type(model).__name__}")
    connect()
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
    engine.install(
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
    engine.uninstall()
