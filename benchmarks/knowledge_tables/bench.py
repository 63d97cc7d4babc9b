"""What the tables share: the host, the data, the options, and the cost of unread text."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from paper_tables.bench import UNREAD_BOOK, Bench
from torch import Tensor, nn

from locas_peft.evaluation import Unit
from locas_peft.stages import ReadSettings, complete, score

from .scales import Scale

__all__ = ["KnowledgeBench", "Options"]


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Args:
        choose: whether the passages are those that settings are chosen on.
        draw: the seed of the draws.
        rows: keys of the rows to be made; None for all.
        study, lora: settings of the studies of a memory and of LoRA that are not the defaults.
        pages: the folders of the pages; none for the demo's and the data's.
        forget: remove the weights of memories after all rows of their text were made.
    """

    choose: bool = False
    draw: int = 0
    rows: tuple[str, ...] | None = None
    study: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    pages: tuple[Path, ...] = ()
    forget: bool = False

    def describe(self, names: tuple[str, ...] = ("study", "lora")) -> str:
        """Return the settings that are not the defaults, as a part of a file's name."""
        parts = []
        for name in names:
            for key, value in sorted(getattr(self, name).items()):
                parts.append(f"_{name}.{key}={value}")
        return "".join(parts)


class KnowledgeBench(Bench):
    """A host, its data, and the folder of one run's results (see `Bench`)."""

    def __init__(
        self,
        model: str,
        data: Path,
        out: Path,
        scale: Scale,
        options: Options,
        device: str = "auto",
        dtype: str = "auto",
    ):
        if options.choose:
            scale = replace(scale, name=f"{scale.name}-choose")
        super().__init__(model, data, out, scale, device, dtype)
        self.options = options
        # The perplexity of the unread text under the base, by the context of its windows.
        self.score_base = cache(partial(self.score_unread, self.base))
        # By document and name: the rows that need a memory share its unit.
        self.memories: dict[tuple[str, str], Unit] = {}

    @property
    def page(self) -> Path:
        """The Markdown file of the tables; each set of settings has its own."""
        return self.folder.with_name(f"{self.scale.name}{self.options.describe()}.md")

    @property
    def locas(self) -> str:
        """The method of a memory that fits the host."""
        return "locas-glu" if self.is_gated else "locas-mlp"

    @cached_property
    def unread(self) -> Tensor | None:
        """The beginning of a book that no memory reads, LongTensor [T]; None without the book."""
        try:
            return self.document(UNREAD_BOOK, self.scale.unread_tokens)
        except FileNotFoundError:
            return None

    def score_unread(self, model: nn.Module, context: str | None = None) -> float | None:
        """Return the perplexity of the unread text under a frozen model; None without the text."""
        if self.unread is None:
            return None
        return self.score(model, self.unread, context)

    def score(self, model: nn.Module, ids: Tensor, context: str | None = None) -> float:
        """Return the perplexity of a text, LongTensor [T], under a frozen model."""
        settings = ReadSettings(method="none", context=context, **self.common)
        return score(model, ids, complete(settings, self.base))
