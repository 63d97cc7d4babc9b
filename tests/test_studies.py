"""The studies and `locas eval`: the files that they write, and how they continue after an interruption."""

import json
import math
import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from locomo_data import make_sample, make_samples, write_samples
from peft import PeftModel

from locas_command import program as cli
from locas_peft import backbone
from locas_peft.asking.prompts import encode_answer
from locas_peft.evaluation import (
    Unit,
    drift,
    load_column,
    load_documents,
    load_locomo,
    perplexity,
    runs,
    units,
)
from locas_peft.evaluation.f1 import answer_f1, load_stemmer
from locas_peft.evaluation.prompts import make_prompts
from locas_peft.evaluation.runs import Run
from locas_peft.exchanges import EXCHANGES, writing
from locas_peft.files import write_json
from locas_peft.memories import memory_attached
from locas_peft.progress import follow_steps
from locas_peft.stages import ReadSettings, complete, score
from locas_peft.text import tokenize
from locas_peft.ttt.chunks import Chunk

FAST = ["--window", "32", "--stride", "16", "--r", "4", "--device", "cpu"]
BOOK = "\n\n".join(
    f"The {word} of the house was old, and nobody went there."
    for word in ("door", "roof", "garden")
)
RECORD = {"sample_id", "question", "category", "answer", "prediction", "f1"}


@pytest.fixture(scope="module")
def embedded():
    return backbone.load()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `locas eval`, with words in one text or several; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path, make_samples())
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    (tmp_path / "other.txt").write_text(
        "He came from the sea and said nothing of it to her.", encoding="utf-8"
    )

    def call(command: str, *args) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["eval", *command.split(), *map(str, args)])
        return ended.value.code, *capsys.readouterr()

    return call


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def locomo_run(tmp_path_factory):
    """One run of the LoCoMo study that several tests look at."""
    folder = tmp_path_factory.mktemp("locomo")
    data = write_samples(folder, make_samples())
    args = ["eval", "locomo", str(data), "--out", str(folder / "out"), "--max-new-tokens", "2"]
    args += [*FAST, "--anchor", "0", "--setting", "no-context,evidence"]
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 0
    return folder, args


def test_locomo_writes_every_prediction_for_other_scorers(locomo_run):
    folder, _ = locomo_run
    files = list((folder / "out/locomo").rglob("*.memory-*.json"))
    # 2 conversations x (base + 2 methods with the right and the wrong memory) x 2 settings
    assert len(files) == 2 * (1 + 2 * 2) * 2
    for path in files:
        records = read(path)
        assert len(records) == 6
        for record in records:
            assert record.keys() >= RECORD
            f1 = answer_f1(record["prediction"], record["answer"], record["category"])
            assert record["f1"] == f1
    answers = read(folder / "out/locomo.json")["answers"]
    assert answers.keys() == {"none", "lora", "locas-glu"}
    assert answers["none"].keys() == {"no-context", "evidence"}
    # Without the adversarial ones.
    assert answers["none"]["evidence"]["none"]["gold_nats"]["n"] == 10
    assert answers["lora"]["no-context"].keys() == {"right", "wrong"}
    assert answers["lora"]["no-context"]["right"]["adversarial"]["n"] == 2


def test_gold_nats_are_those_of_the_gold_answer_after_the_prompt(locomo_run, embedded):
    folder, _ = locomo_run
    base, tokenizer = embedded
    talk = load_locomo(folder / "talks.json")[0][0]
    gold = torch.tensor(encode_answer(tokenizer, talk.questions[3].answer))
    for setting in ("no-context", "evidence"):
        prompts, _ = make_prompts(base, tokenizer, talk, setting)
        ids = torch.tensor([[*prompts[3], *gold]])
        with torch.no_grad():
            logits = base(ids).logits[0, -len(gold) - 1 : -1]
        expected = torch.nn.functional.cross_entropy(logits, gold).item()
        record = read(folder / f"out/locomo/predictions/none/talk-1.{setting}.memory-none.json")[3]
        assert record["gold_nats"] == pytest.approx(expected, rel=1e-4)


