"""The methods that can read a text: fields with their rules, values in each preset, and the adapter for a base.

A new method is a class here and a row of `METHODS`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..checks import check_choice, check_number, check_whole
from ..slots import RidgeWriter, SlotWriter, ValueWriter, Writer
from ..tuner import STRATEGIES, LocasConfig, find_ffns

__all__ = [
    "METHODS",
    "METHOD_FIELDS",
    "PRESETS",
    "UPDATES",
    "Adapter",
    "Memory",
    "Method",
    "check_fields",
    "checked",
]

PRESETS = ("paper", "tuned")
UPDATES = ("bp", "nlsvd", "ridge")
_WRITING = ("epsilon", "slots_per_chunk")
_TRAINED = ("learning_rate", "decay_steps", "anchor", "anchor_every")
SHAPE = (
    "method",
    "r",
    "layers_to_transform",
    "init",
    "output_scale",
    "scaling",
    "max_slot_norm",
)
"""The settings that a memory keeps when it goes on with another text."""
_LEARNING = {"layers_to_transform": None, "anchor": None, "anchor_every": 4}
# The values of all methods that learn. As in the paper: a constant rate.
PAPER: dict[str, Any] = {**_LEARNING, "decay_steps": 0}
# A falling rate, so that one rate serves texts of all lengths.
TUNED: dict[str, Any] = {**_LEARNING, "decay_steps": 100}


def checked(check: Callable[[str, Any], None], **options: Any) -> Any:
    """Return a dataclass field whose values are checked by `check(name, value)`; None is not."""
    return dataclasses.field(metadata={"check": check}, **options)


def check_fields(cls: Any, values: Mapping[str, Any]) -> None:
    """Check those of the values that are fields of a dataclass by the rules of its fields."""
    for field in dataclasses.fields(cls):
        if "check" in field.metadata and values.get(field.name) is not None:
            field.metadata["check"](field.name, values[field.name])


def _check_layers(name: str, layers: Any) -> None:
    indices = layers if isinstance(layers, list) else []
    whole = all(
        isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices
    )
    if layers != "upper" and (not indices or not whole or len(set(indices)) < len(indices)):
        rule = (
            f"{name} must be 'upper' or a list of different layer indices from 0 on, got {layers!r}"
        )
        raise ValueError(f"{rule}: leave it out for all layers")


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a reading attaches to the base, and how that learns. Each method is a subclass.

    For each of `PRESETS`, `presets` has the values of all settings that the method has: its own fields, and those of
    `TrainingSettings` that concern learning. A setting that is missing has no meaning for the method.
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

        None stands for a setting that another one makes meaningless. A given setting that is meaningless, or that the
        method does not have, is a `ValueError`.
        """
        for name, value in given.items():
            if name not in cls.presets[preset]:
                raise ValueError(
                    f"{name} has no meaning for the method {cls.name!r}, got {value}: leave it out"
                )
        values = {**cls.presets[preset], **given}
        for field, unused in cls.list_unused(values, given):
            for name in unused:
                if name in given:
                    rule = (
                        f"{name} has no meaning with {field}={values[field]!r}, got {given[name]}"
                    )
                    raise ValueError(f"{rule}: leave it out")
                values[name] = None
        return values

    @classmethod
    def list_unused(
        cls, values: dict[str, Any], given: Mapping[str, Any]
    ) -> list[tuple[str, tuple[str, ...]]]:
        """Return each setting whose value makes others meaningless, with the names of those."""
        return []

    def make_config(self, base: PreTrainedModel, seed: int) -> PeftConfig | None:
        """Return a fresh adapter's configuration; None for no adapter. A base that does not fit is a `ValueError`."""
        return None

    def make_writer(self, model: nn.Module) -> Writer | None:
        """Return what writes tokens into the adapter's slots while it reads; None where nothing does."""
        return None


