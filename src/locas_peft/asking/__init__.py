"""Ask a model: prompts and chat templates, continuations in batches, answers.

An `Answerer` answers questions and conversations, `continue_texts` continues prompts, and
`continue_rows` token ids.
"""

from .answers import Answer, Answerer, Question, count_right, is_right, load_questions
from .continuation import (
    answer_in_batches,
    begin_rows,
    check_room,
    continue_rows,
    continue_texts,
    count_shared,
    draw,
    pad_left,
    share_prefixes,
)
from .dates import current_day, dated
from .prompts import (
    SHORT_PROMPT,
    can_chat,
    encode_answer,
    encode_beginning,
    encode_prompt,
    encode_question,
    find_pad_token,
    fit_turns,
)

__all__ = [
    "SHORT_PROMPT",
    "Answer",
    "Answerer",
    "Question",
    "answer_in_batches",
    "begin_rows",
    "can_chat",
    "check_room",
    "continue_rows",
    "continue_texts",
    "count_right",
    "count_shared",
    "current_day",
    "dated",
    "draw",
    "encode_answer",
    "encode_beginning",
    "encode_prompt",
    "encode_question",
    "find_pad_token",
    "fit_turns",
    "is_right",
    "load_questions",
    "pad_left",
    "share_prefixes",
]
