"""Loads and saves of patched models: what fits is carried exactly, what doesn't is refused before it is read."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    WeightConverter,
    modeling_utils,
)
from transformers.core_model_loading import Concatenate, ConversionOps, WeightRenaming
from transformers.models.bert.modeling_bert import BertPooler
from transformers.models.llama.modeling_llama import LlamaMLP

from modelpatch import (
    ArgumentError,
    LayoutError,
    NoReportError,
    Patch,
    WeightsError,
    get_patch_mapping,
    ledger,
    patched,
    register_patch_mapping,
    report,
    unregister_patch_mapping,
)
from modelpatch.testing import tiny_config, tiny_inputs, tiny_model
from modelpatch.weights import (
    converted,
    create,
    drop,
    fuse,
    register_checkpoint_conversion_mapping,
    transpose,
)


class FusedAttention(nn.Module):
    """Llama's attention with one projection for queries, keys and values; it only has to run."""

    def __init__(self, config, layer_idx):
        super().__init__()
        width = config.head_dim
        self.sizes = [config.num_attention_heads * width] + 2 * [config.num_key_value_heads * width]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.attention_bias)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden_states, **kwargs):
        query, key, value = self.qkv_proj(hidden_states).split(self.sizes, -1)
        mixed = query + torch.cat([key, value], -1)
        return self.o_proj(mixed), None


class TransposedMLP(nn.Module):
    """The names of the original, and square matrices the other way round."""

    def __init__(self, config):
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (config.hidden_size, config.intermediate_size)
            shape = shape[::-1] if name == "down_proj" else shape
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x):
        return (nn.functional.silu(x @ self.gate_proj) * (x @ self.up_proj)) @ self.down_proj


QKV = {"qkv_proj": fuse("q_proj", "k_proj", "v_proj")}
FUSED = Patch("fused-qkv", {"LlamaAttention": FusedAttention}, {FusedAttention: QKV}, version="2")
TRANSPOSED = Patch(
    "transposed",
    {"LlamaMLP": TransposedMLP},
    {TransposedMLP: {n: transpose(f"{n}.weight") for n in ("gate_proj", "up_proj", "down_proj")}},
)
SITE = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def checkpoint(stock, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    stock.save_pretrained(folder)
    return folder


@pytest.fixture
def registered_conversion():
    """Registers a conversion for Llama, and takes it back."""
    yield lambda *mapping: register_checkpoint_conversion_mapping(
        "llama", list(mapping), overwrite=True
    )
    register_checkpoint_conversion_mapping("llama", [], overwrite=True)


def load(folder, *patches, strict=True, **kwargs):
    with patched(*(patches or (FUSED,)), strict=strict):
        return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def edited(checkpoint, folder, edit):
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_same_files(one, other):
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert {k: (t.shape, t.dtype) for k, t in found.items()} == {
        k: (t.shape, t.dtype) for k, t in expected.items()
    }
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


# --- what is carried --------------------------------------------------------------------------------------------------


def test_a_patched_load_holds_the_files_tensors_and_saves_them_as_they_were(
    stock, checkpoint, tmp_path
):
    model = load(checkpoint)
    model.save_pretrained(tmp_path)

    attention = stock.model.layers[1].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert torch.equal(
        model.model.layers[1].self_attn.qkv_proj.weight, torch.cat([p.weight for p in parts])
    )
    assert_same_files(checkpoint, tmp_path)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"device_map": "auto"},
        {"device_map": {"": "cpu"}},
        {"low_cpu_mem_usage": True},
        {"dtype": torch.float32},
    ],
)
def test_every_way_to_place_the_weights_carries_them(checkpoint, tmp_path, kwargs):
    load(checkpoint, **kwargs).save_pretrained(tmp_path)

    assert_same_files(checkpoint, tmp_path)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_weights_offloaded_to_disk_are_the_replacements_and_are_saved_as_the_stock_ones(
    stock, checkpoint, tmp_path
):
    on_disk = {f"model.layers.{i}": "disk" for i in (1, 2)}
    places = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    model = load(
        checkpoint,
        device_map=dict.fromkeys(places, "cpu") | on_disk,
        offload_folder=tmp_path / "offload",
    )
    inputs = tiny_inputs(stock)

    assert model.model.layers[1].self_attn.qkv_proj.weight.is_meta
    assert torch.equal(model(**inputs).logits, load(checkpoint)(**inputs).logits)
    model.save_pretrained(tmp_path / "saved")
    assert_same_files(checkpoint, tmp_path / "saved")


