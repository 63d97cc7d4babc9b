"""How the memories are made: readings and studies, one after another, and what each one costs."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paper_tables.baselines import list_logits, measure_kl
from paper_tables.bench import LONG_BOOKS
from torch import Tensor, nn

from locas_peft.evaluation import Unit
from locas_peft.exchanges import EXCHANGES, load_exchanges
from locas_peft.files import load_json, write_json
from locas_peft.memories import memory_attached
from locas_peft.stages import Place, ReadSettings, StudySettings, complete, read, study
from locas_peft.text import digest_ids, tokenize
from locas_settings.adapter import SHAPE

from .bench import KnowledgeBench
from .documents import Document

__all__ = [
    "LORA",
    "LORA_FREE",
    "ARTICLE",
    "READING",
    "STUDY",
    "STUDY_AFTER_ARTICLE",
    "Recipe",
    "SideEffects",
    "article_unit",
    "forget",
    "memory_unit",
    "opened",
]

LESSONS = ".lessons"
"""The suffix of the copy of a study's exchanges, which stays when the memory is removed."""
NOTHING = "nothing was studied"
"""How the error of a study begins that found nothing to teach."""
LORA_WIDTH = 16
CLOCK_SECONDS = 10.0


@dataclass(frozen=True)
class Recipe:
    """How a memory is made of a text.

    Args:
        name: in files.
        kind: "read" or "study".
        adapter: "study" for a memory, "lora" for LoRA: the name of its settings in `Options`.
        start: makes the memory that is gone on with; None for a fresh adapter.
        lessons: the study that wrote what is taught; None for its own.
        anchored: whether a study has an anchor, its default.
        times: how often the text is read.
        reads: what is learned: the "text", its "article" or another "book".
    """

    name: str
    kind: str
    adapter: str = "study"
    start: "Recipe | None" = None
    lessons: "Recipe | None" = None
    anchored: bool = True
    times: int = 1
    reads: str = "text"

    def list_adapters(self) -> tuple[str, ...]:
        """Return whose settings matter, for this recipe and those before it."""
        names = [self.adapter]
        for other in (self.start, self.lessons):
            if other is not None:
                names += other.list_adapters()
        return tuple(sorted(set(names), reverse=True))


READING = Recipe("reading", "read")
STUDY = Recipe("study", "study")
ARTICLE = Recipe("article", "read", reads="article")
STUDY_AFTER_ARTICLE = Recipe("study-after-article", "study", start=ARTICLE)
LORA = Recipe("lora-anchor", "study", "lora", lessons=STUDY)
LORA_FREE = Recipe("lora", "study", "lora", lessons=STUDY, anchored=False)


class _Clock:
    """Processor seconds of a unit, with those of interrupted runs, which a file keeps."""

    def __init__(self, file: Path):
        self._file = file
        self._before = load_json(file) if file.exists() else 0.0
        self._began = time.process_time()
        self._written = self._began

    def read(self) -> float:
        return self._before + time.process_time() - self._began

    def note(self, step: Any) -> None:
        """Keep the time so far, every few seconds."""
        if time.process_time() - self._written >= CLOCK_SECONDS:
            self._written = time.process_time()
            write_json(self._file, self.read())


def memory_unit(bench: KnowledgeBench, document: Document, recipe: Recipe, seed: int) -> Unit:
    """Return the unit of a memory: its cost, its KL on the base's answers, and unread text.

    Its folder has the memory, until `forget` removes it. A study that finds nothing to teach has
    `failed` among its figures, and no memory.
    """
    slug = f"{recipe.name}{bench.options.describe(recipe.list_adapters())}-seed{seed}"
    key = (document.name, slug)
    if key not in bench.memories:
        bench.memories[key] = _make_unit(bench, document, recipe, seed, slug)
    return bench.memories[key]


def _make_unit(
    bench: KnowledgeBench, document: Document, recipe: Recipe, seed: int, slug: str
) -> Unit:
    needs = None
    for other in (recipe.start, recipe.lessons):
        if other is not None:
            needs = memory_unit(bench, document, other, seed)
    settings = _complete(bench, recipe, seed)
    ids = _find_text(bench, document, recipe)
    about = {
        "row": slug,
        "document": document.name,
        "text_sha256": digest_ids(ids),
        "times": recipe.times,
        "settings": _list_settings(settings),
    }

    def measure(unit: Unit) -> dict[str, Any]:
        clock = _Clock(unit.unfinished)
        try:
            record = _learn(bench, unit, document, ids, recipe, settings, clock)
        except ValueError as error:
            if not str(error).startswith(NOTHING):
                raise
            return {"failed": str(error), "processor_seconds": clock.read()}
        seconds = clock.read()
        if recipe.start is not None:
            seconds += needs.load()["figures"]["processor_seconds"]
        figures = {"processor_seconds": seconds, "parameters": record.extra_parameters}
        figures["record"] = _list_numbers(record)
        effects = SideEffects(bench)
        with memory_attached(bench.base, unit.memory) as model:
            return {**figures, **effects.measure(model)}

    path = f"memories/{document.name}/{slug}.json"
    return bench.unit(path, about, measure, needs, size=len(ids) * recipe.times)


def _complete(bench: KnowledgeBench, recipe: Recipe, seed: int) -> Any:
    """Return the complete settings of a recipe's stage."""
    given: dict[str, Any] = {"method": bench.locas, **bench.options.study}
    if recipe.adapter == "lora":
        given = {"method": "lora", "r": LORA_WIDTH, **bench.options.lora}
    if not recipe.anchored:
        given["anchor"] = 0.0
    if recipe.kind == "study":
        return complete(StudySettings(seed=seed, **given), bench.base)
    # A study that goes on with the memory has its shape.
    shape = {name: value for name, value in given.items() if name in SHAPE}
    return complete(ReadSettings(seed=seed, **shape, **bench.common), bench.base)


