"""The plan of a load: which tensors of the files fill which of the model, decided before one is read.

Transformers places each key as it would in the stock model. Where a layout takes over, tensors go on through its
equations into the replacement; everything else is left to Transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from modelpatch._transformers import (
    Conversions,
    converter_text,
    file_tensor,
    is_scalable,
    not_ignored,
    target_names,
    tied_names,
)
from modelpatch.weights.expressions import Tensors
from modelpatch.weights.ledger import Entry, Ledger
from modelpatch.weights.rules import Equation, SiteLayout, fingerprint, random_like, scales
from modelpatch.weights.sites import LayoutSite

_AS_IT_IS = "as it is"


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
        return _AS_IT_IS if self.keys[0][0] == self.name else "rename"

    def run(self, tensors: Tensors, conversions: Conversions) -> dict[str, torch.Tensor]:
        """Do it, with the tensors of the keys."""
        if self.converter is None:
            return {self.name: tensors[self.keys[0][0]]}
        by_pattern: dict[str, list[torch.Tensor]] = {}
        for key, pattern in self.keys:
            by_pattern.setdefault(pattern, []).append(tensors[key])
        return conversions.run(self.converter, self.name, by_pattern)


@dataclass(slots=True)
class Group:
    """Tensors of the files that fill tensors of one site together: jobs, and then equations."""

    site: LayoutSite
    jobs: list[Job]
    equations: list[Equation]

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

    def fill(
        self,
        tensors: Tensors,
        conversions: Conversions,
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the replacement's tensors by relative name, as views where possible."""
        if shapes is None:
            shapes = {name: self.site.replacement[name].shape for name in self.targets}
        originals = self.stock(tensors, conversions)
        made: dict[str, torch.Tensor] = {}
        for equation in self.equations:
            made |= equation.forward(originals, shapes)
        return made


