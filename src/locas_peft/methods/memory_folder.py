"""A memory's folder: PEFT's files, and beside them a card and the reading that made it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel

from .. import backbone, checkpoint
from ..files import staged, write_json
from ..loading import MEMORY_CONFIG
from ..text import digest_ids
from .record import READING, Reading
from .settings import Settings

CHECKPOINT_FOLDER = "checkpoint"
"""The folder in a memory's folder where an unfinished reading waits."""


def save_memory(model: PeftModel, directory: str | Path, reading: Reading) -> None:
    """Writes a memory with the reading that made it, whole or not at all.

    The base is recorded as `reading.settings.model`, which is a name that other machines know too.

    Args:
        model: the model with its adapter; not changed.
        directory: made where it does not exist; other files in it stay.
        reading: goes into `reading.json`.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    config = model.peft_config[model.active_adapter]
    name = config.base_model_name_or_path
    try:
        config.base_model_name_or_path = reading.settings.model
        with staged(directory, last=MEMORY_CONFIG) as folder:
            # Embeddings are not trained here, and PEFT would ask the hub about them.
            model.save_pretrained(str(folder), save_embedding_layers=False)
            (folder / "README.md").write_text(_make_card(config, reading), encoding="utf-8")
            write_json(folder / READING, reading.to_json())
    finally:
        config.base_model_name_or_path = name


def _make_card(config: PeftConfig, reading: Reading) -> str:
    """The model card: what the memory is and how it is loaded. PEFT's own is a form that waits to be filled in."""
    settings = reading.settings
    if backbone.is_embedded(settings.model):
        known = backbone.name_of(settings.model)
        which = "" if known == backbone.NAME else f'name="{known}"'
        load = f"from locas_peft import backbone\n\nbase, tokenizer = backbone.load({which})"
    else:
        load = (
            "import locas_peft  # registers LOCAS with PEFT\nfrom transformers import AutoModelForCausalLM\n\n"
            f"base = AutoModelForCausalLM.from_pretrained({settings.model!r})"
        )
    return f"""---
base_model: {settings.model}
library_name: peft
tags:
- locas
---

# A memory of one text

A {config.peft_type.value} adapter (method {settings.method}, r={settings.r}, {reading.extra_parameters:,} parameters)
for {settings.model}, made by reading {reading.curve[-1][0]:,} tokens. Perplexity while reading, each token scored
before it was learned: {reading.perplexity:.2f}. All settings and figures are in `{READING}`.

```python
from peft import PeftModel
{load}
model = PeftModel.from_pretrained(base, "this folder")
```
"""


def find_finished(memory_dir: str | Path, settings: Settings, input_ids: torch.LongTensor) -> Reading | None:
    """Looks whether a folder already holds the memory of this very reading, finished.

    Args:
        memory_dir: the folder; it need not exist.
        settings: what the reading would be done with.
        input_ids: LongTensor [T], what would be read.

    Returns:
        The finished reading; None where there is no memory, or a checkpoint waits to be gone on from.

    Raises:
        ValueError: the folder holds the memory of another reading.
    """
    folder = Path(memory_dir)
    if has_checkpoint(folder) or not (folder / MEMORY_CONFIG).exists():
        return None
    remedy = "choose another folder, or give --overwrite"
    if not (folder / READING).exists():
        raise ValueError(f"--out {str(folder)!r} holds a memory that no reading here made: {remedy}")
    reading = Reading.from_json(json.loads((folder / READING).read_text(encoding="utf-8")))
    here, there = dataclasses.asdict(settings), dataclasses.asdict(reading.settings)
    field = next((field for field in here if here[field] != there[field]), None)
    if field is not None:
        raise ValueError(
            f"{field} must be {there[field]!r} as in the memory in {str(folder)!r}, got {here[field]!r}: {remedy}"
        )
    if reading.text_sha256 != digest_ids(input_ids[: settings.max_tokens]):
        raise ValueError(f"--out {str(folder)!r} holds the memory of another text: {remedy}")
    return reading


def has_checkpoint(memory_dir: str | Path) -> bool:
    """Says whether an unfinished reading waits in a memory's folder."""
    return (Path(memory_dir) / CHECKPOINT_FOLDER / checkpoint.CHECKPOINT).exists()
