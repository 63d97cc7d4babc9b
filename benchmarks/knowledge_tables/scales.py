"""The sizes of a run: a few minutes for a try, or the tables."""

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Scale"]


@dataclass(frozen=True)
class Scale:
    """How much is learned and asked.

    Args:
        name: the name of the run's folder.
        window, stride: of readings, in tokens.
        passages: of SQuAD and of the fictional ones, drawn by a seed.
        questions: about each passage of SQuAD that is alone in its memory.
        joined: passages of SQuAD that share one memory; 0 for no such memory.
        joined_questions: about each of them.
        readings: after how many readings of a fictional passage its probes are scored.
        retention_tokens: of another book, which a studied memory reads.
        prefix_steps: how many steps a prefix is trained for on a short text, which it reads again and
            again; a longer one is read once.
        stories: of QuALITY.
        context_tokens: the most tokens of a story in context.
        seeds: of the studies of the pages; all other studies have the seed 0.
        article_tokens: of the other passages of a passage's article.
        unread_tokens: of the book that no memory reads.
        conversations: of LoCoMo.
        locomo_questions: of each category of a conversation; None for all.
    """

    name: str
    window: int
    stride: int
    passages: int
    questions: int
    joined: int
    joined_questions: int
    readings: tuple[int, ...]
    retention_tokens: int
    prefix_steps: int
    stories: int
    context_tokens: int
    seeds: int
    article_tokens: int
    unread_tokens: int
    conversations: int
    locomo_questions: int | None


QUICK = Scale(
    name="quick",
    window=1024,
    stride=512,
    passages=1,
    questions=3,
    joined=2,
    joined_questions=2,
    readings=(1, 2),
    retention_tokens=512,
    prefix_steps=2,
    stories=1,
    context_tokens=1024,
    seeds=1,
    article_tokens=256,
    unread_tokens=512,
    conversations=1,
    locomo_questions=2,
)
FULL = Scale(
    name="full",
    window=1024,
    stride=512,
    passages=20,
    questions=5,
    joined=50,
    joined_questions=3,
    readings=(1, 4, 10),
    retention_tokens=10_000,
    prefix_steps=30,
    stories=2,
    context_tokens=16_384,
    seeds=1,
    article_tokens=1_024,
    unread_tokens=2_048,
    conversations=1,
    locomo_questions=None,
)
