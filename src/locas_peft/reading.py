"""One reading of a text: settings -> adapter -> trainer -> memory folder. The only code that teaches a text and saves.

A method is one row of `ADAPTERS`, with its settings in each preset of `settings.PRESETS`. All methods run in the same
loop, so that their figures compare.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from . import backbone
from .files import finish_replacement, load_json, staged, write_json
from .gguf_models import is_gguf
from .loading import MEMORY_CONFIG, load_memory
from .peak_memory import PeakMemory
from .selfstudy import Exchange, Lesson, SelfStudy, StudyStep, save_exchanges
from .selfstudy.exchanges import EXCHANGES, digest_exchanges
from .settings import ReadingSettings
from .text import digest_ids
from .ttt import (
    Anchor,
    Chunk,
    OwnText,
    TestTimeTrainer,
    at_marks,
    checkpoint,
    choose_marks,
    cumulative,
    per_segment,
    perplexity,
)
from .ttt.checkpoint import has_checkpoint
from .ttt.run_state import differing_field
from .tuner import LocasConfig, SlotWriter
from .tuner.ffn import find_ffns

__all__ = [
    "CHECKPOINT_FOLDER",
    "READING",
    "Reading",
    "attached",
    "check_vacant",
    "find_finished",
    "has_checkpoint",
    "memorize",
    "memory_attached",
    "score",
]

_logger = logging.getLogger(__name__)

READING = "reading.json"
"""The file in a memory's folder that holds the reading that made it."""
CHECKPOINT_FOLDER = "checkpoint"
"""The folder in a memory's folder that holds an unfinished reading."""
ANCHOR_TOKENS = 128
"""The most tokens of a text that the base writes for the anchor."""
STUDY_RATE = 0.75
"""The learning rate of a self-study, relative to the reading's."""
_CARD = "README.md"


