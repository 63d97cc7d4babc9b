"""The parameters that are trained and their optimizer: warm-up, decay, skipped steps."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Learner", "OptimizerFactory", "total_norm"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def total_norm(gradients: Iterable[Tensor | None]) -> Tensor:
    """Return the norm of all gradients together, a float32 scalar on the device of one of them."""
    norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm.float()


class Learner:
    """An optimizer over some parameters, made at the first step.

    A step is `begin`, one or more backward passes, `finish`; or `check_gradients` and `end` in its
    place, where the caller waits for other values as well.

    Args:
        parameters: returns what is trained; called at each step, so that a switch of adapters is
            noticed.
        learning_rate, warmup_steps, decay_steps: see `TrainingSettings`.
        make_optimizer: makes another optimizer, with its own rates; None for AdamW without weight
            decay.
        beta: AdamW's decay of the squared gradients.

    Attributes:
        trains: whether there are steps. False where neither a rate nor an optimizer was given: then
            `begin` does nothing, and `finish` clears the gradients.
        steps: how many steps were taken.
    """

    def __init__(
        self,
        parameters: Callable[[], list[nn.Parameter]],
        learning_rate: float | None,
        warmup_steps: int,
        decay_steps: int = 0,
        make_optimizer: OptimizerFactory | None = None,
        beta: float = 0.999,
    ):
        self.parameters = parameters
        self.trains = learning_rate is not None or make_optimizer is not None
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._decay_steps = decay_steps
        self._make_optimizer = make_optimizer or self._make_adamw
        self._beta = beta
        self._rates: list[float] = []

    def begin(self) -> None:
        """Clear the gradients for a step; make the optimizer for the first one."""
        if not self.trains:
            return
        parameters = self.parameters()
        if self.optimizer is None:
            self._start(parameters)
        if set(self._held()) != set(parameters):
            rule = "model must train the same parameters from the first chunk to the last"
            remedy = "make a new TestTimeTrainer after switching or adding adapters"
            raise ValueError(f"{rule}, got others than the optimizer was made for: {remedy}")
        self._started.zero_grad(set_to_none=True)

    def finish(self, step: bool = True, rate_factor: float = 1.0) -> bool:
        """Take the step at `rate_factor` of its rate; return whether it was taken.

        It is not taken where a gradient is not finite, or where `step` is False.
        """
        taken = step
        if step and self.trains:
            taken = bool(self.check_gradients())
        self.end(taken, rate_factor)
        return taken

    def check_gradients(self) -> Tensor:
        """Return whether all gradients are finite, a BoolTensor [] on the device of one of them.

        Where nothing waits for its value, the device is not waited for.
        """
        return torch.isfinite(total_norm(parameter.grad for parameter in self._held()))

    def end(self, step: bool, rate_factor: float = 1.0) -> None:
        """Take the step, if `step`, at `rate_factor` of its rate, and clear the gradients."""
        if not self.trains:
            for parameter in self.parameters():
                parameter.grad = None
            return
        if step:
            self._set_rates(rate_factor)
            self._started.step()
            self.steps += 1
        self._started.zero_grad(set_to_none=True)

    @torch.no_grad()
    def move_slots(self, moved: dict[nn.Parameter, tuple[int, Tensor]]) -> None:
        """Move the optimizer's state along with the slots of a memory (see `Moves`).

        The state of new slots is zero.
        """
        if self.optimizer is None:
            return
        for parameter, (dim, former) in moved.items():
            fresh = (former < 0).nonzero().squeeze(1)
            for entry in self.optimizer.state.get(parameter, {}).values():
                if isinstance(entry, Tensor) and entry.shape == parameter.shape:
                    gathered = entry.index_select(dim, former.clamp(min=0))
                    entry.copy_(gathered.index_fill_(dim, fresh, 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the optimizer's state, without the parameters."""
        optimizer = None
        if self.optimizer is not None:
            optimizer = self.optimizer.state_dict()
        return {"steps": self.steps, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        A state that does not fit the parameters is a `ValueError`.
        """
        self.steps = int(state["steps"])
        if state["optimizer"] is None:
            self.optimizer = None
            return
        self._start(self.parameters())
        self._started.load_state_dict(state["optimizer"])
        if isinstance(self.optimizer, torch.optim.AdamW):
            self._check_adamw()

    @property
    def _started(self) -> torch.optim.Optimizer:
        """The optimizer, which `begin` or a loaded state has made."""
        assert self.optimizer is not None
        return self.optimizer

    def _start(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = self._make_optimizer(parameters)
        self._rates = [group["lr"] for group in self._started.param_groups]

    def _make_adamw(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # One fused kernel: unfused, a step over many small matrices takes a tenth of a chunk.
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
        return torch.optim.AdamW(
            parameters,
            lr=self._learning_rate,
            betas=(0.9, self._beta),
            weight_decay=0.0,
            fused=fused,
        )

    def _held(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer was made for."""
        return [parameter for group in self._started.param_groups for parameter in group["params"]]

    def _set_rates(self, rate_factor: float) -> None:
        warmup = min(1.0, (self.steps + 1) / (self._warmup_steps + 1))
        decay = 1.0
        if self._decay_steps:
            decay = (1.0 + self.steps / self._decay_steps) ** -0.5
        for group, rate in zip(self._started.param_groups, self._rates, strict=True):
            group["lr"] = rate * warmup * decay * rate_factor

    def _check_adamw(self) -> None:
        # Only AdamW: the state of other optimizers may have any shape.
        for parameter, entries in self._started.state.items():
            missing = {"step", "exp_avg", "exp_avg_sq"} - entries.keys()
            if missing:
                raise ValueError(f"the optimizer's state has no {min(missing)}")
            for entry in entries.values():
                if entry.ndim and entry.shape != parameter.shape:
                    got = list(entry.shape)
                    expected = list(parameter.shape)
                    raise ValueError(f"the optimizer's state has shape {got} for {expected}")
