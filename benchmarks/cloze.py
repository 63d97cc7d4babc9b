"""The cloze of LoCoMo: how well a model predicts gold answers inside their own turns, with nothing else in context.

    python benchmarks/cloze.py locomo10.json --conversations conv-26,conv-30 --methods lora,locas-glu \
        --set readings=3 window=128 stride=64 --out cloze

Two measures, also for models too small to answer questions: the nats a token that a memory saves on these spans, with
the right memory and with the one of another conversation; and the share of spans with a lower nll a token than three
other spans of the same conversation. The processes of `accelerate launch` share a run; the same command goes on with
it.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from measuring import encode_pair, make_table
from plotting import GREY, label_axes, make_figure, save_figure
from torch import nn

from locas_peft.asking.scoring import score_targets
from locas_peft.bases import load_base
from locas_peft.evaluation import Run, Unit, choose_conversations, load_locomo
from locas_peft.evaluation.conversations import Conversation, dialogue_lines
from locas_peft.evaluation.f1 import ADVERSARIAL
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.memories import memory_attached
from locas_peft.stages import ReadSettings, complete_all
from locas_peft.tables import Sheet, format_mean, format_percent, to_number
from locas_peft.text import digest_json, tokenize

BASE = "none"
OTHERS = 3
"""So many other spans are compared with each one: a quarter of all spans come first by chance."""


@dataclass(frozen=True)
class AnswerSpan:
    """A gold answer in its turn, of a question's `index` and `category` (the first one, if several have this answer).

    `prompt` is "Speaker: " and the turn's text up to the span, `text` the span as written there; `others` are at most
    three other spans of the conversation.
    """

    sample_id: str
    dia_id: str
    index: int
    category: int
    prompt: str
    text: str
    others: tuple[str, ...] = ()


def find_spans(conversation: Conversation, seed: int = 0) -> list[AnswerSpan]:
    """Find the gold answers that occur word for word in their evidence turns, in any case.

    For category 1 each item of the comma-separated list is searched. Category 5 is left out: its answers are traps. A
    place in a turn counts once, even if it answers several questions. The other spans are drawn by `seed`.
    """
    found: dict[tuple[str, int, int], AnswerSpan] = {}
    turns, sample_id = conversation.turns, conversation.sample_id
    for question in conversation.questions:
        if question.category == ADVERSARIAL:
            continue
        for turn in (turns[dia_id] for dia_id in question.evidence if dia_id in turns):
            text = " ".join(turn.text.split())
            items = question.answer.split(",") if question.category == 1 else [question.answer]
            for item in filter(None, (" ".join(item.split()).rstrip(".") for item in items)):
                if match := re.search(rf"(?<!\w){re.escape(item)}(?!\w)", text, re.IGNORECASE):
                    prompt = f"{turn.speaker}: {text[: match.start()]}"
                    span = AnswerSpan(
                        sample_id, turn.dia_id, question.index, question.category, prompt, match[0]
                    )
                    found.setdefault((turn.dia_id, *match.span()), span)
    texts = sorted({span.text for span in found.values()})
    spans = []
    for key, span in found.items():
        others = [text for text in texts if text.casefold() != span.text.casefold()]
        draw = random.Random(f"{seed}/{sample_id}/{key}")
        spans.append(replace(span, others=tuple(draw.sample(others, min(OTHERS, len(others))))))
    return spans


def score_spans(
    model: nn.Module, tokenizer, spans: Sequence[AnswerSpan], *, batch_tokens: int = 4096
) -> list[dict[str, Any]]:
    """Score spans, and the other spans of each one after the same prompt; return one record a span.

    It has the span's fields, `nll_per_token` and `others_nll_per_token` in nats, the number of its `tokens`, and
    whether it is `first`: below all the others.
    """
    pairs = [
        encode_pair(tokenizer, span.prompt, text)
        for span in spans
        for text in (span.text, *span.others)
    ]
    scores = iter(score_targets(model, pairs, batch_tokens=batch_tokens))
    records = []
    for span in spans:
        own, *others = (next(scores) for _ in (span.text, *span.others))
        nats = [other.per_token for other in others]
        scored = {
            "nll_per_token": own.per_token,
            "others_nll_per_token": nats,
            "tokens": own.tokens,
        }
        records.append(
            {**asdict(span), **scored, "first": all(own.per_token < other for other in nats)}
        )
    return records


def gains(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> list[float]:
    """Return the nats a token that each span costs less than in records of the same spans by another model."""
    return [
        old["nll_per_token"] - new["nll_per_token"]
        for new, old in zip(records, reference, strict=True)
    ]


def firsts(records: Sequence[dict[str, Any]]) -> list[float]:
    """Return 1 for each span that comes first, 0 for each that does not; spans without others are left out."""
    return [float(record["first"]) for record in records if record["others"]]


def run_cloze(run: Run, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Score the spans of conversations under the base, and each method's memory of the right and a wrong one."""
    folder, groups = run.out / "cloze", {"right": conversations}
    if len(conversations) > 1:
        groups["wrong"] = [conversations[-1], *conversations[:-1]]
    texts = {
        one.sample_id: tokenize(run.tokenizer, "\n".join(dialogue_lines(one)))
        for one in conversations
    }

    def score(conversation: Conversation, memory: Path | None) -> list[dict[str, Any]]:
        with (
            nullcontext(run.base) if memory is None else memory_attached(run.base, memory) as model
        ):
            return score_spans(model, run.tokenizer, find_spans(conversation))

    scored = {
        (BASE, "none"): [
            Unit(folder / f"{one.sample_id}.json", partial(score, one, None))
            for one in conversations
        ]
    }
    for method, settings in run.methods.items():
        readings = {
            name: run.learning(ids, settings, folder / "memories" / method / f"{name}.json")
            for name, ids in texts.items()
        }
        for group, owners in groups.items():
            units = scored[method, group] = []
            for one, owner in zip(conversations, owners, strict=True):
                reading = readings[owner.sample_id]
                path = folder / method / f"{one.sample_id}.memory-{owner.sample_id}.json"
                units.append(Unit(path, partial(score, one, reading.memory), needs=reading))
    units = [unit for row in scored.values() for unit in row]
    head = run.make(
        "cloze",
        units,
        conversations={one.sample_id: digest_json(asdict(one)) for one in conversations},
    )
    records = {
        row: [record for unit in row_units for record in unit.load()]
        for row, row_units in scored.items()
    }
    figures = {**head, **summarize(records)}
    run.save("cloze", figures)
    return figures


