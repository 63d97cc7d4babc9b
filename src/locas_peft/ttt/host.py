"""The model as a reading sees it: limits, adapters, logits.

Axes: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

# Fields of an adapter's configuration: those that a LOCAS memory's calibration fills in, a part of the memory and not
# of its settings, and those that change nothing of its arithmetic.
_FILLED = ("slots",)
_NO_ARITHMETIC = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)


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

    def active_adapters(self) -> list[str]:
        names = {}
        for module in self.model.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                names.update(dict.fromkeys(module.active_adapters))
        configs = getattr(self.model, "peft_config", None) or {}
        return [name for name in names if name in configs]

    def adapter_config(self, name: str) -> dict:
        """Gives an adapter's configuration as JSON, without what does not change its arithmetic."""
        config = self.model.peft_config[name].to_dict()
        config = {field: value for field, value in config.items() if field not in _NO_ARITHMETIC + _FILLED}
        return json.loads(json.dumps(config, default=to_plain))

    def filled(self, name: str) -> dict:
        """Gives those fields of an adapter's configuration that came with its weights."""
        config = self.model.peft_config[name]
        return {field: getattr(config, field) for field in _FILLED if hasattr(config, field)}

    def fingerprint(self) -> str:
        """Gives a hash over the base's parameters: names, shapes, dtypes, and the first few numbers of each."""
        digest = hashlib.sha256()
        adapters = [
            (name + ".", ("base_layer.", "original_module."))
            for name, module in self.model.named_modules()
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
        for name, parameter in self.model.named_parameters():
            if any(name.startswith(prefix) and not name[len(prefix) :].startswith(base) for prefix, base in adapters):
                continue
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            trained = parameter.requires_grad and bool(adapters)
            if not trained and parameter.device.type != "meta":
                digest.update(repr(parameter.detach().reshape(-1)[:16].double().tolist()).encode())
        return digest.hexdigest()


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


def to_plain(value: object) -> object:
    """Gives what JSON cannot hold in a form that it can."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
