"""The settings of a reading: given flat, and completed once, into those of the training, the method and the study."""

import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from .. import backbone
from ..checks import check_choice, check_whole
from ..model import count_positions
from ..model.causal_lm import CausalLM, check_window
from ..ttt import TrainingSettings
from .methods import METHOD_FIELDS, METHODS, PRESETS, Method, check_fields, checked

__all__ = [
    "AnySettings",
    "CompleteSettings",
    "ReadingSettings",
    "StudySettings",
    "complete_all",
    "parse_method",
]

_SEEN = ("window", "stride", "context")
_TRAINING = tuple(field.name for field in dataclasses.fields(TrainingSettings))
_AT_LEAST_1 = partial(check_whole, least=1)


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """A self-study: after reading, the model asks itself about the text, and learns the answers without the text.

    Args:
        exchanges: questions wanted about each sentence; None for 6 or 12 (see `SelfStudy`).
        passes: the most times that each exchange is learned; None for 4, or more for few.
    """

    exchanges: int | None = checked(_AT_LEAST_1, default=None)
    passes: int | None = checked(_AT_LEAST_1, default=None)

    def __post_init__(self) -> None:
        check_fields(StudySettings, vars(self))


_STUDY = tuple(field.name for field in dataclasses.fields(StudySettings))


