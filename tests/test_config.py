import copy
import dataclasses

import pytest
from peft import PeftConfig, PeftType

from locas_peft import LocasConfig
from locas_peft.tuner import STRATEGIES


def test_round_trip(tmp_path):
    """Lists of names become sets."""
    config = LocasConfig(
        r=8,
        init_weights="gaussian",
        output_scale="paper",
        scaling=2.5,
        max_slot_norm=None,
        rank_pattern={"0.mlp": 2},
        seed=3,
        target_modules=["mlp"],
        exclude_modules=["head"],
        pad_to_multiple_of=64,
        task_type="CAUSAL_LM",
    )
    config.save_pretrained(tmp_path)
    for loaded in (LocasConfig.from_pretrained(tmp_path), PeftConfig.from_pretrained(tmp_path)):
        assert isinstance(loaded, LocasConfig)
        assert loaded.to_dict() == config.to_dict()
    assert loaded.peft_type is PeftType.LOCAS
    assert (loaded.target_modules, loaded.exclude_modules) == ({"mlp"}, {"head"})


# A field, the error, its rule, and values that break it.
REFUSED = [
    ("r", ValueError, "be at least 1", 0, -3),
    ("r", TypeError, "be an integer", 2.0, True),
    (
        "init_weights",
        ValueError,
        f"be True, False or one of {', '.join(map(repr, STRATEGIES))}",
        "best",
    ),
    ("init_weights", TypeError, "be True, False or the name of a strategy", [1], None, 1),
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
    ("record", TypeError, "be a dictionary", 5),
    ("ffn_parts", TypeError, "be a dictionary of names", "up", {"up": 1, "down": "x"}),
    ("scaling", TypeError, "be a number", "r"),
    ("scaling", ValueError, "be finite, at most 1e12 in size", float("nan"), 10**30, -1e308),
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


SLOTS = {"slots": {"mlp": "0"}}
NAMES = {"saved_embeddings": "lm_head"}
PATTERN = {"target_modules": ".*mlp", "layers_to_transform": [0]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank_pattern": {"x": 0}}, "rank_pattern['x'] must be at least 1, got 0."),
        (PATTERN, "layers_to_transform cannot be used when target_mo"),
        ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform: set the layers "),
        ({"record": {"host": 5}}, "record['host'] must be a dictionary, got 5."),
        ({"record": {"slots": [1]}}, "record['slots'] must be a dictionary of lists of indices, "),
        ({"record": SLOTS}, "record['slots'] must be a dictionary of lists of indices, got {'mlp'"),
        ({"record": NAMES}, "record['saved_embeddings'] must be a list of names, got 'lm_head'."),
    ],
)
def test_fields_that_do_not_go_together_and_bad_records_are_named(fields, message):
    error = TypeError if "record" in fields else ValueError
    with pytest.raises(error) as caught:
        LocasConfig(**fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("init_weights", "strategy"), [(True, "topk"), (False, "gaussian"), ("write", "write")]
)
def test_init_weights_names_the_strategy(init_weights, strategy):
    assert LocasConfig(init_weights=init_weights).strategy == strategy


def test_each_field_has_a_help_text():
    fields = dataclasses.fields(LocasConfig)
    assert all(field.metadata["help"] for field in fields)


def test_copies_of_a_config_keep_their_records():
    config = LocasConfig(record={"slots": {"mlp": [1]}})
    copied = copy.copy(config)
    copied.set_record("slots", {"mlp": [2]})
    assert config.get_record("slots") == {"mlp": [1]}
