"""The PG-19 benchmark: results are kept and continued, tables are made of the folder, ratios are what they claim."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from locas_peft import backbone, text
from locas_peft.stages import ReadSettings, complete, score

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = ["--window", "32", "--stride", "16"]


@pytest.fixture
def pg19(monkeypatch):
    """Return the script as a module; the modules of its folder are removed afterwards."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("pg19")
    torch.set_num_threads(threads)
    for name in ("pg19", "pg19_rows", "pg19_report", "pg19_timing", "measuring"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Make a folder of short texts under the names of the benchmark's books."""
    folder = tmp_path_factory.mktemp("books")
    reference = text.python_reference()
    for number, name in enumerate(["1684", "2118", "3649", "36235", "5274"]):
        (folder / f"{name}.txt").write_text(
            reference[5000 * number : 5000 * number + 3000], encoding="utf-8"
        )
    return folder


@pytest.fixture
def call(pg19, books, tmp_path, capsys):
    """Run the command on the books; return its JSON, its stdout and its stderr."""

    def run(*arguments):
        pg19.main(["--books", str(books), "--out", str(tmp_path / "out"), *SMALL, *arguments])
        printed = capsys.readouterr()
        return json.loads(printed.out.splitlines()[-1]), printed.out, printed.err

    return run


@pytest.fixture
def fail(call, capsys):
    """Run a command that must fail; return its one-line error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as raised:
            call(*arguments)
        capsys.readouterr()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return run


HEADLINE = ["--table", "headline", "--rows", "none, cache,locas-glu@16", "--tokens", "80"]


def test_readings_are_kept_and_the_table_is_made_from_the_folder(call, pg19, tmp_path, monkeypatch):
    summary, printed, _ = call(*HEADLINE, "--documents", "3649,1684")
    shared, readings = (summary["tables"]["headline"][key] for key in ("shared", "readings"))
    assert [(value["row"], value["document"]) for value in readings] == [
        ("none, cache", "3649"),
        ("none, cache", "1684"),
        ("locas-glu@16", "3649"),
        ("locas-glu@16", "1684"),
    ]
    assert (shared["scored_tokens"], shared["window"], shared["stride"]) == (79, 32, 16)
    assert (
        readings[0]["adapter_bytes"]
        == 0
        < 4 * readings[2]["extra_parameters"]
        <= readings[2]["adapter_bytes"]
    )
    assert "| row | rate | parameters | 3649 | 1684 | mean of 3649 |" in printed
    assert json.loads((tmp_path / "out" / "pg19.json").read_text())["tables"] == summary["tables"]
    assert (tmp_path / "out" / "pg19.md").read_text().strip() in printed

    monkeypatch.setattr(pg19, "read", None)  # nothing is left to be read
    again, _, progress = call(*HEADLINE, "--documents", "3649,1684")
    assert again["tables"] == summary["tables"] and progress == ""
    collected, _, _ = call("--table", "headline", "--tokens", "80", "--collect")
    assert collected["tables"] == summary["tables"]


def test_results_of_an_older_version_are_used(call, tmp_path):
    row = ["--table", "width", "--rows", "locas-glu@4", "--tokens", "80"]
    call(*row)
    path = tmp_path / "out" / "readings" / "3649" / "locas-glu@4-seed0-80.json"
    value = json.loads(path.read_text())
    for name in ("readings", "warmup_steps"):
        del value[name]
    path.write_text(json.dumps({**value, "anchor": None}))
    summary, _, progress = call(*row)
    (table,) = summary["tables"].values()
    assert progress == "" and table["readings"][0]["perplexity"] == value["perplexity"]


def test_times_without_their_memory_are_shown(pg19, tmp_path, monkeypatch, call, fail):
    def fill(*rest):
        raise OSError("full")

    monkeypatch.setattr(sys.modules["pg19_timing"], "measure_memory", fill)
    assert fail("--table", "timing", "--timing-tokens", "448", "--rows", "none") == "pg19: full"
    summary, _, _ = call("--table", "timing", "--collect")
    assert summary["tables"]["timing"]["markdown"].endswith("| - | - |")


def test_rows_beyond_the_models_positions_are_left_out_and_named(pg19, capsys):
    rows = sys.modules["pg19_rows"]
    common = ReadSettings(method="none", window=1024)
    kept = pg19.keep_what_fits(backbone.load()[0], rows.TABLES["headline"].rows, common)
    assert {row.name for row in rows.TABLES["headline"].rows} - {row.name for row in kept} == {
        rows.LONG.name
    }
    assert (
        capsys.readouterr().err == "left out: long, 4 windows, beyond the model's 2,048 positions\n"
    )


def test_operations_are_counted_over_a_whole_cycle_of_the_cache(pg19):
    timing, base = sys.modules["pg19_timing"], backbone.load()[0]

    def count(method="none", window=512, stride=256, context="cache", **given):
        settings = ReadSettings(
            method=method, window=window, stride=stride, context=context, **given
        )
        return timing.count_chunks(base, complete(settings))

    assert count() == 3  # 255 + 3 * 256 = 1,023 of 1,024 positions
    assert count(context="recompute") == 1
    assert count("locas-glu", anchor=0.3, anchor_every=4) == 12
    assert count(window=2048) == 1  # the model's positions end before two windows
    assert count(window=32, stride=16) == 3


def test_a_folder_of_other_settings_or_texts_is_refused(call, fail, pg19, books, tmp_path, capsys):
    row = ["--table", "width", "--rows", "none", "--tokens", "80"]
    call(*row)
    path = tmp_path / "out" / "readings" / "3649" / "none_cache-seed0-80.json"
    expected = f"pg19: stride must be 16 as in {str(path)!r}, got 8: choose another --out, or delete that file"
    assert fail(*row, "--stride", "8") == expected
    other = tmp_path / "3649.txt"
    other.write_text((books / "5274.txt").read_text(), encoding="utf-8")
    with pytest.raises(SystemExit) as raised:
        pg19.main(["--books", str(other), "--out", str(tmp_path / "out"), *SMALL, *row])
    assert (
        str(raised.value)
        == f"pg19: {str(path)!r} is of another text named '3649': choose another --out"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--documents", "1"],
            "--documents must be among 1684, 2118, 36235, 3649, 5274, got '1': check the name",
        ),
        (
            ["--table", "width", "--rows", "x"],
            "--rows must be beginnings of names, got 'x': choose among none, ",
        ),
        (
            ["--table", "timing", "--timing-tokens", "300"],
            "--timing-tokens must be at least 512 for these windows, ",
        ),
    ],
)
def test_mistakes_are_one_line(fail, arguments, message):
    assert fail(*arguments).startswith(f"pg19: {message}")


def test_books_that_a_table_needs_are_asked_for(pg19, books, tmp_path):
    def complain(*arguments):
        with pytest.raises(SystemExit) as raised:
            pg19.main([*arguments, "--out", str(tmp_path), "--tokens", "80"])
        return str(raised.value)

    training, read = str(books / "2118.txt"), str(books / "1684.txt")
    assert (
        complain()
        == "pg19: --books must name text files or folders of them, got none: give it, or --dataset"
    )
    assert complain("--books", training, "--table", "width") == (
        "pg19: --books must hold one of 3649 for this table, got 2118: add it"
    )
    assert complain("--books", read, "--table", "curves") == (
        "pg19: --books must hold '5274', which is left unread in --table curves: add the file"
    )


def test_any_texts_will_do(pg19, books, tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text((books / "5274.txt").read_text(), encoding="utf-8")
    pg19.main(
        [
            "--books",
            str(mine),
            "--out",
            str(tmp_path / "out"),
            *SMALL,
            "--rows",
            "none",
            "--tokens",
            "80",
        ]
    )
    (table,) = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"].values()
    assert (table["shared"]["document"], len(table["readings"])) == ("mine", 2)


def test_forgetting_is_the_rise_on_unread_books(call, pg19):
    rows = ["--rows", "none,lora@8, lr 0.001", "--tokens", "200"]
    summary, printed, _ = call("--table", "curves", *rows)
    table = summary["tables"]["curves"]
    before, after = table["readings"]
    assert before["unread"].keys() == after["unread"].keys() == {"5274", "36235"}
    assert table["shared"]["unread_tokens"] == 20
    mean = [sum(value["unread"].values()) / 2 for value in (before, after)]
    assert mean[0] != mean[1]
    assert f"| {mean[1]:.2f} | {mean[1] - mean[0]:+.2f} |" in printed


def test_the_sweep_marks_the_rate_that_ends_best_in_each_group(pg19):
    report = sys.modules["pg19_report"]
    values = {
        "lora@16, lr 0.001": (8.0, 9.0),
        "lora@16, lr 0.002": (9.0, 8.0),
        "locas-glu@16, lr 0.001": (8.5, 8.5),
    }
    readings = []
    for name, (whole, last) in values.items():
        value = {"perplexity": whole, "perplexity_between": {"0-60": 7.0, "60-80": last}}
        readings.append(
            {**value, "row": name, "document": "1684", "extra_parameters": 5, "tokens_read": 80}
        )
    table = report.to_markdown("sweep", readings).splitlines()
    assert table[0] == "| row | parameters | 1684, first 80 | 1684, tokens 60-80 |"
    assert table[2:] == [
        "| lora@16, lr 0.001 | 5 | 8.000 | 9.000 |",
        "| lora@16, lr 0.002 | 5 | 9.000 | **8.000** |",
        "| locas-glu@16, lr 0.001 | 5 | 8.500 | **8.500** |",
    ]


def test_the_mean_over_documents_is_weighted_by_tokens(pg19):
    report = sys.modules["pg19_report"]

    def reading(document, perplexity, nll_nats, tokens):
        value = {
            "perplexity": perplexity,
            "nll_nats": nll_nats,
            "scored_tokens": tokens,
            "tokens_read": tokens + 1,
        }
        value |= {
            "learning_rate": None,
            "extra_parameters": 0,
            "perplexity_at": {},
            "perplexity_between": {},
        }
        return {**value, "row": "none, cache", "document": document}

    table = report.to_markdown(
        "headline", [reading("3649", 2.0, 300.0, 100), reading("5274", 3.0, 100.0, 300)]
    )
    assert table.splitlines()[2] == "| none, cache | - | 0 | 2.00 | 3.00 | 2.72 |"  # exp(400 / 400)


def test_rows_are_read_with_the_settings_that_they_name(pg19):
    rows = sys.modules["pg19_rows"]
    common = ReadSettings(method="none", window=64, stride=16)
    found = {
        row.name: row.settings(common, seed=2, max_tokens=80)
        for row in rows.TABLES["headline"].rows
    }
    assert len(found) == len(rows.TABLES["headline"].rows)
    assert all(
        (value.stride, value.max_tokens, value.seed) == (16, 80, 2) for value in found.values()
    )
    assert found["long, 4 windows"].window == 256
    assert [found[name].context for name in ("none, recompute", "none, cache")] == [
        "recompute",
        "cache",
    ]
    published = found["lora@64, recompute"]
    assert (published.context, published.r) == ("recompute", 64)
    assert found["locas-glu@64, upper layers"].layers_to_transform == "upper"
    assert [found[name].scaling for name in ("locas-glu@64, paper", "locas-glu@64")] == [
        1.0,
        64.0,
    ]


def test_frozen_rates_follow_their_rule_from_the_sweep(pg19):
    rates = sys.modules["pg19_rows"].RATES
    results = json.loads((FOLDER / "results" / "pg19.json").read_text(encoding="utf-8"))["tables"][
        "sweep"
    ]
    swept: dict[str, list[tuple[float, float]]] = {}
    for reading in results["readings"]:
        row, _, rate = reading["row"].rpartition(", lr ")
        if row:
            swept.setdefault(row, []).append(
                (list(reading["perplexity_between"].values())[-1], float(rate))
            )
    best = {row: min(found)[1] for row, found in swept.items()}
    assert {
        "lora@16",
        "lora@64",
        "locas-glu@16",
        "locas-glu@64",
        "locas-glu@64, paper",
    } <= best.keys()
    for row in best.keys() & rates.keys():
        assert rates[row] == (best[row] / 2 if row.startswith("locas") else best[row]), row
        assert (
            min(rate for _, rate in swept[row]) < best[row] < max(rate for _, rate in swept[row])
        ), row


def test_shapes_are_timed_and_their_operations_counted(pg19, tmp_path, monkeypatch, capsys):
    timing, measuring = sys.modules["pg19_timing"], sys.modules["measuring"]

    def in_this_process(load, rows, common, ids):
        return {row.name: timing.measure_row(load, row.settings(common), ids[:96]) for row in rows}

    monkeypatch.setattr(timing, "measure_memory", in_this_process)
    arguments = ["--shapes", "tiny", "--window", "32", "--stride", "16", "--out", str(tmp_path)]
    pg19.main(
        [*arguments, "--timing-tokens", "448", "--rows", "none,locas-glu@16,locas-glu@64, anchor"]
    )
    (value,) = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"].values()
    measured = {row["row"]: row for row in value["rows"]}
    recompute, cache, locas = (
        measured[name] for name in ("none, recompute", "none, cache", "locas-glu@16")
    )
    assert (
        recompute["relative_time"]["none, recompute"]
        == recompute["relative_operations"]["none, recompute"]
        == 1
    )
    assert locas["extra_parameters"] == 2 * 16 * 3 * 64
    assert locas["adapter_bytes"] > 4 * locas["extra_parameters"]
    assert locas["peak_bytes"] >= locas["peak_bytes_early"] >= 0

    # Three cached chunks of 16 tokens; 15 tokens of context are fed again before the first of them. Then the cache
    # holds these 15 tokens, and after that 4 sinks and 15 tokens.
    shape = measuring.SHAPES["tiny"]
    hidden, width, layers = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_hidden_layers"],
    )
    projections = hidden * 16 * (4 + 2 + 2 + 4) + 3 * hidden * width
    attention = 2 * 2 * 4 * 16 * (15 * 15 + 16 * (15 + 16) + 2 * 16 * (4 + 15 + 16))
    tokens = 15 + 3 * 16
    expected = (
        layers * (2 * tokens * projections + attention)
        + 2 * (1 + 3 * 16) * hidden * shape["vocab_size"]
    )
    assert cache["operations_a_token"] * 3 * 16 == expected
    # A backward pass costs at most two forward passes, and less since the first layer has inputs without gradients.
    assert 1.5 < locas["relative_operations"]["none, cache"] < 3
    # Random weights can generate the anchor's text too.
    assert measured["locas-glu@64, anchor 0.3, lr 0.004"]["tokens_per_second"] > 0
    assert "| locas-glu@16 | 6,144 |" in (tmp_path / "pg19-shapes.md").read_text()


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_their_own(pg19, books, tmp_path):
    rows, timing = sys.modules["pg19_rows"], sys.modules["pg19_timing"]
    load = partial(sys.modules["measuring"].load_shape, "tiny", "float32", "cpu")
    ids = torch.randint(0, 512, (400,), generator=torch.Generator().manual_seed(0))
    common = ReadSettings(method="none", window=32, stride=16)
    found = timing.measure_memory(load, [rows.NONE, rows.lora(64)], common, ids)
    assert found["lora@64"]["peak_bytes"] > found["none, cache"]["peak_bytes"] >= 0


def test_the_first_block_is_one_table_of_the_command(call, fail, books, tmp_path):
    block = ["--table", "first-block", "--rows", "none,TempLoRA", "--tokens", "100"]
    summary, printed, _ = call(*block)
    table = summary["tables"]["first-block"]
    assert [row["row"] for row in table["results"]] == [
        "none",
        "none, window x2",
        "none, cached",
        "TempLoRA",
    ]
    assert all(row["tokens"] == 100 for row in table["results"])
    base, tokenizer = backbone.load(name=backbone.MLP_NAME)
    ids = text.tokenize(
        tokenizer, text.unwrap((books / "3649.txt").read_text(encoding="utf-8")), 100
    )
    settings = complete(ReadSettings(method="none", window=32, stride=16, context="cache"))
    expected = score(base.requires_grad_(False), ids, settings)
    assert table["results"][2]["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert [row["extra_parameters"] for row in table["results"]] == [0, 0, 0, 1_572_864]
    assert "| none | - |" in printed
    path = tmp_path / "out" / "first-block.json"
    assert fail(*block[:-1], "90") == (
        f"pg19: tokens must be 100 as in {str(path)!r}, got 90: choose another --out, or delete that file"
    )


def test_plots_are_drawn_of_what_was_read(call, tmp_path):
    call(
        "--table",
        "headline,width,curves",
        "--rows",
        "none,locas-glu@64",
        "--quick",
        "--tokens",
        "60",
        "--plot",
    )
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"perplexity-3649.png", "perplexity-parameters.png", "gain-forgetting.png"}
