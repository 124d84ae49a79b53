"""The only file that touches the internals of Transformers (5.3 to 5.24 seen).

Nothing here decides anything: functions that the engine passes in are put where Transformers calls its own, and each
change returns its undo.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

Undo = Callable[[], None]
_MISSING = object()
_OURS = "modelpatch"
_LOAD, _REVERT = "convert_and_load_state_dict_in_model", "revert_weight_conversion"
_LOAD_PARTITIONED = "_load_state_dict_into_zero3_model"
constructing = threading.RLock()
"""Held while models are constructed: the default dtype may be another then, in all threads."""
_capturing = threading.RLock()


def is_model(module: nn.Module) -> bool:
    """Tell whether `module` is a `PreTrainedModel`, without importing Transformers."""
    return is_model_class(type(module))


def is_model_class(cls: type) -> bool:
    """Tell whether `cls` derives from `PreTrainedModel`, without importing Transformers."""
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    return modeling_utils is not None and modeling_utils.PreTrainedModel in cls.__mro__


# --- registries -------------------------------------------------------------------------------------------------------


def registered_there() -> dict[str, type[nn.Module]]:
    """Return the live registry of Transformers' own `monkey_patching`, empty while that is not imported."""
    module = sys.modules.get("transformers.monkey_patching")
    return getattr(module, "_monkey_patch_mapping_cache", {})


# --- loading ----------------------------------------------------------------------------------------------------------


def hook_loading(  # noqa: PLR0913  # one for each place in Transformers
    *,
    apply_patches: Callable[[], Any],
    patch_output_recorders: Callable[[nn.Module], None],
    mark: str,
    initialise: Callable[..., None],
    built: Callable[[nn.Module], None],
    stands_for: Callable[[nn.Module, type], bool],
    original_name: Callable[[str], str],
    load: Callable[..., Any],
    load_partitioned: Callable[..., Any],
    revert: Callable[..., Any],
    unreadable: Callable[[Any, Exception], Exception],
) -> Undo:
    """Put the engine where `from_pretrained`, `from_config` and model constructors call Transformers' own functions.

    Args:
        apply_patches: Context around the construction of a model that is loaded or configured.
        patch_output_recorders: Called with each model so constructed.
        mark: Name of the attribute that modules carry which took the place of others.
        initialise: Called with each of these, what Transformers would call for it, and the further arguments of that.
        built: Called with each model whose initial values are complete.
        stands_for: Tells whether a module is a replacement of an original of a class.
        original_name: From the class name of a model to the one that built-in weight conversions know.
        load: Called with what Transformers calls to read a checkpoint into a model, and its arguments.
        load_partitioned: The same for a model that DeepSpeed has partitioned.
        revert: Called with what Transformers calls to give tensors the names and shapes of a file, the model, and the
            tensors.
        unreadable: From the path of a file that can't be opened, and the error, to the one to raise.
    """
    modeling_utils = import_module("transformers.modeling_utils")
    initialization = import_module("transformers.initialization")
    capturing = import_module("transformers.utils.output_capturing")
    conversion_mapping = import_module("transformers.conversion_mapping")
    model_class = modeling_utils.PreTrainedModel
    stock_hooks = capturing.maybe_install_capturing_hooks
    stock_conversions = conversion_mapping.get_checkpoint_conversion_mapping

    def conversions(name: str) -> Any:
        found = stock_conversions(name)
        return stock_conversions(original_name(name)) if found is None else found

    def install_hooks(model: nn.Module) -> None:
        if any(stands_for(module, object) for module in model.modules()):
            record_replacements(model, stands_for)
        else:
            stock_hooks(model)

    with ExitStack() as stack:
        for owner, name, value in (
            (modeling_utils, "safe_open", _naming_the_file(modeling_utils.safe_open, unreadable)),
            (modeling_utils, "apply_patches", apply_patches),
            (modeling_utils, "patch_output_recorders", patch_output_recorders),
            (modeling_utils, "local_torch_dtype", _one_at_a_time(modeling_utils.local_torch_dtype)),
            (initialization, "no_tie_weights", _in_this_thread(model_class)),
            (capturing, "maybe_install_capturing_hooks", install_hooks),
            (conversion_mapping, "get_checkpoint_conversion_mapping", conversions),
            (nn.Module, "smart_apply", _walk(mark, initialise, built)),
            *(
                (modeling_utils, name, functools.partial(ours, getattr(modeling_utils, name)))
                for name, ours in (
                    (_LOAD, load),
                    (_LOAD_PARTITIONED, load_partitioned),
                    (_REVERT, revert),
                )
            ),
        ):
            stack.callback(_put(owner, name, value))
        return stack.pop_all().close


