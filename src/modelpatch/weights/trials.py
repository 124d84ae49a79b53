"""Tries what an equation does: on shapes, and forward and back on small random tensors. No weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from modelpatch.weights.equations import Equation
from modelpatch.weights.expressions import Expression, Tensors

Scale = Callable[[int], int]
"""From a dimension to a smaller one."""

_SMALL = 16  # dimensions below are left as they are for the trial
_FEW = 3  # entries of a stack that the trial keeps
_DIGITS = {torch.int8: 7, torch.uint8: 8, torch.int16: 15, torch.bool: 1}


def misfit(equation: Equation, original: Tensors, replacement: Tensors) -> str | None:
    """Return why the shapes of an equation don't fit, or None."""
    sides = f"original {_side(equation.sources, original)}, replacement {_side(equation.targets, replacement)}"
    try:
        found = equation.forward(_empty(equation.sources, original), _shapes(replacement))
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{equation.target}: {equation.source} doesn't fit: {sides}: {_first_line(error)}"
    if any(found[name].shape != replacement[name].shape for name in equation.targets):
        made = ", ".join(f"{name} {shape_text(found[name].shape)}" for name in equation.targets[:3])
        return f"{equation.target}: {equation.source} doesn't fit: {sides}; it makes {made}"
    return None


def inverse_fault(equation: Equation, original: Tensors, replacement: Tensors) -> str | None:
    """Return why an equation doesn't give the original back bit for bit, or None.

    It is run forward and back on shapes, and on random values at the smallest scale at which its shapes still fit.
    """
    if equation.is_rename:
        return None
    sides = f"original {_side(equation.sources, original)}, replacement {_side(equation.targets, replacement)}"
    try:
        targets = equation.forward(_empty(equation.sources, original), _shapes(replacement))
        back = equation.backward(targets, _shapes(original))
        wrong = [name for name in equation.sources if back[name].shape != original[name].shape]
        if wrong:
            return (
                f"{equation} gives {wrong[0]} back as {shape_text(back[wrong[0]].shape)}: {sides}"
            )
        for small, sources, target_shapes in _trials(equation, original, replacement):
            back = small.backward(
                small.forward(sources, target_shapes), {n: t.shape for n, t in sources.items()}
            )
            wrong = [name for name, tensor in sources.items() if not _same_bits(back[name], tensor)]
            if wrong:
                return f"{equation} doesn't give {wrong[0]} back bit for bit: {sides}"
            return None
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{equation} can't be taken back: {sides}: {_first_line(error)}"
    return None


def _trials(
    equation: Equation, original: Tensors, replacement: Tensors
) -> Iterator[tuple[Equation, dict[str, torch.Tensor], dict[str, torch.Size]]]:
    """Yield the equation with random sources and the targets' shapes, made small and at last as they are.

    A scale is taken when the scaled shapes still fit each other.
    """
    few = Equation(_cut(equation.target), _cut(equation.source))
    for small in dict.fromkeys((few, equation)):
        dims = [
            dim
            for known, names in ((original, small.sources), (replacement, small.targets))
            for name in names
            for dim in known[name].shape
        ]
        for scale in scales(dims, _longest(equation) if small is few else None):
            sources = shrunk({n: original[n] for n in small.sources}, scale)
            targets = {n: scaled(replacement[n].shape, scale) for n in small.targets}
            try:
                made = small.forward(sources, targets)
            except (RuntimeError, ValueError, IndexError):
                continue
            if all(made[name].shape == targets[name] for name in targets):
                yield small, sources, targets


def _cut(expression: Expression) -> Expression:
    """Keep the first entries of each long stack."""
    if isinstance(expression, str):
        return expression
    parts = expression.parts
    if expression.operation == "stack" and len(parts) > _FEW:
        parts = parts[:_FEW]
    return replace(expression, parts=tuple(map(_cut, parts)))


def scales(dims: Iterable[int], cut: int | None = None) -> Iterator[Scale]:
    """Yield ways to make dimensions small, the smallest first, and the identity at last.

    Args:
        dims: All dimensions that occur.
        cut: A number of entries of which only the first are kept.
    """
    large = [dim for dim in set(dims) if dim >= _SMALL and dim != cut]
    common = math.gcd(*large)
    factors = [f for f in (common, common // 2, common // 4) if f > 1 and min(large) // f > 1]
    for factor in [*(f for f in factors if all(dim % f == 0 for dim in large)), 1]:

        def scale(dim: int, factor: int = factor) -> int:
            if dim == cut:
                return _FEW
            return dim // factor if dim in large else dim

        yield scale


def _longest(equation: Equation) -> int | None:
    def lengths(expression: Expression) -> Iterator[int]:
        if not isinstance(expression, str):
            if expression.operation == "stack":
                yield len(expression.parts)
            for inner in expression.parts:
                yield from lengths(inner)

    return max((*lengths(equation.target), *lengths(equation.source)), default=None)


def scaled(shape: Iterable[int], scale: Scale) -> torch.Size:
    """Return a shape with each dimension made small."""
    return torch.Size(map(scale, shape))


def shrunk(tensors: Tensors, scale: Scale) -> dict[str, torch.Tensor]:
    """Return random tensors on the CPU, in the dtypes of others and their shapes made small; the same at each call."""
    generator = torch.Generator().manual_seed(0)

    def fill(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator).to(dtype)
        high = 2 ** _DIGITS.get(dtype, 30)
        return torch.randint(0, high, shape, generator=generator).to(dtype)

    return {name: fill(scaled(t.shape, scale), t.dtype) for name, t in tensors.items()}


def fingerprint(tensor: torch.Tensor) -> tuple[torch.Size, bytes]:
    """Return a value that only a tensor of the same shape and bytes has."""
    # A copy, since one of a single element may have any strides.
    packed = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    return tensor.shape, packed.view(torch.uint8).numpy().tobytes()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: NaN is NaN, and zero is not minus zero."""
    return one.dtype == other.dtype and fingerprint(one) == fingerprint(other)


def _empty(names: Iterable[str], known: Tensors) -> dict[str, torch.Tensor]:
    return {n: torch.empty(known[n].shape, dtype=known[n].dtype, device="meta") for n in names}


def _shapes(known: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in known.items()}


def _side(names: Sequence[str], known: Tensors) -> str:
    shown = [f"{name} {shape_text(known[name].shape)}" for name in names[:3]]
    return ", ".join([*shown, "..."] if len(names) > len(shown) else shown)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def shape_text(shape: Iterable[int]) -> str:
    """Write a shape as messages do."""
    return f"[{', '.join(map(str, shape))}]"
