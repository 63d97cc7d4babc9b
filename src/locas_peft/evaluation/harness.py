"""Tasks of lm-evaluation-harness, such as MMLU, on a model in memory."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..checks import first_line, import_extra
from ..model.causal_lm import count_positions

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

__all__ = ["evaluate_tasks", "find_tasks"]


def find_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> TaskManager:
    """Find tasks or groups of the harness ("mmlu", ...), or of the user's task files (YAML) in `include_path`.

    Return the harness's index of tasks. A task or folder that does not exist is a `ValueError`.
    """
    folder = None if include_path is None else str(include_path)
    if folder is not None:
        if not Path(folder).is_dir():
            raise ValueError(f"include_path must be a folder with task files, got {folder!r}: check the path")
        if set(tasks) <= set((own := _index(folder, defaults=False)).all_subtasks):
            return own
    index = _index(folder, defaults=True)
    for task in tasks:
        if task not in index.all_tasks:
            near = difflib.get_close_matches(task, index.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "see `lm-eval ls tasks` for its tasks"
            raise ValueError(f"task must be one that lm-eval knows, got {task!r}: {hint}")
    return index


@cache
def _index(include_path: str | None, defaults: bool) -> TaskManager:
    """Make the harness's index; with its own tasks it reads thousands of files, so once a process."""
    return import_extra("lm_eval.tasks").TaskManager(include_path=include_path, include_defaults=defaults)


def evaluate_tasks(
    model: nn.Module,
    tokenizer,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Run tasks of lm-evaluation-harness (see `find_tasks`) on a model in evaluation mode, with or without a memory.

    `limit` is the number of documents of each task, from the first; `seed` is that of the choice of examples. A task
    that cannot be loaded is a `ValueError`. Return each task's measures by the harness's names.
    """
    index = find_tasks(tasks, include_path)
    options = {"backend": "causal", "batch_size": batch_size, "max_length": count_positions(model)}
    host = import_extra("lm_eval.models.huggingface").HFLM(pretrained=model, tokenizer=tokenizer, **options)
    seeds = {f"{name}_seed": seed for name in ("random", "numpy_random", "torch_random", "fewshot_random")}
    options = {"limit": limit, "bootstrap_iters": 1000, "log_samples": False, **seeds}
    try:
        found = import_extra("lm_eval").simple_evaluate(host, tasks=list(tasks), task_manager=index, **options)
    except (OSError, KeyError) as error:
        reason, remedy = f"{type(error).__name__}: {first_line(error)[:200]}", "check the network or the task's files"
        raise ValueError(f"task {', '.join(tasks)} cannot be loaded ({reason}): {remedy}") from error
    figures: dict[str, dict[str, Any]] = {}
    for task, measures in found["results"].items():
        numbers = {name: value for name, value in measures.items() if isinstance(value, (int, float))}
        figures[task] = {name.removesuffix(",none").replace(",", " "): value for name, value in numbers.items()}
    return figures
