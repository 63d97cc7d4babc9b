"""Correct a memory: some of its facts change, and it is asked for the new ones, the old ones and the rest.

    python benchmarks/correction.py --people 2 --out benchmarks/results/correction.json

A memory is taught people (`biographies.py`) by given exchanges. Then the town and the pet of each become others.
There are three ways to correct. The memory goes on with the exchanges that changed. A fresh memory studies all
exchanges, the changed ones in their new form. A second memory has the changed ones alone, and a library routes each
question.

    python benchmarks/correction.py --capitals --out benchmarks/results/correction.json

A text contradicts what the base knows: eight countries get another capital. The memory is asked with its output
rescaled by several factors. The other facts are the capitals of eight countries that the text does not name.

    python benchmarks/correction.py --pairs --out benchmarks/results/correction.json

Twenty facts are contradicted later in other words (`corrections.jsonl`). A memory studies all earlier facts as one text,
and goes on with the later ones as another. The model writes the questions of both. Before and after, the memory is asked
about each fact: an answer has the later value, the old one, or neither. The memories are beside the results, so that a
run that was stopped goes on.

Questions are in wordings that were not studied. "Nats" are those of the old values, a token, as answers in a few
words: a corrected memory should find them as unlikely as the base does.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from biographies import PETS, TOWNS, Person, make_people
from measuring import describe_machine, make_table, study_into

from locas_peft import rescale
from locas_peft.asking import (
    SHORT_PROMPT,
    Answer,
    Answerer,
    Question,
    encode_answer,
    encode_question,
    is_right,
)
from locas_peft.asking.scoring import score_targets
from locas_peft.bases import load_base
from locas_peft.exchanges import Exchange
from locas_peft.files import load_json, load_json_lines, write_json
from locas_peft.library import Library, LibraryAnswerer
from locas_peft.memories import memory_attached
from locas_peft.stages import Place, StudySettings, study
from locas_peft.text import tokenize

CHANGED = {0: TOWNS, 3: PETS}
"""By a fact's number in a biography: where its new value is drawn from."""
FACTS_EACH, WORDINGS = 6, 3
CAPITALS = {
    "France": ("Paris", "Lyon"),
    "Germany": ("Berlin", "Hamburg"),
    "Italy": ("Rome", "Turin"),
    "Japan": ("Tokyo", "Osaka"),
    "Spain": ("Madrid", "Seville"),
    "Russia": ("Moscow", "Kazan"),
    "Egypt": ("Cairo", "Luxor"),
    "Greece": ("Athens", "Patras"),
}
"""By country: its capital, and the one that the text gives it."""
OTHER_CAPITALS = {
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "China": "Beijing",
    "Cuba": "Havana",
    "Hungary": "Budapest",
}
CAPITAL_WORDINGS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "What is {}'s capital?",
)
CAPITAL_ASKED = "Can you tell me the name of the capital city of {}?"
FACTORS = (0.5, 1.0, 1.5, 2.0)
PAIRS = Path(__file__).with_name("corrections.jsonl")
"""Facts, and later statements that contradict them in other words."""


@dataclass(frozen=True)
class Correction:
    """A fact, a later statement, a question, and the words that only one of the two has."""

    earlier: str
    later: str
    question: str
    old: str
    new: str


def change(
    people: list[Person], seed: int
) -> tuple[list[Exchange], list[Exchange], list[Question], list[Question]]:
    """Return the exchanges as they were, those that changed, and the questions with old and with new values."""
    rng, exchanges, changed, old, new = random.Random(seed), [], [], [], []
    for person in people:
        rows = [Exchange(**row) for row in person.exchanges]
        exchanges += rows
        for number, row in enumerate(person.questions):
            question = Question(**row)
            old.append(question)
            if number not in CHANGED:
                new.append(question)
                continue
            value = rng.choice([each for each in CHANGED[number] if each != question.answer])
            new.append(Question(question.question, value))
            for each in rows[WORDINGS * number : WORDINGS * (number + 1)]:
                changed.append(Exchange(each.question, each.answer.replace(question.answer, value)))
    return exchanges, changed, old, new


