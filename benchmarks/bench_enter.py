"""What it costs to enter and leave `apply_patches()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import transformers.models.llama.modeling_llama as llama
import transformers.models.llava.modeling_llava  # noqa: F401 - a process that has used two families.
from transformers import monkey_patching

import modelpatch
from benchmarks.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from pytest_benchmark.fixture import BenchmarkFixture


class OtherMLP(llama.LlamaMLP):
    """A replacement."""


ONE_KEY = {"LlamaMLP": OtherMLP}
FIFTY_KEYS = {f"Layer{i}": OtherMLP for i in range(25)} | {
    f".*Pattern{i}$": OtherMLP for i in range(25)
}
GROUP = pytest.mark.benchmark(group="enter and leave apply_patches()", disable_gc=True)


@pytest.fixture(scope="module")
def medians() -> dict[str, float]:
    """Collect the median seconds of each side of this module's figures."""
    return {}


def enter(apply_patches: Callable[[], AbstractContextManager[None]]) -> None:
    with apply_patches():
        pass


@GROUP
def test_one_key_in_transformers(benchmark: BenchmarkFixture, medians: dict[str, float]) -> None:
    assert monkey_patching.apply_patches.__module__ == "transformers.monkey_patching"
    monkey_patching.register_patch_mapping(ONE_KEY)

    try:
        benchmark.pedantic(enter, args=(monkey_patching.apply_patches,), rounds=15, warmup_rounds=2)
    except ImportError as error:
        pytest.skip(f"Transformers' own fails with what is installed: {error}")
    finally:
        monkey_patching.clear_patch_mapping()

    medians["transformers"] = benchmark.stats.stats.median


@GROUP
def test_one_key(benchmark: BenchmarkFixture, medians: dict[str, float]) -> None:
    modelpatch.register_patch_mapping(ONE_KEY)

    benchmark.pedantic(
        enter, args=(modelpatch.apply_patches,), rounds=2000, iterations=50, warmup_rounds=100
    )

    modelpatch.clear_patch_mapping()
    medians["one key"] = benchmark.stats.stats.median


@GROUP
def test_fifty_keys(benchmark: BenchmarkFixture, medians: dict[str, float]) -> None:
    modelpatch.register_patch_mapping(FIFTY_KEYS)

    benchmark.pedantic(
        enter, args=(modelpatch.apply_patches,), rounds=2000, iterations=50, warmup_rounds=100
    )

    modelpatch.clear_patch_mapping()
    medians["fifty keys"] = benchmark.stats.stats.median


def test_figure_of_one_key(
    medians: dict[str, float], record_figure: Callable[[Figure], None]
) -> None:
    if not {"transformers", "one key"} <= medians.keys():
        pytest.skip("both sides have to be measured")
    stock, ours = medians["transformers"], medians["one key"]

    record_figure(
        Figure(
            "enter and leave `apply_patches()` with one exact key, against Transformers' own (Llama and LLaVA imported)",
            "10,000 times faster or more",
            f"{stock / ours:,.0f} times ({stock * 1e3:,.0f} ms, {ours * 1e6:.1f} µs)",
            stock / ours >= 10_000,
        )
    )


def test_figure_of_fifty_keys(
    medians: dict[str, float], record_figure: Callable[[Figure], None]
) -> None:
    if not {"one key", "fifty keys"} <= medians.keys():
        pytest.skip("both sides have to be measured")
    one, fifty = medians["one key"], medians["fifty keys"]

    record_figure(
        Figure(
            "the same with 50 keys of which 25 patterns, against one key",
            "within 2 times",
            f"{fifty / one:.2f} times ({fifty * 1e6:.1f} µs, {one * 1e6:.1f} µs)",
            fifty / one <= 2,
        )
    )
