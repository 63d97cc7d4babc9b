"""Many documents at once: each row of a batch has a LOCAS memory of its own, which its own document trains.

The rows are selected by PEFT's `adapter_names`; the loop is the one of `TestTimeTrainer`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from ..model.causal_lm import CausalLM
from ..tuner import STRATEGIES, LocasConfig, LocasLayer, list_layers
from ..tuner.modules import ADAPTER_LAYERS
from .anchor import Anchor
from .chunks import Chunk, cut
from .learner import Learner
from .loop import Batch, Loop, Row, calibrate_empty
from .settings import TrainingSettings


def read_many(
    model: PeftModel,
    documents: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    settings: TrainingSettings | None = None,
    *,
    anchor: Anchor | None = None,
    **fields: Any,
) -> ManyReading:
    """Read many documents at once, each into a fresh memory of its own, which is named after the document.

    Each is what a `TestTimeTrainer` of the same settings would make of that document alone, up to rounding. The
    memories are configured as the model's active one, which itself is neither used nor changed. They are inactive
    adapters of the model from the first record on; the caller may stop, and save, at any record.

    Args:
        model: a PEFT model whose adapters are all LOCAS memories, with one active. Mutated: the memories are added.
        documents: from names, which no adapter has, to LongTensors [T] or [1, T], T >= 2; all are in one batch.
        settings, anchor, fields: as for `TestTimeTrainer`.

    The iterator yields, for each chunk, the records of the documents that have it, by name. A `TypeError` or
    `ValueError` at the call leaves the model as it was.
    """
    host = CausalLM(model)
    settings = TrainingSettings(**fields) if settings is None else replace(settings, **fields)
    if settings.learning_rate is None:
        raise ValueError("learning_rate must be a number above 0, got None: give one, 1e-3 say")
    if anchor is not None:
        anchor.check(host)
    loop = Loop(host, settings, anchor=anchor)
    _check_model(model)
    return ManyReading(model, loop, _check_documents(host, documents))


class ManyReading:
    """The iterator of `read_many`."""

    def __init__(self, model: PeftModel, loop: Loop, documents: dict[str, Tensor]):
        self._model, self._loop = model, loop
        self._config = (
            model.active_peft_config.copy_for_new_memory()
        )  # the active one's, before its calibration
        loop.find_start_token(documents.values())
        self._rows = {name: self._make_row(name, ids) for name, ids in documents.items()}
        self._records = self._read()

    def __iter__(self) -> Iterator[dict[str, Chunk]]:
        return self

    def __next__(self) -> dict[str, Chunk]:
        return next(self._records)

    def close(self) -> None:
        """End the reading; the memories stay as they are."""
        self._records.close()

    @property
    def chunks(self) -> dict[str, list[Chunk]]:
        """The records so far of each document."""
        return {name: row.chunks for name, row in self._rows.items()}

    @property
    def skipped_chunks(self) -> dict[str, int]:
        """How many chunks of each document were not learned because a loss or a gradient was not finite."""
        return {name: row.skipped_chunks for name, row in self._rows.items()}

    @property
    def taken_back(self) -> dict[str, list[int]]:
        """For each document the numbers of tokens read at which the brake took its memory back."""
        return {name: row.taken_back for name, row in self._rows.items()}

    def perplexity(self, name: str) -> float:
        """Of a document's current reading; nan before its first scored token."""
        return self._rows[name].perplexity

    def _make_row(self, name: str, ids: Tensor) -> Row:
        settings = self._loop.settings
        rates = settings.learning_rate, settings.warmup_steps, settings.decay_steps
        return Row(
            ids.to(self._loop.host.device), Learner(lambda: self._list_weights(name), *rates), name
        )

    def _list_weights(self, name: str) -> list[nn.Parameter]:
        return [
            part.weight
            for layer in list_layers(self._model, name)
            for part in layer.projections(name)
        ]

    def _read(self) -> Generator[dict[str, Chunk], None, None]:
        self._add_memories()
        try:
            for reading in range(self._loop.settings.readings):
                batches = [self._loop.make_batch(list(self._rows.values()))]
                for start in range(
                    0, max(len(row.ids) for row in self._rows.values()), self._loop.settings.stride
                ):
                    read = [row for batch in batches for row in batch.rows]
                    batches = [
                        after for batch in batches for after in self._step(batch, start, reading)
                    ]
                    yield {name: row.chunks[-1] for name, row in self._rows.items() if row in read}
                for row in self._rows.values():
                    self._loop.end_reading(row, reading)
        finally:
            for name, row in self._rows.items():
                row.learner.release()
                for weight in self._list_weights(name):
                    weight.requires_grad_(False)  # as PEFT leaves adapters that are not active
                    weight.grad = None

    def _step(self, batch: Batch, start: int, reading: int) -> Iterator[Batch]:
        """Score and learn the chunk of each row, rows with chunks of one length together."""
        by_stop: dict[int, list[int]] = {}
        settings = self._loop.settings
        for index, row in enumerate(batch.rows):
            by_stop.setdefault(min(start + settings.stride, len(row.ids)), []).append(index)
        for stop, indices in by_stop.items():
            bounds = next(cut(stop, settings.window, settings.stride, start))
            for after in self._loop.step(batch.select(indices), bounds, reading):
                going_on = [index for index, row in enumerate(after.rows) if len(row.ids) > stop]
                if going_on:
                    yield after.select(going_on)

    def _add_memories(self) -> None:
        """Add a memory for each document and calibrate it on the document's first chunk."""
        trained = {parameter: parameter.requires_grad for parameter in self._model.parameters()}
        active = self._model.active_adapters[0]
        dtypes = {layer: layer.locas_up[active].weight.dtype for layer in list_layers(self._model)}
        try:
            for name, row in self._rows.items():
                with warnings.catch_warnings():
                    # PEFT advises against names that are part of its prefix, such as "a"; nothing here parses them.
                    warnings.filterwarnings(
                        "ignore", message=".*should not be contained in the prefix"
                    )
                    self._model.add_adapter(name, copy.deepcopy(self._config))
                for layer, dtype in dtypes.items():
                    for part in layer.projections(name):
                        part.to(dtype)
                calibrate_empty(self._model, self._loop.first_chunk(row), name)
        except BaseException:
            for name in self._rows.keys() & self._model.peft_config.keys():
                self._model.delete_adapter(name)
            raise
        finally:
            for parameter, requires_grad in trained.items():
                parameter.requires_grad_(requires_grad)
        for name in self._rows:
            for weight in self._list_weights(name):
                weight.requires_grad_(True)


