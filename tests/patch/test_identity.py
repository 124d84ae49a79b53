"""What others know of a class by its name follows the replacement, for the patched model alone."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import get_module_class_from_name
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaForCausalLM,
    LlamaModel,
    LlavaForConditionalGeneration,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5LayerFF

from modelpatch import patched, report
from modelpatch.testing import tiny_config, tiny_inputs, tiny_model


class Layer(LlamaDecoderLayer):
    """A subclass: keeps gradient checkpointing."""


class BareLayer(nn.Module):
    """No subclass: loses gradient checkpointing."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.inner = nn.ModuleList(
            [nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)]
        )

    def forward(self, hidden_states, **kwargs):
        for linear in self.inner:
            hidden_states = hidden_states + linear(hidden_states)
        return hidden_states


class Root(LlamaForCausalLM):
    """Replaces a whole model."""


class MixtralRoot(MixtralForCausalLM):
    """Replaces a whole model whose weights are converted on loading."""


class LlavaRoot(LlavaForConditionalGeneration):
    """Replaces a composite model whose weights are converted by class name."""


def sizes(model):
    return {name: p.numel() * p.element_size() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layer", [Layer, BareLayer])
def test_a_device_map_never_splits_inside_a_replaced_layer(layer):
    with patched({"LlamaDecoderLayer": layer}):
        model = tiny_model("llama", num_hidden_layers=4)
    whole = sum(sizes(model.model.layers[0]).values())
    budget = sum(sizes(model.model.embed_tokens).values()) + int(1.5 * whole)

    device_map = infer_auto_device_map(
        model, max_memory={0: budget, "cpu": 10**9}, no_split_module_classes=model._no_split_modules
    )

    assert len(set(device_map.values())) > 1
    assert not [
        path for path in device_map if path.startswith("model.layers.") and path.count(".") > 2
    ]


@pytest.mark.parametrize("build", ["from_config", "by hand", "on meta", "in the block"])
def test_names_for_sharding_follow_however_the_model_is_built(build):
    config = tiny_config("llama")
    with patched({"LlamaDecoderLayer": BareLayer}):
        if build == "from_config":
            model = AutoModelForCausalLM.from_config(config)
        elif build == "on meta":
            with torch.device("meta"):
                model = LlamaForCausalLM(config)
        else:
            model = LlamaForCausalLM(config)
        if build == "in the block":
            assert set(model._no_split_modules) == {"BareLayer"}

    assert set(model._no_split_modules) == {"BareLayer"}
    assert set(model.model._no_split_modules) == {"BareLayer"}
    assert set(LlamaForCausalLM(config)._no_split_modules) == {"LlamaDecoderLayer"}


def test_the_originals_name_stays_while_some_sites_keep_the_original():
    with patched({"LlamaDecoderLayer": BareLayer}, where=lambda layer_idx: layer_idx == 0):
        model = tiny_model("llama")

    assert set(model._no_split_modules) == {"LlamaDecoderLayer", "BareLayer"}


@pytest.mark.parametrize("layer", [Layer, BareLayer])
def test_fsdp_wraps_a_replaced_layer_by_name(layer):
    with patched({"LlamaDecoderLayer": layer}):
        model = tiny_model("llama")
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")

    plugin.set_auto_wrap_policy(model)

    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {layer}
    assert [get_module_class_from_name(model, name) for name in model._no_split_modules] == [layer]


def test_modules_kept_in_float32_stay_so_under_a_replaced_layer(tmp_path):
    class FeedForward(T5LayerFF):
        pass

    tiny_model("t5").save_pretrained(tmp_path)

    with patched({"T5LayerFF": FeedForward}):
        model = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)

    feed_forward = model.encoder.block[0].layer[1]
    assert type(feed_forward) is FeedForward
    stock = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    dtypes = {name: p.dtype for name, p in stock.named_parameters()}
    assert torch.float32 in dtypes.values()
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_a_replaced_layer_is_checkpointed_as_the_original():
    with patched({"LlamaDecoderLayer": Layer}):
        model = tiny_model("llama")
    calls = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    model.train()

    model(**tiny_inputs(model), use_cache=False).logits.sum().backward()

    assert len(calls) == 6  # three layers, and each of them again in backward
    assert report(model).changes == (
        "kept whole when sharded: Layer (was LlamaDecoderLayer)",
        "hidden_states are recorded from Layer (was LlamaDecoderLayer)",
    )


def test_a_replacement_that_loses_checkpointing_is_reported():
    with patched({"LlamaDecoderLayer": BareLayer}):
        model = tiny_model("llama")

    lost = "gradient checkpointing is lost: BareLayer is no GradientCheckpointingLayer, LlamaDecoderLayer is"
    assert lost in report(model).changes


@pytest.mark.parametrize(
    "key", ["LlamaForCausalLM", LlamaForCausalLM, "transformers.LlamaForCausalLM"]
)
def test_a_replaced_root_class_is_built_loaded_and_saved_under_the_originals_name(tmp_path, key):
    stock = tiny_model("llama")
    stock.save_pretrained(tmp_path / "stock")

    with patched({key: Root}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
        built = AutoModelForCausalLM.from_config(stock.config)
    loaded.save_pretrained(tmp_path / "again")

    assert type(loaded) is type(built) is Root
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is LlamaForCausalLM
    assert (tmp_path / "again/config.json").read_bytes() == (
        tmp_path / "stock/config.json"
    ).read_bytes()
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "stock/model.safetensors"
    ).read_bytes()
    assert "save_pretrained" not in vars(loaded.config)


def test_a_replaced_base_model_is_reached_through_an_auto_class(tmp_path):
    class Base(LlamaModel):
        pass

    tiny_model("llama").model.save_pretrained(tmp_path)

    with patched({"LlamaModel": Base}):
        model = AutoModel.from_pretrained(tmp_path)

    assert type(model) is Base


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_copy_of_a_replaced_root_is_saved_under_the_originals_name(tmp_path, copier):
    with patched({LlamaForCausalLM: Root}):
        model = tiny_model("llama")

    copier(model).save_pretrained(tmp_path)

    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


@pytest.mark.parametrize(
    ("family", "auto", "root"),
    [
        ("mixtral", AutoModelForCausalLM, MixtralRoot),
        ("llava", AutoModelForImageTextToText, LlavaRoot),
    ],
)
def test_built_in_weight_conversions_reach_a_replaced_root(tmp_path, family, auto, root):
    stock = tiny_model(family)
    stock.save_pretrained(tmp_path)

    with patched({root.__mro__[1]: root}):
        model, info = auto.from_pretrained(tmp_path, output_loading_info=True)

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_model_beyond_the_patched_one_keeps_its_names():
    with patched({"LlamaDecoderLayer": BareLayer}):
        tiny_model("llama")

    plain = tiny_model("llama")

    assert set(plain._no_split_modules) == {"LlamaDecoderLayer"}
    assert "save_pretrained" not in vars(plain)
