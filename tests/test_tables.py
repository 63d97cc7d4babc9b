"""Tables: texts are kept as they are, on the terminal and in Markdown."""

from __future__ import annotations

import io

from rich.console import Console

from locas_peft.memories.inspection import tabulate_memory
from locas_peft.tables import Sheet


def render(sheet) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=200).print(sheet.to_rich())
    rows = [line for line in stream.getvalue().splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row.replace("┃", "│").strip("│").split("│")] for row in rows]


def test_the_memory_table_has_a_row_for_each_ffn():
    norms = {"mean": 0.5, "max": 1.0}
    layer = {"name": "layers.0.mlp", "r": 8, "tau": 0.025, "gate": norms, "up": norms, "down": norms}
    layers = [{**layer, "slots": [3, 1, 2, 9, 8, 7]}, {**layer, "name": "layers.1.mlp", "gate": None, "slots": None}]
    rows = render(tabulate_memory({"layers": layers}))
    assert rows[1] == ["layers.0.mlp", "8", "0.025", *["0.500", "1.000"] * 3, "3, 1, 2, ... (6)"]
    assert rows[2] == ["layers.1.mlp", "8", "0.025", "-", "-", *["0.500", "1.000"] * 2, "-"]


def test_markup_in_texts_is_not_interpreted():
    sheet = Sheet("a [bold]title[/draft]", ["[b]", "x"], [["notes[/draft]", ":smile:"], ["b|c", "2"]], best=(1, 1))
    assert render(sheet) == [["[b]", "x"], ["notes[/draft]", ":smile:"], ["b|c", "2"]]
    assert sheet.to_markdown() == (
        "**a [bold]title[/draft]**\n\n| [b] | x |\n|---|---:|\n| notes[/draft] | :smile: |\n| b/c | 2 |"
    )
