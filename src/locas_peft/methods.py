"""The methods that a text can be read with, their presets, and one reading from the first token to the saved memory.

A method is a function in the table `METHODS` that turns a base model into the model to read with; a new one is one
function. All of them run in the same loop (`TestTimeTrainer`), so that their figures compare.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from . import backbone, checkpoint
from .evaluation.perplexity import at_marks, cumulative, perplexity
from .files import staged, write_json
from .loading import MEMORY_CONFIG
from .text import digest_ids
from .ttt import Anchor, Chunk, TestTimeTrainer, write_own_text
from .ttt.gradient import GRADIENTS
from .tuner import STRATEGIES, LocasConfig, SlotWriter
from .tuner.ffn import find_ffns

CHECKPOINT_FOLDER = "checkpoint"
READING = "reading.json"
"""What a memory's folder holds besides PEFT's files: the reading that made it."""

_PAPERS_NORMS = {"row_norm": None, "max_slot_norm": None}
_PLAIN = {"layers_to_transform": None, "gradient": "full", "anchor": None, "anchor_every": 4}

_WRITING = {"update": "bp", "epsilon": 0.01, "slots_per_chunk": 8}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # Gated: the paper's, tau divided by r and the rate of its PG-19 runs. Two-layer: written slot by slot as in the
    # paper, but tau undivided and a rate from our sweep (benchmarks/README.md).
    "paper": {
        "none": {},
        "lora": {"r": 64, "learning_rate": 1e-3, **_PLAIN},
        "locas-glu": {"r": 64, "init": "topk", "learning_rate": 4e-3, "scaling": 1.0, **_PAPERS_NORMS, **_PLAIN},
        "locas-mlp": {
            **{"r": 64, "init": "write", "learning_rate": 5e-4, "scaling": "r", **_PAPERS_NORMS, **_PLAIN},
            **_WRITING,
        },
    },
    # What measured best (benchmarks/README.md): tau undivided ("r" stands for the width itself), so that the norm clip
    # binds later and the memory learns more; an anchor, so that it leaves other texts alone; cloned rows everywhere.
    "tuned": {
        "none": {},
        "lora": {"r": 64, "learning_rate": 1e-3, **_PLAIN},
        "locas-glu": {
            **{"r": 64, "init": "topk", "learning_rate": 4e-3, "scaling": "r", **_PAPERS_NORMS, **_PLAIN},
            **{"anchor": 0.3},
        },
        "locas-mlp": {
            **{"r": 64, "init": "topk", "learning_rate": 8e-3, "scaling": "r", **_PAPERS_NORMS, **_PLAIN},
            **_WRITING,
        },
    },
}


UPDATES = ("bp", "nlsvd")
"""How a written memory goes on: trained by gradient descent, or only written and folded."""


@dataclass(frozen=True)
class Settings:
    """How a text is read. `from_preset` fills in what a method leaves open.

    Args:
        method: a name in `METHODS`.
        model: name of the base, for the record.
        preset: name of the preset that the defaults came from, for the record.
        r: memory width or LoRA rank; None where the method has none, as with `init`, `learning_rate` and `scaling`.
        init: strategy that makes a memory's gate and up rows.
        learning_rate: of AdamW.
        scaling: multiplies tau, which is divided by `r`.
        row_norm: the norm of a memory's rows at the start; None for 1, the paper's.
        max_slot_norm: the radius of the norm clip, 0 for no clip; None for 1, the paper's.
        update: of a memory that is written (init "write"): "bp" also trains the slots, "nlsvd" only writes and folds
            them by NL-SVD. A memory that is not written is trained, whatever this says.
        epsilon: length of a written value.
        slots_per_chunk: how many tokens of a chunk are written, those with the highest loss.
        layers_to_transform: indices of the layers that get a memory or LoRA, or "upper" for the upper half of them;
            None for all. Nothing is differentiated below the lowest of them.
        gradient: "full", or "tokenwise", which leaves out attention (see `ttt.TestTimeTrainer`); None where nothing
            is learned.
        anchor: how hard what is trained is held to the base on text that the base wrote (see `ttt.Anchor`); None, or 0
            in `from_preset`, for not at all.
        anchor_every: one step in so many is held.
        window: tokens that the model sees at once, context and chunk.
        stride: tokens of a chunk.
        context: "cache" keeps the context's keys and values, "recompute" reads the whole window again.
        epochs: learning passes over a chunk.
        max_tokens: how many tokens of the text are read; None for all of them.
        seed: set before each method.
        dtype: of the base's weights, for the record.

    Raises:
        ValueError: a value that no reading can have.
    """

    method: str
    model: str = backbone.NAME
    preset: str = "tuned"
    r: int | None = None
    init: str | None = None
    learning_rate: float | None = None
    scaling: float | None = None
    row_norm: float | None = None
    max_slot_norm: float | None = None
    update: str | None = None
    epsilon: float | None = None
    slots_per_chunk: int | None = None
    layers_to_transform: list[int] | str | None = None
    gradient: str | None = None
    anchor: float | None = None
    anchor_every: int | None = None
    window: int = 512
    stride: int = 256
    context: str = "cache"
    epochs: int = 1
    max_tokens: int | None = None
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("preset", self.preset, PRESETS)
        if self.init is not None:
            _check_choice("init", self.init, STRATEGIES)
        if self.update is not None:
            _check_choice("update", self.update, UPDATES)
        if self.gradient is not None:
            _check_choice("gradient", self.gradient, GRADIENTS)
        for name in ("r", "stride", "epochs", "max_tokens", "slots_per_chunk", "anchor_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}: raise it, or leave it out")
        if self.window < self.stride:
            raise ValueError(
                f"window must be at least the stride ({self.stride}), got {self.window}: the window holds the chunk; "
                "raise it, or lower the stride"
            )
        _check_layers(self.layers_to_transform)
        if isinstance(self.layers_to_transform, tuple):
            object.__setattr__(self, "layers_to_transform", list(self.layers_to_transform))  # as JSON gives it back
        for name in ("learning_rate", "scaling", "row_norm", "epsilon", "anchor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {value}: leave it out for the preset's")

    @classmethod
    def from_preset(cls, method: str, preset: str = "tuned", **given: Any) -> Settings:
        """Takes a preset's values for all that is not given.

        Args:
            method: a name in `METHODS`.
            preset: a name in `PRESETS`.
            given: fields of `Settings`; None stands for "not given".

        Raises:
            ValueError: an unknown name, a value out of range, or a field that this method does not have.

        Example:
            >>> Settings.from_preset("locas-glu", r=16).scaling
            16.0
        """
        _check_choice("method", method, METHODS)
        _check_choice("preset", preset, PRESETS)
        values = dict(PRESETS[preset][method])
        given = {name: value for name, value in given.items() if value is not None}
        for name in METHOD_FIELDS:
            if name in given and name not in values:
                raise ValueError(f"{name} has no meaning for the method {method!r}, got {given[name]}: leave it out")
        values.update(given)
        values["anchor"] = values.get("anchor") or None
        _drop_what_is_not_used(values, given)
        if values.get("scaling") == "r":
            values["scaling"] = float(values["r"])
        return cls(method=method, preset=preset, **values)


def _drop_what_is_not_used(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Takes out a preset's values that another setting leaves without a meaning, and refuses given ones."""
    rules = [
        ("init", values.get("init"), values.get("init") != "write", ("update", "epsilon", "slots_per_chunk")),
        ("update", values.get("update"), values.get("update") == "nlsvd", ("learning_rate", "anchor")),
        ("anchor", values.get("anchor"), not values.get("anchor"), ("anchor_every",)),
    ]
    for field, value, applies, names in rules:
        for name in names if applies else ():
            if name in given:
                raise ValueError(f"{name} has no meaning with {field}={value!r}, got {given[name]}: leave it out")
            values.pop(name, None)


