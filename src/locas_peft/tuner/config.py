"""LocasConfig: the configuration of a memory, saved beside its weights."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from peft.config import PeftConfig
from peft.utils import PeftType
from peft.utils.other import get_pattern_key

from .initialization import STRATEGIES
from .memory_file import check_memory_file


@dataclass
class LocasConfig(PeftConfig):
    """Configuration of a LOCAS memory: a narrow FFN of width `r` beside each FFN of the host.

    Args:
        r: the width R of the memory, in slots. A slot is one gate row, one up row and one down column.
        target_modules: the FFNs that get a memory: names, suffixes of names, or a regular expression. `None` (and
            "all-linear") finds every dense FFN of the language model by its structure.
        exclude_modules: the FFNs that get none: names, suffixes, or a regular expression.
        init_strategy: how gate and up rows are initialised, a row of `STRATEGIES`: "topk", "bottomk" and "random"
            clone slots of the host, "gaussian" draws unit vectors, "activation" takes normalised FFN inputs (the
            paper's table on initialisation). "write" leaves all slots of a two-layer memory free, to be written in
            closed form (`SlotWriter`, `write_tokens`).
        variant: "auto" gives the memory the host's structure. "mlp" is the paper's Locas-MLP, two layers: on a
            two-layer host the same as "auto", on a gated host an experiment with ReLU that cannot be merged.
        gated_host_experiment: must be True for variant "mlp" on a host with gated FFNs, which the paper does not
            recommend.
        output_scale: "measured" sets the scales of the memory's input and output by what calibration sees, so that
            one learning rate suits every host (`scale.py`). "paper" leaves the input alone and scales the output by
            tau, the mean norm of the host's down columns divided by R.
        scaling: multiplies the output scale. With output_scale="paper", 1.0 is the paper's value and `r` cancels the
            division.
        row_norm: the initial norm of gate and up rows; 1.0 is the paper's value. A larger norm makes a slot respond
            to fewer inputs, and more strongly. Above 1 it must not exceed `max_slot_norm`.
        max_slot_norm: the radius of the norm clip, applied after each optimizer step; 1.0 is the paper's value,
            `None` switches the clip off.
        pad_to_multiple_of: merged FFNs are padded with zero neurons to a multiple of this width.
        rank_pattern: other widths for some FFNs, from names or regular expressions to `r`.
        layers_to_transform: indices of the layers that get a memory; `None` for all.
        layers_pattern: the name of the module list that those indices refer to, if it is not found automatically.
        ffn_parts: the attribute names of the parts of an unknown FFN: `{"gate": "w_gate", "up": "w_in", "down":
            "w_out", "activation": "act"}`; `gate_up` instead of `gate` and `up` where one projection holds both; no
            `gate` for a two-layer FFN; `activation` is an attribute of the FFN or one of transformers' activation
            names.
        seed: the seed of everything that is drawn at random.
        init_weights: `False` fills gate, up and down with random numbers, so that the memory changes the output; for
            tests only.
        modules_to_save: modules outside the memory that are trained and saved in full.
        trainable_token_indices: tokens whose embeddings are trained as well.
        host: the base that the memory was made for (family, hidden size, number of FFNs, activation). Filled in
            automatically and checked when the memory is loaded.
        slots: the host slots that each FFN's memory was cloned from. Filled in automatically.

    Raises:
        TypeError, ValueError: a field has an invalid value; the message names field, rule and value.
    """

    r: int = 64
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    init_strategy: str = "topk"
    variant: Literal["auto", "mlp"] = "auto"
    gated_host_experiment: bool = False
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
            raise ValueError(
                f"row_norm must be at most max_slot_norm ({self.max_slot_norm}), got {self.row_norm}: the first step "
                "would clip the rows; raise max_slot_norm, or set it to None."
            )
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(self.target_modules, str) and getattr(self, name) is not None:
                raise ValueError(f"{name} cannot be used when target_modules is a regular expression.")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern needs layers_to_transform: set the layers that it counts.")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            setattr(self, name, set(value) if isinstance(value, list | tuple) else value)
        # A host given at construction comes from a memory's file, so the model must match it. One filled in later
        # describes this memory and must not bind the config object to that model.
        self._expected_host = self.host

    def width_of(self, name: str) -> int:
        """Return R of the memory at the FFN of that name: from `rank_pattern`, or else `r`."""
        return self.rank_pattern.get(get_pattern_key(self.rank_pattern, name), self.r)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs):
        """Load a memory's config, and raise a `ValueError` if a local memory file does not fit it.

        No model has been changed by then.
        """
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        folder = os.path.join(pretrained_model_name_or_path, subfolder or "")
        if os.path.isdir(folder):
            check_memory_file(folder, config)
        return config


# ------------------------------------------------------------------------ checks: a memory's JSON may hold anything


def _holds(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple | set) and all(isinstance(value, kind) for value in values)


def _maps(values: object, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(values, dict) and all(map(is_valid, values.values()))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_name_or_names(value: object) -> bool:
    return isinstance(value, str) or _holds(value, str)


def _is_pattern(value: object) -> bool:
    try:
        return bool(re.compile(value))
    except (re.error, TypeError):
        return False


# From a field to its rule and whether a value follows it. None is checked by the field's annotation.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("be an integer", _is_whole),
    "pad_to_multiple_of": ("be an integer", _is_whole),
    "target_modules": ("be names, or one name or regular expression", _is_name_or_names),
    "exclude_modules": ("be names, or one name or regular expression", _is_name_or_names),
    "modules_to_save": ("be a list of names", lambda value: _holds(value, str)),
    "layers_to_transform": ("be an index or a list of them", lambda value: _is_whole(value) or _holds(value, int)),
    "scaling": ("be a number", _is_number),
    "row_norm": ("be a number", _is_number),
    "max_slot_norm": ("be a number, or None for no clip", _is_number),
    "rank_pattern": ("be a dictionary", lambda value: isinstance(value, dict)),
    "ffn_parts": ("be a dictionary of names", lambda value: _maps(value, lambda name: isinstance(name, str))),
    "host": ("be a dictionary", lambda value: isinstance(value, dict)),
    "slots": ("be a dictionary of lists of indices", lambda value: _maps(value, lambda slots: _holds(slots, int))),
}
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("be at least 1", lambda value: value >= 1),
    "pad_to_multiple_of": ("be at least 1", lambda value: value >= 1),
    "target_modules": ("be a regular expression", lambda value: not isinstance(value, str) or _is_pattern(value)),
    "exclude_modules": ("be a regular expression", lambda value: not isinstance(value, str) or _is_pattern(value)),
    "rank_pattern": ("have regular expressions as keys", lambda value: all(map(_is_pattern, value))),
    "init_strategy": ("be one of {strategies}", lambda value: isinstance(value, str) and value in STRATEGIES),
    "variant": ("be one of 'auto', 'mlp'", lambda value: value in ("auto", "mlp")),
    "output_scale": ("be one of 'measured', 'paper'", lambda value: value in ("measured", "paper")),
    "scaling": ("be finite", math.isfinite),
    "row_norm": ("be a finite number above 0", lambda value: 0 < value < math.inf),
    "max_slot_norm": ("be above 0, or None for no clip", lambda value: value > 0),
}


def _check(field_name: str, value: Any, name: str | None = None) -> None:
    """Check a value by a field's rules; `name` stands for it in the message."""
    if value is None and "None" in LocasConfig.__annotations__[field_name]:
        return
    for rules, error in ((_TYPES, TypeError), (_VALUES, ValueError)):
        rule, is_valid = rules.get(field_name, ("", lambda value: True))
        if not is_valid(value):
            rule = rule.format(strategies=", ".join(map(repr, STRATEGIES)))  # the table may have grown
            raise error(f"{name or field_name} must {rule}, got {value!r}.")
