import json

import pytest
from peft import PeftConfig, PeftType

from locas_peft import LocasConfig
from locas_peft.tuner import STRATEGIES


def test_round_trip(tmp_path):
    config = LocasConfig(
        r=8, init_strategy="gaussian", output_scale="paper", scaling=2.5, max_slot_norm=None,
        rank_pattern={"0.mlp": 2}, seed=3, target_modules=["mlp"], pad_to_multiple_of=64, task_type="CAUSAL_LM",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    for loaded in (LocasConfig.from_pretrained(tmp_path), PeftConfig.from_pretrained(tmp_path)):
        assert isinstance(loaded, LocasConfig)
        assert loaded.to_dict() == config.to_dict()
    assert loaded.peft_type is PeftType.LOCAS and loaded.target_modules == {"mlp"}


def test_lists_become_sets():
    config = LocasConfig(target_modules=["a", "b"], exclude_modules=["c"])
    assert (config.target_modules, config.exclude_modules) == ({"a", "b"}, {"c"})


# A field, the error, its rule, and values that break it.
REFUSED = [
    ("r", ValueError, "be at least 1", 0, -3),
    ("r", TypeError, "be an integer", 2.0, True),
    ("init_strategy", ValueError, f"be one of {', '.join(map(repr, STRATEGIES))}", "best", [1]),
    ("output_scale", ValueError, "be one of 'measured', 'paper'", "mine"),
    ("rank_pattern", TypeError, "be a dictionary", None, ["x"]),
    ("rank_pattern", ValueError, "have regular expressions as keys", {"(": 4}),
    ("target_modules", TypeError, "be names, or one name or regular expression", 5),
    ("target_modules", ValueError, "be a regular expression, or at least one name", "(", []),
    ("exclude_modules", TypeError, "be names, or one name or regular expression", [5]),
    ("layers_to_transform", TypeError, "be an index or a list of them", "0"),
    ("modules_to_save", TypeError, "be a list of names", "lm_head"),
    ("modules_to_save", ValueError, "be names", ["(a+)+"]),
    (
        "trainable_token_indices",
        TypeError,
        "be a list of token ids, or lists by module name",
        0,
        {"wte": [-1]},
    ),
    ("host", TypeError, "be a dictionary", 5),
    ("slots", TypeError, "be a dictionary of lists of indices", [1]),
    ("ffn_parts", TypeError, "be a dictionary of names", "up", {"up": 1, "down": "x"}),
    ("scaling", TypeError, "be a number", "r"),
    ("scaling", ValueError, "be finite, at most 1e12 in size", float("nan"), 10**30, -1e308),
    ("row_norm", TypeError, "be a number", "4"),
    ("row_norm", ValueError, "be a finite number above 0", 0),
    ("max_slot_norm", TypeError, "be a number, or None for no clip", "1"),
    ("max_slot_norm", ValueError, "be finite and above 0, or None for no clip", 0, float("inf")),
    ("pad_to_multiple_of", ValueError, "be from 1 to 65536", 0, 10**11),
    ("seed", TypeError, "be an integer", "0"),
]


@pytest.mark.parametrize(
    ("field", "error", "rule", "value"),
    [(*row[:3], value) for row in REFUSED for value in row[3:]],
    ids=str,
)
def test_bad_values_are_named(field, error, rule, value):
    with pytest.raises(error) as caught:
        LocasConfig(**{field: value})
    assert str(caught.value) == f"{field} must {rule}, got {value!r}."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank_pattern": {"x": 0}}, "rank_pattern['x'] must be at least 1, got 0."),
        (
            {"row_norm": 4.0},
            "row_norm must be at most max_slot_norm (1.0), got 4.0: the first step would clip the rows",
        ),
        (
            {"target_modules": ".*mlp", "layers_to_transform": [0]},
            "layers_to_transform cannot be used when target_mo",
        ),
        (
            {"layers_pattern": "layers"},
            "layers_pattern needs layers_to_transform: set the layers that it counts.",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_named(fields, message):
    with pytest.raises(ValueError) as caught:
        LocasConfig(**fields)
    assert str(caught.value).startswith(message)


def test_strategies_are_those_of_the_table(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "mine", STRATEGIES["random"])
    assert LocasConfig(init_strategy="mine").init_strategy == "mine"


def test_unknown_fields_are_not_swallowed():
    with pytest.raises(TypeError):
        LocasConfig(rank=4)


def test_the_fields_that_a_former_version_saved_are_left_out(tmp_path):
    LocasConfig(r=3, target_modules=["mlp"]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(
        json.dumps(
            {**json.loads(path.read_text()), "gated_host_experiment": False, "variant": "auto"}
        )
    )
    assert LocasConfig.from_pretrained(tmp_path).r == 3
