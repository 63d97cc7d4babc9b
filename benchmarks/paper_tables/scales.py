"""The sizes of a run: an hour on two cores, a day on two cores, or a GPU."""

from dataclasses import dataclass

__all__ = ["CPU", "GPU", "QUICK", "SCALES", "Scale"]


@dataclass(frozen=True)
class Scale:
    """How much is read and asked.

    Args:
        name: the name of the run's folder.
        window, stride: in tokens, of all rows but those that name another one.
        sweep_tokens: of the training book that chooses learning rates.
        rates: how many learning rates a sweep tries at most.
        marks: numbers of tokens read at which perplexities are listed; the last one is the length
            of the two long books.
        short_tokens: of each of the six books over which the intervals are; 0 for none of them.
        ablation_tokens: of the tables init and width.
        baseline_tokens: of the table of other methods.
        baseline_sweep_tokens: of the training book, for that table; more than `stride`, since the
            first chunk is scored before anything is learned.
        seeds: of the table init.
        memory_tokens: of the book that a memory has read before MMLU.
        questions: of each of MMLU's subjects; None for all.
        few_shot: whether MMLU is also asked with five examples, which takes longest.
        probes: questions of each of the three other sets.
        pairs: of each of BLiMP's paradigms.
        unread_tokens: of the book that is not read.
        conversations: of LoCoMo.
        locomo_questions: of each category of a conversation; None for all.
        timed_tokens: of the readings that are timed side by side.
        large_width: the width of the second pair of rows of MMLU; None for no such rows.
    """

    name: str
    window: int
    stride: int
    sweep_tokens: int
    rates: int
    marks: tuple[int, ...]
    short_tokens: int
    ablation_tokens: int
    baseline_tokens: int
    baseline_sweep_tokens: int
    seeds: int
    memory_tokens: int
    questions: int | None
    few_shot: bool
    probes: int
    pairs: int
    unread_tokens: int
    conversations: int
    locomo_questions: int | None
    timed_tokens: int
    large_width: int | None = None

    @property
    def book_tokens(self) -> int:
        """How many tokens of each of the two long books are read."""
        return self.marks[-1]


QUICK = Scale(
    name="quick",
    window=1024,
    stride=512,
    sweep_tokens=2_048,
    rates=2,
    marks=(2_048, 4_096),
    short_tokens=0,
    ablation_tokens=2_048,
    baseline_tokens=2_048,
    baseline_sweep_tokens=2_048,
    seeds=1,
    memory_tokens=4_096,
    questions=2,
    few_shot=False,
    probes=20,
    pairs=2,
    unread_tokens=2_048,
    conversations=1,
    locomo_questions=5,
    timed_tokens=14_336,
)
CPU = Scale(
    name="cpu",
    window=1024,
    stride=512,
    sweep_tokens=12_288,
    rates=4,
    marks=(12_288, 25_088, 50_176),
    short_tokens=12_288,
    ablation_tokens=12_288,
    baseline_tokens=8_192,
    baseline_sweep_tokens=4_096,
    seeds=3,
    memory_tokens=50_176,
    questions=20,
    few_shot=False,
    probes=200,
    pairs=10,
    unread_tokens=8_192,
    conversations=2,
    locomo_questions=20,
    timed_tokens=16_384,
)
GPU = Scale(
    name="gpu",
    window=2048,
    stride=1024,
    sweep_tokens=50_176,
    rates=5,
    marks=(50_176, 100_352, 150_528, 200_704),
    short_tokens=50_176,
    ablation_tokens=50_176,
    baseline_tokens=50_176,
    baseline_sweep_tokens=12_288,
    seeds=3,
    memory_tokens=200_704,
    questions=None,
    few_shot=True,
    probes=200,
    pairs=100,
    unread_tokens=50_176,
    conversations=6,
    locomo_questions=None,
    timed_tokens=65_536,
    large_width=512,
)
SCALES = {scale.name: scale for scale in (QUICK, CPU, GPU)}
