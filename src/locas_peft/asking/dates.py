"""The date that a chat template prints: today's, or a pinned one.

What was interrupted before midnight and goes on after it has the prompts that it began with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, datetime
from typing import Any

from ..checks import invalid

__all__ = ["current_day", "dated", "pin_date"]

_PINNED: ContextVar[date | None] = ContextVar("pinned date", default=None)
_CODES = "aAbBcdGHIjmMpSuUVwWxXyYZ"
# Codes that not every system has, by those that it has.
_COMPOSED = {"%F": "%Y-%m-%d", "%D": "%m/%d/%y", "%T": "%H:%M:%S", "%R": "%H:%M", "%h": "%b"}
# transformers gives templates a function of this name, and no other one.
_MACRO = """{%- macro strftime_now(format) -%}
{%- set written = namespace(text=format) -%}
{%- for code, value in codes_of_the_day.items() -%}
{%- set written.text = written.text.replace(code, value) -%}
{%- endfor -%}
{{- written.text -}}
{%- endmacro %}
"""


@contextmanager
def dated(day: str) -> Iterator[None]:
    """Let chat templates print a day in place of today within the context.

    Args:
        day: such as "2026-11-26", else it is a `ValueError`. Its time is midnight.
    """
    try:
        pinned = date.fromisoformat(day)
    except (TypeError, ValueError):
        rule = "be a day such as 2026-11-26"
        raise invalid("date", rule, repr(day), "correct it, or start afresh") from None
    token = _PINNED.set(pinned)
    try:
        yield
    finally:
        _PINNED.reset(token)


def current_day() -> str:
    """Return the day that chat templates print, as `dated` takes it."""
    return (_PINNED.get() or date.today()).isoformat()


def pin_date(tokenizer: Any) -> dict[str, Any]:
    """Return the options of `apply_chat_template` with which it prints the pinned day, if any."""
    day = _PINNED.get()
    if day is None:
        return {}
    template = tokenizer.get_chat_template()
    if "strftime_now" not in template:
        return {}
    # The macro ends with a line break: what follows begins a line, as before.
    return {"chat_template": _MACRO + template, "codes_of_the_day": _list_codes(day)}


def _list_codes(day: date) -> dict[str, str]:
    """Return the format codes of a date with their values, those first that hold others."""
    midnight = datetime(day.year, day.month, day.day)
    codes = {}
    for code, composed in _COMPOSED.items():
        codes[code] = midnight.strftime(composed)
    codes["%e"] = f"{day.day:2d}"
    for code in _CODES:
        value = midnight.strftime(f"%{code}")
        codes[f"%{code}"] = value
        # Without zeros before it, on Unix and on Windows.
        for flag in "-#":
            codes[f"%{flag}{code}"] = value.lstrip("0") or "0"
    codes["%%"] = "%"
    return codes
