"""The tables of the paper (`benchmarks/paper.py`): choices, units, comparisons, baselines."""

import dataclasses
import importlib
import json
import math
import shutil
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from families import make_host, make_tokens
from locomo_data import make_samples, write_samples
from torch import nn
from training import assert_same, weights_of

from locas_peft import backbone, text
from locas_peft.asking.scoring import score_targets
from locas_peft.stages import ReadSettings, complete, score

FOLDER = Path(__file__).parents[1] / "benchmarks"
MODULES = (
    "ablations attention baselines bench choices forgetting gap locomo mmlu pg19 rows scales timing"
)
PAIRS = {
    "agreement": [
        ("The dogs bark.", "The dogs barks."),
        ("She sings.", "She sing."),
        ("We go.", "We goes."),
    ],
    "islands": [("What did you see?", "What did you see it?")],
}


@contextmanager
def imported(script: str, package: str, modules: str):
    """Import a script of `benchmarks/` and modules of its tables; afterwards all are gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        found = {name: importlib.import_module(f"{package}.{name}") for name in modules.split()}
        found[script] = importlib.import_module(script)
        yield type("Tables", (), found)
    for name in list(sys.modules):
        first = name.partition(".")[0]
        if first in (script, "measuring", "knowledge_tables", "paper_tables"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def tables():
    with imported("paper", "paper_tables", MODULES) as found:
        yield found


@pytest.fixture(scope="module")
def base():
    return backbone.load()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Make a folder of data sets: short texts under the books' names, and few questions."""
    folder = tmp_path_factory.mktemp("data")
    write_books(folder / "pg19" / "eval", "3649", "36235", "5274")
    write_books(folder / "pg19" / "train", "2118", "17769", "28345", "36087", first=3)
    questions = [make_question(subject, number) for subject in ("law", "art") for number in "12"]
    write_lines(folder / "mmlu" / "test.jsonl", questions)
    write_lines(folder / "mmlu" / "dev.jsonl", questions[::2])
    for name in ("arc_challenge", "piqa", "openbook_qa"):
        row = {"query": "Question: What barks?", "choices": ["a dog", "a stone"], "gold": 0}
        write_lines(folder / "probes" / f"{name}.jsonl", [row])
    write_pairs(folder / "blimp" / "BLiMP.zip")
    return folder


def write_books(folder, *names, first=0):
    """Write parts of a text, from a number on, under names."""
    folder.mkdir(parents=True)
    reference = text.python_reference()
    for number, name in enumerate(names, first):
        part = reference[6000 * number : 6000 * number + 5000]
        (folder / f"{name}.txt").write_text(part, encoding="utf-8")


def make_question(subject, number):
    choices = [f"choice {letter}{number}" for letter in "wxyz"]
    return {"subject": subject, "question": f"Which {number}? ", "choices": choices, "answer": 2}


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def write_pairs(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        for name, pairs in PAIRS.items():
            rows = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in pairs]
            archive.writestr(f"data/{name}.jsonl", "\n".join(rows))
            archive.writestr(f"__MACOSX/data/._{name}.jsonl", b"\x00\x05")


@pytest.fixture(scope="module")
def scale(tables):
    return dataclasses.replace(
        tables.scales.QUICK,
        name="test",
        sweep_tokens=300,
        rates=2,
        marks=(256, 600),
        ablation_tokens=300,
        baseline_tokens=300,
        baseline_sweep_tokens=300,
        memory_tokens=300,
        questions=None,
        unread_tokens=300,
    )


@pytest.fixture
def bench(tables, data, scale, tmp_path):
    return tables.bench.Bench(backbone.NAME, data, tmp_path / "out", scale, dtype="float32")


@pytest.fixture
def measure_nats(tables, base):
    """Return a function that scores one text after another."""
    model, tokenizer = base

    def measure(prompt, target):
        pair = tables.choices.encode_pair(tokenizer, prompt, target)
        return score_targets(model, [pair])[0].nll_nats

    return measure


