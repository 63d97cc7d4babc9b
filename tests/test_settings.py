"""Settings are checked once, and completed from the preset of their method."""

import math

import pytest
from families import make_host

from locas_peft import backbone, stages
from locas_peft.stages import (
    METHODS,
    PRESETS,
    ReadSettings,
    StudySettings,
    choose_values,
    complete_all,
    for_base,
)
from locas_peft.stages.complete import training_settings
from locas_peft.ttt import TrainingSettings
from locas_peft.tuner import STRATEGIES

LAYERS = "be 'upper' or a list of different layer indices from 0 on, got {got}: leave it out for all layers"
RATE = "give one, 1e-3 say; to read without learning, give the model without its adapter"


def complete(method: str, preset: str = "tuned", **given) -> ReadSettings:
    return stages.complete(ReadSettings(method=method, preset=preset, **given))


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
    ("gains", TypeError, "be true or false, got {got}: give one of them", "no", 1),
    ("scaling", TypeError, "be a number, got str: give a number", "2"),
    ("seed", TypeError, "be an int, got str: give a whole number", "abc"),
    ("layers_to_transform", ValueError, LAYERS, "lower", [], [-1], [1, 1], [True], 3),
]


@pytest.mark.parametrize(("field", "value", "error", "message"), expand(TRAINING), ids=str)
def test_values_out_of_range_are_named_also_where_they_are_given(field, value, error, message):
    given = {"window": 16, "stride": 8, "learning_rate": 0.02}
    for cls in (TrainingSettings, ReadSettings) if value is not None else (TrainingSettings,):
        with pytest.raises(error) as caught:
            cls(**given | {field: value})
        assert str(caught.value) == message


@pytest.mark.parametrize(("field", "value", "error", "message"), expand(READING), ids=str)
def test_a_readings_values_out_of_range_are_named(field, value, error, message):
    with pytest.raises(error) as caught:
        ReadSettings(**{field: value})
    assert str(caught.value) == message
    if field not in ("preset", "update"):
        with pytest.raises(error) as caught:
            StudySettings(**{field: value})
        assert str(caught.value) == message


@pytest.mark.parametrize("field", ["window", "exchanges", "passes"])
def test_a_studys_values_out_of_range_are_named(field):
    with pytest.raises(ValueError, match=f"^{field} must be at least 1, got 0: raise it$"):
        StudySettings(**{field: 0})
    message = f"^{field} must be an int, got float: give a whole number$"
    with pytest.raises(TypeError, match=message):
        StudySettings(**{field: 1.0})


@pytest.mark.parametrize("settings_class", [ReadSettings, StudySettings])
@pytest.mark.parametrize("method", ["locas-glu", "locas-mlp"])
def test_a_strategy_that_does_not_exist_is_named_before_a_base_is_needed(settings_class, method):
    with pytest.raises(ValueError) as caught:
        choose_values(settings_class(method=method, init="zero"))
    names = ", ".join(STRATEGIES)
    assert str(caught.value) == f"init must be one of {names}, got 'zero': choose one of them"


def test_a_study_needs_an_adapter_that_is_trained():
    message = (
        "^a study needs an adapter that is trained, got method 'none': use locas-glu or lora, say$"
    )
    with pytest.raises(ValueError, match=message):
        choose_values(StudySettings(method="none"))


@pytest.mark.parametrize(("method", "rate"), [("locas-glu", 6e-3), ("lora", 1.5e-3)])
def test_a_study_has_values_of_its_own(method, rate):
    study = stages.complete(StudySettings(method=method))
    assert study.learning_rate == pytest.approx(rate)
    assert (study.r, study.window, study.exchanges, study.passes) == (64, 512, None, None)
    assert stages.complete(study) == study
    with pytest.raises(TypeError):
        StudySettings(stride=8)


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
        ("locas-mlp", "paper", {"update": "nlsvd", "gains": True}, "with update='nlsvd'"),
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
    message = "^update must be bp or ridge for the method 'locas-glu', got 'nlsvd': leave"
    with pytest.raises(ValueError, match=message):
        complete("locas-glu", update="nlsvd")
    ridge = complete("locas-glu", update="ridge")
    assert ridge.learning_rate is ridge.anchor is ridge.anchor_every is None
    joined = complete("locas-glu", update="ridge", learning_rate=2e-3)
    assert (joined.learning_rate, joined.decay_steps, joined.anchor) == (2e-3, 100, 0.3)


