"""The model as a reading sees it: limits, adapters, logits.

Axes: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn


class Host:
    """What a reading asks of a model: its limits, its adapter, and logits for some tokens."""

    def __init__(self, model: nn.Module):
        if not isinstance(model, nn.Module) or not hasattr(model, "get_input_embeddings"):
            raise TypeError(
                f"model must be a transformers causal language model, got {type(model).__name__}: "
                "load one with AutoModelForCausalLM"
            )
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            method = model.active_peft_config.peft_type.value
            raise ValueError(
                f"model's adapter must lie in its layers, got the prompt method {method}: "
                "use LOCAS, LoRA or another adapter made of weights"
            )
        self.model = model
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        self._accepts = inspect.signature(base.forward).parameters.keys()
        self.kind = type(base).__name__
        self._config = base.config.get_text_config()
        positions = getattr(self._config, "max_position_embeddings", None)
        self.positions = positions if isinstance(positions, int) and positions > 0 else None

    @property
    def device(self) -> torch.device:
        device = self.model.get_input_embeddings().weight.device
        return torch.device("cpu") if device.type == "meta" else device  # offloaded: accelerate moves the tokens

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    def logits(self, ids: Tensor, count: int, **kwargs) -> Tensor:
        """Gives the logits [B, count, V] at the last `count` tokens of each row of `ids` [B, n]."""
        kwargs = {name: value for name, value in {"logits_to_keep": count, **kwargs}.items() if name in self._accepts}
        logits = self.model(input_ids=ids, **kwargs).logits
        # No slice where none is needed: its backward pass fills all the logits with zeros.
        return logits if logits.shape[1] == count else logits[:, -count:]

    def check_cache(self) -> None:
        """Refuses models whose context is more than keys and values that slide."""
        layer_types = set(getattr(self._config, "layer_types", None) or ())
        slides = layer_types <= {"full_attention", "sliding_attention"} and "past_key_values" in self._accepts
        relative = self._config.model_type in ("bloom", "mpt")  # ALiBi: distances, no positions
        if not slides or not ("position_ids" in self._accepts or relative):
            raise ValueError(
                f"context must be 'recompute' for {self._config.model_type}, got 'cache': "
                "its layers keep more than keys and values that could slide with the text"
            )

    def has_adapter(self) -> bool:
        return isinstance(self.model, PeftModel) or any(
            isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for module in self.model.modules()
        )

    def is_merged(self) -> bool:
        return any(module.merged for module in self.model.modules() if isinstance(module, BaseTunerLayer))


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Switches all adapters off. PEFT's own `disable_adapter` would also touch which parameters require gradients."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not module._disable_adapters
    ]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
