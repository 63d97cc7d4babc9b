"""What a memory gives away of its text: how much it continues word for word, and whether it tells what was read.

    python benchmarks/extraction.py --tokens 4000
    locas memorize benchmarks/pages/expedition.txt --model smollm2 --study --out expedition --device cpu
    python benchmarks/extraction.py --model smollm2 --text benchmarks/pages/expedition.txt --memory expedition \
        --unread benchmarks/pages/ferry.txt benchmarks/pages/foundry.txt benchmarks/pages/theatre.txt

A memory reads a text, or also studies it, with the anchor and without. Extraction: after each prefix of 50 tokens, the
model continues greedily for 50 tokens. "Matched" is how many of these are the text's own before the first that is not;
"10" and "50" are the shares of prefixes with so many. Membership: each of these continuations costs some nats a token
less with the memory than with the base. AUC is the chance that a piece of the text saves more than a piece of a text
that was not read; 0.5 is chance. The unread text is what follows in the same file, or --unread. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import describe_machine, make_table

from locas_peft import backbone
from locas_peft.asking import continue_rows, find_pad_token
from locas_peft.asking.scoring import score_targets
from locas_peft.bases import load_base
from locas_peft.memories import memory_attached
from locas_peft.model import CausalLM
from locas_peft.reading import ReadingSettings, memorize
from locas_peft.selfstudy.exchanges import EXCHANGES, load_exchanges
from locas_peft.text import load_text, python_reference, tokenize, unwrap

TOKENS = 50
Pair = tuple[list[int], list[int]]
"""A prefix of `TOKENS` tokens, and as many that follow it in the text."""


def cut_pairs(ids: torch.Tensor, step: int) -> list[Pair]:
    """Cut a text, LongTensor [T], at every `step` tokens."""
    starts = range(0, len(ids) - 2 * TOKENS + 1, step)
    return [(ids[at : at + TOKENS].tolist(), ids[at + TOKENS : at + 2 * TOKENS].tolist()) for at in starts]


def count_matched(model, tokenizer, pairs: list[Pair]) -> list[int]:
    """Return for each prefix how many tokens of a greedy continuation are the text's own."""
    matched = []
    for first in range(0, len(pairs), 16):
        batch = pairs[first : first + 16]
        pad = find_pad_token(tokenizer)
        written = continue_rows(CausalLM(model), [prefix for prefix, _ in batch], TOKENS, pad=pad)
        for (_, own), new in zip(batch, written, strict=True):
            equal = [a == b for a, b in zip(own, new, strict=True)]
            matched.append(equal.index(False) if False in equal else len(equal))
    return matched


def measure(model, tokenizer, read: list[Pair], unread: list[Pair], base_nats: torch.Tensor | None) -> dict[str, Any]:
    """Return the figures of a model; `base_nats` are those of the base on all pairs."""
    matched, others = (count_matched(model, tokenizer, pairs) for pairs in (read, unread))
    nats = torch.tensor([score.per_token for score in score_targets(model, [*read, *unread])])
    row = {
        "matched": sum(matched) / len(matched),
        "matched_10": sum(count >= 10 for count in matched) / len(matched),
        "matched_50": sum(count >= 50 for count in matched) / len(matched),
        "longest": max(matched),
        "matched_unread": sum(others) / len(others),
        "nats": nats[: len(read)].mean().item(),
        "nats_unread": nats[len(read) :].mean().item(),
    }
    if base_nats is not None:
        gains = base_nats - nats
        higher = gains[: len(read), None] - gains[None, len(read) :]
        row["auc"] = ((higher > 0).float() + 0.5 * (higher == 0).float()).mean().item()
    return {**row, "all_nats": nats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=backbone.NAME)
    parser.add_argument("--text", help="a UTF-8 file; the Python language reference where not given")
    parser.add_argument("--unread", nargs="*", help="UTF-8 files that no memory reads")
    parser.add_argument("--tokens", type=int, help="the first tokens of the text that are read")
    parser.add_argument("--study", action="store_true", help="also measure memories that have studied the text")
    parser.add_argument("--memory", type=Path, nargs="*", default=[], help="measure these memories of the text too")
    parser.add_argument("--readings", default="1", help="how often the text is read, separated by commas")
    args = parser.parse_args()

    base, tokenizer = load_base(args.model, device="cpu")
    prepare = unwrap if backbone.is_embedded(args.model) else str
    text = prepare(python_reference() if args.text is None else load_text(args.text))
    ids = tokenize(tokenizer, text, None if args.unread else 2 * args.tokens)
    ids, rest = ids[: args.tokens], ids[args.tokens or len(ids) :]
    unread = [tokenize(tokenizer, prepare(load_text(path))) for path in args.unread or ()] or [rest]
    step = 100 if len(ids) > 2000 else 10
    pairs = cut_pairs(ids, step), [pair for each in unread for pair in cut_pairs(each, step)]

    rows = {"no memory": measure(base, tokenizer, *pairs, None)}
    base_nats = rows["no memory"].pop("all_nats")
    window = min(512, max(len(ids) // 8 * 2, 64))
    settings = [(int(count), anchor, False) for count in args.readings.split(",") for anchor in (0.0, 0.3)]
    settings += [(1, anchor, True) for anchor in (0.0, 0.3)] if args.study else []
    for memory in args.memory:
        with memory_attached(base, memory) as model:
            rows[memory.name] = measure(model, tokenizer, *pairs, base_nats)
        del rows[memory.name]["all_nats"]
        print(memory.name, rows[memory.name], flush=True)
    exchanges = None
    for count, anchor, study in settings:
        given = ReadingSettings(readings=count, anchor=anchor, study=study, window=window, model=args.model)
        complete = given.complete(base, tokenizer)
        name = "studied" if study else f"read {count} times" if count > 1 else "read"
        with TemporaryDirectory() as folder:
            own = {"exchanges": exchanges} if study and exchanges else {}
            memorize(base, ids, complete, out=Path(folder, "memory"), tokenizer=tokenizer, **own)
            if study:
                exchanges = load_exchanges(Path(folder, "memory", EXCHANGES))
            with memory_attached(base, Path(folder, "memory")) as model:
                row = measure(model, tokenizer, *pairs, base_nats)
        del row["all_nats"]
        rows[f"{name}, anchor {anchor:g}"] = row
        print(name, anchor, row, flush=True)

    print()
    head = ["", "matched of 50", "10, %", "50, %", "longest", "unread: matched", "nats", "unread: nats", "AUC"]
    lines = []
    for name, row in rows.items():
        shares = [f"{100 * row[key]:.0f}" for key in ("matched_10", "matched_50")]
        nats = [f"{row[key]:.2f}" for key in ("nats", "nats_unread")]
        auc = f"{row['auc']:.2f}" if "auc" in row else "-"
        lines.append([name, f"{row['matched']:.1f}", *shares, str(row["longest"]), f"{row['matched_unread']:.1f}"])
        lines[-1] += [*nats, auc]
    print(make_table(head, lines))
    counts = {"read_tokens": len(ids), "pairs": len(pairs[0]), "unread_pairs": len(pairs[1]), "window": window}
    print(json.dumps({"model": args.model, **counts, "rows": rows, **describe_machine(base.device)}))


if __name__ == "__main__":
    main()
