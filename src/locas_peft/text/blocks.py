"""Blocks of a text: prose, dialogues, questions with answers, lists, tables, records, logs, code.

The kind of a block follows from the marks, labels and order of its lines.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace

import regex

from .dialogues import ends_sentence, is_answer, is_question, list_turns, split_label
from .sentences import NARROWEST_COLUMN, fills_column, is_wrapped, split_sentences
from .words import split_words

__all__ = [
    "Block",
    "is_code",
    "list_blocks",
    "split_items",
    "split_pairs",
    "split_records",
    "split_rows",
]

_LEVEL = r"(?:DEBUG|TRACE|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|SEVERE)\b"
_TIME = (
    r"\d{4}[-/.]\d\d[-/.]\d\d|\d\d?[./]\d\d?[./]\d{2,4}|\d\d?:\d\d|\p{L}{3} +\d\d? \d\d:\d\d|"
    r"\d{1,3}(?:\.\d{1,3}){3}\s"
)
# A line of a log begins with a date, a time, an address or a level.
_LOG = regex.compile(rf"[\s\[(<]*(?:{_TIME}|{_LEVEL})")
_ITEM = regex.compile(r"\s*(?:(?:[-*+•‣◦▪]|\(?\d{1,3}[.)]|\(?\p{L}\))\s+\S|\d{1,3}、)")
_RULE = frozenset(" \t|:+=-")
# ```code``` on one line is code within a sentence.
_FENCE = regex.compile(r"\s*(?:(?P<mark>`{3,})[^`]*$|(?P<mark>~{3,}))")
_HEADING = regex.compile(r"\s*(?:#{1,6}\s|\*\*|__)")
_QUESTION_END = regex.compile(r"[?？؟\u037e][*_]*$")
_INDENTED = regex.compile(r"  |\t")
_MOST_LABEL_WORDS = 4
# So short a value of a field may end with a full stop, as an abbreviation does.
_MOST_VALUE_WORDS = 3
# A question that no label marks has at most so many lines of an answer.
_MOST_ANSWER_LINES = 4
_MOST_CELL_WORDS = 3
_LONGEST_CODE_LINE = 200
_KEYWORD = (
    r"(?:async|case|catch|class|def|do|elif|else|except|finally|fn|for|func|function|if|match|"
    r"private|public|static|struct|switch|try|void|while|with)\b"
)
# A line of code ends a statement, opens or closes a block, assigns, calls (with no space before the
# bracket), imports, or begins with a mark or a keyword of SQL.
_CODE = regex.compile(
    rf"""
    (?:.*(?:[{{}}]|[=(\[].*;)|\s*(?:\S+\s)?\S+;)\s*(?:(?://|\#|/\*).*)?
    | \s*@?[\w.\[\]'"]+(?:\s*,\s*[\w.]+)*(?::\s*[\w\[\], .|]+)?\s*(?:[-+*/|&%:]?=|<-)\s*\S.*
    | \s*(?:const|let|var|val|auto)\s+\w+.*=.*
    | .*[\w\])]\(.*\)\s*[:,;]?\s*(?:\#.*)?
    | \s*{_KEYWORD}.*[:({{]\s*(?:\#.*)?
    | \s*(?:import\ [\w.]+(?:\ as\ \w+)?(?:,\ [\w.]+)*|from\ [\w.]+\ import\ .*)
    | \s*(?:\#include|\#!|@\w+$|@\w+\(|</?[a-zA-Z!][^>]*>|\$\ |'''|\"\"\").*
    | \s*(?:SELECT|FROM|WHERE|INSERT\ INTO|UPDATE|JOIN|ORDER\ BY|GROUP\ BY|CREATE\ TABLE)\b.*
    """,
    regex.VERBOSE,
)


@dataclass(frozen=True)
class Block:
    """Lines of a text that belong together.

    Attributes:
        kind: "text", "dialogue", "faq", "list", "table", "record", "log" or "code".
        lines: as they stand in the text. An empty line begins each paragraph.
        introduction: of a list or a table: the sentence or heading above it; empty for none.
    """

    kind: str
    lines: tuple[str, ...]
    introduction: str = ""

    @property
    def text(self) -> str:
        """The lines as one text, without the blank ones above."""
        return "\n".join(self.lines).lstrip("\n")


def list_blocks(text: str) -> list[Block]:
    """Return the blocks of a text in their order. Each line is in one, but for marks of code.

    A dialogue may have blank lines between its turns.
    """
    text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if list_turns(lines):
        return [Block("dialogue", tuple(lines))]
    blocks: list[Block] = []
    for paragraph in _list_paragraphs(lines):
        previous = blocks[-1].kind if blocks else ""
        if _is_prose(paragraph, text):
            parts = [Block("text", tuple(paragraph))]
        else:
            parts = _split_paragraph(paragraph, previous)
        first, *others = parts
        _append(blocks, replace(first, lines=("", *first.lines)))
        for block in others:
            _append(blocks, block)
    checked: list[Block] = []
    for block in blocks:
        _append(checked, replace(block, kind=_check_kind(block)))
    return _introduce(checked, text)


def is_code(lines: Sequence[str]) -> bool:
    """Return whether half of the lines are code, by their marks or by their indentation."""
    marked = 0
    parts = 0
    for line in lines:
        is_marked = len(line) <= _LONGEST_CODE_LINE and _CODE.fullmatch(line) is not None
        marked += is_marked
        parts += is_marked or _INDENTED.match(line) is not None
    return marked > 0 and 4 * marked >= len(lines) and 2 * parts >= len(lines)


def split_rows(lines: Sequence[str]) -> list[list[str]]:
    """Return the cells of a table's rows, the header first; nothing for lines that are no table.

    Cells are separated by "|", tabs, semicolons or commas, as in Markdown, TSV and CSV. All rows
    have as many, and each column of CSV has a name. Commas with a space after them are those of
    sentences, except for three or more short cells in each of three or more rows.
    """
    lines = [line for line in lines if line.strip() and not _is_rule(line)]
    for delimiter in ("|", "\t", ";", ","):
        rows = [_split_row(line, delimiter) for line in lines]
        if _is_table(rows, delimiter):
            return rows
    return []


def split_records(lines: Sequence[str]) -> list[list[str]]:
    """Return lines "Label: value" by record; nothing for lines that are no records.

    A record begins where the first label returns. It has two or more lines, each with a label of
    its own.
    """
    records: list[list[str]] = []
    labels: list[str] = []
    for line in lines:
        label, _ = split_label(line) or ("", "")
        if not labels or label == labels[0]:
            records.append([])
            labels = []
        if label in labels:
            return []
        labels.append(label)
        records[-1].append(line)
    if any(len(record) < 2 for record in records):
        return []
    return records


def split_items(lines: Sequence[str]) -> list[list[str]]:
    """Return the lines of each item of a list; those of items inside it are part of an item."""
    items: list[list[str]] = []
    margin = 0
    for line in lines:
        indentation = len(line) - len(line.lstrip())
        if not items:
            margin = indentation
        is_item = _ITEM.match(line) is not None
        if not items or (is_item and indentation <= margin):
            items.append([line])
        elif is_item:
            items[-1].append(line)
        else:
            # A line goes on.
            items[-1][-1] += f"\n{line}"
    return items


def split_pairs(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each question of a block "faq", and the lines of its answer, as they stand."""
    pairs: list[tuple[str, list[str]]] = []
    begins = True
    for line in lines:
        if not line:
            begins = True
            continue
        asks = _asks(line) or (begins and _QUESTION_END.search(line.rstrip()) is not None)
        if not pairs or asks:
            pairs.append((line, []))
        else:
            pairs[-1][1].append(line)
        begins = False
    return pairs


def _list_paragraphs(lines: Sequence[str]) -> list[list[str]]:
    """Return the lines between blank lines; a fenced block of code is one paragraph."""
    paragraphs: list[list[str]] = [[]]
    # The mark of the fence that is open.
    opened = ""
    above = ""
    for line in lines:
        ends = bool(opened) and _closes(line, opened)
        if not opened and not _is_underline(line, above):
            opened = _find_fence(line)
            if opened:
                paragraphs.append([])
        if opened or line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
        if ends:
            paragraphs.append([])
            opened = ""
        above = "" if ends else line
    return [paragraph for paragraph in paragraphs if paragraph]


def _find_fence(line: str) -> str:
    """Return the mark of a line that begins or ends fenced code; "" for another line."""
    fence = _FENCE.match(line)
    return fence["mark"] if fence else ""


def _closes(line: str, mark: str) -> bool:
    """Return whether a line ends fenced code: as many marks of its kind as began it, or more."""
    marks = line.strip()
    return len(marks) >= len(mark) and set(marks) == {mark[0]}


def _is_underline(line: str, above: str) -> bool:
    """Return whether a line of tildes underlines the heading above it, as in reStructuredText.

    Three tildes may begin code.
    """
    tildes = line.strip()
    return set(tildes) == {"~"} and len(tildes) > 3 and 0 < len(above.strip()) <= len(tildes)


def _is_prose(lines: Sequence[str], whole: str) -> bool:
    """Return whether lines are a paragraph of a hard-wrapped text."""
    if not is_wrapped(whole) or _tell_line(lines[0]) != "text":
        return False
    return fills_column(lines) and not split_rows(lines)


def _split_paragraph(lines: list[str], previous: str) -> list[Block]:
    """Split a paragraph where the kind of its lines changes.

    Args:
        previous: the kind of the block before it.
    """
    mark = _find_fence(lines[0])
    if mark:
        is_closed = len(lines) > 1 and _closes(lines[-1], mark)
        inner = lines[1:-1] if is_closed else lines[1:]
        return [Block("code", tuple(inner))]
    is_inside = previous == "code" and all(map(_INDENTED.match, lines))
    if is_inside or is_code(lines):
        return [Block("code", tuple(lines))]
    if list_turns(lines):
        return [Block("dialogue", tuple(lines))]
    if split_rows(lines):
        return [Block("table", tuple(lines))]
    if split_rows(lines[1:]):
        return [Block("text", (lines[0],)), Block("table", tuple(lines[1:]))]
    questions = [_QUESTION_END.search(line.rstrip()) is not None for line in lines]
    if 1 < len(lines) <= _MOST_ANSWER_LINES and questions[0] and not any(questions[1:]):
        return [Block("faq", tuple(lines))]
    return _split_lines(lines)


def _split_lines(lines: Sequence[str]) -> list[Block]:
    """Split a paragraph into blocks of lines of one kind."""
    blocks: list[Block] = []
    for number, line in enumerate(lines):
        kind = _tell_line(line)
        neighbours = [*lines[number + 1 : number + 2], *lines[max(number - 1, 0) : number]]
        is_item = _ITEM.match(line) is not None
        if kind == "faq" and is_item and neighbours and all(map(_ITEM.match, neighbours)):
            # The questions of a list have no answers.
            kind = "list"
        if blocks:
            kind = _continue_kind(blocks[-1], line, kind)
        _append(blocks, Block(kind, (line,)))
    return blocks


def _tell_line(line: str) -> str:
    """Return the kind of a block that a line belongs to by its own marks."""
    if _asks(line) or is_answer(line):
        return "faq"
    if _LOG.match(line):
        return "log"
    if _ITEM.match(line):
        return "list"
    label, value = split_label(line) or ("", "")
    is_value = not ends_sentence(value) or len(split_words(value)) <= _MOST_VALUE_WORDS
    if label and is_value and len(split_words(label)) <= _MOST_LABEL_WORDS:
        return "record"
    return "text"


def _continue_kind(block: Block, line: str, kind: str) -> str:
    """Return the kind of a line after a block of its paragraph."""
    before = block.lines[-1]
    if block.kind == "faq":
        is_marked = is_question(block.lines[0])
        return "faq" if is_marked or kind in ("text", "record") else kind
    if block.kind in ("list", "log") and kind == "text":
        is_cut = len(before) >= NARROWEST_COLUMN and not ends_sentence(before)
        return block.kind if is_cut or _INDENTED.match(line) else kind
    return kind


def _append(blocks: list[Block], block: Block) -> None:
    """Append a block, or join it with the last one where both are parts of one."""
    if blocks:
        last = blocks[-1]
        joins = last.kind == block.kind and last.kind not in ("dialogue", "table", "record")
        if last.kind == block.kind == "record" and block.lines[0]:
            joins = True
        # A question may have a blank line below.
        is_answer_apart = last.kind == "faq" and block.kind == "text" and _asks(last.lines[-1])
        if is_answer_apart and len(block.lines) <= _MOST_ANSWER_LINES:
            joins = True
        if joins:
            blocks[-1] = replace(last, lines=(*last.lines, *block.lines))
            return
    blocks.append(block)


def _check_kind(block: Block) -> str:
    """Return the kind of a block; "text" for lines that only look like its kind."""
    lines = [line for line in block.lines if line]
    items = sum(_ITEM.match(line) is not None for line in lines)
    is_kind = True
    if block.kind == "log":
        is_kind = len(lines) > 1
    elif block.kind == "record":
        is_kind = bool(split_records(lines))
    elif block.kind == "list":
        # Lines of prose, such as those after a formula, can begin with a number and a bracket.
        loose = sum(not (_ITEM.match(line) or _INDENTED.match(line)) for line in lines)
        is_kind = items > 1 and loose <= items
    elif block.kind == "faq":
        pairs = split_pairs(block.lines)
        is_kind = 2 * sum(bool(answer) for _, answer in pairs) >= len(pairs)
        if not is_kind and items > 1:
            return "list"
    return block.kind if is_kind else "text"


def _introduce(blocks: Sequence[Block], whole: str) -> list[Block]:
    """Give lists and tables the sentence or heading above them, and take it from its text."""
    introduced: list[Block] = []
    for block in blocks:
        if block.kind in ("list", "table") and introduced and introduced[-1].kind == "text":
            text = introduced[-1].text
            sentence = _find_introduction(text, whole, is_apart=not block.lines[0])
            if sentence:
                rest = text[: text.rindex(sentence)].rstrip()
                introduced.pop()
                if rest:
                    introduced.append(Block("text", tuple(rest.split("\n"))))
                block = replace(block, introduction=" ".join(sentence.lstrip("# ").split()))
        introduced.append(block)
    return introduced


def _find_introduction(text: str, whole: str, is_apart: bool) -> str:
    """Return the last sentence of a text where it introduces what follows; else ""."""
    sentences = split_sentences(text, whole)
    if not sentences:
        return ""
    last = sentences[-1]
    introduces = last.endswith((":", "：")) or _HEADING.match(last) is not None
    if not is_apart and not ends_sentence(last):
        introduces = True
    return last if introduces else ""


def _asks(line: str) -> bool:
    """Return whether a line is a question by its label, or as an item or a heading."""
    if is_question(line):
        return True
    is_marked = _ITEM.match(line) is not None or _HEADING.match(line) is not None
    return is_marked and _QUESTION_END.search(line.rstrip()) is not None


def _is_rule(line: str) -> bool:
    """Return whether a line is the rule below the header of a Markdown table."""
    return "-" in line and _RULE.issuperset(line)


def _split_row(line: str, delimiter: str) -> list[str]:
    if delimiter == "|":
        cells = line.strip().removeprefix("|").removesuffix("|").split("|")
    else:
        try:
            cells = next(csv.reader([line], delimiter=delimiter))
        except (csv.Error, StopIteration):
            # The line is too long for a row.
            cells = [line]
    return cells


def _is_table(rows: Sequence[Sequence[str]], delimiter: str) -> bool:
    columns = len(rows[0]) if rows else 0
    if len(rows) < 2 or columns < 2 or any(len(row) != columns for row in rows):
        return False
    header = rows[0]
    if delimiter == "|":
        return any(cell.strip() for cell in header)
    if not all(regex.match(r"\s*[\p{L}_]", cell) for cell in header):
        return False
    if delimiter == "\t":
        return True
    if any(map(ends_sentence, header)):
        return False
    cells = [cell for row in rows for cell in row]
    if not any(cell.startswith(" ") for cell in cells):
        return True
    words = sum(len(split_words(cell)) for cell in cells)
    return min(columns, len(rows)) >= 3 and words <= _MOST_CELL_WORDS * len(cells)