METHOD_FIELDS = (
    "r",
    "init",
    "learning_rate",
    "scaling",
    "row_norm",
    "max_slot_norm",
    "update",
    "epsilon",
    "slots_per_chunk",
    "layers_to_transform",
    "gradient",
    "anchor",
    "anchor_every",
)
"""The settings that not every method has."""


@dataclass(frozen=True)
class Reading:
    """What one method made of one text. `to_json` gives the object that `--json` writes.

    `nll_nats` is the sum over `scored_tokens`, each scored before it was learned. `perplexity_at` maps numbers of
    tokens read to the perplexity so far, `curve` has it as (tokens read, perplexity) after each chunk. `seconds` is
    the time spent on an anchor's text and on chunks (scoring and learning; no loading, no checkpoints). `peak_bytes`
    is the highest memory in use while reading, the base model included: on CUDA what torch had allocated, elsewhere
    the resident size of the process, which where the system cannot reset its record (other than Linux) is the highest
    since the start; None on systems that keep none. `memory_dir` is None where nothing was saved.
    """

    settings: Settings
    text_sha256: str
    scored_tokens: int
    nll_nats: float
    perplexity: float
    perplexity_at: dict[str, float]
    curve: list[tuple[int, float]]
    extra_parameters: int
    seconds: float
    peak_bytes: int | None
    skipped_chunks: int = 0
    memory_dir: str | None = None

    @property
    def method(self) -> str:
        return self.settings.method

    @property
    def tokens_per_second(self) -> float:
        return self.scored_tokens / self.seconds if self.seconds > 0 else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Gives the settings and the results in one flat dictionary of JSON values."""
        results = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        settings = dataclasses.asdict(results.pop("settings"))
        return {**settings, **results, "tokens_per_second": self.tokens_per_second}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Reading:
        """Undoes `to_json`; a figure that JSON could not hold (null) comes back as NaN.

        Raises:
            ValueError: a key is missing or unknown.
        """
        value = {name: item for name, item in value.items() if name != "tokens_per_second"}
        names = {field.name for field in dataclasses.fields(Settings)}
        try:
            settings = Settings(**{name: value.pop(name) for name in list(value) if name in names})
            reading = cls(settings=settings, **value)
        except TypeError as error:
            raise ValueError(f"{READING} must be one that this version wrote ({error}): read the text again") from None
        return dataclasses.replace(
            reading,
            nll_nats=_or_nan(reading.nll_nats),
            perplexity=_or_nan(reading.perplexity),
            perplexity_at={mark: _or_nan(item) for mark, item in reading.perplexity_at.items()},
            curve=[(tokens, _or_nan(item)) for tokens, item in reading.curve],
        )


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


# ---------------------------------------------------------------------- methods


def _read_only(base: PreTrainedModel, settings: Settings) -> nn.Module:
    return base


def _add_lora(base: PreTrainedModel, settings: Settings) -> PeftModel:
    """TempLoRA: LoRA on every projection of attention and FFN, alpha = r, in the same loop."""
    layers = find_layers(base, settings.layers_to_transform)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.r,
        lora_dropout=0.0,
        # PEFT takes layers beside a list of names only.
        target_modules="all-linear" if layers is None else _name_projections(base),
        layers_to_transform=layers,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def _add_gated_memory(base: PreTrainedModel, settings: Settings) -> PeftModel:
    _check_host(base, "locas-glu", gated=True)
    return get_peft_model(base, _memory_config(base, settings))


def _add_two_layer_memory(base: PreTrainedModel, settings: Settings) -> PeftModel:
    _check_host(base, "locas-mlp", gated=False)
    return get_peft_model(base, _memory_config(base, settings))


METHODS: dict[str, Callable[[PreTrainedModel, Settings], nn.Module]] = {
    "none": _read_only,
    "lora": _add_lora,
    "locas-glu": _add_gated_memory,
    "locas-mlp": _add_two_layer_memory,
}


def find_layers(base: PreTrainedModel, layers: list[int] | str | None) -> list[int] | None:
    """Gives the indices of the layers that `Settings.layers_to_transform` means for a model.

    Args:
        base: a causal LM.
        layers: indices, "upper" or None. The upper half of an odd number of layers is the larger one.

    Returns:
        The indices, ascending; None for all layers.

    Raises:
        ValueError: an index that the model does not have.
    """
    if layers is None:
        return None
    depth = base.config.get_text_config().num_hidden_layers
    if layers == "upper":
        return list(range(depth // 2, depth))
    beyond = next((index for index in layers if index >= depth), None)
    if beyond is not None:
        raise ValueError(
            f"layers_to_transform must lie below {depth}, the layers of {type(base).__name__}, got {beyond}: lower it"
        )
    return sorted(layers)


def _name_projections(base: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear layers but the output's, as PEFT's "all-linear" finds them."""
    head = base.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    names = {name for name, module in base.named_modules() if isinstance(module, kinds) and module is not head}
    return sorted({name.rpartition(".")[2] for name in names})


