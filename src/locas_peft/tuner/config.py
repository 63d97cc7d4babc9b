"""LocasConfig: the configuration of a memory, saved beside its weights."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

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
            paper's table on initialisation). "topk", "bottomk" and "activation" need a calibration pass. "write"
            leaves all slots of a two-layer memory free, to be written in closed form (`SlotWriter`, `write_tokens`).
        variant: "auto" gives the memory the host's structure. "mlp" is the paper's Locas-MLP, two layers: on a
            two-layer host the same as "auto", on a gated host an experiment with ReLU that cannot be merged.
        gated_host_experiment: must be True for variant "mlp" on a host with gated FFNs, which the paper does not
            recommend.
        scaling: multiplies tau, the paper's output scale (mean norm of the host's down columns, divided by R). 1.0 is
            the paper's value; `r` cancels the division.
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
        seed: the seed of the strategies that draw random numbers.
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

    r: int = field(default=64, metadata={"help": "Width of the memory, in slots."})
    target_modules: list[str] | str | None = field(
        default=None, metadata={"help": "FFN modules that get a memory; None finds every dense FFN."}
    )
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "FFN modules that get none."})
    init_strategy: str = field(default="topk", metadata={"help": "How gate and up rows are initialised."})
    variant: Literal["auto", "mlp"] = field(
        default="auto", metadata={"help": "Structure of the memory: the host's, or two layers (Locas-MLP)."}
    )
    gated_host_experiment: bool = field(
        default=False, metadata={"help": "Allows variant 'mlp' on a host with gated FFNs."}
    )
    scaling: float = field(default=1.0, metadata={"help": "Multiplies tau, the output scale."})
    row_norm: float = field(default=1.0, metadata={"help": "Initial norm of gate and up rows."})
    max_slot_norm: float | None = field(default=1.0, metadata={"help": "Radius of the norm clip; None: no clip."})
    pad_to_multiple_of: int | None = field(
        default=None, metadata={"help": "Merged FFNs are zero-padded to a multiple of this width."}
    )
    rank_pattern: dict[str, int] = field(default_factory=dict, metadata={"help": "Other widths for some FFNs."})
    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "Indices of the layers that get a memory."}
    )
    layers_pattern: list[str] | str | None = field(
        default=None, metadata={"help": "Name of the module list that layers_to_transform refers to."}
    )
    ffn_parts: dict[str, str] | None = field(default=None, metadata={"help": "Names of an unknown FFN's parts."})
    seed: int = field(default=0, metadata={"help": "Seed of the strategies that draw random numbers."})
    init_weights: bool = field(
        default=True, metadata={"help": "False fills the memory with random numbers, for tests."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules outside the memory that are trained and saved in full."}
    )
    trainable_token_indices: list[int] | dict[str, list[int]] | None = field(
        default=None, metadata={"help": "Tokens whose embeddings are trained as well."}
    )
    host: dict | None = field(default=None, metadata={"help": "Base of the memory; filled in automatically."})
    slots: dict[str, list[int]] | None = field(
        default=None, metadata={"help": "Host slots that each memory was cloned from; filled in automatically."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.LOCAS
        self._check_names()
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            setattr(self, name, set(value) if isinstance(value, list | tuple) else value)
        _check_width("r", self.r)
        for pattern, r in self.rank_pattern.items():
            _check_width(f"rank_pattern[{pattern!r}]", r)
        if self.pad_to_multiple_of is not None:
            _check_width("pad_to_multiple_of", self.pad_to_multiple_of)
        _check_choice("init_strategy", self.init_strategy, STRATEGIES)
        _check_choice("variant", self.variant, ("auto", "mlp"))
        self._check_scales()
        if isinstance(self.target_modules, str):
            for name in ("layers_to_transform", "layers_pattern"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} cannot be used when target_modules is a regular expression.")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern needs layers_to_transform: set the layers that it counts.")
        # A host given at construction comes from a memory's file, so the model must match it. One filled in later
        # describes this memory and must not bind the config object to that model.
        self._expected_host = self.host

    def _check_names(self) -> None:
        """Checks names, lists and dictionaries, which a memory's JSON may hold in a wrong type."""
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, str):
                _check_pattern(name, value)
            elif value is not None and not _holds_only(value, str):
                raise TypeError(f"{name} must be names, or one name or regular expression, got {value!r}.")
        if self.modules_to_save is not None and not _holds_only(self.modules_to_save, str):
            raise TypeError(f"modules_to_save must be a list of names, got {self.modules_to_save!r}.")
        layers = self.layers_to_transform
        if layers is not None and not isinstance(layers, int) and not _holds_only(layers, int):
            raise TypeError(f"layers_to_transform must be an index or a list of them, got {layers!r}.")
        for name in ("rank_pattern", "ffn_parts", "host", "slots"):
            value = getattr(self, name)
            if not isinstance(value, dict) and (value is not None or name == "rank_pattern"):
                raise TypeError(f"{name} must be a dictionary, got {value!r}.")
        if self.slots and not all(_holds_only(slots, int) for slots in self.slots.values()):
            raise TypeError("slots must be lists of indices, got something else.")
        for pattern in self.rank_pattern:
            _check_pattern("rank_pattern", pattern)
        if self.ffn_parts and not _holds_only(list(self.ffn_parts.values()), str):
            raise TypeError(f"ffn_parts must name attributes, got {self.ffn_parts!r}.")

    def _check_scales(self) -> None:
        scaling, row_norm, radius = self.scaling, self.row_norm, self.max_slot_norm
        if not _is_number(scaling):
            raise TypeError(f"scaling must be a number, got {scaling!r}.")
        if not math.isfinite(scaling):
            raise ValueError(f"scaling must be finite, got {scaling}.")
        if not _is_number(row_norm):
            raise TypeError(f"row_norm must be a number, got {row_norm!r}.")
        if not 0 < row_norm < math.inf:
            raise ValueError(f"row_norm must be a finite number above 0, got {row_norm}.")
        if radius is None:
            return
        if not _is_number(radius):
            raise TypeError(f"max_slot_norm must be a number, or None for no clip, got {radius!r}.")
        if not radius > 0:
            raise ValueError(f"max_slot_norm must be above 0, or None for no clip, got {radius}.")
        if row_norm > max(1.0, radius):
            raise ValueError(
                f"row_norm must be at most max_slot_norm ({radius}), got {row_norm}: the first step would clip the "
                "rows; raise max_slot_norm, or set it to None."
            )

    def width_of(self, name: str) -> int:
        """Returns R of the memory at the FFN of that name: from `rank_pattern`, or else `r`."""
        return self.rank_pattern.get(get_pattern_key(self.rank_pattern, name), self.r)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs):
        """Loads a memory's config, and checks a local memory file against it before any model is changed.

        Raises:
            ValueError: the folder has no config, or its memory file is pickled, truncated or does not fit the config.
        """
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        folder = os.path.join(pretrained_model_name_or_path, subfolder or "")
        if os.path.isdir(folder):
            check_memory_file(folder, config)
        return config


def _holds_only(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple | set) and all(isinstance(value, kind) for value in values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{name} must hold regular expressions, got {pattern!r}: {error}.") from None


def _check_width(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