def _walk(
    mark: str, initialise: Callable[..., None], built: Callable[[nn.Module], None]
) -> Callable[..., nn.Module]:
    """Return a `smart_apply` that calls `initialise` for marked modules, and `built` with the model in the end."""

    def apply(module: nn.Module, by_family: Callable[..., None], *flags: Any) -> None:
        for child in module.children():
            inner: Any = child
            apply(child, inner._initialize_weights if is_model(child) else by_family, *flags)
        if mark in module.__dict__:
            initialise(module, by_family, *flags)
        else:
            by_family(module, *flags)

    def smart_apply(model: nn.Module, by_family: Callable[..., None], *flags: Any) -> nn.Module:
        apply(model, by_family, *flags)
        built(model)
        return model

    return smart_apply


def _naming_the_file(
    stock: Callable[..., Any], unreadable: Callable[[Any, Exception], Exception]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(filename, *args, **kwargs)
        except Exception as error:
            raise unreadable(filename, error) from error

    return safe_open


def _put(owner: Any, name: str, value: Any) -> Undo:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if before is _MISSING else setattr(owner, name, before)


def _one_at_a_time(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Let one thread construct at a time under `local_torch_dtype`.

    It sets the default dtype of the process, so that overlapping loads get each other's dtype, and the last one out
    may leave its own behind for good. What takes long in a load, reading weights, comes after and still overlaps.
    """

    @contextmanager
    def local_torch_dtype(*args: Any, **kwargs: Any) -> Iterator[None]:
        with constructing, stock(*args, **kwargs):
            yield

    return local_torch_dtype


def _in_this_thread(model_class: Any) -> Callable[[], Any]:
    """Return a `no_tie_weights` that leaves other threads alone: the stock one empties the method for all of them."""

    @contextmanager
    def no_tie_weights() -> Iterator[None]:
        stock = model_class.tie_weights
        thread = threading.get_ident()

        def tie_weights(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == thread else stock(self, *args, **kwargs)

        model_class.tie_weights = tie_weights
        try:
            yield
        finally:
            model_class.tie_weights = stock

    return no_tie_weights


def save_code(model_class: Any, folder: str, config: Any) -> None:
    """Save the code of a model class beside its config, as Transformers does for one that came as remote code."""
    if model_class.is_remote_code():
        code = import_module("transformers.dynamic_module_utils")
        code.custom_object_save(object.__new__(model_class), folder, config=config)


# --- weights ----------------------------------------------------------------------------------------------------------


class Conversions:
    """The weight conversions that Transformers applies to the keys of one model's files."""

    def __init__(self, model: Any, mapping: Iterable[Any]) -> None:
        loading = import_module("transformers.core_model_loading")
        self._model = model
        self._rename = loading.rename_source_key
        self._renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
        self.converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]

    @classmethod
    def at_save(cls, model: Any) -> Conversions:
        """Return those that a save would take back: of the load, or else the family's."""
        mapping = getattr(model, "_weight_conversions", None)
        if mapping is None:
            mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(
                model, add_legacy=False
            )
        return cls(model, mapping)

    def place(
        self, key: str, names: Mapping[str, Any], *, convert: bool = True
    ) -> tuple[str, Any | None, str]:
        """Return the name that a key of a file has in a model with tensors `names`.

        Returns:
            The name, the first one where there are several; the converter that makes it, or None; and the pattern of
            that converter.
        """
        prefix = self._model.base_model_prefix
        converters = self.converters if convert else []
        name, pattern = self._rename(key, self._renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = self._rename(key, [], [], prefix, names)
        if pattern is None:
            return name, None, ""
        return name, next(one for one in converters if pattern in one.source_patterns), pattern

    def renamed(self, key: str) -> str:
        """Return a key as converters see it."""
        name: str = self._rename(key, self._renamings, [])[0]
        return name

    def converted(self, name: str) -> tuple[str, Any | None, str]:
        """Do as `place` with converters alone."""
        new, pattern = self._rename(name, [], self.converters)
        if pattern is None:
            return name, None, ""
        return new, next(one for one in self.converters if pattern in one.source_patterns), pattern

    def back(self, converter: Any, made: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Take back what a converter made.

        Raises:
            Exception: Whatever its operations raise that can't.
        """
        reverse = converter.reverse_transform()
        by_first: dict[str, dict[str, list[torch.Tensor]]] = {}
        for name, tensor in made.items():
            first, pattern = reverse.rename_source_key(name)
            by_first.setdefault(first, {}).setdefault(pattern, []).append(tensor)
        return [
            tensor
            for first, tensors in by_first.items()
            for tensor in self.run(reverse, first, tensors).values()
        ]

    def run(
        self, converter: Any, name: str, tensors: Mapping[str, list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Run a converter.

        Args:
            converter: One of `converters`.
            name: The first name that it makes.
            tensors: Its sources by pattern.
        """
        one = copy.deepcopy(converter)
        for pattern, values in tensors.items():
            one.collected_tensors[pattern].extend(values)
        made = one.convert(name, model=self._model, config=self._model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def target_names(converter: Any, first: str) -> list[str]:
    """Return all names that a converter makes, from the first one."""
    patterns = converter.target_patterns
    return [first.replace(patterns[0], pattern) for pattern in patterns]


def converter_text(converter: Any) -> str:
    """Return the operations of a converter as its author wrote them."""
    return ", ".join(map(repr, converter.operations))


def operations(converter: Any) -> list[tuple[str, int, int]] | None:
    """Return the operations of a converter that a layout can express, each with its dimensions, or None.

    They are "stack", "fuse", "split", "transpose" and "flatten".
    """
    loading = import_module("transformers.core_model_loading")
    found = []
    for one in converter.operations:
        if type(one) is loading.MergeModulelist:
            found.append(("stack", one.dim, 0))
        elif (
            type(one) is loading.Concatenate and getattr(one, "num_shards_attribute", None) is None
        ):
            found.append(("fuse", one.dim, 0))
        elif type(one) is loading.Chunk and getattr(one, "num_shards_attribute", None) is None:
            found.append(("split", one.dim, 0))
        elif type(one) is loading.Transpose and not getattr(one, "check_dims", False):
            found.append(("transpose", one.dim0, one.dim1))
        elif type(one) is getattr(loading, "Conv3dToLinear", None):  # not in 5.3
            found.append(("flatten", 1, -1))
        else:
            return None
    return found


def carried(
    load_config: Any,
    takes: Mapping[str, str],
    convert: Callable[[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Any:
    """Return a load's config with a converter of ours before all others.

    Args:
        load_config: Transformers' own.
        takes: From keys, as converters see them, to the first target that they fill.
        convert: Called with a first target and the tensors that fill it by key of the file, on their device and in
            their dtype; returns all targets.
    """
    loading = import_module("transformers.core_model_loading")

    class Carrier(loading.WeightConverter):  # type: ignore[misc,name-defined]  # its class is only known now
        """Takes keys by look-up instead of by pattern, and hands all of them to one function."""

        def __init__(self) -> None:
            super().__init__([_OURS], [_OURS], operations=[object()])

        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            target = takes.get(source_key)
            return (source_key, None) if target is None else (target, _OURS)

        def add_tensor(self, target_key: str, source_key: str, _pattern: str, future: Any) -> None:
            self.collected_tensors[source_key] = [future]
            self.layer_targets[target_key].add(source_key)

        def convert(  # as Transformers calls it
            self,
            layer_name: str,
            model: Any = None,
            config: Any = None,
            hf_quantizer: Any = None,
            loading_info: Any = None,
        ) -> dict[str, Any]:
            tensors = {key: values[0] for key, values in self.materialize_tensors().items()}
            made: dict[str, Any] = convert(layer_name, tensors)
            if hf_quantizer is None or hf_quantizer.pre_quantized:
                return made
            for name in [n for n in made if hf_quantizer.param_needs_quantization(model, n)]:
                made |= hf_quantizer.get_quantize_ops().convert(
                    {name: [made.pop(name)]},
                    source_patterns=[name],
                    target_patterns=[name],
                    full_layer_name=name,
                    model=model,
                    config=config,
                    missing_keys=loading_info.missing_keys,
                )
            return made

        def __deepcopy__(self, memo: dict[int, Any]) -> Carrier:
            """Return one without tensors. Transformers asks for one with each key, so it has to be cheap."""
            fresh = copy.copy(self)
            fresh.collected_tensors, fresh.layer_targets = {}, defaultdict(set)
            return fresh

    mapping = [Carrier(), *(load_config.weight_mapping or [])]
    return dataclasses.replace(load_config, weight_mapping=mapping)


def forget_carrier(model: Any) -> None:
    """Take our converter out of what a model remembers of its load."""
    kept = [one for one in model._weight_conversions if type(one).__name__ != "Carrier"]
    model._weight_conversions = kept


def tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """Return the tensors that a model's family ties, as pairs of patterns of full names."""
    found = []
    for path, inner in model.named_modules():
        tied: Any = getattr(inner, "_tied_weights_keys", None)
        config: Any = getattr(inner, "config", None)
        if isinstance(tied, Mapping) and getattr(config, "tie_word_embeddings", False):
            prefix = re.escape(f"{path}.") if path else ""
            found += [(prefix + one, prefix + other) for one, other in tied.items()]
    return found


def conversion_name(name: str) -> Any:
    """Return a class or function of Transformers' weight conversions."""
    registry = import_module("transformers.conversion_mapping")
    loading = import_module("transformers.core_model_loading")
    return getattr(registry if name.startswith("register") else loading, name)


def has_adapter(model: Any) -> bool:
    """Tell whether a PEFT adapter was added to a model by Transformers."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def file_tensor(value: Any) -> torch.Tensor:
    """Return shape and dtype of a tensor that may still be in its file, on `meta`."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="meta")
    dtypes = import_module("transformers.modeling_utils").str_to_torch_dtype
    return torch.empty(value.get_shape(), dtype=dtypes[value.get_dtype()], device="meta")


def read_offloaded(model: Any, name: str) -> torch.Tensor:
    """Return a tensor of a model that is on disk and `meta` in memory, mapped from its file.

    Raises:
        ValueError: It isn't on disk.
    """
    accelerate = import_module("transformers.integrations.accelerate")
    tensor: torch.Tensor = accelerate.load_offloaded_parameter(model, name)
    return tensor


def not_ignored(model: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Return what is missing and unexpected by the rules of a model's family: it may ignore some of both."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return info.missing_keys - tied.keys(), info.unexpected_keys


# --- recorders --------------------------------------------------------------------------------------------------------


def record_replacements(model: nn.Module, stands_for: Callable[[nn.Module, type], bool]) -> None:
    """Capture the outputs of `model`, a replacement in the place of the class that its family records.

    Transformers keeps what to record by class, so changing that would reach every model of the family. The hooks are
    its own; they are put on the modules of this model here.
    """
    with _capturing:
        if not getattr(model, "_output_capturing_hooks_installed", False):
            _capture(model, "", [], stands_for)


def forget_recorders(model: nn.Module) -> None:
    """Take away the capturing hooks that `model` has, so that the next request installs them anew."""
    for module in model.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
        for handle, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__qualname__", "").startswith("install_output_capuring_hook."):
                del module._forward_hooks[handle]


def recorded_classes(model: nn.Module) -> set[type]:
    """Return the classes whose outputs are recorded anywhere in `model`."""
    specs = [
        spec for module in model.modules() if is_model(module) for _, spec in _recorders(module)
    ]
    return {spec.target_class for spec in specs if spec.target_class is not None}


def recorded_outputs(model: nn.Module, original: type) -> list[str]:
    """Return the names of the outputs that the family of `model` records from instances of `original`."""
    return [
        key
        for key, spec in _recorders(model)
        if spec.target_class is not None and issubclass(original, spec.target_class)
    ]


def _capture(
    module: nn.Module,
    path: str,
    recorders: list[tuple[str, Any]],
    stands_for: Callable[[nn.Module, type], bool],
) -> None:
    capturing = sys.modules["transformers.utils.output_capturing"]
    if is_model(module):  # a model inside records what its own family says
        recorders = _recorders(module)
        module._output_capturing_hooks_installed = True  # type: ignore[assignment]
    inside = list(recorders)
    for recorder in recorders:
        key, spec = recorder
        replaced = spec.target_class is not None and stands_for(module, spec.target_class)
        by_class = replaced or (
            spec.target_class is not None and isinstance(module, spec.target_class)
        )
        by_path = spec.class_name is not None and path.endswith(spec.class_name)
        layer = f".{spec.layer_name.strip('.')}." if spec.layer_name is not None else "."
        if (by_class or by_path) and layer in f".{path}.":
            initial = getattr(
                spec, "capture_initial_hidden_state", _MISSING
            )  # since 5.5 or later, not in 5.3
            capturing.install_output_capuring_hook(
                module, key, spec.index, *(() if initial is _MISSING else (initial,))
            )
            if replaced:  # an original that the replacement holds would be counted twice
                inside.remove(recorder)
    for name, child in module.named_children():
        _capture(child, f"{path}.{name}", inside, stands_for)


def _recorders(model: nn.Module) -> list[tuple[str, Any]]:
    capturing = import_module("transformers.utils.output_capturing")
    # The registry is keyed by this string in every version; 5.24 hides that behind its own accessors.
    specs = dict.get(capturing._CAN_RECORD_REGISTRY, str(type(model))) or {}
    return [
        (key, _as_recorder(key, spec))
        for key, value in specs.items()
        for spec in (value if isinstance(value, list) else [value])
    ]


def _as_recorder(output: str, spec: Any) -> Any:
    """Spell a class or a path's end out as Transformers does: states are outputs, attentions come second."""
    capturing = sys.modules["transformers.utils.output_capturing"]
    if isinstance(spec, capturing.OutputRecorder):
        return spec
    target, path = (None, spec) if isinstance(spec, str) else (spec, None)
    index = 0 if "hidden_states" in output else 1
    return capturing.OutputRecorder(target, index=index, class_name=path)


# --- installing -------------------------------------------------------------------------------------------------------


def install_functions(functions: Iterable[Callable[..., Any]]) -> Undo:
    """Exchange the functions of `transformers.monkey_patching` of the same names, wherever they were imported to.

    Also bridges what moved between versions, so that code written for one runs on all: the recorder registry takes
    class strings, and `register_checkpoint_conversion_mapping` both names of its first parameter.
    """
    monkey_patching = import_module("transformers.monkey_patching")
    conversion_mapping = import_module("transformers.conversion_mapping")
    capturing = import_module("transformers.utils.output_capturing")
    register_conversion = conversion_mapping.register_checkpoint_conversion_mapping
    with ExitStack() as stack:
        for function in functions:
            stack.callback(_exchange(getattr(monkey_patching, function.__name__), _alias(function)))
        stack.callback(_exchange(register_conversion, _with_both_names(register_conversion)))
        registry = type(capturing._CAN_RECORD_REGISTRY)
        if registry is not dict:  # since 5.24 keyed by model
            for name, value in _string_keys(registry).items():
                stack.callback(_put(registry, name, value))
        return stack.pop_all().close


def _exchange(old: object, new: object) -> Undo:
    """Bind `new` in every module that holds `old`. Looks at what modules hold and never resolves a lazy attribute."""

    def swap(before: object, after: object) -> None:
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if value is before:
                        setattr(module, name, after)

    swap(old, new)
    return lambda: swap(new, old)


def _alias(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a second function: undoing must tell who imported it from Transformers from who imported it from us."""

    @functools.wraps(function)
    def alias(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return alias


def _with_both_names(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def register_checkpoint_conversion_mapping(*args: Any, **kwargs: Any) -> None:
        for name in ("model_type_or_class_name", "model_type"):  # the second one until 5.3
            if name in kwargs:
                args = (kwargs.pop(name), *args)
        stock(*args, **kwargs)

    return register_checkpoint_conversion_mapping


def _string_keys(registry: Any) -> dict[str, Callable[..., Any]]:
    stock_set, stock_get = registry.__setitem__, registry.get

    def set_item(self: Any, key: Any, value: Any) -> None:
        dict.__setitem__(self, key, value) if isinstance(key, str) else stock_set(self, key, value)

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return dict.get(self, key, default) if isinstance(key, str) else stock_get(self, key)

    return {"__setitem__": set_item, "get": get}
