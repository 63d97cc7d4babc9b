"""Chat templates that print the date: what goes on after midnight has the prompts that it began with."""

import datetime

import pytest
from safetensors.torch import load_file
from training import assert_same
from transformers.utils import chat_template_utils

from locas_peft import backbone
from locas_peft.asking import current_day, dated, dates, encode_prompt
from locas_peft.evaluation import Run
from locas_peft.evaluation.units import Unit
from locas_peft.files import load_json
from locas_peft.selfstudy import Exchange
from locas_peft.stages import Place, ReadSettings, StudySettings, load_records, open_study, study
from locas_peft.text import tokenize

TEMPLATE = (
    "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}\n"
    "Today: {{ day }}\n{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
)
TEXT = "The lamp at Skarn was lit by Old Peder, the keeper of the rock, in the winter of 1868."
EXCHANGES = [
    Exchange("Who lit the lamp?", "Old Peder lit the lamp."),
    Exchange("When?", "In the winter of 1868."),
]
SETTINGS = StudySettings(r=8, passes=3, window=256, anchor=0.1, learning_rate=1e-2)


@pytest.fixture
def today(monkeypatch):
    """A function that sets today's date."""

    def set_day(day: str) -> None:
        chosen = datetime.datetime.fromisoformat(f"{day}T12:34:56")

        class Moment(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return chosen

        class Day(datetime.date):
            @classmethod
            def today(cls):
                return cls.fromisoformat(day)

        monkeypatch.setattr(chat_template_utils, "datetime", Moment)
        monkeypatch.setattr(dates, "date", Day)

    set_day("2026-11-30")
    return set_day


@pytest.fixture
def base():
    model, tokenizer = backbone.load()
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def make_study() -> tuple:
    """Return what a process has that begins or goes on: a base, its tokenizer, a text, settings."""
    model, tokenizer = backbone.load()
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer, tokenize(tokenizer, TEXT), SETTINGS


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_a_pinned_day_is_printed_in_place_of_today(today, base):
    tokenizer = base[1]
    prompt = encode_prompt(tokenizer, "Who?")
    assert tokenizer.decode(prompt) == "Today: 30 Nov 2026\n<user>Who?<answer>"
    with dated("2026-11-30"):
        today("2026-12-01")
        assert encode_prompt(tokenizer, "Who?") == prompt and current_day() == "2026-11-30"
    assert encode_prompt(tokenizer, "Who?") != prompt and current_day() == "2026-12-01"


@pytest.mark.parametrize(
    "format", ["%d %B %Y", "%Y-%m-%d", "%A %-d. %b %y", "%F", "%e %h", "100%%", "%j"]
)
def test_every_format_is_written(format, base):
    tokenizer = base[1]
    tokenizer.chat_template = (
        "{{ strftime_now(format) if format else strftime_now('" + format + "') }}!"
    )
    with dated("2026-03-07"):
        written = tokenizer.decode(encode_prompt(tokenizer, "Who?"))
    assert written == datetime.date(2026, 3, 7).strftime(format) + "!"


@pytest.mark.parametrize(
    "template", ["\n\n  {% if true %}a{% endif %}", "  {{ 'a' }}\n", "{# c #}\n b"]
)
def test_a_pinned_day_changes_nothing_else(template, base):
    tokenizer = base[1]
    tokenizer.chat_template = template + "{# strftime_now #}"
    expected = encode_prompt(tokenizer, "Who?")
    with dated("2026-03-07"):
        assert encode_prompt(tokenizer, "Who?") == expected


@pytest.mark.parametrize("day", ["today", 5, None])
def test_a_day_that_is_none_is_one_line(day):
    with pytest.raises(ValueError, match="^date must be a day such as 2026-11-26, got .*: correct"):
        with dated(day):
            pass


def test_a_study_that_goes_on_after_midnight_gives_the_same_bytes(today, tmp_path):
    whole, half, later = (tmp_path / name for name in ("whole", "half", "later"))
    study(*make_study(), Place(out=whole), exchanges=EXCHANGES)
    place = Place(out=half, checkpoint_dir=tmp_path / "kept", resume=True)
    with pytest.raises(KeyboardInterrupt):
        with open_study(*make_study(), place, exchanges=EXCHANGES) as run:
            for _ in run:
                raise KeyboardInterrupt
    today("2026-12-01")
    study(*make_study(), place, exchanges=EXCHANGES)
    (record,) = load_records(half)
    assert record.date == "2026-11-30" and record.kl_nats == load_records(whole)[0].kl_nats
    assert_same(weights(half), weights(whole))
    # The date is part of what is learned: else the test could not fail.
    study(*make_study(), Place(out=later), exchanges=EXCHANGES)
    expected = weights(whole)
    assert any((weight != expected[name]).any() for name, weight in weights(later).items())


def test_a_run_that_goes_on_after_midnight_has_the_date_of_its_first_day(today, tmp_path):
    def make(count, **options):
        """Run so many units; return the days on which they were made."""
        files = [tmp_path / "work" / f"{number}.json" for number in range(count)]
        units = [Unit(file, lambda: {"day": current_day()}) for file in files]
        methods = {"lora": ReadSettings(method="none")}
        Run(None, None, methods, tmp_path, **options).make("work", units)
        return [load_json(file)["day"] for file in files]

    assert make(1) == ["2026-11-30"]
    today("2026-12-01")
    assert make(2) == ["2026-11-30"] * 2
    assert make(2, overwrite=True) == ["2026-12-01"] * 2
