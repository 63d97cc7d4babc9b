"""Complete the settings of a stage: take what is not given from the method and the base."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import PreTrainedModel

from locas_settings import AdapterSettings, ReadSettings, StageSettings

from .. import backbone
from ..checks import check_choice
from ..model import CausalLM, check_window, count_positions
from ..ttt import TrainingSettings
from .methods import METHODS

__all__ = [
    "choose_values",
    "complete",
    "complete_all",
    "for_base",
    "list_settings",
    "parse_method",
    "split_methods",
    "training_settings",
]

_EMBEDDED_WINDOW = 512
_WINDOW = 2048
# Fields that every method has: what is learned, and how the text is seen.
_OF_EVERY_METHOD = {
    "method",
    "preset",
    "seed",
    "model",
    "dtype",
    "max_tokens",
    "window",
    "stride",
    "context",
    "readings",
    "warmup_steps",
    "exchanges",
    "passes",
    "writer",
}

Settings = TypeVar("Settings", bound=StageSettings)


def complete(settings: Settings, base: PreTrainedModel | None = None) -> Settings:
    """Return the settings with nothing left open: None stands for what has no meaning.

    A value that was given but has no meaning for the method is a `ValueError`. Settings that are
    complete are returned as they are.

    Args:
        settings: of a reading or a study.
        base: the causal LM of the stage; None where window, stride and context are given, or 512,
            256 and "cache" fit.
    """
    values = choose_values(settings)
    values |= _describe_base(settings, base)
    values["window"] = _choose_window(settings, base, values["model"])
    if isinstance(settings, ReadSettings):
        values["stride"] = settings.stride or max(1, values["window"] // 2)
        values["context"] = settings.context or _choose_context(base)
    return dataclasses.replace(settings, **values)


def choose_values(settings: StageSettings) -> dict[str, Any]:
    """Return the values of the settings that the method has: those given, or else its own.

    Values that contradict each other, or that the method does not have, are a `ValueError`. No base
    is needed for this.
    """
    method = METHODS[settings.method]
    chosen = {}
    for name, value in settings.list_given().items():
        if name not in _OF_EVERY_METHOD:
            chosen[name] = value
    return method.complete(list_settings(settings), chosen)


def list_settings(settings: StageSettings) -> dict[str, Any]:
    """Return the settings that the method of a stage has, with their default values.

    A method that cannot study is a `ValueError`.
    """
    method = METHODS[settings.method]
    if isinstance(settings, ReadSettings):
        return method.reading[settings.preset]
    if method.study is None:
        problem = f"a study needs an adapter that is trained, got method {method.name!r}"
        raise ValueError(f"{problem}: use locas-glu or lora, say")
    return method.study


def _describe_base(settings: AdapterSettings, base: PreTrainedModel | None) -> dict[str, str]:
    """Return the name and the dtype of the base, for the record of the stage."""
    model = settings.model
    if model is None:
        model = backbone.NAME if base is None else backbone.name_of(base.name_or_path)
    dtype = settings.dtype
    if dtype is None:
        dtype = "float32" if base is None else str(base.dtype).removeprefix("torch.")
    return {"model": model, "dtype": dtype}


def _choose_window(settings: Settings, base: PreTrainedModel | None, model: str) -> int:
    positions = None if base is None else count_positions(base)
    if settings.window is not None:
        check_window(settings.window, positions)
        return settings.window
    embedded = base is None or backbone.is_embedded(model)
    usual = _EMBEDDED_WINDOW if embedded else _WINDOW
    return min(usual, positions or usual)


def _choose_context(base: PreTrainedModel | None) -> str:
    if base is None or CausalLM(base).can_cache():
        return "cache"
    return "recompute"


def training_settings(settings: ReadSettings) -> TrainingSettings:
    """Return the settings of the loop, from complete settings of a reading."""
    assert settings.window is not None
    assert settings.stride is not None
    assert settings.context is not None
    return TrainingSettings(
        window=settings.window,
        stride=settings.stride,
        learning_rate=settings.learning_rate,
        readings=settings.readings,
        context=settings.context,
        warmup_steps=settings.warmup_steps,
        decay_steps=settings.decay_steps or 0,
    )


def for_base(settings: ReadSettings) -> ReadSettings:
    """Return complete settings of one reading without an adapter, in the same windows."""
    return complete(
        ReadSettings(
            method="none",
            preset=settings.preset,
            window=settings.window,
            stride=settings.stride,
            context=settings.context,
            warmup_steps=settings.warmup_steps,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
            model=settings.model,
            dtype=settings.dtype,
        )
    )


def complete_all(
    settings: Settings, methods: Sequence[str], base: PreTrainedModel | None = None
) -> dict[str, Settings]:
    """Complete the settings for several methods, such as "lora@16:2e-3".

    The keys are names such as "lora@16-lr2e-3". Arguments and errors are those of `complete` and
    `split_methods`.
    """
    by_label = split_methods(settings, methods)
    return {label: complete(chosen, base) for label, chosen in by_label.items()}


def split_methods(settings: Settings, methods: Sequence[str]) -> dict[str, Settings]:
    """Return the settings of each of several methods; a value is used by the methods that have it.

    An unknown or repeated method, values that contradict each other, and a value that none of the
    methods has, are a `ValueError`. No base is needed for this.
    """
    chosen: dict[str, Settings] = {}
    unused = settings.list_given().keys() - _OF_EVERY_METHOD
    for spec in methods:
        name, fields = parse_method(spec)
        label = spec.replace(":", "-lr")
        if label in chosen:
            rule = f"methods must name each once, got {spec!r} twice"
            raise ValueError(f"{rule}: drop the second one")
        candidate = dataclasses.replace(settings, method=name)
        known = list_settings(candidate)
        missing = dict.fromkeys(vars(settings).keys() - _OF_EVERY_METHOD - known.keys())
        values = {**missing, **fields}
        chosen[label] = dataclasses.replace(candidate, **values)
        choose_values(chosen[label])
        unused -= known.keys() - fields.keys()
    for field in sorted(unused):
        names = ", ".join(methods)
        raise ValueError(f"{field} has no meaning for the methods {names}: leave it out")
    return chosen


def parse_method(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a method such as "lora@16:2e-3" into its name and the fields that are given.

    The width and the rate may be left out.
    """
    pattern = r"([^@:]+)(?:@([1-9]\d*))?(?::(\d+\.?\d*(?:[eE][+-]?\d+)?))?"
    match = re.fullmatch(pattern, spec)
    if match is None or (match[3] and not 0 < float(match[3]) < math.inf):
        rule = "method must be NAME, NAME@WIDTH, NAME:RATE or both"
        raise ValueError(f"{rule}, got {spec!r}: write lora@16:2e-3, say")
    check_choice("method", match[1], METHODS)
    fields: dict[str, Any] = {}
    if match[2]:
        fields["r"] = int(match[2])
    if match[3]:
        fields["learning_rate"] = float(match[3])
    return match[1], fields
