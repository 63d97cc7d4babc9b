"""Use memories that were saved: ask, chat, generate, merge, export, combine, resize, push, inspect."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter

from ..conversion import combine_memories, export_memory, merge_memory, merge_to_gguf, save_adapter
from ..evaluation import recall
from ..files import check_output_directory
from ..gguf_models import find_converter
from ..loading import describe_memory, load_memory, load_memory_config
from ..memory_folder import set_license, upload_memory
from ..report import tabulate_memory
from ..text import encode_prompt, encode_turns, find_pad_token, load_text
from ..ttt import count_positions
from ..tuner import compress, grow, list_layers
from .console import open_consoles, printable, write_result
from .options import (
    BASE,
    AtLeastTwo,
    AtLeastZero,
    Base,
    BaseBesideDevice,
    BaseGroup,
    BaseOptions,
    Count,
    Device,
    JsonFile,
    NamedPath,
    Overwrite,
    Seed,
    Text,
    load,
)

Memory = Annotated[Path, Parameter(help="a memory's folder.")]
Prompt = Annotated[str, Parameter(allow_leading_hyphen=True)]
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's --max-lora-rank can have."""


def generate(
    prompt: Prompt,
    /,
    *,
    memory: Memory,
    max_new_tokens: Count = 64,
    temperature: AtLeastZero = 0.0,
    raw: bool = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
    base: BaseGroup = BASE,
) -> None:
    """Continue a prompt without and with a memory.

    Args:
        prompt: the beginning of the text, or, for a model with a chat template, the user's message.
        max_new_tokens: the most tokens to write.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        raw: continue the prompt as it is, without the chat template.
        seed: of the tokens that are drawn.
    """
    stdout, _ = open_consoles(json_file)
    if not prompt.strip():
        raise ValueError("PROMPT must not be empty: give the beginning of a text")
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise ValueError(f"PROMPT must be valid UTF-8, got {prompt!r}: convert it, for instance with iconv -t UTF-8")
    loaded = _load_base_of(memory, base)
    chat = not raw and getattr(loaded.tokenizer, "chat_template", None) is not None
    ids = encode_prompt(loaded.tokenizer, prompt) if chat else loaded.tokenizer(prompt)["input_ids"]
    if not _fits(loaded, ids, max_new_tokens):
        raise _too_long("prompt", loaded, ids, max_new_tokens)
    adapted = _load_memory(loaded, memory)
    with adapted.disable_adapter():
        without = _continue(adapted, loaded.tokenizer, ids, max_new_tokens, temperature, seed)
    with_memory = _continue(adapted, loaded.tokenizer, ids, max_new_tokens, temperature, seed)
    for title, continuation in (("without the memory", without), ("with the memory", with_memory)):
        stdout.print(title, style="bold")
        stdout.print(("" if chat else prompt) + continuation.strip("\n" if chat else "") + "\n")
    write_result(json_file, {"prompt": prompt, "memory_dir": str(memory), "without": without, "with": with_memory})


def ask(
    *question: Annotated[str, Parameter(allow_leading_hyphen=False)],
    memory: Memory | None = None,
    questions: Path | None = None,
    context: Path | None = None,
    without_memory: bool = False,
    max_new_tokens: Count = 32,
    json_file: JsonFile = None,
    base: BaseGroup = BASE,
) -> None:
    """Ask a model short questions about what it has read.

    Args:
        question: the questions.
        questions: a JSON Lines file with more, an object a line: question and, if known, answer.
        context: a text file that the model sees before each question.
        without_memory: ask the base model alone; --memory then only names it.
        max_new_tokens: the longest answer, in tokens.
    """
    stdout, _ = open_consoles(json_file)
    asked = [recall.Question(text) for text in question]
    asked += [] if questions is None else recall.load_questions(questions)
    if not asked or any(not item.question.strip() for item in asked):
        raise ValueError("QUESTION must be given and not be empty: ask one, or give --questions FILE")
    text = None if context is None else load_text(context)
    loaded, model = _load_to_ask(memory, without_memory, base)
    answers = recall.ask(model, loaded.tokenizer, asked, context=text, max_new_tokens=max_new_tokens)
    records = [
        {
            "question": item.question,
            "answer": answer,
            "gold": item.answer,
            "right": None if item.answer is None else recall.is_right(answer, item.answer),
        }
        for item, answer in zip(asked, answers, strict=True)
    ]
    for record in records:
        stdout.print(record["question"], style="bold")
        stdout.print(record["answer"] + ("" if record["right"] is None else f"   ({record['gold']})"))
    graded = [record["right"] for record in records if record["right"] is not None]
    if graded:
        stdout.print(f"{sum(graded)} of {len(graded)} right")
    write_result(json_file, records)


