"""Checks of single values. Each error is one line: field, rule, value and remedy."""

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["check_choice", "check_flag", "check_number", "check_whole", "invalid"]


def invalid(field: str, rule: str, got: object, remedy: str) -> ValueError:
    """Return the error for a value that breaks a rule: "FIELD must RULE, got GOT: REMEDY".

    Args:
        field: the name of the setting, file or folder.
        rule: what it must do or be, such as "be at least 1".
        got: the value, or a description of it. Give `repr(value)` for a text.
        remedy: what the user can do about it.
    """
    return ValueError(f"{field} must {rule}, got {got}: {remedy}")


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise a `TypeError` or `ValueError` unless a value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: give a whole number")
    if value < least:
        raise invalid(name, f"be at least {least}", value, "raise it")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise a `ValueError` unless a value is one of some names."""
    choices = list(choices)
    if value not in choices:
        raise invalid(name, f"be one of {', '.join(choices)}", repr(value), "choose one of them")


def check_flag(name: str, value: Any) -> None:
    """Raise a `TypeError` unless a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}: give one of them")


def check_number(name: str, value: Any, may_be_0: bool = False) -> None:
    """Raise a `TypeError` for what is no number, and a `ValueError` for a number out of range.

    The range is the finite numbers above 0, and 0 where that is allowed.
    """
    if isinstance(value, (bool, str)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: give a number")
    if 0 < value < math.inf or (value == 0 and may_be_0):
        return
    rule = "be 0 or a finite number above" if may_be_0 else "be a finite number above 0"
    raise invalid(name, rule, value, "leave it out for the preset's")
