"""Learn a text in closed form, by ridge regression: a linear map beside each two-layer FFN.

With A `[N, D]` an FFN's inputs of all N tokens so far, and G `[N, D]` the gradients of their
log-likelihood at its output, a layer's map is

    M = S + C^-1 A'G * rate N / (N + prior) / g,    C = A'A + ridge d I

with d the mean of the diagonal of A'A, g the mean square of the elements of G, and S the map that
the slots had before (usually 0). docs/concepts/ridge.md has the reasons. M is cut to n terms p v',
the first in the singular value decomposition of C^(1/2) M, with p scaled so that p A has a mean
square of 1. All inputs share a direction m, with m A about 1. It keeps the slot of each term on,
and one more slot takes the constant away again:

    sum_j f((p_j + SHIFT m) A) v_j - f(m A) SHIFT sum_j v_j = sum_j (p_j A) v_j

where f(x) = x for x > 0.

Keys times SHARPNESS and values divided by it let GELU and SiLU act as ReLU. Such keys are far
longer than the norm clip allows. The memory's scales k and tau are free: the rows and columns are
divided by powers of two that bring them within the clip, and k and tau are these powers. The map
stays the same to the last bit. The paper has no such rule.

Axes: L layers, N tokens, D hidden size, R slots, n = R - 1 terms, D at most.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checks import check_number
from ..tuner.layer import LocasLayer
from .recording import Moves, Writer, all_finite

if TYPE_CHECKING:
    from ..ttt import TestTimeTrainer

__all__ = ["RidgeWriter", "ValueWriter", "holds_map"]

SHIFT = 5.0
"""Above it, fewer terms fall off (0.1% on text of one kind); below it, bfloat16 loses less."""
SHARPNESS = 32.0
MARGIN = 1.01
"""By which rows are shorter than the radius at least: rounding to bfloat16 may lengthen them."""

Sums = dict[str, Tensor]
"""A'A, A'G [L, D, D]; sums of A [L, D], of mean(G^2) [L] and of 1; the rate; S [L, D, D]."""


class Regression(Writer):
    """A rule that writes the ridge regression of all tokens so far, after each chunk."""

    arguments = ("rate", "ridge", "prior")

    def __init__(
        self,
        model: nn.Module,
        *,
        rate: float,
        ridge: float,
        prior: float = 32000.0,
        adapter_name: str | None = None,
    ):
        super().__init__(model, adapter_name)
        check_number("rate", rate)
        check_number("ridge", ridge)
        check_number("prior", prior, may_be_0=True)
        self.rate = rate
        self.ridge = ridge
        self.prior = prior
        start = self._read_map()
        depth, width, _ = start.shape
        self._sums: Sums = {
            "gram": torch.zeros(depth, width, width),
            "cross": torch.zeros_like(start),
            "total": torch.zeros(depth, width),
            "power": torch.zeros(depth),
            "tokens": torch.zeros(()),
            "rate": torch.tensor(float(rate)),
            "start": start,
        }
        self._has_start = bool(start.any())

    def write(self, losses: Tensor) -> Moves:
        """Add the recorded passes to the sums, and write their map in place of the former one.

        The mean of the losses must have been differentiated. A chunk that makes a sum or the map
        infinite is left out.
        """
        before = self._sums
        if self._add(len(losses), None) and not self.solve():
            self._sums = before
        return {}

    def add(self, counted: Tensor) -> bool:
        """Add the recorded passes, of one text or of several rows, to the sums.

        `solve` writes their map.

        Args:
            counted: BoolTensor of N elements, tells which of the last N recorded tokens predict one
                that counts: the mean of those losses must have been differentiated. The others,
                such as padding, enter no sum.

        Returns:
            False, without a change, if a sum is not finite.
        """
        counted = counted.flatten()
        return self._add(len(counted), counted.nonzero().flatten())

    @torch.no_grad()
    def solve(self) -> bool:
        """Write the map of the sums in place of the former one.

        Return False, without a change, if it is not finite.
        """
        slots = self._solve(self._sums)
        finite = all_finite(slots)
        if finite:
            self._store(*slots)
        return finite

    def state_dict(self) -> dict[str, Any]:
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums = {}
        for name, tensor in self._sums.items():
            sums[name] = torch.empty_like(tensor).copy_(state[name])
        self._sums = sums
        self._has_start = bool(sums["start"].any())

    @torch.no_grad()
    def _add(self, count: int, chosen: Tensor | None) -> bool:
        self._check_recorded()
        inputs = self._take_inputs(count, chosen)
        gradients = self._take_gradients(count, chosen)
        self._release()
        # Of the sum over the tokens.
        gradients = gradients * inputs.shape[1]
        inputs = self._observe(inputs)
        sums = {name: tensor.to(inputs) for name, tensor in self._sums.items()}
        sums["gram"] = torch.baddbmm(sums["gram"], inputs.mT, inputs)
        sums["cross"] = torch.baddbmm(sums["cross"], inputs.mT, gradients)
        sums["total"] = sums["total"] + inputs.sum(dim=1)
        sums["power"] = sums["power"] + gradients.square().mean(dim=2).sum(dim=1)
        sums["tokens"] = sums["tokens"] + inputs.shape[1]
        finite = all_finite(sums.values())
        if finite:
            self._sums = sums
        return finite

    def _normal_equations(self, sums: Sums) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor of C, and C M, both batches of L."""
        gram = sums["gram"]
        tokens = sums["tokens"]
        tiny = torch.finfo(gram.dtype).tiny
        size = gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=tiny)
        identity = torch.eye(gram.shape[-1], device=gram.device)
        metric = gram + self.ridge * size[:, None, None] * identity
        power = (sums["power"] / tokens).clamp(min=tiny)
        length = sums["rate"] * tokens / (tokens + self.prior) / power
        target = sums["cross"] * length[:, None, None]
        if self._has_start:
            target += metric @ sums["start"]
        return torch.linalg.cholesky_ex(metric).L, target

    def _observe(self, inputs: Tensor) -> Tensor:
        """Return what the rule multiplies, from A `[L, N, D]`."""
        raise NotImplementedError

    def _read_map(self) -> Tensor:
        """Return S, what the slots hold already, in float32 on the CPU."""
        raise NotImplementedError

    def _solve(self, sums: Sums) -> tuple[Tensor, ...]:
        """Return the slots of the map."""
        raise NotImplementedError

    def _store(self, *slots: Tensor) -> None:
        """Write what `_solve` returned."""
        raise NotImplementedError


