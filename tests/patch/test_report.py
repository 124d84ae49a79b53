"""The report of a patched model."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from modelpatch import (
    NoReportError,
    apply_patches,
    clear_patch_mapping,
    patched,
    register_patch_mapping,
    report,
)
from modelpatch.patch.report import Replaced, Unused
from modelpatch.testing import tiny_config, tiny_model


class MLP(LlamaMLP):
    pass


def test_every_site_is_named_with_path_and_classes():
    with patched({"LlamaMLP": MLP}):
        model = tiny_model("llama")

    found = report(model)

    assert found.model == "LlamaForCausalLM"
    assert found.replaced == tuple(
        Replaced("'LlamaMLP'", f"model.layers.{i}.mlp", "LlamaMLP", "MLP") for i in range(3)
    )
    assert str(found.replaced[0]) == "model.layers.0.mlp: LlamaMLP -> MLP"
    assert found.unused == ()


def test_keys_that_replaced_nothing_are_named_with_the_nearest_names():
    register_patch_mapping({"LlamaMLP": MLP, "LlamaAtention": MLP})
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    clear_patch_mapping()

    assert report(model).unused == (Unused("'LlamaAtention'", ("LlamaAttention",)),)


def test_a_model_in_which_no_key_matched_has_a_report_too():
    with patched({"LlamaMPL": MLP}, strict=False):
        model = tiny_model("llama")

    found = report(model)
    assert found.replaced == ()
    assert found.unused[0].nearest[0] == "LlamaMLP"


def test_scoped_and_registered_keys_are_reported_together():
    register_patch_mapping({"LlamaMLP": MLP})
    with patched(
        {"LlamaRMSNorm": type("Norm", (nn.RMSNorm,), {})},
        where=lambda hidden_size, eps: False,
        strict=False,
    ):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    clear_patch_mapping()

    found = report(model)
    assert {site.key for site in found.replaced} == {"'LlamaMLP'"}
    assert [key.key for key in found.unused] == ["'LlamaRMSNorm'"]


def test_a_model_built_by_hand_has_its_report_inside_the_block_already():
    register_patch_mapping({"LlamaMLP": MLP})
    with apply_patches():
        model = LlamaModel(tiny_config("llama"))
        inside = report(model)
    clear_patch_mapping()

    assert inside == report(model)
    assert len(inside.replaced) == 3


def test_modules_of_other_packages_are_reported_by_their_sites():
    class Own(nn.Linear):
        pass

    with patched({nn.Linear: Own}):
        model = nn.Sequential(nn.Linear(2, 2))

    assert report(model).replaced == (
        Replaced("torch.nn.modules.linear.Linear", "0", "Linear", "Own"),
    )


def test_a_plain_model_has_none():
    with pytest.raises(
        NoReportError, match="LlamaForCausalLM was not built under a patch in this process"
    ):
        report(tiny_model("llama"))


def test_a_report_can_be_stored():
    with patched({"LlamaMLP": MLP}):
        found = report(tiny_model("llama"))

    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301


def test_describe_prints_a_table_with_one_row_for_like_sites(capsys):
    register_patch_mapping({"LlamaMLP": MLP, "Wrong[x]": MLP})
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    clear_patch_mapping()

    report(model).describe()

    printed = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert ["model.layers.*.mlp", "LlamaMLP -> MLP", "'LlamaMLP'", "3"] in printed
    assert ["replaced nothing", "nothing has a similar name", "'Wrong[x]'", "0"] in printed


@pytest.mark.parametrize("other", [None, LlamaMLP])
def test_a_report_of_something_else_is_refused(other):
    with pytest.raises(TypeError, match=r"report\(\) takes a model"):
        report(other)


def test_a_wrapper_that_holds_a_checkpointing_layer_has_not_lost_it():
    class Wrapper(nn.Module):
        def __init__(self, config, layer_idx):
            super().__init__()
            self.inner = LlamaDecoderLayer(config, layer_idx)

    with patched({"LlamaDecoderLayer": Wrapper}):
        model = tiny_model("llama")

    assert not [change for change in report(model).changes if "checkpointing" in change]


def test_a_module_that_holds_its_parent_among_its_arguments_is_freed():
    class Part(nn.Module):
        def __init__(self, context):
            super().__init__()

    class OtherPart(Part):
        pass

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part({"parent": self})

    with patched({Part: OtherPart}):
        whole = Whole()
    alive = weakref.ref(whole)
    del whole
    gc.collect()

    assert alive() is None
