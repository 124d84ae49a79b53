"""Loads a Qwen3-MoE checkpoint once, patched or not, and prints the seconds and the peak memory of the process.

`python load_worker.py SIDE FOLDER`; the sides are the keys of `SIDES`, and "by_hand".
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


class ApartStacks(nn.Module):
    """Gate and up apart: every weight has to be copied, as in the stock load."""

    def __init__(self, config):
        super().__init__()
        sizes = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
        self.gate = nn.Parameter(torch.empty(sizes))
        self.up = nn.Parameter(torch.empty(sizes))
        self.down = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))


class TurnedStacks(nn.Module):
    """The same transposed: every weight has to be turned, too."""

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
    "apart": experts_as(
        ApartStacks, {fuse("gate", "up", dim=1): "gate_up_proj", "down": "down_proj"}
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


def turn(model):
    """Put transposed stacks into a stock model, as one would without a patch, and free what they replace."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        with torch.device("meta"):
            turned = TurnedStacks(model.config)
        for name, tensor in (("gate", gate), ("up", up), ("down", experts.down_proj.detach())):
            setattr(turned, name, nn.Parameter(tensor.transpose(1, 2).contiguous()))
        layer.mlp.experts = turned


def main():
    side, folder = sys.argv[1:]
    transformers.logging.disable_progress_bar()
    patch = SIDES.get(side)
    started = time.perf_counter()
    with patched(patch) if patch else nullcontext():
        model = Qwen3MoeForCausalLM.from_pretrained(folder)
    if side == "by_hand":
        turn(model)
    seconds = time.perf_counter() - started
    experts = type(model.model.layers[0].mlp.experts).__name__
    print(seconds, peak_bytes(), experts)


if __name__ == "__main__":
    main()