class RidgeWriter(Regression):
    """Write the ridge regression of all tokens so far into a two-layer memory, after each chunk.

    A `TestTimeTrainer` with it and no `learning_rate` learns without an optimizer. It holds 3 L D^2
    float32 numbers, and sets the memory's scales k and tau. All rows that it writes are within the
    norm clip.

    Args:
        model: a model with a two-layer LOCAS memory of `init_weights="write"`, empty or with a map
            that this rule has written before, to which the text's is added.
        rate: of the map; see above.
        ridge: what is added to the diagonal of A'A, relative to its mean.
        prior: the number of tokens at which the map has half its length.
        adapter_name: the memory; `None` for the active one. It has no gates and one width in all
            layers.

    Raises:
        ValueError: for an argument out of range, a memory with other slots, or a host whose
            activation is not like ReLU.
    """

    def __init__(
        self, model: nn.Module, *, rate: float = 0.08, ridge: float = 0.03, **options: Any
    ):
        super().__init__(model, rate=rate, ridge=ridge, **options)

    def check(self, trainer: "TestTimeTrainer") -> None:
        super().check(trainer)
        if trainer.learner.trains:
            rule = "learning_rate and optimizer must be None beside a RidgeWriter"
            reason = "which replaces what an optimizer learns after each chunk"
            got = f"got the rate {trainer.settings.learning_rate}"
            raise ValueError(f"{rule}, {reason}, {got}: leave them out, or use a SlotWriter")

    @property
    def _terms(self) -> int:
        return min(self.capacity - 1, self._layers[0].in_features)

    def _observe(self, inputs: Tensor) -> Tensor:
        return inputs

    @torch.no_grad()
    def _read_map(self) -> Tensor:
        """Return the linear map of the slots `[L, D, D]`.

        A `ValueError` where they hold none, or cannot hold one.
        """
        act = self._layers[0].ffn.act
        probe = torch.linspace(-4.0, 4.0, 9)
        sharp = act(SHARPNESS * probe) / SHARPNESS
        if not torch.allclose(sharp, probe.relu(), atol=0.01):
            rule = "the host's activation must be like ReLU, GELU or SiLU"
            raise ValueError(f"{rule}, got {act}: use SlotWriter")
        maps = []
        for layer, up, down in self._weights():
            self._check_slots(layer, down)
            scale = layer.saved_scale(self.adapter_name)
            factor = layer.locas_input_scale[self.adapter_name] * scale
            maps.append((factor * (up.float().T @ down.float().T)).cpu())
        return torch.stack(maps)

    def _check_slots(self, layer: LocasLayer, down: Tensor) -> None:
        if down.any() and not holds_map(down):
            rule = f"the memory {self.adapter_name!r} must be empty or written by RidgeWriter"
            raise ValueError(f"{rule}, got other slots in {layer.name}: give a fresh one")

    def _solve(self, sums: Sums) -> tuple[Tensor, Tensor]:
        """Return the slots of the cut map: keys `[L, D, n + 1]` and values `[L, n + 1, D]`."""
        gram = sums["gram"]
        tokens = sums["tokens"]
        tiny = torch.finfo(gram.dtype).tiny
        factor, target = self._normal_equations(sums)
        # The right singular vectors of C^(1/2) M are the eigenvectors of M'C M, which is
        # target' C^-1 target. Two steps of subspace iteration from the values that are written
        # already: the sums change little from chunk to chunk.
        columns = [down[:, : self._terms] for _, _, down in self._weights()]
        former = torch.stack([values.float().to(gram) for values in columns])
        if not former.any():
            vectors = torch.linalg.eigh(target.mT @ target).eigenvectors
            former = vectors.flip(-1)[..., : self._terms]
        for _ in range(2):
            directions = torch.linalg.qr(former).Q
            keys = torch.cholesky_solve(target @ directions, factor)
            former = target.mT @ keys
        size = ((keys * (gram @ keys)).sum(dim=1, keepdim=True) / tokens).sqrt()
        values = size.mT * directions.mT
        # m [L, D, 1]
        total = sums["total"]
        common = torch.cholesky_solve(total[..., None], factor)
        common = common * tokens / (total[:, None] @ common).clamp(min=tiny)
        keys = keys / size.clamp(min=tiny) + SHIFT * common
        keys = torch.cat([keys, common], dim=2)
        last = -SHIFT * values.sum(dim=1, keepdim=True)
        return keys, torch.cat([values, last], dim=1)

    def _store(self, keys: Tensor, values: Tensor) -> None:
        slots = self._terms + 1
        for (layer, up, down), key, value in zip(self._weights(), keys, values, strict=True):
            rows = SHARPNESS * key.T.to(up.device)  # [n + 1, D]
            columns = value.T.to(down.device) / SHARPNESS  # [D, n + 1]
            config = layer.locas_config[self.adapter_name]
            radius = config.max_slot_norm or 1.0
            k = _find_scale(rows.norm(dim=1), radius)
            tau = _find_scale(columns.norm(dim=0), radius) / config.scaling
            layer.locas_input_scale[self.adapter_name].copy_(k)
            layer.locas_tau[self.adapter_name].copy_(tau)
            up[:slots] = rows / k
            down[:, :slots] = columns / layer.saved_scale(self.adapter_name)