@dataclass(slots=True)
class LoadPlan:
    """A load, decided.

    Attributes:
        conversions: Transformers' own part.
        faults: What refuses it, one sentence each.
        lenient: The same at sites that are not strict.
        takes: From keys, as converters see them, to the first target of their group.
        groups: By first target; None where a tensor of the file is one of the model as it is.
        aside: Keys that are not to be read.
        entries: The ledger's, by target.
    """

    conversions: Conversions
    faults: list[str] = field(default_factory=list)
    lenient: list[str] = field(default_factory=list)
    takes: dict[str, str] = field(default_factory=dict)
    groups: dict[str, Group | None] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)
    entries: dict[str, Entry] = field(default_factory=dict)

    def complain(self, site: LayoutSite, fault: str) -> None:
        """Note a fault."""
        (self.faults if site.strict else self.lenient).append(f"{fault} ({site.title})")

    def fill(self, first_target: str, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Compute the targets of a group from its tensors, each in memory of its own."""
        group = self.groups[first_target]
        if group is None:
            (tensor,) = tensors.values()
            return {first_target: tensor}
        made = group.fill(tensors, self.conversions)
        return {group.site.full(name): _owned(tensor) for name, tensor in made.items()}


def plan_load(
    model: Any, files: Mapping[str, Any], sites: Sequence[LayoutSite], mapping: Iterable[Any]
) -> tuple[LoadPlan, Ledger]:
    """Decide a load.

    Args:
        model: The model, with its replacements, on `meta`.
        files: All tensors of the files by key; none is read.
        sites: The replaced modules.
        mapping: Transformers' conversions for this model.
    """
    plan = LoadPlan(Conversions(model, mapping))
    targets: dict[str, torch.Tensor] = model.state_dict()
    owners = {site.full(n): site for site in sites for n in site.replacement}
    originals = {site.full(n): site for site in sites if site.is_declared for n in site.original}
    stock = {n: t for n, t in targets.items() if n not in owners or not owners[n].is_declared}
    stock |= {full: site.original[site.local(full)] for full, site in originals.items()}

    jobs, as_saved, unplaced = _place(files, stock, targets, plan.conversions)
    made_by = _made_by(plan, jobs, owners, originals)
    _refuse_tied(plan, model, sites)
    for site in sites:
        if site.is_declared and site.layout is not None:
            _restructure(plan, site, site.layout, made_by, as_saved, files)
    taken = {id(job) for group in plan.groups.values() if group for job in group.jobs}
    for job in jobs:
        if id(job) not in taken and not plan.aside.intersection(key for key, _ in job.keys):
            _leave(plan, job, targets, owners, files)
    unplaced |= {key: name for name, key in as_saved.items()}

    left_over = _left_over(model, unplaced, sites)
    for key, site in left_over.items():
        plan.complain(site, f"{key}: in the files, and nothing in the model takes it")
    _account_missing(plan, model, targets, owners, left_over)
    ledger = Ledger(
        model=type(model).__name__,
        entries=tuple(plan.entries[name] for name in targets),
        dropped=tuple(plan.aside),
        unused=tuple(unplaced),
        faults=tuple(plan.lenient),
    )
    return plan, ledger


def _place(
    files: Iterable[str], stock: Tensors, targets: Tensors, conversions: Conversions
) -> tuple[list[Job], dict[str, str], dict[str, str]]:
    """Find for each key what Transformers would do with it in the stock model.

    Returns:
        The jobs; the keys of a file that was saved in the replacement's layout, by target; and the other keys, with
        the names that they would have.
    """
    uses: dict[tuple[str, int], tuple[Any, list[tuple[str, str]]]] = {}
    as_saved: dict[str, str] = {}
    unplaced: dict[str, str] = {}
    for key in files:
        name, converter, pattern = conversions.place(key, stock)
        if name in stock:
            uses.setdefault((name, id(converter)), (converter, []))[1].append((key, pattern))
            continue
        own, _, _ = conversions.place(key, targets, convert=False)
        if own in targets and own not in as_saved:
            as_saved[own] = key
        else:
            unplaced[key] = name
    jobs = [Job(name, tuple(keys), converter) for (name, _), (converter, keys) in uses.items()]
    return jobs, as_saved, unplaced


def _made_by(
    plan: LoadPlan,
    jobs: Iterable[Job],
    owners: Mapping[str, LayoutSite],
    originals: Mapping[str, LayoutSite],
) -> dict[str, Job]:
    """Return the job that makes each tensor of the stock model; two of them, or two keys for one, are a fault."""
    made_by: dict[str, Job] = {}
    for job in jobs:
        for name in job.names:
            site = originals.get(name) or owners.get(name)
            others = [key for key, _ in made_by[name].keys] if name in made_by else []
            keys = [*others, *(key for key, _ in job.keys)]
            if site and (others or (job.converter is None and len(keys) > 1)):
                plan.complain(site, f"{name}: the files hold it twice, as {' and '.join(keys[:3])}")
            made_by[name] = job
    return made_by


def _refuse_tied(plan: LoadPlan, model: Any, sites: Sequence[LayoutSite]) -> None:
    """Complain of layouts that move a tensor which the family ties to another by name."""
    pairs = tied_names(model)
    for site in sites if pairs else ():
        equations = site.layout.equations if site.is_declared and site.layout else ()
        for name in (n for e in equations if e.target != e.source for n in e.sources):
            for one, other in pairs:
                ends = {one: other, other: one}
                for end in (end for end in ends if re.fullmatch(end, site.full(name))):
                    plan.complain(
                        site,
                        f"{site.full(name)}: the model ties it to {ends[end]} by name, and the layout moves it. Leave it where "
                        f"it is, or set tie_word_embeddings=False",
                    )


def _restructure(
    plan: LoadPlan,
    site: LayoutSite,
    layout: SiteLayout,
    made_by: Mapping[str, Job],
    as_saved: dict[str, str],
    files: Mapping[str, Any],
) -> None:
    """Plan what a layout takes over."""
    for name in layout.dropped:
        if job := made_by.get(site.full(name)):
            plan.aside.update(key for key, _ in job.keys)
    by_job: dict[int, Group] = {}
    for equation in layout.equations:
        jobs = [made_by[full] for full in map(site.full, equation.sources) if full in made_by]
        saved = [name for name in equation.targets if site.full(name) in as_saved]
        if equation.target == equation.source and all(len(job.names) == 1 for job in jobs):
            continue  # Transformers fills it as it would in the stock model
        if not jobs and len(saved) == len(equation.targets):
            for name in saved:
                _take(plan, site, as_saved.pop(site.full(name)), name, "rename")
        elif saved or len(jobs) < len(equation.sources):
            _complain_of_sources(plan, site, equation, made_by, as_saved)
        else:
            groups = {id(g): g for g in map(by_job.get, map(id, jobs)) if g is not None}
            merged = Group(site, list({id(job): job for job in jobs}.values()), [equation])
            for group in groups.values():
                more = [job for job in group.jobs if job not in merged.jobs]
                merged = Group(site, [*more, *merged.jobs], [*group.equations, *merged.equations])
            by_job |= {id(job): merged for job in merged.jobs}
    for group in {id(group): group for group in by_job.values()}.values():
        _settle(plan, group, files)
    for name in layout.created:
        if key := as_saved.pop(site.full(name), None):
            _take(plan, site, key, name, _AS_IT_IS)


def _settle(plan: LoadPlan, group: Group, files: Mapping[str, Any]) -> None:
    """Decide how a group is filled, if what the files hold fits."""
    site = group.site
    empty = {key: file_tensor(files[key]) for key in group.keys}
    for name in group.targets:
        _enter(plan, site.full(name), (), "missing", site.replacement[name], site)
    try:
        found = group.stock(empty, plan.conversions)
    except Exception as error:  # noqa: BLE001  # whatever a converter does with what a file holds
        plan.complain(
            site, f"{site.full(group.targets[0])}: {group.jobs[0].operation} failed: {error}"
        )
        return
    before = len(plan.faults) + len(plan.lenient)
    for name in (name for equation in group.equations for name in equation.sources):
        _compare(plan, site, site.full(name), group.keys, found[name], site.original[name])
    if len(plan.faults) + len(plan.lenient) > before:
        return
    for target, key in (_unconverted(group, empty, plan.conversions) or {}).items():
        _take(plan, site, key, target, "rename")
    if plan.entries[site.full(group.targets[0])].sources:
        return
    first = site.full(group.targets[0])
    plan.groups[first] = group
    plan.takes |= {plan.conversions.renamed(key): first for key in group.keys}
    before_it = ", ".join(dict.fromkeys(j.operation for j in group.jobs if j.converter is not None))
    for equation in group.equations:
        keys = [
            k
            for j in group.jobs
            if {*map(site.full, equation.sources)} & {*j.names}
            for k, _ in j.keys
        ]
        operation = f"{before_it}, then {equation}" if before_it else str(equation)
        for name in equation.targets:
            _enter(plan, site.full(name), tuple(keys), operation, site.replacement[name], site)


def _unconverted(group: Group, empty: Tensors, conversions: Conversions) -> dict[str, str] | None:
    """Return the key for each target of a group if each tensor comes out as it went in, or None.

    A converter may stack what the layout takes apart again. Seen on small random tensors; only for converters that
    treat small tensors as they treat large ones.
    """
    converters = [job.converter for job in group.jobs if job.converter is not None]
    if not converters or not all(map(is_scalable, converters)):
        return None
    shapes = {name: group.site.replacement[name].shape for name in group.targets}
    dims = {d for s in (*shapes.values(), *(t.shape for t in empty.values())) for d in s}
    scale = next(scales(dims))
    small = {
        key: random_like(torch.empty([*map(scale, t.shape)], dtype=t.dtype, device="meta"), i)
        for i, (key, t) in enumerate(empty.items())
    }
    try:
        made = group.fill(
            small, conversions, {n: torch.Size(map(scale, s)) for n, s in shapes.items()}
        )
    except (RuntimeError, ValueError, IndexError):
        return None
    by_value = {fingerprint(tensor): key for key, tensor in small.items()}
    found = {name: by_value.get(fingerprint(tensor)) for name, tensor in made.items()}
    whole = {key for key in found.values() if key is not None}
    is_whole = len(whole) == len(found) == len(small) == len(by_value)
    return {n: k for n, k in found.items() if k} if is_whole else None


def _take(plan: LoadPlan, site: LayoutSite, key: str, name: str, operation: str) -> None:
    """Let a key fill a target as it is."""
    full = site.full(name)
    plan.groups[full] = None
    plan.takes[plan.conversions.renamed(key)] = full
    _enter(plan, full, (key,), operation, site.replacement[name], site)


def _leave(
    plan: LoadPlan,
    job: Job,
    targets: Tensors,
    owners: Mapping[str, LayoutSite],
    files: Mapping[str, Any],
) -> None:
    """Leave a job to Transformers; what it makes under a replaced site has to fit."""
    keys = tuple(key for key, _ in job.keys)
    owned = [name for name in job.names if name in owners]
    made: dict[str, torch.Tensor] = {}
    if owned:
        try:
            made = job.run({key: file_tensor(files[key]) for key in keys}, plan.conversions)
        except Exception as error:  # noqa: BLE001  # whatever a converter does with what a file holds
            plan.complain(owners[owned[0]], f"{owned[0]}: {job.operation} failed: {error}")
    for name in job.names:
        if name in targets:
            site = owners.get(name)
            _enter(plan, name, keys, job.operation, targets[name], site)
            if site and name in made:
                _compare(plan, site, name, keys, made[name], targets[name])
                if job.converter is not None and site.is_of_conversion(site.local(name)):
                    _check_way_back(plan, site, job, files)


def _check_way_back(plan: LoadPlan, site: LayoutSite, job: Job, files: Mapping[str, Any]) -> None:
    """Complain when a registered converter doesn't give the tensors of the files back bit for bit."""
    empty = {key: file_tensor(files[key]) for key, _ in job.keys}
    reason = "its operations fail on random tensors"
    for scale in scales(dim for tensor in empty.values() for dim in tensor.shape):
        small = {
            key: random_like(torch.empty([*map(scale, t.shape)], dtype=t.dtype, device="meta"), i)
            for i, (key, t) in enumerate(empty.items())
        }
        kept = {fingerprint(tensor) for tensor in small.values()}
        try:
            back = plan.conversions.back(job.converter, job.run(small, plan.conversions))
        except NotImplementedError:
            reason = "it has no reverse_op"
            break
        except Exception as error:  # noqa: BLE001  # whatever an operation does with tensors of this size
            reason = str(error)
            continue
        if kept == {fingerprint(tensor) for tensor in back}:
            return
        reason = f"{[list(t.shape) for t in small.values()]} come back as {[list(t.shape) for t in back]}"
        break
    shapes = ", ".join(f"{key} {list(t.shape)}" for key, t in [*empty.items()][:3])
    plan.complain(
        site,
        f"{job.name}: {job.operation} doesn't give the files' tensors back bit for bit ({shapes}): {reason}",
    )


def _compare(
    plan: LoadPlan,
    site: LayoutSite,
    name: str,
    keys: Sequence[str],
    found: torch.Tensor,
    wanted: torch.Tensor,
) -> None:
    """Complain when what the files hold isn't what the model has there."""
    both_real = found.dtype.is_floating_point and wanted.dtype.is_floating_point
    shown = ", ".join([*keys[:3], *(["..."] if len(keys) > 3 else [])])  # noqa: PLR2004  # enough to find it
    if found.shape != wanted.shape:
        plan.complain(
            site,
            f"{name}: {list(found.shape)} in the files ({shown}), {list(wanted.shape)} in the model",
        )
    elif found.dtype != wanted.dtype and not both_real:
        plan.complain(
            site, f"{name}: {found.dtype} in the files ({shown}), {wanted.dtype} in the model"
        )


def _complain_of_sources(
    plan: LoadPlan,
    site: LayoutSite,
    equation: Equation,
    made_by: Mapping[str, Job],
    as_saved: dict[str, str],
) -> None:
    saved = [name for name in equation.targets if site.full(name) in as_saved]
    for name in equation.targets:
        _enter(plan, site.full(name), (), "missing", site.replacement[name], site)
    lacking = [full for full in map(site.full, equation.sources) if full not in made_by]
    if saved:
        plan.complain(
            site, f"{site.full(saved[0])}: the files hold it, and parts of {equation} besides"
        )
    for full in lacking:
        shape = list(site.original[site.local(full)].shape)
        plan.complain(
            site,
            f"{full} {shape}: in no file; {site.full(equation.targets[0])} needs it: {equation}",
        )


def _account_missing(
    plan: LoadPlan,
    model: Any,
    targets: Tensors,
    owners: Mapping[str, LayoutSite],
    left_over: Mapping[str, LayoutSite],
) -> None:
    """Enter the tensors that no file has."""
    missing = {name for name in targets if name not in plan.entries}
    wanted, _ = not_ignored(model, missing, set())
    for name in (name for name in targets if name in missing):
        site = owners.get(name)
        operation = "initialised" if name in wanted else "tied or ignored"
        if site and name in wanted:
            local = site.local(name)
            if site.layout and local in site.layout.created:
                operation = "created"
            elif local not in site.initialised:
                operation = "missing"
                left = [key for key, above in left_over.items() if above is site]
                reason = (
                    f"the files hold {', '.join(left[:3])} there, which nothing takes; a layout says how they belong together"
                    if left
                    else f"if it has none, {{{local!r}: create}} in the layout, or a reset_parameters of its own, lets the "
                    f"replacement initialise it"
                )
                shape = list(targets[name].shape)
                plan.complain(site, f"{name} {shape}: in no file; {reason}")
        _enter(plan, name, (), operation, targets[name], site)


def _left_over(
    model: Any, unplaced: Mapping[str, str], sites: Sequence[LayoutSite]
) -> dict[str, LayoutSite]:
    """Return the keys under replaced modules that nothing takes and the family doesn't ignore."""
    _, wanted = not_ignored(model, set(), set(unplaced.values()))
    paths = {site.path: site for site in sites if site.path}
    above = {
        key: next((paths[path] for path in _paths_above(name) if path in paths), None)
        for key, name in unplaced.items()
        if name in wanted
    }
    return {key: site for key, site in above.items() if site is not None}


def _paths_above(name: str) -> Iterator[str]:
    """Yield the paths of the modules above a tensor, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _enter(
    plan: LoadPlan,
    name: str,
    keys: tuple[str, ...],
    operation: str,
    tensor: torch.Tensor,
    site: LayoutSite | None,
) -> None:
    num_bytes = tensor.numel() * tensor.element_size()
    plan.entries[name] = Entry(name, keys, operation, num_bytes, site.path if site else None)


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory of its own: a view would keep all of what it is a part of."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
