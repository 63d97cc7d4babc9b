"""Find the passages that a question is about by a linear map of the base's hidden states; nothing is trained.

Each token of a question gives each passage a score, by ridge regression on the tokens of the passages and of the
questions that a study has learned: 1 for their own passage and -1 for all others. A passage's score for a question is
the highest of its tokens', averaged over four layers. A text is read twice in a row, and its tokens are those of the
second copy: no token of the first one has seen all of the text (Springer et al., 2024, arXiv:2402.15449). What the
passage and its questions share with the question in words, by BM25, is added. A question with names, none of them in
the text, finds nothing. One memory that has learned chooses among what is found: its probability of each is added too.

Regression needs sums over tokens alone (`Moments`). A memory keeps its own: those of several memories add up to what
one memory of all their texts would have.

Axes: L layers, T tokens of a text, P passages, D hidden size.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..asking import begin_rows, encode_answer, encode_question
from ..checks import import_extra
from ..model import CausalLM, token_losses
from ..tuner import adapters_disabled, evaluating
from .exchanges import (
    EXCHANGES,
    PASSAGES,
    Exchange,
    correct,
    digest_exchanges,
    join_exchanges,
    load_exchanges,
)

__all__ = [
    "MOST_FOUND",
    "Finder",
    "Moments",
    "has_learned",
    "load_finder",
    "measure_moments",
    "save_moments",
]
__all__ += ["score_by_words"]

DEPTHS = (
    0.27,
    0.74,
    0.8,
    0.87,
)  # the layers whose inputs are read, as shares of the model's layers
RIDGE = 0.1  # added to the diagonal of the inputs' products, relative to an input's squared length, which is D
MOST_FOUND, BATCH = 10, 16  # passages for a question; texts that are read together
WORDS = 0.05  # what 1 of `score_by_words` weighs
MEMORY = 0.25  # what a memory's probability of a passage, among those found, weighs
LEAST_SCORE = 0.18  # BM25 a unit of idf that counts as 1; chosen by benchmarks/library.py
BACKGROUND = (
    300  # documents that stand for other texts: with one memory alone, no word of it would be rare
)
_WORD = re.compile(r"\b\w\w+\b")


class Finder:
    """Finds passages for questions: call it with Q questions.

    Args:
        model: a causal LM, with or without a memory.
        passages: P texts, each with the text in which words of a question are looked for (`join_exchanges`).
        rows: float [L, P, D], which `Moments.fit_rows` returns.
        chooses: whether the active memory, if it has learned, chooses among what is found.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        passages: Mapping[str, str],
        rows: Tensor,
        chooses: bool = False,
    ):
        self._model, self._tokenizer, self._passages, self._rows = (
            model,
            tokenizer,
            passages,
            rows.float(),
        )
        self._chooses = chooses
        self._words = set(_WORD.findall(" ".join(passages.values()).lower()))

    def __call__(self, questions: Sequence[str]) -> list[dict[str, float]]:
        """Return for each question ten passages with their scores, the best first, or none."""
        found, passages = dict[int, dict[str, float]](), list(self._passages)
        words = WORDS * torch.from_numpy(
            score_by_words([[each] for each in self._passages.values()], questions)
        )
        for number, inputs in _read(self._model, self._tokenizer, questions):
            scores = (inputs @ self._rows.to(inputs.device).mT).amax(1).mean(0).cpu() + words[
                number
            ]  # [P]
            best = scores.topk(min(MOST_FOUND, len(scores))).indices.tolist()
            names = _list_names(questions[number]) if self._words else []
            about = not names or self._words.intersection(names)
            found[number] = {passages[each]: scores[each].item() for each in best if about}
        chooses = self._chooses and has_learned(self._model)
        return [
            self._choose(each, found[n]) if chooses else found[n]
            for n, each in enumerate(questions)
        ]

    @torch.no_grad()
    def _choose(self, question: str, found: dict[str, float]) -> dict[str, float]:
        """Add the memory's probability of each passage among those found to its score; return them in their order."""
        host, prompt = CausalLM(self._model), encode_question(self._tokenizer, question)
        answers = [torch.tensor(encode_answer(self._tokenizer, each)) for each in found]
        most = max(map(len, answers), default=0)
        if not found or len(prompt) + most > (host.positions or math.inf):
            return found
        rows = [[*prompt, *answer.tolist()][:-1] for answer in answers]
        with evaluating(self._model):
            logits = host.logits(
                count=most, **begin_rows(host, rows, [(len(prompt) - 1, range(len(rows)))], 0)
            )
        nats = [
            token_losses(row[-len(answer) :], answer).sum()
            for row, answer in zip(logits, answers, strict=True)
        ]
        shares = torch.stack(nats).neg().softmax(0).tolist()
        chosen = [
            (score + MEMORY * share, each)
            for (each, score), share in zip(found.items(), shares, strict=True)
        ]
        return {each: score for score, each in sorted(chosen, key=lambda row: -row[0])}


