"""Tiny models of real families, with fixed random weights, for tests that need no download.

Families are data: one entry names the config class, the model class, the kind of input and the fields that make the
model small. Sizes are shared where families agree: width 32, depth 2 or 3, vocabulary 100.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from modelpatch.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["FAMILIES", "Family", "tiny_config", "tiny_inputs", "tiny_model"]

InputKind = Literal["text", "text_pair", "image", "image_text", "patches_text"]

_BATCH: Final = 2
_LENGTH: Final = 7
_FIRST_PLAIN_ID: Final = (
    3  # RoBERTa counts positions from its padding id, so the special ids 0 to 2 are never drawn.
)
_ARGUMENTS: Final = frozenset({"attn_implementation", "experts_implementation"})
"""What a config's constructor takes and keeps under another name."""


@dataclass(frozen=True, slots=True)
class Family:
    """What makes a tiny model of one architecture.

    Attributes:
        config_class: Name of the config class in `transformers`.
        model_class: Name of the model class in `transformers`.
        inputs: Kind of input that `tiny_inputs` makes.
        fields: Config fields that differ from the config class's own defaults. A mapping under the name of a
            sub-config holds the fields of that sub-config.
    """

    config_class: str
    model_class: str
    inputs: InputKind
    fields: Mapping[str, Any]


_ENCODER: Final = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_DECODER: Final = {**_ENCODER, "num_key_value_heads": 2}
_VISION: Final = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_ENCODER_DECODER: Final = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_MOE: Final = {**_DECODER, "num_experts_per_tok": 2}
_QWEN_MOE: Final = {**_MOE, "num_experts": 8, "moe_intermediate_size": 24}
_LLAVA: Final = {
    "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
    "text_config": {"model_type": "llama", **_DECODER},
    "image_token_index": 99,
    "image_seq_length": 4,
}
_DEEPSEEK: Final = {
    **_MOE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_NLLB: Final = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_experts": 4,
    "expert_capacity": 16,
    "max_position_embeddings": 64,
}
_GPT_OSS: Final = {
    **_MOE,
    "num_local_experts": 8,
    "head_dim": 8,
    "sliding_window": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
_QWEN_VL: Final = {
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,  # what the merger makes, and the text takes
        "mlp_ratio": 2,
        "num_heads": 4,
        "patch_size": 4,
    },
    "text_config": {
        "model_type": "qwen2_vl_text",
        **_DECODER,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 1, 1],  # of half a head
        },
    },
    "image_token_id": 99,
    "video_token_id": 98,
    "vision_start_token_id": 96,
    "vision_end_token_id": 97,
}

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "bert": Family("BertConfig", "BertModel", "text", _ENCODER),
        "roberta": Family("RobertaConfig", "RobertaForMaskedLM", "text", _ENCODER),
        "llama": Family("LlamaConfig", "LlamaForCausalLM", "text", _DECODER),
        "mistral": Family("MistralConfig", "MistralForCausalLM", "text", _DECODER),
        "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", "text", {**_DECODER, "head_dim": 8}),
        "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", "text", _ENCODER),
        "t5": Family("T5Config", "T5ForConditionalGeneration", "text_pair", _ENCODER_DECODER),
        "qwen2_moe": Family(
            "Qwen2MoeConfig",
            "Qwen2MoeForCausalLM",
            "text",
            {**_QWEN_MOE, "shared_expert_intermediate_size": 24},
        ),
        "qwen3_moe": Family(
            "Qwen3MoeConfig", "Qwen3MoeForCausalLM", "text", {**_QWEN_MOE, "head_dim": 8}
        ),
        "mixtral": Family(
            "MixtralConfig", "MixtralForCausalLM", "text", {**_MOE, "num_local_experts": 8}
        ),
        "vit": Family("ViTConfig", "ViTForImageClassification", "image", _VISION),
        "llava": Family("LlavaConfig", "LlavaForConditionalGeneration", "image_text", _LLAVA),
        "deepseek_v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", "text", _DEEPSEEK),
        "gpt_oss": Family("GptOssConfig", "GptOssForCausalLM", "text", _GPT_OSS),
        "phi3": Family("Phi3Config", "Phi3ForCausalLM", "text", {**_DECODER, "pad_token_id": 0}),
        "nllb-moe": Family("NllbMoeConfig", "NllbMoeForConditionalGeneration", "text_pair", _NLLB),
        "qwen2_vl": Family(
            "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", "patches_text", _QWEN_VL
        ),
    }
)
"""Every family that `tiny_model` builds, by its `model_type` in Transformers. Read-only."""


