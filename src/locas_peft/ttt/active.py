"""The parts of a model that a reading uses.

They are listed once, and again only after adapters were switched.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..model.causal_lm import CausalLM
from ..tuner import calibrate, trained_parameters, uncalibrated_memories
from ..tuner.modules import AdapterLayers, used_modules

__all__ = ["ActiveParts", "calibrate_empty"]


class ActiveParts:
    """The modules, adapter layers and trained parameters of a model that are in use.

    To walk all modules of a model takes a tenth of the time of a small chunk, so that `update`
    looks at the adapter layers alone.

    Args:
        host: the model.
        parameters: what is trained; None for the parameters of the adapters that are in use.

    Attributes:
        parameters: what is trained; nothing for a plain model, whose own weights all require
            gradients.
        calibrated: whether the memories that are in use are known to be calibrated; set by the
            caller.
    """

    def __init__(self, host: CausalLM, parameters: Iterable[nn.Parameter] | None = None):
        self._host = host
        self._given = None if parameters is None else list(parameters)
        self.walk()

    def walk(self) -> None:
        """Walk the model and list its parts."""
        model = self._host.model
        self._modules = list(used_modules(model))
        self._adapters = AdapterLayers(model)
        self.parameters: list[nn.Parameter] = []
        if self._given is not None:
            self.parameters = self._given
        elif self._host.has_adapter():
            self.parameters = trained_parameters(model)
        self.calibrated = False

    def update(self) -> None:
        """List the parts again if adapters were switched, enabled or disabled."""
        if self._adapters.were_switched():
            self.walk()

    @property
    def merged(self) -> bool:
        """Whether an adapter is merged into the base, where it cannot learn."""
        layers = self._adapters.layers
        return any(isinstance(layer, BaseTunerLayer) and layer.merged for layer in layers)

    @property
    def frozen(self) -> bool:
        """Whether an adapter is in use, and nothing of it is trained."""
        if self.parameters:
            return False
        layers = [layer for layer in self._adapters.layers if isinstance(layer, BaseTunerLayer)]
        return any(layer.active_adapters and not layer.disable_adapters for layer in layers)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode within the context.

        Each module's own mode is restored afterwards.
        """
        training = [module for module in self._modules if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def calibrate_empty(model: nn.Module, input_ids: Tensor) -> None:
    """Calibrate empty memories on their first chunk, a LongTensor [B, N].

    Later tokens would leak into scores.
    """
    for name in uncalibrated_memories(model):
        calibrate(model, [input_ids], name, across_processes=False)
