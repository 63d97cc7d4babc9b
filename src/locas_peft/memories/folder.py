"""The folder of a memory: its files, what may be replaced in it, how it is saved and uploaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from ..checks import one_line
from ..files import finish_replacement, staged
from ..selfstudy.exchanges import EXCHANGES
from .card import CARD
from .checkpoint import CHECKPOINT_FOLDER, has_checkpoint
from .loading import MEMORY_CONFIG

__all__ = ["FILES", "READING", "SAMPLE", "check_vacant", "save_memory", "upload_memory"]

READING = "reading.json"
"""The file in a memory's folder that holds the reading that made it."""
SAMPLE = "sample.txt"
"""The file in a memory's folder that holds pieces of its text, by which a library finds it."""
FILES = (MEMORY_CONFIG, SAFETENSORS_WEIGHTS_NAME, CARD, READING, EXCHANGES, SAMPLE)
"""The files of a memory; no other is packed, unpacked or deleted."""


def check_vacant(directory: str | Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise a `ValueError` for a folder in which a reading would replace something. It need not exist.

    Args:
        resume: an unfinished reading in it will go on.
        overwrite: a memory in it may be replaced. Other files that only have the same names may not.
    """
    folder = Path(directory)
    finish_replacement(folder)
    is_memory = (folder / MEMORY_CONFIG).exists() and (folder / READING).exists()
    unfinished = has_checkpoint(folder / CHECKPOINT_FOLDER)
    if not is_memory:
        for name in FILES:
            if os.path.lexists(folder / name):
                raise ValueError(
                    f"--out {str(folder)!r} holds a file {name} that no reading wrote: choose another folder, or move "
                    "that file"
                )
    if unfinished and not resume and not overwrite:
        raise ValueError(
            f"--out {str(folder)!r} holds an unfinished reading: go on with --resume, or give --overwrite"
        )
    if is_memory and not unfinished and not overwrite:
        raise ValueError(f"--out {str(folder)!r} holds a memory: choose another folder, or give --overwrite")


def save_memory(
    model: PeftModel,
    directory: str | Path,
    base_name: str,
    card: str,
    *,
    adapter_name: str = "default",
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Write PEFT's files of a memory and its model card into a folder, whole or not at all.

    Args:
        base_name: the base's name on other machines too, which the memory's config gets.
        card: in place of PEFT's template.
        add_files: writes more files into the folder that it is given, which are part of the whole.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    config = model.peft_config[adapter_name]
    name = config.base_model_name_or_path
    config.base_model_name_or_path = base_name
    try:
        with staged(directory) as folder:
            # Embeddings are not trained here, and PEFT would ask the hub about them.
            model.save_pretrained(str(folder), selected_adapters=[adapter_name], save_embedding_layers=False)
            if adapter_name != "default":  # PEFT saves it in a folder of its name
                for file in (folder / adapter_name).iterdir():
                    file.rename(folder / file.name)
                (folder / adapter_name).rmdir()
            (folder / CARD).write_text(card, encoding="utf-8")
            if add_files is not None:
                add_files(folder)
    finally:
        config.base_model_name_or_path = name


def upload_memory(directory: str | Path, repo: str, *, private: bool = False) -> str:
    """Upload the files of a memory, its model card among them, to the Hugging Face hub.

    `PeftModel.push_to_hub` would write an empty template in place of the card. The exchanges of a self-study, which
    can quote the text, stay here.

    Args:
        repo: NAME or OWNER/NAME; made where there is none.
        private: make a new repository a private one.

    Returns:
        The address of the repository.

    Raises:
        ValueError: the hub cannot be reached, or refuses.
    """
    try:
        url = HfApi().create_repo(repo, private=private, exist_ok=True)
        files = [CARD, MEMORY_CONFIG, "adapter_model.*", READING]
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=directory, allow_patterns=files)
    except Exception as error:  # whatever the network and its libraries raise
        reason = one_line(" ".join(str(error).split()))
        raise ValueError(
            f"memory cannot be pushed to {repo!r} ({reason}): check the name, and log in with `hf auth login`"
        ) from error
    return str(url)
