"""Learn a text in closed form: a linear map beside each two-layer FFN, by ridge regression, as slots of its memory.

With A `[N, D]` an FFN's inputs of all N tokens so far, and G `[N, D]` the gradients of their log-likelihood at its
output, a layer's map is

    M = S + C^-1 A'G * rate N / (N + prior) / g,    C = A'A + ridge d I

with d the mean of the diagonal of A'A, g the mean square of the elements of G, and S the map that the slots had before
(usually 0). docs/ideas/ridge.md has the reasons. M is cut to n terms p v', the first in the singular value
decomposition of C^(1/2) M, with p scaled so that p A has a mean square of 1. All inputs share a direction m, with m A
about 1. It keeps the slot of each term on, and one more slot takes the constant away again:

    sum_j f((p_j + SHIFT m) A) v_j - f(m A) SHIFT sum_j v_j = sum_j (p_j A) v_j    where f(x) = x for x > 0

Keys times SHARPNESS and values divided by it let GELU and SiLU act as ReLU. The paper has no such rule.

Axes: L layers, N tokens, D hidden size, R slots, n = R - 1 terms, D at most.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_number
from ..tuner.norm_clip import clip_norms_
from .recording import Moves, Writer

SHIFT = 5.0  # above it, fewer terms fall off (0.1% on text of one kind); below it, less precision is lost in bfloat16
SHARPNESS = 32.0


class RidgeWriter(Writer):
    """Write the ridge regression of all tokens so far into a two-layer memory, after each chunk.

    A `TestTimeTrainer` with it and no `learning_rate` learns without an optimizer. It holds 3 L D^2 float32 numbers.

    Args:
        model: a model with a two-layer LOCAS memory of `init_strategy="write"`, empty or with a map that this rule
            has written before, to which the text's is added.
        rate: of the map; see above.
        ridge: what is added to the diagonal of A'A, relative to its mean.
        prior: the number of tokens at which the map has half its length.
        adapter_name: the memory; `None` for the active one. It has no gates and one width in all layers.

    An argument out of range, a memory with other slots, or a host whose activation is not like ReLU is a `ValueError`.
    """

    arguments = ("rate", "ridge", "prior")

    def __init__(
        self,
        model: nn.Module,
        *,
        rate=0.08,
        ridge=0.03,
        prior=32000.0,
        adapter_name: str | None = None,
    ):
        super().__init__(model, adapter_name)
        if self.needs_two_layers:
            # The map's rows are long: a norm clip would destroy it.
            self._layers[0].locas_config[self.adapter_name].max_slot_norm = None
        self.rate, self.ridge, self.prior = rate, ridge, prior
        for name in self.arguments:
            check_number(name, getattr(self, name), may_be_0=name == "prior")
        start = self._read_map()
        depth, d, _ = start.shape
        # A'A [L, D, D], A'G [L, D, D]; the sums over tokens of A [L, D], of mean(G^2) [L], and of 1.
        self._sums = {"gram": torch.zeros(depth, d, d), "cross": torch.zeros_like(start)}
        self._sums |= {"total": torch.zeros(depth, d), "power": torch.zeros(depth)}
        self._sums |= {"tokens": torch.zeros(()), "rate": torch.tensor(float(rate)), "start": start}

    def write(self, losses: Tensor) -> Moves:
        """Add the last recorded passes to the sums, and write their map in place of the former one.

        The mean of the losses must have been differentiated. A chunk that makes a sum or the map infinite is left out.
        """
        before = self._sums
        if self.add(torch.ones_like(losses, dtype=torch.bool)) and not self.solve():
            self._sums = before
        return {}

    @torch.no_grad()
    def add(self, counted: Tensor) -> bool:
        """Add the last recorded passes, of one text or of several rows, to the sums alone. `solve` writes their map.

        `counted`, BoolTensor of N elements, tells which of the last N recorded tokens predict one that counts: the
        mean of those losses must have been differentiated. The others, such as padding, enter no sum. Return False,
        without a change, if a sum is not finite.
        """
        counted = counted.flatten()
        inputs, gradients = (
            each[:, counted.to(each.device)] for each in self._take(len(counted))
        )  # [L, N, D]
        gradients = gradients * inputs.shape[1]  # of the sum over the tokens
        inputs = self._observe(inputs)
        sums = {name: tensor.to(inputs) for name, tensor in self._sums.items()}
        sums["gram"] = torch.baddbmm(sums["gram"], inputs.mT, inputs)
        sums["cross"] = torch.baddbmm(sums["cross"], inputs.mT, gradients)
        sums["total"] = sums["total"] + inputs.sum(dim=1)
        sums["power"] = sums["power"] + gradients.square().mean(dim=2).sum(dim=1)
        sums["tokens"] = sums["tokens"] + inputs.shape[1]
        if finite := all(tensor.isfinite().all() for tensor in sums.values()):
            self._sums = sums
        return finite

    @torch.no_grad()
    def solve(self) -> bool:
        """Write the map of the sums in place of the former one; return False, without a change, if not finite."""
        slots = self._solve(self._sums)
        if finite := all(tensor.isfinite().all() for tensor in slots):
            self._store(*slots)
        return finite

    def take_back(self, rate_factor: float) -> None:
        """Go on from the map that the slots have now, without the gradients so far, at a lower rate."""
        self._sums["cross"].zero_()
        self._sums["rate"] *= rate_factor
        self._sums["start"] = self._read_map()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {
            name: torch.empty_like(tensor).copy_(state[name]) for name, tensor in self._sums.items()
        }

    def _observe(self, inputs: Tensor) -> Tensor:
        """Return what the rule multiplies, from A `[L, N, D]`: A itself."""
        return inputs

    def _store(self, keys: Tensor, values: Tensor) -> None:
        for (layer, up, down), key, value in zip(self._weights(), keys, values, strict=True):
            k, tau = (
                layer.locas_input_scale[self.adapter_name],
                layer.saved_scale(self.adapter_name),
            )
            up[: self._terms + 1] = SHARPNESS * key.T.to(up.device) / k
            down[:, : self._terms + 1] = value.T.to(down.device) / (SHARPNESS * tau)

    @torch.no_grad()
    def _read_map(self) -> Tensor:
        """Return the linear map of the slots `[L, D, D]`; a `ValueError` where they hold none or cannot hold one."""
        act, probe = self._layers[0].ffn.act, torch.linspace(-4.0, 4.0, 9)
        if not torch.allclose(act(SHARPNESS * probe) / SHARPNESS, probe.relu(), atol=0.01):
            raise ValueError(
                f"the host's activation must be like ReLU, GELU or SiLU, got {act}: use SlotWriter"
            )
        n, maps = self._terms, []
        for layer, up, down in self._weights():
            values, last = down[:, :n].float(), down[:, n].float()
            if (
                last + SHIFT * values.sum(dim=1)
            ).norm() > 0.01 * SHIFT * values.norm():  # more than rounding
                rule = f"the memory {self.adapter_name!r} must be empty or written by RidgeWriter, got other slots"
                raise ValueError(f"{rule} in {layer.name}: give a fresh one")
            factor = layer.locas_input_scale[self.adapter_name] * layer.saved_scale(
                self.adapter_name
            )
            maps.append((factor * (up.float().T @ down.float().T)).cpu())
        return torch.stack(maps)

    @property
    def _terms(self) -> int:
        return min(self.capacity - 1, self._layers[0].in_features)

    def _normal_equations(self, sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor of C, and C M, both batches of L."""
        gram, tokens = sums["gram"], sums["tokens"]
        tiny = torch.finfo(gram.dtype).tiny
        size = gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=tiny)[:, None, None]
        metric = gram + self.ridge * size * torch.eye(gram.shape[-1], device=gram.device)
        length = (
            sums["rate"] * tokens / (tokens + self.prior) / (sums["power"] / tokens).clamp(min=tiny)
        )
        target = sums["cross"] * length[:, None, None]
        if sums["start"].any():
            target += metric @ sums["start"]
        return torch.linalg.cholesky_ex(metric).L, target

    def _solve(self, sums: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the slots of the cut map: keys `[L, D, n + 1]` and values `[L, n + 1, D]`."""
        gram, tokens, n = sums["gram"], sums["tokens"], self._terms
        tiny = torch.finfo(gram.dtype).tiny
        factor, target = self._normal_equations(sums)
        # The right singular vectors of C^(1/2) M are the eigenvectors of M'C M = target' C^-1 target. Two steps of
        # subspace iteration from the values that are written already: the sums change little from chunk to chunk.
        former = torch.stack([down.float()[:, :n].to(gram) for _, _, down in self._weights()])
        if not former.any():
            former = torch.linalg.eigh(target.mT @ target).eigenvectors.flip(-1)[..., :n]
        for _ in range(2):
            directions = torch.linalg.qr(former).Q
            keys = torch.cholesky_solve(target @ directions, factor)
            former = target.mT @ keys
        size = ((keys * (gram @ keys)).sum(dim=1, keepdim=True) / tokens).sqrt()
        values = size.mT * directions.mT
        common = torch.cholesky_solve(sums["total"][..., None], factor)  # m [L, D, 1]
        common = common * tokens / (sums["total"][:, None] @ common).clamp(min=tiny)
        keys = torch.cat([keys / size.clamp(min=tiny) + SHIFT * common, common], dim=2)
        return keys, torch.cat([values, -SHIFT * values.sum(dim=1, keepdim=True)], dim=1)


class ValueWriter(RidgeWriter):
    """Write the ridge regression of all tokens so far into the values of any memory, gated or not; its rows stay.

    As `RidgeWriter`, with the activations M `[N, R]` of the slots in place of A, and the values V `[R, D]` in place of
    the map. Nothing is cut: V = S + C^-1 M'G * (rate / (L D)) N / (N + prior) / g, then the norm clip. The memory may
    have any values before; `prior` and `adapter_name` are as there. The writer holds L R (R + 2 D) float32 numbers.
    """

    needs_two_layers = False

    def __init__(
        self, model: nn.Module, *, rate: float = 500.0, ridge: float = 0.1, **options: Any
    ) -> None:
        super().__init__(model, rate=rate, ridge=ridge, **options)
        self._sums["rate"] /= len(self._layers) * self._layers[0].in_features

    def _observe(self, inputs: Tensor) -> Tensor:
        """Return M `[L, N, R]` from A `[L, N, D]`."""
        layers, names = zip(self._weights(), inputs, strict=True), [self.adapter_name]
        return torch.stack(
            [one.activate(names, own.to(up.device)).to(own) for (one, up, _), own in layers]
        )

    @torch.no_grad()
    def _read_map(self) -> Tensor:
        """Return the values at the FFNs' outputs `[L, R, D]`."""
        scaled = [
            layer.saved_scale(self.adapter_name) * down.float().T
            for layer, _, down in self._weights()
        ]
        return torch.stack([values.cpu() for values in scaled])

    def _solve(self, sums: dict[str, Tensor]) -> tuple[Tensor, ...]:
        factor, target = self._normal_equations(sums)
        return (torch.cholesky_solve(target, factor),)

    def _store(self, values: Tensor) -> None:
        for (layer, _, down), value in zip(self._weights(), values, strict=True):
            down.copy_(value.T.to(down.device) / layer.saved_scale(self.adapter_name))
            if (radius := layer.locas_config[self.adapter_name].max_slot_norm) is not None:
                clip_norms_([down], [-2], radius)
