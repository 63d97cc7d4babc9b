"""A base and a text for it, and the settings that a command line makes for a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .shell import quieten

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..methods import Settings


@dataclass(frozen=True)
class Job:
    """A base and a text for it: `input_ids` LongTensor [T], on the CPU."""

    name: str
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    input_ids: torch.LongTensor
    embedded: bool


def prepare(
    content: str, model: str | None, dtype: str, device: str, unwrap: bool | None, max_tokens: int | None
) -> Job:
    from .. import backbone, loading, text

    quieten()
    name = model or backbone.NAME
    embedded = backbone.is_embedded(name)
    base, tokenizer = loading.load_base(name, dtype, device)
    if unwrap if unwrap is not None else embedded:
        content = text.unwrap(content)
    input_ids = text.tokenize(tokenizer, content, max_tokens)
    return Job(backbone.name_of(name), base, tokenizer, input_ids, embedded)


def make_settings(names: Sequence[str], job: Job, *, preset: str, **given: Any) -> list[Settings]:
    """Makes the settings of each method: what was given, the backbone's defaults, the preset's."""
    from ..methods import METHOD_FIELDS, PRESETS, Settings

    window, stride, context = (given.pop(name, None) for name in ("window", "stride", "context"))
    if window is None:
        window = 512 if job.embedded else min(2048, count_positions(job.base) or 2048)
    common = {
        "model": job.name,
        "dtype": str(job.base.dtype).removeprefix("torch."),
        "window": window,
        "stride": stride or max(1, window // 2),
        "context": context or ("cache" if job.embedded else "recompute"),
    }
    if len(names) == 1:
        return [Settings.from_preset(names[0], preset, **common, **given)]
    # Side by side an option is for those methods that have it; one that none has is a mistake.
    if preset in PRESETS:
        for field in METHOD_FIELDS:
            if given.get(field) is not None and not any(field in PRESETS[preset][name] for name in names):
                raise ValueError(f"{field} has no meaning for the methods {', '.join(names)}: leave it out")
    return [
        Settings.from_preset(
            name,
            preset,
            **common,
            **{f: v for f, v in given.items() if f not in METHOD_FIELDS or f in PRESETS.get(preset, {}).get(name, ())},
        )
        for name in names
    ]


def count_positions(base: PreTrainedModel) -> int | None:
    config = base.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