def _memory_config(base: PreTrainedModel, settings: Settings) -> LocasConfig:
    norms = {} if settings.row_norm is None else {"row_norm": settings.row_norm}
    if settings.max_slot_norm is not None:
        norms["max_slot_norm"] = settings.max_slot_norm or None
    return LocasConfig(
        r=settings.r,
        init_strategy=settings.init,
        scaling=settings.scaling,
        layers_to_transform=find_layers(base, settings.layers_to_transform),
        **norms,
        seed=settings.seed,
        task_type="CAUSAL_LM",
    )


def _check_host(base: PreTrainedModel, method: str, gated: bool) -> None:
    kinds = {ffn.gated for ffn in find_ffns(base).values()}
    if kinds == {not gated}:
        found, other = ("two-layer", "locas-mlp") if gated else ("gated", "locas-glu")
        raise ValueError(
            f"method {method!r} needs {'gated' if gated else 'two-layer'} FFNs, got {type(base).__name__} with "
            f"{found} ones: use {other!r}"
        )


def _check_layers(layers: Any) -> None:
    if layers is None or layers == "upper":
        return
    indices = layers if isinstance(layers, list | tuple) else ()
    whole = all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices)
    if not indices or not whole or len(set(indices)) < len(indices):
        raise ValueError(
            f"layers_to_transform must be 'upper' or different layer indices from 0 on, got {layers!r}: "
            "leave it out for all layers"
        )


