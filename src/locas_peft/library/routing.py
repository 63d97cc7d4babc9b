"""Which memory of a library a question is about."""

import math
from contextlib import suppress
from pathlib import Path

from ..memories.folder import SAMPLE
from ..selfstudy.exchanges import EXCHANGES, join_exchanges, load_exchanges

__all__ = ["LEAST_GAIN", "LEAST_SHARE", "MOST_SEARCHED", "list_passages", "make_sample"]

LEAST_GAIN = (
    1.4  # in nats a token (`measure_gain`) below which the base answers (benchmarks/library.py)
)
LEAST_SHARE, MOST_SEARCHED = (
    0.7,
    5,
)  # of the best memory's score; memories whose passages are found together
SAMPLE_LINES, SAMPLE_CHARACTERS = 200, 200


def make_sample(text: str, earlier: str | Path | None = None) -> str:
    """Return evenly spread pieces of a text, a line each, after those in the folder of an `earlier` memory, if any."""
    pieces = [
        text[first : first + SAMPLE_CHARACTERS] for first in range(0, len(text), SAMPLE_CHARACTERS)
    ]
    step = math.ceil(len(pieces) / SAMPLE_LINES)
    sample = "".join(" ".join(piece.split()) + "\n" for piece in pieces[:: max(step, 1)])
    former = None if earlier is None else Path(earlier) / SAMPLE
    before = former.read_text(encoding="utf-8") if former is not None and former.is_file() else ""
    return (
        before if before.endswith(sample) else before + sample
    )  # it may have been added before a kill


def list_passages(memory: Path) -> list[str]:
    """Return what a memory is found by: what it has studied, else the lines of its sample."""
    with suppress(FileNotFoundError):  # it has no sample, or another process forgets it meanwhile
        if (memory / EXCHANGES).is_file():
            return list(join_exchanges(load_exchanges(memory / EXCHANGES)).values())
        return (memory / SAMPLE).read_text(encoding="utf-8").splitlines()
    return []
