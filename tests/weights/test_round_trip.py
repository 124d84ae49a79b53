"""From a stock file into a patched model and back: it comes out as it went in, and the model computes the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchEmbed

from modelpatch import Patch, ledger, patched
from modelpatch.testing import FAMILIES, tiny_config, tiny_inputs, tiny_model
from modelpatch.weights import flatten, fuse, interleave, stack, transpose

# --- replacements -----------------------------------------------------------------------------------------------------


class FusedAttention(LlamaAttention):
    """One projection, of which the stock forward sees three slices."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        parts = [self._modules.pop(f"{name}_proj") for name in "qkv"]
        self.sizes = [part.out_features for part in parts]
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.attention_bias)

    def q_proj(self, x):
        return self.qkv(x).split(self.sizes, -1)[0]

    def k_proj(self, x):
        return self.qkv(x).split(self.sizes, -1)[1]

    def v_proj(self, x):
        return self.qkv(x).split(self.sizes, -1)[2]


class FusedMLP(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        del self.gate_proj, self.up_proj
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


class SplitMLP(Phi3MLP):
    def __init__(self, config):
        super().__init__(config)
        del self.gate_up_proj
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, hidden_states):
        return self.down_proj(self.up(hidden_states) * self.activation_fn(self.gate(hidden_states)))


def moe_sizes(config):
    """Experts, hidden and intermediate width, by the names of whichever family."""
    fields = config.to_dict()
    experts = ("n_routed_experts", "num_local_experts", "num_experts")
    return (
        next(fields[name] for name in experts if name in fields),
        config.hidden_size,
        fields.get("moe_intermediate_size", config.intermediate_size),
    )


class Expert(nn.Module):
    def __init__(self, hidden, intermediate, *, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ClampedExpert(Expert):
    """As GPT-OSS has it."""

    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=7.0)
        up = self.up_proj(x).clamp(-7.0, 7.0)
        return self.down_proj((up + 1) * gate * torch.sigmoid(1.702 * gate))


def mixed(experts, hidden_states, top_k_index, top_k_weights):
    """Each expert on each token, weighed by its share, which is zero for most."""
    shares = [
        (top_k_weights * (top_k_index == i)).sum(-1, keepdim=True) for i in range(len(experts))
    ]
    return sum(s * expert(hidden_states) for s, expert in zip(shares, experts, strict=True))


class ListedExperts(nn.ModuleList):
    def __init__(self, config):
        num_experts, *sizes = moe_sizes(config)
        super().__init__(Expert(*sizes) for _ in range(num_experts))

    forward = mixed


class ListedClampedExperts(nn.ModuleList):
    def __init__(self, config):
        num_experts, *sizes = moe_sizes(config)
        super().__init__(ClampedExpert(*sizes, bias=True) for _ in range(num_experts))

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        return mixed(self, hidden_states, router_indices, routing_weights)


class TurnedStacks(nn.Module):
    """Three stacks, with the width that is summed over in the middle."""

    def __init__(self, config):
        super().__init__()
        num_experts, hidden, intermediate = moe_sizes(config)
        self.gate = nn.Parameter(torch.zeros(num_experts, hidden, intermediate))
        self.up = nn.Parameter(torch.zeros(num_experts, hidden, intermediate))
        self.down = nn.Parameter(torch.zeros(num_experts, intermediate, hidden))

    def expert(self, i, x):
        return (nn.functional.silu(x @ self.gate[i]) * (x @ self.up[i])) @ self.down[i]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        experts = [partial(self.expert, i) for i in range(len(self.gate))]
        return mixed(experts, hidden_states, top_k_index, top_k_weights)


class StackedNllbExperts(nn.Module):
    """The other way: the original has a module for each expert."""

    def __init__(self, config, ffn_dim):
        super().__init__()
        num_experts, hidden = config.num_experts, config.d_model
        self.fc1 = nn.Parameter(torch.zeros(num_experts, ffn_dim, hidden))
        self.fc1_bias = nn.Parameter(torch.zeros(num_experts, ffn_dim))
        self.fc2 = nn.Parameter(torch.zeros(num_experts, hidden, ffn_dim))
        self.fc2_bias = nn.Parameter(torch.zeros(num_experts, hidden))
        self.kept = 1 - config.moe_token_dropout

    def forward(self, hidden_states, router_mask, router_probs):
        chosen = nn.functional.one_hot(router_mask, num_classes=len(self.fc1))
        shares = (chosen * router_probs.unsqueeze(-1)).sum(1)
        inner = torch.einsum("th,efh->tef", hidden_states, self.fc1) + self.fc1_bias
        out = torch.einsum("tef,ehf->teh", inner.relu(), self.fc2) + self.fc2_bias
        return self.kept * torch.einsum("teh,te->th", out, shares)


