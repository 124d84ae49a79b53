"""The only file that touches the internals of Transformers (5.3 to 5.24 seen).

Nothing here decides anything: functions that the engine passes in are put where Transformers calls its own, and each
change returns its undo.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

Undo = Callable[[], None]
_MISSING = object()
_loading = threading.RLock()
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

    def smart_apply(model: nn.Module, by_family: Callable[..., None], *flags: Any) -> nn.Module:
        """Walk as Transformers' own does: children first, each model inside by its family's rule."""

        def apply(module: nn.Module, by_family: Callable[..., None]) -> None:
            for child in module.children():
                apply(
                    child,
                    child._initialize_weights if isinstance(child, model_class) else by_family,
                )
            if mark in module.__dict__:
                initialise(module, by_family, *flags)
            else:
                by_family(module, *flags)

        apply(model, by_family)
        built(model)
        return model

    with ExitStack() as stack:
        for owner, name, value in (
            (modeling_utils, "apply_patches", apply_patches),
            (modeling_utils, "patch_output_recorders", patch_output_recorders),
            (modeling_utils, "local_torch_dtype", _one_at_a_time(modeling_utils.local_torch_dtype)),
            (initialization, "no_tie_weights", _in_this_thread(model_class)),
            (capturing, "maybe_install_capturing_hooks", install_hooks),
            (conversion_mapping, "get_checkpoint_conversion_mapping", conversions),
            (nn.Module, "smart_apply", smart_apply),
        ):
            stack.callback(_put(owner, name, value))
        return stack.pop_all().close


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
        with _loading, stock(*args, **kwargs):
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
