"""Plans a load: which tensors of the files fill which of the model, decided before one is read.

Transformers places each key as it would in the stock model. Where a layout takes over, tensors go on through its
equations into the replacement; everything else is left to Transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from modelpatch._transformers import Conversions, file_tensor, not_ignored, tied_names
from modelpatch.weights.equations import Equation, SiteLayout
from modelpatch.weights.expressions import Tensors
from modelpatch.weights.ledger import Ledger
from modelpatch.weights.mosaic import pieced, source
from modelpatch.weights.plan import AS_IT_IS, Group, Job, LoadPlan
from modelpatch.weights.sites import LayoutSite
from modelpatch.weights.trials import fingerprint, scales, shrunk


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
    owners = {site.full(name): site for site in sites for name in site.replacement}
    plan = LoadPlan(Conversions(model, mapping), files, model.state_dict(), owners)
    originals = {site.full(n): site for site in sites if site.is_declared for n in site.original}
    declared = [(site, site.layout) for site in sites if site.is_declared and site.layout]
    stock = {n: t for n, t in plan.targets.items() if n not in owners or not owners[n].is_declared}
    stock |= {name: site.original[site.local(name)] for name, site in originals.items()}

    jobs, as_saved, unplaced = _place(plan, stock)
    made_by = _made_by(plan, jobs, owners | originals)
    _refuse_tied(plan, model, [site for site, _ in declared])
    plan.aside.update(
        key
        for site, layout in declared
        for name in map(site.full, layout.dropped)
        for key, _ in (made_by[name].keys if name in made_by else ())
    )
    for site, layout in declared:
        _restructure(plan, site, layout, made_by, as_saved)
    for job in jobs:
        if not any(plan.is_taken(key) for key, _ in job.keys):
            _leave(plan, job)
    unplaced |= {key: name for name, key in as_saved.items()}

    left_over = _left_over(model, unplaced, sites)
    for key, site in left_over.items():
        plan.complain(site, f"{key}: in the files, and nothing in the model takes it")
    _account_missing(plan, model, left_over)
    ledger = Ledger(
        model=type(model).__name__,
        entries=tuple(plan.entries[name] for name in plan.targets),
        dropped=tuple(plan.aside),
        unused=tuple(unplaced),
        faults=tuple(plan.lenient),
    )
    return plan, ledger


def _place(plan: LoadPlan, stock: Tensors) -> tuple[list[Job], dict[str, str], dict[str, str]]:
    """Find for each key what Transformers would do with it in the stock model.

    Returns:
        The jobs; the keys of a file that was saved in the replacement's layout, by target; and the other keys, with
        the names that they would have.
    """
    uses: dict[tuple[str, int], tuple[Any, list[tuple[str, str]]]] = {}
    as_saved: dict[str, str] = {}
    unplaced: dict[str, str] = {}
    for key in plan.files:
        name, converter, pattern = plan.conversions.place(key, stock)
        if name in stock and not (converter is None and _is_own(plan, key, name, stock[name])):
            uses.setdefault((name, id(converter)), (converter, []))[1].append((key, pattern))
            continue
        own, _, _ = plan.conversions.place(key, plan.targets, convert=False)
        if own in plan.targets and own not in as_saved:
            as_saved[own] = key
        else:
            unplaced[key] = name
    jobs = [Job(name, tuple(keys), converter) for (name, _), (converter, keys) in uses.items()]
    return jobs, as_saved, unplaced


def _is_own(plan: LoadPlan, key: str, name: str, stock: torch.Tensor) -> bool:
    """Tell by its shape that a tensor with one name in both layouts is in the replacement's."""
    own = plan.targets.get(name)
    if own is None or own.shape == stock.shape:
        return False
    return file_tensor(plan.files[key]).shape == own.shape


def _made_by(
    plan: LoadPlan, jobs: Iterable[Job], sites: Mapping[str, LayoutSite]
) -> dict[str, Job]:
    """Return the job that makes each tensor of the stock model; two of them, or two keys for one, are a fault."""
    made_by: dict[str, Job] = {}
    for job in jobs:
        for name in job.names:
            others = [key for key, _ in made_by[name].keys] if name in made_by else []
            keys = [*others, *(key for key, _ in job.keys)]
            if name in sites and (others or (job.converter is None and len(keys) > 1)):
                twice = " and ".join(keys[:3])
                plan.complain(sites[name], f"{name}: the files hold it twice, as {twice}")
            made_by[name] = job
    return made_by


