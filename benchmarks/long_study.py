"""Study a document of 5,000 tokens in one memory, and its parts in a memory each, which are summed.

    python benchmarks/long_study.py smollm2 --data DATA/knowledge/squad.jsonl --out RESULTS

The document joins passages of SQuAD, from number 200 on: the first ones are for choosing settings.
All rows are asked the same questions: the base, one memory of the whole document, and the sum of
the memories of its parts (`add_weighted_adapter`, weights of 1). Each row is a JSON file in the
folder RESULTS; so is each memory. The same command goes on where it was stopped.

"Right" is the share of answers with the gold answer within. "Sentences" is the share that are a
passage of the text, word for word. "Read" is the share that can be read as text: the base, without
a memory, finds the answer at most as unlikely, in nats a token, as the least likely twentieth of
the document's own passages. Both follow the same short prompt. Processor time is that of the
studies, without what an interrupted run had done; size is that of the tensors' files.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from knowledge import parse_settings
from knowledge_tables.documents import CHOOSING, Document, join_documents, parse_passage
from measuring import describe_machine, make_table
from paper_tables.choices import load_lines
from torch import nn

from locas_peft.asking import Answerer, Question, encode_answer, encode_question
from locas_peft.asking.scoring import score_targets
from locas_peft.bases import load_base
from locas_peft.files import load_json, write_json
from locas_peft.memories import load_memory
from locas_peft.selfstudy import split_passages
from locas_peft.stages import Place, StudySettings, study
from locas_peft.text import tokenize
from locas_peft.tuner.modules import remember_modules

PROMPT = "What does the text say?"
"""Stands before what the base judges as text."""
LEAST_LIKELY = 0.05
"""The share of the text's own passages that are less likely than the limit."""


def load_passages(file: Path, tokenizer: Any, most_tokens: int, questions: int) -> list[Document]:
    """Load passages in their order, up to a number of tokens, with the first questions of each."""
    passages: list[Document] = []
    tokens = 0
    for number, record in enumerate(load_lines(file)):
        if number < CHOOSING["squad"]:
            continue
        passage = parse_passage(number, record)
        tokens += len(tokenize(tokenizer, passage.text))
        if passages and tokens > most_tokens:
            break
        passages.append(replace(passage, questions=passage.questions[:questions]))
    return passages


