"""Reports: the tables of protocols' figures."""

from __future__ import annotations

import pytest

from locas_peft.evaluation import tabulate_figures
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.files import write_json


def test_a_missing_figure_is_a_dash():
    found = {"perplexity": None, "perplexity_at": {"1000": None}, "perplexity_between": {}, "curve": [[1000, None]]}
    figures = {
        "study": "perplexity",
        "documents": {"book": {}},
        "readings": {"lora": {"book": found}},
        "means": {"lora": {"perplexity": 31.25}},
    }
    first, second = tabulate_figures(figures)
    assert (first.headers, first.rows) == (["", "book", "all tokens"], [["lora", "-", "31.25"]])
    assert (second.title, second.rows) == ("book: perplexity so far, at", [["lora", "-"]])


def test_a_cloze_without_spans_has_no_plot(write_report, tmp_path):
    keys = ("gain_right", "gain_wrong", "right_minus_wrong", "first_right", "first_wrong")
    found = {key: mean_interval([]) for key in keys}
    cloze = {"spans": 0, "base": {"first": mean_interval([])}, "methods": {"lora": found}, "differences": []}
    write_json(tmp_path / "locomo.json", {"study": "locomo", "methods": {}, "answers": {}, "cloze": cloze})
    assert write_report([tmp_path], tmp_path / "report.md") == [tmp_path / "report.md"]
    assert "| lora | - | - | - | - | - |" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_folders_without_figures_are_refused(write_report, tmp_path):
    with pytest.raises(ValueError, match="folders must hold figures of locas eval, got none in "):
        write_report([tmp_path], tmp_path / "report.md")
    assert list(tmp_path.iterdir()) == []
