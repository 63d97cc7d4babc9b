"""What self-study costs and gives: the gap to the page in context that each adapter closes, against processor time.

    python benchmarks/selfstudy.py --model smollm2 --out benchmarks/results/selfstudy.json --plot gap-compute.png

Pages: the demo's, on which the settings were chosen, and those of the folder `pages`. The model writes the exchanges
of a page once, for all methods. The gap is measured in nats a token of the gold answers: 0 without the page, 1 with
the page in context. "Recited" is the gap that the base closes with what the memory recites freely for each question,
and "direct" what the memory closes without reciting. The first is also measured in the middle of a study, and after
some of the readings of the method that only reads. At the end both are measured, for the page's own questions and for
those of the next page (wrong memory). The questions are asked in both ways, and the KL from the base is measured on
the base's own answers to questions about other things. A page with results is not read again.

    python benchmarks/selfstudy.py --seeds 0,1,2 --pages expedition,ferry,foundry,garden,theatre --out fresh.json

With seeds, each page is studied once a seed with Locas's defaults, exchanges included, and only its own questions are
asked. Beside it stand the page in context; BM25: its best sentence as the answer, the best one where each has the
questions that the study wrote about it, and its best three in the base's context; and the sentence after which the
question is the likeliest for the base. A second table has short answers, which the base gives with the best passages
of each in its context: how many have the gold phrase, how many are the phrase alone, and their F1.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import answer_briefly, describe_machine, is_exact, make_table, recite

from locas_peft import demo
from locas_peft.asking import (
    SHORT_PROMPT,
    Answer,
    Answerer,
    Question,
    count_right,
    encode_answer,
    encode_question,
    load_questions,
)
from locas_peft.asking.prompts import WRITE_PROMPT, encode_prompt
from locas_peft.asking.scoring import score_targets
from locas_peft.bases import load_base
from locas_peft.evaluation.drift import measure_drift, write_own_answers
from locas_peft.evaluation.f1 import load_stemmer, token_f1
from locas_peft.exchanges import EXCHANGES, PER_PASSAGE, load_exchanges, write_exchanges
from locas_peft.files import load_json, write_json
from locas_peft.library import score_by_words
from locas_peft.library.routing import join_exchanges
from locas_peft.memories import memory_attached
from locas_peft.selfstudy import StudyStep, split_passages
from locas_peft.stages import Place, ReadSettings, StudySettings, parse_method, read, study
from locas_peft.text import NAME, load_text, tokenize
from locas_peft.ttt import Chunk
from locas_peft.tuner import adapters_disabled

DEMO = "lighthouse"
PAGES = (DEMO, "composer", "bee", "orchard", "tram")
READING_ONLY = "locas-glu:reading-only"
METHODS = f"locas-glu,lora@11,{READING_ONLY}"
READINGS = 120  # about the processor time of a study
MEASURED_READINGS = 40
SHORT_CONTEXTS = (1, 3)
"""Passages from which the base answers in a few words."""


class Page:
    """A page with its questions, as prompts without and with the page, and the gold answers."""

    def __init__(self, tokenizer, text: str, questions: list[Question]):
        self.text, self.questions = text, questions
        self.ids = tokenize(tokenizer, text)
        self._tokenizer = tokenizer
        self._golds = [encode_answer(tokenizer, each.answer) for each in questions]

    def measure_base(self, base) -> None:
        self._without, self._within = (
            self._score(base, [text] * len(self.questions)) for text in ("", self.text)
        )

    def recite(self, model) -> list[list[str]]:
        """Let a memory recite passages for each question."""
        return recite(model, self._tokenizer, [each.question for each in self.questions])

    def gap_closed(self, model, recited: list[list[str]] | None = None) -> float:
        """Return the share of the gap in nats a gold token, between without and in context, that a model closes.

        With what its memory has recited for each question, the share that its base closes.
        """
        contexts = ["\n".join(passages) for passages in recited or [[]] * len(self.questions)]
        with adapters_disabled(model) if recited else nullcontext():
            return (self._without - self._score(model, contexts)) / (self._without - self._within)

    def _score(self, model, contexts: list[str]) -> float:
        prompts = [
            encode_question(
                self._tokenizer, asked.question, SHORT_PROMPT, context
            )  # gold answers are phrases
            for asked, context in zip(self.questions, contexts, strict=True)
        ]
        scores = score_targets(
            model, list(zip(prompts, self._golds, strict=True)), batch_tokens=2048
        )
        return sum(score.per_token for score in scores) / len(scores)


def load_page(tokenizer, name: str) -> Page:
    """Load the demo's page, or one of the folder `pages`."""
    if name == DEMO:
        return Page(tokenizer, demo.load_page(), demo.load_page_questions())
    path = demo.PAGES / name
    return Page(
        tokenizer, load_text(path.with_suffix(".txt")), load_questions(path.with_suffix(".jsonl"))
    )