def test_a_file_in_the_replacements_own_layout_is_read_too(checkpoint, tmp_path):
    load(checkpoint).save_pretrained(tmp_path / "own", save_original_format=False)

    load(tmp_path / "own").save_pretrained(tmp_path / "stock")

    assert_same_files(checkpoint, tmp_path / "stock")


def test_a_created_parameter_is_initialised_saved_and_read_again(checkpoint, tmp_path):
    class Scaled(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.scale = nn.Parameter(torch.full((3,), 2.0))

    patch = Patch("scaled", {"LlamaMLP": Scaled}, {Scaled: {"scale": create}})
    model = load(checkpoint, patch)
    first = model.model.layers[0].mlp.scale
    assert torch.equal(first, torch.full((3,), 2.0))
    assert {e.operation for e in ledger(model).entries if "scale" in e.target} == {"created"}
    first.data.fill_(7.0)

    model.save_pretrained(tmp_path)

    assert torch.equal(load(tmp_path, patch).model.layers[0].mlp.scale, torch.full((3,), 7.0))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_copies_of_a_patched_model_are_saved_in_the_stock_layout(checkpoint, tmp_path, copier):
    copier(load(checkpoint)).save_pretrained(tmp_path)

    assert_same_files(checkpoint, tmp_path)


def test_tied_embeddings_stay_tied(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "stock")

    model = load(tmp_path / "stock")
    model.save_pretrained(tmp_path / "saved")

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_files(tmp_path / "stock", tmp_path / "saved")


# --- the specification's way ------------------------------------------------------------------------------------------


def joined(operation):
    return WeightConverter(["q_proj", "k_proj", "v_proj"], ["qkv_proj"], operations=[operation])


def test_a_registered_concatenation_is_taken_back_to_the_original_row_counts(
    checkpoint, tmp_path, registered_conversion
):
    registered_conversion(joined(Concatenate(dim=0)))

    load(checkpoint, {"LlamaAttention": FusedAttention}).save_pretrained(tmp_path)

    assert_same_files(checkpoint, tmp_path)  # Transformers' own cuts 64 rows into 22, 22 and 20


def test_a_registered_operation_whose_reverse_loses_something_is_refused(
    checkpoint, registered_conversion
):
    class Unequal(ConversionOps):
        reverse_op = property(lambda self: Equal())

        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            tensors = [input_dict[pattern][0] for pattern in source_patterns]
            return {target_patterns[0]: torch.cat(tensors)}

    class Equal(ConversionOps):
        reverse_op = property(lambda self: Unequal())

        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            ((tensor,),) = input_dict.values()
            return dict(zip(target_patterns, tensor.chunk(3), strict=True))

    registered_conversion(joined(Unequal()))

    with pytest.raises(WeightsError, match=r"qkv_proj.weight: Unequal doesn't give .* bit for bit"):
        load(checkpoint, {"LlamaAttention": FusedAttention})
    lenient = load(checkpoint, {"LlamaAttention": FusedAttention}, strict=False)
    assert "bit for bit" in ledger(lenient).faults[0]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_replacement_without_a_layout_is_refused_with_both_sides(checkpoint):
    with pytest.raises(WeightsError) as caught:
        load(checkpoint, {"LlamaAttention": FusedAttention})

    faults = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == 3 * 4
    assert f"{SITE}.q_proj.weight: in the files, and nothing in the model takes it" in faults
    assert f"{SITE}.qkv_proj.weight [64, 32]: in no file; the files hold {SITE}.k_proj" in faults
    assert "... and 2 more" in str(caught.value)


def test_lenient_loads_have_the_faults_in_the_ledger_and_no_unwritten_memory(checkpoint):
    torch.use_deterministic_algorithms(mode=True)  # fills fresh memory with NaN
    try:
        model = load(checkpoint, {"LlamaAttention": FusedAttention}, strict=False)
    finally:
        torch.use_deterministic_algorithms(mode=False)

    account = ledger(model)
    assert len(account.faults) == 12
    assert f"{SITE}.q_proj.weight" in account.unused
    assert {e.operation for e in account.entries if "qkv_proj" in e.target} == {"missing"}
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop(f"{SITE}.k_proj.weight"),
            r"k_proj.weight \[16, 32\]: in no file; .*qkv_proj.weight needs it: fuse",
        ),
        (
            lambda t: t.update({f"{SITE}.q_proj.scale": torch.ones(1)}),
            "q_proj.scale: in the files, and nothing in the model takes it",
        ),
        (
            lambda t: t.update({f"{SITE}.q_proj.weight": torch.zeros(16, 32)}),
            r"q_proj.weight: \[16, 32\] in the files .*, \[32, 32\] in the model",
        ),
        (
            lambda t: t.update({f"{SITE}.q_proj.weight": torch.zeros(32, 32, dtype=torch.int64)}),
            r"q_proj.weight: torch.int64 in the files .*, torch.float32 in the model",
        ),
        (
            lambda t: t.update(
                {f"{SITE.removeprefix('model.')}.q_proj.weight": torch.ones(32, 32)}
            ),
            "q_proj.weight: the files hold it twice",
        ),
        (
            lambda t: t.update({f"{SITE}.qkv_proj.weight": torch.ones(64, 32)}),
            "qkv_proj.weight: the files hold it, and parts of fuse",
        ),
        (
            lambda t: t.update({f"{SITE}.o_proj.weight": torch.ones(32, 31)}),
            r"o_proj.weight: \[32, 31\] in the files .*, \[32, 32\] in the model",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "twice", "both layouts", "kept shape"],
)
def test_files_that_dont_fit_are_refused(checkpoint, tmp_path, edit, message):
    folder = edited(checkpoint, tmp_path, edit)

    with pytest.raises(WeightsError, match=message) as caught:
        load(folder)

    assert len(caught.value.faults) == 1
    assert "FusedAttention in the place of LlamaAttention of patch 'fused-qkv'" in str(caught.value)


