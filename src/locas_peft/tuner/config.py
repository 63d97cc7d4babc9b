"""LocasConfig: the configuration of a memory, saved beside its weights."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from peft.config import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, PeftType
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from .initialization import STRATEGIES
from .memory_file import LARGEST, PREFIX, split_keys

DEFAULT_STRATEGY = "topk"
# Random numbers need a strategy that uses neither a text nor slots of the host.
STRATEGY_OF_RANDOM_NUMBERS = "gaussian"
# What a memory's record can hold.
RECORDS = ("host", "slots", "saved_embeddings")
# The fields of PEFT that name what is trained beside FFNs.
BESIDE_FFNS = ("modules_to_save", "trainable_token_indices")
# The fields by which a memory changes more than its own slots.
BESIDE_SLOTS = (*BESIDE_FFNS, "gains")
# Fields of former versions that have no meaning any more. `row_norm` only scaled initial rows.
FORMER_FIELDS = ("gated_host_experiment", "variant", "row_norm")


@dataclass
class LocasConfig(PeftConfig):
    """Configuration of a LOCAS memory: a narrow FFN of width `r` beside each FFN of the host.

    A slot is one gate row (if the host is gated), one up row and one down column.
    `exclude_modules`, `layers_to_transform`, `layers_pattern`, `modules_to_save` and
    `trainable_token_indices` are as in PEFT's other methods.

    Raises:
        TypeError: a field has a value of a wrong type. The message is one line.
        ValueError: a field has another invalid value. The message is one line.
    """

    r: int = field(default=64, metadata={"help": "The width of the memory, in slots."})
    target_modules: list[str] | set[str] | str | None = field(
        default=None,
        metadata={
            "help": (
                "The FFNs that get a memory: names, suffixes of names, or a regular expression. "
                "None and 'all-linear' find every FFN of the language model by its structure, a "
                "mixture of experts as one."
            )
        },
    )
    exclude_modules: list[str] | set[str] | str | None = field(
        default=None,
        metadata={"help": "The FFNs that get no memory: names, or a regular expression."},
    )
    init_weights: bool | str = field(
        default=True,
        metadata={
            "help": (
                "How gate and up rows are initialised. True is 'topk', the paper's strategy: the "
                "host slots that a text activates most. The name of a row of `STRATEGIES` selects "
                "another strategy. False fills all weights with random numbers, which change the "
                "output; for tests only."
            )
        },
    )
    output_scale: Literal["measured", "paper"] = field(
        default="measured",
        metadata={
            "help": (
                "'measured' sets the scales of the memory's input and output by what calibration "
                "sees, so that one learning rate suits every host. 'paper' leaves the input alone "
                "and scales the output by tau, the mean norm of the host's down columns divided "
                "by `r`."
            )
        },
    )
    scaling: float = field(
        default=1.0,
        metadata={
            "help": (
                "Multiplies the output scale. With output_scale='paper', scaling=r cancels the "
                "division by `r`."
            )
        },
    )
    max_slot_norm: float | None = field(
        default=1.0,
        metadata={
            "help": "The radius of the norm clip, 1.0 in the paper. None switches the clip off."
        },
    )
    gains: bool = field(
        default=False,
        metadata={
            "help": (
                "Whether each neuron of the host's FFNs has a trained factor too, which starts at "
                "1: F more parameters a layer. Merging multiplies the host's down columns by them."
            )
        },
    )
    pad_to_multiple_of: int | None = field(
        default=None,
        metadata={"help": "Merged FFNs are padded with zero neurons to a multiple of this width."},
    )
    rank_pattern: dict[str, int] = field(
        default_factory=dict,
        metadata={"help": "Other widths for some FFNs: from names or regular expressions to `r`."},
    )
    layers_to_transform: list[int] | int | None = field(
        default=None,
        metadata={"help": "The indices of the layers that get a memory. None is all layers."},
    )
    layers_pattern: list[str] | str | None = field(
        default=None,
        metadata={
            "help": (
                "The name of the list of layers that `layers_to_transform` counts, if it is not a "
                "common one."
            )
        },
    )
    ffn_parts: dict[str, str] | None = field(
        default=None,
        metadata={
            "help": (
                "The attribute names of the parts of an unknown FFN, such as {'gate': 'w_gate', "
                "'up': 'w_in', 'down': 'w_out', 'activation': 'act'}."
            )
        },
    )
    seed: int = field(
        default=0, metadata={"help": "The seed of everything that is drawn at random."}
    )
    modules_to_save: list[str] | None = field(
        default=None,
        metadata={
            "help": "The names of modules that are trained in full and saved with the memory."
        },
    )
    trainable_token_indices: list[int] | dict[str, list[int]] | None = field(
        default=None,
        metadata={
            "help": (
                "The ids of tokens whose embeddings are trained, as a list, or as lists by the "
                "name of an embedding."
            )
        },
    )
    record: dict | None = field(
        default=None,
        metadata={
            "help": (
                "Filled in automatically. 'host': properties of the base, which are compared when "
                "the memory is loaded. 'slots': the host slots that each FFN's memory was cloned "
                "from. 'saved_embeddings': names of the base's own tensors that are in the "
                "memory's file and replace the base's when it is loaded."
            )
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.LOCAS
        self._check_fields()
        self._check_fields_together()
        if isinstance(self.target_modules, list | tuple):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list | tuple):
            self.exclude_modules = set(self.exclude_modules)
        # A host that is given at construction comes from a memory's file, so the model must match
        # it. A host that is filled in later describes this memory and must not bind the config
        # object to that model.
        self._expected_host: dict | None = self.get_record("host")

    def _check_fields(self) -> None:
        for name, rules in RULES.items():
            _check(name, rules, getattr(self, name), self._may_be_none(name))
        for pattern, r in self.rank_pattern.items():
            _check(f"rank_pattern[{pattern!r}]", RULES["r"], r)
        for name in RECORDS:
            _check(f"record[{name!r}]", RECORD_RULES[name], self.get_record(name), True)

    def _check_fields_together(self) -> None:
        if isinstance(self.target_modules, str):
            for name in ("layers_to_transform", "layers_pattern"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} cannot be used when target_modules is a regular expression."
                    )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(
                "layers_pattern needs layers_to_transform: set the layers that it counts."
            )

    @staticmethod
    def _may_be_none(name: str) -> bool:
        # The fields of PEFT's own class are not among these annotations. All of them may be None.
        annotation = LocasConfig.__annotations__.get(name, "None")
        return "None" in annotation

    @property
    def strategy(self) -> str:
        """The name of the strategy that makes the initial rows, a key of `STRATEGIES`."""
        if isinstance(self.init_weights, str):
            return self.init_weights
        return DEFAULT_STRATEGY if self.init_weights else STRATEGY_OF_RANDOM_NUMBERS

    def get_record(self, name: str) -> Any:
        """Return "host", "slots" or "saved_embeddings" of the record; None where there is none."""
        return (self.record or {}).get(name)

    def set_record(self, name: str, value: Any) -> None:
        """Replace an entry of the record. Copies of the config keep theirs."""
        self.record = {**(self.record or {}), name: value}

    def width_of(self, name: str) -> int:
        """Return R of the memory at the FFN of that name: from `rank_pattern`, or else `r`."""
        pattern = get_pattern_key(self.rank_pattern, name)
        return self.rank_pattern.get(pattern, self.r)

    @classmethod
    def check_kwargs(cls, **kwargs: Any) -> dict[str, Any]:
        """Translate the fields of a config that a former version saved."""
        return translate_former_fields(kwargs)

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the config as PEFT does, and record which of the base's tensors are in the file."""
        memory, others = split_keys(_list_keys(save_directory))
        if memory:
            embeddings = []
            for key in sorted(others):
                if self.field_that_names(key) not in BESIDE_FFNS:
                    embeddings.append(key.removeprefix(PREFIX))
            self.set_record("saved_embeddings", embeddings or None)
        super().save_pretrained(save_directory, **kwargs)

    def field_beside_slots(self) -> str | None:
        """Return a field by which the memory changes more than its slots; None without one."""
        for field_name in BESIDE_SLOTS:
            if getattr(self, field_name):
                return field_name
        return None

    def field_that_names(self, key: str) -> str | None:
        """Return the field that names a tensor beside the memory's own; None where none does."""
        name = key.removeprefix(PREFIX)
        if name in (self.get_record("saved_embeddings") or ()):
            return "saved_embeddings"
        if self.trainable_token_indices and name.endswith(".trainable_tokens_delta"):
            return "trainable_token_indices"
        is_of_base = ".original_module." in name
        for module in self.modules_to_save or ():
            if f".{module}." in f".{name}" and not is_of_base:
                return "modules_to_save"
        return None


