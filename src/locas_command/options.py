"""Options that several commands share, and the base model that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from cyclopts.validators import Number
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locas_peft import backbone, text
from locas_peft.bases import loading
from locas_peft.reading.settings import ReadingSettings

from .console import show_remarks, silence_libraries, warnings_as_lines

LARGEST = 2**48  # the size in bytes of a tensor with so many rows fits 64 bits


def _parse_layers(type_: Any, tokens: Sequence) -> list[int] | str:
    value = tokens[0].value
    try:
        return value if value == "upper" else [int(index) for index in value.split(",")]
    except ValueError:
        raise ValueError(f"must be upper, or indices separated by commas, got {value!r}: write 3,4,5, say") from None


def _parse_path(type_: Any, tokens: Sequence) -> Path:
    if not tokens[0].value:
        raise ValueError("must name a path, got an empty text")
    return Path(tokens[0].value)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(ReadingSettings):
    """The settings of a reading, with the names and forms that they have on the command line."""

    learning_rate: Annotated[float | None, Parameter(name="--lr")] = None
    r: Annotated[int | None, Parameter(alias="--width")] = None
    layers_to_transform: Annotated[str | None, Parameter(name="--layers", converter=_parse_layers)] = None
    brake: Annotated[bool | None, Parameter(negative="--no-brake")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:,}, got {value:,}: lower it")

    def of(self, base: Base) -> ReadingSettings:
        """Return plain settings, with the record of the base that was loaded and its tokenizer's start token."""
        settings = ReadingSettings(**{**vars(self), "model": base.name, "dtype": base.dtype})
        if settings.start_token is not None:
            return settings
        return replace(settings, start_token=text.find_start_token(base.tokenizer))


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """The base model.

    Args:
        model: folder, hub name or GGUF file of a causal LM, or smollm2; where not given, the one that the memory
            names, or an embedded one.
        dtype: auto, float32, bfloat16 or float16.
        device: cpu, cuda, cuda:1, ... or auto.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"


READING, BASE = ReadingOptions(), BaseOptions()
OneMethod = Annotated[ReadingOptions, Parameter(name="*", group="Reading", parse="^(?!model$|dtype$)")]
ManyMethods = Annotated[ReadingOptions, Parameter(name="*", group="Reading", parse="^(?!model$|dtype$|method$)")]
ManyScored = Annotated[
    ReadingOptions,
    Parameter(name="*", group="Reading", parse="^(?!model$|dtype$|method$|study$|exchanges$|passes$)"),
]
"""Without the options of a self-study, which comes after a text is scored."""
BaseGroup = Annotated[BaseOptions, Parameter(name="*", group="Base model")]
# For commands whose device is the CPU unless it is given.
BaseBesideDevice = Annotated[BaseOptions, Parameter(name="*", group="Base model", parse="^(?!device$)")]
Device = Annotated[str, Parameter(group="Base model")]
Text = Annotated[str, Parameter(allow_leading_hyphen=True)]
Memory = Annotated[Path, Parameter(help="a memory's folder.")]
NamedPath = Annotated[Path, Parameter(converter=_parse_path)]
JsonFile = Annotated[
    Path | None,
    Parameter(name="--json", converter=_parse_path, allow_leading_hyphen=True, help="write JSON; - for stdout."),
]
Overwrite = Annotated[bool, Parameter(help="replace the results of an earlier run in --out.")]
Unwrap = Annotated[
    bool | None,
    Parameter(
        negative="--no-unwrap",
        help="join hard-wrapped lines to paragraphs first; by default for an embedded base model only.",
    ),
]
Count = Annotated[int, Parameter(validator=Number(gte=1, lte=LARGEST))]
AtLeastTwo = Annotated[int, Parameter(validator=Number(gte=2))]
AtLeastZero = Annotated[float, Parameter(validator=Number(gte=0))]
Seed = Annotated[int, Parameter(validator=Number(gte=-LARGEST, lte=LARGEST))]


@dataclass(frozen=True)
class Base:
    """A base model with its tokenizer, under its recorded name."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def encode(self, content: str, max_tokens: int | None, unwrap: bool | None) -> torch.LongTensor:
        """Return a text's token ids, LongTensor [T] on the CPU; unwrap None: unwrapped for an embedded backbone."""
        if backbone.is_embedded(self.name) if unwrap is None else unwrap:
            content = text.unwrap(content)
        return text.tokenize(self.tokenizer, content, max_tokens)


def load(options: BaseOptions) -> Base:
    """Load the base model that the options name."""
    silence_libraries()
    show_remarks()
    name = options.model or backbone.NAME
    model, tokenizer = loading.load_base(name, options.dtype, options.device)
    return Base(backbone.name_of(name), model, tokenizer)


def load_base_of(memory: Path, options: BaseOptions) -> Base:
    """Load the base model that the options name, or else the memory."""
    name = options.model or loading.load_memory_config(memory).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"memory {str(memory)!r} does not name its base: give it with --model")
    return load(replace(options, model=name))


def load_onto(base: Base, memory: Path, **fields: Any) -> Any:
    """Load a memory onto its base (see `loading.load_memory`)."""
    with warnings_as_lines():
        return loading.load_memory(base.model, memory, **fields)


def split_names(names: str, option: str) -> tuple[str, ...]:
    """Split the value of an option into names.

    Raises:
        ValueError: there is none, or one is repeated.
    """
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise ValueError(f"{option} must name something, got {names!r}: separate names by commas")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{option} must name each once, got {names!r}: drop the second mention")
    return chosen