class Curve:
    """What a method has reached after so many processor seconds, without those of measuring."""

    def __init__(self, base, page: Page, before: float):
        self.points: list[dict[str, float]] = []
        self._base, self._page, self._before = base, page, before
        self._began, self._halfway = time.process_time(), False

    def measure(self) -> None:
        now = time.process_time()
        self.add(self.seconds(), self._page.gap_closed(self._base, self._page.recite(self._base)))
        self._began += time.process_time() - now

    def seconds(self) -> float:
        return self._before + time.process_time() - self._began

    def add(self, seconds: float, gap: float) -> None:
        self.points.append({"cpu_seconds": seconds, "gap": gap})

    def after_reading(self, chunk: Chunk) -> None:
        done = chunk.reading + 1
        if chunk.stop == len(self._page.ids) and done % MEASURED_READINGS == 0 and done < READINGS:
            self.measure()

    def after_step(self, step: StudyStep) -> None:
        if step.phase == "learn" and not self._halfway and 2 * step.done >= step.total:
            self._halfway = True
            self.measure()


def study_page(
    base,
    tokenizer,
    page: Page,
    other: Page,
    own_answers: list,
    methods: list[str],
    anchor: float | None,
) -> dict:
    """Measure all methods on one page; return its results."""
    page.measure_base(base)
    other.measure_base(base)
    began, exchanges = time.process_time(), []
    for written in write_exchanges(
        base, tokenizer, split_passages(tokenizer, page.text), PER_PASSAGE
    ):
        exchanges += written.exchanges
    writing = time.process_time() - began
    results: dict[str, Any] = {
        "asked": len(page.questions),
        "kept": len(exchanges),
        "writing_cpu_seconds": writing,
        "right": ask_page(base, tokenizer, page),
        "right_in_context": ask_page(base, tokenizer, page, page.text),
        "methods": {},
    }
    for label in methods:
        studies = label != READING_ONLY
        name, own = parse_method(label.removesuffix(":reading-only"))
        curve = Curve(base, page, writing if studies else 0.0)
        with TemporaryDirectory() as folder:
            memory = Path(folder) / "memory"
            place = Place(out=memory)
            if studies:
                record = study(
                    base,
                    tokenizer,
                    page.ids,
                    StudySettings(method=name, anchor=anchor, **own),
                    place,
                    exchanges=exchanges,
                    on_step=curve.after_step,
                )
            else:
                settings = ReadSettings(method=name, readings=READINGS, anchor=anchor, **own)
                record = read(
                    base,
                    page.ids,
                    settings,
                    place,
                    tokenizer=tokenizer,
                    on_step=curve.after_reading,
                )
            seconds = curve.seconds()
            with memory_attached(base, memory) as model:
                drift = measure_drift(model, own_answers)
                recited = page.recite(model)
                with adapters_disabled(model):
                    contexts = ["\n".join(passages) for passages in recited]
                    answers = answer_briefly(model, tokenizer, page.questions, contexts)
                curve.add(seconds, page.gap_closed(model, recited))
                figures = {
                    "right": ask_page(model, tokenizer, page),
                    "right_recited": count_right(answers),
                    "gap_direct": page.gap_closed(model),
                    "gap_other_page": other.gap_closed(model, other.recite(model)),
                    "gap_other_page_direct": other.gap_closed(model),
                    "kl_nats": drift["kl_per_token"],
                }
        figures |= {"parameters": record.extra_parameters, **curve.points[-1]}
        print(label, figures, flush=True)
        results["methods"][label] = {**figures, "curve": curve.points}
    return results