def tiny_config(family: str, **config_overrides: Any) -> PreTrainedConfig:
    """Make the config of a tiny model.

    Attention is eager, because only eager attention returns its weights; pass `attn_implementation` for another one.

    Args:
        family: A name in `FAMILIES`.
        **config_overrides: Fields of the config, which win over the family's own. A mapping for a sub-config
            (`text_config={"num_hidden_layers": 1}`) is merged into the tiny one; a config object takes its place.

    Returns:
        A new config of the family's class.

    Raises:
        ArgumentError: The family is unknown, or an override is no field of its config.

    Example:
        >>> tiny_config("llama", num_hidden_layers=1).num_hidden_layers
        1
    """
    entry = _family(family)
    config_class = getattr(importlib.import_module("transformers"), entry.config_class)
    faults: list[str] = []
    fields = _merged(entry.fields, config_overrides, config_class(), path="", faults=faults)
    if faults:
        message = f"tiny_config({family!r}): {entry.config_class} lacks what was overridden; nothing was built."
        raise ArgumentError(message, faults=faults)
    config: PreTrainedConfig = config_class(**{"attn_implementation": "eager", **fields})
    return config


def tiny_model(family: str, **config_overrides: Any) -> PreTrainedModel:
    """Build a tiny model with fixed random weights.

    The class is called directly, so the patches of `patched(...)` and `apply_patches()` take effect. Weights are drawn
    wide enough for a change in any layer to show in the output. A parameter's values follow from its name and shape
    alone: models that share parameter names share those weights, whatever else differs. The CPU's random state is
    left as it was. Building takes about 10 ms, after `transformers` is imported.

    Args:
        family: A name in `FAMILIES`.
        **config_overrides: As for `tiny_config`.

    Returns:
        The model in evaluation mode, with float32 weights on the default device.

    Raises:
        ArgumentError: The family is unknown, or an override is no field of its config.

    Example:
        >>> model = tiny_model("qwen3_moe", num_hidden_layers=1)
        >>> model(**tiny_inputs(model)).logits.shape
        torch.Size([2, 7, 100])
    """
    config = tiny_config(family, **config_overrides)
    model_class = getattr(importlib.import_module("transformers"), FAMILIES[family].model_class)
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = model_class(config)
    _prepare(model)
    return model


