"""What is imported: by a pattern, and by `import modelpatch`. Each in a fresh process."""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_IMPORTS = 11

# The pattern names the class that is built as well, so its replacement derives from it.
PATTERN = """
import sys
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from {module} import register_patch_mapping

class OtherLlama(LlamaForCausalLM):
    pass

config = LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
AutoModelForCausalLM.from_config(config)
register_patch_mapping({{".*ForCausalLM$": OtherLlama}})
before = len(sys.modules)
model = AutoModelForCausalLM.from_config(config)
print(len(sys.modules) - before, type(model).__name__)
"""

IMPORT = """
import sys
import time
import torch

started = time.perf_counter()
import modelpatch

print(time.perf_counter() - started, "transformers" in sys.modules)
"""


def printed_by(program: str) -> list[str]:
    """Run a program in a fresh interpreter and return the words it prints."""
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()


def test_modules_imported_by_a_pattern(record_figure: Callable[[Figure], None]) -> None:
    num_ours, built = printed_by(PATTERN.format(module="modelpatch"))
    num_stock, _ = printed_by(PATTERN.format(module="transformers.monkey_patching"))

    assert built == "OtherLlama"
    record_figure(
        Figure(
            "extra modules imported by `.*ForCausalLM$`",
            "0",
            f"{num_ours} (Transformers' own: {num_stock})",
            num_ours == "0",
        )
    )


def test_import_time(record_figure: Callable[[Figure], None]) -> None:
    runs = [printed_by(IMPORT) for _ in range(NUM_IMPORTS)]

    milliseconds = 1000 * statistics.median(float(seconds) for seconds, _ in runs)
    has_transformers = any(imported == "True" for _, imported in runs)
    record_figure(
        Figure(
            "`import modelpatch` beyond `import torch`",
            "at most 50 ms, Transformers not imported",
            f"{milliseconds:.0f} ms, Transformers {'imported' if has_transformers else 'not imported'}",
            milliseconds <= 50 and not has_transformers,
        )
    )
