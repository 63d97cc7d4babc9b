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


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"r": 0}, ValueError, "r must be at least 1, got 0."),
        ({"r": -3}, ValueError, "r must be at least 1, got -3."),
        ({"r": 2.0}, TypeError, "r must be an integer, got 2.0."),
        ({"r": True}, TypeError, "r must be an integer, got True."),
        ({"rank_pattern": {"x": 0}}, ValueError, "rank_pattern['x'] must be at least 1, got 0."),
        (
            {"init_strategy": "best"},
            ValueError,
            "init_strategy must be one of 'topk', 'bottomk', 'random', 'gaussian', 'activation', 'write', got 'best'.",
        ),
        (
            {"init_strategy": [1]},
            ValueError,
            "init_strategy must be one of 'topk', 'bottomk', 'random', 'gaussian', 'activation', 'write', got [1].",
        ),
        ({"rank_pattern": None}, TypeError, "rank_pattern must be a dictionary, got None."),
        ({"rank_pattern": ["x"]}, TypeError, "rank_pattern must be a dictionary, got ['x']."),
        (
            {"rank_pattern": {"(": 4}},
            ValueError,
            "rank_pattern must have regular expressions as keys, got {'(': 4}.",
        ),
        (
            {"target_modules": "("},
            ValueError,
            "target_modules must be a regular expression, or at least one name, got '('.",
        ),
        (
            {"target_modules": []},
            ValueError,
            "target_modules must be a regular expression, or at least one name, got [].",
        ),
        ({"output_scale": "mine"}, ValueError, "output_scale must be one of 'measured', 'paper', got 'mine'."),
        ({"target_modules": 5}, TypeError, "target_modules must be names, or one name or regular expression, got 5."),
        (
            {"exclude_modules": [5]},
            TypeError,
            "exclude_modules must be names, or one name or regular expression, got [5].",
        ),
        ({"layers_to_transform": "0"}, TypeError, "layers_to_transform must be an index or a list of them, got '0'."),
        ({"modules_to_save": "lm_head"}, TypeError, "modules_to_save must be a list of names, got 'lm_head'."),
        ({"host": 5}, TypeError, "host must be a dictionary, got 5."),
        ({"slots": [1]}, TypeError, "slots must be a dictionary of lists of indices, got [1]."),
        ({"ffn_parts": "up"}, TypeError, "ffn_parts must be a dictionary of names, got 'up'."),
        (
            {"ffn_parts": {"up": 1, "down": "x"}},
            TypeError,
            "ffn_parts must be a dictionary of names, got {'up': 1, 'down': 'x'}.",
        ),
        ({"max_slot_norm": "1"}, TypeError, "max_slot_norm must be a number, or None for no clip, got '1'."),
        ({"scaling": "r"}, TypeError, "scaling must be a number, got 'r'."),
        ({"scaling": float("nan")}, ValueError, "scaling must be finite, at most 1e12 in size, got nan."),
        ({"row_norm": "4"}, TypeError, "row_norm must be a number, got '4'."),
        ({"row_norm": 0}, ValueError, "row_norm must be a finite number above 0, got 0."),
        (
            {"row_norm": 4.0},
            ValueError,
            "row_norm must be at most max_slot_norm (1.0), got 4.0: the first step would clip the rows; raise "
            "max_slot_norm, or set it to None.",
        ),
        (
            {"max_slot_norm": 0},
            ValueError,
            "max_slot_norm must be finite and above 0, or None for no clip, got 0.",
        ),
        (
            {"max_slot_norm": float("inf")},
            ValueError,
            "max_slot_norm must be finite and above 0, or None for no clip, got inf.",
        ),
        ({"scaling": 10**30}, ValueError, f"scaling must be finite, at most 1e12 in size, got {10**30}."),
        ({"scaling": -1e308}, ValueError, "scaling must be finite, at most 1e12 in size, got -1e+308."),
        ({"seed": "0"}, TypeError, "seed must be an integer, got '0'."),
        (
            {"trainable_token_indices": 0},
            TypeError,
            "trainable_token_indices must be a list of token ids, or lists by module name, got 0.",
        ),
        (
            {"trainable_token_indices": {"wte": [-1]}},
            TypeError,
            "trainable_token_indices must be a list of token ids, or lists by module name, got {'wte': [-1]}.",
        ),
        ({"modules_to_save": ["(a+)+"]}, ValueError, "modules_to_save must be names, got ['(a+)+']."),
        ({"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of must be from 1 to 65536, got 0."),
        ({"pad_to_multiple_of": 10**11}, ValueError, "pad_to_multiple_of must be from 1 to 65536, got 100000000000."),
        (
            {"target_modules": ".*mlp", "layers_to_transform": [0]},
            ValueError,
            "layers_to_transform cannot be used when target_modules is a regular expression.",
        ),
        (
            {"layers_pattern": "layers"},
            ValueError,
            "layers_pattern needs layers_to_transform: set the layers that it counts.",
        ),
    ],
)
def test_bad_fields_are_named(kwargs, error, message):
    with pytest.raises(error) as caught:
        LocasConfig(**kwargs)
    assert str(caught.value) == message


def test_strategies_are_those_of_the_table(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "mine", STRATEGIES["random"])
    assert LocasConfig(init_strategy="mine").init_strategy == "mine"


def test_unknown_fields_are_not_swallowed():
    with pytest.raises(TypeError):
        LocasConfig(rank=4)


def test_the_fields_that_a_former_version_saved_are_left_out(tmp_path):
    LocasConfig(r=3, target_modules=["mlp"]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gated_host_experiment": False, "variant": "auto"}))
    assert LocasConfig.from_pretrained(tmp_path).r == 3