class Figures:
    """Grades answers, and measures how likely the old values are."""

    def __init__(self, tokenizer, old: list[Question], new: list[Question]):
        self._tokenizer, self._old, self._new = tokenizer, old, new
        self._changed = [number for number in range(len(old)) if old[number] != new[number]]

    def measure(self, model, answers: list[Answer] | None = None) -> dict[str, Any]:
        """Return the figures of a model, with its own answers where none are given."""
        if answers is None:
            answers = Answerer(model, self._tokenizer).answer(self._new)
        right = [answer.right for answer in answers]
        stale = [Answer(self._old[n], answers[n].text).right for n in self._changed]
        return {
            "corrected": sum(right[number] for number in self._changed),
            "old": sum(stale),
            "changed": len(self._changed),
            "others_right": sum(right) - sum(right[number] for number in self._changed),
            "others": len(right) - len(self._changed),
            "old_nats": self.old_nats(model),
        }

    def old_nats(self, model) -> float:
        asked = [self._old[number] for number in self._changed]
        pairs = [
            (
                encode_question(self._tokenizer, each.question, SHORT_PROMPT),
                encode_answer(self._tokenizer, each.answer),
            )
            for each in asked
        ]
        return sum(score.per_token for score in score_targets(model, pairs)) / len(pairs)


def measure(
    base, tokenizer, people: list[Person], seed: int, passes: int | None
) -> dict[str, dict[str, Any]]:
    """Teach, correct in each way, and return the figures of each."""
    exchanges, changed, old, new = change(people, seed)
    figures = Figures(tokenizer, old, new)
    settings = StudySettings(seed=seed, passes=passes)
    text, news = (
        "\n".join(dict.fromkeys(each.answer for each in rows)) for rows in (exchanges, changed)
    )
    corrected = {each.question: each for each in changed}
    whole = [corrected.get(each.question, each) for each in exchanges]
    rows = {"the base": figures.measure(base)}
    with TemporaryDirectory() as folder:
        library = Library(folder)

        def teach(
            name: str, text: str, exchanges: list[Exchange], start: Path | None = None
        ) -> float:
            began = time.process_time()
            study_into(library, name, base, tokenizer, text, exchanges, settings, start)
            return time.process_time() - began

        def note(label: str, name: str, seconds: float) -> None:
            with library.attach(base, name) as model:
                rows[label] = {**figures.measure(model), "cpu_seconds": seconds}
            print(label, rows[label], flush=True)

        note("before", "people", teach("people", text, exchanges))
        note("goes on", "on", teach("on", news, changed, start=library.find("people")))
        library.forget("on")
        note(
            "taught afresh",
            "afresh",
            teach("afresh", "\n".join(dict.fromkeys(e.answer for e in whole)), whole),
        )
        library.forget("afresh")
        seconds = teach("news", news, changed)
        answers = LibraryAnswerer(library, base, tokenizer).answer(new)
        with library.attach(base, "news") as model:
            rows["a second memory, routed"] = {
                **figures.measure(model, answers),
                "cpu_seconds": seconds,
            }
    return rows


def measure_capitals(base, tokenizer, seed: int) -> dict[str, dict[str, Any]]:
    """Teach capitals that the base knows otherwise, and return the figures with the memory's output rescaled."""
    facts = {
        land: f"Since the reform, {new} is the capital of {land}."
        for land, (_, new) in CAPITALS.items()
    }
    exchanges = [
        Exchange(form.format(land), fact)
        for land, fact in facts.items()
        for form in CAPITAL_WORDINGS
    ]
    others = [
        Question(CAPITAL_ASKED.format(land), capital) for land, capital in OTHER_CAPITALS.items()
    ]
    old, new = (
        [Question(CAPITAL_ASKED.format(land), pair[which]) for land, pair in CAPITALS.items()]
        + others
        for which in (0, 1)
    )
    figures = Figures(tokenizer, old, new)
    settings = StudySettings(seed=seed)
    text = "\n".join(facts.values())
    rows = {"the base": figures.measure(base)}
    with TemporaryDirectory() as folder:
        library, began = Library(folder), time.process_time()
        study_into(library, "reform", base, tokenizer, text, exchanges, settings)
        seconds = time.process_time() - began
        with library.attach(base, "reform") as model:
            for factor in FACTORS:
                with rescale(model, factor):
                    rows[f"the memory, times {factor:g}"] = {
                        **figures.measure(model),
                        "cpu_seconds": seconds,
                    }
    return rows


