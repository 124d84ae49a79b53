"""What a patched load of a large checkpoint takes: time and the process's peak memory, against the stock load."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.figures import Figure
from benchmarks.paired import measure_pairs, ratio_of

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_PAIRS = 7
WORKER = Path(__file__).with_name("load_worker.py")
CONFIG = Qwen3MoeConfig(
    vocab_size=1000,
    hidden_size=1024,
    moe_intermediate_size=256,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=64,
)
LAYER_BYTES = 2 * 3 * CONFIG.num_experts * CONFIG.hidden_size * CONFIG.moe_intermediate_size


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint of 1 GB with a key for each expert, as the hub has them."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="250MB")
    return folder


def load(side: str, folder: Path) -> tuple[float, int]:
    """Load in a fresh process; return seconds, and its peak memory in bytes."""
    seconds, peak, experts = subprocess.run(
        [sys.executable, str(WORKER), side, str(folder)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    ).stdout.split()
    assert (experts == "Qwen3MoeExperts") == (side == "stock")
    return float(seconds), int(peak)


@pytest.mark.parametrize(
    ("side", "other", "title"),
    [
        ("listed", "stock", "experts as a list of modules"),
        ("apart", "stock", "experts as three stacks"),
        ("turned", "by_hand", "experts as three transposed stacks"),
    ],
)
def test_load(
    record_figure: Callable[[Figure], None], checkpoint: Path, side: str, other: str, title: str
) -> None:
    peaks: dict[str, list[int]] = {side: [], other: []}

    def seconds(name: str) -> float:
        spent, peak = load(name, checkpoint)
        peaks[name].append(peak)
        return spent

    load("stock", checkpoint)  # into the page cache
    pairs = measure_pairs(partial(seconds, side), partial(seconds, other), num_rounds=NUM_PAIRS)
    peaks.setdefault("stock", [load("stock", checkpoint)[1]])

    ratio = ratio_of(pairs)
    against = {"stock": "stock", "by_hand": "stock and transposing by hand"}[other]
    ours, theirs = (max(peaks[name]) / 1e6 for name in (side, "stock"))
    name = f"load of a 1 GB Qwen3-MoE checkpoint, {title}"
    record_figure(
        Figure(f"{name}: time, against {against}", "at most 1.10", str(ratio), ratio.median <= 1.10)
    )
    record_figure(
        Figure(
            f"{name}: peak memory of the process",
            f"at most stock plus one layer ({LAYER_BYTES / 1e6:.0f} MB)",
            f"{ours:.0f} MB, stock {theirs:.0f} MB",
            ours <= theirs + LAYER_BYTES / 1e6,
        )
    )
