"""The paper's table of LoCoMo: questions about a dialogue that a memory has read, by the F1."""

import random
from dataclasses import replace
from typing import Any

from measuring import make_table

from locas_peft.evaluation import Run, run_locomo
from locas_peft.evaluation.conversations import Conversation, load_locomo
from locas_peft.evaluation.f1 import CATEGORIES
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.evaluation.locomo import LocomoPlan
from locas_peft.files import load_json, write_json
from locas_peft.tables import format_mean, format_percent

from .attention import masked_attention
from .bench import Bench
from .pg19 import best_lora
from .rows import DEFAULT_LORA, LOCAS, Row

__all__ = ["fill", "tabulate"]

SETTINGS = ("no-context", "full-context")
SCORES = "locomo-f1.json"
"""The F1 of each question. The predictions quote the data set, and stay out of the repository."""
PAPER_NOTE = (
    "The paper, Qwen3-1.7B-Base, F1 of single-hop, multi-hop, open-domain, temporal, adversarial: "
    "full attention 37.3, 23.8, 14.0, 33.5, -33.0; with TempLoRA 37.7, 23.1, 13.3, 29.1, -31.8; "
    "with Locas 41.6, 25.2, 14.1, 34.1, -28.7. No context 5.6, 4.6, 10.8, 1.3, -5.2; with TempLoRA "
    "5.2, 4.5, 9.3, 1.3, -5.4; with Locas 6.8, 8.4, 10.6, 4.3, -5.9."
)


def _list_rows(bench: Bench) -> dict[str, Row]:
    """Return the methods that read a dialogue, by their names in files."""
    rows = {"lora-default": DEFAULT_LORA}
    best = best_lora(bench, make=True)
    if best is not None:
        rows["lora-best"] = best
    if bench.is_gated:
        rows["locas"] = LOCAS
    return rows


def load_conversations(bench: Bench) -> list[Conversation]:
    """Load the first conversations of the release, each with the questions of the scale."""
    files = sorted((bench.data / "locomo").glob("*.json"))
    if not files:
        where = str(bench.data / "locomo")
        raise FileNotFoundError(f"--data must hold LoCoMo, got no .json file in {where!r}: add it")
    conversations, _ = load_locomo(files[0])
    chosen = []
    for conversation in conversations[: bench.scale.conversations]:
        chosen.append(_draw_questions(conversation, bench.scale.locomo_questions))
    return chosen


def _draw_questions(conversation: Conversation, count: int | None) -> Conversation:
    """Draw so many questions of each category, in their order; all where `count` is None."""
    if count is None:
        return conversation
    random_state = random.Random(0)
    indices = set()
    for category in CATEGORIES:
        own = [item.index for item in conversation.questions if item.category == category]
        indices.update(random_state.sample(own, min(count, len(own))))
    questions = tuple(item for item in conversation.questions if item.index in indices)
    return replace(conversation, questions=questions)


def fill(bench: Bench) -> None:
    """Let each method read the dialogues, and ask it with the dialogue in context and without."""
    methods = {}
    for name, row in _list_rows(bench).items():
        methods[name] = replace(bench.settings(row), model=bench.host)
    run = Run(bench.base, bench.tokenizer, methods, bench.folder, common=_describe(bench))
    plan = LocomoPlan(SETTINGS, wrong_memory=False)
    with masked_attention(bench.base):
        run_locomo(run, load_conversations(bench), plan)
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for method in ("none", *methods):
        scores[method] = {setting: _load_f1(bench, method, setting) for setting in SETTINGS}
    write_json(bench.folder / SCORES, scores)


def _describe(bench: Bench) -> dict[str, Any]:
    return {"model": bench.host, "dtype": bench.dtype_name}


def tabulate(bench: Bench) -> str:
    """Return the F1s by category, and the paired differences from the base."""
    scores_file = bench.folder / SCORES
    # The scores are written last.
    if not scores_file.exists():
        return ""
    figures = load_json(bench.folder / "locomo.json")
    scores = load_json(scores_file)
    names = [*CATEGORIES.values(), "answerable", "abstention"]
    lines = []
    for setting in SETTINGS:
        base = scores["none"][setting]
        for method, groups in figures["answers"].items():
            if setting not in groups:
                continue
            (means,) = groups[setting].values()
            cells = [f"{_label(figures['methods'].get(method))}, {setting}"]
            cells += [format_percent(means.get(name)) for name in names]
            own = scores[method][setting]
            differences = [own[key] - base[key] for key in base if key in own]
            change = mean_interval(differences)
            cells.append("-" if method == "none" else format_mean(change, 2, 100.0))
            lines.append(cells)
    conversations = ", ".join(figures["conversations"])
    count = len(scores["none"][SETTINGS[0]])
    note = (
        f"F1 in %, by LoCoMo's rules for each category, with 95% intervals over questions; "
        f"conversations {conversations}, {count} questions with an answer, {figures['dtype']}. "
        "The last column is the paired change of all categories but the adversarial one. Greedy answers of at most 32 tokens."
    )
    table = make_table(["", *names, "change from the base"], lines)
    return f"{note}\n\n{table}\n\n{PAPER_NOTE}"


def _label(settings: dict[str, Any] | None) -> str:
    """Return the name of a method in the table, by the settings of its readings; None is the base.

    The rate is the one that was used: a sweep of this folder may be missing or newer.
    """
    if settings is None:
        return "base"
    name = "TempLoRA" if settings["method"] == "lora" else "Locas"
    return f"{name} r={settings['r']} at {settings['learning_rate']:g}"


def _load_f1(bench: Bench, method: str, setting: str) -> dict[str, float]:
    """Return the F1 of each question that has an answer, by conversation and index."""
    folder = bench.folder / "locomo" / "predictions" / method
    scores = {}
    for file in sorted(folder.glob(f"*.{setting}.*.json")):
        for record in load_json(file):
            if CATEGORIES[record["category"]] != "adversarial":
                scores[f"{record['sample_id']} {record['index']}"] = record["f1"]
    return scores
