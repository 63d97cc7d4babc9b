"""Settings are checked once, and completed from the preset of their method."""

from __future__ import annotations

import math

import pytest
from families import make_host
from locas_peft.reading import METHODS, PRESETS, CompleteSettings, ReadingSettings, complete_all
from locas_peft.reading.settings import FIELDS

from locas_peft import backbone
from locas_peft.ttt import TrainingSettings
from locas_peft.tuner import STRATEGIES

LAYERS = "be 'upper' or a list of different layer indices from 0 on, got {got}: leave it out for all layers"
RATE = "give one, 1e-3 say; to read without learning, give the model without its adapter"


def complete(method: str, preset: str = "tuned", **given) -> CompleteSettings:
    return ReadingSettings(method=method, preset=preset, **given).complete()


def expand(table):
    """A case for each value of a row: the field, the value, the error and its message."""
    rows = (
        (field, error, rule, value) for field, error, rule, *values in table for value in values
    )
    return [
        (field, value, error, f"{field} must {rule.format(got=repr(value))}")
        for field, error, rule, value in rows
    ]


WHOLE = "be an int, got {}: give a whole number"
# A field of the training, the error, the rule and the remedy, and values that break it.
TRAINING = [
    *(
        (name, ValueError, "be at least 1, got {got}: raise it", 0)
        for name in ("stride", "readings")
    ),
    *(
        (name, ValueError, "be at least 0, got {got}: raise it", -1)
        for name in ("warmup_steps", "decay_steps")
    ),
    ("stride", TypeError, WHOLE.format("float"), 8.0),
    ("window", TypeError, WHOLE.format("bool"), True),
    ("readings", TypeError, WHOLE.format("NoneType"), None),
    ("decay_steps", TypeError, WHOLE.format("float"), 0.5),
    (
        "stride",
        ValueError,
        "be at most window, got stride {got} with window 16: lower stride or raise window",
        17,
    ),
    ("context", ValueError, "be one of recompute, cache, got {got}: choose one of them", "whole"),
    (
        "learning_rate",
        ValueError,
        f"be a number above 0, got {{got}}: {RATE}",
        0.0,
        math.nan,
        math.inf,
    ),
]
READING = [
    (
        "method",
        ValueError,
        f"be one of {', '.join(METHODS)}, got {{got}}: choose one of them",
        "memo",
    ),
    ("preset", ValueError, "be one of paper, tuned, got {got}: choose one of them", "best"),
    (
        "init",
        ValueError,
        f"be one of {', '.join(STRATEGIES)}, got {{got}}: choose one of them",
        "zero",
    ),
    ("update", ValueError, "be one of bp, nlsvd, ridge, got {got}: choose one of them", "sgd"),
    ("r", ValueError, "be at least 1, got {got}: raise it", 0),
    ("max_tokens", ValueError, "be at least 2, got {got}: raise it", 1),
    (
        "scaling",
        ValueError,
        "be a finite number above 0, got {got}: leave it out for the preset's",
        -1.0,
    ),
    (
        "anchor",
        ValueError,
        "be 0 or a finite number above, got {got}: leave it out for the preset's",
        -1.0,
    ),
    ("layers_to_transform", ValueError, LAYERS, "lower", [], [-1], [1, 1], [True], 3),
]


@pytest.mark.parametrize(("field", "value", "error", "message"), expand(TRAINING), ids=str)
def test_values_out_of_range_are_named_also_where_they_are_given(field, value, error, message):
    given = {"window": 16, "stride": 8, "learning_rate": 0.02}
    for cls in (TrainingSettings, ReadingSettings) if value is not None else (TrainingSettings,):
        with pytest.raises(error) as caught:
            cls(**given | {field: value})
        assert str(caught.value) == message
    if value is None:  # not given
        assert (
            ReadingSettings(**given, readings=None).complete().training
            == ReadingSettings(**given).complete().training
        )


