"""Restructure Hugging Face Transformers models while they are built, and prove that nothing else changed."""

from modelpatch.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContainerMatchError,
    EngineConflictError,
    LayoutError,
    ModelPatchError,
    NoReportError,
    NothingReplacedError,
    NothingReplacedWarning,
    UninitializedError,
    WeightsError,
)
from modelpatch.patch.api import (
    Patch,
    apply_patches,
    clear_patch_mapping,
    get_patch_mapping,
    install,
    patch_output_recorders,
    patched,
    register_patch_mapping,
    uninstall,
    unregister_patch_mapping,
)
from modelpatch.patch.loading import ledger
from modelpatch.patch.report import PatchReport, report
from modelpatch.weights.ledger import Ledger

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ContainerMatchError",
    "EngineConflictError",
    "LayoutError",
    "Ledger",
    "ModelPatchError",
    "NoReportError",
    "NothingReplacedError",
    "NothingReplacedWarning",
    "Patch",
    "PatchReport",
    "UninitializedError",
    "WeightsError",
    "apply_patches",
    "clear_patch_mapping",
    "get_patch_mapping",
    "install",
    "ledger",
    "patch_output_recorders",
    "patched",
    "register_patch_mapping",
    "report",
    "uninstall",
    "unregister_patch_mapping",
]
