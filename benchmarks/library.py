"""Routing in a library: which memory a question finds, and what that costs in right answers.

    python benchmarks/library.py --out benchmarks/results/library.json

Nothing is trained: a memory is found by its exchanges, which are made here of people (`biographies.py`), 6, 20 and 50
of them, beside the exchanges in `--pages`, folders of studied memories with a file of questions each. The questions
about people have wordings that no exchange has. Questions about none are those on people who are not in the library,
those of pages that are not, and general ones. The router's threshold was chosen on people of the seeds 100 to 102 and
on the pages lighthouse, composer, bee, orchard and tram; the seeds here are others.

    python benchmarks/library.py --model smollm2 --study 6 --out benchmarks/results/library.json

So many people are studied, a memory each, and one memory of all their texts. All questions are asked with the memory
that the router finds, with the right one, with the one of all texts, and, without a memory, with the three passages in
the context that BM25 finds among all.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from biographies import Person, make_people
from measuring import describe_machine, make_table, study_into

from locas_peft.asking import Answer, Answerer, Question, count_right, load_questions
from locas_peft.bases import load_base
from locas_peft.exchanges import Exchange
from locas_peft.files import load_json, write_json
from locas_peft.library import Library, LibraryAnswerer, score_by_words
from locas_peft.library.routing import LEAST_SCORE, join_exchanges, list_passages
from locas_peft.stages import StudySettings

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
    right = (scores.argmax(1) == owners) & (scores.max(1) >= LEAST_SCORE)
    result = {
        "memories": len(passages),
        "people_right": float(right[owners < count].mean()),
        "pages_right": float(right[owners >= count].mean()) if pages else None,
        "first_right": float((scores.argmax(1) == owners).mean()),
        "seconds_a_question": seconds,
    }
    for kind, questions in about_none.items():
        result[f"{kind}_routed"] = float(
            (score_by_words(passages, questions).max(1) >= LEAST_SCORE).mean()
        )
    return result


def measure_answers(
    base, tokenizer, people: list[Person], passes: int, seed: int
) -> dict[str, Any]:
    """Study people, a memory each and one of all, and return how many answers are right in each way to ask."""
    questions = [Question(**row) for person in people for row in person.questions]
    settings = StudySettings(passes=passes, seed=seed)
    results: dict[str, Any] = {"asked": len(questions)}
    with TemporaryDirectory() as folder:
        library, began = Library(Path(folder) / "each"), time.process_time()
        for person in people:
            exchanges = [Exchange(**row) for row in person.exchanges]
            study_into(library, person.name, base, tokenizer, person.text, exchanges, settings)
        results["cpu_seconds_a_person"] = (time.process_time() - began) / len(people)
        answers = LibraryAnswerer(library, base, tokenizer).answer(questions)
        names = [person.name for person in people for _ in person.questions]
        results["routed_to_the_right"] = sum(
            answer.memories == (name,) for answer, name in zip(answers, names, strict=True)
        )
        results["right_routed"] = count_right(answers)
        given: list[Answer] = []
        for person in people:
            with library.attach(base, person.name) as model:
                asked = [Question(**row) for row in person.questions]
                given += Answerer(model, tokenizer).answer(asked)
        results["right_given"] = count_right(given)
        whole, text = Library(Path(folder) / "one"), "\n".join(person.text for person in people)
        exchanges = [Exchange(**row) for person in people for row in person.exchanges]
        study_into(whole, "all", base, tokenizer, text, exchanges, settings)
        with whole.attach(base, "all") as model:
            of_all = Answerer(model, tokenizer).answer(questions)
        results["right_one_memory_of_all"] = count_right(of_all)
        held = join_exchanges(exchanges)
        sentences = list(held)
        scores = score_by_words(
            [[passage] for passage in held.values()], [asked.question for asked in questions]
        )
        answers = []
        for question, row in zip(questions, scores, strict=True):
            context = "\n".join(sentences[best] for best in row.argsort()[::-1][:3])
            answers += Answerer(base, tokenizer, context=context).answer([question])
        results["right_bm25_and_base"] = count_right(answers)
        results["right_base"] = count_right(Answerer(base, tokenizer).answer(questions))
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
        results["answers"] = measure_answers(
            base, tokenizer, people, arguments.passes, arguments.seed
        )
        print(results)
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
