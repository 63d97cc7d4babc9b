"""Commands on saved memories: merge, export, resize, sign, push, inspect; and on a library of them."""

from pathlib import Path
from typing import Any

from .console import open_consoles, printable, warnings_as_lines, write_result
from .options import (
    BASE_ON_CPU,
    AtLeastTwo,
    BaseOnCpu,
    Count,
    JsonFile,
    Memory,
    NamedPath,
    Overwrite,
    Text,
)

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank can have


def merge(
    memory: Memory,
    /,
    *,
    out: NamedPath,
    overwrite: Overwrite = False,
    pad_to_multiple_of: Count | None = None,
    base: BaseOnCpu = BASE_ON_CPU,
) -> None:
    """Merge a memory into its base model: a checkpoint that stock transformers loads.

    Args:
        out: the checkpoint's folder, new or empty.
        pad_to_multiple_of: pad the merged FFNs' width with zeros to a multiple of this.
    """
    from locas_peft.memories.conversion import merge_memory

    from .running import load_base_of

    stdout, _ = open_consoles()
    _check_empty(out, "choose another, or give --overwrite", overwrite)
    loaded = load_base_of(memory, base)
    with warnings_as_lines():
        merged = merge_memory(loaded.model, loaded.tokenizer, memory, out, pad_to_multiple_of)
    width = getattr(merged.config, "intermediate_size", None)
    wide = f", FFNs {width:,} wide" if isinstance(width, int) else ""
    loads = f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it"
    stdout.print(
        f"The merged model ({merged.num_parameters():,} parameters{wide}) is in {out}: {loads}"
    )


def export(
    memory: Memory,
    /,
    *,
    out: NamedPath,
    no_base: bool = False,
    base_only: bool = False,
    base_name: str | None = None,
    neurons: Count | None = None,
    base: BaseOnCpu = BASE_ON_CPU,
) -> None:
    """Export a memory for engines that serve LoRA; others load what locas merge writes.

    Args:
        out: a new or empty folder: `base` gets the base, widened by neurons of zeros, and `adapter` a LoRA adapter.
        no_base: export the adapter alone, for a base that was exported before with the same --neurons.
        base_only: export the base alone.
        base_name: what the adapter's config calls the exported base, such as the server's --model: engines compare it.
        neurons: how many neurons the base gets: the r of the widest memory that it shall serve; this one's by default.
    """
    from locas_peft.memories.conversion import export_memory

    from .running import load_base_of

    if no_base and base_only:
        raise ValueError(
            "--no-base and --base-only exclude each other: give one of them, or none for both"
        )
    stdout, _ = open_consoles()
    _check_empty(out)
    loaded = load_base_of(memory, base)
    parts = {
        "with_base": not no_base,
        "with_adapter": not base_only,
        "neurons": neurons,
        "base_path": base_name,
    }
    with warnings_as_lines():
        neurons, rank = export_memory(loaded.model, loaded.tokenizer, memory, out, **parts)
    if not no_base:
        stdout.print(
            f"The base, {neurons} neurons wider in each FFN, is in {out / 'base'}: any engine loads it"
        )
    if not base_only:
        stdout.print(
            f"The LoRA adapter of rank {rank} is in {out / 'adapter'}: serve it with that base"
        )
        stdout.print(_name_vllm_option(rank))


def resize(
    memory: Memory,
    /,
    *,
    r: Count,
    out: NamedPath,
    text: Text | None = None,
    max_tokens: AtLeastTwo = 8192,
    base: BaseOnCpu = BASE_ON_CPU,
) -> None:
    """Change how many slots a memory has. Fewer keep its output nearly; more keep it exactly, and can learn more.

    Args:
        r: slots in every layer.
        out: a new or empty folder.
        text: a UTF-8 text file, or - for stdin: best what the memory has read. Fewer slots are refitted on it, and new
            ones are cloned from what is active on it. A two-layer memory can get fewer slots without (NL-SVD).
        max_tokens: the first tokens of the text.
    """
    from locas_peft import compress, grow
    from locas_peft.memories.conversion import save_adapter
    from locas_peft.memories.folder import escape
    from locas_peft.model import count_positions
    from locas_peft.text import load_text
    from locas_peft.tuner import list_layers

    from .running import open_with_base

    stdout, _ = open_consoles()
    _check_empty(out)
    content = None if text is None else load_text(text)
    loaded, model = open_with_base(memory, base)
    widths = [layer.locas_up["default"].out_features for layer in list_layers(model, "default")]
    if not widths:
        raise ValueError(
            f"memory must be of type LOCAS, got {str(memory)!r} of another: give one of locas-glu"
        )
    if (
        content is None
        and r < max(widths)
        and any(layer.ffn.gated for layer in list_layers(model, "default"))
    ):
        raise ValueError(
            "--text must name a text for fewer slots beside gated FFNs, got none: give what was read"
        )
    window, batches = min(512, count_positions(loaded.model) or 512), None
    if content is not None:
        batches = [part[None] for part in loaded.encode(content, max_tokens, None).split(window)]
    (grow if r > max(widths) else compress)(model, r, batches=batches)
    resized = {"resized from": f"{max(widths)} slots in a layer"}
    save_adapter(model, "default", loaded.name, out, escape(memory.name), resized)
    stdout.print(f"The memory of {r} slots a layer, {max(widths)} before, is in {out}")


