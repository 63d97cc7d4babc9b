"""Sentences of a text in any language, by the rules of the package sentencex.

The rules are those of the text's language: its abbreviations, dates and marks that end a sentence.
The language is guessed from the script and, where several languages share it, from short words.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import regex
import sentencex

from .words import split_words

__all__ = [
    "NARROWEST_COLUMN",
    "fills_column",
    "guess_language",
    "is_wrapped",
    "split_sentences",
]

# The languages with rules of their own, by script, with frequent words where several languages
# share a script. The first language of a script is the one without evidence for another.
_LANGUAGES = {
    "Latin": {
        "en": "the of and to in is a that was for with he it on as at by from his are i",
        "ca": "el la els les és un una que del amb de en no per a",
        "da": "og i at det en den er til på ikke der af for med som et",
        "de": "der die das und ist nicht ein eine mit den von zu sie auf im am er es in wie",
        "es": "el la los las y es un una que del por con en de se no su al",
        "fi": "ja on ei oli se että hän ovat kun mutta",
        "fr": "le la les des et est un une dans que pour du il elle de en a au ce sur",
        "it": "il la di e è un una che del della per con non si le da in",
        "nl": "de het een en is niet van op met voor hij zij in dat te ik",
        "pl": "w i na z się nie to jest do że o po",
        "pt": "o a os as e é um uma que do da em não para com de no na se",
        "sk": "a v na sa je že nie do s z o to",
    },
    "Cyrillic": {
        "ru": "и в не на что с по как это был к из у",
        "bg": "и на да се от е за по са че",
        "kk": "және мен бұл бір үшін да де еді",
        "uk": "і та що у з до не на це в був як",
    },
    "Arabic": {"ar": ""},
    "Armenian": {"hy": ""},
    "Bengali": {"bn": ""},
    "Devanagari": {"hi": ""},
    "Ethiopic": {"am": ""},
    "Greek": {"el": ""},
    "Gujarati": {"gu": ""},
    "Gurmukhi": {"pa": ""},
    "Han": {"zh": ""},
    "Hangul": {"ko": ""},
    "Hiragana": {"ja": ""},
    "Kannada": {"kn": ""},
    "Malayalam": {"ml": ""},
    "Myanmar": {"my": ""},
    "Tamil": {"ta": ""},
    "Telugu": {"te": ""},
}
# The beginning of a text that its language is guessed from.
_GUESSED_CHARACTERS = 20_000

_PARAGRAPH_END = regex.compile(r"\n\s*\n")
# A longer line is cut after a Chinese or Japanese sentence.
_PIECE_CHARACTERS = 2_000
_FULL_STOP = regex.compile(r"[。！？｡]+[」』”’）)]*")
_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
# The end of a sentence that no space need follow, with its closing marks.
_SPACELESS_END = regex.compile(
    rf"(?:[。！？｡．।॥؟۔։።။]|[{_SPACELESS}][.!?…]+)\p{{P}}*$|[.!?…][\"'”’»)\]]+$"
)
_MOST_MARKS = 16
# A word that goes on, as in README.MD, or a path.
_GOES_ON = regex.compile(rf"(?![{_SPACELESS}])[\w/\\*]")
_EMPHASIS = regex.compile(r"[*_]+(?=\s|$)")
# Fewer words in emphasis are a label of what follows them.
_FEWEST_EMPHASISED = 3
# The beginning of an item of a list, a row, a heading or a quotation.
_ITEM = regex.compile(r"\s*(?:[-*+•]\s|\(?\d{1,3}[.)]\s|[|#>])")
_ROW = regex.compile(r"\s*\||.*\t")
_LOWER_CASE = regex.compile(r"\s*(?!\p{Lu})\p{L}")
# A text is hard-wrapped where this share of its line breaks comes before a lower-case letter.
_FEWEST_LOWER_CASE = 1 / 3
# Narrower columns are lists and verses.
NARROWEST_COLUMN = 40
# How many characters a line may end before the last word that would have fitted.
_RAGGED = 5


def split_sentences(text: str, whole: str | None = None) -> list[str]:
    """Return the sentences of a text in their order, without the white space around them.

    A line break ends a sentence: items of a list, rows of a table and lines of code or of a log
    stay apart. Hard-wrapped paragraphs are the exception. There a sentence goes on over a line
    break, which it keeps. A row of a table, which begins with "|" or has a tab, is never split.

    Each piece is a part of the text as it stands, and together the pieces hold all of the text but
    white space.

    Args:
        whole: a longer text that `text` is a part of. Its language and its line breaks tell more
            than those of a few lines. None for `text` itself.
    """
    if whole is None:
        whole = text
    language = guess_language(whole)
    sentences: list[str] = []
    for block in _list_blocks(text, is_wrapped(whole)):
        if _ROW.match(block):
            pieces = [block]
        else:
            pieces = _split_block(block, language)
        sentences += filter(None, map(str.strip, pieces))
    return sentences


@lru_cache(maxsize=4)
def is_wrapped(text: str) -> bool:
    """Return whether the paragraphs of a text are hard-wrapped: their lines begin in lower case."""
    continued = [line for group in _list_all_groups(text) for line in group[1:]]
    lower = sum(_LOWER_CASE.match(line) is not None for line in continued)
    return lower > _FEWEST_LOWER_CASE * len(continued)


def fills_column(lines: Sequence[str]) -> bool:
    """Return whether no line but the last has room for the first word of the next one."""
    widths = [len(line.rstrip()) for line in lines]
    if max(widths) < NARROWEST_COLUMN:
        return False
    for width, following in zip(widths, lines[1:], strict=False):
        word = following.lstrip().split(" ")[0]
        if width + 1 + len(word) + _RAGGED <= max(widths):
            return False
    return True


def guess_language(text: str) -> str:
    """Return the code of the language whose script and frequent words a text has most of.

    Of languages without frequent words here, that is one with the same script: "en" for the Latin
    one.
    """
    return _guess_language(text[:_GUESSED_CHARACTERS])


@lru_cache(maxsize=4)
def _guess_language(text: str) -> str:
    letters = {}
    for script in _LANGUAGES:
        letters[script] = len(regex.findall(rf"\p{{{script}}}", text))
    # Japanese has Han characters too.
    if letters["Hiragana"]:
        letters["Hiragana"] += letters["Han"]
    # Of equal counts, max takes the first: Latin and English.
    languages = _LANGUAGES[max(letters, key=letters.__getitem__)]
    words = split_words(text)
    votes = {}
    for language, frequent in languages.items():
        votes[language] = sum(map(set(frequent.split()).__contains__, words))
    return max(votes, key=votes.__getitem__)


def _split_block(block: str, language: str) -> list[str]:
    marker = _ITEM.match(block)
    start = 0 if marker is None else marker.end()
    # The package takes UTF-8 alone; a surrogate becomes one other character.
    encodable = block.encode("utf-8", "replace").decode("utf-8")
    ends = []
    begin = 0
    for piece in _cut(encodable):
        boundaries = sentencex.get_sentence_boundaries(language, piece)
        ends += [begin + boundary["end_index"] for boundary in boundaries]
        begin += len(piece)
    # The number of an item of a list does not stand alone.
    places = [0]
    for end in ends:
        place = _find_place(block, places[-1], end)
        if place > start:
            places.append(place)
    return [block[begin:end] for begin, end in pairwise([*places, len(block)])]


def _find_place(block: str, begin: int, end: int) -> int:
    """Return where a sentence ends whose end is proposed; 0 where none ends there.

    It ends behind the marks of its emphasis, and not inside a word such as README.MD.

    Args:
        begin: of the sentence.
    """
    emphasis = _EMPHASIS.match(block, end)
    if emphasis is not None:
        is_label = len(block[begin:end].split()) < _FEWEST_EMPHASISED
        return 0 if is_label else emphasis.end()
    if block[end - 1 : end].isspace() or _GOES_ON.match(block, end) is None:
        return end
    is_spaceless = _SPACELESS_END.search(block[max(0, end - _MOST_MARKS) : end]) is not None
    return end if is_spaceless else 0


def _cut(block: str) -> list[str]:
    """Return the pieces of a long line: the package takes quadratic time for Chinese."""
    pieces = []
    begin = 0
    while len(block) - begin > _PIECE_CHARACTERS:
        end = _FULL_STOP.search(block, begin + _PIECE_CHARACTERS)
        if end is None:
            break
        pieces.append(block[begin : end.end()])
        begin = end.end()
    return [*pieces, block[begin:]]


def _list_blocks(text: str, wrapped: bool) -> list[str]:
    """Return the lines of a text; those of a paragraph or item that is `wrapped` are one block."""
    blocks: list[str] = []
    for group in _list_all_groups(text):
        if wrapped and fills_column(group):
            blocks.append("\n".join(group))
        else:
            blocks += group
    return blocks


def _list_all_groups(text: str) -> list[list[str]]:
    return [group for paragraph in _PARAGRAPH_END.split(text) for group in _list_groups(paragraph)]


def _list_groups(paragraph: str) -> list[list[str]]:
    """Return the lines of a paragraph in groups, each of which begins with an item's beginning."""
    groups: list[list[str]] = []
    for line in paragraph.split("\n"):
        if not groups or _ITEM.match(line):
            groups.append([])
        groups[-1].append(line)
    return groups
