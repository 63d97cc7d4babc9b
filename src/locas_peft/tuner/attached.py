"""The memories that a model has: found by name, listed by their state, and rescaled for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .layer import LocasLayer
from .modules import used_modules


def list_layers(model: nn.Module, adapter_name: str | None = None) -> list[LocasLayer]:
    """Return the model's LocasLayers, lowest first; only those with the memory of that name if one is given."""
    layers = [module for module in used_modules(model) if isinstance(module, LocasLayer)]
    return (
        layers
        if adapter_name is None
        else [layer for layer in layers if adapter_name in layer.locas_up]
    )


def names_or_active(model: nn.Module, adapter_name: str | None) -> list[str]:
    """Return the name in a list; for `None` the names of the model's active memories, in the order of its layers."""
    if adapter_name is not None:
        return [adapter_name]
    layers = list_layers(model)
    return list(
        dict.fromkeys(
            name for layer in layers for name in layer.active_adapters if name in layer.locas_up
        )
    )


def find_memory(
    model: nn.Module, adapter_name: str | None, purpose: str
) -> tuple[str, list[LocasLayer]]:
    """Return the name of a memory, `None` for the active one, and the layers that have it, lowest first.

    Where there is none, or several are active, raise a `ValueError`; `purpose` completes its message.
    """
    names = names_or_active(model, adapter_name)
    layers = list_layers(model, names[0]) if len(names) == 1 else []
    if not layers:
        wanted = (
            repr(adapter_name)
            if adapter_name
            else f"that is active (active: {', '.join(names) or 'none'})"
        )
        raise ValueError(
            f"the model has no single LOCAS memory {wanted} to {purpose}: add it, or name one."
        )
    return names[0], layers


def empty_memories(model: nn.Module, adapter_name: str | None = None) -> list[str]:
    """Name the memories, by default of the active ones, that wait for their calibration (rows or measured scale)."""
    layers = {name: list_layers(model, name) for name in names_or_active(model, adapter_name)}
    return [
        name for name, own in layers.items() if any(layer.needs_calibration(name) for layer in own)
    ]


def unwritten_memories(model: nn.Module) -> list[str]:
    """Name the active memories of the strategy "write" that have no slot yet, so that training cannot change them."""
    layers = {name: list_layers(model, name) for name in names_or_active(model, None)}
    return [
        name
        for name, own in layers.items()
        if all(one.is_written(name) and one.is_empty(name) for one in own)
    ]


@contextmanager
def rescale(model: nn.Module, multiplier: float, adapter_name: str | None = None) -> Iterator[None]:
    """Multiply the output of a memory by a number within the context: 0 silences it, 1 changes nothing.

    The multiplier is not saved with the memory, and a memory cannot be merged inside the context. The multipliers of
    nested contexts are multiplied. Without a name, the active memories are rescaled. A memory that is missing or
    merged is a `ValueError`.
    """
    memories = [
        (layer, name)
        for name in names_or_active(model, adapter_name)
        for layer in list_layers(model, name)
    ]
    if not memories:
        raise ValueError(
            f"the model has no LOCAS memory {adapter_name or 'that is active'!r} to rescale."
        )
    for layer, name in memories:
        if name in layer.merged_adapters:
            raise ValueError(
                f"the memory '{name}' is merged: call unmerge_adapter() before it is rescaled."
            )
    former = [(layer, name, layer.locas_multiplier.get(name)) for layer, name in memories]
    for layer, name, value in former:
        layer.locas_multiplier[name] = multiplier if value is None else value * multiplier
    try:
        yield
    finally:
        for layer, name, value in former:
            layer.locas_multiplier.pop(name, None)
            if value is not None and name in layer.locas_up:
                layer.locas_multiplier[name] = value
