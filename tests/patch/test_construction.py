"""Construction is as without the engine, except for the one thing it is there for.

The probes run in processes of their own, so that one of them has never seen the engine.
"""

from __future__ import annotations

import abc
import copy
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import distributed, fx, nn
from torch.nn.utils import parametrize, skip_init
from torch.nn.utils.parametrizations import weight_norm

import modelpatch
from modelpatch import patched
from modelpatch.patch import construction
from modelpatch.testing import tiny_inputs, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

Width = TypeVar("Width")


class Scale(nn.Module):
    """Built from an argument."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([float(factor)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class NewScale(Scale):
    pass


class Ramp(nn.Module):
    """Built without arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)


class NewRamp(Ramp):
    pass


class Pinned(nn.Module):
    """Has a `__new__` of its own, which passes no arguments on."""

    made_with: float

    def __new__(cls, factor: float = 1.0) -> Self:
        self = super().__new__(cls)
        self.__dict__["made_with"] = factor
        return self

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor


class Tagging(nn.Module):
    """Has a `__new__` of its own, which takes anything."""

    tag: object

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.__dict__["tag"] = [args, kwargs]
        return self


class NewPinned(Pinned):
    pass


class Counting(type):
    """A metaclass that takes part in each call."""

    called: ClassVar[list[type]] = []

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        Counting.called.append(cls)
        return super().__call__(*args, **kwargs)


class Counted(nn.Module, metaclass=Counting):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor


class NewCounted(Counted):
    pass


class Shared(nn.Module, PyTorchModelHubMixin):
    """The mixin's `__new__`, after `nn.Module`'s, keeps the arguments for `config.json`."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class NewShared(Shared):
    pass


class Mapped(nn.Module, dict):
    pass


class Generics(nn.Module, Generic[Width]):
    pass


class Stack(nn.Module):
    """Slices its layers as a decoder does, which constructs a `ModuleList` in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scale(2), Scale(3), Scale(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return x


# --- the same with and without the engine -------------------------------------------------------

PROBES: dict[str, Callable[[], object]] = {}
X = torch.arange(6.0).view(2, 3)


def probe(function: Callable[[], object]) -> Callable[[], object]:
    PROBES[function.__name__] = function
    return function


@probe
def compiled_whole() -> object:
    return torch.compile(Stack(), fullgraph=True, backend="eager")(X).tolist()


@probe
def compiled_llama_whole() -> object:
    model = tiny_model("llama")
    inputs = tiny_inputs(model)
    with torch.no_grad():
        return torch.compile(model, fullgraph=True, backend="eager")(**inputs).logits.tolist()


@probe
def exported() -> object:
    return torch.export.export(Stack(), (X,), strict=False).module()(X).tolist()


@probe
def exported_strictly() -> object:
    return torch.export.export(Stack(), (X,), strict=True).module()(X).tolist()


@probe
def scripted() -> object:
    module = torch.jit.script(nn.Sequential(Scale(2), Ramp()))
    return [module(X).tolist(), str(module.inlined_graph)]


@probe
def traced() -> object:
    return torch.jit.trace(Stack(), X)(X).tolist()


@probe
def symbolically_traced() -> object:
    graph = fx.symbolic_trace(Stack())
    return [graph(X).tolist(), graph.code, type(graph).__mro__[1].__name__]


@probe
def pickled() -> object:
    return described(pickle.loads(pickle.dumps(Stack())))  # noqa: S301 - written one call earlier.


@probe
def saved_and_loaded_whole() -> object:
    file = io.BytesIO()
    torch.save(Stack(), file)
    file.seek(0)
    return described(torch.load(file, weights_only=False))


@probe
def copied() -> object:
    return [described(copier(Stack())) for copier in (copy.copy, copy.deepcopy)]


@probe
def replicated() -> object:
    return described(Stack()._replicate_for_data_parallel())


@probe
def fully_sharded() -> object:
    from torch.distributed.fsdp import fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    module = nn.Sequential(Scale(2), Scale(3))
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh)
    result = [type(module).__name__, module(X).tolist(), described(module[:1])]
    distributed.destroy_process_group()
    return result


@probe
def weight_normed() -> object:
    module = weight_norm(nn.Linear(3, 2))
    again = copy.deepcopy(module)
    names = [type(m).__name__ for m in (module, again)]
    return [names, sorted(again.state_dict()), torch.equal(module(X), again(X))]