def test_predictions_come_from_the_seed_and_a_broken_run_goes_on(locomo_run, tmp_path):
    folder, args = locomo_run
    again = tmp_path / "again"
    shutil.copytree(folder / "out", again)
    protocol = again / "locomo"
    lost = protocol / "predictions/locas-glu/talk-1.no-context.memory-talk-1.json"
    expected = lost.read_bytes()
    lost.unlink()
    lost.with_suffix(".unfinished").write_text(json.dumps(json.loads(expected)[:2]))
    shutil.rmtree(protocol / "memories/lora")
    made = protocol / "memories/locas-glu/talk-2.json"
    made.unlink()  # stopped between a memory and its result
    kept = [
        protocol / "predictions/none/talk-1.no-context.memory-none.json",
        made.with_suffix("") / "adapter_model.safetensors",
    ]
    stamps = [path.stat().st_mtime_ns for path in kept]
    before = read(again / "locomo.json")
    with pytest.raises(SystemExit) as ended:
        cli.main([str(again) if arg == str(folder / "out") else arg for arg in args])
    assert ended.value.code == 0
    assert lost.read_bytes() == expected and not lost.with_suffix(".unfinished").exists()
    assert made.exists()
    assert [path.stat().st_mtime_ns for path in kept] == stamps, "what exists is not made again"
    after = read(again / "locomo.json")
    assert after["answers"] == before["answers"]
    perplexities = [each["teachings"]["lora"]["talk-1"]["perplexity"] for each in (before, after)]
    assert perplexities[0] == perplexities[1]


def test_sessions_without_the_evidence_of_a_question_are_refused(run, tmp_path):
    samples = make_samples()
    for sample in samples:
        for question in sample["qa"]:
            question["evidence"] = []
    write_samples(tmp_path, samples)
    code, _, err = run("locomo talks.json --limit-sessions 1 --out o", *FAST)
    message = "--limit-sessions must leave the evidence of a question, got 1: take more sessions\n"
    assert code == 2 and err.endswith(message)


def test_answers_under_way_are_of_one_run(tmp_path):
    unit = Unit(tmp_path / "answers.json", dict)
    assert not unit.has_begun
    unit.unfinished.write_text("[]")
    assert unit.has_begun


def test_broken_records_and_dialogues_that_were_cut_are_named(run, tmp_path):
    samples = make_samples()
    for turn in samples[0]["conversation"]["session_1"]:
        turn["text"] *= 200
    del samples[1]["qa"][1]["answer"]
    samples.append({"conversation": {}})
    write_samples(tmp_path, samples)
    args = "locomo talks.json --setting full-context --method none --out o --max-new-tokens 2"
    code, out, err = run(f"{args} --device cpu --window 32 --stride 16")
    assert code == 0 and "oldest lines left out" in out
    assert "talk-1, full-context" in out and "talk-2, full-context" not in out
    assert "talks.json[1].qa[1] must have an 'answer' (category 2), got None: question" in err
    assert "talks.json[2].conversation must have a session with turns" in err
    figures = read(tmp_path / "o/locomo.json")
    assert len(figures["left_out"]) == 2
    dropped = figures["answers"]["none"]["full-context"]["none"]["dropped_lines"]
    assert dropped["talk-1"] > 0 == dropped["talk-2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("locomo talks.json --method lora,lora", "error: --method must name each once, got 'lora,"),
        ("forgetting book.txt", "error: something must be measured: give --unread TEXT or "),
        ("perplexity", "error: give either TEXT files or --dataset NAME, one of the two"),
        ("perplexity empty", "error: folder must hold .txt files, got none in 'empty': name "),
        (
            "locomo talks.json --study --stride 64 --out o",
            "error: stride has no meaning for a study, got 64: leave it out",
        ),
        ("locomo", 'error: Command "eval locomo" parameter DATA requires an argument: see locas '),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, args, message):
    (tmp_path / "empty").mkdir()
    code, out, err = run(args)
    assert code == 2 and out == ""
    assert err.splitlines()[-1].startswith(message)
    assert not (tmp_path / "locas-eval.json").exists() and "Traceback" not in err


@pytest.mark.parametrize("gold", ["grey parrot", "the boats lay still " * 12])
def test_full_context_keeps_the_newest_lines_that_fit(gold, embedded, tmp_path):
    """And leaves room for an answer of 8 tokens, or for the longest gold answer."""
    model, tokenizer = embedded
    sample = make_sample()
    sample["qa"][0]["answer"] = gold
    line = {"speaker": "Ida", "text": "The sea was grey and the boats lay still."}
    sample["conversation"]["session_1"] += [{**line, "dia_id": f"D1:{n}"} for n in range(3, 200)]
    talk = load_locomo(write_samples(tmp_path, [sample]))[0][0]
    make = partial(make_prompts, model, tokenizer, talk, max_new_tokens=8)
    prompts, dropped = make(setting="full-context")
    room = 2048 - max(8, len(encode_answer(tokenizer, gold)))
    assert (room < 2040) == ("boats" in gold)
    # No more is left out than must be.
    assert dropped > 0 and room - 40 < max(map(len, prompts)) <= room
    text = tokenizer.decode(prompts[0])
    assert "Paint the kitchen blue" in text and "grey parrot" not in text
    assert make(setting="no-context")[1] == 0


