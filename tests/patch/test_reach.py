"""What a key reaches: every place that a class can be built from, and no class that it does not name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DiffLlamaConfig,
    DiffLlamaModel,
    FalconConfig,
    FalconModel,
    PreTrainedModel,
)
from transformers import LlamaForCausalLM as ImportedByValue
from transformers import dynamic_module_utils as dynamic
from transformers.activations import ACT2FN, GELUActivation
from transformers.models.diffllama.modeling_diffllama import DiffLlamaMLP
from transformers.models.falcon import modeling_falcon
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from modelpatch import (
    NothingReplacedError,
    apply_patches,
    clear_patch_mapping,
    patched,
    register_patch_mapping,
)
from modelpatch.testing import tiny_config, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LLAMA = "transformers.models.llama.modeling_llama"
TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def subclass(original: type) -> type:
    return type(f"New{original.__name__}", (original,), {})


def classes(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


class UserBlock(nn.Module):
    """A class of somebody who has nothing to do with Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


# --- where a class is built from ----------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_class_in_an_attention_table_is_reached(implementation: str) -> None:
    replacement = subclass(modeling_falcon.FalconAttention)
    config = FalconConfig(**TINY, attn_implementation=implementation)

    with patched({"FalconAttention": replacement}):
        model = FalconModel(config)

    assert modeling_falcon.FALCON_ATTENTION_CLASSES[implementation] is not replacement
    assert {type(layer.self_attention) for layer in model.h} == {replacement}


def test_an_activation_in_its_table_is_reached_by_a_model_that_looks_it_up() -> None:
    replacement = subclass(GELUActivation)

    with patched({"GELUActivation": replacement}):
        model = tiny_model("bert")
        looked_up = ACT2FN["gelu"]

    assert type(looked_up) is replacement
    assert replacement in classes(model)
    assert GELUActivation not in classes(model)


def test_an_alias_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    replacement = subclass(LlamaMLP)
    alias = LlamaMLP
    monkeypatch.setattr(modeling_llama, "AliasOfMLP", alias, raising=False)

    with patched({"LlamaMLP": replacement}):
        built = [build(tiny_config("llama")) for build in (alias, modeling_llama.AliasOfMLP)]

    assert [type(module) for module in built] == [replacement] * 2


def test_a_class_that_user_code_imported_by_value_is_reached() -> None:
    replacement = subclass(ImportedByValue)

    with patched({"LlamaForCausalLM": replacement}):
        model = ImportedByValue(tiny_config("llama"))

    assert type(model) is replacement


@pytest.mark.parametrize("build", [AutoModel.from_config, LlamaModel._from_config, LlamaModel])
def test_the_root_class_is_reached(build: Callable[[Any], nn.Module]) -> None:
    replacement = subclass(LlamaModel)

    with patched({"LlamaModel": replacement}):
        model = build(tiny_config("llama"))

    assert type(model) is replacement


