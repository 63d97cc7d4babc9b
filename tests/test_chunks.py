"""Every token is in one chunk, and perplexity weighs tokens, not chunks."""

import math

import pytest

from locas_peft.ttt import (
    Chunk,
    at_marks,
    choose_marks,
    cumulative,
    cut,
    per_segment,
    perplexity,
    perplexity_of,
)


def make_chunks(*nlls: float, stride: int = 10) -> list[Chunk]:
    """Chunks of `stride` tokens, each token of which costs the same: the first chunk scores one token less."""
    chunks = []
    for index, nll in enumerate(nlls):
        start, tokens = index * stride, stride - (index == 0)
        chunks.append(Chunk(index, start, start + stride, tokens, nll * tokens, 0.0, True))
    return chunks


@pytest.mark.parametrize(
    ("window", "stride"), [(16, 8), (16, 16), (16, 15), (9, 1), (1, 1), (64, 5)]
)
@pytest.mark.parametrize("length", [2, 8, 9, 16, 17, 50])
def test_every_token_but_the_first_is_scored_once_with_the_context_of_the_window(
    length, window, stride
):
    spans = list(cut(length, window, stride))
    assert [span.start for span in spans] == list(range(0, length, stride))
    assert sum(span.scored for span in spans) == length - 1
    for span in spans:
        assert span.stop == min(span.start + stride, length)
        assert span.begin == max(0, span.start - max(window - stride, 1))
    assert list(cut(length, window, stride, start=stride)) == spans[1:]


def test_perplexity_is_the_exponential_of_the_mean_where_there_is_one():
    # Of a uniform guess, the number of choices.
    assert perplexity(7 * math.log(50), 7) == pytest.approx(50)
    assert perplexity(1e6, 1) == math.inf
    assert math.isnan(perplexity(math.nan, 1))
    assert math.isnan(perplexity_of([]))
    with pytest.raises(ValueError, match="^tokens must be at least 1, got 0: score a token before"):
        perplexity(0.0, 0)


def test_cumulative_weighs_tokens_and_not_chunks():
    chunks = make_chunks(3.0, 1.0)
    points = cumulative(chunks)
    assert [tokens for tokens, _ in points] == [10, 20]
    assert points[0][1] == pytest.approx(math.exp(3))
    assert points[1][1] == pytest.approx(math.exp((9 * 3 + 10 * 1) / 19)) == perplexity_of(chunks)
    # What precedes the first scored token is left out.
    assert cumulative(make_chunks(0.0, 1.0, stride=1)) == [(2, math.exp(1))]
    assert cumulative([]) == []


def test_at_marks_takes_the_end_of_the_chunk_that_reaches_the_mark():
    chunks = make_chunks(3.0, 2.0, 1.0)
    ends = dict(cumulative(chunks))
    assert at_marks(chunks, [15, 10, 30, 31]) == {"10": ends[10], "15": ends[20], "30": ends[30]}


def test_per_segment_shares_no_token_and_leaves_none_out():
    segments = per_segment(make_chunks(4.0, 3.0, 2.0, 1.0), [15, 30, 100])
    nats = {"0-15": (9 * 4 + 10 * 3) / 19, "15-30": 2, "30-40": 1}
    expected = {name: math.exp(value) for name, value in nats.items()}
    assert list(segments) == list(expected) and segments == pytest.approx(expected)


def test_per_segment_ends_with_the_document_and_skips_segments_inside_one_chunk():
    assert list(per_segment(make_chunks(2.0, 1.0), [12, 14, 20])) == ["0-12"]
    assert list(per_segment(make_chunks(2.0, 1.0), [])) == ["0-20"]
    assert per_segment([], [10]) == {}


@pytest.mark.parametrize(
    ("tokens", "marks"),
    [
        (900, []),
        (3_500, [1000, 2000, 3000]),
        (60_000, [25_000, 50_000]),
        (100_000, [25_000, 50_000, 75_000, 100_000]),
        (1_000_000, [50_000, 100_000, 150_000, 200_000]),
    ],
)
def test_marks_follow_the_length(tokens, marks):
    assert choose_marks(tokens) == marks