def test_renamings_that_lead_in_a_circle_are_refused(checkpoint, registered_conversion):
    registered_conversion(
        WeightRenaming("q_proj", "k_proj"),
        WeightRenaming("k_proj", "q_proj"),
    )

    with pytest.raises(WeightsError) as caught:
        load(checkpoint)
    faults = "\n".join(caught.value.faults)
    assert f"{SITE}.q_proj.weight: the files hold it twice, as {SITE}.k_proj.weight and" in faults
    assert f"{SITE}.k_proj.weight [16, 32]: in no file" in faults


def test_outside_of_replaced_modules_transformers_verdict_stands_and_is_shown(checkpoint, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.mlp.extra"] = torch.ones(1)
        del tensors["model.norm.weight"]

    model = load(edited(checkpoint, tmp_path, edit))

    account = ledger(model)
    assert account.unused == ("model.layers.0.mlp.extra",)
    (norm,) = (entry for entry in account.entries if entry.target == "model.norm.weight")
    assert (norm.sources, norm.operation, norm.site) == ((), "initialised", None)


def test_head_and_base_load_each_others_files(checkpoint, tmp_path):
    class Pooler(BertPooler):
        pass

    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
    BertModel(config).save_pretrained(tmp_path / "base")
    BertForSequenceClassification(config).save_pretrained(tmp_path / "head")

    with patched({"BertPooler": Pooler}):
        head = BertForSequenceClassification.from_pretrained(tmp_path / "base")
        base = BertModel.from_pretrained(tmp_path / "head")

    assert [e.target for e in ledger(head).entries if not e.sources] == [
        "classifier.weight",
        "classifier.bias",
    ]
    assert ledger(base).unused == ("classifier.bias", "classifier.weight")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"qkv_proj": fuse("q_prj", "k_proj", "v_proj")}, "no 'q_prj'; nearest: q_proj"),
        ({"qkv_proj": fuse("q_proj", "k_proj")}, r"v_proj.weight \[16, 32\] .*nothing uses it"),
        ({**QKV, "o_proj": "q_proj"}, "q_proj.weight of the original: named 2 times"),
        (
            {**QKV, "qkv_proj.weight": "o_proj.weight"},
            "qkv_proj.weight of the replacement: named 2",
        ),
        (
            {"qkv_proj": fuse("q_proj", "k_proj", "v_proj", dim=1)},
            r"doesn't fit: original .*\[32, 32\]",
        ),
        ({"qkv_proj": fuse("q_proj", "k_proj"), drop: "v_proj"}, "doesn't fit"),
        (
            {"qkv_proj": converted(fuse("q_proj", "k_proj", "v_proj"), torch.clone)},
            "can't be taken back.* has no inverse.*allow_irreversible=True",
        ),
        (
            {"qkv_proj": converted(fuse("q_proj", "k_proj", "v_proj"), torch.clone, torch.round)},
            "doesn't give q_proj.weight back bit for bit",
        ),
    ],
    ids=["name", "unused", "source twice", "target twice", "dim", "shape", "no inverse", "lossy"],
)
def test_layouts_that_dont_hold_are_refused_with_the_site(checkpoint, layout, message):
    patch = Patch("wrong", {"LlamaAttention": FusedAttention}, {FusedAttention: layout})

    with pytest.raises(LayoutError, match=message) as caught:
        load(checkpoint, patch)

    assert SITE in str(caught.value)