def tiny_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Make a fixed batch of two that a model of a known family accepts.

    Args:
        model: A model whose `config.model_type` is in `FAMILIES`, tiny or not.

    Returns:
        Keyword arguments of `model`, on its device, new at each call and always the same:

        - `input_ids`, int64 of shape (2, 7), no special and no padding ids; where there are images, the rows also hold
          their image tokens;
        - `decoder_input_ids`, the same shape, for encoder-decoders;
        - `pixel_values`, in the model's dtype, of shape (2, channels, height, width), for models that see images;
        - for models that take images cut into patches, `pixel_values` of shape (patches of both images, values of a
          patch), `image_grid_thw`, int64 of shape (2, 3), and `mm_token_type_ids`, int32 in the shape of `input_ids`.

    Raises:
        ArgumentError: The model's family is unknown.

    Example:
        >>> {name: tuple(value.shape) for name, value in tiny_inputs(tiny_model("vit")).items()}
        {'pixel_values': (2, 3, 8, 8)}
    """
    kind = _family(model.config.model_type).inputs
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, torch.Tensor] = {}
    if kind in {"text", "text_pair"}:
        inputs["input_ids"] = _ids(config.vocab_size, generator)
    if kind == "text_pair":
        inputs["decoder_input_ids"] = _ids(config.vocab_size, generator)
    if kind == "image":
        inputs["pixel_values"] = _pixels(config, generator)
    if kind == "image_text":
        text = _ids(min(config.text_config.vocab_size, config.image_token_index), generator)
        image = torch.full(
            (_BATCH, config.image_seq_length), config.image_token_index, device="cpu"
        )
        inputs["input_ids"] = torch.cat([text[:, :1], image, text[:, 1:]], dim=1)
        inputs["pixel_values"] = _pixels(config.vision_config, generator)
    if kind == "patches_text":
        inputs |= _patches_and_text(config, generator)
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _family(name: str) -> Family:
    """Look a family up."""
    if name in FAMILIES:
        return FAMILIES[name]
    nearest = get_close_matches(name, FAMILIES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    known = ", ".join(FAMILIES)
    raise ArgumentError(f"There is no tiny model of the family {name!r}.{hint} Families: {known}.")


def _merged(
    fields: Mapping[str, Any],
    overrides: Mapping[str, Any],
    default: PreTrainedConfig,
    *,
    path: str,
    faults: list[str],
) -> dict[str, Any]:
    """Lay overrides over fields, sub-configs included, and collect the overrides that name no field of `default`."""
    merged = dict(fields)
    for given, value in overrides.items():
        # `num_experts`, for one, is another name of Mixtral's `num_local_experts`.
        name = default.attribute_map.get(given, given)
        inner = fields.get(name)
        if fault := _fault(given, name, default, path=path):
            faults.append(fault)
        elif isinstance(value, Mapping) and isinstance(inner, Mapping):
            inner_path = f"{path}{given}."
            inner_default = getattr(default, name)
            model_type = inner.get("model_type")
            if value.get("model_type", model_type) != model_type:
                auto_config = importlib.import_module("transformers").AutoConfig
                inner, inner_default = {}, auto_config.for_model(value["model_type"])
            merged[name] = _merged(inner, value, inner_default, path=inner_path, faults=faults)
        else:
            merged[name] = value
    return merged


def _fault(given: str, name: str, default: PreTrainedConfig, *, path: str) -> str | None:
    """Say what is wrong with the name of an override, with the nearest field."""
    if name in _ARGUMENTS or (hasattr(default, name) and not callable(getattr(default, name))):
        return None
    fault = f"{path + given!r} is no field of {type(default).__name__}"
    nearest = [] if hasattr(default, name) else get_close_matches(given, vars(default), n=1)
    return f"{fault}; did you mean {path + nearest[0]!r}?" if nearest else fault


@torch.no_grad()
def _prepare(model: torch.nn.Module) -> None:
    """Set evaluation mode, float32, and the weights: wide noise, in vectors narrow noise around one or zero."""
    model.to(dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
        noise = noise.to(parameter.device)
        # Around one where it was one: other initial values may be random (CLIP's class embedding), and are dropped.
        parameter.copy_(noise * 0.3 if parameter.ndim > 1 else noise * 0.1 + (parameter == 1))


def _ids(vocabulary_size: int, generator: torch.Generator) -> torch.Tensor:
    """Draw token ids of shape (batch, length), none of them special."""
    shape = (_BATCH, _LENGTH)
    return torch.randint(_FIRST_PLAIN_ID, vocabulary_size, shape, generator=generator, device="cpu")


def _pixels(config: Any, generator: torch.Generator) -> torch.Tensor:
    """Draw an image batch, float32 of shape (batch, channels, height, width), for a vision config."""
    shape = (_BATCH, config.num_channels, config.image_size, config.image_size)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _patches_and_text(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw one image a row in patches, each merged block of which stands for one token of the row."""
    vision = config.vision_config
    side = 2 * vision.spatial_merge_size
    num_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    text = _ids(config.vision_start_token_id, generator)
    image = torch.full((_BATCH, 4), config.image_token_id, device="cpu")
    ids = torch.cat([text[:, :1], image, text[:, 1:]], dim=1)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "image_grid_thw": torch.tensor([[1, side, side]] * _BATCH, device="cpu"),
        "pixel_values": torch.randn(
            (_BATCH * side**2, num_values), generator=generator, dtype=torch.float32, device="cpu"
        ),
    }
