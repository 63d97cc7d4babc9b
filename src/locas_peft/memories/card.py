"""The model card in a memory's folder, which the Hugging Face hub renders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from .. import __version__, backbone
from ..bases.gguf import is_gguf
from ..checks import one_line
from ..files import staged_file

__all__ = ["CARD", "escape", "make_card", "set_license"]

CARD = "README.md"
"""The file in a memory's folder that holds its model card."""


def make_card(base: str, peft_type: str, title: str, made: str, rows: Mapping[str, str], note: str = "") -> str:
    """Return a model card: its metadata as YAML, then Markdown. No licence is claimed.

    Args:
        base: the base's name, as `--model` takes it.
        peft_type: of the adapter.
        title: what the memory is of, in Markdown.
        made: how it was made, after "that was".
        rows: of the card's table, in Markdown.
        note: a sentence below the table.
    """
    data = ModelCardData(
        base_model=base if _is_on_hub(base) else None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=[peft_type.lower(), "test-time-training"],
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
{data.to_yaml()}
---

# A memory of {title}

A PEFT adapter for {escape(base)} that was {made}, with locas_peft {__version__}.

| | |
|---|---|
{table}

{note}

```python
from peft import PeftModel
{_describe_loading(base)}
model = PeftModel.from_pretrained(base, "this folder")
```

```bash
locas ask "What is the text about?" --memory "this folder"
```
"""


def set_license(directory: str | Path, license: str) -> None:
    """Name the licence in the metadata of a memory's model card."""
    path = Path(directory) / CARD
    card = ModelCard.load(path)
    card.data.license = license
    with staged_file(path) as temporary:
        card.save(temporary)


def escape(text: str) -> str:
    """Return a text as one line of Markdown that renders as that text: no markup, HTML, links or formulas."""
    return re.sub(r"[!-/:-@[-`{-~]", lambda found: f"&#{ord(found[0])};", one_line(text))


def _is_on_hub(model: str) -> bool:
    """Return whether a base's name can be one of the hub, and no folder or file."""
    return not (backbone.is_embedded(model) or is_gguf(model) or Path(model).expanduser().exists())


def _describe_loading(model: str) -> str:
    """Return the lines of Python that load a base and register LOCAS."""
    if backbone.is_embedded(model):
        name = backbone.name_of(model)
        argument = "" if name == backbone.NAME else f'name="{name}"'
        return f"from locas_peft import backbone\n\nbase, tokenizer = backbone.load({argument})"
    if is_gguf(model):
        return f"from locas_peft.bases import load_base\n\nbase, tokenizer = load_base({model!r})"
    return (
        "import locas_peft  # registers LOCAS with PEFT\nfrom transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({model!r})"
    )
