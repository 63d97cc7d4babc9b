"""The studies and `locas eval`: the files that they write, and how they continue after an interruption."""

import json
import math
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from locomo_data import make_samples, write_samples

from locas_command import program as cli
from locas_peft import backbone
from locas_peft.asking.prompts import encode_answer
from locas_peft.evaluation import (
    Unit,
    load_column,
    load_documents,
    load_locomo,
    perplexity,
    run_units,
    runs,
    units,
)
from locas_peft.evaluation.f1 import answer_f1, load_stemmer
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.evaluation.prompts import make_prompts
from locas_peft.evaluation.runs import Run, summarize_stage
from locas_peft.files import load_json, write_json
from locas_peft.memories import memory_attached
from locas_peft.progress import follow_steps
from locas_peft.selfstudy import writing
from locas_peft.selfstudy.exchanges import EXCHANGES
from locas_peft.stages import ReadSettings, complete, score
from locas_peft.ttt.chunks import Chunk

FAST = ["--window", "32", "--stride", "16", "--r", "4", "--device", "cpu"]
BOOK = "\n\n".join(
    f"The {word} of the house was old, and nobody went there."
    for word in ("door", "roof", "garden")
)
RECORD = {"sample_id", "question", "category", "answer", "prediction", "f1"}


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
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def locomo_run(tmp_path_factory):
    """One run of the LoCoMo study that several tests look at."""
    folder = tmp_path_factory.mktemp("locomo")
    data = write_samples(folder, make_samples())
    args = ["eval", "locomo", str(data), "--out", str(folder / "out"), "--max-new-tokens", "2"]
    args += [*FAST, "--anchor", "0", "--setting", "no-context,evidence,full-context"]
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 0
    return folder, args


def test_locomo_writes_every_prediction_for_other_scorers(locomo_run):
    folder, _ = locomo_run
    files = sorted(
        path.relative_to(folder / "out/locomo")
        for path in (folder / "out/locomo").rglob("*.memory-*.json")
    )
    # 2 conversations x (base + 2 methods with the right and the wrong memory) x 3 settings
    assert len(files) == 2 * (1 + 2 * 2) * 3
    for path in files:
        records = read(folder / "out/locomo" / path)
        assert len(records) == 6
        for record in records:
            assert record.keys() >= RECORD
            assert record["f1"] == answer_f1(
                record["prediction"], record["answer"], record["category"]
            )
    figures = read(folder / "out/locomo.json")
    assert figures["answers"].keys() == {"none", "lora", "locas-glu"}
    assert figures["answers"]["none"].keys() == {"no-context", "evidence", "full-context"}
    assert (
        figures["answers"]["none"]["evidence"]["none"]["gold_nats"]["n"] == 10
    )  # without the adversarial ones
    assert figures["answers"]["lora"]["no-context"].keys() == {"right", "wrong"}
    assert figures["answers"]["lora"]["no-context"]["right"]["adversarial"]["n"] == 2


def test_gold_nats_are_those_of_the_gold_answer_after_the_prompt(locomo_run):
    folder, _ = locomo_run
    base, tokenizer = backbone.load()
    talk = load_locomo(folder / "talks.json")[0][0]
    for setting in ("no-context", "evidence"):
        prompts, _ = make_prompts(base, tokenizer, talk, setting)
        gold = encode_answer(tokenizer, talk.questions[3].answer)
        ids = torch.tensor([prompts[3] + gold])
        with torch.no_grad():
            logits = base(ids).logits[0, len(prompts[3]) - 1 : -1]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, len(prompts[3]) :]).item()
        record = read(folder / f"out/locomo/predictions/none/talk-1.{setting}.memory-none.json")[3]
        assert record["gold_nats"] == pytest.approx(expected, rel=1e-4)