def chat(
    *,
    memory: Memory | None = None,
    without_memory: bool = False,
    max_new_tokens: Count = 128,
    temperature: AtLeastZero = 0.0,
    seed: Seed = 0,
    base: BaseGroup = BASE,
) -> None:
    """Talk with a model about what it has read: one message a line; /exit or the end of the input ends it.

    Args:
        without_memory: talk with the base model alone; --memory then only names it.
        max_new_tokens: the longest reply, in tokens.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: of the tokens that are drawn.
    """
    stdout, stderr = open_consoles()
    loaded, model = _load_to_ask(memory, without_memory, base)
    if getattr(loaded.tokenizer, "chat_template", None) is None:
        raise ValueError(f"model must have a chat template, got {loaded.name!r} without one: use locas generate")
    turns: list[dict[str, str]] = []
    while True:
        if sys.stdin.isatty():
            stderr.print("> ", end="")
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if not line.strip():
            continue
        turns.append({"role": "user", "content": line.strip()})
        while not _fits(loaded, ids := encode_turns(loaded.tokenizer, turns), max_new_tokens):
            if len(turns) == 1:
                raise _too_long("message", loaded, ids, max_new_tokens)
            del turns[:2]  # the oldest message and its reply
        reply = _continue(model, loaded.tokenizer, ids, max_new_tokens, temperature, seed).strip()
        turns.append({"role": "assistant", "content": reply})
        stdout.print(reply)


def merge(
    memory: Memory,
    /,
    *,
    out: NamedPath,
    overwrite: Overwrite = False,
    pad_to_multiple_of: Count | None = None,
    device: Device = "cpu",
    base: BaseBesideDevice = BASE,
) -> None:
    """Merge a memory into its base model: a checkpoint that stock transformers loads.

    Args:
        out: the checkpoint's folder, new or empty.
        pad_to_multiple_of: pad the merged FFNs' width with zeros to a multiple of this.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    stdout, _ = open_consoles()
    if overwrite:
        check_output_directory("--out", out)
    else:
        _check_empty(out, "choose another, or give --overwrite")
    loaded = _load_base_of(memory, replace(base, device=device))
    with _warnings_as_lines():
        merged = merge_memory(loaded.model, loaded.tokenizer, memory, out, **_padding(pad_to_multiple_of))
    width = getattr(merged.config, "intermediate_size", None)
    stdout.print(
        f"The merged model ({sum(p.numel() for p in merged.parameters()):,} parameters"
        f"{f', FFNs {width:,} wide' if isinstance(width, int) else ''}) is in {out}: "
        f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it"
    )


def export(
    memory: Memory,
    /,
    *,
    out: NamedPath,
    to: Literal["lora", "plain", "gguf"] = "lora",
    no_base: bool = False,
    base_only: bool = False,
    neurons: Count | None = None,
    pad_to_multiple_of: Count | None = None,
    device: Device = "cpu",
    base: BaseBesideDevice = BASE,
) -> None:
    """Export a memory for engines that do not know LOCAS.

    Args:
        out: a new or empty folder.
        to: lora, for engines that serve LoRA: the base, widened by neurons of zeros, in `base`, and a LoRA adapter in
            `adapter`. plain: the merged model, as locas merge writes it. gguf: the merged model as `model.gguf`, made
            by llama.cpp's converter, which must be on the PATH.
        no_base: export the adapter alone, for a base that was exported before with the same --neurons.
        base_only: export the base alone.
        neurons: how many neurons the base gets: the r of the widest memory that it shall serve; this one's by default.
        pad_to_multiple_of: with plain and gguf, pad the merged FFNs' width with zeros to a multiple of this.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    if to == "lora" and pad_to_multiple_of is not None:
        raise ValueError("--pad-to-multiple-of goes with --to plain or gguf, got --to lora: choose --neurons")
    if to != "lora" and (no_base or base_only or neurons is not None):
        raise ValueError(f"--no-base, --base-only and --neurons go with --to lora, got --to {to}: leave them out")
    _check_empty(out, "choose another")
    if to == "plain":
        merge(memory, out=out, pad_to_multiple_of=pad_to_multiple_of, device=device, base=base)
    elif to == "gguf":
        _export_gguf(memory, out, pad_to_multiple_of, replace(base, device=device))
    else:
        _export_lora(memory, out, no_base, base_only, neurons, replace(base, device=device))


