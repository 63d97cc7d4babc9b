"""Rows that tell the passages of a study apart, before anything is learned.

Which passage a question is about, and which one is being recited, can be read from the base's hidden states by a
linear map, which AdamW finds slowly. Ridge regression gives it at once, from one forward pass over the lessons.

Axes: N tokens, S slots that get new rows, D hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import commonprefix

import torch
from torch import Tensor, nn

from ..asking import begin_rows
from ..asking.continuation import Rows
from ..model import CausalLM
from ..tuner import adapters_disabled, evaluating
from ..tuner.attached import list_layers, names_or_active

__all__ = ["can_tell_apart", "place_discriminants", "upper_layers_trained"]

RIDGE_AT_ENDS, RIDGE_INSIDE = 0.1, 1.0
"""Of the mean squared length of the inputs, at the ends of prompts and inside answers."""
LEVEL, UP = 3.0, 2.0
"""A gate for the tokens of its own passage, before the activation (minus this for all others), and each up row."""
SLOTS_EACH = 3  # the most of half a layer for one passage: with more, a note of two sentences has other words in it
FEWEST = 8
"""Of fewer passages some were recited with a word changed, and too many slots of a layer would be one passage's."""
FIRST_LAYER = 1 / 3  # lower layers do not take part: there the passages are hardest to tell apart
BATCH = 16


class _Inputs(list[Tensor]):
    """The FFN's inputs at the last tokens of each row, [N, D] of each; takes the place of a `Calibration`."""

    counts: Sequence[int] = ()  # of the rows of the batch

    def update(self, ffn_input: Tensor, *_: object) -> None:
        rows = ffn_input.reshape(len(self.counts), -1, ffn_input.shape[-1])  # OPT flattens them
        self.extend(row[-count:].clone() for row, count in zip(rows, self.counts, strict=True))


def can_tell_apart(model: nn.Module, passages: int) -> bool:
    """Return whether there are `FEWEST` passages or more, and one slot for each in half of an upper layer's slots."""
    name, _, layers = _find_trained(model)
    return FEWEST <= passages <= min(layer.locas_down[name].in_features for layer in layers) // 2


@torch.no_grad()
def place_discriminants(
    model: nn.Module,
    rows: Rows,
    counts: Sequence[int],
    passages: Sequence[int],
    pad: int,
    *,
    inside: bool,
) -> None:
    """Give up to half of a memory's slots, in the upper two thirds of its layers, rows that tell passages apart.

    It is the memory that is trained; it has no norm clip (`stages.stage.separates`). A slot's gate row is open
    at the tokens of one passage and closed at all others; in a memory without gates its up row is. The passages take
    the slots in turns, at most `SLOTS_EACH` each. The slots' values become zero; others stay.

    Args:
        rows: token ids, such as prompts, or prompts and answers.
        counts: how many tokens at the end of each row are its passage's.
        passages: the number of each row's passage, from 0 on; -1 for a row that is of none.
        pad: any token.
        inside: whether the tokens are those of answers, and the memory's first slots get the rows; else its last ones.
    """
    name, _, layers = _find_trained(model)
    own, count = torch.tensor(passages).repeat_interleave(torch.tensor(counts)), max(passages) + 1
    for place, (layer, inputs) in enumerate(
        zip(layers, _list_inputs(model, layers, rows, counts, pad), strict=True)
    ):
        *weights, down = (module.weight for module in layer.projections(name))
        slots = min(down.shape[1] // 2, SLOTS_EACH * count)
        chosen = slice(slots) if inside else slice(-slots, None)
        numbers = torch.arange(place * slots, (place + 1) * slots) % count
        found = _regress(
            inputs.float() * layer.locas_input_scale[name], own.to(inputs.device), count, inside
        )
        for weight, new in zip(weights, (found[numbers], found[count]), strict=False):
            weight[chosen] = new.to(weight)
        down[:, chosen] = 0
        # The rows are no longer clones of neurons of the host.
        layer.locas_config[name].set_record("slots", None)


def _regress(inputs: Tensor, own: Tensor, count: int, inside: bool) -> Tensor:
    """Return rows, [count + 1, D]: one for each passage that is `LEVEL` for its inputs, and one that is `UP` for all.

    The inputs are [N, D]. Inside answers a passage's own ones weigh as much as all others together. At the ends of
    prompts, of which there are few, that would fit these prompts alone.
    """
    ridge = (RIDGE_INSIDE if inside else RIDGE_AT_ENDS) * inputs.pow(2).sum(1).mean()
    products = inputs.T @ inputs + ridge * torch.eye(inputs.shape[1], device=inputs.device)
    targets = torch.where(own[:, None] == torch.arange(count, device=own.device), LEVEL, -LEVEL).to(
        inputs
    )
    sums = inputs.T @ torch.cat([targets, torch.full_like(targets[:, :1], UP)], 1)
    rows = torch.linalg.solve(products, sums).T
    for number in range(count if inside else 0):
        mine = inputs[own == number]
        more = (len(inputs) - len(mine)) / max(len(mine), 1) - 1
        extra = more * mine.T
        rows[number] = torch.linalg.solve(
            products + extra @ mine, sums[:, number] + more * LEVEL * mine.sum(0)
        )
    return rows


@contextmanager
def upper_layers_trained(model: nn.Module, alone: bool = True) -> Iterator[None]:
    """Within the context, only the layers that get discriminants are trained; with `alone` False nothing changes."""
    name, lower, _ = _find_trained(model) if alone else ("", [], [])
    trained = [
        module.weight
        for layer in lower
        for module in layer.projections(name)
        if module.weight.requires_grad
    ]
    try:
        for weight in trained:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)


def _find_trained(model: nn.Module) -> tuple[str, list, list]:
    """Return the name of the memory that is trained, else of the last one, and its lower and upper layers."""
    layers = {name: list_layers(model, name) for name in names_or_active(model, None)}
    name, own = max(
        reversed(layers.items()),
        key=lambda each: each[1][-1].locas_down[each[0]].weight.requires_grad,
    )
    first = int(FIRST_LAYER * len(own))
    return name, own[:first], own[first:]


def _list_inputs(
    model: nn.Module, layers: Sequence, rows: Rows, counts: Sequence[int], pad: int
) -> list[Tensor]:
    """Return each layer's FFN inputs at the last tokens of rows, [N, D], in their order, without its memories."""
    host, inputs = CausalLM(model), [_Inputs() for _ in layers]
    with evaluating(model), adapters_disabled(model):
        for first in range(0, len(rows), BATCH):
            batch, kept = (each[first : first + BATCH] for each in (rows, counts))
            shared = len(
                commonprefix([list(row[:-count]) for row, count in zip(batch, kept, strict=True)])
            )
            given = begin_rows(host, batch, [(shared, range(len(batch)))], pad)
            try:
                for layer, seen in zip(layers, inputs, strict=True):
                    layer.calibration, seen.counts = seen, kept
                host.outputs(count=1, **given)
            finally:
                for layer in layers:
                    layer.calibration = None
    return [torch.cat(seen) for seen in inputs]
