"""`locas generate`, `merge` and `inspect`: what can be done with a memory that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .job import count_positions
from .options import Device, Dtype, JsonFile, Memory, Seed
from .shell import check_json_file, command, make_consoles, quieten, write_result

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the text begins with.", metavar="PROMPT")],
    memory: Annotated[Path, typer.Option(help="A memory's folder.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option(help="The base. Default: the one the memory names.", metavar="NAME")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Write so many tokens at most.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; above, tokens are drawn.", min=0.0)
    ] = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Continue a prompt without and with a memory."""
    from .. import loading

    stdout, stderr = make_consoles(json_file)
    check_json_file(json_file)
    if not prompt.strip():
        raise ValueError("PROMPT must not be empty: give the beginning of a text")
    base, tokenizer = _load_base_of(memory, model, dtype, device)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(base.device)
    limit = count_positions(base)
    if limit is not None and inputs["input_ids"].shape[1] + max_new_tokens > limit:
        raise ValueError(
            f"prompt and --max-new-tokens must fit the model's {limit} positions, got "
            f"{inputs['input_ids'].shape[1]} + {max_new_tokens}: shorten one of them"
        )
    adapted = loading.load_memory(base, memory)
    with adapted.disable_adapter():
        without = _continue(adapted, tokenizer, inputs, max_new_tokens, temperature, seed)
    with_memory = _continue(adapted, tokenizer, inputs, max_new_tokens, temperature, seed)
    for title, continuation in (("without the memory", without), ("with the memory", with_memory)):
        stdout.print(f"[bold]{title}[/bold]")
        stdout.print(prompt + continuation + "\n", markup=False)
    write_result(
        json_file, {"prompt": prompt, "memory_dir": str(memory), "without": without, "with": with_memory}, stderr
    )


@command()
def merge(
    memory: Memory,
    out: Annotated[Path, typer.Option(help="Where the checkpoint goes: a new or empty folder.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option(help="The base. Default: the one the memory names.", metavar="NAME")
    ] = None,
    pad_to_multiple_of: Annotated[
        int | None, typer.Option(help="Pad the merged FFNs' width with zeros to a multiple of this.", min=1)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Make a memory part of its base for good: a checkpoint that stock transformers loads."""
    from .. import loading
    from ..files import check_output_directory, staged

    stdout, _ = make_consoles(None)
    check_output_directory("--out", out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out must be a new or empty folder, got {str(out)!r} with files in it: choose another")
    base, tokenizer = _load_base_of(memory, model, dtype, device)
    fields = {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}
    merged = loading.load_memory(base, memory, **fields).merge_and_unload()
    with staged(out, last="config.json") as folder:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    width = getattr(merged.config, "intermediate_size", None)
    stdout.print(
        f"The merged model ({sum(p.numel() for p in merged.parameters()):,} parameters"
        f"{f', FFNs {width:,} wide' if isinstance(width, int) else ''}) is in {out}: "
        f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it"
    )


@command()
def inspect(memory: Memory, json_file: JsonFile = None) -> None:
    """Say what is in a memory: base, layers, width, bytes, norms, slots. Loads no base."""
    from ..loading import describe_memory
    from ..report import make_memory_table

    stdout, stderr = make_consoles(json_file)
    check_json_file(json_file)
    found = describe_memory(memory)
    for name in ("base", "peft_type", "r", "init", "scaling", "dtype"):
        if found[name] is not None:
            stdout.print(f"{name:11}{found[name]}", markup=False)
    stdout.print(f"{'size':11}{found['parameters']:,} parameters, {found['bytes']:,} bytes")
    if found["layers"]:
        stdout.print(make_memory_table(found))
    write_result(json_file, found, stderr)


def _load_base_of(
    memory: Path, model: str | None, dtype: str, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from .. import loading

    quieten()
    name = model or loading.read_memory_config(memory).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"memory {str(memory)!r} does not name its base: give it with --model")
    return loading.load_base(name, dtype, device)


def _continue(
    model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any, max_new_tokens: int, temperature: float, seed: int
) -> str:
    import torch

    torch.manual_seed(seed)
    drawing = {"do_sample": True, "temperature": temperature}
    likeliest = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **(drawing if temperature else likeliest)
        )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
