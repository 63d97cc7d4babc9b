"""The settings that both stages share: the adapter, its seed, and the part of the text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from .checks import check_choice, check_flag, check_number, check_whole, invalid

__all__ = ["LARGEST", "METHODS", "SHAPE", "AdapterSettings", "GivenName", "parse_name"]

METHODS = ("none", "lora", "locas-glu", "locas-mlp")
LARGEST = 2**48
"""The largest whole number: the size in bytes of a tensor with so many rows fits 64 bits."""
SHAPE = (
    "method",
    "r",
    "layers_to_transform",
    "init",
    "output_scale",
    "scaling",
    "max_slot_norm",
    "gains",
)
"""The settings that a memory keeps when another stage goes on with it."""


class GivenName(str):
    """A name that the command line was given, which may also be the default one."""

    __slots__ = ()


Check = Callable[[str, Any], None]


def parse_name(type_: Any, tokens: Sequence) -> str:
    """Return the value of an option as a `GivenName`."""
    return GivenName(tokens[0].value)


def _convert_layers(type_: Any, tokens: Sequence) -> list[int] | str:
    """Return the value of the option --layers."""
    return parse_layers(tokens[0].value)


def parse_layers(value: str) -> list[int] | str:
    """Parse layers: "upper", or indices separated by commas; others are a `ValueError`."""
    if value == "upper":
        return value
    try:
        return [int(index) for index in value.split(",")]
    except ValueError:
        rule = "must be upper, or indices separated by commas"
        raise ValueError(f"{rule}, got {value!r}: write 3,4,5, say") from None


def check_layers(name: str, layers: Any) -> None:
    """Raise a `ValueError` unless layers are "upper" or a list of different indices."""
    if layers == "upper":
        return
    indices = layers if isinstance(layers, list) else []
    whole = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in indices)
    if not indices or not whole or len(set(indices)) < len(indices):
        rule = "be 'upper' or a list of different layer indices from 0 on"
        raise invalid(name, rule, repr(layers), "leave it out for all layers")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """What both stages are told of the adapter and the text.

    None stands for a value that is not given: the method's own value, or the preset's, takes its
    place (`locas_peft.stages.complete`). A value out of range is a `TypeError` or `ValueError`.
    """

    method: Annotated[
        str,
        Parameter(
            converter=parse_name,
            help="lora, locas-glu (gated FFNs) or locas-mlp (two-layer FFNs); for locas read also "
            "none.",
        ),
    ] = "locas-glu"
    r: Annotated[
        int | None, Parameter(alias="--width", help="memory width, or LoRA rank; 64 by default.")
    ] = None
    init: Annotated[
        str | None,
        Parameter(
            help="how a memory's rows are made: topk, bottomk, random, gaussian, activation, or "
            "write (locas-mlp, for locas read alone)."
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Parameter(
            name="--lr",
            help="of AdamW, after the warm-up. By default 4e-3 for locas-glu, 8e-3 for locas-mlp "
            "and 1e-3 for lora; 1.5 times as much in a study.",
        ),
    ] = None
    output_scale: Annotated[
        str | None,
        Parameter(
            help="measured: from the calibration text, so that one rate serves all hosts; paper: "
            "the mean norm of the FFN's down columns, divided by r."
        ),
    ] = None
    scaling: Annotated[float | None, Parameter(help="multiplies the output scale.")] = None
    max_slot_norm: Annotated[
        float | None, Parameter(help="radius of the norm clip; 0 for no clip.")
    ] = None
    gains: Annotated[
        bool | None,
        Parameter(negative="", help="train a factor for each neuron of the base's FFNs too."),
    ] = None
    layers_to_transform: Annotated[
        Any,
        Parameter(
            name="--layers",
            converter=_convert_layers,
            help="the layers that get an adapter: upper for the upper half, or indices such as "
            "3,4,5; all where not given.",
        ),
    ] = None
    anchor: Annotated[
        float | None,
        Parameter(
            help="weight of the KL divergence from the base on text, and in a study on answers, "
            "that the base wrote; 0 for none. By default 0.3 for a reading by locas-glu, 3.9 for a "
            "study by locas-glu or lora, else none."
        ),
    ] = None
    max_tokens: Annotated[
        int | None, Parameter(help="the first tokens of the text; all where not given.")
    ] = None
    seed: Annotated[int, Parameter(help="of torch, set before the adapter is made.")] = 0
    model: Annotated[str | None, Parameter(parse=False)] = None
    dtype: Annotated[str | None, Parameter(parse=False)] = None

    # From a field to the check of its value. Subclasses add their own.
    CHECKS: ClassVar[dict[str, Check]] = {
        "r": partial(check_whole, least=1),
        "gains": check_flag,
        "scaling": check_number,
        "max_slot_norm": partial(check_number, may_be_0=True),
        "layers_to_transform": check_layers,
        "anchor": partial(check_number, may_be_0=True),
        "max_tokens": partial(check_whole, least=2),
        "seed": partial(check_whole, least=-LARGEST),
    }

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        for name in ("model", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise invalid(name, "be a string", repr(value), "give its name")
        for name, value in vars(self).items():
            if isinstance(value, int) and abs(value) > LARGEST:
                raise invalid(name, f"be at most {LARGEST:,}", f"{value:,}", "lower it")
        if self.learning_rate is not None:
            _check_learning_rate(self.learning_rate)
        for name, check in self.CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                check(name, value)

    @property
    def base_name(self) -> str:
        """The name of the base, which complete settings have."""
        assert self.model is not None, "the settings are not complete"
        return self.model

    def list_given(self) -> dict[str, Any]:
        """Return the fields that have a value, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _check_learning_rate(rate: float) -> None:
    if isinstance(rate, str) or not 0 < rate < float("inf"):
        remedy = "give one, 1e-3 say; to read without learning, give the model without its adapter"
        raise invalid("learning_rate", "be a number above 0", repr(rate), remedy)
