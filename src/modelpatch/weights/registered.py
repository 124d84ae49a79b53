"""Layouts that were declared through Transformers' registry of checkpoint conversions.

`register_checkpoint_conversion_mapping` tells how a file becomes the replacement. Read against the original's names it
says the same as a layout, and so gets an exact way back: Transformers' own cuts what was concatenated into equal
pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelpatch._transformers import Conversions, operations, target_names
from modelpatch.weights.equations import Equation, SiteLayout
from modelpatch.weights.expressions import (
    Expression,
    Tensors,
    flatten,
    fuse,
    stack,
    transpose,
)
from modelpatch.weights.trials import misfit


def may_concern(conversions: Conversions, names: Sequence[str]) -> bool:
    """Tell, without looking closely, whether a converter may make one of some tensors."""
    pieces = [
        max(pattern.replace("\\", "").split("*"), key=len).strip("^$.")
        for converter in conversions.converters
        for pattern in converter.target_patterns
    ]
    return any(piece in name for piece in pieces for name in names)


def registered_layout(
    path: str, original: Tensors, replacement: Tensors, conversions: Conversions
) -> SiteLayout | None:
    """Return the layout that registered converters give to a replaced module, or None if they give none.

    Args:
        path: Path of the module.
        original: Tensors of the module in whose place it is, by relative name.
        replacement: Its own.
        conversions: The registered ones.
    """
    prefix = f"{path}." if path else ""
    found: dict[tuple[str, int], tuple[Any, dict[str, list[str]]]] = {}
    for name in original:
        target, converter, pattern = conversions.converted(prefix + name)
        if converter is not None:
            _, sources = found.setdefault((target, id(converter)), (converter, {}))
            sources.setdefault(pattern, []).append(name)
    equations = []
    for (target, _), (converter, sources) in found.items():
        targets = [name.removeprefix(prefix) for name in target_names(converter, target)]
        if all(name in replacement for name in targets) and len(sources) == len(
            converter.source_patterns
        ):
            ordered = {pattern: sources[pattern] for pattern in converter.source_patterns}
            if equation := _equation(converter, ordered, targets):
                equations.append(equation)
    if not equations:
        return None
    faults = [fault for e in equations if (fault := misfit(e, original, replacement))]
    return SiteLayout(tuple(equations), faults=tuple(faults))


def _equation(
    converter: Any, sources: Mapping[str, list[str]], targets: list[str]
) -> Equation | None:
    """Write a converter as an equation, or return None where it can't be."""
    steps = operations(converter)
    values: list[list[Expression]] = [list(names) for names in sources.values()]
    target: Expression = targets[0]
    for index, (operation, dim, other) in enumerate(steps or ()):
        single = len(values) == 1 and len(values[0]) == 1
        if operation == "stack":
            values = [[stack(*parts, dim=dim)] for parts in values]
        elif operation == "fuse":
            values = [[fuse(*(part for parts in values for part in parts), dim=dim)]]
        elif operation == "transpose" and single:
            values = [[transpose(values[0][0], dim, other)]]
        elif operation == "flatten" and single:
            values = [[flatten(values[0][0], dim, other)]]
        elif operation == "split" and single and index == len(steps or ()) - 1:
            target = fuse(*targets, dim=dim)
        else:
            return None
    whole = steps and len(values) == 1 and len(values[0]) == 1
    return Equation(target, values[0][0]) if whole else None
