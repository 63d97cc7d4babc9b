"""Writing tokens into a two-layer memory in closed form, and folding the memory when it is full (Locas-MLP).

Paper, section "Memory Initialization for Locas-MLP". For a token t and layer i,

    key   k = A^i / |A^i|,   value  v = epsilon G^i / |G|,   |G|^2 = sum over layers of |G^i|^2

with A^i the FFN's input and G^i the gradient of the next token's log-likelihood with respect to the FFN's output: the
slot moves that output by phi(|A^i|) v, uphill. One forward and one backward pass over a stretch of text give A and G
of all its tokens. The log-likelihoods are summed before the backward pass, so each G_t also holds what token t does
for the later ones through attention; the paper writes one token at a time, at the price of one backward pass each.

Where the paper leaves room, or is left:
- Length. The paper's values all have one length, so that a token the model knew weighs as much as a surprise.
  `normalization="chunk"` divides by the root of the mean of |G|^2 over a chunk's tokens instead: the sum of the slots
  is then a step of gradient descent. It learned more where all tokens were written (`benchmarks/LOG.md`).
- Units. The paper has tau for Locas-GLU alone. Here every memory's output is multiplied by tau * `scaling`, and what
  is stored is v / (tau * scaling): a written slot does to the output what the formula says, in every layer alike,
  whatever r is. The norm clip bounds what is stored, at the next optimizer step; with `scaling=r` its ball has about
  the size of the host's own values, without it 1/r of that.
- The cycle (appendix, "Expansion-Compression Cycle"). The memory's tensors have R = capacity slots from the start,
  free ones zero. A free slot has zero gradients in key and value, so training leaves it free, and how many are taken
  can be read off the keys. When a chunk finds too few free, the memory is first folded to capacity / 2.

Axes: L layers, N tokens, D hidden size, R slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .compression import refit_slots
from .layer import LocasLayer, list_active_memories, list_layers
from .nlsvd import nl_svd
from .passes import evaluating

Tokens = Literal["highest-loss", "evenly", "all"]
Fold = Literal["nlsvd", "refit"]
Normalization = Literal["token", "chunk"]


@dataclass(frozen=True)
class Written:
    """What one call wrote.

    Attributes:
        slots: how many slots.
        folded: whether the memory was folded before.
        moved: for each weight whose slots changed their places: the weight's dimension that slots lie along, and for
            each new place the slot's former one (LongTensor `[R]`, -1 for a slot that is new). An optimizer's state
            can follow; what stands at -1 starts from zero.
    """

    slots: int
    folded: bool = False
    moved: dict[nn.Parameter, tuple[int, Tensor]] | None = None


class SlotWriter:
    """Writes the tokens of what a model reads into the free slots of its two-layer memory.

    For `TestTimeTrainer(model, ..., writer=SlotWriter(model))`, which shows it each chunk's forward and backward pass,
    so that writing costs no pass of its own; `write_tokens` is the same for one stretch of text. Nothing is kept
    here between two chunks: the memory's tensors say which slots are taken.

    Args:
        model: a model with a two-layer LOCAS memory, of `init_strategy="write"` as a rule.
        epsilon: the length of a written value over all layers together, at the FFNs' outputs.
        tokens: which tokens of a chunk: the "highest-loss" ones, "evenly" spaced ones, or "all".
        slots_per_chunk: how many tokens of a chunk; it has no meaning for "all".
        normalization: what |G| is: "token", each token's own as in the paper, or "chunk", the root mean square of
            the tokens that are written together.
        fold: how a full memory is brought to half: "nlsvd", or "refit" (the slots that say most about the chunk at
            hand, their values fitted to what the whole memory answered), which suits a memory that is also trained.
        adapter_name: which memory; `None` for the active one.

    Raises:
        ValueError: the model has no such memory or more than one active, it has gates, its layers have different
            widths, or an argument is out of range.

    Example:
        ```py
        model = get_peft_model(base, LocasConfig(r=64, init_strategy="write", scaling=64))
        trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=2e-3, writer=SlotWriter(model))
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        epsilon: float = 0.01,
        tokens: Tokens = "highest-loss",
        slots_per_chunk: int = 8,
        normalization: Normalization = "token",
        fold: Fold = "refit",
        adapter_name: str | None = None,
    ) -> None:
        if not 0 < epsilon < math.inf:
            raise ValueError(f"epsilon must be a finite number above 0, got {epsilon}: give 0.01, say.")
        if tokens not in _CHOICES:
            raise ValueError(f"tokens must be one of {', '.join(map(repr, _CHOICES))}, got {tokens!r}.")
        if normalization not in ("token", "chunk"):
            raise ValueError(f"normalization must be one of 'token', 'chunk', got {normalization!r}.")
        if fold not in ("nlsvd", "refit"):
            raise ValueError(f"fold must be one of 'nlsvd', 'refit', got {fold!r}.")
        if isinstance(slots_per_chunk, bool) or not isinstance(slots_per_chunk, int) or slots_per_chunk < 1:
            raise ValueError(f"slots_per_chunk must be a whole number of at least 1, got {slots_per_chunk!r}.")
        self.epsilon, self.tokens, self.slots_per_chunk, self.fold = epsilon, tokens, slots_per_chunk, fold
        self.normalization = normalization
        self.adapter_name, self._layers = _find_memory(model, adapter_name)
        self.folds = 0
        self._inputs: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []
        self._paused = False

    @property
    def settings(self) -> dict[str, float | int | str]:
        """What a continuation of a reading must share: plain values, by name."""
        names = ("epsilon", "tokens", "slots_per_chunk", "normalization", "fold", "adapter_name")
        return {name: getattr(self, name) for name in names}

    @property
    def capacity(self) -> int:
        """R, the slots that the memory has room for."""
        return self._layers[0].locas_up[self.adapter_name].out_features

    @property
    def taken(self) -> int:
        """How many slots hold something: the places before the first one that is free in all layers."""
        used = torch.zeros(self.capacity, dtype=torch.bool)
        for layer in self._layers:
            up, down = layer.locas_up[self.adapter_name].weight, layer.locas_down[self.adapter_name].weight
            used |= (up.any(dim=1) | down.any(dim=0)).cpu()
        used = used.nonzero()
        return 0 if not len(used) else int(used[-1]) + 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context, each forward with gradients and its backward pass are noted, the last one for good."""
        self._inputs, self._gradients = [None] * len(self._layers), [None] * len(self._layers)

        def recorder(place: int) -> Callable[[Tensor, Tensor], None]:
            def record(ffn_input: Tensor, output: Tensor) -> None:
                if self._paused:
                    return
                self._inputs[place] = ffn_input.detach().flatten(0, -2)
                output.register_hook(note)

            def note(gradient: Tensor) -> None:
                self._gradients[place] = gradient.detach().flatten(0, -2)

            return record

        try:
            for place, layer in enumerate(self._layers):
                layer.recorder = recorder(place)
            yield
        finally:
            for layer in self._layers:
                layer.recorder = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Within the context, inside `recording`, passes are not noted."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def is_finite(self) -> bool:
        """Says whether what was recorded last can be written."""
        return all(t is not None and bool(t.isfinite().all()) for t in (*self._inputs, *self._gradients))

    @torch.no_grad()
    def write(self, losses: Tensor) -> Written:
        """Writes tokens of the passes that were recorded last, and folds the memory first where it is full.

        Args:
            losses: `[N]`, the nll of the last N of the tokens that those passes predicted; their sum or mean was
                differentiated.

        Raises:
            ValueError: nothing was recorded, or an input or a gradient is not finite; the memory is as it was.
        """
        if any(tensor is None for tensor in (*self._inputs, *self._gradients)) or not self._inputs:
            raise ValueError("write needs a forward and a backward pass inside recording(): run them first.")
        count = len(losses)
        device = self._inputs[0].device
        inputs = torch.stack([tensor[-count:].to(device).float() for tensor in self._inputs])  # [L, N, D]
        # What was differentiated is a loss: uphill in the log-likelihood is the other way.
        gradients = -torch.stack([tensor[-count:].to(device).float() for tensor in self._gradients])
        self._inputs, self._gradients = [], []
        if not (inputs.isfinite().all() and gradients.isfinite().all()):
            raise ValueError("FFN inputs and gradients must be finite to be written, got NaN or infinity.")
        chosen = _CHOICES[self.tokens](losses, min(self.slots_per_chunk, self.capacity // 2)).to(device)
        keys, values = make_slots(inputs[:, chosen], gradients[:, chosen], self.epsilon, self.normalization)
        written, folded, moved = 0, False, None
        room = self.capacity // 2
        for key, value in zip(keys.split(room, dim=1), values.split(room, dim=1), strict=True):
            if self.taken + key.shape[1] > self.capacity:
                moved, folded = self._fold(inputs, moved), True
            self._store(self.taken, key, value)
            written += key.shape[1]
        return Written(written, folded, moved)

    def _memory(self) -> tuple[Tensor, Tensor]:
        """K `[L, D, R]` and V `[L, R, D]` in float32, the values as they are stored."""
        name = self.adapter_name
        device = self._layers[0].locas_up[name].weight.device
        keys = [layer.locas_up[name].weight.detach().to(device).float().T for layer in self._layers]
        values = [layer.locas_down[name].weight.detach().to(device).float().T for layer in self._layers]
        return torch.stack(keys), torch.stack(values)

    def _store(self, start: int, keys: Tensor, values: Tensor) -> None:
        stop = start + keys.shape[1]
        for place, layer in enumerate(self._layers):
            up, down = layer.locas_up[self.adapter_name].weight, layer.locas_down[self.adapter_name].weight
            up[start:stop] = keys[place].to(up)
            down[:, start:stop] = (values[place].to(down.device) / layer.scale(self.adapter_name)).T.to(down.dtype)

    def _fold(self, inputs: Tensor, before: dict | None) -> dict[nn.Parameter, tuple[int, Tensor]]:
        """Brings the memory to half its capacity, in place; says where slots came from."""
        keys, values = self._memory()
        rank, name = self.capacity // 2, self.adapter_name
        places = torch.full((len(self._layers), self.capacity), -1, device=keys.device)
        if self.fold == "nlsvd":
            # One activation for all: they are layers of one host.
            activation = self._layers[0].activation_of(name)
            probe_norm = float(inputs.norm(dim=-1).mean())
            reduced = nl_svd(keys, values, rank, activation=activation, probe_norm=probe_norm)
            new_keys, new_values = reduced.key, reduced.value
        else:
            slots = torch.stack(
                [
                    layer.activate(name, seen.to(layer.locas_up[name].weight.device)).to(keys.device).float()
                    for layer, seen in zip(self._layers, inputs, strict=True)
                ]
            )
            chosen, new_values = refit_slots(slots.mT.double() @ slots.double(), values, rank)
            new_keys = keys.gather(2, chosen[:, None].expand(-1, keys.shape[1], -1))
            places[:, :rank] = chosen
        moved = {}
        for place, layer in enumerate(self._layers):
            up, down = layer.locas_up[name].weight, layer.locas_down[name].weight
            up.zero_()
            down.zero_()
            up[:rank] = new_keys[place].T.to(up)
            down[:, :rank] = new_values[place].T.to(down)
            for weight, dim in ((up, 0), (down, 1)):
                moved[weight] = (dim, _follow(places[place].to(weight.device), before and before[weight][1]))
        self.folds += 1
        return moved


def write_tokens(
    model: nn.Module,
    input_ids: Tensor,
    *,
    epsilon: float = 0.01,
    tokens: Tokens = "all",
    slots_per_chunk: int = 8,
    normalization: Normalization = "token",
    fold: Fold = "nlsvd",
    adapter_name: str | None = None,
) -> Written:
    """Writes the tokens of a text into a memory, by one forward and one backward pass over all of it.

    Args:
        model: a causal language model with a two-layer LOCAS memory, which is mutated; nothing else is.
        input_ids: LongTensor `[T]` or `[1, T]`, T >= 2.
        epsilon, tokens, slots_per_chunk, normalization, fold, adapter_name: as for `SlotWriter`, for which the text is
            one chunk.

    Raises:
        ValueError: as `SlotWriter` and its `write` do, or a text that is no `[T]` of two tokens or more.
    """
    if input_ids.dim() not in (1, 2) or input_ids.numel() != input_ids.shape[-1] or input_ids.shape[-1] < 2:
        raise ValueError(f"input_ids must be [T] or [1, T] with T >= 2, got {list(input_ids.shape)}: give one text.")
    writer = SlotWriter(
        model,
        epsilon=epsilon,
        tokens=tokens,
        slots_per_chunk=slots_per_chunk,
        normalization=normalization,
        fold=fold,
        adapter_name=adapter_name,
    )
    ids = input_ids.reshape(1, -1).to(model.get_input_embeddings().weight.device)
    # Of a plain module's parameters none needs a gradient: those that arrive here would only be thrown away.
    flags = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in flags:
        parameter.requires_grad_(False)
    try:
        with evaluating(model), writer.recording(), torch.enable_grad():
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
            losses = nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="none")
            losses.sum().backward()
    finally:
        for parameter in flags:
            parameter.requires_grad_(True)
    return writer.write(losses.detach())


def make_slots(
    inputs: Tensor, gradients: Tensor, epsilon: float, normalization: Normalization = "token"
) -> tuple[Tensor, Tensor]:
    """The closed form: unit keys, and values that are epsilon long over all layers of a token together.

    Args:
        inputs: A `[L, N, D]`.
        gradients: G `[L, N, D]`, of the log-likelihood with respect to the FFNs' outputs.
        epsilon: the length.
        normalization: "token", or "chunk": then epsilon is the root mean square of the tokens' lengths.

    Returns:
        keys `[L, N, D]` and values `[L, N, D]`; zeros where an input or a token's whole gradient is zero.
    """
    length = gradients.norm(dim=-1, keepdim=True).norm(dim=0, keepdim=True)
    if normalization == "chunk":
        length = length.square().mean(dim=1, keepdim=True).sqrt()
    values = epsilon * gradients / length.clamp(min=torch.finfo(gradients.dtype).tiny)
    return nn.functional.normalize(inputs, dim=-1), values


def _highest_loss(losses: Tensor, count: int) -> Tensor:
    return losses.topk(min(count, len(losses))).indices.sort().values


def _evenly(losses: Tensor, count: int) -> Tensor:
    step = max(1, -(-len(losses) // count))
    return torch.arange(step - 1, len(losses), step, device=losses.device)


def _all(losses: Tensor, count: int) -> Tensor:
    return torch.arange(len(losses), device=losses.device)


_CHOICES: dict[str, Callable[[Tensor, int], Tensor]] = {"highest-loss": _highest_loss, "evenly": _evenly, "all": _all}


def _follow(places: Tensor, before: Tensor | None) -> Tensor:
    """Where slots came from after two moves: -1 stays -1."""
    return places if before is None else torch.where(places >= 0, before[places.clamp(min=0)], -1)


def _find_memory(model: nn.Module, adapter_name: str | None) -> tuple[str, list[LocasLayer]]:
    layers = list_layers(model)
    names = list_active_memories(model) if adapter_name is None else [adapter_name]
    if len(names) != 1:
        raise ValueError(f"adapter_name must be one LOCAS memory, got {names or 'none that is active'}: name one.")
    layers = [layer for layer in layers if names[0] in layer.locas_up]
    if not layers:
        raise ValueError(f"the model has no LOCAS memory {names[0]!r} to write into: add it first.")
    if any(names[0] in layer.locas_gate for layer in layers):
        raise ValueError(
            f"the memory {names[0]!r} must have two layers to be written, got gates beside {layers[0].name}: train "
            "it, or use a host with two-layer FFNs."
        )
    if any(names[0] in layer.merged_adapters for layer in layers):
        raise ValueError(f"the memory {names[0]!r} must not be merged while it is written: call unmerge_adapter().")
    widths = sorted({layer.locas_up[names[0]].out_features for layer in layers})
    if len(widths) > 1:
        raise ValueError(f"all layers of a written memory must have one width, got {widths}: leave out rank_pattern.")
    if widths[0] < 2:
        raise ValueError(
            "r must be at least 2 for a memory that is written, got 1: one slot cannot be folded to half."
        )
    if any(float(layer.scale(names[0])) == 0 for layer in layers):
        raise ValueError(f"the memory {names[0]!r} must have an output scale above 0 to be written: raise scaling.")
    return names[0], layers
