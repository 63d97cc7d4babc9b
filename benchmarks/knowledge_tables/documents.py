"""The texts that are learned, and what is asked about each: SQuAD, fictional passages, stories, pages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paper_tables.choices import Item, draw, load_lines

from locas_peft import demo
from locas_peft.asking import Question, load_questions
from locas_peft.text import load_text

from .bench import KnowledgeBench

__all__ = [
    "CHOOSING",
    "KINDS",
    "Asked",
    "Document",
    "Probe",
    "join_documents",
    "load_fictional",
    "load_pages",
    "load_squad",
    "load_stories",
    "parse_choices",
    "parse_passage",
]

CHOOSING = {"squad": 200, "fictional": 20}
"""How many of the first passages are for choosing settings; all others report."""
KINDS = {"mem": "the text's wording", "gen": "paraphrase", "hard_gen": "composition"}
"""The kinds of the fictional passages' probes, by their names in the file."""


@dataclass(frozen=True)
class Asked:
    """A question with its gold answer, the passage that has it, and the title of its article."""

    question: str
    answer: str
    passage: str
    title: str


@dataclass(frozen=True)
class Probe:
    """The beginning of a sentence, and the words that continue it."""

    kind: str
    input: str
    target: str


@dataclass(frozen=True)
class Document:
    """A text that is learned.

    Args:
        name: of its files.
        text: all of it, with its title.
        questions: what is asked about it, in the table's own type.
        title: of the text.
        article: the other passages of the article that the text is a passage of, with its title.
    """

    name: str
    text: str
    questions: tuple[Any, ...] = ()
    title: str = ""
    article: str = ""


def load_squad(bench: KnowledgeBench, count: int, questions: int) -> list[Document]:
    """Draw passages of SQuAD that have enough different questions, and questions of each."""
    candidates = []
    records = _load_part(bench, "squad")
    for number, record in records:
        document = parse_passage(number, record)
        if len(document.questions) >= questions:
            candidates.append((number, document))
    documents = []
    for number, document in draw(candidates, count, bench.options.draw):
        asked = draw(list(document.questions), questions, number)
        article = _join_article(document, [record for _, record in records])
        documents.append(replace(document, questions=tuple(asked), article=article))
    return documents


def _join_article(document: Document, records: Sequence[dict[str, Any]]) -> str:
    """Return the other passages of a passage's article below its title; "" for none."""
    texts = {}
    for record in records:
        if record["title"] == document.title and record["context"] not in document.text:
            texts[record["context"]] = None
    return "\n\n".join([document.title, *texts]) if texts else ""


def parse_passage(number: int, record: dict[str, Any]) -> Document:
    """Return a passage of SQuAD with its different questions, each an `Asked`."""
    title = record["title"]
    text = f"{title}\n{record['context']}"
    unique = {entry["question"]: entry["answer"] for entry in record["questions"]}
    asked = [Asked(question, answer, text, title) for question, answer in unique.items()]
    return Document(f"squad-{number:04d}", text, tuple(asked), title)


def join_documents(documents: Sequence[Document], name: str) -> Document:
    """Join documents, with blank lines between them; each question keeps its own passage."""
    text = "\n\n".join(document.text for document in documents)
    questions: list[Any] = []
    for document in documents:
        questions += document.questions
    return Document(name, text, tuple(questions))


def load_fictional(bench: KnowledgeBench) -> list[Document]:
    """Draw fictional passages with their probes."""
    documents = []
    drawn = draw(_load_part(bench, "fictional"), bench.scale.passages, bench.options.draw)
    for number, record in drawn:
        probes = []
        for kind in KINDS:
            pairs = zip(record[f"{kind}_input"], record[f"{kind}_target"], strict=True)
            probes += [Probe(kind, begin, target) for begin, target in pairs]
        name = f"fictional-{number:02d}"
        documents.append(Document(name, record["train_context"], tuple(probes)))
    return documents


def load_stories(bench: KnowledgeBench) -> list[Document]:
    """Load the first stories of QuALITY with their questions, each an `Item` of choices."""
    documents = []
    records = _load_lines(bench.data / "knowledge" / "quality.jsonl")
    for number, record in enumerate(records[: bench.scale.stories]):
        items = []
        for text, right in zip(record["instructions"], record["outputs"], strict=True):
            items.append(parse_choices(text, right))
        documents.append(Document(f"quality-{number}", record["input"], tuple(items)))
    return documents


def parse_choices(text: str, right: str) -> Item:
    """Split a question with its choices, "(A) ... (B) ..."; `right` begins with a choice's letter."""
    question, *rest = re.split(r"\s*\(([A-Z])\)\s*", text)
    letters = rest[::2]
    choices = tuple(choice.strip() for choice in rest[1::2])
    return Item(question.strip(), choices, letters.index(right.strip()[1]))


def load_pages(bench: KnowledgeBench) -> list[Document]:
    """Load the pages that have a file of questions, X.txt with X.jsonl, and the demo's page."""
    folders = bench.options.pages
    documents: dict[str, Document] = {}
    if not folders:
        folders = (bench.data / "pages",)
        page = demo.load_page()
        documents["demo"] = _make_page("demo", page, demo.load_page_questions())
    for folder in folders:
        for file in sorted(folder.glob("*.jsonl")):
            page = file.with_suffix(".txt")
            if page.exists() and file.stem not in documents:
                documents[file.stem] = _make_page(file.stem, load_text(page), load_questions(file))
    if not documents:
        names = ", ".join(repr(str(folder)) for folder in folders)
        raise ValueError(f"--pages must hold X.txt with X.jsonl, got none in {names}: add one")
    return list(documents.values())


def _make_page(name: str, text: str, questions: Sequence[Question]) -> Document:
    asked = tuple(Asked(item.question, item.answer, text, name) for item in questions)
    return Document(name, text, asked, name)


def _load_part(bench: KnowledgeBench, name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the numbered passages that settings are chosen on, or the others."""
    records = list(enumerate(_load_lines(bench.data / "knowledge" / f"{name}.jsonl")))
    count = CHOOSING[name]
    return records[:count] if bench.options.choose else records[count:]


def _load_lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        raise FileNotFoundError(f"--folder must hold {file.name}, got no {str(file)!r}: add it")
    return load_lines(file)
