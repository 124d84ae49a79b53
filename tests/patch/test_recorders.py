"""Hidden states and attentions: a patched model returns its own, and a plain one of the family all of its."""

from __future__ import annotations

import copy
import importlib
import pickle
import pickletools

import pytest
import torch
from torch import nn
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

import modelpatch
from modelpatch import (
    apply_patches,
    patch_output_recorders,
    patched,
    register_patch_mapping,
    report,
)
from modelpatch.testing import tiny_config, tiny_inputs, tiny_model

OUTPUTS = (
    "hidden_states",
    "attentions",
    "encoder_hidden_states",
    "encoder_attentions",
    "decoder_hidden_states",
)
# The layer and the attention whose outputs the family returns.
RECORDED = {
    "bert": ("BertLayer", "BertSelfAttention"),
    "roberta": ("RobertaLayer", "RobertaSelfAttention"),
    "vit": ("ViTLayer", "ViTAttention"),
    "llama": ("LlamaDecoderLayer", "LlamaAttention"),
    "mistral": ("MistralDecoderLayer", "MistralAttention"),
    "qwen3": ("Qwen3DecoderLayer", "Qwen3Attention"),
    "gpt_neox": ("GPTNeoXLayer", "GPTNeoXAttention"),
    "t5": ("T5Block", "T5Attention"),
    "qwen2_moe": ("Qwen2MoeDecoderLayer", "Qwen2MoeAttention"),
    "qwen3_moe": ("Qwen3MoeDecoderLayer", "Qwen3MoeAttention"),
    "mixtral": ("MixtralDecoderLayer", "MixtralAttention"),
    "llava": ("LlamaDecoderLayer", "LlamaAttention"),
}


def wrapper_of(original):
    """A class that is no subclass of the original, holds one and passes through to it, attributes included."""

    class Wrapper(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            self.inner = original(*args, **kwargs)

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    return Wrapper


def outputs_of(model):
    with torch.no_grad():
        out = model(**tiny_inputs(model), output_hidden_states=True, output_attentions=True)
    return {name: out[name] for name in OUTPUTS if out.get(name) is not None}


def assert_same(got, expected):
    assert {k: len(v) for k, v in got.items()} == {k: len(v) for k, v in expected.items()}
    for name, tensors in expected.items():
        for a, b in zip(got[name], tensors, strict=True):
            assert torch.equal(a, b), name


def classes_of(family):
    modules = {type(m).__name__: type(m) for m in tiny_model(family).modules()}
    return [modules[name] for name in RECORDED[family] if name in modules]


@pytest.mark.parametrize("family", RECORDED)
def test_patched_and_fresh_plain_models_return_all_hidden_states_and_attentions(family):
    originals = classes_of(family)
    assert originals, "the family's classes were renamed"
    expected = outputs_of(tiny_model(family))
    assert expected["encoder_hidden_states" if family == "t5" else "hidden_states"]

    with patched({original: wrapper_of(original) for original in originals}):
        model = tiny_model(family)
    model.load_state_dict(wrapped_weights(tiny_model(family), model))

    assert_same(outputs_of(model), expected)
    assert_same(outputs_of(tiny_model(family)), expected)


def wrapped_weights(stock, model):
    """The weights of a stock model under the names they have behind wrappers."""
    values = stock.state_dict()
    return {name: values[name.replace(".inner.", ".")] for name in model.state_dict()}


def test_a_wrapper_returns_its_own_states_and_not_those_of_what_it_holds():
    class Doubled(nn.Module):
        def __init__(self, config, layer_idx):
            super().__init__()
            self.inner = LlamaDecoderLayer(config, layer_idx)

        def forward(self, *args, **kwargs):
            return 2 * self.inner(*args, **kwargs)

    with patched({"LlamaDecoderLayer": Doubled}):
        model = tiny_model("llama").model
    inputs = tiny_inputs(model)
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _m, _a, out: seen.append(out))

    states = model(**inputs, output_hidden_states=True).hidden_states

    assert len(states) == 4
    for got, expected in zip(states[1:-1], seen[:-1], strict=True):
        assert torch.equal(got, expected)


def test_recorder_tables_of_the_class_are_as_before():
    with patched({"LlamaDecoderLayer": wrapper_of(LlamaDecoderLayer)}):
        model = tiny_model("llama")
    outputs_of(model)

    assert LlamaModel._can_record_outputs["hidden_states"] is LlamaDecoderLayer


def test_a_model_built_by_hand_returns_its_states_inside_the_block_already():
    register_patch_mapping({"LlamaDecoderLayer": wrapper_of(LlamaDecoderLayer)})
    with apply_patches():
        model = LlamaModel(tiny_config("llama"))
        states = model(**tiny_inputs(model), output_hidden_states=True).hidden_states
    modelpatch.clear_patch_mapping()

    assert len(states) == 4


def test_modules_that_were_exchanged_by_hand_are_recorded_when_asked_for():
    wrapper = wrapper_of(LlamaDecoderLayer)
    model = tiny_model("llama").model
    expected = model(**tiny_inputs(model), output_hidden_states=True).hidden_states
    for i, layer in enumerate(model.layers):
        model.layers[i] = wrapper(model.config, i)
        model.layers[i].inner = layer
    register_patch_mapping({"LlamaDecoderLayer": wrapper})

    patch_output_recorders(model)
    patch_output_recorders(model)

    states = model(**tiny_inputs(model), output_hidden_states=True).hidden_states
    modelpatch.clear_patch_mapping()
    assert_same({"hidden_states": states}, {"hidden_states": expected})


def test_a_recorder_that_the_user_adds_later_is_served():
    capturing = importlib.import_module("transformers.utils.output_capturing")

    class Attention(LlamaAttention):
        pass

    with patched({"LlamaDecoderLayer": wrapper_of(LlamaDecoderLayer), "LlamaAttention": Attention}):
        model = tiny_model("llama").model
    key = str(type(model))
    table = dict.get(capturing._CAN_RECORD_REGISTRY, key)
    added = {**table, "mixed": capturing.OutputRecorder(Attention, index=0)}
    dict.__setitem__(capturing._CAN_RECORD_REGISTRY, key, added)
    try:
        mixed = model(**tiny_inputs(model), output_mixed=True).mixed
    finally:
        dict.__setitem__(capturing._CAN_RECORD_REGISTRY, key, table)

    assert [tuple(m.shape) for m in mixed] == [(2, 7, 32)] * 3


class Passing(nn.Module):
    """Attention by another class, at module level so that it can be pickled."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.inner = LlamaAttention(config, layer_idx)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_copy_returns_its_states_too(copier):
    with patched({"LlamaAttention": Passing}):
        model = tiny_model("llama")

    copied = copier(model)

    assert_same(outputs_of(copied), outputs_of(model))
    assert len(outputs_of(copied)["attentions"]) == 3
    assert [str(site) for site in report(copied).replaced] == [
        str(site) for site in report(model).replaced
    ]


def test_a_pickled_model_needs_no_modelpatch_to_be_loaded():
    with patched({"LlamaMLP": NestedMLP}):
        model = tiny_model("llama")

    names = [
        argument
        for _, argument, _ in pickletools.genops(pickle.dumps(model))
        if isinstance(argument, str)
    ]

    assert not [name for name in names if name.startswith("modelpatch")]


class NestedMLP(LlamaMLP):
    pass
