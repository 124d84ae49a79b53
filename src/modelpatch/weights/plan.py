"""A load while it is being planned: what is to be done with which tensors of the files, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from modelpatch._transformers import Conversions, converter_text, file_tensor, target_names
from modelpatch.weights.equations import Equation
from modelpatch.weights.expressions import Tensors
from modelpatch.weights.ledger import Entry
from modelpatch.weights.mosaic import pieced, whole
from modelpatch.weights.sites import LayoutSite

AS_IT_IS = "as it is"
_SHOWN = 3  # enough keys to find the place


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What Transformers does with some keys of the files: it makes tensors of the stock model.

    Attributes:
        name: The first tensor that it makes.
        keys: The keys, with the pattern of the converter for each.
        converter: Its converter, or None where the tensor stays as it is.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    converter: Any | None

    @property
    def names(self) -> list[str]:
        """All that it makes."""
        return [self.name] if self.converter is None else target_names(self.converter, self.name)

    @property
    def operation(self) -> str:
        """What the ledger calls it."""
        if self.converter is not None:
            return converter_text(self.converter)
        return AS_IT_IS if self.keys[0][0] == self.name else "rename"

    def run(self, tensors: Tensors, conversions: Conversions) -> dict[str, torch.Tensor]:
        """Do it, with the tensors of the keys."""
        if self.converter is None:
            return {self.name: tensors[self.keys[0][0]]}
        by_pattern: dict[str, list[torch.Tensor]] = {}
        for key, pattern in self.keys:
            by_pattern.setdefault(pattern, []).append(tensors[key])
        return conversions.run(self.converter, self.name, by_pattern)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tensors of the files that fill tensors of one site together: jobs, and then equations."""

    site: LayoutSite
    jobs: tuple[Job, ...]
    equations: tuple[Equation, ...]

    @property
    def keys(self) -> list[str]:
        """The keys of the files."""
        return [key for job in self.jobs for key, _ in job.keys]

    @property
    def targets(self) -> list[str]:
        """Relative names of what it fills; the first one stands for the group."""
        return [name for equation in self.equations for name in equation.targets]

    def stock(self, tensors: Tensors, conversions: Conversions) -> dict[str, torch.Tensor]:
        """Return the original's tensors, by relative name."""
        made = [job.run(tensors, conversions) for job in self.jobs]
        return {self.site.local(n): t for one in made for n, t in one.items()}

    def fill(self, originals: Tensors) -> dict[str, torch.Tensor]:
        """Return the replacement's tensors by relative name, from the original's."""
        shapes = {name: self.site.replacement[name].shape for name in self.targets}
        made: dict[str, torch.Tensor] = {}
        for equation in self.equations:
            made |= equation.forward(originals, shapes)
        return made


@dataclass(slots=True)
class LoadPlan:
    """A load, as far as it is decided.

    Attributes:
        conversions: Transformers' own part.
        files: All tensors of the files by key; none is read.
        targets: The model's, by name, on `meta`.
        owners: The replaced module of each target that has one.
        faults: What refuses the load, one sentence each.
        lenient: The same at sites that are not strict.
        takes: From keys, as converters see them, to the first target of their group.
        groups: By first target; None where a tensor of the file is one of the model as it is.
        aside: Keys that are not to be read.
        entries: The ledger's, by target.
    """

    conversions: Conversions
    files: Mapping[str, Any]
    targets: Tensors
    owners: Mapping[str, LayoutSite]
    faults: list[str] = field(default_factory=list)
    lenient: list[str] = field(default_factory=list)
    takes: dict[str, str] = field(default_factory=dict)
    groups: dict[str, Group | None] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)
    entries: dict[str, Entry] = field(default_factory=dict)

    def empty(self, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return shapes and dtypes of what the files hold."""
        return {key: file_tensor(self.files[key]) for key in keys}

    def complain(self, site: LayoutSite, fault: str) -> None:
        """Note a fault."""
        (self.faults if site.strict else self.lenient).append(f"{fault} ({site.title})")

    def compare(
        self,
        site: LayoutSite,
        name: str,
        keys: Sequence[str],
        sides: tuple[torch.Tensor, torch.Tensor],
    ) -> bool:
        """Tell whether what the files hold is what the model has there; complain if not.

        Any floating dtype of the files fits any of the model: Transformers casts them.

        Args:
            site: The site.
            name: What is compared.
            keys: The keys of the files that it comes from.
            sides: What the files give, and what the model has.
        """
        found, wanted = sides
        shown = ", ".join([*keys[:_SHOWN], *(["..."] if len(keys) > _SHOWN else [])])
        both_real = found.dtype.is_floating_point and wanted.dtype.is_floating_point
        given: object
        needed: object
        if found.shape != wanted.shape:
            given, needed = [*found.shape], [*wanted.shape]
        elif found.dtype != wanted.dtype and not both_real:
            given, needed = found.dtype, wanted.dtype
        else:
            return True
        self.complain(site, f"{name}: {given} in the files ({shown}), {needed} in the model")
        return False

    def enter(self, name: str, operation: str, keys: tuple[str, ...] = ()) -> None:
        """Note in the ledger what fills a target."""
        tensor, site = self.targets[name], self.owners.get(name)
        num_bytes = tensor.numel() * tensor.element_size()
        self.entries[name] = Entry(name, keys, operation, num_bytes, site.path if site else None)

    def take(self, key: str, name: str, operation: str) -> None:
        """Let a key fill a target as it is."""
        self.groups[name] = None
        self.takes[self.conversions.renamed(key)] = name
        self.enter(name, operation, (key,))

    def is_taken(self, key: str) -> bool:
        """Tell whether a key has its place already, or is not to be read."""
        return key in self.aside or self.conversions.renamed(key) in self.takes

    def fill(self, first_target: str, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Compute the targets of a group from its tensors, each in memory of its own."""
        group = self.groups[first_target]
        if group is None:
            (tensor,) = tensors.values()
            return {first_target: tensor}
        made = group.fill(group.stock(pieced(tensors), self.conversions))
        return {group.site.full(name): _owned(whole(tensor)) for name, tensor in made.items()}


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory of its own: a view would keep all of what it is a part of."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
