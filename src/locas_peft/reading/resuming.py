"""The checkpoints of a reading: when its state is saved, and whether a saved state is of the same run."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import describe_difference
from ..memories import checkpoint
from ..model import fingerprint
from ..selfstudy import SelfStudy
from ..ttt import TestTimeTrainer
from ..ttt.model_state import active_configs

__all__ = ["Checkpoints", "restore"]

_logger = logging.getLogger(__name__)
# "record" describes the base, which is compared by its fingerprint, and the slots that calibration chose.
_NO_ARITHMETIC = {
    "auto_mapping",
    "base_model_name_or_path",
    "record",
    "inference_mode",
    "peft_version",
    "revision",
}
_NO_ARITHMETIC |= {"task_type"}


@dataclass
class Checkpoints:
    """Saves the state of a reading: where a checkpoint is due, and where a caller's function raises."""

    folder: Path | None
    seconds: float
    reading: dict[str, Any]
    trainer: TestTimeTrainer
    study: SelfStudy | None
    _saved: float = field(default_factory=time.monotonic)
    _failed: bool = False

    def after(self, step: Any, follow: Callable[[Any], None] | None, due: bool = False) -> None:
        """Call a caller's function after a step; save a checkpoint if it is due."""
        due = due or time.monotonic() - self._saved >= self.seconds
        try:
            if follow is not None:
                follow(step)
        except BaseException:
            self.save()
            raise
        if due:
            self.save()

    def save(self) -> None:
        if self.folder is None:
            return
        state = {"run": _describe_run(self.trainer, self.reading), **self.trainer.state_dict()}
        if self.study is not None:
            state["study"] = self.study.state_dict()
        try:
            checkpoint.save(self.folder, state)
        except OSError as failure:
            if not self._failed:
                _logger.warning(
                    "no checkpoint can be saved (%s); the reading goes on",
                    failure.strerror or failure,
                )
            self._failed = True
        self._saved = time.monotonic()


def restore(
    directory: str | Path,
    state: dict[str, Any],
    trainer: TestTimeTrainer,
    text_sha256: str,
    reading: Any = None,
) -> None:
    """Load a checkpoint's state into the trainer that will go on with it.

    Of an adapter's configuration, the fields that change its arithmetic must be the same. The fields that calibration
    fills in are restored. A checkpoint that is damaged, or of another model, adapter, setting or text, is a
    `ValueError`; the trainer, its model and torch's random state are then as before. Messages name `directory`;
    `text_sha256` is of the document that will be read (`text.digest_ids`), `reading` its settings and origin, if any.
    """
    try:
        difference = _find_difference(_describe_run(trainer, reading), state["run"], directory)
        begun = state["text"]
        if difference is None and begun not in (None, text_sha256):
            rule = (
                f"input_ids must be the document begun in {str(directory)!r} (sha256 {begun[:12]})"
            )
            difference = f"{rule}, got another one ({text_sha256[:12]}): give that text, or choose another folder"
        if difference is None:
            trainer.load_state_dict(state)
    except Exception as error:  # entries of another kind or shape than we write
        raise checkpoint.damaged(directory, error) from None
    if difference is not None:
        raise ValueError(difference)


def _describe_run(trainer: TestTimeTrainer, reading: dict[str, Any] | None) -> dict[str, Any]:
    adapters = {}
    for name, config in active_configs(trainer.model).items():
        fields = {
            field: value for field, value in config.to_dict().items() if field not in _NO_ARITHMETIC
        }
        text = json.dumps(
            fields, default=lambda value: sorted(value) if isinstance(value, set) else str(value)
        )
        adapters[name] = json.loads(text)
    run = {"settings": trainer.describe(), "adapters": adapters, "base": fingerprint(trainer.model)}
    return {"reading": reading or {}, **run}


def _find_difference(
    ours: dict[str, Any], theirs: dict[str, Any], directory: str | Path
) -> str | None:
    """Return the message for the first difference between two results of `_describe_run`; None where there is none."""
    where, other = f"the checkpoint in {str(directory)!r}", "or choose another folder"
    here, there = ours["adapters"], theirs["adapters"]
    compared = [("", ours[part], theirs[part]) for part in ("reading", "settings")]
    compared += [
        (f"adapter {name!r}: ", config, there.get(name, config)) for name, config in here.items()
    ]
    for prefix, own, recorded in compared:
        if difference := describe_difference(
            own, recorded, where, f"give the former value, {other}", prefix
        ):
            return difference
    if here.keys() != there.keys():
        return f"active adapters must be {sorted(there)} as in {where}, got {sorted(here)}: activate those, {other}"
    if ours["base"] != theirs["base"]:
        return f"model must be the one of {where}, got other base weights: load that model in the same dtype, {other}"
    return None
