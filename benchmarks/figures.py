"""A measured figure, and the table of all of them."""

from __future__ import annotations

import datetime as dt
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import modelpatch

COLUMNS = ("figure", "must be", "measured", "verdict")


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: what was measured, what it must be, what came out, and whether that is enough."""

    name: str
    must_be: str
    measured: str
    is_met: bool

    @property
    def verdict(self) -> str:
        return "met" if self.is_met else "NOT MET"


def print_table(figures: list[Figure]) -> None:
    """Print the table to the terminal, or 120 wide to a file."""
    console = Console()
    if not console.is_terminal:
        console.width = 120
    table = Table(
        *COLUMNS, title="Speed", title_justify="left", caption=circumstances(), show_lines=True
    )
    for figure in figures:
        style = None if figure.is_met else "bold red"
        table.add_row(figure.name, figure.must_be, figure.measured, figure.verdict, style=style)
    console.print()
    console.print(table)


def markdown(figures: list[Figure]) -> str:
    """Return the table as Markdown, with versions and date below."""
    rows = [(figure.name, figure.must_be, figure.measured, figure.verdict) for figure in figures]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", circumstances(), ""])


def circumstances() -> str:
    """Say what was measured, when and on what."""
    versions = {
        "modelpatch": modelpatch.__version__,
        "Transformers": transformers.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    today = dt.datetime.now(tz=dt.timezone.utc).date()
    return (
        f"{named}; {processor()}, {os.cpu_count()} cores; {today}. Ratios: median [95 % interval]."
    )


def processor() -> str:
    """Return the name of the processor, as well as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