def test_a_sweep_reads_what_was_learned(tables):
    for scale in tables.scales.SCALES.values():
        # The first chunk is scored before anything is learned: it is the same at all rates.
        assert scale.sweep_tokens > 2 * scale.stride
        assert scale.baseline_sweep_tokens > 2 * scale.stride


# ---------------------------------------------------------------------- choices


def test_the_prompt_of_mmlu_is_the_usual_one(tables, data):
    items = tables.choices.load_mmlu(data / "mmlu" / "test.jsonl")
    prompt = tables.choices.make_letter_prompts(items)[0]
    assert prompt == (
        "The following are multiple choice questions (with answers) about art.\n\n"
        "Which 1?\nA. choice w1\nB. choice x1\nC. choice y1\nD. choice z1\nAnswer:"
    )
    with_example = tables.choices.make_letter_prompts(items[:1], shots=items[1:2])[0]
    assert with_example.count("Answer:") == 2 and "Answer: C\n\n" in with_example


def test_questions_are_drawn_from_each_subject_by_the_seed(tables, data):
    file = data / "mmlu" / "test.jsonl"
    drawn = tables.choices.load_mmlu(file, 1)
    assert [item.subject for item in drawn] == ["art", "law"]
    assert tables.choices.load_mmlu(file, 1) == drawn


