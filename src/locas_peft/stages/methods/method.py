"""What a method is: its values of the settings, its adapter, and the steps that write it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from locas_settings import AdapterSettings, ReadSettings

from ...checks import invalid
from ...ttt.steps import Step

__all__ = ["PAPER", "STUDY_ANCHOR", "TUNED", "Method", "Unused", "find_layers"]

Unused = list[tuple[str, tuple[str, ...]]]
"""Fields whose values make other fields meaningless, each with the names of these."""

_ALL_LAYERS = {"layers_to_transform": None}
_NO_ANCHOR = {"anchor": None, "anchor_every": 4}
# The paper names no schedule: a constant learning rate.
PAPER: dict[str, Any] = {**_ALL_LAYERS, **_NO_ANCHOR, "decay_steps": 0}
# A falling learning rate, so that one rate serves texts of all lengths.
TUNED: dict[str, Any] = {**_ALL_LAYERS, **_NO_ANCHOR, "decay_steps": 100}
STUDY_ANCHOR = 3.9
"""The anchor's weight at the end of a study, with a memory beside gated FFNs and with LoRA."""


class Method:
    """What a stage attaches to the base, and how that learns. Each method is a subclass.

    For each preset, `reading` has the values of all settings of a reading that the method has.
    `study` has those of a study; it is None for a method that cannot study. A setting that is
    missing there has no meaning for the method.
    """

    name: ClassVar[str]
    reading: ClassVar[dict[str, dict[str, Any]]]
    study: ClassVar[dict[str, Any] | None] = None

    def list_unused(self, values: dict[str, Any], given: Mapping[str, Any]) -> Unused:
        """Return each setting whose value makes others meaningless, with the names of those."""
        if values.get("anchor"):
            return []
        return [("anchor", ("anchor_every",))]

    def complete(self, defaults: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the settings in `defaults`: those given, or else the defaults.

        None stands for a setting that another one makes meaningless. A given setting that is
        meaningless, or that the method does not have, is a `ValueError`.
        """
        for name, value in given.items():
            if name not in defaults:
                raise _meaningless(name, f"for the method {self.name!r}", value)
        values = {**defaults, **given}
        for field, unused in self.list_unused(values, given):
            for name in unused:
                if name in given:
                    raise _meaningless(name, f"with {field}={values[field]!r}", given[name])
                if name in values:
                    values[name] = None
        return values

    def make_config(self, settings: AdapterSettings, base: PreTrainedModel) -> PeftConfig | None:
        """Return a fresh adapter's configuration; None for no adapter.

        A base that the method does not fit is a `ValueError`.
        """
        return None

    def make_writers(self, settings: ReadSettings, model: nn.Module) -> list[Step]:
        """Return the steps that write into the adapter while it reads."""
        return []


def find_layers(settings: AdapterSettings, base: PreTrainedModel) -> list[int] | None:
    """Return the layer indices that `layers_to_transform` means for a base; None for all layers.

    The upper half of an odd number of layers is the larger half. An index beyond the model's is a
    `ValueError`.
    """
    layers = settings.layers_to_transform
    depth = base.config.get_text_config().num_hidden_layers
    if layers is None:
        return None
    if layers == "upper":
        return list(range(depth // 2, depth))
    highest = max(layers)
    if highest >= depth:
        rule = f"lie below {depth}, the layers of {type(base).__name__}"
        raise invalid("layers_to_transform", rule, str(highest), "lower it")
    return sorted(layers)


def _meaningless(name: str, where: str, value: Any) -> ValueError:
    return ValueError(f"{name} has no meaning {where}, got {value}: leave it out")
