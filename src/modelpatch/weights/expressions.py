"""How tensors lie in one another: expressions over parameter names.

An expression joins the tensors that it names into one, and parts such a tensor into them again. A layout equates an
expression over the replacement's names with one over the original's, so that one description serves both directions.

Pure, on any device: on `meta` nothing but shapes is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch

from modelpatch.errors import ArgumentError, ArgumentTypeError

Tensors = Mapping[str, torch.Tensor]
Convert = Callable[[torch.Tensor], torch.Tensor]


class _Nothing(Enum):
    """Sides of a layout's entry on which there is nothing."""

    CREATE = "create"
    DROP = "drop"


create = _Nothing.CREATE
"""`{"scale": create}`: no stock file has this one, so the replacement initialises it; a file that has it is read."""
drop = _Nothing.DROP
"""`{drop: "sinks"}`, or a tuple of names: the replacement has no use for these tensors of the original."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors joined into one; the parts are names or joined themselves."""

    parts: tuple[Expression, ...]
    operation: ClassVar[str]

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join one tensor for each part."""
        raise NotImplementedError

    def part(self, tensor: torch.Tensor, shapes: Iterable[torch.Size], /) -> Sequence[torch.Tensor]:
        """Undo `join`, given the shapes of the parts, computed when asked for; views where possible."""
        raise NotImplementedError

    def _options(self) -> str:
        return ""

    def __str__(self) -> str:
        shown = [str(part) for part in self.parts]
        if len(shown) > 4:  # noqa: PLR2004  # a list of experts
            shown = [*shown[:2], "...", shown[-1]]
        return f"{self.operation}({', '.join(shown)}{self._options()})"


Expression = str | Joined


@dataclass(frozen=True, slots=True)
class _AlongDim(Joined):
    dim: int

    def _options(self) -> str:
        return f", dim={self.dim}"


@dataclass(frozen=True, slots=True)
class _Fuse(_AlongDim):
    operation = "fuse"

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(tensors), dim=self.dim)

    def part(self, tensor: torch.Tensor, shapes: Iterable[torch.Size], /) -> Sequence[torch.Tensor]:
        return torch.split(tensor, [shape[self.dim] for shape in shapes], dim=self.dim)


@dataclass(frozen=True, slots=True)
class _Stack(_AlongDim):
    operation = "stack"

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(tensors), dim=self.dim)

    def part(
        self, tensor: torch.Tensor, _shapes: Iterable[torch.Size], /
    ) -> Sequence[torch.Tensor]:
        return tensor.unbind(self.dim)


@dataclass(frozen=True, slots=True)
class _Interleave(_AlongDim):
    operation = "interleave"

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        dim = self.dim % tensors[0].ndim
        return torch.stack(list(tensors), dim=dim + 1).flatten(dim, dim + 1)

    def part(
        self, tensor: torch.Tensor, _shapes: Iterable[torch.Size], /
    ) -> Sequence[torch.Tensor]:
        dim = self.dim % tensor.ndim
        return torch.unflatten(tensor, dim, (-1, len(self.parts))).unbind(dim + 1)


@dataclass(frozen=True, slots=True)
class _Transpose(Joined):
    dim0: int
    dim1: int
    operation = "transpose"

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0].transpose(self.dim0, self.dim1)

    def part(
        self, tensor: torch.Tensor, _shapes: Iterable[torch.Size], /
    ) -> Sequence[torch.Tensor]:
        return (tensor.transpose(self.dim0, self.dim1),)

    def _options(self) -> str:
        return f", {self.dim0}, {self.dim1}"


@dataclass(frozen=True, slots=True)
class _Flatten(Joined):
    start_dim: int
    end_dim: int
    operation = "flatten"

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0].flatten(self.start_dim, self.end_dim)

    def part(self, tensor: torch.Tensor, shapes: Iterable[torch.Size], /) -> Sequence[torch.Tensor]:
        return (tensor.reshape(next(iter(shapes))),)

    def _options(self) -> str:
        return f", {self.start_dim}, {self.end_dim}"


@dataclass(frozen=True, slots=True)
class _Converted(Joined):
    forward: Convert
    inverse: Convert | None
    operation = "converted"

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.forward(tensors[0])

    def part(
        self, tensor: torch.Tensor, _shapes: Iterable[torch.Size], /
    ) -> Sequence[torch.Tensor]:
        if self.inverse is None:
            raise ValueError(f"{self} has no inverse")
        return (self.inverse(tensor),)

    def _options(self) -> str:
        return f", {getattr(self.forward, '__name__', self.forward)}"


def fuse(*parts: Expression, dim: int = 0) -> Expression:
    """Concatenate tensors along `dim`; their sizes there may differ.

    `{"qkv_proj": fuse("q_proj", "k_proj", "v_proj")}` fuses; with `fuse` on the replacement's side, it splits.

    Args:
        *parts: Names relative to the module, or expressions. The name of a module stands for each of its parameters
            and persistent buffers.
        dim: Along which dimension of the tensors.

    Raises:
        ArgumentTypeError: A part is neither.
        ArgumentError: There is no part.
    """
    return _Fuse(_checked(parts), dim)


def stack(*parts: Expression, dim: int = 0) -> Expression:
    """Stack tensors of one shape along a new dimension `dim`.

    `stack("*.down_proj.weight")` stands for all entries of a module list, in order: one `*` stands for one index.

    Raises:
        ArgumentTypeError: A part is neither a name nor an expression.
        ArgumentError: There is no part.
    """
    return _Stack(_checked(parts), dim)


def interleave(*parts: Expression, dim: int = 0) -> Expression:
    """Take slices along `dim` by turns: the first of each part, the second of each part, and so on.

    Raises:
        ArgumentTypeError: A part is neither a name nor an expression.
        ArgumentError: There is no part.
    """
    return _Interleave(_checked(parts), dim)


def transpose(part: Expression, dim0: int = 0, dim1: int = 1) -> Expression:
    """Exchange two dimensions.

    Raises:
        ArgumentTypeError: `part` is neither a name nor an expression.
    """
    return _Transpose(_checked((part,)), dim0, dim1)


def flatten(part: Expression, start_dim: int = 1, end_dim: int = -1) -> Expression:
    """Make one dimension of several, as from a convolution's weight to a linear layer's.

    Raises:
        ArgumentTypeError: `part` is neither a name nor an expression.
    """
    return _Flatten(_checked((part,)), start_dim, end_dim)


def converted(part: Expression, forward: Convert, inverse: Convert | None = None) -> Expression:
    """Apply a function of your own to a tensor, such as a permutation or padding.

    Args:
        part: A name or an expression.
        forward: From the tensor of `part` to what it stands for here; has to work on the `meta` device too.
        inverse: Its inverse, bit for bit; without one the patch needs `allow_irreversible=True`, and a model can only
            be saved in its own layout.

    Raises:
        ArgumentTypeError: `part` is neither a name nor an expression.
    """
    return _Converted(_checked((part,)), forward, inverse)


def _checked(parts: tuple[Expression, ...]) -> tuple[Expression, ...]:
    for part in parts:
        if not isinstance(part, (str, Joined)):
            raise ArgumentTypeError(f"a part is a name or an expression over names, got {part!r}")
    if not parts:
        raise ArgumentError("an expression needs at least one part")
    return parts


# --- walking and computing --------------------------------------------------------------------------------------------


def leaves(expression: Expression) -> Iterator[str]:
    """Yield the names in an expression, in order."""
    if isinstance(expression, str):
        yield expression
    else:
        for part in expression.parts:
            yield from leaves(part)


def renamed(expression: Expression, rename: Callable[[str], str]) -> Expression:
    """Return the expression over other names."""
    if isinstance(expression, str):
        return rename(expression)
    return replace(expression, parts=tuple(renamed(part, rename) for part in expression.parts))


def expanded(
    expression: Expression, indices: Callable[[str], Sequence[int]], *, in_stack: bool = False
) -> Expression:
    """Write out what a `stack` says with a `*`.

    Args:
        expression: What to write out.
        indices: From a name with a `*` to the indices that it has.
        in_stack: Whether a stack has bound the `*` already.
    """
    if isinstance(expression, str):
        return expression
    if not isinstance(expression, _Stack) or in_stack:
        parts = tuple(expanded(part, indices, in_stack=in_stack) for part in expression.parts)
        return replace(expression, parts=parts)
    written: list[Expression] = []
    for part in expression.parts:
        starred = [name for name in leaves(part) if "*" in name]
        if starred:
            written += [_at(part, index) for index in indices(starred[0])]
        else:
            written.append(expanded(part, indices))
    return replace(expression, parts=tuple(written))


def _at(expression: Expression, index: int) -> Expression:
    """Put an index in the place of the first star of each name."""
    return renamed(expression, lambda name: name.replace("*", str(index), 1))


def join(expression: Expression, tensors: Tensors) -> torch.Tensor:
    """Compute an expression.

    Args:
        expression: Over names in `tensors`.
        tensors: Values by name.
    """
    if isinstance(expression, str):
        return tensors[expression]
    return expression.join([join(part, tensors) for part in expression.parts])


def part(
    expression: Expression, tensor: torch.Tensor, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Undo `join`: the tensors that an expression names, as views where possible.

    Args:
        expression: Over names in `shapes`.
        tensor: Value of the expression.
        shapes: Shapes of the tensors to return.

    Raises:
        ValueError: The tensor can't be parted like that.
    """
    if isinstance(expression, str):
        return {expression: tensor}
    pieces = expression.part(tensor, (_shape(inner, shapes) for inner in expression.parts))
    if len(pieces) != len(expression.parts):
        raise ValueError(
            f"{expression} has {len(expression.parts)} parts, the tensor {tuple(tensor.shape)} {len(pieces)}"
        )
    found: dict[str, torch.Tensor] = {}
    for inner, piece in zip(expression.parts, pieces, strict=True):
        found |= part(inner, piece, shapes)
    return found


def _shape(expression: Expression, shapes: Mapping[str, torch.Size]) -> torch.Size:
    if isinstance(expression, str):
        return shapes[expression]
    empty = {name: torch.empty(shapes[name], device="meta") for name in leaves(expression)}
    return join(expression, empty).shape
