"""The figures of the README and of `docs/results.md` are those of the results in `benchmarks/results`."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from locas_peft.evaluation.intervals import mean_interval

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
FOLDER = ROOT / "benchmarks" / "results"
HOST = "Qwen2.5-Coder-0.5B-Instruct"
PAPER = FOLDER / "paper" / HOST / "cpu"
PAPER_FLOAT32 = FOLDER / "paper-float32" / HOST / "cpu"
READINGS = PAPER / "readings"
BOOKS = ("3649", "36235")
SHORT_BOOKS = (*BOOKS, "5274", "17769", "28345", "36087")
BEST_LORA = "lora_learning_rate=0.0003"
ANCHORED_LORA = f"{BEST_LORA}_anchor=0.3_anchor_every=4"
ANCHORED_STUDY = "LoRA r=16, the study's lessons"
FREE_STUDY = f"{ANCHORED_STUDY}, no anchor"
README_STUDIES = {
    "no memory": "no context",
    "passage in context": "text in context",
    "BM25's sentences in context": "BM25 + base",
    "BM25's best sentence, no model": "BM25's best sentence, no model",
    "Locas r=64, studied": "study",
    "LoRA r=16, the same lessons, no anchor": FREE_STUDY,
    "LoRA r=16, with the anchor": ANCHORED_STUDY,
}
"""The rows of the README's table of studies, with their names on the page of the results."""
SLUGS = {
    "study": "study-seed0.json",
    FREE_STUDY: "lora-seed0.json",
    ANCHORED_STUDY: "lora-anchor-seed0.json",
}
ROWS = {
    "no memory": "none",
    "LoRA r=64": BEST_LORA,
    "Locas r=64": "locas-glu",
    "Locas r=16": "locas-glu_r=16",
}


def load_figures(book: str, row: str) -> dict:
    path = READINGS / f"{book}-50176" / f"{row}-seed0.json"
    return json.loads(path.read_text(encoding="utf-8"))["figures"]


def list_cells(name: str, page: str = README, head: str = "perplexity, book 3649") -> list[str]:
    """The cells of a row of the table that has this in its head, the README's table of readings say."""
    table = page.split(head, 1)[1].split("\n\n")[0]
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", table, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def perplexity_at(figures: dict, mark: int) -> float:
    """The perplexity of the chunks up to a mark, each of which is [end, scored tokens, nats]."""
    chunks = [chunk for chunk in figures["chunks"] if chunk[0] <= mark]
    assert chunks[-1][0] == mark
    return math.exp(sum(chunk[2] for chunk in chunks) / sum(chunk[1] for chunk in chunks))


def sum_nats(figures: dict) -> float:
    return sum(chunk[2] for chunk in figures["chunks"])


@pytest.mark.parametrize("name", ROWS)
def test_the_table_of_readings_has_the_figures_of_the_results(name):
    parameters, *perplexities, shares, behind = list_cells(name)
    figures = [load_figures(book, ROWS[name]) for book in BOOKS]
    if name != "no memory":
        assert int(parameters.replace(",", "")) == figures[0]["parameters"]
    assert perplexities == [f"{one['perplexity']:.2f}" for one in figures]
    if not name.startswith("Locas"):
        return
    gains = []
    for book, one in zip(BOOKS, figures, strict=True):
        base = math.log(load_figures(book, "none")["perplexity"])
        best = math.log(load_figures(book, BEST_LORA)["perplexity"])
        gains.append((base - math.log(one["perplexity"])) / (base - best))
    assert shares == ", ".join(f"{gain:.2f}" for gain in gains)
    differences = []
    for book, one in zip(BOOKS, figures, strict=True):
        chunks = zip(one["chunks"], load_figures(book, BEST_LORA)["chunks"], strict=True)
        interval = mean_interval([(own[2] - other[2]) / own[1] for own, other in chunks])
        differences.append("{mean:.3f} [{low:.3f}, {high:.3f}]".format(**interval))
    assert behind == ", ".join(differences)