def _check_choice(field: str, value: Any, choices: dict[str, Any]) -> None:
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}")


# ---------------------------------------------------------------------- reading


@contextmanager
def attached(base: PreTrainedModel, settings: Settings) -> Iterator[nn.Module]:
    """Gives the base with a method's fresh adapter in it, and takes the adapter out again when the block ends.

    Mutates `base` in between. Afterwards its modules, weights, `requires_grad` flags and mode are what they were.

    Args:
        base: a causal LM without adapters.
        settings: the method, its widths and its seed, which is set for torch here.

    Raises:
        ValueError: the method does not fit the base.
    """
    flags = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    training = base.training
    torch.manual_seed(settings.seed)
    model = METHODS[settings.method](base, settings)
    try:
        if model is base:
            base.requires_grad_(False)
        yield model
    finally:
        if model is not base:
            model.unload()
            base.__dict__.pop("peft_config", None)
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(flags[name])
            parameter.grad = None
        base.train(training)


def read_with(
    base: PreTrainedModel,
    input_ids: torch.LongTensor,
    settings: Settings,
    *,
    on_chunk: Callable[[Chunk], None] | None = None,
    memory_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
) -> Reading:
    """Reads a text with one method, from a fresh adapter or a checkpoint to the figures and the saved memory.

    Mutates `base` while it runs and leaves it as it was (see `attached`).

    Args:
        base: a causal LM without adapters.
        input_ids: LongTensor [T], T >= 2; the first `settings.max_tokens` of it are read.
        settings: see `Settings`.
        on_chunk: called after each chunk; on resuming, for the chunks of the checkpoint first.
        memory_dir: where the memory and its `reading.json` go, whole or not at all. The method "none" has nothing to
            save.
        checkpoint_dir: where the state is kept every `checkpoint_seconds`, and removed from once the memory is saved.
        checkpoint_seconds: at least so much time lies between two checkpoints.
        resume: goes on from the checkpoint in `checkpoint_dir`; from the start where there is none.

    Returns:
        The reading; `memory_dir` in it is the folder that was written, if any.

    Raises:
        ValueError: the text is too short, the method does not fit the base, or the checkpoint is of another reading.
        OSError: the disk is full, or a folder cannot be written.
    """
    if input_ids.dim() != 1 or input_ids.numel() < 2:
        raise ValueError(f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text")
    input_ids = input_ids[: settings.max_tokens]
    if settings.method == "none":
        memory_dir = checkpoint_dir = None
    with attached(base, settings) as model:
        began = time.perf_counter()
        trainer = make_trainer(model, settings)
        preparation_seconds = time.perf_counter() - began
        if checkpoint_dir is not None and resume:
            trainer.resume(checkpoint_dir)
        for chunk in trainer.chunks:
            _call(on_chunk, chunk)
        peak = PeakMemory(base.device)
        saved = time.monotonic()
        with closing(_begin(trainer, input_ids, checkpoint_dir)) as chunks:
            for chunk in chunks:
                _call(on_chunk, chunk)
                if checkpoint_dir is not None and time.monotonic() - saved >= checkpoint_seconds:
                    _save_checkpoint(trainer, Path(checkpoint_dir))
                    saved = time.monotonic()
        chunks = trainer.chunks
        nll_nats, scored_tokens = sum(chunk.nll_nats for chunk in chunks), sum(chunk.tokens for chunk in chunks)
        reading = Reading(
            settings=settings,
            text_sha256=digest_ids(input_ids),
            scored_tokens=scored_tokens,
            nll_nats=nll_nats,
            perplexity=perplexity(nll_nats, scored_tokens),
            perplexity_at=at_marks(chunks, choose_marks(len(input_ids))),
            curve=cumulative(chunks),
            extra_parameters=_count_extra_parameters(model, base),
            seconds=preparation_seconds + sum(chunk.seconds for chunk in chunks),
            peak_bytes=peak.read(),
            skipped_chunks=trainer.skipped_chunks,
            memory_dir=None if memory_dir is None else str(memory_dir),
        )
        if memory_dir is not None:
            save_memory(model, memory_dir, reading)
        if checkpoint_dir is not None:
            shutil.rmtree(checkpoint_dir, ignore_errors=True)
    return reading


def save_memory(model: PeftModel, directory: str | Path, reading: Reading) -> None:
    """Writes a memory with the reading that made it, whole or not at all.

    The base is recorded as `reading.settings.model`, which is a name that other machines know too.

    Args:
        model: the model with its adapter; not changed.
        directory: made where it does not exist; other files in it stay.
        reading: goes into `reading.json`.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    config = model.peft_config[model.active_adapter]
    name = config.base_model_name_or_path
    try:
        config.base_model_name_or_path = reading.settings.model
        with staged(directory, last=MEMORY_CONFIG) as folder:
            # Embeddings are not trained here, and PEFT would ask the hub about them.
            model.save_pretrained(str(folder), save_embedding_layers=False)
            (folder / "README.md").write_text(_make_card(config, reading), encoding="utf-8")
            write_json(folder / READING, reading.to_json())
    finally:
        config.base_model_name_or_path = name


def _make_card(config: PeftConfig, reading: Reading) -> str:
    """The model card: what the memory is and how it is loaded. PEFT's own is a form that waits to be filled in."""
    settings = reading.settings
    if backbone.is_embedded(settings.model):
        known = backbone.name_of(settings.model)
        which = "" if known == backbone.NAME else f'name="{known}"'
        load = f"from locas_peft import backbone\n\nbase, tokenizer = backbone.load({which})"
    else:
        load = (
            "import locas_peft  # registers LOCAS with PEFT\nfrom transformers import AutoModelForCausalLM\n\n"
            f"base = AutoModelForCausalLM.from_pretrained({settings.model!r})"
        )
    return f"""---
base_model: {settings.model}
library_name: peft
tags:
- locas
---

# A memory of one text

A {config.peft_type.value} adapter (method {settings.method}, r={settings.r}, {reading.extra_parameters:,} parameters)
for {settings.model}, made by reading {reading.curve[-1][0]:,} tokens. Perplexity while reading, each token scored
before it was learned: {reading.perplexity:.2f}. All settings and figures are in `{READING}`.

```python
from peft import PeftModel
{load}
model = PeftModel.from_pretrained(base, "this folder")
```
"""


def score(model: nn.Module, input_ids: torch.LongTensor, settings: Settings) -> float:
    """Gives the perplexity of a text under a model that does not learn while it reads.

    Args:
        model: a causal LM, with or without an adapter; not changed. None of its parameters may require gradients.
        input_ids: LongTensor [T], T >= 2.
        settings: window, stride and context are taken from it.

    Raises:
        ValueError: a parameter requires gradients, so that reading would teach it.
    """
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if learning:
        raise ValueError(f"model must be frozen, got {len(learning)} trainable parameters: freeze them first")
    trainer = TestTimeTrainer(
        model, window=settings.window, stride=settings.stride, learning_rate=None, context=settings.context
    )
    for _ in trainer.read(input_ids):
        pass
    return trainer.perplexity


def choose_marks(tokens: int) -> list[int]:
    """Chooses the numbers of tokens at which the perplexity so far is reported: at most four, evenly spaced.

    Long texts have the protocol's 50K, 100K, 150K and 200K, shorter ones smaller steps.

    Args:
        tokens: how many tokens the text has.
    """
    steps = (1_000, 2_500, 5_000, 10_000, 25_000, 50_000)
    step = next((step for step in steps if tokens <= 4 * step), steps[-1])
    return [mark for mark in range(step, 4 * step + 1, step) if mark <= tokens]


def make_trainer(model: nn.Module, settings: Settings, **options: Any) -> TestTimeTrainer:
    """Makes the trainer of a reading: with the memory's writer, and the text that an anchor holds it by.

    Args:
        model: what `attached` gives.
        settings: how the text is read.
        options: further arguments of `TestTimeTrainer`, such as `objective`.
    """
    writer = None
    if settings.init == "write":
        fold = "nlsvd" if settings.update == "nlsvd" else "refit"
        slots = {"epsilon": settings.epsilon, "slots_per_chunk": settings.slots_per_chunk}
        slots = {name: value for name, value in slots.items() if value is not None}
        writer = SlotWriter(model, fold=fold, **slots)
    anchor = None
    if settings.anchor is not None:
        own = write_own_text(model, tokens=settings.stride, seed=settings.seed)
        anchor = Anchor(own, weight=settings.anchor, every=settings.anchor_every)
    return TestTimeTrainer(
        model,
        window=settings.window,
        stride=settings.stride,
        learning_rate=settings.learning_rate,
        epochs=settings.epochs,
        context=settings.context,
        gradient=settings.gradient or "full",
        writer=writer,
        anchor=anchor,
        **options,
    )


def _call(callback: Callable[[Chunk], None] | None, chunk: Chunk) -> None:
    if callback is not None:
        callback(chunk)


def _count_extra_parameters(model: nn.Module, base: nn.Module) -> int:
    return 0 if model is base else sum(p.numel() for p in model.parameters() if p.requires_grad)


# ---------------------------------------------------------------------- checkpoints


def find_finished(memory_dir: str | Path, settings: Settings, input_ids: torch.LongTensor) -> Reading | None:
    """Looks whether a folder already holds the memory of this very reading, finished.

    Args:
        memory_dir: the folder; it need not exist.
        settings: what the reading would be done with.
        input_ids: LongTensor [T], what would be read.

    Returns:
        The finished reading; None where there is no memory, or a checkpoint waits to be gone on from.

    Raises:
        ValueError: the folder holds the memory of another reading.
    """
    folder = Path(memory_dir)
    if has_checkpoint(folder) or not (folder / MEMORY_CONFIG).exists():
        return None
    remedy = "choose another folder, or give --overwrite"
    if not (folder / READING).exists():
        raise ValueError(f"--out {str(folder)!r} holds a memory that no reading here made: {remedy}")
    reading = Reading.from_json(json.loads((folder / READING).read_text(encoding="utf-8")))
    here, there = dataclasses.asdict(settings), dataclasses.asdict(reading.settings)
    field = next((field for field in here if here[field] != there[field]), None)
    if field is not None:
        raise ValueError(
            f"{field} must be {there[field]!r} as in the memory in {str(folder)!r}, got {here[field]!r}: {remedy}"
        )
    if reading.text_sha256 != digest_ids(input_ids[: settings.max_tokens]):
        raise ValueError(f"--out {str(folder)!r} holds the memory of another text: {remedy}")
    return reading


def has_checkpoint(memory_dir: str | Path) -> bool:
    """Says whether an unfinished reading waits in a memory's folder."""
    return (Path(memory_dir) / CHECKPOINT_FOLDER / checkpoint.CHECKPOINT).exists()


def _begin(
    trainer: TestTimeTrainer, input_ids: torch.LongTensor, checkpoint_dir: str | Path | None
) -> Iterator[Chunk]:
    if not trainer.position:
        return trainer.read(input_ids)
    try:
        return trainer.read(input_ids)
    except ValueError as error:
        raise ValueError(
            f"text must be the one that the checkpoint in {str(checkpoint_dir)!r} was begun with, to the last token: "
            "give that text and the same limit of tokens, or choose another folder"
        ) from error


def _save_checkpoint(trainer: TestTimeTrainer, directory: Path) -> None:
    """Saves a checkpoint; where the first one fails, the folders that were made for it go again."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        trainer.save(directory)
    except BaseException:
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
        for folder in made[1:]:
            with suppress(OSError):
                folder.rmdir()
        raise


# ---------------------------------------------------------------------- peak memory


class PeakMemory:
    """The highest memory in use from now on, in bytes: torch's on CUDA, the process's resident size elsewhere.

    There is one record a process (on CUDA: a device), which a new object begins afresh where the system lets it: on
    Linux and on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: begins the record of /proc/self/status afresh
        except OSError:
            pass

    def read(self) -> int | None:
        """Gives the peak so far; None on systems that keep none."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        status = Path("/proc/self/status")  # Linux: what getrusage tells may be of the process that started this one
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
        if found:
            return int(found[1]) * 1024
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
