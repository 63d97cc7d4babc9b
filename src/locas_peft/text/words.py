"""Words of a text in any script.

Some scripts put no space between words: there a run of characters is a phrase or a sentence.
"""

import re
import unicodedata
from collections.abc import Iterator

import regex

__all__ = [
    "holds_phrase",
    "join_words",
    "list_content_words",
    "list_runs",
    "on_one_line",
    "split_words",
]

_UNSPACED = {
    "han": r"\p{Han}々〆",
    "hiragana": r"\p{Hiragana}",
    "thai": r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}",
}
"""Scripts without spaces. A run of Katakana is one word, most often a foreign one."""
_ALL_UNSPACED = "".join(_UNSPACED.values())
# In this order. \w has the marks of letters too. The long vowel mark belongs to the run before it.
_SCRIPTS = {
    **{name: f"[{characters}][{characters}ー]*" for name, characters in _UNSPACED.items()},
    "hangul": r"\p{Hangul}+",
    "other": rf"[^\W{_ALL_UNSPACED}\p{{Hangul}}]+",
}
_RUN = regex.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _SCRIPTS.items()))
_ASCII_WORD = re.compile(r"[a-z0-9_]+")
# A character or mark of Chinese or Japanese. In Thai a space ends a sentence.
_CJK_MARKS = "ー、。，！？；：「」『』（）《》〈〉【】"
_SPACELESS = rf"[{_UNSPACED['han']}{_UNSPACED['hiragana']}\p{{Katakana}}{_CJK_MARKS}]"
# The break of a line that is long enough to be hard-wrapped; shorter ones are items of a list.
_SPACELESS_BREAK = regex.compile(rf"(?<=[^\n]{{15}}{_SPACELESS})[^\S\n]*\n\s*(?={_SPACELESS})")
_SPACELESS_END = regex.compile(r"[。！？｡][」』”’）》】]*\Z")
_SPACELESS_START = regex.compile(rf"[\p{{Pi}}\p{{Ps}}]*{_SPACELESS}")
# A character of a word that has spaces around it.
_SPACED = rf"[^\W{_ALL_UNSPACED}]"


def list_runs(text: str) -> Iterator[tuple[str, str]]:
    """Yield each run of a script's letters and digits in a text, and the script.

    The script is "han", "hiragana", "thai" (or a script like it), "hangul", or "other". A run of
    the last two is a word. Case, width and the form of accents do not matter.
    """
    if text.isascii():
        # The same, in half of the time.
        for word in _ASCII_WORD.findall(text.casefold()):
            yield word, "other"
        return
    # Case folding can take a letter and its accent apart.
    folded = unicodedata.normalize("NFKC", text).casefold()
    for match in _RUN.finditer(unicodedata.normalize("NFKC", folded)):
        yield match[0], match.lastgroup


def split_words(text: str) -> list[str]:
    """Return the words of a text; each character is one in a script without spaces."""
    words: list[str] = []
    for run, script in list_runs(text):
        if script in _UNSPACED:
            words += run
        else:
            words.append(run)
    return words


def on_one_line(text: str) -> str:
    """Return a text on one line, with single spaces.

    The break of a hard-wrapped line of Chinese or Japanese leaves none.
    """
    return " ".join(_SPACELESS_BREAK.sub("", text).split())


def join_words(first: str, second: str) -> str:
    """Join two texts by a space; two sentences of Chinese or Japanese by nothing."""
    is_spaceless = _SPACELESS_END.search(first) and _SPACELESS_START.match(second)
    return f"{first}{second}" if is_spaceless else f"{first} {second}"


def list_content_words(text: str) -> frozenset[str]:
    """Return a text's words, case-folded, without the short ones that every text has."""
    return frozenset(
        word for word in split_words(text) if len(word) > 3 or not word.isascii() or word.isdigit()
    )


def holds_phrase(text: str, phrase: str) -> bool:
    """Return whether a phrase occurs in a text as whole words. Case and white space do not matter.

    A phrase that begins or ends in a script without spaces may begin or end anywhere.
    """
    text, phrase = (_fold(each) for each in (text, phrase))
    pattern = regex.escape(phrase)
    unspaced = f"[{_ALL_UNSPACED}]"
    if not regex.match(unspaced, phrase[:1]):
        pattern = rf"(?<!{_SPACED}){pattern}"
    if not regex.match(unspaced, phrase[-1:]):
        pattern = rf"{pattern}(?!{_SPACED})"
    return regex.search(pattern, text) is not None


def _fold(text: str) -> str:
    folded = unicodedata.normalize("NFC", text).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())
