"""Reports: the tables of protocols' figures."""

import json

import pytest

from locas_peft.evaluation import tabulate_figures


def test_a_missing_figure_is_a_dash():
    found = {
        "perplexity": None,
        "perplexity_at": {"1000": None},
        "perplexity_between": {},
        "curve": [[1000, None]],
    }
    figures = {
        "study": "perplexity",
        "documents": {"book": {}},
        "readings": {"lora": {"book": found}},
        "means": {"lora": {"perplexity": 31.25}},
    }
    first, second = tabulate_figures(figures)
    assert (first.headers, first.rows) == (["", "book", "all tokens"], [["lora", "-", "31.25"]])
    assert (second.title, second.rows) == ("book: perplexity so far, at", [["lora", "-"]])


def test_folders_without_figures_are_refused(write_report, tmp_path):
    with pytest.raises(ValueError, match="folders must hold figures of locas eval, got none in "):
        write_report([tmp_path], tmp_path / "report.md")
    assert list(tmp_path.iterdir()) == []


def test_a_report_has_the_tables_in_markdown(write_report, tmp_path):
    found = {
        "perplexity": 31.25,
        "perplexity_at": {},
        "perplexity_between": {},
        "curve": [[1000, 31.25]],
    }
    figures = {
        "study": "perplexity",
        "documents": {"a|b": {}},
        "methods": {},
        "readings": {"lora": {"a|b": found}},
    }
    figures["means"] = {"lora": {"perplexity": 31.25}}
    (tmp_path / "perplexity.json").write_text(json.dumps(figures))
    text = write_report([tmp_path], tmp_path / "report.md")[0].read_text()
    assert (
        "scored before it was learned**\n\n|  | a/b | all tokens |\n|---|---:|---:|\n| lora | 31.25 |"
        in text
    )
