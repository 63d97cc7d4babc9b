"""What memories need around a forward of their host: the padding mask, and the clip of shards."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from .attached import list_layers


class HostHooks:
    """The hooks on a host before and after its forward; `remove` takes them off.

    Args:
        host: the model that the memories are in.
    """

    def __init__(self, host: nn.Module) -> None:
        # Found once: a walk over the modules takes a tenth of the time of a small forward.
        self._layers = list_layers(host)
        self._handles = [
            host.register_forward_pre_hook(self._prepare, with_kwargs=True),
            host.register_forward_hook(self._clear, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _prepare(self, host: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if dist.is_available() and dist.is_initialized():
            for layer in self._layers:
                layer.prepare_shards()
        for layer in self._layers:
            layer.token_mask = None
            layer.pass_on_forward()
            if layer.disable_adapters and layer.merged:
                # The first projection of a flat FFN runs before its layer.
                layer.unmerge()
        if not torch.is_grad_enabled():
            return
        waiting = [layer for layer in self._layers if layer.may_calibrate()]
        if not waiting:
            return
        if any(layer.merged for layer in self._layers):
            # It would be calibrated in some layers, or on neurons that are no slots of the host.
            problem = "a memory that waits for its calibration is beside a merged one"
            raise ValueError(f"{problem}: call unmerge_adapter() before it is trained.")
        masks = _find_masks(host, args, kwargs)
        has_two_texts = getattr(getattr(host, "config", None), "is_encoder_decoder", False)
        for layer in waiting:
            is_decoding = has_two_texts and "decoder" in layer.name.split(".")
            name = "decoder_attention_mask" if is_decoding else "attention_mask"
            mask = masks.get(name)
            # Some models take a mask for each kind of attention.
            layer.token_mask = mask if isinstance(mask, Tensor) else None

    def _clear(self, host: nn.Module, args: tuple, output: Any) -> None:
        for layer in self._layers:
            # A memory that still waits is calibrated when reentrant gradient checkpointing runs
            # the layer again, in the backward pass. A forward that failed has no output.
            is_needed = layer.token_mask is not None and output is not None
            if not is_needed or not layer.may_calibrate():
                layer.token_mask = None


def _find_masks(host: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the host's arguments by their names, however they were given."""
    if not args:
        return kwargs
    names = list(inspect.signature(host.forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs
