"""Passages of a text: the pieces that a study teaches as answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from .blocks import Block, list_blocks, split_items, split_pairs, split_records, split_rows
from .control_tokens import encode_text
from .dialogues import ends_sentence, list_turns
from .documents import NAME
from .sentences import split_sentences
from .words import join_words, on_one_line, split_words

__all__ = ["LONGEST_PASSAGE", "REPORTED", "Passage", "split_passages"]

LONGEST_PASSAGE = 64
"""The most tokens of a passage: a memory learns passages as answers."""
REPORTED = "said"
"""The word after the speaker in a turn that is put as reported speech."""

# The mark of a heading in Markdown.
_MARK = re.compile(r"#{1,6}\s")
# A blank line, or the line break before such a mark.
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=#{1,6}\s)")
_FEWEST_WORDS = 5
_MOST_SUBJECT_WORDS = 8
_WITHIN_WORD = re.compile(r"(?<=\w)['’-](?=\w)")


@dataclass(frozen=True)
class Passage:
    """A piece of a text that answers questions by itself.

    Attributes:
        text: the passage.
        subject: what it is about, where it does not say so itself. For a turn of a dialogue this is
            the speaker. Else it is the title of the text or, without one, its beginning up to the
            end of its first name, such as "The tower of Skarn Point". It is empty where the first
            sentence has no name, or has it late.
        introduces: whether the passage is the one to ask about the subject alone.
    """

    text: str
    subject: str = ""
    introduces: bool = False


def split_passages(tokenizer: Any, text: str, most_tokens: int = LONGEST_PASSAGE) -> list[Passage]:
    """Split a text into passages that answer questions by themselves.

    A small model writes far better questions about a short passage than about a page. What a
    passage is depends on the kind of the text's blocks (see `list_blocks`):

    - Prose: a sentence on one line (see `on_one_line`). The first one below a heading begins with
      the heading. The title of the text is the passages' subject, and no passage.
    - A dialogue: a turn, put as reported speech, with the date where a line above has one: Ann
      said: "I moved to Bergen." on 8 May, 2023. A small model then asks about facts, and not as one
      of the speakers. The date comes last, because a question seldom names it. A long turn is split
      into its sentences.
    - Questions with answers: a question and its answer.
    - A list: an item, after the sentence that introduces the list.
    - A table: a row, each cell after the name of its column: stop: Mill; fare: 3.
    - A record, such as an address: its fields, one after another.
    - A log: a line.
    - Code: a definition, or the lines between two blank lines, with line breaks and indentation.

    Sentences, turns and items of a few words join the one before them. A sentence of more than
    `most_tokens` is cut, at a space where it has one. An answer or a row of more is divided, and
    each part begins with the question or the first cell.

    Raises:
        ValueError: for a text of fewer than five words.
    """
    blocks = list_blocks(text)
    subject = ""
    if blocks and blocks[0].kind == "text":
        title, blocks = _split_title(blocks)
        subject = _strip_marks(title) if title else _find_subject(text)
    if len(encode_text(tokenizer, subject)) > most_tokens:
        # It stands above each passage in a prompt.
        subject = ""
    splitter = _Splitter(tokenizer, text, subject, most_tokens)
    passages: list[Passage] = []
    for block in blocks:
        passages += splitter.split(block)
    if subject and passages and not any(passage.introduces for passage in passages):
        passages[0] = replace(passages[0], introduces=True)
    if sum(_count_words(passage.text) for passage in passages) < _FEWEST_WORDS:
        rule = f"text must hold a passage of at least {_FEWEST_WORDS} words to be studied"
        raise ValueError(f"{rule}, got {text.strip()[:60]!r}: give more text, or read it instead")
    return passages


def _split_title(blocks: list[Block]) -> tuple[str, list[Block]]:
    """Return the heading that a text begins with, and the blocks without it.

    The heading is "", and the blocks are all, where there is none, it is long, or nothing follows
    it. One more heading may stand between it and the first sentence.

    Args:
        blocks: those of the text; the first one is of the kind "text".
    """
    paragraphs = _list_paragraphs(blocks[0].text)
    heading, rest = _split_heading(paragraphs[0], paragraphs[1:3]) if paragraphs else ("", "")
    left = [part for part in (rest, *paragraphs[1:]) if part]
    is_followed = bool(left) or len(blocks) > 1
    if not heading or not is_followed or _count_words(heading) > _MOST_SUBJECT_WORDS:
        return "", blocks
    first = [Block("text", tuple("\n\n".join(left).split("\n")))] if left else []
    return heading, first + blocks[1:]


def _find_subject(text: str) -> str:
    """Return the beginning of a text up to its first name; "" for no name, or a late one."""
    sentences = _list_sentences(text)
    first = _strip_marks(sentences[0]) if sentences else ""
    name = NAME.search(first)
    if name is None:
        return ""
    subject = first[: name.end()]
    # "l'histoire" is one word here.
    words = _count_words(_WITHIN_WORD.sub("", subject))
    return subject if words <= _MOST_SUBJECT_WORDS else ""


class _Splitter:
    """Splits blocks of a text into passages of at most `most_tokens` tokens."""

    def __init__(self, tokenizer: Any, text: str, subject: str, most_tokens: int):
        self._tokenizer = tokenizer
        self._text = text
        self._subject = subject
        self._most_tokens = most_tokens

    def split(self, block: Block) -> list[Passage]:
        """Return the passages of a block."""
        split = {
            "text": self._split_text,
            "dialogue": self._split_dialogue,
            "faq": self._split_questions,
            "list": self._split_list,
            "table": self._split_table,
            "record": self._split_records,
            "log": self._split_log,
            "code": self._split_code,
        }
        return split[block.kind](block)

    def _split_dialogue(self, block: Block) -> list[Passage]:
        """Return the turns of a dialogue as reported speech."""
        passages: list[Passage] = []
        for turn in list_turns(block.lines):
            form = "{}"
            if turn.speaker:
                date = f" on {turn.date}." if turn.date else ""
                form = f'{turn.speaker} {REPORTED}: "{{}}"{date}'
            for sentence in self._split_turn(turn.said, form):
                statement = form.replace("{}", sentence)
                if _is_short(sentence) and self._append(passages, statement):
                    continue
                passages += [Passage(piece, turn.speaker) for piece in self._cut(statement)]
        return passages

    def _split_turn(self, said: str, form: str) -> list[str]:
        """Return a reported turn whole where it is short, else the sentences of a line."""
        whole = on_one_line(said)
        if form != "{}" and self._fits(form.replace("{}", whole)):
            return [whole]
        return _list_sentences(said)

    def _split_text(self, block: Block) -> list[Passage]:
        pieces: list[str] = []
        headings: list[str] = []
        paragraphs = _list_paragraphs(block.text)
        for number, paragraph in enumerate(paragraphs, 1):
            heading, rest = _split_heading(paragraph, paragraphs[number : number + 1])
            if heading:
                headings.append(_strip_marks(heading))
            for sentence in self._list_sentences(rest):
                pieces.append(" ".join([*headings, sentence]))
                headings = []
        if headings:
            pieces.append(" ".join(headings))
        return self._join_short("", pieces)

    def _split_questions(self, block: Block) -> list[Passage]:
        pieces = []
        for question, answer in split_pairs(block.lines):
            sentences = self._list_sentences("\n".join(answer))
            pieces += self._pack(on_one_line(question), sentences, " ")
        return self._state(pieces)

    def _split_list(self, block: Block) -> list[Passage]:
        passages: list[Passage] = []
        pieces: list[str] = []
        for item in split_items([line for line in block.lines if line]):
            whole = on_one_line(" ".join(item))
            if self._fits(_join(block.introduction, whole)):
                pieces.append(whole)
                continue
            passages += self._join_short(block.introduction, pieces)
            pieces = []
            first, *others = self._list_sentences(item[0])
            inner = [on_one_line(line) for line in item[1:]]
            head = _join(block.introduction, first)
            passages += self._state(self._pack(head, [*others, *inner], " "))
        return passages + self._join_short(block.introduction, pieces)

    def _split_table(self, block: Block) -> list[Passage]:
        header, *rows = split_rows(block.lines)
        names = [on_one_line(name) for name in header]
        pieces = []
        for row in rows:
            cells = []
            for name, cell in zip_longest(names, row, fillvalue=""):
                value = on_one_line(cell)
                if value:
                    cells.append(f"{name}: {value}" if name else value)
            if cells:
                first = _join(block.introduction, cells[0])
                pieces += self._pack(first, cells[1:], "; ")
        return self._state(pieces)

    def _split_records(self, block: Block) -> list[Passage]:
        pieces = []
        for record in split_records([line for line in block.lines if line]):
            fields = [on_one_line(field) for field in record]
            pieces += self._pack(fields[0], fields[1:], "; ")
        return self._state(pieces)

    def _split_log(self, block: Block) -> list[Passage]:
        pieces = []
        for line in block.lines:
            if line:
                pieces += self._cut(on_one_line(line))
        return self._state(pieces)

    def _split_code(self, block: Block) -> list[Passage]:
        """Return definitions that fit, else the lines between two blank lines, else lines.

        Lines of a few words join those before them.
        """
        pieces: list[str] = []
        for paragraph in _list_code(block.text):
            is_part = paragraph[0].isspace() or _is_short(paragraph)
            joined = f"{pieces[-1]}\n\n{paragraph}" if pieces else ""
            if is_part and pieces and self._fits(joined):
                pieces[-1] = joined
            elif self._fits(paragraph):
                pieces.append(paragraph)
            else:
                pieces += self._pack("", paragraph.split("\n"), "\n")
        return self._state(pieces)

    def _state(self, pieces: Sequence[str]) -> list[Passage]:
        """Return pieces as passages about the text's subject."""
        subject = self._subject
        return [Passage(piece, subject, bool(subject) and subject in piece) for piece in pieces]

    def _join_short(self, introduction: str, pieces: Sequence[str]) -> list[Passage]:
        """Return pieces after an introduction; those of a few words join the one before them."""
        passages: list[Passage] = []
        for piece in pieces:
            if _is_short(piece) and self._append(passages, piece):
                continue
            passages += self._state(self._cut(_join(introduction, piece)))
        return passages

    def _append(self, passages: list[Passage], piece: str) -> bool:
        """Add a piece to the last passage; return False where there is none, or it does not fit."""
        if not passages:
            return False
        joined = join_words(passages[-1].text, piece)
        if not self._fits(joined):
            return False
        passages[-1] = replace(passages[-1], text=joined)
        return True

    def _pack(self, head: str, parts: Sequence[str], joint: str) -> list[str]:
        """Join parts to passages that fit. Each begins with the head, where that fits too."""
        passages: list[str] = []
        current = head
        for part in parts:
            joined = _join(current, part, joint)
            if self._fits(joined):
                current = joined
                continue
            if current != head:
                passages.append(current)
            current = _join(head, part, joint)
            if not self._fits(current):
                passages += self._cut(part)
                current = head
        if current != head:
            passages.append(current)
        if head and not any(passage.startswith(head) for passage in passages):
            passages[:0] = self._cut(head)
        return passages

    def _cut(self, sentence: str) -> list[str]:
        """Halve a sentence until each piece fits."""
        if len(sentence) < 2 or self._fits(sentence):
            return [sentence]
        middle = len(sentence) // 2
        space = sentence.rfind(" ", 1, middle + 1)
        if space > 0:
            middle = space
        pieces = []
        for part in (sentence[:middle].strip(), sentence[middle:].strip()):
            if part:
                pieces += self._cut(part)
        return pieces

    def _list_sentences(self, part: str) -> list[str]:
        """Return the sentences of a part of the text."""
        return [on_one_line(sentence) for sentence in split_sentences(part, self._text)]

    def _fits(self, text: str) -> bool:
        return len(encode_text(self._tokenizer, text)) <= self._most_tokens


