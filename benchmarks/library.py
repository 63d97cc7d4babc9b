"""Routing in a library: which memory a question finds, and what that costs in right answers.

    python benchmarks/library.py --out benchmarks/results/library.json

Nothing is trained: a memory is found by its exchanges, which are made here of people (`biographies.py`), 6, 20 and 50
of them, beside the exchanges in `--pages`, folders of studied memories with a file of questions each. The questions
about people have wordings that no exchange has. Questions about none are those on people who are not in the library,
those of pages that are not, and general ones. The router's threshold was chosen on people of the seeds 100 to 102 and
on the pages lighthouse, composer, bee, orchard and tram; the seeds here are others.

    python benchmarks/library.py --pages MEMORY... --questions FILE... --ask --out benchmarks/results/library.json

A library of the pages' memories is asked the pages' own questions, and general ones. The least gain was chosen
on lighthouse and composer with other general questions.

    python benchmarks/library.py --model smollm2 --study 6 --out benchmarks/results/library.json

So many people are studied, a memory each, and one memory of all their texts. All questions are asked with the memory
that the router finds, with the right one, with the sum of all, with the one of all texts, and, without a memory, with
the three passages in the context that BM25 finds among all.

    python benchmarks/library.py --study 34 --passes 0 --seed 2 --out benchmarks/results/library-found.json

Nothing is learned: the answers are the sentences found in the library, in the one memory of all texts, and by BM25.
"""

from __future__ import annotations

import argparse
import shutil
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from biographies import Person, make_people
from measuring import describe_machine, make_table

from locas_peft.asking import Question, ask, ask_by_reciting, count_right, load_questions
from locas_peft.bases import load_base
from locas_peft.files import load_json, write_json
from locas_peft.library import Library, score_by_words
from locas_peft.library.routing import list_passages
from locas_peft.memories import memory_attached
from locas_peft.reading import ReadingSettings
from locas_peft.selfstudy import Exchange
from locas_peft.selfstudy.exchanges import join_exchanges

SIZES = (6, 20, 50)
SEEDS = (0, 1, 2)
STRANGERS = 120
GENERAL = (
    "What is the capital of Norway?",
    "Who painted the Mona Lisa?",
    "How do I cook rice?",
    "What is nine times eight?",
    "Write a short poem about autumn.",
    "Who was the first person on the moon?",
    "When did the Roman Empire fall?",
    "How many strings does a violin have?",
    "What is the longest river in Africa?",
    "Translate thank you into Spanish.",
    "Which bird is the largest?",
    "In what year was Mozart born?",
    "What does a carpenter do?",
    "Where was Cleopatra born?",
    "How far is the sun from the earth?",
    "Can you recommend a book?",
    "What is photosynthesis?",
    "Why is the sky blue?",
    "How do magnets work?",
    "Who invented the telephone?",
)


def measure_routing(
    count: int, seed: int, pages: list[tuple[list[str], list[str]]]
) -> dict[str, Any]:
    """Return how often the right memory is found, and none where there is none, with `count` people and some pages."""
    people = make_people(count, seed)
    known = {person.name for person in people}
    strangers = [each for each in make_people(144, seed + 1000) if each.name not in known]
    passages = [
        *(
            [*join_exchanges(Exchange(**row) for row in person.exchanges).values()]
            for person in people
        ),
        *(held for held, _ in pages),
    ]
    asked = [
        (number, row["question"])
        for number, person in enumerate(people)
        for row in person.questions
    ]
    asked += [
        (count + number, question)
        for number, (_, questions) in enumerate(pages)
        for question in questions
    ]
    about_none = {
        "strangers": [row["question"] for person in strangers for row in person.questions][
            :STRANGERS
        ],
        "general": list(GENERAL),
    }
    began = time.perf_counter()
    scores = score_by_words(passages, [question for _, question in asked])
    seconds = (time.perf_counter() - began) / len(asked)
    owners = np.array([owner for owner, _ in asked])
    right = (scores.argmax(1) == owners) & (scores.max(1) >= 1)
    result = {
        "memories": len(passages),
        "people_right": float(right[owners < count].mean()),
        "pages_right": float(right[owners >= count].mean()) if pages else None,
        "first_right": float((scores.argmax(1) == owners).mean()),
        "seconds_a_question": seconds,
    }
    for kind, questions in about_none.items():
        result[f"{kind}_routed"] = float((score_by_words(passages, questions).max(1) >= 1).mean())
    return result


