"""The parameters that are trained and their optimizer: warm-up, skipped steps, snapshots."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Learner:
    """An optimizer over some parameters, made at the first step: `begin`, one or more backward passes, `finish`.

    Args:
        list_parameters: returns what is trained; called at each chunk, so that a switch of adapters is noticed.
        learning_rate, warmup_steps, decay_steps: see `TrainingSettings`.
        make_optimizer: makes another optimizer, with its own rates; None for AdamW without weight decay.
        beta: AdamW's decay of the squared gradients.

    Attributes:
        trains: whether there are steps: False where neither a rate nor an optimizer was given.
        steps: how many steps were taken since the start, or since the parameters were last taken back.
        good: copies of the parameters in their last good state (`brake.py`), or None.
        mean: a number of readings, and the mean of the parameters over their ends.
    """

    def __init__(
        self,
        list_parameters: Callable[[], list[nn.Parameter]],
        learning_rate: float | None,
        warmup_steps: int,
        decay_steps: int = 0,
        make_optimizer: OptimizerFactory | None = None,
        beta: float = 0.999,
    ):
        self.parameters = list_parameters
        self.trains = learning_rate is not None or make_optimizer is not None
        self._learning_rate, self._warmup_steps, self._decay_steps = (
            learning_rate,
            warmup_steps,
            decay_steps,
        )
        self._make_optimizer, self._beta = make_optimizer or self._make_adamw, beta
        self.optimizer: torch.optim.Optimizer | None = None
        self._rates: list[float] = []
        self._rate_factor = 1.0
        self.steps = self._earlier_steps = 0
        self._snapshot: Any = None
        self.good: list[Tensor] | None = None
        self.mean: tuple[int, list[Tensor]] = (0, [])

    def _make_adamw(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # One fused kernel: unfused, a step over many small matrices takes a tenth of a chunk's time on a CPU.
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
        betas = 0.9, self._beta
        return torch.optim.AdamW(
            parameters, lr=self._learning_rate, betas=betas, weight_decay=0.0, fused=fused
        )

    def _start(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = self._make_optimizer(parameters)
        self._rates = [self._rate_factor * group["lr"] for group in self.optimizer.param_groups]

    def begin(self) -> None:
        """Clear the gradients for a step; make the optimizer for the first one."""
        parameters = self.parameters()
        if self.optimizer is None:
            self._start(parameters)
        if set(self._held()) != set(parameters):
            rule = "model must train the same parameters from the first chunk to the last"
            remedy = "make a new TestTimeTrainer after switching or adding adapters"
            raise ValueError(f"{rule}, got others than the optimizer was made for: {remedy}")
        self.optimizer.zero_grad(set_to_none=True)

    def _held(self) -> list[nn.Parameter]:
        # The optimizer's parameters: to list the model's again takes as long as it has modules.
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def finish(self, step: bool = True, rate_factor: float = 1.0) -> bool:
        """Take the step at `rate_factor` of its rate, unless a gradient is not finite; return whether it was taken."""
        gradients = [parameter.grad for parameter in self._held() if parameter.grad is not None]
        finite = step and bool(torch.isfinite(nn.utils.get_total_norm(gradients)))
        if finite:
            warmup = min(1.0, (self.steps + 1) / (self._warmup_steps + 1))
            steps = self._earlier_steps + self.steps
            decay = (1.0 + steps / self._decay_steps) ** -0.5 if self._decay_steps else 1.0
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * warmup * decay * rate_factor
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    @torch.no_grad()
    def move_slots(self, moved: dict[nn.Parameter, tuple[int, Tensor]]) -> None:
        """Move the optimizer's state along with the slots of a memory (see `Moves`); it is zero for new slots."""
        for parameter, (dim, former) in moved.items() if self.optimizer is not None else ():
            for entry in self.optimizer.state.get(parameter, {}).values():
                if isinstance(entry, Tensor) and entry.shape == parameter.shape:
                    gathered = entry.index_select(dim, former.clamp(min=0))
                    entry.copy_(gathered.index_fill_(dim, (former < 0).nonzero().squeeze(1), 0.0))

    @torch.no_grad()
    def _load(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.copy_(value)

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    def take_snapshot(self) -> None:
        """Copy parameters and optimizer state, for `restore_snapshot`."""
        state = None if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict())
        self._snapshot = self._copy(), self.optimizer, self.steps, state

    def restore_snapshot(self) -> None:
        """Restore parameters and optimizer from the last snapshot."""
        values, self.optimizer, self.steps, state = self._snapshot
        self._load(values)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state)

    @torch.no_grad()
    def average(self, readings: int, last: bool) -> None:
        """Add the parameters after so many readings to the mean over readings; load the mean after the last one."""
        if readings > self.mean[0]:  # else in the mean already, of a reading that was resumed
            own = self._copy()
            mean = [
                former.lerp(new, 1 / readings)
                for former, new in zip(self.mean[1] or own, own, strict=True)
            ]
            self.mean = readings, mean
            if last:
                self._load(mean)

    def keep_good(self) -> None:
        """Copy the parameters; `take_back` returns to this copy."""
        self.good = self._copy()

    def take_back(self, rate_factor: float) -> None:
        """Restore the parameters from the good state; the next step makes a new optimizer, with lower rates."""
        self._load(self.good)
        self._earlier_steps += self.steps
        self.optimizer, self.steps, self._rate_factor = None, 0, self._rate_factor * rate_factor

    def _fit(self, values: list[Tensor]) -> list[Tensor]:
        """Return saved values as the parameters are; raise a `ValueError` where they have other shapes."""
        parameters = self.parameters()
        if [value.shape for value in values] != [value.shape for value in parameters]:
            raise ValueError("the good state or the mean has other shapes than the parameters")
        return [value.to(own) for value, own in zip(values, parameters, strict=True)]

    def release(self) -> None:
        """Drop the optimizer, the snapshot, the good state and the mean: several copies of the parameters."""
        self.optimizer = self._snapshot = self.good = None
        self.mean = 0, []

    def state_dict(self) -> dict[str, Any]:
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        steps = {"steps": self.steps, "earlier_steps": self._earlier_steps}
        state = {**steps, "rate_factor": self._rate_factor, "optimizer": optimizer}
        return {**state, "good": self.good, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raise a `ValueError` where it does not fit the parameters."""
        self.steps, self._earlier_steps = int(state["steps"]), int(state["earlier_steps"])
        self._rate_factor = float(state["rate_factor"])
        self.good = state["good"] and self._fit(state["good"])
        self.mean = int(state["mean"][0]), state["mean"][1] and self._fit(state["mean"][1])
        if state["optimizer"] is None:
            self.optimizer = None
            return
        self._start(self.parameters())
        self.optimizer.load_state_dict(state["optimizer"])
        adamw = isinstance(
            self.optimizer, torch.optim.AdamW
        )  # the state of others may have any shape
        for parameter, entries in self.optimizer.state.items() if adamw else ():
            missing = {"step", "exp_avg", "exp_avg_sq"} - entries.keys()
            if missing:
                raise ValueError(f"the optimizer's state has no {min(missing)}")
            for entry in entries.values():
                if entry.ndim and entry.shape != parameter.shape:
                    expected = list(parameter.shape)
                    raise ValueError(
                        f"the optimizer's state has shape {list(entry.shape)} for {expected}"
                    )
