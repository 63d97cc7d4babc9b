"""The folder of a memory: its files, model card, saving, uploading and zip archives.

An archive may be hostile.
"""

import io
import lzma
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
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from transformers.utils import CONFIG_NAME

from .. import __version__, backbone
from ..bases.gguf import is_gguf
from ..checks import invalid, one_line
from ..exchanges import EXCHANGES
from ..files import finish_replacement, load_json, staged, staged_file, write_json
from ..tuner import LocasConfig
from .base_sample import sample_weights
from .checkpoint import CHECKPOINT_FOLDER, has_checkpoint
from .tensor_file import seal_tensor_file

__all__ = [
    "FILES",
    "MEMORY_CONFIG",
    "MOST_BYTES",
    "PASSAGES",
    "READING",
    "RECORD",
    "SAMPLE",
    "SIGNATURE",
    "TEXT",
    "TEXT_SIGNATURE",
    "check_vacant",
    "escape",
    "make_card",
    "pack",
    "save_memory",
    "set_base",
    "set_license",
    "unpack",
    "upload_memory",
]

# In a memory's folder: PEFT's config; the model card, which the Hugging Face hub renders; the
# record of the stages that made it, and the one that version 0.2.0 wrote; pieces of its text, by
# which a library finds it; its text, whose sentences are shown as the sources of answers.
MEMORY_CONFIG = "adapter_config.json"
CARD = "README.md"
RECORD = "record.json"
READING = "reading.json"
SAMPLE = "sample.txt"
TEXT = "text.txt"
PASSAGES = "passages.safetensors"
"""A file that version 0.2.0 wrote. It is not used."""
# A signature by the program model_signing (docs/howto/signing.md), and one that version 0.2.0 wrote
# beside it.
SIGNATURE = "model.sig"
TEXT_SIGNATURE = "model-and-text.sig"
FILES = (
    MEMORY_CONFIG,
    SAFETENSORS_WEIGHTS_NAME,
    CARD,
    RECORD,
    READING,
    EXCHANGES,
    PASSAGES,
    SAMPLE,
    TEXT,
    SIGNATURE,
    TEXT_SIGNATURE,
)
"""The files of a memory; no other is packed, unpacked or deleted."""
_PUSHED = (
    CARD,
    MEMORY_CONFIG,
    SAFETENSORS_WEIGHTS_NAME,
    WEIGHTS_NAME,
    RECORD,
    READING,
    SIGNATURE,
)
MOST_BYTES = 2**30
"""The most that an archive unpacks to."""
_MOST_LISTED_BYTES = 2**20


def check_vacant(
    directory: str | Path, resume: bool = False, overwrite: bool = False, goes_on: bool = False
) -> None:
    """Raise a `ValueError` for a folder in which a reading would replace something.

    The folder need not exist. Other files that only have the names of a memory's files may never be
    replaced.

    Args:
        resume: an unfinished reading or study in the folder will go on.
        overwrite: an unfinished reading or study and a memory may be replaced.
        goes_on: a memory alone may be replaced.
    """
    folder = Path(directory)
    holds = f"--out {str(directory)!r} holds"
    if os.path.lexists(folder / CONFIG_NAME):
        # transformers would load the memory with that model, and no memory would find its base.
        raise ValueError(f"{holds} a model, by its {CONFIG_NAME}: choose another folder")
    if _is_library(folder):
        raise ValueError(f"{holds} a library: give --library, or choose another folder")
    finish_replacement(folder)
    has_record = (folder / RECORD).exists() or (folder / READING).exists()
    is_memory = has_record and (folder / MEMORY_CONFIG).exists()
    if not is_memory:
        for name in FILES:
            if os.path.lexists(folder / name):
                remedy = "choose another folder, or move that file"
                raise ValueError(f"{holds} a file {name} that no reading wrote: {remedy}")
    unfinished = has_checkpoint(folder / CHECKPOINT_FOLDER)
    if unfinished and not resume and not overwrite:
        remedy = "go on with --resume, or give --overwrite"
        raise ValueError(f"{holds} an unfinished reading or study: {remedy}")
    if is_memory and not (unfinished or overwrite or goes_on):
        raise ValueError(f"{holds} a memory: choose another folder, or give --overwrite")


