"""Reports: tables of readings, memories and studies, plots that are whole files."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest
from rich.console import Console

from locas_peft import report
from locas_peft.reading.record import Reading
from locas_peft.reading.settings import ReadingSettings


def make_reading(method: str, perplexity: float, seconds: float, tokens: int = 2500) -> Reading:
    return Reading(
        settings=ReadingSettings(method=method).complete(),
        text_sha256="0",
        scored_tokens=tokens - 1,
        nll_nats=1.0,
        perplexity=perplexity,
        perplexity_at={"1000": perplexity + 2, "2000": perplexity + 1},
        curve=[(stop, perplexity + 3 - 3 * stop / tokens) for stop in range(250, tokens + 1, 250)],
        extra_parameters=0 if method == "none" else 294_912,
        seconds=seconds,
        peak_bytes=1,
    )


def render(sheet) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=200).print(sheet.to_rich())
    rows = [line for line in stream.getvalue().splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row.replace("┃", "│").strip("│").split("│")] for row in rows]


def test_the_table_compares_with_none():
    rows = render(report.tabulate_readings([make_reading("none", 40.0, 2.0), make_reading("locas-glu", 30.0, 5.0)]))
    assert rows == [
        ["method", "r", "parameters", "ppl at 1K", "ppl at 2K", "perplexity", "time", "tokens/s"],
        ["none", "-", "0", "42.00", "41.00", "40.00", "1.00x", "1,250"],
        ["locas-glu", "64", "294,912", "32.00", "31.00", "30.00", "2.50x", "500"],
    ]


def test_without_none_times_are_in_seconds():
    assert render(report.tabulate_readings([make_reading("lora", 30.0, 5.0)]))[1][-2:] == ["5.0 s", "500"]


def test_a_mark_at_the_end_is_not_repeated():
    (header, row) = render(report.tabulate_readings([make_reading("lora", 30.0, 5.0, tokens=2000)]))
    assert header[3:5] == ["ppl at 1K", "perplexity"]
    assert len(row) == len(header)


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    report.plot_readings([make_reading("none", 40.0, 2.0), make_reading("locas-glu", 30.0, 5.0)], path, title="a text")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert list(tmp_path.iterdir()) == [path]


def test_a_plot_survives_overflow(tmp_path):
    pytest.importorskip("matplotlib")
    broken = dataclasses.replace(make_reading("lora", 30.0, 5.0), curve=[(250, float("inf")), (500, float("nan"))])
    report.plot_readings([broken], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_without_matplotlib_the_message_names_the_remedy(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = "matplotlib must be installed for plots: pip install matplotlib (or the extra 'plot' of locas_peft)"
    with pytest.raises(ModuleNotFoundError) as raised:
        report.plot_readings([make_reading("none", 40.0, 2.0)], tmp_path / "plot.png")
    assert str(raised.value) == message
    assert list(tmp_path.iterdir()) == []


def test_the_memory_table_has_a_row_for_each_ffn():
    norms = {"mean": 0.5, "max": 1.0}
    layer = {"name": "layers.0.mlp", "r": 8, "tau": 0.025, "gate": norms, "up": norms, "down": norms}
    layers = [{**layer, "slots": [3, 1, 2, 9, 8, 7]}, {**layer, "name": "layers.1.mlp", "gate": None, "slots": None}]
    rows = render(report.tabulate_memory({"layers": layers}))
    assert rows[1] == ["layers.0.mlp", "8", "0.025", *["0.500", "1.000"] * 3, "3, 1, 2, ... (6)"]
    assert rows[2] == ["layers.1.mlp", "8", "0.025", "-", "-", *["0.500", "1.000"] * 2, "-"]


def test_markup_in_texts_is_not_interpreted():
    sheet = report.Sheet(
        "a [bold]title[/draft]", ["[b]", "x"], [["notes[/draft]", ":smile:"], ["b|c", "2"]], best=(1, 1)
    )
    assert render(sheet) == [["[b]", "x"], ["notes[/draft]", ":smile:"], ["b|c", "2"]]
    assert sheet.to_markdown() == (
        "**a [bold]title[/draft]**\n\n| [b] | x |\n|---|---:|\n| notes[/draft] | :smile: |\n| b/c | 2 |"
    )


def test_a_missing_figure_is_a_dash():
    found = {"perplexity": None, "perplexity_at": {"1000": None}, "perplexity_between": {}, "curve": [[1000, None]]}
    figures = {
        "study": "perplexity",
        "documents": {"book": {}},
        "readings": {"lora": {"book": found}},
        "means": {"lora": {"perplexity": 31.25}},
    }
    first, second = report.tabulate_study(figures)
    assert (first.headers, first.rows) == (["", "book", "all tokens"], [["lora", "-", "31.25"]])
    assert (second.title, second.rows) == ("book: perplexity so far, at", [["lora", "-"]])
