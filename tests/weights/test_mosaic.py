"""Mosaics: whatever is done to them, the values are those of torch's own tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpatch.weights.mosaic import Mosaic, pieced, source, whole

STEPS = {
    "cat": lambda t, d, n: torch.cat([t, *t.split(max(1, t.shape[d] // n), dim=d)], dim=d),
    "stack": lambda t, d, n: torch.stack([t] * n, dim=d),
    "split": lambda t, d, n: t.split(n, dim=d)[-1],
    "split_with_sizes": lambda t, d, n: t.split(
        [t.shape[d] // n, t.shape[d] - t.shape[d] // n], dim=d
    )[1],
    "chunk": lambda t, d, n: t.chunk(n, dim=d)[0].contiguous(),
    "unbind": lambda t, d, n: t.unbind(d)[-1] if t.dim() > 2 else t,
    "squeeze": lambda t, d, n: t.squeeze(d) if t.dim() > 2 else t,
    "transpose": lambda t, d, n: t.transpose(d, -1).contiguous(),
    "flatten": lambda t, d, n: t.flatten(0, 1).unsqueeze(0),
    "index": lambda t, d, n: t[..., ::n],
    "negate": lambda t, d, n: -t,
    "halve": lambda t, d, n: torch.cat([t.to(torch.bfloat16), t.float()], dim=d),
}


@st.composite
def programmes(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    step = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(-2, 1), st.integers(1, 3))
    return draw(st.lists(step, min_size=1, max_size=6))


@given(programmes(), st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_a_mosaic_has_the_values_shape_and_dtype_that_torch_gives(programme, shape):
    plain = torch.randn(shape)
    mosaic = pieced({"t": plain})["t"]
    for name, dim, number in programme:
        plain, mosaic = (STEPS[name](tensor, dim, number) for tensor in (plain, mosaic))
        assert (mosaic.shape, mosaic.dtype) == (plain.shape, plain.dtype)
    assert torch.equal(whole(mosaic), plain)
    assert not isinstance(whole(mosaic), Mosaic)


def test_a_tensor_that_comes_out_as_it_went_in_is_found():
    tensors = {name: torch.randn(4, 6) for name in "abc"}
    stacked = torch.stack(list(pieced(tensors).values())).transpose(1, 2)
    upper = torch.cat([stacked, stacked], dim=1).split([6, 6], dim=1)[0]

    for name, part in zip("abc", upper.unbind(0), strict=True):
        assert source(part.transpose(0, 1)) is tensors[name]
        assert whole(part.transpose(0, 1)).data_ptr() == tensors[name].data_ptr()
        assert source(part) is None  # transposed
        assert source(part[:2]) is None
    assert source(upper) is None
    assert source(tensors["a"]) is None


@pytest.mark.parametrize("write", [lambda t: t.mul_(2), lambda t: t.zero_(), lambda t: t.t_()])
def test_a_mosaic_is_not_written_to(write):
    tensor = torch.randn(3, 3)
    before = tensor.clone()

    with pytest.raises(NotImplementedError, match="let it write to a copy"):
        write(pieced({"t": tensor})["t"])
    assert torch.equal(tensor, before)


def test_what_torch_refuses_is_refused():
    one, other = pieced({"one": torch.randn(2, 3), "other": torch.randn(3, 2)}).values()

    for refused in (
        lambda: torch.cat([one, other]),
        lambda: torch.stack([one, other]),
        lambda: torch.stack([one, one], dim=4),
        lambda: one.split([1, 2]),
        lambda: one.transpose(0, 2),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            refused()
