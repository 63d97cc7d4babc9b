"""The pages of the demo: short fictional texts, each with questions in other words than its own."""

from pathlib import Path

from ..asking import Question, load_questions
from ..text import load_text, split_sentences

__all__ = [
    "COMPARED",
    "PAGE",
    "PAGES",
    "find_sentence",
    "join_pages",
    "load_page",
    "load_page_questions",
]

PAGES = Path(__file__).parent / "pages"
"""The folder of the pages."""
PAGE = "lighthouse"
"""The page that is studied."""
COMPARED = ("expedition", "ferry", "foundry", "garden", "theatre")
"""The pages that no setting of a study was chosen on."""


def load_page(name: str = PAGE, sentences: int | None = None) -> str:
    """Load a page, or its first sentences."""
    text = load_text(PAGES / f"{name}.txt")
    if sentences is None:
        return text
    return " ".join(split_sentences(text)[:sentences])


def load_page_questions(name: str = PAGE) -> list[Question]:
    """Load the questions about a page; each has an answer."""
    return load_questions(PAGES / f"{name}.jsonl")


def join_pages() -> str:
    """Return all pages but `PAGE`, one after the other."""
    names = sorted(path.stem for path in PAGES.glob("*.txt"))
    return "\n\n".join(load_page(name).strip() for name in names if name != PAGE)


def find_sentence(page: str, answer: str) -> str:
    """Return the first sentence of a page that has the answer; "" where none has it."""
    for sentence in split_sentences(page):
        if answer in sentence:
            return sentence
    return ""
