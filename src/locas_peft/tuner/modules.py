"""Modules and parameters of a model with adapters: the base's own, those in use, their modes."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from accelerate.utils import align_module_device
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

__all__ = [
    "ADAPTER_LAYERS",
    "AdapterLayers",
    "adapters_disabled",
    "base_parameters",
    "evaluating",
    "host_modules",
    "is_wrapper",
    "load_offloaded",
    "plain_name",
    "reference_active",
    "remember_modules",
    "state_name",
    "trained_parameters",
    "uncompiled",
    "unmerged_at_end",
    "unwrap",
    "used_modules",
]

# What PEFT puts around a module of the base: an adapter's layer, a trained copy, or trained tokens.
ADAPTER_LAYERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)
# What torch's wrappers call the module that they wrap: activation checkpointing, FSDP, and
# `torch.compile`. The names in a state dict have only the last of them.
_HIDDEN = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_COMPILED = "_orig_mod"
WRAPPED = (*_HIDDEN, _COMPILED)
# The base's own modules inside these.
_BASE = ("base_layer.", "original_module.", "token_adapter.base_layer.")
_WRAPPED_BY_ADAPTERS = ("base_layer", "original_module", "token_adapter")


def plain_name(name: str) -> str:
    """Return a module's or a tensor's name without the wrappers of torch around its parents."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def state_name(name: str) -> str:
    """Return a module's name as the names in its model's state dict begin."""
    return ".".join(part for part in name.split(".") if part not in _HIDDEN)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is one of the wrappers of torch: activation checkpointing, ..."""
    return any(part in module._modules for part in WRAPPED)


def unwrap(module: nn.Module) -> nn.Module:
    """Return what the wrappers of torch around a module wrap; the module itself without any."""
    while is_wrapper(module):
        module = next(module._modules[part] for part in WRAPPED if part in module._modules)
    return module


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped, or the module itself."""
    return module._modules.get(_COMPILED, module)


