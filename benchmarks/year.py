"""A dialogue of many sessions: a memory for each session, or one memory that goes on; who answers, and how well.

    python benchmarks/year.py locomo6.json --conversation conv-30 --work year --out year.json

Each session is studied into a memory of its own in a library. With `--passes 0` nothing is learned: a memory then has
what finds its passages (`selfstudy.Finder`) alone. The base answers each question from ten passages, those

- own: found in the memory of the session which has the evidence;
- first: found in the memory that the library finds for the question;
- together: found in up to five memories that fit nearly as well, searched as one;
- all: found in all memories, as in one memory of the whole dialogue;
- bm25: of all sessions, by their words; also by these and those of the study's questions;
- together and bm25, in turns.

With `--answer together,bm25` the base answers from these alone; the others are compared by the rank of the evidence.
Separate memories do not change: the questions are asked once, after the last session.

    python benchmarks/year.py locomo6.json --conversation conv-30 --work year --out year.json --goes-on 10 --every 5

One memory goes on through the first sessions, with the exchanges that the separate memories have studied, and is asked
after every fifth one.

What is finished is not done again. The texts and memories stay in `--work` (LoCoMo's licence); `--out` has figures and
the numbers of questions alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import describe_machine

from locas_peft.asking import Question, ask_by_reciting, is_right
from locas_peft.asking.answers import answer_from
from locas_peft.bases import load_base
from locas_peft.evaluation.conversations import (
    Conversation,
    LocomoQuestion,
    Session,
    dialogue_lines,
    load_locomo,
)
from locas_peft.evaluation.f1 import answer_f1
from locas_peft.files import load_json, write_json
from locas_peft.library import Library, score_by_words
from locas_peft.library.routing import MOST_SEARCHED
from locas_peft.memories import memory_attached
from locas_peft.reading import ReadingSettings, memorize
from locas_peft.selfstudy import load_exchanges, load_finder, split_passages
from locas_peft.selfstudy.exchanges import EXCHANGES, join_exchanges
from locas_peft.selfstudy.finding import MOST_FOUND
from locas_peft.text import tokenize


def name_of(session: Session) -> str:
    return f"session {session.number:02}"


def text_of(talk: Conversation, session: Session) -> str:
    return "\n".join(dialogue_lines(replace(talk, sessions=(session,))))


def lines_of(talk: Conversation) -> dict[str, str]:
    """Return the text of each turn on one line, by the turn's id."""
    return {turn.dia_id: " ".join(turn.text.split()) for turn in talk.turns.values()}


def list_questions(talk: Conversation) -> list[tuple[LocomoQuestion, str]]:
    """Return the answerable questions whose evidence lies in one session, each with the name of its memory."""
    names = {turn.dia_id: name_of(session) for session in talk.sessions for turn in session.turns}
    held = [
        (each, {names[turn] for turn in each.evidence if turn in names}) for each in talk.questions
    ]
    return [
        (each, owners.pop()) for each, owners in held if each.category != 5 and len(owners) == 1
    ]


def describe(
    asked: LocomoQuestion, given: str | None, recited: Sequence[str], lines: dict[str, str]
) -> dict[str, Any]:
    """Return an answer's figures: is the gold phrase in it, its F1, and at which rank a passage of the evidence is.

    Where no answer is given, the rank alone.
    """
    evidence = [lines[turn] for turn in asked.evidence if turn in lines]
    ranks = [
        rank
        for rank, passage in enumerate(recited, 1)
        if any(is_of(passage, line) for line in evidence)
    ]
    found = {"index": asked.index, "rank": ranks[0] if ranks else None}
    if given is not None:
        found |= {
            "right": is_right(given, asked.answer),
            "f1": answer_f1(given, asked.answer, asked.category),
        }
    return found


def is_of(passage: str, line: str) -> bool:
    """Return whether a passage, which may be reported speech, is of a turn."""
    said = passage.split(': "', 1)[-1].split('" on ')[0].strip('" ')
    return bool(said) and said in line


