"""Checks of a user's values. Each error is one line with the field, its rule, its value and the remedy."""

import math
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

from .tuner.memory_file import one_line

__all__ = [
    "check_choice",
    "check_number",
    "check_whole",
    "describe_difference",
    "first_line",
    "import_extra",
]
__all__ += ["one_line"]


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise a `TypeError` or `ValueError` unless a value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: give a whole number")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}: raise it")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise a `ValueError` unless a value is one of some names."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}, got {value!r}: choose one of them"
        )


def check_number(name: str, value: Any, may_be_0: bool = False) -> None:
    """Raise a `ValueError` unless a value is finite and above 0, or 0 where it may be."""
    if not 0 <= value < math.inf or (value == 0 and not may_be_0):
        rule = "0 or a finite number above" if may_be_0 else "a finite number above 0"
        raise ValueError(f"{name} must be {rule}, got {value}: leave it out for the preset's")


def describe_difference(
    ours: dict[str, Any], theirs: dict[str, Any], where: str, remedy: str, prefix: str = ""
) -> str | None:
    """Return the message for the first field in which two settings differ, also inside dictionaries; None for none."""
    fields = ("method", "preset", *ours, *theirs)  # other fields follow from the first two
    field = next((field for field in fields if ours.get(field) != theirs.get(field)), None)
    if field is None:
        return None
    here, there = ours.get(field), theirs.get(field)
    if isinstance(here, dict) and isinstance(there, dict):
        return describe_difference(here, there, where, remedy, f"{prefix}{field}: ")
    return f"{prefix}{field} must be {there!r:.80} as in {where}, got {here!r:.80}: {remedy}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[0].rstrip(":.")) if lines else type(error).__name__


def import_extra(name: str, extra: str = "eval", what: str = "this measure") -> ModuleType:
    """Import a module of an extra by its full name, such as "nltk.stem.porter"; a `ValueError` without its package."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        raise ValueError(
            f"{what} needs {package}: install the extra with pip install 'locas_peft[{extra}]'"
        ) from None