def _refuse_tied(plan: LoadPlan, model: Any, sites: Iterable[LayoutSite]) -> None:
    """Complain of layouts that move a tensor which the family ties to another by name."""
    pairs = tied_names(model)
    ends = [*pairs, *((other, one) for one, other in pairs)]
    for site in sites if ends else ():
        for name in map(site.full, site.moved):
            for end, other in ends:
                if re.fullmatch(end, name):
                    plan.complain(
                        site,
                        f"{name}: the model ties it to {other} by name, and the layout moves it. Leave it where it is, or "
                        f"set tie_word_embeddings=False",
                    )


# --- what a layout takes over -----------------------------------------------------------------------------------------


def _restructure(
    plan: LoadPlan,
    site: LayoutSite,
    layout: SiteLayout,
    made_by: Mapping[str, Job],
    as_saved: dict[str, str],
) -> None:
    """Plan how a site with a layout is filled.

    Args:
        plan: To be extended.
        site: The site.
        layout: Its layout.
        made_by: The job that makes each tensor of the stock model.
        as_saved: Keys in the replacement's layout by target; those that are used are taken out.
    """
    converted: list[tuple[Equation, list[Job]]] = []
    for equation in layout.equations:
        jobs = [made_by[name] for name in map(site.full, equation.sources) if name in made_by]
        if equation.is_kept and all(len(job.names) == 1 for job in jobs):
            continue  # Transformers fills it as it would in the stock model.
        targets = list(map(site.full, equation.targets))
        saved = {name: as_saved.pop(name) for name in targets if name in as_saved}
        if not jobs and len(saved) == len(targets):
            for name, key in saved.items():
                plan.take(key, name, "rename")
        elif saved or len(jobs) < len(equation.sources):
            _complain_of_sources(plan, site, equation, made_by, saved)
        else:
            converted.append((equation, jobs))
    for group in _grouped(site, converted):
        _settle(plan, group)
    for name in map(site.full, layout.created):
        if name in as_saved:
            plan.take(as_saved.pop(name), name, AS_IT_IS)


def _complain_of_sources(
    plan: LoadPlan,
    site: LayoutSite,
    equation: Equation,
    made_by: Mapping[str, Job],
    saved: Iterable[str],
) -> None:
    targets = list(map(site.full, equation.targets))
    for name in targets:
        plan.enter(name, "missing")
    for name in saved:
        plan.complain(site, f"{name}: the files hold it, and parts of {equation} besides")
    for name in equation.sources:
        if site.full(name) not in made_by:
            shape = list(site.original[name].shape)
            reason = f"in no file; {targets[0]} needs it: {equation}"
            plan.complain(site, f"{site.full(name)} {shape}: {reason}")


def _grouped(site: LayoutSite, converted: Iterable[tuple[Equation, list[Job]]]) -> list[Group]:
    """Put together what shares a job: its tensors are there at one time only."""
    by_job: dict[Job, Group] = {}
    for equation, own in converted:
        shared = list(dict.fromkeys(by_job[job] for job in own if job in by_job))
        jobs = dict.fromkeys([*(job for group in shared for job in group.jobs), *own])
        equations = [e for group in shared for e in group.equations]
        by_job |= dict.fromkeys(jobs, Group(site, tuple(jobs), (*equations, equation)))
    return list(dict.fromkeys(by_job.values()))


def _settle(plan: LoadPlan, group: Group) -> None:
    """Decide how a group is filled, if what the files hold fits."""
    site = group.site
    empty = plan.empty(group.keys)
    targets = list(map(site.full, group.targets))
    for name in targets:
        plan.enter(name, "missing")
    try:
        found = group.stock(pieced(empty), plan.conversions)
    except Exception as error:  # noqa: BLE001  # whatever a converter does with what a file holds
        plan.complain(site, f"{targets[0]}: {group.jobs[0].operation} failed: {error}")
        return
    sources = [name for equation in group.equations for name in equation.sources]
    fits = [
        plan.compare(site, site.full(n), group.keys, (found[n], site.original[n])) for n in sources
    ]
    if not all(fits):
        return
    if unmoved := _unconverted(group.fill(found), empty):
        for name, key in unmoved.items():
            plan.take(key, site.full(name), "rename")
        return
    plan.groups[targets[0]] = group
    plan.takes |= {plan.conversions.renamed(key): targets[0] for key in group.keys}
    before = ", ".join(dict.fromkeys(j.operation for j in group.jobs if j.converter is not None))
    for equation in group.equations:
        operation = f"{before}, then {equation}" if before else str(equation)
        made_from = {*map(site.full, equation.sources)}
        used = [job for job in group.jobs if made_from.intersection(job.names)]
        for name in equation.targets:
            plan.enter(site.full(name), operation, tuple(k for job in used for k, _ in job.keys))


