"""The tensors' file of a memory: found, read, and checked before any model is changed. Nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import safe_open

from .ffn import WIDENABLE_DTYPES

if TYPE_CHECKING:
    from .config import LocasConfig

WEIGHTS = ("locas_gate", "locas_up", "locas_down")
SCALES = ("locas_tau", "locas_input_scale")
REQUIRED = ("locas_up", "locas_down", "locas_tau")
PREFIX = "base_model.model."
DIGEST = "locas_digest"
"""The key of the digest in the metadata of a safetensors file."""
LARGEST = 1e12
"""The limit of a layer's gain, the product of its largest numbers, and of any other number in a memory's files.

The outputs of a layer within it stay far below the largest float32. Trained memories are below 1e3.
"""


@dataclass(frozen=True)
class MemoryFile:
    """The contents of a file that passed the checks: its tensors on the meta device, and each FFN's memory width R."""

    path: str
    tensors: dict[str, torch.Tensor]
    widths: dict[str, int]


def find_memory_file(folder: str) -> str | None:
    """Return the file that PEFT loads from a folder, safetensors before a pickle; None where there is neither."""
    paths = [os.path.join(folder, name) for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)]
    return next((path for path in paths if os.path.isfile(path)), None)


def load_tensors(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Load the tensors of an adapter's file, on the CPU, and its metadata.

    A pickle is read by torch's reader of plain tensors (`weights_only`), which calls no function that it names.

    Raises:
        ValueError: the file is unreadable or damaged, its digest is that of other tensors, or it holds something
            other than dense tensors.
    """
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
        else:
            tensors, metadata = torch.load(path, map_location="cpu", weights_only=True), {}
    except Exception as error:  # whatever the readers raise for a damaged file
        if isinstance(error, PermissionError):
            raise ValueError(f"{path} cannot be read ({error.strerror}): check the file's permissions.") from None
        if not path.endswith(".safetensors"):  # torch's own message advises to unpickle everything
            raise ValueError(f"{path} is damaged or no pickle of tensors alone: save it as safetensors.") from None
        reason = one_line(str(error).partition("\n")[0])
        raise ValueError(f"{path} is truncated or not a safetensors file ({reason}): copy or save it again.") from None
    if not isinstance(tensors, dict) or not all(isinstance(key, str) for key in tensors):
        raise ValueError(f"{path} must hold tensors by name, got {type(tensors).__name__}: save it again.")
    for key, tensor in tensors.items():
        if not _is_dense(tensor):
            raise ValueError(f"{path} must hold dense tensors, got another value as {one_line(key)}: save it again.")
    if DIGEST in metadata and metadata[DIGEST] != digest(tensors):
        raise ValueError(f"{path} holds other tensors than were saved, since its digest differs: copy it again.")
    return tensors, metadata


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, in the order of their names."""
    found = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        found.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode(errors="surrogatepass"))
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{found.hexdigest()}"


def check_memory_file(folder: str, config: LocasConfig) -> MemoryFile | None:
    """Check a memory's file against its config. No model is needed.

    The file must be complete and consistent, of the configured widths, and of finite numbers whose product is below
    `LARGEST`. Each tensor must belong to the memory or to what the config names: `modules_to_save`,
    `trainable_token_indices`, `saved_embeddings`.

    Returns:
        The file's contents; None where the folder has no file, which is left to PEFT.

    Raises:
        ValueError: the file breaks a rule; the message names it in one line.
    """
    path = find_memory_file(folder)
    if path is None:
        return None
    tensors, _ = load_tensors(path)
    layers, others = _split(tensors)
    if not layers:
        raise ValueError(f"{path} holds no LOCAS memory: no tensor of it is named locas_up.")
    for key, tensor in tensors.items():
        problem = _find_number_problem(tensor, is_memory=key not in others)
        if problem:
            raise ValueError(f"{path}: {one_line(key)} {problem}; save or copy the memory again.")
    # PEFT loads each of these without a question, also in place of the base's own weights.
    for key in others:
        if _asked_for_by(key, config) is None:
            raise ValueError(
                f"{path}: {one_line(key)} is a weight of the base and no part of a memory; get the file from a "
                "trusted source, or name the tensor in the config's saved_embeddings."
            )
    for field in ("modules_to_save", "trainable_token_indices", "saved_embeddings"):
        # A classifier has one of several names, so that one tensor is enough here.
        if getattr(config, field) and not any(_asked_for_by(key, config) == field for key in others):
            raise ValueError(f"{path} does not fit its config: no tensor is for {field}. Save the memory again.")
    hidden_size = (config.host or {}).get("hidden_size")
    for name, parts in layers.items():
        problem = _find_layer_problem(parts, config, hidden_size)
        if problem:
            raise ValueError(f"{path} does not fit its config at {one_line(name)}: {problem}. Save the memory again.")
    widths = {name: len(parts["locas_up"]) for name, parts in layers.items()}
    return MemoryFile(path, {key: tensor.to("meta") for key, tensor in tensors.items()}, widths)