@dataclass(frozen=True)
class Reading:
    """What one method made of one text. `to_json` returns the object that `--json` writes.

    Attributes:
        text_sha256: of the token ids.
        scored_tokens: of the first reading of the text.
        nll_nats: their summed nll, each token scored before it was learned.
        perplexity_at: from the number of tokens read to the perplexity so far.
        perplexity_between: from "0-50000" and so on to the perplexity of that segment.
        perplexities: of each reading of the text; the first one is `perplexity`.
        curve: (tokens read, perplexity so far) after each chunk of the first reading.
        extra_parameters: trained parameters.
        seconds: for scoring and learning all chunks, the anchor's texts included.
        peak_bytes: see `PeakMemory`; the base is included.
        skipped_chunks: chunks that were not learned because a loss or a gradient was not finite.
        memory_dir: None where nothing was saved.
        taken_back: the numbers of tokens read at which the brake took the adapter back to an earlier state.
        final_nats: the loss of the adapter in the brake's last comparison, at the end, in nats a token; None without.
        final_base_nats: the loss of the base there.
        studied: of a self-study (see `SelfStudy.figures`), or None.
    """

    settings: ReadingSettings
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
    perplexities: list[float] = field(default_factory=list)
    perplexity_between: dict[str, float] = field(default_factory=dict)
    taken_back: list[int] = field(default_factory=list)
    final_nats: float | None = None
    final_base_nats: float | None = None
    studied: dict[str, Any] | None = None

    @property
    def method(self) -> str:
        return self.settings.method

    @property
    def tokens_per_second(self) -> float:
        tokens = self.scored_tokens * self.settings.readings
        return tokens / self.seconds if self.seconds > 0 else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Return the settings and the figures in one flat dictionary of JSON values."""
        figures = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        settings = dataclasses.asdict(figures.pop("settings"))
        return {**settings, **figures, "tokens_per_second": self.tokens_per_second}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Reading:
        """Undo `to_json`; a figure that JSON cannot hold (null) comes back as NaN.

        Raises:
            ValueError: a key is missing or unknown.
        """
        value = {name: item for name, item in value.items() if name != "tokens_per_second"}
        names = {item.name for item in dataclasses.fields(ReadingSettings)}
        settings = {name: value.pop(name) for name in list(value) if name in names}
        optional = {"peak_bytes", "memory_dir", "final_nats", "final_base_nats", "studied"}
        for name in value.keys() - optional:
            value[name] = _null_to_nan(value[name])
        try:
            reading = cls(settings=ReadingSettings(**settings), **value)
        except TypeError as error:
            raise ValueError(f"{READING} must be one that this version wrote ({error}): read the text again") from None
        return dataclasses.replace(reading, curve=[tuple(point) for point in reading.curve])


def _null_to_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _null_to_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_null_to_nan(item) for item in value]
    return float("nan") if value is None else value


def memorize(
    base: PreTrainedModel,
    input_ids: torch.LongTensor,
    settings: ReadingSettings,
    *,
    out: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    overwrite: bool = False,
    on_chunk: Callable[[Chunk], None] | None = None,
    tokenizer: Any = None,
    exchanges: Sequence[Exchange | Lesson] | None = None,
    on_study: Callable[[StudyStep], None] | None = None,
) -> Reading:
    """Read a text with one method, from a fresh adapter or a checkpoint to the figures and the saved memory.

    `base` is mutated while this runs and restored at the end (see `attached`).

    Args:
        base: a causal LM without adapters.
        input_ids: LongTensor [T], T >= 2; the first `settings.max_tokens` are read.
        settings: completed here.
        out: the memory's folder, written whole or not at all. The method "none" has nothing to save.
        checkpoint_dir: a folder for the unfinished state, saved every `checkpoint_seconds`, and where a callback
            raises, and removed after the memory was saved; without `out` the caller removes it. It is locked for the
            whole call. Where it cannot be written, a warning is logged and the reading goes on.
        checkpoint_seconds: the least time between two checkpoints.
        resume: go on from the checkpoint in `checkpoint_dir`; from the start where there is none.
        overwrite: replace the memory in `out`, and a checkpoint that is not resumed.
        on_chunk: called after each chunk; on resuming, for the chunks of the checkpoint first.
        tokenizer: of the base; needed for a self-study (`settings.study`).
        exchanges: studied in place of those that the model would write (see `SelfStudy`).
        on_study: called after each step of a self-study.

    Returns:
        The reading.

    Raises:
        ValueError: the text is too short, the method does not fit the base, `out` is not vacant, or the checkpoint is
            of another reading or in use.
        OSError: the disk is full, or a folder cannot be written.
    """
    if input_ids.dim() != 1 or input_ids.numel() < 2:
        raise ValueError(f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text")
    settings = settings.complete(base)
    input_ids = input_ids[: settings.max_tokens]
    if settings.method == "none":
        out = checkpoint_dir = None
    with ExitStack() as stack:
        lock = None if checkpoint_dir is None else stack.enter_context(_locked(Path(checkpoint_dir)))
        if out is not None:
            check_vacant(out, resume=resume, overwrite=overwrite)
        resuming = lock is not None and resume and has_checkpoint(lock.directory)
        model = stack.enter_context(attached(base, settings))
        peak = PeakMemory(base.device)
        trainer = make_trainer(model, settings)
        if resuming:
            trainer.resume(lock)  # it brings the anchor's texts, which the study takes from the trainer
        study = _make_study(trainer, tokenizer, input_ids, settings, exchanges)
        if resuming and study is not None:
            study.resume(lock)
        for chunk in trainer.chunks if on_chunk is not None else ():
            on_chunk(chunk)
        saving = _Saving(lock, checkpoint_seconds, trainer, study)
        for chunk in trainer.read(input_ids):
            with saving:
                if on_chunk is not None:
                    on_chunk(chunk)
        if study is not None:
            with saving:
                saving.due = True  # the first exchanges take long
        for step in study.run() if study is not None else ():
            with saving:
                saving.due |= step.phase == "write"
                if on_study is not None:
                    on_study(step)
        reading = _make_reading(trainer, settings, input_ids, peak)
        if study is not None:
            reading = dataclasses.replace(reading, studied=study.figures)
        if out is not None:
            reading = dataclasses.replace(reading, memory_dir=str(out))
            _save_memory(model, out, reading, None if study is None else study.exchanges)
        if lock is not None and out is not None:
            checkpoint.remove(lock.directory)
    return reading


class _Saving:
    """A context for what a caller does between two steps: it saves a checkpoint where one is due, or on an error."""

    def __init__(
        self, lock: checkpoint.Lock | None, seconds: float, trainer: TestTimeTrainer, study: SelfStudy | None
    ):
        self._lock, self._seconds, self._trainer, self._study = lock, seconds, trainer, study
        self._saved, self._failed = time.monotonic(), False
        self.due = False

    def __enter__(self) -> None:
        self.due = time.monotonic() - self._saved >= self._seconds

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._lock is None or not (self.due or kind is not None):
            return
        state = self._trainer.state_dict() | ({} if self._study is None else self._study.state_dict())
        try:
            checkpoint.save(self._lock.directory, state)
        except OSError as failure:
            if not self._failed:
                _logger.warning("no checkpoint can be saved (%s); the reading goes on", failure.strerror or failure)
            self._failed = True
        self._saved = time.monotonic()


@contextmanager
def _locked(directory: Path) -> Iterator[checkpoint.Lock]:
    """Lock a checkpoint's folder; afterwards remove it where it is empty, and the parents that were made for it."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        with closing(checkpoint.Lock(directory)) as lock:
            yield lock
    finally:
        for folder in dict.fromkeys((directory, *made)):
            with suppress(OSError):
                folder.rmdir()


