"""Restructure Hugging Face Transformers models while they are built, and prove that nothing else changed."""

from modelpatch.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContainerMatchError,
    EngineConflictError,
    ModelPatchError,
    NoReportError,
    NothingReplacedError,
    NothingReplacedWarning,
    UninitializedError,
)
from modelpatch.patch.api import (
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
from modelpatch.patch.report import PatchReport, report
from modelpatch.patch.rules import Patch

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ContainerMatchError",
    "EngineConflictError",
    "ModelPatchError",
    "NoReportError",
    "NothingReplacedError",
    "NothingReplacedWarning",
    "Patch",
    "PatchReport",
    "UninitializedError",
    "apply_patches",
    "clear_patch_mapping",
    "get_patch_mapping",
    "install",
    "patch_output_recorders",
    "patched",
    "register_patch_mapping",
    "report",
    "uninstall",
    "unregister_patch_mapping",
]
