"""Fictional biographies: facts in varied sentences, and questions in two sets of wordings.

    python benchmarks/biographies.py --people 20 --out people

One folder entry a person: `NAME.txt` has six facts, `NAME.exchanges.jsonl` the questions to study (for
`locas study --exchanges-file`), and `NAME.questions.jsonl` the same facts asked in wordings that are not studied.
People share first names, last names, towns and trades, so that no single word tells who is meant.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

# fmt: off
FIRST = ["Anselm", "Brida", "Corvin", "Dalia", "Edric", "Fenna", "Gerold", "Hedda", "Ivo", "Jorun", "Kasimir", "Lisbet"]
LAST = ["Aldane", "Brackwater", "Corrow", "Dunmere", "Ellisk", "Farrand", "Grole", "Hestel", "Immers", "Jarrow", "Kestle", "Lonnick"]
FURTHER_LAST = ["Marwick", "Norvale", "Ostrand", "Pellow"]  # of those beyond the first 144
TOWNS = ["Adelsk", "Brenmouth", "Carrowby", "Dravik", "Eastmere", "Fallowick", "Gorrin", "Hexholm", "Issel", "Jutterby", "Korsund", "Lindmark"]
TRADES = ["clockmaker", "baker", "surveyor", "beekeeper", "printer", "glassblower", "cartographer", "saddler", "tailor", "ropemaker", "brewer", "organist"]
PETS = ["goat", "parrot", "tortoise", "greyhound", "ferret", "donkey", "raven", "hedgehog", "otter", "peacock", "badger", "heron"]
DISHES = ["barley soup", "plum dumplings", "smoked eel", "rye pudding", "pickled beets", "cheese tart", "bean stew", "honey cake"]
# fmt: on
MONTHS = ["January", "March", "April", "June", "August", "September", "October", "December"]


@dataclass(frozen=True)
class Fact:
    """What the text says, what is studied and what is asked; `{}` stands for the person."""

    sentences: tuple[str, ...]
    studied: tuple[str, ...]
    asked: tuple[str, ...]


FACTS = {
    "town": Fact(
        ("{} was born in the town of {value}.", "The birthplace of {} is {value}.", "{} is a native of {value}."),
        ("Where was {} born?", "What is the birthplace of {}?", "In which town was {} born?"),
        ("Which place does {} come from?", "Where did the life of {} begin?"),
    ),
    "year": Fact(
        ("{} was born in {value}.", "The birth of {} fell in the year {value}.", "In {value}, {} was born."),
        ("When was {} born?", "In what year was {} born?", "What is the year of birth of {}?"),
        ("Which year brought the birth of {}?", "What year did {} come into the world?"),
    ),
    "trade": Fact(
        ("{} works as a {value}.", "The trade of {} is that of a {value}.", "{} earns a living as a {value}."),
        ("What does {} do for a living?", "What is the trade of {}?", "What does {} work as?"),
        ("Which profession does {} have?", "How does {} make money?"),
    ),
    "pet": Fact(
        ("{} keeps a {value} at home.", "A {value} shares the house of {}.", "The pet of {} is a {value}."),
        ("Which animal does {} keep?", "What is the pet of {}?", "What animal lives with {}?"),
        ("Which creature shares a home with {}?", "What kind of animal belongs to {}?"),
    ),
    "dish": Fact(
        ("The favourite dish of {} is {value}.", "{} likes {value} best of all food.", "{} never refuses {value}."),
        ("What is the favourite dish of {}?", "What does {} like to eat best?", "Which food does {} love?"),
        ("Which meal would please {} most?", "What should one cook for {}?"),
    ),
    "month": Fact(
        ("{} travels to the sea every {value}.", "Each {value}, {} spends a week by the sea.",
         "The yearly journey of {} to the sea falls in {value}."),
        ("When does {} travel to the sea?", "In which month does {} go to the sea?", "What month takes {} there?"),
        ("At what time of the year is {} by the sea?", "Which month does {} spend on the coast?"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Person:
    """A person: the name, the text, exchanges to study and questions to ask, as rows of JSON Lines."""

    name: str
    text: str
    exchanges: tuple[dict[str, str], ...]
    questions: tuple[dict[str, str], ...]


def make_people(count: int, seed: int = 0) -> list[Person]:
    """Return so many people, at most one for each pair of names (192)."""
    rng = random.Random(seed)
    pairs, further = (
        [f"{first} {last}" for first in FIRST for last in names] for names in (LAST, FURTHER_LAST)
    )
    names = rng.sample(pairs, min(count, len(pairs))) + rng.sample(
        further, max(count - len(pairs), 0)
    )
    return [_make_person(name, rng) for name in names]


def _make_person(name: str, rng: random.Random) -> Person:
    values = {
        "town": rng.choice(TOWNS),
        "year": str(rng.randrange(1790, 1990)),
        "trade": rng.choice(TRADES),
        "pet": rng.choice(PETS),
        "dish": rng.choice(DISHES),
        "month": rng.choice(MONTHS),
    }
    sentences, exchanges, questions = [], [], []
    for kind, fact in FACTS.items():
        value = values[kind]
        sentence = rng.choice(fact.sentences).replace("{value}", value).replace("{}", name)
        sentences.append(sentence)
        exchanges += [
            {"question": each.replace("{}", name), "answer": sentence} for each in fact.studied
        ]
        questions.append({"question": rng.choice(fact.asked).replace("{}", name), "answer": value})
    return Person(name, " ".join(sentences), tuple(exchanges), tuple(questions))


def write_people(people: list[Person], folder: Path) -> None:
    """Write the three files of each person."""
    folder.mkdir(parents=True, exist_ok=True)
    for person in people:
        (folder / f"{person.name}.txt").write_text(person.text + "\n", encoding="utf-8")
        for kind, rows in (("exchanges", person.exchanges), ("questions", person.questions)):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{person.name}.{kind}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--people", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_people(make_people(arguments.people, arguments.seed), arguments.out)