def load_offloaded(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a module's tensor. One that Accelerate offloads is loaded, as for a forward of it."""
    if not hasattr(module, "_hf_hook"):
        return getattr(module, name)
    with align_module_device(module):
        return getattr(module, name)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the base's own parameters, by names that are the same with and without adapters."""
    wrapped = []
    for name, module in model.named_modules():
        if isinstance(module, ADAPTER_LAYERS):
            wrapped.append(f"{name}.")
    prefixes = tuple(wrapped)
    for name, parameter in model.named_parameters():
        # One test of all prefixes first: a model may have thousands of them.
        if name.startswith(prefixes):
            outer = [prefix for prefix in wrapped if name.startswith(prefix)]
            if not all(name.removeprefix(prefix).startswith(_BASE) for prefix in outer):
                continue
        plain = re.sub(r"(token_adapter\.)?base_layer\.|original_module\.", "", name)
        yield plain_name(plain).removeprefix("base_model.model."), parameter


def host_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules like `named_modules`, without what adapters have in their layers.

    The layers themselves are among them, and inside each of them the module that it wraps.
    """
    seen = set()
    left = [("", model)]
    while left:
        name, module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        yield name, module
        is_adapter = isinstance(module, ADAPTER_LAYERS)
        children = []
        for child_name, child in module.named_children():
            if not is_adapter or child_name in _WRAPPED_BY_ADAPTERS:
                children.append((f"{name}.{child_name}" if name else child_name, child))
        left.extend(reversed(children))


def used_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model, each before its children, without those of inactive adapters.

    A model may have hundreds of such adapters; a step must not take longer for them.
    """
    seen = set()
    left = [model]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        left.extend(reversed(_used_children(module)))


def _used_children(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, BaseTunerLayer):
        return list(module.children())
    by_adapter = (*module.adapter_layer_names, *module.other_param_names)
    children = []
    for name, child in module.named_children():
        if name in by_adapter and isinstance(child, nn.ModuleDict):
            children += [child[key] for key in module.active_adapters if key in child]
        else:
            children.append(child)
    return children


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, without those of inactive adapters."""
    trained: dict[nn.Parameter, None] = {}
    for module in used_modules(model):
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                trained[parameter] = None
    return list(trained)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within the context; then restore each module's mode."""
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
    """Switch a model's adapters off within the context: PEFT's layers and fully trained modules.

    Where some of the active adapters are trained and others are frozen, the frozen ones stay on:
    they are part of what is compared with. Unlike PEFT's `disable_adapter`, it works on any module
    and leaves `requires_grad` alone.

    Args:
        model: the model; mutated within the context.
        except_for: modules of adapters that stay on.
    """
    with AdapterLayers(model).disabled(except_for):
        yield


@contextmanager
def reference_active(model: nn.Module, reference: str | None = None) -> Iterator[None]:
    """Make a model its own reference within the context: what its training is compared with.

    Adapters that are active and frozen stay on, as in `adapters_disabled`.

    Args:
        model: the model; mutated within the context.
        reference: the adapter that takes the place of those in training, such as TRL's
            `ref_adapter_name`; None for the model without them.
    """
    with AdapterLayers(model).referring_to(reference):
        yield


class AdapterLayers:
    """The adapter layers of a model that are in use, listed once: using the list takes no walk.

    Args:
        model: the model.

    Attributes:
        layers: PEFT's layers, and its wrappers of modules that are trained in full.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Any] = []
        for module in used_modules(model):
            if isinstance(module, ADAPTER_LAYERS):
                self.layers.append(module)
        self._frozen = _find_frozen(self.layers)
        self._switches = self._read_switches()

    def were_switched(self) -> bool:
        """Return whether adapters were switched, enabled, disabled, merged or unmerged since."""
        return self._read_switches() != self._switches

    @contextmanager
    def referring_to(self, reference: str | None) -> Iterator[None]:
        """Use a reference adapter within the context (see `reference_active`)."""
        if reference is None:
            with self.disabled():
                yield
            return
        former = [(layer, layer._active_adapter) for layer in self.layers]
        for layer in self.layers:
            still_on = [name for name in layer.active_adapters if name in self._frozen]
            layer._active_adapter = [*still_on, reference]
        try:
            yield
        finally:
            for layer, active in former:
                layer._active_adapter = active

    @contextmanager
    def disabled(self, except_for: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Switch the layers off within the context (see `adapters_disabled`)."""
        exceptions = {id(module) for module in except_for}
        former = []
        for layer in self.layers:
            if layer._disable_adapters or id(layer) in exceptions:
                continue
            former.append((layer, layer._active_adapter))
            still_on = [name for name in layer.active_adapters if name in self._frozen]
            if still_on:
                layer._active_adapter = still_on
            else:
                layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, active in former:
                layer._active_adapter = active
                layer._disable_adapters = False

    def _read_switches(self) -> list[Any]:
        switches = []
        for layer in self.layers:
            merged = list(getattr(layer, "merged_adapters", ()))
            switches.append((list(layer.active_adapters), layer.disable_adapters, merged))
        return switches


def _find_frozen(adapters: list[nn.Module]) -> set[str]:
    """Return the active adapters without a trained parameter, if another has one."""
    names = {name for module in adapters for name in module.active_adapters}
    if len(names) <= 1:
        return set()
    trained = set()
    for module in adapters:
        for part in module.adapter_layer_names:
            tensors_of = attrgetter(part)(module)
            for name in names.intersection(tensors_of.keys()):
                if _is_trained(tensors_of[name]):
                    trained.add(name)
    return names - trained if trained else set()


def _is_trained(tensors: nn.Module | Tensor) -> bool:
    if isinstance(tensors, Tensor):
        return tensors.requires_grad
    return any(parameter.requires_grad for parameter in tensors.parameters())


@contextmanager
def unmerged_at_end(model: nn.Module) -> Iterator[None]:
    """Take adapters that were merged within the context out of the base again.

    A memory's host is then as before, bit for bit. Of other adapters, PEFT subtracts what it added:
    the weights are as before up to rounding.
    """
    # Merging may take the layers out of the model.
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        yield
    finally:
        for layer in layers:
            if layer.merged:
                layer.unmerge()


def remember_modules(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a model's modules and their attributes as they are now.

    Values of tensors are not kept. What changes them is undone first (`unmerged_at_end`), or done
    to copies that take their place.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    contents = []
    for _, values in attributes:
        for value in values.values():
            if isinstance(value, dict | list | set):
                # Nearly all are empty: they share one copy, since each new object brings the next
                # garbage collection closer.
                contents.append((value, value.copy() if value else ()))
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore() -> None:
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)
        for container, content in contents:
            # In place: handles of hooks refer to the containers.
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        for parameter, requires_grad in trained:
            parameter.requires_grad = requires_grad

    return restore