def combine(
    *memory: Path,
    out: NamedPath,
    weights: str | None = None,
    device: Device = "cpu",
    base: BaseBesideDevice = BASE,
) -> None:
    """Combine memories of one base into one memory that adds exactly what their weighted sum adds.

    Args:
        memory: two or more folders of memories.
        out: a new or empty folder.
        weights: a number for each memory, separated by commas; 1 each by default.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    stdout, _ = open_consoles()
    if len(memory) < 2:
        raise ValueError(f"MEMORY must be given for two or more, got {len(memory)}: name the folders to combine")
    try:
        numbers = [1.0] * len(memory) if weights is None else [float(number) for number in weights.split(",")]
    except ValueError:
        raise ValueError(f"--weights must be numbers separated by commas, got {weights!r}: write 1,0.5, say") from None
    _check_empty(out, "choose another")
    loaded = _load_base_of(memory[0], replace(base, device=device))
    with _warnings_as_lines():
        slots = combine_memories(loaded.model, loaded.name, memory, numbers, out)
    stdout.print(f"The combined memory of {slots} slots is in {out}")


def resize(
    memory: Memory,
    /,
    *,
    r: Count,
    out: NamedPath,
    text: Text | None = None,
    max_tokens: AtLeastTwo = 8192,
    device: Device = "cpu",
    base: BaseBesideDevice = BASE,
) -> None:
    """Change how many slots a memory has: fewer say nearly the same, more can learn more and say the same for now.

    Args:
        r: slots in every layer.
        out: a new or empty folder.
        text: a UTF-8 text file, or - for stdin: best what the memory has read. Fewer slots are refitted on it, and new
            ones are cloned from what is active on it. A two-layer memory can get fewer slots without (NL-SVD).
        max_tokens: the first tokens of the text.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    stdout, _ = open_consoles()
    _check_empty(out, "choose another")
    content = None if text is None else load_text(text)
    loaded = _load_base_of(memory, replace(base, device=device))
    model = _load_memory(loaded, memory)
    widths = [layer.locas_up["default"].out_features for layer in list_layers(model, "default")]
    if not widths:
        raise ValueError(f"memory must be of type LOCAS, got {str(memory)!r} of another: give one of locas-glu")
    batches = None
    if content is not None:
        window = min(512, count_positions(loaded.model) or 512)
        batches = [part[None] for part in loaded.encode(content, max_tokens, None).split(window)]
    (grow if r > max(widths) else compress)(model, r, batches=batches)
    save_adapter(model, "default", loaded.name, out)
    stdout.print(f"The memory of {r} slots a layer, {max(widths)} before, is in {out}")


def push(memory: Memory, /, *, repo: str, license: str | None = None, private: bool = False) -> None:
    """Upload a memory with its model card to the Hugging Face hub; log in there first, with `hf auth login`.

    Args:
        repo: NAME or OWNER/NAME; made where there is none.
        license: of the memory, such as cc-by-4.0, written into its model card; the card names none without.
        private: make a new repository a private one.
    """
    stdout, _ = open_consoles()
    describe_memory(memory)  # it refuses a damaged file in one line
    if license is not None:
        set_license(memory, license)
    stdout.print(f"The memory is at {upload_memory(memory, repo, private=private)}")


def inspect(memory: Memory, /, *, json_file: JsonFile = None) -> None:
    """Describe a memory: base model, layers, width, bytes, norms, slots. Loads no base model."""
    stdout, _ = open_consoles(json_file)
    found = describe_memory(memory)
    for name in ("base", "peft_type", "r", "init", "scaling", "dtype"):
        if found[name] is not None:
            stdout.print(f"{name:11}{printable(str(found[name]))}")
    stdout.print(f"{'size':11}{found['parameters']:,} parameters, {found['bytes']:,} bytes")
    if found["learned"] is False:
        stdout.print(f"{'learned':11}nothing yet")
    if found["replaces"]:
        stdout.print(f"{'replaces':11}{printable(', '.join(found['replaces']))} of the base")
    if found["layers"]:
        stdout.print(tabulate_memory(found).to_rich())
    write_result(json_file, found)