def _list_settings(settings: Any) -> dict[str, Any]:
    """Return the settings that a result names: all but the place of the base."""
    listed = {name: value for name, value in vars(settings).items() if name != "model"}
    # No anchor, given as 0 or not at all.
    return {**listed, "anchor": settings.anchor or None}


def _find_text(bench: KnowledgeBench, document: Document, recipe: Recipe) -> Tensor:
    if recipe.reads == "book":
        return bench.document(LONG_BOOKS[0], bench.scale.retention_tokens)
    if recipe.reads == "article":
        return _tokenize_article(bench, document)
    return tokenize(bench.tokenizer, document.text)


def _tokenize_article(bench: KnowledgeBench, document: Document) -> Tensor:
    return tokenize(bench.tokenizer, document.article)[: bench.scale.article_tokens]


def article_unit(bench: KnowledgeBench, document: Document, recipe: Recipe, seed: int) -> Unit:
    """Return the unit of a memory's effect on the other passages of its text's article."""
    memory = memory_unit(bench, document, recipe, seed)
    ids = _tokenize_article(bench, document)
    about = {
        "row": memory.memory.name,
        "document": document.name,
        "text_sha256": digest_ids(ids),
    }

    def measure(unit: Unit) -> dict[str, Any]:
        if _has_failed(memory):
            return {"failed": memory.load()["figures"]["failed"]}
        figures = {"base_perplexity": bench.score(bench.base, ids)}
        with opened(bench, memory) as model:
            return {**figures, "perplexity": bench.score(model, ids)}

    path = f"memories/{document.name}/{memory.memory.name}.article.json"
    return bench.unit(path, about, measure, memory, size=len(ids))


def _learn(
    bench: KnowledgeBench,
    unit: Unit,
    document: Document,
    ids: Tensor,
    recipe: Recipe,
    settings: Any,
    clock: _Clock,
) -> Any:
    """Make the memory in the unit's folder; return the record of its last stage."""
    start = None
    if recipe.start is not None:
        start = _find_memory(unit.needs)
    place = Place(
        out=unit.memory,
        checkpoint_dir=unit.checkpoint,
        resume=True,
        overwrite=True,
        title=document.title or document.name,
    )
    if recipe.kind == "study":
        lessons = None
        if recipe.lessons is not None:
            lessons = load_exchanges(_find_lessons(unit.needs))
        record = study(
            bench.base,
            bench.tokenizer,
            ids,
            settings,
            place,
            start=start,
            exchanges=lessons,
            on_step=clock.note,
        )
        if (unit.memory / EXCHANGES).exists():
            shutil.copyfile(unit.memory / EXCHANGES, unit.path.with_suffix(LESSONS))
        return record
    # Readings after the first go on in place; they are short, and begin again after a kill.
    # The text is kept, as by `locas read`.
    kept_text = bench.tokenizer.decode(ids, skip_special_tokens=True)
    place = replace(place, checkpoint_dir=None, resume=False, kept_text=kept_text)
    for _ in range(recipe.times):
        record = read(bench.base, ids, settings, place, tokenizer=bench.tokenizer, start=start)
        start = unit.memory
    return record


def _find_memory(unit: Unit) -> Path:
    """Return a memory's folder; one that was not kept is made again."""
    if not _has_failed(unit) and not list(unit.memory.glob("*.safetensors")):
        unit.make()
    return unit.memory


def _find_lessons(unit: Unit) -> Path:
    """Return the file of what a study wrote; where it was not kept, it is studied again."""
    if _has_failed(unit):
        raise ValueError(f"{NOTHING}: the study before this one wrote nothing")
    file = unit.path.with_suffix(LESSONS)
    if not file.exists():
        unit.make()
    return file


def _has_failed(unit: Unit) -> bool:
    return "failed" in unit.load()["figures"]


def _list_numbers(record: Any) -> dict[str, float]:
    """Return the plain figures of a record, without its settings."""
    settings = vars(record.settings)
    numbers = {}
    for name, value in record.to_json().items():
        if isinstance(value, (int, float)) and name not in settings:
            numbers[name] = value
    return numbers


class SideEffects:
    """What the base says of other things, and how a memory changes it.

    It is made before a memory is attached: a memory is attached in the base's own layers.

    Args:
        context: of the unread text's windows (see `ReadSettings`).
    """

    def __init__(self, bench: KnowledgeBench, context: str | None = None):
        self._bench = bench
        self._context = context
        self._base_logits = list_logits(bench.base, bench.own_answers)
        self._base_perplexity = bench.score_base(context)

    def measure(self, model: nn.Module) -> dict[str, Any]:
        """Return the KL on the base's own answers and the unread text's perplexities."""
        return {
            "own_answers_kl": measure_kl(model, self._bench.own_answers, self._base_logits),
            "unread_perplexity": self._bench.score_unread(model, self._context),
            "unread_base_perplexity": self._base_perplexity,
        }


@contextmanager
def opened(bench: KnowledgeBench, unit: Unit | None) -> Iterator[nn.Module]:
    """Attach the memory of a unit within the context; without one, yield the base."""
    if unit is None or _has_failed(unit):
        yield bench.base
        return
    with memory_attached(bench.base, _find_memory(unit)) as model:
        yield model


def forget(unit: Unit) -> None:
    """Remove a unit's memory; the lessons of its study stay."""
    shutil.rmtree(unit.memory, ignore_errors=True)
