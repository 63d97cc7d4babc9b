"""The settings of a study: the model asks itself about a text and learns the answers without it."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from cyclopts import Parameter

from .adapter import AdapterSettings, Check
from .checks import check_whole

__all__ = ["StudySettings"]


@dataclass(frozen=True, kw_only=True)
class StudySettings(AdapterSettings):
    """How a text is studied."""

    window: Annotated[
        int | None, Parameter(help="the first tokens of the text, which calibrate a fresh memory.")
    ] = None
    exchanges: Annotated[
        int | None,
        Parameter(
            help="questions that the model writes about each passage, at most; 12 by default."
        ),
    ] = None
    passes: Annotated[
        int | None,
        Parameter(
            help="the most times that each exchange is learned; 4, or more for few, by default."
        ),
    ] = None
    writer: Annotated[
        str | None,
        Parameter(
            help="another model, which writes the questions: a folder, hub name or GGUF file."
        ),
    ] = None

    CHECKS: ClassVar[dict[str, Check]] = {
        **AdapterSettings.CHECKS,
        "window": partial(check_whole, least=1),
        "exchanges": partial(check_whole, least=1),
        "passes": partial(check_whole, least=1),
    }
