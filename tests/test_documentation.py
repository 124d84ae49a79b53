"""Code in the documentation runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

import modelpatch
from modelpatch.testing import tiny_model

ROOT = Path(__file__).parent.parent


def blocks():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, block in enumerate(
            re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        ):
            yield pytest.param(block, id=f"{page.name}-{number}")


class MyNorm(nn.RMSNorm):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__(hidden_size, eps=eps)


@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    names = {
        "MyNorm": MyNorm,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "path": tmp_path / "llama",
    }

    try:
        exec(compile(block, "block", "exec"), names)  # noqa: S102
    finally:
        modelpatch.uninstall()

    if "model" in names:
        assert modelpatch.report(names["model"]).replaced