def _check_model(model: nn.Module) -> None:
    """Raise a `ValueError` unless the model's adapters are all LOCAS memories that can be trained."""
    config = model.active_peft_config if isinstance(model, PeftModel) else None
    if not isinstance(config, LocasConfig):
        got = type(model).__name__ if config is None else f"one with {config.peft_type.value}"
        rule = f"model must be a PEFT model with an active LOCAS memory, got {got}"
        remedy = "use get_peft_model(model, LocasConfig()), or read one after the other with TestTimeTrainer"
        raise ValueError(f"{rule}: {remedy}")
    if len(model.active_adapters) > 1:
        remedy = "call set_adapter with the one that the memories shall be configured as"
        raise ValueError(
            f"model must have one active adapter, got {', '.join(model.active_adapters)}: {remedy}"
        )
    for layer in (module for module in model.modules() if isinstance(module, ADAPTER_LAYERS)):
        if not isinstance(layer, LocasLayer):
            kind = f"{type(layer).__module__}.{type(layer).__name__}"
            what = f"model must have LOCAS memories alone, got a layer of {kind}"
            raise ValueError(
                f"{what}: unload that adapter, or read one after the other with TestTimeTrainer"
            )
        if layer.merged:
            raise ValueError(
                "model must not have a memory merged into the base: call unmerge_adapter() first"
            )
        if layer.disable_adapters:
            raise ValueError(
                "model must not have its adapters disabled, got disabled ones: enable them first"
            )
    if STRATEGIES[config.strategy].written:
        got = f"{config.strategy!r}, whose slots are written one document at a time"
        remedy = "choose 'topk', or read one after the other with TestTimeTrainer"
        raise ValueError(f"init_weights must be one that makes rows, got {got}: {remedy}")


def _check_documents(
    host: CausalLM, documents: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the documents as LongTensors [T], by name."""
    checked: dict[str, Tensor] = {}
    for name, ids in documents.items() if isinstance(documents, Mapping) else documents:
        if not isinstance(name, str):
            raise TypeError(
                f"documents' names must be strings, got {type(name).__name__}: give each a name"
            )
        # PEFT keeps adapters as attributes of modules.
        if not name or "." in name or name.startswith("__") or hasattr(nn.ModuleDict(), name):
            what = f"documents' names must be names that an adapter can have, got {name!r}"
            raise ValueError(
                f"{what}: give one without dots that is not an attribute of a PyTorch module"
            )
        if name in checked:
            raise ValueError(f"documents' names must differ, got {name!r} twice: give each its own")
        if name in host.model.peft_config:
            rule = f"documents' names must be new to the model, got {name!r}, which is an adapter already"
            raise ValueError(f"{rule}: choose another name, or delete_adapter that one first")
        checked[name] = host.check_document(ids, f"documents[{name!r}]")
    if not checked:
        raise ValueError(
            "documents must hold at least one, got none: give a mapping from names to LongTensors"
        )
    return checked
