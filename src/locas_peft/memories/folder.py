"""The folder of a memory: its files, model card, saving and uploading; zip archives of it, which may be hostile."""

import io
import os
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from .. import __version__, backbone
from ..bases.gguf import is_gguf
from ..checks import one_line
from ..files import finish_replacement, staged, staged_file
from ..selfstudy.exchanges import EXCHANGES, PASSAGES
from ..tuner import LocasConfig
from .base_sample import sample_weights
from .checkpoint import CHECKPOINT_FOLDER, has_checkpoint
from .tensor_file import seal_tensor_file

__all__ = [
    "FILES",
    "MEMORY_CONFIG",
    "MOST_BYTES",
    "READING",
    "SAMPLE",
    "SIGNATURE",
    "TEXT_SIGNATURE",
    "check_vacant",
]
__all__ += ["escape", "make_card", "pack", "save_memory", "set_license", "unpack", "upload_memory"]

MEMORY_CONFIG = "adapter_config.json"
CARD = "README.md"  # in a memory's folder: its model card, which the Hugging Face hub renders
READING = "reading.json"  # in a memory's folder: the reading that made it
SAMPLE = "sample.txt"  # in a memory's folder: pieces of its text, by which a library finds it
SIGNATURE, TEXT_SIGNATURE = "model.sig", "model-and-text.sig"
"""The files in a memory's folder that hold its signatures (see `signing`)."""
FILES = (MEMORY_CONFIG, SAFETENSORS_WEIGHTS_NAME, CARD, READING, EXCHANGES, PASSAGES, SAMPLE)
FILES += (SIGNATURE, TEXT_SIGNATURE)
"""The files of a memory; no other is packed, unpacked or deleted."""
MOST_BYTES = 2**30  # the most that an archive unpacks to
_MOST_LISTED_BYTES = 2**20


def check_vacant(
    directory: str | Path, resume: bool = False, overwrite: bool = False, goes_on: bool = False
) -> None:
    """Raise a `ValueError` for a folder in which a reading would replace something. It need not exist.

    With `resume` an unfinished reading in it will go on, with `overwrite` it and a memory may be replaced, and with
    `goes_on` a memory alone. Other files that only have the same names may not.
    """
    folder, held = Path(directory), f"--out {str(directory)!r} holds"
    finish_replacement(folder)
    is_memory = (folder / MEMORY_CONFIG).exists() and (folder / READING).exists()
    unfinished = has_checkpoint(folder / CHECKPOINT_FOLDER)
    for name in () if is_memory else FILES:
        if os.path.lexists(folder / name):
            raise ValueError(
                f"{held} a file {name} that no reading wrote: choose another folder, or move that file"
            )
    if unfinished and not resume and not overwrite:
        raise ValueError(f"{held} an unfinished reading: go on with --resume, or give --overwrite")
    if is_memory and not (unfinished or overwrite or goes_on):
        raise ValueError(f"{held} a memory: choose another folder, or give --overwrite")


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

    The memory's config gets `base_name`, the base's name on other machines too. A LOCAS memory's record gets a sample
    of the base's weights, and its file a digest of its tensors. `add_files` writes more files into the folder that it
    is given, which are part of the whole.
    """
    config = model.peft_config[adapter_name]
    is_memory = isinstance(config, LocasConfig)
    if is_memory:
        host = config.get_record("host") or {}
        config.set_record("host", {**host, "weights": sample_weights(model)})
    name = config.base_model_name_or_path
    config.base_model_name_or_path = base_name
    try:
        with staged(directory) as folder:
            # Embeddings are not trained here, and PEFT would ask the hub about them.
            model.save_pretrained(
                str(folder), selected_adapters=[adapter_name], save_embedding_layers=False
            )
            if adapter_name != "default":  # PEFT saves it in a folder of its name
                for file in (folder / adapter_name).iterdir():
                    file.rename(folder / file.name)
                (folder / adapter_name).rmdir()
            if is_memory:
                seal_tensor_file(folder)
            (folder / CARD).write_text(card, encoding="utf-8")
            if add_files is not None:
                add_files(folder)
    finally:
        config.base_model_name_or_path = name


def upload_memory(directory: str | Path, repo: str, *, private: bool = False) -> str:
    """Upload the files of a memory to the repository NAME or OWNER/NAME of the Hugging Face hub; return the address.

    A new repository is made where there is none. `PeftModel.push_to_hub` would write an empty template in place of the
    card. The exchanges of a self-study, which can quote the text, stay here.
    """
    try:
        url = HfApi().create_repo(repo, private=private, exist_ok=True)
        files = [CARD, MEMORY_CONFIG, "adapter_model.*", READING, SIGNATURE]
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=directory, allow_patterns=files)
    except Exception as error:  # whatever the network and its libraries raise
        what = f"memory cannot be pushed to {repo!r} ({one_line(' '.join(str(error).split()))})"
        raise ValueError(f"{what}: check the name, and log in with `hf auth login`") from error
    return str(url)


def make_card(
    base: str, peft_type: str, title: str, made: str, rows: Mapping[str, str], note: str = ""
) -> str:
    """Return a model card: its metadata as YAML, then Markdown. No licence is claimed.

    The title says what the memory is of, and `made`, after "that was", how it was made. The note is below the table.
    Title and rows are Markdown.
    """
    is_local = backbone.is_embedded(base) or is_gguf(base) or Path(base).expanduser().exists()
    tags = [peft_type.lower(), "test-time-training"]
    about = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": tags}
    data = ModelCardData(base_model=None if is_local else base, **about)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    fields = {"data": data.to_yaml(), "title": title, "made": made, "table": table, "note": note}
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return template.format(
        base=escape(base), version=__version__, loading=_describe_loading(base), **fields
    )


def set_license(directory: str | Path, license: str) -> None:
    """Name the licence in the metadata of a memory's model card."""
    path = Path(directory) / CARD
    card = ModelCard.load(path)
    card.data.license = license
    with staged_file(path) as temporary:
        card.save(temporary)


