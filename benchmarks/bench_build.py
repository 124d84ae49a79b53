"""What patches, and an engine that is installed but idle, cost while a model is built."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.llama.modeling_llama import LlamaMLP

import modelpatch
from benchmarks.figures import Figure
from benchmarks.paired import Measurement, measure_pairs, ratio_of, seconds_of
from modelpatch.testing import tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

NUM_ROUNDS = 400
NUM_WORKER_PAIRS = 6
NUM_WORKER_ROUNDS = 60
WORKER = Path(__file__).with_name("idle_worker.py")


class OtherMLP(LlamaMLP):
    """A replacement that costs what its original costs, with a constructor of its own, as most have."""

    def __init__(self, config):
        super().__init__(config)


def build_llama() -> nn.Module:
    return AutoModelForCausalLM.from_config(tiny_config("llama"))


def build_llava() -> nn.Module:
    return AutoModelForImageTextToText.from_config(tiny_config("llava"))


def registered_against_not(build: Callable[[], nn.Module], key: str) -> list[Measurement]:
    """Time builds with one key registered and with none.

    Each is the second build after the change: a key that matches nothing warns in the first.
    """

    def with_key() -> float:
        modelpatch.register_patch_mapping({key: OtherMLP})
        build()
        seconds = seconds_of(build)
        modelpatch.clear_patch_mapping()
        return seconds

    def without() -> float:
        build()
        return seconds_of(build)

    measure_pairs(with_key, without, num_rounds=10)  # warm up
    return measure_pairs(with_key, without, num_rounds=NUM_ROUNDS)


def test_one_patch(record_figure: Callable[[Figure], None]) -> None:
    ratio = ratio_of(registered_against_not(build_llama, "LlamaMLP"))

    record_figure(
        Figure(
            "tiny Llama `from_config` with one patch, against no patch",
            "at most 1.05",
            str(ratio),
            ratio.low <= 1.05,
        )
    )


@pytest.mark.filterwarnings("ignore::modelpatch.NothingReplacedWarning")
def test_patch_that_matches_nothing(record_figure: Callable[[Figure], None]) -> None:
    ratio = ratio_of(registered_against_not(build_llava, "NoSuchMLP"))

    record_figure(
        Figure(
            "tiny LLaVA `from_config` with a patch that matches nothing, against no patch",
            "at most 1.05",
            str(ratio),
            ratio.low <= 1.05,
        )
    )


class Worker:
    """A process that builds a model and says how long it took, whenever it is asked."""

    def __init__(self, side: str, stack: ExitStack) -> None:
        # The same hash seed, or sets and dicts would be laid out differently in the two processes of a pair.
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(WORKER), side],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )
        )
        stack.callback(self.process.stdin.close)

    def wait(self) -> None:
        assert self.process.stdout.readline() == "ready\n"

    def seconds(self) -> float:
        self.process.stdin.write("build\n")
        return float(self.process.stdout.readline())


def workers_by_turns(side: str, baseline: str) -> list[Measurement]:
    """Time builds in pairs of processes, one for each side.

    An engine that was installed stays in `nn.Module.__new__`, so one process can't be both sides. Where two processes
    happen to lie in memory makes them differ for good by a few percent, hence several pairs, and each side is started
    first in half of them. With the same side twice the ratio must come out as one.
    """
    pairs: list[Measurement] = []
    for turn in range(NUM_WORKER_PAIRS):
        with ExitStack() as stack:
            names = (baseline, side) if turn % 2 else (side, baseline)
            first, second = (Worker(name, stack) for name in names)
            first.wait()
            second.wait()
            ours, theirs = (second, first) if turn % 2 else (first, second)
            pairs += measure_pairs(ours.seconds, theirs.seconds, num_rounds=NUM_WORKER_ROUNDS)
    return pairs


def test_idle_engine(record_figure: Callable[[Figure], None]) -> None:
    ratio = ratio_of(workers_by_turns("idle", "plain"))

    record_figure(
        Figure(
            "building a 32-layer tiny Llama with the engine installed but idle, against not installed",
            "at most 1.03",
            str(ratio),
            ratio.low <= 1.03,
        )
    )
