"""Layouts as users write them, and their meaning at one site."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from modelpatch.errors import ArgumentTypeError
from modelpatch.weights.equations import Equation, SiteLayout
from modelpatch.weights.expressions import (
    Expression,
    Joined,
    Tensors,
    create,
    drop,
    expanded,
    leaves,
    renamed,
)
from modelpatch.weights.trials import misfit, shape_text

Layout = Mapping[object, object]
"""From expressions over the replacement's names to ones over the original's; also `{name: create}`, `{drop: names}`."""


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


def compile_layout(layout: Layout, original: Tensors, replacement: Tensors) -> SiteLayout:
    """Write a layout out for one site.

    Args:
        layout: As `check_layout` accepts it.
        original: The original's parameters and persistent buffers by relative name, on `meta`.
        replacement: The replacement's.
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
    if not names.faults:
        names.account()
    faults = names.faults or [
        reason for e in names.equations if (reason := misfit(e, original, replacement))
    ]
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
                f"{name} {shape_text(known[name].shape)} of the {side}: {advice}"
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