def test_an_irreversible_layout_loads_when_allowed_and_is_not_saved_as_stock(checkpoint, tmp_path):
    layout = {"qkv_proj": converted(fuse("q_proj", "k_proj", "v_proj"), torch.clone)}
    patch = Patch(
        "one-way",
        {"LlamaAttention": FusedAttention},
        {FusedAttention: layout},
        allow_irreversible=True,
    )
    model = load(checkpoint, patch)

    with pytest.raises(LayoutError, match="save_original_format=False"):
        model.save_pretrained(tmp_path)

    model.save_pretrained(tmp_path, save_original_format=False)
    assert f"{SITE}.qkv_proj.weight" in load_file(tmp_path / "model.safetensors")


def test_dropped_tensors_are_named_and_not_read(checkpoint, tmp_path):
    class Quiet(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, x):
            return x

    names = ("gate_proj", "up_proj", "down_proj")
    refused = Patch("quiet", {"LlamaMLP": Quiet}, {Quiet: {drop: names}})
    allowed = Patch("quiet", refused.replace, refused.layout, allow_irreversible=True)

    with pytest.raises(LayoutError, match="dropped, so that saving can't give it back"):
        load(checkpoint, refused)
    model = load(checkpoint, allowed)

    assert len(ledger(model).dropped) == 9
    assert ledger(model).unused == ()


def test_a_file_that_is_cut_off_is_named(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(WeightsError, match=r"model.safetensors can't be read: .*cut off"):
        load(tmp_path)


def test_an_index_that_promises_too_much_is_refused(stock, tmp_path):
    stock.save_pretrained(tmp_path, max_shard_size="20KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.lost"] = index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))

    with pytest.raises(WeightsError, match=r"model.lost: the index has it in model-.*no shard"):
        load(tmp_path)


def test_layouts_that_move_a_tied_tensor_are_refused(tmp_path):
    class Table(nn.Module):
        def __init__(self, num_embeddings, embedding_dim, padding_idx=None):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(num_embeddings, embedding_dim))

    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)

    with pytest.raises(WeightsError, match=r"ties it to lm_head.weight by name"):
        load(tmp_path, Patch("table", {nn.Embedding: Table}, {Table: {"table": "weight"}}))


