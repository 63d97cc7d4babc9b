"""The modules and parameters of a model with adapters: the base's own, those in use, and all of them as they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

ADAPTER_LAYERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)
"""What PEFT puts around a module of the base: an adapter's layer, a fully trained copy, or trained tokens."""
_BASE = ("base_layer.", "original_module.", "token_adapter.base_layer.")
"""What the base's own modules are called inside these."""


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the base's own parameters, by names that are the same with and without adapters."""
    wrapped = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, ADAPTER_LAYERS))
    for name, parameter in model.named_parameters():
        outer = [prefix for prefix in wrapped if name.startswith(prefix)] if name.startswith(wrapped) else []
        if all(name.removeprefix(prefix).startswith(_BASE) for prefix in outer):
            plain = re.sub(r"(token_adapter\.)?base_layer\.|original_module\.", "", name)
            yield plain.removeprefix("base_model.model."), parameter


def used_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model, each before its children, without those of adapters that are not active.

    A model may have hundreds of such adapters; a step must not take longer for them.
    """
    seen, left = set(), [model]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        children = []
        for name, child in module.named_children():
            if (
                isinstance(child, nn.ModuleDict)
                and isinstance(module, BaseTunerLayer)
                and _is_by_adapter(module, name)
            ):
                children += [child[key] for key in module.active_adapters if key in child]
            else:
                children.append(child)
        left.extend(reversed(children))


def _is_by_adapter(layer: BaseTunerLayer, name: str) -> bool:
    return name in layer.adapter_layer_names or name in layer.other_param_names


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, each once, without those of adapters that are not active."""
    parameters = (parameter for module in used_modules(model) for parameter in module.parameters(recurse=False))
    return list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))


_CONTAINERS = (dict, list, set)


def remember_modules(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a model's modules and their attributes as they are now.

    Values of tensors are not kept: adding an adapter changes none.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    containers = [value for values in attributes for value in values.values() if isinstance(value, _CONTAINERS)]
    # Nearly all are empty, and each object that is made here brings the next garbage collection closer.
    contents = [(dict if isinstance(value, dict) else list)(value) if value else () for value in containers]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore() -> None:
        for module, values in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(values)
        for container, content in zip(containers, contents, strict=True):  # in place: handles of hooks refer to them
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for parameter, requires_grad in trained:
            parameter.requires_grad = requires_grad

    return restore
