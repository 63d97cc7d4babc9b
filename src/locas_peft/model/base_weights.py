"""The base's weights: their digest, and what was computed of them alone, so that it is computed once."""

import hashlib
from collections.abc import Callable, Hashable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..files import find_kept, staged_file
from ..text import digest_json, digest_tokenizer
from ..tuner.modules import ADAPTER_LAYERS, adapters_disabled, base_parameters, used_modules

MOST_KNOWN = 256
_KNOWN: dict[Hashable, Any] = {}


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 over the base's frozen parameters: names, shapes, dtypes, and up to 4,096 numbers of each.

    The numbers are evenly spread: a change of others alone is not seen, nor one of weights that are sharded, on the
    meta device, or of a tensor type of their own. It is the same with and without adapters.
    """
    digest = hashlib.sha256()
    adapted = any(isinstance(module, ADAPTER_LAYERS) for module in model.modules())
    for name, parameter in base_parameters(model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if type(parameter.data) is torch.Tensor and not (
            parameter.is_meta or (adapted and parameter.requires_grad)
        ):
            flat = parameter.detach().reshape(-1)
            digest.update(flat[:: -(-len(flat) // 4096) or 1].to("cpu", torch.float64).numpy())
    return digest.hexdigest()


def compute_once(model: nn.Module, compute: Callable[..., Any], *arguments: Hashable) -> Any:
    """Return `compute(model, *arguments)`, which depends on the base alone: once for each base and its arguments.

    A base is known by its name and fingerprint. For one with a name, whose weights the fingerprint sees, the result is
    also kept on disk (see `find_kept`): it has tensors and plain values alone, and the arguments are tokenizers and
    JSON values. It is computed each time where frozen adapters stay on as part of the base. Do not change the result.
    """
    with adapters_disabled(model):
        if any(
            isinstance(each, ADAPTER_LAYERS) and not each._disable_adapters
            for each in used_modules(model)
        ):
            return compute(model, *arguments)
    base = model.config.name_or_path, fingerprint(model)
    key = *base, compute, arguments
    if key not in _KNOWN:
        if len(_KNOWN) == MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _load_or_compute(base, model, compute, arguments)
    return _KNOWN[key]


def _load_or_compute(
    base: tuple[str, str], model: nn.Module, compute: Callable[..., Any], arguments: tuple
) -> Any:
    if not base[0] or any(
        each.is_meta or type(each.data) is not torch.Tensor for _, each in base_parameters(model)
    ):
        return compute(model, *arguments)
    code = hashlib.sha256(
        b"".join(each.read_bytes() for each in sorted(Path(__file__).parents[1].rglob("*.py")))
    )
    versions = (
        code.hexdigest(),
        torch.__version__,
        transformers.__version__,
        model.config.to_json_string(),
    )
    plain = [
        (digest_tokenizer(each), each.eos_token) if callable(each) else each for each in arguments
    ]
    if (
        folder := find_kept("bases", digest_json([*base, *versions, compute.__name__, plain]))
    ) is None:
        return compute(model, *arguments)
    with suppress(
        Exception
    ):  # none is kept, or each kind of damage raises an error of another type
        return torch.load(folder / "result.pt", weights_only=True, map_location="cpu")
    torch.save(found := compute(model, *arguments), content := BytesIO())
    with suppress(OSError), staged_file(folder / "result.pt") as temporary:
        temporary.write_bytes(content.getvalue())
    return found