def repeat_study(
    base, tokenizer, page: Page, settings: StudySettings, own_answers: list
) -> dict[str, Any]:
    """Study one page and ask its questions; return its results."""
    began = time.process_time()
    with TemporaryDirectory() as folder:
        memory = Path(folder) / "memory"
        record = study(base, tokenizer, page.ids, settings, Place(out=memory))
        seconds = time.process_time() - began
        exchanges = load_exchanges(memory / EXCHANGES)
        held = join_exchanges(exchanges)
        with memory_attached(base, memory) as model:
            began = time.process_time()
            right = ask_page(model, tokenizer, page)
            ended = time.process_time()
            short = {"memory": measure_short(model, tokenizer, page, [[]] * len(page.questions), 0)}
            drift = measure_drift(model, own_answers)
    scores = score_by_words(
        [[text] for text in held.values()], [each.question for each in page.questions]
    )
    by_words = [[list(held)[best]] for best in scores.argmax(1)]
    return {
        "right": right,
        "short": short,
        "kl_nats": drift["kl_per_token"],
        "right_by_words": count_first(page, by_words),
        "cpu_seconds": seconds,
        "asking_cpu_seconds": ended - began,
        "kept": record.kept,
        "steps": record.steps,
    }


def measure_retrieval(base, tokenizer, page: Page) -> dict[str, int]:
    """Return how many questions are right with the page in the base's context, with BM25, and by likelihood."""
    sentences = [passage.text for passage in split_passages(tokenizer, page.text)]
    ranked = [rank_sentences(sentences, each.question) for each in page.questions]
    in_context = [
        Answerer(base, tokenizer, context="\n".join(best[:3])).answer([each])[0]
        for each, best in zip(page.questions, ranked, strict=True)
    ]
    nats = [score_question(base, tokenizer, each.question, sentences) for each in page.questions]
    likeliest = [
        [sentences[number] for number in sorted(range(len(row)), key=row.__getitem__)]
        for row in nats
    ]
    short = {
        "none": measure_short(base, tokenizer, page, [[]] * len(nats), 0),
        "page": measure_short(base, tokenizer, page, [[page.text]] * len(nats), 1),
    }
    for count in SHORT_CONTEXTS:
        short[f"bm25, best {count}"] = measure_short(base, tokenizer, page, ranked, count)
        short[f"likelihood, best {count}"] = measure_short(base, tokenizer, page, likeliest, count)
    return {
        "asked": len(page.questions),
        "right_by_likelihood": count_first(page, likeliest),
        "right_in_context": ask_page(base, tokenizer, page, page.text),
        "right_bm25_sentence": count_first(page, ranked),
        "right_bm25_context": count_right(in_context),
        "short": short,
    }


def score_question(model, tokenizer, question: str, passages: list[str]) -> list[float]:
    """Return the negative log-likelihood of a question after each passage, in nats.

    The names of the question stand above the passage, since a passage seldom repeats the name of its subject.
    """
    target, names = (
        encode_answer(tokenizer, question),
        ", ".join(dict.fromkeys(NAME.findall(question))),
    )
    requests = [
        f"{names}\n\n{WRITE_PROMPT.format(passage=passage)}".strip() for passage in passages
    ]
    scores = score_targets(
        model, [(encode_prompt(tokenizer, request), target) for request in requests]
    )
    return [score.nll_nats for score in scores]


def count_first(page: Page, ranked: list[list[str]]) -> int:
    """Return how many of a page's questions the first of the passages ranked for each answers right."""
    pairs = zip(page.questions, ranked, strict=True)
    return count_right([Answer(question, best[0]) for question, best in pairs])