def test_the_choice_between_a_memory_and_lora_rests_on_the_results():
    shares = []
    behind = []
    for book in BOOKS:
        none, best, locas = (
            load_figures(book, row)["perplexity"] for row in ("none", BEST_LORA, "locas-glu")
        )
        shares.append(math.log(none / locas) / math.log(none / best))
        behind.append(locas / best - 1)
    assert "two books: {:.0%} and {:.0%} of LoRA's gain".format(*shares) in README
    assert "Locas is {:.1%} and {:.1%} behind LoRA r=64".format(*behind) in README
    assert "Locas is {:.1%} and {:.1%} of perplexity behind TempLoRA".format(*behind) in RESULTS


def test_the_time_and_the_memory_of_a_reading_are_those_of_the_results():
    path = PAPER / "time" / "rows.json"
    rows = {
        row["row"]: row for row in json.loads(path.read_text(encoding="utf-8"))["figures"]["rows"]
    }
    lora = rows["TempLoRA r=64, default rate"]

    def find_ratio(row: dict, writing: float = 0.0) -> str:
        turns = zip(row["processor_seconds"], lora["processor_seconds"], strict=True)
        low, middle, high = statistics.quantiles(
            [(own + writing) / other for own, other in turns], method="inclusive"
        )
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    locas = rows["Locas r=64"]
    alone = find_ratio(locas)
    first = find_ratio(locas, locas["writing_processor_seconds"])
    bare = find_ratio(rows["Locas r=64, without the anchor"])
    peak = f"{locas['peak_bytes'] / lora['peak_bytes']:.2f}"
    times = f"takes {alone[:4]} of LoRA r=64's processor time (0.75 with AMX)"
    writing = f"{first[:4]} while the base writes the anchor's texts"
    assert f"{times}, {writing}, and {peak} of its peak memory" in README
    of_lora = alone.replace(" [", " of TempLoRA's processor time [quartiles ")
    assert f"{of_lora}, without it {bare}, with {peak} and" in RESULTS
    assert f"A first reading takes {first} of TempLoRA's time" in RESULTS


def test_a_longer_window_gains_what_the_pages_say():
    none, best, longer, locas = (
        load_figures("3649", row) for row in ("none", BEST_LORA, "none_window=16384", "locas-glu")
    )
    share = (sum_nats(none) - sum_nats(longer)) / (sum_nats(none) - sum_nats(best))
    assert f"a window of 16,384 tokens alone has {share:.0%} (one book)" in README
    cells = list_cells("no memory, window 16,384", RESULTS, "| book 3649 | parameters")
    assert cells[3] == f"{longer['perplexity']:.2f}"
    assert cells[5] == f"{share:.2f}"
    gain = (sum_nats(none) - sum_nats(longer)) / (sum_nats(none) - sum_nats(locas))
    assert f"gains {gain:.0%} of what Locas gains" in RESULTS


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("no memory", "none"),
        ("TempLoRA r=64, 3e-4", BEST_LORA),
        ("TempLoRA r=64, 1e-3, its default", "lora"),
        ("Locas r=64, the default", "locas-glu"),
        ("Locas r=16", "locas-glu_r=16"),
        ("Locas r=64 with gains", "locas-glu_gains=True"),
    ],
)
def test_the_table_of_six_books_has_the_figures_of_the_results(name, row):
    *cells, _ = list_cells(name, RESULTS, "| book | 3649 | 36235 | 5274")
    expected = []
    for book in SHORT_BOOKS:
        length = 50_176 if book in BOOKS else 12_288
        path = READINGS / f"{book}-{length}" / f"{row}-seed0.json"
        if path.is_file():
            figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
            expected.append(f"{perplexity_at(figures, 12_288):.2f}")
        else:
            expected.append("-")
    assert cells == expected


@pytest.mark.parametrize(
    ("name", "row", "row_of_64"),
    [
        ("TempLoRA", "lora_r={}_learning_rate=0.0003", BEST_LORA),
        ("Locas", "locas-glu_r={}", "locas-glu"),
    ],
)
def test_the_table_of_widths_has_the_figures_of_the_results(name, row, row_of_64):
    expected = []
    for width in (16, 32, 64, 128):
        file = row_of_64 if width == 64 else row.format(width)
        path = READINGS / "3649-12288" / f"{file}-seed0.json"
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        expected.append(f"{figures['perplexity']:.2f}")
    assert list_cells(name, RESULTS, "| r | 16 | 32 | 64 | 128 |") == expected


