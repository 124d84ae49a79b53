"""What patches did to a model."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from torch import nn

from modelpatch import _transformers
from modelpatch.errors import ArgumentTypeError, NoReportError
from modelpatch.patch.identity import built_under
from modelpatch.patch.loading import find_ledger
from modelpatch.patch.rules import nearest
from modelpatch.patch.sites import sites
from modelpatch.weights.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Replaced:
    """One site: `path` holds a `replacement` where the model's code builds an `original` (class names)."""

    key: str
    path: str
    original: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}: {self.original} -> {self.replacement}"


@dataclass(frozen=True, slots=True)
class Unused:
    """A key that replaced nothing in this model, and the names in it that look most like the key."""

    key: str
    nearest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PatchReport:
    """What patches did to one model; all strings, so that it can be stored.

    Attributes:
        model: Class name of the model.
        replaced: The replaced sites, in the order of `named_modules`.
        unused: Keys that replaced nothing.
        changes: What follows a replacement besides: recorders, names for sharding, lost gradient checkpointing.
        ledger: The account of the load that built the model; None if it was not loaded from files.
    """

    model: str
    replaced: tuple[Replaced, ...]
    unused: tuple[Unused, ...]
    changes: tuple[str, ...]
    ledger: Ledger | None = None

    def describe(self) -> None:
        """Print the report as a table, like sites of numbered layers in one row."""
        from rich.console import Console  # not needed to patch
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            "site",
            "original -> replacement",
            "key",
            title=f"Patches of {self.model}",
            title_justify="left",
        )
        table.add_column("count", justify="right")
        rows = Counter(
            (
                re.sub(r"\b\d+\b", "*", site.path) or "(root)",
                f"{site.original} -> {site.replacement}",
                site.key,
            )
            for site in self.replaced
        )
        for row, count in rows.items():
            table.add_row(*map(escape, row), str(count))
        for unused in self.unused:
            near = (
                f"nearest: {', '.join(unused.nearest)}"
                if unused.nearest
                else "nothing has a similar name"
            )
            table.add_row("replaced nothing", near, escape(unused.key), "0")
        console = Console()
        if not console.is_terminal:
            console.width = 120
        console.print(table)
        for change in self.changes:
            console.print(f"  {change}", highlight=False, markup=False)
        if self.ledger is not None:
            self.ledger.describe()


def report(model: nn.Module) -> PatchReport:
    """Tell what patches did to `model`.

    Args:
        model: A model that was built under `patched`, `apply_patches` or a registered mapping, or a copy of it. Of an
            unpickled one the replaced sites are known, and not the keys that replaced nothing.

    Raises:
        ArgumentTypeError: `model` is no nn.Module.
        NoReportError: No patch was active when the model was built.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"report() takes a model, got {type(model).__name__}")
    found = list(sites(model))
    rule_sets = dict.fromkeys(
        [*built_under(model), *(site.rules for _, _, site in found if site.rules)]
    )
    if not found and not rule_sets:
        raise NoReportError(
            f"{type(model).__name__} was not built under a patch in this process: wrap the load in `patched(...)`, or "
            f"register the patch before it."
        )
    names = {type(module).__name__ for module in model.modules()}
    names |= {site.original.__name__ for _, _, site in found}
    used = {site.rule for _, _, site in found}
    unused = [rule for rules in rule_sets for rule in rules.rules if rule not in used]
    return PatchReport(
        model=type(model).__name__,
        replaced=tuple(
            Replaced(site.rule.key_text, path, site.original.__name__, type(module).__name__)
            for path, module, site in found
        ),
        unused=tuple(Unused(rule.key_text, tuple(nearest(rule.key, names))) for rule in unused),
        changes=tuple(_changes(model)),
        ledger=find_ledger(model),
    )


def _changes(model: nn.Module) -> list[str]:
    changes: dict[str, None] = {}  # an ordered set: like sites have like changes
    for _, module, site in sites(model):
        old, new = site.original.__name__, type(module).__name__
        checkpoints = "gradient_checkpointing"  # the attribute of layers that can
        if hasattr(site.original, checkpoints) and not any(
            hasattr(inner, checkpoints) for inner in module.modules()
        ):
            changes[
                f"gradient checkpointing is lost: {new} is no GradientCheckpointingLayer, {old} is"
            ] = None
    for owner in filter(_transformers.is_model, model.modules()):
        for _, module, site in sites(owner):
            old, new = site.original.__name__, type(module).__name__
            if old in (getattr(type(owner), "_no_split_modules", None) or ()):
                changes[f"kept whole when sharded: {new} (was {old})"] = None
            for output in _transformers.recorded_outputs(owner, site.original):
                changes[f"{output} are recorded from {new} (was {old})"] = None
    return list(changes)
