"""The public test helpers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from modelpatch.errors import ArgumentError
from modelpatch.testing import FAMILIES, tiny_config, tiny_inputs, tiny_model

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
MODES = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")


def outputs(model: Any, **arguments: Any) -> Any:
    """Run a model on its tiny inputs."""
    with torch.no_grad():
        return model(**tiny_inputs(model), **arguments)


@EVERY_FAMILY
def test_a_family_is_named_by_its_model_type(family: str) -> None:
    config = tiny_config(family)

    assert config.model_type == family


@EVERY_FAMILY
def test_a_model_is_small_float32_and_in_evaluation_mode(family: str) -> None:
    model = tiny_model(family)

    assert not any(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000


@EVERY_FAMILY
def test_two_builds_are_bit_identical_and_leave_the_random_state_alone(family: str) -> None:
    before = torch.get_rng_state()
    first = tiny_model(family)
    torch.rand(1)
    second = tiny_model(family)
    torch.set_rng_state(before)
    tiny_model(family)

    assert torch.equal(torch.get_rng_state(), before)
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(a, second.state_dict()[k]) for k, a in first.state_dict().items())
    assert torch.equal(outputs(first)[0], outputs(second)[0])


@EVERY_FAMILY
def test_inputs_are_new_at_each_call_and_always_the_same(family: str) -> None:
    model = tiny_model(family)
    first, second = tiny_inputs(model), tiny_inputs(model)

    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(value is not second[name] for name, value in first.items())


@EVERY_FAMILY
def test_rows_differ_and_every_output_is_finite(family: str) -> None:
    result = outputs(tiny_model(family))[0]

    assert torch.isfinite(result).all()
    assert not torch.allclose(result[0], result[1], atol=1e-2)


@EVERY_FAMILY
def test_a_change_in_any_parameter_that_is_used_shows_in_the_output(family: str) -> None:
    model = tiny_model(family)
    model(**tiny_inputs(model))[0].square().sum().backward()
    used = {name: p for name, p in model.named_parameters() if p.grad is not None}
    silent = [name for name, p in used.items() if not p.grad.abs().max() > 0]

    # Softmax ignores a constant that is added to all its scores, so a key bias never shows.
    assert [name for name in silent if "k" not in name.split(".")[-2]] == []


@EVERY_FAMILY
def test_a_model_returns_all_hidden_states_and_attentions(family: str) -> None:
    result = outputs(tiny_model(family), output_hidden_states=True, output_attentions=True)
    attentions = {mode: result[mode] for mode in MODES if result.get(mode)}

    assert attentions
    for mode, values in attentions.items():
        states = mode.replace("cross", "decoder").replace("attentions", "hidden_states")
        assert len(result[states]) == len(values) + 1
        assert all(value is not None for value in values)


@EVERY_FAMILY
def test_a_model_builds_without_weights_on_the_meta_device(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family)

    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@EVERY_FAMILY
def test_inputs_follow_the_dtype_of_the_model(family: str) -> None:
    model = tiny_model(family).bfloat16()

    assert outputs(model)[0].dtype == torch.bfloat16


def test_there_are_families_of_every_kind() -> None:
    assert {family.inputs for family in FAMILIES.values()} == {
        "text",
        "text_pair",
        "image",
        "image_text",
        "patches_text",
    }
    assert len(FAMILIES) >= 15


def test_families_can_not_be_edited() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        FAMILIES["bert"] = FAMILIES["llama"]  # type: ignore[index]


def test_weights_follow_from_name_and_shape_alone() -> None:
    shallow, deep = tiny_model("llama", num_hidden_layers=1), tiny_model("llama")
    shared = deep.state_dict()

    assert all(torch.equal(value, shared[name]) for name, value in shallow.state_dict().items())
    assert not torch.equal(
        shared["model.layers.0.mlp.up_proj.weight"], shared["model.layers.1.mlp.up_proj.weight"]
    )


def test_an_override_wins_over_the_field_of_the_family() -> None:
    model = tiny_model("llama", num_hidden_layers=1, attn_implementation="sdpa")

    assert len(model.model.layers) == 1
    assert model.config._attn_implementation == "sdpa"


def test_an_override_may_use_the_other_name_of_a_field() -> None:
    assert tiny_config("mixtral", num_experts=4).num_local_experts == 4


def test_an_override_of_a_sub_config_is_merged_into_the_tiny_one() -> None:
    config = tiny_config("llava", text_config={"num_hidden_layers": 1})

    assert config.text_config.num_hidden_layers == 1
    assert config.text_config.hidden_size == 32


def test_a_sub_config_may_be_of_another_family() -> None:
    by_type = tiny_config("llava", text_config={"model_type": "mistral", "sliding_window": 4})
    by_object = tiny_config("llava", text_config=tiny_config("mistral"))

    assert type(by_type.text_config).__name__ == "MistralConfig"
    assert type(by_object.text_config).__name__ == "MistralConfig"


def test_an_unknown_family_names_the_nearest_and_all_others() -> None:
    with pytest.raises(ArgumentError) as raised:
        tiny_model("qwen3moe")

    assert str(raised.value) == (
        "There is no tiny model of the family 'qwen3moe'. Did you mean 'qwen3_moe'? "
        f"Families: {', '.join(FAMILIES)}."
    )


def test_every_unknown_field_is_listed_with_its_path_and_the_nearest() -> None:
    with pytest.raises(ArgumentError) as raised:
        tiny_model("llava", text_config={"num_layer": 1, "to_dict": 2}, image_token_indexes=3)

    assert raised.value.faults == (
        "'text_config.num_layer' is no field of LlamaConfig; did you mean 'text_config.num_hidden_layers'?",
        "'text_config.to_dict' is no field of LlamaConfig",
        "'image_token_indexes' is no field of LlavaConfig; did you mean 'image_token_index'?",
    )


def test_the_fields_of_a_sub_config_of_another_family_are_checked_too() -> None:
    with pytest.raises(ArgumentError, match=r"'text_config\.windows' is no field of MistralConfig"):
        tiny_config("llava", text_config={"model_type": "mistral", "windows": 4})


def test_inputs_for_a_model_of_no_known_family_are_refused() -> None:
    model = tiny_model("llama")
    model.config.model_type = "mamba"

    with pytest.raises(ArgumentError, match="no tiny model of the family 'mamba'"):
        tiny_inputs(model)


def test_weights_are_float32_whatever_the_default_dtype_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_model("llama")
    finally:
        torch.set_default_dtype(torch.float32)

    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def test_the_import_does_not_import_transformers() -> None:
    code = "import sys, modelpatch.testing; sys.exit('transformers' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