@pytest.mark.parametrize(
    ("name", "rate", "row"),
    [
        ("`topk` clones, the default", 0.004, "locas-glu"),
        ("`random` clones", 0.004, "locas-glu_init=random"),
        ("`activation`", 0.004, "locas-glu_init=activation"),
        ("`bottomk` clones", 0.002, "locas-glu_init=bottomk_learning_rate=0.002"),
        ("`gaussian`", 0.002, "locas-glu_init=gaussian_learning_rate=0.002"),
    ],
)
def test_the_table_of_initialisations_has_the_figures_of_the_results(name, rate, row):
    perplexities = []
    for seed in range(3):
        path = READINGS / "3649-12288" / f"{row}-seed{seed}.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        perplexities.append(record["figures"]["perplexity"])
    found_rate, perplexity, _ = list_cells(name, RESULTS, "| | rate | perplexity | nats a token to")
    assert float(found_rate) == rate
    assert perplexity == f"{sum(perplexities) / 3:.2f}"
    assert statistics.stdev(perplexities) <= 0.06


def find_range(runs: list[dict], figure: str, digits: int) -> str:
    values = [run[figure] for run in runs]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


@pytest.mark.parametrize(
    ("name", "method"),
    [("no memory", "none"), ("Locas r=64", "locas-glu"), ("LoRA r=64", "lora")],
)
def test_the_table_of_the_demo_has_the_ranges_of_its_runs(name, method):
    runs = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))
    runs = [run for run in runs if run["method"] == method]
    assert len({(run["threads"], run["dtype"], run["seed"]) for run in runs}) == 8
    parameters, perplexity, change = list_cells(name, README, "| method | parameters |")
    assert int(parameters.replace(",", "")) == runs[0]["extra_parameters"]
    assert perplexity == find_range(runs, "perplexity", 2)
    if method != "none":
        assert change == find_range(runs, "own_answers_kl", 3)


def list_studies(host: str, heading: str = "") -> dict[str, list[str]]:
    """The cells of each row of a host's table of studies, by the row's name.

    It is the first table, or the one below a heading.
    """
    page = (FOLDER / "knowledge" / host / "full.md").read_text(encoding="utf-8")
    page = page[page.index(heading) :]
    table = page.split("|  | gold within |", 1)[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.strip().split("\n")[2:]]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def describe_time(host: str, row: str) -> str:
    """The mean seconds of a row's studies of single passages, and of writing their questions."""
    seconds = []
    writing = []
    for file in sorted((FOLDER / "knowledge" / host / "full" / "squad").glob(f"squad-0*/{row}")):
        cost = json.loads(file.read_text(encoding="utf-8"))["figures"]["cost"]
        seconds.append(cost["processor_seconds"])
        writing.append(cost["record"]["writing_seconds"])
    mean = "{mean:.0f} [{low:.0f}, {high:.0f}]".format(**mean_interval(seconds))
    if not any(writing):
        return f"{mean}, without writing"
    return f"{mean}, of which {statistics.mean(writing):.0f} writing"


@pytest.mark.parametrize(("name", "row"), README_STUDIES.items())
def test_the_table_of_studies_has_the_figures_of_the_results(name, row):
    right, f1, divergence, seconds = list_cells(name, README, "| | right | F1, %")
    cells = list_studies(HOST)[row]
    assert right == cells[0]
    assert f1 == cells[2]
    if cells[9] != "-":
        numbers = [float(number) for number in re.findall(r"[\d.]+", cells[9])]
        assert divergence == "{:.3f} [{:.3f}, {:.3f}]".format(*numbers)
        assert seconds == describe_time(HOST, SLUGS[row])