def test_memories_that_were_studied_are_asked(run, tmp_path, monkeypatch):
    # The embedded model's questions are seldom about a passage.
    monkeypatch.setattr(writing, "is_about", lambda *_: True)
    args = "locomo talks.json --setting no-context --max-new-tokens 2 --out o --window 256 --r 4"
    args += " --device cpu --method none,locas-glu --study --anchor 0 --passes 1"
    code, _, err = run(f"{args} --exchanges 1 --conversations talk-1 --no-wrong-memory")
    assert code == 0, err
    figures = read(tmp_path / "o/locomo.json")
    (taught,) = figures["teachings"]["locas-glu"].values()
    assert taught["asked"] >= taught["kept"] > 0
    used = figures["methods"]["locas-glu"]
    assert (used["exchanges"], used["window"], used["r"]) == (1, 256, 4)
    assert "exchanges" not in figures["methods"]["none"]
    made = read(tmp_path / "o/locomo/memories/locas-glu/talk-1.json")
    assert made["stage"] == "study" and made["asked"] >= made["passages"] > 0


def test_forgetting_is_measured_before_after_and_with_the_memory_off(run, tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "QUESTIONS", drift.QUESTIONS[:3])
    args = ["forgetting book.txt --unread other.txt --own-answers --lr 0.02 --out o", *FAST]
    code, out, _ = run(*args, "--method", "none,lora,locas-glu")
    assert code == 0 and "equal to before, to the last bit" in out
    figures = read(tmp_path / "o/forgetting.json")
    before = figures["before"]["unread_perplexity"]
    assert figures["after"].keys() == {"lora", "locas-glu"}
    for found in figures["after"].values():
        assert found["disabled_is_before"] is True
        assert found["disabled_perplexity"] == before
        assert found["unread_perplexity"] != before
        for text in ("other", "own answers"):
            assert found["kl_per_token"][text]["mean_over_tokens"] > 0
        rise = found["unread_rise"]["other"]
        assert rise["mean"] == pytest.approx(found["unread_perplexity"]["other"] - before["other"])
        assert rise["n"] == 1 or rise["low"] <= rise["mean"] <= rise["high"]
    result = tmp_path / "o/forgetting/after-lora.json"
    stamp = result.stat().st_mtime_ns
    assert run(*args, "--method", "none,lora,locas-glu,locas-glu@2")[0] == 0
    assert result.stat().st_mtime_ns == stamp
    assert read(tmp_path / "o/forgetting.json")["methods"]["locas-glu@2"]["r"] == 2


def test_a_memory_that_was_not_switched_off_would_show(run, tmp_path, monkeypatch):
    monkeypatch.setattr(PeftModel, "disable_adapter", lambda self: nullcontext())
    args = "forgetting book.txt --unread other.txt --method lora --lr 0.02 --out o"
    code, out, _ = run(args, *FAST)
    assert code == 0 and "differs in other" in out
    assert read(tmp_path / "o/forgetting.json")["after"]["lora"]["disabled_is_before"] is False


def test_perplexity_of_several_documents(run, tmp_path):
    code, out, _ = run("perplexity", "book.txt", "other.txt", "--out", "o", *FAST)
    assert code == 0 and "all tokens" in out
    figures = read(tmp_path / "o/perplexity.json")
    assert figures["readings"].keys() == {"none", "lora", "locas-glu"}
    rows = figures["readings"]["locas-glu"].values()
    nats, tokens = (sum(row[key] for row in rows) for key in ("nll_nats", "scored_tokens"))
    mean = figures["means"]["locas-glu"]["perplexity"]
    assert mean == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    run("perplexity", "other.txt", "--out", "alone", "--method", "locas-glu", *FAST)
    fresh = read(tmp_path / "alone/perplexity/locas-glu/other.json")["nll_nats"]
    alone = figures["readings"]["locas-glu"]["other"]["nll_nats"]
    assert fresh == alone, "a fresh memory for each document"


