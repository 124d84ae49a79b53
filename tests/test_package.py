"""The package as a whole: what it exports, what importing it does, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import modelpatch

SOURCE = Path(modelpatch.__file__).parent
# What each part may import from the package; `patch/weights` and others join as they come.
ARROWS = {
    "errors": set(),
    "_transformers": set(),
    "testing": {"errors"},
    "weights.expressions": {"errors"},
    "weights.equations": {"weights.expressions"},
    "weights.trials": {"weights.equations", "weights.expressions"},
    "weights.mosaic": set(),
    "weights.layout": {
        "errors",
        "weights.equations",
        "weights.expressions",
        "weights.trials",
    },
    "weights.sites": {"errors", "weights.equations", "weights.trials"},
    "weights.ledger": set(),
    "weights.registered": {
        "_transformers",
        "weights.equations",
        "weights.expressions",
        "weights.trials",
    },
    "weights.plan": {
        "_transformers",
        "weights.equations",
        "weights.expressions",
        "weights.ledger",
        "weights.mosaic",
        "weights.sites",
    },
    "weights.loading": {
        "_transformers",
        "weights.equations",
        "weights.expressions",
        "weights.ledger",
        "weights.mosaic",
        "weights.plan",
        "weights.sites",
        "weights.trials",
    },
    "weights.saving": {
        "errors",
        "weights.equations",
        "weights.expressions",
        "weights.mosaic",
        "weights.sites",
    },
    "weights.receiving": {"errors", "weights.equations", "weights.sites"},
    "patch.rules": {"errors", "weights.layout"},
    "patch.construction": {"errors", "patch.rules"},
    "patch.registry": {"errors", "_transformers", "patch.rules"},
    "patch.initialisation": {"errors", "patch.construction"},
    "patch.sites": {
        "errors",
        "_transformers",
        "patch.construction",
        "patch.initialisation",
        "weights.layout",
        "weights.registered",
        "weights.sites",
    },
    "patch.identity": {
        "errors",
        "_transformers",
        "patch.construction",
        "patch.rules",
        "patch.sites",
    },
    "patch.scope": {
        "errors",
        "_transformers",
        "patch.construction",
        "patch.identity",
        "patch.initialisation",
        "patch.loading",
        "patch.registry",
        "patch.rules",
    },
    "patch.loading": {
        "errors",
        "_transformers",
        "patch.identity",
        "patch.sites",
        "weights.ledger",
        "weights.loading",
        "weights.receiving",
        "weights.saving",
        "weights.sites",
    },
    "patch.report": {
        "errors",
        "_transformers",
        "patch.identity",
        "patch.loading",
        "patch.rules",
        "patch.sites",
        "weights.ledger",
    },
    "patch.engine": {
        "errors",
        "_transformers",
        "patch.construction",
        "patch.identity",
        "patch.initialisation",
        "patch.loading",
        "patch.registry",
        "patch.rules",
        "patch.scope",
        "weights.layout",
    },
    "patch.api": {
        "errors",
        "_transformers",
        "patch.construction",
        "patch.engine",
        "patch.identity",
        "patch.registry",
        "patch.rules",
        "patch.scope",
        "weights.layout",
    },
}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if not name.endswith("__init__"):
            yield name, path


def imported(path):
    """Modules of this package and of Transformers that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_point_one_way(name, path):
    known = {f"modelpatch.{module}" for module in ARROWS}

    found = {module.removeprefix("modelpatch.") for module in imported(path) if module in known}

    assert found <= ARROWS[name]


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_one_file_alone_knows_transformers(name, path):
    inside = (
        "transformers.modeling_utils",
        "transformers.monkey_patching",
        "transformers.conversion_mapping",
    )

    found = [module for module in imported(path) if module.startswith("transformers")]

    assert not found or name == "testing"  # for its annotations
    assert name == "_transformers" or not any(
        f'"{module}"' in path.read_text() for module in inside
    )


def test_the_public_names_are_these():
    assert set(modelpatch.__all__) == {
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
    }


def test_importing_changes_nothing_and_imports_no_transformers():
    script = """
import sys, torch
from torch import nn
before, modules = dict(vars(nn.Module)), set(sys.modules)
import modelpatch
assert dict(vars(nn.Module)) == before
assert "transformers" not in sys.modules
assert {m for m in set(sys.modules) - modules if m.startswith("torch.distributed")} == set()
print("clean")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert done.stdout == "clean\n", done.stderr


def test_every_error_is_ours_and_a_built_in_one():
    errors = [getattr(modelpatch, name) for name in modelpatch.__all__ if name.endswith("Error")]

    for error in errors:
        assert issubclass(error, modelpatch.ModelPatchError)
        assert error is modelpatch.ModelPatchError or issubclass(
            error, (ValueError, TypeError, LookupError, RuntimeError)
        )
