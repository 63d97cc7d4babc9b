"""The prompts of the LoCoMo protocol: a question alone, or after evidence or the dialogue."""

from bisect import bisect_right
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..asking import encode_answer, encode_prompt
from ..checks import check_choice
from ..files import load_json
from ..model.causal_lm import count_positions
from .conversations import Conversation, LocomoQuestion, dialogue_lines, keep_evidence

__all__ = ["ANSWERED", "PROMPTS", "make_prompt", "make_prompts"]

ANSWERED = ("no-context", "evidence", "full-context")
PROMPTS: dict[str, str] = load_json(Path(__file__).with_suffix(".json"))
"""The prompts, by setting, and hints by category number (`hint-1` to `hint-5`), which replace
`{hint}`. The setting "evidence" has the prompt of "full-context", and its dialogue is the turns
that the question names."""


def make_prompts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    setting: str,
    *,
    max_new_tokens: int = 32,
) -> tuple[list[list[int]], int]:
    """Make the prompts of a conversation's questions.

    If the whole dialogue exceeds the model's positions, its newest lines are in context: as many as
    leave room for the longest question, and for an answer or the longest gold answer.

    Args:
        model: the one that answers.
        tokenizer: of the model.
        conversation: with its questions.
        setting: one of `ANSWERED`.
        max_new_tokens: the most tokens of an answer.

    Returns:
        The prompts as token ids, and the number of the dialogue's lines that were left out.
    """
    lines = dialogue_lines(conversation)

    def encode(question: LocomoQuestion, newest: int) -> list[int]:
        shown = lines[len(lines) - newest :]
        if setting == "evidence":
            shown = dialogue_lines(keep_evidence(conversation, question))
        prompt = make_prompt(conversation, question, setting, "\n".join(shown))
        return encode_prompt(tokenizer, prompt)

    prompts = [encode(question, len(lines)) for question in conversation.questions]
    positions = count_positions(model)
    if setting != "full-context" or positions is None or not prompts:
        return prompts, 0
    # Gold answers are scored after the prompts.
    golds = [len(encode_answer(tokenizer, item.answer)) for item in conversation.questions]
    room = positions - max(max_new_tokens, *golds)
    lengths = [len(prompt) for prompt in prompts]
    if max(lengths) <= room:
        return prompts, 0
    longest = conversation.questions[lengths.index(max(lengths))]

    def measure(newest: int) -> int:
        return len(encode(longest, newest))

    fitting = bisect_right(range(len(lines) + 1), room, key=measure)
    # 0 even if that does not fit: `answer` refuses the question then.
    newest = max(0, fitting - 1)
    prompts = [encode(question, newest) for question in conversation.questions]
    return prompts, len(lines) - newest


def make_prompt(
    conversation: Conversation, question: LocomoQuestion, setting: str, text: str
) -> str:
    """Make a question's prompt in a setting of `ANSWERED`; `text` is the dialogue in context."""
    check_choice("setting", setting, ANSWERED)
    template = PROMPTS["full-context" if setting == "evidence" else setting]
    speaker_a, speaker_b = conversation.speakers
    return template.format(
        question=question.question,
        hint=PROMPTS.get(f"hint-{question.category}", ""),
        dialogue=text,
        speaker_a=speaker_a,
        speaker_b=speaker_b,
    )
