"""Options that several commands share. This module imports neither torch nor `locas_peft`, so that help is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

LARGEST = 2**48  # the size in bytes of a tensor with so many rows fits 64 bits


def _parse_layers(type_: Any, tokens: Sequence) -> list[int] | str:
    value = tokens[0].value
    try:
        return value if value == "upper" else [int(index) for index in value.split(",")]
    except ValueError:
        raise ValueError(
            f"must be upper, or indices separated by commas, got {value!r}: write 3,4,5, say"
        ) from None


def _parse_path(type_: Any, tokens: Sequence) -> Path:
    if not tokens[0].value:
        raise ValueError("must name a path, got an empty text")
    return Path(tokens[0].value)


def _parse_text(type_: Any, tokens: Sequence) -> str:
    if len(text := tokens[0].value) > 1 and text.startswith("-"):
        raise ValueError(f"text must be a file, or - for stdin, got the unknown option {text!r}")
    return text


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """The fields of `ReadingSettings` but those of the base, with their names and forms on the command line.

    None stands for a value that is not given. `ReadingSettings` checks the values, when a command runs.

    Args:
        method: none, lora, locas-glu (gated FFNs) or locas-mlp (two-layer FFNs).
        preset: where the values that are not given come from: tuned or paper.
        r: memory width, or LoRA rank.
        init: how a memory's rows are made: topk, bottomk, random, gaussian, activation, or write (locas-mlp).
        learning_rate: of AdamW, after the warm-up.
        output_scale: measured: from the calibration text, so that one rate serves all hosts; paper: tau divided by r.
        scaling: multiplies the output scale.
        max_slot_norm: radius of the norm clip; 0 for no clip.
        update: bp trains a memory, ridge writes it in closed form: the values of locas-glu, whose rows a learning rate
            trains beside, or with init "write" a linear map. With init "write", bp also writes slots, nlsvd only that.
        epsilon: length of a written value.
        slots_per_chunk: how many tokens of a chunk are written, those with the highest loss.
        layers_to_transform: the layers that get an adapter: upper, or indices such as 3,4,5; all where not given.
        anchor: weight of the KL to the base on text, and in a study on answers, that the base wrote; 0 for none.
        anchor_every: every n-th optimizer step pulls to the base.
        window: tokens that the model sees at once, context and chunk.
        stride: tokens between two learning steps; half the window where not given.
        context: cache, the default where the base can use it, keeps the context's keys and values; recompute feeds it
            again.
        readings: how often the text is read; from 6 chunks on a trained memory is the mean of those after each.
        warmup_steps: optimizer steps with a smaller rate at the start.
        decay_steps: the rate is divided by the root of 1 + steps / this; 0 for a constant rate.
        max_tokens: the first tokens of the text that are read; all where not given.
        study: after reading, the model asks itself about the text, and learns the answers without the text.
        exchanges: questions wanted about each sentence; by default 6, 12 for fewer than 8 or more than half of --r.
        passes: the most times that each exchange is learned; 4, or more for few, by default.
        seed: of torch, set before the adapter is made.
    """

    window: int | None = None
    stride: int | None = None
    learning_rate: Annotated[float | None, Parameter(name="--lr")] = None
    readings: int = 1
    context: str | None = None
    warmup_steps: int = 2
    decay_steps: int | None = None
    method: str = "locas-glu"
    preset: str = "tuned"
    r: Annotated[int | None, Parameter(alias="--width")] = None
    init: str | None = None
    output_scale: str | None = None
    scaling: float | None = None
    max_slot_norm: float | None = None
    update: str | None = None
    epsilon: float | None = None
    slots_per_chunk: int | None = None
    layers_to_transform: Annotated[Any, Parameter(name="--layers", converter=_parse_layers)] = (
        None  # str, list[int]
    )
    anchor: float | None = None
    anchor_every: int | None = None
    max_tokens: int | None = None
    study: bool = False
    exchanges: int | None = None
    passes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:,}, got {value:,}: lower it")


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """The base model.

    Args:
        model: folder, hub name or GGUF file of a causal LM, or smollm2; where not given, the one that the memory
            names, or an embedded one.
        dtype: float32, bfloat16, float16, stored, or auto: the stored one, but float32 on a CPU that is slow at it.
        device: cpu, cuda, cuda:1, ... or auto, which is Accelerate's: a base that does not fit there is split over all
            devices, the CPU's memory and the disk.
        quantize: nf4 or int8, with bitsandbytes, or int8 with torchao; for folders and hub names.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None


@dataclass(frozen=True, kw_only=True)
class BaseOnCpuOptions(BaseOptions):
    """The base model of a command that writes weights: on the CPU and in the stored dtype, unless others are given."""

    dtype: str = "stored"
    device: str = "cpu"


READING, BASE, BASE_ON_CPU = ReadingOptions(), BaseOptions(), BaseOnCpuOptions()
OneMethod = Annotated[ReadingOptions, Parameter(name="*", group="Reading")]
ManyMethods = Annotated[ReadingOptions, Parameter(name="*", group="Reading", parse="^(?!method$)")]
_SCORED = "^(?!method$|study$|exchanges$|passes$)"
ManyScored = Annotated[ReadingOptions, Parameter(name="*", group="Reading", parse=_SCORED)]
"""Without the options of a self-study, which comes after a text is scored."""
BaseGroup = Annotated[BaseOptions, Parameter(name="*", group="Base model")]
MemoryBase = BaseGroup
BaseOnCpu = Annotated[BaseOnCpuOptions, Parameter(name="*", group="Base model")]
Text = Annotated[str, Parameter(converter=_parse_text, allow_leading_hyphen=True)]
Memory = Annotated[Path, Parameter(help="a memory's folder.")]
NamedPath = Annotated[Path, Parameter(converter=_parse_path)]
Start = Annotated[Path, Parameter(name="--from", converter=_parse_path)]
_JSON = {"name": "--json", "converter": _parse_path, "allow_leading_hyphen": True}
JsonFile = Annotated[Path | None, Parameter(help="write JSON; - for stdout.", **_JSON)]
Overwrite = Annotated[bool, Parameter(help="replace the results of an earlier run in --out.")]
UNWRAP = "join hard-wrapped lines to paragraphs first; by default for an embedded base model only."
Unwrap = Annotated[bool | None, Parameter(negative="--no-unwrap", help=UNWRAP)]
Count = Annotated[int, Parameter(validator=Number(gte=1, lte=LARGEST))]
AtLeastTwo = Annotated[int, Parameter(validator=Number(gte=2))]
AtLeastZero = Annotated[float, Parameter(validator=Number(gte=0))]
Seed = Annotated[int, Parameter(validator=Number(gte=-LARGEST, lte=LARGEST))]


def split_names(names: str, option: str) -> tuple[str, ...]:
    """Split the value of an option into names; a `ValueError` where there is none, or one is repeated."""
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise ValueError(f"{option} must name something, got {names!r}: separate names by commas")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{option} must name each once, got {names!r}: drop the second mention")
    return chosen


def check_settings(options: ReadingOptions, methods: Sequence[str] | None = None) -> None:
    """Raise a `ValueError` for values that contradict each other, before a base is loaded.

    Args:
        options: of a command.
        methods: those of a command that has several; None for `options.method` alone.
    """
    from locas_peft.reading.settings import ReadingSettings, complete_all

    settings = ReadingSettings(**vars(options))
    # Without the base its window is not known: any stride may fit into it.
    settings = replace(settings, window=settings.window or sys.maxsize)
    if methods is None:
        settings.complete()
    else:
        complete_all(settings, methods)
