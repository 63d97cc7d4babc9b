"""Save what a stage made: the memory, its records, its exchanges, its card."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel

from ..checks import describe_difference
from ..exchanges import EXCHANGES, Exchange, save_exchanges
from ..files import drop_former, finish_replacement, write_json
from ..memories.checkpoint import CHECKPOINT_FOLDER, InUse, has_checkpoint, locked
from ..memories.folder import (
    MEMORY_CONFIG,
    PASSAGES,
    READING,
    RECORD,
    SAMPLE,
    SIGNATURE,
    TEXT,
    TEXT_SIGNATURE,
    escape,
    make_card,
    save_memory,
)
from .record import ReadRecord, Record, StudyRecord, load_records, records_to_json

__all__ = ["copy_history", "find_finished", "save_stages"]

_CARD_SETTINGS = (
    "preset",
    "r",
    "init",
    "learning_rate",
    "window",
    "stride",
    "context",
    "readings",
    "anchor",
    "passes",
    "seed",
    "dtype",
)
# What the stage learns, beside its settings.
_OF_THE_TEXT = ("stage", "text_sha256", "given", "exchanges_sha256")


def save_stages(
    model: PeftModel,
    directory: str | Path,
    records: Sequence[Record],
    exchanges: Sequence[Exchange] = (),
    sample: str | None = None,
    kept_text: str | None = None,
    keeps_former: bool = False,
) -> None:
    """Write a memory into a folder, whole or not at all.

    Args:
        model: the model whose active adapter is the memory.
        directory: the folder; files of a memory that this one replaces are removed.
        records: of the stages that made it, the last one last.
        exchanges: what the memory has studied.
        sample: pieces of its text, by which a library finds it.
        kept_text: its text, whose sentences are shown as the sources of answers.
        keeps_former: whether a sample or a text that is None stays as it is in the folder. An
            empty one is removed in any case.
    """
    texts = {SAMPLE: sample, TEXT: kept_text}
    # Files of the memory that this one replaces.
    stale = [READING, PASSAGES, SIGNATURE, TEXT_SIGNATURE]
    if not exchanges:
        stale.append(EXCHANGES)
    for name, content in texts.items():
        stays = content is None and keeps_former
        if not content and not stays:
            stale.append(name)

    def add_files(folder: Path) -> None:
        write_json(folder / RECORD, records_to_json(records))
        if exchanges:
            save_exchanges(folder / EXCHANGES, exchanges)
        for name, content in texts.items():
            if content:
                (folder / name).write_text(content, encoding="utf-8", newline="\n")
        drop_former(folder, stale)

    card = _make_card(model.peft_config[model.active_adapter], records)
    save_memory(model, directory, records[-1].settings.base_name, card, add_files=add_files)


def copy_history(memory: Path, folder: Path, r: int, directory: Path) -> None:
    """Write the records of a memory that was resized, and its texts, into a folder.

    A stage can then go on with the resized memory. Of a memory that no stage made, nothing is
    written.

    Args:
        memory: the folder of the memory before it was resized.
        folder: what is written into.
        r: the present width.
        directory: what `folder` will be called.

    Raises:
        ValueError: the memory's record is damaged.
    """
    if not any((memory / name).is_file() for name in (RECORD, READING)):
        return
    *earlier, last = load_records(memory)
    resized = replace(
        last,
        settings=replace(last.settings, r=r),
        memory_dir=str(directory),
        resized_from=last.settings.r,
    )
    write_json(folder / RECORD, records_to_json([*earlier, resized]))
    for name in (EXCHANGES, SAMPLE, TEXT):
        if (memory / name).is_file():
            shutil.copyfile(memory / name, folder / name)


def find_finished(directory: str | Path, expected: dict[str, Any]) -> Record | None:
    """Return the record of a finished memory; None where there is none, or an unfinished stage.

    A memory of another text, of other settings, exchanges or origin is a `ValueError`.

    Args:
        directory: the memory's folder.
        expected: fields of the record that the stage would have, as JSON values.
    """
    folder = Path(directory)
    finish_replacement(folder)
    unfinished = folder / CHECKPOINT_FOLDER
    if has_checkpoint(unfinished) or not (folder / MEMORY_CONFIG).exists():
        return None
    if unfinished.is_dir():
        # Afterwards the lock is gone, and the folder where it is empty.
        with suppress(InUse, OSError), locked(unfinished):
            pass
    remedy = "choose another folder, or give --overwrite"
    held = f"--out {str(folder)!r} holds"
    if not (folder / RECORD).exists() and not (folder / READING).exists():
        raise ValueError(f"{held} a memory that no reading here made: {remedy}")
    record = load_records(folder)[-1]
    if expected.get("stage", record.kind) != record.kind:
        made = "reading" if record.kind == "read" else "study"
        raise ValueError(f"{held} the memory of a {made}: {remedy}")
    recorded = record.to_json()
    settings = {name: value for name, value in expected.items() if name not in _OF_THE_TEXT}
    shared = {name: recorded.get(name) for name in settings}
    where = f"the memory in {str(folder)!r}"
    difference = describe_difference(settings, shared, where, remedy)
    if difference is not None:
        raise ValueError(difference)
    if expected["text_sha256"] != recorded["text_sha256"]:
        raise ValueError(f"{held} the memory of another text: {remedy}")
    change = _describe_change(record)
    if change is not None:
        raise ValueError(f"{held} {change}: {remedy}")
    if expected.get("given") is False and recorded["given"]:
        raise ValueError(f"{held} the memory of exchanges that were given: {remedy}")
    exchanges = "exchanges_sha256"
    if exchanges in expected and expected[exchanges] != recorded[exchanges]:
        raise ValueError(f"{held} the memory of other exchanges: {remedy}")
    return record


def _describe_change(record: Record) -> str | None:
    """Return what a memory is in place of that of its whole stage; None where it is that one."""
    if record.resized_from is not None:
        return "a memory that was resized"
    if record.stopped:
        return "the memory of a stage that was stopped early"
    return None


def _make_card(config: PeftConfig, records: Sequence[Record]) -> str:
    """Return the model card of a memory."""
    last = records[-1]
    settings = last.settings
    title = escape(last.title or "a text")
    rows = {
        "text": title,
        "base": escape(settings.base_name),
        "method": f"{last.method}, {last.extra_parameters:,} parameters",
    }
    made = []
    for record in records:
        rows |= _describe_stage(record)
        made.append("reading" if record.kind == "read" else "studying")
    for name in _CARD_SETTINGS:
        value = getattr(settings, name, None)
        if value is not None:
            rows[name] = f"`{value}`"
    how = f"trained by {' and '.join(dict.fromkeys(made))} one text"
    note = f"The perplexities are of this text alone. All settings and figures are in `{RECORD}`."
    return make_card(settings.base_name, config.peft_type, title, how, rows, note)


def _describe_stage(record: Record) -> dict[str, str]:
    """Return the rows of a card that describe one stage."""
    if isinstance(record, ReadRecord):
        scored = "perplexity while reading, each token scored before it was learned"
        return {
            "tokens": f"{record.curve[-1][0]:,}",
            scored: f"{record.perplexity:.2f}",
            "time to read": f"{record.seconds:,.0f} s",
        }
    if isinstance(record, StudyRecord):
        return {"study": f"{record.kept} exchanges in {record.seconds:,.0f} s"}
    return {}
