"""What a key reaches: every place that a class can be built from, and no class that it does not name."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, dynamic_module_utils
from transformers.activations import ACT2FN, GELUActivation
from transformers.models.deprecated import __path__ as _  # noqa: F401
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel, LlamaRMSNorm

from modelpatch import apply_patches, clear_patch_mapping, patched, register_patch_mapping
from modelpatch.testing import tiny_config, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
