"""Ask a model: prompts and chat templates, continuations in batches, answers, recitation.

`ask` and `ask_by_reciting` answer questions, `continue_texts` continues prompts, and `continue_rows` token ids.
"""

from .answers import Question, ask, ask_by_reciting, count_right, is_right, load_questions
from .continuation import (
    answer,
    begin_rows,
    check_room,
    continue_rows,
    continue_texts,
    draw,
    share_prefixes,
)
from .prompts import (
    SHORT_PROMPT,
    can_chat,
    encode_answer,
    encode_prompt,
    encode_question,
    find_pad_token,
    fit_turns,
)

__all__ = ["SHORT_PROMPT", "Question", "answer", "ask", "ask_by_reciting", "begin_rows"]
__all__ += [
    "can_chat",
    "check_room",
    "continue_rows",
    "continue_texts",
    "count_right",
    "draw",
    "encode_answer",
]
__all__ += [
    "encode_prompt",
    "encode_question",
    "find_pad_token",
    "fit_turns",
    "is_right",
    "load_questions",
]
__all__ += ["share_prefixes"]
