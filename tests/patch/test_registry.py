"""The global registry: the specification's functions, all or nothing."""

from __future__ import annotations

import inspect
import warnings

import pytest
from transformers import AutoModelForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralAttention

import modelpatch
from modelpatch import (
    ArgumentError,
    NothingReplacedWarning,
    apply_patches,
    clear_patch_mapping,
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)
from modelpatch.testing import tiny_config, tiny_model


class Attention(LlamaAttention):
    pass


class OtherAttention(LlamaAttention):
    pass


class AnyAttention(MistralAttention):
    pass


@pytest.fixture(autouse=True)
def _empty_registry():
    yield
    clear_patch_mapping()


def attention(model):
    return type(model.base_model.layers[0].self_attn)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        ("register_patch_mapping", "(mapping, overwrite=False)"),
        ("unregister_patch_mapping", "(keys)"),
        ("get_patch_mapping", "()"),
        ("clear_patch_mapping", "()"),
        ("apply_patches", "()"),
        ("patch_output_recorders", "(model)"),
    ],
)
def test_signatures_are_the_specifications(function, parameters):
    signature = inspect.signature(getattr(modelpatch, function))

    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == parameters


def test_registered_patches_reach_from_pretrained_and_from_config(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    register_patch_mapping(mapping={"LlamaAttention": Attention})

    assert attention(AutoModelForCausalLM.from_pretrained(tmp_path)) is Attention
    assert attention(AutoModelForCausalLM.from_config(tiny_config("llama"))) is Attention
    assert attention(LlamaModel.from_pretrained(tmp_path)) is Attention


def test_manual_construction_needs_the_block():
    register_patch_mapping(mapping={"LlamaAttention": Attention})

    with apply_patches():
        inside = LlamaModel(tiny_config("llama"))
    outside = LlamaModel(tiny_config("llama"))

    assert attention(inside) is Attention
    assert attention(outside) is LlamaAttention


def test_an_exact_name_beats_a_pattern():
    register_patch_mapping({".*Attention": AnyAttention, "LlamaAttention": Attention})

    assert attention(AutoModelForCausalLM.from_config(tiny_config("llama"))) is Attention
    assert attention(AutoModelForCausalLM.from_config(tiny_config("mistral"))) is AnyAttention


def test_a_key_is_registered_once_unless_overwritten():
    register_patch_mapping({"LlamaAttention": Attention})

    with pytest.raises(
        ValueError, match=r"'LlamaAttention' already has a patch mapping.*overwrite=True"
    ):
        register_patch_mapping({"LlamaAttention": OtherAttention})
    assert get_patch_mapping() == {"LlamaAttention": Attention}

    register_patch_mapping({"LlamaAttention": OtherAttention}, overwrite=True)
    assert get_patch_mapping() == {"LlamaAttention": OtherAttention}


@pytest.mark.parametrize(
    ("third", "error"),
    [
        ({"Third": "no class"}, TypeError),
        ({"Third": dict}, TypeError),
        ({"Th(ird": Attention}, ValueError),
    ],
)
def test_a_bad_third_entry_leaves_the_first_two_unregistered(third, error):
    with pytest.raises(error):
        register_patch_mapping({"First": Attention, "Second": Attention, **third})

    assert get_patch_mapping() == {}


def test_a_taken_third_key_leaves_the_first_two_unregistered():
    register_patch_mapping({"Third": Attention})

    with pytest.raises(ArgumentError):
        register_patch_mapping({"First": Attention, "Second": Attention, "Third": Attention})

    assert get_patch_mapping() == {"Third": Attention}


def test_unregistering_takes_the_keys_as_registered_all_or_none():
    register_patch_mapping({"A": Attention, ".*B": Attention, LlamaMLP: type("M", (LlamaMLP,), {})})

    with pytest.raises(
        ValueError, match=r"'C' is not registered, so it can't be removed. Registered: 'A', '\.\*B'"
    ):
        unregister_patch_mapping(["A", "C"])
    assert len(get_patch_mapping()) == 3

    unregister_patch_mapping(keys=["A", ".*B", LlamaMLP])
    assert get_patch_mapping() == {}


def test_a_single_string_to_unregister_is_refused():
    with pytest.raises(TypeError, match=r"did you mean \['LlamaAttention'\]"):
        unregister_patch_mapping("LlamaAttention")


def test_the_mapping_that_is_returned_is_a_copy():
    register_patch_mapping({"LlamaAttention": Attention})

    get_patch_mapping().clear()

    assert get_patch_mapping() == {"LlamaAttention": Attention}


def test_a_load_that_matches_no_key_warns_once_with_suggestions():
    register_patch_mapping({"LlamaAtention": Attention, "Bert": Attention})

    with pytest.warns(NothingReplacedWarning) as caught:
        AutoModelForCausalLM.from_config(tiny_config("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_config(tiny_config("llama"))

    assert len(caught) == 1
    assert str(caught[0].message) == (
        "No registered key matched the model:\n"
        "  - Key 'LlamaAtention' replaced nothing. Nearest classes that were built: LlamaAttention.\n"
        "  - Key 'Bert' replaced nothing. No class that was built has a similar name."
    )


def test_a_load_warns_again_after_the_registry_has_changed():
    register_patch_mapping({"Wrong": Attention})
    with pytest.warns(NothingReplacedWarning):
        AutoModelForCausalLM.from_config(tiny_config("llama"))

    register_patch_mapping({"WrongToo": Attention})
    with pytest.warns(NothingReplacedWarning):
        AutoModelForCausalLM.from_config(tiny_config("llama"))


def test_a_load_that_matches_one_key_of_several_is_silent():
    register_patch_mapping({"Wrong": Attention, "LlamaAttention": Attention})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_config(tiny_config("llama"))


def test_a_registration_inside_a_block_reaches_the_loads_after_it():
    register_patch_mapping({"LlamaMLP": type("M", (LlamaMLP,), {})})

    with apply_patches():
        register_patch_mapping({"LlamaAttention": Attention})
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))

    assert attention(model) is Attention
    assert type(model.model.layers[0].mlp).__name__ == "M"


def test_a_tower_that_matches_nothing_does_not_warn_for_the_whole():
    register_patch_mapping({"LlamaMLP": type("M", (LlamaMLP,), {})})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny_model("llava")  # by hand: its constructor configures one tower after the other

    assert type(model.model.language_model.layers[0].mlp).__name__ == "M"


def test_the_warning_points_at_the_line_that_loads():
    register_patch_mapping({"Wrong": Attention})

    with pytest.warns(NothingReplacedWarning) as caught:
        AutoModelForCausalLM.from_config(tiny_config("llama"))

    assert caught[0].filename == __file__


def test_a_class_to_unregister_outside_of_a_list_is_refused():
    with pytest.raises(TypeError, match="did you mean"):
        unregister_patch_mapping(LlamaMLP)
