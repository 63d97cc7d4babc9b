"""Tables: texts are kept as they are, on the terminal and in Markdown."""

import io

import pytest
from rich.console import Console

from locas_peft.memories.loading import tabulate_memory
from locas_peft.tables import Sheet


def render(sheet, width: int = 200) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(sheet.to_rich())
    rows = [line for line in stream.getvalue().splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row.replace("┃", "│").strip("│").split("│")] for row in rows]


def test_the_memory_table_has_a_row_for_each_ffn():
    norms = {"mean": 0.5, "max": 1.0}
    layer = {
        "name": "layers.0.mlp",
        "r": 8,
        "tau": 0.025,
        "gate": norms,
        "up": norms,
        "down": norms,
    }
    layers = [
        {**layer, "slots": [3, 1, 2, 9, 8, 7]},
        {**layer, "name": "layers.1.mlp", "gate": None, "slots": None},
    ]
    sheet = tabulate_memory({"layers": layers})
    assert sheet.title.startswith("layers.*.mlp   (gate, up, down: mean norm")
    assert render(sheet)[1:] == [
        ["0", "8", "0.025", "0.500", "0.500", "0.500", "1.000", "3, 1, ..."],
        ["1", "8", "0.025", "-", "0.500", "0.500", "1.000", "-"],
    ]
    wide = {**layer, "r": 1024, "tau": 1.2345e-5, "slots": [12345] * 9}
    layers = [
        {**wide, "name": f"model.language_model.layers.{index}.mlp"} for index in range(100, 130)
    ]
    lines = render(tabulate_memory({"layers": layers}), width=80)
    assert [row[0] for row in lines[1:]] == [str(index) for index in range(100, 130)], "a line each"


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["a.b"], "a.b"),
        (["a", "a.b"], "a"),
        (["a.0.x", "b.0.y"], "a.0.x"),
        (["x.1.a.0", "x.2.a.3"], "1.0"),
    ],
)
def test_names_of_ffns_keep_what_they_do_not_share(names, first):
    layer = dict.fromkeys(("tau", "gate", "up", "down", "slots"))
    rows = render(tabulate_memory({"layers": [{**layer, "name": name, "r": 1} for name in names]}))
    assert rows[1][0] == first


def test_markup_in_texts_is_not_interpreted():
    sheet = Sheet(
        "a [bold]title[/draft]",
        ["[b]", "x"],
        [["notes[/draft]", ":smile:"], ["b|c", "2"]],
        best=(1, 1),
    )
    assert render(sheet) == [["[b]", "x"], ["notes[/draft]", ":smile:"], ["b|c", "2"]]
