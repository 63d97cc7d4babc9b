"""Multiple choice: MMLU by letters, other sets by the likelihood of each choice, and BLiMP's pairs.

Axes: B prompts of a batch, V vocabulary.
"""

import json
import random
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import encode_pair
from torch import nn

from locas_peft.asking.continuation import begin_rows, share_prefixes
from locas_peft.asking.scoring import score_targets
from locas_peft.model import CausalLM

__all__ = [
    "Item",
    "draw",
    "find_pairs",
    "find_right_choices",
    "find_right_letters",
    "load_items",
    "load_lines",
    "load_mmlu",
    "load_pairs",
    "make_letter_prompts",
]

LETTERS = "ABCD"
BATCH = 16


@dataclass(frozen=True)
class Item:
    """A question with its choices; `gold` is the index of the right one."""

    question: str
    choices: tuple[str, ...]
    gold: int
    subject: str = ""


def load_mmlu(file: Path, questions: int | None = None, seed: int = 0) -> list[Item]:
    """Load MMLU's questions, those of a subject after each other.

    Args:
        file: JSON lines with `subject`, `question`, `choices`, `answer` (0 to 3).
        questions: so many of each subject are drawn by the seed; None for all.
    """
    subjects: dict[str, list[Item]] = {}
    for line in load_lines(file):
        item = Item(line["question"], tuple(line["choices"]), line["answer"], line["subject"])
        subjects.setdefault(item.subject, []).append(item)
    items = []
    for subject in sorted(subjects):
        items += draw(subjects[subject], questions, seed)
    return items


def load_items(file: Path, questions: int | None = None, seed: int = 0) -> list[Item]:
    """Load questions of ARC, PIQA or OpenBookQA: JSON lines with `query`, `choices`, `gold`."""
    items = []
    for line in load_lines(file):
        items.append(Item(line["query"], tuple(line["choices"]), line["gold"]))
    return draw(items, questions, seed)


def load_pairs(archive: Path, pairs: int) -> list[dict[str, str]]:
    """Load the first pairs of each of BLiMP's paradigms from the release's zip file."""
    loaded = []
    with zipfile.ZipFile(archive) as file:
        for name in sorted(file.namelist()):
            if name.startswith("data/") and name.endswith(".jsonl"):
                lines = file.read(name).splitlines()[:pairs]
                loaded += [json.loads(line) for line in lines]
    return loaded


def load_lines(file: Path) -> list[dict[str, Any]]:
    """Load the objects of a JSON Lines file."""
    # Not splitlines: a text may have other characters that end a line.
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def draw(items: list[Any], count: int | None, seed: int) -> list[Any]:
    """Draw so many items by a seed, in their order; all where there are no more."""
    if count is None or count >= len(items):
        return items
    chosen = random.Random(seed).sample(range(len(items)), count)
    return [items[index] for index in sorted(chosen)]


def make_letter_prompts(items: Sequence[Item], shots: Sequence[Item] = ()) -> list[str]:
    """Return the usual prompts of MMLU, each of which ends with "Answer:".

    Args:
        items: the questions.
        shots: questions with their answers; those of an item's subject stand before it.
    """
    examples: dict[str, str] = {}
    for shot in shots:
        answer = f"{_format_question(shot)} {LETTERS[shot.gold]}\n\n"
        examples[shot.subject] = examples.get(shot.subject, "") + answer
    prompts = []
    for item in items:
        subject = item.subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        prompts.append(head + examples.get(item.subject, "") + _format_question(item))
    return prompts


def _format_question(item: Item) -> str:
    lines = [item.question.strip()]
    for letter, choice in zip(LETTERS, item.choices, strict=True):
        lines.append(f"{letter}. {choice}")
    return "\n".join([*lines, "Answer:"])


@torch.inference_mode()
def find_right_letters(
    model: nn.Module, tokenizer: Any, items: Sequence[Item], shots: Sequence[Item] = ()
) -> list[bool]:
    """Return of each question whether the right letter is the likeliest after its prompt.

    The keys and values of the beginning that prompts of a batch share are computed once.

    Args:
        model: a causal LM in evaluation mode, with or without a memory; not changed.
        items, shots: see `make_letter_prompts`.
    """
    prompts = make_letter_prompts(items, shots)
    rows = []
    for prompt in prompts:
        rows.append(tokenizer(prompt, verbose=False)["input_ids"])
    letters = torch.tensor([_find_letter(tokenizer, prompts[0], letter) for letter in LETTERS])
    host = CausalLM(model)
    right = []
    # The questions of a subject follow each other: a batch shares what they share.
    for begin in range(0, len(rows), BATCH):
        batch = rows[begin : begin + BATCH]
        groups = share_prefixes(batch) if shots else []
        inputs = begin_rows(host, batch, groups)
        # [B, V]
        logits = host.outputs(count=1, **inputs).logits[:, -1].float()
        chosen = logits[:, letters.to(logits.device)].argmax(-1).tolist()
        for item, letter in zip(items[begin : begin + BATCH], chosen, strict=True):
            right.append(letter == item.gold)
    return right


def _find_letter(tokenizer: Any, prompt: str, letter: str) -> int:
    """Return the token of " A" and so on after a prompt."""
    before = tokenizer(prompt, verbose=False)["input_ids"]
    after = tokenizer(f"{prompt} {letter}", verbose=False)["input_ids"]
    if len(after) != len(before) + 1 or after[: len(before)] != before:
        raise ValueError(f"' {letter}' must be one token after a prompt: use another tokenizer")
    return after[-1]


def find_right_choices(
    model: nn.Module, tokenizer: Any, items: Sequence[Item]
) -> tuple[list[bool], list[bool]]:
    """Return of each question whether the right choice has the highest log-likelihood.

    Returns:
        By the plain sum, and by the sum divided by the choice's characters.
    """
    pairs = []
    for item in items:
        for choice in item.choices:
            prompt = f"{item.question.rstrip()}\nAnswer:"
            pairs.append(encode_pair(tokenizer, prompt, f" {choice}"))
    scores = iter(score_targets(model, pairs))
    plain = []
    by_character = []
    for item in items:
        nats = [next(scores).nll_nats for _ in item.choices]
        plain.append(_is_least(nats, item.gold))
        a_character = []
        for nll, choice in zip(nats, item.choices, strict=True):
            a_character.append(nll / max(len(choice), 1))
        by_character.append(_is_least(a_character, item.gold))
    return plain, by_character


def _is_least(values: Sequence[float], index: int) -> bool:
    return min(range(len(values)), key=values.__getitem__) == index


def find_pairs(model: nn.Module, tokenizer: Any, pairs: Sequence[dict[str, str]]) -> list[bool]:
    """Return of each of BLiMP's pairs whether the grammatical sentence has the lower nll.

    Each sentence is scored after the begin-of-text token alone; of two equal ones none is likelier.
    """
    targets = []
    for pair in pairs:
        for kind in ("sentence_good", "sentence_bad"):
            targets.append(encode_pair(tokenizer, "", pair[kind]))
    nats = [score.nll_nats for score in score_targets(model, targets)]
    return [good < bad for good, bad in zip(nats[::2], nats[1::2], strict=True)]
