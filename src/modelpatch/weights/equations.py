"""A layout at one site, written out: equations between the original's tensors and the replacement's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modelpatch.weights.expressions import Expression, Tensors, join, leaves, part


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

    @property
    def is_kept(self) -> bool:
        """Whether it stays as it is, and keeps its name."""
        return self.target == self.source

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
            return "keep" if self.is_kept else "rename"
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