def measure_short(
    model, tokenizer, page: Page, passages: list[list[str]], count: int
) -> dict[str, float]:
    """Let a model answer in a few words from the first passages for each question; return its figures."""
    contexts = ["\n".join(each[:count]) for each in passages]
    answers = answer_briefly(model, tokenizer, page.questions, contexts)
    texts = [answer.text for answer in answers]
    golds = [asked.answer for asked in page.questions]
    return {
        "right": count_right(answers),
        "exact": sum(map(is_exact, texts, golds)),
        "f1": 100 * sum(map(token_f1, texts, golds)) / len(golds),
    }


def rank_sentences(
    sentences: list[str], question: str, k1: float = 1.2, b: float = 0.75
) -> list[str]:
    """Return sentences by their BM25 score for a question, the best first; case-folded words, no stemming."""
    counts = [Counter(re.findall(r"\w+", sentence.casefold())) for sentence in sentences]
    mean_length = sum(each.total() for each in counts) / len(counts)

    def score(words: Counter) -> float:
        total = 0.0
        for word in set(re.findall(r"\w+", question.casefold())):
            having = sum(word in each for each in counts)
            weight = math.log(1 + (len(counts) - having + 0.5) / (having + 0.5))
            saturation = k1 * (1 - b + b * words.total() / mean_length)
            total += weight * words[word] * (k1 + 1) / (words[word] + saturation)
        return total

    order = sorted(range(len(sentences)), key=lambda number: -score(counts[number]))
    return [sentences[number] for number in order]


def ask_page(model, tokenizer, page: Page, context: str = "") -> int:
    """Return how many of a page's questions a model answers right."""
    return count_right(Answerer(model, tokenizer, context=context).answer(page.questions))


def tabulate(pages: dict[str, dict[str, Any]]) -> str:
    """Return a row a page and method."""
    head = ["page, method", "parameters", "right", "right, recited", "gap, recited", "direct"]
    head += ["other page's, recited", "direct", "KL, nats", "processor s"]
    rows = []
    for name, page in pages.items():
        asked = page["asked"]
        rows.append(
            [f"{name}: none", "0", f"{page['right']} of {asked}", "", "", "0", "", "0", "0", "0"]
        )
        rows.append(
            [
                f"{name}: in context",
                "0",
                f"{page['right_in_context']} of {asked}",
                "",
                "",
                "1",
                *[""] * 4,
            ]
        )
        for label, row in page["methods"].items():
            gaps = ("gap", "gap_direct", "gap_other_page", "gap_other_page_direct")
            figures = [f"{row[key]} of {asked}" for key in ("right", "right_recited")]
            figures += [
                *(f"{row[key]:.2f}" for key in gaps),
                f"{row['kl_nats']:.3f}",
                f"{row['cpu_seconds']:.0f}",
            ]
            rows.append([f"{name}: {label}", f"{row['parameters']:,}", *figures])
    return make_table(head, rows)


def tabulate_seeds(pages: dict[str, dict[str, Any]]) -> str:
    """Return a row a page, and the means."""
    head = [
        "page",
        "studied, a seed",
        "mean, studied",
        "mean, by words and the study's questions",
        "in context",
        "BM25's sentence",
        "BM25's three in context",
        "by the question's likelihood",
        "KL, nats",
        "processor s",
    ]
    keys = ("right_in_context", "right_bm25_sentence", "right_bm25_context", "right_by_likelihood")
    measured = ("kl_nats", "cpu_seconds")
    rows, figures = [], []

    def end_of(mean: list[float]) -> list[str]:
        return [f"{mean[6]:.3f}", f"{mean[7]:.0f}"]

    for name, page in pages.items():
        runs = list(page["seeds"].values())
        rights = [[run[key] for run in runs] for key in ("right", "right_by_words")]
        mean = [
            *(sum(right) / len(right) for right in rights),
            *(page[key] for key in keys),
            *(sum(run[key] for run in runs) / len(runs) for key in measured),
        ]
        figures.append(mean)
        seeds = ", ".join(map(str, rights[0]))
        rows.append(
            [
                name,
                seeds,
                *(f"{each:.1f}" for each in mean[:2]),
                *map(str, mean[2:6]),
                *end_of(mean),
            ]
        )
    means = [sum(column) / len(column) for column in zip(*figures, strict=True)]
    rows.append(["mean", "", *(f"{mean:.1f}" for mean in means[:6]), *end_of(means)])
    return make_table(head, rows)