def _make_study(
    trainer: TestTimeTrainer,
    tokenizer: Any,
    input_ids: torch.LongTensor,
    settings: ReadingSettings,
    exchanges: Sequence[Exchange | Lesson] | None,
) -> SelfStudy | None:
    """Return the self-study that the settings ask for, or None."""
    if not settings.study:
        if exchanges is not None:
            raise ValueError(f"exchanges have no meaning without study, got {len(exchanges)}: set study, or leave out")
        return None
    if tokenizer is None:
        raise ValueError("tokenizer must be given for a self-study, got None: give the base's tokenizer")
    return SelfStudy(
        trainer.model,
        tokenizer,
        input_ids,
        per_passage=settings.exchanges,
        passes=settings.passes,
        learning_rate=STUDY_RATE * settings.learning_rate,
        window=settings.window,
        seed=settings.seed,
        anchor=trainer.anchor,
        given=exchanges,
    )


def make_trainer(model: nn.Module, settings: ReadingSettings) -> TestTimeTrainer:
    """Return the trainer of a reading, with the memory's writer and the anchor where the settings ask for them."""
    writer = anchor = None
    if settings.init == "write":
        fold = "nlsvd" if settings.update == "nlsvd" else "refit"
        writer = SlotWriter(model, fold=fold, epsilon=settings.epsilon, slots_per_chunk=settings.slots_per_chunk)
    if settings.anchor:
        texts = OwnText(model, tokens=max(min(settings.stride, ANCHOR_TOKENS), 2), seed=settings.seed)
        anchor = Anchor(texts, weight=settings.anchor, every=settings.anchor_every)
    return TestTimeTrainer(model, settings, writer=writer, anchor=anchor)


def _make_reading(
    trainer: TestTimeTrainer, settings: ReadingSettings, input_ids: torch.LongTensor, peak: PeakMemory
) -> Reading:
    """Return the figures of a reading."""
    readings = [[chunk for chunk in trainer.chunks if chunk.reading == n] for n in range(settings.readings)]
    nlls = [sum(chunk.nll_nats for chunk in chunks) for chunks in readings]
    tokens = sum(chunk.tokens for chunk in readings[0])
    marks = choose_marks(len(input_ids))
    final, final_base = trainer.final or (None, None)
    return Reading(
        settings=settings,
        text_sha256=digest_ids(input_ids),
        scored_tokens=tokens,
        nll_nats=nlls[0],
        perplexity=perplexity(nlls[0], tokens),
        perplexity_at=at_marks(readings[0], marks),
        perplexity_between=per_segment(readings[0], marks),
        perplexities=[perplexity(nll, tokens) for nll in nlls],
        curve=cumulative(readings[0]),
        extra_parameters=sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad),
        seconds=trainer.seconds,
        peak_bytes=peak.read(),
        skipped_chunks=trainer.skipped_chunks,
        taken_back=trainer.taken_back,
        final_nats=final,
        final_base_nats=final_base,
    )


