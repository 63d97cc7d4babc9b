"""Settings are checked once, and completed from the preset of their method."""

from __future__ import annotations

import math

import pytest
from families import make_host

from locas_peft import backbone
from locas_peft.reading import METHODS, PRESETS, CompleteSettings, ReadingSettings, complete_all
from locas_peft.reading.settings import FIELDS
from locas_peft.ttt import TrainingSettings
from locas_peft.tuner import STRATEGIES

RATE = "give one, 1e-3 say; to read without learning, give the model without its adapter"


def complete(method: str, preset: str = "tuned", **given) -> CompleteSettings:
    return ReadingSettings(method=method, preset=preset, **given).complete()


RANGES = pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"stride": 0}, ValueError, "stride must be at least 1, got 0: raise it"),
        ({"stride": 8.0}, TypeError, "stride must be an int, got float: give a whole number"),
        ({"window": True}, TypeError, "window must be an int, got bool: give a whole number"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0: raise it"),
        ({"epochs": None}, TypeError, "epochs must be an int, got NoneType: give a whole number"),
        ({"readings": 0}, ValueError, "readings must be at least 1, got 0: raise it"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, got -1: raise it"),
        ({"decay_steps": -1}, ValueError, "decay_steps must be at least 0, got -1: raise it"),
        ({"decay_steps": 0.5}, TypeError, "decay_steps must be an int, got float: give a whole number"),
        (
            {"stride": 17},
            ValueError,
            "stride must be at most window, got stride 17 with window 16: lower stride or raise window",
        ),
        ({"context": "whole"}, ValueError, "context must be one of recompute, cache, got 'whole': choose one of them"),
        *(
            ({"learning_rate": rate}, ValueError, f"learning_rate must be a number above 0, got {rate}: {RATE}")
            for rate in (0.0, math.nan, math.inf)
        ),
    ],
    ids=str,
)


@RANGES
def test_values_out_of_range_are_named(given, error, message):
    with pytest.raises(error) as caught:
        TrainingSettings(**{"window": 16, "stride": 8, "learning_rate": 0.02} | given)
    assert str(caught.value) == message


@RANGES
def test_they_are_refused_where_they_are_given(given, error, message):
    given = {"window": 16, "stride": 8, "learning_rate": 0.02} | given
    if None in given.values():  # not given
        assert (
            ReadingSettings(**given).complete().training
            == ReadingSettings(window=16, stride=8, learning_rate=0.02).complete().training
        )
        return
    with pytest.raises(error) as caught:
        ReadingSettings(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "memo"}, "method must be one of none, lora, locas-glu, locas-mlp, got 'memo': choose one of them"),
        ({"preset": "best"}, "preset must be one of paper, tuned, got 'best': choose one of them"),
        ({"init": "zero"}, f"init must be one of {', '.join(STRATEGIES)}, got 'zero': choose one of them"),
        ({"update": "sgd"}, "update must be one of bp, nlsvd, got 'sgd': choose one of them"),
        ({"r": 0}, "r must be at least 1, got 0: raise it"),
        ({"max_tokens": 1}, "max_tokens must be at least 2, got 1: raise it"),
        ({"row_norm": -1.0}, "row_norm must be a finite number above 0, got -1.0: leave it out for the preset's"),
        ({"anchor": -1.0}, "anchor must be 0 or a finite number above, got -1.0: leave it out for the preset's"),
        *(
            (
                {"layers_to_transform": layers},
                "layers_to_transform must be 'upper' or a list of different layer indices from 0 on, got "
                f"{layers!r}: leave it out for all layers",
            )
            for layers in ("lower", [], [-1], [1, 1], [True], 3)
        ),
    ],
    ids=str,
)
def test_a_readings_values_out_of_range_are_named(given, message):
    with pytest.raises(ValueError) as caught:
        ReadingSettings(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("method", "preset", "given", "message"),
    [
        ("lora", "tuned", {"init": "topk"}, "init has no meaning for the method 'lora', got topk"),
        ("lora", "tuned", {"row_norm": 2.0}, "row_norm has no meaning for the method 'lora', got 2.0"),
        ("none", "tuned", {"r": 8}, "r has no meaning for the method 'none', got 8"),
        ("none", "tuned", {"anchor": 1.0}, "anchor has no meaning for the method 'none', got 1.0"),
        (
            "none",
            "tuned",
            {"layers_to_transform": "upper"},
            "layers_to_transform has no meaning for the method 'none', got upper",
        ),
        ("locas-glu", "tuned", {"update": "bp"}, "update has no meaning for the method 'locas-glu', got bp"),
        (
            "locas-mlp",
            "paper",
            {"update": "nlsvd", "learning_rate": 0.1},
            "learning_rate has no meaning with update='nlsvd', got 0.1",
        ),
        ("locas-mlp", "paper", {"update": "nlsvd", "anchor": 1}, "anchor has no meaning with update='nlsvd', got 1"),
        ("locas-mlp", "tuned", {"init": "topk", "epsilon": 0.1}, "epsilon has no meaning with init='topk', got 0.1"),
        ("lora", "tuned", {"anchor_every": 2}, "anchor_every has no meaning with anchor=None, got 2"),
        ("lora", "tuned", {"anchor": 0.0, "anchor_every": 2}, "anchor_every has no meaning with anchor=0.0, got 2"),
    ],
)  # fmt: skip
def test_values_that_a_method_does_not_have_are_refused(method, preset, given, message):
    with pytest.raises(ValueError) as caught:
        complete(method, preset, **given)
    assert str(caught.value) == f"{message}: leave it out"


