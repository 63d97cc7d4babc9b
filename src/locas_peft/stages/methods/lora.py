"""The method "lora": TempLoRA, the paper's baseline."""

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from locas_settings import AdapterSettings

from .method import PAPER, STUDY_ANCHOR, TUNED, Method, find_layers

__all__ = ["Lora"]

_RANK = 64
# The paper does not state its rate.
_LEARNING_RATE = 1e-3


class Lora(Method):
    """LoRA of rank `r`, with alpha = r, on every projection of attention and FFN."""

    name = "lora"
    reading = {
        "paper": {"r": _RANK, "learning_rate": _LEARNING_RATE, **PAPER},
        "tuned": {"r": _RANK, "learning_rate": _LEARNING_RATE, **TUNED},
    }
    study = {
        "r": _RANK,
        "learning_rate": 1.5 * _LEARNING_RATE,
        "layers_to_transform": None,
        "anchor": STUDY_ANCHOR,
    }

    def make_config(self, settings: AdapterSettings, base: PreTrainedModel) -> LoraConfig:
        layers = find_layers(settings, base)
        head = base.get_output_embeddings()
        projections = {
            name: module
            for name, module in base.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head
        }
        targets: str | list[str] = "all-linear"
        if layers is not None:
            # PEFT takes layers together with a list of names only.
            targets = sorted({name.rpartition(".")[2] for name in projections})
        return LoraConfig(
            r=settings.r,
            lora_alpha=settings.r,
            lora_dropout=0.0,
            target_modules=targets,
            layers_to_transform=layers,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in projections.values()),
            task_type="CAUSAL_LM",
        )
