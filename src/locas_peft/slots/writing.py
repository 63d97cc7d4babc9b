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

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..checks import check_choice, check_number, check_whole
from .nlsvd import nl_svd
from .recording import Moves, Writer
from .resizing import refit_slots

Tokens = Literal["highest-loss", "all"]
Fold = Literal["nlsvd", "refit"]
Normalization = Literal["token", "chunk"]


class SlotWriter(Writer):
    """Write tokens of a text into the free slots of a two-layer memory, whose tensors show which slots are taken.

    A `TestTimeTrainer` with a writer records each chunk's forward and backward pass in it, so that writing needs no
    pass of its own. A window and stride of the text's length write a whole text at once.

    Args:
        model: a model with a two-layer LOCAS memory, usually of `init_weights="write"`.
        epsilon: the length of a written value over all layers together, at the FFNs' outputs.
        tokens: which tokens of a chunk are written: `slots_per_chunk` with the "highest-loss", or "all".
        normalization: how |G| is computed: of each "token" (the paper), or the root mean square over a "chunk".
        fold: how a full memory is reduced: "nlsvd", or "refit" on the chunk (`resizing.py`), for one that is trained.
        fold_ratio: the share of the slots that a fold leaves, rounded down, above 0 and below 1.
        threshold: of "nlsvd": directions at most this strong, relative to the strongest, are left out.
        adapter_name: the memory; `None` for the active one. It has no gates and one width in all layers.
    """

    arguments = (
        "epsilon",
        "tokens",
        "slots_per_chunk",
        "normalization",
        "fold",
        "fold_ratio",
        "threshold",
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        epsilon: float = 0.01,
        tokens: Tokens = "highest-loss",
        slots_per_chunk: int = 8,
        normalization: Normalization = "token",
        fold: Fold = "refit",
        fold_ratio: float = 0.5,
        threshold: float = 0.0,
        adapter_name: str | None = None,
    ) -> None:
        check_number("epsilon", epsilon)
        check_whole("slots_per_chunk", slots_per_chunk, 1)
        check_choice("tokens", tokens, get_args(Tokens))
        check_choice("normalization", normalization, get_args(Normalization))
        check_choice("fold", fold, get_args(Fold))
        for name, value in (("fold_ratio", fold_ratio), ("threshold", threshold)):
            if not 0 <= value < 1 or value == 0 and name == "fold_ratio":
                rule = "above 0 and below 1" if name == "fold_ratio" else "at least 0 and below 1"
                raise ValueError(f"{name} must be {rule}, got {value}: leave it out")
        self.epsilon, self.tokens, self.slots_per_chunk = epsilon, tokens, slots_per_chunk
        self.normalization, self.fold, self.fold_ratio, self.threshold = (
            normalization,
            fold,
            fold_ratio,
            threshold,
        )
        super().__init__(model, adapter_name)
        self._folded = max(1, int(fold_ratio * self.capacity))  # slots after a fold
        self.folds = 0

    @property
    def taken(self) -> int:
        """The number of slots in use: up to the last one that is not zero in some layer."""
        used = torch.stack(
            [(up.any(dim=1) | down.any(dim=0)).cpu() for _, up, down in self._weights()]
        )
        return max(used.any(dim=0).nonzero().flatten().tolist(), default=-1) + 1

    @torch.no_grad()
    def write(self, losses: Tensor) -> Moves:
        """Write tokens of the last recorded passes. Fold the memory first if it has too few free slots."""
        inputs, gradients = self._take(len(losses))
        room = self.capacity - self._folded
        chosen = _CHOICES[self.tokens](losses, min(self.slots_per_chunk, room)).to(inputs.device)
        keys, values = make_slots(
            inputs[:, chosen], gradients[:, chosen], self.epsilon, self.normalization
        )
        moved: Moves = {}
        for key, value in zip(keys.split(room, dim=1), values.split(room, dim=1), strict=True):
            if self.taken + key.shape[1] > self.capacity:
                moved = self._fold(inputs, moved)
            start, stop = self.taken, self.taken + key.shape[1]
            for (layer, up, down), k, v in zip(self._weights(), key, value, strict=True):
                up[start:stop] = k.to(up)
                down[:, start:stop] = (
                    v.to(down.device) / layer.saved_scale(self.adapter_name)
                ).T.to(down.dtype)
        return moved

    def _fold(self, inputs: Tensor, earlier: Moves) -> Moves:
        """Fold the memory in place; return the moves of its slots, `earlier` ones included.

        `inputs` is the chunk's A `[L, N, D]`.
        """
        rank, device = self._folded, self._weights()[0][1].device
        keys = torch.stack(
            [up.detach().to(device).float().T for _, up, _ in self._weights()]
        )  # K [L, D, R]
        values = torch.stack(
            [down.detach().to(device).float().T for _, _, down in self._weights()]
        )  # V [L, R, D]
        sources = torch.full((len(self._layers), self.capacity), -1, device=device)
        if self.fold == "nlsvd":
            k = torch.stack(
                [layer.locas_input_scale[self.adapter_name].to(device) for layer in self._layers]
            )
            probe_norm = float((k[:, None] * inputs.norm(dim=-1)).mean())
            act = self._layers[0].ffn.act  # the same in all layers of a host
            options = {"activation": act, "probe_norm": probe_norm, "threshold": self.threshold}
            keys, values, _ = nl_svd(keys, values, rank, **options)
        else:
            seen = zip(self._weights(), inputs, strict=True)
            activations = [
                layer.activate([self.adapter_name], own.to(up.device))
                for (layer, up, _), own in seen
            ]
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
    "highest-loss": lambda losses, count: (
        losses.topk(min(count, len(losses))).indices.sort().values
    ),
    "all": lambda losses, count: torch.arange(len(losses), device=losses.device),
}