def _export_gguf(memory: Path, out: Path, pad_to_multiple_of: int | None, base: BaseOptions) -> None:
    """Write the merged model as a GGUF file."""
    stdout, _ = open_consoles()
    converter = find_converter()
    loaded = _load_base_of(memory, base)
    with _warnings_as_lines():
        merge_to_gguf(loaded.model, loaded.tokenizer, memory, out, converter, **_padding(pad_to_multiple_of))
    stdout.print(f"The merged model is in {out / 'model.gguf'}: llama.cpp loads it")


def _export_lora(
    memory: Path, out: Path, no_base: bool, base_only: bool, neurons: int | None, base: BaseOptions
) -> None:
    """Write a memory as a LoRA adapter, the widened base, or both."""
    stdout, _ = open_consoles()
    if no_base and base_only:
        raise ValueError("--no-base and --base-only exclude each other: give one of them, or none for both")
    loaded = _load_base_of(memory, base)
    with _warnings_as_lines():
        neurons, rank = export_memory(
            loaded.model, loaded.tokenizer, memory, out,
            neurons=neurons, with_base=not no_base, with_adapter=not base_only,
        )  # fmt: skip
    if not no_base:
        stdout.print(f"The base, {neurons} neurons wider in each FFN, is in {out / 'base'}: any engine loads it")
    if not base_only:
        stdout.print(f"The LoRA adapter of rank {rank} is in {out / 'adapter'}: serve it with that base")
        stdout.print(_name_vllm_option(rank))


def _name_vllm_option(rank: int) -> str:
    """Return the option that vLLM needs to serve a LoRA of this rank, as a line."""
    allowed = next((each for each in VLLM_RANKS if each >= rank), None)
    if allowed is None:
        return f"vLLM serves ranks up to {VLLM_RANKS[-1]}: make the memory narrower with locas resize"
    return f"vLLM needs --max-lora-rank {allowed}"


def _padding(pad_to_multiple_of: int | None) -> dict[str, int]:
    """Return the field of a memory's config that a merge reads, if it is given."""
    return {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}


def _load_to_ask(memory: Path | None, without_memory: bool, base: BaseOptions) -> tuple[Base, Any]:
    """Load a base and, unless it is asked alone, the memory; return the base and the model that is asked."""
    if memory is None and not (without_memory and base.model):
        raise ValueError("--memory must name a memory's folder, got none: give it, or --without-memory with --model")
    loaded = load(base) if memory is None else _load_base_of(memory, base)
    return loaded, (loaded.model if without_memory else _load_memory(loaded, memory).eval())


def _check_empty(out: Path, remedy: str) -> None:
    """Raise a `ValueError` where a folder cannot be written or holds something."""
    check_output_directory("--out", out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out must be a new or empty folder, got {str(out)!r} with files in it: {remedy}")


def _load_base_of(memory: Path, options: BaseOptions) -> Base:
    """Load the base model that the options name, or else the memory."""
    name = options.model or load_memory_config(memory).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"memory {str(memory)!r} does not name its base: give it with --model")
    return load(replace(options, model=name))


def _load_memory(base: Base, memory: Path, **fields: Any) -> Any:
    """Load a memory onto its base (see `loading.load_memory`)."""
    with _warnings_as_lines():
        return load_memory(base.model, memory, **fields)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print the warnings of the block to stderr when it ends, one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    _, stderr = open_consoles()
    for warning in caught:
        stderr.print(f"warning: {printable(str(warning.message))}")


def _fits(base: Base, ids: list[int], max_new_tokens: int) -> bool:
    limit = count_positions(base.model)
    return limit is None or len(ids) + max_new_tokens <= limit


def _too_long(name: str, base: Base, ids: list[int], max_new_tokens: int) -> ValueError:
    return ValueError(
        f"{name} and --max-new-tokens must fit the model's {count_positions(base.model)} positions, got {len(ids)} + "
        f"{max_new_tokens}: shorten one of them"
    )


def _continue(model: Any, tokenizer: Any, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> str:
    """Return the text that a model writes after a prompt."""
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature}
    likeliest = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    prompt = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            pad_token_id=find_pad_token(tokenizer),
            **(drawn if temperature else likeliest),
        )
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
