"""Write tokens into a two-layer memory in closed form; fold it when it is full (Locas-MLP).

Paper, section "Memory Initialization for Locas-MLP". For a token t and layer i,

    key   k = A^i / |A^i|,   value  v = epsilon G^i / |G|,   |G|^2 = sum over layers of |G^i|^2

with A^i the FFN's input and G^i the gradient of the next token's log-likelihood with respect to the
FFN's output: the slot moves that output by phi(|A^i|) v, which raises the likelihood.

Choices beyond the paper:

- Passes. One forward and one backward pass over a chunk give A and G of all its tokens, so that G_t
  also contains the effect of token t on later tokens through attention; the paper writes one token
  at a time.
- Tokens. Those of a chunk with the highest loss are written; the paper writes all.
- Units. The stored value is v divided by the memory's output scale, so that a written slot changes
  the output by the formula's amount, in every layer and for every r. Where the scale is measured,
  the formula's A is k A / KAPPA, the input as a norm without gains would make it (`scale.py`):
  hosts that compute one function in different units then learn the same. The memory itself computes
  phi(k |A|), so that the stored value is multiplied by phi(k |A| / KAPPA) / phi(k |A|); the key
  stays a unit vector. With the paper's scale k is 1, and nothing is multiplied.
- Clip. The norm clip applies to the stored values, here too. If epsilon is too large for the output
  scale, a stored value is longer than the clip's radius and is shortened to it: the slot then moves
  the output of that layer in the same direction by less than the formula's amount.
- The cycle (appendix, "Expansion-Compression Cycle"). The memory has R = capacity slots from the
  start; free slots are zero, and training leaves them so. A memory with too few of them for a chunk
  is first folded to capacity / 2: by NL-SVD, or by a least-squares refit, which the paper has not.

Axes: L layers, N tokens, D hidden size, R slots.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..checks import check_choice, check_number, check_whole
from ..tuner.layer import LocasLayer
from ..tuner.scale import KAPPA
from .nlsvd import nl_svd
from .recording import Moves, Writer
from .resizing import refit_slots

__all__ = ["SlotWriter", "make_slots"]

Fold = Literal["nlsvd", "refit"]


class SlotWriter(Writer):
    """Write tokens of a text into the free slots of a two-layer memory.

    The memory's tensors show which slots are taken.

    A `TestTimeTrainer` with this step records each chunk's forward and backward pass in it, so that
    writing needs no pass of its own. A window and stride of the text's length write a whole text at
    once.

    Args:
        model: a model with a two-layer LOCAS memory, usually of `init_weights="write"`.
        epsilon: the length of a written value over all layers together, at the FFNs' outputs.
        slots_per_chunk: how many tokens of a chunk are written, those with the highest loss; at
            most half the slots.
        fold: how a full memory is reduced: "nlsvd", or "refit" on the chunk (`resizing.py`), for
            one that is trained.
        adapter_name: the memory; `None` for the active one. It has no gates and one width in all
            layers.

    Attributes:
        folds: how often the memory was folded.
    """

    arguments = ("epsilon", "slots_per_chunk", "fold")

    def __init__(
        self,
        model: nn.Module,
        *,
        epsilon: float = 0.01,
        slots_per_chunk: int = 8,
        fold: Fold = "refit",
        adapter_name: str | None = None,
    ) -> None:
        check_number("epsilon", epsilon)
        check_whole("slots_per_chunk", slots_per_chunk, 1)
        check_choice("fold", fold, get_args(Fold))
        super().__init__(model, adapter_name)
        self.epsilon = epsilon
        self.slots_per_chunk = slots_per_chunk
        self.fold = fold
        self.folds = 0

    @property
    def taken(self) -> int:
        """The number of slots in use: up to the last one that is not zero in some layer."""
        device = self._weights()[0][1].device
        used = []
        for _, up, down in self._weights():
            is_used = up.any(dim=1) | down.any(dim=0)
            used.append(is_used.to(device))
        indices = torch.stack(used).any(dim=0).nonzero().flatten().tolist()
        return max(indices, default=-1) + 1

    @torch.no_grad()
    def write(self, losses: Tensor) -> Moves:
        """Write tokens of the recorded passes; fold the memory first where slots are missing."""
        self._check_recorded()
        count = min(self.slots_per_chunk, self.capacity - self._folded, len(losses))
        chosen = losses.topk(count).indices.sort().values
        inputs = self._take_inputs(len(losses), chosen)
        gradients = self._take_gradients(len(losses), chosen)
        start = self.taken
        moved: Moves = {}
        if start + count > self.capacity:
            moved = self._fold(self._take_inputs(len(losses)))
            start = self.taken
        self._store(start, inputs, gradients)
        self._release()
        return moved

    @property
    def _folded(self) -> int:
        """The number of slots that a fold leaves, n = N_capacity / 2."""
        return self.capacity // 2

    def _store(self, start: int, inputs: Tensor, gradients: Tensor) -> None:
        """Write tokens, A and G `[L, N, D]`, into the slots from `start` on."""
        keys, values = make_slots(inputs, gradients, self.epsilon)
        norms = inputs.norm(dim=-1)
        stop = start + keys.shape[1]
        for index, (layer, up, down) in enumerate(self._weights()):
            k = layer.locas_input_scale[self.adapter_name].to(norms.device)
            promised = layer.ffn.act(k * norms[index] / self._find_input_size(layer))
            reached = layer.ffn.act(k * norms[index])
            share = torch.where(reached != 0, promised / reached, 1.0)
            value = (share[:, None] * values[index]).to(down.device)
            stored = value / layer.saved_scale(self.adapter_name)
            up[start:stop] = keys[index].to(up)
            down[:, start:stop] = stored.T.to(down.dtype)
            self._clip_values(layer, down[:, start:stop])

    def _find_input_size(self, layer: LocasLayer) -> float:
        """Return the size of the elements of k A where those of A have the size 1."""
        if layer.locas_config[self.adapter_name].output_scale == "measured":
            return KAPPA
        return 1.0

    def _fold(self, inputs: Tensor) -> Moves:
        """Fold the memory in place; return the moves of its slots.

        `inputs` is the chunk's A `[L, N, D]`.
        """
        device = inputs.device
        weights = self._weights()
        # K [L, D, R] and V [L, R, D].
        keys = torch.stack([up.detach().to(device).float().T for _, up, _ in weights])
        values = torch.stack([down.detach().to(device).float().T for _, _, down in weights])
        sources = torch.full((len(weights), self.capacity), -1, device=device)
        if self.fold == "nlsvd":
            keys, values = self._reduce(keys, values, inputs)
        else:
            chosen, values = self._refit(values, inputs)
            keys = keys.take_along_dim(chosen[:, None], 2)
            sources[:, : self._folded] = chosen
        moved: Moves = {}
        for index, (layer, up, down) in enumerate(weights):
            up.zero_()
            up[: self._folded] = keys[index].T.to(up)
            down.zero_()
            down[:, : self._folded] = values[index].T.to(down)
            self._clip_values(layer, down[:, : self._folded])
            moved[up] = (0, sources[index].to(up.device))
            moved[down] = (1, sources[index].to(down.device))
        self.folds += 1
        return moved

    def _reduce(self, keys: Tensor, values: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys `[L, D, n]` and values `[L, n, D]` after NL-SVD (paper, appendix)."""
        scales = [layer.locas_input_scale[self.adapter_name] for layer in self._layers]
        k = torch.stack([scale.to(inputs.device) for scale in scales])
        probe_norm = float((k[:, None] * inputs.norm(dim=-1)).mean())
        # The activation is the same in all layers of a host.
        activation = self._layers[0].ffn.act
        reduced = nl_svd(keys, values, self._folded, activation=activation, probe_norm=probe_norm)
        return reduced.key, reduced.value

    def _refit(self, values: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots that are kept `[L, n]`, and their refitted values `[L, n, D]`."""
        activations = []
        for (layer, up, _), layer_inputs in zip(self._weights(), inputs, strict=True):
            activation = layer.activate([self.adapter_name], layer_inputs.to(up.device))
            activations.append(activation.to(inputs.device).float())
        slots = torch.stack(activations)
        gram = slots.mT.double() @ slots.double()
        return refit_slots(gram, values, self._folded)


def make_slots(inputs: Tensor, gradients: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return unit keys, and values of length epsilon over all layers of a token, both `[L, N, D]`.

    Paper: k = Normalize(A), v = epsilon GlobalNormalize(G), over the hidden size and the layers.

    Args:
        inputs, gradients: A and G of the log-likelihood, both `[L, N, D]`.
    """
    length = gradients.norm(dim=-1, keepdim=True).norm(dim=0, keepdim=True)
    values = epsilon * gradients / length.clamp(min=torch.finfo(gradients.dtype).tiny)
    return nn.functional.normalize(inputs, dim=-1), values
