"""Options that several commands share.

This module imports neither torch nor `locas_peft`, so that help is printed at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from locas_settings import LARGEST, ReadSettings, StudySettings


def _parse_path(type_: Any, tokens: Sequence) -> Path:
    if not tokens[0].value:
        raise ValueError("must name a path, got an empty text")
    return Path(tokens[0].value)


def _parse_text(type_: Any, tokens: Sequence) -> str:
    text = tokens[0].value
    if len(text) > 1 and text.startswith("-"):
        raise ValueError(f"text must be a file, or - for stdin, got the unknown option {text!r}")
    return text


def _refuse_nan(type_: Any, value: float) -> None:
    # It is not below any bound either.
    if math.isnan(value):
        raise ValueError("must be a number, got nan")


Text = Annotated[str, Parameter(converter=_parse_text, allow_leading_hyphen=True)]
Memory = Annotated[Path, Parameter(help="a memory's folder.")]
NamedPath = Annotated[Path, Parameter(converter=_parse_path)]
JsonFile = Annotated[
    Path | None,
    Parameter(
        name="--json",
        converter=_parse_path,
        allow_leading_hyphen=True,
        help="write JSON; - for stdout.",
    ),
]
Overwrite = Annotated[bool, Parameter(help="replace the results of an earlier run in --out.")]
Unwrap = Annotated[
    bool | None,
    Parameter(
        negative="--no-unwrap",
        help="join hard-wrapped lines to paragraphs first; by default for an embedded base model "
        "only.",
    ),
]
Compiled = Annotated[
    bool,
    Parameter(
        name="--compile",
        negative=(),
        help="run the model through torch.compile, which takes minutes at first; the figures are "
        "the same to rounding.",
    ),
]
Count = Annotated[int, Parameter(validator=Number(gte=1, lte=LARGEST))]
AtLeastTwo = Annotated[int, Parameter(validator=Number(gte=2))]
AtLeastZero = Annotated[float, Parameter(validator=(_refuse_nan, Number(gte=0)))]
Seed = Annotated[int, Parameter(validator=Number(gte=-LARGEST, lte=LARGEST))]


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """The base model.

    Args:
        model: folder, hub name or GGUF file of a causal LM, or smollm2; where not given, the one
            that the memory names, or an embedded one.
        dtype: float32, bfloat16, float16, stored, or auto: the stored one, but float32 on a CPU
            that is slow at it.
        device: cpu, cuda, cuda:1, ... or auto, which is Accelerate's: a base that does not fit
            there is split over all devices, the CPU's memory and the disk.
        quantize: nf4 or int8, with bitsandbytes, or int8 with torchao; for folders and hub names.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None


@dataclass(frozen=True, kw_only=True)
class BaseOnCpuOptions(BaseOptions):
    """The base model of a command that writes weights: on the CPU and in the stored dtype."""

    dtype: str = "stored"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class AnswererOptions:
    """What answers a question.

    Args:
        memory: a memory's folder.
        library: a folder of memories: each question is answered with the one that it is about, if
            any.
        without_memory: ask the base model alone; --memory then only names it.
        source: show below each answer the sentence of the text that fits the question best.
    """

    memory: Path | None = None
    library: NamedPath | None = None
    without_memory: bool = False
    source: bool = False


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where the memory goes.

    Args:
        out: the memory's folder; this or --library is needed unless the method is none.
        library: a folder of memories that gets one more; its base is the model where none is given.
        name: of the memory in the library; the text's file name where not given.
        start: a memory that goes on with this text, by its folder, or its name in the library. It
            is replaced where neither --out nor --name is given.
        resume: continue from the checkpoint in --out, if there is one.
        overwrite: replace the results of an earlier run in --out.
        checkpoint_seconds: time between two checkpoints.
        keep_text: keep the text in the memory's folder, for ask --source, and in a library pieces
            of it, by which questions find the memory. A study keeps its exchanges in any case,
            which quote the text.
    """

    out: NamedPath | None = None
    library: NamedPath | None = None
    name: str | None = None
    start: Annotated[Path | None, Parameter(name="--from", converter=_parse_path)] = None
    resume: bool = False
    overwrite: bool = False
    checkpoint_seconds: AtLeastZero = 30.0
    keep_text: Annotated[bool, Parameter(negative="--no-keep-text")] = True


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """A table of texts, a memory for each.

    Args:
        manifest: a table in place of the text, for --library: JSON Lines with name, text or path,
            and settings of the line's own; or a .csv or .parquet file, or a dataset's name. The
            same command goes on with what is left.
        ray: teach the table on a Ray cluster: its address, auto, or nothing for one on this
            machine.
        actors: with --ray, actors on each machine that has no GPU.
    """

    manifest: str | None = None
    ray: bool | str = False
    actors: Count = 1


READ = ReadSettings()
STUDY = StudySettings()
BASE = BaseOptions()
BASE_ON_CPU = BaseOnCpuOptions()
PLACE = PlaceOptions()
ANSWERER = AnswererOptions()
TABLE = TableOptions()

ReadGroup = Annotated[ReadSettings, Parameter(name="*", group="Reading")]
StudyGroup = Annotated[StudySettings, Parameter(name="*", group="Study")]
ManyMethods = Annotated[
    ReadSettings, Parameter(name="*", group="Reading", parse="^(?!method$|model$|dtype$)")
]
"""The settings of a reading by several methods, which a protocol names itself."""
BaseGroup = Annotated[BaseOptions, Parameter(name="*", group="Base model")]
MemoryBase = BaseGroup
BaseOnCpu = Annotated[BaseOnCpuOptions, Parameter(name="*", group="Base model")]
AnswererGroup = Annotated[AnswererOptions, Parameter(name="*", group="Memory")]
PlaceGroup = Annotated[PlaceOptions, Parameter(name="*", group="Memory")]
TableGroup = Annotated[TableOptions, Parameter(name="*", group="Table")]


def split_names(names: str, option: str) -> tuple[str, ...]:
    """Split the value of an option into names.

    A `ValueError` where there is none, or one is repeated.
    """
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise ValueError(f"{option} must name something, got {names!r}: separate names by commas")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{option} must name each once, got {names!r}: drop the second mention")
    return chosen


def check_absent(where: str, **values: object) -> None:
    """Raise a `ValueError` for an option that is given where it has no meaning.

    Args:
        where: such as "without --text".
        values: of the options, by their names; None where an option was not given.
    """
    for name, value in values.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} has no meaning {where}, got {value}: leave it out")