def test_layouts_inside_of_layouts_are_refused(checkpoint):
    class Model(LlamaForCausalLM):
        pass

    outer = Patch("model", {LlamaForCausalLM: Model}, {Model: {}})

    with pytest.raises(LayoutError, match="is inside of the model, which has one too"):
        load(checkpoint, outer, FUSED)


def test_a_load_that_deepspeed_partitions_is_refused(checkpoint):
    model = load(checkpoint)

    with pytest.raises(LayoutError, match="DeepSpeed's ZeRO-3 places the stock model's tensors"):
        modeling_utils._load_state_dict_into_zero3_model(model, {}, None)


def test_two_patches_that_claim_one_class_are_refused_with_both_names(checkpoint):
    other = Patch("other", {".*Attention$": FusedAttention}, {FusedAttention: QKV})

    with pytest.raises(ArgumentError, match=r"'fused-qkv' \('LlamaAttention'\) and 'other'"):
        load(checkpoint, FUSED, other)


def test_patches_compose(stock, checkpoint, tmp_path):
    model = load(checkpoint, FUSED, TRANSPOSED)
    model.save_pretrained(tmp_path)

    assert torch.equal(
        model.model.layers[0].mlp.gate_proj, stock.model.layers[0].mlp.gate_proj.weight.T
    )
    assert_same_files(checkpoint, tmp_path)


def test_a_layout_for_a_class_that_replaces_nothing_is_refused_at_once():
    with pytest.raises(ArgumentError, match="'TransposedMLP', which replaces nothing in it"):
        Patch("wrong", {"LlamaAttention": FusedAttention}, {TransposedMLP: {}})


# --- how long it lasts ------------------------------------------------------------------------------------------------


def test_a_registered_patch_lasts_until_it_is_unregistered(checkpoint, tmp_path):
    FUSED.register()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(ArgumentError, match="by patch 'fused-qkv'"):
        FUSED.register()
    FUSED.unregister()
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)

    model.save_pretrained(tmp_path)

    assert type(plain.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert get_patch_mapping() == {}
    assert_same_files(checkpoint, tmp_path)


def test_plain_loads_beside_and_after_patched_ones_are_untouched(stock, checkpoint, tmp_path):
    broken = edited(checkpoint, tmp_path, lambda t: t.pop(f"{SITE}.k_proj.weight"))
    plain, faults = [], []

    def load_plain():
        try:
            plain.extend(AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(8))
        except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
            faults.append(error)

    with patched(FUSED, strict=False):
        thread = threading.Thread(target=load_plain)
        thread.start()
        models = [AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(8)]
        thread.join()
    with pytest.raises(WeightsError):
        load(broken)
    plain.append(AutoModelForCausalLM.from_pretrained(checkpoint))

    assert faults == []
    assert all(hasattr(model.model.layers[0].self_attn, "qkv_proj") for model in models)
    for model in plain:
        for name, tensor in stock.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)
        with pytest.raises(NoReportError):
            ledger(model)


def test_loads_in_several_dtypes_at_once_get_each_their_own(checkpoint):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    found, faults = [], []
    start = threading.Barrier(2 * len(dtypes))

    def load_all(dtype, *patches):
        try:
            start.wait()
            for _ in range(5):
                with patched(*patches) if patches else nullcontext():
                    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
                found.append((model, dtype, bool(patches)))
        except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
            faults.append(error)

    threads = [
        threading.Thread(target=load_all, args=(dtype, *patches))
        for dtype in dtypes
        for patches in ((), (FUSED,))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert faults == []
    assert len(found) == 5 * len(threads)
    files = load_file(checkpoint / "model.safetensors")
    for model, dtype, is_patched in found:
        attention = model.model.layers[0].self_attn
        assert hasattr(attention, "qkv_proj") == is_patched
        parts = [files[f"{SITE}.{name}_proj.weight"].to(dtype) for name in "qkv"]
        loaded = attention.qkv_proj if is_patched else attention.q_proj
        assert torch.equal(loaded.weight, torch.cat(parts) if is_patched else parts[0])
        assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}
    assert torch.get_default_dtype() == torch.float32


# --- records ----------------------------------------------------------------------------------------------------------


