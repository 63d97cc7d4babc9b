"""Rows that tell the passages of a study apart, before anything is learned.

Which passage a question is about can be read from the base's hidden states by a linear map, which AdamW finds slowly.
Ridge regression gives it at once, from one forward pass over the prompts of the study.

Axes: N prompts, S slots that get new rows, D hidden size.
"""

from collections.abc import Sequence
from os.path import commonprefix

import torch
from torch import Tensor, nn

from ..asking import begin_rows
from ..asking.continuation import Rows
from ..model import CausalLM
from ..tuner import adapters_disabled, evaluating
from ..tuner.attached import list_layers, names_or_active

__all__ = ["can_tell_apart", "place_discriminants"]

RIDGE = 0.1
"""Of the mean squared length of an input."""
LEVEL = 3.0
"""What a gate is for the prompts of its own passage, before the activation; for all others it is as far below 0."""
UP = 2.0
"""What the up projection is for every prompt."""
SLOTS_EACH = 3
"""The most slots of a layer for one passage: with more, a note of two sentences is recited with other words in it."""
FEWEST = 8
"""Of fewer passages some were recited with a word changed, and too many slots of a layer would be one passage's."""
FIRST_LAYER = 1 / 3
"""Lower layers keep their cloned rows: there the passages are hardest to tell apart."""
BATCH = 16


class _Ends(list[Tensor]):
    """The FFN's inputs at the last token of each prompt; takes the place of a `Calibration`."""

    def update(self, ffn_input: Tensor, *_: object) -> None:
        self.append(ffn_input[:, -1].float())


def can_tell_apart(model: nn.Module, passages: int) -> bool:
    """Return whether there are `FEWEST` passages or more, and one slot for each in half of every layer's slots."""
    name, layers = _find_trained(model)
    return FEWEST <= passages <= min(layer.locas_down[name].in_features for layer in layers) // 2


@torch.no_grad()
def place_discriminants(model: nn.Module, prompts: Rows, passages: Sequence[int], pad: int) -> None:
    """Give up to half of a memory's slots, in the upper two thirds of its layers, rows that tell passages apart.

    It is the memory that is trained; it has no norm clip (`CompleteSettings.separates`). A slot's gate row is open
    at the end of the prompts of one passage and closed for all others; in a memory without gates its up row is. The
    passages, for which `can_tell_apart` holds, take the slots in turns. The slots' values become zero; others stay.

    Args:
        prompts: N rows of token ids.
        passages: the number of each prompt's passage, from 0 on; -1 for a prompt that is about none.
        pad: any token.
    """
    name, layers = _find_trained(model)
    layers = layers[int(FIRST_LAYER * len(layers)) :]
    ends = _list_ends(model, layers, prompts, pad)
    own, count = torch.tensor(passages), max(passages) + 1
    for place, (layer, inputs) in enumerate(zip(layers, ends, strict=True)):
        *rows, down = (module.weight for module in layer.projections(name))
        inputs, slots = inputs * layer.locas_input_scale[name], min(down.shape[1] // 2, SLOTS_EACH * count)
        numbers = torch.arange(place * slots, (place + 1) * slots) % count
        targets = torch.where(own[:, None] == numbers, LEVEL, -LEVEL).to(inputs)
        targets = torch.cat([targets, torch.full_like(targets[:, :1], UP)], 1)
        products = inputs @ inputs.T
        products.diagonal().add_(RIDGE * products.diagonal().mean())
        found = torch.linalg.solve(products, targets).T @ inputs  # [S + 1, D]
        for weight, new in zip(rows, (found[:-1], found[-1]), strict=False):
            weight[-slots:] = new.to(weight)
        down[:, -slots:] = 0
        layer.locas_config[name].slots = None  # which neurons of the host the rows are clones of


def _find_trained(model: nn.Module) -> tuple[str, list]:
    """Return the name of the memory that is trained, and its layers, lowest first; others may be active beside it."""
    layers = {name: list_layers(model, name) for name in names_or_active(model, None)}
    return next((name, own) for name, own in layers.items() if own[0].locas_down[name].weight.requires_grad)


def _list_ends(model: nn.Module, layers: Sequence, prompts: Rows, pad: int) -> list[Tensor]:
    """Return each layer's FFN inputs at the ends of prompts, [N, D] float32, without memories."""
    host, ends = CausalLM(model), [_Ends() for _ in layers]
    with evaluating(model), adapters_disabled(model):
        for first in range(0, len(prompts), BATCH):
            batch = prompts[first : first + BATCH]
            shared = len(commonprefix([list(prompt[:-1]) for prompt in batch]))
            inputs = begin_rows(host, batch, [(shared, range(len(batch)))], pad)
            try:
                for layer, seen in zip(layers, ends, strict=True):
                    layer.calibration = seen
                host.outputs(count=1, **inputs)
            finally:
                for layer in layers:
                    layer.calibration = None
    return [torch.cat(seen) for seen in ends]
