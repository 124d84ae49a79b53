"""Connects the engine to torch and Transformers, and takes it off again."""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from modelpatch import _transformers
from modelpatch.errors import EngineConflictError, WeightsError
from modelpatch.patch import construction, identity, loading, registry, scope
from modelpatch.patch.construction import Site
from modelpatch.patch.initialisation import complete, initialise
from modelpatch.patch.rules import Form, Key, Rule, key_text
from modelpatch.weights.layout import Layout

_lock = threading.Lock()
_undo: dict[
    str, _transformers.Undo
] = {}  # what is connected: "loading"; after install() "functions"
_taken: dict[str, type[nn.Module]] = {}  # registrations that were Transformers' before install()


def install(functions: Sequence[Callable[..., Any]]) -> None:
    """Exchange Transformers' functions of these names, and take its registrations over."""
    connect()
    with _lock:
        if "functions" in _undo:
            return
        theirs = _transformers.registered_there()
        _taken.update(registry.adopt(theirs))
        for key in _taken:
            del theirs[key]
        _undo["functions"] = _transformers.install_functions(functions)


def uninstall() -> None:
    """Undo `install` and `connect`.

    Raises:
        EngineConflictError: A block is open in this thread or task; nothing was changed.
    """
    if construction.active():
        raise EngineConflictError(
            "uninstall() inside an open block would leave it half applied. Leave the block first."
        )
    with _lock:
        for undo in reversed(_undo.values()):
            undo()
        _undo.clear()
        mine = registry.registered()
        _transformers.registered_there().update({k: v for k, v in _taken.items() if k in mine})
        _taken.clear()
        registry.clear()


@contextmanager
def connected(block: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `block` with the engine connected: it may have been uninstalled since the block was made."""
    connect()
    with block():
        yield


def connect() -> None:
    """Connect the engine to torch and Transformers, once."""
    with _lock:
        construction.install()
        if "loading" not in _undo:
            _undo["loading"] = _transformers.hook_loading(
                apply_patches=scope.registered,
                patch_output_recorders=_loaded,
                mark=construction.MARK,
                initialise=initialise,
                built=_built,
                stands_for=_stands_for,
                original_name=identity.original_name,
                load=loading.load,
                load_partitioned=loading.load_partitioned,
                revert=loading.revert,
                unreadable=_unreadable,
            )


@dataclass(frozen=True, slots=True)
class _PatchOfPickle:
    """What a pickled site keeps of its patch: `where` has had its say, and may not pickle."""

    name: str
    version: str
    layout: dict[type[nn.Module], Layout]
    allow_irreversible: bool


def _reduce(site: Site) -> tuple[Any, ...]:
    """Pickle a site as a plain string, or with what saving needs where its patch has a layout for it."""
    rule, original = site.rule, site.original
    layout = rule.patch.layout.get(rule.replacement) if rule.patch else None
    if rule.patch is None or layout is None or site.args is None:
        return str, (f"{rule.key_text}|{original.__module__}|{original.__qualname__}",)
    patch = _PatchOfPickle(
        rule.patch.name,
        rule.patch.version,
        {rule.replacement: dict(layout)},
        rule.patch.allow_irreversible,
    )
    return _restored, (rule.key, rule.replacement, patch, (original, site.args, site.kwargs))


def _restored(
    key: Key,
    replacement: type[nn.Module],
    patch: _PatchOfPickle,
    built_from: tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]],
) -> Site:
    """Undo `_reduce`; saving such a model comes through the engine."""
    connect()
    rule = Rule(key, replacement, Form.NAME, key_text=key_text(key), patch=patch)
    return Site(rule, None, *built_from, on_meta=False)


copyreg.pickle(Site, _reduce)


def _unreadable(path: Any, error: Exception) -> Exception:
    """Name the file that a patched load can't open; what a plain load raises stays as it is."""
    if not construction.active() and not registry.rules().rules:
        return error
    return WeightsError(f"{path} can't be read: {error}. It may be cut off; nothing was loaded.")


def _built(model: nn.Module) -> None:
    if scopes := construction.active():
        identity.follow(model, scopes)
        loading.accept_stock_state_dicts(model)
    complete(model)


def _loaded(model: nn.Module) -> None:
    """Finish a model that Transformers has constructed, unless its constructor came to its end itself."""
    scopes = construction.active()
    if not all(scope.rules in identity.built_under(model) for scope in scopes):
        identity.follow_all(model, scopes)
    loading.accept_stock_state_dicts(model)
    complete(model)


def _stands_for(module: nn.Module, original: type) -> bool:
    site = construction.site_of(module)
    return site is not None and issubclass(site.original, original)
