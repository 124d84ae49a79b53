"""Keys: what they name, what is refused, and where `where` lets them through."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
from torch import nn
from transformers import BertModel, LlamaModel
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from modelpatch import (
    ArgumentError,
    ArgumentTypeError,
    ContainerMatchError,
    NothingReplacedError,
    Patch,
    patched,
)
from modelpatch.patch.rules import RuleSet, compile_rules
from modelpatch.testing import tiny_config, tiny_model


class MLP(LlamaMLP):
    pass


class OtherMLP(LlamaMLP):
    pass


class Attention(BertSelfAttention):
    pass


def layers(model):
    return [type(layer.mlp) for layer in model.model.layers]


def test_a_pattern_that_matches_a_container_and_its_content_is_refused_with_both_names():
    with pytest.raises(ContainerMatchError) as caught, patched({".*Attention": Attention}):
        BertModel(tiny_config("bert"))

    assert caught.value.container == "BertAttention"
    assert caught.value.inner == ("BertCrossAttention", "BertSelfAttention")
    assert str(caught.value) == (
        "Pattern '.*Attention' matches BertAttention and also BertCrossAttention, BertSelfAttention, which "
        "BertAttention builds: replacing the outer one would drop what is inside. Use a narrower pattern, or the exact "
        "name of the class that is meant."
    )


def test_the_narrower_pattern_works():
    with patched({".*SelfAttention$": Attention}):
        model = BertModel(tiny_config("bert"))

    assert {type(layer.attention.self) for layer in model.encoder.layer} == {Attention}


def test_a_container_is_found_where_no_code_names_what_it_holds():
    """`LlavaModel` gets its parts from Auto classes: only a build shows them."""

    class Anything(nn.Module):
        def __init__(self, *args):
            super().__init__()

    with pytest.raises(ContainerMatchError) as caught, patched({"^Llava|LlamaModel": Anything}):
        tiny_model("llava")

    assert "LlamaModel" in caught.value.inner


def test_looking_into_a_container_keeps_no_class_alive():
    def build():
        class Inner(nn.Module):
            pass

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Inner()

        class Replacement(nn.Module):
            pass

        Inner.__module__ = Outer.__module__ = "transformers.models.made_up"
        with patched({"Oute.": Replacement}):
            Outer()
        return weakref.ref(Outer), weakref.ref(Inner)

    references = build()
    gc.collect()

    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize(
    ("key", "replacement", "error", "message"),
    [
        ("LlamaMLP", "a string", ArgumentTypeError, "Replacement for 'LlamaMLP' must be a class"),
        (
            "LlamaMLP",
            MLP(tiny_config("llama")),
            ArgumentTypeError,
            "must be a class, got an object of type MLP",
        ),
        ("LlamaMLP", dict, ArgumentTypeError, "must be a subclass of nn.Module, got dict"),
        (
            dict,
            MLP,
            ArgumentTypeError,
            "A key is a class name, a pattern, a dotted path or an nn.Module class",
        ),
        (7, MLP, ArgumentTypeError, "A key is a class name"),
        ("Llama(MLP", MLP, ArgumentError, "neither a class name nor a valid pattern: missing \\)"),
        ("", MLP, ArgumentError, "An empty key would match every class"),
        ("LlamaMLP", LlamaMLP, ArgumentError, "is the original itself"),
        (LlamaMLP, LlamaMLP, ArgumentError, "is the original itself"),
        (
            "transformers.models.llama.modeling_llama.LlamaMLP",
            LlamaMLP,
            ArgumentError,
            "is the original itself",
        ),
    ],
)
def test_a_bad_entry_is_refused_before_anything_is_built(key, replacement, error, message):
    with pytest.raises(error, match=message):
        patched({key: replacement})


def test_all_bad_entries_are_named_at_once():
    with pytest.raises(ArgumentTypeError) as caught:
        patched({"A": 1, "B": dict, "C(": MLP, "LlamaMLP": MLP})

    assert len(caught.value.faults) == 3
    assert str(caught.value).startswith("3 entries can't be used:\n  - Replacement for 'A'")


def test_many_faults_are_counted_after_the_first_ten():
    with pytest.raises(ArgumentTypeError, match="and 5 more") as caught:
        patched({f"Key{i}": 1 for i in range(15)})

    assert len(caught.value.faults) == 15


def test_a_string_instead_of_a_mapping_is_refused():
    with pytest.raises(
        ArgumentTypeError, match="expected a mapping from keys to replacement classes, got str"
    ):
        patched("LlamaMLP")


def test_no_key_at_all_is_refused():
    with pytest.raises(ArgumentError, match="needs at least one key"):
        patched({})


def test_two_patches_that_claim_one_key_are_refused_with_both_names():
    first, second = Patch("first", {"LlamaMLP": MLP}), Patch("second", {"LlamaMLP": OtherMLP})

    with pytest.raises(ArgumentError, match="Two patches claim 'LlamaMLP': 'first' and 'second'"):
        patched(first, second)


def test_patches_and_mappings_compose():
    with patched(
        Patch("mlp", {"LlamaMLP": MLP}), {"LlamaAttention": type("Own", (LlamaAttention,), {})}
    ):
        model = tiny_model("llama")

    assert layers(model) == [MLP] * 3
    assert type(model.model.layers[0].self_attn).__name__ == "Own"


def test_where_leaves_the_first_and_last_layers_alone():
    with patched(
        {"LlamaAttention": type("Own", (LlamaAttention,), {})},
        where=lambda config, layer_idx: 0 < layer_idx < config.num_hidden_layers - 1,
    ):
        model = tiny_model("llama", num_hidden_layers=4)

    names = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert names == ["LlamaAttention", "Own", "Own", "LlamaAttention"]


def test_where_selects_a_tower_by_its_config():
    with patched(
        {nn.Linear: type("Own", (nn.Linear,), {})}, where=lambda in_features, **_: in_features == 48
    ):
        model = tiny_model("llava")

    own = {path for path, module in model.named_modules() if type(module).__name__ == "Own"}
    assert own
    assert all(path.endswith(("down_proj", "fc2")) for path in own)

    with patched(
        {"LlamaMLP": MLP, "CLIPMLP": MLP},
        where=lambda config: config.model_type == "llama",
        strict=False,
    ):
        model = tiny_model("llava")

    assert {
        path.split(".")[1] for path, module in model.named_modules() if type(module) is MLP
    } == {"language_model"}


def test_where_of_a_patch_and_of_the_block_both_hold():
    patch = Patch(
        "own",
        {"LlamaAttention": type("Own", (LlamaAttention,), {})},
        where=lambda layer_idx: layer_idx > 0,
    )

    with patched(patch, where=lambda layer_idx: layer_idx < 2):
        model = tiny_model("llama")

    assert [type(layer.self_attn).__name__ == "Own" for layer in model.model.layers] == [
        False,
        True,
        False,
    ]


def test_where_sees_defaults_and_optional_names():
    seen = []

    def note(in_features, bias, absent="default"):
        seen.append((in_features, bias, absent))
        return True

    with patched({nn.Linear: type("Own", (nn.Linear,), {})}, where=note):
        nn.Linear(2, 3)

    assert seen == [(2, True, "default")]


def test_where_that_asks_for_what_no_site_has_is_refused_by_name():
    with (
        pytest.raises(
            ArgumentTypeError, match=r"asks for layer_idx, and LlamaMLP is built from config"
        ),
        patched({"LlamaMLP": MLP}, where=lambda layer_idx: True),
    ):
        tiny_model("llama")


def test_where_must_be_callable():
    with pytest.raises(
        ArgumentTypeError, match="where= must be a function with a signature: 3 is not"
    ):
        patched({"LlamaMLP": MLP}, where=3)


def test_where_that_turns_everything_down_is_said_on_leaving():
    with (
        pytest.raises(NothingReplacedError, match="where= turned down all 3 constructions"),
        patched({"LlamaMLP": MLP}, where=lambda config: False),
    ):
        tiny_model("llama")


def test_a_key_that_replaced_nothing_raises_on_leaving_with_the_nearest_classes():
    with pytest.raises(NothingReplacedError) as caught, patched({"LlamaMPL": MLP}):
        tiny_model("llama")

    assert str(caught.value) == (
        "Key 'LlamaMPL' replaced nothing. Nearest classes that were built: LlamaMLP, LlamaModel, LlamaRMSNorm."
    )


def test_a_key_that_a_stronger_one_shadows_is_said_to_be():
    with (
        pytest.raises(NothingReplacedError, match="a stronger key took LlamaMLP"),
        patched({LlamaMLP: MLP, "LlamaMLP": OtherMLP}),
    ):
        tiny_model("llama")


def test_a_block_in_which_nothing_was_built_says_so():
    with (
        pytest.raises(NothingReplacedError, match="no module was built"),
        patched({"LlamaMLP": MLP}),
    ):
        pass


def test_a_block_that_is_not_strict_stays_silent():
    with patched({"LlamaMPL": MLP}, strict=False):
        model = tiny_model("llama")

    assert layers(model) == [LlamaMLP] * 3


def test_an_inner_key_wins_and_the_outer_one_is_back_afterwards():
    with patched({"LlamaMLP": MLP}):
        with patched({".*MLP$": OtherMLP}):
            inner = tiny_model("llama")
        outer = tiny_model("llama")

    assert layers(inner) == [OtherMLP] * 3
    assert layers(outer) == [MLP] * 3


def test_patterns_go_in_the_order_of_registration():
    rules = RuleSet(compile_rules({"Llama.*": MLP, ".*MLP": OtherMLP}))

    assert [rule.replacement for rule in rules.matching(LlamaMLP)] == [MLP, OtherMLP]


def test_what_a_rule_builds_is_not_replaced_again():
    class Left(nn.Module):
        pass

    class Right(nn.Module):
        pass

    with patched({Left: Right, Right: Left}):
        assert type(Left()) is Right
        assert type(Right()) is Left


@pytest.mark.parametrize("where", [lambda *args: True, eval("lambda config, /: True")])  # noqa: S307  # positional
def test_where_that_takes_arguments_by_position_is_refused(where):
    with pytest.raises(
        ArgumentTypeError, match=r"by keyword, and takes (args|config) by position only"
    ):
        patched({"LlamaMLP": MLP}, where=where)


def test_a_name_outside_of_model_code_is_told_how_to_be_reached():
    class MyLayer(nn.Module):
        pass

    with (
        pytest.raises(NothingReplacedError, match="Give the class itself, or its dotted path"),
        patched({"MyLayer": nn.Identity}),
    ):
        MyLayer()


def test_a_name_that_was_meant_as_a_pattern_is_told_how_to_write_one():
    with (
        pytest.raises(NothingReplacedError, match=r"exact name. As a pattern, write '\.\*RMS'"),
        patched({"RMS": MLP}),
    ):
        tiny_model("llama")


def test_wrappers_that_derive_from_each_other_do_not_switch_each_other_off():
    class Base(nn.Module):
        original = LlamaMLP

        def __init__(self, *args, **kwargs):
            super().__init__()
            self.inner = self.original(*args, **kwargs)

    class Derived(Base):
        original = LlamaDecoderLayer

    with patched({"LlamaDecoderLayer": Derived, "LlamaMLP": Base}):
        model = LlamaModel(tiny_config("llama"))

    assert [type(layer) for layer in model.layers] == [Derived] * 3
    assert [type(layer.inner.mlp) for layer in model.layers] == [Base] * 3


@pytest.mark.parametrize("method", ["__deepcopy__", "__copy__"])
def test_a_copying_method_of_a_class_without_arguments_copies(method):
    class Plain(nn.Module):
        pass

    def duplicate(self, memo=None):
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        return new

    duplicate.__code__ = duplicate.__code__.replace(co_name=method)
    setattr(Plain, method, duplicate)
    plain = Plain()

    with patched({Plain: nn.Identity}, strict=False):
        duplicated = copy.deepcopy(plain) if method == "__deepcopy__" else copy.copy(plain)

    assert type(duplicated) is Plain


def test_a_replacement_whose_new_returns_something_else_is_taken_at_its_word():
    class Odd(nn.Module):
        def __new__(cls, *args, **kwargs):
            return 7

    with patched({nn.Identity: Odd}):
        assert nn.Identity() == 7