def test_predictions_come_from_the_seed_and_a_broken_run_goes_on(locomo_run, tmp_path):
    folder, args = locomo_run
    again = tmp_path / "again"
    shutil.copytree(folder / "out", again)
    lost = again / "locomo/predictions/locas-glu/talk-1.no-context.memory-talk-1.json"
    expected = lost.read_bytes()
    lost.unlink()
    lost.with_suffix(".unfinished").write_text(json.dumps(json.loads(expected)[:2]))
    shutil.rmtree(again / "locomo/memories/lora")
    kept = again / "locomo/predictions/none/talk-1.no-context.memory-none.json"
    stamp = kept.stat().st_mtime_ns
    before = read(again / "locomo.json")
    made = again / "locomo/memories/locas-glu/talk-2.json"
    made.unlink()  # stopped between a memory and its result
    memory = made.with_suffix("") / "adapter_model.safetensors"
    memory_stamp = memory.stat().st_mtime_ns
    with pytest.raises(SystemExit) as ended:
        cli.main([str(again) if arg == str(folder / "out") else arg for arg in args])
    assert ended.value.code == 0
    assert lost.read_bytes() == expected and not lost.with_suffix(".unfinished").exists()
    assert kept.stat().st_mtime_ns == stamp, "a result that exists is not made again"
    assert made.exists() and memory.stat().st_mtime_ns == memory_stamp, "nor is a memory"
    after = read(again / "locomo.json")
    assert after["answers"] == before["answers"]
    teaching = after["teachings"]["lora"]["talk-1"]
    assert teaching["perplexity"] == before["teachings"]["lora"]["talk-1"]["perplexity"]


def test_sessions_without_the_evidence_of_a_question_are_refused(run, tmp_path):
    samples = make_samples()
    for sample in samples:
        for question in sample["qa"]:
            question["evidence"] = []
    write_samples(tmp_path, samples)
    code, _, err = run("locomo talks.json --limit-sessions 1 --out o", *FAST)
    assert code == 2
    message = "--limit-sessions must leave the evidence of a question, got 1: take more sessions"
    assert err.endswith(f"{message}\n")


def test_answers_under_way_are_of_one_run(tmp_path):
    unit = Unit(tmp_path / "answers.json", dict)
    assert not unit.has_begun
    unit.unfinished.write_text("[]")
    assert unit.has_begun


def test_broken_records_are_named_and_the_rest_is_kept(run, tmp_path):
    samples = make_samples()
    del samples[0]["qa"][1]["answer"]
    samples.append({"conversation": {}})
    write_samples(tmp_path, samples)
    args = "locomo talks.json --setting no-context --method none --out o --max-new-tokens 2"
    code, _, err = run(f"{args} --device cpu --window 32 --stride 16")
    assert code == 0
    assert "talks.json[0].qa[1] must have an 'answer' (category 2), got None: question" in err
    assert "talks.json[2].conversation must have a session with turns" in err
    assert len(read(tmp_path / "o/locomo.json")["left_out"]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("locomo talks.json --method lora,lora", "error: --method must name each once, got 'lora,"),
        ("forgetting book.txt", "error: something must be measured: give --unread TEXT or "),
        ("perplexity", "error: give either TEXT files or --dataset NAME, one of the two"),
        ("perplexity empty", "error: folder must hold .txt files, got none in 'empty': name "),
        ("locomo", 'error: Command "eval locomo" parameter DATA requires an argument: see locas '),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, args, message):
    (tmp_path / "empty").mkdir()
    code, out, err = run(args)
    assert code == 2 and out == ""
    assert err.splitlines()[-1].startswith(message)
    assert not (tmp_path / "locas-eval.json").exists() and "Traceback" not in err


def test_full_context_keeps_the_newest_lines_that_fit(tmp_path):
    model, tokenizer = backbone.load()
    sample = make_samples()[0]
    talk = sample["conversation"]
    talk["session_1"] = talk["session_1"] * 1 + [
        {"speaker": "Ida", "dia_id": f"D1:{n}", "text": "The sea was grey and the boats lay still."}
        for n in range(3, 200)
    ]
    conversation = load_locomo(write_samples(tmp_path, [sample]))[0][0]
    prompts, dropped = make_prompts(
        model, tokenizer, conversation, "full-context", max_new_tokens=8
    )
    assert dropped > 0 and max(map(len, prompts)) <= 2048 - 8
    assert max(map(len, prompts)) > 2048 - 8 - 40, "no more is left out than must be"
    text = tokenizer.decode(prompts[0])
    assert "Paint the kitchen blue" in text and "grey parrot" not in text
    assert make_prompts(model, tokenizer, conversation, "no-context", max_new_tokens=8)[1] == 0


def test_full_context_leaves_room_for_the_longest_gold_answer(tmp_path):
    model, tokenizer = backbone.load()
    sample = make_samples()[0]
    sample["conversation"]["session_1"] *= 200
    sample["qa"][0]["answer"] = "the boats lay still " * 12
    talk = load_locomo(write_samples(tmp_path, [sample]))[0][0]
    prompts, _ = make_prompts(model, tokenizer, talk, "full-context", max_new_tokens=8)
    gold = encode_answer(tokenizer, talk.questions[0].answer)
    assert len(gold) > 8 and max(map(len, prompts)) <= 2048 - len(gold)


