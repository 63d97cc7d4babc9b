"""A model's passes through `torch.compile`, and the plain model where that fails."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

__all__ = ["CompiledModel", "find_compile_obstacle"]

_logger = logging.getLogger(__name__)

Layers = list[tuple[Tensor, Tensor]]


class CompiledModel:
    """Call a model through `torch.compile`, with a graph for each shape of its inputs.

    Other adapters, widths or dtypes than before make another graph. Where a call fails, one line is
    logged, and this call and all later ones go to the model itself. On CUDA the graphs are captured
    and replayed.

    Args:
        model: a causal language model, plain or with adapters.

    Attributes:
        is_on: whether the next call is compiled.
        captures: whether graphs are captured: what a call and its backward pass return is then
            overwritten by later ones.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.is_on = True
        self.captures = model.get_input_embeddings().weight.device.type == "cuda"
        mode = "reduce-overhead" if self.captures else None
        self._call = torch.compile(model, dynamic=False, mode=mode)

    def __call__(self, **inputs: Any) -> Any:
        """Return what the model's forward returns; arguments are its own."""
        if not self.is_on:
            return self._model(**inputs)
        # The first name is that of transformers 5.24 and later.
        cache = inputs.get("cache", inputs.get("past_key_values"))
        kept = _list_layers(cache)
        try:
            return self._call(**inputs)
        except Exception as error:
            # torch's first line names what raised, the second one why.
            lines = str(error).split("\n")[:2]
            self.stop(" ".join(lines).strip() or type(error).__name__)
            _restore_layers(cache, kept)
            return self._model(**inputs)

    def stop(self, reason: str) -> None:
        """Log why the model is not compiled, and compile nothing from now on."""
        self.is_on = False
        _logger.warning("the model is not compiled: %s", reason)


def find_compile_obstacle(base: PreTrainedModel) -> str | None:
    """Return why a base cannot be compiled with chunks of one shape, or None.

    Padded chunks need a mask of their own, which flash attention, sliding windows and distances in
    place of positions do not take.
    """
    config = base.config.get_text_config()
    if any(hasattr(module, "_hf_hook") for module in base.modules()):
        return "its layers are offloaded or split over devices"
    if getattr(base, "is_quantized", False):
        return "its layers are quantised"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {config._attn_implementation!r}, not 'sdpa'"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "its attention has no positions"
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides or isinstance(getattr(config, "sliding_window", None), int):
        return "its attention has a sliding window"
    return None


def _list_layers(cache: DynamicCache | None) -> Layers:
    if cache is None:
        return []
    return [(layer.keys, layer.values) for layer in cache.layers]


def _restore_layers(cache: DynamicCache | None, kept: Layers) -> None:
    """Take from a cache what a forward that failed may have added."""
    if cache is None:
        return
    del cache.layers[len(kept) :]
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        layer.keys = keys
        layer.values = values
