"""Mosaics: whatever is done to them, the values are those of torch's own tensors."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpatch.weights.mosaic import Mosaic, pieced, source, whole

STEPS = {
    "cat": lambda t, d, n: torch.cat([t, *t.split(max(1, t.shape[d] // n), dim=d)], dim=d),
    "stack": lambda t, d, n: torch.stack([t] * n, dim=d),
    "split": lambda t, d, n: t.split(n, dim=d)[-1],
    "split_with_sizes": lambda t, d, n: t.split([t.shape[d] // n, t.shape[d] - t.shape[d] // n], dim=d)[1],
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
