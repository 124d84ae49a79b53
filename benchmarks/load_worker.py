"""Loads a Qwen3-MoE checkpoint once, patched or not, and prints the seconds and the peak memory of the process.

`python load_worker.py SIDE FOLDER`; the sides are the keys of `SIDES`.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from modelpatch import Patch, patched
from modelpatch.weights import fuse, stack, transpose


class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)


class ListedExperts(nn.ModuleList):
    """A module for each expert: the tensors of the file, without a copy."""

    def __init__(self, config):
        super().__init__(Expert(config) for _ in range(config.num_experts))


class TurnedStacks(nn.Module):
    """Gate and up apart, and all of them transposed: every weight has to be copied."""

    def __init__(self, config):
        super().__init__()
        sizes = (config.num_experts, config.hidden_size, config.moe_intermediate_size)
        self.gate = nn.Parameter(torch.empty(sizes))
        self.up = nn.Parameter(torch.empty(sizes))
        self.down = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))


def experts_as(replacement, layout):
    return Patch("experts", {"Qwen3MoeExperts": replacement}, {replacement: layout})


SIDES = {
    "stock": None,
    "listed": experts_as(
        ListedExperts,
        {
            stack(fuse("*.gate_proj.weight", "*.up_proj.weight")): "gate_up_proj",
            stack("*.down_proj.weight"): "down_proj",
        },
    ),
    "turned": experts_as(
        TurnedStacks,
        {
            fuse(transpose("gate", 1, 2), transpose("up", 1, 2), dim=1): "gate_up_proj",
            transpose("down", 1, 2): "down_proj",
        },
    ),
}


def peak_bytes():
    """Return the largest resident memory that this process has had (Linux)."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def main():
    side, folder = sys.argv[1:]
    transformers.logging.disable_progress_bar()
    patch = SIDES[side]
    started = time.perf_counter()
    with patched(patch) if patch else nullcontext():
        model = Qwen3MoeForCausalLM.from_pretrained(folder)
    seconds = time.perf_counter() - started
    experts = type(model.model.layers[0].mlp.experts).__name__
    print(seconds, peak_bytes(), experts)


if __name__ == "__main__":
    main()