@pytest.mark.parametrize(
    ("rate", "row"),
    [
        ("0.006", "study"),
        ("0.0001", "lora_lora.learning_rate=0.0001"),
        ("0.0003", "lora_lora.learning_rate=0.0003"),
        ("0.001", "lora_lora.learning_rate=0.001"),
        ("0.0015, its default", "lora"),
    ],
)
def test_the_rates_of_a_study_by_lora_have_the_figures_of_the_results(rate, row):
    folder = FOLDER / "knowledge" / "smollm2" / "full-choose" / "squad"
    results = []
    for file in folder.glob(f"*/{row}-seed0.json"):
        results.append(json.loads(file.read_text(encoding="utf-8"))["figures"])
    assert len(results) == 3
    right = sum(one["right"] for one in results)
    costs = [one["cost"] for one in results]
    change = statistics.mean(statistics.mean(cost["own_answers_kl"]) for cost in costs)
    rises = [cost["unread_perplexity"] / cost["unread_base_perplexity"] - 1 for cost in costs]
    figures = f"| {rate} | {right} | {change:.3f} | {statistics.mean(rises):+.1%} |"
    assert figures in RESULTS


def test_the_choice_of_a_method_rests_on_the_table_of_studies():
    choice = README.split("## When a memory is the right choice", 1)[1].split("\n## ")[0]

    def find_right(name: str) -> str:
        return list_cells(name, README, "| | right | F1, %")[0].split()[0]

    studies = list_studies(HOST)
    anchored = studies.pop(ANCHORED_STUDY)
    assert f"The last row has {anchored[-1]} questions" in README
    # The other rows have the same questions.
    (count,) = {studies[row][-1] for row in README_STUDIES.values() if row != ANCHORED_STUDY}
    assert f"{find_right('passage in context')}% of {count} questions right" in choice
    joined = list_studies(HOST, "12 passages in one memory")
    names = ("BM25's best sentence, no model", "study", "study, and BM25's sentences")
    printed, remembered, both = (joined[name][0].split()[0] for name in names)
    asked = joined["study"][-1]
    of_twelve = f"of 12 paragraphs BM25's best sentence answers {printed}% of {asked} questions"
    assert f"{of_twelve}, a memory {remembered}%, with BM25's sentences {both}%" in choice
    studied = find_right("Locas r=64, studied")
    assert f"{studied}% of {count}; without a memory {find_right('no memory')}%" in choice


JOINED_ROWS = {
    "no context": "no context",
    "the question's passage in context": "text in context",
    "BM25's three sentences in context": "BM25 + base",
    "BM25's best sentence, no model": "BM25's best sentence, no model",
    "all-MiniLM-L6-v2's three sentences in context": "all-MiniLM-L6-v2 + base",
    "Locas r=64, studied": "study",
}
TWENTY = {
    **JOINED_ROWS,
    "LoRA r=16, the same lessons, with the anchor": ANCHORED_STUDY,
    "CARTRIDGE, from the text": "CARTRIDGE, from the text",
    "CARTRIDGE, random": "CARTRIDGE, random",
}
BOTH = "the same, and BM25's sentences in context"
TWELVE = {
    **JOINED_ROWS,
    BOTH: "study, and BM25's sentences",
    "CARTRIDGE, from the text": "CARTRIDGE, from the text",
    "CARTRIDGE, random": "CARTRIDGE, random",
}


def check_joined(title: str, host: str, heading: str, name: str, row: str) -> None:
    """Compare a row of a section of the results with the one of the page of all results."""
    section = RESULTS.split(title, 1)[1]
    cells = list_cells(name, section, "| | parameters | right, %")
    parameters, right, f1, kl, unread, seconds = cells
    figures = list_studies(host, heading)[row]
    assert [right, f1] == [figures[0], figures[2]]
    if figures[7] == "-":
        return
    assert parameters == figures[8]
    if name == BOTH:
        assert not kl and not unread and not seconds
        return
    # The page has four digits.
    assert abs(float(kl) - float(figures[9])) <= 0.00055
    digits = len(unread.strip("%").partition(".")[2])
    assert unread == f"{float(figures[10]):+.{digits}f}%"
    assert seconds.split(", without")[0] == f"{float(figures[7]):,.0f}"


@pytest.mark.parametrize(("name", "row"), TWENTY.items())
def test_the_table_of_twenty_passages_has_the_figures_of_the_results(name, row):
    title = "### Twenty passages in one memory"
    check_joined(title, "smollm2", "20 passages in one memory", name, row)


