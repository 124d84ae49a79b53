"""A replaced module, as its weights see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modelpatch.errors import LayoutError
from modelpatch.weights.equations import SiteLayout
from modelpatch.weights.trials import inverse_fault


@dataclass(frozen=True, slots=True, eq=False)
class LayoutSite:
    """A replaced module and its layout.

    Attributes:
        path: Path in the model; empty for the model itself.
        title: What messages call it.
        replacement: Its parameters and persistent buffers, by relative name.
        original: Those of the module in whose place it is, on `meta`; empty without a layout.
        layout: How one comes from the other; None where they are the same, or where registered conversions say it.
        is_declared: Whether a patch gives the layout, and not Transformers' registry.
        initialised: Those of the replacement that no file needs to have, because it initialises them itself.
        strict: Whether a fault refuses the load.
        allow_irreversible: Whether the layout may lose something.
    """

    path: str
    title: str
    replacement: dict[str, torch.Tensor]
    original: dict[str, torch.Tensor]
    layout: SiteLayout | None
    is_declared: bool = False
    initialised: frozenset[str] = frozenset()
    strict: bool = True
    allow_irreversible: bool = False

    def is_of_conversion(self, name: str) -> bool:
        """Tell whether a converter that makes it was registered for the replacement, and no layout says the same."""
        if not self.original:
            return False
        same = name in self.original and self.original[name].shape == self.replacement[name].shape
        written = self.layout is not None and any(name in e.targets for e in self.layout.equations)
        return not same and not written

    @property
    def moved(self) -> list[str]:
        """Relative names of the original's tensors that the layout doesn't leave as they are."""
        equations = self.layout.equations if self.layout else ()
        return [name for e in equations if not e.is_kept for name in e.sources]

    def without_file(self, name: str) -> str:
        """Return what the ledger calls a tensor of the replacement that no file has."""
        if self.layout and name in self.layout.created:
            return "created"
        return "initialised" if name in self.initialised else "missing"

    def full(self, name: str) -> str:
        """Return the name of a tensor in the model."""
        return f"{self.path}.{name}" if self.path else name

    def local(self, name: str) -> str:
        """Return the name of a tensor of the model relative to this module."""
        return name.removeprefix(f"{self.path}.") if self.path else name


def check_sites(sites: Sequence[LayoutSite]) -> None:
    """Check the layouts of all sites, forward and back.

    Raises:
        LayoutError: A name, a shape or a missing inverse, at any of them.
    """
    faults: list[str] = []
    verdicts: dict[object, str | None] = {}
    for site in sites:
        if site.layout is None or not (site.is_declared or site.strict):
            continue
        found = list(site.layout.faults) if site.is_declared else []
        if not site.allow_irreversible and not site.layout.faults:
            for equation in site.layout.equations:
                names = (*equation.sources, *equation.targets)
                both = (site.original, site.replacement)
                shapes = tuple(
                    (t.shape, t.dtype)
                    for known in both
                    for t in map(known.get, names)
                    if t is not None
                )
                case = (equation, shapes)
                if not found and case not in verdicts:
                    verdicts[case] = inverse_fault(equation, *both)
                if reason := verdicts.get(case):
                    found.append(f"{reason}. To allow it: Patch(..., allow_irreversible=True)")
            if site.layout.dropped:
                dropped = ", ".join(site.layout.dropped)
                found.append(
                    f"{dropped}: dropped, so that saving can't give it back. To allow it: Patch(..., allow_irreversible=True)"
                )
        faults += [f"{site.path or '(root)'}, {site.title}: {fault}" for fault in found]
    if faults:
        raise LayoutError("The layout doesn't hold, and nothing was loaded:", faults=faults)
