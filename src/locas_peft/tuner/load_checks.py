"""Whether tensors can be loaded into a memory, or saved from one. No tensor is changed here."""

from collections.abc import Iterator

from torch import Tensor, nn

from .config import LocasConfig
from .errors import invalid
from .ffn import WIDENABLE_DTYPES
from .memory_file import LARGEST, PREFIX, one_line, remove_adapter_name, split_tensors
from .modules import host_modules, plain_name
from .state_keys import map_memory, map_tied, map_trained

Tensors = dict[str, Tensor]
LOAD_THE_BASE = "load the base that the memory was made for"


def find_problem(tensors: Tensors, expected: Tensors, config: LocasConfig) -> str | None:
    """Return why a memory's tensors cannot take the place of others; None where they can.

    Args:
        tensors: the tensors to be loaded, by name.
        expected: for each of them the tensor whose place it takes, which has its shape and kind of
            dtype. Those of a memory must all be among `tensors`.
        config: the memory's config, whose `scaling` multiplies its output.
    """
    for key in sorted(expected):
        if ".locas_" in key and key not in tensors:
            return f"the file has no {key}; {LOAD_THE_BASE}"
    for key, tensor in tensors.items():
        problem = _find_tensor_problem(key, tensor, expected[key])
        if problem is not None:
            return f"{one_line(key)} {problem}"
    layers, _ = split_tensors(tensors)
    for name, parts in layers.items():
        problem = find_gain_problem(parts, config.scaling)
        if problem is not None:
            return f"at {one_line(name)} {problem}"
    return None


def _find_tensor_problem(key: str, tensor: Tensor, expected: Tensor) -> str | None:
    shape = list(expected.shape)
    if list(tensor.shape) != shape:
        return f"has shape {list(tensor.shape)}, expected {shape}; {LOAD_THE_BASE}"
    is_memory = ".locas_" in key
    if not is_memory and not expected.is_floating_point():
        if tensor.dtype == expected.dtype:
            return None
        return f"is of {tensor.dtype}, {expected.dtype} expected; save or copy the memory again"
    problem = find_number_problem(tensor)
    return None if problem is None else f"{problem}; save or copy the memory again"


def find_number_problem(tensor: Tensor) -> str | None:
    """Return why a tensor's dtype or values cannot be loaded; None where they can."""
    if tensor.dtype not in WIDENABLE_DTYPES:
        return f"is of {tensor.dtype}, a floating dtype of 16 bits or more expected"
    if tensor.is_meta or not tensor.numel():
        return None
    if not tensor.isfinite().all():
        return "holds values that are not finite"
    largest = tensor.abs().max().item()
    if largest > LARGEST:
        return f"holds {largest:.3g}, at most {LARGEST:.0e} in size expected"
    return None


def find_gain_problem(parts: Tensors, scaling: float) -> str | None:
    """Return why a memory's output beside one FFN could become too large; None where it cannot."""
    gain = max(1.0, abs(scaling))
    # Numbers below 1 are counted as 1: they may grow in training.
    for part, tensor in parts.items():
        if tensor.is_meta or not tensor.numel():
            continue
        factor = max(1.0, tensor.detach().abs().max().item())
        times = 1
        # The input scale multiplies the inputs of gate and up.
        if part == "locas_input_scale" and "locas_gate" in parts:
            times = 2
        gain *= factor**times
    if gain > LARGEST:
        return f"the product of its largest numbers is {gain:.3g}, at most {LARGEST:.0e} expected"
    return None


def select_loadable(model: nn.Module, adapter_name: str, config: LocasConfig) -> Tensors:
    """Return the model's tensors that a memory's file may replace, by the model's names.

    They are those of the memory itself, of modules and tokens that are trained beside it, and the
    embeddings that the config's record names.
    """
    state = model.state_dict(keep_vars=True)
    added = {
        *map_memory(model, adapter_name).values(),
        *map_trained(model, adapter_name).values(),
        *map_tied(model, adapter_name).values(),
    }
    embeddings = {id(parameter) for parameter in _list_embeddings(model)}
    saved = config.get_record("saved_embeddings") or ()
    loadable = {}
    for key, tensor in state.items():
        name = plain_name(key).removeprefix(PREFIX)
        is_saved_embedding = id(tensor) in embeddings and name in saved
        if key in added or is_saved_embedding:
            loadable[key] = tensor
    return loadable


def _list_embeddings(model: nn.Module) -> Iterator[nn.Parameter]:
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            # The model has no embeddings.
            continue
        if module is not None:
            yield from module.parameters()


def check_tensors(
    model: nn.Module, adapter_name: str, config: LocasConfig, tensors: Tensors
) -> None:
    """Check a file's tensors against the model's own, before they are loaded.

    Args:
        tensors: the tensors by the model's names; names may have PEFT's prefix where the model's
            have none.

    Raises:
        ValueError: a tensor is missing, is not expected, or has another shape, another kind of
            dtype, or values that are not finite or too large. The message is one line.
    """
    state = model.state_dict(keep_vars=True)
    loadable = select_loadable(model, adapter_name, config)
    named = {}
    for key, tensor in tensors.items():
        own_key = key if key in state else key.removeprefix(PREFIX)
        if own_key not in loadable:
            problem = _describe_stranger(own_key, is_of_base=own_key in state)
            raise ValueError(f"the memory does not fit the model: {problem}.")
        named[remove_adapter_name(own_key, adapter_name)] = tensor
    expected = {}
    for key, tensor in loadable.items():
        expected[remove_adapter_name(key, adapter_name)] = tensor
    misfit = find_problem(named, expected, config)
    if misfit is not None:
        raise ValueError(f"the memory does not fit the model: {misfit}.")


def _describe_stranger(key: str, is_of_base: bool) -> str:
    if is_of_base and ".locas_" not in key:
        remedy = "get the file from a trusted source, or name the embedding in the config's record"
        return f"{one_line(key)} is a weight of the base and no part of a memory; {remedy}"
    return f"the model has no layer for {one_line(key)}; {LOAD_THE_BASE}"


def check_tokens(config: LocasConfig, model: nn.Module) -> None:
    """Raise a `ValueError` if a token to be trained is outside the vocabulary.

    On a GPU, PEFT would crash.
    """
    indices = config.trainable_token_indices or {}
    if isinstance(indices, dict):
        for target, ids in indices.items():
            for name, module in host_modules(model):
                if name.endswith(target):
                    _check_ids(name, module, ids)
        return
    embeddings = None
    if hasattr(model, "get_input_embeddings"):
        embeddings = model.get_input_embeddings()
    for name, module in host_modules(model):
        if module is embeddings:
            _check_ids(name, module, indices)


def _check_ids(name: str, module: nn.Module, ids: list[int]) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.shape:
        return
    largest = max(ids, default=0)
    if largest >= weight.shape[0]:
        rule = f"be below the {weight.shape[0]} rows of {name}"
        raise invalid("trainable_token_indices", rule, largest, "use ids of this vocabulary")