def _list_keys(folder: str) -> list[str]:
    """Return the names of the tensors in a folder's newest file; none without a sound one."""
    paths = []
    for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            paths.append(path)
    if not paths:
        return []
    # PEFT writes the tensors before the config, and leaves a file of the other format.
    path = max(paths, key=os.path.getmtime)
    if path.endswith(WEIGHTS_NAME):
        return _list_pickled_keys(path)
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError:
        # A damaged older file, which is about to be replaced: transformers saves the config first.
        return []


def _list_pickled_keys(path: str) -> list[str]:
    """Return the names of the tensors in a pickle; none where it holds other things."""
    try:
        return list(torch.load(path, map_location="meta", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError):
        return []


def translate_former_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved config, those of LOCAS 0.2.0 and before translated to today's.

    `init_strategy` became a value of `init_weights`. `host`, `slots` and `saved_embeddings` moved
    into `record`.
    """
    translated = {name: value for name, value in fields.items() if name not in FORMER_FIELDS}
    strategy = translated.pop("init_strategy", None)
    if strategy is not None and translated.get("init_weights", True) is True:
        is_default = strategy == DEFAULT_STRATEGY
        translated["init_weights"] = True if is_default else strategy
    former_record = {}
    for name in RECORDS:
        if name in translated:
            former_record[name] = translated.pop(name)
    if former_record and translated.get("record") is None:
        translated["record"] = former_record
    return translated


@dataclass(frozen=True)
class Rule:
    """What a value must be: a text for the message, a function that checks it, and the error."""

    text: str
    is_kept: Callable[[Any], bool]
    error: type[Exception] = ValueError


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_dictionary(value: object) -> bool:
    return isinstance(value, dict)


def _is_list_of(values: object, kind: type) -> bool:
    if not isinstance(values, list | tuple | set):
        return False
    return all(isinstance(value, kind) for value in values)


def _are_names(values: object) -> bool:
    return _is_list_of(values, str)


def _is_name_or_names(value: object) -> bool:
    return isinstance(value, str) or _are_names(value)


def _is_index_or_indices(value: object) -> bool:
    return _is_integer(value) or _is_list_of(value, int)


def _is_dictionary_of_names(value: object) -> bool:
    return isinstance(value, dict) and _are_names(list(value.values()))


def _is_dictionary_of_indices(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(_is_list_of(indices, int) for indices in value.values())


def _are_token_indices(value: object) -> bool:
    lists: list[Any] = list(value.values()) if isinstance(value, dict) else [value]
    return all(_is_list_of(ids, int) and min(ids, default=0) >= 0 for ids in lists)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_bool_or_string(value: object) -> bool:
    return isinstance(value, bool | str)


def _is_strategy(value: bool | str) -> bool:
    return isinstance(value, bool) or value in STRATEGIES


def _is_output_scale(value: object) -> bool:
    return value in ("measured", "paper")


def _is_at_least_1(value: int) -> bool:
    return value >= 1


def _is_multiple(value: int) -> bool:
    return 1 <= value <= 65536


def _is_seed(value: int) -> bool:
    return abs(value) < 2**63


def _is_finite(value: float) -> bool:
    # Not a number is not below it either.
    return abs(value) <= LARGEST


def _is_positive(value: float) -> bool:
    return 0 < value <= LARGEST


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError, RecursionError, OverflowError):
        return False
    return True


def _are_names_or_pattern(value: object) -> bool:
    return not isinstance(value, str) or _is_pattern(value)


def _is_target(value: object) -> bool:
    return bool(value) and _are_names_or_pattern(value)


def _has_patterns_as_keys(value: dict) -> bool:
    return all(_is_pattern(key) for key in value)


def _are_plain_names(values: list[str]) -> bool:
    # PEFT matches them as regular expressions and as ends of names.
    return all(re.fullmatch(r"[\w.-]+", value) for value in values)


A_STRING = Rule("be a string", _is_string, TypeError)
AN_INTEGER = Rule("be an integer", _is_integer, TypeError)
A_NUMBER = Rule("be a number", _is_number, TypeError)
A_DICTIONARY = Rule("be a dictionary", _is_dictionary, TypeError)
NAMES = Rule("be a list of names", _are_names, TypeError)
MODULES = Rule("be names, or one name or regular expression", _is_name_or_names, TypeError)

# The rules of a field, in the order of checking.
RULES: dict[str, list[Rule]] = {
    "base_model_name_or_path": [A_STRING],
    "r": [AN_INTEGER, Rule("be at least 1", _is_at_least_1)],
    "target_modules": [MODULES, Rule("be a regular expression, or at least one name", _is_target)],
    "exclude_modules": [MODULES, Rule("be a regular expression", _are_names_or_pattern)],
    "init_weights": [
        Rule("be True, False or the name of a strategy", _is_bool_or_string, TypeError),
        Rule("be True, False or one of {strategies}", _is_strategy),
    ],
    "output_scale": [Rule("be one of 'measured', 'paper'", _is_output_scale)],
    "scaling": [A_NUMBER, Rule("be finite, at most 1e12 in size", _is_finite)],
    "max_slot_norm": [
        Rule("be a number, or None for no clip", _is_number, TypeError),
        Rule("be finite and above 0, or None for no clip", _is_positive),
    ],
    "gains": [Rule("be True or False", _is_bool, TypeError)],
    "pad_to_multiple_of": [AN_INTEGER, Rule("be from 1 to 65536", _is_multiple)],
    "rank_pattern": [
        A_DICTIONARY,
        Rule("have regular expressions as keys", _has_patterns_as_keys),
    ],
    "layers_to_transform": [Rule("be an index or a list of them", _is_index_or_indices, TypeError)],
    "layers_pattern": [Rule("be a name or names", _is_name_or_names, TypeError)],
    "ffn_parts": [Rule("be a dictionary of names", _is_dictionary_of_names, TypeError)],
    "seed": [AN_INTEGER, Rule("have at most 63 bits", _is_seed)],
    "modules_to_save": [NAMES, Rule("be names", _are_plain_names)],
    "trainable_token_indices": [
        Rule("be a list of token ids, or lists by module name", _are_token_indices, TypeError)
    ],
    "record": [A_DICTIONARY],
}
RECORD_RULES: dict[str, list[Rule]] = {
    "host": [A_DICTIONARY],
    "slots": [Rule("be a dictionary of lists of indices", _is_dictionary_of_indices, TypeError)],
    "saved_embeddings": [NAMES],
}


def _check(name: str, rules: list[Rule], value: Any, may_be_none: bool = False) -> None:
    """Raise the error of the first rule that a value breaks."""
    if value is None and may_be_none:
        return
    for rule in rules:
        if not rule.is_kept(value):
            # The table of strategies may have grown since the import.
            text = rule.text.format(strategies=", ".join(map(repr, STRATEGIES)))
            raise rule.error(f"{name} must {text}, got {value!r}.")
