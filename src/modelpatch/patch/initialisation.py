"""Initial values under a replaced site.

Transformers initialises modules by the name and type of their class, so it knows nothing of a replacement, and loading
builds on the meta device, so what a constructor computed is lost. Here the replacement is asked first; then the
family's own initialisation has its turn; what neither wrote comes from building the replacement once more, and what
that leaves unwritten as well is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelpatch.errors import UninitializedError
from modelpatch.patch.construction import Site, site_of

_UNWRITTEN: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def initialise(module: nn.Module, by_family: Callable[[], None]) -> None:
    """Initialise one module whose children are done: by its family, unless it is a replacement.

    Args:
        module: The module; of a replaced site its root.
        by_family: What Transformers would do for it.

    Raises:
        UninitializedError: A tensor below a replaced site would keep memory that nobody wrote.
    """
    site = site_of(module)
    if site is None:
        by_family()
        return
    if getattr(module, "_is_hf_initialized", False):
        return
    own = _own_initialiser(module, site)
    if own is not None:
        _ask(module, own)
    else:
        _let_family(module, site, by_family)
    module._is_hf_initialized = True  # type: ignore[assignment]  # the mark Transformers itself sets
    _complete(module, site)


def _let_family(module: nn.Module, site: Site, by_family: Callable[[], None]) -> None:
    """Run the family's initialisation; it finds a dummy where the replacement dropped what the original has."""
    dummies: list[str] = []
    original: nn.Module | None = None
    try:
        while True:
            try:
                return by_family()
            except AttributeError as error:
                name = error.name
                if error.obj is not module or name is None or name in dummies:
                    raise
                if original is None:
                    with torch.device("meta"):
                        original = site.build(site.original)
                if not hasattr(original, name):
                    raise
                vars(module)[name] = getattr(original, name)
                dummies.append(name)
    finally:
        for name in dummies:
            del vars(module)[name]


def _own_initialiser(module: nn.Module, site: Site) -> Callable[[], None] | None:
    """Return `reset_parameters` where the replacement itself defines it."""
    for cls in type(module).__mro__:
        if cls in site.original.__mro__ or cls.__module__.partition(".")[0] in (
            "torch",
            "transformers",
        ):
            return None
        if "reset_parameters" in vars(cls):
            return module.reset_parameters  # type: ignore[return-value]  # nn.Module types attributes as tensors
    return None


def _ask(module: nn.Module, own: Callable[[], None]) -> None:
    loaded = {
        name: tensor
        for name, tensor in _own_tensors(module)
        if getattr(tensor, "_is_hf_initialized", False)
    }
    before = {name: tensor._version for name, tensor in loaded.items()}
    if len(loaded) == len(list(_own_tensors(module))):
        return
    with torch.no_grad():
        own()
    changed = [name for name, tensor in loaded.items() if tensor._version != before[name]]
    if changed:
        raise UninitializedError(
            f"{type(module).__name__}.reset_parameters overwrote {', '.join(changed)}, which had been loaded. Use the "
            f"functions of torch.nn.init there: they leave loaded tensors alone."
        )


def _complete(module: nn.Module, site: Site) -> None:
    """Give each tensor that nobody wrote since its allocation the value the constructor gives it."""
    pending = dict(_pending(module, site))
    if not pending:
        return
    cls = type(module)
    unwritten = _UNWRITTEN.get(cls)
    values: dict[str, torch.Tensor] = {}
    if site.on_meta or unwritten is None:
        # Without a meta device the values are there already, and the random stream stays as it was.
        with nullcontext() if site.on_meta else torch.random.fork_rng(devices=[]):
            values, unwritten = _constructed(cls, site)
        _UNWRITTEN[cls] = unwritten
    lost = [name for name in pending if name in unwritten or (site.on_meta and name not in values)]
    if lost:
        raise UninitializedError(
            f"{cls.__name__} in the place of {site.original.__name__}: {', '.join(lost)} is in no file, and nothing "
            f"initialises it. Define {cls.__name__}.reset_parameters, or give it a value in the constructor."
        )
    if site.on_meta:
        with torch.no_grad():
            for name, tensor in pending.items():
                tensor.copy_(values[name])


def _constructed(
    cls: type[nn.Module], site: Site
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Build the replacement once more, on the CPU; return its tensors and the names of those left unwritten."""
    mode = _Unwritten()
    with torch.device("cpu"), mode:
        fresh = site.build(cls)
    values = dict(_all_tensors(fresh))
    return values, frozenset(
        name for name, tensor in values.items() if _storage(tensor) in mode.storages
    )


class _Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Keeps the storages that came from an `empty` and were not written since."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        outputs = {_storage(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        if func._schema.is_mutable:
            self.storages -= inputs
        elif "empty" in func._schema.name:
            self.storages |= outputs
        else:
            self.storages -= (
                outputs - inputs
            )  # a new tensor with a value, perhaps where an old one lay
        return result


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _all_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors below `module`, except those of replaced sites inside, which are done."""
    for name, tensor in _own_tensors(module):
        yield prefix + name, tensor
    for name, child in module.named_children():
        if site_of(child) is None:
            yield from _all_tensors(child, f"{prefix}{name}.")


def _pending(module: nn.Module, site: Site) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that were neither loaded nor written in place."""
    for name, tensor in _all_tensors(module):
        if getattr(tensor, "_is_hf_initialized", False) or tensor.is_meta or not tensor.numel():
            continue
        if not tensor.is_inference():
            if tensor._version == 0:
                yield name, tensor
        elif site.on_meta:
            raise UninitializedError(
                f"{type(module).__name__} was loaded under torch.inference_mode, whose tensors don't tell whether "
                f"{name} was written. Load outside of it; the model may run inside."
            )
