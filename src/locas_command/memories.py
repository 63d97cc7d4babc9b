"""Commands on saved memories: merge, export, resize, push, inspect; and on a library of them."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

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
    check_absent,
)

# The values that --max-lora-rank can have.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


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
    from locas_peft.memories.conversion import check_checkpoint_folder, merge_memory

    from .running import load_base_of

    stdout, _ = open_consoles()
    _check_empty(out, "choose another, or give --overwrite", overwrite)
    check_checkpoint_folder(out)
    loaded = load_base_of(memory, base)
    with warnings_as_lines():
        merged = merge_memory(loaded.model, loaded.tokenizer, memory, out, pad_to_multiple_of)
    width = getattr(merged.config, "intermediate_size", None)
    wide = ""
    if isinstance(width, int):
        wide = f", FFNs {width:,} wide"
    loads = f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it"
    stdout.print(
        f"The merged model ({merged.num_parameters():,} parameters{wide}) is in {out}: {loads}"
    )


def export(
    memory: Annotated[Path, Parameter(help="a memory's folder, or a library's.")],
    /,
    *,
    out: NamedPath,
    no_base: bool = False,
    base_only: bool = False,
    base_name: str | None = None,
    neurons: Count | None = None,
    base: BaseOnCpu = BASE_ON_CPU,
) -> None:
    """Export a memory, or each one of a library, for engines that serve LoRA.

    Args:
        out: a new or empty folder: `base` gets the base, widened by neurons of zeros, and `adapter`
            a LoRA adapter; of a library, `adapters` gets a folder for each memory, by its name.
        no_base: export the adapters alone, for a base that was exported with the same --neurons.
        base_only: export the base alone.
        base_name: what the adapters call the exported base: engines compare it with their own name
            of it, such as the server's --model.
        neurons: how many neurons the base gets: the r of the widest memory that it shall serve. By
            default that of the widest one here.
    """
    from locas_peft.memories import MEMORY_CONFIG, export_memories

    from .running import load_base_of, open_library

    if no_base and base_only:
        raise ValueError(
            "--no-base and --base-only exclude each other: give one of them, or none for both"
        )
    stdout, _ = open_consoles()
    _check_empty(out)
    is_library = not (memory / MEMORY_CONFIG).exists() and any(memory.glob(f"*/{MEMORY_CONFIG}"))
    if is_library:
        held, loaded = open_library(memory, base)
        exported = {f"adapters/{name}": held.find(name) for name in held.list()}
    else:
        loaded = load_base_of(memory, base)
        exported = {"adapter": memory}
    with warnings_as_lines():
        neurons, rank = export_memories(
            loaded.model,
            loaded.tokenizer,
            exported,
            out,
            neurons=neurons,
            with_base=not no_base,
            with_adapters=not base_only,
            base_name=base_name,
        )
    if not no_base:
        wider = f"{neurons} neurons wider in each FFN"
        stdout.print(f"The base, {wider}, is in {out / 'base'}: any engine loads it")
    if base_only:
        return
    if is_library:
        count = "1 LoRA adapter" if len(exported) == 1 else f"{len(exported)} LoRA adapters"
        where = out / "adapters"
        stdout.print(f"{count} of rank {rank} at most: vLLM finds each in {where} by its name")
    else:
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
    max_tokens: AtLeastTwo | None = None,
    base: BaseOnCpu = BASE_ON_CPU,
) -> None:
    """Change how many slots a memory has.

    With fewer slots its output stays nearly the same. With more it stays the same, and the memory
    can learn more: go on with --from.

    Args:
        r: slots in every layer.
        out: a new or empty folder.
        text: a UTF-8 text file, or - for stdin: best what the memory has read. Fewer slots are
            refitted on it, and new ones are cloned from what is active on it. A two-layer memory
            can get fewer slots without (NL-SVD).
        max_tokens: the first tokens of the text; 8,192 by default.
    """
    from locas_peft import compress, grow
    from locas_peft.memories.conversion import save_adapter
    from locas_peft.memories.folder import escape
    from locas_peft.model import count_positions
    from locas_peft.stages.saving import copy_history
    from locas_peft.text import load_text
    from locas_peft.tuner import STRATEGIES, list_layers

    from .running import open_with_base

    stdout, _ = open_consoles()
    _check_empty(out)
    if text is None:
        check_absent("without --text", max_tokens=max_tokens)
    content = None if text is None else load_text(text)
    loaded, model = open_with_base(memory, base)
    layers = list_layers(model, "default")
    widths = [layer.locas_up["default"].out_features for layer in layers]
    if not widths:
        raise ValueError(
            f"memory must be of type LOCAS, got {str(memory)!r} of another: give one of locas-glu"
        )
    if content is None and {*widths} == {r}:
        raise ValueError(
            f"--r must differ from the memory's width, got {r}, which it has already: "
            "give another, or keep the memory"
        )
    has_gates = any(layer.ffn.gated for layer in layers)
    if content is None and r < max(widths) and has_gates:
        raise ValueError(
            "--text must name a text for fewer slots beside gated FFNs, "
            "got none: give what was read"
        )
    strategy = STRATEGIES[model.peft_config["default"].strategy]
    if content is None and r > max(widths) and strategy.needs_calibration:
        raise ValueError(
            "--text must name a text for more slots, whose rows are made from it, "
            "got none: give what was read"
        )
    batches = None
    if content is not None:
        window = min(512, count_positions(loaded.model) or 512)
        ids = loaded.encode(content, max_tokens or 8192, None)
        batches = [part[None] for part in ids.split(window)]
    change = grow if r > max(widths) else compress
    change(model, r, batches=batches)
    resized = {"resized from": f"{max(widths)} slots in a layer"}

    def add_history(folder: Path) -> None:
        copy_history(memory, folder, r, out)

    title = escape(memory.name)
    save_adapter(model, "default", loaded.name, out, title, resized, add_history)
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
        size = "unfinished"
        if row["bytes"] is not None:
            size = f"{row['bytes'] / 1e6:.1f} MB"
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


def push(
    memory: Memory, /, *, repo: str, license: str | None = None, private: bool = False
) -> None:
    """Upload a memory with its model card to the Hugging Face hub.

    Log in there first, with `hf auth login`.

    Args:
        repo: NAME or OWNER/NAME; made where there is none.
        license: of the memory, such as cc-by-4.0, written into its model card; none if not given.
        private: make a new repository a private one.
    """
    from locas_peft.memories.folder import set_license, upload_memory
    from locas_peft.memories.loading import describe_memory

    stdout, _ = open_consoles()
    # It refuses a damaged file in one line.
    describe_memory(memory)
    if license is not None:
        set_license(memory, license)
    stdout.print(f"The memory is at {upload_memory(memory, repo, private=private)}")


def inspect(memory: Memory, /, *, json_file: JsonFile = None) -> None:
    """Describe a memory: base model, layers, width, bytes, norms, slots. Loads no base model."""
    from locas_peft.memories.loading import describe_memory, tabulate_memory

    stdout, _ = open_consoles(json_file)
    description = describe_memory(memory)
    for name in ("base", "peft_type", "r", "init", "scaling", "dtype"):
        if description[name] is not None:
            stdout.print(f"{name:11}{printable(str(description[name]))}")
    size = f"{description['parameters']:,} parameters, {description['bytes']:,} bytes"
    stdout.print(f"{'size':11}{size}")
    for name, digest in description["digests"].items():
        stdout.print(printable(f"{name.removesuffix('_sha256'):11}SHA-256 {digest}"))
    if description["learned"] is False:
        stdout.print(f"{'learned':11}nothing yet")
    if description["replaces"]:
        names = printable(", ".join(description["replaces"]))
        stdout.print(f"{'replaces':11}{names} of the base")
    sizes = [layer["gain"]["mean"] for layer in description["layers"] if layer["gain"]]
    if sizes:
        mean = sum(sizes) / len(sizes)
        stdout.print(f"{'gains':11}of the base's neurons, {mean:.3g} in size on average")
    if description["layers"]:
        stdout.print(tabulate_memory(description).to_rich())
    write_result(json_file, description)


def _name_vllm_option(rank: int) -> str:
    """Return the option that vLLM needs to serve a LoRA of this rank, as a line."""
    for allowed in VLLM_RANKS:
        if allowed >= rank:
            return f"vLLM needs --max-lora-rank {allowed}"
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
        remedy = "locas read TEXT --library makes one"
        raise ValueError(f"a library must be a folder of memories, got {str(folder)!r}: {remedy}")
    return Library(folder)
