"""A dialogue of many sessions: a memory for each session, or one memory that goes on; who answers, and how well.

    python benchmarks/year.py locomo6.json --conversation conv-30 --work year --out year.json

Each session is studied into a memory of its own in a library. A question is then asked with the memory that the
library finds, with that of the session that holds its evidence, and of the base with as many passages as a memory
recites, by BM25 over all sessions: of the passages alone, and of each with the questions that its study wrote. The
last are also merged by rank with what the memory that is found recites. The base answers in a few words from the
passages (`ask_by_reciting`). Separate memories do not change: the questions are asked once, after the last session.

    python benchmarks/year.py locomo6.json --conversation conv-30 --work year --out year.json --goes-on 10 --every 5

One memory goes on through the first sessions, with the exchanges that the separate memories have studied, and is asked
after every fifth one.

What is finished is not done again. The texts and memories stay in `--work` (LoCoMo's licence); `--out` has figures and
the numbers of questions alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import describe_machine

from locas_peft.asking import Question, ask_by_reciting, encode_question, is_right
from locas_peft.asking.answers import MOST_RECITED, answer_all
from locas_peft.asking.prompts import SHORT_PROMPT
from locas_peft.bases import load_base
from locas_peft.evaluation.conversations import Conversation, LocomoQuestion, Session, dialogue_lines, load_locomo
from locas_peft.evaluation.f1 import answer_f1
from locas_peft.files import load_json, write_json
from locas_peft.library import Library, score_by_words
from locas_peft.library.routing import join_exchanges
from locas_peft.memories import memory_attached
from locas_peft.reading import ReadingSettings, memorize
from locas_peft.selfstudy import load_exchanges, split_passages
from locas_peft.selfstudy.exchanges import EXCHANGES
from locas_peft.text import tokenize

ANSWER_TOKENS = 32


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
    held = [(each, {names[turn] for turn in each.evidence if turn in names}) for each in talk.questions]
    return [(each, owners.pop()) for each, owners in held if each.category != 5 and len(owners) == 1]


def describe(asked: LocomoQuestion, given: str, recited: Sequence[str], lines: dict[str, str]) -> dict[str, Any]:
    """Return an answer's figures: is the gold phrase in it, its F1, and at which rank a passage of the evidence is."""
    evidence = [lines[turn] for turn in asked.evidence if turn in lines]
    ranks = [rank for rank, passage in enumerate(recited, 1) if any(is_of(passage, line) for line in evidence)]
    right, f1 = is_right(given, asked.answer), answer_f1(given, asked.answer, asked.category)
    return {"index": asked.index, "right": right, "f1": f1, "rank": ranks[0] if ranks else None}


def is_of(passage: str, line: str) -> bool:
    """Return whether a passage, which may be reported speech, is of a turn."""
    said = passage.split(': "', 1)[-1].split('" on ')[0].strip('" ')
    return bool(said) and said in line


def study(base, tokenizer, talk: Conversation, library: Library, results: dict[str, Any], settings, out: Path) -> None:
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


def ask(base, tokenizer, talk: Conversation, library: Library, results: dict[str, Any], out: Path) -> None:
    """Ask each question with its own session's memory, with the one that is found, and of the base with passages."""
    lines = lines_of(talk)
    asked = list_questions(talk)
    questions = [Question(each.question, each.answer) for each, _ in asked]
    began = time.perf_counter()
    by_words = library.route([each.question for each in questions])
    results["seconds_a_routing"] = (time.perf_counter() - began) / len(questions)
    rows: dict[str, list[dict[str, Any]]] = {"own": [], "routed": []}
    began = time.process_time()
    for name in dict.fromkeys(name for _, name in asked):
        numbers = [number for number, (_, owner) in enumerate(asked) if owner == name]
        with library.attach(base, [name]) as model:
            given = ask_by_reciting(model, tokenizer, [questions[number] for number in numbers])
        for number, answer, recited in zip(numbers, *given, strict=True):
            rows["own"].append(describe(asked[number][0], answer, recited, lines) | {"memory": name})
    results["cpu_seconds_an_answer"] = (time.process_time() - began) / len(questions)
    routed = library.ask(base, tokenizer, questions, by=ask_by_reciting)
    for (each, owner), words, found in zip(asked, by_words, routed, strict=True):
        figures = describe(each, found.answer, found.recited, lines)
        names = {"by_words": words[0] if words else None, "memory": found.memories[0] if found.memories else None}
        rows["routed"].append(figures | names | {"own": owner})
    passages = [each.text for s in talk.sessions for each in split_passages(tokenizer, text_of(talk, s))]
    held = join_exchanges(each for s in talk.sessions for each in load_exchanges(library.find(name_of(s)) / EXCHANGES))
    best = rank_passages(dict(zip(passages, passages, strict=True)), questions)
    with_questions = rank_passages(held, questions)
    merged = [merge(found.recited, others) for found, others in zip(routed, with_questions, strict=True)]
    kinds = {"base": [[] for _ in questions], "bm25": best, "bm25 and the study's questions": with_questions}
    for kind, contexts in (kinds | {"routed and these, merged": merged}).items():
        rows[kind], both = [], zip(questions, contexts, strict=True)
        prompts = [encode_question(tokenizer, each.question, SHORT_PROMPT, "\n".join(found)) for each, found in both]
        answers = answer_all(base, tokenizer, prompts, ANSWER_TOKENS)
        for (each, _), answer, found in zip(asked, answers, contexts, strict=True):
            rows[kind].append(describe(each, answer, found, lines))
    results["answers"] = rows
    write_json(out, results)