def _list_sentences(text: str) -> list[str]:
    return [on_one_line(sentence) for sentence in split_sentences(text)]


def _list_paragraphs(text: str) -> list[str]:
    return [part for part in _PARAGRAPH_END.split(text) if part.strip()]


def _split_heading(paragraph: str, following: Sequence[str]) -> tuple[str, str]:
    """Return the first line of a paragraph where it is a heading, else "", and what is left.

    A heading has the mark "#", or it is short, does not end as a sentence does, and stands above a
    line of two sentences or more, or alone above a paragraph that ends as a sentence does. So a
    line of a poem or of a list of names is none.

    Args:
        following: the paragraphs below that count: one; for a title two, since one more heading may
            stand between.
    """
    first, _, rest = paragraph.partition("\n")
    if _is_marked(first):
        return first, rest
    is_short = 0 < _count_words(first) <= _MOST_SUBJECT_WORDS
    if not is_short or ends_sentence(first.strip()):
        return "", paragraph
    if rest:
        below = rest.split("\n")[0]
        is_heading = len(split_sentences(below)) > 1
    else:
        is_heading = any(ends_sentence(other.strip()) for other in following)
    return (first, rest) if is_heading else ("", paragraph)


def _is_marked(line: str) -> bool:
    return _MARK.match(line) is not None


def _strip_marks(heading: str) -> str:
    return on_one_line(heading.lstrip("#*_ ").rstrip("*_:, "))


def _list_code(text: str) -> list[str]:
    """Return the paragraphs of code; a definition without a blank line before it begins one."""
    paragraphs: list[list[str]] = [[]]
    for line in text.split("\n"):
        before = paragraphs[-1]
        if not line.strip():
            paragraphs.append([])
            continue
        ends_definition = bool(before) and before[-1][0].isspace() and line[0].isalpha()
        if ends_definition:
            paragraphs.append([])
        paragraphs[-1].append(line.rstrip())
    return ["\n".join(paragraph) for paragraph in paragraphs if paragraph]


def _join(head: str, text: str, joint: str = " ") -> str:
    """Join two texts; a semicolon between them gives way to the mark of a sentence's end."""
    if not head:
        return text
    if joint == "; " and ends_sentence(head):
        joint = " "
    return f"{head}{joint}{text}"


def _is_short(text: str) -> bool:
    """Return whether a piece has too few words for a passage of its own."""
    return _count_words(text) < _FEWEST_WORDS


def _count_words(text: str) -> int:
    return len(split_words(text))
