"""A patch is seen where it was asked for and nowhere else, and is gone when its block is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

from modelpatch import (
    apply_patches,
    clear_patch_mapping,
    get_patch_mapping,
    patched,
    register_patch_mapping,
    unregister_patch_mapping,
)
from modelpatch.patch import construction, registry
from modelpatch.testing import tiny_config, tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

ROUNDS = 200


class Leaf(nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.width = width


class NewLeaf(Leaf):
    pass


class Twig(nn.Module):
    pass


class NewTwig(Twig):
    pass


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList([Leaf(2), Leaf(3)])
        self.twig = Twig()


class NewMLP(LlamaMLP):
    pass


def leaves(tree: nn.Module) -> set[type]:
    return {type(module) for module in tree.modules() if isinstance(module, Leaf)}


def mlps(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, LlamaMLP)}


def in_threads(work: Callable[[int], object], count: int = 8) -> list[Any]:
    """Run `work` with 0, 1, ... in threads that start together, switching as often as can be."""
    start = threading.Barrier(count)

    def run(index: int) -> object:
        start.wait()
        return work(index)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(run, range(count)))
    finally:
        sys.setswitchinterval(interval)


def state() -> dict[object, object]:
    """Return everything that a patch could have left behind."""
    classes = [value for value in vars(modeling_llama).values() if isinstance(value, type)]
    found: dict[object, object] = {
        (cls, name): id(value)
        for cls in (nn.Module, PreTrainedModel, *classes)
        for name, value in vars(cls).items()
        if name != "__slotnames__" and not name.endswith("_cached_value")  # Stock keeps those.
    }
    found["names"] = {name: id(value) for name, value in vars(modeling_llama).items()}
    found["registry"] = get_patch_mapping()
    found["scopes"] = construction.active()
    found["dtype"] = torch.get_default_dtype()
    found["model"] = [type(module) for module in tiny_model("llama").modules()]
    found["configured"] = mlps(AutoModelForCausalLM.from_config(tiny_config("llama")))
    return found


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Compare, around every test, what a patch could have left behind."""
    with patched({Leaf: NewLeaf}):
        Leaf()  # Connects the engine.
    before = state()
    yield
    assert state() == before


# --- every exit restores ------------------------------------------------------------------------


class BrokenMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        message = "the replacement can't be built"
        raise RuntimeError(message)


@contextmanager
def registered(mapping: dict[Any, type[nn.Module]]) -> Iterator[None]:
    """Give the registered form the shape of the scoped one."""
    register_patch_mapping(mapping)
    try:
        with apply_patches():
            yield
    finally:
        clear_patch_mapping()


FORMS = pytest.mark.parametrize("form", [patched, registered])


@FORMS
@pytest.mark.parametrize("build", [tiny_model, lambda _: LlamaForCausalLM(tiny_config("llama"))])
def test_a_replacement_that_cannot_be_built_leaves_nothing(form: Any, build: Any) -> None:
    with pytest.raises(RuntimeError, match="can't be built"), form({"LlamaMLP": BrokenMLP}):
        build("llama")

    assert mlps(tiny_model("llama")) == {LlamaMLP}


