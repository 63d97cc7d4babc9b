"""Checks of a user's values. Each error is one line: the field, its rule, its value, the remedy."""

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from locas_settings.checks import check_choice, check_number, check_whole, invalid

from .tuner.memory_file import one_line

__all__ = [
    "check_choice",
    "check_number",
    "check_whole",
    "describe_difference",
    "first_line",
    "hide_folder",
    "import_extra",
    "invalid",
    "one_line",
]


def describe_difference(
    ours: dict[str, Any], theirs: dict[str, Any], where: str, remedy: str, prefix: str = ""
) -> str | None:
    """Return the message for the first field in which two settings differ, or None.

    Dictionaries inside the settings are compared field by field.

    Args:
        ours, theirs: the settings. Those of `theirs` are the ones that must hold.
        where: where `theirs` come from, for the message.
        remedy: the end of the message.
        prefix: the names of the dictionaries around these settings.
    """
    # Other fields follow from the first two.
    fields = ("method", "preset", *ours, *theirs)
    differing = [field for field in fields if ours.get(field) != theirs.get(field)]
    if not differing:
        return None
    field = differing[0]
    our_value = ours.get(field)
    their_value = theirs.get(field)
    if isinstance(our_value, dict) and isinstance(their_value, dict):
        return describe_difference(our_value, their_value, where, remedy, f"{prefix}{field}: ")
    rule = f"be {their_value!r:.80} as in {where}"
    return str(invalid(f"{prefix}{field}", rule, f"{our_value!r:.80}", remedy))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[0].rstrip(":.")) if lines else type(error).__name__


def hide_folder(message: str, folder: Path, name: str = "") -> str:
    """Return a message with `name` in place of a folder's path; without one, paths begin in it."""
    # Most messages quote paths by `repr`, which doubles the backslashes of Windows.
    for written in (repr(str(folder))[1:-1], str(folder)):
        if not name:
            message = re.sub(rf"{re.escape(written)}[/\\]+", "", message)
        message = message.replace(written, name)
    return message


def import_extra(name: str, extra: str = "eval", what: str = "this measure") -> ModuleType:
    """Import a module of an extra.

    Args:
        name: the module's full name, such as "nltk.stem.porter".
        extra: the extra of this package that installs it.
        what: what needs the module, for the message.

    Raises:
        ValueError: its package is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        raise ValueError(
            f"{what} needs {package}: install the extra with pip install 'locas_peft[{extra}]'"
        ) from None