def study(
    base,
    tokenizer,
    talk: Conversation,
    library: Library,
    results: dict[str, Any],
    settings,
    out: Path,
) -> None:
    """Study each session with a memory of its own; record the time and the size."""
    rows = results.setdefault("sessions", {})
    for session in talk.sessions:
        name = name_of(session)
        if name in rows:
            continue
        began = time.process_time()
        text = text_of(talk, session)
        record = library.add(base, tokenizer, text, name, settings, overwrite=True)
        rows[name] = {
            "cpu_seconds": time.process_time() - began,
            "passages": record.studied["passages"],
            "exchanges": record.studied["kept"],
            "steps": record.studied["steps"],
            "bytes": library.bytes_of(name),
        }
        write_json(out, results)
        print(name, rows[name], flush=True)


def find(
    base, tokenizer, library: Library, questions: list[Question], searched: list[tuple[str, ...]]
) -> list[list[str]]:
    """Return for each question the passages that are found in some memories, by their names, searched as one."""
    found: list[list[str]] = [[] for _ in questions]
    for names in filter(None, dict.fromkeys(searched)):
        numbers = [number for number, each in enumerate(searched) if each == names]
        rows = library.load_finder(names, base, tokenizer)(
            [questions[number].question for number in numbers]
        )
        for number, row in zip(numbers, rows, strict=True):
            found[number] = list(row)
    return found


def ask(
    base,
    tokenizer,
    talk: Conversation,
    library: Library,
    results: dict[str, Any],
    out: Path,
    answered: list[str],
) -> None:
    """Ask the base each question with passages of its own session's memory, of those that are found, and of BM25."""
    lines, asked = lines_of(talk), list_questions(talk)
    questions, owners = (
        [Question(each.question, each.answer) for each, _ in asked],
        [(owner,) for _, owner in asked],
    )
    texts = [each.question for each in questions]
    began = time.perf_counter()
    first, several = library.route(texts), library.route(texts, MOST_SEARCHED)
    results["seconds_a_routing"] = (time.perf_counter() - began) / 2 / len(questions)
    began = time.process_time()
    together = find(base, tokenizer, library, questions, several)
    results["seconds_a_question"] = (time.process_time() - began) / len(questions)
    passages = [
        each.text for s in talk.sessions for each in split_passages(tokenizer, text_of(talk, s))
    ]
    held = join_exchanges(
        each for s in talk.sessions for each in load_exchanges(library.find(name_of(s)) / EXCHANGES)
    )
    by_words = rank_passages(dict(zip(passages, passages, strict=True)), questions)
    kinds: dict[str, Callable[[], list[list[str]]]] = {
        "base": lambda: [[] for _ in questions],
        "own": lambda: find(base, tokenizer, library, questions, owners),
        "first": lambda: find(base, tokenizer, library, questions, first),
        "together": lambda: together,
        "all": lambda: find(
            base, tokenizer, library, questions, [tuple(library.list())] * len(questions)
        ),
        "bm25": lambda: by_words,
        "bm25 and the study's questions": lambda: rank_passages(held, questions),
        "together and bm25, in turns": lambda: [
            merge(*both) for both in zip(together, by_words, strict=True)
        ],
    }
    rows = results.setdefault("answers", {})
    for kind, make in kinds.items():
        if kind not in rows or (kind in answered and "right" not in rows[kind][0]):
            contexts, answers = make(), [None] * len(questions)
            if not answered or kind in answered:
                answers = answer_from(base, tokenizer, questions, contexts)
            described = zip(asked, answers, contexts, several, strict=True)
            rows[kind] = [
                describe(each, answer, found, lines) | {"own": owner, "memories": list(names)}
                for (each, owner), answer, found, names in described
            ]
            write_json(out, results)
        print(tabulate({kind: rows[kind]}), flush=True)


def rank_passages(texts: dict[str, str], questions: list[Question]) -> list[list[str]]:
    """Return for each question the passages that BM25 ranks first, as many as a memory recites, by their texts."""
    scores = score_by_words(
        [[text] for text in texts.values()], [each.question for each in questions]
    )
    names = list(texts)
    return [[names[number] for number in row.argsort()[::-1][:MOST_FOUND]] for row in scores]