@dataclass(frozen=True, kw_only=True)
class NoAdapter(Method):
    """The base alone, in the windows of the other methods: what their figures are compared with."""

    name = "none"
    presets = {"paper": {}, "tuned": {}}


@dataclass(frozen=True, kw_only=True)
class Adapter(Method):
    """A method that trains an adapter. Its fields are options of `locas memorize`; None for one without meaning."""

    r: int = checked(partial(check_whole, least=1))
    layers_to_transform: list[int] | str | None = checked(_check_layers)
    anchor: float | None = checked(partial(check_number, may_be_0=True))
    anchor_every: int | None = checked(partial(check_whole, least=1))

    @classmethod
    def list_unused(
        cls, values: dict[str, Any], given: Mapping[str, Any]
    ) -> list[tuple[str, tuple[str, ...]]]:
        return [] if values["anchor"] else [("anchor", ("anchor_every",))]

    def find_layers(self, base: PreTrainedModel) -> list[int] | None:
        """Return the layer indices that `layers_to_transform` means for a model; None for all layers.

        The upper half of an odd number of layers is the larger half. An index beyond the model's is a `ValueError`.
        """
        layers, depth = self.layers_to_transform, base.config.get_text_config().num_hidden_layers
        if layers is None:
            return None
        if layers == "upper":
            return list(range(depth // 2, depth))
        if (beyond := max(layers)) >= depth:
            rule = (
                f"layers_to_transform must lie below {depth}, the layers of {type(base).__name__}"
            )
            raise ValueError(f"{rule}, got {beyond}: lower it")
        return sorted(layers)


@dataclass(frozen=True, kw_only=True)
class Lora(Adapter):
    """TempLoRA: LoRA of rank `r`, with alpha = r, on every projection of attention and FFN."""

    name = "lora"
    presets = {
        "paper": {"r": 64, "learning_rate": 1e-3, **PAPER},
        "tuned": {"r": 64, "learning_rate": 1e-3, **TUNED},
    }

    def make_config(self, base: PreTrainedModel, seed: int) -> LoraConfig:
        layers, head = self.find_layers(base), base.get_output_embeddings()
        linear = {
            n: m
            for n, m in base.named_modules()
            if isinstance(m, (nn.Linear, Conv1D)) and m is not head
        }
        return LoraConfig(
            r=self.r,
            lora_alpha=self.r,
            lora_dropout=0.0,
            # PEFT takes layers together with a list of names only.
            target_modules="all-linear"
            if layers is None
            else sorted({name.rpartition(".")[2] for name in linear}),
            layers_to_transform=layers,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in linear.values()),
            task_type="CAUSAL_LM",
        )


@dataclass(frozen=True, kw_only=True)
class Memory(Adapter):
    """A LOCAS memory; its fields are those of `LocasConfig`, but for a `max_slot_norm` of 0, which is no clip."""

    gated: ClassVar[bool]
    other: ClassVar[str]
    init: str = checked(partial(check_choice, choices=STRATEGIES))
    output_scale: str
    scaling: float = checked(check_number)
    max_slot_norm: float | None = checked(partial(check_number, may_be_0=True))
    update: str | None = checked(partial(check_choice, choices=UPDATES))

    def make_config(self, base: PreTrainedModel, seed: int) -> LocasConfig:
        if {ffn.gated for ffn in find_ffns(base).values()} == {not self.gated}:
            needed, found = ("gated", "two-layer") if self.gated else ("two-layer", "gated")
            rule = f"method {self.name!r} needs {needed} FFNs, got {type(base).__name__} with {found} ones"
            raise ValueError(f"{rule}: use {self.other!r}")
        fields = {
            "r": self.r,
            "init_weights": self.init,
            "output_scale": self.output_scale,
            "scaling": self.scaling,
        }
        fields |= (
            {} if self.max_slot_norm is None else {"max_slot_norm": self.max_slot_norm or None}
        )
        return LocasConfig(
            **fields, layers_to_transform=self.find_layers(base), seed=seed, task_type="CAUSAL_LM"
        )


@dataclass(frozen=True, kw_only=True)
class LocasGlu(Memory):
    """A memory beside gated FFNs, of rows that are cloned from the base."""

    name, gated, other = "locas-glu", True, "locas-mlp"
    _ROWS = {
        "r": 64,
        "init": "topk",
        "scaling": 1.0,
        "max_slot_norm": None,
        "learning_rate": 4e-3,
    }
    _ROWS |= {"update": "bp"}
    presets = {
        # The paper's tau, divided by r, and the rate of its PG-19 runs.
        "paper": {**_ROWS, "output_scale": "paper", **PAPER},
        # The measured output scale, so that one rate serves all hosts; an anchor, which limits changes on other texts.
        "tuned": {**_ROWS, "output_scale": "measured", **TUNED, "anchor": 0.3},
    }

    @classmethod
    def list_unused(
        cls, values: dict[str, Any], given: Mapping[str, Any]
    ) -> list[tuple[str, tuple[str, ...]]]:
        if values["update"] == "nlsvd":
            raise ValueError(
                f"update must be bp or ridge for the method {cls.name!r}, got 'nlsvd': leave it out"
            )
        if (
            values["update"] == "ridge" and "learning_rate" not in given
        ):  # with a rate the rows are trained beside
            return [("update", _TRAINED)]
        return super().list_unused(values, given)

    def make_writer(self, model: nn.Module) -> Writer | None:
        return ValueWriter(model) if self.update == "ridge" else None


@dataclass(frozen=True, kw_only=True)
class LocasMlp(Memory):
    """A memory beside two-layer FFNs, of cloned rows or written slot by slot."""

    name, gated, other = "locas-mlp", False, "locas-glu"
    _PAPER = {
        "r": 64,
        "init": "write",
        "output_scale": "paper",
        "scaling": None,
        "learning_rate": 5e-4,
    }
    _TUNED = {
        "r": 64,
        "init": "topk",
        "output_scale": "measured",
        "scaling": 4.0,
        "learning_rate": 8e-3,
    }
    _ROWS = {
        "max_slot_norm": None,
        "update": "bp",
        "epsilon": 0.01,
        "slots_per_chunk": 8,
    }
    presets = {
        # Written slot by slot as in the paper, but with tau undivided (`choose`) and a rate from our sweep.
        "paper": {**_PAPER, **_ROWS, **PAPER},
        "tuned": {**_TUNED, **_ROWS, **TUNED},
    }
    epsilon: float | None = checked(check_number)
    slots_per_chunk: int | None = checked(partial(check_whole, least=1))

    @classmethod
    def choose(cls, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
        values = super().choose(preset, given)
        if values["scaling"] is None:
            values["scaling"] = float(values["r"])
        return values

    @classmethod
    def list_unused(
        cls, values: dict[str, Any], given: Mapping[str, Any]
    ) -> list[tuple[str, tuple[str, ...]]]:
        unused = super().list_unused(values, given)
        if values["init"] != "write":
            return [("init", ("update", *_WRITING)), *unused]
        untrained = {"nlsvd": _TRAINED, "ridge": (*_TRAINED, *_WRITING)}.get(values["update"])
        return unused if untrained is None else [("update", untrained), *unused]

    def make_writer(self, model: nn.Module) -> Writer | None:
        if self.init != "write":
            return None
        if self.update == "ridge":
            return RidgeWriter(model)
        fold = "nlsvd" if self.update == "nlsvd" else "refit"
        options = {
            name: getattr(self, name) for name in _WRITING if getattr(self, name) is not None
        }
        return SlotWriter(model, fold=fold, **options)


METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (NoAdapter, Lora, LocasGlu, LocasMlp)}
METHOD_FIELDS = tuple(
    dict.fromkeys(name for cls in reversed(METHODS.values()) for name in cls.presets["paper"])
)
"""The settings that not every method has: its own, and those of the training of an adapter."""
