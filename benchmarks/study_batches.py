"""One step of a study on lessons of two documents, compared with a step for each: does a mixed batch pay?

    python benchmarks/study_batches.py                        # SmolLM2, one thread, minutes
    python benchmarks/study_batches.py --device cuda

A lesson is a question and the sentence of a page that answers it. A step is a forward pass, a backward pass and that
of AdamW, as in a self-study: 8 lessons of one document, with the tokens that all prompts share computed once
("8, shared") or in each row ("8"); 16 of one document; and 16 of two documents, each row with its own memory by
`adapter_names` ("8 + 8"). They take turns. The figures are medians of a step's processor time (wall time on a GPU) a
lesson.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from os.path import commonprefix

import torch
from measuring import describe_machine, make_table, wait
from peft import get_peft_model
from torch.nn.functional import cross_entropy

from locas_peft import LocasConfig, calibrate, demo
from locas_peft.asking import encode_question
from locas_peft.asking.continuation import begin_rows, pad_left
from locas_peft.asking.prompts import encode_answer
from locas_peft.bases import load_base
from locas_peft.model import CausalLM
from locas_peft.text import load_text

PAGES = ("expedition", "ferry")
LESSONS = 8

Row = tuple[list[int], list[int]]
"""A prompt and its answer, as token ids."""


def make_rows(tokenizer, page: str) -> list[Row]:
    """Return a lesson for each of a page's first sentences, about its first words."""
    text = " ".join(load_text(demo.PAGES / f"{page}.txt").split())
    sentences = [each.strip() + "." for each in text.split(". ") if len(each.split()) > 5]
    questions = [
        f"What does the text say about {' '.join(each.split()[2:5])}?" for each in sentences
    ]
    pairs = list(zip(questions, sentences, strict=True))
    pairs = (pairs * (2 * LESSONS // len(pairs) + 1))[: 2 * LESSONS]
    return [
        (encode_question(tokenizer, question), encode_answer(tokenizer, answer))
        for question, answer in pairs
    ]


def step(
    host: CausalLM,
    rows: list[Row],
    optimizer,
    adapters: list[str] | None = None,
    shared: bool = False,
) -> None:
    """Take a step on some lessons, with the active memory or one a row."""
    inputs, longest = (
        [[*prompt, *answer][:-1] for prompt, answer in rows],
        max(len(answer) for _, answer in rows),
    )
    begun = commonprefix([prompt[:-1] for prompt, _ in rows])
    if shared:
        batch = begin_rows(host, inputs, [(len(begun), range(len(rows)))], 0)
    else:
        batch = pad_left(inputs, 0, host.device)
    logits = host.logits(count=longest, adapters=adapters, **batch)
    losses = [
        cross_entropy(each[-len(answer) :].float(), torch.tensor(answer, device=host.device))
        for each, (_, answer) in zip(logits, rows, strict=True)
    ]
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--r", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base, tokenizer = load_base(arguments.model, arguments.dtype, arguments.device)
    model = get_peft_model(base, LocasConfig(r=arguments.r), adapter_name=PAGES[0])
    model.add_adapter(PAGES[1], LocasConfig(r=arguments.r))
    rows = {page: make_rows(tokenizer, page) for page in PAGES}
    optimizers = {}
    for page in reversed(PAGES):
        calibrate(model, [torch.tensor([rows[page][0][1]], device=base.device)], page)
        model.set_adapter(page)
        own = [weight for name, weight in model.named_parameters() if weight.requires_grad]
        optimizers[page] = torch.optim.AdamW(own, lr=1e-4, weight_decay=0.0)
    host, (one, other) = CausalLM(model.eval()), PAGES
    both = torch.optim.AdamW(
        [weight for each in optimizers.values() for weight in each.param_groups[0]["params"]]
    )

    def mixed() -> None:
        for weight in both.param_groups[0]["params"]:
            weight.requires_grad_(True)
        names = [one] * LESSONS + [other] * LESSONS
        step(host, rows[one][:LESSONS] + rows[other][:LESSONS], both, names)
        for weight in optimizers[other].param_groups[0]["params"]:
            weight.requires_grad_(False)

    ways = {
        "8, shared": (
            LESSONS,
            lambda: step(host, rows[one][:LESSONS], optimizers[one], shared=True),
        ),
        "8": (LESSONS, lambda: step(host, rows[one][:LESSONS], optimizers[one])),
        "16": (2 * LESSONS, lambda: step(host, rows[one], optimizers[one])),
        "8 + 8": (2 * LESSONS, mixed),
    }
    clock = time.perf_counter if base.device.type == "cuda" else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, (lessons, act) in ways.items():
            wait(base.device)
            began = clock()
            act()
            wait(base.device)
            if number:  # the first round warms up
                taken[name].append(1000 * (clock() - began) / lessons)
    figures = {
        name: (statistics.median(each), min(each), max(each)) for name, each in taken.items()
    }
    cells = [
        [name, f"{ms:.0f}", f"{least:.0f} to {most:.0f}"]
        for name, (ms, least, most) in figures.items()
    ]
    print(make_table(["lessons of a step", "ms a lesson", "least to most"], cells))
    print(
        json.dumps(
            {**vars(arguments), **describe_machine(base.device), "steps": figures}, default=str
        )
    )


if __name__ == "__main__":
    main()
