"""Tensors that are joined, cut and turned without a copy, and put together once in the end.

Stacking experts, cutting the stack and turning the pieces copies each weight once for each step. A mosaic only keeps
account of which part of which tensor goes where, so that a weight is copied once at most, and one that comes out as it
went in is found to do so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def is_all_of(self, whole: torch.Tensor) -> bool:
        """Tell whether it has shape and dtype of a mosaic, and so is all of it."""
        return self.tensor.shape == whole.shape and self.tensor.dtype == whole.dtype


class Mosaic(torch.Tensor):
    """A tensor that lies in pieces of others.

    What only moves pieces gives mosaics; for any other operation it is put together. It can't be written to.
    """

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, pieces: Iterable[Piece]) -> Mosaic:
        """Return a tensor of pieces on `device`, with the shape and dtype of `like`."""
        self: Mosaic = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # not in its stubs
            cls, like.shape, dtype=like.dtype, device=device
        )
        self.pieces = tuple(pieces)
        return self

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
        if rule is None:
            _refuse_writing(function, args)
            plain_args, plain_kwargs = tree_map_only(Mosaic, _plain, (args, dict(kwargs or {})))
            return function(*plain_args, **plain_kwargs)
        made = function(*tree_map_only(torch.Tensor, _empty, args))  # shapes, and torch's own errors
        outputs = [made] if isinstance(made, torch.Tensor) else made
        device = next(_tensors(args)).device
        mosaics = [
            cls(like, device, pieces)
            for like, pieces in zip(outputs, rule(outputs, *args), strict=True)
        ]
        return mosaics[0] if isinstance(made, torch.Tensor) else mosaics


def pieced(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as mosaics of one piece each."""
    return {
        name: Mosaic(tensor, tensor.device, _pieces(tensor.detach(), tensor))
        for name, tensor in tensors.items()
    }


def source(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a mosaic is all of and nothing else, or None."""
    if not isinstance(tensor, Mosaic) or len(tensor.pieces) != 1:
        return None
    (piece,) = tensor.pieces
    found, view = piece.source, piece.tensor
    unmoved = found.stride() == view.stride() and found.storage_offset() == view.storage_offset()
    return found if unmoved and piece.is_all_of(tensor) and piece.is_all_of(found) else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Put a mosaic together: a view where it is one piece, otherwise a copy. Any other tensor stays as it is."""
    if not isinstance(tensor, Mosaic):
        return tensor
    if len(tensor.pieces) == 1 and tensor.pieces[0].is_all_of(tensor):
        return tensor.pieces[0].tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for piece in tensor.pieces:
        box = tuple(map(slice, piece.start, map(sum, zip(piece.start, piece.tensor.shape, strict=True))))
        made[box].copy_(piece.tensor)
    return made


def _plain(mosaic: Mosaic) -> torch.Tensor:
    return whole(mosaic).contiguous()  # as mosaics say that they are


def _refuse_writing(function: Any, args: Sequence[Any]) -> None:
    for given, parameter in zip(args, function._schema.arguments, strict=False):
        written = parameter.alias_info is not None and parameter.alias_info.is_write
        if written and isinstance(given, Mosaic):
            raise NotImplementedError(f"{function} writes to a tensor of a file; let it write to a copy")


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# --- rules: from the outputs, empty, and the arguments of an operation to the pieces of each output ------------------

Rule = Callable[..., Iterable[Iterable[Piece]]]


def _pieces(tensor: torch.Tensor, source: torch.Tensor | None = None) -> Sequence[Piece]:
    if isinstance(tensor, Mosaic):
        return tensor.pieces
    return (Piece((0,) * tensor.dim(), tensor, tensor if source is None else source),)


def _cat(
    outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], dim: int = 0
) -> list[list[Piece]]:
    dim %= outputs[0].dim()
    ends = accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
    return [
        [
            replace(piece, start=_with(piece.start, dim, piece.start[dim] + begin))
            for begin, tensor in zip(ends, tensors, strict=False)  # the last end begins nothing
            for piece in _pieces(tensor)
        ]
    ]


def _stack(
    outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], dim: int = 0
) -> list[list[Piece]]:
    dim %= outputs[0].dim()
    return [
        [
            Piece(
                (*piece.start[:dim], index, *piece.start[dim:]),
                piece.tensor.unsqueeze(dim),
                piece.source,
            )
            for index, tensor in enumerate(tensors)
            for piece in _pieces(tensor)
        ]
    ]


def _split(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, _sizes: object, dim: int = 0
) -> list[list[Piece]]:
    dim %= tensor.dim()
    return _cut(tensor, dim, [output.shape[dim] for output in outputs])


def _unbind(_: Sequence[torch.Tensor], tensor: torch.Tensor, dim: int = 0) -> list[list[Piece]]:
    dim %= tensor.dim()
    return [
        [_squeezed(piece, dim) for piece in pieces]
        for pieces in _cut(tensor, dim, [1] * tensor.shape[dim])
    ]


def _squeeze(_: Sequence[torch.Tensor], tensor: torch.Tensor, dim: int) -> list[Sequence[Piece]]:
    dim %= tensor.dim()
    pieces = _pieces(tensor)
    return [pieces if tensor.shape[dim] != 1 else [_squeezed(piece, dim) for piece in pieces]]


def _transpose(
    _: Sequence[torch.Tensor], tensor: torch.Tensor, dim0: int, dim1: int
) -> list[list[Piece]]:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return [
        [
            Piece(tuple(piece.start[dim] for dim in order), piece.tensor.permute(order), piece.source)
            for piece in _pieces(tensor)
        ]
    ]


_RULES: dict[Any, Rule] = {
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
    _aten.squeeze.dim: _squeeze,
    _aten.transpose.int: _transpose,
}


def _cut(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[list[Piece]]:
    """Cut along `dim` into parts of some sizes."""
    ends = list(accumulate(sizes))
    parts: list[list[Piece]] = [[] for _ in sizes]
    for piece in _pieces(tensor):
        begin = piece.start[dim]
        end = begin + piece.tensor.shape[dim]
        for index in range(bisect_right(ends, begin), len(ends)):
            first = ends[index] - sizes[index]
            if first >= end:
                break
            low, high = max(begin, first), min(end, ends[index])
            part = piece.tensor.narrow(dim, low - begin, high - low)
            parts[index].append(Piece(_with(piece.start, dim, low - first), part, piece.source))
    return parts


def _squeezed(piece: Piece, dim: int) -> Piece:
    start = piece.start[:dim] + piece.start[dim + 1 :]
    return Piece(start, piece.tensor.squeeze(dim), piece.source)


def _with(start: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*start[:dim], value, *start[dim + 1 :])
