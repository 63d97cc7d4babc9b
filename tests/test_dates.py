"""Chat templates that print the date: what goes on after midnight has the prompts that it began with."""

import datetime
import json

import pytest
from safetensors.torch import load_file
from transformers.utils import chat_template_utils

from locas_peft import backbone
from locas_peft.asking import current_day, dated, dates, encode_prompt
from locas_peft.evaluation import Run
from locas_peft.evaluation.units import Unit
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


def test_a_day_that_is_none_is_one_line():
    for day in ("today", 5, None):
        message = "^date must be a day such as 2026-11-26, got .*: correct"
        with pytest.raises(ValueError, match=message):
            with dated(day):
                pass


def contents(folder):
    record = load_records(folder)[-1].to_json()
    times = [name for name in record if "seconds" in name] + ["peak_bytes", "memory_dir"]
    return {name: value for name, value in record.items() if name not in times}


def test_a_study_that_goes_on_after_midnight_gives_the_same_bytes(today, tmp_path):
    def load():
        model, tokenizer = backbone.load()
        tokenizer.chat_template = TEMPLATE
        return model, tokenizer, tokenize(tokenizer, TEXT)

    whole = Place(out=tmp_path / "whole")
    study(*load(), SETTINGS, whole, exchanges=EXCHANGES)
    place = Place(out=tmp_path / "half", checkpoint_dir=tmp_path / "kept", resume=True)
    with pytest.raises(KeyboardInterrupt):
        with open_study(*load(), SETTINGS, place, exchanges=EXCHANGES) as run:
            for _ in run:
                raise KeyboardInterrupt
    today("2026-12-01")
    study(*load(), SETTINGS, place, exchanges=EXCHANGES)
    assert contents(tmp_path / "half") == contents(tmp_path / "whole")
    assert contents(tmp_path / "half")["date"] == "2026-11-30"
    one, two = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("half", "whole")
    )
    assert one.keys() == two.keys() and all((one[key] == two[key]).all() for key in one)
    # The date is part of what is learned: else the test could not fail.
    study(*load(), SETTINGS, Place(out=tmp_path / "later"), exchanges=EXCHANGES)
    later = load_file(tmp_path / "later" / "adapter_model.safetensors")
    assert any((later[key] != two[key]).any() for key in two)


def test_a_run_that_goes_on_after_midnight_has_the_date_of_its_first_day(today, tmp_path):
    def make():
        return {"day": current_day()}

    methods = {"lora": ReadSettings(method="none")}
    for number, day in enumerate(("2026-11-30", "2026-12-01")):
        today(day)
        units = [Unit(tmp_path / "work" / f"{n}.json", make) for n in range(number + 1)]
        Run(None, None, methods, tmp_path).make("work", units)
    days = [json.loads((tmp_path / "work" / f"{n}.json").read_text())["day"] for n in (0, 1)]
    assert days == ["2026-11-30"] * 2
    Run(None, None, methods, tmp_path, overwrite=True).make("work", units)
    assert json.loads((tmp_path / "work" / "0.json").read_text())["day"] == "2026-12-01"