def test_presets_fill_in_what_is_not_given():
    tuned, paper = complete("locas-glu", r=16), complete("locas-glu", "paper", r=16)
    assert (tuned.learning_rate, paper.learning_rate) == (4e-3, 4e-3)
    assert (tuned.scaling, tuned.init, tuned.anchor, tuned.anchor_every) == (
        1.0, "topk", 0.3, 4,
    )  # fmt: skip
    assert (paper.scaling, paper.init, paper.anchor) == (1.0, "topk", None)
    assert (tuned.output_scale, paper.output_scale) == ("measured", "paper")
    decay_steps = [each.decay_steps for each in (tuned, paper, complete("lora"))]
    assert decay_steps == [100, 0, 100]
    assert complete("locas-glu", decay_steps=0).decay_steps == 0
    assert complete("locas-mlp", "paper", r=16).scaling == 16.0
    assert complete("locas-glu", scaling=2.5).scaling == 2.5
    lora, none = complete("lora"), complete("none")
    assert (lora.r, lora.learning_rate, lora.anchor) == (64, 1e-3, None)
    assert (none.r, none.learning_rate, none.anchor) == (None, None, None)


def test_the_record_has_every_setting_and_null_where_one_has_no_meaning():
    lora = vars(complete("lora"))
    none = vars(complete("none"))
    assert tuple(lora) == tuple(none)
    assert (lora["method"], lora["r"], lora["init"], lora["scaling"]) == ("lora", 64, None, None)
    without_meaning = ("r", "learning_rate", "decay_steps", "init", "scaling")
    assert {none[name] for name in without_meaning} == {None}
    assert vars(complete("locas-mlp", "paper", update="nlsvd"))["decay_steps"] is None


def test_what_a_written_memory_does_not_use_is_left_out():
    bp, nlsvd = (complete("locas-mlp", "paper", update=update) for update in (None, "nlsvd"))
    topk = complete("locas-mlp")
    assert (bp.init, bp.update) == ("write", "bp") and bp.learning_rate and bp.epsilon
    assert nlsvd.learning_rate is None and nlsvd.epsilon
    assert topk.learning_rate
    assert (topk.update, topk.epsilon, topk.slots_per_chunk) == (None, None, None)


@pytest.mark.parametrize("given", [{}, {"anchor": 0}, {"anchor": 0.5}], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_complete_settings_are_complete(method, preset, given):
    given = given if method != "none" else {}
    settings = complete(method, preset, **given)
    assert stages.complete(settings) == settings
    assert (settings.window, settings.stride, settings.context) == (512, 256, "cache")
    training = training_settings(settings)
    assert (training.window, training.stride, training.context) == (512, 256, "cache")
    assert training.learning_rate == settings.learning_rate
    assert settings.anchor_every == (4 if settings.anchor else None)
    assert METHODS[method].reading.keys() == set(PRESETS)


def test_window_stride_and_context_suit_the_base():
    base = make_host("llama")  # 64 positions
    named, default = ReadSettings(model="mine"), ReadSettings()
    assert [
        getattr(stages.complete(named, base), name) for name in ("window", "stride", "context")
    ] == [
        64,
        32,
        "cache",
    ]
    assert (
        stages.complete(named, make_host("lfm2")).context == "recompute"
    )  # its layers also keep other state
    assert stages.complete(named, backbone.load()[0]).window == 2048
    assert stages.complete(default, base).window == 64
    given = stages.complete(ReadSettings(model="mine", window=20, context="cache"), base)
    assert (given.window, given.stride, given.context) == (20, 10, "cache")


# Several methods


def test_each_method_uses_the_values_that_it_has():
    given = ReadSettings(r=8, scaling=2.0, window=64)
    completed = complete_all(given, ["none", "lora@16:2e-3", "lora", "locas-glu:1e-3"])
    assert list(completed) == ["none", "lora@16-lr2e-3", "lora", "locas-glu-lr1e-3"]
    none, wide, lora, locas = completed.values()
    assert [settings.window for settings in completed.values()] == [64] * 4
    assert (none.method, none.r) == ("none", None)
    assert (wide.method, wide.r, wide.learning_rate) == ("lora", 16, 2e-3)
    assert (lora.r, lora.learning_rate) == (8, 1e-3)
    assert (locas.r, locas.learning_rate, locas.scaling) == (8, 1e-3, 2.0)
    assert locas == stages.complete(ReadSettings(r=8, scaling=2.0, window=64, learning_rate=1e-3))


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
        complete_all(ReadSettings(**given), methods)
    assert str(caught.value) == message


def test_the_settings_of_the_base_have_the_same_windows_and_no_adapter():
    settings = complete("locas-glu", window=64, stride=16, context="cache", readings=2, seed=3)
    base = for_base(settings)
    assert (base.window, base.stride, base.context, base.seed) == (64, 16, "cache", 3)
    assert (base.method, base.learning_rate, base.readings, base.r) == ("none", None, 1, None)
