"""Discriminants: slots of a memory that tell the passages of a study apart from the beginning.

Which passage a question is about, and which one is being recited, can be read from the base's
hidden states by a linear map. AdamW finds this map slowly. Ridge regression gives it at once, from
one forward pass over the lessons.

Axes: N tokens, S slots that get new rows, D hidden size, P passages.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import commonprefix

import torch
from torch import Tensor, nn

from ..asking import begin_rows
from ..asking.continuation import Groups, Rows
from ..model import CausalLM
from ..tuner import LocasLayer, adapters_disabled, evaluating
from ..tuner.attached import find_memories

__all__ = [
    "can_tell_apart",
    "lift_norm_clip",
    "place_discriminants",
    "upper_layers_trained",
]

# Of the mean squared length of the inputs, at the ends of prompts.
RIDGE_AT_ENDS = 0.1
# The same inside answers.
RIDGE_INSIDE = 1.0
# A gate before the activation for the tokens of its own passage; minus this for all others.
LEVEL = 3.0
# An up row's product with the input, for all tokens.
UP = 2.0
# The most slots for one passage, in each half of a layer. With more, a note of two sentences is
# recited with other words in it.
SLOTS_EACH = 3
# The fewest passages. Of fewer, some were recited with a word changed, and too many slots of a
# layer would be one passage's.
FEWEST = 3
# The share of the layers that do not take part: the lowest, where the passages are hardest to tell
# apart.
FIRST_LAYER = 1 / 3
ROWS_AT_ONCE = 16


class _Inputs(list[Tensor]):
    """The FFN's inputs at the last tokens of each row, [N, D] of each.

    Its `update` is a layer's `observer`.
    """

    counts: Sequence[int] = ()
    """How many tokens of each row of the batch are wanted."""

    def update(self, ffn_input: Tensor, *_: object) -> None:
        # OPT flattens the rows.
        rows = ffn_input.reshape(len(self.counts), -1, ffn_input.shape[-1])
        for row, count in zip(rows, self.counts, strict=True):
            self.append(row[-count:].clone())


def can_tell_apart(model: nn.Module, passages: int) -> bool:
    """Return whether the memory gets discriminants for so many passages.

    There must be `FEWEST` or more, and one slot for each in half of an upper layer's slots.
    """
    name, _, layers = _find_trained(model)
    width = min(layer.locas_down[name].in_features for layer in layers)
    return FEWEST <= passages <= width // 2


def lift_norm_clip(model: nn.Module) -> None:
    """Take the norm clip from the memory that is trained: discriminants are longer than one."""
    name, _, layers = _find_trained(model)
    layers[0].locas_config[name].max_slot_norm = None


@torch.no_grad()
def place_discriminants(
    model: nn.Module,
    rows: Rows,
    counts: Sequence[int],
    passages: Sequence[int],
    *,
    inside: bool,
) -> None:
    """Give up to half of a memory's slots rows that tell passages apart, in its upper layers.

    The memory is the one that is trained. It has no norm clip (`lift_norm_clip`). The
    gate row of a slot is open at the tokens of one passage and closed at all others; in a memory
    without gates its up row is. The passages take the slots in turns, at most `SLOTS_EACH` each.
    The slots' values become zero; others stay.

    Args:
        model: a model with a LOCAS memory; mutated.
        rows: token ids, such as prompts, or prompts and answers.
        counts: how many tokens at the end of each row are its passage's.
        passages: the number of each row's passage, from 0 on; -1 for a row that is of none.
        inside: whether the tokens are those of answers, and the memory's first slots get the rows;
            else its last ones.
    """
    name, _, layers = _find_trained(model)
    count = max(passages) + 1
    # Batches of about one length have few padding tokens.
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    rows = [rows[number] for number in order]
    counts = [counts[number] for number in order]
    passages = [passages[number] for number in order]
    owners = torch.tensor(passages).repeat_interleave(torch.tensor(counts))
    inputs = _list_inputs(model, layers, rows, counts)
    for number, (layer, layer_inputs) in enumerate(zip(layers, inputs, strict=True)):
        scaled = layer_inputs.float() * layer.locas_input_scale[name]
        solved = _regress(scaled, owners.to(scaled.device), count, inside)
        *weights, down = [module.weight for module in layer.projections(name)]
        slots = min(down.shape[1] // 2, SLOTS_EACH * count)
        chosen = slice(slots) if inside else slice(-slots, None)
        turns = torch.arange(number * slots, (number + 1) * slots) % count
        # A memory without gates has one weight, whose rows are those of the passages.
        for weight, new_rows in zip(weights, (solved[turns], solved[count]), strict=False):
            weight[chosen] = new_rows.to(weight)
        down[:, chosen] = 0
        # The rows are no longer clones of neurons of the host.
        layer.locas_config[name].set_record("slots", None)


def _regress(inputs: Tensor, owners: Tensor, count: int, inside: bool) -> Tensor:
    """Return rows [P + 1, D]: one for each passage, and one whose product is `UP` for all inputs.

    A passage's row has the product `LEVEL` with its own inputs and minus that with others. Inside
    answers a passage's own inputs weigh as much as all others together. At the ends of prompts, of
    which there are few, that would fit these prompts alone.

    Args:
        inputs: float32 [N, D].
        owners: LongTensor [N], the passage of each input; -1 for none.
        count: P.
        inside: whether the inputs are those inside answers.
    """
    share = RIDGE_INSIDE if inside else RIDGE_AT_ENDS
    ridge = share * inputs.pow(2).sum(1).mean()
    products = inputs.T @ inputs + ridge * torch.eye(inputs.shape[1], device=inputs.device)
    is_owner = owners[:, None] == torch.arange(count, device=owners.device)
    targets = torch.where(is_owner, LEVEL, -LEVEL).to(inputs)
    up_targets = torch.full_like(targets[:, :1], UP)
    sums = inputs.T @ torch.cat([targets, up_targets], 1)
    rows = torch.linalg.solve(products, sums).T
    if not inside:
        return rows
    for number in range(count):
        own = inputs[owners == number]
        # The weight of an own input beyond 1.
        extra = (len(inputs) - len(own)) / max(len(own), 1) - 1
        own_products = products + (extra * own.T) @ own
        own_sums = sums[:, number] + extra * LEVEL * own.sum(0)
        rows[number] = torch.linalg.solve(own_products, own_sums)
    return rows


@contextmanager
def upper_layers_trained(model: nn.Module, alone: bool = True) -> Iterator[None]:
    """Train only the layers that get discriminants within the context.

    With `alone` False nothing changes.
    """
    frozen = []
    if alone:
        name, lower_layers, _ = _find_trained(model)
        for layer in lower_layers:
            frozen += [each for each in layer.parameters_of(name) if each.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(True)


def _find_trained(model: nn.Module) -> tuple[str, list[LocasLayer], list[LocasLayer]]:
    """Return the name of the last memory that is trained, and its lower and upper layers.

    Where none is trained, it is the last one.
    """
    memories = find_memories(model, None)
    trained = []
    for name, layers in memories.items():
        if layers[-1].locas_down[name].weight.requires_grad:
            trained.append(name)
    name = (trained or list(memories))[-1]
    layers = memories[name]
    first = int(FIRST_LAYER * len(layers))
    return name, layers[:first], layers[first:]


def _list_inputs(
    model: nn.Module, layers: Sequence[LocasLayer], rows: Rows, counts: Sequence[int]
) -> list[Tensor]:
    """Return each layer's FFN inputs at the last tokens of rows, [N, D], without its memories."""
    host = CausalLM(model)
    inputs = [_Inputs() for _ in layers]
    with evaluating(model), adapters_disabled(model):
        for first in range(0, len(rows), ROWS_AT_ONCE):
            batch = rows[first : first + ROWS_AT_ONCE]
            batch_counts = counts[first : first + ROWS_AT_ONCE]
            arguments = begin_rows(host, batch, _share_beginning(batch, batch_counts))
            try:
                for layer, layer_inputs in zip(layers, inputs, strict=True):
                    layer_inputs.counts = batch_counts
                    layer.observer = layer_inputs.update
                host.outputs(count=1, **arguments)
            finally:
                for layer in layers:
                    layer.observer = None
    return [torch.cat(layer_inputs) for layer_inputs in inputs]


def _share_beginning(rows: Rows, counts: Sequence[int]) -> Groups:
    """Return one group of all rows, which share what is alike before their last tokens."""
    beginnings = [list(row[:-count]) for row, count in zip(rows, counts, strict=True)]
    return [(len(commonprefix(beginnings)), range(len(rows)))]