def test_a_dialogue_that_was_cut_is_said_so(run, tmp_path):
    samples = make_samples()
    for turn in samples[0]["conversation"]["session_1"]:
        turn["text"] *= 200
    write_samples(tmp_path, samples)
    settings = "--max-new-tokens 2 --window 32 --stride 16 --device cpu"
    code, out, _ = run(f"locomo talks.json --setting full-context --method none --out o {settings}")
    assert code == 0 and "oldest lines left out" in out
    assert "talk-1, full-context" in out and "talk-2, full-context" not in out
    figures = read(tmp_path / "o/locomo.json")["answers"]["none"]["full-context"]["none"]
    assert figures["dropped_lines"]["talk-1"] > 0 == figures["dropped_lines"]["talk-2"]


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
    code, _, err = run(f"{args} --stride 64")
    assert code == 2 and "error: stride has no meaning for a study, got 64: leave it out" in err
    code, _, err = run("perplexity", "book.txt", "--study", "--out", "p")
    assert code != 0 and "--study" in err


def test_forgetting_is_measured_before_after_and_with_the_memory_off(run, tmp_path):
    args = ["forgetting book.txt --unread other.txt --own-answers --out o", *FAST]
    code, out, _ = run(*args, "--method", "none,lora,locas-glu", "--lr", "0.02")
    assert code == 0 and "equal to before, to the last bit" in out
    figures = read(tmp_path / "o/forgetting.json")
    assert figures["after"].keys() == {"lora", "locas-glu"}
    for found in figures["after"].values():
        assert found["disabled_is_before"] is True
        assert found["disabled_perplexity"] == figures["before"]["unread_perplexity"]
        assert found["unread_perplexity"] != figures["before"]["unread_perplexity"]
        assert found["kl_per_token"]["other"]["mean_over_tokens"] > 0
        assert found["kl_per_token"]["own answers"]["mean_over_tokens"] > 0
        rise = found["unread_rise"]["other"]
        difference = (
            found["unread_perplexity"]["other"] - figures["before"]["unread_perplexity"]["other"]
        )
        assert rise["mean"] == pytest.approx(difference)
        assert rise["n"] == 1 or rise["low"] <= rise["mean"] <= rise["high"]
    stamp = (tmp_path / "o/forgetting/after-lora.json").stat().st_mtime_ns
    code, _, _ = run(*args, "--method", "none,lora,locas-glu,locas-glu@2", "--lr", "0.02")
    assert code == 0
    assert (tmp_path / "o/forgetting/after-lora.json").stat().st_mtime_ns == stamp
    assert read(tmp_path / "o/forgetting.json")["methods"]["locas-glu@2"]["r"] == 2


def test_a_memory_that_was_not_switched_off_would_show(run, tmp_path, monkeypatch):
    from contextlib import nullcontext

    from peft import PeftModel

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
    rows = figures["readings"]["locas-glu"]
    tokens = {name: row["scored_tokens"] for name, row in rows.items()}
    weighted = sum(row["nll_nats"] for row in rows.values()) / sum(tokens.values())
    assert figures["means"]["locas-glu"]["perplexity"] == pytest.approx(
        torch.tensor(weighted).exp().item(), rel=1e-5
    )
    alone = read(tmp_path / "o/perplexity/locas-glu/other.json")
    code, _, _ = run("perplexity", "other.txt", "--out", "alone", "--method", "locas-glu", *FAST)
    fresh = read(tmp_path / "alone/perplexity/locas-glu/other.json")
    assert fresh["nll_nats"] == alone["nll_nats"], "a fresh memory for each document"


def test_a_reading_that_diverged_costs_no_other_figures(tmp_path, monkeypatch):
    def read_nothing(self, ids, settings, path, label, *, keep_memory):
        nats = 12.0 if settings.method == "none" else math.nan
        marks = {"perplexity_at": {}, "perplexity_between": {}}
        result = {"nll_nats": nats, "scored_tokens": 4, "perplexity": nats, **marks}
        return Unit(path, lambda: result)

    base, tokenizer = backbone.load()
    methods = {name: ReadSettings(method=name) for name in ("none", "lora")}
    run = Run(base, tokenizer, methods, tmp_path)
    monkeypatch.setattr(Run, "learning", read_nothing)
    figures = perplexity.run_perplexity(run, {"book": torch.arange(5)})
    assert figures["means"]["none"]["nll_per_token"]["mean"] == 3
    assert math.isnan(figures["means"]["lora"]["perplexity"])
    rows = perplexity.tabulate(figures)[0].rows
    assert rows == [["none", "12.00", "20.09"], ["lora", "-", "-"]]