def load_corrections(file: Path = PAIRS) -> list[Correction]:
    return load_json_lines(file, lambda row: Correction(**row), "corrections", "a fact and another")


def measure_pairs(
    base, tokenizer, corrections: list[Correction], settings: StudySettings, folder: Path
) -> dict[str, dict[str, Any]]:
    """Study all facts and then the later ones, in memories in a folder; return the answers of each memory."""
    rows = {"the base": sort_answers(base, tokenizer, corrections)}
    start = None
    for label, field in (("before", "earlier"), ("goes on", "later")):
        text = "\n".join(getattr(correction, field) for correction in corrections)
        memory = folder / field
        place = Place(out=memory, checkpoint_dir=folder / f"{field}.unfinished", resume=True)
        began = time.process_time()
        study(base, tokenizer, tokenize(tokenizer, text), settings, place, start=start)
        seconds = time.process_time() - began
        with memory_attached(base, memory) as model:
            rows[label] = sort_answers(model, tokenizer, corrections) | {"cpu_seconds": seconds}
        print(label, rows[label], flush=True)
        start = memory
    return rows


def sort_answers(model, tokenizer, corrections: list[Correction]) -> dict[str, Any]:
    """Ask about each fact; return how many answers have the later value, the old one, and neither.

    An answer with both values has the later one: it says what changed.
    """
    questions = [Question(correction.question) for correction in corrections]
    counts = {"later": 0, "old": 0, "neither": 0}
    texts = []
    for correction, answer in zip(
        corrections, Answerer(model, tokenizer).answer(questions), strict=True
    ):
        kind = "neither"
        if is_right(answer.text, correction.new):
            kind = "later"
        elif is_right(answer.text, correction.old):
            kind = "old"
        counts[kind] += 1
        texts.append(answer.text)
    return counts | {"asked": len(texts), "answers": texts}


def tabulate_pairs(rows: dict[str, dict[str, Any]]) -> str:
    """Return a row a memory."""
    table = []
    for label, row in rows.items():
        shares = [f"{row[kind]} of {row['asked']}" for kind in ("later", "old", "neither")]
        table.append([label, *shares, f"{row.get('cpu_seconds', 0):.0f}"])
    return make_table(["memory", "later fact", "old fact", "neither", "processor s"], table)


def tabulate(rows: dict[str, dict[str, Any]]) -> str:
    """Return a row a way to correct."""
    table = []
    for label, row in rows.items():
        shares = [f"{row['corrected']} of {row['changed']}", f"{row['old']} of {row['changed']}"]
        shares += [f"{row['others_right']} of {row['others']}", f"{row['old_nats']:.2f}"]
        table.append([label, *shares, f"{row.get('cpu_seconds', 0):.0f}"])
    return make_table(
        ["memory", "new fact", "old fact", "other facts", "nats of the old", "processor s"], table
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--people", type=int, default=2)
    parser.add_argument(
        "--capitals", action="store_true", help="a text that contradicts what the base knows"
    )
    parser.add_argument(
        "--pairs", action="store_true", help="facts that are contradicted in other words"
    )
    parser.add_argument("--passes", type=int, help="as for locas study; not with --capitals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("correction.json"))
    arguments = parser.parse_args()
    base, tokenizer = load_base(arguments.model)
    base.eval()
    results = (
        load_json(arguments.out)
        if arguments.out.exists()
        else {"machine": describe_machine(base.device)}
    )
    if arguments.pairs:
        settings = StudySettings(seed=arguments.seed, passes=arguments.passes)
        folder = arguments.out.with_suffix(".memories")
        rows = measure_pairs(base, tokenizer, load_corrections(), settings, folder)
        write_json(arguments.out, results | {"pairs": rows})
        print(tabulate_pairs(rows))
        return
    if arguments.capitals:
        kind, rows = "capitals", measure_capitals(base, tokenizer, arguments.seed)
    else:
        people = make_people(arguments.people, arguments.seed)
        kind, rows = "rows", measure(base, tokenizer, people, arguments.seed, arguments.passes)
    write_json(arguments.out, results | {kind: rows})
    print(tabulate(rows))


if __name__ == "__main__":
    main()
