"""Which tensors of a model's state are a memory's: by the structure of the model.

An adapter may be named like a layer ("0"), a module ("mlp") or a tensor ("weight"). No name of a
tensor tells then which adapter it belongs to.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .layer import LocasLayer
from .memory_file import SCALES, WEIGHTS
from .modules import ADAPTER_LAYERS, plain_name, state_name

Tensors = dict[str, Tensor]


def map_memory(model: nn.Module, adapter_name: str) -> dict[str, str]:
    """Return the names of a memory's tensors in the model's state, by their names in its file."""
    keys: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LocasLayer):
            continue
        own_name = state_name(name)
        for part in WEIGHTS:
            if adapter_name in getattr(layer, part):
                own_key = f"{own_name}.{part}.{adapter_name}.weight"
                keys[f"{plain_name(name)}.{part}.weight"] = own_key
        for part in SCALES:
            if adapter_name in getattr(layer, part):
                keys[f"{plain_name(name)}.{part}"] = f"{own_name}.{part}.{adapter_name}"
    return keys


def map_trained(model: nn.Module, adapter_name: str) -> dict[str, str]:
    """Return the same for the modules and tokens that are trained in full beside a memory."""
    keys: dict[str, str] = {}
    for name, wrapper in model.named_modules():
        if not isinstance(wrapper, AuxiliaryTrainingWrapper):
            continue
        if adapter_name not in wrapper._get_available_adapters():
            continue
        for key, own_key in wrapper.adapter_state_dict_load_map(adapter_name).items():
            keys[f"{plain_name(name)}.{key}"] = f"{state_name(name)}.{own_key}"
    return keys


def map_tied(model: nn.Module, adapter_name: str) -> dict[str, str]:
    """Return the same for the copies of trained tokens that PEFT saves for tied embeddings.

    It saves them where it saves a resized embedding.
    """
    keys: dict[str, str] = {}
    for name, wrapper in model.named_modules():
        if (
            not isinstance(wrapper, TrainableTokensWrapper)
            or not wrapper.token_adapter.tied_adapter
        ):
            continue
        if adapter_name in wrapper.token_adapter.trainable_tokens_delta:
            part = "token_adapter.trainable_tokens_delta"
            keys[f"{plain_name(name)}.{part}"] = f"{state_name(name)}.{part}.{adapter_name}"
    return keys


def restore_hidden(
    model: nn.Module, adapter_name: str, others: Iterable[str], state: Tensors
) -> None:
    """Add to a state what PEFT has taken out of it since it looked like another adapter's.

    PEFT leaves out each tensor whose name contains the name of another adapter.

    Args:
        model: the model.
        adapter_name: the memory that is saved.
        others: the names of the other adapters.
        state: the model's state without the tensors that were left out; mutated.

    Raises:
        ValueError: the tensors that were left out are needed, and the state has copies of the
            model's tensors, so that their values are not known here.
    """
    if not state:
        # Of a process that does not write.
        return
    foreign = tuple(_list_prefixes(model, others))
    hiding: dict[str, str] = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        key = state_name(name)
        other = _find_name_in(key, others)
        if other is not None and key not in state and not _is_below(key, foreign):
            hiding[key] = other
    if not hiding:
        return
    whole = model.state_dict()
    if _is_view(state, whole):
        for key in hiding:
            if key in whole:
                state[key] = whole[key]
        return
    needed = {**map_memory(model, adapter_name), **map_trained(model, adapter_name)}
    for key in needed.values():
        if key in hiding:
            raise ValueError(
                f"the memory '{adapter_name}' cannot be saved from this state_dict, in which the "
                f"name of the adapter '{hiding[key]}' hides {key}: "
                f"delete the adapter '{hiding[key]}' first, or give no state_dict."
            )


def add_wrappers_to_names(model: nn.Module, state: Tensors) -> Tensors:
    """Return a memory's tensors by names with the wrappers that a model has.

    Args:
        model: the model that is to get a memory beside the FFNs that the names tell.
        state: the tensors, by names with wrappers or without.
    """
    names: dict[str, str] = {}
    for name, _ in model.named_modules():
        # The outermost wrapper comes first.
        names.setdefault(plain_name(name), name)
    found: Tensors = {}
    for key, tensor in state.items():
        plain = plain_name(key)
        ffn, separator, part = plain.rpartition(".locas_")
        found[f"{names.get(ffn, ffn)}{separator}{part}" if separator else plain] = tensor
    return found


def add_names_of_wrapped(model: nn.Module, adapter_name: str, state: Tensors) -> None:
    """Add to a state the names by which a memory's tensors are looked for in a wrapped model.

    The names of a state that was gathered from `torch.compile(model)`, or from a model in
    DistributedDataParallel, begin otherwise. PEFT looks for what is trained in full by the names of
    modules, which contain wrappers that the names in a state do not have.

    Args:
        model: the model.
        adapter_name: the memory that is saved.
        state: the model's state; mutated.
    """
    by_plain = {plain_name(key).removeprefix("module."): key for key in state}
    wanted = set(map_memory(model, adapter_name).values())
    for name, wrapper in model.named_modules():
        if not isinstance(wrapper, AuxiliaryTrainingWrapper):
            continue
        for own_key in wrapper.adapter_state_dict_load_map(adapter_name).values():
            wanted.add(f"{name}.{own_key}")
    for key in wanted:
        given = by_plain.get(plain_name(key))
        if key not in state and given is not None:
            state[key] = state[given]


def _list_prefixes(model: nn.Module, adapter_names: Iterable[str]) -> Iterator[str]:
    """Yield how the names of adapters' tensors begin, in each layer that has them."""
    for name, layer in model.named_modules():
        if not isinstance(layer, ADAPTER_LAYERS):
            continue
        for part in (*layer.adapter_layer_names, *layer.other_param_names):
            container = attrgetter(part)(layer)
            for adapter_name in adapter_names:
                if adapter_name in container:
                    yield f"{state_name(name)}.{part}.{adapter_name}"


def _is_below(key: str, prefixes: tuple[str, ...]) -> bool:
    if not key.startswith(prefixes):
        return False
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _find_name_in(key: str, adapter_names: Iterable[str]) -> str | None:
    """Return the first name that PEFT takes for the name of the adapter that has a tensor."""
    for name in adapter_names:
        if f".{name}." in key or key.endswith(f".{name}"):
            return name
    return None


def _is_view(state: Tensors, whole: Tensors) -> bool:
    """Return whether a state has the model's own tensors, and no copies or shards of them."""
    for key, tensor in state.items():
        own = whole.get(key)
        if not isinstance(tensor, Tensor) or not isinstance(own, Tensor):
            continue
        if isinstance(tensor, DTensor) or isinstance(own, DTensor):
            return False
        if tensor.device != own.device or tensor.data_ptr() != own.data_ptr():
            return False
    return True
