"""Train a small backbone from plain-text books, on the CPU, in a fixed time.

    python benchmarks/backbone/train.py --arch glu --books DIR --out DIR --minutes 80

Muon on the matrices, AdamW on embeddings, norms and biases; 16 windows of 512 tokens a step. The learning rate
follows the share of the time budget that is spent: constant up to 40%, then straight down to zero. Training seconds
are counted over all runs, so a run stopped and continued with `--resume` gets the whole budget. The last line on
stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from books import encode_books, load_books, load_tokenizer, train_tokenizer
from locas_peft.files import staged
from locas_peft.memories import checkpoint

CONTEXT_TOKENS = 512
BATCH_WINDOWS = 16
WARMUP_STEPS = 50
CONSTANT_SHARE = 0.4


def build_glu(vocabulary: int, end_of_text: int) -> PreTrainedModel:
    """A Qwen3 whose FFNs are gated (SiLU): 5.8M parameters at a vocabulary of 4,096."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=end_of_text,
            pad_token_id=end_of_text,
        )
    )


def build_mlp(vocabulary: int, end_of_text: int) -> PreTrainedModel:
    """A GPT-NeoX whose FFNs are two layers with ReLU between: 5.8M parameters at a vocabulary of 4,096."""
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
            hidden_act="relu",
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            # One after the other: the FFN then sees what attention has added, as in most current models.
            use_parallel_residual=False,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
            bos_token_id=None,
            eos_token_id=end_of_text,
            pad_token_id=end_of_text,
        )
    )