@probe
def parametrization_removed() -> object:
    module = weight_norm(nn.Linear(3, 2))
    parametrize.remove_parametrizations(module, "weight")
    return described(module)


@probe
def lazy() -> object:
    module = nn.LazyLinear(2)
    before = type(module).__name__
    return [before, list(module(X).shape), described(module)]


@probe
def initialisation_skipped() -> object:
    return described(skip_init(nn.Linear, 3, 2, dtype=torch.float16))


@probe
def on_the_meta_device() -> object:
    with torch.device("meta"):
        return described(Stack())


@probe
def hub_mixin_after_module() -> object:
    with tempfile.TemporaryDirectory() as folder:
        Shared(width=3).save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        return [config, described(Shared.from_pretrained(folder))]


@probe
def mapping_after_module() -> object:
    module = Mapped()
    module["name"] = 1
    return [dict(module), isinstance(module, nn.Module), module.training]


@probe
def generic_after_module() -> object:
    return described(Generics[int]())


@probe
def metaclass() -> object:
    return [described(Counted(2)), [cls.__name__ for cls in Counting.called]]


@probe
def own_new() -> object:
    module = Pinned(2.5)
    return [module.made_with, module.factor, copy.deepcopy(module).made_with]


@probe
def own_new_that_forwards_to_a_mixin() -> object:
    class Mixin:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            self = super().__new__(cls)
            self.__dict__["given"] = [args, kwargs]
            return self

    class Mixed(nn.Module, Mixin):
        def __init__(self, factor: float, *, bias: bool = False) -> None:
            super().__init__()
            self.factor, self.bias = factor, bias

    mixed = Mixed(2.0, bias=True)
    return [mixed.given, mixed.factor, mixed.bias]


@probe
def wrong_arguments() -> object:
    errors = []
    for call in (Scale, lambda: Scale(1, 2), lambda: nn.Module(1), lambda: Ramp(x=1)):
        with pytest.raises(TypeError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


@probe
def signatures() -> object:
    from transformers import BertModel, LlamaForCausalLM

    classes = (LlamaForCausalLM, BertModel, Stack, Scale, Pinned, Counted, Shared, nn.Linear)
    return [str(inspect.signature(cls)) for cls in classes]


@probe
def lists_of_attributes() -> object:
    return [sorted(set(dir(cls)) - {"__new__"}) for cls in (Scale, Mapped, Counted)]


def described(module: nn.Module) -> object:
    """Tell what a module is made of."""
    tensors = module.state_dict().items()
    classes = [(name, type(m).__qualname__) for name, m in module.named_modules()]
    return [classes, [(name, str(t.device), str(t.dtype), list(t.shape)) for name, t in tensors]]


def main(state: str) -> None:
    """Print what each probe gives, as JSON."""
    if state == "installed":
        construction.install()
    results = {}
    for name, function in PROBES.items():
        block = patched({Stack: Scale}, where=lambda: False, strict=False)
        torch.manual_seed(0)
        try:
            with block if state == "in a block" else nullcontext():
                results[name] = {"is": function()}
        except Exception:  # noqa: BLE001 - shown by the test of this probe.
            results[name] = {"error": traceback.format_exc()}
    print(json.dumps(results))  # noqa: T201


STATES = ("without", "installed", "in a block")


@pytest.fixture(scope="module")
def found() -> Mapping[str, Mapping[str, object]]:
    """What each probe gave in each state of the engine."""
    command = [sys.executable, "-W", "ignore", __file__]

    def run(state: str) -> Mapping[str, object]:
        result = subprocess.run([*command, state], stdout=subprocess.PIPE, check=True)
        return json.loads(result.stdout.splitlines()[-1])  # The hub mixin prints, too.

    with ThreadPoolExecutor() as pool:
        return dict(zip(STATES, pool.map(run, STATES), strict=True))


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("state", STATES[1:])
def test_the_engine_changes_nothing_that_no_key_names(
    name: str, state: str, found: Mapping[str, Mapping[str, object]]
) -> None:
    stock, with_engine = found["without"][name], found[state][name]

    assert "is" in stock, stock
    assert with_engine == stock


# --- copies are not constructions ---------------------------------------------------------------


def unpickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))  # noqa: S301 - written one call earlier.


def unpickled_in_python(module: nn.Module) -> nn.Module:
    return pickle._Unpickler(io.BytesIO(pickle.dumps(module))).load()