@dataclass(frozen=True, kw_only=True)
class CompleteSettings:
    """How a text is read, with nothing left open. `ReadingSettings.complete` makes it.

    `study` is None for none, `max_tokens` None for the whole text. Torch gets the `seed` before the adapter is made.
    `preset`, where values that were not given came from, and `model` and `dtype`, the base's, are for the record. A
    study without an adapter that is trained is a `ValueError`.
    """

    method: Method
    training: TrainingSettings
    study: StudySettings | None
    preset: str
    max_tokens: int | None
    seed: int
    model: str
    dtype: str

    def __post_init__(self) -> None:
        if self.study is not None and self.training.learning_rate is None:
            update = vars(self.method).get("update")
            got = f"method {self.method.name!r}" + (
                "" if update is None else f" with update {update!r}"
            )
            raise ValueError(
                f"study needs an adapter that is trained, got {got}: use locas-glu or lora, say"
            )

    @property
    def separates(self) -> bool:
        """Whether a fresh memory gets rows that tell passages apart, and no norm clip (`discriminants.py`)."""
        default = getattr(self.method, "init", None) == "topk" and self.method.max_slot_norm is None
        return default and self.study is not None

    def complete(
        self, base: PreTrainedModel | None = None, tokenizer: Any = None
    ) -> "CompleteSettings":
        """Return these settings: they are complete."""
        return self

    def for_base(self, **training: Any) -> "CompleteSettings":
        """Return the settings of a reading without an adapter that sees the same tokens in the same windows.

        `training` has fields of `TrainingSettings` with other values.
        """
        seen = {name: getattr(self.training, name) for name in _SEEN}
        alone = TrainingSettings(**{**seen, "learning_rate": None, **training})
        return dataclasses.replace(self, method=METHODS["none"](), training=alone, study=None)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as flat JSON values, as `ReadingSettings` names them; None for one without meaning."""
        training = vars(self.training)
        has = self.method.presets[self.preset]
        values = {
            name: value
            for name, value in training.items()
            if name in has or name not in METHOD_FIELDS
        }
        if self.training.learning_rate is None:
            values["decay_steps"] = None
        values |= {
            **vars(self),
            **vars(self.method),
            "method": self.method.name,
            "study": self.study is not None,
        }
        values |= {} if self.study is None else vars(self.study)
        return {name: values.get(name) for name in FIELDS}


FIELDS = (
    *_TRAINING, "method", "preset", *(name for name in METHOD_FIELDS if name not in _TRAINING), "max_tokens",
    "study", *_STUDY, "seed", "model", "dtype",
)  # fmt: skip
"""The settings of a reading, in the order in which its record has them."""
_DEFAULTS = {"method": "locas-glu", "preset": "tuned", "study": False, "seed": 0}
_FIELDS = [(name, Any, _DEFAULTS.get(name)) for name in FIELDS]
_Given = dataclasses.make_dataclass("_Given", _FIELDS, frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class ReadingSettings(_Given):
    """How a text is read, as far as it is given. `complete` takes the rest from the preset and the base.

    Args:
        method: one of `METHODS`.
        preset: where the values that are not given come from: tuned or paper.
        study: whether a self-study follows (see `StudySettings`).
        max_tokens, seed, model, dtype: as in `CompleteSettings`.
        fields: those of `TrainingSettings`, of the method (`r`, `anchor`, ...; see `locas memorize --help`), and of
            `StudySettings`. None, or a field that is left out, stands for a value that is not given.

    A value out of range is a `TypeError` or `ValueError`.
    """

    def __post_init__(self) -> None:
        check_choice("preset", self.preset, PRESETS)
        check_choice("method", self.method, METHODS)
        if not isinstance(self.study, bool):
            raise TypeError(f"study must be true or false, got {self.study!r}: give one of the two")
        given = self._list_given()
        # Checked with what is completed later, and here, before a command loads its model.
        training = {name: given[name] for name in _TRAINING if name in given}
        TrainingSettings(**{"window": sys.maxsize, "stride": 1, "learning_rate": None, **training})
        for part in (*METHODS.values(), StudySettings):
            check_fields(part, given)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 2)

    def complete(self, base: PreTrainedModel | None = None) -> CompleteSettings:
        """Return the settings of every part of a reading; a value that was given but has no meaning is a `ValueError`.

        Args:
            base: the model that reads; None where window, stride and context are given, or 512, 256 and "cache" fit.
        """
        given, cls = self._list_given(), METHODS[self.method]
        values = cls.choose(
            self.preset, {name: given.pop(name) for name in METHOD_FIELDS if name in given}
        )
        study = {name: given[name] for name in _STUDY if name in given}
        for name, value in study.items() if not self.study else ():
            raise ValueError(f"{name} has no meaning without study, got {value}: leave it out")
        model = self.model
        if model is None:
            model = backbone.NAME if base is None else backbone.name_of(base.name_or_path)
        embedded = base is None or backbone.is_embedded(model)
        positions = None if base is None else count_positions(base)
        window = self.window or min(512 if embedded else 2048, positions or 2048)
        check_window(window, positions)
        found = {
            "window": window,
            "stride": max(1, window // 2),
            "context": "cache" if base is None or CausalLM(base).can_cache() else "recompute",
        }
        training = {"learning_rate": None, **found, **given}
        training |= {name: value for name, value in values.items() if value is not None}
        return CompleteSettings(
            method=cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)}),
            training=TrainingSettings(
                **{name: training[name] for name in _TRAINING if name in training}
            ),
            study=StudySettings(**study) if self.study else None,
            preset=self.preset,
            max_tokens=self.max_tokens,
            seed=self.seed,
            model=model,
            dtype=self.dtype
            or ("float32" if base is None else str(base.dtype).removeprefix("torch.")),
        )

    def _list_given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


AnySettings = ReadingSettings | CompleteSettings


def complete_all(
    settings: ReadingSettings,
    methods: Sequence[str],
    base: PreTrainedModel | None = None,
) -> dict[str, CompleteSettings]:
    """Complete the settings for each of several methods, such as "lora@16:2e-3", by names such as "lora@16-lr2e-3".

    A value is used by the methods that have it. An unknown or repeated method, or a value that none of them has, is a
    `ValueError`. For the base see `ReadingSettings.complete`.
    """
    completed, used = {}, set()
    for spec in methods:
        name, own = parse_method(spec)
        has = METHODS[name].presets[settings.preset]
        used |= has.keys() - own.keys()
        values = dict.fromkeys(field for field in METHOD_FIELDS if field not in has)
        label = spec.replace(":", "-lr")
        if label in completed:
            raise ValueError(
                f"methods must name each once, got {spec!r} twice: drop the second one"
            )
        if not has:  # a method that learns nothing
            values |= {"study": False, **dict.fromkeys(_STUDY)}
        each = dataclasses.replace(settings, method=name, **{**values, **own})
        completed[label] = each.complete(base)
    for field in METHOD_FIELDS:
        if getattr(settings, field) is not None and field not in used:
            raise ValueError(
                f"{field} has no meaning for the methods {', '.join(methods)}: leave it out"
            )
    return completed


def parse_method(spec: str) -> tuple[str, dict[str, Any]]:
    """Split NAME[@WIDTH][:RATE] into the method's name and the fields `r` and `learning_rate` that are given."""
    match = re.fullmatch(r"([^@:]+)(?:@([1-9]\d*))?(?::(\d+\.?\d*(?:[eE][+-]?\d+)?))?", spec)
    if match is None or (match[3] and not 0 < float(match[3]) < math.inf):
        raise ValueError(
            f"method must be NAME, NAME@WIDTH, NAME:RATE or both, got {spec!r}: write lora@16:2e-3, say"
        )
    check_choice("method", match[1], METHODS)
    own = {"r": match[2] and int(match[2]), "learning_rate": match[3] and float(match[3])}
    return match[1], {field: value for field, value in own.items() if value is not None}
