"""`install` gives code that was written for Transformers' own functions this engine, and `uninstall` takes it back."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Concatenate,
    LlamaForCausalLM,
    WeightConverter,
    conversion_mapping,
    monkey_patching,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import modelpatch
from modelpatch import get_patch_mapping, patched, register_patch_mapping, report
from modelpatch.testing import tiny_config, tiny_inputs, tiny_model

capturing = importlib.import_module("transformers.utils.output_capturing")
modeling_utils = importlib.import_module("transformers.modeling_utils")
FUNCTIONS = (
    "register_patch_mapping",
    "unregister_patch_mapping",
    "get_patch_mapping",
    "clear_patch_mapping",
    "apply_patches",
    "patch_output_recorders",
)


class MLP(LlamaMLP):
    pass


class OtherMLP(LlamaMLP):
    pass


class FusedAttention(LlamaAttention):
    """One projection for query, key and value, as in the specification."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sizes = [p.out_features for p in (self.q_proj, self.k_proj, self.v_proj)]
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)

    def forward(self, hidden_states, *args, **kwargs):
        for name, part in zip(
            "qkv", self.qkv_proj(hidden_states).split(self.sizes, dim=-1), strict=True
        ):
            self.__dict__[f"{name}_proj"] = lambda _, part=part: part
        return super().forward(hidden_states, *args, **kwargs)


@pytest.fixture(autouse=True)
def _uninstalled():
    modelpatch.uninstall()
    yield
    modelpatch.uninstall()
    monkey_patching.clear_patch_mapping()


def mlp(model):
    return type(model.base_model.layers[0].mlp)


def test_transformers_own_functions_become_ours_and_are_given_back():
    stock = {name: getattr(monkey_patching, name) for name in FUNCTIONS}

    modelpatch.install()
    modelpatch.install()

    assert all(
        getattr(monkey_patching, name).__wrapped__ is getattr(modelpatch, name)
        for name in FUNCTIONS
    )
    modelpatch.uninstall()
    modelpatch.uninstall()
    assert {name: getattr(monkey_patching, name) for name in FUNCTIONS} == stock


def test_modules_that_imported_a_function_by_value_are_served_and_given_back():
    library = types.ModuleType("a_library")
    library.register = stock = monkey_patching.register_patch_mapping
    sys.modules["a_library"] = library
    try:
        modelpatch.install()
        assert library.register.__wrapped__ is register_patch_mapping
        late = types.ModuleType("a_late_library")
        late.register = monkey_patching.register_patch_mapping
        late.ours = register_patch_mapping
        sys.modules["a_late_library"] = late
        modelpatch.uninstall()

        assert library.register is stock
        assert late.register is stock
        assert late.ours is modelpatch.register_patch_mapping is register_patch_mapping
    finally:
        sys.modules.pop("a_library", None)
        sys.modules.pop("a_late_library", None)


def test_transformers_own_users_of_the_registry_are_served():
    names = ["transformers.modeling_utils", "transformers.integrations.hub_kernels"]
    if importlib.util.find_spec("transformers.fusion_mapping"):  # not in 5.3
        names.append("transformers.fusion_mapping")
    bound = [
        (module, name, getattr(module, name))
        for module in map(importlib.import_module, names)
        for name in FUNCTIONS
        if hasattr(module, name)
    ]
    assert len(bound) >= 2

    modelpatch.install()
    assert not [name for module, name, stock in bound if getattr(module, name) is stock]

    modelpatch.uninstall()
    assert not [name for module, name, stock in bound if getattr(module, name) is not stock]


def test_registrations_made_with_transformers_before_move_here_and_back():
    monkey_patching.register_patch_mapping({"LlamaMLP": MLP, "Gone": MLP})

    modelpatch.install()
    assert get_patch_mapping() == {"LlamaMLP": MLP, "Gone": MLP}
    monkey_patching.unregister_patch_mapping(["Gone"])
    assert mlp(AutoModelForCausalLM.from_config(tiny_config("llama"))) is MLP
    modelpatch.uninstall()

    assert get_patch_mapping() == {}
    assert monkey_patching.get_patch_mapping() == {"LlamaMLP": MLP}


def test_registrations_made_here_and_there_both_apply_ours_first():
    monkey_patching.register_patch_mapping(
        {"LlamaMLP": OtherMLP, "LlamaAttention": FusedAttention, "LlamaMLP(": MLP}
    )
    register_patch_mapping({"LlamaMLP": MLP})

    model = AutoModelForCausalLM.from_config(tiny_config("llama"))

    assert mlp(model) is MLP
    assert type(model.model.layers[0].self_attn) is FusedAttention
    modelpatch.clear_patch_mapping()
    assert mlp(AutoModelForCausalLM.from_config(tiny_config("llama"))) is OtherMLP