def escape(text: str) -> str:
    """Return a text as one line of Markdown that renders as that text: no markup, HTML, links or formulas."""
    return re.sub(r"[!-/:-@[-`{-~]", lambda found: f"&#{ord(found[0])};", one_line(text))


def _describe_loading(model: str) -> str:
    """Return the lines of Python that load a base and register LOCAS."""
    if backbone.is_embedded(model):
        name = backbone.name_of(model)
        argument = "" if name == backbone.NAME else f'name="{name}"'
        return f"from locas_peft import backbone\n\nbase, tokenizer = backbone.load({argument})"
    if is_gguf(model):
        return f"from locas_peft.bases import load_base\n\nbase, tokenizer = load_base({model!r})"
    imports = "import locas_peft  # registers LOCAS with PEFT\nfrom transformers import AutoModelForCausalLM"
    return f"{imports}\n\nbase = AutoModelForCausalLM.from_pretrained({model!r})"


def pack(folder: Path, archive: Path) -> None:
    """Write a memory's files, but no links, into a zip archive, which is not compressed."""
    with zipfile.ZipFile(archive, "w") as packed:
        for file in (folder / name for name in FILES):
            if file.is_file() and not file.is_symlink():
                packed.write(file, Path(folder.name, file.name))


def unpack(archive: Path, folder: Path) -> None:
    """Write a memory's files out of a zip archive, which has them at its top or in one folder, into an empty folder.

    After the `ValueError` for an archive that is damaged or holds something else, the folder may hold some files.
    """
    try:
        with _ShortReads(archive) as file, zipfile.ZipFile(file) as packed:
            for entry in _list_entries(
                packed
            ):  # zipfile writes at most the bytes that an entry declares
                with (
                    packed.open(entry) as source,
                    (folder / Path(entry.filename).name).open("xb") as target,
                ):
                    shutil.copyfileobj(source, target)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        NotImplementedError,
        FileExistsError,
    ) as error:
        raise ValueError(
            f"the archive must be a sound zip of a memory ({error}): download the memory again"
        ) from None


class _ShortReads(io.FileIO):
    """A file that refuses long reads: zipfile reads the list of an archive's entries at once, however long it is."""

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_LISTED_BYTES:
            raise ValueError(
                f"the archive must list few files, got a list of {size:,} bytes: pack one memory alone"
            )
        return super().read(size)


def _list_entries(packed: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the files in an archive; a `ValueError` unless they are files of one memory and not too large."""
    entries = [entry for entry in packed.infolist() if not entry.is_dir()]
    home, slash, _ = entries[0].filename.rpartition("/") if entries else ("", "", "")
    is_plain = "/" not in home and (not slash or home not in ("", ".", ".."))
    for entry in entries:
        is_link = stat.S_ISLNK(entry.external_attr >> 16)
        if not is_plain or is_link or entry.filename not in [home + slash + name for name in FILES]:
            rule = f"hold the files of one memory ({', '.join(FILES)}), no links and one folder at most"
            raise ValueError(
                f"the archive must {rule}, got {entry.filename[:80]!r}: pack one memory alone"
            )
    if sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise ValueError(f"a memory must have at most {MOST_BYTES:,} bytes, got more: upload less")
    return entries