def test_a_reading_that_diverged_costs_no_other_figures(embedded, tmp_path, monkeypatch):
    def read_nothing(self, ids, settings, path, label, *, keep_memory):
        nats = 12.0 if settings.method == "none" else math.nan
        marks = {"perplexity_at": {}, "perplexity_between": {}}
        result = {"nll_nats": nats, "scored_tokens": 4, "perplexity": nats, **marks}
        return Unit(path, lambda: result)

    methods = {name: ReadSettings(method=name) for name in ("none", "lora")}
    run = Run(*embedded, methods, tmp_path)
    monkeypatch.setattr(Run, "learning", read_nothing)
    figures = perplexity.run_perplexity(run, {"book": torch.arange(5)})
    assert figures["means"]["none"]["nll_per_token"]["mean"] == 3
    assert math.isnan(figures["means"]["lora"]["perplexity"])
    rows = perplexity.tabulate(figures)[0].rows
    assert rows == [["none", "12.00", "20.09"], ["lora", "-", "-"]]


def test_the_perplexity_of_text_files_needs_no_extra(run, monkeypatch):
    extras = ("datasets", "evaluate", "nltk")
    for name in [*sys.modules]:
        if name.partition(".")[0] in extras:
            monkeypatch.delitem(sys.modules, name)
    for name in extras:
        monkeypatch.setitem(sys.modules, name, None)
    assert run("perplexity", "book.txt", "--out", "o", "--method", "lora", *FAST)[0] == 0
    load_stemmer.cache_clear()
    code, _, err = run("locomo", "talks.json", "--out", "p", "--method", "lora", *FAST)
    assert code == 2 and "error: this measure needs nltk: install the extra" in err.splitlines()[-1]


def test_a_reading_that_was_interrupted_continues_inside_its_text(run, tmp_path, monkeypatch):
    args = ["perplexity", "book.txt", "--method", "locas-glu", *FAST]
    assert run(*args, "--out", "whole")[0] == 0
    read_text, begun = runs.read, []

    def read_until_third(base, ids, settings, place, *, on_step, **options):
        def stop(chunk):
            begun.append(chunk.index)
            on_step(chunk)
            if len(begun) == 3:
                raise KeyboardInterrupt

        place = replace(place, checkpoint_seconds=0.0)
        return read_text(base, ids, settings, place, on_step=stop, **options)

    def stop_at_the_result(path, value):
        if path.name == "book.json":
            raise KeyboardInterrupt
        write_json(path, value)

    folder = tmp_path / "parts/perplexity/locas-glu"
    with monkeypatch.context() as patch:
        patch.setattr(runs, "read", read_until_third)
        assert run(*args, "--out", "parts")[0] == 130
        assert (folder / "book/checkpoint").exists()
        patch.setattr(units, "write_json", stop_at_the_result)
        assert run(*args, "--out", "parts")[0] == 130
    assert begun[:5] == [0, 1, 2, 0, 1], "reported again, not read again"
    assert os.listdir(folder) == ["book"], "a checkpoint stands until its result does"
    assert run(*args, "--out", "parts")[0] == 0
    assert os.listdir(folder) == ["book.json"]
    whole = read(tmp_path / "whole/perplexity/locas-glu/book.json")
    parts = read(folder / "book.json")
    assert parts["nll_nats"] == whole["nll_nats"] and parts["curve"] == whole["curve"]
    assert not list((tmp_path / "parts").rglob("*.lock"))


def test_a_run_that_failed_at_once_binds_nobody(run, tmp_path):
    args = ["perplexity", "book.txt", "--out", "o", "--method", "locas-glu", *FAST]
    code, _, err = run(*args, "--layers", "9")
    assert code == 2 and "--layers must lie below 6" in err
    killed = tmp_path / "o/perplexity/locas-glu/book/checkpoint/checkpoint.lock"
    killed.parent.mkdir(parents=True)
    killed.touch()
    assert run(*args)[0] == 0
    code, _, err = run(*args, "--layers", "3")
    assert code == 2 and "--layers must be None as in the results in 'o', got [3]" in err


