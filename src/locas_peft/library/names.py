"""Names of memories, which are also the names of their folders, on every system."""

from ..checks import invalid
from ..files import fold_name, is_name_character, is_reserved, normalize_name

__all__ = ["FAILURES", "check_name", "is_name", "propose_name"]

FAILURES = "failures.jsonl"
"""The failures of a table (see `table.py`)."""
_MOST_CHARACTERS = 60
# A folder's name has 255 on most systems, and the temporary ones beside it are longer.
_MOST_BYTES = 200
_OTHER_CHARACTERS = " .()-"


def check_name(name: str) -> str:
    """Return a memory's name, stripped and normalized.

    A name that cannot be a folder's everywhere is a `ValueError`.
    """
    name = normalize_name(name.strip())
    if not is_name(name) or fold_name(name) == FAILURES:
        raise ValueError(
            f"name must be at most {_MOST_CHARACTERS} letters, digits, spaces or any of . ( ) _ - "
            f"and begin with a letter or digit, got {name[:_MOST_CHARACTERS]!r}: choose another"
        )
    if is_reserved(name):
        rule = "be one that no system reserves for a device"
        raise invalid("name", rule, repr(name), "choose another")
    # Of some letters, the folded form is longer.
    size = max(len(name.encode()), len(fold_name(name).encode()))
    if size > _MOST_BYTES:
        rule = f"have at most {_MOST_BYTES} bytes in UTF-8"
        raise invalid("name", rule, f"{size} in {name!r}", "choose a shorter one")
    return name


def is_name(name: str) -> bool:
    """Return whether a normalized name may be a memory's: it cannot lead out of the library."""
    if not 1 <= len(name) <= _MOST_CHARACTERS or not name[0].isalnum():
        return False
    if not is_name_character(name[-1]) and name[-1] != ")":
        return False
    return all(character in _OTHER_CHARACTERS or is_name_character(character) for character in name)


def propose_name(text: str) -> str:
    """Return a name that a memory can have, such as that of its file; "memory" for lack of one."""
    characters = []
    for character in normalize_name(text):
        is_allowed = character in _OTHER_CHARACTERS or is_name_character(character)
        characters.append(character if is_allowed and character != "_" else " ")
    words = "".join(characters).split()
    # Shorter than the longest name: a number may follow it.
    name = " ".join(words)[:50].strip(" .-(")
    return name if is_name(name) and not is_reserved(name) else "memory"