def score(model: nn.Module, input_ids: torch.LongTensor, settings: ReadingSettings) -> float:
    """Return the perplexity of a text under a frozen model, with or without an adapter, which is not changed.

    Args:
        input_ids: LongTensor [T], T >= 2.
        settings: complete; window, stride and context are used.

    Raises:
        ValueError: a parameter requires gradients.
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


# ---------------------------------------------------------------------- adapters


@contextmanager
def attached(base: PreTrainedModel, settings: ReadingSettings) -> Iterator[nn.Module]:
    """Attach a method's fresh adapter to a base within the context, after setting torch's seed.

    `base`, a causal LM without adapters, is mutated. Afterwards its modules, weights, `requires_grad` flags and mode
    are as before.

    Raises:
        ValueError: the method does not fit the base.
    """
    flags = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    training = base.training
    torch.manual_seed(settings.seed)
    make_config = ADAPTERS[settings.method]
    config = None if make_config is None else make_config(base, settings)
    model = base.requires_grad_(False) if config is None else get_peft_model(base, config)
    try:
        yield model
    finally:
        if model is not base:
            _detach(model)
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(flags[name])
            parameter.grad = None
        base.train(training)


@contextmanager
def memory_attached(base: PreTrainedModel, directory: str | Path) -> Iterator[PeftModel]:
    """Attach a saved memory to its base within the context, frozen and in evaluation mode.

    `base`, a causal LM without adapters, is mutated, and restored at the end.
    """
    model = load_memory(base, directory).requires_grad_(False).eval()
    try:
        yield model
    finally:
        _detach(model)


def _detach(model: PeftModel) -> None:
    base = model.unload()
    base.__dict__.pop("peft_config", None)


def _lora_config(base: PreTrainedModel, settings: ReadingSettings) -> LoraConfig:
    """TempLoRA: LoRA on every projection of attention and FFN, alpha = r."""
    layers = find_layers(base, settings.layers_to_transform)
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.r,
        lora_dropout=0.0,
        # PEFT takes layers together with a list of names only.
        target_modules="all-linear" if layers is None else _name_projections(base),
        layers_to_transform=layers,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
        task_type="CAUSAL_LM",
    )


def _name_projections(base: PreTrainedModel) -> list[str]:
    """Return the last part of the name of each linear layer but the output's, as PEFT's "all-linear" finds them."""
    head = base.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    names = {name for name, module in base.named_modules() if isinstance(module, kinds) and module is not head}
    return sorted({name.rpartition(".")[2] for name in names})


def _memory_config(base: PreTrainedModel, settings: ReadingSettings) -> LocasConfig:
    gated = settings.method == "locas-glu"
    if {ffn.gated for ffn in find_ffns(base).values()} == {not gated}:
        found, other = ("two-layer", "locas-mlp") if gated else ("gated", "locas-glu")
        raise ValueError(
            f"method {settings.method!r} needs {'gated' if gated else 'two-layer'} FFNs, got {type(base).__name__} "
            f"with {found} ones: use {other!r}"
        )
    norms = {} if settings.row_norm is None else {"row_norm": settings.row_norm}
    if settings.max_slot_norm is not None:
        norms["max_slot_norm"] = settings.max_slot_norm or None
    return LocasConfig(
        r=settings.r,
        init_strategy=settings.init,
        output_scale=settings.output_scale,
        scaling=settings.scaling,
        layers_to_transform=find_layers(base, settings.layers_to_transform),
        **norms,
        seed=settings.seed,
        task_type="CAUSAL_LM",
    )


ADAPTERS: dict[str, Callable[[PreTrainedModel, ReadingSettings], PeftConfig] | None] = {
    "none": None,
    "lora": _lora_config,
    "locas-glu": _memory_config,
    "locas-mlp": _memory_config,
}
"""For each method the configuration of its adapter; None where the model only reads."""


def find_layers(base: PreTrainedModel, layers: list[int] | str | None) -> list[int] | None:
    """Return the layer indices that `ReadingSettings.layers_to_transform` means for a model; None for all layers.

    The upper half of an odd number of layers is the larger half.

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


# ---------------------------------------------------------------------- a memory's folder


