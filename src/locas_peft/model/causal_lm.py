"""The model as the loop uses it: its limits, its adapter, its logits.

Axes: B rows of a batch, n tokens, T tokens of a document, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from peft import PeftModel
from torch import Tensor, nn

from ..tuner.modules import ADAPTER_LAYERS
from .cpu_attention import CpuAttention


def count_positions(model: nn.Module) -> int | None:
    """Return how many positions a causal language model has; None where its config has no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def check_window(window: int, positions: int | None) -> None:
    """Raise a `ValueError` where a window is longer than a model's positions."""
    if positions is not None and window > positions:
        rule = f"window must be within the model's {positions} positions, got {window}"
        raise ValueError(f"{rule}: lower window, and stride with it")


class CausalLM:
    """A causal language model, plain or with adapters, and its `base`, whose class is `kind`, with its `positions`.

    With `cpu_attention`, attention in bfloat16 on a CPU is computed by `CpuAttention`, which is faster for learning.
    torch's own kernel rounds differently: answers are then those of transformers' `generate`. A model that is no
    transformers language model is a `TypeError`, and an adapter without weights in the layers a `ValueError`.
    """

    def __init__(self, model: nn.Module, cpu_attention: bool = True):
        if not isinstance(model, nn.Module) or not hasattr(model, "get_input_embeddings"):
            rule = f"model must be a transformers causal language model, got {type(model).__name__}"
            raise TypeError(f"{rule}: load one with AutoModelForCausalLM")
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            method = model.active_peft_config.peft_type.value
            rule = f"model's adapter must lie in its layers, got the prompt method {method}"
            raise ValueError(f"{rule}: use LOCAS, LoRA or another adapter made of weights")
        self.model, self._cpu_attention = model, cpu_attention
        self.base = base = model.get_base_model() if isinstance(model, PeftModel) else model
        self.kind = type(base).__name__
        self.positions = count_positions(base)
        self._config = base.config.get_text_config()
        # With LongRoPE (Phi-3, Phi-4) the frequencies change where a text goes beyond these positions.
        rope = getattr(self._config, "rope_parameters", None) or {}
        longrope = rope.get("rope_type") == "longrope"
        self.rope_positions: int | None = (
            rope.get("original_max_position_embeddings") if longrope else None
        )
        self._accepts = inspect.signature(base.forward).parameters.keys()

    @property
    def device(self) -> torch.device:
        """The device that token ids go to; the CPU for an offloaded model, whose hooks move them."""
        device = self.model.get_input_embeddings().weight.device
        return torch.device("cpu") if device.type == "meta" else device

    @property
    def start_token(self) -> int | None:
        """The token that a text begins with, if its config names one; not every tokenizer puts it there."""
        return getattr(self._config, "bos_token_id", None)

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    def logits(
        self, ids: Tensor, count: int, adapters: Sequence[str] | None = None, **kwargs
    ) -> Tensor:
        """Return the logits [B, count, V] at the last `count` tokens of each row of `ids`, a LongTensor [B, n].

        `adapters` has an adapter's name for each row; None: the active ones. The forward gets the `kwargs` it takes.
        """
        logits = self.outputs(ids, count, adapters, **kwargs).logits
        # Slice only where needed: the backward pass of a slice fills all the logits with zeros.
        return logits if logits.shape[1] == count else logits[:, -count:]

    def outputs(self, ids: Tensor, count: int, adapters: Sequence[str] | None = None, **kwargs):
        """Return what the model's forward returns, with the logits that `logits` describes or those of more tokens."""
        # As a slice of several rows, or of one token, the last hidden states make torch copy the head's weights.
        split = (
            len(set(getattr(self.base, "hf_device_map", {}).values())) > 1
        )  # indices would be on another device
        keep = (
            count
            if split or (len(ids) == 1 and count > 1)
            else torch.arange(-count, 0, device=ids.device)
        )
        kwargs = {
            name: value
            for name, value in {"logits_to_keep": keep, **kwargs}.items()
            if name in self._accepts
        }
        if adapters is not None:
            kwargs["adapter_names"] = list(adapters)
        weight = self.model.get_input_embeddings().weight
        # Elsewhere the context would only cost time: each torch function passes through it.
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        with CpuAttention() if on_cpu and self._cpu_attention else nullcontext():
            return self.model(input_ids=ids, **kwargs)

    def check_document(self, input_ids: Tensor, name: str = "input_ids") -> Tensor:
        """Return a document, integers [T] or [1, T] with T >= 2 in the vocabulary, as LongTensor [T], or raise."""
        if not isinstance(input_ids, Tensor):
            rule = f"{name} must be a LongTensor of shape [T] or [1, T]"
            raise TypeError(f"{rule}, got {type(input_ids).__name__}: make one with torch.tensor")
        if input_ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise TypeError(
                f"{name} must be integers, got {input_ids.dtype}: give token ids as a LongTensor"
            )
        if not (input_ids.ndim == 1 or (input_ids.ndim == 2 and input_ids.shape[0] == 1)):
            rule = f"{name} must have the shape [T] or [1, T], got {list(input_ids.shape)}"
            raise ValueError(f"{rule}: give one document at a time")
        ids = input_ids.detach().reshape(-1).long()
        if len(ids) < 2:
            raise ValueError(
                f"{name} must hold at least 2 tokens, got {len(ids)}: give a longer text"
            )
        self.check_tokens(ids, name, "use the model's own tokenizer")
        return ids

    def check_tokens(self, ids: Tensor, name: str, remedy: str) -> None:
        """Raise a `ValueError` for tokens outside the vocabulary."""
        low, high = ids.min().item(), ids.max().item()
        if low < 0 or high >= self.vocabulary:
            rule = f"{name} must lie in [0, {self.vocabulary}), the model's vocabulary"
            raise ValueError(f"{rule}, got {low if low < 0 else high}: {remedy}")

    def can_cache(self) -> bool:
        """Return whether the model's context is nothing but keys and values, which can slide with a text."""
        layer_types = set(getattr(self._config, "layer_types", None) or ())
        slides = (
            layer_types <= {"full_attention", "sliding_attention"}
            and "past_key_values" in self._accepts
        )
        relative = self._config.model_type in (
            "bloom",
            "mpt",
        )  # ALiBi: distances instead of positions
        return slides and ("position_ids" in self._accepts or relative)

    def can_pad_inside(self, length: int) -> bool:
        """Return whether padding may lie between the tokens of rows of `length`, padding included."""
        # A sliding window that is shorter, and distances by index as in MPT, count it.
        window = getattr(self._config, "sliding_window", None)
        return self._config.model_type != "mpt" and (
            not isinstance(window, int) or length <= window
        )

    def has_adapter(self) -> bool:
        modules = self.model.modules()
        return isinstance(self.model, PeftModel) or any(
            isinstance(module, ADAPTER_LAYERS) for module in modules
        )