def tabulate_short(pages: dict[str, dict[str, Any]]) -> str:
    """Return a row a way to answer in a few words: means over the pages, and over their seeds."""
    found: dict[str, list[list[dict[str, float]]]] = {}  # by the way: of each page, its runs
    for page in pages.values():
        runs = [run["short"] for run in page["seeds"].values() if "short" in run]
        for each in [page["short"], *runs[:1]] if runs else []:
            for way in each:
                found.setdefault(way, []).append(
                    [run[way] for run in (runs if way in runs[0] else [page["short"]])]
                )
    rows = []
    for way, of_pages in found.items():
        means = [
            [sum(run[key] for run in runs) / len(runs) for runs in of_pages]
            for key in ("right", "exact", "f1")
        ]
        rows.append([way, *(f"{sum(mean) / len(mean):.1f}" for mean in means)])
    return make_table(["a few words, from", "right", "exact", "F1"], rows)


def plot(pages: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the share of the gap closed against processor seconds, a panel a page and a line a method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(pages), 3.5), layout="constrained")
    panels = figure.subplots(1, len(pages), sharey=True, squeeze=False)[0]
    for axes, (name, page) in zip(panels, pages.items(), strict=True):
        for label, row in page["methods"].items():
            points = [(point["cpu_seconds"], point["gap"]) for point in row["curve"]]
            axes.plot(*zip(*points, strict=True), marker=".", label=label)
        axes.axhline(1, color="grey", linewidth=0.8, label="page in context")
        axes.set(title=name, xlabel="processor seconds", ylabel="share of the gap closed")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--anchor",
        type=float,
        help="weight of the KL to the base; the method's own where not given",
    )
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--pages", default=",".join(PAGES))
    parser.add_argument("--seeds", help="study each page once a seed, and ask its questions alone")
    parser.add_argument("--method", default="locas-glu", help="with --seeds: the one that studies")
    parser.add_argument(
        "--exchanges", type=int, help="with --seeds: questions a sentence, where not the default"
    )
    parser.add_argument(
        "--passes", type=int, help="with --seeds: how often each is learned, where not the default"
    )
    parser.add_argument("--out", type=Path, default=Path("selfstudy.json"))
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    base, tokenizer = load_base(arguments.model, dtype=arguments.dtype)
    base.eval()
    names = arguments.pages.split(",")
    results = (
        load_json(arguments.out)
        if arguments.out.exists()
        else {"machine": describe_machine(base.device)}
    )
    done = results.setdefault("pages", {})
    load_stemmer()  # a missing package is reported before the work begins
    own_answers = write_own_answers(base, tokenizer)
    if arguments.seeds:
        method, options = parse_method(arguments.method)
        options |= {each: getattr(arguments, each) for each in ("exchanges", "passes", "anchor")}
        options["method"] = method
        for name in names:
            page, figures = load_page(tokenizer, name), done.setdefault(name, {"seeds": {}})
            if "asked" not in figures:
                figures |= measure_retrieval(base, tokenizer, page)
            for seed in arguments.seeds.split(","):
                if seed not in figures["seeds"]:
                    settings = StudySettings(seed=int(seed), **options)
                    figures["seeds"][seed] = repeat_study(
                        base, tokenizer, page, settings, own_answers
                    )
                    print(name, seed, figures["seeds"][seed], flush=True)
                    write_json(arguments.out, results)
        print(tabulate_seeds(done), tabulate_short(done), sep="\n\n")
        return
    methods = arguments.methods.split(",")
    for name in names:
        if name not in done:
            page, other = (
                load_page(tokenizer, each)
                for each in (name, PAGES[PAGES.index(name) - len(PAGES) + 1])
            )
            done[name] = study_page(
                base, tokenizer, page, other, own_answers, methods, arguments.anchor
            )
            write_json(arguments.out, results)
    print(tabulate(done))
    if arguments.plot is not None:
        plot(done, arguments.plot)


if __name__ == "__main__":
    main()
