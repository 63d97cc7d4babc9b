"""A whole conversation: what is found by its one memory's exchanges against BM25, as the context of the base.

    locas eval locomo locomo6.json --model smollm2 --method none,locas-glu --study --exchanges 3 --passes 0 \
        --conversations conv-41 --setting no-context,recited,evidence --no-wrong-memory --out conv-41
    python benchmarks/conversation.py locomo6.json --conversation conv-41 --run conv-41 --out conversation.json

The first command has exchanges written about the dialogue, finds ten passages for each question by these
(`selfstudy.Finder`; "recited"), and asks the base with these, with nothing and with the evidence. The second one asks
the base in the same way with the ten passages that BM25 ranks first, and with these and the found ones in turns. What
is finished is not done again. `--out` has figures and the numbers of questions alone (LoCoMo's licence).

    python benchmarks/conversation.py locomo6.json --conversation conv-41 --run conv-41 --out taught.json \
        --teach locas-glu@64,lora@11+0.3 --other conv-50

A memory of each method, "+" its anchor, is taught the same exchanges in three passes. It is asked the questions of its
own conversation, and a hundred of another one, without any passage. The base is asked the same ones.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from measuring import describe_machine, make_study
from year import count_hits, describe, lines_of, merge, rank_passages

from locas_peft.asking import Question, answer, encode_answer
from locas_peft.asking.scoring import score_targets
from locas_peft.bases import load_base
from locas_peft.evaluation.conversations import (
    Conversation,
    LocomoQuestion,
    choose_conversations,
    dialogue_lines,
    load_locomo,
)
from locas_peft.evaluation.f1 import ADVERSARIAL
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.evaluation.locomo import f1_by_category
from locas_peft.evaluation.prompts import FROM_RECITED, make_prompts
from locas_peft.files import load_json, write_json
from locas_peft.memories import memory_attached
from locas_peft.reading import memorize
from locas_peft.selfstudy import load_exchanges, split_passages
from locas_peft.selfstudy.exchanges import EXCHANGES
from locas_peft.text import tokenize

METHOD = "locas-glu"
PASSES, OTHER_QUESTIONS = 3, 100


def describe_scored(
    asked: LocomoQuestion, given: str, gold_nats: float, passages: list[str], lines: dict[str, str]
) -> dict[str, Any]:
    """Return an answer's figures, its question's category, and the nats a token of the gold answer."""
    return {
        **describe(asked, given, passages, lines),
        "category": asked.category,
        "gold_nats": gold_nats,
    }


def ask(
    model,
    tokenizer,
    talk: Conversation,
    passages: dict[int, list[str]] | None = None,
    setting: str = FROM_RECITED,
) -> list[dict[str, Any]]:
    """Ask each question with its passages, by the question's index, or in another setting; return the figures."""
    lines, prompts = (
        lines_of(talk),
        make_prompts(model, tokenizer, talk, setting, recited=passages)[0],
    )
    rows: dict[int, dict[str, Any]] = {}
    for batch, texts in answer(model, tokenizer, prompts):
        golds = [
            (prompts[number], encode_answer(tokenizer, talk.questions[number].answer))
            for number in batch
        ]
        for number, text, score in zip(batch, texts, score_targets(model, golds), strict=True):
            asked = talk.questions[number]
            rows[number] = describe_scored(
                asked, text, score.per_token, (passages or {}).get(asked.index, []), lines
            )
    return [rows[number] for number in sorted(rows)]


def teach(
    base, tokenizer, talk: Conversation, other: Conversation, run: Path, label: str
) -> dict[str, Any]:
    """Teach a memory the run's exchanges; return the study's figures, and the answers about both conversations."""
    exchanges = load_exchanges(run / "locomo/memories" / METHOD / talk.sample_id / EXCHANGES)
    text = tokenize(tokenizer, "\n".join(dialogue_lines(talk)))
    with TemporaryDirectory() as folder:
        memory = Path(folder) / "memory"
        reading = memorize(
            base,
            text,
            make_study(label, PASSES),
            out=memory,
            tokenizer=tokenizer,
            exchanges=exchanges,
        )
        found = {"seconds": reading.seconds, "studied": {**reading.studied, "samples": []}}
        with memory_attached(base, memory) as model:
            found["own"], found["other"] = (
                ask(model, tokenizer, each, setting="no-context") for each in (talk, other)
            )
    return found


def teach_all(
    base, tokenizer, talks: tuple[Conversation, Conversation], arguments, results: dict[str, Any]
) -> None:
    """Teach the methods that are not yet in the results, ask the base, and print a table of each conversation."""
    labels = arguments.teach.split(",")
    for label in labels:
        if label not in results:
            results[label] = teach(base, tokenizer, *talks, arguments.run, label)
            write_json(arguments.out, results)
    for setting in ("no-context", "evidence"):
        if setting not in results:
            own, other = (ask(base, tokenizer, talk, setting=setting) for talk in talks)
            results[setting] = {"own": own, "other": other}
            write_json(arguments.out, results)
    for whose in ("own", "other"):
        rows = {
            each.replace("no-", "no "): results[each][whose]
            for each in ("no-context", "evidence", *labels)
        }
        print(whose, tabulate(rows), sep="\n")


def read_run(
    folder: Path, talk: Conversation
) -> tuple[dict[str, list[dict[str, Any]]], dict[int, list[str]]]:
    """Return the answers of the protocol's run, by how the base was asked, and what the memory recited."""
    lines, found = lines_of(talk), {}
    name, questions = talk.sample_id, {each.index: each for each in talk.questions}
    files = {
        "no context": f"none/{name}.no-context.memory-none",
        "evidence": f"none/{name}.evidence.memory-none",
    }
    files["recited"] = f"{METHOD}/{name}.recited.memory-{name}"
    recited: dict[int, list[str]] = {}
    for kind, file in files.items():
        records = load_json(folder / "locomo" / "predictions" / f"{file}.json")
        rows = found[kind] = []
        for record in records:
            passages = record["recited"] or []
            asked, given = questions[record["index"]], record["prediction"]
            rows.append(describe_scored(asked, given, record["gold_nats"], passages, lines))
            if kind == "recited":
                recited[record["index"]] = passages
    return found, recited


def tabulate(answers: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line for each way: right, F1, nats, share of the gap closed, hits of the evidence, F1 by category."""
    rows = {
        kind: [row for row in found if row["category"] != ADVERSARIAL]
        for kind, found in answers.items()
    }
    alone, evidence = (
        np.mean([row["gold_nats"] for row in rows[kind]]) for kind in ("no context", "evidence")
    )
    table = []
    for kind, found in rows.items():
        nats, f1 = (mean_interval([row[key] for row in found]) for key in ("gold_nats", "f1"))
        gap = (alone - nats["mean"]) / (alone - evidence)
        shown = [
            f"{each['mean']:.3f} [{each['low']:.3f}, {each['high']:.3f}]" for each in (f1, nats)
        ]
        right = sum(row["right"] for row in found)
        line = (
            f"{kind}: {right} right of {len(found)}, F1 {shown[0]}, nats {shown[1]}, gap {gap:.2f}"
        )
        by_category = {
            name: round(100 * each["mean"], 1) for name, each in f1_by_category(found).items()
        }
        table.append(
            f"{line}, evidence among 1, 5, 10 {count_hits(found)}, F1 by category {by_category}"
        )
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--conversation", required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder of the protocol's run")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--teach", help="methods, separated by commas; with --other")
    parser.add_argument(
        "--other", help="another conversation, which the taught memories do not know"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if bool(arguments.teach) != bool(arguments.other):
        parser.error("--teach and --other go together: give both, or neither")
    (talk,) = choose_conversations(load_locomo(arguments.file)[0], [arguments.conversation])
    base, tokenizer = load_base(arguments.model)
    base.eval()
    results = (
        load_json(arguments.out)
        if arguments.out.exists()
        else {"machine": describe_machine(base.device)}
    )
    if arguments.teach:
        (other,) = choose_conversations(load_locomo(arguments.file)[0], [arguments.other])
        asked = [each for each in other.questions if each.category != ADVERSARIAL][:OTHER_QUESTIONS]
        teach_all(
            base, tokenizer, (talk, replace(other, questions=tuple(asked))), arguments, results
        )
        return
    passages = [each.text for each in split_passages(tokenizer, "\n".join(dialogue_lines(talk)))]
    questions, indices = (
        [Question(each.question) for each in talk.questions],
        [each.index for each in talk.questions],
    )
    ranked = rank_passages(dict(zip(passages, passages, strict=True)), questions)
    by_words = dict(zip(indices, ranked, strict=True))
    answers, recited = read_run(arguments.run, talk)
    contexts = {
        "bm25": by_words,
        "recited and bm25, in turns": {
            each: merge(recited[each], by_words[each]) for each in indices
        },
    }
    results |= {"conversation": talk.sample_id, "passages": len(passages)}
    results["taught"] = taught = load_json(arguments.run / "locomo.json")["teachings"][METHOD][
        talk.sample_id
    ]
    taught["studied"].pop("samples", None)  # texts
    results["answers"] = answers = {**results.get("answers", {}), **answers}
    for kind, found in contexts.items():
        if kind not in answers:
            answers[kind] = ask(base, tokenizer, talk, found)
            write_json(arguments.out, results)
    write_json(arguments.out, results)
    print(tabulate(answers))


if __name__ == "__main__":
    main()