def test_presets_fill_in_what_is_not_given():
    tuned, paper = complete("locas-glu", r=16), complete("locas-glu", "paper", r=16)
    assert (tuned.training.learning_rate, paper.training.learning_rate) == (4e-3, 4e-3)
    assert (tuned.method.scaling, tuned.method.init, tuned.method.anchor, tuned.method.anchor_every) == (
        1.0, "topk", 0.3, 4,
    )  # fmt: skip
    assert (paper.method.scaling, paper.method.init, paper.method.anchor) == (1.0, "topk", None)
    assert (tuned.method.output_scale, paper.method.output_scale) == ("measured", "paper")
    decay_steps = [each.training.decay_steps for each in (tuned, paper, complete("lora"))]
    assert decay_steps == [100, 0, 100]
    assert [each.training.brake for each in (tuned, paper)] == [True, False]
    assert complete("locas-glu", decay_steps=0).training.decay_steps == 0
    assert complete("locas-mlp", "paper", r=16).method.scaling == 16.0
    assert complete("locas-glu", scaling=2.5).method.scaling == 2.5
    lora, none = complete("lora"), complete("none")
    assert (lora.method.r, lora.training.learning_rate, lora.method.anchor) == (64, 1e-3, None)
    assert (none.method.r, none.training.learning_rate, none.method.anchor) == (None, None, None)


def test_the_record_has_every_setting_and_null_where_one_has_no_meaning():
    lora, none, study = complete("lora").to_json(), complete("none").to_json(), complete("lora", study=True).to_json()
    assert tuple(lora) == tuple(none) == FIELDS
    assert (lora["method"], lora["r"], lora["init"], lora["scaling"]) == ("lora", 64, None, None)
    without_meaning = ("r", "learning_rate", "decay_steps", "init", "scaling", "brake")
    assert {none[name] for name in without_meaning} == {None}
    assert (lora["study"], lora["exchanges"], study["study"], study["exchanges"], study["passes"]) == (
        False,
        None,
        True,
        12,
        4,
    )
    assert complete("locas-mlp", "paper", update="nlsvd").to_json()["decay_steps"] is None


