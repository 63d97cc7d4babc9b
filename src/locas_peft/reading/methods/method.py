"""What the methods share: fields with their rules, values in each preset, and the adapter for a base."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from ...checks import check_choice, check_number, check_whole
from ...slots import SlotWriter
from ...tuner import STRATEGIES, LocasConfig, find_ffns

__all__ = ["PAPER", "PRESETS", "TUNED", "Adapter", "Memory", "Method", "check_fields", "checked", "find_layers"]

PRESETS = ("paper", "tuned")
_LEARNING = {"layers_to_transform": None, "anchor": None, "anchor_every": 4, "gradient": "full"}
PAPER: dict[str, Any] = {**_LEARNING, "decay_steps": 0, "brake": False}
"""The values of all methods that learn, as in the paper: a constant rate."""
TUNED: dict[str, Any] = {**_LEARNING, "decay_steps": 100, "brake": True}
"""A falling rate, so that one rate serves texts of all lengths, and the brake."""


def checked(check: Callable[[str, Any], None], **options: Any) -> Any:
    """Return a dataclass field whose values are checked by `check(name, value)`; None is not."""
    return dataclasses.field(metadata={"check": check}, **options)


def check_fields(cls: Any, values: Mapping[str, Any]) -> None:
    """Check those of the values that are fields of a dataclass by the rules of its fields."""
    for field in dataclasses.fields(cls):
        if "check" in field.metadata and values.get(field.name) is not None:
            field.metadata["check"](field.name, values[field.name])


def check_layers(name: str, layers: Any) -> None:
    indices = layers if isinstance(layers, list) else []
    whole = all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices)
    if layers != "upper" and (not indices or not whole or len(set(indices)) < len(indices)):
        raise ValueError(
            f"{name} must be 'upper' or a list of different layer indices from 0 on, got {layers!r}: leave it out for "
            "all layers"
        )


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a reading attaches to the base, and how that learns. Each method is a subclass.

    Attributes:
        name: of the method.
        presets: for each of `PRESETS` the values of all settings that the method has: its own fields, and those of
            `TrainingSettings` that concern learning. A setting that is missing has no meaning for the method.

    Raises:
        TypeError, ValueError: a value out of range; one line with the field, its rule, its value and the remedy.
    """

    name: ClassVar[str]
    presets: ClassVar[dict[str, dict[str, Any]]]
    r: ClassVar[int | None] = None
    anchor: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_fields(self, vars(self))

    @classmethod
    def choose(cls, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all settings that the method has: those given, or else the preset's.

        None stands for a setting that another one makes meaningless.

        Raises:
            ValueError: such a setting is given, or one that the method does not have.
        """
        values = dict(cls.presets[preset])
        for name, value in given.items():
            if name not in values:
                raise ValueError(f"{name} has no meaning for the method {cls.name!r}, got {value}: leave it out")
            values[name] = value
        for field, unused in cls.list_unused(values):
            for name in unused:
                if name in given:
                    raise ValueError(
                        f"{name} has no meaning with {field}={values[field]!r}, got {given[name]}: leave it out"
                    )
                values[name] = None
        return values

    @classmethod
    def list_unused(cls, values: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
        """Return each setting whose value makes others meaningless, with the names of those."""
        return []

    def make_config(self, base: PreTrainedModel, seed: int) -> PeftConfig | None:
        """Return the configuration of a fresh adapter for a base; None where the model only reads.

        Raises:
            ValueError: the method does not fit the base.
        """
        raise NotImplementedError

    def make_writer(self, model: nn.Module) -> SlotWriter | None:
        """Return what writes tokens into the adapter's slots while it reads; None where nothing does."""
        return None


@dataclass(frozen=True, kw_only=True)
class Adapter(Method):
    """A method that trains an adapter.

    Args:
        r: width of the adapter.
        layers_to_transform: the layers that get an adapter: "upper", or their indices; None for all.
        anchor: weight of the KL to the base on text that the base wrote; 0 or None for none.
        anchor_every: every n-th optimizer step pulls to the base; None without an anchor.
    """

    r: int = checked(partial(check_whole, least=1))
    layers_to_transform: list[int] | str | None = checked(check_layers)
    anchor: float | None = checked(partial(check_number, may_be_0=True))
    anchor_every: int | None = checked(partial(check_whole, least=1))

    @classmethod
    def list_unused(cls, values: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
        return [] if values["anchor"] else [("anchor", ("anchor_every",))]


@dataclass(frozen=True, kw_only=True)
class Memory(Adapter):
    """A LOCAS memory; its other fields are those of `LocasConfig`.

    Args:
        init: the strategy that makes the memory's rows.
        max_slot_norm: radius of the norm clip; 0 for no clip, None for the default of `LocasConfig`.
    """

    gated: ClassVar[bool]
    other: ClassVar[str]
    init: str = checked(partial(check_choice, choices=STRATEGIES))
    output_scale: str
    scaling: float = checked(check_number)
    row_norm: float | None = checked(check_number)
    max_slot_norm: float | None = checked(partial(check_number, may_be_0=True))

    def make_config(self, base: PreTrainedModel, seed: int) -> LocasConfig:
        kinds = {True: "gated", False: "two-layer"}
        if {ffn.gated for ffn in find_ffns(base).values()} == {not self.gated}:
            raise ValueError(
                f"method {self.name!r} needs {kinds[self.gated]} FFNs, got {type(base).__name__} with "
                f"{kinds[not self.gated]} ones: use {self.other!r}"
            )
        norms = {} if self.row_norm is None else {"row_norm": self.row_norm}
        if self.max_slot_norm is not None:
            norms["max_slot_norm"] = self.max_slot_norm or None
        return LocasConfig(
            r=self.r,
            init_strategy=self.init,
            output_scale=self.output_scale,
            scaling=self.scaling,
            layers_to_transform=find_layers(base, self.layers_to_transform),
            **norms,
            seed=seed,
            task_type="CAUSAL_LM",
        )


def find_layers(base: PreTrainedModel, layers: list[int] | str | None) -> list[int] | None:
    """Return the layer indices that `layers_to_transform` means for a model; None for all layers.

    The upper half of an odd number of layers is the larger half. An index beyond the model's is a `ValueError`.
    """
    if layers is None:
        return None
    depth = base.config.get_text_config().num_hidden_layers
    if layers == "upper":
        return list(range(depth // 2, depth))
    beyond = next((index for index in layers if index >= depth), None)
    if beyond is not None:
        raise ValueError(
            f"layers_to_transform must lie below {depth}, the layers of {type(base).__name__}, got {beyond}: lower it"
        )
    return sorted(layers)