@pytest.mark.parametrize(("name", "row"), TWELVE.items())
def test_the_table_of_twelve_passages_has_the_figures_of_the_results(name, row):
    check_joined("### Twelve passages, Qwen", HOST, "12 passages in one memory", name, row)


@pytest.mark.parametrize("page", ["expedition", "ferry", "foundry", "garden", "theatre"])
def test_the_table_of_pages_has_the_figures_of_the_results(page):
    folder = FOLDER / "knowledge" / "smollm2" / "full" / "pages" / page
    right = {}
    for file in folder.glob("*.json"):
        right[file.stem] = json.loads(file.read_text(encoding="utf-8"))["figures"]["right"]
    studied, _, in_context, *_ = list_cells(page, RESULTS, "| right of 20 | Locas, seeds 0 and 1")
    assert studied == f"{right['study-seed0']}, {right['study-seed1']}"
    assert in_context == str(right["context"])


def find_article_change(host: str, row: str) -> list[str]:
    """The mean change of the article's perplexity by the memories of a row, and its interval, in %."""
    numbers = re.findall(r"-?[\d.]+", list_studies(host)[row][11])
    return [f"{float(number):,.0f}" for number in numbers]


def test_what_a_study_does_to_an_unread_book_is_that_of_the_results():
    studies = list_studies(HOST)
    locas, *ends = re.findall(r"-?[\d.]+", studies["study"][10])
    lora = re.findall(r"-?[\d.]+", studies[FREE_STUDY][10])[0]
    interval = ", ".join(f"{float(end):.1f}" for end in ends)
    assert (
        f"is {float(locas):.1f}% [{interval}] higher (LoRA without the anchor: {float(lora):.0f}%)"
        in README
    )


def test_what_a_study_does_to_its_article_is_that_of_the_results():
    qwen, *qwen_ends = find_article_change(HOST, "study")
    small, *small_ends = find_article_change("smollm2", "study")
    lora, *lora_ends = find_article_change("smollm2", FREE_STUDY)
    assert f"that of the rest of its article {qwen}%." in README
    with_locas = f"by {qwen}% [{', '.join(qwen_ends)}] with Locas"
    other, *other_ends = find_article_change(HOST, FREE_STUDY)
    assert f"{with_locas}, by {other}% [{', '.join(other_ends)}] with LoRA" in RESULTS
    with_locas = f"of the same article rise by {small}% [{', '.join(small_ends)}] with Locas"
    assert f"{with_locas}, by {lora}% [{', '.join(lora_ends)}] with LoRA" in RESULTS


@pytest.mark.parametrize(
    ("name", "row", "digits"),
    [
        ("Locas, read once", "Locas, read 1 times", 2),
        ("Locas, read 4 times", "Locas, read 4 times", 1),
        ("Locas, read 10 times", "Locas, read 10 times", 1),
        ("Locas, studied", "Locas, studied", 1),
        (
            "LoRA r=16, the same lessons, without the anchor (one passage)",
            "LoRA r=16, studied, no anchor",
            1,
        ),
    ],
)
def test_the_table_of_fictional_passages_has_the_figures_of_the_results(name, row, digits):
    page = (FOLDER / "knowledge-float32" / "smollm2" / "full.md").read_text(encoding="utf-8")
    cells = list_cells(name, RESULTS, "| | the text's wording | paraphrase")
    found = list_cells(row, page, "|  | the text's wording: nats a target")
    for cell, change in zip(cells[:3], (found[1], found[4], found[7]), strict=True):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", change)]
        expected = [f"{number:.{digits}f}" for number in numbers]
        assert re.findall(r"-?[\d.]+", cell) == expected
    assert f"{float(found[9].split()[0]):,.0f}" in cells[5]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("base", "base"),
        ("TempLoRA r=64, 3e-4", "TempLoRA r=64 at 0.0003"),
        ("Locas r=64", "Locas r=64 at 0.004"),
    ],
)
def test_the_table_of_the_dialogues_has_the_figures_of_the_results(name, row):
    page = (FOLDER / "paper-float32" / HOST / "cpu.md").read_text(encoding="utf-8")
    cells = list_cells(name, RESULTS, "| | dialogue in the context | change from the base")
    expected = []
    for setting in ("full-context", "no-context"):
        *_, answerable, _, change = list_cells(f"{row}, {setting}", page, "|  | multi-hop")
        expected.append(answerable)
        numbers = re.findall(r"-?[\d.]+", change)
        expected.append("-")
        if row != "base":
            expected[-1] = "{:.1f} [{:.1f}, {:.1f}]".format(*map(float, numbers))
    assert cells == expected