def rank_passages(texts: dict[str, str], questions: list[Question]) -> list[list[str]]:
    """Return for each question the passages that BM25 ranks first, as many as a memory recites, by their texts."""
    scores = score_by_words([[text] for text in texts.values()], [each.question for each in questions])
    names = list(texts)
    return [[names[number] for number in row.argsort()[::-1][:MOST_RECITED]] for row in scores]


def merge(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return the passages of two rankings in turns, each once, as many as a memory recites."""
    turns = chain.from_iterable(zip_longest(one, other))
    return list(dict.fromkeys(filter(None, turns)))[:MOST_RECITED]


def go_on(
    base, tokenizer, talk: Conversation, library: Library, results, settings, out: Path, work: Path, most, every
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
        options = {"exchanges": exchanges, "start": memory if number > 1 else None, "overwrite": number == 1}
        record = memorize(base, ids, settings, out=memory, tokenizer=tokenizer, **options)
        row = {"cpu_seconds": time.process_time() - began, "steps": record.studied["steps"]}
        if number % every == 0:
            known = {name_of(each) for each in talk.sessions[:number]}
            asked = [(each, name) for each, name in list_questions(talk) if name in known]
            questions = [Question(each.question, each.answer) for each, _ in asked]
            with memory_attached(base, memory) as model:
                given = ask_by_reciting(model, tokenizer, questions)
            row["answers"] = [
                describe(each, answer, recited, lines)
                for (each, _), answer, recited in zip(asked, *given, strict=True)
            ]
        rows.append(row)
        write_json(out, results)
        print(name_of(session), {key: value for key, value in row.items() if key != "answers"}, flush=True)


def tabulate(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line for each way to ask: right answers, F1, hits of the evidence among 1, 5 and 10 passages."""
    table = []
    for kind, found in rows.items():
        ranks = [row["rank"] or np.inf for row in found]
        hits = [sum(rank <= count for rank in ranks) for count in (1, 5, 10)]
        right, f1 = sum(row["right"] for row in found), 100 * np.mean([row["f1"] for row in found])
        table.append(f"{kind}: {right} right of {len(found)}, F1 {f1:.1f}, evidence among 1, 5, 10 passages {hits}")
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
    parser.add_argument("--goes-on", type=int, default=0, help="teach one memory so many sessions")
    parser.add_argument("--every", type=int, default=5, help="ask it after every so many")
    parser.add_argument("--work", type=Path, required=True, help="folder of the memories")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    talk = next(each for each in load_locomo(arguments.file)[0] if each.sample_id == arguments.conversation)
    talk = replace(talk, sessions=talk.sessions[: arguments.limit_sessions])
    base, tokenizer = load_base(arguments.model)
    base.eval()
    chosen = {"exchanges": arguments.exchanges, "passes": arguments.passes, "seed": arguments.seed}
    settings = ReadingSettings(model=arguments.model, study=True, **chosen)
    new = {"machine": describe_machine(torch.device("cpu")), "conversation": talk.sample_id, **chosen}
    results = load_json(arguments.out) if arguments.out.exists() else new
    library = Library(arguments.work / "library")
    study(base, tokenizer, talk, library, results, settings, arguments.out)
    if arguments.goes_on:
        shared = results, settings, arguments.out, arguments.work
        go_on(base, tokenizer, talk, library, *shared, arguments.goes_on, arguments.every)
    else:
        ask(base, tokenizer, talk, library, results, arguments.out)
        print(tabulate(results["answers"]))


if __name__ == "__main__":
    main()