class LinearPatchEmbed(PatchEmbed):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.proj = nn.Linear(self.proj.weight[0].numel(), self.embed_dim, bias=False)

    def forward(self, hidden_states):
        return self.proj(hidden_states)


# --- cases ------------------------------------------------------------------------------------------------------------

QKV = Patch(
    "qkv",
    {"LlamaAttention": FusedAttention},
    {FusedAttention: {"qkv": fuse("q_proj", "k_proj", "v_proj")}},
)
GATE_UP = Patch(
    "gate-up", {"LlamaMLP": FusedMLP}, {FusedMLP: {"gate_up": fuse("gate_proj", "up_proj")}}
)
EXPERTS = {
    stack(fuse("*.gate_proj.weight", "*.up_proj.weight")): "gate_up_proj",
    stack("*.down_proj.weight"): "down_proj",
}
STACKS = {
    fuse(transpose("gate", 1, 2), transpose("up", 1, 2), dim=1): "gate_up_proj",
    transpose("down", 1, 2): "down_proj",
}
CLAMPED = {
    stack(transpose(interleave("*.gate_proj.weight", "*.up_proj.weight"))): "gate_up_proj",
    stack(interleave("*.gate_proj.bias", "*.up_proj.bias")): "gate_up_proj_bias",
    stack(transpose("*.down_proj.weight")): "down_proj",
    stack("*.down_proj.bias"): "down_proj_bias",
}


def experts_patch(original, replacement, layout):
    return Patch("experts", {original: replacement}, {replacement: layout})


@dataclass(frozen=True)
class Case:
    family: str
    patch: Patch
    fields: dict[str, Any] = field(default_factory=dict)


CASES = {
    "fused qkv": Case("llama", QKV, {"num_key_value_heads": 4}),
    "grouped qkv": Case("llama", QKV),
    "grouped qkv with bias": Case("llama", QKV, {"attention_bias": True}),
    "qkv, tied": Case("llama", QKV, {"tie_word_embeddings": True}),
    "fused gate/up": Case("llama", GATE_UP),
    "split gate/up": Case(
        "phi3",
        Patch(
            "split",
            {Phi3MLP: SplitMLP},
            {SplitMLP: {fuse("gate", "up"): "gate_up_proj"}},
        ),
    ),
    "conv3d to linear": Case(
        "qwen2_vl",
        Patch(
            "linear",
            {PatchEmbed: LinearPatchEmbed},
            {LinearPatchEmbed: {"proj.weight": flatten("proj.weight")}},
        ),
    ),
    "text of a composite": Case("llava", QKV),
    "list to stack, nllb_moe": Case(
        "nllb-moe",
        experts_patch(
            NllbMoeExperts,
            StackedNllbExperts,
            {fc: stack(f"expert_*.{fc}.weight") for fc in ("fc1", "fc2")}
            | {f"{fc}_bias": stack(f"expert_*.{fc}.bias") for fc in ("fc1", "fc2")},
        ),
    ),
    "stack to list, gpt_oss": Case(
        "gpt_oss", experts_patch("GptOssExperts", ListedClampedExperts, CLAMPED)
    ),
}
for family, original in (
    ("qwen2_moe", "Qwen2MoeExperts"),
    ("qwen3_moe", "Qwen3MoeExperts"),
    ("mixtral", "MixtralExperts"),
    ("deepseek_v3", "DeepseekV3(Experts|NaiveMoe)$"),  # the latter until 5.12
):
    CASES[f"stack to list, {family}"] = Case(
        family, experts_patch(original, ListedExperts, EXPERTS)
    )
    CASES[f"list to turned stacks, {family}"] = Case(
        family, experts_patch(original, TurnedStacks, STACKS)
    )

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def model_class(case):
    return getattr(transformers, FAMILIES[case.family].model_class)


def load(case, folder, **kwargs):
    with patched(case.patch):
        return model_class(case).from_pretrained(folder, attn_implementation="eager", **kwargs)


