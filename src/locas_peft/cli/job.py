"""A base to work with, and the settings that a command line makes for methods on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .options import BaseOptions, MethodOptions, TextOptions
from .shell import quieten

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..methods import Settings
    from ..studies.sharing import Processes


@dataclass(frozen=True)
class Job:
    """A base with its tokenizer, under the name that is recorded."""

    name: str
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    embedded: bool

    @property
    def dtype(self) -> str:
        return str(self.base.dtype).removeprefix("torch.")

    def encode(self, content: str, options: TextOptions) -> torch.LongTensor:
        """Turns a text into token ids, LongTensor [T] on the CPU; for an embedded backbone it is unwrapped first."""
        from .. import text

        if options.unwrap if options.unwrap is not None else self.embedded:
            content = text.unwrap(content)
        return text.tokenize(self.tokenizer, content, options.max_tokens)


def load(options: BaseOptions, processes: Processes | None = None) -> Job:
    """Loads the base; where Accelerate has launched the command, on its device and in its precision.

    Args:
        options: a device other than "auto" and a dtype other than "auto" are taken as given.
        processes: what Accelerate says.

    Raises:
        ValueError: see `loading.load_base`; or a certain GPU was named for several processes.
    """
    from .. import backbone, loading

    quieten()
    name, device, dtype = options.model or backbone.NAME, options.device, options.dtype
    if processes is not None:
        if processes.count > 1 and device not in ("auto", "cpu"):
            raise ValueError(f"--device must be auto or cpu for {processes.count} processes, got {device!r}: drop it")
        device = processes.device if processes.device is not None and device == "auto" else device
        dtype = processes.dtype if processes.dtype is not None and dtype == "auto" else dtype
    base, tokenizer = loading.load_base(name, dtype, device)
    return Job(backbone.name_of(name), base, tokenizer, backbone.is_embedded(name))


def make_settings(
    names: Sequence[str],
    job: Job,
    options: MethodOptions,
    own: Sequence[dict[str, Any]] | None = None,
    strict: bool = True,
    **given: Any,
) -> list[Settings]:
    """Makes the settings of each method: what was given, the backbone's defaults, the preset's.

    Args:
        names: of the methods. Side by side, an option is for those that have it.
        job: the base.
        options: for all of them.
        own: for each of them alone, stronger than `options`.
        strict: refuses an option that none of them has.
        given: further fields of `methods.Settings`.

    Raises:
        ValueError: a value that no reading can have, or not with this base.
    """
    from ..methods import METHOD_FIELDS, METHODS, PRESETS, Settings

    for name in names:
        if name not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    fields = {**options.to_fields(), **given}
    preset = fields.pop("preset")
    limit = count_positions(job.base)
    fields["window"] = fields["window"] or (512 if job.embedded else min(2048, limit or 2048))
    fields["stride"] = fields["stride"] or max(1, fields["window"] // 2)
    fields["context"] = fields["context"] or ("cache" if job.embedded else "recompute")
    check_window("--window", fields["window"], job)
    known = {name: PRESETS.get(preset, {}).get(name, {}) for name in names}
    kept = [{f: v for f, v in fields.items() if f not in METHOD_FIELDS or f in known[name]} for name in names]
    if strict and len(names) == 1:
        kept = [fields]  # a field too many has its own message
    elif strict and preset in PRESETS:
        for field in METHOD_FIELDS:
            if fields.get(field) is not None and not any(field in known[name] for name in names):
                raise ValueError(f"{field} has no meaning for the methods {', '.join(names)}: leave it out")
    return [
        Settings.from_preset(name, preset, model=job.name, dtype=job.dtype, **{**shared, **alone})
        for name, shared, alone in zip(names, kept, own or [{}] * len(names), strict=True)
    ]


def check_window(option: str, window: int, job: Job) -> None:
    """Refuses a window that is longer than the base's positions.

    Raises:
        ValueError: it is.
    """
    limit = count_positions(job.base)
    if limit is not None and window > limit:
        raise ValueError(f"{option} must be within the model's {limit} positions, got {window}: lower it")


def count_positions(base: PreTrainedModel) -> int | None:
    config = base.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
