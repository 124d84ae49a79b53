"""Initial values under a replaced site.

Transformers initialises modules by the name and type of their class, so it knows nothing of a replacement, and loading
builds on the meta device, so what a constructor computed is lost. Here the replacement is asked first; then the
family's own initialisation has its turn; what neither wrote comes from building the replacement once more, and what
that leaves unwritten as well is an error.

A tensor has its value when it carries Transformers' mark, or was written in place since it was allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelpatch.errors import UninitializedError
from modelpatch.patch.construction import Site, site_of

_HAS_VALUE = (
    "_is_hf_initialized"  # on tensors and modules; what Transformers itself sets and honours
)


def initialise(module: nn.Module, by_family: Callable[..., None], *flags: Any) -> None:
    """Initialise the root of a replaced site, whose children are done.

    Args:
        module: The replacement.
        by_family: What Transformers would call for it.
        *flags: With what besides the module.

    Raises:
        UninitializedError: A tensor below it would keep memory that nobody wrote.
    """
    site = site_of(module)
    if site is None:
        by_family(module, *flags)
        return
    if vars(module).get(_HAS_VALUE):
        return
    own = own_initialiser(module, site)
    if own is None:
        _let_family(module, site, by_family, flags)
    else:
        _ask(module, own)
    vars(module)[_HAS_VALUE] = True
    complete(module)


def complete(module: nn.Module) -> None:
    """Give each tensor below a replaced site that has no value yet the one that the constructor gives it.

    Raises:
        UninitializedError: The constructor gives none either.
    """
    site = site_of(module)
    if site is None or site.args is None:
        return
    if all(_has_value(tensor, site) for _, _, tensor in _tensors(module)):
        return
    pending = {name: tensor for name, tensor in _named(module) if not _has_value(tensor, site)}
    built = _value_of(site, pending) if site.on_meta else _verdict_on(site)
    if built is None:
        return
    values, unwritten = built
    lost = [name for name in pending if name in unwritten or (site.on_meta and name not in values)]
    if lost:
        raise UninitializedError(
            f"{_names(site)}: {', '.join(lost)} is in no file, and nothing initialises it. Define "
            f"{site.rule.replacement.__name__}.reset_parameters, or give it a value in the constructor."
        )
    with torch.no_grad():
        for name, tensor in pending.items():
            if site.on_meta:
                tensor.copy_(values[name])
            setattr(tensor, _HAS_VALUE, True)


def own_initialiser(module: nn.Module, site: Site) -> Callable[[], None] | None:
    """Return `reset_parameters` where the replacement itself defines it."""
    if not hasattr(type(module), "reset_parameters"):
        return None
    for cls in type(module).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls in site.original.__mro__ or package in ("torch", "transformers"):
            return None
        if "reset_parameters" in vars(cls):
            return module.reset_parameters  # type: ignore[return-value]  # typed as a tensor
    return None


def _ask(module: nn.Module, own: Callable[[], None]) -> None:
    """Let the replacement initialise itself; what had been loaded stays as it was, however it writes."""
    before = {(id(owner), name): tensor for owner, name, tensor in _tensors(module)}
    loaded = [
        (owner, name, tensor, tensor.detach().clone())
        for owner, name, tensor in _tensors(module)
        if getattr(tensor, _HAS_VALUE, False)
    ]
    if before and len(loaded) == len(before):
        return
    with torch.no_grad(), _Writes() as writes:
        own()
    for owner, name, tensor in _tensors(module):
        if _storage(tensor) in writes.written or tensor is not before.get((id(owner), name)):
            setattr(tensor, _HAS_VALUE, True)
    with torch.no_grad():
        for owner, name, tensor, value in loaded:
            table: Any = owner._parameters if name in owner._parameters else owner._buffers
            table[name] = tensor
            tensor.copy_(value)


def _let_family(
    module: nn.Module, site: Site, by_family: Callable[..., None], flags: tuple[Any, ...]
) -> None:
    """Run the family's initialisation; it finds a dummy where the replacement dropped what the original has."""
    dummies: list[str] = []
    original: nn.Module | None = None
    try:
        while True:
            try:
                return by_family(module, *flags)
            except AttributeError as error:
                name = error.name
                if error.obj is not module or name is None or name in dummies or site.args is None:
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


_Built = tuple[dict[str, torch.Tensor], set[str]]


def _value_of(site: Site, pending: dict[str, torch.Tensor]) -> _Built:
    """Build the replacement again where its tensors had no memory, for their values."""
    try:
        return _build_again(site, "cpu")
    except Exception as error:
        raise UninitializedError(
            f"{_names(site)}: {', '.join(pending)} is in no file, and building another "
            f"{site.rule.replacement.__name__} from the same arguments for the value failed: {error}"
        ) from error


def _verdict_on(site: Site) -> _Built | None:
    """Build the replacement again to see what its constructor leaves unwritten, without a trace.

    Returns None where it can't be built twice: its arguments were used up, or it needs what is gone.
    """
    for device in ("meta", "cpu"):
        try:
            with torch.random.fork_rng(devices=[]):
                return _build_again(site, device)
        except Exception:  # noqa: BLE001, S112  # a constructor may want real tensors, or fail in its own way
            continue
    return None


def _build_again(site: Site, device: str) -> _Built:
    with torch.device(device), _Writes() as writes:
        fresh = site.build(site.rule.replacement)
    values = dict(_named(fresh))
    return values, {name for name, tensor in values.items() if _storage(tensor) in writes.unwritten}


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Tells which storages were written, and which came to be without a value.

    Holds the storages: otherwise one could be freed and another come to lie at the same address.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, torch.UntypedStorage] = {}
        self.unwritten: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _storages((args, kwargs)), _storages(result)
        if func._schema.is_mutable:
            for argument, schema in zip(args, func._schema.arguments, strict=False):
                if schema.alias_info is not None and schema.alias_info.is_write:
                    self.written |= _storages(argument)
            for storage in self.written:
                self.unwritten.pop(storage, None)
        elif "empty" in func._schema.name or (given and given.keys() <= self.unwritten.keys()):
            self.unwritten |= made  # a copy of nothing is nothing
        return result


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return {_storage(tensor): tensor.untyped_storage() for tensor in tensors}


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield owner, name and tensor for all below `module`, except in replaced sites inside, which are done."""
    modules = [module]
    for owner in modules:  # grows
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield owner, name, tensor
        modules += [
            child
            for child in owner._modules.values()
            if child is not None and site_of(child) is None
        ]


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and tensor for the same as `_tensors`."""
    paths = {id(inner): path for path, inner in module.named_modules()}
    for owner, name, tensor in _tensors(module):
        yield f"{paths[id(owner)]}.{name}".removeprefix("."), tensor


def _has_value(tensor: torch.Tensor, site: Site) -> bool:
    """Tell whether a tensor has a value, as far as one can see from outside."""
    if getattr(tensor, _HAS_VALUE, False) or tensor.is_meta or not tensor.numel():
        return True
    if not tensor.is_inference():
        return tensor._version > 0
    if site.on_meta:
        raise UninitializedError(
            f"{_names(site)} was loaded under torch.inference_mode, whose tensors don't tell whether they were written. "
            f"Load outside of it; the model may run inside."
        )
    return True


def _names(site: Site) -> str:
    return f"{site.rule.replacement.__name__} in the place of {site.original.__name__}"
