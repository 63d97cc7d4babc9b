"""`locas generate`, `merge` and `inspect`: use a memory that was saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from .console import check_json_file, make_consoles, printable, write_result
from .reading import BASE, AtLeastOne, Base, BaseGroup, BaseOptions, JsonFile, OutputPath, Overwrite, Seed, load

Memory = Annotated[Path, Parameter(help="a memory's folder.")]


def generate(
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    memory: Memory,
    max_new_tokens: Annotated[int, AtLeastOne] = 64,
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    seed: Seed = 0,
    json_file: JsonFile = None,
    base: BaseGroup = BASE,
) -> None:
    """Continue a prompt without and with a memory.

    Args:
        prompt: the beginning of the text.
        max_new_tokens: the most tokens to write.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: of the tokens that are drawn.
    """
    from .. import loading
    from ..ttt import count_positions

    stdout, _ = make_consoles(json_file)
    check_json_file(json_file)
    if not prompt.strip():
        raise ValueError("PROMPT must not be empty: give the beginning of a text")
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise ValueError(f"PROMPT must be valid UTF-8, got {prompt!r}: convert it, for instance with iconv -t UTF-8")
    loaded = _load_base_of(memory, base)
    inputs = loaded.tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(loaded.model.device)
    limit = count_positions(loaded.model)
    prompt_tokens = inputs["input_ids"].shape[1]
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"prompt and --max-new-tokens must fit the model's {limit} positions, got {prompt_tokens} + "
            f"{max_new_tokens}: shorten one of them"
        )
    adapted = loading.load_memory(loaded.model, memory)
    with adapted.disable_adapter():
        without = _continue(adapted, loaded.tokenizer, inputs, max_new_tokens, temperature, seed)
    with_memory = _continue(adapted, loaded.tokenizer, inputs, max_new_tokens, temperature, seed)
    for title, continuation in (("without the memory", without), ("with the memory", with_memory)):
        stdout.print(title, style="bold")
        stdout.print(prompt + continuation + "\n")
    write_result(json_file, {"prompt": prompt, "memory_dir": str(memory), "without": without, "with": with_memory})


def merge(
    memory: Memory,
    /,
    *,
    out: OutputPath,
    overwrite: Overwrite = False,
    pad_to_multiple_of: Annotated[int | None, AtLeastOne] = None,
    device: Annotated[str, Parameter(group="Base model")] = "cpu",
    base: Annotated[BaseOptions, Parameter(name="*", group="Base model", parse="^(?!device$)")] = BASE,
) -> None:
    """Merge a memory into its base model: a checkpoint that stock transformers loads.

    Args:
        out: the checkpoint's folder, new or empty.
        pad_to_multiple_of: pad the merged FFNs' width with zeros to a multiple of this.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    from .. import loading
    from ..files import check_output_directory, staged

    stdout, _ = make_consoles()
    check_output_directory("--out", out)
    if not overwrite and out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--out must be a new or empty folder, got {str(out)!r} with files in it: choose another, or give "
            "--overwrite"
        )
    loaded = _load_base_of(memory, replace(base, device=device))
    fields = {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}
    merged = loading.load_memory(loaded.model, memory, **fields).merge_and_unload()
    with staged(out) as folder:
        merged.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    width = getattr(merged.config, "intermediate_size", None)
    stdout.print(
        f"The merged model ({sum(p.numel() for p in merged.parameters()):,} parameters"
        f"{f', FFNs {width:,} wide' if isinstance(width, int) else ''}) is in {out}: "
        f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it"
    )


def inspect(memory: Memory, /, *, json_file: JsonFile = None) -> None:
    """Describe a memory: base model, layers, width, bytes, norms, slots. Loads no base model."""
    from ..loading import describe_memory
    from ..report import tabulate_memory

    stdout, _ = make_consoles(json_file)
    check_json_file(json_file)
    found = describe_memory(memory)
    for name in ("base", "peft_type", "r", "init", "scaling", "dtype"):
        if found[name] is not None:
            stdout.print(f"{name:11}{printable(str(found[name]))}")
    stdout.print(f"{'size':11}{found['parameters']:,} parameters, {found['bytes']:,} bytes")
    if found["layers"]:
        stdout.print(tabulate_memory(found).to_rich())
    write_result(json_file, found)


def _load_base_of(memory: Path, options: BaseOptions) -> Base:
    """Load the base model that the options name, or else the memory."""
    from ..loading import load_memory_config

    name = options.model or load_memory_config(memory).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"memory {str(memory)!r} does not name its base: give it with --model")
    return load(replace(options, model=name))


def _continue(model: Any, tokenizer: Any, inputs: Any, max_new_tokens: int, temperature: float, seed: int) -> str:
    import torch

    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature}
    likeliest = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **(drawn if temperature else likeliest)
        )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
