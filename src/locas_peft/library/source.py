"""The sentence of a memory's stored text that fits a question best.

BM25 finds the sentences with words of the question. The base, without the memory, then chooses the
one after which it finds the question likeliest: query likelihood (Sachan et al., 2022,
arXiv:2204.07496). Nothing is stored but the text.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..asking import Answer
from ..asking.prompts import WRITE_PROMPT, encode_answer, encode_prompt
from ..asking.scoring import score_targets
from ..checks import first_line
from ..memories.folder import TEXT
from ..model import count_positions
from ..text import load_text, split_sentences
from ..tuner import adapters_disabled
from .routing import score_by_words

__all__ = ["add_sources", "check_text", "find_source", "holds_text", "join_texts"]

_logger = logging.getLogger(__name__)
CANDIDATES = 20
"""The sentences, by BM25, that the base compares."""
MOST_CHARACTERS = 1_000
"""The characters of a sentence, or of the text's beginning, that the base is shown."""


def join_texts(text: str, earlier: str | Path | None = None) -> str:
    """Return the text that a memory stores: after that of an `earlier` memory, where it has one."""
    if earlier is None or not holds_text(earlier):
        return text
    before = load_text(Path(earlier) / TEXT)
    # The text may be studied after it was read, or have been added before a kill.
    return before if text in before else f"{before}\n\n{text}"


def holds_text(memory: str | Path) -> bool:
    """Return whether a memory's folder has its text."""
    return (Path(memory) / TEXT).is_file()


def check_text(memory: str | Path) -> None:
    """Raise a `ValueError` where a memory's folder does not have its text."""
    if not holds_text(memory):
        rule = f"memory must hold its text for a source, got no {TEXT} in {str(memory)!r}"
        raise ValueError(f"{rule}: make the memory again without --no-keep-text, or ask alone")


def add_sources(
    model: nn.Module,
    tokenizer: Any,
    answers: Sequence[Answer],
    memories: Sequence[str | Path | None],
) -> list[Answer]:
    """Return answers with their sources.

    An answer that no memory gave has no source, and neither has one of a memory without its text.

    Args:
        model: the base in evaluation mode; a memory in it is disabled meanwhile.
        tokenizer: of the base.
        answers: to questions.
        memories: the folder of the memory that gave each answer; None for the base.

    A text that cannot be read is left out, and a warning is logged.

    Raises:
        ValueError: the package bm25s is missing.
    """
    # A text is split and indexed once for all of its questions.
    asked: dict[Path, list[str]] = {}
    for answer, memory in zip(answers, memories, strict=True):
        if memory is not None and holds_text(memory):
            asked.setdefault(Path(memory), []).append(answer.question.question)
    sources = {}
    for folder, questions in asked.items():
        try:
            sentences = split_sentences(load_text(folder / TEXT))
        except ValueError as error:
            _logger.warning("memory %r has no source: %s", folder.name, first_line(error))
            continue
        sources[folder] = iter(_find_sources(model, tokenizer, sentences, questions))
    sourced = []
    for answer, memory in zip(answers, memories, strict=True):
        found = None if memory is None else sources.get(Path(memory))
        source = None if found is None else next(found)
        sourced.append(replace(answer, source=source))
    return sourced


def find_source(
    model: nn.Module, tokenizer: Any, sentences: Sequence[str], question: str
) -> str | None:
    """Return the sentence of a text that a question is about; None if none has a word of it.

    The arguments and errors are those of `add_sources`.
    """
    (source,) = _find_sources(model, tokenizer, sentences, [question])
    return source


def _find_sources(
    model: nn.Module, tokenizer: Any, sentences: Sequence[str], questions: Sequence[str]
) -> list[str | None]:
    """Return for each question about a text what `find_source` does."""
    sources: list[str | None] = []
    all_scores = score_by_words([[sentence] for sentence in sentences], questions)
    for question, scores in zip(questions, all_scores, strict=True):
        if not scores.max(initial=0.0):
            sources.append(None)
            continue
        # Of equal scores, the earlier sentence comes first.
        best = (-scores).argsort(kind="stable")[:CANDIDATES]
        candidates = [sentences[number] for number in best]
        nats = score_question(model, tokenizer, question, candidates, sentences[0])
        sources.append(candidates[nats.index(min(nats))])
    return sources


def score_question(
    model: nn.Module, tokenizer: Any, question: str, sentences: Sequence[str], beginning: str
) -> list[float]:
    """Return the negative log-likelihood of a question after each sentence, in nats.

    Args:
        beginning: the first sentence of the text, which stands above each other one. A sentence
            seldom names what its text is about, and a question does: with the sentence alone, the
            one that names it would be the likeliest for most questions.
    """
    target = encode_answer(tokenizer, question)
    pairs = []
    for sentence in sentences:
        passage = sentence[:MOST_CHARACTERS]
        if sentence != beginning:
            passage = f"{beginning[:MOST_CHARACTERS]}\n{passage}"
        prompt = encode_prompt(tokenizer, WRITE_PROMPT.format(passage=passage))
        pairs.append((_cut_prompt(model, prompt, target), target))
    with adapters_disabled(model):
        scores = score_targets(model, pairs)
    return [score.nll_nats for score in scores]


def _cut_prompt(model: nn.Module, prompt: list[int], target: list[int]) -> list[int]:
    """Return the last tokens of a prompt, as many as the model has positions for."""
    positions = count_positions(model)
    if positions is None:
        return prompt
    return prompt[max(len(prompt) + len(target) - positions, 0) :]
