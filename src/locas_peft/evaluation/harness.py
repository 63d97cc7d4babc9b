"""Tasks of lm-evaluation-harness, such as MMLU, on a model in memory."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..model.causal_lm import count_positions
from .extras import import_extra

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

__all__ = ["evaluate_tasks", "find_tasks"]


def find_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> TaskManager:
    """Find tasks by their names, before any work is done for them, and return the harness's index of tasks.

    They are tasks or groups of the harness ("mmlu", ...), or of the user's task files (YAML) in `include_path`.

    Raises:
        ValueError: a task or the folder does not exist, or the harness is not installed.
    """
    folder = None if include_path is None else str(include_path)
    if folder is not None:
        if not Path(folder).is_dir():
            raise ValueError(f"include_path must be a folder with task files, got {folder!r}: check the path")
        own = _index(folder, defaults=False)
        if set(tasks) <= set(own.all_subtasks):
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

    `limit` is the number of documents of each task, from the first; `seed` is that of the choice of examples.

    Returns:
        Each task's measures by the harness's names, such as {"mmlu": {"acc": 0.6, "acc_stderr": 0.004}}.

    Raises:
        ValueError: a task does not exist or cannot be loaded, or the harness is not installed.
    """
    index = find_tasks(tasks, include_path)
    options = {"backend": "causal", "batch_size": batch_size, "max_length": count_positions(model)}
    host = import_extra("lm_eval.models.huggingface").HFLM(pretrained=model, tokenizer=tokenizer, **options)
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        found = import_extra("lm_eval").simple_evaluate(
            model=host,
            tasks=list(tasks),
            task_manager=index,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
            **dict.fromkeys(seeds, seed),
        )
    except (OSError, KeyError) as error:
        raise ValueError(
            f"task {', '.join(tasks)} cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0][:200]}): "
            "check the network or the task's files"
        ) from error
    figures: dict[str, dict[str, Any]] = {}
    for task, measures in found["results"].items():
        numbers = {name: value for name, value in measures.items() if isinstance(value, (int, float))}
        figures[task] = {name.removesuffix(",none").replace(",", " "): value for name, value in numbers.items()}
    return figures