def merge(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return the passages of two rankings in turns, each once, as many as a memory recites."""
    turns = chain.from_iterable(zip_longest(one, other))
    return list(dict.fromkeys(filter(None, turns)))[:MOST_FOUND]


def go_on(
    base,
    tokenizer,
    talk: Conversation,
    library: Library,
    results,
    settings,
    out: Path,
    work: Path,
    most,
    every,
):
    """Teach one memory the first sessions, one after the other, and ask what it has been taught so far."""
    lines = lines_of(talk)
    rows, memory = results.setdefault("one_memory", []), work / "one memory"
    for number, session in enumerate(talk.sessions[:most], 1):
        if number <= len(rows):
            continue
        began = time.process_time()
        ids = tokenize(tokenizer, text_of(talk, session))
        exchanges = load_exchanges(library.find(name_of(session)) / EXCHANGES)
        options = {
            "exchanges": exchanges,
            "start": memory if number > 1 else None,
            "overwrite": number == 1,
        }
        record = memorize(base, ids, settings, out=memory, tokenizer=tokenizer, **options)
        row = {"cpu_seconds": time.process_time() - began, "steps": record.studied["steps"]}
        if number % every == 0:
            known = {name_of(each) for each in talk.sessions[:number]}
            asked = [(each, name) for each, name in list_questions(talk) if name in known]
            questions = [Question(each.question, each.answer) for each, _ in asked]
            with memory_attached(base, memory) as model:
                find = load_finder(memory, model, tokenizer)
                given = ask_by_reciting(model, tokenizer, questions, find)
            row["answers"] = [
                describe(each, answer, recited, lines)
                for (each, _), answer, recited in zip(asked, *given, strict=True)
            ]
        rows.append(row)
        write_json(out, results)
        print(
            name_of(session),
            {key: value for key, value in row.items() if key != "answers"},
            flush=True,
        )


def count_hits(rows: list[dict[str, Any]]) -> list[int]:
    """Return for how many questions a passage of the evidence is among the first 1, 5 and 10."""
    ranks = [row["rank"] or np.inf for row in rows]
    return [sum(rank <= count for rank in ranks) for count in (1, 5, 10)]


def tabulate(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line for each way to ask: right answers, F1, hits of the evidence among 1, 5 and 10 passages."""
    table = []
    for kind, found in rows.items():
        line = f"{kind}: of {len(found)}, evidence among 1, 5, 10 passages {count_hits(found)}"
        if "right" in found[0]:
            line += f", {sum(row['right'] for row in found)} right, F1 {100 * np.mean([row['f1'] for row in found]):.1f}"
        table.append(line)
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--conversation", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--exchanges", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-sessions", type=int)
    parser.add_argument(
        "--answer", help="kinds of passages, separated by commas, that the base answers from; all"
    )
    parser.add_argument("--goes-on", type=int, default=0, help="teach one memory so many sessions")
    parser.add_argument("--every", type=int, default=5, help="ask it after every so many")
    parser.add_argument("--work", type=Path, required=True, help="folder of the memories")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    talk = next(
        each for each in load_locomo(arguments.file)[0] if each.sample_id == arguments.conversation
    )
    talk = replace(talk, sessions=talk.sessions[: arguments.limit_sessions])
    base, tokenizer = load_base(arguments.model)
    base.eval()
    chosen = {"exchanges": arguments.exchanges, "passes": arguments.passes, "seed": arguments.seed}
    settings = ReadingSettings(model=arguments.model, study=True, **chosen)
    new = {
        "machine": describe_machine(torch.device("cpu")),
        "conversation": talk.sample_id,
        **chosen,
    }
    results = load_json(arguments.out) if arguments.out.exists() else new
    library = Library(arguments.work / "library")
    study(base, tokenizer, talk, library, results, settings, arguments.out)
    if arguments.goes_on:
        shared = results, settings, arguments.out, arguments.work
        go_on(base, tokenizer, talk, library, *shared, arguments.goes_on, arguments.every)
    else:
        answered = arguments.answer.split(",") if arguments.answer else []
        ask(base, tokenizer, talk, library, results, arguments.out, answered)


if __name__ == "__main__":
    main()
