"""LocasConfig: the configuration of a memory, saved beside its weights."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from peft.config import PeftConfig
from peft.utils import CONFIG_NAME, PeftType
from peft.utils.other import get_pattern_key

from .initialization import STRATEGIES
from .memory_file import (
    LARGEST,
    PREFIX,
    find_memory_file,
    one_line,
    seal_memory_file,
    split_tensors,
)


@dataclass
class LocasConfig(PeftConfig):
    """Configuration of a LOCAS memory: a narrow FFN of width `r` beside each FFN of the host.

    Args:
        r: the width R of the memory, in slots. A slot is one gate row (if gated), one up row and one down column.
        target_modules: the FFNs that get a memory: names, suffixes of names, or a regular expression. `None` (and
            "all-linear") finds every FFN of the language model by its structure, a mixture of experts as one.
        exclude_modules, layers_to_transform, layers_pattern, modules_to_save, trainable_token_indices: as in PEFT's
            other methods.
        init_strategy: how gate and up rows are initialised, a row of `STRATEGIES` (the paper's table on
            initialisation). "write" leaves the slots of a two-layer memory free for a `SlotWriter` or `RidgeWriter`.
        output_scale: "measured" sets the scales of the memory's input and output by what calibration sees, so that
            one learning rate suits every host (`scale.py`). "paper" leaves the input alone and scales the output by
            tau, the mean norm of the host's down columns divided by R.
        scaling: multiplies the output scale. With output_scale="paper", `r` cancels the division.
        row_norm: the initial norm of gate and up rows; 1.0 is the paper's value. A larger norm makes a slot respond
            to fewer inputs, and more strongly. Above 1 it must not exceed `max_slot_norm`.
        max_slot_norm: the radius of the norm clip, 1.0 in the paper; `None` switches the clip off.
        pad_to_multiple_of: merged FFNs are padded with zero neurons to a multiple of this width.
        rank_pattern: other widths for some FFNs, from names or regular expressions to `r`.
        ffn_parts: the attribute names of the parts of an unknown FFN, `{"gate": "w_gate", "up": "w_in", "down":
            "w_out", "activation": "act"}`; see `FFNParts`.
        seed: the seed of everything that is drawn at random.
        init_weights: `False` fills gate, up and down with random numbers, which change the output; for tests only.
        saved_embeddings: names of the base's own tensors that were saved with the memory (`save_embedding_layers`)
            and replace the base's when it is loaded. Filled in by `save_pretrained`; others in a file are refused.
        host: properties of the base and a sample of its weights. Filled in automatically and compared when the memory
            is loaded: other weights give a warning, any other difference is refused.
        slots: the host slots that each FFN's memory was cloned from. Filled in automatically.

    A field with an invalid value is a `TypeError` or `ValueError`, in one line.
    """

    r: int = 64
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    init_strategy: str = "topk"
    output_scale: Literal["measured", "paper"] = "measured"
    scaling: float = 1.0
    row_norm: float = 1.0
    max_slot_norm: float | None = 1.0
    pad_to_multiple_of: int | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    ffn_parts: dict[str, str] | None = None
    seed: int = 0
    init_weights: bool = True
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    saved_embeddings: list[str] | None = None
    host: dict | None = None
    slots: dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.LOCAS
        for name in _TYPES | _VALUES:
            _check(name, getattr(self, name))
        for pattern, r in self.rank_pattern.items():
            _check("r", r, f"rank_pattern[{pattern!r}]")
        if self.row_norm > max(1.0, self.max_slot_norm or math.inf):
            what = f"row_norm must be at most max_slot_norm ({self.max_slot_norm}), got {self.row_norm}"
            raise ValueError(
                f"{what}: the first step would clip the rows; raise max_slot_norm, or set it to None."
            )
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(self.target_modules, str) and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} cannot be used when target_modules is a regular expression."
                )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(
                "layers_pattern needs layers_to_transform: set the layers that it counts."
            )
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            setattr(self, name, set(value) if isinstance(value, list | tuple) else value)
        # A host given at construction comes from a memory's file, so the model must match it. One filled in later
        # describes this memory and must not bind the config object to that model.
        self._expected_host = self.host
        self._file: str | None = None
        self._fields_of_file: list[Any] = []

    def width_of(self, name: str) -> int:
        """Return R of the memory at the FFN of that name: from `rank_pattern`, or else `r`."""
        return self.rank_pattern.get(get_pattern_key(self.rank_pattern, name), self.r)

    def field_that_names(self, key: str) -> str | None:
        """Return the field that names a tensor of a file which is no part of the memory; None where none does."""
        name = key.removeprefix(PREFIX)
        if name in (self.saved_embeddings or ()):
            return "saved_embeddings"
        if self.trainable_token_indices and name.endswith(".trainable_tokens_delta"):
            return "trainable_token_indices"
        if any(f".{module}." in f".{name}" for module in self.modules_to_save or ()):
            return "modules_to_save"
        return None

    @classmethod
    def check_kwargs(cls, **kwargs: Any) -> dict[str, Any]:
        """Leave out the fields that former versions saved: what a memory's structure is, its tensors tell."""
        return {
            name: value
            for name, value in kwargs.items()
            if name not in ("gated_host_experiment", "variant")
        }

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs
    ):
        """Load a memory's config from a folder or the hub, or raise a `ValueError` if it is damaged."""
        try:
            config = super().from_pretrained(
                pretrained_model_name_or_path, subfolder=subfolder, **kwargs
            )
        except ValueError as error:
            raise ValueError(one_line(str(error))) from error
        except (TypeError, AttributeError, RecursionError, OverflowError) as error:
            folder = os.path.join(pretrained_model_name_or_path, subfolder or "")
            if find_memory_file(folder) is None:  # a config alone: PEFT's own errors
                raise
            path, reason = os.path.join(folder, CONFIG_NAME), one_line(str(error))
            raise ValueError(
                f"{path} is no config of a memory ({reason}): copy or save the memory again"
            ) from error
        if isinstance(config, LocasConfig):
            config._file = find_memory_file(
                pretrained_model_name_or_path, subfolder, **cls._split_kwargs(kwargs)[0]
            )
            config._fields_of_file = config._list_fields_of_file()
        return config

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the config as PEFT does. If the tensors are there, add their digest and replace patterns by names."""
        layers, others = split_tensors(seal_memory_file(save_directory))
        saved = copy.copy(self)
        if layers:
            trained = ("modules_to_save", "trainable_token_indices")
            embeddings = [
                key.removeprefix(PREFIX)
                for key in others
                if self.field_that_names(key) not in trained
            ]
            self.saved_embeddings = saved.saved_embeddings = embeddings or None
            saved.name_modules(
                {
                    name: len(parts["locas_up"])
                    for name, parts in layers.items()
                    if "locas_up" in parts
                }
            )
        super(LocasConfig, saved).save_pretrained(save_directory, **kwargs)

    def name_modules(self, widths: dict[str, int]) -> None:
        """Replace all regular expressions by the names of FFNs that have a memory, each with its width R."""
        patterns = (self.target_modules, self.exclude_modules)
        if any(isinstance(pattern, str) for pattern in patterns) or self.layers_pattern:
            self.target_modules, self.exclude_modules = set(widths), None
            self.layers_to_transform = self.layers_pattern = None
        longest_first = sorted(
            widths.items(), key=lambda item: -len(item[0])
        )  # a name may end with another
        ranks = {re.escape(name): r for name, r in longest_first}
        self.rank_pattern = ranks if set(ranks.values()) != {self.r} else {}
        self._fields_of_file = self._list_fields_of_file()

    @property
    def file(self) -> str | None:
        """The file of the memory that the config was loaded with; None where a field that it fixes has changed."""
        return self._file if self._list_fields_of_file() == self._fields_of_file else None

    def _list_fields_of_file(self) -> list[Any]:
        # Heads of some tasks are added by PEFT after the config was loaded.
        names = (
            set(self.target_modules or ()),
            set(self.modules_to_save or ()) - {"classifier", "score", "qa_outputs"},
        )
        tensors = self.trainable_token_indices, self.saved_embeddings
        return [self.r, self.rank_pattern, self.exclude_modules, *names, *tensors]

    def copy_for_new_memory(self) -> LocasConfig:
        """Return a copy that is bound to no base and no file, for a new memory that is trained."""
        new = copy.deepcopy(self)
        new.slots, new.inference_mode, new._expected_host, new._file = None, False, None, None
        return new


def _holds(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple | set) and all(
        isinstance(value, kind) for value in values
    )


def _maps(values: object, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(values, dict) and all(map(is_valid, values.values()))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_name_or_names(value: object) -> bool:
    return isinstance(value, str) or _holds(value, str)


def _is_pattern(value: Any) -> bool:
    try:
        return bool(re.compile(value))
    except (re.error, TypeError, RecursionError, OverflowError):
        return False


def _is_target(value: object) -> bool:
    return not isinstance(value, str) or _is_pattern(value)


def _is_token_indices(value: Any) -> bool:
    lists = value.values() if isinstance(value, dict) else [value]
    return all(_holds(indices, int) and min(indices, default=0) >= 0 for indices in lists)


# From a field to its rule and whether a value follows it. None is checked by the field's annotation.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "base_model_name_or_path": ("be a string", lambda value: isinstance(value, str)),
    "r": ("be an integer", _is_whole),
    "pad_to_multiple_of": ("be an integer", _is_whole),
    "target_modules": ("be names, or one name or regular expression", _is_name_or_names),
    "exclude_modules": ("be names, or one name or regular expression", _is_name_or_names),
    "modules_to_save": ("be a list of names", lambda value: _holds(value, str)),
    "trainable_token_indices": (
        "be a list of token ids, or lists by module name",
        _is_token_indices,
    ),
    "saved_embeddings": ("be a list of names", lambda value: _holds(value, str)),
    "layers_pattern": ("be a name or names", _is_name_or_names),
    "seed": ("be an integer", _is_whole),
    "init_weights": ("be True or False", lambda value: isinstance(value, bool)),
    "layers_to_transform": (
        "be an index or a list of them",
        lambda value: _is_whole(value) or _holds(value, int),
    ),
    "scaling": ("be a number", _is_number),
    "row_norm": ("be a number", _is_number),
    "max_slot_norm": ("be a number, or None for no clip", _is_number),
    "rank_pattern": ("be a dictionary", lambda value: isinstance(value, dict)),
    "ffn_parts": (
        "be a dictionary of names",
        lambda value: _maps(value, lambda name: isinstance(name, str)),
    ),
    "host": ("be a dictionary", lambda value: isinstance(value, dict)),
    "slots": (
        "be a dictionary of lists of indices",
        lambda value: _maps(value, lambda slots: _holds(slots, int)),
    ),
}
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("be at least 1", lambda value: value >= 1),
    "pad_to_multiple_of": ("be from 1 to 65536", lambda value: 1 <= value <= 65536),
    # PEFT matches them as regular expressions and as ends of names.
    "modules_to_save": (
        "be names",
        lambda value: all(re.fullmatch(r"[\w.-]+", name) for name in value),
    ),
    "seed": ("have at most 63 bits", lambda value: abs(value) < 2**63),
    "target_modules": (
        "be a regular expression, or at least one name",
        lambda value: value and _is_target(value),
    ),
    "exclude_modules": ("be a regular expression", _is_target),
    "rank_pattern": (
        "have regular expressions as keys",
        lambda value: all(map(_is_pattern, value)),
    ),
    "init_strategy": (
        "be one of {strategies}",
        lambda value: isinstance(value, str) and value in STRATEGIES,
    ),
    "output_scale": ("be one of 'measured', 'paper'", lambda value: value in ("measured", "paper")),
    "scaling": ("be finite, at most 1e12 in size", lambda value: abs(value) <= LARGEST),
    "row_norm": ("be a finite number above 0", lambda value: 0 < value <= LARGEST),
    "max_slot_norm": (
        "be finite and above 0, or None for no clip",
        lambda value: 0 < value <= LARGEST,
    ),
}


def _check(field_name: str, value: Any, name: str | None = None) -> None:
    """Check a value by a field's rules; `name` stands for it in the message."""
    if value is None and "None" in LocasConfig.__annotations__.get(field_name, "None"):
        return
    for rules, error in ((_TYPES, TypeError), (_VALUES, ValueError)):
        rule, is_valid = rules.get(field_name, ("", lambda value: True))
        if not is_valid(value):
            rule = rule.format(
                strategies=", ".join(map(repr, STRATEGIES))
            )  # the table may have grown
            raise error(f"{name or field_name} must {rule}, got {value!r}.")