@dataclass(frozen=True)
class Moments:
    """Sums over tokens, float32, which a regression needs: of all products [L, D, D], of each passage's [L, P, D]."""

    gram: Tensor
    sums: Tensor

    def fit_rows(self) -> Tensor:
        """Return the rows that find each passage among the others, float32 [L, P, D]."""
        products = self.gram + RIDGE * self.gram.shape[-1] * torch.eye(
            self.gram.shape[-1], device=self.gram.device
        )
        targets = 2 * self.sums - self.sums.sum(1, keepdim=True)
        return torch.linalg.solve_ex(
            products, targets.mT
        ).result.mT.cpu()  # no error for a file of any numbers


def measure_moments(model: nn.Module, tokenizer, exchanges: Sequence[Exchange]) -> Moments:
    """Return the moments of some exchanges, whose answers are the passages, in their order."""
    numbers = dict[str, int]()
    own = [numbers.setdefault(each.answer, len(numbers)) for each in exchanges]
    own, texts = [*own, *numbers.values()], [*(each.question for each in exchanges), *numbers]
    gram = sums = torch.zeros(())
    for text, inputs in _read(model, tokenizer, texts):
        gram = gram + inputs.mT @ inputs
        sums = sums if sums.ndim else inputs.new_zeros(len(inputs), len(numbers), inputs.shape[-1])
        sums[:, own[text]] += inputs.sum(1)
    return Moments(gram, sums)


def save_moments(folder: Path, moments: Moments, exchanges: Sequence[Exchange]) -> None:
    """Write the moments of some exchanges into a memory's folder, in half precision."""
    d, tokens = (
        moments.gram.shape[-1],
        moments.gram[0].diagonal().mean(),
    )  # each token has the squared length D
    rows, columns = torch.triu_indices(d, d)
    upper = moments.gram[:, rows, columns]
    tensors = {
        "gram": (upper / tokens).half(),
        "sums": (moments.sums / d**0.5).half(),
        "tokens": tokens.reshape(1),
    }
    tensors = {name: each.cpu().contiguous() for name, each in tensors.items()}
    save_file(tensors, folder / PASSAGES, {"exchanges": digest_exchanges(exchanges)})


def _load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}): copy it again."
        ) from None