ARCHITECTURES: dict[str, Callable[[int, int], PreTrainedModel]] = {
    "glu": build_glu,
    "mlp": build_mlp,
}
FFN_DESCRIPTIONS = {"glu": "gated FFNs (SiLU)", "mlp": "two-layer FFNs (ReLU)"}
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def training_batch(tokens: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """Return the windows of one step. They depend on the step alone, so that a resumed run gets the same ones.

    Each pass over the books cuts them at its own random offset and visits every whole window once, in random order.

    Args:
        tokens: `LongTensor [tokens]`, all books in one row.
        step: counted from 0.
        seed: of the whole run.

    Returns:
        `LongTensor [BATCH_WINDOWS, CONTEXT_TOKENS]`.
    """
    windows = (
        len(tokens) // CONTEXT_TOKENS - 1
    )  # one fewer than fit, so that every offset leaves as many
    epoch, position = divmod(step, windows // BATCH_WINDOWS)
    generator = torch.Generator().manual_seed(seed + epoch)
    offset = int(torch.randint(0, CONTEXT_TOKENS, (1,), generator=generator))
    order = torch.randperm(windows, generator=generator)[
        position * BATCH_WINDOWS : (position + 1) * BATCH_WINDOWS
    ]
    return torch.stack(
        [tokens[offset + i * CONTEXT_TOKENS :][:CONTEXT_TOKENS] for i in order.tolist()]
    )


def learning_rate_factor(step: int, spent: float) -> float:
    """Return the share of the peak rate at `step` (from 0), after the share `spent` (0 to 1) of the time budget."""
    decay = min(1.0, (1.0 - spent) / (1.0 - CONSTANT_SHARE))
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.0, decay)


def build_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside the layers, and AdamW for embeddings, norms and biases."""
    embedding = model.get_input_embeddings().weight  # tied: the output matrix is the same parameter
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def load_checkpoint(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Load the checkpoint of this run; None where there is none.

    Raises:
        ValueError: the checkpoint was made with another architecture, seed, vocabulary or set of books.
    """
    state = checkpoint.load(out)
    for name, value in settings.items() if state else ():
        if state["settings"][name] != value:
            raise ValueError(
                f"{out / checkpoint.CHECKPOINT} was made with {name}={state['settings'][name]!r}, this run has "
                f"{value!r}: give the same arguments, or another --out"
            )
    return state


def train(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    *,
    minutes: float,
    seed: int,
    precision: str,
    out: Path,
    checkpoint_minutes: float,
    resume: bool,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Train in place until `minutes` of training are spent, those of resumed runs included.

    Only the steps count as training time; loading, checkpoints and evaluation do not.

    Args:
        model: float32, changed in place.
        tokens: `LongTensor [tokens]`.
        minutes: the budget.
        seed: of the order of the windows.
        precision: a key of `PRECISIONS`; the weights stay float32.
        out: the folder of the checkpoint.
        checkpoint_minutes: between two checkpoints.
        resume: continue from the checkpoint where there is one.
        settings: must be the same in a checkpoint that is resumed.

    Returns:
        `steps`, `tokens`, `seconds` of training, and `loss` of the last step (nats a token).

    Raises:
        ValueError: too little text, or a checkpoint of another run.
    """
    if len(tokens) // CONTEXT_TOKENS - 1 < BATCH_WINDOWS:
        raise ValueError(
            f"the books have {len(tokens):,} tokens, at least {(BATCH_WINDOWS + 1) * CONTEXT_TOKENS:,} are needed: "
            "add books"
        )
    optimizers = build_optimizers(model)
    step, seconds, loss_nats = 0, 0.0, math.nan
    state = load_checkpoint(out, settings) if resume else None
    if state is not None:
        model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        torch.set_rng_state(state["rng"])
        step, seconds, loss_nats = state["step"], state["seconds"], state["loss"]
        log(f"resumed at step {step}, {seconds / 60:.1f} of {minutes:g} minutes spent")

    def save() -> None:
        state = {
            "settings": settings,
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "rng": torch.get_rng_state(),
            "step": step,
            "seconds": seconds,
            "loss": loss_nats,
        }
        checkpoint.save(out, state)

    model.train()
    saved_seconds = first_seconds = seconds
    first_step = step
    while seconds < minutes * 60:
        start = time.perf_counter()
        factor = learning_rate_factor(step, seconds / (minutes * 60))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        batch = training_batch(tokens, step, seed)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss_nats = loss.item()
        step += 1
        seconds += time.perf_counter() - start
        if step % 20 == 0:
            speed = (step - first_step) * BATCH_WINDOWS * CONTEXT_TOKENS / (seconds - first_seconds)
            read = step * BATCH_WINDOWS * CONTEXT_TOKENS / 1e6
            log(
                f"step {step}  {seconds:.0f} s  {read:.2f}M tokens  {speed:.0f} tokens/s  loss {loss_nats:.3f}"
            )
        if seconds - saved_seconds >= checkpoint_minutes * 60:
            save()
            saved_seconds = seconds
    save()
    return {
        "steps": step,
        "tokens": step * BATCH_WINDOWS * CONTEXT_TOKENS,
        "seconds": seconds,
        "loss": loss_nats,
    }


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, books: dict[str, torch.Tensor], limit: int
) -> dict[str, Any]:
    """Measure the loss on books the model has not seen, in separate windows.

    The first token of a window has no context and is not scored; a last window too short to score is left out.

    Args:
        model: any causal language model.
        books: name -> `LongTensor [tokens]`.
        limit: tokens read of each book, from its start.

    Returns:
        `loss` (nats a token, over all books), `scored_tokens`, and `by_book` (name -> loss).
    """
    model.eval()
    nll_nats, scored, by_book = 0.0, 0, {}
    for name, tokens in books.items():
        book_nll, book_scored = 0.0, 0
        for window in tokens[:limit].split(CONTEXT_TOKENS):
            if len(window) < 2:
                continue
            batch = window[None]
            logits = model(input_ids=batch).logits[0, :-1].float()
            book_nll += torch.nn.functional.cross_entropy(
                logits, window[1:], reduction="sum"
            ).item()
            book_scored += len(window) - 1
        by_book[name] = book_nll / book_scored
        nll_nats += book_nll
        scored += book_scored
    return {"loss": nll_nats / scored, "scored_tokens": scored, "by_book": by_book}


def model_card(arch: str, model: PreTrainedModel, facts: dict[str, Any]) -> str:
    """Write the model card.

    Args:
        arch: a key of `ARCHITECTURES`.
        model: what the card describes.
        facts: what `run` returns, but for the card.

    Returns:
        Markdown: architecture, training, quality on unseen books, limits, and the command.
    """
    config = model.config
    passes = facts["tokens"] / facts["corpus_tokens"]
    held_out = facts["held_out"]
    if held_out is None:
        quality = "Not measured on unseen text (no `--held-out`)."
    else:
        rows = "\n".join(
            f"| {name} | {loss:.3f} | {math.exp(loss):.1f} |"
            for name, loss in held_out["by_book"].items()
        )
        quality = (
            f"On books it has not seen, the first {facts['held_out_tokens']:,} tokens of each, in separate windows of "
            f"{CONTEXT_TOKENS} tokens ({held_out['scored_tokens']:,} tokens scored, bf16 weights):\n\n"
            "| book | loss (nats a token) | perplexity |\n|---|---|---|\n"
            f"{rows}\n| all | {held_out['loss']:.3f} | {math.exp(held_out['loss']):.1f} |"
        )
    return f"""# tinybook-{arch}

A small language model trained from scratch on the books named below, for tests, examples and benchmarks that must
run without a download.

## Architecture

{type(model).__name__}: {config.num_hidden_layers} layers, hidden size {config.hidden_size},
{FFN_DESCRIPTIONS[arch]} of width {config.intermediate_size}, {config.num_attention_heads} attention heads, rotary
positions up to {config.max_position_embeddings:,}, tied embeddings, byte-level BPE of {config.vocab_size:,} tokens.
{facts["parameters"]:,} parameters, stored in bfloat16 ({facts["bytes"] / 1e6:.1f} MB).

## Training

- Text: {facts["corpus_tokens"]:,} tokens of {len(facts["books"])} books, paragraphs unwrapped to one line each
  ({", ".join(facts["books"])}).
- {facts["steps"]:,} steps of {BATCH_WINDOWS} x {CONTEXT_TOKENS} tokens: {facts["tokens"]:,} tokens,
  {passes:.2f} passes.
- {facts["seconds"] / 60:.0f} minutes on the CPU, threads: {facts["threads"]}, {facts["precision"]} forward pass.
- Muon and AdamW, seed {facts["seed"]}; loss of the last step {facts["loss"]:.3f} nats a token.

    {facts["command"]}

## Quality

{quality}

## Limits

It writes prose in the style of its books, without meaning. It answers no questions and follows no instructions. It was
trained with contexts of {CONTEXT_TOKENS} tokens; longer ones are untested. Text has to be prepared as in training: one
line a paragraph, a blank line between.
"""


def save_model(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Save model and tokenizer as a plain transformers folder; return the size of the weights, in bytes."""
    with staged(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return (out / "model.safetensors").stat().st_size


def log(line: str) -> None:
    """Print a line of progress on stderr; stdout has the result alone."""
    print(line, file=sys.stderr, flush=True)


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command that made a model, with the last parts of the folders' names alone."""
    parts = ["python benchmarks/backbone/train.py", f"--arch {arguments.arch}"]
    for name in ("books", "held_out", "tokenizer", "out"):
        path = getattr(arguments, name)
        if path is not None:
            parts.append(f"--{name.replace('_', '-')} {path.resolve().name}")
    parts.append(
        f"--minutes {arguments.minutes:g} --threads {arguments.threads} --precision {arguments.precision}"
    )
    return " ".join(parts)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; every folder becomes a `Path`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), required=True)
    parser.add_argument(
        "--books", type=Path, required=True, help="directory of .txt books to learn from"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="model, tokenizer, model card and checkpoint go here",
    )
    parser.add_argument(
        "--minutes", type=float, default=80.0, help="training time, resumed runs added up"
    )
    parser.add_argument(
        "--held-out", type=Path, help="directory of .txt books to measure the loss on at the end"
    )
    parser.add_argument(
        "--held-out-tokens", type=int, default=50_000, help="tokens read of each held-out book"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="reuse the tokenizer of this folder (default: train one)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in --out, if there is one",
    )
    parser.add_argument(
        "--checkpoint-minutes", type=float, default=3.0, help="training time between checkpoints"
    )
    parser.add_argument(
        "--precision", choices=sorted(PRECISIONS), default="bf16", help="of the forward pass"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, save, measure and describe one backbone.

    Returns:
        The figures that are also printed as JSON.

    Raises:
        ValueError: arguments, books, tokenizer or checkpoint that do not fit; the message names the remedy.
    """
    if not arguments.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, got {arguments.minutes:g}")
    if arguments.held_out_tokens < 2:
        raise ValueError(f"--held-out-tokens must be at least 2, got {arguments.held_out_tokens}")
    out = arguments.out
    if checkpoint.has_checkpoint(out) and not arguments.resume:
        path = out / checkpoint.CHECKPOINT
        raise ValueError(f"{path} exists: continue it with --resume, or choose another --out")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    books = load_books(arguments.books)
    held_out_books = load_books(arguments.held_out) if arguments.held_out else {}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = (
        load_tokenizer(arguments.tokenizer) if arguments.tokenizer else train_tokenizer(books)
    )
    tokens = torch.cat(list(encode_books(tokenizer, books).values()))
    model = ARCHITECTURES[arguments.arch](len(tokenizer), tokenizer.eos_token_id)
    parameters = sum(p.numel() for p in model.parameters())
    log(
        f"{len(books)} books, {len(tokens):,} tokens; {type(model).__name__}, {parameters:,} parameters"
    )

    settings = {
        "arch": arguments.arch,
        "seed": arguments.seed,
        "vocabulary": len(tokenizer),
        "corpus_tokens": len(tokens),
    }
    result = train(
        model,
        tokens,
        minutes=arguments.minutes,
        seed=arguments.seed,
        precision=arguments.precision,
        out=out,
        checkpoint_minutes=arguments.checkpoint_minutes,
        resume=arguments.resume,
        settings=settings,
    )
    model.to(torch.bfloat16)
    weight_bytes = save_model(out, model, tokenizer)
    # The rounded weights are what others load; float32 arithmetic only keeps the measure's own error out.
    held_out = None
    if held_out_books:
        encoded = encode_books(tokenizer, held_out_books)
        held_out = held_out_loss(model.float(), encoded, arguments.held_out_tokens)
    result = {
        **settings,
        **result,
        "model": type(model).__name__,
        "parameters": parameters,
        "bytes": weight_bytes,
        "books": list(books),
        "precision": arguments.precision,
        "threads": arguments.threads,
        "held_out_tokens": arguments.held_out_tokens,
        "held_out": held_out,
        "perplexity": math.exp(held_out["loss"]) if held_out else None,
        "command": command_line(arguments),
    }
    (out / "README.md").write_text(model_card(arguments.arch, model, result), encoding="utf-8")
    return result


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; bad input ends with one line and exit code 2."""
    arguments = parse_arguments(argv)
    try:
        result = run(arguments)
    except ValueError as error:
        log(f"error: {error}")
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
