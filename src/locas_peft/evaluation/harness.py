"""lm-evaluation-harness (MMLU and whatever else it knows) on a live model, its memory included.

The harness would load an adapter by itself only where it knows its type; here the model is handed over as it stands.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


def find_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> TaskManager:
    """Looks tasks up by their names, before any work is done for them.

    Args:
        tasks: names of tasks or groups that the harness knows ("mmlu", ...), or that `include_path` defines.
        include_path: a folder with task files (YAML) of one's own.

    Returns:
        The harness's manager, which knows them.

    Raises:
        ValueError: the harness knows no such task, or there is no such folder.
        ModuleNotFoundError: it is not installed.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path must be a folder with task files, got {str(include_path)!r}: check the path")
    folder = None if include_path is None else str(include_path)
    if folder is not None:
        own = _index(folder, defaults=False)
        if set(tasks) <= set(own.all_subtasks):
            return own
    manager = _index(folder, defaults=True)
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "see `lm-eval ls tasks` for those that it knows"
            raise ValueError(f"task must be one that lm-eval knows, got {task!r}: {hint}")
    return manager


@cache
def _index(include_path: str | None, defaults: bool) -> TaskManager:
    """The harness reads thousands of files to learn its own tasks: once a process, and only if need be."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=defaults)


def evaluate_tasks(
    model: nn.Module,
    tokenizer,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Runs tasks of lm-evaluation-harness on a model in memory.

    Args:
        model: a causal language model in evaluation mode, with or without a memory; only read.
        tokenizer: its tokenizer.
        tasks: names of tasks or groups that the harness knows ("mmlu", ...), or that `include_path` defines.
        include_path: a folder with task files (YAML) of one's own.
        limit: the first so many documents of each task.
        num_fewshot: examples before each question; the task's own number where None.
        batch_size: documents at once.
        seed: of the choice of examples.

    Returns:
        Of each task its measures, such as {"mmlu": {"acc": 0.6, "acc_stderr": 0.004}}, by the harness's names.

    Raises:
        ValueError: the harness knows no such task, or cannot load one.
        ModuleNotFoundError: it is not installed.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    manager = find_tasks(tasks, include_path)
    host = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        max_length=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )
    try:
        found = lm_eval.simple_evaluate(
            model=host,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            bootstrap_iters=1000,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (OSError, ConnectionError, KeyError, FileNotFoundError) as error:
        raise ValueError(
            f"task {', '.join(tasks)} cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0][:200]}): "
            "check the network or the task's files"
        ) from error
    results = {}
    for task, measures in found["results"].items():
        results[task] = {
            name.removesuffix(",none").replace(",", " "): value
            for name, value in measures.items()
            if isinstance(value, (int, float))
        }
    return results
