"""What a layout means at one site: equations between the original's tensors and the replacement's.

Pure: names, shapes and tiny random tensors; no weight is read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import torch

from modelpatch.errors import ArgumentTypeError
from modelpatch.weights.expressions import (
    Expression,
    Joined,
    Tensors,
    create,
    drop,
    expanded,
    join,
    leaves,
    part,
    renamed,
)

Layout = Mapping[object, object]
"""From an expression over the replacement's names to one over the original's; also `{name: create}`, `{drop: names}`."""

_SMALL = 16  # dimensions below are left as they are for the trial
_FEW = 3  # entries of a stack that the trial keeps
_DIGITS = {torch.int8: 7, torch.uint8: 8, torch.int16: 15, torch.bool: 1}


@dataclass(frozen=True, slots=True)
class Equation:
    """`target`, over the replacement's names, holds what `source`, over the original's, holds."""

    target: Expression
    source: Expression

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the replacement's tensors, in order."""
        return tuple(leaves(self.target))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the original's tensors, in order."""
        return tuple(leaves(self.source))

    @property
    def is_rename(self) -> bool:
        """Whether the tensor stays as it is."""
        return isinstance(self.target, str) and isinstance(self.source, str)

    def forward(
        self, tensors: Tensors, shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """Compute the targets from the sources; views where possible.

        Args:
            tensors: The sources, and maybe others.
            shapes: Shapes of the targets.
        """
        return part(self.target, join(self.source, tensors), shapes)

    def backward(
        self, tensors: Tensors, shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """Compute the sources from the targets; views where possible.

        Args:
            tensors: The targets, and maybe others.
            shapes: Shapes of the sources.
        """
        return part(self.source, join(self.target, tensors), shapes)

    def __str__(self) -> str:
        if self.is_rename:
            return "keep" if self.target == self.source else "rename"
        return (
            str(self.source) if isinstance(self.target, str) else f"{self.target} = {self.source}"
        )


@dataclass(frozen=True, slots=True)
class SiteLayout:
    """A layout at one site, by names relative to it.

    Attributes:
        equations: Each tensor of the original in one of them at most, each of the replacement likewise.
        created: Tensors of the replacement that no stock file has.
        dropped: Tensors of the original that the replacement has no use for.
        faults: What is wrong with it, one sentence each.
    """

    equations: tuple[Equation, ...] = ()
    created: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def check_layout(layout: object) -> None:
    """Check what can be checked without a site.

    Raises:
        ArgumentTypeError: It is no mapping between expressions.
    """
    if not isinstance(layout, Mapping):
        raise ArgumentTypeError(
            f"a layout maps the replacement's names to the original's, got {type(layout).__name__}"
        )
    for target, source in layout.items():
        fine = (
            _is_names(source)
            if target is drop
            else isinstance(target, (str, Joined))
            and (source is create or isinstance(source, (str, Joined)))
        )
        if not fine or (source is create and not isinstance(target, str)):
            raise ArgumentTypeError(
                f"an entry of a layout is one expression: another, a name: create, or drop: names; got {target}: {source}"
            )


def _is_names(value: object) -> bool:
    names = (value,) if isinstance(value, str) else value
    return isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)


def compile_layout(
    layout: Layout, original: Tensors, replacement: Tensors, *, complete: bool = True
) -> SiteLayout:
    """Write a layout out for one site.

    Args:
        layout: As `check_layout` accepts it.
        original: The original's parameters and persistent buffers by relative name, on `meta`.
        replacement: The replacement's.
        complete: Whether each tensor of both has to be accounted for.
    """
    names = _Names(original, replacement)
    for target, source in layout.items():
        if target is drop:
            given = (source,) if isinstance(source, str) else source
            names.dropped += names.resolved(given, names.original, "original")  # type: ignore[arg-type]  # checked
        elif source is create:
            names.created += names.resolved((target,), names.replacement, "replacement")  # type: ignore[arg-type]
        else:
            names.equations += names.equated(target, source)  # type: ignore[arg-type]
    names.keep()
    if complete and not names.faults:
        names.account()
    faults = list(names.faults)
    if not faults:
        for equation in names.equations:
            if reason := misfit(equation, original, replacement):
                faults.append(reason)
    return SiteLayout(
        tuple(names.equations), tuple(names.created), tuple(names.dropped), tuple(faults)
    )


@dataclass(slots=True)
class _Names:
    """Resolves the names of a layout, and keeps account of them."""

    original: Tensors
    replacement: Tensors
    equations: list[Equation] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def resolved(self, patterns: Iterable[str], known: Tensors, side: str) -> list[str]:
        """Return all tensors that names mean: a tensor, a module's, or those of all entries of a list."""
        found = []
        for pattern in patterns:
            matches = list(_matches(pattern, known))
            if not matches:
                self._unknown(pattern, known, side)
            found += [name for name, _, _ in matches]
        return found

    def equated(self, target: Expression, source: Expression) -> list[Equation]:
        """Return one equation for each tensor of the modules that an entry names."""
        sides = ((target, self.replacement, "replacement"), (source, self.original, "original"))
        suffixes: dict[str, list[str]] = {}  # by name as written, with the side
        for expression, known, side in sides:
            for name in leaves(expression):
                matches = list(_matches(name, known))
                if not matches:
                    self._unknown(name, known, side)
                    return []
                suffixes[f"{name} ({side})"] = sorted({suffix for _, _, suffix in matches})
        if len({tuple(found) for found in suffixes.values()}) > 1:
            shown = "; ".join(f"{name} has {_shown(found)}" for name, found in suffixes.items())
            self.faults.append(
                f"{target}: {source} equates modules with different tensors: {shown}. Name the tensors one by one."
            )
            return []
        return [
            equation
            for suffix in next(iter(suffixes.values()))
            for equation in self._for_suffix(target, source, suffix)
        ]

    def _for_suffix(
        self, target: Expression, source: Expression, suffix: str
    ) -> Iterator[Equation]:
        whole_target, whole_source = (
            expanded(
                renamed(expression, lambda name: f"{name}.{suffix}" if suffix else name),
                lambda name, known=known: _indices(name, known),  # type: ignore[misc]
            )
            for expression, known in ((target, self.replacement), (source, self.original))
        )
        free: dict[str, list[int]] = {}  # names with a * that no stack binds
        for expression, known in ((whole_target, self.replacement), (whole_source, self.original)):
            free |= {name: _indices(name, known) for name in leaves(expression) if "*" in name}
        if not free:
            yield Equation(whole_target, whole_source)
            return
        if len({tuple(found) for found in free.values()}) > 1:
            shown = "; ".join(f"{name} has {len(found)}" for name, found in free.items())
            self.faults.append(f"{target}: {source} equates lists of different lengths: {shown}")
            return
        for index in next(iter(free.values())):
            yield Equation(
                renamed(whole_target, lambda name, i=index: name.replace("*", str(i))),  # type: ignore[misc]
                renamed(whole_source, lambda name, i=index: name.replace("*", str(i))),  # type: ignore[misc]
            )

    def keep(self) -> None:
        """Equate what has one name on both sides and is mentioned on neither."""
        used_targets = {name for e in self.equations for name in e.targets}.union(self.created)
        used_sources = {name for e in self.equations for name in e.sources}.union(self.dropped)
        self.equations += [
            Equation(name, name)
            for name in self.original
            if name in self.replacement and name not in used_sources and name not in used_targets
        ]

    def account(self) -> None:
        """Find what is named twice or not at all."""
        for side, known, used, advice in (
            (
                "original",
                self.original,
                [*(n for e in self.equations for n in e.sources), *self.dropped],
                "nothing uses it; give its place in the layout, or {drop: name}",
            ),
            (
                "replacement",
                self.replacement,
                [*(n for e in self.equations for n in e.targets), *self.created],
                "nothing fills it; say where it comes from, or {name: create}",
            ),
        ):
            counts = Counter(used)
            self.faults += [
                f"{name} of the {side}: named {count} times"
                for name, count in counts.items()
                if count > 1
            ]
            self.faults += [
                f"{name} {_shape_text(known[name].shape)} of the {side}: {advice}"
                for name in known
                if name not in counts
            ]

    def _unknown(self, pattern: str, known: Tensors, side: str) -> None:
        modules = {name.rpartition(".")[0] for name in known} - {""}
        close = get_close_matches(pattern, [*known, *modules], n=3) or list(known)[:3]
        self.faults.append(f"the {side} has no {pattern!r}; nearest: {', '.join(close) or 'none'}")


def _matches(pattern: str, known: Iterable[str]) -> Iterator[tuple[str, int | None, str]]:
    """Yield name, index and suffix of the tensors that a pattern means."""
    # An index is one segment of a name, and so are the ends of the pattern.
    regex = re.compile(r"(\d+)".join(map(re.escape, pattern.split("*"))) + r"(?:\.(.+))?")
    for name in known:
        if match := regex.fullmatch(name):
            *index, suffix = match.groups()
            yield name, int(index[0]) if index else None, suffix or ""


def _indices(pattern: str, known: Iterable[str]) -> list[int]:
    return sorted(
        index for _, index, suffix in _matches(pattern, known) if not suffix and index is not None
    )


def _shown(suffixes: Sequence[str]) -> str:
    return ", ".join(suffix or "no tensors inside" for suffix in suffixes)


def _shape_text(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# --- checking ---------------------------------------------------------------------------------------------------------


def misfit(equation: Equation, original: Tensors, replacement: Tensors) -> str | None:
    """Return why the shapes of an equation don't fit, or None."""
    sides = f"original {_side(equation.sources, original)}, replacement {_side(equation.targets, replacement)}"
    try:
        found = equation.forward(_empty(equation.sources, original), _shapes(replacement))
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{equation.target}: {equation.source} doesn't fit: {sides}: {_first_line(error)}"
    if any(found[name].shape != replacement[name].shape for name in equation.targets):
        made = ", ".join(
            f"{name} {_shape_text(found[name].shape)}" for name in equation.targets[:3]
        )
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
                f"{equation} gives {wrong[0]} back as {_shape_text(back[wrong[0]].shape)}: {sides}"
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
    """Yield the equation with random sources and the targets' shapes, scaled down and at last as they are.

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
            shapes = {n: torch.Size(map(scale, original[n].shape)) for n in small.sources}
            targets = {n: torch.Size(map(scale, replacement[n].shape)) for n in small.targets}
            empty = {
                n: torch.empty(s, device="meta", dtype=original[n].dtype) for n, s in shapes.items()
            }
            try:
                made = small.forward(empty, targets)
            except (RuntimeError, ValueError, IndexError):
                continue
            if all(made[name].shape == targets[name] for name in targets):
                yield (
                    small,
                    {n: random_like(e, i) for i, (n, e) in enumerate(empty.items())},
                    targets,
                )


def _cut(expression: Expression) -> Expression:
    """Keep the first entries of each long stack."""
    if isinstance(expression, str):
        return expression
    parts = expression.parts
    if expression.operation == "stack" and len(parts) > _FEW:
        parts = parts[:_FEW]
    return replace(expression, parts=tuple(map(_cut, parts)))


def scales(dims: Iterable[int], cut: int | None = None) -> Iterator[Callable[[int], int]]:
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


def random_like(empty: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return random values in the shape and dtype of a tensor, on the CPU, the same at each call."""
    generator = torch.Generator().manual_seed(seed)
    if empty.dtype.is_floating_point or empty.dtype.is_complex:
        return torch.randn(empty.shape, generator=generator).to(empty.dtype)
    high = 2 ** _DIGITS.get(empty.dtype, 30)
    return torch.randint(0, high, empty.shape, generator=generator).to(empty.dtype)


def fingerprint(tensor: torch.Tensor) -> tuple[torch.Size, bytes]:
    """Return a value that only a tensor of the same shape and bytes has."""
    return tensor.shape, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: NaN is NaN, and zero is not minus zero."""
    return one.dtype == other.dtype and fingerprint(one) == fingerprint(other)


def _empty(names: Iterable[str], known: Tensors) -> dict[str, torch.Tensor]:
    return {n: torch.empty(known[n].shape, dtype=known[n].dtype, device="meta") for n in names}


def _shapes(known: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in known.items()}


def _side(names: Sequence[str], known: Tensors) -> str:
    shown = [f"{name} {_shape_text(known[name].shape)}" for name in names[:3]]
    return ", ".join([*shown, "..."] if len(names) > len(shown) else shown)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
