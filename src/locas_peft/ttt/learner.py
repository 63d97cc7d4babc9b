"""The parameters that are trained, and the steps that they take: rates, warm-up, and a way back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .host import Host
from .optimizers import OPTIMIZERS, OptimizerFactory


class Learner:
    """An optimizer over what a model trains, made at the first step.

    A step is `begin`, one or more backward passes, `finish`.

    Args:
        host: whose adapter is trained.
        optimizer, learning_rate, warmup_steps, weight_decay, max_grad_norm: as `TestTimeTrainer` takes them.

    Attributes:
        optimizer: None before the first step.
        steps: how many were taken.
    """

    def __init__(
        self,
        host: Host,
        *,
        optimizer: str | OptimizerFactory,
        learning_rate: float | None,
        warmup_steps: int,
        weight_decay: float,
        max_grad_norm: float | None,
    ):
        self._host, self.optimizer_name = host, optimizer
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.weight_decay, self.max_grad_norm = weight_decay, max_grad_norm
        self.optimizer: torch.optim.Optimizer | None = None
        self._rates: list[float] = []
        self.steps = 0

    def parameters(self) -> list[nn.Parameter]:
        """Gives what is to be trained; nothing for a plain model, whose own weights all require gradients."""
        if not self._host.has_adapter():
            return []
        return [parameter for parameter in self._host.model.parameters() if parameter.requires_grad]

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Clears the gradients for a step; makes the optimizer for the first one.

        Raises:
            ValueError: other parameters than the optimizer was made for.
        """
        if self.optimizer is None:
            self._make_optimizer(parameters)
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if held != {id(parameter) for parameter in parameters}:
            raise ValueError(
                "model must train the same parameters from the first chunk to the last, got others than the optimizer "
                "was made for: make a new TestTimeTrainer after switching or adding adapters"
            )
        self.optimizer.zero_grad(set_to_none=True)

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> None:
        if callable(self.optimizer_name):
            self.optimizer = self.optimizer_name(parameters)
        else:
            self.optimizer = OPTIMIZERS[self.optimizer_name](parameters, self.learning_rate, self.weight_decay)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def finish(self, parameters: list[nn.Parameter]) -> bool:
        """Takes the step, or none where a gradient is not finite, and says whether it was taken."""
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        finite = bool(torch.isfinite(norm))
        if finite:
            if self.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
            warmth = min(1.0, (self.steps + 1) / (self.warmup_steps + 1))
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * warmth
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    @torch.no_grad()
    def follow_slots(self, moved: dict[nn.Parameter, tuple[int, Tensor]]) -> None:
        """Lets the optimizer's state go where slots of a memory went; it is zero for slots that are new.

        Args:
            moved: for a parameter the dimension of its slots, and for each slot the place it came from, or -1.
        """
        for parameter, (dim, places) in moved.items() if self.optimizer is not None else ():
            for entry in self.optimizer.state.get(parameter, {}).values():
                if isinstance(entry, Tensor) and entry.shape == parameter.shape:
                    followed = entry.index_select(dim, places.clamp(min=0))
                    followed.index_fill_(dim, (places < 0).nonzero().squeeze(1), 0.0)
                    entry.copy_(followed)

    def snapshot(self) -> Callable[[], None]:
        """Gives a function that brings parameters and optimizer back to where they are now."""
        parameters = self.parameters()
        values = [parameter.detach().clone() for parameter in parameters]
        optimizer, rates, steps = self.optimizer, self._rates, self.steps
        state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())

        def undo() -> None:
            with torch.no_grad():
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)
            self.optimizer, self._rates, self.steps = optimizer, rates, steps
            if optimizer is not None:
                optimizer.load_state_dict(state)

        return undo

    # Checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Gives the optimizer's tensors, named "parameter's number/entry"."""
        return {
            f"{number}/{key}": value
            for number, entries in self._optimizer_state()["state"].items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }

    def state(self) -> dict:
        """Gives the rest of the optimizer's state, for JSON."""
        optimizer = self._optimizer_state()
        return {
            "param_groups": optimizer["param_groups"],
            "state": {
                str(number): {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
                for number, entries in optimizer["state"].items()
            },
        }

    def restore(self, tensors: dict[str, Tensor], state: dict, steps: int) -> None:
        """Takes up what `tensors` and `state` gave.

        Raises:
            TypeError: they contradict each other, or the model.
        """
        if not isinstance(steps, int):
            raise TypeError(f"the number of steps is {steps!r}")
        self.optimizer, self.steps = None, steps
        if not state["param_groups"]:
            return
        entries = {int(number): dict(scalars) for number, scalars in state["state"].items()}
        for name, value in tensors.items():
            number, key = name.split("/", 1)
            entries[int(number)][key] = value
        groups = [
            {key: tuple(value) if key != "params" and isinstance(value, list) else value for key, value in its.items()}
            for its in state["param_groups"]
        ]
        parameters = self.parameters()
        # An optimizer of the caller's may order parameters, and shape its state, as it likes.
        for number, entry in () if callable(self.optimizer_name) else entries.items():
            for value in entry.values():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameters[number].shape:
                    raise TypeError(f"the optimizer's state has shape {list(value.shape)} for parameter {number}")
        self._make_optimizer(parameters)
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})

    def _optimizer_state(self) -> dict:
        return {"state": {}, "param_groups": []} if self.optimizer is None else self.optimizer.state_dict()