def measure_answers(
    base, tokenizer, people: list[Person], passes: int, seed: int
) -> dict[str, Any]:
    """Study people, a memory each and one of all, and return how many answers are right in each way to ask."""
    questions = [Question(**row) for person in people for row in person.questions]
    settings = ReadingSettings(study=True, passes=passes, seed=seed)
    results: dict[str, Any] = {"asked": len(questions)}
    with TemporaryDirectory() as folder:
        library, began = Library(Path(folder) / "each"), time.process_time()
        for person in people:
            exchanges = [Exchange(**row) for row in person.exchanges]
            library.add(base, tokenizer, person.text, person.name, settings, exchanges=exchanges)
        results["cpu_seconds_a_person"] = (time.process_time() - began) / len(people)
        answers = library.ask(base, tokenizer, questions)
        names = [person.name for person in people for _ in person.questions]
        results["routed_to_the_right"] = sum(
            each.memories == (name,) for each, name in zip(answers, names, strict=True)
        )
        results["right_routed"] = count_right([each.answer for each in answers], questions)
        given = []
        for person in people:
            with library.attach(base, [person.name]) as model:
                given += ask(model, tokenizer, [Question(**row) for row in person.questions])
        results["right_given"] = count_right(given, questions)
        paths = [library.find(person.name) for person in people]
        with memory_attached(base, paths[0], beside=paths[1:]) as model:
            results["right_sum_of_all"] = count_right(ask(model, tokenizer, questions), questions)
        whole, text = Library(Path(folder) / "one"), "\n".join(person.text for person in people)
        exchanges = [Exchange(**row) for person in people for row in person.exchanges]
        whole.add(base, tokenizer, text, "all", settings, exchanges=exchanges)
        with whole.attach(base, ["all"]) as model:
            results["right_one_memory_of_all"] = count_right(
                ask(model, tokenizer, questions), questions
            )
        passages = [passage for path in paths for passage in list_passages(path)]
        sentences = [row["answer"] for person in people for row in person.exchanges[::3]]
        scores = score_by_words(
            [[passage] for passage in passages], [each.question for each in questions]
        )
        answers = [
            ask(
                base,
                tokenizer,
                [each],
                context="\n".join(sentences[best] for best in row.argsort()[::-1][:3]),
            )[0]
            for each, row in zip(questions, scores, strict=True)
        ]
        results["right_bm25_and_base"] = count_right(answers, questions)
        results["right_base"] = count_right(ask(base, tokenizer, questions), questions)
    return results


def measure_found(base, tokenizer, people: list[Person]) -> dict[str, Any]:
    """Return how often the right sentence is found: in memories of one person each, in one of all, and by BM25."""
    questions = [Question(**row) for person in people for row in person.questions]
    names = [person.name for person in people for _ in person.questions]
    settings, by = (
        ReadingSettings(study=True, passes=0, r=1),
        partial(ask_by_reciting, passage=True),
    )
    with TemporaryDirectory() as folder:
        each, whole, began = (
            Library(Path(folder) / "each"),
            Library(Path(folder) / "one"),
            time.process_time(),
        )
        for person in people:
            exchanges = [Exchange(**row) for row in person.exchanges]
            each.add(base, tokenizer, person.text, person.name, settings, exchanges=exchanges)
        seconds = (time.process_time() - began) / len(questions)
        found = each.ask(base, tokenizer, questions, by=by)
        exchanges = [Exchange(**row) for person in people for row in person.exchanges]
        text = "\n".join(person.text for person in people)
        whole.add(base, tokenizer, text, "all", settings, exchanges=exchanges)
        together = whole.load_finder(["all"], base, tokenizer)(
            [asked.question for asked in questions]
        )
    held = join_exchanges(exchanges)
    scores = score_by_words(
        [[text] for text in held.values()], [asked.question for asked in questions]
    )
    return {
        "people": len(people),
        "asked": len(questions),
        "cpu_seconds_a_fact": seconds,
        "right_memory_first": sum(
            one.memories[:1] == (name,) for one, name in zip(found, names, strict=True)
        ),
        "right_memory_each": count_right([one.answer for one in found], questions),
        "right_one_memory_of_all": count_right(
            [next(iter(one), "") for one in together], questions
        ),
        "right_bm25": count_right([list(held)[best] for best in scores.argmax(1)], questions),
    }