def _is_library(folder: Path) -> bool:
    """Return whether a folder has memories in folders of their own, and is none itself."""
    if (folder / MEMORY_CONFIG).exists():
        return False
    return any(not file.parent.name.startswith(".") for file in folder.glob(f"*/{MEMORY_CONFIG}"))


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

    A LOCAS memory's record gets a sample of the base's weights, and its file a digest of its
    tensors.

    Args:
        base_name: the base's name on other machines too, for the memory's config.
        card: the text of the model card.
        add_files: writes more files into the folder that it is given, which are part of the whole.
    """
    config = model.peft_config[adapter_name]
    is_memory = isinstance(config, LocasConfig)
    if is_memory:
        host = config.get_record("host") or {}
        config.set_record("host", {**host, "weights": sample_weights(model)})
    former_name = config.base_model_name_or_path
    config.base_model_name_or_path = base_name
    try:
        with staged(directory) as folder:
            # Embeddings are not trained here, and PEFT would ask the hub about them.
            model.save_pretrained(
                str(folder), selected_adapters=[adapter_name], save_embedding_layers=False
            )
            # PEFT saves other adapters than "default" in a folder of their name.
            if adapter_name != "default":
                for file in (folder / adapter_name).iterdir():
                    file.rename(folder / file.name)
                (folder / adapter_name).rmdir()
            if is_memory:
                seal_tensor_file(folder)
            (folder / CARD).write_text(card, encoding="utf-8", newline="\n")
            if add_files is not None:
                add_files(folder)
    finally:
        config.base_model_name_or_path = former_name


def upload_memory(directory: str | Path, repo: str, *, private: bool = False) -> str:
    """Upload a memory to the repository NAME or OWNER/NAME of the hub; return the address.

    A new repository is made where there is none. `PeftModel.push_to_hub` would write an empty
    template in place of the card. The files that quote its text stay here: the text, the sample
    of it, and the exchanges of a self-study. A file that is a link, which may lead anywhere, is a
    `ValueError`.
    """
    for name in _PUSHED:
        if (Path(directory) / name).is_symlink():
            remedy = "copy the memory with its files first"
            raise invalid("memory", "be pushed without links", f"the link {name!r}", remedy)
    try:
        url = HfApi().create_repo(repo, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=url.repo_id, folder_path=directory, allow_patterns=list(_PUSHED)
        )
    # Whatever the network and its libraries raise.
    except Exception as error:
        reason = one_line(" ".join(str(error).split()))
        problem = f"memory cannot be pushed to {repo!r} ({reason})"
        raise ValueError(f"{problem}: check the name, and log in with `hf auth login`") from error
    return str(url)


def make_card(
    base: str, peft_type: str, title: str, made: str, rows: Mapping[str, str], note: str = ""
) -> str:
    """Return a model card: its metadata as YAML, then Markdown. No licence is claimed.

    Args:
        title: what the memory is of, in Markdown.
        made: how it was made, after "that was".
        rows: a table of names and values, in Markdown.
        note: stands below the table.
    """
    is_local = backbone.is_embedded(base) or is_gguf(base) or Path(base).expanduser().exists()
    data = ModelCardData(
        base_model=None if is_local else base,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=[peft_type.lower(), "test-time-training"],
    )
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return template.format(
        data=data.to_yaml(),
        title=title,
        base=escape(base),
        made=made,
        version=__version__,
        table="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        note=note,
        loading=_describe_loading(base),
    )


def set_license(directory: str | Path, license: str) -> None:
    """Name the licence in the metadata of a memory's model card."""
    path = Path(directory) / CARD
    card = ModelCard.load(path)
    card.data.license = license
    with staged_file(path) as temporary:
        card.save(temporary)