@pytest.mark.parametrize("shots", [0, 1])
def test_letters_are_those_that_are_likeliest_one_by_one(tables, data, base, shots):
    model, tokenizer = base
    items = tables.choices.load_mmlu(data / "mmlu" / "test.jsonl")
    examples = items[:shots]
    prompts = tables.choices.make_letter_prompts(items, examples)
    expected = []
    for item, prompt in zip(items, prompts, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        pairs = []
        for letter in "ABCD":
            whole = tokenizer(f"{prompt} {letter}")["input_ids"]
            pairs.append((ids, whole[len(ids) :]))
        nats = [score.nll_nats for score in score_targets(model, pairs)]
        expected.append(nats.index(min(nats)) == item.gold)
    assert tables.choices.find_right_letters(model, tokenizer, items, examples) == expected


def test_choices_are_compared_plainly_and_by_character(tables, base, measure_nats):
    item = tables.choices.Item("Question: What did he see?", ("him", "the old man of the sea"), 1)
    plain, by_character = tables.choices.find_right_choices(*base, [item])
    prompt = f"{item.question}\nAnswer:"
    short, long = (measure_nats(prompt, f" {choice}") for choice in item.choices)
    assert plain == [long < short] and by_character == [long / 22 < short / 3]
    assert plain != by_character, "the long choice wins by character alone"


def test_the_first_pairs_of_each_paradigm_are_loaded_and_scored(tables, data, base, measure_nats):
    pairs = tables.choices.load_pairs(data / "blimp" / "BLiMP.zip", 2)
    found = [pair["sentence_good"] for pair in pairs]
    assert found == ["The dogs bark.", "She sings.", "What did you see?"]
    expected = []
    for pair in pairs:
        good, bad = (measure_nats("", pair[kind]) for kind in ("sentence_good", "sentence_bad"))
        expected.append(good < bad)
    assert tables.choices.find_pairs(*base, pairs) == expected


# ---------------------------------------------------------------------- readings


def test_a_reading_is_kept_and_scored_as_by_the_package(tables, bench):
    unit = bench.reading(tables.rows.NONE, "3649", 600)
    bench.run([unit])
    result = unit.load()
    settings = complete(ReadSettings(method="none", window=512, stride=256), bench.base)
    expected = score(bench.base, bench.document("3649", 600), settings)
    assert result["figures"]["perplexity"] == pytest.approx(expected, rel=1e-9)
    assert {"commit", "hardware"} <= result["machine"].keys() and result["host"] == "tinybook-glu"
    before = unit.path.stat().st_mtime_ns
    bench.run([bench.reading(tables.rows.NONE, "3649", 600)])
    assert unit.path.stat().st_mtime_ns == before


def test_rows_with_the_same_settings_share_their_results(tables, bench):
    default = bench.reading(tables.rows.DEFAULT_LORA, "3649", 600)
    assert bench.reading(tables.rows.lora(64, 1e-3), "3649", 600).path == default.path
    assert bench.reading(tables.rows.lora(64, 2e-3), "3649", 600).path != default.path


def test_results_of_another_text_are_refused(tables, bench, data, scale):
    bench.run([bench.reading(tables.rows.NONE, "3649", 600)])
    other = tables.bench.Bench(backbone.NAME, data, bench.folder.parent.parent, scale)
    other.document = lambda name, tokens: torch.arange(2, 2 + tokens)
    with pytest.raises(ValueError, match="text_sha256.*another --out"):
        other.reading(tables.rows.NONE, "3649", 600)


def test_pg19_compares_chunks_with_the_best_rate_of_the_sweep(tables, bench):
    tables.pg19.fill(bench)
    lines = tables.pg19.tabulate(bench).splitlines()
    line = next(line for line in lines if line.startswith("| Locas r=64 |"))
    rows = (tables.rows.LOCAS, tables.pg19.best_lora(bench))
    mine, theirs = (bench.reading(row, "3649", 600).load()["figures"]["chunks"] for row in rows)
    differences = [(own[2] - other[2]) / own[1] for own, other in zip(mine, theirs, strict=True)]
    assert f"{sum(differences) / len(differences):.4f} [" in line
    _, tokens, nats = mine[0][:3]
    assert f"| {math.exp(nats / tokens):.3f} |" in line, "the perplexity at 256 tokens"


def test_two_layer_hosts_have_the_rows_of_their_method(tables, data, scale, tmp_path):
    bench = tables.bench.Bench(backbone.MLP_NAME, data, tmp_path, scale, dtype="float32")
    bench.lora_rate = 1e-3
    tables.pg19.fill(bench)
    page = tables.pg19.tabulate(bench)
    for row in tables.rows.two_layer_rows():
        assert page.count(f"| {row.name} |") == 2, "a row of each of the two long books"
    assert "two-layer FFNs" in page and "| Locas r=64 |" not in page


def test_mmlu_is_measured_of_the_base_and_of_memories(tables, bench, monkeypatch):
    # Those of the other rows are made alike, and take long.
    none, _, anchored, *_ = tables.mmlu.list_rows(bench, make=False)
    monkeypatch.setattr(
        tables.mmlu, "list_rows", lambda bench, make: [none, anchored, tables.rows.LOCAS]
    )
    tables.mmlu.fill(bench)
    page = tables.mmlu.tabulate(bench)
    assert (
        page.count("\n| Locas r=64 |") == 2
        and "\n| TempLoRA r=64, default rate, with the anchor |" in page
    )
    base, memory = (
        json.loads((bench.folder / "mmlu" / name / "own-answers.json").read_text())["figures"]
        for name in ("none", "locas-glu")
    )
    assert base["kl_per_token"] == 0 < memory["kl_per_token"]
    assert base["chunk_tokens"] == memory["chunk_tokens"]


def test_a_memory_that_was_not_kept_is_made_again(tables, bench):
    units = tables.mmlu._list_units(bench, tables.rows.LOCAS)
    bench.run([units["blimp"]])
    first = units["own-answers"]
    bench.run([first])
    expected = first.load()["figures"]
    first.path.unlink()
    shutil.rmtree(first.needs.memory)
    bench.run([first])
    assert first.load()["figures"] == expected


def test_a_reading_that_was_interrupted_is_made_again_for_a_measure(tables, bench):
    unit = tables.mmlu._list_units(bench, tables.rows.LOCAS)["own-answers"]
    bench.run([unit.needs])
    shutil.rmtree(unit.needs.memory)
    unit.needs.checkpoint.mkdir(parents=True)
    bench.run([unit])
    assert unit.load()["figures"]["kl_per_token"] > 0


def test_results_of_another_dtype_are_refused(tables, bench, data, scale):
    bench.run([bench.reading(tables.rows.NONE, "3649", 600)])
    arguments = backbone.NAME, data, bench.folder.parent.parent, scale
    other = tables.bench.Bench(*arguments, dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype 'float32' in .*, not 'bfloat16': choose another"):
        other.unit("readings/3649-600/none-seed0.json", {}, measure=None)


def test_the_best_rate_of_lora_stays_with_the_results(tables, data, scale, tmp_path):
    arguments = backbone.NAME, data, tmp_path, scale
    tables.bench.Bench(*arguments).lora_rate = 3e-4
    later = tables.bench.Bench(*arguments)
    assert tables.pg19.best_lora(later).name.endswith("(0.0003)")
    with pytest.raises(ValueError, match="--lora-rate 0.0003 in .*, not 0.001: choose another"):
        later.lora_rate = 1e-3


def test_the_bases_own_answers_stay_with_the_results(tables, bench, data, scale, monkeypatch):
    pieces = bench.own_answers
    monkeypatch.setattr(tables.bench, "write_own_answers", None)
    later = tables.bench.Bench(backbone.NAME, data, bench.folder.parent.parent, scale)
    for (ids, scored), (kept, kept_scored) in zip(pieces, later.own_answers, strict=True):
        assert torch.equal(ids, kept) and scored == kept_scored


def test_windows_are_within_the_hosts_positions(tables, bench, monkeypatch):
    choose = tables.bench.choose_window
    assert choose(tables.scales.GPU, 1024) == {"window": 1024, "stride": 512}
    assert choose(tables.scales.GPU, None) == {"window": 2048, "stride": 1024}
    monkeypatch.setattr(tables.pg19, "count_positions", lambda base: bench.common["window"])
    assert not any("window" in row.given for row in tables.pg19.list_rows(bench))


def test_forgetting_is_compared_over_books_that_both_methods_read(tables, bench, monkeypatch):
    monkeypatch.setattr(tables.forgetting, "BOOKS", ("5274", "17769"))
    bench.scale = dataclasses.replace(bench.scale, short_tokens=600)
    bench.lora_rate = 3e-4
    memory, lora = tables.forgetting.list_rows(bench, make=False)
    weights = [bench.settings(row).anchor for row in (memory, lora)]
    assert weights[0] == weights[1] > 0, "both have the anchor"
    tables.forgetting.fill(bench)
    both = [tables.forgetting._find_means(bench, row) for row in (memory, lora)]
    changes = [both[1][book] - both[0][book] for book in ("5274", "17769")]
    assert f"| {sum(changes) / 2:.4f} [" in tables.forgetting.tabulate(bench)
    tables.forgetting._make_unit(bench, lora, "17769").path.unlink()
    assert "17769" not in tables.forgetting.tabulate(bench)


def test_the_preset_paper_reads_as_the_paper_does(tables, data, scale, tmp_path):
    bench = tables.bench.Bench(backbone.NAME, data, tmp_path, scale, preset="paper")
    assert bench.folder.name == "test-paper"
    memory = bench.settings(tables.rows.LOCAS)
    assert (memory.output_scale, memory.decay_steps, memory.anchor) == ("paper", 0, None)
    bench.lora_rate = 3e-4
    bench.scale = dataclasses.replace(scale, short_tokens=300)
    _, lora = tables.forgetting.list_rows(bench, make=False)
    assert bench.settings(lora).anchor is None
    names = [row.name for row in tables.mmlu.list_rows(bench, make=False)]
    assert "Locas r=64, without the anchor" not in names


def test_locomo_compares_each_method_with_the_base(tables, bench, data, monkeypatch):
    (data / "locomo").mkdir()
    write_samples(data / "locomo", make_samples())
    rows = {"locas": tables.rows.LOCAS}
    monkeypatch.setattr(tables.locomo, "_list_rows", lambda bench: rows)
    tables.locomo.fill(bench)
    lines = tables.locomo.tabulate(bench).splitlines()
    base, own = (tables.locomo._load_f1(bench, row, "no-context") for row in ("none", "locas"))
    assert base and base.keys() == own.keys()
    change = 100 * sum(own[key] - base[key] for key in base) / len(base)
    (line,) = [line for line in lines if line.startswith("| Locas r=64 at 0.004, no-context |")]
    assert f" {change:.2f} " in line.split("|")[-2]


def test_attention_over_a_long_context_gives_the_same_logits(tables, monkeypatch):
    host = make_host("qwen2")
    host.set_attn_implementation("sdpa")
    assert host.config.num_key_value_heads < host.config.num_attention_heads
    ids = make_tokens(1, 12)
    repeated = []
    attend = tables.attention.sdpa_attention_forward

    def note(module, query, key, value, mask, **options):
        repeated.append(mask is None if query.shape[2] == 1 else mask is not None)
        return attend(module, query, key, value, mask, **options)

    monkeypatch.setattr(tables.attention, "sdpa_attention_forward", note)
    expected = host(ids).logits
    with torch.no_grad(), tables.attention.masked_attention(host):
        for split in ([4, 8], [4, 7, 1]):
            cache = None
            for tokens, wanted in zip(ids.split(split, 1), expected.split(split, 1), strict=True):
                outputs = host(tokens, past_key_values=cache, use_cache=True)
                cache = outputs.past_key_values
                torch.testing.assert_close(outputs.logits, wanted, atol=1e-5, rtol=1e-4)
    assert repeated and not any(repeated)
    assert host.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------- baselines


def test_each_baseline_learns_and_leaves_the_base_as_it_was(tables, bench):
    before = weights_of(bench.base)
    ids = bench.document("3649", 300)
    for baseline in [*tables.baselines.BASELINES, *tables.gap.ROWS]:
        rate = baseline.rates[0] if baseline.rates else None
        if baseline.name == "LoRA r=64, attention alone":
            assert rate == 3e-4
        with baseline.open(bench, rate) as trainer:
            list(trainer.read(ids))
            count = len(trainer.learner.parameters())
        assert (count > 0) == (rate is not None), baseline.name
        assert trainer.skipped_chunks == 0, baseline.name
        assert_same(weights_of(bench.base), before)
        assert not any(weight.requires_grad for weight in bench.base.parameters()), baseline.name


def test_a_prefix_of_keys_and_values_moves_the_scores(tables, bench):
    cartridge = next(row for row in tables.baselines.BASELINES if row.name.startswith("CARTRIDGE"))
    ids = bench.document("3649", 300)

    def list_logits(model):
        return tables.baselines.list_logits(model, [(ids[:40], 8)])[0]

    with cartridge.open(bench, 1e-2) as trainer:
        before = list_logits(trainer.model)
        list(trainer.read(ids))
        after = list_logits(trainer.model)
    assert not torch.allclose(before, list_logits(bench.base), atol=1e-2), "the prefix is seen"
    assert not torch.allclose(after, before, atol=1e-4), "the prefix has learned"


def test_dynamic_evaluation_keeps_steps_that_bfloat16_would_lose(tables):
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = tables.baselines.DynamicEvaluation([weight], 0.0, decay=1e-9)
    weight.grad = torch.tensor([1.0, 1.0], dtype=torch.bfloat16)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 2e-3
    # Each step is a thousandth, half of what bfloat16 can take from 1.
    for _ in range(8):
        optimizer.step()
    assert weight.float()[0].item() == pytest.approx(1 - 8e-3, abs=2e-3)
    optimizer.restore()
    assert torch.equal(weight, torch.ones(2, dtype=torch.bfloat16))


# ---------------------------------------------------------------------- times


@pytest.mark.slow
def test_rows_are_timed_in_turn_and_their_operations_counted(tables, bench):
    rows = [tables.timing.AGAIN, tables.rows.NONE, tables.rows.DEFAULT_LORA, tables.rows.LOCAS]
    ids = torch.cat([bench.document("3649", 1100)] * 7)
    results = {row["row"]: row for row in tables.timing.time_rows(bench, rows, ids)}
    operations = [results[row.name]["operations"] for row in rows]
    again, none, lora, locas = operations
    assert none < again < 2.1 * none, "a window that is read again costs twice the chunk"
    assert 2 * none < locas < lora, "learning costs a backward pass, LoRA's more than a memory's"
    writing = [results[row.name]["writing_processor_seconds"] for row in rows]
    assert writing[:3] == [0, 0, 0] and writing[3] > 0, "the memory's anchor alone writes texts"


# ---------------------------------------------------------------------- the command


def test_a_table_that_cannot_be_made_does_not_keep_the_others(tables, bench, monkeypatch):
    def fail(bench):
        raise ValueError("no such row here")

    monkeypatch.setattr(tables.locomo, "fill", fail)
    filled = []
    monkeypatch.setattr(tables.mmlu, "fill", lambda bench: filled.append("mmlu"))
    with pytest.raises(ValueError, match="no such row here"):
        tables.paper.fill_tables(bench, ["locomo", "mmlu"])
    assert filled == ["mmlu"] and bench.folder.with_suffix(".md").exists()


def test_all_tables_are_those_of_the_paper(tables):
    arguments = tables.paper.parse_arguments([backbone.NAME])
    assert arguments.tables == ["sweep", "pg19", "init", "width", "mmlu", "forgetting", "locomo"]
    arguments = tables.paper.parse_arguments([backbone.NAME, "--table", "time,baselines"])
    assert arguments.tables == ["time", "baselines"]


def test_mistakes_are_one_line(tables, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tables.paper.main([backbone.NAME, "--table", "pg20"])
    assert "--table must be among" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tables.paper.main([backbone.NAME, "--table", "gap", "--preset", "paper"])
    assert "--preset is not for the table 'gap'" in capsys.readouterr().err
    arguments = [backbone.NAME, "--data", str(tmp_path), "--out", str(tmp_path / "o"), "--quick"]
    with pytest.raises(SystemExit, match="paper: --data must hold the book 2118"):
        tables.paper.main(arguments)


def test_the_page_is_made_of_what_there_is(tables, data, tmp_path):
    arguments = [backbone.NAME, "--data", str(data), "--out", str(tmp_path), "--quick"]
    tables.paper.main([*arguments, "--collect"])
    page = tmp_path / "tinybook-glu" / "quick.md"
    assert page.read_text() == "# tinybook-glu, scale quick\n"


# ---------------------------------------------------------------------- lm-evaluation-harness


@pytest.mark.slow
def test_letters_are_those_of_lm_evaluation_harness(tables, base):
    """200 questions, by `loglikelihood` of the harness's own model class."""
    harness = pytest.importorskip("lm_eval.models.huggingface")
    instance = importlib.import_module("lm_eval.api.instance").Instance
    model, tokenizer = base
    words = text.python_reference().split()
    items = []
    for number in range(200):
        drawn = words[20 * number : 20 * number + 20]
        choices = tuple(" ".join(drawn[4 * k : 4 * k + 4]) for k in range(1, 5))
        items.append(tables.choices.Item(" ".join(drawn[:4]), choices, number % 4, "law"))
    found = tables.choices.find_right_letters(model, tokenizer, items)
    wrapped = harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    requests = []
    for prompt in tables.choices.make_letter_prompts(items):
        for letter in "ABCD":
            pair = (prompt, f" {letter}")
            requests.append(instance("loglikelihood", {}, pair, len(requests)))
    scores = [value for value, _ in wrapped.loglikelihood(requests, disable_tqdm=True)]
    expected = []
    for number, item in enumerate(items):
        own = scores[4 * number : 4 * number + 4]
        expected.append(own.index(max(own)) == item.gold)
    assert found == expected
