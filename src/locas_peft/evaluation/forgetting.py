"""What a memory costs elsewhere: grammar (BLiMP), the perplexity of unread text, and drift from the base.

The paper measures MMLU; `harness` does. These measures work on models of any size, and need no more than their losses.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor, nn

from .intervals import Mean, rise_interval
from .perplexity import perplexity
from .scoring import encode_pair, read_logits, score_targets

PARADIGMS = 67
"""How many paradigms BLiMP has, 1,000 pairs each."""


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences that differ in what makes one of them ungrammatical."""

    paradigm: str
    field: str
    good: str
    bad: str


@dataclass(frozen=True)
class PairScore:
    """A pair's total nll in nats, of either sentence."""

    paradigm: str
    field: str
    good_nll_nats: float
    bad_nll_nats: float

    @property
    def right(self) -> bool:
        """Whether the grammatical sentence is the likelier one."""
        return self.good_nll_nats < self.bad_nll_nats


def read_blimp(path: str | Path, limit_pairs: int | None = None) -> tuple[list[MinimalPair], list[str]]:
    """Reads BLiMP's JSON lines from the release's zip file or from a folder.

    Args:
        path: a zip file, or a folder; every `.jsonl` in it is a paradigm, at any depth.
        limit_pairs: the first so many pairs of each paradigm; all of them where None.

    Returns:
        The pairs, by paradigm in alphabetical order, and one line for each record that cannot be used.

    Raises:
        ValueError: there is no such file, or no pair in it.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"BLiMP must be a zip file or a folder, got {str(path)!r}, which does not exist: check it")
    if limit_pairs is not None and limit_pairs < 1:
        raise ValueError(f"limit_pairs must be at least 1, got {limit_pairs}: raise it, or leave it out")
    pairs, problems = [], []
    for name, lines in _open_blimp(path):
        count = 0
        for number, line in enumerate(lines, 1):
            if limit_pairs is not None and count >= limit_pairs:
                break
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                pair = MinimalPair(
                    str(record.get("UID") or PurePosixPath(name).stem),
                    str(record.get("field") or "unknown"),
                    record["sentence_good"],
                    record["sentence_bad"],
                )
                if not (isinstance(pair.good, str) and isinstance(pair.bad, str) and pair.good and pair.bad):
                    raise TypeError
            except (ValueError, KeyError, TypeError, AttributeError):
                problems.append(f"{name}:{number} must hold sentence_good and sentence_bad: pair left out")
                continue
            pairs.append(pair)
            count += 1
    if not pairs:
        raise ValueError(f"BLiMP must hold pairs in .jsonl files, got none in {str(path)!r}: give the release's zip")
    return pairs, problems


def _open_blimp(path: Path) -> Iterator[tuple[str, list[str]]]:
    if path.is_dir():
        for file in sorted(path.rglob("*.jsonl"), key=lambda file: file.name):
            yield file.name, file.read_text(encoding="utf-8", errors="replace").splitlines()
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".jsonl") and "__MACOSX" not in name]
            for name in sorted(names, key=lambda name: PurePosixPath(name).name):
                yield PurePosixPath(name).name, archive.read(name).decode("utf-8", errors="replace").splitlines()
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"BLiMP must be a zip file or a folder, got {str(path)!r} ({error}): copy it again") from None


def score_pairs(
    model: nn.Module,
    tokenizer,
    pairs: Sequence[MinimalPair],
    *,
    batch_tokens: int = 4096,
    on_batch: Callable[[int], None] | None = None,
) -> list[PairScore]:
    """Scores both sentences of each pair, each after the tokenizer's first special token alone.

    Args:
        model: a causal language model in evaluation mode; only read.
        tokenizer: its tokenizer.
        pairs: see `read_blimp`.
        batch_tokens: see `scoring.score_targets`.
        on_batch: called with the number of sentences that were scored.
    """
    texts = [encode_pair(tokenizer, "", text) for pair in pairs for text in (pair.good, pair.bad)]
    scores = score_targets(model, texts, batch_tokens=batch_tokens, on_batch=on_batch)
    return [
        PairScore(pair.paradigm, pair.field, scores[2 * number].nll_nats, scores[2 * number + 1].nll_nats)
        for number, pair in enumerate(pairs)
    ]


def by_paradigm(scores: Sequence[PairScore]) -> dict[str, float]:
    """Gives each paradigm's share of pairs that came out right."""
    right: dict[str, list[bool]] = {}
    for score in scores:
        right.setdefault(score.paradigm, []).append(score.right)
    return {name: sum(values) / len(values) for name, values in sorted(right.items())}


