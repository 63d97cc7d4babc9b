"""The settings of a reading: one dataclass that the command line fills in, `memorize` completes and the trainer runs.

`None` stands for a value that was not given. `ReadingSettings.complete` takes it from the preset, and for the window,
the stride and the context from the base.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .. import backbone
from ..checks import check_choice, check_whole
from ..model import count_positions
from ..model.causal_lm import CausalLM, check_window
from ..ttt import TrainingSettings
from ..tuner import STRATEGIES

__all__ = ["METHODS", "PRESETS", "UPDATES", "ReadingSettings", "complete_all", "label_method", "parse_method"]

_LEARNING = {"decay_steps": 0, "layers_to_transform": None, "gradient": "full"}
_LEARNING |= {"anchor": None, "anchor_every": 4, "brake": True}
_MEMORY = {"r": 64, "init": "topk", "output_scale": "measured", "row_norm": None, "max_slot_norm": None, **_LEARNING}
_PAPER = {"output_scale": "paper", "brake": False}
_WRITTEN = {"update": "bp", "epsilon": 0.01, "slots_per_chunk": 8}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # Gated: the paper's tau, divided by r, and the rate of its PG-19 runs. Two-layer: written slot by slot as in the
    # paper, but with tau undivided and a rate from our sweep (benchmarks/README.md).
    "paper": {
        "none": {},
        "lora": {"r": 64, "learning_rate": 1e-3, **_LEARNING, "brake": False},
        "locas-glu": {**_MEMORY, **_PAPER, "learning_rate": 4e-3, "scaling": 1.0},
        # "r" is replaced by the width.
        "locas-mlp": {**_MEMORY, **_PAPER, "init": "write", "learning_rate": 5e-4, "scaling": "r", **_WRITTEN},
    },
    # The measured output scale, so that one rate serves all hosts; a falling rate, so that one serves texts of all
    # lengths; an anchor, which limits changes on other texts; the brake; cloned rows for every memory.
    "tuned": {
        "none": {},
        "lora": {"r": 64, "learning_rate": 1e-3, **_LEARNING, "decay_steps": 100},
        "locas-glu": {**_MEMORY, "learning_rate": 4e-3, "decay_steps": 100, "scaling": 1.0, "anchor": 0.3},
        "locas-mlp": {**_MEMORY, "learning_rate": 8e-3, "decay_steps": 100, "scaling": 4.0, **_WRITTEN},
    },
}
"""For each preset and method the values of the fields that the method has."""

METHODS = tuple(PRESETS["paper"])
UPDATES = ("bp", "nlsvd")
STUDY = {"exchanges": 16, "passes": 4}
"""The fields of a self-study, with their values where not given."""
_STUDY_LEAST = tuple((name, 1) for name in STUDY)
_SEEN = ("window", "stride", "context", "sinks", "start_token", "max_tokens", "seed", "model", "dtype", "preset")
METHOD_FIELDS = tuple(dict.fromkeys(field for values in PRESETS["paper"].values() for field in values))
"""The fields that not every method has."""


@dataclass(frozen=True, kw_only=True)
class ReadingSettings(TrainingSettings):
    """How a text is read. None stands for a value that was not given.

    Args:
        method: none, lora, locas-glu (gated FFNs) or locas-mlp (two-layer FFNs).
        preset: where the values that are not given come from: tuned or paper.
        r: memory width, or LoRA rank.
        init: how a memory's rows are made: topk, bottomk, random, gaussian, activation, or write (locas-mlp).
        learning_rate: of AdamW, after the warm-up.
        output_scale: measured: from the calibration text, so that one rate serves all hosts; paper: tau divided by r.
        scaling: multiplies the output scale.
        row_norm: norm of a memory's rows at the start; above 1 its slots are sharper.
        max_slot_norm: radius of the norm clip; 0 for no clip.
        update: of a memory with init "write": bp also trains its slots, nlsvd only writes and folds them.
        epsilon: length of a written value.
        slots_per_chunk: how many tokens of a chunk are written, those with the highest loss.
        layers_to_transform: the layers that get an adapter: upper, or indices such as 3,4,5; all where not given.
        gradient: full, or tokenwise: not through attention, in three quarters of the time.
        anchor: weight of the KL to the base on text, and in a study on answers, that the base wrote; 0 for none.
        anchor_every: every n-th optimizer step pulls to the base.
        brake: compare with the base now and then, and go back where the text became worse.
        window: tokens that the model sees at once, context and chunk.
        stride: tokens between two learning steps; half the window where not given.
        context: cache keeps the context's keys and values, recompute feeds it again; where not given, the cache if the
            base can use it.
        epochs: optimizer steps on each chunk.
        readings: how often the text is read.
        warmup_steps: optimizer steps with a smaller rate at the start.
        decay_steps: the rate is divided by the root of 1 + steps / this; 0 for a constant rate.
        objective: nll, or distill: learn the distributions of the base with a longer window.
        teacher_window: tokens that the teacher of distill sees.
        token_weighting: uniform, or loss: a token counts in proportion to its own loss.
        max_tokens: the first tokens of the text that are read; all where not given.
        study: after reading, the model asks itself about the text, and learns the answers without the text.
        exchanges: questions wanted about each sentence; 16 where not given.
        passes: how often each exchange is learned; 4 where not given.
        seed: of torch, set before the adapter is made.
        model: name of the base, which the memory records; where not given, that of the base itself.
        dtype: of the base's weights, for the record.

    Raises:
        TypeError, ValueError: a value out of range; one line with the field, its rule, its value and the remedy.
    """

    method: str = "locas-glu"
    preset: str = "tuned"
    r: int | None = None
    init: str | None = None
    learning_rate: float | None = None
    decay_steps: int | None = None
    output_scale: str | None = None
    scaling: float | None = None
    row_norm: float | None = None
    max_slot_norm: float | None = None
    update: str | None = None
    epsilon: float | None = None
    slots_per_chunk: int | None = None
    layers_to_transform: list[int] | str | None = None
    gradient: str | None = None
    anchor: float | None = None
    anchor_every: int | None = None
    brake: bool | None = None
    window: int | None = None
    stride: int | None = None
    context: str | None = None
    max_tokens: int | None = None
    study: bool = False
    exchanges: int | None = None
    passes: int | None = None
    seed: int = 0
    model: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("preset", self.preset, PRESETS)
        check_choice("method", self.method, METHODS)
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name, choices in (("init", STRATEGIES), ("update", UPDATES)):
            if name in given:
                check_choice(name, given[name], choices)
        for name, least in (("r", 1), ("slots_per_chunk", 1), ("anchor_every", 1), ("max_tokens", 2), *_STUDY_LEAST):
            if name in given:
                check_whole(name, given[name], least)
        for name in ("scaling", "row_norm", "epsilon", "max_slot_norm", "anchor"):
            may_be_0 = name in ("max_slot_norm", "anchor")
            number = given.get(name, 1.0)
            if not 0 <= number < math.inf or (number == 0 and not may_be_0):
                rule = "0 or a finite number above" if may_be_0 else "a finite number above 0"
                raise ValueError(f"{name} must be {rule}, got {number}: leave it out for the preset's")
        if self.layers_to_transform is not None:
            _check_layers(self.layers_to_transform)

    def complete(self, base: PreTrainedModel | None = None) -> ReadingSettings:
        """Return the settings with every value filled in that the method has.

        Args:
            base: the model that reads; None where window, stride and context are given, or 512, 256 and "cache" fit.

        Raises:
            ValueError: a value was given that the method does not have, or that another setting makes meaningless.

        Example:
            >>> ReadingSettings(method="locas-glu", r=16).complete().learning_rate
            0.004
        """
        given = {name: getattr(self, name) for name in METHOD_FIELDS if getattr(self, name) is not None}
        preset = PRESETS[self.preset][self.method]
        for name in given:
            if name not in preset:
                raise ValueError(
                    f"{name} has no meaning for the method {self.method!r}, got {given[name]}: leave it out"
                )
        values = {**dict.fromkeys(METHOD_FIELDS), **preset, **given}
        _drop_unused(values, given)
        values |= self._complete_study(values["learning_rate"])
        if values["scaling"] == "r":
            values["scaling"] = float(values["r"])
        model = self.model or (backbone.NAME if base is None else backbone.name_of(base.name_or_path))
        embedded = base is None or backbone.is_embedded(model)
        positions = None if base is None else count_positions(base)
        window = self.window or min(512 if embedded else 2048, positions or 2048)
        check_window(window, positions)
        return dataclasses.replace(
            self,
            **values,
            model=model,
            dtype=self.dtype or ("float32" if base is None else str(base.dtype).removeprefix("torch.")),
            window=window,
            stride=self.stride or max(1, window // 2),
            context=self.context or ("cache" if base is None or CausalLM(base).can_cache() else "recompute"),
        )

    def for_base(self, **changes: Any) -> ReadingSettings:
        """Return the settings of a reading without an adapter that sees the same tokens in the same windows.

        Args:
            changes: fields of these settings with other values.
        """
        same = {name: getattr(self, name) for name in _SEEN}
        return ReadingSettings(method="none", **{**same, **changes})

    def _complete_study(self, learning_rate: float | None) -> dict[str, int]:
        """Return the fields of a self-study; refuse one that cannot be."""
        if self.study and learning_rate is None:
            raise ValueError(
                f"study needs an adapter that is trained, got method {self.method!r}"
                f"{'' if self.update is None else f' with update {self.update!r}'}: use locas-glu or lora, say"
            )
        for name in STUDY:
            if not self.study and getattr(self, name) is not None:
                raise ValueError(f"{name} has no meaning without study, got {getattr(self, name)}: leave it out")
        return {name: getattr(self, name) or value for name, value in STUDY.items()} if self.study else {}


def complete_all(
    settings: ReadingSettings, methods: Iterable[str], base: PreTrainedModel | None = None
) -> dict[str, ReadingSettings]:
    """Complete the settings for each of several methods; a value is used by the methods that have it.

    Each method is NAME[@WIDTH][:RATE], such as "lora@16:2e-3". The result has its name in tables and folders as key:
    "lora@16-lr2e-3".

    Raises:
        ValueError: an unknown or repeated method, or a value that none of the methods has.
    """
    methods = list(methods)
    completed: dict[str, ReadingSettings] = {}
    used: set[str] = set()
    for spec in methods:
        name, own = parse_method(spec)
        has = PRESETS[settings.preset][name]
        used |= has.keys() - own.keys()
        shared = {field: getattr(settings, field) if field in has else None for field in METHOD_FIELDS}
        label = label_method(spec)
        if label in completed:
            raise ValueError(f"methods must name each once, got {spec!r} twice: drop the second one")
        if not has:  # "none" learns nothing
            shared |= {"study": False, **dict.fromkeys(STUDY)}
        completed[label] = dataclasses.replace(settings, method=name, **{**shared, **own}).complete(base)
    for field in METHOD_FIELDS:
        if getattr(settings, field) is not None and field not in used:
            raise ValueError(f"{field} has no meaning for the methods {', '.join(methods)}: leave it out")
    return completed


def label_method(spec: str) -> str:
    """Return the name of a method in tables and folders: "lora@16-lr2e-3" for "lora@16:2e-3"."""
    return spec.replace(":", "-lr")


def parse_method(spec: str) -> tuple[str, dict[str, Any]]:
    """Split NAME[@WIDTH][:RATE] into the method's name and the fields `r` and `learning_rate` that are given."""
    match = re.fullmatch(r"([^@:]+)(?:@([1-9]\d*))?(?::(\d+\.?\d*(?:[eE][+-]?\d+)?))?", spec)
    if match is None or (match[3] and not 0 < float(match[3]) < math.inf):
        raise ValueError(f"method must be NAME, NAME@WIDTH, NAME:RATE or both, got {spec!r}: write lora@16:2e-3, say")
    check_choice("method", match[1], METHODS)
    own = {"r": match[2] and int(match[2]), "learning_rate": match[3] and float(match[3])}
    return match[1], {field: value for field, value in own.items() if value is not None}


def _drop_unused(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Set to None the preset's values that another setting makes meaningless; refuse given ones."""
    rules = [
        ("init", values["init"] != "write", ("update", "epsilon", "slots_per_chunk")),
        ("update", values["update"] == "nlsvd", ("learning_rate", "decay_steps", "anchor")),
        ("anchor", not values["anchor"], ("anchor_every",)),
    ]
    for field, applies, unused in rules:
        for name in unused if applies else ():
            if name in given and values[name] is not None:
                raise ValueError(
                    f"{name} has no meaning with {field}={values[field]!r}, got {values[name]}: leave it out"
                )
            values[name] = None


def _check_layers(layers: Any) -> None:
    indices = layers if isinstance(layers, list) else []
    whole = all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices)
    if layers != "upper" and (not indices or not whole or len(set(indices)) < len(indices)):
        raise ValueError(
            f"layers_to_transform must be 'upper' or a list of different layer indices from 0 on, got {layers!r}: "
            "leave it out for all layers"
        )
