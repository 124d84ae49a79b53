"""Errors and warnings of modelpatch: one root, and each leaf is also the built-in that a caller expects."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 10


class ModelPatchError(Exception):
    """Root of all errors that modelpatch raises.

    Attributes:
        faults: Every fault of the operation, one sentence each. The message shows the first ten.
    """

    def __init__(self, message: str, *, faults: Sequence[str] = ()) -> None:
        self.faults: tuple[str, ...] = tuple(faults) or (message,)
        if faults:
            shown = "".join(f"\n  - {fault}" for fault in faults[:_SHOWN])
            rest = len(faults) - _SHOWN
            message = f"{message}{shown}" + (f"\n  ... and {rest} more" if rest > 0 else "")
        super().__init__(message)


class ArgumentError(ModelPatchError, ValueError):
    """An argument has the right type and a value that can't be used: nothing was changed."""


class ArgumentTypeError(ModelPatchError, TypeError):
    """An argument has the wrong type: nothing was changed."""


class ContainerMatchError(ModelPatchError, ValueError):
    """A pattern matches a class and also a class that this one builds: the model was not built.

    Attributes:
        container: Name of the outer class.
        inner: Names of the matching classes that it builds.
    """

    def __init__(self, message: str, *, container: str, inner: Sequence[str]) -> None:
        super().__init__(message)
        self.container = container
        self.inner = tuple(inner)


class LayoutError(ModelPatchError, ValueError):
    """A layout doesn't fit a site, or can't be taken back: nothing was loaded, saved or changed."""


class WeightsError(ModelPatchError, RuntimeError):
    """Weights and a patched model don't match: missing, unexpected, used twice, of a wrong shape or dtype.

    Nothing was loaded, and no model is returned. `patched(..., strict=False)` puts the faults into the ledger instead.
    """


class NothingReplacedError(ModelPatchError, LookupError):
    """A key of a `patched` block replaced nothing: what was built in the block is unpatched there."""


class EngineConflictError(ModelPatchError, RuntimeError):
    """Another library took `nn.Module.__new__` over, so that no patch could take effect. Nothing was changed."""


class NoReportError(ModelPatchError, LookupError):
    """The model was not built under patches in this process, so there is nothing to report."""


class UninitializedError(ModelPatchError, RuntimeError):
    """A tensor under a replaced site holds memory that nobody wrote: the model must not be used."""


class NothingReplacedWarning(UserWarning):
    """A model was built while patches were registered, and none of their keys matched.

    Compare the keys with the nearest class names in the message; use `patched(...)` to make this an error, or
    `unregister_patch_mapping` for keys that are meant for another model.
    """
