"""The model as the loop uses it: its limits, its adapter, its logits.

Axes: B rows of a batch, n tokens, T tokens of a document, V vocabulary.
"""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache

from ..tuner.modules import ADAPTER_LAYERS, unwrap
from .compiled import CompiledModel, find_compile_obstacle
from .cpu_attention import CpuAttention

__all__ = ["CausalLM", "check_window", "count_positions", "find_cache"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_SLIDING = {"full_attention", "sliding_attention"}
"""Layers whose context is nothing but keys and values."""
_RELATIVE = ("bloom", "mpt")
"""Models with ALiBi, which take distances instead of positions."""


def count_positions(model: nn.Module) -> int | None:
    """Return how many positions a causal language model has; None without a limit in its config."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    return positions


def find_cache(outputs: Any) -> Any:
    """Return the keys and values in what a model's forward returns; None where there are none."""
    # Their name since transformers 5.24.
    cache = getattr(outputs, "cache", None)
    if cache is None:
        cache = getattr(outputs, "past_key_values", None)
    return cache


def check_window(window: int, positions: int | None) -> None:
    """Raise a `ValueError` where a window is longer than a model's positions."""
    if positions is not None and window > positions:
        rule = f"window must be within the model's {positions} positions, got {window}"
        raise ValueError(f"{rule}: lower window, and stride with it")


class CausalLM:
    """A causal language model, plain or with adapters.

    Args:
        model: a transformers model, or PEFT's model of one; also through `torch.compile`.
        cpu_attention: whether attention in bfloat16 on a CPU is computed by `CpuAttention`, which
            is faster for learning. torch's own kernel rounds differently: answers are then those of
            transformers' `generate`.

    Attributes:
        base: the model without torch's and PEFT's wrappers, whose class is named `kind`.
        positions: how many it has; None for no limit.
        rope_positions: the positions beyond which a model with LongRoPE (Phi-3, Phi-4) changes its
            frequencies; None for other models.

    Raises:
        TypeError: for a model that is no transformers language model.
        ValueError: for an encoder-decoder, and for an adapter without weights in the layers.
    """

    def __init__(self, model: nn.Module, cpu_attention: bool = True):
        _check_model(model)
        self.model = model
        # The forward of a compiled model names none of its arguments.
        self.base = unwrap(model)
        if isinstance(self.base, PeftModel):
            self.base = unwrap(self.base.get_base_model())
        self.kind = type(self.base).__name__
        if getattr(self.base.config, "is_encoder_decoder", False):
            rule = f"model must be a causal language model, got the encoder-decoder {self.kind}"
            raise ValueError(f"{rule}: train its memory in a loop of your own")
        self.positions = count_positions(self.base)
        self.rope_positions: int | None = None
        self._cpu_attention = cpu_attention
        self._compiled: CompiledModel | None = None
        self._config = self.base.config.get_text_config()
        self._accepts = inspect.signature(self.base.forward).parameters.keys()
        # transformers 5.24 gave the argument another name.
        self._cache_argument = "cache" if "cache" in self._accepts else "past_key_values"
        rope = getattr(self._config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            self.rope_positions = rope.get("original_max_position_embeddings")

    @property
    def device(self) -> torch.device:
        """The device for token ids; the CPU for an offloaded model, whose hooks move them."""
        device = self.model.get_input_embeddings().weight.device
        if device.type == "meta":
            return torch.device("cpu")
        return device

    @property
    def start_token(self) -> int | None:
        """The token that a text begins with, by its config; not every tokenizer puts it there."""
        return getattr(self._config, "bos_token_id", None)

    @property
    def vocabulary(self) -> int:
        """V, the number of rows of the input embeddings."""
        return self.model.get_input_embeddings().weight.shape[0]

    def logits(
        self, ids: Tensor, count: int, adapters: Sequence[str] | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the logits [B, count, V] at the last `count` tokens of each row.

        Args:
            ids: LongTensor [B, n].
            count: how many tokens of a row have logits.
            adapters: an adapter's name for each row; None: the active ones.
            kwargs: passed to the model's forward, as far as it takes them.
        """
        logits = self.outputs(ids, count, adapters, **kwargs).logits
        # Slice only where needed: the backward pass of a slice fills all the logits with zeros.
        if logits.shape[1] == count:
            return logits
        return logits[:, -count:]

    def outputs(
        self, ids: Tensor, count: int, adapters: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """Return what the model's forward returns, with the same logits or those of more tokens.

        Keys and values are given as `past_key_values`, whatever the model calls them.
        """
        options = {"logits_to_keep": self._logits_to_keep(ids, count), **kwargs}
        if options.get("use_cache") is False and self._reads_positions(options):
            options["past_key_values"] = _NoCache()
        if "past_key_values" in options:
            options[self._cache_argument] = options.pop("past_key_values")
        options = {name: value for name, value in options.items() if name in self._accepts}
        if adapters is not None:
            options["adapter_names"] = list(adapters)
        if self._compiled is not None and self._compiled.is_on:
            return self._compiled(input_ids=ids, **options)
        with self._attention():
            return self.model(input_ids=ids, **options)

    def compile(self, obstacle: str | None = None) -> None:
        """Run the model through `torch.compile` from now on.

        Where it cannot be compiled, one line is logged, and it runs as before.

        Args:
            obstacle: why the caller's passes cannot be compiled; None where they can.
        """
        self._compiled = CompiledModel(self.model)
        obstacle = obstacle or find_compile_obstacle(self.base)
        if obstacle is not None:
            self._compiled.stop(obstacle)

    @property
    def is_compiled(self) -> bool:
        """Whether the model's passes are compiled."""
        return self._compiled is not None and self._compiled.is_on

    def keep_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy gradients that the next pass would overwrite: those of graphs that are captured."""
        if self._compiled is None or not (self._compiled.is_on and self._compiled.captures):
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def check_document(self, input_ids: Tensor, name: str = "input_ids") -> Tensor:
        """Return a document as LongTensor [T], or raise a `TypeError` or `ValueError`.

        Args:
            input_ids: integers [T] or [1, T] with T >= 2, in the vocabulary.
            name: of the argument, for the message.
        """
        if not isinstance(input_ids, Tensor):
            rule = f"{name} must be a LongTensor of shape [T] or [1, T]"
            raise TypeError(f"{rule}, got {type(input_ids).__name__}: make one with torch.tensor")
        if input_ids.dtype not in _INTEGERS:
            rule = f"{name} must be integers, got {input_ids.dtype}"
            raise TypeError(f"{rule}: give token ids as a LongTensor")
        one_row = input_ids.ndim == 2 and input_ids.shape[0] == 1
        if input_ids.ndim != 1 and not one_row:
            rule = f"{name} must have the shape [T] or [1, T], got {list(input_ids.shape)}"
            raise ValueError(f"{rule}: give one document at a time")
        ids = input_ids.detach().reshape(-1).long()
        if len(ids) < 2:
            rule = f"{name} must hold at least 2 tokens, got {len(ids)}"
            raise ValueError(f"{rule}: give a longer text")
        self.check_tokens(ids, name, "use the model's own tokenizer")
        return ids

    def check_tokens(self, ids: Tensor, name: str, remedy: str) -> None:
        """Raise a `ValueError` for tokens outside the vocabulary."""
        for token in (ids.min().item(), ids.max().item()):
            if not 0 <= token < self.vocabulary:
                rule = f"{name} must lie in [0, {self.vocabulary}), the model's vocabulary"
                raise ValueError(f"{rule}, got {token}: {remedy}")

    def can_cache(self) -> bool:
        """Return whether the model's context is only keys and values, which can slide."""
        layer_types = set(getattr(self._config, "layer_types", None) or ())
        if not layer_types <= _SLIDING or self._cache_argument not in self._accepts:
            return False
        return "position_ids" in self._accepts or self._config.model_type in _RELATIVE

    def can_pad_left(self) -> bool:
        """Return whether padding may lie before rows.

        The decoder of an encoder-decoder, such as BART's, counts positions from the padding on.
        """
        return "position_ids" in self._accepts or "encoder_hidden_states" not in self._accepts

    def can_pad_inside(self, length: int) -> bool:
        """Return whether padding may lie inside rows of `length` tokens, padding included."""
        # A sliding window that is shorter, and distances by index as in MPT, count padding.
        if self._config.model_type == "mpt":
            return False
        name = "window_size" if self._config.model_type == "gpt_neo" else "sliding_window"
        window = getattr(self._config, name, None)
        return not isinstance(window, int) or length <= window

    def has_adapter(self) -> bool:
        """Return whether the model has any adapter, active or not."""
        if isinstance(unwrap(self.model), PeftModel):
            return True
        return any(isinstance(module, ADAPTER_LAYERS) for module in self.model.modules())

    def _reads_positions(self, options: dict[str, Any]) -> bool:
        """Return whether transformers would read the positions' values: a wait for the device.

        It does without a mask and a cache, to find packed rows.
        """
        # Activation checkpointing, which is for training, allows no cache.
        if self.model.training or not self.can_cache():
            return False
        return options.get("attention_mask") is None and options.get("past_key_values") is None

    def _logits_to_keep(self, ids: Tensor, count: int) -> int | Tensor:
        # Of several rows, or of one token, a slice of the last hidden states makes torch copy the
        # head's weights. Indices would be on another device where the model is split.
        devices = set(getattr(self.base, "hf_device_map", {}).values())
        if len(devices) > 1 or (len(ids) == 1 and count > 1):
            return count
        return torch.arange(-count, 0, device=ids.device)

    def _attention(self) -> AbstractContextManager:
        weight = self.model.get_input_embeddings().weight
        # Elsewhere the context would only cost time: each torch function passes through it.
        if self._cpu_attention and weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            return CpuAttention()
        return nullcontext()


class _NoCache(DynamicCache):
    """A cache that keeps nothing: each forward has its own keys and values alone."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "get_input_embeddings"):
        rule = f"model must be a transformers causal language model, got {type(model).__name__}"
        raise TypeError(f"{rule}: load one with AutoModelForCausalLM")
    plain = unwrap(model)
    if isinstance(plain, PeftModel) and plain.active_peft_config.is_prompt_learning:
        method = plain.active_peft_config.peft_type.value
        rule = f"model's adapter must lie in its layers, got the prompt method {method}"
        raise ValueError(f"{rule}: use LOCAS, LoRA or another adapter made of weights")
