"""One side of a pair: builds a 32-layer tiny Llama whenever a line comes in, and prints the seconds it took.

`idle_worker.py idle` installs the engine and leaves it idle; `idle_worker.py plain` never imports it.
"""

from __future__ import annotations

import gc
import sys
import time

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

NUM_WARM_UPS = 20


def main(side: str) -> None:
    torch.set_num_threads(1)
    if side == "idle":
        import modelpatch

        modelpatch.install()
    assert ("modelpatch" in sys.modules) == ("__new__" in vars(nn.Module)) == (side == "idle")
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    for _ in range(NUM_WARM_UPS):
        AutoModelForCausalLM.from_config(config)
    gc.collect()
    gc.freeze()  # what is there now is not looked at again between rounds
    gc.disable()
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        AutoModelForCausalLM.from_config(config)
        seconds = time.perf_counter() - started
        gc.collect()  # before the answer: it would slow the other side, which builds next
        print(seconds, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
