"""Nothing under a replaced site is uninitialised, whichever way the model came to be."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2MoeForCausalLM,
    Qwen2MoeModel,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from modelpatch import (
    Patch,
    UninitializedError,
    clear_patch_mapping,
    patch_output_recorders,
    patched,
    register_patch_mapping,
    report,
)
from modelpatch.testing import tiny_config, tiny_inputs, tiny_model
from modelpatch.weights import create


class ListedExperts(nn.ModuleList):
    """No subclass of the original, and without its parameters, as in the specification's example."""

    def __init__(self, config):
        super().__init__(
            nn.ModuleDict(
                {
                    "gate": nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False),
                    "up": nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False),
                    "down": nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False),
                }
            )
            for _ in range(config.num_experts)
        )

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self):
            token, slot = torch.where(top_k_index == i)
            x = hidden_states[token]
            y = expert["down"](nn.functional.silu(expert["gate"](x)) * expert["up"](x))
            out.index_add_(0, token, y * top_k_weights[token, slot, None])
        return out


class BareExperts(Qwen2MoeExperts):
    """A subclass that deleted what the original's family initialises."""

    def __init__(self, config):
        super().__init__(config)
        del self.gate_up_proj, self.down_proj
        self.experts = ListedExperts(config)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return self.experts(hidden_states, top_k_index, top_k_weights)


class HalfExperts(Qwen2MoeExperts):
    """A subclass that deleted one parameter and kept the other."""

    def __init__(self, config):
        super().__init__(config)
        del self.gate_up_proj