def replica(module: nn.Module) -> nn.Module:
    return module._replicate_for_data_parallel()


COPIERS = (copy.copy, copy.deepcopy, unpickled_in_python, replica)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize(
    ("make", "replacement"),
    [
        (lambda: Scale(2), NewScale),
        (Ramp, NewRamp),
        (lambda: Pinned(2), NewPinned),
        (Counted, NewCounted),
        (Shared, NewShared),
    ],
    ids=["arguments", "no arguments", "own new", "metaclass", "mixin"],
)
def test_a_copy_made_in_a_block_is_of_the_class_it_was_copied_from(
    copier: Callable[[nn.Module], nn.Module],
    make: Callable[[], nn.Module],
    replacement: type[nn.Module],
) -> None:
    plain = make()
    original = type(plain)

    with patched({original: replacement}):
        copied = copier(plain)
        built = make()

    assert type(copied) is original
    assert type(built) is replacement


def test_a_module_unpickled_in_a_block_is_of_the_class_that_was_pickled() -> None:
    plain = nn.Sequential(Scale(2))

    with patched({Scale: NewScale}, strict=False):  # A class without arguments: a documented limit.
        copied = unpickled(plain)

    assert type(copied[0]) is Scale


@pytest.mark.parametrize("copier", [*COPIERS, unpickled])
def test_a_copy_of_a_replacement_is_a_replacement_anywhere(
    copier: Callable[[nn.Module], nn.Module],
) -> None:
    with patched({Scale: NewScale}):
        built = Scale(2)
        inside = copier(built)
    outside = copier(built)

    assert type(inside) is type(outside) is NewScale


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu2", "quick_gelu"])
def test_an_activation_from_the_table_is_replaced_when_built_and_not_when_copied(name: str) -> None:
    from transformers.activations import ACT2FN

    plain = ACT2FN[name]
    replacement = type("NewActivation", (type(plain),), {})

    with patched({type(plain).__name__: replacement}):
        copies = [copier(plain) for copier in (copy.copy, copy.deepcopy, replica)]
        built = ACT2FN[name]

    assert {type(copied) for copied in copies} == {type(plain)}
    assert type(built) is replacement


def test_the_layers_that_a_model_copies_are_those_it_was_given() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    class NewLinear(nn.Linear):
        pass

    with patched({nn.Linear: NewLinear}, strict=False):
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    assert NewLinear not in {type(module) for module in encoder.modules()}


# --- a replacement is built as its own class is -------------------------------------------------


def test_own_new_of_the_original_runs_for_the_replacement() -> None:
    with patched({Pinned: NewPinned}):
        built = Pinned(2.5)

    assert type(built) is NewPinned
    assert (built.made_with, built.factor) == (2.5, 2.5)


def test_own_new_of_the_replacement_runs_with_the_arguments() -> None:
    class Tagged(Tagging, Scale):
        pass

    with patched({Scale: Tagged}):
        built = Scale(factor=2)

    assert built.tag == [(), {"factor": 2}]
    assert built.factor == 2


def test_a_metaclass_call_happens_once_for_a_replaced_construction() -> None:
    Counting.called.clear()

    with patched({Counted: NewCounted}):
        built = Counted(2)

    assert type(built) is NewCounted
    assert built.factor == 2
    assert Counting.called == [Counted]


def test_the_mixin_of_a_replacement_keeps_its_config(tmp_path: Path) -> None:
    with patched({Shared: NewShared}):
        Shared(width=3).save_pretrained(tmp_path)
        loaded = Shared.from_pretrained(tmp_path)

    assert json.loads(Path(tmp_path, "config.json").read_text()) == {"width": 3}
    assert type(loaded) is NewShared
    assert loaded.linear.in_features == 3


def test_a_mapping_is_replaced_by_a_mapping() -> None:
    class NewMapped(Mapped):
        pass

    with patched({Mapped: NewMapped}):
        built = Mapped()
    built["name"] = 1

    assert type(built) is NewMapped
    assert dict(built) == {"name": 1}