@dataclass(frozen=True)
class Drift:
    """What a model makes of a text that it did not learn, and how far it is from a reference there.

    Attributes:
        tokens: how many tokens were scored.
        nll_nats: their summed nll under the model.
        reference_nll_nats: and under the reference.
        kl_nats: summed KL of the next-token distributions, from the reference's to the model's.
        reference_sha256: over the bytes of all the reference's logits: two references with the same hash are the same
            to the last bit.
        chunk_kl_nats: the mean KL a token in each chunk, for intervals.
        chunk_nll_nats: each chunk's summed nll under the model, for intervals.
        chunk_tokens: over how many tokens.
    """

    tokens: int
    nll_nats: float
    reference_nll_nats: float
    kl_nats: float
    reference_sha256: str
    chunk_kl_nats: tuple[float, ...]
    chunk_nll_nats: tuple[float, ...]
    chunk_tokens: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll_nats, self.tokens)

    @property
    def reference_perplexity(self) -> float:
        return perplexity(self.reference_nll_nats, self.tokens)

    @property
    def kl_per_token(self) -> float:
        return self.kl_nats / self.tokens

    def to_json(self) -> dict:
        return {
            **asdict(self),
            "perplexity": self.perplexity,
            "reference_perplexity": self.reference_perplexity,
            "kl_per_token": self.kl_per_token,
        }

    @classmethod
    def from_json(cls, value: dict) -> Drift:
        """Undoes `to_json`.

        Raises:
            ValueError: a measure is missing, as in what an earlier version wrote.
        """
        missing = next((field.name for field in fields(cls) if field.name not in value), None)
        if missing is not None:
            raise ValueError(f"drift must have {missing}, got a record without it: measure again with --overwrite")
        values = {field.name: value[field.name] for field in fields(cls)}
        return cls(**{name: tuple(item) if isinstance(item, list) else item for name, item in values.items()})


def measure_drift(
    model: nn.Module,
    reference: Callable[[], AbstractContextManager],
    input_ids: Tensor,
    window: int,
    stride: int,
    on_chunk: Callable[[int], None] | None = None,
) -> Drift:
    """Reads a text with frozen weights, chunk by chunk under the model and under its reference.

    Args:
        model: a causal language model in evaluation mode; its weights are not changed.
        reference: gives a context within which the model is the reference: `model.disable_adapter` for the base of a
            PEFT model, `contextlib.nullcontext` for the model itself.
        input_ids: LongTensor [T], T >= 2.
        window: see `scoring.read_logits`.
        stride: see `scoring.read_logits`.
        on_chunk: called with the number of tokens that were scored.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    if input_ids.dim() != 1 or len(input_ids) < 2:
        raise ValueError(f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text")
    ours, theirs, kls, counts = [], [], [], []
    digest = hashlib.sha256()
    reading = read_logits(model, input_ids, window, stride)
    there = read_logits(model, input_ids, window, stride)
    for logits, targets in reading:
        with reference():
            its, _ = next(there)
        digest.update(its.contiguous().view(torch.uint8).cpu().numpy())
        p, q = its.float().log_softmax(-1), logits.float().log_softmax(-1)  # [N, V]
        index = targets.unsqueeze(1)
        ours.append(-q.gather(1, index).double().sum().item())
        theirs.append(-p.gather(1, index).double().sum().item())
        kls.append((p.exp() * (p - q)).sum(-1).double().sum().item())
        counts.append(len(targets))
        if on_chunk is not None:
            on_chunk(len(targets))
    return Drift(
        tokens=sum(counts),
        nll_nats=math.fsum(ours),
        reference_nll_nats=math.fsum(theirs),
        kl_nats=math.fsum(kls),
        reference_sha256=digest.hexdigest(),
        chunk_kl_nats=tuple(kl / count for kl, count in zip(kls, counts, strict=True)),
        chunk_nll_nats=tuple(ours),
        chunk_tokens=tuple(counts),
    )


def perplexity_rise(before: Drift, after: Drift) -> Mean:
    """Gives the rise of a text's perplexity from one measurement to another, with its 95% interval over chunks.

    Args:
        before: see `measure_drift`.
        after: of the same text in the same chunks.

    Raises:
        ValueError: they are of different chunks.
    """
    if before.chunk_tokens != after.chunk_tokens:
        raise ValueError(
            f"before and after must be of the same chunks, got {len(before.chunk_tokens)} and "
            f"{len(after.chunk_tokens)} of them, or other ones: measure both with the same window and stride"
        )
    return rise_interval(before.chunk_nll_nats, after.chunk_nll_nats, after.chunk_tokens)