def test_the_perplexity_of_text_files_needs_no_extra(run, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("datasets", "evaluate", "nltk"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("datasets", "evaluate", "nltk"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("perplexity", "book.txt", "--out", "o", "--method", "lora", *FAST)[0] == 0
    load_stemmer.cache_clear()
    code, _, err = run("locomo", "talks.json", "--out", "p", "--method", "lora", *FAST)
    assert code == 2 and err.splitlines()[-1].startswith(
        "error: this measure needs nltk: install the extra with pip"
    )


def test_a_reading_that_was_interrupted_continues_inside_its_text(run, tmp_path, monkeypatch):
    args = ["forgetting book.txt --unread other.txt --method locas-glu", *FAST]
    path = "forgetting/memories/locas-glu.json"
    assert run(*args, "--out", "whole")[0] == 0
    read_text, begun = runs.read, []

    def stopped(base, ids, settings, place, *, on_step, **options):
        def on_each(chunk):
            begun.append(chunk.index)
            on_step(chunk)
            if len(begun) == 3:
                raise KeyboardInterrupt

        stop_there = on_each if settings.method != "none" else on_step
        place = replace(place, checkpoint_seconds=0.0)
        return read_text(base, ids, settings, place, on_step=stop_there, **options)

    monkeypatch.setattr(runs, "read", stopped)
    assert run(*args, "--out", "parts")[0] == 130
    result = tmp_path / "parts" / path
    assert (result.with_suffix("") / "checkpoint").exists() and not result.exists()
    assert run(*args, "--out", "parts")[0] == 0
    assert begun[:3] == [0, 1, 2] and begun[3:5] == [0, 1], "reported again, not read again"
    whole, parts = (read(tmp_path / name / path) for name in ("whole", "parts"))
    assert parts["nll_nats"] == whole["nll_nats"] and parts["curve"] == whole["curve"]
    assert not (result.with_suffix("") / "checkpoint").exists()
    assert not list((tmp_path / "parts").rglob("*.lock"))


def test_a_checkpoint_stands_until_its_result_does(run, tmp_path, monkeypatch):
    args = ["perplexity", "book.txt", "--method", "locas-glu", "--out", "o", *FAST]
    read_text, folder = runs.read, tmp_path / "o/perplexity/locas-glu"

    def read_with_checkpoints(base, ids, settings, place, **options):
        return read_text(base, ids, settings, replace(place, checkpoint_seconds=0.0), **options)

    def stop_at_the_result(path, value):
        if path.name == "book.json":
            raise KeyboardInterrupt
        write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "read", read_with_checkpoints)
        patch.setattr(units, "write_json", stop_at_the_result)
        assert run(*args)[0] == 130
    assert [path.name for path in folder.iterdir()] == ["book"]
    assert run(*args)[0] == 0
    assert [path.name for path in folder.iterdir()] == ["book.json"]


def test_a_run_that_failed_at_once_binds_nobody(run, tmp_path):
    args = ["perplexity", "book.txt", "--out", "o", "--method", "locas-glu", *FAST]
    code, _, err = run(*args, "--layers", "9")
    assert code == 2 and "--layers must lie below 6" in err
    killed = tmp_path / "o" / "perplexity" / "locas-glu" / "book" / "checkpoint" / "checkpoint.lock"
    killed.parent.mkdir(parents=True)
    killed.touch()
    assert run(*args)[0] == 0
    code, _, err = run(*args, "--layers", "3")
    assert code == 2 and "--layers must be None as in the results in 'o', got [3]" in err


def test_the_report_has_tables_and_plots_of_all_runs(locomo_run, run, write_report, tmp_path):
    folder, _ = locomo_run
    run("forgetting", "book.txt", "--unread", "other.txt", "--out", "o", *FAST)
    run("perplexity", "book.txt", "--out", "o", *FAST, "--anchor", 0.5, "--scaling", 3)
    written = write_report([folder / "out", tmp_path / "o"], tmp_path / "report.md")
    assert written[0].name == "report.md" and len(written) == 3
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for title in ("## LoCoMo", "## Forgetting", "## Perplexity", "| locas-glu |"):
        assert title in text
    line = next(line for line in text.splitlines() if "scaling 3.0" in line)
    own = ("learning rate 0.004", "scaling 3.0", "anchor 0.5", "anchor every 4")
    assert all(part in line for part in own), "a method's settings, given or from the preset"
    assert "none: " not in text, "it has no settings"
    plots = sorted(path.name for path in tmp_path.glob("*.png"))
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


def test_a_new_protocol_is_a_table_of_units_and_a_summary(tmp_path):
    """The perplexity of one text under the memories of several texts: written with public names alone."""

    def run_transfer(texts, overwrite=False):
        run = Run(base, tokenizer, {"locas-glu": settings}, tmp_path, overwrite=overwrite)
        folder = run.out / "transfer"

        def score_with(memory):
            with memory_attached(base, memory) as model:
                return {"perplexity": score(model, target, settings)}

        units = []
        for name, ids in texts.items():
            reading = run.learning(ids, settings, folder / "memories" / f"{name}.json")
            units.append(
                Unit(folder / f"{name}.json", partial(score_with, reading.memory), needs=reading)
            )
        run.make("transfer", units, texts=list(texts))
        return mean_interval([unit.load()["perplexity"] for unit in units])

    base, tokenizer = backbone.load()
    target, *texts = (
        tokenizer(text, return_tensors="pt")["input_ids"][0]
        for text in (BOOK, BOOK * 3, "He came. " * 30)
    )
    given = ReadSettings(method="locas-glu", window=32, stride=16, r=4, anchor=0)
    settings = complete(given, base)
    texts = dict(zip(("own", "other"), texts, strict=True))
    found = run_transfer(texts)
    own, other = (read(tmp_path / "transfer" / f"{name}.json")["perplexity"] for name in texts)
    assert found["n"] == 2 and own < other
    assert run_transfer(texts) == found
    message = r"^texts must be \['own', 'other'\] as in the results in "
    with pytest.raises(ValueError, match=message):
        run_transfer({"own": texts["own"]})
    (tmp_path / "transfer" / "memories" / "other" / EXCHANGES).write_text("")  # of a study
    run_transfer({"own": texts["own"]}, overwrite=True)
    assert not list((tmp_path / "transfer").rglob("other*"))


def test_documents_from_files_folders_and_datasets(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert load_documents([str(tmp_path)]) == {"a": "first", "b": "second"}
    assert load_documents([str(tmp_path)], limit=1) == {"a": "first"}
    message = r"^documents must have different names, got 'a' twice: rename "
    with pytest.raises(ValueError, match=message):
        load_documents([str(tmp_path), str(tmp_path / "a.txt")])
    (tmp_path / "a.json.txt").write_text("third")
    assert list(load_documents([str(tmp_path)])) == ["a_json", "a", "b"]
    rows = tmp_path / "rows"
    rows.mkdir()
    lines = [json.dumps({"text": text}) for text in ("one", " ", "three")]
    (rows / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert load_column(str(rows), "test", "text") == {"test-0": "one", "test-2": "three"}
    assert load_column(str(rows), "test", "text", limit=1) == {"test-0": "one"}
    message = "^column must be one of text, got 'words': choose one of them$"
    with pytest.raises(ValueError, match=message):
        load_column(str(rows), "test", "words")


@pytest.mark.parametrize("method", ["lora", "locas-glu"])
def test_a_kept_memory_is_the_one_that_was_made(tmp_path, method):
    base, tokenizer = backbone.load()
    base.requires_grad_(False)
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    ids = tokenizer(BOOK, return_tensors="pt")["input_ids"][0]
    settings = complete(ReadSettings(method=method, window=32, stride=16, r=4, readings=2))
    unit = Run(base, tokenizer, {}, tmp_path).learning(ids, settings, tmp_path / "memory.json")
    run_units([unit])
    found = summarize_stage(load_json(unit.path))
    assert len(found["perplexity"]) == 2 and found["perplexity"][1] < found["perplexity"][0]
    assert found["scored_tokens"] == 2 * (len(ids) - 1) and found["parameters"] > 0
    stamp = (tmp_path / "memory" / "record.json").stat().st_mtime_ns
    run_units([unit])
    assert (tmp_path / "memory" / "record.json").stat().st_mtime_ns == stamp
    with memory_attached(base, tmp_path / "memory") as model, torch.no_grad():
        changed = model(ids.unsqueeze(0)).logits
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert base.state_dict().keys() == weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in base.state_dict().items())
    with torch.no_grad():
        assert not torch.equal(base(ids.unsqueeze(0)).logits, changed)
