"""The demo's first part: a model reads the same pages with each method."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..evaluation.drift import measure_drift, write_own_answers
from ..memories.loading import memory_attached
from ..model import count_positions
from ..progress import Progress, follow_steps
from ..stages import Place, ReadRecord, ReadSettings, choose_memory, complete_all, read
from ..text import tokenize
from .pages import join_pages

__all__ = ["PagesRead", "list_methods", "read_pages"]

WINDOW = 512


@dataclass(frozen=True)
class PagesRead:
    """A method's reading of the pages.

    Attributes:
        record: of the reading.
        change_nats: KL from the base on its own answers to other questions, in nats a token; NaN
            where it answered none.
    """

    record: ReadRecord
    change_nats: float

    def to_json(self) -> dict[str, Any]:
        """Return the row of `demo.json`."""
        return {**self.record.to_json(), "own_answers_kl": self.change_nats}


def list_methods(base: PreTrainedModel, settings: ReadSettings) -> dict[str, ReadSettings]:
    """Return the complete settings of the demo's methods, by name: none, a memory, and LoRA.

    Args:
        base: a causal LM without adapters.
        settings: what the user chose; the window and the context are the demo's.
    """
    window = min(WINDOW, count_positions(base) or WINDOW)
    settings = replace(settings, window=window, context="cache")
    return complete_all(settings, ("none", choose_memory(base), "lora"), base)


def read_pages(
    base: PreTrainedModel,
    tokenizer: Any,
    methods: Mapping[str, ReadSettings],
    out: Path,
    progress: Progress,
) -> Iterator[PagesRead]:
    """Read the pages with each method, from a fresh adapter each.

    A method's memory is saved in its folder in `out`, where it replaces one. `base` is restored at
    the end.

    Args:
        base, tokenizer: a causal LM without adapters, and its tokenizer.
        methods: complete settings by method; "none" reads without a memory.
    """
    base.eval()
    own_answers = write_own_answers(base, tokenizer)
    text = join_pages()
    for method, settings in methods.items():
        folder = out / method
        ids = tokenize(tokenizer, text, settings.max_tokens)
        place = Place(out=folder, overwrite=True, title="short pages")
        show = follow_steps(progress, method, len(ids))
        record = read(base, ids, settings, place, tokenizer=tokenizer, on_step=show)
        change = 0.0
        if method != "none":
            with memory_attached(base, folder) as model:
                change = measure_drift(model, own_answers)["kl_per_token"]
        yield PagesRead(record, change)