def test_the_config_records_the_patches_and_nothing_else(checkpoint, tmp_path):
    model = load(checkpoint, FUSED, TRANSPOSED)
    model.save_pretrained(tmp_path)

    config, before = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, checkpoint)
    )
    assert config.pop("modelpatch") == {"fused-qkv": "2", "transposed": "1"}
    assert config == before
    assert not hasattr(model.config, "modelpatch")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        file.name for file in checkpoint.iterdir()
    )


def test_a_folder_of_a_patched_model_loads_as_the_stock_model(stock, checkpoint, tmp_path):
    load(checkpoint).save_pretrained(tmp_path)

    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")

    inputs = tiny_inputs(stock)
    assert type(model) is LlamaForCausalLM
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


def test_a_replaced_root_keeps_the_originals_name_beside_the_record(checkpoint, tmp_path):
    class Root(LlamaForCausalLM):
        pass

    load(checkpoint, Patch("root", {LlamaForCausalLM: Root})).save_pretrained(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["modelpatch"] == {"root": "1"}


def test_the_ledger_accounts_for_every_tensor(checkpoint, capsys):
    model = load(checkpoint)

    account = ledger(model)

    files = load_file(checkpoint / "model.safetensors")
    assert [entry.target for entry in account.entries] == list(model.state_dict())
    assert {key for entry in account.entries for key in entry.sources} == set(files)
    fused = next(e for e in account.entries if e.target == f"{SITE}.qkv_proj.weight")
    assert set(fused.sources) == {f"{SITE}.{n}_proj.weight" for n in "qkv"}
    assert fused.operation == "fuse(q_proj.weight, k_proj.weight, v_proj.weight, dim=0)"
    assert (fused.num_bytes, fused.site) == (64 * 32 * 4, SITE)
    assert account.summary.startswith("30 tensors of the file fill 24 of 24 in LlamaForCausalLM")
    assert report(model).ledger is account
    account.describe()
    assert "model.layers.*.self_attn.qkv_proj.weight" in capsys.readouterr().out


# --- state dicts and training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", [FUSED, TRANSPOSED], ids=["fused", "transposed"])
def test_stock_and_own_state_dicts_give_the_same_weights(stock, checkpoint, patch):
    expected = load(checkpoint, patch).state_dict()
    with patched(patch):
        model = tiny_model("llama")

    for source in (stock.state_dict(), expected):
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(source)
        assert all(torch.equal(model.state_dict()[name], t) for name, t in expected.items())


def test_a_stock_state_dict_may_come_in_pieces(stock, checkpoint):
    model = load(checkpoint)
    for parameter in model.parameters():
        parameter.data.zero_()
    items = sorted(stock.state_dict().items())

    for half in (dict(items[::2]), dict(items[1::2])):
        model.load_state_dict(half, strict=False)

    expected = load(checkpoint).state_dict()
    assert all(torch.equal(model.state_dict()[name], t) for name, t in expected.items())


def test_a_stock_state_dict_that_lacks_a_part_is_refused(stock, checkpoint):
    model = load(checkpoint)
    partial = {k: t for k, t in stock.state_dict().items() if k != f"{SITE}.k_proj.weight"}

    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{SITE}.k_proj'):
        model.load_state_dict(partial)


def test_a_state_dict_of_both_layouts_is_refused(stock, checkpoint):
    model = load(checkpoint)

    with pytest.raises(WeightsError, match=r"q_proj.weight of the stock layout and .*qkv_proj"):
        model.load_state_dict(stock.state_dict() | model.state_dict())


class TurnedLinear(nn.Module):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(in_features, out_features))

    def forward(self, x):
        return x @ self.weight


TURNED_SQUARES = Patch(
    "turned",
    {nn.Linear: TurnedLinear},
    {TurnedLinear: {"weight": transpose("weight")}},
    where=lambda in_features, out_features: in_features == out_features,
)


