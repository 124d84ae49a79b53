"""Collects the figures that the benchmarks measure, and prints them as one table at the end.

`python -m pytest benchmarks` runs all of it in a few minutes. A figure that isn't met fails the run only with
`--require-figures`: how fast a machine is at the moment is no property of the code.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.figures import Figure, markdown, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIGURES = pytest.StashKey[list[Figure]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("figures")
    group.addoption("--require-figures", action="store_true", help="fail when a figure is not met")
    group.addoption(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also write the table as Markdown, for the README",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


@pytest.fixture
def record_figure(pytestconfig: pytest.Config) -> Callable[[Figure], None]:
    """Return the function that puts a figure into the table."""
    return pytestconfig.stash[FIGURES].append


@pytest.fixture(autouse=True)
def _quiet_process() -> Iterator[None]:
    """Measure on one thread, and collect garbage only between rounds.

    Frozen are the objects of the libraries: looking at all of them between rounds takes longer than the rounds.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    torch.set_num_threads(num_threads)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    figures = config.stash[FIGURES]
    if not figures:
        return
    print_table(figures)
    if path := config.option.markdown:
        path.write_text(markdown(figures), encoding="utf-8")


def pytest_sessionfinish(session: pytest.Session) -> None:
    missed = not all(figure.is_met for figure in session.config.stash[FIGURES])
    if (
        missed
        and session.config.option.require_figures
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