def set_base(directory: str | Path, name: str) -> None:
    """Name the base in a memory's config, and remove signatures, which are of the former config."""
    path = Path(directory) / MEMORY_CONFIG
    write_json(path, {**load_json(path), "base_model_name_or_path": name})
    for signature in (SIGNATURE, TEXT_SIGNATURE):
        (Path(directory) / signature).unlink(missing_ok=True)


def escape(text: str) -> str:
    """Return a text as one line of Markdown that renders as that text, without markup or HTML."""
    return re.sub(r"[!-/:-@[-`{-~]", lambda match: f"&#{ord(match[0])};", one_line(text))


def pack(folder: Path, archive: Path) -> None:
    """Write a memory's files, but no links, into a zip archive, which is not compressed.

    A memory whose tensors are in another file than that of safetensors is a `ValueError`.
    """
    if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file():
        rule = f"memory {folder.name!r} must have a file {SAFETENSORS_WEIGHTS_NAME} to be packed"
        raise ValueError(f"{rule}, got none: save it again")
    # A reproducible image may date its files before 1980, where a zip's dates begin.
    with zipfile.ZipFile(archive, "w", strict_timestamps=False) as packed:
        for name in FILES:
            file = folder / name
            if file.is_file() and not file.is_symlink():
                packed.write(file, Path(folder.name, name))


def unpack(archive: Path, folder: Path) -> None:
    """Write a memory's files out of a zip archive into an empty folder.

    The archive has them at its top or in one folder.

    Raises:
        ValueError: the archive is damaged, or holds something else. The folder may then hold some
            files.
    """
    try:
        with _ShortReads(archive) as file, zipfile.ZipFile(file) as packed:
            for entry in _list_entries(packed):
                path = folder / Path(entry.filename).name
                # zipfile writes at most the bytes that an entry declares.
                with packed.open(entry) as source, path.open("xb") as target:
                    shutil.copyfileobj(source, target)
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        RuntimeError,
        NotImplementedError,
        FileExistsError,
    ) as error:
        raise ValueError(
            f"the archive must be a sound zip of a memory ({error}): download the memory again"
        ) from None


class _ShortReads(io.FileIO):
    """A file that refuses long reads.

    zipfile reads the list of an archive's entries at once, however long it is.
    """

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _MOST_LISTED_BYTES:
            got = f"a list of {size:,} bytes"
            raise invalid("the archive", "list few files", got, "pack one memory alone")
        return super().read(size)


def _list_entries(packed: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the files in an archive; a `ValueError` unless they are those of one memory."""
    entries = [entry for entry in packed.infolist() if not entry.is_dir()]
    first_name = entries[0].filename if entries else ""
    folder, slash, _ = first_name.rpartition("/")
    is_outside = bool(slash) and folder in ("", ".", "..")
    allowed = set()
    # One folder at most, which is inside the folder that the archive is unpacked to.
    if "/" not in folder and not is_outside:
        allowed = {folder + slash + name for name in FILES}
    for entry in entries:
        is_link = stat.S_ISLNK(entry.external_attr >> 16)
        if is_link or entry.filename not in allowed:
            files = ", ".join(FILES)
            rule = f"hold the files of one memory ({files}), no links and one folder at most"
            got = repr(entry.filename[:80])
            raise invalid("the archive", rule, got, "pack one memory alone")
    if sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise invalid("a memory", f"have at most {MOST_BYTES:,} bytes", "more", "upload less")
    return entries


def _describe_loading(base: str) -> str:
    """Return the lines of Python that load a base and register LOCAS."""
    if backbone.is_embedded(base):
        name = backbone.name_of(base)
        argument = "" if name == backbone.NAME else f'name="{name}"'
        return f"from locas_peft import backbone\n\nbase, tokenizer = backbone.load({argument})"
    if is_gguf(base):
        return f"from locas_peft.bases import load_base\n\nbase, tokenizer = load_base({base!r})"
    return (
        "import locas_peft  # registers LOCAS with PEFT\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({base!r})"
    )
