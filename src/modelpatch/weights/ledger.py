"""What a load consumed and filled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model.

    Attributes:
        target: Its name.
        sources: The keys of the file that it came from.
        operation: How: "as it is", "rename", the layout's expression, or Transformers' operations; without sources
            "created", "initialised", "ignored" or "tied".
        num_bytes: Its size in the model, in bytes.
        site: Path of the replaced module that it belongs to; None outside of replaced modules.
    """

    target: str
    sources: tuple[str, ...]
    operation: str
    num_bytes: int
    site: str | None


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one load.

    Attributes:
        model: Class name of the model.
        entries: One for each of its parameters and persistent buffers.
        dropped: Keys of the file that a layout drops by name.
        unused: Keys of the file that nothing took. None of a replaced module's is among them, unless `faults` say so.
        faults: What `strict=False` let pass: missing, unexpected, doubly used, of a wrong shape or dtype.
    """

    model: str
    entries: tuple[Entry, ...]
    dropped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The account in one sentence."""
        filled = [entry for entry in self.entries if entry.sources]
        converted = [e for e in filled if e.operation not in ("as it is", "rename")]
        sources = {key for entry in filled for key in entry.sources}
        text = (
            f"{len(sources)} tensors of the file fill {len(filled)} of {len(self.entries)} in {self.model} "
            f"({_size(sum(entry.num_bytes for entry in filled))}), {len(converted)} by a conversion; "
            f"{len(self.dropped)} dropped, {len(self.unused)} left over"
        )
        return f"{text}, {len(self.faults)} faults" if self.faults else text

    def describe(self) -> None:
        """Print the account as a table, like tensors of numbered layers in one row."""
        from rich.console import Console  # not needed to load
        from rich.markup import escape
        from rich.table import Table

        table = Table("tensor", "from", "operation", title=f"Weights of {self.model}")
        table.title_justify = "left"
        for column in ("count", "bytes"):
            table.add_column(column, justify="right")
        rows: dict[tuple[str, str, str], list[int]] = {}
        for entry in self.entries:
            sources = ", ".join(dict.fromkeys(map(starred, entry.sources)))
            row = (starred(entry.target), sources, starred(entry.operation))
            rows.setdefault(row, []).append(entry.num_bytes)
        for row, sizes in rows.items():
            table.add_row(*map(escape, row), str(len(sizes)), _size(sum(sizes)))
        console = Console()
        if not console.is_terminal:
            console.width = 160
        console.print(table)
        for title, keys in (("dropped", self.dropped), ("left over", self.unused)):
            for key, count in _counted(keys).items():
                console.print(f"  {title}: {key} ({count})", highlight=False, markup=False)
        for fault in self.faults:
            console.print(f"  fault: {fault}", highlight=False, markup=False)
        console.print(f"  {self.summary}", highlight=False, markup=False)


def starred(text: str) -> str:
    """Write a name with a star for each number."""
    return re.sub(r"\b\d+\b(?=\.)|(?<=\.)\d+\b", "*", text)


def _counted(keys: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key in map(starred, keys):
        counts[key] = counts.get(key, 0) + 1
    return counts


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":  # noqa: PLR2004  # that is what the units are
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
