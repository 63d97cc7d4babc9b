"""The options that several commands share, each written once with its help; those that go together are a group.

A command takes a group as one parameter (`how: MethodOptions`); `spread` makes options of its fields.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

if TYPE_CHECKING:
    from ..studies.run import Recipe

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Dtype = Annotated[str, typer.Option(help="Of the base: auto, float32, bfloat16 or float16.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write JSON; - for stdout.", metavar="FILE", allow_dash=True),
]
MaxTokens = Annotated[int | None, typer.Option(help="Read so many tokens at most.", min=2)]
Memory = Annotated[Path, typer.Argument(help="A memory's folder.", metavar="MEMORY")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in --out.")]
Preset = Annotated[str, typer.Option(help="Where the defaults come from: tuned or paper.")]
Seed = Annotated[int, typer.Option(help="Set before each method.")]
Text = Annotated[str, typer.Argument(help="A UTF-8 text file, or - for stdin.", metavar="TEXT")]
Width = Annotated[int | None, typer.Option("--r", "--width", help="Memory width, LoRA rank.", min=1)]


@dataclass(frozen=True)
class BaseOptions:
    """The base."""

    model: Annotated[
        str | None,
        typer.Option(help="A causal LM: folder or hub name. Default: the embedded backbone.", metavar="NAME"),
    ] = None
    dtype: Dtype = "auto"
    device: Device = "auto"


@dataclass(frozen=True)
class MethodOptions:
    """The method."""

    # Named as the fields of `methods.Settings`, which they become.
    preset: Preset = "tuned"
    r: Width = None
    init: Annotated[
        str | None,
        typer.Option(help="How a memory begins: topk, bottomk, random, gaussian, activation or write (locas-mlp)."),
    ] = None
    learning_rate: Annotated[float | None, typer.Option("--lr", help="Learning rate. Default: the preset's.")] = None
    scaling: Annotated[
        float | None, typer.Option(help="Multiplies tau, the memory's output scale. Default: the preset's.")
    ] = None
    row_norm: Annotated[
        float | None, typer.Option(help="Norm of a memory's rows at the start: above 1 its slots are sharper.")
    ] = None
    max_slot_norm: Annotated[
        float | None, typer.Option(help="Radius of the norm clip, 0 for no clip. Default: the paper's 1.", min=0.0)
    ] = None
    update: Annotated[
        str | None, typer.Option(help="Of a written memory: bp trains its slots too, nlsvd only writes and folds.")
    ] = None
    epsilon: Annotated[float | None, typer.Option(help="Length of a written value. Default: the preset's.")] = None
    slots_per_chunk: Annotated[int | None, typer.Option(help="Tokens of a chunk that are written.", min=1)] = None
    layers_to_transform: Annotated[
        str | None, typer.Option("--layers", help="Only these: upper, or 3,4,5. Default: all.", metavar="LIST")
    ] = None
    gradient: Annotated[
        str | None, typer.Option(help="full, or tokenwise: not through attention, in three quarters of the time.")
    ] = None
    anchor: Annotated[
        float | None, typer.Option(help="How hard a memory is held to the base on text of the base's own.", min=0.0)
    ] = None
    anchor_every: Annotated[int | None, typer.Option(help="Held at one step in so many.", min=1)] = None
    window: Annotated[
        int | None, typer.Option(help="Tokens the model sees at once. Default: 512; with --model up to 2048.", min=1)
    ] = None
    stride: Annotated[
        int | None, typer.Option(help="Tokens between two learning steps. Default: window / 2.", min=1)
    ] = None
    context: Annotated[
        str | None, typer.Option(help="cache keeps keys and values, recompute reads again (default with --model).")
    ] = None
    epochs: Annotated[int, typer.Option(help="Learning passes over each chunk.", min=1)] = 1
    seed: Seed = 0

    def to_fields(self) -> dict[str, Any]:
        """Gives the fields of `methods.Settings`; None stands for "not given".

        Raises:
            ValueError: the layers are neither "upper" nor numbers.
        """
        return {**dataclasses.asdict(self), "layers_to_transform": _parse_layers(self.layers_to_transform)}


@dataclass(frozen=True)
class TextOptions:
    """The text."""

    max_tokens: MaxTokens = None
    unwrap: Annotated[
        bool | None,
        typer.Option(
            "--unwrap/--no-unwrap",
            help="Join hard-wrapped lines to paragraphs first. Default: for the embedded backbone only.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class TeachingOptions:
    """The teaching."""

    readings: Annotated[int, typer.Option(help="How often a text is read.", min=1)] = 1
    objective: Annotated[str, typer.Option(help="nll, or distill: learn from a longer window.")] = "nll"
    teacher_window: Annotated[int | None, typer.Option(help="Tokens that the teacher sees, for distill.", min=1)] = (
        None
    )
    token_weighting: Annotated[str, typer.Option(help="uniform, or loss: a token counts by its own loss.")] = "uniform"

    def to_recipe(self) -> Recipe:
        from ..studies.run import Recipe

        return Recipe(**dataclasses.asdict(self))


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the signature that Typer reads: each field of its groups of options an option of its own.

    A group's first line of documentation is the title of its box in the help.

    Args:
        function: a command; those of its parameters that are annotated with a dataclass are groups.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    shown: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        options = _list_options(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
        shown |= {option.name: option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        function(**values)

    run.__signature__ = inspect.Signature(list(shown.values()))
    run.__annotations__ = {option.name: option.annotation for option in shown.values()}
    return run


def _list_options(group: type) -> list[inspect.Parameter]:
    hints, title = get_type_hints(group, include_extras=True), inspect.getdoc(group).splitlines()[0].rstrip(".")
    options = []
    for field in dataclasses.fields(group):
        kind, option = get_args(hints[field.name])
        option = copy.copy(option)
        option.rich_help_panel = title
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[kind, option],
            )
        )
    return options


def _parse_layers(layers: str | None) -> list[int] | str | None:
    if layers is None or layers == "upper":
        return layers
    try:
        return [int(index) for index in layers.split(",")]
    except ValueError:
        raise ValueError(
            f"--layers must be upper, or indices separated by commas, got {layers!r}: write 3,4,5, say"
        ) from None
