"""A mixture-of-experts block of the host, seen as one FFN: its neurons, and how R more are merged.

With A the block's input, E experts of F neurons each, and w_e(A) the routing weight of expert e,
zero where the router does not choose it,

    block(A) = sum over e of w_e(A) FFN_e(A)  +  s(A) FFN_shared(A)

where the shared expert may be missing and s is 1 or a sigmoid. A memory stands beside the whole
block. The slots that it can clone are the neurons of all experts: e F + j is neuron j of expert e,
and the shared expert's follow. Their activations are weighted by w_e and s, as their outputs are.
Merging a memory whose output is Wdown M is exact where
- the shared expert is always on with s = 1: it becomes R neurons wider;
- or the routing weights of each token add up to one constant c: every expert gets the same R
neurons,
  with Wdown / c.

The experts' weights are those of transformers 5: gate_up_proj `[E, 2 F, D]`, down_proj `[E, D, F]`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import align_module_device
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .ffn import HostFFN, SumActivity, find_dense, find_weight_obstacle, list_known_parts
from .modules import evaluating, unwrap

SHARED_EXPERTS = ("shared_expert", "shared_experts", "shared_mlp")
SHARED_GATE = "shared_expert_gate"
# Widths of experts stay multiples: the grouped products of transformers need rows of 16 bytes.
ALIGNMENT = 8
# What `_recording` fills in, by the names that the experts' arguments have here.
Record = dict[str, Tensor]


class HostMixture:
    """One mixture's block of the host, with the interface of `HostFFN`.

    Args:
        owner: the block, which has the experts, and the shared expert if there is one, as
        attributes.
        name: its name, for messages.

    Raises:
        ValueError: where the experts are of an unknown structure.
    """

    gated = True
    is_flat = False
    # The names of a dense FFN's parts.
    parts = None

    def __init__(self, owner: nn.Module, name: str = "") -> None:
        self.owner = owner
        self.name = name or type(owner).__name__
        experts = unwrap(owner.experts)
        self._is_wrapped = isinstance(experts, BaseTunerLayer)
        self.experts = unwrap(experts.get_base_layer()) if self._is_wrapped else experts
        activation = getattr(self.experts, "act_fn", None)
        if not callable(activation) or not _has_fused_weights(self.experts):
            kind = type(owner).__name__
            raise ValueError(f"{self.name} ({kind}) has experts of an unknown structure.")
        self.act: Callable[[Tensor], Tensor] = activation
        self.hidden_size = self.experts.down_proj.shape[1]
        self.shared = self._find_shared()
        self._shared_gate: nn.Module | None = getattr(owner, SHARED_GATE, None)
        # The shared expert, where memories are merged into it: its weight is 1.
        self._widened = self.shared if self._shared_gate is None else None

    def _find_shared(self) -> HostFFN | None:
        for part in SHARED_EXPERTS:
            child = getattr(self.owner, part, None)
            if child is not None:
                return find_dense(unwrap(child), f"{self.name}.{part}", list_known_parts())
        return None

    def list_weights(self) -> list[Tensor]:
        """Return the weights of the experts, and of the shared one."""
        weights = [self.experts.gate_up_proj, self.experts.down_proj]
        return weights if self.shared is None else [*weights, *self.shared.list_weights()]

    @property
    def expert_width(self) -> int:
        """Return the current F of an expert, merged memories included."""
        return self.experts.down_proj.shape[2]

    @property
    def widens_shared(self) -> bool:
        """Return whether memories are merged into the shared expert, which has the weight 1."""
        return self._widened is not None

    @property
    def width(self) -> int:
        """Return the width of what merging widens: the shared expert, or each of the experts."""
        return self.expert_width if self._widened is None else self._widened.width

    @property
    def slots(self) -> int:
        """Return how many neurons there are to clone: those of all experts."""
        routed = len(self.experts.down_proj) * self.expert_width
        return routed if self.shared is None else routed + self.shared.width

    def merged_width(self, r: int) -> int:
        """Return by how many neurons, also of zeros, merging R slots widens the block."""
        return r if self.widens_shared else math.ceil(r / ALIGNMENT) * ALIGNMENT

    def slots_at(self, width: int) -> int:
        """Return how many neurons there are when `width` has become this."""
        widened = 1 if self.widens_shared else len(self.experts.down_proj)
        return self.slots + (width - self.width) * widened

    @torch.no_grad()
    def gate_and_up_rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the gate rows and the up rows of slots, `LongTensor [R]`: `[R, D]` float32 each."""
        width = self.expert_width
        routed = len(self.experts.down_proj) * width
        with align_module_device(self.experts):
            weight = self.experts.gate_up_proj
            slots = slots.to(weight.device)
            expert = slots.clamp(max=routed - 1) // width
            neuron = slots.clamp(max=routed - 1) % width
            gate = weight[expert, neuron].float()
            up = weight[expert, width + neuron].float()
        of_shared = slots >= routed
        if self.shared is not None and of_shared.any():
            gate[of_shared], up[of_shared] = self.shared.gate_and_up_rows(slots[of_shared] - routed)
        return gate, up

    def mean_down_norm(self) -> float:
        """Return the mean norm of all experts' down columns; NaN for weights on the meta device."""
        with torch.no_grad(), align_module_device(self.experts):
            weight = self.experts.down_proj
            if weight.is_meta:
                return float("nan")
            mean = sum(expert.float().norm(dim=0).mean().item() for expert in weight) / len(weight)
        if self.shared is None:
            return mean
        part = self.shared.width / self.slots
        return (1 - part) * mean + part * self.shared.mean_down_norm()

    @contextmanager
    def observing(self, callback: Callable[[SumActivity, Tensor], None]) -> Iterator[None]:
        """Call a function in each forward within the context; see `HostFFN.observing`."""
        with self._recording() as record:

            def finish(module: nn.Module, args: tuple, output: Tensor) -> None:
                callback(partial(_sum_activity, self, dict(record)), output)

            with self.owner.register_forward_hook(finish):
                yield

    @contextmanager
    def _recording(self) -> Iterator[Record]:
        """Fill a dict in each forward of N tokens, k experts for each.

        The experts' "inputs" `[N, D]`, "chosen" `LongTensor [N, k]`, "weights" `[N, k]`, and their
        output "routed" `[N, D]`. The shared expert's M, "activation" `[N, F]`, and its output
        "shared" `[N, D]`.
        """
        record: Record = {}

        def keep_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            names = ("inputs", "chosen", "weights")
            record.update(zip(names, (*args, *kwargs.values()), strict=False))

        def keep_routed(module: nn.Module, args: tuple, output: Tensor) -> None:
            record["routed"] = output

        def keep_shared(module: nn.Module, args: tuple, output: Tensor) -> None:
            record["activation"] = args[0].flatten(0, -2)
            record["shared"] = output.flatten(0, -2)

        handles = [
            self.experts.register_forward_pre_hook(keep_arguments, with_kwargs=True),
            self.experts.register_forward_hook(keep_routed),
        ]
        if self.shared is not None:
            handles.append(self.shared.down.register_forward_hook(keep_shared))
        try:
            yield record
        finally:
            for handle in handles:
                handle.remove()

    def shared_weight(self, inputs: Tensor) -> Tensor | float:
        """Return s, `[N, 1]` or 1, from the block's input `[N, D]`."""
        return 1.0 if self._shared_gate is None else torch.sigmoid(self._shared_gate(inputs))

    def find_other_adapter(self) -> str | None:
        """Return a message if what merging widens has an adapter, or `None`."""
        if self._widened is not None:
            return self._widened.find_other_adapter()
        if self._is_wrapped:
            return "the experts carry another adapter: merge or unload that one first"
        return None

    def find_obstacle(self) -> str | None:
        """Return the reason why no memory can be merged into the block, or `None`."""
        if self._widened is not None:
            return self._widened.find_obstacle()
        obstacle = self.find_other_adapter()
        for name in ("gate_up_proj", "down_proj"):
            if obstacle is None:
                weight = getattr(self.experts, name)
                obstacle = find_weight_obstacle(name, self.experts, weight)
        if obstacle is None and self.routing_sum() is None:
            problem = "the routing weights of its experts do not add up to a constant"
            shared = "it has no shared expert"
            if self.shared is not None:
                shared = "its shared expert is gated"
            return f"{problem}, and {shared}: keep the memory as an adapter"
        return obstacle

    def routing_sum(self) -> float | None:
        """Return c, what the routing weights of each token add up to, or `None` where they vary."""
        _, record = self._run_random_tokens(256)
        sums = record["weights"].double().sum(dim=-1)
        mean = sums.mean().item()
        tolerance = max(1e-4, 2 * torch.finfo(record["weights"].dtype).eps)
        # Negated, so that values that are not finite vary, too.
        if not (sums / mean - 1).abs().max() <= tolerance:
            return None
        return 1.0 if abs(mean - 1) <= tolerance else mean

    def fit_neurons(
        self, gate: Tensor, up: Tensor, down: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return R neurons as `widen` appends them, which then add what they add beside the block.

        Gate and up are `[R, D]`, down `[D, R]`; the result is in the host's dtype.
        """
        if self._widened is not None:
            return self._widened.fit_neurons(gate, up, down)
        dtype = self.experts.down_proj.dtype
        down = (down.float() / self.routing_sum()).to(down.dtype)
        return gate.to(dtype), up.to(dtype), down.to(dtype)

    @torch.no_grad()
    def widen(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Append R neurons of `fit_neurons`; `narrow` restores the block bit for bit."""
        if self._widened is not None:
            self._widened.widen(gate, up, down)
        else:
            self._append(gate, up, down)

    def _append(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Append neurons to each expert, and neurons of zeros up to the alignment."""
        gate_up = self.experts.gate_up_proj
        columns = self.experts.down_proj
        zeros = self.merged_width(len(up)) - len(up)
        parts = [
            nn.functional.pad(gate, (0, 0, 0, zeros)),
            nn.functional.pad(up, (0, 0, 0, zeros)),
            nn.functional.pad(down, (0, zeros)),
        ]
        parts = [part.to(columns.device, columns.dtype) for part in parts]
        gate, up, down = (part.expand(len(columns), -1, -1) for part in parts)
        first_up = self.expert_width
        wider_gate_up = torch.cat([gate_up[:, :first_up], gate, gate_up[:, first_up:], up], dim=1)
        wider_columns = torch.cat([columns, down], dim=2)
        # Both at once: without memory for one, the other stays too.
        gate_up.data, columns.data = wider_gate_up, wider_columns
        self._refresh_experts()

    @torch.no_grad()
    def narrow(self, width: int) -> None:
        """Remove the neurons from `width` on. The others keep their bits."""
        if self._widened is not None:
            self._widened.narrow(width)
            return
        gate, up = self.experts.gate_up_proj.chunk(2, dim=1)
        narrower_gate_up = torch.cat([gate[:, :width], up[:, :width]], dim=1)
        narrower_columns = self.experts.down_proj[:, :, :width].contiguous()
        self.experts.gate_up_proj.data = narrower_gate_up
        self.experts.down_proj.data = narrower_columns
        self._refresh_experts()

    @torch.no_grad()
    def pad(self, width: int) -> None:
        """Append neurons of zeros, which add nothing to the output, up to a width."""
        if self._widened is not None:
            self._widened.pad(width)
        elif width > self.width:
            rows = self.experts.down_proj.new_zeros(width - self.width, self.hidden_size)
            self._append(rows, rows, rows.T)

    def _refresh_experts(self) -> None:
        for name in ("intermediate_dim", "intermediate_size"):
            if isinstance(getattr(self.experts, name, None), int):
                setattr(self.experts, name, self.expert_width)

    def verify(self) -> None:
        """Do nothing: `find_ffns` finds only blocks that are the sum of their experts."""

    def is_sum_of_experts(self) -> bool:
        """Return whether the block is the sum of its experts, on random tokens; True on meta."""
        if any(parameter.is_meta for parameter in self.owner.parameters()):
            return True
        try:
            return self._is_sum_on_random_tokens()
        except torch.OutOfMemoryError:
            raise
        # A router may need more than the block's input, such as the tokens' ids, and an activation
        # more than one argument.
        except Exception:
            return False

    def _is_sum_on_random_tokens(self) -> bool:
        output, record = self._run_random_tokens(16)
        if not isinstance(output, Tensor) or not {"inputs", "chosen", "weights"} <= record.keys():
            return False
        inputs = record["inputs"]
        expected = torch.zeros_like(record["routed"], dtype=torch.float32)
        with torch.no_grad():
            for expert, token, weight in _list_choices(record):
                activation = self.activate(expert, inputs[token])
                out = nn.functional.linear(activation, self.experts.down_proj[expert])
                expected.index_add_(0, token, (out * weight[:, None]).float())
            if self.shared is not None:
                expected += (self.shared_weight(inputs) * record["shared"]).float()
        error = (output.flatten(0, -2).float() - expected).norm()
        return bool(error <= 0.02 * expected.norm())

    def activate(self, expert: int, inputs: Tensor) -> Tensor:
        """Return the activations `[N, F]` of an expert's neurons for its inputs `[N, D]`."""
        gate, up = nn.functional.linear(inputs, self.experts.gate_up_proj[expert]).chunk(2, dim=-1)
        return self.act(gate) * up

    def _run_random_tokens(self, count: int) -> tuple[Tensor, Record]:
        """Run the block on random tokens, so many of each of three lengths.

        Routing weights that are not normalised grow with the router's logits, and those with a
        token's length.

        Returns:
            The block's output, and what `_recording` recorded.
        """
        weight = self.experts.down_proj
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(3, count, self.hidden_size, generator=generator, device="cpu")
        lengths = torch.tensor([0.1, 0.3, 1.0], device="cpu").reshape(3, 1, 1)
        tokens = (tokens * lengths).to(weight.device, weight.dtype)
        with torch.no_grad(), evaluating(self.owner), self._recording() as record:
            output = self.owner(tokens)
        return output, record


def _has_fused_weights(experts: nn.Module) -> bool:
    gate_up = getattr(experts, "gate_up_proj", None)
    down = getattr(experts, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return False
    if gate_up.dim() != 3 or down.dim() != 3:
        return False
    return gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])


def _list_choices(record: Record) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each chosen expert with its tokens, `LongTensor [n]`, and its weights there, `[n]`."""
    for expert in record["chosen"].unique().tolist():
        token, choice = torch.where(record["chosen"] == expert)
        yield expert, token, record["weights"][token, choice]


def _sum_activity(mixture: HostMixture, record: Record, is_token: Tensor | None) -> Tensor:
    """Return the sum of the weighted |M| of a recorded forward over tokens; see `SumActivity`."""
    inputs = record["inputs"]
    width = mixture.expert_width
    if is_token is None:
        counted = torch.ones(len(inputs), device=inputs.device)
    else:
        counted = is_token.float()
    activity = torch.zeros(mixture.slots, device=inputs.device)
    with align_module_device(mixture.experts):
        for expert, token, weight in _list_choices(record):
            activation = mixture.activate(expert, inputs[token]).abs().float()
            activity[expert * width :][:width] = (weight.float() * counted[token]) @ activation
    if mixture.shared is not None:
        weight = mixture.shared_weight(inputs) * counted[:, None]
        weighted = weight.float() * record["activation"].abs()
        activity[-mixture.shared.width :] = weighted.sum(dim=0)
    return activity