@pytest.mark.parametrize(("field", "value", "error", "message"), expand(READING), ids=str)
def test_a_readings_values_out_of_range_are_named(field, value, error, message):
    with pytest.raises(error) as caught:
        ReadingSettings(**{field: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("method", "preset", "given", "reason"),
    [
        ("lora", "tuned", {"init": "topk"}, "for the method 'lora'"),
        ("lora", "tuned", {"scaling": 2.0}, "for the method 'lora'"),
        ("none", "tuned", {"r": 8}, "for the method 'none'"),
        ("none", "tuned", {"anchor": 1.0}, "for the method 'none'"),
        ("none", "tuned", {"layers_to_transform": "upper"}, "for the method 'none'"),
        ("locas-glu", "tuned", {"epsilon": 0.1}, "for the method 'locas-glu'"),
        ("locas-glu", "tuned", {"update": "ridge", "anchor": 0.1}, "with update='ridge'"),
        ("locas-mlp", "paper", {"update": "nlsvd", "learning_rate": 0.1}, "with update='nlsvd'"),
        ("locas-mlp", "paper", {"update": "nlsvd", "anchor": 1}, "with update='nlsvd'"),
        (
            "locas-mlp",
            "tuned",
            {"init": "write", "update": "ridge", "epsilon": 0.1},
            "with update='ridge'",
        ),
        ("locas-mlp", "tuned", {"init": "topk", "epsilon": 0.1}, "with init='topk'"),
        ("lora", "tuned", {"anchor_every": 2}, "with anchor=None"),
        ("lora", "tuned", {"anchor": 0.0, "anchor_every": 2}, "with anchor=0.0"),
    ],
    ids=str,
)
def test_values_that_a_method_does_not_have_are_refused(method, preset, given, reason):
    with pytest.raises(ValueError) as caught:
        complete(method, preset, **given)
    field, value = list(given.items())[-1]
    assert str(caught.value) == f"{field} has no meaning {reason}, got {value}: leave it out"


def test_a_gated_memory_is_not_written_slot_by_slot():
    with pytest.raises(
        ValueError,
        match="^update must be bp or ridge for the method 'locas-glu', got 'nlsvd': leave",
    ):
        complete("locas-glu", update="nlsvd")
    ridge = complete("locas-glu", update="ridge")
    assert ridge.training.learning_rate is ridge.method.anchor is ridge.method.anchor_every is None
    joined = complete("locas-glu", update="ridge", learning_rate=2e-3)
    assert (joined.training.learning_rate, joined.training.decay_steps, joined.method.anchor) == (
        2e-3,
        100,
        0.3,
    )


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
    assert complete("locas-glu", decay_steps=0).training.decay_steps == 0
    assert complete("locas-mlp", "paper", r=16).method.scaling == 16.0
    assert complete("locas-glu", scaling=2.5).method.scaling == 2.5
    lora, none = complete("lora"), complete("none")
    assert (lora.method.r, lora.training.learning_rate, lora.method.anchor) == (64, 1e-3, None)
    assert (none.method.r, none.training.learning_rate, none.method.anchor) == (None, None, None)


def test_the_record_has_every_setting_and_null_where_one_has_no_meaning():
    lora, none, study = (
        complete("lora").to_json(),
        complete("none").to_json(),
        complete("lora", study=True).to_json(),
    )
    assert tuple(lora) == tuple(none) == FIELDS
    assert (lora["method"], lora["r"], lora["init"], lora["scaling"]) == ("lora", 64, None, None)
    without_meaning = ("r", "learning_rate", "decay_steps", "init", "scaling")
    assert {none[name] for name in without_meaning} == {None}
    assert (
        lora["study"],
        lora["exchanges"],
        study["study"],
        study["exchanges"],
        study["passes"],
    ) == (
        False,
        None,
        True,
        None,
        None,
    )
    assert complete("locas-mlp", "paper", update="nlsvd").to_json()["decay_steps"] is None


def test_what_a_written_memory_does_not_use_is_left_out():
    bp, nlsvd = (complete("locas-mlp", "paper", update=update) for update in (None, "nlsvd"))
    topk = complete("locas-mlp")
    assert (
        (bp.method.init, bp.method.update) == ("write", "bp")
        and bp.training.learning_rate
        and bp.method.epsilon
    )
    assert nlsvd.training.learning_rate is None and nlsvd.method.epsilon
    method = topk.method
    assert topk.training.learning_rate and (
        method.update,
        method.epsilon,
        method.slots_per_chunk,
    ) == (
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
    assert [
        getattr(named.complete(base).training, name) for name in ("window", "stride", "context")
    ] == [
        64,
        32,
        "cache",
    ]
    assert (
        named.complete(make_host("lfm2")).training.context == "recompute"
    )  # its layers also keep other state
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
        (
            {"scaling": 2.0},
            ["none", "lora"],
            "scaling has no meaning for the methods none, lora: leave it out",
        ),
        (
            {"r": 8},
            ["none", "lora@16"],
            "r has no meaning for the methods none, lora@16: leave it out",
        ),
        (
            {},
            ["lora", "lora"],
            "methods must name each once, got 'lora' twice: drop the second one",
        ),
        ({}, ["none@8"], "r has no meaning for the method 'none', got 8: leave it out"),
        (
            {},
            ["memo"],
            "method must be one of none, lora, locas-glu, locas-mlp, got 'memo': choose one of them",
        ),
        *(
            (
                {},
                [spec],
                f"method must be NAME, NAME@WIDTH, NAME:RATE or both, got {spec!r}: write lora@16:2e-3, say",
            )
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
        method="locas-glu",
        window=64,
        stride=16,
        context="cache",
        readings=2,
        study=True,
    ).complete()
    base = settings.for_base(window=128)
    training = base.training
    assert (training.window, training.stride, training.context) == (128, 16, "cache")
    assert (base.method.name, training.learning_rate, training.readings, base.study) == (
        "none",
        None,
        1,
        None,
    )
