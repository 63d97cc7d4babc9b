"""The settings of a reading: test-time training on a text."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from cyclopts import Parameter

from .adapter import AdapterSettings, Check, parse_name
from .checks import check_choice, check_number, check_whole, invalid

__all__ = ["CONTEXTS", "LEARNED_BY", "PRESETS", "UPDATES", "ReadSettings"]

PRESETS = ("paper", "tuned")
UPDATES = ("bp", "nlsvd", "ridge")
CONTEXTS = ("recompute", "cache")
LEARNED_BY = ("preset", "update")
"""The settings that a reading keeps from the memory's last reading when it goes on with it."""


@dataclass(frozen=True, kw_only=True)
class ReadSettings(AdapterSettings):
    """How a text is read: each chunk is scored first and learned second."""

    preset: Annotated[
        str,
        Parameter(
            converter=parse_name,
            help="where the values that are not given come from: tuned or paper.",
        ),
    ] = "tuned"
    update: Annotated[
        str | None,
        Parameter(
            help="bp: an optimizer trains the memory. ridge: the values are solved for in closed "
            "form; with a learning rate the rows are trained too (locas-glu). With init write "
            "(locas-mlp): bp writes slots and trains them, nlsvd only writes them, ridge writes a "
            "linear map."
        ),
    ] = None
    epsilon: Annotated[float | None, Parameter(help="length of a written value.")] = None
    slots_per_chunk: Annotated[
        int | None, Parameter(help="how many tokens of a chunk are written.")
    ] = None
    anchor_every: Annotated[
        int | None, Parameter(help="every n-th optimizer step pulls to the base; 4 by default.")
    ] = None
    window: Annotated[
        int | None,
        Parameter(
            help="tokens that the model sees at once, context and chunk; by default 2048, 512 for "
            "the embedded models, at most the model's positions."
        ),
    ] = None
    stride: Annotated[
        int | None,
        Parameter(help="tokens between two learning steps; half the window where not given."),
    ] = None
    context: Annotated[
        str | None,
        Parameter(
            help="cache, the default where the base can use it, keeps the context's keys and "
            "values; recompute feeds it again."
        ),
    ] = None
    readings: Annotated[
        int,
        Parameter(
            help="how often the text is read. Of a text of 6 chunks or more, a trained memory is "
            "the mean of the memories after each reading."
        ),
    ] = 1
    warmup_steps: Annotated[
        int, Parameter(help="optimizer steps with a smaller rate at the start.")
    ] = 2
    decay_steps: Annotated[
        int | None,
        Parameter(
            help="the rate is divided by the root of 1 + steps / this; 0 for a constant rate. By "
            "default 100, in the preset paper 0."
        ),
    ] = None

    CHECKS: ClassVar[dict[str, Check]] = {
        **AdapterSettings.CHECKS,
        "preset": partial(check_choice, choices=PRESETS),
        "update": partial(check_choice, choices=UPDATES),
        "epsilon": check_number,
        "slots_per_chunk": partial(check_whole, least=1),
        "anchor_every": partial(check_whole, least=1),
        "window": partial(check_whole, least=1),
        "stride": partial(check_whole, least=1),
        "context": partial(check_choice, choices=CONTEXTS),
        "readings": partial(check_whole, least=1),
        "warmup_steps": partial(check_whole, least=0),
        "decay_steps": partial(check_whole, least=0),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride is None or self.window is None or self.stride <= self.window:
            return
        got = f"stride {self.stride} with window {self.window}"
        raise invalid("stride", "be at most window", got, "lower stride or raise window")