def check_vacant(directory: str | Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise a `ValueError` for a folder in which a reading would replace something. It need not exist.

    Args:
        resume: an unfinished reading in it will go on.
        overwrite: a memory in it may be replaced. Other files that only have the same names may not.
    """
    folder = Path(directory)
    finish_replacement(folder)
    is_memory = (folder / MEMORY_CONFIG).exists() and (folder / READING).exists()
    unfinished = has_checkpoint(folder / CHECKPOINT_FOLDER)
    if not is_memory:
        for name in (MEMORY_CONFIG, READING, _CARD, EXCHANGES, "adapter_model.safetensors"):
            if os.path.lexists(folder / name):
                raise ValueError(
                    f"--out {str(folder)!r} holds a file {name} that no reading wrote: choose another folder, or move "
                    "that file"
                )
    if unfinished and not resume and not overwrite:
        raise ValueError(
            f"--out {str(folder)!r} holds an unfinished reading: go on with --resume, or give --overwrite"
        )
    if is_memory and not unfinished and not overwrite:
        raise ValueError(f"--out {str(folder)!r} holds a memory: choose another folder, or give --overwrite")


def find_finished(
    directory: str | Path,
    settings: ReadingSettings,
    input_ids: torch.LongTensor,
    exchanges: Sequence[Exchange] | None = None,
) -> Reading | None:
    """Return the finished reading of a folder; None where there is no memory, or an unfinished reading.

    The lock of a reading that was killed right after it had finished is removed.

    Args:
        directory: it need not exist.
        settings: of the reading that would be done, complete.
        input_ids: LongTensor [T], the text.
        exchanges: those that would be studied; None where the model writes them.

    Raises:
        ValueError: the folder holds the memory of another reading.
    """
    folder = Path(directory)
    finish_replacement(folder)
    if has_checkpoint(folder / CHECKPOINT_FOLDER) or not (folder / MEMORY_CONFIG).exists():
        return None
    if (folder / CHECKPOINT_FOLDER).is_dir():
        with suppress(checkpoint.InUse, OSError), _locked(folder / CHECKPOINT_FOLDER):
            pass  # afterwards the lock is gone, and the folder where it is empty
    remedy = "choose another folder, or give --overwrite"
    if not (folder / READING).exists():
        raise ValueError(f"--out {str(folder)!r} holds a memory that no reading here made: {remedy}")
    reading = Reading.from_json(load_json(folder / READING))
    here, there = dataclasses.asdict(settings), dataclasses.asdict(reading.settings)
    name = differing_field(here, there)
    if name is not None:
        raise ValueError(
            f"{name} must be {there[name]!r} as in the memory in {str(folder)!r}, got {here[name]!r}: {remedy}"
        )
    if reading.text_sha256 != digest_ids(input_ids[: settings.max_tokens]):
        raise ValueError(f"--out {str(folder)!r} holds the memory of another text: {remedy}")
    if exchanges is not None and (reading.studied or {}).get("exchanges_sha256") != digest_exchanges(exchanges):
        raise ValueError(f"--out {str(folder)!r} holds the memory of other exchanges: {remedy}")
    return reading


def _save_memory(
    model: PeftModel, directory: str | Path, reading: Reading, exchanges: Sequence[Exchange] | None = None
) -> None:
    """Write PEFT's files, a model card, the reading and the exchanges into a folder, whole or not at all."""
    config = model.peft_config[model.active_adapter]
    name = config.base_model_name_or_path
    try:
        # The name on other machines too.
        config.base_model_name_or_path = reading.settings.model
        with staged(directory) as folder:
            # Embeddings are not trained here, and PEFT would ask the hub about them.
            model.save_pretrained(str(folder), save_embedding_layers=False)
            (folder / _CARD).write_text(_make_card(config, reading), encoding="utf-8")
            write_json(folder / READING, reading.to_json())
            if exchanges is not None:
                save_exchanges(folder / EXCHANGES, exchanges)
        if exchanges is None:
            (Path(directory) / EXCHANGES).unlink(missing_ok=True)  # of the memory that this one replaces
    finally:
        config.base_model_name_or_path = name


def _make_card(config: PeftConfig, reading: Reading) -> str:
    settings = reading.settings
    if backbone.is_embedded(settings.model):
        name = backbone.name_of(settings.model)
        argument = "" if name == backbone.NAME else f'name="{name}"'
        load = f"from locas_peft import backbone\n\nbase, tokenizer = backbone.load({argument})"
    elif is_gguf(settings.model):
        load = f"from locas_peft.loading import load_base\n\nbase, tokenizer = load_base({settings.model!r})"
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
for {settings.model}, trained while reading {reading.curve[-1][0]:,} tokens. Perplexity of the text, each token scored
before it was learned: {reading.perplexity:.2f}. All settings and figures are in `{READING}`.

```python
from peft import PeftModel
{load}
model = PeftModel.from_pretrained(base, "this folder")
```
"""