def library(folder: Path, /, *, json_file: JsonFile = None) -> None:
    """List the memories of a library, the latest first.

    Args:
        folder: the library.
    """
    stdout, _ = open_consoles(json_file)
    held = _open_library(folder)
    rows = [{"name": name, "bytes": held.bytes_of(name)} for name in held.list()]
    rows += [{"name": name, "bytes": None} for name in held.list_unfinished()]
    for row in rows:
        size = "unfinished" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
        stdout.print(f"{row['name']}   {size}", markup=False)
    if not rows:
        stdout.print(f"{folder} holds no memory", markup=False)
    write_result(json_file, rows)


def forget(folder: Path, name: str, /) -> None:
    """Delete a memory of a library, whole or not at all. The memories that stay are not changed.

    Args:
        folder: the library.
        name: of the memory.
    """
    stdout, _ = open_consoles()
    held = _open_library(folder)
    held.forget(name)
    stdout.print(f"{name} is forgotten: no file in {folder} holds what it learned", markup=False)


def sign(memory: Memory, /, *, key: NamedPath, certificate: NamedPath | None = None) -> None:
    """Sign the files of a memory (OpenSSF model signing): others can tell that they are from you and unchanged.

    Args:
        key: PEM file with a private key on P-256, P-384 or P-521, without a password.
        certificate: PEM file with the key's certificate, then those of its issuers.
    """
    from locas_peft.memories.loading import describe_memory
    from locas_peft.memories.signing import sign_memory

    stdout, _ = open_consoles()
    describe_memory(memory)  # it refuses a damaged file in one line
    stdout.print(f"{memory} is signed: {', '.join(sign_memory(memory, key, certificate))}")


def verify(memory: Memory, /, *, key: NamedPath) -> None:
    """Check that a memory is signed by the owner of a key, and that no covered file was changed, added or removed.

    Args:
        key: PEM file with the public key, or with the certificates of the authorities that you trust.
    """
    from locas_peft.memories.signing import check_signature

    stdout, _ = open_consoles()
    stdout.print(
        f"{memory} is as signed: {', '.join(map(printable, check_signature(memory, key)))}"
    )


def push(
    memory: Memory, /, *, repo: str, license: str | None = None, private: bool = False
) -> None:
    """Upload a memory with its model card to the Hugging Face hub; log in there first, with `hf auth login`.

    Args:
        repo: NAME or OWNER/NAME; made where there is none.
        license: of the memory, such as cc-by-4.0, written into its model card; the card names none without.
        private: make a new repository a private one.
    """
    from locas_peft.memories.folder import set_license, upload_memory
    from locas_peft.memories.loading import describe_memory

    stdout, _ = open_consoles()
    describe_memory(memory)  # it refuses a damaged file in one line
    if license is not None:
        set_license(memory, license)
    stdout.print(f"The memory is at {upload_memory(memory, repo, private=private)}")


def inspect(
    memory: Memory, /, *, others: tuple[Path, ...] = (), json_file: JsonFile = None
) -> None:
    """Describe a memory: base model, layers, width, bytes, norms, slots, and what is unusual. Loads no base model.

    Args:
        others: a folder of memories of its base to compare it with; may be given again. Else the folder around it.
    """
    from locas_peft.memories.loading import (
        LEAST_OTHERS,
        describe_memory,
        find_unusual,
        tabulate_memory,
    )

    stdout, _ = open_consoles(json_file)
    found = describe_memory(memory)
    found |= find_unusual(found, [_open_library(each).folder for each in others])
    for name in ("base", "peft_type", "r", "init", "scaling", "dtype"):
        if found[name] is not None:
            stdout.print(f"{name:11}{printable(str(found[name]))}")
    stdout.print(f"{'size':11}{found['parameters']:,} parameters, {found['bytes']:,} bytes")
    for name, value in found["digests"].items():
        stdout.print(printable(f"{name.removesuffix('_sha256'):11}SHA-256 {value}"))
    if found["learned"] is False:
        stdout.print(f"{'learned':11}nothing yet")
    if found["replaces"]:
        stdout.print(f"{'replaces':11}{printable(', '.join(found['replaces']))} of the base")
    if found["layers"]:
        stdout.print(tabulate_memory(found).to_rich())
        for each in (marks := found["unusual"]) or ():
            usual = f"usually {each['low']:.3g} to {each['high']:.3g}"
            stdout.print(
                f"{'unusual':11}{printable(each['quantity'])}: {each['value']:.3g}, {usual}"
            )
        count = (
            f"not known: {LEAST_OTHERS} are needed" if marks is None else len(marks) or "nothing"
        )
        stdout.print(f"{'unusual':11}{count}, beside {found['others']} other memories of this base")
    write_result(json_file, found)


def _name_vllm_option(rank: int) -> str:
    """Return the option that vLLM needs to serve a LoRA of this rank, as a line."""
    if rank <= VLLM_RANKS[-1]:
        return f"vLLM needs --max-lora-rank {next(allowed for allowed in VLLM_RANKS if allowed >= rank)}"
    return f"vLLM serves ranks up to {VLLM_RANKS[-1]}: make the memory narrower with locas resize"


def _check_empty(out: Path, remedy: str = "choose another", overwrite: bool = False) -> None:
    from locas_peft.files import check_output_directory

    check_output_directory("--out", out)
    if not overwrite and out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--out must be a new or empty folder, got {str(out)!r} with files in it: {remedy}"
        )


def _open_library(folder: Path) -> Any:
    from locas_peft.library import Library

    if not folder.is_dir():
        raise ValueError(
            f"a library must be a folder of memories, got {str(folder)!r}: memorize --library makes one"
        )
    return Library(folder)
