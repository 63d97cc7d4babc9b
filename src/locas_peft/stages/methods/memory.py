"""What the methods with a LOCAS memory share: its configuration, and the kind of host it fits."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedModel

from locas_settings import AdapterSettings

from ...checks import check_choice
from ...tuner import STRATEGIES, LocasConfig, find_ffns
from .method import Method, find_layers

__all__ = ["TRAINED", "MemoryMethod", "choose_memory"]

TRAINED = ("learning_rate", "decay_steps", "anchor", "anchor_every")
"""The settings that have no meaning for a memory that is written and not trained."""


class MemoryMethod(Method):
    """A LOCAS memory beside gated or two-layer FFNs."""

    gated: ClassVar[bool]
    other_method: ClassVar[str]

    def complete(self, defaults: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        values = super().complete(defaults, given)
        check_choice("init", values["init"], STRATEGIES)
        # As in records of memories without gains.
        values["gains"] = values["gains"] or None
        return values

    def make_config(self, settings: AdapterSettings, base: PreTrainedModel) -> LocasConfig:
        self._check_host(base)
        fields: dict[str, Any] = {
            "r": settings.r,
            "init_weights": settings.init,
            "output_scale": settings.output_scale,
            "scaling": settings.scaling,
            "layers_to_transform": find_layers(settings, base),
            "gains": bool(settings.gains),
            "seed": settings.seed,
            "task_type": "CAUSAL_LM",
        }
        if settings.max_slot_norm is not None:
            # 0 stands for no clip.
            fields["max_slot_norm"] = settings.max_slot_norm or None
        return LocasConfig(**fields)

    def _check_host(self, base: PreTrainedModel) -> None:
        kinds = {ffn.gated for ffn in find_ffns(base).values()}
        if kinds != {not self.gated}:
            return
        needed = "gated"
        present = "two-layer"
        if not self.gated:
            needed = "two-layer"
            present = "gated"
        problem = f"method {self.name!r} needs {needed} FFNs, got {type(base).__name__}"
        raise ValueError(f"{problem} with {present} ones: use {self.other_method!r}")


def choose_memory(base: PreTrainedModel) -> str:
    """Return the method of a memory that fits a base's FFNs: "locas-glu" or "locas-mlp"."""
    is_gated = all(ffn.gated for ffn in find_ffns(base).values())
    return "locas-glu" if is_gated else "locas-mlp"
