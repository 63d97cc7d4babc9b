"""Ask a model: prompts and chat templates, continuations in batches, answers, recitation.

`ask` and `ask_by_reciting` answer questions, `continue_texts` continues prompts, `continue_rows` token ids.
"""

from .answers import Question, ask, ask_by_reciting, count_right, is_exact, is_right, load_questions, recite_for
from .continuation import answer, begin_rows, check_room, continue_rows, continue_texts, draw, share_prefixes
from .prompts import SHORT_PROMPT, can_chat, encode_answer, encode_prompt, encode_question, find_pad_token, fit_turns

__all__ = ["SHORT_PROMPT", "Question", "answer", "ask", "ask_by_reciting", "begin_rows", "can_chat", "check_room"]
__all__ += ["continue_rows", "continue_texts", "count_right", "draw", "encode_answer", "encode_prompt"]
__all__ += ["encode_question", "find_pad_token", "fit_turns", "is_exact", "is_right", "load_questions", "recite_for"]
__all__ += ["share_prefixes"]
