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

CLASSES = (TrainingSettings, ReadSettings, StudySettings)


def complete(method: str, **given) -> ReadSettings:
    return stages.complete(ReadSettings(method=method, **given))


AT_LEAST_1 = "be at least 1, got 0: raise it"
LAYERS = "be 'upper' or a list of different layer indices from 0 on, got .*: leave it out for all"
# A field, the error, the rule with the remedy, and values that break it.
REFUSED = [
    ("stride", ValueError, AT_LEAST_1, 0),
    ("stride", TypeError, "be an int, got float: give a whole number", 8.0),
    ("stride", ValueError, "be at most window, got stride 17 with window 16: lower stride or", 17),
    ("window", ValueError, AT_LEAST_1, 0),
    ("window", TypeError, "be an int, got bool: give a whole number", True),
    ("readings", ValueError, AT_LEAST_1, 0),
    ("warmup_steps", ValueError, "be at least 0, got -1: raise it", -1),
    ("decay_steps", ValueError, "be at least 0, got -1: raise it", -1),
    ("decay_steps", TypeError, "be an int, got float: give a whole number", 0.5),
    ("context", ValueError, "be one of recompute, cache, got 'whole': choose one of them", "whole"),
    ("learning_rate", ValueError, "be a number above 0, .*: give one", 0.0, math.nan, math.inf),
    ("method", ValueError, f"be one of {', '.join(METHODS)}, got 'memo': choose one", "memo"),
    ("preset", ValueError, "be one of paper, tuned, got 'best': choose one of them", "best"),
    ("update", ValueError, "be one of bp, nlsvd, ridge, got 'sgd': choose one of them", "sgd"),
    ("r", ValueError, AT_LEAST_1, 0),
    ("max_tokens", ValueError, "be at least 2, got 1: raise it", 1),
    ("scaling", ValueError, "be a finite number above 0, got -1.0: leave it out for the", -1.0),
    ("scaling", TypeError, "be a number, got str: give a number", "2"),
    ("anchor", ValueError, "be 0 or a finite number above, got -1.0: leave it out", -1.0),
    ("gains", TypeError, "be true or false, got .*: give one of them", "no", 1),
    ("seed", TypeError, "be an int, got str: give a whole number", "abc"),
    ("layers_to_transform", ValueError, LAYERS, "lower", [], [-1], [1, 1], [True], 3),
    ("exchanges", ValueError, AT_LEAST_1, 0),
    ("passes", ValueError, AT_LEAST_1, 0),
]


@pytest.mark.parametrize(
    ("field", "error", "rule", "value"),
    [(*row[:3], value) for row in REFUSED for value in row[3:]],
    ids=str,
)
def test_values_out_of_range_are_named_by_each_class_that_has_them(field, error, rule, value):
    given = {"window": 16, "stride": 8, "learning_rate": 0.02, field: value}
    classes = [cls for cls in CLASSES if field in cls.__dataclass_fields__]
    assert classes
    for cls in classes:
        known = cls.__dataclass_fields__.keys() & given.keys()
        with pytest.raises(error, match=f"^{field} must {rule}"):
            cls(**{name: given[name] for name in known})


@pytest.mark.parametrize("method", ["locas-glu", "locas-mlp"])
@pytest.mark.parametrize("settings_class", [ReadSettings, StudySettings])
def test_an_unknown_strategy_is_named_without_a_base(settings_class, method):
    message = "^init must be one of topk, .*, got 'zero': choose one of them$"
    with pytest.raises(ValueError, match=message):
        choose_values(settings_class(method=method, init="zero"))


def test_a_stride_is_not_compared_with_a_window_that_the_base_gives():
    assert choose_values(ReadSettings(stride=1024)) == choose_values(ReadSettings())


def test_a_study_needs_an_adapter_that_is_trained():
    message = "^a study needs an adapter that is trained, got method 'none': use locas-glu or lora"
    with pytest.raises(ValueError, match=message):
        choose_values(StudySettings(method="none"))


@pytest.mark.parametrize(("method", "rate"), [("locas-glu", 6e-3), ("lora", 1.5e-3)])
def test_a_study_has_values_of_its_own(method, rate):
    study = stages.complete(StudySettings(method=method))
    assert study.learning_rate == pytest.approx(rate)
    assert (study.r, study.window, study.exchanges, study.passes) == (64, 512, None, None)
    assert stages.complete(study) == study


NLSVD = {"preset": "paper", "update": "nlsvd"}
WRITTEN = {"init": "write", "update": "ridge"}


@pytest.mark.parametrize(
    ("method", "given", "reason"),
    [
        ("lora", {"init": "topk"}, "for the method 'lora'"),
        ("lora", {"scaling": 2.0}, "for the method 'lora'"),
        ("none", {"r": 8}, "for the method 'none'"),
        ("none", {"anchor": 1.0}, "for the method 'none'"),
        ("none", {"layers_to_transform": "upper"}, "for the method 'none'"),
        ("locas-glu", {"epsilon": 0.1}, "for the method 'locas-glu'"),
        ("locas-glu", {"update": "ridge", "anchor": 0.1}, "with update='ridge'"),
        ("locas-mlp", {**NLSVD, "learning_rate": 0.1}, "with update='nlsvd'"),
        ("locas-mlp", {**NLSVD, "anchor": 1}, "with update='nlsvd'"),
        ("locas-mlp", {**NLSVD, "gains": True}, "with update='nlsvd'"),
        ("locas-mlp", {**WRITTEN, "epsilon": 0.1}, "with update='ridge'"),
        ("locas-mlp", {"init": "topk", "epsilon": 0.1}, "with init='topk'"),
        ("lora", {"anchor_every": 2}, "with anchor=None"),
        ("lora", {"anchor": 0.0, "anchor_every": 2}, "with anchor=0.0"),
    ],
    ids=str,
)
def test_values_that_a_method_does_not_have_are_refused(method, given, reason):
    field = list(given)[-1]
    message = f"^{field} has no meaning {reason}, got {given[field]}: leave it out$"
    with pytest.raises(ValueError, match=message):
        complete(method, **given)


