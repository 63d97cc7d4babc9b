"""Modules and tokens that PEFT trains in full beside a memory: rules, and PEFT's wrappers of them.

PEFT's wrappers take for granted that each adapter of a model has a part in each of them. Here a
model may have memories with other fields, or without any: the wrappers are replaced by subclasses
in which an adapter without a part uses the base's own module.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import (
    AuxiliaryTrainingWrapper,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
)
from torch import Tensor, nn

from .config import LocasConfig
from .errors import invalid
from .modules import host_modules, plain_name

ONE_FIELD = "name each module in one of the two fields"


class _MemoryWrapper(AuxiliaryTrainingWrapper):
    """What both wrappers share."""

    def adapter_state_dict(
        self, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if adapter_name not in self._adapters:
            return {}
        return super().adapter_state_dict(adapter_name, state_dict)

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        if adapter_name not in self._adapters:
            return {}
        return super().adapter_state_dict_load_map(adapter_name)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        # PEFT refuses several, after it has deleted the adapter from all other layers.
        own = [name for name in new_active_adapters or () if name in self._adapters]
        if adapter_name not in self._adapters:
            if own and own != self.active_adapters:
                self.set_adapter(own[0])
            return
        super().delete_adapter(adapter_name, own or None)

    def _forward_wrapped_mixed_batch(
        self, x: Tensor, active_adapter: str, *args: Any, **kwargs: Any
    ) -> Tensor:
        if active_adapter not in self._adapters:
            return self.original_module(x, *args, **kwargs)
        return super()._forward_wrapped_mixed_batch(x, active_adapter, *args, **kwargs)


class MemoryModulesWrapper(_MemoryWrapper, ModulesToSaveWrapper):
    """A module of `modules_to_save`."""


class MemoryTokensWrapper(_MemoryWrapper, TrainableTokensWrapper):
    """An embedding of `trainable_token_indices`."""


class MemoryTokensLayer(TrainableTokensLayer):
    """The trained tokens of one embedding."""

    other_param_names = (*TrainableTokensLayer.other_param_names, "keeps_float32")

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        former = self.trainable_tokens_delta[adapter_name]
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        if self.keeps_float32.get(adapter_name, False):
            # Loaded with low_cpu_mem_usage: PEFT would round them to the base's dtype and back.
            moved = former.detach().to(self.trainable_tokens_delta[adapter_name].device)
            self.trainable_tokens_delta[adapter_name] = nn.Parameter(moved, former.requires_grad)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        # PEFT takes for granted that each adapter trains tokens of this embedding.
        if adapter_names is not None:
            adapter_names = [name for name in adapter_names if self.has_adapter(name)]
            if not adapter_names:
                return
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)

    def unmerge(self) -> None:
        # PEFT warns of a layer in which nothing is merged, beside others in which something is.
        if self.merged:
            super().unmerge()

    def has_adapter(self, adapter_name: str) -> bool:
        """Return whether tokens of this embedding are trained for an adapter."""
        return adapter_name in self.trainable_tokens_delta

    @property
    def keeps_float32(self) -> dict[str, bool]:
        """Whether the tokens of an adapter stay in float32 beside a half-precision base."""
        return self.__dict__.setdefault("_keeps_float32", {})


REPLACEMENTS = {
    TrainableTokensLayer: MemoryTokensLayer,
    ModulesToSaveWrapper: MemoryModulesWrapper,
    TrainableTokensWrapper: MemoryTokensWrapper,
}


def replace_wrappers(model: nn.Module) -> None:
    """Turn PEFT's wrappers in a model into ours, in place: they stay the same objects."""
    for module in model.modules():
        replacement = REPLACEMENTS.get(type(module))
        if replacement is not None:
            module.__class__ = replacement


def check_active(model: nn.Module, adapter_names: Sequence[str]) -> None:
    """Raise a `ValueError` if adapters cannot be active together: each module is trained once."""
    for name, module in model.named_modules():
        if not isinstance(module, AuxiliaryTrainingWrapper):
            continue
        own = [adapter for adapter in adapter_names if adapter in module._adapters]
        if len(own) > 1:
            is_whole = isinstance(module, ModulesToSaveWrapper)
            kind = ModulesToSaveWrapper if is_whole else TrainableTokensWrapper
            # As PEFT begins its message, which lists the module.
            problem = f"Only one adapter can be set at a time for {kind.__name__} of {name}"
            raise ValueError(f"{problem}, got {own}: activate one of them.")


