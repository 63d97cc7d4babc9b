"""TempLoRA: LoRA on every projection of attention and FFN, in the loop in which a memory learns."""

from __future__ import annotations

from dataclasses import dataclass

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .method import PAPER, TUNED, Adapter, find_layers

__all__ = ["Lora"]


@dataclass(frozen=True, kw_only=True)
class Lora(Adapter):
    """LoRA of rank `r`, with alpha = r."""

    name = "lora"
    presets = {
        "paper": {"r": 64, "learning_rate": 1e-3, **PAPER},
        "tuned": {"r": 64, "learning_rate": 1e-3, **TUNED},
    }

    def make_config(self, base: PreTrainedModel, seed: int) -> LoraConfig:
        layers = find_layers(base, self.layers_to_transform)
        return LoraConfig(
            r=self.r,
            lora_alpha=self.r,
            lora_dropout=0.0,
            # PEFT takes layers together with a list of names only.
            target_modules="all-linear" if layers is None else _name_projections(base),
            layers_to_transform=layers,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
            task_type="CAUSAL_LM",
        )


def _name_projections(base: PreTrainedModel) -> list[str]:
    """Return the last part of the name of each linear layer but the output's, as PEFT's "all-linear" finds them."""
    head = base.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    names = {name for name, module in base.named_modules() if isinstance(module, kinds) and module is not head}
    return sorted({name.rpartition(".")[2] for name in names})