class OwnRotary(nn.Module):
    """Has no name, type or attribute by which Transformers would know it."""

    def __init__(self, config, device=None):
        super().__init__()
        steps = (
            torch.arange(0, config.head_dim, 2, dtype=torch.float, device=device) / config.head_dim
        )
        self.register_buffer("frequencies", 10_000.0**-steps, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class OwnNorm(nn.Module):
    """As the original, under a name that Transformers doesn't know, with memory that it leaves unwritten."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ScaledNorm(OwnNorm):
    """Has a parameter that no checkpoint holds, with a value from the constructor."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__(hidden_size, eps)
        self.scale = nn.Parameter(torch.full((hidden_size,), 3.0))


class SelfMadeNorm(OwnNorm):
    """Owns its initial values."""

    def reset_parameters(self):
        nn.init.constant_(self.weight, 5.0)


@pytest.fixture
def checkpoint(tmp_path):
    """A stock model and the folder it was saved to."""
    model = tiny_model("llama", head_dim=8)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def by_hand(config):
    return Qwen2MoeForCausalLM(config)


def adding(name, replace):
    """A patch whose replacement has one parameter more than the original."""
    (replacement,) = replace.values()
    return Patch("adding", replace, {replacement: {name: create}})


@pytest.mark.parametrize("build", [by_hand, AutoModelForCausalLM.from_config])
@pytest.mark.parametrize("experts", [ListedExperts, BareExperts, HalfExperts])
def test_experts_without_the_originals_parameters_are_built_and_initialised(build, experts):
    config = tiny_config("qwen2_moe")

    with patched({"Qwen2MoeExperts": experts}):
        model = build(config)

    site = model.model.layers[0].mlp.experts
    assert type(site) is experts
    for name, parameter in site.named_parameters():
        deviation = parameter.std().item()
        assert 0.3 * config.initializer_range < deviation < 3 * config.initializer_range, name
    if experts is not HalfExperts:
        assert model(**tiny_inputs(model)).logits.isfinite().all()


def test_the_family_finds_no_dummy_on_the_module_afterwards():
    with patched({"Qwen2MoeExperts": HalfExperts}):
        model = Qwen2MoeForCausalLM(tiny_config("qwen2_moe"))

    assert not hasattr(model.model.layers[0].mlp.experts, "gate_up_proj")


def test_a_mistake_of_the_familys_own_is_not_taken_for_a_dropped_parameter():
    class Mistaken(Qwen2MoeModel):
        def _init_weights(self, module):
            if isinstance(module, Qwen2MoeExperts):
                module.no_such_thing  # noqa: B018  # the mistake

    with (
        pytest.raises(AttributeError, match="no_such_thing"),
        patched({"Qwen2MoeExperts": HalfExperts}),
    ):
        Mistaken(tiny_config("qwen2_moe"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replaced_rotary_embedding_loads_with_the_buffers_its_constructor_computes(
    checkpoint, dtype
):
    stock, path = checkpoint

    with patched({LlamaRotaryEmbedding: OwnRotary}):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    torch.testing.assert_close(model.model.rotary_emb.frequencies, stock.model.rotary_emb.inv_freq)
    inputs = tiny_inputs(stock)
    torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits)


def test_a_replaced_norm_loads_its_weights_and_gives_the_stock_logits(checkpoint):
    stock, path = checkpoint

    with patched({"LlamaRMSNorm": OwnNorm}):
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    assert torch.equal(model(**tiny_inputs(stock)).logits, stock(**tiny_inputs(stock)).logits)


def test_a_parameter_that_no_file_holds_gets_the_constructors_value(checkpoint):
    stock, path = checkpoint

    with patched(adding("scale", {"LlamaRMSNorm": ScaledNorm})):
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    assert torch.equal(model.model.norm.scale, torch.full((32,), 3.0))
    assert torch.equal(model.model.norm.weight, stock.model.norm.weight)


def test_random_constructor_values_differ_between_the_layers_of_a_load(checkpoint):
    class Noisy(OwnNorm):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__(hidden_size, eps)
            self.noise = nn.Parameter(torch.randn(hidden_size) + 0.0)

    with patched(adding("noise", {"LlamaRMSNorm": Noisy})):
        model = AutoModelForCausalLM.from_pretrained(checkpoint[1])

    layers = model.model.layers
    assert not torch.equal(layers[0].input_layernorm.noise, layers[1].input_layernorm.noise)


def test_a_replacement_that_owns_its_initialisation_is_asked_first(checkpoint):
    stock, path = checkpoint
    with patched({"LlamaRMSNorm": SelfMadeNorm}):
        fresh = LlamaForCausalLM(stock.config)
        loaded = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    assert torch.equal(fresh.model.norm.weight, torch.full((32,), 5.0))
    assert torch.equal(loaded.model.norm.weight, stock.model.norm.weight)


@pytest.mark.parametrize("write", ["in place", "data", "new parameter"])
def test_loaded_weights_survive_whatever_way_the_replacement_writes(checkpoint, write):
    class Overwriting(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.gain = nn.Parameter(torch.empty(3))

        def reset_parameters(self):
            for owner, name in ((self, "gain"), (self.up_proj, "weight")):
                value = getattr(owner, name)
                if write == "in place":
                    value.fill_(9.0)
                elif write == "data":
                    value.data.fill_(9.0)
                else:
                    setattr(owner, name, nn.Parameter(torch.full_like(value, 9.0)))

    stock, path = checkpoint

    with patched({"LlamaMLP": Overwriting}):
        loaded = AutoModelForCausalLM.from_pretrained(path)
        built = LlamaForCausalLM(stock.config)

    for i, layer in enumerate(loaded.model.layers):
        assert torch.equal(layer.mlp.gain, torch.full((3,), 9.0))
        assert torch.equal(layer.mlp.up_proj.weight, stock.model.layers[i].mlp.up_proj.weight)
    assert built.model.layers[0].mlp.up_proj.weight.eq(9).all()
    assert built.model.layers[0].mlp.gain.eq(9).all()


def test_a_replacement_without_tensors_of_its_own_is_asked_for_its_children(checkpoint):
    class Extended(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.extra = nn.Linear(2, 2)

        def reset_parameters(self):
            nn.init.constant_(self.extra.weight, 7.0)

    stock, path = checkpoint
    with patched({"LlamaMLP": Extended}):
        built = LlamaForCausalLM(stock.config)
        loaded = AutoModelForCausalLM.from_pretrained(path)

    for model in (built, loaded):
        assert model.model.layers[1].mlp.extra.weight.eq(7).all()
    assert torch.equal(
        loaded.model.layers[1].mlp.up_proj.weight, stock.model.layers[1].mlp.up_proj.weight
    )


def test_memory_that_nobody_writes_is_refused_by_name():
    with pytest.raises(UninitializedError) as caught, patched({"LlamaRMSNorm": OwnNorm}):
        LlamaForCausalLM(tiny_config("llama"))

    assert str(caught.value) == (
        "OwnNorm in the place of LlamaRMSNorm: weight is in no file, and nothing initialises it. Define "
        "OwnNorm.reset_parameters, or give it a value in the constructor."
    )


def test_memory_that_no_file_fills_is_refused_on_loading_too(tmp_path):
    class Extra(LlamaRMSNorm):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__(hidden_size, eps)
            self.extra = nn.Parameter(torch.empty(hidden_size))

    tiny_model("llama").save_pretrained(tmp_path)

    with (
        pytest.raises(UninitializedError, match="extra is in no file"),
        patched(adding("extra", {"LlamaRMSNorm": Extra})),
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_subclass_in_the_familys_manner_is_initialised_by_the_family():
    class Same(Qwen2MoeExperts):
        pass

    torch.manual_seed(1)
    plain = Qwen2MoeForCausalLM(tiny_config("qwen2_moe"))
    torch.manual_seed(1)
    with patched({"Qwen2MoeExperts": Same}):
        model = Qwen2MoeForCausalLM(tiny_config("qwen2_moe"))

    for (name, expected), (_, got) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(expected, got), name


def test_checking_a_replacement_leaves_the_random_stream_alone():
    class Constant(nn.Module):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden_size))
            self.drawn = nn.Linear(2, 2)

    class Twin(Constant):
        pass

    def draw(norm):
        torch.manual_seed(0)
        with patched({"LlamaRMSNorm": norm}):
            LlamaForCausalLM(tiny_config("llama"))
        return torch.rand(3)

    first = draw(Constant)  # checked here
    again = draw(Constant)  # and remembered
    assert torch.equal(first, again)
    assert torch.equal(first, draw(Twin))


def test_a_model_built_on_the_meta_device_is_completed_when_its_weights_are_initialised():
    with torch.device("meta"), patched({LlamaRotaryEmbedding: OwnRotary}):
        model = LlamaForCausalLM(tiny_config("llama", head_dim=8))

    model.to_empty(device="cpu")
    model.initialize_weights()

    expected = LlamaForCausalLM(model.config).model.rotary_emb.inv_freq
    torch.testing.assert_close(model.model.rotary_emb.frequencies, expected)


def test_a_load_under_inference_mode_says_that_it_cannot_tell(checkpoint):
    with (
        torch.inference_mode(),
        pytest.raises(UninitializedError, match="inference_mode"),
        patched({LlamaRotaryEmbedding: OwnRotary}),
    ):
        AutoModelForCausalLM.from_pretrained(checkpoint[1])


def test_a_load_without_a_patch_is_as_before(checkpoint):
    stock, path = checkpoint
    with patched({"LlamaRMSNorm": OwnNorm}, strict=False):
        pass

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    assert torch.equal(model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)
    assert torch.equal(model(**tiny_inputs(stock)).logits, stock(**tiny_inputs(stock)).logits)


class LateGarbage(LlamaForCausalLM):
    """Adds a parameter after the family's initialisation has run."""

    def __init__(self, config):
        super().__init__(config)
        self.late = nn.Parameter(torch.empty(3000))


class LateValue(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.late = nn.Parameter(torch.ones(3))
        self.post_init()


def build_by_hand(config):
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("build", [build_by_hand, AutoModelForCausalLM.from_config])
def test_a_replaced_model_that_adds_unwritten_memory_late_is_refused(build):
    with (
        pytest.raises(UninitializedError, match="late is in no file"),
        patched({LlamaForCausalLM: LateGarbage}),
    ):
        build(tiny_config("llama"))


@pytest.mark.parametrize("build", [build_by_hand, AutoModelForCausalLM.from_config])
def test_a_replaced_model_that_adds_a_value_late_keeps_it(build):
    with patched({LlamaForCausalLM: LateValue}):
        model = build(tiny_config("llama"))

    assert model.late.eq(1).all()


def test_each_site_is_judged_by_itself():
    class Uneven(LlamaAttention):
        def __init__(self, config, layer_idx):
            super().__init__(config, layer_idx)
            self.gain = nn.Parameter(torch.ones(30) if layer_idx == 0 else torch.empty(30))

    with pytest.raises(UninitializedError, match="gain"), patched({"LlamaAttention": Uneven}):
        LlamaForCausalLM(tiny_config("llama"))


@pytest.mark.parametrize(
    "via",
    [torch.clone, lambda empty: empty.to(torch.float64), lambda empty: empty[:2].contiguous()],
)
def test_a_copy_of_unwritten_memory_is_unwritten(via):
    class Copied(LlamaRMSNorm):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__(hidden_size, eps)
            self.gain = nn.Parameter(via(torch.empty(30)))

    with pytest.raises(UninitializedError, match="gain"), patched({"LlamaRMSNorm": Copied}):
        LlamaForCausalLM(tiny_config("llama"))


def test_memory_that_was_reused_is_not_taken_for_unwritten():
    for _ in range(20):

        class Indexed(BareExperts):
            def __init__(self, config):
                super().__init__(config)
                self.register_buffer("index", torch.tensor([1.0, 2.0, 3.0]))

        with patched({"Qwen2MoeExperts": Indexed}):
            model = Qwen2MoeForCausalLM(tiny_config("qwen2_moe", num_hidden_layers=1))

        assert model.model.layers[0].mlp.experts.index.tolist() == [1, 2, 3]


class Counting(LlamaRMSNorm):
    """Can't be built twice: it uses an argument up."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__(hidden_size, eps)
        self.register_buffer("steps", torch.arange(PENDING.pop()), persistent=False)


PENDING: list[int] = []


def test_a_replacement_that_cant_be_built_twice_keeps_the_values_it_has():
    PENDING[:] = [3]

    with patched({"LlamaRMSNorm": Counting}, where=lambda: len(PENDING) > 0):
        model = LlamaForCausalLM(tiny_config("llama"))

    assert model.model.layers[0].input_layernorm.steps.tolist() == [0, 1, 2]


def test_a_load_that_needs_a_value_it_cant_get_says_why(checkpoint):
    PENDING[:] = [3]

    with (
        pytest.raises(
            UninitializedError,
            match=r"steps is in no file, and building another Counting .* failed: pop from",
        ),
        patched({"LlamaRMSNorm": Counting}, where=lambda: len(PENDING) > 0),
    ):
        AutoModelForCausalLM.from_pretrained(checkpoint[1])


def test_a_clone_made_in_a_constructor_is_initialised_and_reported(checkpoint):
    class Steps(LlamaRMSNorm):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__(hidden_size, eps)
            self.register_buffer("steps", torch.arange(1.0, 4.0), persistent=False)

    class Cloning(LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            self.layers[1].input_layernorm = copy.deepcopy(self.layers[0].input_layernorm)

    with patched({LlamaModel: Cloning, LlamaRMSNorm: Steps}):
        model = AutoModelForCausalLM.from_pretrained(checkpoint[1])

    assert model.model.layers[1].input_layernorm.steps.tolist() == [1, 2, 3]
    assert "model.layers.1.input_layernorm" in {site.path for site in report(model).replaced}


def test_the_second_build_is_plain_where_the_registry_would_reach_in(checkpoint):
    built = []

    class Noting(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            built.append(type(self))

    class Root(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.extra = nn.Parameter(torch.ones(3))
            self.inner = [
                AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=1))
            ]

    register_patch_mapping({"LlamaMLP": Noting})
    adding("extra", {"LlamaForCausalLM": Root}).register()
    try:
        AutoModelForCausalLM.from_pretrained(checkpoint[1])
    finally:
        clear_patch_mapping()

    assert len(built) == 4  # three layers and the inner model's one, and none for the second build


def test_modules_exchanged_by_hand_may_be_initialised_again():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    model = tiny_model("llama").model
    model.layers[0] = Wrapper(model.layers[0])
    register_patch_mapping({"LlamaDecoderLayer": Wrapper})
    patch_output_recorders(model)
    clear_patch_mapping()

    model.init_weights()

    assert model.layers[0].gain.item() == 1


def test_a_module_made_of_a_replaced_ones_attributes_is_initialised_by_the_family():
    class OwnRMSNorm(LlamaRMSNorm):
        pass

    class RemadeRMSNorm(LlamaRMSNorm):
        pass

    with patched({"LlamaRMSNorm": OwnRMSNorm}):
        model = LlamaModel(tiny_config("llama"))
    remade = RemadeRMSNorm(32)
    remade.__dict__.update(model.norm.__dict__)
    remade._is_hf_initialized = False
    nn.init.constant_(remade.weight, 7.0)
    model.norm = remade

    model.init_weights()

    assert remade.weight.eq(1).all()
    assert "norm" not in {site.path for site in report(model).replaced}