def test_the_report_has_tables_and_plots_of_all_runs(locomo_run, run, write_report, tmp_path):
    folder, _ = locomo_run
    options = [*FAST, "--out", "o", "--method", "none,locas-glu"]
    run("forgetting", "book.txt", "--unread", "other.txt", *options)
    run("perplexity", "book.txt", *options, "--anchor", 0.5, "--scaling", 3)
    written = write_report([folder / "out", tmp_path / "o"], tmp_path / "report.md")
    assert written[0].name == "report.md" and len(written) == 3
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for title in ("## LoCoMo", "## Forgetting", "## Perplexity", "| locas-glu |"):
        assert title in text
    line = next(line for line in text.splitlines() if "scaling 3.0" in line)
    own = ("learning rate 0.004", "scaling 3.0", "anchor 0.5", "anchor every 4")
    assert all(part in line for part in own), "a method's settings, given or from the preset"
    assert "none: " not in text, "it has no settings"
    plots = [path.name for path in tmp_path.glob("*.png")]
    assert len(plots) == 2 and all(f"({name})" in text for name in plots)


def test_progress_begins_anew_with_each_reading():
    shown = []

    def progress(label, total):
        shown.append((label, total))
        return lambda steps, note="": shown.append((steps, note))

    on_step = follow_steps(progress, "reading", 30)
    for reading, nll_nats in ((0, 20.0), (0, 40.0), (1, 0.0)):
        on_step(Chunk(0, 0, 10, 10, nll_nats, 2.0, True, reading))
    assert shown == [
        ("reading", 30),
        (10, "perplexity 7.39, 5 tokens/s"),
        (10, "perplexity 20.09, 5 tokens/s"),
        (10, "perplexity 1.00, 5 tokens/s"),
    ]


def test_a_new_protocol_is_a_table_of_units(embedded, tmp_path):
    """The perplexity of a text under memories of others: written with public names alone."""
    base, tokenizer = embedded
    settings = complete(ReadSettings(window=32, stride=16, r=4, anchor=0), base)
    target, own, other = (tokenize(tokenizer, text) for text in (BOOK, BOOK * 2, "He came. " * 15))
    folder = tmp_path / "transfer"

    def score_with(memory):
        with memory_attached(base, memory) as model:
            return {"perplexity": score(model, target, settings)}

    def run_transfer(overwrite=False, **texts):
        run = Run(base, tokenizer, {"locas-glu": settings}, tmp_path, overwrite=overwrite)
        units = []
        for name, ids in texts.items():
            reading = run.learning(ids, settings, folder / "memories" / f"{name}.json")
            score_text = partial(score_with, reading.memory)
            units.append(Unit(folder / f"{name}.json", score_text, needs=reading))
        run.make("transfer", units, texts=list(texts))
        return [unit.load()["perplexity"] for unit in units]

    perplexities = run_transfer(own=own, other=other)
    assert perplexities[0] < perplexities[1]
    assert run_transfer(own=own, other=other) == perplexities
    with pytest.raises(
        ValueError, match=r"^texts must be \['own', 'other'\] as in the results in "
    ):
        run_transfer(own=own)
    (folder / "memories" / "other" / EXCHANGES).write_text("")  # of a study
    run_transfer(own=own, overwrite=True)
    assert not list(folder.rglob("other*"))


def test_documents_from_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert load_documents([str(tmp_path)]) == {"a": "first", "b": "second"}
    assert load_documents([str(tmp_path)], limit=1) == {"a": "first"}
    with pytest.raises(ValueError, match="^documents must have different names, got 'a' twice: "):
        load_documents([str(tmp_path), str(tmp_path / "a.txt")])
    (tmp_path / "a.json.txt").write_text("third")
    assert list(load_documents([str(tmp_path)])) == ["a_json", "a", "b"]


def test_documents_from_datasets(tmp_path):
    lines = [json.dumps({"text": text}) for text in ("one", " ", "three")]
    (tmp_path / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    rows = str(tmp_path)
    assert load_column(rows, "test", "text") == {"test-0": "one", "test-2": "three"}
    assert load_column(rows, "test", "text", limit=1) == {"test-0": "one"}
    with pytest.raises(ValueError, match="^column must be one of text, got 'words': choose one"):
        load_column(rows, "test", "words")


def test_the_command_takes_the_column_text_of_the_split_test(run, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "test.jsonl").write_text(json.dumps({"text": BOOK}) + "\n")
    code, _, err = run("perplexity --dataset rows --method lora --out o", *FAST)
    assert code == 0, err
    assert read(tmp_path / "o/perplexity.json")["readings"]["lora"].keys() == {"test-0"}