def divide(passages: Sequence[Document], count: int) -> list[Document]:
    """Divide passages into parts, each of as many passages, or one more."""
    bounds = [len(passages) * number // count for number in range(count + 1)]
    parts = []
    for number in range(count):
        part = passages[bounds[number] : bounds[number + 1]]
        parts.append(join_documents(part, f"part-{number}"))
    return parts


class Study:
    """Makes the rows of one document, and keeps them in a folder."""

    def __init__(self, model: str, passages_file: Path, out: Path, options: argparse.Namespace):
        self._base, self._tokenizer = load_base(model)
        self._base.eval()
        self._out = out
        self._settings = StudySettings(seed=options.seed, **options.study)
        passages = load_passages(passages_file, self._tokenizer, options.tokens, options.questions)
        self._whole = join_documents(passages, "whole")
        self._questions = [
            Question(asked.question, asked.answer) for asked in self._whole.questions
        ]
        self._parts = divide(passages, options.parts)
        self._limit = self._find_limit()

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self._base.device

    def fill(self) -> dict[str, dict[str, Any]]:
        """Return all rows; those that are missing are made."""
        self._out.mkdir(parents=True, exist_ok=True)
        rows = {"the base": self._make_row("base", [])}
        rows["one memory"] = self._make_row("one", [self._whole])
        rows[f"sum of {len(self._parts)} memories"] = self._make_row("sum", self._parts)
        return rows

    def _make_row(self, name: str, parts: Sequence[Document]) -> dict[str, Any]:
        file = self._out / f"{name}.json"
        if file.exists():
            return load_json(file)
        studies = []
        for number, part in enumerate(parts):
            studies.append(self._learn(f"{name}-{number}", part))
        folders = [self._out / "memories" / f"{name}-{number}" for number in range(len(parts))]
        with self._attach(folders) as model:
            answers = Answerer(model, self._tokenizer).answer(self._questions)
        row = self._grade([answer.text for answer in answers])
        row["right"] = sum(answer.right is True for answer in answers)
        row["cpu_seconds"] = sum(item["cpu_seconds"] for item in studies)
        row["bytes"] = sum(item["bytes"] for item in studies)
        row["studies"] = studies
        write_json(file, row)
        print(name, {key: row[key] for key in ("asked", "right", "read", "sentences")}, flush=True)
        return row

    def _learn(self, name: str, part: Document) -> dict[str, Any]:
        """Study a part into a memory; return what it cost."""
        file = self._out / f"study-{name}.json"
        if file.exists():
            return load_json(file)
        folder = self._out / "memories" / name
        place = Place(
            out=folder,
            checkpoint_dir=self._out / "memories" / f"{name}.unfinished",
            resume=True,
            title=name,
        )
        ids = tokenize(self._tokenizer, part.text)
        began = time.process_time()
        record = study(self._base, self._tokenizer, ids, self._settings, place)
        figures = {
            "cpu_seconds": time.process_time() - began,
            "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            "tokens": len(ids),
            "steps": record.steps,
            "kept": record.kept,
        }
        write_json(file, figures)
        print(name, figures, flush=True)
        return figures

    @contextmanager
    def _attach(self, folders: Sequence[Path]) -> Iterator[nn.Module]:
        """Attach the sum of memories to the base within the context; for none, yield the base."""
        if not folders:
            yield self._base
            return
        restore = remember_modules(self._base)
        try:
            model = load_memory(self._base, folders[0])
            names = [model.active_adapter]
            for number, folder in enumerate(folders[1:]):
                names.append(f"part{number}")
                model.load_adapter(str(folder), adapter_name=names[-1])
            if len(folders) > 1:
                model.add_weighted_adapter(names, [1.0] * len(names), "sum")
                model.set_adapter("sum")
            yield model.requires_grad_(False).eval()
        finally:
            restore()

    def _grade(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return how many answers can be read, and how many are passages of the text."""
        passages = set(self._list_passages())
        nats = self._judge(texts)
        return {
            "asked": len(texts),
            "read": sum(nat <= self._limit for nat in nats),
            "sentences": sum(text in passages for text in texts),
            "limit_nats": self._limit,
            "nats": nats,
            "questions": [asdict(question) for question in self._questions],
            "answers": list(texts),
        }

    def _find_limit(self) -> float:
        """Return the nats a token that all but the least likely passages of the text have."""
        nats = sorted(self._judge(self._list_passages()))
        return nats[int((1 - LEAST_LIKELY) * (len(nats) - 1))]

    def _list_passages(self) -> list[str]:
        passages = split_passages(self._tokenizer, self._whole.text)
        return [passage.text for passage in passages]

    def _judge(self, texts: Sequence[str]) -> list[float]:
        """Return the nats a token of texts under the base; infinity for an empty one."""
        prompt = encode_question(self._tokenizer, PROMPT)
        nats = [float("inf")] * len(texts)
        numbers = [number for number, text in enumerate(texts) if text.strip()]
        pairs = [(prompt, encode_answer(self._tokenizer, texts[number])) for number in numbers]
        for number, score in zip(numbers, score_targets(self._base, pairs), strict=True):
            nats[number] = score.per_token
        return nats


def tabulate(rows: dict[str, dict[str, Any]]) -> str:
    """Return a row a way to learn the document."""
    table = []
    for label, row in rows.items():
        shares = [f"{100 * row[key] / row['asked']:.0f}%" for key in ("right", "read", "sentences")]
        size = f"{row['bytes'] / 1e6:.1f}"
        table.append([label, *shares, f"{row['cpu_seconds']:.0f}", size, str(row["asked"])])
    head = ["", "right", "can be read", "sentences of the text", "processor s", "MB", "n"]
    return make_table(head, table)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, a name on the hub, or smollm2")
    parser.add_argument("--data", type=Path, required=True, help="squad.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the folder of rows and memories")
    parser.add_argument("--tokens", type=int, default=5_000, help="of the document, about")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--questions", type=int, default=2, help="about each passage, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--study", type=parse_settings, default={}, help="settings: passes=3,r=32")
    options = parser.parse_args(argv)
    bench = Study(options.model, options.data, options.out, options)
    rows = bench.fill()
    result = {"machine": describe_machine(bench.device), "rows": rows}
    write_json(options.out / "long_study.json", result)
    print(tabulate(rows))


if __name__ == "__main__":
    main()
