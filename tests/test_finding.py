"""What finds the passages of a study by a question: ridge regression on the base's hidden states, and its file."""

from dataclasses import replace

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from locas_peft import LocasConfig, backbone
from locas_peft.asking import encode_answer, encode_question
from locas_peft.reading import ReadingSettings, memorize
from locas_peft.selfstudy import Exchange, Finder, load_finder, save_exchanges
from locas_peft.selfstudy.exchanges import digest_exchanges, join_exchanges
from locas_peft.selfstudy.finding import (
    DEPTHS,
    MEMORY,
    RIDGE,
    WORDS,
    has_learned,
    measure_moments,
    save_moments,
    score_by_words,
)
from locas_peft.text import tokenize

PASSAGES = [
    "The keeper of the old house was Anna.",
    "The garden was small and had a wall.",
    "Bread is baked on Monday.",
]
EXCHANGES = [
    Exchange("Who was the keeper?", PASSAGES[0]),
    Exchange("What was small?", PASSAGES[1]),
    Exchange("When is bread baked?", PASSAGES[2]),
    Exchange("Who lived in the old house?", PASSAGES[0]),
]


@pytest.fixture(scope="module")
def base():
    return backbone.load()


def read(model, tokenizer, text):
    """The tokens of a text's second copy as four layers get them, each of mean square 1, [L, T, D]."""
    once, between = (tokenizer(each)["input_ids"] for each in (text, "\n"))
    states = model(
        torch.tensor([[*once, *between, *once]]), output_hidden_states=True
    ).hidden_states
    chosen = torch.stack(
        [states[int(depth * (len(states) - 1))][0, -len(once) :].float() for depth in DEPTHS]
    )
    return chosen / (chosen.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def fit_rows(model, tokenizer, exchanges):
    return measure_moments(model, tokenizer, exchanges).fit_rows()


def alone(model, tokenizer, rows):
    """A finder that looks for no words."""
    return Finder(model, tokenizer, dict.fromkeys(PASSAGES, ""), rows)


@torch.no_grad()
def test_the_rows_are_the_ridge_regression_of_the_passages_on_their_tokens(base):
    rows = fit_rows(*base, EXCHANGES)
    texts = [(passage, number) for number, passage in enumerate(PASSAGES)]
    texts += [(each.question, PASSAGES.index(each.answer)) for each in EXCHANGES]
    inputs = torch.cat([read(*base, text) for text, _ in texts], 1).double()
    owners = torch.cat(
        [torch.full((len(base[1](text)["input_ids"]),), number) for text, number in texts]
    )
    targets = torch.where(owners[:, None] == torch.arange(3), 1.0, -1.0).double()
    size = inputs.shape[-1]
    for layer, found in zip(inputs, rows, strict=True):  # least squares with the ridge as more rows
        more = torch.cat([layer, (RIDGE * size) ** 0.5 * torch.eye(size).double()])
        expected = torch.linalg.lstsq(
            more, torch.cat([targets, torch.zeros(size, 3).double()])
        ).solution
        torch.testing.assert_close(found.double(), expected.T, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_a_passages_score_is_its_best_tokens_averaged_over_the_layers(base):
    rows, asked = (
        fit_rows(*base, EXCHANGES),
        ["Who kept the house?", "What had a wall around it, as it was small?"],
    )
    found = alone(*base, rows)(asked)
    for question, each in zip(asked, found, strict=True):
        scores = (read(*base, question) @ rows.mT).amax(1).mean(0).tolist()
        expected = dict(zip(PASSAGES, scores, strict=True))
        assert (
            each == pytest.approx(expected, abs=1e-4)
            and list(each) == sorted(expected, key=expected.get)[::-1]
        )
    first = [next(iter(each)) for each in alone(*base, rows)([each.question for each in EXCHANGES])]
    assert first == [each.answer for each in EXCHANGES]


@torch.no_grad()
def test_the_words_of_a_passage_and_its_questions_count_too(base):
    rows, asked = fit_rows(*base, EXCHANGES), ["When is bread baked?", "Who wrote this play?"]
    held = join_exchanges(EXCHANGES)
    words = dict(
        zip(
            held, score_by_words([[each] for each in held.values()], asked)[0].tolist(), strict=True
        )
    )
    assert words[PASSAGES[2]] > 1 > words[PASSAGES[0]]
    with_words, without = Finder(*base, held, rows)(asked), alone(*base, rows)(asked)
    for passage in PASSAGES:
        expected = without[0][passage] + WORDS * words[passage]
        assert with_words[0][passage] == pytest.approx(expected, abs=1e-5)
    assert with_words[1] == pytest.approx(without[1], abs=1e-5), (
        "no word of the second question is in the text"
    )


def test_a_question_about_other_names_finds_nothing(base):
    rows, held = fit_rows(*base, EXCHANGES), join_exchanges(EXCHANGES)
    asked = [
        "Who wrote Hamlet?",
        "Was Hamlet baked on Monday?",
        "who wrote it?",
        "Hamlet, who wrote it?",
    ]
    assert [len(each) for each in Finder(*base, held, rows)(asked)] == [0, 3, 3, 3], (
        "the first word of a question is not taken for a name"
    )
    assert [len(each) for each in alone(*base, rows)(asked)] == [3, 3, 3, 3]


def test_a_memory_does_not_change_what_is_found(base):
    model, tokenizer = backbone.load()
    model = get_peft_model(model, LocasConfig(r=4, init_weights="random"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    torch.testing.assert_close(fit_rows(model, tokenizer, EXCHANGES), fit_rows(*base, EXCHANGES))


def test_one_memory_that_has_learned_chooses_among_what_is_found(tmp_path, base):
    model, tokenizer = backbone.load()
    model = get_peft_model(model, LocasConfig(r=4, init_weights="random")).eval()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_exchanges(tmp_path / name / "exchanges.jsonl", EXCHANGES)
    asked, given = (
        [each.question for each in EXCHANGES],
        (tmp_path / "one", [tmp_path / "one", tmp_path / "two"]),
    )
    expected, together = (load_finder(each, *base)(asked) for each in given)
    assert load_finder(tmp_path / "one", model, tokenizer)(asked) == expected, (
        "it has learned nothing"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "locas_down" in name:
                parameter.normal_(std=20.0)
    found, several = (load_finder(each, model, tokenizer)(asked) for each in given)
    assert several == together, "of several none is asked"
    for question, scores, own in zip(asked, found, expected, strict=True):
        prompt, nats = encode_question(tokenizer, question), []
        for passage in own:
            ids = torch.tensor([[*prompt, *encode_answer(tokenizer, passage)]])
            with torch.no_grad():
                logs = model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            nats.append(logs.gather(1, ids[0, len(prompt) :, None]).sum())
        shares = torch.stack(nats).softmax(0)
        heard = {
            each: own[each] + MEMORY * share.item() for each, share in zip(own, shares, strict=True)
        }
        assert scores == pytest.approx(heard, rel=1e-3)
        assert list(scores) == sorted(heard, key=heard.get, reverse=True)


def test_a_memory_chooses_where_it_is_active_and_the_question_leaves_room(tmp_path, base):
    model, tokenizer = backbone.load()
    model = get_peft_model(model, LocasConfig(r=4, init_weights="random")).eval()
    model.add_adapter("other", LocasConfig(r=4, init_weights="random"))
    save_exchanges(tmp_path / "exchanges.jsonl", EXCHANGES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "locas_down.default" in name:
                parameter.normal_(std=20.0)
    asked, find = [EXCHANGES[0].question], load_finder(tmp_path, model, tokenizer)
    plain = load_finder(tmp_path, *base)
    assert has_learned(model) and find(asked) != plain(asked)
    with model.disable_adapter():
        assert not has_learned(model) and find(asked) == plain(asked)
    model.set_adapter("other")
    assert not has_learned(model) and find(asked) == plain(asked), "the other one has learned"
    model.set_adapter("default")
    long = ["house " * base[0].config.max_position_embeddings]
    assert find(long) == plain(long)


def test_a_studied_memory_has_its_moments_and_without_them_they_are_measured(
    tmp_path, base, monkeypatch
):
    model, tokenizer = backbone.load()
    settings = ReadingSettings(r=4, anchor=0.0, study=True, passes=1).complete(model)
    text, folder = tokenize(tokenizer, " ".join(PASSAGES)), tmp_path / "m"
    memorize(model, text, settings, out=folder, tokenizer=tokenizer, exchanges=EXCHANGES)
    measured = []

    def measure(*given):
        measured.append(given)
        return measure_moments(*given)

    monkeypatch.setattr("locas_peft.selfstudy.finding.measure_moments", measure)
    asked = ["Who kept the house?", "Is there bread?"]
    found = load_finder(folder, *base)(asked)
    assert not measured
    fresh = Finder(*base, join_exchanges(EXCHANGES), fit_rows(*base, EXCHANGES))(asked)
    for each, other in zip(found, fresh, strict=True):
        assert each == pytest.approx(other, abs=1e-2), "in half precision"
    path = folder / "passages.safetensors"
    tensors, size = load_file(path), base[0].config.hidden_size
    gram, sums, tokens = (tensors[name] for name in ("gram", "sums", "tokens"))
    assert gram.dtype == sums.dtype == torch.float16 and sums.shape == (len(DEPTHS), 3, size)
    assert gram.shape == (len(DEPTHS), size * (size + 1) // 2) and tokens.numel() == 1
    texts = [*PASSAGES, *(each.question for each in EXCHANGES)]
    assert tokens.item() == pytest.approx(
        sum(len(base[1](each)["input_ids"]) for each in texts), rel=1e-4
    )
    kept = path.read_bytes()
    for change in (
        path.unlink,
        lambda: save_file(
            {**tensors, "sums": sums[:, :2].contiguous()},
            path,
            {"exchanges": digest_exchanges(EXCHANGES)},
        ),
        lambda: save_file(tensors, path, {"exchanges": "0"}),
    ):
        change()
        before = len(measured)
        assert load_finder(folder, *base)(asked)[0] and len(measured) == before + 1
    path.write_bytes(kept[:100])
    with pytest.raises(
        ValueError, match="passages.safetensors is truncated or not a safetensors file"
    ):
        load_finder(folder, *base)
    (folder / "exchanges.jsonl").unlink()
    with pytest.raises(
        ValueError,
        match="^a memory must have its exchanges.jsonl beside it to recite, got '.*m' without",
    ):
        load_finder(folder, *base)


def test_a_studied_memory_goes_on_without_a_tokenizer_and_its_moments_are_measured_later(tmp_path):
    model, tokenizer = backbone.load()
    text, settings = tokenize(tokenizer, " ".join(PASSAGES)), ReadingSettings(r=4, anchor=0.0)
    study = replace(settings, study=True, passes=1).complete(model)
    memorize(model, text, study, out=tmp_path / "m", tokenizer=tokenizer, exchanges=EXCHANGES)
    memorize(model, text, settings.complete(model), out=tmp_path / "m", start=tmp_path / "m")
    assert (tmp_path / "m/exchanges.jsonl").is_file() and not (
        tmp_path / "m/passages.safetensors"
    ).exists()
    assert (
        list(load_finder(tmp_path / "m", model, tokenizer)([EXCHANGES[1].question])[0])[0]
        == PASSAGES[1]
    )


def test_several_memories_are_searched_as_one_memory_of_all_texts(tmp_path, base):
    own, asked = (EXCHANGES[:2], EXCHANGES[2:]), [each.question for each in EXCHANGES]
    assert {each.answer for each in own[0]} & {each.answer for each in own[1]}, (
        "a passage is in both"
    )
    for name, exchanges in zip(("one", "two"), own, strict=True):
        (tmp_path / name).mkdir()
        save_exchanges(tmp_path / name / "exchanges.jsonl", exchanges)
        save_moments(tmp_path / name, measure_moments(*base, exchanges), exchanges)
    found = load_finder([tmp_path / "one", tmp_path / "two"], *base)(asked)
    # Each memory has read the passage of both, so that its own tokens count twice.
    text = [*EXCHANGES[:2], *EXCHANGES[2:], Exchange(PASSAGES[0], PASSAGES[0])]
    rows = fit_rows(*base, text)
    expected = Finder(*base, join_exchanges(EXCHANGES), rows)(asked)
    for each, other in zip(found, expected, strict=True):
        assert each == pytest.approx(other, abs=1e-2) and next(iter(each)) == next(iter(other))
    apart = load_finder(tmp_path / "two", *base)(asked[:1])[0]
    assert set(apart) == {PASSAGES[0], PASSAGES[2]}
    with pytest.raises(
        ValueError,
        match=r"^a memory must have its exchanges.jsonl beside it to recite, got '.' without",
    ):
        load_finder([], *base)


def test_the_first_of_several_memories_corrects_the_answers_of_the_others(tmp_path, base):
    new = [Exchange(EXCHANGES[2].question.upper(), "Bread is baked at night."), EXCHANGES[1]]
    for name, exchanges in (("new", new), ("old", EXCHANGES)):
        (tmp_path / name).mkdir()
        save_exchanges(tmp_path / name / "exchanges.jsonl", exchanges)
    found = load_finder([tmp_path / "new", tmp_path / "old"], *base)([EXCHANGES[2].question])[0]
    assert PASSAGES[2] not in found and set(found) == {"Bread is baked at night.", *PASSAGES[:2]}


def test_a_study_of_no_passes_teaches_nothing_and_makes_what_finds(tmp_path):
    model, tokenizer = backbone.load()
    text, settings = (
        tokenize(tokenizer, " ".join(PASSAGES)),
        ReadingSettings(r=4, anchor=0.3, study=True, passes=0),
    )
    made = memorize(
        model,
        text,
        settings.complete(model),
        out=tmp_path / "m",
        tokenizer=tokenizer,
        exchanges=EXCHANGES,
    )
    assert (made.studied["kept"], made.studied["steps"], made.extra_parameters) == (4, 0, 0)
    read = memorize(model, text, ReadingSettings(method="none").complete(model))
    assert made.nll_nats == pytest.approx(read.nll_nats, rel=1e-6)
    saved = load_file(tmp_path / "m/adapter_model.safetensors")
    values = [tensor for name, tensor in saved.items() if "down" in name]
    assert values and not any(each.count_nonzero() for each in values)
    assert (
        next(iter(load_finder(tmp_path / "m", model, tokenizer)(["When is bread baked?"])[0]))
        == PASSAGES[2]
    )