def test_what_a_written_memory_does_not_use_is_left_out():
    bp, nlsvd = (complete("locas-mlp", "paper", update=update) for update in (None, "nlsvd"))
    topk = complete("locas-mlp")
    assert (bp.method.init, bp.method.update) == ("write", "bp") and bp.training.learning_rate and bp.method.epsilon
    assert nlsvd.training.learning_rate is None and nlsvd.method.epsilon
    method = topk.method
    assert topk.training.learning_rate and (method.update, method.epsilon, method.slots_per_chunk) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize("given", [{}, {"anchor": 0}, {"anchor": 0.5}], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_complete_settings_are_complete(method, preset, given):
    given = given if method != "none" else {}
    settings = complete(method, preset, **given)
    assert settings.complete() == settings == ReadingSettings(**settings.to_json()).complete()
    training = settings.training
    assert (training.window, training.stride, training.context) == (512, 256, "cache")
    assert settings.to_json()["anchor_every"] == (4 if settings.method.anchor else None)
    assert METHODS[method].presets.keys() == set(PRESETS)


def test_window_stride_and_context_suit_the_base():
    base = make_host("llama")  # 64 positions
    named, default = ReadingSettings(model="mine"), ReadingSettings()
    assert [getattr(named.complete(base).training, name) for name in ("window", "stride", "context")] == [
        64,
        32,
        "cache",
    ]
    assert named.complete(make_host("lfm2")).training.context == "recompute"  # its layers also keep other state
    assert named.complete(backbone.load()[0]).training.window == 2048
    assert default.complete(base).training.window == 64
    given = ReadingSettings(model="mine", window=20, context="cache").complete(base).training
    assert (given.window, given.stride, given.context) == (20, 10, "cache")


# Several methods


def test_each_method_uses_the_values_that_it_has():
    given = ReadingSettings(r=8, scaling=2.0, window=64)
    completed = complete_all(given, ["none", "lora@16:2e-3", "lora", "locas-glu:1e-3"])
    assert list(completed) == ["none", "lora@16-lr2e-3", "lora", "locas-glu-lr1e-3"]
    none, wide, lora, locas = completed.values()
    assert [settings.training.window for settings in completed.values()] == [64] * 4
    assert (none.method.name, none.method.r) == ("none", None)
    assert (wide.method.name, wide.method.r, wide.training.learning_rate) == ("lora", 16, 2e-3)
    assert (lora.method.r, lora.training.learning_rate) == (8, 1e-3)
    assert (locas.method.r, locas.training.learning_rate, locas.method.scaling) == (8, 1e-3, 2.0)
    assert locas == ReadingSettings(r=8, scaling=2.0, window=64, learning_rate=1e-3).complete()


@pytest.mark.parametrize(
    ("given", "methods", "message"),
    [
        ({"scaling": 2.0}, ["none", "lora"], "scaling has no meaning for the methods none, lora: leave it out"),
        ({"r": 8}, ["none", "lora@16"], "r has no meaning for the methods none, lora@16: leave it out"),
        ({}, ["lora", "lora"], "methods must name each once, got 'lora' twice: drop the second one"),
        ({}, ["none@8"], "r has no meaning for the method 'none', got 8: leave it out"),
        ({}, ["memo"], "method must be one of none, lora, locas-glu, locas-mlp, got 'memo': choose one of them"),
        *(
            ({}, [spec], f"method must be NAME, NAME@WIDTH, NAME:RATE or both, got {spec!r}: write lora@16:2e-3, say")
            for spec in ("", "lora@0", "lora@x", "lora:x", "lora:0", "lora:1e999", "lora:1e-3@8")
        ),
    ],
    ids=str,
)
def test_values_and_methods_that_do_not_fit_are_refused(given, methods, message):
    with pytest.raises(ValueError) as caught:
        complete_all(ReadingSettings(**given), methods)
    assert str(caught.value) == message


def test_the_settings_of_the_base_have_the_same_windows_and_no_adapter():
    settings = ReadingSettings(
        method="locas-glu", window=64, stride=16, context="cache", sinks=2, start_token=7, readings=2, study=True
    ).complete()
    base = settings.for_base(window=128)
    training = base.training
    assert (training.window, training.stride, training.sinks, training.start_token) == (128, 16, 2, 7)
    assert (base.method.name, training.learning_rate, training.readings, base.study) == ("none", None, 1, None)