def _unconverted(made: Tensors, empty: Tensors) -> dict[str, str] | None:
    """Return the key of each tensor if each comes out as it went in, or None.

    A converter may stack what the layout takes apart again.
    """
    key_of = {id(tensor): key for key, tensor in empty.items()}
    found = {name: key_of.get(id(source(tensor))) for name, tensor in made.items()}
    unmoved = {name: key for name, key in found.items() if key is not None}
    return unmoved if len(unmoved) == len(found) == len(empty) else None


# --- what is left to Transformers -------------------------------------------------------------------------------------


def _leave(plan: LoadPlan, job: Job) -> None:
    """Leave a job to Transformers; what it makes under a replaced site has to fit."""
    keys = tuple(key for key, _ in job.keys)
    names = [name for name in job.names if name in plan.targets]
    for name in names:
        plan.enter(name, job.operation, keys)
    owned = [name for name in names if name in plan.owners]
    if not owned:
        return
    try:
        made = job.run(plan.empty(keys), plan.conversions)
    except Exception as error:  # noqa: BLE001  # whatever a converter does with what a file holds
        plan.complain(plan.owners[owned[0]], f"{owned[0]}: {job.operation} failed: {error}")
        return
    for name in owned:
        if name in made:
            site = plan.owners[name]
            plan.compare(site, name, keys, (made[name], plan.targets[name]))
            if job.converter is not None and site.is_of_conversion(site.local(name)):
                _check_way_back(plan, site, job)


def _check_way_back(plan: LoadPlan, site: LayoutSite, job: Job) -> None:
    """Complain when a registered converter doesn't give the tensors of the files back bit for bit."""
    empty = plan.empty([key for key, _ in job.keys])
    reason = "its operations fail on random tensors"
    for scale in scales(dim for tensor in empty.values() for dim in tensor.shape):
        small = shrunk(empty, scale)
        try:
            back = plan.conversions.back(job.converter, job.run(small, plan.conversions))
        except NotImplementedError:
            reason = "it has no reverse_op"
            break
        except Exception as error:  # noqa: BLE001  # whatever an operation does with tensors of this size
            reason = str(error)
            continue
        if {*map(fingerprint, small.values())} == {*map(fingerprint, back)}:
            return
        given, taken = ([list(t.shape) for t in side] for side in (small.values(), back))
        reason = f"{given} come back as {taken}"
        break
    shapes = ", ".join(f"{key} {list(t.shape)}" for key, t in [*empty.items()][:3])
    plan.complain(
        site,
        f"{job.name}: {job.operation} doesn't give the files' tensors back bit for bit ({shapes}): {reason}",
    )


# --- what is missing, and what is left over ---------------------------------------------------------------------------


def _account_missing(plan: LoadPlan, model: Any, left_over: Mapping[str, LayoutSite]) -> None:
    """Enter the tensors that no file has."""
    missing = [name for name in plan.targets if name not in plan.entries]
    wanted, _ = not_ignored(model, {*missing}, set())
    for name in missing:
        site = plan.owners.get(name)
        if name not in wanted:
            operation = "tied or ignored"
        elif site is None:
            operation = "initialised"
        else:
            operation = site.without_file(site.local(name))
            if operation == "missing":
                plan.complain(site, _missing_text(plan, name, site, left_over))
        plan.enter(name, operation)


def _missing_text(
    plan: LoadPlan, name: str, site: LayoutSite, left_over: Mapping[str, LayoutSite]
) -> str:
    left = [key for key, above in left_over.items() if above is site]
    reason = (
        f"the files hold {', '.join(left[:3])} there, which nothing takes; a layout says how they belong together"
        if left
        else f"if it has none, {{{site.local(name)!r}: create}} in the layout, or a reset_parameters of its own, lets the "
        f"replacement initialise it"
    )
    return f"{name} {list(plan.targets[name].shape)}: in no file; {reason}"


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
