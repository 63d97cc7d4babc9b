"""BLiMP: pairs of sentences of which one is ungrammatical, and how often a model gives the other one the lower nll."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch import nn

from ..asking.scoring import OnBatch, encode_pair, score_targets
from ..files import parse_json_lines
from .intervals import mean_interval

__all__ = ["MinimalPair", "PairScore", "load_blimp", "score_pairs", "summarize_pairs"]


class MinimalPair(NamedTuple):
    """A grammatical sentence and an ungrammatical one that differ in one respect."""

    paradigm: str
    field: str
    good: str
    bad: str


class PairScore(NamedTuple):
    """The total nll of each sentence of a pair, in nats."""

    paradigm: str
    field: str
    good_nll_nats: float
    bad_nll_nats: float

    @property
    def right(self) -> bool:
        """Whether the grammatical sentence has the lower nll; False for equal ones."""
        return self.good_nll_nats < self.bad_nll_nats


def load_blimp(path: str | Path, limit_pairs: int | None = None) -> tuple[list[MinimalPair], list[str]]:
    """Load BLiMP's JSON lines from the release's zip file or from a folder, at any depth: each `.jsonl` is a paradigm.

    Return the first `limit_pairs` pairs of each paradigm, in alphabetical order, and one line for each record that
    cannot be used. A file that does not exist or holds no pair is a `ValueError`.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"BLiMP must be a zip file or a folder, got {str(path)!r}, which does not exist: check it")
    pairs, problems = [], []
    for name, lines in _open_blimp(path):
        found = []
        for number, pair in parse_json_lines(lines, partial(_parse_pair, name)):
            if len(found) == limit_pairs:
                break
            if pair is None:
                problems.append(f"{name}:{number} must hold sentence_good and sentence_bad: pair left out")
            else:
                found.append(pair)
        pairs += found
    if not pairs:
        raise ValueError(f"BLiMP must hold pairs in .jsonl files, got none in {str(path)!r}: give the release's zip")
    return pairs, problems


def _parse_pair(name: str, record: dict[str, Any]) -> MinimalPair:
    good, bad = record["sentence_good"], record["sentence_bad"]
    if not (isinstance(good, str) and isinstance(bad, str) and good and bad):
        raise TypeError
    return MinimalPair(str(record.get("UID") or Path(name).stem), str(record.get("field") or "unknown"), good, bad)


def _open_blimp(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        with nullcontext() if path.is_dir() else zipfile.ZipFile(path) as archive:
            names = map(str, path.rglob("*.jsonl")) if archive is None else archive.namelist()
            names = [name for name in names if name.endswith(".jsonl") and "__MACOSX" not in name]
            for name in sorted(names, key=lambda name: Path(name).name):
                content = Path(name).read_bytes() if archive is None else archive.read(name)
                yield Path(name).name, content.decode("utf-8", errors="replace").splitlines()
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"BLiMP must be a zip file or a folder, got {str(path)!r} ({error}): copy it again") from None


def score_pairs(
    model: nn.Module, tokenizer, pairs: Sequence[MinimalPair], *, batch_tokens: int = 4096, on_batch: OnBatch = None
) -> list[PairScore]:
    """Score both sentences of each pair, each after the begin-of-text token alone (see `scoring.score_targets`)."""
    texts = [encode_pair(tokenizer, "", text) for pair in pairs for text in (pair.good, pair.bad)]
    nats = [score.nll_nats for score in score_targets(model, texts, batch_tokens=batch_tokens, on_batch=on_batch)]
    of_each = zip(pairs, nats[::2], nats[1::2], strict=True)
    return [PairScore(pair.paradigm, pair.field, good, bad) for pair, good, bad in of_each]


def summarize_pairs(scores: Sequence[PairScore]) -> dict[str, Any]:
    """Return the share of pairs that are right as `accuracy`, with its interval, and of each of the `paradigms`."""
    paradigms: dict[str, list[bool]] = {}
    for score in scores:
        paradigms.setdefault(score.paradigm, []).append(score.right)
    shares = {name: fmean(right) for name, right in sorted(paradigms.items())}
    return {"accuracy": mean_interval([float(score.right) for score in scores]), "paradigms": shares}
