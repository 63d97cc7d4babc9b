"""Write tokens into a two-layer memory in closed form, and fold the memory when it is full (Locas-MLP).

Paper, section "Memory Initialization for Locas-MLP". For a token t and layer i,

    key   k = A^i / |A^i|,   value  v = epsilon G^i / |G|,   |G|^2 = sum over layers of |G^i|^2

with A^i the FFN's input and G^i the gradient of the next token's log-likelihood with respect to the FFN's output: the
slot moves that output by phi(|A^i|) v, which raises the likelihood.

Choices beyond the paper:
- Passes. One forward and one backward pass over a chunk give A and G of all its tokens, so that G_t also contains the
  effect of token t on later tokens through attention; the paper writes one token at a time.
- Length. `normalization="chunk"` divides by the root mean square of |G| over a chunk's tokens instead: the sum of the
  slots is then a step of gradient descent.
- Units. The stored value is v divided by the memory's output scale, so that a written slot changes the output by the
  formula's amount, in every layer and for every r. The norm clip applies to the stored values.
- The cycle (appendix, "Expansion-Compression Cycle"). The memory has R = capacity slots from the start; free slots are
  zero, and training leaves them so. A memory with too few of them for a chunk is first folded to capacity / 2.

Axes: L layers, N tokens, D hidden size, R slots.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..checks import check_choice, check_whole
from ..tuner import evaluating
from ..tuner.attached import find_memory
from ..tuner.layer import LocasLayer
from .nlsvd import nl_svd
from .resizing import refit_slots

Tokens = Literal["highest-loss", "all"]
Fold = Literal["nlsvd", "refit"]
Normalization = Literal["token", "chunk"]


Moves = dict[nn.Parameter, tuple[int, Tensor]]
"""By weight: the dimension of its slots, and the former index of each (LongTensor [R], -1 for a new slot)."""


class SlotWriter:
    """Write tokens of a text into the free slots of a two-layer memory, whose tensors show which slots are taken.

    A `TestTimeTrainer` with a writer records each chunk's forward and backward pass in it, so that writing needs no
    pass of its own. `write_tokens` writes a single text.

    Args:
        model: a model with a two-layer LOCAS memory, usually of `init_strategy="write"`.
        epsilon: the length of a written value over all layers together, at the FFNs' outputs.
        tokens: which tokens of a chunk are written: `slots_per_chunk` with the "highest-loss", or "all".
        normalization: how |G| is computed: for each "token" as in the paper, or as the root mean square over the
            tokens written together ("chunk").
        fold: how a full memory is reduced to half: "nlsvd", or "refit" on the current chunk (`resizing.py`), which
            suits a memory that is also trained.
        adapter_name: the memory; `None` for the active one. It has no gates and one width in all layers.
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
        check_whole("slots_per_chunk", slots_per_chunk, 1)
        check_choice("tokens", tokens, get_args(Tokens))
        check_choice("normalization", normalization, get_args(Normalization))
        check_choice("fold", fold, get_args(Fold))
        self.epsilon, self.tokens, self.slots_per_chunk = epsilon, tokens, slots_per_chunk
        self.normalization, self.fold = normalization, fold
        self.adapter_name, self._layers = _find_two_layer_memory(model, adapter_name)
        self.folds = 0
        self._inputs: list[Tensor | None] = []  # a layer's A [N, D] of the last recorded pass
        self._gradients: list[Tensor | None] = []  # the gradient of the loss at a layer's output [N, D]
        self._paused = False

    @property
    def settings(self) -> dict[str, float | int | str]:
        """The arguments as plain values: a resumed reading needs a writer with the same ones."""
        names = ("epsilon", "tokens", "slots_per_chunk", "normalization", "fold", "adapter_name")
        return {name: getattr(self, name) for name in names}

    @property
    def capacity(self) -> int:
        """R, the number of slots of the memory."""
        return self._layers[0].locas_up[self.adapter_name].out_features

    @property
    def taken(self) -> int:
        """The number of slots in use: up to the last one that is not zero in some layer."""
        used = torch.stack([(up.any(dim=1) | down.any(dim=0)).cpu() for _, up, down in self._weights()])
        return max(used.any(dim=0).nonzero().flatten().tolist(), default=-1) + 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the last forward pass with gradients, and its backward pass, within the context."""
        self._inputs, self._gradients = [None] * len(self._layers), [None] * len(self._layers)

        def recorder(index: int) -> Callable[[Tensor, Tensor], None]:
            def record(ffn_input: Tensor, output: Tensor) -> None:
                if not self._paused:
                    self._inputs[index] = ffn_input.detach().flatten(0, -2)
                    output.register_hook(record_gradient)

            def record_gradient(gradient: Tensor) -> None:
                self._gradients[index] = gradient.detach().flatten(0, -2)

            return record

        try:
            for index, layer in enumerate(self._layers):
                layer.recorder = recorder(index)
            yield
        finally:
            for layer in self._layers:
                layer.recorder = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Record no passes within this context, which is used inside `recording`."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def is_finite(self) -> bool:
        """Return whether the last recorded passes are complete and finite, so that they can be written."""
        return all(t is not None and bool(t.isfinite().all()) for t in (*self._inputs, *self._gradients))

    @torch.no_grad()
    def write(self, losses: Tensor) -> Moves:
        """Write tokens of the last recorded passes. Fold the memory first if it has too few free slots.

        `losses` `[N]` is the nll of the last N tokens that those passes predicted, whose sum or mean was
        differentiated. If nothing was recorded, or values are not finite, raise a `ValueError`; nothing is changed.
        Return where the slots went, so that an optimizer's state can follow; nothing where the memory was not folded.
        """
        if not self._inputs or any(tensor is None for tensor in (*self._inputs, *self._gradients)):
            raise ValueError("write needs a forward and a backward pass inside recording(): run them first.")
        if not self.is_finite():
            raise ValueError("FFN inputs and gradients must be finite to be written, got NaN or infinity.")
        device = self._inputs[0].device
        inputs, gradients = (
            torch.stack([tensor[-len(losses) :].to(device).float() for tensor in tensors])  # [L, N, D]
            for tensors in (self._inputs, self._gradients)
        )
        self._inputs, self._gradients = [], []
        half = self.capacity // 2
        chosen = _CHOICES[self.tokens](losses, min(self.slots_per_chunk, half)).to(device)
        # The loss was differentiated: the log-likelihood's gradient has the other sign.
        keys, values = make_slots(inputs[:, chosen], -gradients[:, chosen], self.epsilon, self.normalization)
        moved: Moves = {}
        for key, value in zip(keys.split(half, dim=1), values.split(half, dim=1), strict=True):
            if self.taken + key.shape[1] > self.capacity:
                moved = self._fold(inputs, moved)
            start, stop = self.taken, self.taken + key.shape[1]
            for (layer, up, down), k, v in zip(self._weights(), key, value, strict=True):
                up[start:stop] = k.to(up)
                down[:, start:stop] = (v.to(down.device) / layer.saved_scale(self.adapter_name)).T.to(down.dtype)
        return moved

    def _weights(self) -> list[tuple[LocasLayer, nn.Parameter, nn.Parameter]]:
        """Return each layer with its up `[R, D]`, the keys, and its down `[D, R]`, the stored values."""
        return [(layer, *(module.weight for module in layer.projections(self.adapter_name))) for layer in self._layers]

    def _fold(self, inputs: Tensor, earlier: Moves) -> Moves:
        """Reduce the memory to half its capacity, in place; return the moves of its slots, `earlier` ones included.

        `inputs` is the chunk's A `[L, N, D]`.
        """
        rank, device = self.capacity // 2, self._weights()[0][1].device
        keys = torch.stack([up.detach().to(device).float().T for _, up, _ in self._weights()])  # K [L, D, R]
        values = torch.stack([down.detach().to(device).float().T for _, _, down in self._weights()])  # V [L, R, D]
        sources = torch.full((len(self._layers), self.capacity), -1, device=device)
        if self.fold == "nlsvd":
            k = torch.stack([layer.locas_input_scale[self.adapter_name].to(device) for layer in self._layers])
            probe_norm = float((k[:, None] * inputs.norm(dim=-1)).mean())
            act = self._layers[0].ffn.act  # the same in all layers of a host
            keys, values, _ = nl_svd(keys, values, rank, activation=act, probe_norm=probe_norm)
        else:
            seen = zip(self._weights(), inputs, strict=True)
            activations = [layer.activate([self.adapter_name], own.to(up.device)) for (layer, up, _), own in seen]
            slots = torch.stack([activation.to(device).float() for activation in activations])
            chosen, values = refit_slots(slots.mT.double() @ slots.double(), values, rank)
            keys = keys.gather(2, chosen[:, None].expand(-1, keys.shape[1], -1))
            sources[:, :rank] = chosen
        moved = {}
        for index, (_, up, down) in enumerate(self._weights()):
            up.zero_()[:rank] = keys[index].T.to(up)
            down.zero_()[:, :rank] = values[index].T.to(down)
            for weight, dim in ((up, 0), (down, 1)):
                source = sources[index].to(weight.device)
                if earlier:  # two folds of one call: from the slots before the first
                    source = torch.where(source >= 0, earlier[weight][1][source.clamp(min=0)], -1)
                moved[weight] = (dim, source)
        self.folds += 1
        return moved


def write_tokens(
    model: nn.Module,
    input_ids: Tensor,
    *,
    epsilon: float = 0.01,
    normalization: Normalization = "token",
    fold: Fold = "nlsvd",
    adapter_name: str | None = None,
) -> None:
    """Write all tokens of a text, LongTensor `[T]` or `[1, T]`, into the two-layer memory of a language model.

    It takes one forward and one backward pass over the whole text, as one chunk. The other arguments, and what is
    refused, are those of `SlotWriter`.
    """
    if input_ids.dim() not in (1, 2) or input_ids.numel() != input_ids.shape[-1] or input_ids.shape[-1] < 2:
        raise ValueError(f"input_ids must be [T] or [1, T] with T >= 2, got {list(input_ids.shape)}: give one text.")
    writer = SlotWriter(
        model, epsilon=epsilon, tokens="all", normalization=normalization, fold=fold, adapter_name=adapter_name
    )
    ids = input_ids.reshape(1, -1).to(model.get_input_embeddings().weight.device)
    # Only the gradients at the FFNs' outputs are needed: switch off those of the parameters.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        with evaluating(model), writer.recording(), torch.enable_grad():
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
            losses = nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="none")
            losses.sum().backward()
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    writer.write(losses.detach())


def make_slots(
    inputs: Tensor, gradients: Tensor, epsilon: float, normalization: Normalization = "token"
) -> tuple[Tensor, Tensor]:
    """Return unit keys, and values of length epsilon over all layers of a token together, both `[L, N, D]`.

    `inputs` are A and `gradients` G of the log-likelihood, both `[L, N, D]`. With the normalization "chunk", epsilon
    is the root mean square of the tokens' lengths.
    """
    length = gradients.norm(dim=-1, keepdim=True).norm(dim=0, keepdim=True)
    if normalization == "chunk":
        length = length.square().mean(dim=1, keepdim=True).sqrt()
    values = epsilon * gradients / length.clamp(min=torch.finfo(gradients.dtype).tiny)
    return nn.functional.normalize(inputs, dim=-1), values


# From the losses [N] and a number of tokens to the indices of the tokens to write, in order.
_CHOICES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "highest-loss": lambda losses, count: losses.topk(min(count, len(losses))).indices.sort().values,
    "all": lambda losses, count: torch.arange(len(losses), device=losses.device),
}


def _find_two_layer_memory(model: nn.Module, adapter_name: str | None) -> tuple[str, list[LocasLayer]]:
    name, layers = find_memory(model, adapter_name, "write into")
    if any(name in layer.locas_gate for layer in layers):
        raise ValueError(
            f"the memory {name!r} must have two layers to be written, got gates beside {layers[0].name}: train it, or "
            "use a host with two-layer FFNs."
        )
    if any(name in layer.merged_adapters for layer in layers):
        raise ValueError(f"the memory {name!r} must not be merged while it is written: call unmerge_adapter().")
    widths = sorted({layer.locas_up[name].out_features for layer in layers})
    if len(widths) > 1:
        raise ValueError(f"all layers of a written memory must have one width, got {widths}: leave out rank_pattern.")
    if widths[0] < 2:
        raise ValueError("r must be at least 2 for a memory that is written, got 1: one slot cannot be halved.")
    if any(float(layer.saved_scale(name)) == 0 for layer in layers):
        raise ValueError(f"the memory {name!r} must have an output scale above 0 to be written: raise scaling.")
    return name, layers
