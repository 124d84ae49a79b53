"""Tensors that are joined, cut and turned without a copy, and put together once in the end.

Stacking experts, cutting the stack and turning the pieces copies each weight once for each step. A mosaic only keeps
account of which part of which tensor goes where, so that a weight is copied once at most, and one that comes out as it
went in is found to do so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a mosaic.

    Attributes:
        start: Its first index in the mosaic, for each dimension.
        tensor: What lies there.
        source: The tensor that this is a view of.
    """

    start: tuple[int, ...]
    tensor: torch.Tensor
    source: torch.Tensor


class Mosaic(torch.Tensor):
    """A tensor that lies in pieces of others, contiguous by its strides.

    What only moves pieces gives mosaics; for any other operation it is put together. It can't be written to.
    """

    pieces: tuple[Piece, ...]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls,
        function: Any,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch, of which one argument at least is a mosaic."""
        rule = None if kwargs else _RULES.get(function)
        made = rule(*args) if rule else None
        if made is not None:
            return made
        _refuse_writing(function, args)
        plain_args, plain_kwargs = tree_map_only(Mosaic, _plain, (args, dict(kwargs or {})))
        return function(*plain_args, **plain_kwargs)


def pieced(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as mosaics of one piece each."""
    return {name: _mosaic(tensor) for name, tensor in tensors.items()}


def source(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a mosaic is all of and nothing else, or None."""
    if not isinstance(tensor, Mosaic) or len(tensor.pieces) != 1:
        return None
    (piece,) = tensor.pieces
    view, found = piece.tensor, piece.source
    unmoved = view.shape == found.shape and view.stride() == found.stride()
    return found if unmoved and tensor.shape == found.shape else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Put a mosaic together: a view where it is one piece, otherwise a copy. Any other tensor stays as it is."""
    if not isinstance(tensor, Mosaic):
        return tensor
    if len(tensor.pieces) == 1:
        return tensor.pieces[0].tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for piece in tensor.pieces:
        box = made
        for dim, (start, size) in enumerate(zip(piece.start, piece.tensor.shape, strict=True)):
            box = box.narrow(dim, start, size)
        box.copy_(piece.tensor)
    return made


def _plain(mosaic: Mosaic) -> torch.Tensor:
    return whole(mosaic).contiguous()


def _refuse_writing(function: Any, args: Sequence[Any]) -> None:
    for given, parameter in zip(args, function._schema.arguments, strict=False):  # noqa: SLF001  # nor is it public elsewhere
        written = parameter.alias_info is not None and parameter.alias_info.is_write
        if written and isinstance(given, Mosaic):
            raise NotImplementedError(
                f"{function} writes to a tensor of a file; let it write to a copy"
            )


# --- rules: what an operation does with pieces, or None where torch has to do it -------------------------------------


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Mosaic | None:
    dim = range(tensors[0].dim() + 1)[dim]
    return _cat([_unsqueezed(_mosaic(tensor), dim) for tensor in tensors], dim)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Mosaic | None:
    first = tensors[0]
    dim = range(first.dim())[dim]
    if len({(t.dtype, t.device, _with(t.shape, dim)) for t in tensors}) > 1:
        return None  # torch casts it, or refuses to
    *starts, size = accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
    pieces = [
        Piece(_with(piece.start, dim, piece.start[dim] + start), piece.tensor, piece.source)
        for start, tensor in zip(starts, tensors, strict=True)
        for piece in _mosaic(tensor).pieces
    ]
    return _joined(_with(first.shape, dim, size), pieces, first)


def _split(tensor: Mosaic, size: int, dim: int = 0) -> list[Mosaic] | None:
    length = tensor.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, size or 1)]
    return _split_with_sizes(tensor, sizes, dim)


def _split_with_sizes(tensor: Mosaic, sizes: Sequence[int], dim: int = 0) -> list[Mosaic] | None:
    dim = range(tensor.dim())[dim]
    if sum(sizes) != tensor.shape[dim] or min(sizes, default=0) < 1:
        return None
    ends = list(accumulate(sizes))
    parts: list[list[Piece]] = [[] for _ in sizes]
    for piece in tensor.pieces:
        begin = piece.start[dim]
        end = begin + piece.tensor.shape[dim]
        # By bisection: stacks of hundreds of experts are cut into as many.
        for index in range(bisect_right(ends, begin), bisect_right(ends, end - 1) + 1):
            first = ends[index] - sizes[index]
            low, high = max(begin, first), min(end, ends[index])
            part = piece.tensor.narrow(dim, low - begin, high - low)
            parts[index].append(Piece(_with(piece.start, dim, low - first), part, piece.source))
    return [
        _joined(_with(tensor.shape, dim, size), pieces, tensor)
        for size, pieces in zip(sizes, parts, strict=True)
    ]


def _unbind(tensor: Mosaic, dim: int = 0) -> list[Mosaic] | None:
    slices = _split(tensor, 1, dim)
    return slices and [_squeeze(one, dim) for one in slices]


def _unsqueezed(tensor: Mosaic, dim: int) -> Mosaic:
    def inserted(values: Sequence[int], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim:])

    pieces = [
        Piece(inserted(piece.start, 0), piece.tensor.unsqueeze(dim), piece.source)
        for piece in tensor.pieces
    ]
    return _joined(inserted(tensor.shape, 1), pieces, tensor)


def _squeeze(tensor: Mosaic, dim: int) -> Mosaic:
    dim = range(tensor.dim())[dim]
    return _permuted(tensor, [d for d in range(tensor.dim()) if d != dim or tensor.shape[d] != 1])


def _transpose(tensor: Mosaic, dim0: int, dim1: int) -> Mosaic:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(tensor, order)


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.unbind.int: _unbind,
    _aten.squeeze.dim: _squeeze,
    _aten.transpose.int: _transpose,
}


def _joined(shape: Sequence[int], pieces: Iterable[Piece], like: torch.Tensor) -> Mosaic:
    """Return a tensor of pieces, with the dtype and device of `like`."""
    mosaic: Mosaic = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  # torch's only way
        Mosaic, shape, dtype=like.dtype, device=like.device
    )
    mosaic.pieces = tuple(pieces)
    return mosaic


def _mosaic(tensor: torch.Tensor) -> Mosaic:
    if isinstance(tensor, Mosaic):
        return tensor
    return _joined(tensor.shape, [Piece((0,) * tensor.dim(), tensor.detach(), tensor)], tensor)


def _permuted(tensor: Mosaic, order: Sequence[int]) -> Mosaic:
    """Return a mosaic with its dimensions in another order; one that is left out has the size 1."""
    left_out = [dim for dim in range(tensor.dim()) if dim not in order]
    pieces = [
        Piece(
            tuple(piece.start[dim] for dim in order),
            piece.tensor.permute(*left_out, *order)[(0,) * len(left_out)],
            piece.source,
        )
        for piece in tensor.pieces
    ]
    return _joined([tensor.shape[dim] for dim in order], pieces, tensor)


def _with(values: Sequence[int], dim: int, value: int = 0) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
