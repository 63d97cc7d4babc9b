"""The file of a memory's tensors: found, read and digested. Nothing in it is executed; `load_checks.py` checks it."""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from typing import Any

import huggingface_hub
import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor

WEIGHTS = ("locas_gate", "locas_up", "locas_down")
SCALES = ("locas_tau", "locas_input_scale", "locas_calibrated")
PREFIX = "base_model.model."  # PEFT puts it before each name in a file
DIGEST = "locas_digest"  # the key of the digest in the metadata of a safetensors file
# The limit of a layer's gain, the product of its largest numbers, and of any other number in a memory's files: outputs
# stay far below the largest float32. Trained memories are below 1e3.
LARGEST = 1e12


def find_memory_file(folder: str, subfolder: str | None = None, **hub_options: Any) -> str | None:
    """Return the file that PEFT loads from a folder or the hub, safetensors before a pickle; None without either."""
    path = os.path.join(folder, subfolder) if subfolder else folder
    for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME):
        if os.path.isdir(path):
            if os.path.isfile(os.path.join(path, name)):
                return os.path.join(path, name)
        else:
            with suppress(
                Exception
            ):  # no such file, no network: PEFT names the reason when it loads the tensors
                return huggingface_hub.hf_hub_download(
                    folder, name, subfolder=subfolder, **hub_options
                )
    return None


def load_tensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Load the tensors of an adapter's file, on the CPU, and its metadata.

    A pickle is read by torch's reader of plain tensors (`weights_only`), which calls no function that it names. A file
    that is damaged, has another digest, or holds other things than dense tensors is a `ValueError`.
    """
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors, metadata = (
                    {key: file.get_tensor(key) for key in file.keys()},
                    file.metadata() or {},
                )
        else:
            tensors, metadata = torch.load(path, map_location="cpu", weights_only=True), {}
    except Exception as error:  # whatever the readers raise for a damaged file
        if isinstance(error, PermissionError):
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): check the file's permissions."
            ) from None
        if not path.endswith(".safetensors"):  # torch's own message advises to unpickle everything
            raise ValueError(
                f"{path} is damaged or no pickle of tensors alone: save it as safetensors."
            ) from None
        reason = one_line(str(error).partition("\n")[0])
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({reason}): copy or save it again."
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(key, str) for key in tensors):
        raise ValueError(
            f"{path} must hold tensors by name, got {type(tensors).__name__}: save it again."
        )
    for key, tensor in tensors.items():
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        dense = dense and not tensor.is_meta and not tensor.is_quantized
        # A pickle can give one number a shape of any size.
        if not dense or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{path} must hold dense tensors, got another value as {one_line(key)}: save it again."
            )
    if DIGEST in metadata and metadata[DIGEST] != digest(tensors):
        raise ValueError(
            f"{path} holds other tensors than were saved, since its digest differs: copy it again."
        )
    return tensors, metadata


def split_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return the parts of the memory beside each FFN, by the FFN's name, and the names of all other tensors."""
    layers: dict[str, dict[str, Tensor]] = {}
    others = []
    for key, tensor in tensors.items():
        layer, _, part = key.removesuffix(".weight").rpartition(
            "."
        )  # 'a.b.locas_up.weight' -> 'a.b', 'locas_up'
        if part in (WEIGHTS if key.endswith(".weight") else SCALES) and layer:
            layers.setdefault(layer.removeprefix(PREFIX), {})[part] = tensor
        else:
            others.append(key)
    return layers, others


def digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, in the order of their names."""
    found = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        found.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode(errors="surrogatepass"))
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{found.hexdigest()}"


def seal_memory_file(folder: str) -> dict[str, Tensor]:
    """Write the digest of its tensors into a memory's safetensors file, and return them; none without a file."""
    path = find_memory_file(folder) if os.path.isdir(folder) else None
    try:
        tensors, metadata = ({}, {}) if path is None else load_tensors(path)
    except ValueError:  # an older file, which is about to be replaced
        return {}
    if not split_tensors(tensors)[0] or not path.endswith(".safetensors"):
        return tensors
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    # safetensors itself writes the keys in a random order.
    header["__metadata__"] = dict(sorted({**metadata, DIGEST: digest(tensors)}.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors stay aligned
    temporary = f"{path}.{os.getpid()}.partial"
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(data)
        shutil.copymode(path, temporary)
        shutil.move(temporary, path)  # a rename, where the system can replace a file by one
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    return tensors


def one_line(text: str) -> str:
    """Return a text from a file, fit for a message: one line, at most 200 characters, control characters escaped."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= 200 else f"{text[:200]}..."
