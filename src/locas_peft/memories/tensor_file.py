"""The file of an adapter's tensors: found, read, digested and sealed. Nothing in it is executed."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor

from ..tuner.memory_file import one_line, split_tensors

__all__ = ["find_tensor_file", "load_tensors", "seal_tensor_file"]

Tensors = dict[str, Tensor]
# The key of the digest in the metadata of a safetensors file.
DIGEST = "locas_digest"


def find_tensor_file(folder: str | Path) -> Path | None:
    """Return the file that PEFT loads from a folder: safetensors, else a pickle, else None."""
    for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME):
        path = Path(folder, name)
        if path.is_file():
            return path
    return None


def load_tensors(path: str | Path) -> tuple[Tensors, dict[str, str]]:
    """Load the tensors of an adapter's file, on the CPU, and its metadata.

    A pickle is read by torch's reader of plain tensors (`weights_only`), which calls no function
    that it names.

    Raises:
        ValueError: the file is damaged, has another digest, or holds other things than dense
            tensors.
    """
    path = str(path)
    try:
        if path.endswith(".safetensors"):
            tensors, metadata = _read_safetensors(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
            metadata = {}
    except PermissionError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): check the file's permissions."
        ) from None
    # Whatever the readers raise for a damaged file.
    except Exception as error:
        raise ValueError(_describe_damage(path, error)) from None
    _check_dense(path, tensors)
    if DIGEST in metadata and metadata[DIGEST] != digest(tensors):
        raise ValueError(
            f"{path} holds other tensors than were saved, since its digest differs: copy it again."
        )
    return tensors, metadata


def _read_safetensors(path: str) -> tuple[Tensors, dict[str, str]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        names = list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
        metadata = file.metadata() or {}
    return tensors, metadata


def _describe_damage(path: str, error: Exception) -> str:
    if not path.endswith(".safetensors"):
        # torch's own message advises to unpickle everything.
        return f"{path} is damaged or no pickle of tensors alone: save it as safetensors."
    first, _, _ = str(error).partition("\n")
    reason = one_line(first)
    return f"{path} is truncated or not a safetensors file ({reason}): copy or save it again."


def _check_dense(path: str, tensors: Any) -> None:
    by_name = isinstance(tensors, dict) and all(isinstance(key, str) for key in tensors)
    if not by_name:
        raise ValueError(
            f"{path} must hold tensors by name, got {type(tensors).__name__}: save it again."
        )
    for key, tensor in tensors.items():
        if not _is_dense(tensor):
            raise ValueError(
                f"{path} must hold dense tensors, got another value as {one_line(key)}: "
                "save it again."
            )


def _is_dense(tensor: object) -> bool:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return False
    if tensor.is_meta or tensor.is_quantized:
        return False
    # A pickle can give one number a shape of any size.
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def digest(tensors: Tensors) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, in order of names."""
    sha256 = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        header = f"{key} {tensor.dtype} {list(tensor.shape)}\n"
        sha256.update(header.encode(errors="surrogatepass"))
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{sha256.hexdigest()}"


def seal_tensor_file(folder: str | Path) -> None:
    """Write the digest of its tensors into the metadata of a memory's safetensors file."""
    path = find_tensor_file(folder)
    if path is None or path.suffix != ".safetensors":
        return
    sealed = _make_metadata(path)
    if sealed is None:
        return
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        data = file.read()
    # Sorted, since safetensors itself writes the keys in a random order.
    header["__metadata__"] = dict(sorted(sealed.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors stay aligned.
    text += b" " * (-len(text) % 8)
    temporary = f"{path}.{os.getpid()}.partial"
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(data)
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _make_metadata(path: Path) -> dict[str, str] | None:
    """Return the metadata of a memory's file with the digest; None for another adapter's file.

    The tensors are views of the file. They are released here, since Windows replaces no file that
    has views.
    """
    tensors, metadata = load_tensors(path)
    layers, _ = split_tensors(tensors)
    if not layers:
        return None
    return {**metadata, DIGEST: digest(tensors)}