def test_the_root_class_is_reached_when_loading(tmp_path: Path) -> None:
    stock = tiny_model("llama")
    stock.save_pretrained(tmp_path)
    replacement = subclass(ImportedByValue)

    with patched({"LlamaForCausalLM": replacement}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert type(model) is replacement
    assert all((model.state_dict()[k] == v).all() for k, v in stock.state_dict().items())


@pytest.mark.parametrize("key", ["FreshBlock", "^Fresh", "{module}.FreshBlock"])
def test_a_model_module_that_is_first_imported_in_the_block_is_reached(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformers.models.fresh.modeling_fresh"
    source = tmp_path / "modeling_fresh.py"
    source.write_text("from torch import nn\n\nclass FreshBlock(nn.Module):\n    pass\n")
    spec = importlib.util.spec_from_file_location(name, source)

    with patched({key.format(module=name): UserBlock}):
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        built = module.FreshBlock()

    assert type(built) is UserBlock


def test_a_user_module_that_is_first_imported_in_the_block_is_reached_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fresh_user_code.py").write_text("from torch import nn\nclass Own(nn.GELU): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fresh_user_code", raising=False)

    with patched({"fresh_user_code.Own": UserBlock}):
        built = importlib.import_module("fresh_user_code").Own()

    assert type(built) is UserBlock


REMOTE = dedent("""
    from torch import nn
    from transformers import BertConfig, PreTrainedModel

    class RemoteBlock(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.linear = nn.Linear(config.hidden_size, config.hidden_size)

    class RemoteModel(PreTrainedModel):
        config_class = BertConfig

        def __init__(self, config):
            super().__init__(config)
            self.block = RemoteBlock(config)
            self.post_init()
""")


@pytest.fixture
def remote_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a model with its code, and let that be imported from nowhere but this test's folder."""
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "modeling_remote.py").write_text(REMOTE)
    remote = dynamic.get_class_from_dynamic_module("modeling_remote.RemoteModel", folder)
    remote(tiny_config("bert")).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_remote.RemoteModel"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("derives", [True, False])
def test_a_replaced_model_of_remote_code_is_saved_with_all_that_stock_saves(
    remote_checkpoint: Path, tmp_path: Path, derives: bool
) -> None:
    stock = AutoModel.from_pretrained(remote_checkpoint, trust_remote_code=True)
    remote, block = type(stock), sys.modules[type(stock).__module__].RemoteBlock

    def init(self: Any, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.block = block(config)
        self.post_init()

    body = {} if derives else {"config_class": BertConfig, "__init__": init}
    replacement = type("Own", (remote if derives else PreTrainedModel,), body)

    with patched({"RemoteModel": replacement}):
        model = AutoModel.from_pretrained(remote_checkpoint, trust_remote_code=True)
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "patched")

    assert type(model) is replacement
    for file in (tmp_path / "stock").iterdir():  # the code as well, since 5.20 or later
        assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes(), file.name


def test_code_of_a_checkpoint_is_reached_each_time_it_is_executed(remote_checkpoint: Path) -> None:
    class NewBlock(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.linear = nn.Linear(config.hidden_size, config.hidden_size)

    originals: list[type] = []

    def load() -> nn.Module:
        # Executed again where the text has changed.
        source = f"{REMOTE}\nEXECUTED = {len(originals)}\n"
        (remote_checkpoint / "modeling_remote.py").write_text(source)
        model = AutoModel.from_pretrained(remote_checkpoint, trust_remote_code=True)
        originals.append(sys.modules[type(model).__module__].RemoteBlock)
        return model

    plain = load()
    with patched({"RemoteBlock": NewBlock}):
        first, second = load(), load()
    after = load()

    assert len(set(originals)) == 4
    assert type(first.block) is type(second.block) is NewBlock
    assert (type(plain.block), type(after.block)) == (originals[0], originals[3])
    assert (second.block.linear.weight == plain.block.linear.weight).all()


# --- what a key names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [LlamaModel, f"{LLAMA}.LlamaModel", "transformers.LlamaModel", "LlamaModel", "^LlamaModel$"],
    ids=str,
)
def test_every_form_of_key_reaches_a_model_class(key: str | type) -> None:
    replacement = subclass(LlamaModel)

    with patched({key: replacement}):
        model = ImportedByValue(tiny_config("llama"))

    assert type(model.model) is replacement


@pytest.mark.parametrize("key", [nn.Linear, "torch.nn.Linear", "torch.nn.modules.linear.Linear"])
def test_a_class_and_a_path_reach_any_package(key: str | type) -> None:
    replacement = subclass(nn.Linear)

    with patched({key: replacement}):
        built = UserBlock()

    assert type(built.linear) is replacement


def test_a_path_reaches_a_nested_class_by_its_qualified_name() -> None:
    class Outer:
        class Inner(nn.Module):
            pass

    path = f"{Outer.Inner.__module__}.Inner"
    Outer.Inner.__qualname__ = "Outer.Inner"

    with patched({path.replace(".Inner", ".Outer.Inner"): UserBlock}):
        built = Outer.Inner()

    assert type(built) is UserBlock


@pytest.mark.parametrize("key", ["Linear", "^Linear$", "UserBlock", "User.lock"])
def test_a_name_and_a_pattern_reach_model_code_only(key: str) -> None:
    with patched({key: nn.Identity}, strict=False):
        built = UserBlock()

    assert classes(built) == {UserBlock, nn.Linear}


@pytest.mark.parametrize("module", ["transformers.quantizers.x", "transformers.modelsx", "models"])
def test_a_name_does_not_reach_what_only_looks_like_model_code(module: str) -> None:
    own = type("Own", (nn.Module,), {"__module__": module})

    with patched({"Own": nn.Identity, "^Own": nn.ReLU}, strict=False):
        built = own()

    assert type(built) is own


def test_a_name_is_never_a_pattern() -> None:
    config = DiffLlamaConfig(**TINY)

    with patched({"LlamaMLP": subclass(LlamaMLP)}, strict=False):
        model = DiffLlamaModel(config)

    assert DiffLlamaMLP in classes(model)


def test_a_pattern_is_searched_for_and_not_matched_whole() -> None:
    replacement = subclass(DiffLlamaMLP)

    with patched({"lamaML.": replacement}):
        model = DiffLlamaModel(DiffLlamaConfig(**TINY))

    assert {type(layer.mlp) for layer in model.layers} == {replacement}


def test_a_path_does_not_reach_a_class_of_the_same_name_elsewhere() -> None:
    other = type("LlamaMLP", (nn.Module,), {"__module__": "transformers.models.other.modeling"})

    with patched({f"{LLAMA}.LlamaMLP": nn.Identity}, strict=False):
        built = other()

    assert type(built) is other


def test_a_subclass_of_a_named_class_is_not_reached() -> None:
    own = type("Own", (LlamaMLP,), {"__module__": LLAMA})

    with patched({LlamaMLP: UserBlock}, strict=False):
        built = own(tiny_config("llama"))

    assert type(built) is own


FORMS = {
    "class": LlamaMLP,
    "path": f"{LLAMA}.LlamaMLP",
    "name": "LlamaMLP",
    "pattern": "LlamaMLP$",
    "later pattern": "Llama.LP",
}


@pytest.mark.parametrize("weaker", list(FORMS)[1:])
@pytest.mark.parametrize("globally", [False, True])
def test_a_class_beats_a_path_beats_a_name_beats_a_pattern(weaker: str, globally: bool) -> None:
    forms = list(FORMS)
    stronger = forms[forms.index(weaker) - 1]
    weak, strong = subclass(LlamaMLP), subclass(LlamaMLP)
    keys = {FORMS[weaker]: weak, FORMS[stronger]: strong}
    if weaker == "later pattern":  # Among patterns the first one wins.
        keys = dict(reversed(keys.items()))

    if globally:
        register_patch_mapping(keys)
    with apply_patches() if globally else patched(keys, strict=False):
        built = LlamaMLP(tiny_config("llama"))
    clear_patch_mapping()

    assert type(built) is strong


def test_a_replacement_that_its_own_pattern_names_is_no_replaced_site() -> None:
    model_code = type("OwnMLP", (LlamaMLP,), {"__module__": LLAMA})

    with pytest.raises(NothingReplacedError), patched({"MLP$": model_code}):
        model_code(tiny_config("llama"))


# --- what is left alone -------------------------------------------------------------------------


@pytest.mark.parametrize("globally", [False, True])
def test_a_broad_pattern_imports_nothing(globally: bool) -> None:
    pattern = ".*ForCausalLM$"
    replacement = subclass(ImportedByValue)
    with patched({ImportedByValue: replacement}):
        AutoModelForCausalLM.from_config(tiny_config("llama"))
    before = set(sys.modules)

    if globally:
        register_patch_mapping({pattern: replacement})
    with apply_patches() if globally else patched({pattern: replacement}):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    clear_patch_mapping()

    assert type(model) is replacement
    assert set(sys.modules) == before


def test_no_name_in_any_module_is_rebound() -> None:
    def names() -> dict[str, dict[str, Any]]:
        modules = [(n, m) for n, m in sys.modules.items() if n.startswith("transformers.models.")]
        return {name: dict(vars(module)) for name, module in modules}

    tiny_model("llama")
    before = names()

    with patched({"LlamaMLP": subclass(LlamaMLP)}):
        tiny_model("llama")
        inside = names()

    assert inside == before