def check_trained(config: LocasConfig, model: nn.Module) -> None:
    """Raise a `ValueError` if a module would be trained both in full and by its tokens.

    PEFT finds this in a forward, or not at all.
    """
    in_full = set(_find_in_full(config, model))
    by_tokens = set(_find_by_tokens(config, model))
    for name, module in host_modules(model):
        if isinstance(module, ModulesToSaveWrapper):
            in_full.add(name)
        elif isinstance(module, TrainableTokensWrapper):
            by_tokens.add(name)
    for name in (*in_full, *by_tokens):
        if name != plain_name(name):
            field = "modules_to_save" if name in in_full else "trainable_token_indices"
            rule = "not name a module inside one that torch.compile or checkpointing wraps"
            raise invalid(field, rule, name, "wrap the model after the memory is added or loaded")
    in_full = {_outermost(name) for name in in_full}
    by_tokens = {_outermost(name) for name in by_tokens}
    both = sorted(in_full & by_tokens)
    if both:
        # As PEFT begins its message.
        problem = "The embedding layer is already marked to be trained fully"
        field = "trainable_token_indices must not train what modules_to_save trains"
        raise ValueError(f"{problem}: {field}, got {both[0]}; {ONE_FIELD}.")


def check_mergeable_tokens(model: nn.Module, adapter_names: Iterable[str]) -> None:
    """Raise a `ValueError` if merging trained tokens would change another module's weight too.

    PEFT writes them into the weight, which a tied module shares. Where both have the same trained
    tokens, that is right.
    """
    wrappers = {}
    for name, module in host_modules(model):
        if isinstance(module, TrainableTokensWrapper):
            wrappers[name] = module
    bases = {id(wrapper.original_module): wrapper for wrapper in wrappers.values()}
    for name, wrapper in wrappers.items():
        if not wrapper._adapters.intersection(adapter_names):
            continue
        weight = wrapper.original_module.weight
        for other_name, other in host_modules(model):
            if other._parameters.get("weight") is not weight or other is wrapper.original_module:
                continue
            other_wrapper = bases.get(id(other))
            if other_wrapper is None or _list_deltas(other_wrapper) is not _list_deltas(wrapper):
                raise ValueError(
                    f"cannot merge the trained tokens of {name}: its weight is tied to that of "
                    f"{_outermost(other_name)}, which would change too. "
                    "Load the base with tie_word_embeddings=False first."
                )


def _list_deltas(wrapper: TrainableTokensWrapper) -> nn.ParameterDict:
    return wrapper.token_adapter.trainable_tokens_delta


def _outermost(name: str) -> str:
    return re.sub(r"\.(original_module|token_adapter)(\..*)?$", "", name)


def _find_in_full(config: LocasConfig, model: nn.Module) -> Iterator[str]:
    """Yield the modules that PEFT trains in full for a config, as it finds them."""
    names = tuple(config.modules_to_save or ())
    for name, _ in host_modules(model):
        if names and name.endswith(names):
            yield name


def _find_by_tokens(config: LocasConfig, model: nn.Module) -> Iterator[str]:
    """Yield the embeddings whose tokens PEFT trains for a config, tied ones included."""
    indices = config.trainable_token_indices
    if not indices:
        return
    embeddings = find_embeddings(model)
    targets: list[str] = list(indices) if isinstance(indices, dict) else embeddings[:1]
    found = [name for name, _ in host_modules(model) if name.endswith(tuple(targets))]
    yield from found
    if embeddings and embeddings[0] in found:
        yield from embeddings[1:]


def find_embeddings(model: nn.Module) -> list[str]:
    """Return the names of the input embedding and of the modules whose weights are tied to it."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        # The model has no embeddings.
        return []
    weight = _find_weight(embedding)
    first = []
    tied = []
    for name, module in host_modules(model):
        if module is embedding:
            first.append(name)
        elif isinstance(module, nn.Linear | nn.Embedding) and module.weight is weight:
            tied.append(name)
    return [*first, *tied]


def _find_weight(embedding: nn.Module) -> nn.Parameter | None:
    while isinstance(embedding, AuxiliaryTrainingWrapper):
        embedding = embedding.original_module
    return getattr(embedding, "weight", None)