def summarize(spans: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of the records of each method and group: "none", "right" and "wrong" memories."""
    base, methods = spans[BASE, "none"], {}
    contrasts: dict[
        str, list[float]
    ] = {}  # each method's gains of the right memory over the wrong one
    for (method, group), records in spans.items():
        if method != BASE:
            found = {f"gain_{group}": gains(records, base), f"first_{group}": firsts(records)}
            methods.setdefault(method, {}).update(
                {name: mean_interval(values) for name, values in found.items()}
            )
        if group == "wrong":
            right = spans[method, "right"]
            contrasts[method] = gains(right, records)
            methods[method]["right_minus_wrong"] = mean_interval(contrasts[method])
    differences = []
    for number, one in enumerate(contrasts):
        for other in list(contrasts)[:number]:
            gaps = [a - b for a, b in zip(contrasts[one], contrasts[other], strict=True)]
            differences.append(
                {"method": one, "against": other, "right_minus_wrong": mean_interval(gaps)}
            )
    first = {"first": mean_interval(firsts(base))}
    return {"spans": len(base), "base": first, "methods": methods, "differences": differences}


def tabulate(cloze: dict[str, Any]) -> list[Sheet]:
    """Return the tables: the gains, and their differences between methods."""
    keys = ("gain_right", "gain_wrong", "right_minus_wrong", "first_right", "first_wrong")
    formats = {key: format_percent if key.startswith("first") else format_mean for key in keys}
    rows = [["base", "", "", "", format_percent(cloze["base"]["first"]), ""]]
    for method, found in cloze["methods"].items():
        rows.append([method, *(form(found.get(key)) for key, form in formats.items())])
    headers = [
        "memory",
        "gain",
        "of a wrong one",
        "right - wrong",
        "first, %",
        "with a wrong one, %",
    ]
    sheets = [Sheet(f"LoCoMo cloze: nats a token, {cloze['spans']} spans", headers, rows)]
    rows = [
        [f"{d['method']} - {d['against']}", format_mean(d["right_minus_wrong"])]
        for d in cloze["differences"]
    ]
    return [*sheets, Sheet("Difference of right - wrong, nats a token", ["methods", "mean"], rows)]


def draw(cloze: dict[str, Any], path: Path) -> None:
    """Draw the gains, with each conversation's own memory and with another one's, into a PNG file."""
    methods = {
        name: found for name, found in cloze["methods"].items() if "right_minus_wrong" in found
    }
    figure, axes = make_figure()
    bars = (
        (-0.2, "gain_right", "C0", "its own memory"),
        (0.2, "gain_wrong", GREY, "another one's"),
    )
    for offset, key, colour, label in bars:
        means = [found[key] for found in methods.values()]
        errors = [
            [m["mean"] - to_number(m["low"]) for m in means],
            [to_number(m["high"]) - m["mean"] for m in means],
        ]
        positions = [number + offset for number in range(len(means))]
        axes.bar(
            positions,
            [m["mean"] for m in means],
            0.38,
            yerr=errors,
            color=colour,
            capsize=4,
            label=label,
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(methods)), list(methods))
    label_axes(axes, "", "nats a token gained on spans", "LoCoMo cloze")
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument(
        "--conversations", help="by sample_id, separated by commas; all where not given"
    )
    parser.add_argument("--methods", default="lora,locas-glu")
    parser.add_argument("--model", default="locas_peft/tinybook-glu")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the reading"
    )
    parser.add_argument("--out", type=Path, default=Path("cloze"))
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    names = arguments.conversations and arguments.conversations.split(",")
    conversations = choose_conversations(load_locomo(arguments.data)[0], names)
    given = dict(each.split("=", 1) for each in arguments.set)
    settings = ReadSettings(
        **{name: parse(value) for name, value in given.items()}, model=arguments.model
    )
    base, tokenizer = load_base(arguments.model)
    methods = complete_all(settings, arguments.methods.split(","), base)
    figures = run_cloze(
        Run(base, tokenizer, methods, arguments.out, {"model": arguments.model}), conversations
    )
    for sheet in tabulate(figures):
        print(f"**{sheet.title}**\n\n{make_table(sheet.headers, sheet.rows)}", end="\n\n")
    if arguments.plot is not None:
        draw(figures, arguments.plot)


def parse(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value


if __name__ == "__main__":
    main()