def test_a_registered_replacement_that_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    register_patch_mapping({"LlamaMLP": BrokenMLP})

    with pytest.raises(RuntimeError, match="can't be built"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    clear_patch_mapping()

    assert mlps(AutoModelForCausalLM.from_pretrained(tmp_path)) == {LlamaMLP}


@FORMS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_in_the_block_passes_and_leaves_nothing(
    form: Any, error: type[BaseException]
) -> None:
    def fail() -> None:
        with form({"LlamaMLP": NewMLP}):
            seen.append(mlps(tiny_model("llama")))
            raise error

    seen: list[set[type]] = []
    with pytest.raises(error):
        fail()
    seen.append(mlps(tiny_model("llama")))

    assert seen == [{NewMLP}, {LlamaMLP}]


@FORMS
def test_an_error_in_the_block_is_not_replaced_by_one_of_a_key(form: Any) -> None:
    with pytest.raises(ZeroDivisionError), form({"LlamaMLP": NewMLP}):
        _ = 1 // 0


@FORMS
def test_a_generator_that_is_closed_early_leaves_nothing(form: Any) -> None:
    def models() -> Iterator[nn.Module]:
        with form({"LlamaMLP": NewMLP}):
            while True:
                yield tiny_model("llama")

    generator = models()
    inside = mlps(next(generator))
    generator.close()

    assert inside == {NewMLP}
    assert mlps(tiny_model("llama")) == {LlamaMLP}


def test_an_async_generator_that_is_closed_in_another_task_leaves_nothing() -> None:
    async def trees() -> AsyncIterator[nn.Module]:
        with patched({Leaf: NewLeaf}):
            while True:
                yield Tree()

    async def main() -> list[set[type]]:
        generator = trees()
        inside = leaves(await anext(generator))
        await asyncio.create_task(generator.aclose())
        return [inside, leaves(Tree())]

    assert asyncio.run(main()) == [{NewLeaf}, {Leaf}]


def test_a_block_that_is_left_in_another_thread_is_closed_everywhere() -> None:
    block = patched({Leaf: NewLeaf})
    block.__enter__()
    inside = leaves(Tree())

    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()

    assert inside == {NewLeaf}
    assert leaves(Tree()) == {Leaf}


def test_a_decorated_function_is_patched_at_each_call() -> None:
    @patched({Leaf: NewLeaf})
    def build() -> nn.Module:
        return Tree()

    assert [leaves(build()), leaves(Tree()), leaves(build())] == [{NewLeaf}, {Leaf}, {NewLeaf}]


# --- blocks in blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_overlapping_blocks_that_close_in_any_order_leave_nothing(first: int) -> None:
    blocks = [patched({Leaf: NewLeaf}), patched({Twig: NewTwig})]
    both = {NewLeaf, NewTwig}
    for block in blocks:
        block.__enter__()

    def built() -> set[type]:
        return {type(module) for module in Tree().modules()} - {Tree, nn.ModuleList}

    inside = built()
    blocks[first].__exit__(None, None, None)
    between = built()
    blocks[1 - first].__exit__(None, None, None)

    assert inside == both
    assert between == ({Leaf, NewTwig}, {NewLeaf, Twig})[first]
    assert built() == {Leaf, Twig}
    assert construction._ACTIVE.get() == ()


def test_a_block_in_a_block_of_the_same_rules_ends_alone() -> None:
    with patched({Leaf: NewLeaf}):
        with patched({Leaf: NewLeaf}):
            inner = leaves(Tree())
        outer = leaves(Tree())

    assert inner == outer == {NewLeaf}
    assert leaves(Tree()) == {Leaf}


KEYS = (LlamaMLP, f"{LlamaMLP.__module__}.LlamaMLP", "LlamaMLP", "^LlamaMLP$")


@pytest.mark.parametrize("scoped", KEYS)
@pytest.mark.parametrize("globally", KEYS)
@pytest.mark.parametrize("global_first", [False, True])
def test_a_scoped_key_beats_a_registered_one_whatever_their_forms(
    scoped: Any, globally: Any, global_first: bool
) -> None:
    class Scoped(LlamaMLP):
        pass

    register_patch_mapping({globally: NewMLP})
    blocks = [apply_patches(), patched({scoped: Scoped})]

    with blocks[1 - global_first], blocks[global_first]:
        by_hand = LlamaMLP(tiny_config("llama"))
    clear_patch_mapping()

    assert type(by_hand) is Scoped


@FORMS
def test_the_text_tower_of_a_composite_model_is_reached(form: Any, tmp_path: Path) -> None:
    config = tiny_config("llava")
    tiny_model("llava").save_pretrained(tmp_path)

    with form({"LlamaMLP": NewMLP}):
        models = [
            tiny_model("llava"),
            AutoModelForImageTextToText.from_config(config),
            AutoModelForImageTextToText.from_pretrained(tmp_path),
        ]

    assert [mlps(model) for model in models] == [{NewMLP}] * 3


def test_a_scoped_key_beats_a_registered_one_in_the_tower_of_a_composite_model() -> None:
    class Scoped(LlamaMLP):
        pass

    register_patch_mapping({LlamaMLP: NewMLP})

    with patched({".*MLP$": Scoped}, where=lambda config: config.model_type == "llama"):
        model = AutoModelForImageTextToText.from_config(tiny_config("llava"))
    registered_only = AutoModelForImageTextToText.from_config(tiny_config("llava"))
    clear_patch_mapping()

    assert mlps(model) == {Scoped}
    assert mlps(registered_only) == {NewMLP}


# --- a replacement that builds its original -----------------------------------------------------


def wrapper(bases: tuple[type, ...], extra: Callable[[], nn.Module] = nn.Identity) -> Any:
    """Return a replacement for `Leaf` that holds one, and something more."""

    class Wrapper(*bases):  # type: ignore[misc]
        def __init__(self, width: int = 1) -> None:
            super().__init__(*([width] if Leaf in bases else []))
            self.build(width)
            self.extra = extra()

        def build(self, width: int) -> None:
            self.inner = Leaf(width)

    return Wrapper


BASES = pytest.mark.parametrize("bases", [(Leaf,), (nn.Module,)], ids=["subclass", "stranger"])


@BASES
@pytest.mark.parametrize("key", [Leaf, f"{Leaf.__module__}.Leaf"], ids=["class", "path"])
def test_a_replacement_may_build_its_original(bases: tuple[type, ...], key: Any) -> None:
    replacement = wrapper(bases)

    with patched({key: replacement}):
        tree = Tree()

    assert [type(leaf) for leaf in tree.leaves] == [replacement] * 2
    assert [type(leaf.inner) for leaf in tree.leaves] == [Leaf] * 2
    assert [leaf.inner.width for leaf in tree.leaves] == [2, 3]


@BASES
def test_a_wrapper_switches_off_its_own_rule_only(bases: tuple[type, ...]) -> None:
    replacement = wrapper(bases, extra=Twig)

    with patched({Leaf: replacement, Twig: NewTwig}):
        leaf = Leaf()
        after = Leaf()

    assert type(leaf.extra) is NewTwig
    assert type(leaf.inner) is Leaf
    assert type(after) is replacement


@BASES
def test_a_wrapper_that_cannot_be_built_switches_its_rule_on_again(bases: tuple[type, ...]) -> None:
    def fail() -> nn.Module:
        message = "no extra"
        raise RuntimeError(message)

    replacement = wrapper(bases, extra=lambda: fail() if fail_now else nn.Identity())

    with patched({Leaf: replacement}):
        fail_now = True
        with pytest.raises(RuntimeError, match="no extra"):
            Leaf()
        fail_now = False
        after = Leaf()

    assert type(after) is replacement


def test_a_replacement_may_build_its_original_whatever_its_init_is_called() -> None:
    def build(self: Any, width: int = 1) -> None:
        nn.Module.__init__(self)
        self.inner = Leaf(width)

    replacement = type("Made", (nn.Module,), {"__init__": build})

    with patched({Leaf: replacement}):
        leaf = Leaf()

    assert [type(module) for module in leaf.modules()] == [replacement, Leaf]


def test_two_wrappers_that_build_each_others_originals_come_to_an_end() -> None:
    class WrapLeaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Twig()

    class WrapTwig(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Leaf()

    with patched({Leaf: WrapLeaf, Twig: WrapTwig}):
        leaf, twig = Leaf(), Twig()

    assert [type(module) for module in leaf.modules()] == [WrapLeaf, WrapTwig, Leaf]
    assert [type(module) for module in twig.modules()] == [WrapTwig, WrapLeaf, Twig]


@BASES
def test_the_original_in_an_inner_blocks_wrapper_is_the_outer_blocks(
    bases: tuple[type, ...],
) -> None:
    replacement = wrapper(bases)

    with patched({Leaf: NewLeaf}, strict=False), patched({Leaf: replacement}):
        leaf = Leaf()

    assert type(leaf) is replacement
    assert type(leaf.inner) is NewLeaf


def test_a_wrapped_model_part_computes_as_its_original() -> None:
    class Wrapping(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.inner = LlamaMLP(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    x = torch.tensor([[5, 6, 7]])
    plain = tiny_model("llama")

    with patched({"LlamaMLP": Wrapping}):
        model = tiny_model("llama")
    weights = {name.replace(".mlp.", ".mlp.inner."): t for name, t in plain.state_dict().items()}
    model.load_state_dict(weights)

    assert torch.equal(model(x).logits, plain(x).logits)


# --- threads and tasks --------------------------------------------------------------------------


def test_a_thread_that_is_started_in_a_block_is_plain() -> None:
    built = []

    with patched({Leaf: NewLeaf}):
        thread = threading.Thread(target=lambda: built.append(Tree()))
        thread.start()
        thread.join()
        built.append(Tree())

    assert [leaves(tree) for tree in built] == [{Leaf}, {NewLeaf}]


def test_a_task_that_outlives_the_block_it_was_started_in_is_plain_afterwards() -> None:
    async def main() -> list[set[type]]:
        left = asyncio.Event()

        async def work() -> list[set[type]]:
            inside = leaves(Tree())
            await left.wait()
            return [inside, leaves(Tree())]

        with patched({Leaf: NewLeaf}):
            task = asyncio.create_task(work())
            await asyncio.sleep(0)  # Lets the task come to its wait.
        left.set()
        return await task

    assert asyncio.run(main()) == [{NewLeaf}, {Leaf}]


def own_leaf(index: int) -> type[Leaf]:
    """Return the class that a worker builds: every second one is plain."""
    return type(f"Leaf{index}", (Leaf,), {}) if index % 2 else Leaf


def test_eight_threads_do_not_see_each_others_patches() -> None:
    def work(index: int) -> set[type]:
        mine, seen = own_leaf(index), set()
        for _ in range(ROUNDS):
            if mine is Leaf:
                seen |= leaves(Tree())
            else:
                with patched({Leaf: mine}):
                    seen |= leaves(Tree())
        return seen == {mine}

    assert in_threads(work) == [True] * 8


def test_eight_tasks_do_not_see_each_others_patches() -> None:
    async def work(index: int) -> bool:
        mine, seen = own_leaf(index), set()
        for _ in range(ROUNDS):
            if mine is Leaf:
                seen |= leaves(Tree())
            else:
                with patched({Leaf: mine}):
                    await asyncio.sleep(0)  # The other tasks build here.
                    seen |= leaves(Tree())
            await asyncio.sleep(0)
        return seen == {mine}

    async def main() -> list[bool]:
        return await asyncio.gather(*map(work, range(8)))

    assert asyncio.run(main()) == [True] * 8


def test_eight_threads_configure_patched_and_plain_models_at_once() -> None:
    config = tiny_config("llama", num_hidden_layers=1)

    def work(index: int) -> bool:
        mine = type("Own", (LlamaMLP,), {}) if index % 2 else LlamaMLP
        seen = set()
        for _ in range(10):
            with patched({"LlamaMLP": mine} if index % 2 else {"LlamaRMSNorm": OwnNorm}):
                seen |= mlps(AutoModelForCausalLM.from_config(config))
        return seen == {mine}

    assert in_threads(work) == [True] * 8


class OwnNorm(modeling_llama.LlamaRMSNorm):
    pass


@pytest.mark.parametrize("tied", [False, True])
def test_eight_threads_load_patched_and_plain_models_at_once(tied: bool, tmp_path: Path) -> None:
    stock = tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=tied)
    stock.save_pretrained(tmp_path)
    weights = stock.state_dict()

    def load() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(tmp_path)

    def right(model: Any) -> bool:
        found = model.state_dict()
        same = all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        is_tied = model.lm_head.weight is model.model.embed_tokens.weight
        return same and is_tied == tied and found.keys() == weights.keys()

    def work(index: int) -> bool:
        for _ in range(5):
            if index % 2:
                with patched({"LlamaMLP": NewMLP}):
                    model = load()
            else:
                model = load()
            if not right(model) or mlps(model) != {NewMLP if index % 2 else LlamaMLP}:
                return False
        return True

    assert in_threads(work) == [True] * 8


def test_a_model_built_by_hand_is_tied_while_another_thread_loads(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1, tie_word_embeddings=True)
    tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(tmp_path)

    def work(index: int) -> bool:
        models = []
        for _ in range(10):
            build = AutoModelForCausalLM.from_pretrained if index % 2 else LlamaForCausalLM
            models.append(build(tmp_path if index % 2 else config))
        return all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)

    assert in_threads(work) == [True] * 8


MIXED_LOADS = """
import sys, threading
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
folder, engine, rounds = sys.argv[1], sys.argv[2] == "modelpatch", int(sys.argv[3])
if engine:
    import modelpatch
    modelpatch.install()
DTYPES = (torch.float32, torch.bfloat16)

def dtypes(dtype):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return {n: t.dtype for n, t in (*model.named_parameters(), *model.named_buffers())}

right = {dtype: dtypes(dtype) for dtype in DTYPES}
wrong = []

def work(dtype):
    for _ in range(rounds):
        if wrong:
            return
        try:
            found = dtypes(dtype)
        except Exception as error:
            wrong.append(repr(error))
        else:
            if found != right[dtype]:
                wrong.append(f"{dtype} became {set(found.values()) - set(right[dtype].values())}")

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work, args=(DTYPES[i % 2],)) for i in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if torch.get_default_dtype() != torch.float32:
    wrong.append("the default dtype")
print(wrong or "clean")
"""


@pytest.mark.parametrize(("engine", "rounds"), [("stock", 200), ("modelpatch", 20)])
def test_loads_of_two_dtypes_at_once_are_right_and_with_stock_are_not(
    engine: str, rounds: int, tmp_path: Path
) -> None:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", MIXED_LOADS, tmp_path, engine, str(rounds)]

    result = subprocess.run(command, capture_output=True, text=True, check=True)

    assert (result.stdout.strip() == "clean") == (engine == "modelpatch"), result.stdout


# --- the registry -------------------------------------------------------------------------------


def test_sixteen_threads_lose_no_registration() -> None:
    def work(index: int) -> None:
        for number in range(250):
            key = f"Key{index}x{number}"
            register_patch_mapping({key: NewLeaf})
            assert get_patch_mapping()[key] is NewLeaf
            if number % 2:
                unregister_patch_mapping([key])
                registry.rules()

    in_threads(work, count=16)
    kept = {f"Key{index}x{number}" for index in range(16) for number in range(0, 250, 2)}
    found, compiled = get_patch_mapping(), {rule.key for rule in registry.rules().rules}
    clear_patch_mapping()

    assert found.keys() == compiled == kept


def test_of_sixteen_threads_that_register_one_key_one_succeeds() -> None:
    def work(_: int) -> bool:
        try:
            register_patch_mapping({"LlamaMLP": NewMLP})
        except ValueError:
            return False
        return True

    outcomes = in_threads(work, count=16)
    clear_patch_mapping()

    assert sum(outcomes) == 1