class ValueWriter(Regression):
    """Write the ridge regression of all tokens so far into the values of any memory; its rows stay.

    As `RidgeWriter`, with the activations M `[N, R]` of the slots in place of A, and the values V
    `[R, D]` in place of the map. Nothing is cut: V = S + C^-1 M'G * (rate / (L D)) N / (N + prior)
    / g, then the norm clip. The memory may have any values before, and an optimizer may train its
    rows beside; `prior` and `adapter_name` are as there. The writer holds L R (R + 2 D) float32
    numbers.
    """

    needs_two_layers = False

    def __init__(
        self, model: nn.Module, *, rate: float = 500.0, ridge: float = 0.1, **options: Any
    ) -> None:
        super().__init__(model, rate=rate, ridge=ridge, **options)
        self._sums["rate"] /= len(self._layers) * self._layers[0].in_features

    def _observe(self, inputs: Tensor) -> Tensor:
        """Return M `[L, N, R]` from A `[L, N, D]`."""
        activations = []
        for (layer, up, _), layer_inputs in zip(self._weights(), inputs, strict=True):
            activation = layer.activate([self.adapter_name], layer_inputs.to(up.device))
            activations.append(activation.to(layer_inputs))
        return torch.stack(activations)

    @torch.no_grad()
    def _read_map(self) -> Tensor:
        """Return the values at the FFNs' outputs `[L, R, D]`."""
        values = []
        for layer, _, down in self._weights():
            values.append((layer.saved_scale(self.adapter_name) * down.float().T).cpu())
        return torch.stack(values)

    def _solve(self, sums: Sums) -> tuple[Tensor]:
        factor, target = self._normal_equations(sums)
        return (torch.cholesky_solve(target, factor),)

    def _store(self, values: Tensor) -> None:
        for (layer, _, down), value in zip(self._weights(), values, strict=True):
            down.copy_(value.T.to(down.device) / layer.saved_scale(self.adapter_name))
            self._clip_values(layer, down)


def holds_map(down: Tensor) -> bool:
    """Return whether the values of a layer `[D, R]` are those of a map that `RidgeWriter` wrote."""
    terms = min(down.shape[1] - 1, down.shape[0])
    values = down[:, :terms].float()
    # What is left of the constant is more than rounding where another rule wrote the slots.
    constant = down[:, terms].float() + SHIFT * values.sum(dim=1)
    return bool(values.any() and constant.norm() <= 0.01 * SHIFT * values.norm())


def _find_scale(norms: Tensor, radius: float) -> Tensor:
    """Return the least power of two that brings vectors of these norms within a radius.

    A power of two: dividing by it rounds nothing.
    """
    _, exponent = torch.frexp(MARGIN * norms.max() / radius)
    return torch.ldexp(torch.ones_like(norms[0]), exponent)
