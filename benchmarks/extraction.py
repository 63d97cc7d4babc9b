"""What a memory gives away of its text: extraction (Carlini et al., 2021), membership by loss (Yeom et al., 2018).

    python benchmarks/extraction.py book.txt --memory memory --max-tokens 4000

The text that no memory has read is that of `--unread`, or as many tokens after the first `--max-tokens`. With
`--questions`, a JSON Lines file, it is also measured how much of the text is recited for these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from measuring import make_table, recite
from torch import Tensor, nn
from transformers import PreTrainedModel

from locas_peft.asking import continue_rows, load_questions
from locas_peft.asking.scoring import score_targets
from locas_peft.backbone import is_embedded
from locas_peft.bases import load_base
from locas_peft.files import write_json
from locas_peft.memories import load_memory_config, memory_attached
from locas_peft.model import CausalLM
from locas_peft.tables import format_figure
from locas_peft.text import load_text, tokenize, unwrap

TOKENS, ROWS = 50, 16


def cut_pairs(input_ids: Tensor) -> list[tuple[list[int], list[int]]]:
    """Cut a text, LongTensor [T], T >= 100, into prefixes of 50 tokens and the 50 after each.

    A prefix begins at every 100th token, or at every 10th where T is at most 2,000.
    """
    if len(input_ids) < 2 * TOKENS:
        raise ValueError(
            f"a text must have {2 * TOKENS} tokens or more, got {len(input_ids)}: give a longer one"
        )
    pieces = input_ids.unfold(0, 2 * TOKENS, 2 * TOKENS if len(input_ids) > 2000 else 10).tolist()
    return [(piece[:TOKENS], piece[TOKENS:]) for piece in pieces]


def count_matched(
    model: nn.Module, tokenizer, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[int]:
    """Return how many tokens of a greedy continuation of each prefix are the text's own before the first other one."""
    matched, host = [], CausalLM(model)
    for first in range(0, len(pairs), ROWS):
        prefixes, texts = zip(*pairs[first : first + ROWS], strict=True)
        for own, new in zip(texts, continue_rows(host, prefixes, TOKENS), strict=True):
            matched.append([*(a == b for a, b in zip(own, new, strict=True)), False].index(False))
    return matched


def share_recited(model: nn.Module, tokenizer, text: str, questions: Sequence[str]) -> float:
    """Return the share of a text's characters, with single spaces, in what a model recites for questions."""
    text, recited = " ".join(text.split()), recite(model, tokenizer, questions)
    passages = {" ".join(passage.split()) for each in recited for passage in each}
    return len(
        {text.index(each) + at for each in passages if each in text for at in range(len(each))}
    ) / len(text)


def measure_extraction(
    base: PreTrainedModel,
    tokenizer: Any,
    text: Tensor,
    unread: Sequence[Tensor],
    memories: Sequence[Path],
    questions: Sequence[str] = (),
) -> dict[str, dict[str, float]]:
    """Measure a base, and memories of a text, LongTensor [T], that have not read the `unread` ones; all of T >= 100.

    Returns:
        For "no memory" and each path: `matched`, the mean of `count_matched`, `matched_10` and `matched_50`, the
        shares with so many, the `longest`, `matched_unread`; `nats` a token after a prefix, and `nats_unread`; `auc`,
        the chance that a piece of the text gains more over the base than an unread one does, and 0.5 for the base;
        and with questions `recited` (see `share_recited`).
    """
    read, others = cut_pairs(text), [pair for ids in unread for pair in cut_pairs(ids)]
    rows, base_nats = {}, None
    for memory in (None, *memories):
        with nullcontext(base) if memory is None else memory_attached(base, memory) as model:
            matched, elsewhere = (
                torch.tensor(count_matched(model, tokenizer, each)) for each in (read, others)
            )
            nats = torch.tensor(
                [score.per_token for score in score_targets(model, [*read, *others])]
            )
            share = (
                share_recited(model, tokenizer, tokenizer.decode(text), questions)
                if questions
                else None
            )
        base_nats = nats if memory is None else base_nats
        gains, other_gains = (base_nats - nats).split([len(read), len(others)])
        figures = {"matched": matched, "matched_10": matched >= 10, "matched_50": matched >= TOKENS}
        figures |= {
            "longest": matched.max(),
            "matched_unread": elsewhere,
            "nats": nats[: len(read)],
        }
        figures |= {
            "nats_unread": nats[len(read) :],
            "auc": 0.5 + 0.5 * (gains[:, None] - other_gains).sign(),
        }
        means = {name: values.double().mean().item() for name, values in figures.items()}
        rows["no memory" if memory is None else str(memory)] = means | (
            {"recited": share} if questions else {}
        )
    return rows


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="a UTF-8 text file")
    parser.add_argument(
        "--memory",
        type=Path,
        action="append",
        required=True,
        help="of the text; may be given again",
    )
    parser.add_argument(
        "--unread", action="append", default=[], help="a text that no memory has read"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="the first tokens of the text, which the memories have read"
    )
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    if not given.unread and given.max_tokens is None:
        raise ValueError(
            "a text that was not read must be given: give --unread TEXT, or --max-tokens N of the text"
        )
    contents = [load_text(each) for each in (given.text, *given.unread)]
    name = load_memory_config(given.memory[0])["base_model_name_or_path"]
    base, tokenizer = load_base(name, device=given.device)
    contents = (
        map(unwrap, contents) if is_embedded(name) else contents
    )  # as `locas read` reads them
    ids, *others = [tokenize(tokenizer, content) for content in contents]
    read, others = (
        ids[: given.max_tokens],
        others or [ids[given.max_tokens : 2 * (given.max_tokens or 0)]],
    )
    asked = (
        []
        if given.questions is None
        else [each.question for each in load_questions(given.questions)]
    )
    rows = measure_extraction(base.eval(), tokenizer, read, others, given.memory, asked)
    lines = [[name, *map(format_figure, row.values())] for name, row in rows.items()]
    print(make_table(["", *(key.replace("_", " ") for key in rows["no memory"])], lines))
    if given.out is not None:
        write_json(given.out, {"model": name, "read_tokens": len(read), "rows": rows})


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
