"""The specification's two long examples, through Transformers' own function names after `install`."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Concatenate,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
    WeightConverter,
    conversion_mapping,
    monkey_patching,
)
from transformers.activations import ACT2FN
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import modelpatch
from modelpatch.testing import tiny_config, tiny_inputs, tiny_model

capturing = import_module("transformers.utils.output_capturing")


class ListedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ListedExperts(nn.ModuleList):
    def __init__(self, config):
        super().__init__(ListedMLP(config) for _ in range(config.num_experts))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self):
            token, slot = torch.where(top_k_index == i)
            out.index_add_(
                0, token, expert(hidden_states[token]) * top_k_weights[token, slot, None]
            )
        return out


class FusedAttention(Qwen2MoeAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sizes = [p.out_features for p in (self.q_proj, self.k_proj, self.v_proj)]
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=True)

    def forward(self, hidden_states, *args, **kwargs):
        for name, part in zip(
            "qkv", self.qkv_proj(hidden_states).split(self.sizes, dim=-1), strict=True
        ):
            self.__dict__[f"{name}_proj"] = lambda _, part=part: part
        return super().forward(hidden_states, *args, **kwargs)


class ReplayableRouter(Qwen3MoeTopKRouter):
    forced: torch.Tensor | None = None

    def forward(self, hidden_states):
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        scores = nn.functional.softmax(logits, dtype=torch.float, dim=-1)
        if self.forced is None:
            values, indices = torch.topk(scores, self.top_k, dim=-1)
        else:
            indices = self.forced.long()
            values = scores.gather(-1, indices)
        if self.norm_topk_prob:
            values = values / values.sum(dim=-1, keepdim=True)
        return scores, values, indices


@contextmanager
def replaying(model, choices):
    routers = [module for module in model.modules() if isinstance(module, ReplayableRouter)]
    for router, forced in zip(routers, choices, strict=True):
        router.forced = forced
    try:
        yield
    finally:
        for router in routers:
            router.forced = None


@pytest.fixture(autouse=True)
def _installed():
    modelpatch.install()
    yield
    modelpatch.uninstall()


@contextmanager
def fused_qkv_conversion():
    conversion_mapping.get_checkpoint_conversion_mapping("qwen2_moe")  # fills the table
    before = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    converter = WeightConverter(
        source_patterns=["q_proj", "k_proj", "v_proj"],
        target_patterns=["qkv_proj"],
        operations=[Concatenate(dim=0)],
    )
    conversion_mapping.register_checkpoint_conversion_mapping(
        model_type_or_class_name="qwen2_moe", mapping=[converter], overwrite=True
    )
    try:
        yield
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache.clear()
        conversion_mapping._checkpoint_conversion_mapping_cache.update(before)


def test_listed_experts_and_fused_attention_load_stock_weights_and_compute_the_same(tmp_path):
    stock = tiny_model("qwen2_moe", num_key_value_heads=4)
    stock.save_pretrained(tmp_path)
    monkey_patching.register_patch_mapping(
        mapping={"Qwen2MoeExperts": ListedExperts, "Qwen2MoeAttention": FusedAttention}
    )

    with fused_qkv_conversion():
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", output_loading_info=True
        )

    layer = model.model.layers[0]
    assert (type(layer.mlp.experts), type(layer.self_attn)) == (ListedExperts, FusedAttention)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(
        model(**tiny_inputs(stock)).logits, stock(**tiny_inputs(stock)).logits, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("build", ["from_config", "by hand"])
def test_the_example_is_built_without_a_checkpoint_too(build):
    config = tiny_config("qwen2_moe")
    monkey_patching.register_patch_mapping(
        mapping={"Qwen2MoeExperts": ListedExperts, "Qwen2MoeAttention": FusedAttention}
    )

    if build == "from_config":
        model = AutoModelForCausalLM.from_config(config)
    else:
        with monkey_patching.apply_patches():
            model = Qwen2MoeForCausalLM(config)

    assert type(model.model.layers[0].mlp.experts) is ListedExperts
    assert model.eval()(**tiny_inputs(model)).logits.isfinite().all()


def test_the_routing_recipe_records_and_replays_with_live_scores():
    monkey_patching.register_patch_mapping({"Qwen3MoeTopKRouter": ReplayableRouter})
    with monkey_patching.apply_patches():
        model = Qwen3MoeForCausalLM(tiny_config("qwen3_moe")).eval()
    inner = model.model
    key = str(inner.__class__)
    existing = capturing._CAN_RECORD_REGISTRY.get(key, {}) or {}
    capturing._CAN_RECORD_REGISTRY[key] = {
        **existing,
        "selected_experts": capturing.OutputRecorder(ReplayableRouter, index=2),
    }
    inputs = tiny_inputs(model)
    try:
        first = inner(**inputs, output_selected_experts=True)
        choices = first.selected_experts
        for layer in inner.layers:
            nn.init.normal_(layer.mlp.gate.weight)
        with replaying(inner, list(choices)):
            again = inner(**inputs, output_selected_experts=True)
            engine = np.stack([choice.numpy().astype(np.int32) for choice in choices], axis=1)
        selected = [
            torch.from_numpy(engine[:, layer, :].copy()).long() for layer in range(engine.shape[1])
        ]
        with replaying(inner, selected):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
    finally:
        capturing._CAN_RECORD_REGISTRY[key] = existing

    assert [(tuple(c.shape), c.dtype) for c in choices] == [((14, 2), torch.long)] * 3
    assert all(torch.equal(a, b) for a, b in zip(again.selected_experts, choices, strict=True))
    assert not torch.equal(first.last_hidden_state, again.last_hidden_state)
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in inner.layers)
    with pytest.raises(ValueError, match="shorter"), replaying(inner, choices[:-1]):
        pass
