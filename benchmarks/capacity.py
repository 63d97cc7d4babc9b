"""How many facts a memory holds: fictional biographies, studied by given questions and asked in other words.

    python benchmarks/capacity.py --facts 12,50,200 --plot capacity.png

A memory is taught the facts of some people (`biographies.py`), each fact by three questions. It is asked for each fact
in a wording that was not studied. "Right" is an answer with the fact's value in it. "Recited" is an answer that is the
fact's sentence word for word. An answer that is a sentence about the same person, or the same fact of another person,
shows a wrong choice among passages. "Short" answers have a few words: exact match and F1. Beside the memory's answers
stands the best sentence by BM25, over sentences with the questions that are studied.
Harm is the KL from the base on its answers to questions about other things. `lora@11+0.3` gives LoRA the anchor that
Locas has by default, `locas-glu@64:2e-3` another rate. A row with a result is not measured again; with all measured,
the command still loads the base, and only makes the table and the plot.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from biographies import Person, make_people
from measuring import answer_briefly, describe_machine, is_exact, make_study, make_table

from locas_peft.asking import Answer, Answerer, Question, count_right
from locas_peft.bases import load_base
from locas_peft.evaluation.drift import measure_drift, write_own_answers
from locas_peft.evaluation.f1 import token_f1
from locas_peft.exchanges import Exchange
from locas_peft.files import load_json, write_json
from locas_peft.library import score_by_words
from locas_peft.library.routing import join_exchanges
from locas_peft.memories import memory_attached
from locas_peft.stages import Place, study
from locas_peft.text import tokenize

METHODS = "locas-glu@4,locas-glu@16,locas-glu@64,lora@3+0.3,lora@11,lora@11+0.3"
FACTS_EACH = 6


def measure(
    base,
    tokenizer,
    own_answers: list,
    people: list[Person],
    facts: int,
    method: str,
    passes: int | None,
) -> dict[str, Any]:
    """Teach the first facts of some people with one method, ask for each, and return the figures."""
    exchanges = [Exchange(**row) for person in people for row in person.exchanges][: 3 * facts]
    questions = [Question(**row) for person in people for row in person.questions][:facts]
    sentences = [each.answer for each in exchanges[::3]]
    owners, texts = (
        [number // FACTS_EACH for number in range(facts)],
        [each.question for each in questions],
    )
    settings = make_study(method, passes)
    input_ids = tokenize(tokenizer, " ".join(sentences))
    began = time.process_time()
    with TemporaryDirectory() as folder:
        memory = Path(folder) / "memory"
        record = study(base, tokenizer, input_ids, settings, Place(out=memory), exchanges=exchanges)
        seconds = time.process_time() - began
        with memory_attached(base, memory) as model:
            drift = measure_drift(model, own_answers)["kl_per_token"]
            answers = Answerer(model, tokenizer).answer(questions)
            briefly = answer_briefly(model, tokenizer, questions, [""] * facts)
    short = [answer.text for answer in briefly]
    held = join_exchanges(exchanges)
    scores = score_by_words([[text] for text in held.values()], texts)
    best = [list(held)[number] for number in scores.argmax(1)]
    by_words = [Answer(*pair) for pair in zip(questions, best, strict=True)]
    numbers = {sentence: number for number, sentence in enumerate(sentences)}
    said = [numbers.get(each.text.strip()) for each in answers]
    both = list(enumerate(said))
    golds = [each.answer for each in questions]
    return {
        "parameters": record.extra_parameters,
        "steps": record.steps,
        "right": count_right(answers),
        "recited": sum(number == other for number, other in both),
        "by_words": count_right(by_words),
        "same_person": sum(o is not None and o != n and owners[o] == owners[n] for n, o in both),
        "same_fact": sum(
            o is not None and owners[o] != owners[n] and (o - n) % FACTS_EACH == 0 for n, o in both
        ),
        "short_exact": sum(map(is_exact, short, golds)),
        "short_f1": 100 * sum(map(token_f1, short, golds)) / facts,
        "kl_nats": drift,
        "cpu_seconds": seconds,
    }


def tabulate(rows: dict[str, dict[str, Any]]) -> str:
    """Return a row a number of facts and method."""
    head = [
        "facts",
        "method",
        "parameters",
        "right, %",
        "recited, %",
        "same person, %",
        "same fact of another, %",
    ]
    head += [
        "by words, %",
        "short, exact, %",
        "short, F1",
        "KL, nats",
        "steps",
    ]
    head += ["processor s a fact"]
    lines = []
    for label, row in sorted(rows.items(), key=lambda item: int(item[0].split(" ")[0])):
        facts, method = label.split(" ")
        kinds = (
            "right",
            "recited",
            "same_person",
            "same_fact",
            "by_words",
            "short_exact",
        )
        shares = [f"{100 * row[kind] / int(facts):.0f}" if kind in row else "" for kind in kinds]
        figures = [
            *shares,
            f"{row['short_f1']:.1f}",
            f"{row['kl_nats']:.3f}",
            f"{row['steps']:,}",
            f"{row['cpu_seconds'] / int(facts):.1f}",
        ]
        lines.append([facts, method, f"{row['parameters']:,}", *figures])
    return make_table(head, lines)


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the share of right answers against facts, a line a method; dashed where the number of passes is given."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    points: dict[str, list[tuple[int, float]]] = {}
    for label, row in rows.items():
        facts, method = label.split(",people")[0].split(" ")
        points.setdefault(method, []).append((int(facts), 100 * row["right"] / int(facts)))
    colours = {
        name: f"C{number}"
        for number, name in enumerate(dict.fromkeys(each.split(",")[0] for each in points))
    }
    for method, each in points.items():
        style = {
            "color": colours[method.split(",")[0]],
            "linestyle": "--" if "," in method else "-",
        }
        axes.plot(*zip(*sorted(each), strict=True), marker="o", label=method, **style)
    axes.set(xlabel="facts taught", ylabel="right answers, %", xscale="log", ylim=(0, 100))
    axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--facts", default="12,50,200")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--passes", type=int, help="as for locas study")
    parser.add_argument("--seed", type=int, default=0, help="of the people")
    parser.add_argument("--out", type=Path, default=Path("capacity.json"))
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    base, tokenizer = load_base(arguments.model)
    base.eval()
    results = (
        load_json(arguments.out)
        if arguments.out.exists()
        else {"machine": describe_machine(base.device)}
    )
    rows = results.setdefault("rows", {})
    own_answers = write_own_answers(base, tokenizer)
    for facts in map(int, arguments.facts.split(",")):
        people = make_people(-(-facts // FACTS_EACH), arguments.seed)
        for method in arguments.methods.split(","):
            label = f"{facts} {method}" + (
                "" if arguments.passes is None else f",{arguments.passes}x"
            )
            label += f",people-{arguments.seed}" if arguments.seed else ""
            if label not in rows:
                rows[label] = measure(
                    base, tokenizer, own_answers, people, facts, method, arguments.passes
                )
                print(label, rows[label], flush=True)
                write_json(arguments.out, results)
    print(tabulate(rows))
    if arguments.plot is not None:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
