"""Two sides measured by turns, and the median of their ratios with an interval.

Two runs of one tiny build differ by up to 15 % on a busy machine. What slows one of a pair slows the other as well, so
the ratio inside a pair is steadier than either time, and the order inside pairs alternates so that neither side is
always the second.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Measurement = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios, and the ends of its 95 % interval."""

    median: float
    low: float
    high: float
    num_rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}], {self.num_rounds} rounds"


def measure_pairs(
    side: Callable[[], float], baseline: Callable[[], float], *, num_rounds: int
) -> list[Measurement]:
    """Call both by turns, and return their pairs of seconds, `side` first in each.

    Args:
        side: Measures once and returns seconds.
        baseline: What it is compared with.
        num_rounds: Number of pairs.
    """
    pairs = []
    for turn in range(num_rounds):
        if turn % 2:
            seconds = side()
            pairs.append((seconds, baseline()))
        else:
            seconds = baseline()
            pairs.append((side(), seconds))
    return pairs


def ratio_of(pairs: Sequence[Measurement]) -> Ratio:
    """Return the median of the ratios inside `pairs`, with the interval that order statistics give.

    The number of ratios below the true median is binomial with p = 1/2, whatever their distribution; its normal
    approximation gives the ranks between which the median lies with 95 %.
    """
    ratios = sorted(side / baseline for side, baseline in pairs)
    count = len(ratios)
    below = max(math.floor((count - 1.96 * math.sqrt(count)) / 2), 0)
    return Ratio(statistics.median(ratios), ratios[below], ratios[count - 1 - below], count)


def seconds_of(action: Callable[[], object]) -> float:
    """Run `action` and free what it returns, timed; collect garbage afterwards, not timed."""
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    gc.collect()
    return seconds