def seal_memory_file(folder: str, config: LocasConfig) -> tuple[dict[str, int], list[str] | None]:
    """Write the digest of its tensors into the metadata of a memory's safetensors file, if the folder has one.

    Returns:
        The FFNs with a memory and their widths R, none where there is no file yet; and the names of the base's tensors
        that were saved with the memory (`save_embedding_layers`), None for none.
    """
    path = find_memory_file(folder)
    try:
        tensors, metadata = ({}, {}) if path is None else load_tensors(path)
    except ValueError:  # an older file, which is about to be replaced
        tensors, metadata = {}, {}
    layers, others = _split(tensors)
    if not layers:
        return {}, config.saved_embeddings
    if path.endswith(".safetensors"):
        _write_metadata(path, {**metadata, DIGEST: digest(tensors)})
    by_config = ("modules_to_save", "trainable_token_indices")
    embeddings = [key.removeprefix(PREFIX) for key in others if _asked_for_by(key, config) not in by_config]
    return {name: len(parts["locas_up"]) for name, parts in layers.items() if "locas_up" in parts}, embeddings or None


def find_divergence(tensors: dict[str, torch.Tensor], config: LocasConfig) -> str | None:
    """Return why a memory with these numbers could not be loaded again; None where it could.

    `tensors` have the names of a file. Those on the meta device or empty are skipped.
    """
    tensors = {key: tensor.detach() for key, tensor in tensors.items() if tensor.numel() and not tensor.is_meta}
    layers, _ = _split(tensors)
    for key, tensor in tensors.items():
        problem = _find_number_problem(tensor, is_memory=True)
        if problem:
            return f"{key} {problem}"
    problems = ((name, _find_gain_problem(parts, config)) for name, parts in layers.items())
    return next((f"at {name} {problem}" for name, problem in problems if problem), None)


def list_replacements(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Name the tensors of a memory's file that are no part of the memory: they replace weights of the base."""
    return [key.removeprefix(PREFIX) for key in _split(tensors)[1]]


def one_line(text: str) -> str:
    """Return a text from a file, fit for a message: one line, at most 200 characters, control characters escaped."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _write_metadata(path: str, metadata: dict[str, str]) -> None:
    """Replace the metadata of a safetensors file. safetensors itself writes keys in a random order."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = file.read()
    text = json.dumps({**header, "__metadata__": dict(sorted(metadata.items()))}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors stay aligned
    temporary = f"{path}.{os.getpid()}.partial"
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(tensors)
        shutil.copymode(path, temporary)
        shutil.move(temporary, path)  # a rename, where the system can replace a file by one
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _is_dense(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return False
    # A pickle can give one number a shape of any size.
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _split(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """Return the parts of the memory in each FFN, by the FFN's name, and the names of all other tensors."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    others = []
    for key, tensor in tensors.items():
        layer, _, part = key.removesuffix(".weight").rpartition(".")  # 'a.b.locas_up.weight' -> 'a.b', 'locas_up'
        if part in (WEIGHTS if key.endswith(".weight") else SCALES) and layer:
            layers.setdefault(layer.removeprefix(PREFIX), {})[part] = tensor
        else:
            others.append(key)
    return layers, others


def _asked_for_by(key: str, config: LocasConfig) -> str | None:
    """Return the field of the config that names a tensor which is no part of the memory; None where none does."""
    name = key.removeprefix(PREFIX)
    if name in (config.saved_embeddings or ()):
        return "saved_embeddings"
    if config.trainable_token_indices and name.endswith(".trainable_tokens_delta"):
        return "trainable_token_indices"
    if any(f".{module}." in f".{name}" for module in config.modules_to_save or ()):
        return "modules_to_save"
    return None


def _find_number_problem(tensor: torch.Tensor, is_memory: bool) -> str | None:
    if is_memory or tensor.is_floating_point():
        if tensor.dtype not in WIDENABLE_DTYPES:
            return f"is of {tensor.dtype}, a floating dtype of 16 bits or more expected"
        if not tensor.isfinite().all():
            return "holds values that are not finite"
        if tensor.numel() and tensor.abs().max() > LARGEST:
            return f"holds {tensor.abs().max().item():.3g}, at most {LARGEST:.0e} in size expected"
    return None


def _find_layer_problem(parts: dict[str, torch.Tensor], config: LocasConfig, hidden_size: int | None) -> str | None:
    for part in REQUIRED:
        if part not in parts:
            return f"{part} is missing"
    up = list(parts["locas_up"].shape)
    if len(up) != 2 or 0 in up:
        return f"locas_up has shape {up}, two dimensions expected"
    # The names in rank_pattern are not compared: a file may bring a regular expression that takes forever.
    r, d = up[0] if up[0] in config.rank_pattern.values() else config.r, hidden_size or up[1]
    expected = {"locas_gate": [r, d], "locas_up": [r, d], "locas_down": [d, r]} | {scale: [] for scale in SCALES}
    for part, tensor in parts.items():
        if list(tensor.shape) != expected[part]:
            return f"{part} has shape {list(tensor.shape)}, expected {expected[part]}"
    return _find_gain_problem(parts, config)


def _find_gain_problem(parts: dict[str, torch.Tensor], config: LocasConfig) -> str | None:
    factors = {part: tensor.abs().max().item() for part, tensor in parts.items()}
    k = factors.pop("locas_input_scale", 1.0)
    projections = [k] * (2 if "locas_gate" in factors else 1)
    gain = math.prod(max(1.0, factor) for factor in (*factors.values(), *projections, abs(config.scaling)))
    if gain > LARGEST:
        return f"the product of its largest numbers is {gain:.3g}, at most {LARGEST:.0e} expected"
    return None