def test_the_dialogues_temporal_questions_and_the_distance_to_lora_are_those_of_the_results():
    scores = json.loads((PAPER_FLOAT32 / "locomo-f1.json").read_text(encoding="utf-8"))
    none, lora, locas = (scores[name]["no-context"] for name in ("none", "lora-best", "locas"))
    assert f"F1 of the {len(none)} that have an answer" in RESULTS
    behind = 100 * statistics.mean(lora[key] - locas[key] for key in none)
    assert f"is {behind:.1f} points behind it" in RESULTS
    answers = json.loads((PAPER_FLOAT32 / "locomo.json").read_text(encoding="utf-8"))["answers"]
    before = answers["none"]["no-context"]["none"]["temporal"]["mean"]
    after = answers["lora-best"]["no-context"]["right"]["temporal"]["mean"]
    assert f"(temporal questions: {100 * before:.1f}, with TempLoRA {100 * after:.1f})" in RESULTS


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Locas r=64", "locas-glu"),
        ("Locas r=64, without the anchor", "locas-glu_anchor=0.0_anchor_every=None"),
        ("TempLoRA r=64, 3e-4", BEST_LORA),
        ("TempLoRA r=64, 3e-4, with the anchor", ANCHORED_LORA),
        ("TempLoRA r=64, 1e-3, its default", "lora"),
    ],
)
def test_what_a_whole_book_changes_is_that_of_the_results(name, row):
    divergence, unread, *_ = list_cells(name, RESULTS, "| | KL, nats a token | unread book")

    def load(measure: str) -> dict:
        path = PAPER / "mmlu" / row / f"{measure}.json"
        return json.loads(path.read_text(encoding="utf-8"))["figures"]

    interval = mean_interval(load("own-answers")["chunk_kl_nats"])
    assert divergence == "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**interval)
    assert unread == f"{load('unread')['perplexity']:.2f}"


@pytest.mark.parametrize(
    ("name", "row"), [("Locas r=64", "locas-glu"), ("TempLoRA r=64, 3e-4", ANCHORED_LORA)]
)
def test_forgetting_over_books_has_the_figures_of_the_results(name, row):
    means = []
    for book in ("17769", "28345", "36087"):
        file = PAPER_FLOAT32 / "forgetting" / f"{book}-12288" / f"{row}.json"
        kls = json.loads(file.read_text(encoding="utf-8"))["figures"]["chunk_kl_nats"]
        means.append(statistics.mean(kls))
    mean = "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**mean_interval(means))
    expected = [*(f"{value:.3f}" for value in means), mean]
    assert list_cells(name, RESULTS, "| KL, nats a token, float32 |") == expected


def list_baselines() -> list[list[str]]:
    """The rows of the table of other methods."""
    table = RESULTS.split("| | rate | parameters | perplexity | gain", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[2:]]


@pytest.mark.parametrize("cells", list_baselines(), ids=lambda cells: cells[0])
def test_the_table_of_other_methods_has_the_figures_of_the_results(cells):
    name, rate, parameters, perplexity, *_, seconds, peak, divergence = cells
    file = name.replace(" ", "-").replace(",", "")
    rate = None if rate == "-" else float(rate)
    path = PAPER / "baselines" / "3649-8192" / f"{file}-{rate}.json"
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert parameters == f"{figures['parameters']:,}"
    assert perplexity == f"{figures['perplexity']:.2f}"
    assert seconds == f"{figures['processor_seconds']:.0f}"
    assert peak == f"{figures['peak_bytes'] / 2**30:.2f}"
    kls = figures["own_answers_kl"]
    assert float(divergence.split()[0]) == pytest.approx(sum(kls) / len(kls), abs=6e-4)
