"""The memories that a model has: found by name, listed by their state, clipped, and rescaled."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .layer import LocasLayer
from .modules import used_modules


def list_layers(model: nn.Module, adapter_name: str | None = None) -> list[LocasLayer]:
    """Return the model's LocasLayers, lowest first; with a name those that have that memory."""
    layers = [module for module in used_modules(model) if isinstance(module, LocasLayer)]
    if adapter_name is None:
        return layers
    return [layer for layer in layers if adapter_name in layer.locas_up]


def _find_active(model: nn.Module) -> dict[str, list[LocasLayer]]:
    """Return the layers of each active memory."""
    active: dict[str, list[LocasLayer]] = {}
    for layer in list_layers(model):
        for name in layer.active_adapters:
            if name in layer.locas_up:
                active.setdefault(name, []).append(layer)
    return active


def find_memories(model: nn.Module, adapter_name: str | None) -> dict[str, list[LocasLayer]]:
    """Return the layers of a memory by its name; for `None` those of each active memory."""
    if adapter_name is None:
        return _find_active(model)
    layers = list_layers(model, adapter_name)
    return {adapter_name: layers} if layers else {}


def find_memory(
    model: nn.Module, adapter_name: str | None, purpose: str
) -> tuple[str, list[LocasLayer]]:
    """Return the name of one memory, `None` for the active one, and its layers, lowest first.

    Raises:
        ValueError: where there is none, or several are active; `purpose` completes the message.
    """
    memories = find_memories(model, adapter_name)
    if len(memories) != 1:
        active = ", ".join(memories) or "none"
        wanted = repr(adapter_name) if adapter_name else f"that is active (active: {active})"
        problem = f"the model has no single LOCAS memory {wanted} to {purpose}"
        raise ValueError(f"{problem}: add it, or name one.")
    return next(iter(memories.items()))


def uncalibrated_memories(model: nn.Module, adapter_name: str | None = None) -> list[str]:
    """Name the memories, by default of the active ones, that wait for their rows or scale."""
    names = []
    for name, layers in find_memories(model, adapter_name).items():
        if any(layer.needs_calibration(name) for layer in layers):
            names.append(name)
    return names


def unwritten_memories(model: nn.Module) -> list[str]:
    """Name the active memories of the strategy "write" without a slot, which no step can change."""
    names = []
    for name, layers in find_memories(model, None).items():
        ups = [layer.locas_up[name].weight for layer in layers if layer.is_written(name)]
        if len(ups) == len(layers) and not any(up.any() for up in ups):
            names.append(name)
    return names


def clip_memories(model: nn.Module, adapter_name: str | None = None) -> None:
    """Clip the weights of a memory now, `None` for the active ones: after a step, before a copy."""
    for name, layers in find_memories(model, adapter_name).items():
        for layer in layers:
            layer.clip_(name)


def keep_weights(model: nn.Module, adapter_name: str | None = None) -> None:
    """Take the weights of a memory as they are, after clipped ones were written back in place.

    A second clip would change the last bits of rows at the radius. Rows that exceed the radius by
    more than rounding are still clipped.
    """
    for name, layers in find_memories(model, adapter_name).items():
        for layer in layers:
            layer.keep_weights(name)


@contextmanager
def rescale(model: nn.Module, multiplier: float, adapter_name: str | None = None) -> Iterator[None]:
    """Multiply the output of a memory by a number within the context: 0 silences it.

    The multiplier is not saved with the memory, and a memory cannot be merged inside the context.
    The multipliers of nested contexts are multiplied.

    Args:
        model: a model with memories.
        multiplier: the factor; 1 changes nothing.
        adapter_name: the memory; `None` for the active ones.

    Raises:
        ValueError: where the memory is missing or merged.
    """
    memories = find_memories(model, adapter_name)
    if not memories:
        wanted = adapter_name or "that is active"
        raise ValueError(f"the model has no LOCAS memory {wanted!r} to rescale.")
    pairs = [(layer, name) for name, layers in memories.items() for layer in layers]
    for layer, name in pairs:
        if name in layer.merged_adapters:
            remedy = "call unmerge_adapter() before it is rescaled."
            raise ValueError(f"the memory '{name}' is merged: {remedy}")
    former = [layer.locas_multiplier.get(name) for layer, name in pairs]
    for (layer, name), value in zip(pairs, former, strict=True):
        layer.locas_multiplier[name] = multiplier if value is None else value * multiplier
    try:
        yield
    finally:
        for (layer, name), value in zip(pairs, former, strict=True):
            layer.locas_multiplier.pop(name, None)
            if value is not None and name in layer.locas_up:
                layer.locas_multiplier[name] = value
