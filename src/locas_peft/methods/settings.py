"""How a text is read: the settings of a reading, and the presets that they start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import backbone
from ..ttt.gradient import GRADIENTS
from ..tuner import STRATEGIES

_PAPERS_NORMS = {"row_norm": None, "max_slot_norm": None}
_PLAIN = {"layers_to_transform": None, "gradient": "full", "anchor": None, "anchor_every": 4}

_WRITING = {"update": "bp", "epsilon": 0.01, "slots_per_chunk": 8}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # Gated: the paper's, tau divided by r and the rate of its PG-19 runs. Two-layer: written slot by slot as in the
    # paper, but tau undivided and a rate from our sweep (benchmarks/README.md).
    "paper": {
        "none": {},
        "lora": {"r": 64, "learning_rate": 1e-3, **_PLAIN},
        "locas-glu": {"r": 64, "init": "topk", "learning_rate": 4e-3, "scaling": 1.0, **_PAPERS_NORMS, **_PLAIN},
        "locas-mlp": {
            **{"r": 64, "init": "write", "learning_rate": 5e-4, "scaling": "r", **_PAPERS_NORMS, **_PLAIN},
            **_WRITING,
        },
    },
    # What measured best (benchmarks/README.md): tau undivided ("r" stands for the width itself), so that the norm clip
    # binds later and the memory learns more; an anchor, so that it leaves other texts alone; cloned rows everywhere.
    "tuned": {
        "none": {},
        "lora": {"r": 64, "learning_rate": 1e-3, **_PLAIN},
        "locas-glu": {
            **{"r": 64, "init": "topk", "learning_rate": 4e-3, "scaling": "r", **_PAPERS_NORMS, **_PLAIN},
            **{"anchor": 0.3},
        },
        "locas-mlp": {
            **{"r": 64, "init": "topk", "learning_rate": 8e-3, "scaling": "r", **_PAPERS_NORMS, **_PLAIN},
            **_WRITING,
        },
    },
}

UPDATES = ("bp", "nlsvd")
"""How a written memory goes on: trained by gradient descent, or only written and folded."""


@dataclass(frozen=True)
class Settings:
    """How a text is read. `from_preset` fills in what a method leaves open.

    Args:
        method: a name in `METHODS`; each preset has all of them.
        model: name of the base, for the record.
        preset: name of the preset that the defaults came from, for the record.
        r: memory width or LoRA rank; None where the method has none, as with `init`, `learning_rate` and `scaling`.
        init: strategy that makes a memory's gate and up rows.
        learning_rate: of AdamW.
        scaling: multiplies tau, which is divided by `r`.
        row_norm: the norm of a memory's rows at the start; None for 1, the paper's.
        max_slot_norm: the radius of the norm clip, 0 for no clip; None for 1, the paper's.
        update: of a memory that is written (init "write"): "bp" also trains the slots, "nlsvd" only writes and folds
            them by NL-SVD. A memory that is not written is trained, whatever this says.
        epsilon: length of a written value.
        slots_per_chunk: how many tokens of a chunk are written, those with the highest loss.
        layers_to_transform: indices of the layers that get a memory or LoRA, or "upper" for the upper half of them;
            None for all. Nothing is differentiated below the lowest of them.
        gradient: "full", or "tokenwise", which leaves out attention (see `ttt.TestTimeTrainer`); None where nothing
            is learned.
        anchor: how hard what is trained is held to the base on text that the base wrote (see `ttt.Anchor`); None, or 0
            in `from_preset`, for not at all.
        anchor_every: one step in so many is held.
        window: tokens that the model sees at once, context and chunk.
        stride: tokens of a chunk.
        context: "cache" keeps the context's keys and values, "recompute" reads the whole window again.
        epochs: learning passes over a chunk.
        max_tokens: how many tokens of the text are read; None for all of them.
        seed: set before each method.
        dtype: of the base's weights, for the record.

    Raises:
        ValueError: a value that no reading can have.
    """

    method: str
    model: str = backbone.NAME
    preset: str = "tuned"
    r: int | None = None
    init: str | None = None
    learning_rate: float | None = None
    scaling: float | None = None
    row_norm: float | None = None
    max_slot_norm: float | None = None
    update: str | None = None
    epsilon: float | None = None
    slots_per_chunk: int | None = None
    layers_to_transform: list[int] | str | None = None
    gradient: str | None = None
    anchor: float | None = None
    anchor_every: int | None = None
    window: int = 512
    stride: int = 256
    context: str = "cache"
    epochs: int = 1
    max_tokens: int | None = None
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_choice("preset", self.preset, PRESETS)
        _check_choice("method", self.method, PRESETS[self.preset])
        if self.init is not None:
            _check_choice("init", self.init, STRATEGIES)
        if self.update is not None:
            _check_choice("update", self.update, UPDATES)
        if self.gradient is not None:
            _check_choice("gradient", self.gradient, GRADIENTS)
        for name in ("r", "stride", "epochs", "max_tokens", "slots_per_chunk", "anchor_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}: raise it, or leave it out")
        if self.window < self.stride:
            raise ValueError(
                f"window must be at least the stride ({self.stride}), got {self.window}: the window holds the chunk; "
                "raise it, or lower the stride"
            )
        _check_layers(self.layers_to_transform)
        if isinstance(self.layers_to_transform, tuple):
            object.__setattr__(self, "layers_to_transform", list(self.layers_to_transform))  # as JSON gives it back
        for name in ("learning_rate", "scaling", "row_norm", "epsilon", "anchor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {value}: leave it out for the preset's")

    @classmethod
    def from_preset(cls, method: str, preset: str = "tuned", **given: Any) -> Settings:
        """Takes a preset's values for all that is not given.

        Args:
            method: a name in `METHODS`.
            preset: a name in `PRESETS`.
            given: fields of `Settings`; None stands for "not given".

        Raises:
            ValueError: an unknown name, a value out of range, or a field that this method does not have.

        Example:
            >>> Settings.from_preset("locas-glu", r=16).scaling
            16.0
        """
        _check_choice("preset", preset, PRESETS)
        _check_choice("method", method, PRESETS[preset])
        values = dict(PRESETS[preset][method])
        given = {name: value for name, value in given.items() if value is not None}
        for name in METHOD_FIELDS:
            if name in given and name not in values:
                raise ValueError(f"{name} has no meaning for the method {method!r}, got {given[name]}: leave it out")
        values.update(given)
        values["anchor"] = values.get("anchor") or None
        _drop_what_is_not_used(values, given)
        if values.get("scaling") == "r":
            values["scaling"] = float(values["r"])
        return cls(method=method, preset=preset, **values)


def _drop_what_is_not_used(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Takes out a preset's values that another setting leaves without a meaning, and refuses given ones."""
    rules = [
        ("init", values.get("init"), values.get("init") != "write", ("update", "epsilon", "slots_per_chunk")),
        ("update", values.get("update"), values.get("update") == "nlsvd", ("learning_rate", "anchor")),
        ("anchor", values.get("anchor"), not values.get("anchor"), ("anchor_every",)),
    ]
    for field, value, applies, names in rules:
        for name in names if applies else ():
            if name in given:
                raise ValueError(f"{name} has no meaning with {field}={value!r}, got {given[name]}: leave it out")
            values.pop(name, None)


METHOD_FIELDS = (
    "r",
    "init",
    "learning_rate",
    "scaling",
    "row_norm",
    "max_slot_norm",
    "update",
    "epsilon",
    "slots_per_chunk",
    "layers_to_transform",
    "gradient",
    "anchor",
    "anchor_every",
)
"""The settings that not every method has."""


def _check_layers(layers: Any) -> None:
    if layers is None or layers == "upper":
        return
    indices = layers if isinstance(layers, list | tuple) else ()
    whole = all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices)
    if not indices or not whole or len(set(indices)) < len(indices):
        raise ValueError(
            f"layers_to_transform must be 'upper' or different layer indices from 0 on, got {layers!r}: "
            "leave it out for all layers"
        )


def _check_choice(field: str, value: Any, choices: dict[str, Any]) -> None:
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}")