def _load_moments(folder: Path, exchanges: Sequence[Exchange], model: nn.Module) -> Moments | None:
    """Return the saved moments of some exchanges, or None where the file has none, or others."""
    passages, d = (
        len({each.answer for each in exchanges}),
        model.config.get_text_config().hidden_size,
    )
    tensors, metadata = (
        _load_tensors(folder / PASSAGES) if (folder / PASSAGES).is_file() else ({}, {})
    )
    shapes = {
        "gram": (len(DEPTHS), d * (d + 1) // 2),
        "sums": (len(DEPTHS), passages, d),
        "tokens": (1,),
    }
    found = {name: tuple(each.shape) for name, each in tensors.items()}
    if found != shapes or metadata.get("exchanges") != digest_exchanges(exchanges):
        return None
    rows, columns = torch.triu_indices(d, d)
    gram = torch.zeros(len(DEPTHS), d, d)
    gram[:, rows, columns] = gram[:, columns, rows] = (
        tensors["gram"].float() * tensors["tokens"].float()
    )
    return Moments(gram, tensors["sums"].float() * d**0.5)


def load_finder(memories: str | Path | Sequence[str | Path], model: nn.Module, tokenizer) -> Finder:
    """Return what finds the passages that a memory has studied, or several together, by their folders.

    A single one that has learned chooses among what is found, where it is the active one of the model. Where several
    ask a question in the same words, the first one's answer stays. Without a file of moments, or with that of other
    exchanges, they are measured. A damaged file, and no folder with exchanges, is a `ValueError`.
    """
    folders = [*map(Path, [memories] if isinstance(memories, str | Path) else memories)]
    exchanges, gram, sums = list[Exchange](), torch.zeros(()), dict[str, Tensor]()
    for folder in folders or [Path()]:
        if not (folder / EXCHANGES).is_file():
            rule = f"a memory must have its {EXCHANGES} beside it to recite, got {str(folder)!r} without"
            raise ValueError(f"{rule}: study its text, or ask it directly")
        own = load_exchanges(folder / EXCHANGES)
        moments = _load_moments(folder, own, model) or measure_moments(model, tokenizer, own)
        gram = gram + moments.gram.cpu()
        for answer, tokens in zip(join_exchanges(own), moments.sums.cpu().unbind(1), strict=True):
            sums[answer] = sums.get(answer, 0) + tokens
        exchanges = correct(own, exchanges)
    passages = join_exchanges(exchanges)
    moments = Moments(gram, torch.stack([sums[each] for each in passages], 1))
    return Finder(model, tokenizer, passages, moments.fit_rows(), len(folders) == 1)


def has_learned(model: nn.Module) -> bool:
    """Return whether the output of an active memory is not zero, that of Locas or LoRA."""
    on = [
        each
        for each in model.modules()
        if isinstance(each, BaseTunerLayer) and not each.disable_adapters
    ]
    marks = {
        f"{part}.{name}."
        for each in on
        for name in each.active_adapters
        for part in ("locas_down", "lora_B")
    }
    return any(
        each.any()
        for name, each in model.named_parameters()
        if any(mark in f"{name}." for mark in marks)
    )


def score_by_words(passages: Sequence[Sequence[str]], questions: Sequence[str]) -> np.ndarray:
    """Score M groups of passages for Q questions by BM25 (Robertson and Zaragoza, 2009) of their best; float64 [Q, M].

    A library's memory, which is such a group, answers where its score is at least 1. A score is divided by the sum of
    the idf of the question's words, so that one threshold serves any number of passages. It is multiplied by the share
    of the question's names that the group has, which tells people of the same first name apart. Names are capitalised
    words after the first. A missing package bm25s is a `ValueError`.
    """
    bm25s = import_extra("bm25s", "library", "what is found by words")
    options = {"stopwords": "en_plus", "return_ids": False, "show_progress": False}
    scores = np.zeros((len(questions), len(passages)))
    owners = np.repeat(np.arange(len(passages)), [len(each) for each in passages])
    if not len(owners):
        return scores
    documents = bm25s.tokenize([text for each in passages for text in each], **options)
    having = Counter(word for document in documents for word in set(document))
    mean_length = max(round(sum(map(len, documents)) / len(documents)), 1)
    index, all_documents = bm25s.BM25(), len(documents) + BACKGROUND
    index.index([*documents, *[["\0"] * mean_length] * BACKGROUND], show_progress=False)
    own = [set(_WORD.findall(" ".join(each).lower())) for each in passages]
    for row, question, words in zip(
        scores, questions, bm25s.tokenize(list(questions), **options), strict=True
    ):
        if not words:
            continue
        idf = sum(
            math.log(1 + (all_documents - having[word] + 0.5) / (having[word] + 0.5))
            for word in words
        )
        np.maximum.at(row, owners, index.get_scores(words)[: len(owners)] / (LEAST_SCORE * idf))
        if names := _list_names(question):
            row *= [sum(name in each for name in names) / len(names) for each in own]
    return scores


def _list_names(question: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(question)[1:] if word[0].isupper()]


@torch.no_grad()
def _read(model: nn.Module, tokenizer, texts: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
    """Yield each text's number and its tokens as the layers get them, float32 [L, T, D], each of mean square 1."""
    host = CausalLM(model)
    once = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    twice = tokenizer([f"{text}\n{text}" for text in texts], verbose=False)["input_ids"]
    rows = [row[-(host.positions or 0) :] for row in twice]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    with evaluating(model), adapters_disabled(model):
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            ids = nn.utils.rnn.pad_sequence(
                [torch.tensor(rows[number]) for number in batch], batch_first=True
            )
            # The padding comes last, where no other token sees it.
            given = {"output_hidden_states": True, "use_cache": False}
            states = host.base.base_model(ids.to(host.device), **given).hidden_states
            chosen = [
                states[int(depth * (len(states) - 1))] for depth in DEPTHS
            ]  # on the devices of their layers
            inputs = torch.stack([each.to(host.device, torch.float32) for each in chosen], 1)
            for number, each in zip(batch, inputs, strict=True):
                own = each[:, : len(rows[number])][:, -len(once[number]) or -1 :]
                yield number, nn.functional.rms_norm(own, own.shape[-1:])