def test_a_virtual_subclass_is_initialised_once() -> None:
    class Abstract(nn.Module, abc.ABC):
        pass

    @Abstract.register
    class Virtual(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factors = [*getattr(self, "factors", []), factor]

    with patched({Abstract: Virtual}):
        built = Abstract(2)

    assert isinstance(built, Abstract)
    assert Abstract not in Virtual.__mro__
    assert type(built) is Virtual
    assert built.factors == [2]


@pytest.mark.parametrize("bases", [(Scale,), (nn.Module,)], ids=["subclass", "stranger"])
def test_a_replacement_is_initialised_once(bases: tuple[type, ...]) -> None:
    calls = []

    def init(self: nn.Module, factor: float) -> None:
        nn.Module.__init__(self)
        calls.append(factor)

    replacement = type("Replacement", bases, {"__init__": init})

    with patched({Scale: replacement}):
        built = Scale(2)

    assert type(built) is replacement
    assert calls == [2]


@pytest.mark.parametrize("bases", [(Ramp,), (nn.Module,), (Tagging, Ramp), (Tagging,)])
def test_a_replacement_is_not_replaced_in_turn(bases: tuple[type, ...]) -> None:
    replacement = type("Replacement", bases, {})

    with patched({Ramp: replacement, replacement: nn.Identity}, strict=False):
        built = Ramp()

    assert type(built) is replacement


def test_skipped_initialisation_gives_a_replacement_with_memory() -> None:
    class NewLinear(nn.Linear):
        pass

    with patched({nn.Linear: NewLinear}):
        built = skip_init(nn.Linear, 3, 2)

    assert type(built) is NewLinear
    assert built(X).shape == (2, 2)


def test_a_lazy_replacement_becomes_what_it_says() -> None:
    class NewLinear(nn.Linear):
        pass

    class NewLazy(nn.LazyLinear):
        cls_to_become = NewLinear

    with patched({nn.LazyLinear: NewLazy}):
        built = nn.LazyLinear(2)
    result = built(X)

    assert type(built) is NewLinear
    assert result.shape == (2, 2)


def test_a_replacement_is_parametrized_as_a_plain_module_is() -> None:
    class NewLinear(nn.Linear):
        pass

    with patched({nn.Linear: NewLinear}):
        normed = weight_norm(nn.Linear(3, 2))
        again = copy.deepcopy(normed)

    assert isinstance(normed, NewLinear)
    assert type(again).__name__ == "ParametrizedNewLinear"
    assert torch.equal(again(X), normed(X))


def test_a_replacement_is_built_on_the_meta_device() -> None:
    with torch.device("meta"), patched({Scale: NewScale}):
        built = Scale(2)

    assert type(built) is NewScale
    assert built.factor.is_meta


@pytest.mark.parametrize("strict", [False, True])
def test_a_replacement_exports_compiles_and_traces_as_its_original(strict: bool) -> None:
    with patched({Scale: NewScale}):
        built = Stack()
        compiled = torch.compile(built, fullgraph=True, backend="eager")(X)
        exported = torch.export.export(built, (X,), strict=strict).module()(X)
        traced = fx.symbolic_trace(built)(X)

    assert {type(layer) for layer in built.layers} == {NewScale}
    assert torch.equal(compiled, Stack()(X))
    assert torch.equal(exported, compiled)
    assert torch.equal(traced, compiled)


def test_compiling_a_patched_llama_leaves_no_graph_break() -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    class NewMLP(LlamaMLP):
        pass

    plain = tiny_model("llama")
    inputs = tiny_inputs(plain)
    with patched({LlamaMLP: NewMLP}), torch.no_grad():
        model = tiny_model("llama")
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs).logits

    assert type(model.model.layers[0].mlp) is NewMLP
    torch.testing.assert_close(compiled, plain(**inputs).logits)


# --- the dispatcher -----------------------------------------------------------------------------


def test_it_is_put_in_once_and_stays() -> None:
    construction.install()
    first = nn.Module.__dict__["__new__"]
    construction.install()
    modelpatch.uninstall()

    built = Scale(2)

    assert nn.Module.__dict__["__new__"] is first
    assert type(built) is Scale


def test_an_error_of_a_replacement_is_the_callers() -> None:
    with (
        pytest.raises(TypeError, match=r"Scale.__init__\(\) missing 1 .* argument: 'factor'"),
        patched({Scale: NewScale}),
    ):
        Scale()


def test_importing_the_package_patches_nothing() -> None:
    script = "import modelpatch, torch; print('__new__' in vars(torch.nn.Module))"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert result.stdout.strip() == b"False"


if __name__ == "__main__":
    main(sys.argv[1])
