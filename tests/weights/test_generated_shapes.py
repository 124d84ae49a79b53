"""Each rule with generated shapes, from a stock file into a patched model and back, against NumPy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from modelpatch import Patch, patched
from modelpatch.weights import converted, flatten, fuse, interleave, stack, transpose

Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """A layout for tensors of some shapes, and what it is to make of them."""

    layout: dict[Any, Any]
    original: Shapes
    expected: Callable[[Arrays], Arrays]

    @property
    def replacement(self) -> Shapes:
        made = self.expected({name: np.zeros(shape) for name, shape in self.original.items()})
        return {name: array.shape for name, array in made.items()}


# --- a model of these tensors -----------------------------------------------------------------------------------------


def hold(module: nn.Module, shapes: Shapes) -> None:
    """Give a module parameters of these names; a name with a dot is one of a module inside."""
    for name, shape in shapes.items():
        *path, last = name.split(".")
        inner = module
        for part in path:
            if part not in inner._modules:
                inner.add_module(part, nn.Module())
            inner = inner._modules[part]
        inner.register_parameter(last, nn.Parameter(torch.zeros(tuple(shape))))


class RuleConfig(PreTrainedConfig):
    model_type = "rule"

    def __init__(self, original=(), replacement=(), **kwargs):
        self.original = dict(original)
        self.replacement = dict(replacement)
        super().__init__(**kwargs)


class Original(nn.Module):
    def __init__(self, config):
        super().__init__()
        hold(self, config.original)


class Replacement(nn.Module):
    def __init__(self, config):
        super().__init__()
        hold(self, config.replacement)


class RuleModel(PreTrainedModel):
    config_class = RuleConfig

    def __init__(self, config):
        super().__init__(config)
        self.block = Original(config)
        self.post_init()

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)


# --- rules ------------------------------------------------------------------------------------------------------------


def sizes(low: int = 1, high: int = 5) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def shapes(draw: st.DrawFn, min_dims: int = 1, max_dims: int = 3) -> tuple[tuple[int, ...], int]:
    """A shape, and one of its dimensions, counted from either side."""
    shape = tuple(draw(st.lists(sizes(), min_size=min_dims, max_size=max_dims)))
    return shape, draw(st.integers(-len(shape), len(shape) - 1))


def resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if i == dim % len(shape) else old for i, old in enumerate(shape))


@st.composite
def fused(draw: st.DrawFn) -> Rule:
    shape, dim = draw(shapes())
    lengths = draw(st.lists(sizes(), min_size=1, max_size=4))
    names = [f"part_{i}" for i in range(len(lengths))]
    return Rule(
        {"whole": fuse(*names, dim=dim)},
        {n: resized(shape, dim, size) for n, size in zip(names, lengths, strict=True)},
        lambda found: {"whole": np.concatenate([found[n] for n in names], axis=dim)},
    )


@st.composite
def split(draw: st.DrawFn) -> Rule:
    shape, dim = draw(shapes())
    lengths = draw(st.lists(sizes(), min_size=1, max_size=4))
    names = [f"part_{i}" for i in range(len(lengths))]

    # The sizes of a split are the replacement's own.
    def expected(found: Arrays) -> Arrays:
        parts = np.split(found["whole"], np.cumsum(lengths)[:-1], axis=dim)
        return dict(zip(names, parts, strict=True))

    return Rule(
        {fuse(*names, dim=dim): "whole"}, {"whole": resized(shape, dim, sum(lengths))}, expected
    )


@st.composite
def stacked(draw: st.DrawFn) -> Rule:
    shape, _ = draw(shapes(max_dims=2))
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    names = [f"{i}.weight" for i in range(draw(sizes(high=12)))]
    return Rule(
        {"stack": stack("*.weight", dim=dim)},
        dict.fromkeys(names, shape),
        lambda found: {"stack": np.stack([found[n] for n in names], axis=dim)},
    )


@st.composite
def listed(draw: st.DrawFn) -> Rule:
    shape, dim = draw(shapes(min_dims=2))
    count = shape[dim]
    return Rule(
        {stack("*.weight", dim=dim): "stack"},
        {"stack": shape},
        lambda found: {f"{i}.weight": found["stack"].take(i, axis=dim) for i in range(count)},
    )


@st.composite
def interleaved(draw: st.DrawFn) -> Rule:
    shape, dim = draw(shapes())
    names = [f"part_{i}" for i in range(draw(sizes(high=4)))]

    def expected(found: Arrays) -> Arrays:
        order = np.arange(len(names) * shape[dim]).reshape(len(names), -1).T.flatten()
        return {"whole": np.concatenate([found[n] for n in names], axis=dim).take(order, axis=dim)}

    return Rule({"whole": interleave(*names, dim=dim)}, dict.fromkeys(names, shape), expected)


@st.composite
def separated(draw: st.DrawFn) -> Rule:
    shape, dim = draw(shapes())
    names = [f"part_{i}" for i in range(draw(sizes(high=4)))]

    def expected(found: Arrays) -> Arrays:
        every = np.arange(found["whole"].shape[dim]) % len(names)
        return {n: found["whole"].compress(every == i, axis=dim) for i, n in enumerate(names)}

    whole = resized(shape, dim, shape[dim] * len(names))
    return Rule({interleave(*names, dim=dim): "whole"}, {"whole": whole}, expected)


@st.composite
def transposed(draw: st.DrawFn) -> Rule:
    shape, dim = draw(shapes(min_dims=2))
    other = draw(st.integers(-len(shape), len(shape) - 1))
    return Rule(
        {"turned": transpose("weight", dim, other)},
        {"weight": shape},
        lambda found: {"turned": found["weight"].swapaxes(dim, other)},
    )


@st.composite
def flattened(draw: st.DrawFn) -> Rule:
    shape, _ = draw(shapes(min_dims=2, max_dims=5))
    start = draw(st.integers(0, len(shape) - 1))
    end = draw(st.integers(start, len(shape) - 1))
    flat = (*shape[:start], -1, *shape[end + 1 :])
    return Rule(
        {"flat": flatten("weight", start, end)},
        {"weight": shape},
        lambda found: {"flat": found["weight"].reshape(flat)},
    )


@st.composite
def renamed(draw: st.DrawFn) -> Rule:
    shape, _ = draw(shapes())
    return Rule(
        {"new": "old"},
        {"old": shape, "same": shape},
        lambda found: {"new": found["old"], "same": found["same"]},
    )


@st.composite
def swapped(draw: st.DrawFn) -> Rule:
    """Two names for each other: not a circle, since each tensor has one place."""
    shape, dim = draw(shapes())
    other = resized(shape, dim, shape[dim] + 1)
    return Rule(
        {"one": "other", "other": "one"},
        {"one": shape, "other": other},
        lambda found: {"one": found["other"], "other": found["one"]},
    )


@st.composite
def reversed_rows(draw: st.DrawFn) -> Rule:
    shape, _ = draw(shapes())

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0)

    return Rule(
        {"flipped": converted("weight", flip, flip)},
        {"weight": shape},
        lambda found: {"flipped": found["weight"][::-1].copy()},
    )


@st.composite
def expert_lists(draw: st.DrawFn) -> Rule:
    """Gate and up in one transposed and interleaved stack, as in GPT-OSS, into a list of modules."""
    experts, hidden, inner = (draw(sizes()) for _ in range(3))

    def expected(found: Arrays) -> Arrays:
        made = {}
        for i in range(experts):
            made[f"{i}.gate.weight"] = found["gate_up"][i, :, ::2].T
            made[f"{i}.up.weight"] = found["gate_up"][i, :, 1::2].T
        return made

    return Rule(
        {
            stack(
                interleave(transpose("*.gate.weight"), transpose("*.up.weight"), dim=1)
            ): "gate_up",
        },
        {"gate_up": (experts, hidden, 2 * inner)},
        expected,
    )


@st.composite
def turned_stacks(draw: st.DrawFn) -> Rule:
    """A list of experts with two projections each into two transposed stacks."""
    experts, hidden, inner = (draw(sizes()) for _ in range(3))
    names = [f"{i}.{part}" for i in range(experts) for part in ("gate", "up")]

    def turned(found: Arrays, part: str) -> np.ndarray:
        return np.stack([found[f"{i}.{part}"].T for i in range(experts)])

    return Rule(
        {
            fuse("gate_t", "up_t", dim=2): transpose(stack(fuse("*.gate", "*.up")), 1, 2),
        },
        dict.fromkeys(names, (inner, hidden)),
        lambda found: {f"{part}_t": turned(found, part) for part in ("gate", "up")},
    )


RULES = [
    fused,
    split,
    stacked,
    listed,
    interleaved,
    separated,
    transposed,
    flattened,
    renamed,
    swapped,
    reversed_rows,
    expert_lists,
    turned_stacks,
]


# --- tests ------------------------------------------------------------------------------------------------------------


def arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Bits by name: NumPy has no bfloat16."""
    bits = {2: torch.int16, 4: torch.int32}
    return {n: t.detach().view(bits[t.element_size()]).numpy() for n, t in tensors.items()}


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def stock_file(folder: Path, rule: Rule, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = RuleModel(RuleConfig(rule.original, rule.replacement)).to(dtype)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: rules.__name__)
def test_stock_files_come_back_bit_for_bit(rules):
    @settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
    @given(rules(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def check(rule: Rule, dtype: torch.dtype) -> None:
        patch = Patch("rule", {Original: Replacement}, {Replacement: rule.layout})
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            stock = stock_file(folder, rule, dtype)
            with patched(patch):
                model = RuleModel.from_pretrained(folder)
            model.save_pretrained(folder / "saved")
            saved = load_file(folder / "saved/model.safetensors")
            plain = RuleModel.from_pretrained(folder / "saved").block.state_dict()
            with patched(patch):
                empty = RuleModel(model.config).to(dtype)
            empty.load_state_dict(stock)

        files = {n.removeprefix("block."): t for n, t in arrays(stock).items()}
        assert same(arrays(model.block.state_dict()), rule.expected(files))
        assert same(arrays(empty.block.state_dict()), rule.expected(files))
        assert {t.dtype for t in (*saved.values(), *model.state_dict().values())} == {dtype}
        assert same(arrays(saved), arrays(stock))
        assert same(arrays(plain), files)

    check()