def stored(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_files(one, other):
    """Keys, shapes, dtypes and bytes."""
    expected, found = stored(one), stored(other)
    assert expected
    assert {k: (t.shape, t.dtype) for k, t in found.items()} == {
        k: (t.shape, t.dtype) for k, t in expected.items()
    }
    assert all(
        torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))
        for key, tensor in expected.items()
    )


@torch.no_grad()
def logits(model):
    return model(**tiny_inputs(model)).logits


@every_case
def test_a_stock_file_comes_back_bit_for_bit_and_the_model_computes_the_same(case, tmp_path):
    stock = tiny_model(case.family, **case.fields)
    stock.save_pretrained(tmp_path / "stock")

    model = load(case, tmp_path / "stock")
    model.save_pretrained(tmp_path / "saved")

    assert any(entry.site is not None for entry in ledger(model).entries)
    assert all(entry.operation != "initialised" for entry in ledger(model).entries)
    assert ledger(model).unused == ()
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-5, atol=1e-5)
    assert_same_files(tmp_path / "stock", tmp_path / "saved")


@every_case
def test_half_precision_shards_come_back_bit_for_bit(case, tmp_path):
    stock = tiny_model(case.family, **case.fields).to(torch.bfloat16)
    stock.save_pretrained(tmp_path / "file", max_shard_size="20KB")
    stock = model_class(case).from_pretrained(tmp_path / "file", dtype="auto")
    stock.save_pretrained(tmp_path / "stock")  # some families keep some tensors in float32

    model = load(case, tmp_path / "file", dtype="auto")
    model.save_pretrained(tmp_path / "saved", max_shard_size="30KB")

    assert model.dtype is torch.bfloat16
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert_same_files(tmp_path / "stock", tmp_path / "saved")


@every_case
def test_pickled_files_and_state_dicts_are_carried_like_safetensors(case, tmp_path):
    stock = tiny_model(case.family, **case.fields)
    stock.save_pretrained(tmp_path / "stock")
    tensors = stored(tmp_path / "stock")
    (tmp_path / "bin").mkdir()
    stock.config.save_pretrained(tmp_path / "bin")
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")

    load(case, tmp_path / "bin").save_pretrained(tmp_path / "from bin")
    load(case, None, config=stock.config, state_dict=tensors).save_pretrained(tmp_path / "given")

    assert_same_files(tmp_path / "stock", tmp_path / "from bin")
    assert_same_files(tmp_path / "stock", tmp_path / "given")


@every_case
def test_a_model_that_was_built_and_not_loaded_is_saved_as_the_stock_model(case, tmp_path):
    with patched(case.patch):
        model = tiny_model(case.family, **case.fields)

    model.save_pretrained(tmp_path / "saved")
    stock = model_class(case).from_pretrained(tmp_path / "saved", attn_implementation="eager")
    stock.save_pretrained(tmp_path / "stock")

    torch.testing.assert_close(logits(stock), logits(model), rtol=1e-5, atol=1e-5)
    assert_same_files(tmp_path / "stock", tmp_path / "saved")


@every_case
def test_files_in_the_own_layout_lead_back_to_the_stock_model(case, tmp_path):
    first = tiny_model(case.family, **case.fields)
    first.save_pretrained(tmp_path / "stock")

    load(case, tmp_path / "stock").save_pretrained(tmp_path / "own", save_original_format=False)
    model = load(case, tmp_path / "own")
    model.save_pretrained(tmp_path / "back")
    stock = model_class(case).from_pretrained(tmp_path / "back")

    own = stored(tmp_path / "own")
    assert all(torch.equal(own[name], t) for name, t in model.state_dict().items() if name in own)
    assert stock.state_dict().keys() == first.state_dict().keys()
    assert all(torch.equal(stock.state_dict()[k], t) for k, t in first.state_dict().items())


@every_case
def test_load_state_dict_takes_the_stock_models_tensors_and_the_models_own(case):
    stock = tiny_model(case.family, **case.fields)
    with patched(case.patch):
        model = tiny_model(case.family, **case.fields)

    source = stock.state_dict()
    for _ in ("the stock model's", "its own"):
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(source)
        source = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.testing.assert_close(logits(model), logits(stock), rtol=1e-5, atol=1e-5)


def test_the_families_are_tiny_models_of_the_library():
    assert {case.family for case in CASES.values()} <= set(FAMILIES)
    assert tiny_config("llama").num_key_value_heads == 2
