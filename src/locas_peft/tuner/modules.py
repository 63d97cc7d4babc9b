"""Modules and parameters of a model with adapters: the base's own, those in use, their modes, their former state."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

# What PEFT puts around a module of the base: an adapter's layer, a fully trained copy, or trained tokens.
ADAPTER_LAYERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)
_BASE = (
    "base_layer.",
    "original_module.",
    "token_adapter.base_layer.",
)  # the base's own modules inside these


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the base's own parameters, by names that are the same with and without adapters."""
    wrapped = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, ADAPTER_LAYERS)
    )
    for name, parameter in model.named_parameters():
        outer = (
            [prefix for prefix in wrapped if name.startswith(prefix)]
            if name.startswith(wrapped)
            else []
        )
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
        is_layer = isinstance(module, BaseTunerLayer)
        by_adapter = (*module.adapter_layer_names, *module.other_param_names) if is_layer else ()
        for name, child in module.named_children():
            if name in by_adapter and isinstance(child, nn.ModuleDict):
                children += [child[key] for key in module.active_adapters if key in child]
            else:
                children.append(child)
        left.extend(reversed(children))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, each once, without those of adapters that are not active."""
    parameters = (
        parameter
        for module in used_modules(model)
        for parameter in module.parameters(recurse=False)
    )
    return list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within the context. Each module's own mode is restored afterwards."""
    training = [module for module in used_modules(model) if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def adapters_disabled(model: nn.Module, except_for: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Switch a model's adapters off within the context, except for some: PEFT's layers and fully trained modules.

    Where some of the active adapters are trained and others are frozen, the frozen ones stay on: they are part of what
    is compared with. Unlike PEFT's `disable_adapter`, it works on any module and leaves `requires_grad` alone.
    """
    kept = {id(module) for module in except_for}
    adapters = [module for module in used_modules(model) if isinstance(module, ADAPTER_LAYERS)]
    switched = [
        module for module in adapters if not (module._disable_adapters or id(module) in kept)
    ]
    names = {name for module in adapters for name in module.active_adapters}
    layers = adapters if len(names) > 1 else ()
    trained = {
        key for layer in layers for key, each in layer.named_parameters() if each.requires_grad
    }
    trained = {name for name in names for key in trained if name in key.split(".")}
    active, frozen = (
        [module._active_adapter for module in switched],
        names - trained if trained else (),
    )
    for module in switched:
        stay = [name for name in module.active_adapters if name in frozen]
        module._active_adapter, module._disable_adapters = stay or module._active_adapter, not stay
    try:
        yield
    finally:
        for module, names in zip(switched, active, strict=True):
            module._active_adapter, module._disable_adapters = names, False


def remember_modules(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a model's modules and their attributes as they are now.

    Values of tensors are not kept: adding an adapter changes none.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    containers = [
        value
        for values in attributes
        for value in values.values()
        if isinstance(value, dict | list | set)
    ]
    # Nearly all are empty, and each object that is made here brings the next garbage collection closer.
    contents = [
        (dict if isinstance(value, dict) else list)(value) if value else () for value in containers
    ]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore() -> None:
        for module, values in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(values)
        for container, content in zip(
            containers, contents, strict=True
        ):  # in place: handles of hooks refer to them
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for parameter, requires_grad in trained:
            parameter.requires_grad = requires_grad

    return restore
