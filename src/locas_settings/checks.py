"""Checks of single values. Each error is one line: field, rule, value and remedy."""

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["check_choice", "check_number", "check_whole", "invalid"]


def invalid(field: str, rule: str, got: str, remedy: str) -> ValueError:
    """Return the error of a field with an invalid value, as one line."""
    return ValueError(f"{field} must {rule}, got {got}: {remedy}")


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise a `TypeError` or `ValueError` unless a value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: give a whole number")
    if value < least:
        raise invalid(name, f"be at least {least}", str(value), "raise it")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise a `ValueError` unless a value is one of some names."""
    choices = list(choices)
    if value not in choices:
        raise invalid(name, f"be one of {', '.join(choices)}", repr(value), "choose one of them")


def check_number(name: str, value: Any, may_be_0: bool = False) -> None:
    """Raise a `ValueError` unless a value is finite and above 0, or 0 where that is allowed."""
    if 0 < value < math.inf or (value == 0 and may_be_0):
        return
    rule = "be 0 or a finite number above" if may_be_0 else "be a finite number above 0"
    raise invalid(name, rule, str(value), "leave it out for the preset's")