def test_uninstalling_leaves_transformers_and_torch_as_they_were():
    owners = (
        modeling_utils,
        monkey_patching,
        conversion_mapping,
        capturing,
        importlib.import_module("transformers.initialization"),
    )
    before = [dict(vars(owner)) for owner in owners]
    applied = vars(nn.Module).get("smart_apply")

    modelpatch.install()
    register_patch_mapping({"LlamaMLP": MLP})
    AutoModelForCausalLM.from_config(tiny_config("llama"))
    modelpatch.uninstall()

    assert [dict(vars(owner)) for owner in owners] == before
    assert vars(nn.Module).get("smart_apply") is applied
    assert get_patch_mapping() == {}


def test_the_engine_works_again_after_it_was_uninstalled():
    modelpatch.install()
    modelpatch.uninstall()

    with patched({"LlamaMLP": MLP}):
        assert mlp(AutoModelForCausalLM.from_config(tiny_config("llama"))) is MLP


def test_the_recorder_registry_takes_class_strings():
    modelpatch.install()
    model = tiny_model("llama").model
    key = str(type(model))
    table = capturing._CAN_RECORD_REGISTRY.get(key, {})
    assert set(table) == {"hidden_states", "attentions"}

    added = {**table, "mixed": capturing.OutputRecorder(LlamaAttention, index=0)}
    capturing._CAN_RECORD_REGISTRY[key] = added
    try:
        assert len(model(**tiny_inputs(model), output_mixed=True).mixed) == 3
        assert capturing._CAN_RECORD_REGISTRY.get("no such class", "default") == "default"
    finally:
        capturing._CAN_RECORD_REGISTRY[key] = table


@pytest.mark.parametrize("parameter", ["model_type_or_class_name", "model_type"])
def test_a_conversion_is_registered_under_both_names_of_the_parameter(tmp_path, parameter):
    modelpatch.install()
    stock = tiny_model("llama", num_key_value_heads=4)
    stock.save_pretrained(tmp_path)
    register_patch_mapping({"LlamaAttention": FusedAttention})
    converter = WeightConverter(
        source_patterns=["q_proj", "k_proj", "v_proj"],
        target_patterns=["qkv_proj"],
        operations=[Concatenate(dim=0)],
    )

    conversion_mapping.register_checkpoint_conversion_mapping(
        **{parameter: "llama"}, mapping=[converter], overwrite=True
    )
    try:
        model = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache.pop("llama")

    assert {site.replacement for site in report(model).replaced} == {"FusedAttention"}
    torch.testing.assert_close(
        model(**tiny_inputs(stock)).logits, stock(**tiny_inputs(stock)).logits
    )


def test_a_block_made_before_uninstalling_connects_the_engine_when_it_is_entered(tmp_path):
    class Steps(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("steps", torch.arange(1.0, 4.0), persistent=False)

    tiny_model("llama").save_pretrained(tmp_path)
    block = patched({"LlamaMLP": Steps})
    modelpatch.uninstall()

    with block:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert model.model.layers[0].mlp.steps.tolist() == [1, 2, 3]


def test_uninstalling_inside_a_block_is_refused():
    with patched({"LlamaMLP": MLP}):
        with pytest.raises(modelpatch.EngineConflictError, match="Leave the block first"):
            modelpatch.uninstall()
        assert mlp(AutoModelForCausalLM.from_config(tiny_config("llama"))) is MLP


def test_apply_patches_alone_applies_what_was_registered_with_transformers():
    monkey_patching.register_patch_mapping({"LlamaMLP": MLP})

    with modelpatch.apply_patches():
        model = LlamaForCausalLM(tiny_config("llama"))

    assert mlp(model) is MLP


def test_a_key_registered_on_both_sides_is_cleared_on_both_by_one_call():
    monkey_patching.register_patch_mapping({"LlamaMLP": OtherMLP})
    register_patch_mapping({"LlamaMLP": MLP})
    modelpatch.install()
    assert get_patch_mapping() == {"LlamaMLP": MLP}

    modelpatch.clear_patch_mapping()

    assert mlp(AutoModelForCausalLM.from_config(tiny_config("llama"))) is LlamaMLP
    modelpatch.uninstall()
    assert monkey_patching.get_patch_mapping() == {}


def test_a_registration_that_was_overwritten_here_is_given_back_as_it_was():
    monkey_patching.register_patch_mapping({"LlamaMLP": OtherMLP})
    modelpatch.install()
    register_patch_mapping({"LlamaMLP": MLP}, overwrite=True)

    modelpatch.uninstall()

    assert monkey_patching.get_patch_mapping() == {"LlamaMLP": OtherMLP}