def test_a_state_dict_that_could_be_in_either_layout_says_so_itself_or_is_refused():
    with patched(TURNED_SQUARES):
        model = tiny_model("llama")
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    model.load_state_dict(model.state_dict())

    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in own.items())
    with pytest.raises(WeightsError, match="one name and shape in the stock layout and in the pat"):
        model.load_state_dict(own)


def test_a_file_that_could_be_in_either_layout_is_not_saved(checkpoint, tmp_path):
    model = load(checkpoint, TURNED_SQUARES)

    with pytest.raises(LayoutError, match=r"q_proj\.weight, TurnedLinear in the place of"):
        model.save_pretrained(tmp_path / "own", save_original_format=False)

    assert not (tmp_path / "own").exists()
    model.save_pretrained(tmp_path / "stock")
    assert_same_files(checkpoint, tmp_path / "stock")


def train(model, folder, *, resume=None, killed_at=None):
    """Three steps, or fewer if the process is killed in one; returns the losses."""
    losses = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            losses.extend([logs["loss"]] if "loss" in logs else [])

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step + 1 == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    rows = [torch.arange(3, 13) + i for i in range(12)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Watch()])
    trainer.train(resume_from_checkpoint=resume)
    return losses


def train_until_killed(checkpoint, folder):
    """Runs in a process of its own."""
    train(load(checkpoint), folder, killed_at=3)


@pytest.mark.filterwarnings("ignore")  # Trainer's own
def test_training_resumes_from_its_files_as_if_it_had_not_been_killed(checkpoint, tmp_path):
    whole_model, resumed_model = load(checkpoint), load(checkpoint)

    whole = train(whole_model, tmp_path / "whole")
    process = multiprocessing.get_context("spawn").Process(
        target=train_until_killed, args=(checkpoint, tmp_path / "parts")
    )
    process.start()
    process.join()
    rest = train(resumed_model, tmp_path / "parts", resume=True)

    assert process.exitcode == -signal.SIGKILL
    assert (len(whole), rest) == (3, whole[2:])
    for one, other in zip(whole_model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(one, other)
    saved = load_file(tmp_path / "parts" / "checkpoint-2" / "model.safetensors")
    assert f"{SITE}.k_proj.weight" in saved
    assert f"{SITE}.qkv_proj.weight" not in saved


# --- other libraries --------------------------------------------------------------------------------------------------


def test_int8_weights_are_the_stock_models_and_saving_them_apart_is_refused(checkpoint, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    quantise = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    model = load(checkpoint, **quantise)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, **quantise)

    attention = stock.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    fused = model.model.layers[0].self_attn.qkv_proj.weight
    assert torch.equal(fused.dequantize(), torch.cat([p.weight.dequantize() for p in parts]))
    with pytest.raises(LayoutError, match="its weights are quantised, and can't be taken apart"):
        model.save_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_on_replaced_modules_train_load_and_merge(stock, checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(load(checkpoint), peft.LoraConfig(target_modules=["qkv_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    inputs = tiny_inputs(stock)
    expected = wrapped(**inputs).logits

    with pytest.raises(LayoutError, match="lora_A"):
        wrapped.get_base_model().save_pretrained(tmp_path / "refused")
    wrapped.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(checkpoint), tmp_path / "adapter")
    assert torch.equal(again(**inputs).logits, expected)
    by_transformers = load(checkpoint)
    by_transformers.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(by_transformers(**inputs).logits, expected)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load(tmp_path / "merged")
    torch.testing.assert_close(merged(**inputs).logits, expected, rtol=0, atol=1e-4)


def test_names_of_transformers_are_those(checkpoint):
    import transformers

    from modelpatch import weights

    assert weights.WeightConverter is transformers.WeightConverter
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        weights.Nothing  # noqa: B018  # asking is the test


def test_unregistering_a_mapping_leaves_a_loaded_model_saveable(checkpoint, tmp_path):
    register_patch_mapping({"LlamaMLP": type("MLP", (LlamaMLP,), {})})
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    unregister_patch_mapping(["LlamaMLP"])

    model.save_pretrained(tmp_path)

    assert_same_files(checkpoint, tmp_path)
    assert tiny_config("llama").model_type == "llama"
