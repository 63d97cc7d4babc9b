"""The methods: each turns a base model into the model to read with.

A method is a function in the table `METHODS`; a new one is one function, and its settings in each preset. All of them
run in the same loop (`TestTimeTrainer`), so that their figures compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..tuner import LocasConfig
from ..tuner.ffn import find_ffns
from .settings import Settings


def _read_only(base: PreTrainedModel, settings: Settings) -> nn.Module:
    return base


def _add_lora(base: PreTrainedModel, settings: Settings) -> PeftModel:
    """TempLoRA: LoRA on every projection of attention and FFN, alpha = r, in the same loop."""
    layers = find_layers(base, settings.layers_to_transform)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.r,
        lora_dropout=0.0,
        # PEFT takes layers beside a list of names only.
        target_modules="all-linear" if layers is None else _name_projections(base),
        layers_to_transform=layers,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def _add_gated_memory(base: PreTrainedModel, settings: Settings) -> PeftModel:
    _check_host(base, "locas-glu", gated=True)
    return get_peft_model(base, _memory_config(base, settings))


def _add_two_layer_memory(base: PreTrainedModel, settings: Settings) -> PeftModel:
    _check_host(base, "locas-mlp", gated=False)
    return get_peft_model(base, _memory_config(base, settings))


METHODS: dict[str, Callable[[PreTrainedModel, Settings], nn.Module]] = {
    "none": _read_only,
    "lora": _add_lora,
    "locas-glu": _add_gated_memory,
    "locas-mlp": _add_two_layer_memory,
}


@contextmanager
def attached(base: PreTrainedModel, settings: Settings) -> Iterator[nn.Module]:
    """Gives the base with a method's fresh adapter in it, and takes the adapter out again when the block ends.

    Mutates `base` in between. Afterwards its modules, weights, `requires_grad` flags and mode are what they were.

    Args:
        base: a causal LM without adapters.
        settings: the method, its widths and its seed, which is set for torch here.

    Raises:
        ValueError: the method does not fit the base.
    """
    flags = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    training = base.training
    torch.manual_seed(settings.seed)
    model = METHODS[settings.method](base, settings)
    try:
        if model is base:
            base.requires_grad_(False)
        yield model
    finally:
        if model is not base:
            model.unload()
            base.__dict__.pop("peft_config", None)
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(flags[name])
            parameter.grad = None
        base.train(training)


def find_layers(base: PreTrainedModel, layers: list[int] | str | None) -> list[int] | None:
    """Gives the indices of the layers that `Settings.layers_to_transform` means for a model.

    Args:
        base: a causal LM.
        layers: indices, "upper" or None. The upper half of an odd number of layers is the larger one.

    Returns:
        The indices, ascending; None for all layers.

    Raises:
        ValueError: an index that the model does not have.
    """
    if layers is None:
        return None
    depth = base.config.get_text_config().num_hidden_layers
    if layers == "upper":
        return list(range(depth // 2, depth))
    beyond = next((index for index in layers if index >= depth), None)
    if beyond is not None:
        raise ValueError(
            f"layers_to_transform must lie below {depth}, the layers of {type(base).__name__}, got {beyond}: lower it"
        )
    return sorted(layers)


def _name_projections(base: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear layers but the output's, as PEFT's "all-linear" finds them."""
    head = base.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    names = {name for name, module in base.named_modules() if isinstance(module, kinds) and module is not head}
    return sorted({name.rpartition(".")[2] for name in names})


def _memory_config(base: PreTrainedModel, settings: Settings) -> LocasConfig:
    norms = {} if settings.row_norm is None else {"row_norm": settings.row_norm}
    if settings.max_slot_norm is not None:
        norms["max_slot_norm"] = settings.max_slot_norm or None
    return LocasConfig(
        r=settings.r,
        init_strategy=settings.init,
        scaling=settings.scaling,
        layers_to_transform=find_layers(base, settings.layers_to_transform),
        **norms,
        seed=settings.seed,
        task_type="CAUSAL_LM",
    )


def _check_host(base: PreTrainedModel, method: str, gated: bool) -> None:
    kinds = {ffn.gated for ffn in find_ffns(base).values()}
    if kinds == {not gated}:
        found, other = ("two-layer", "locas-mlp") if gated else ("gated", "locas-glu")
        raise ValueError(
            f"method {method!r} needs {'gated' if gated else 'two-layer'} FFNs, got {type(base).__name__} with "
            f"{found} ones: use {other!r}"
        )