def measure_pages(base, tokenizer, memories: list[Path], files: list[Path]) -> dict[str, Any]:
    """Ask studied pages' questions and general ones of a library of the pages; return how many memories answered."""
    results: dict[str, Any] = {"asked": 0, "routed_by_words": 0, "answered_by_the_right": 0}
    results |= {"right": 0, "right_given": 0}
    with TemporaryDirectory() as folder:
        for number, memory in enumerate(memories):
            shutil.copytree(memory, Path(folder) / f"page {number}")
        library = Library(folder)
        for number, file in enumerate(files):
            questions, names = load_questions(file), (f"page {number}",)
            answers = library.ask(base, tokenizer, questions)
            with library.attach(base, names) as model:
                given = ask(model, tokenizer, questions)
            results["asked"] += len(questions)
            results["routed_by_words"] += library.route(
                [each.question for each in questions]
            ).count(names)
            results["answered_by_the_right"] += sum(each.memories == names for each in answers)
            results["right"] += count_right([each.answer for each in answers], questions)
            results["right_given"] += count_right(given, questions)
        general = library.ask(base, tokenizer, [Question(each) for each in GENERAL])
        results["general"] = len(GENERAL)
        results["general_by_words"] = sum(map(bool, library.route(GENERAL)))
        results["general_by_a_memory"] = sum(bool(each.memories) for each in general)
    return results


def tabulate(rows: list[dict[str, Any]]) -> str:
    """Return a row a size, the mean over the seeds."""
    head = [
        "memories",
        "people: right memory",
        "pages: right memory",
        "strangers: a memory",
        "general: a memory",
        "ms",
    ]
    keys = ("people_right", "pages_right", "strangers_routed", "general_routed")
    table = []
    for size in dict.fromkeys(row["memories"] for row in rows):
        group = [row for row in rows if row["memories"] == size]
        means = [
            np.mean([row[key] for row in group]) if group[0][key] is not None else None
            for key in keys
        ]
        figures = ["" if mean is None else f"{100 * mean:.1f}%" for mean in means]
        seconds = np.mean([row["seconds_a_question"] for row in group])
        table.append([str(size), *figures, f"{1000 * seconds:.1f}"])
    return make_table(head, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="studied memories")
    parser.add_argument(
        "--questions",
        type=Path,
        nargs="*",
        default=[],
        help="JSON Lines, a file for each of --pages",
    )
    parser.add_argument("--study", type=int, default=0, help="study so many people, and ask")
    parser.add_argument(
        "--ask", action="store_true", help="ask the pages' questions and general ones"
    )
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = (
        load_json(arguments.out)
        if arguments.out.exists()
        else {"machine": describe_machine(torch.device("cpu"))}
    )
    if arguments.study:
        base, tokenizer = load_base(arguments.model)
        people = make_people(arguments.study, arguments.seed)
        if arguments.passes:
            results["answers"] = measure_answers(
                base, tokenizer, people, arguments.passes, arguments.seed
            )
        else:
            results["found"] = measure_found(base, tokenizer, people)
        print(results)
    elif arguments.ask:
        results["pages"] = measure_pages(
            *load_base(arguments.model), arguments.pages, arguments.questions
        )
        print(results["pages"])
    else:
        pages = [
            (list_passages(memory), [each.question for each in load_questions(file)])
            for memory, file in zip(arguments.pages, arguments.questions, strict=True)
        ]
        results["routing"] = [
            measure_routing(size, seed, pages) for size in SIZES for seed in SEEDS
        ]
        print(tabulate(results["routing"]))
    write_json(arguments.out, results)


if __name__ == "__main__":
    main()