def test_a_gated_memory_is_not_written_slot_by_slot():
    message = "^update must be bp or ridge for the method 'locas-glu', got 'nlsvd': leave"
    with pytest.raises(ValueError, match=message):
        complete("locas-glu", update="nlsvd")


SLOTS = {"epsilon": 0.01, "slots_per_chunk": 8}
NOT_WRITTEN = dict.fromkeys(("update", *SLOTS))
NOT_TRAINED = dict.fromkeys(("learning_rate", "decay_steps", "anchor", "anchor_every"))
ANCHORED = {"anchor": 0.3, "anchor_every": 4, "decay_steps": 100}
ROWS = {"learning_rate": 4e-3, "scaling": 1.0, "init": "topk"}
PAPER = {"anchor": None, "decay_steps": 0, "output_scale": "paper"}
LORA = {"r": 64, "learning_rate": 1e-3, "decay_steps": 100}


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("locas-glu", {}, {**ROWS, **ANCHORED, "output_scale": "measured"}),
        ("locas-glu", {"preset": "paper"}, {**ROWS, **PAPER}),
        ("locas-glu", {"decay_steps": 0, "scaling": 2.5}, {"decay_steps": 0, "scaling": 2.5}),
        ("locas-glu", {"update": "ridge"}, NOT_TRAINED),
        ("locas-glu", {"update": "ridge", "learning_rate": 2e-3}, ANCHORED),
        ("locas-mlp", {}, {"learning_rate": 8e-3, "init": "topk", **NOT_WRITTEN}),
        ("locas-mlp", {"preset": "paper", "r": 16}, {"scaling": 16.0, **PAPER, **SLOTS}),
        (
            "locas-mlp",
            {"preset": "paper"},
            {"learning_rate": 5e-4, "init": "write", "update": "bp"},
        ),
        ("locas-mlp", NLSVD, {**NOT_TRAINED, **SLOTS}),
        ("lora", {}, {**LORA, "init": None, "scaling": None, "anchor": None}),
        ("none", {}, dict.fromkeys((*ROWS, *LORA, "anchor"))),
    ],
    ids=str,
)
def test_presets_fill_in_what_is_not_given_and_null_where_it_has_no_meaning(
    method, given, expected
):
    settings = vars(complete(method, **given))
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize("anchor", [None, 0, 0.5])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_complete_settings_are_complete(method, preset, anchor):
    settings = complete(method, preset=preset, anchor=None if method == "none" else anchor)
    assert stages.complete(settings) == settings
    for found in (settings, training_settings(settings)):
        assert (found.window, found.stride, found.context) == (512, 256, "cache")
        assert found.learning_rate == settings.learning_rate
    assert settings.anchor_every == (4 if settings.anchor else None)


def test_window_stride_and_context_suit_the_base():
    of_64_positions = make_host("llama")
    named = {"model": "mine"}
    for given, base, expected in (
        (named, of_64_positions, (64, 32, "cache")),
        # Its layers also keep other state.
        (named, make_host("lfm2"), (64, 32, "recompute")),
        (named, backbone.load()[0], (2048, 1024, "cache")),
        ({}, of_64_positions, (64, 32, "cache")),
        ({**named, "window": 20}, of_64_positions, (20, 10, "cache")),
    ):
        found = stages.complete(ReadSettings(**given), base)
        assert (found.window, found.stride, found.context) == expected


# Several methods


def test_each_method_uses_the_values_that_it_has():
    given = {"r": 8, "scaling": 2.0, "window": 64}
    specs = ["none", "lora@16:2e-3", "lora", "locas-glu:1e-3"]
    completed = complete_all(ReadSettings(**given), specs)
    assert completed == {
        "none": complete("none", window=64),
        "lora@16-lr2e-3": complete("lora", window=64, r=16, learning_rate=2e-3),
        "lora": complete("lora", window=64, r=8),
        "locas-glu-lr1e-3": complete("locas-glu", learning_rate=1e-3, **given),
    }


BAD_SPECS = ["", "lora@0", "lora@x", "lora:x", "lora:0", "lora:1e999", "lora:1e-3@8"]


@pytest.mark.parametrize(
    ("given", "methods", "message"),
    [
        ({"scaling": 2.0}, ["none", "lora"], "scaling has no meaning for the methods none, lora: "),
        ({"r": 8}, ["none", "lora@16"], "r has no meaning for the methods none, lora@16: leave it"),
        ({}, ["lora", "lora"], "methods must name each once, got 'lora' twice: drop the second"),
        ({}, ["none@8"], "r has no meaning for the method 'none', got 8: leave it out"),
        ({}, ["memo"], "method must be one of none, lora, locas-glu, locas-mlp, got 'memo': "),
        *(
            ({}, [spec], f"method must be NAME, .*, got {spec!r}: write lora@")
            for spec in BAD_SPECS
        ),
    ],
    ids=str,
)
def test_values_and_methods_that_do_not_fit_are_refused(given, methods, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        complete_all(ReadSettings(**given), methods)


def test_the_settings_of_the_base_have_the_same_windows_and_no_adapter():
    shared = {"window": 64, "stride": 16, "context": "cache", "seed": 3}
    settings = complete("locas-glu", readings=2, **shared)
    assert for_base(settings) == complete("none", **shared)
