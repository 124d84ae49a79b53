"""Where the weights of a replacement come from, and what a load did with them."""

from __future__ import annotations

from typing import Any

from modelpatch.weights.expressions import (
    converted,
    create,
    drop,
    flatten,
    fuse,
    interleave,
    stack,
    transpose,
)
from modelpatch.weights.ledger import Entry, Ledger

_OF_TRANSFORMERS = (
    "Chunk",
    "Concatenate",
    "ConversionOps",
    "MergeModulelist",
    "SplitModulelist",
    "Transpose",
    "WeightConverter",
    "WeightRenaming",
    "register_checkpoint_conversion_mapping",
)

__all__ = [  # noqa: PLE0604  # names of strings
    "Entry",
    "Ledger",
    "converted",
    "create",
    "drop",
    "flatten",
    "fuse",
    "interleave",
    "stack",
    "transpose",
    *_OF_TRANSFORMERS,
]


def __getattr__(name: str) -> Any:
    """Import the names of Transformers when they are asked for: a layout needs none of them."""
    if name in _OF_TRANSFORMERS:
        from modelpatch._transformers import conversion_name

        return conversion_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
