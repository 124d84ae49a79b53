"""What holds for every test and every doctest: offline, seeded, and leaving no patch behind."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # Before the imports: huggingface_hub reads it when it is imported.
)

from typing import TYPE_CHECKING

import pytest
import torch

import modelpatch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start each test from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_patch_left() -> Iterator[None]:
    """Fail the test that leaves a patch registered, and spare the tests after it."""
    yield
    left = modelpatch.get_patch_mapping()
    modelpatch.clear_patch_mapping()
    assert left == {}, f"the test left patches registered: {sorted(map(str, left))}"  # noqa: S101 - as in a test.
