"""LocasLayer: one FFN of the host with its memories.

Axes used throughout the tuner: B batch, T tokens, D hidden size, F host FFN width, R memory width. With A `[B, T, D]`
the FFN's input, after its norm, and tau a number per layer and memory (paper, sections "Two Variants" and "Output
Scaling Factor"):

    gated      output = FFN(A) + tau * Wdown (act(Wgate A) * (Wup A))
    two-layer  output = FFN(A) + tau * Wdown act(Wup A)

`act` is the host's own activation: only then is a merged memory exactly R more neurons of the host. A two-layer memory
beside a gated FFN (variant "mlp", an experiment) has ReLU and cannot be merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from .config import LocasConfig
from .ffn import HostFFN
from .initialization import STRATEGIES, Calibration, Rows, make_generator
from .norm_clip import clip_after_optimizer_steps, clip_norms_

if TYPE_CHECKING:
    from .stacking import MemoryStack


class ScaleDict(BufferDict):
    """The taus of a layer's memories: they follow the layer to another device, but stay float32 in any model."""

    def _apply(self, fn, recurse: bool = True):
        taus = dict(self.items())
        super()._apply(fn, recurse)
        for name, tau in taus.items():
            if self[name].dtype != tau.dtype:
                self[name] = tau.to(self[name].device)
        return self


class LocasLayer(nn.Module, BaseTunerLayer):
    """One FFN of the host with its memories, in the place of the module that it wraps.

    Args:
        base_layer: the FFN, or its down projection where the FFN's parts sit on the decoder layer.
        ffn: the description of that FFN.
        name: where the layer lies in the model.
        adapter_name: the first memory's name.
        config: the first memory's configuration.
        r: its width.
    """

    adapter_layer_names: tuple[str, ...] = ("locas_gate", "locas_up", "locas_down")
    other_param_names: tuple[str, ...] = ("locas_tau", "locas_config")

    def __init__(
        self, base_layer: nn.Module, ffn: HostFFN, name: str, adapter_name: str, config: LocasConfig, r: int
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.training = base_layer.training  # a new module starts in training mode; the first such forward calibrates
        self.ffn = ffn
        self.name = name
        self.in_features = self.out_features = ffn.hidden_size
        self.locas_gate = nn.ModuleDict()
        self.locas_up = nn.ModuleDict()
        self.locas_down = nn.ModuleDict()
        self.locas_tau = ScaleDict(persistent=True)
        self.locas_config: dict[str, LocasConfig] = {}
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.cast_input_dtype_enabled = True
        # While set, a forward is the backbone's alone and is counted there (explicit calibration).
        self.calibration: Calibration | None = None
        # The padding of the forward under way, for calibration: [B, T], nonzero where a token counts.
        self.token_mask: torch.Tensor | None = None
        # While set, each forward with gradients shows A and the layer's output to it (writing slots).
        self.recorder: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        # While set, each row of the batch has a memory of its own there, whatever is active (`stacking.py`).
        self.stack: MemoryStack | None = None
        self._filled: set[str] = set()  # memories known to have rows, so that training need not look again
        self._ffn_input: torch.Tensor | None = None
        self._inlet_hook = ffn.inlet.register_forward_pre_hook(self._keep_ffn_input) if ffn.is_flat else None
        self.update_layer(adapter_name, config, r)
        clip_after_optimizer_steps(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        clip_after_optimizer_steps(self)  # a copied or unpickled layer is trained too

    # ----------------------------------------------------------------- memories

    def update_layer(self, adapter_name: str, config: LocasConfig, r: int) -> None:
        """Adds a memory of width `r` to this FFN; it changes no output until it has learned."""
        d = self.ffn.hidden_size
        self.locas_config[adapter_name] = config
        if self.ffn.gated and config.variant != "mlp":
            self.locas_gate[adapter_name] = nn.Linear(d, r, bias=False)
        self.locas_up[adapter_name] = nn.Linear(d, r, bias=False)
        self.locas_down[adapter_name] = nn.Linear(r, d, bias=False)
        # From the base as it is now: a later merge must not move it.
        self.locas_tau[adapter_name] = torch.tensor(self.ffn.mean_down_norm() / r, dtype=torch.float32)
        self._reset(adapter_name)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def _reset(self, adapter_name: str) -> None:
        config = self.locas_config[adapter_name]
        weights = self._weights(adapter_name)
        self._filled.discard(adapter_name)
        if weights[-1].is_meta:  # low_cpu_mem_usage: the rows come from a file
            return
        for weight in weights:
            nn.init.zeros_(weight) if config.init_weights else nn.init.normal_(weight)
        strategy = STRATEGIES[config.init_strategy]
        if config.init_weights and not strategy.needs_calibration and not strategy.written:
            self.fill(adapter_name, None)

    def _weights(self, adapter_name: str) -> list[nn.Parameter]:
        """The memory's gate and up `[R, D]` (no gate in a two-layer memory) and down `[D, R]`."""
        return [module.weight for module in self.projections(adapter_name)]

    def projections(self, adapter_name: str) -> list[nn.Linear]:
        """A memory's gate (where it has one), up and down."""
        dicts = (self.locas_gate, self.locas_up, self.locas_down)
        return [modules[adapter_name] for modules in dicts if adapter_name in modules]

    def is_empty(self, adapter_name: str) -> bool:
        """Whether a memory still waits for its calibration, or its first slot: all its up rows are zero."""
        if adapter_name in self._filled:
            return False
        weight = self.locas_up[adapter_name].weight
        if not weight.is_meta and bool(weight.any()):
            self._filled.add(adapter_name)
            return False
        return True

    def is_written(self, adapter_name: str) -> bool:
        """Whether a memory's slots are written while reading, so that an empty one needs no calibration."""
        return STRATEGIES[self.locas_config[adapter_name].init_strategy].written

    def has_learned(self, adapter_name: str) -> bool:
        """Whether a memory's value matrix has left zero."""
        return bool(self.locas_down[adapter_name].weight.any())

    def start_calibration(self, adapter_name: str) -> Calibration:
        """The empty statistics that a memory's strategy needs."""
        config = self.locas_config[adapter_name]
        r = self.locas_up[adapter_name].out_features
        samples = r if STRATEGIES[config.init_strategy].samples_inputs else 0
        return Calibration(samples=samples, seed=config.seed)

    def make_rows(self, adapter_name: str, calibration: Calibration | None) -> Rows:
        """Makes a memory's rows by its strategy, and changes nothing.

        Raises:
            ValueError: the calibration saw no tokens, or values that are not finite.
        """
        config = self.locas_config[adapter_name]
        generator = make_generator(config.seed, self.name)
        r = self.locas_up[adapter_name].out_features
        return STRATEGIES[config.init_strategy].make(self.ffn, calibration, r, generator)

    def fill(self, adapter_name: str, calibration: Calibration | None) -> None:
        """Gives an empty memory its gate and up rows; see `make_rows` for what it raises."""
        self.load_rows(adapter_name, self.make_rows(adapter_name, calibration))

    @torch.no_grad()
    def load_rows(self, adapter_name: str, rows: Rows) -> None:
        """Writes unit rows into a memory, at `row_norm`, sets its values to zero, and notes which slots they clone."""
        config = self.locas_config[adapter_name]
        if rows.gate is not None and adapter_name in self.locas_gate:
            self.locas_gate[adapter_name].weight.copy_(rows.gate * config.row_norm)
        self.locas_up[adapter_name].weight.copy_(rows.up * config.row_norm)
        self.locas_down[adapter_name].weight.zero_()
        if rows.slots is not None:
            config.slots = {**(config.slots or {}), self.name: rows.slots.tolist()}
        self._filled.add(adapter_name)

    def clip_slot_norms(self, adapter_name: str) -> None:
        """Projects each slot's gate row, up row and down column into the ball of radius `max_slot_norm`, in place."""
        radius = self.locas_config[adapter_name].max_slot_norm
        if radius is None:
            return
        *rows, down = self._weights(adapter_name)
        for weight in rows:
            clip_norms_(weight, dim=1, max_norm=radius)
        clip_norms_(down, dim=0, max_norm=radius)

    def delete_adapter(self, adapter_name: str) -> None:
        self._filled.discard(adapter_name)
        super().delete_adapter(adapter_name)

    # ------------------------------------------------------------------ forward

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The FFN's output plus the active memories' outputs, `[B, T, D]` in the host's dtype.

        Args:
            hidden_states: what the wrapped module receives: A `[B, T, D]`, or M `[..., F]` where it is the down
                projection of a flat FFN.
            adapter_names: one memory's name (or "__base__") for each row of the batch.
        """
        adapter_names = kwargs.pop("adapter_names", None)
        ffn_input = self._take_ffn_input() if self.ffn.is_flat else hidden_states
        if getattr(self, "_is_replica", False):
            self._check_replica()
        if self.calibration is not None:
            return self._forward_counted(self.calibration, ffn_input, hidden_states, *args, **kwargs)
        if self.stack is not None:
            return self.stack.add_to(self.base_layer(hidden_states, *args, **kwargs), ffn_input)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(hidden_states, *args, **kwargs)
        if adapter_names is not None:
            return self._forward_mixed_batch(adapter_names, ffn_input, hidden_states, *args, **kwargs)
        if self.merged:
            return self.base_layer(hidden_states, *args, **kwargs)

        memories = [name for name in self.active_adapters if name in self.locas_up]
        waiting = [n for n in memories if self.training and not self.is_written(n) and self.is_empty(n)]
        if waiting:
            result = self._forward_and_fill(waiting, ffn_input, hidden_states, *args, **kwargs)
        else:
            result = self.base_layer(hidden_states, *args, **kwargs)
        for name in memories:
            result = result + self._recall(name, ffn_input).to(result.dtype)
        if self.recorder is not None and torch.is_grad_enabled():
            if not result.requires_grad:
                result = result.detach().requires_grad_()
            self.recorder(ffn_input, result)
        return result

    def _recall(self, adapter_name: str, ffn_input: torch.Tensor) -> torch.Tensor:
        """tau * Locas(A): a memory's output `[B, T, D]`, in the memory's dtype."""
        return self.locas_down[adapter_name](self.activate(adapter_name, ffn_input)) * self.scale(adapter_name)

    def activate(self, adapter_name: str, ffn_input: torch.Tensor) -> torch.Tensor:
        """M of a memory's slots, `[..., R]` in the memory's dtype, for A `[..., D]`."""
        up = self.locas_up[adapter_name]
        ffn_input = self._cast_input_dtype(ffn_input, up.weight.dtype)
        act = self.activation_of(adapter_name)
        if adapter_name in self.locas_gate:
            return act(self.locas_gate[adapter_name](ffn_input)) * up(ffn_input)
        return act(up(ffn_input))

    def activation_of(self, adapter_name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """A memory's activation: the host's, but ReLU for a two-layer memory beside a gated FFN."""
        return torch.relu if self.ffn.gated and adapter_name not in self.locas_gate else self.ffn.act

    def scale(self, adapter_name: str) -> torch.Tensor:
        """The factor on a memory's output, a float32 scalar: tau times the config's `scaling`."""
        return self.locas_tau[adapter_name] * self.locas_config[adapter_name].scaling

    def _forward_counted(self, calibration: Calibration, ffn_input: torch.Tensor, *args: Any, **kwargs: Any):
        with self.ffn.observing(lambda activation: calibration.update(ffn_input, activation, self.token_mask)):
            return self.base_layer(*args, **kwargs)

    def _forward_and_fill(self, waiting: list[str], ffn_input: torch.Tensor, *args: Any, **kwargs: Any):
        # The first training-mode forward: its values are zero, so it is the backbone's forward and can be counted.
        calibrations = {name: self.start_calibration(name) for name in waiting}

        def update(activation: torch.Tensor) -> None:
            for calibration in calibrations.values():
                calibration.update(ffn_input, activation, self.token_mask)

        with self.ffn.observing(update):
            result = self.base_layer(*args, **kwargs)
        for name, calibration in calibrations.items():
            self.fill(name, calibration)
        return result

    def _forward_mixed_batch(
        self, adapter_names: list[str], ffn_input: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.merged:
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )
        # A flat FFN (OPT) sees its batch as rows [B * T, D]: B is restored, so that a name stands for one of B.
        if len(ffn_input) % len(adapter_names) or (ffn_input.dim() > 2 and len(ffn_input) != len(adapter_names)):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(ffn_input)} respectively."
            )
        result = self.base_layer(*args, **kwargs)
        inputs = ffn_input.reshape(len(adapter_names), -1, ffn_input.shape[-1])
        outputs = result.reshape(len(adapter_names), -1, result.shape[-1]).clone()
        for name in dict.fromkeys(adapter_names):
            if name in self.locas_up:
                rows = [row for row, row_name in enumerate(adapter_names) if row_name == name]
                outputs[rows] += self._recall(name, inputs[rows]).to(outputs.dtype)
        return outputs.reshape(result.shape)

    def _check_replica(self) -> None:
        # torch.nn.DataParallel, which Trainer takes on several GPUs: what a replica writes is lost, and its hooks are
        # the original's.
        waiting = [n for n in self.active_adapters if n in self.locas_up and not self.is_written(n)]
        if self.training and any(self.is_empty(name) for name in waiting):
            raise ValueError(
                "a memory cannot calibrate itself under DataParallel: calibrate(model, batches) first, or train with "
                "DistributedDataParallel (torchrun)."
            )
        if self.ffn.is_flat:
            raise ValueError(
                f"{self.name} cannot run under DataParallel, since its FFN has no module of its own: train with "
                "DistributedDataParallel (torchrun), or on one device."
            )

    def _keep_ffn_input(self, module: nn.Module, args: tuple) -> None:
        self._ffn_input = args[0]

    def _take_ffn_input(self) -> torch.Tensor:
        ffn_input, self._ffn_input = self._ffn_input, None
        return ffn_input

    # ------------------------------------------------------------------- merging

    @property
    def base_width(self) -> int:
        """F without the merged memories."""
        return self.ffn.width - sum(self.locas_up[name].out_features for name in self.merged_adapters)

    @torch.no_grad()
    def neurons(self, adapter_name: str) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """A memory as neurons of the host: gate `[R, D]` or `None`, up `[R, D]`, down times its scale `[D, R]`."""
        *rows, down = self._weights(adapter_name)
        gate = rows[0] if adapter_name in self.locas_gate else None
        return gate, rows[-1], (down.float() * self.scale(adapter_name)).to(down.dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Makes memories R more neurons of the host FFN each; `unmerge` gives the base's weights back bit for bit.

        Args:
            safe_merge: checks the memory for values that are not finite first.
            adapter_names: which memories; `None` for the active ones.

        Raises:
            ValueError: a memory is empty or broken, or the host cannot be widened; the base is as it was.
        """
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.locas_up:
                continue
            self.check_mergeable(name)
            neurons = self.neurons(name)
            if safe_merge and not all(part.isfinite().all() for part in neurons if part is not None):
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            self.ffn.widen(*neurons)
            self.merged_adapters.append(name)

    def check_mergeable(self, adapter_name: str) -> None:
        """Raises a `ValueError` if a memory is empty, or its host cannot be widened."""
        if self.is_empty(adapter_name):
            raise ValueError(
                f"the memory '{adapter_name}' is empty: calibrate(model, batches) or train it before it is merged."
            )
        if self.ffn.gated and adapter_name not in self.locas_gate:
            raise ValueError(
                f"cannot merge '{adapter_name}' into {self.name}: a two-layer memory (variant 'mlp') is no part of a "
                "gated FFN; keep it as an adapter, or use variant='auto'."
            )
        obstacle = self.ffn.find_obstacle()
        if obstacle:
            raise ValueError(f"cannot merge into {self.name}: {obstacle}.")

    def unmerge(self, adapter_names: list[str] | None = None) -> None:
        """Cuts merged memories off the host FFN again.

        Args:
            adapter_names: which; `None` for all. Memories merged after one that is cut out stay merged.
        """
        for name in list(self.merged_adapters) if adapter_names is None else adapter_names:
            if name not in self.merged_adapters:
                continue
            place = self.merged_adapters.index(name)
            later = self.merged_adapters[place:]
            start = self.ffn.width - sum(self.locas_up[other].out_features for other in later)
            self.ffn.narrow(start, start + self.locas_up[name].out_features)
            self.merged_adapters.remove(name)

    def release(self) -> nn.Module:
        """Takes the layer's hook off the host and returns the wrapped module."""
        if self._inlet_hook is not None:
            self._inlet_hook.remove()
            self._inlet_hook = None
        return self.base_layer

    # ------------------------------------------------------------ PEFT's questions

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module):
        # An FFN has no weight of its own; its down projection knows device and dtype, quantised or not. Offloaded
        # weights are on the meta device between forwards; the memory stays where they are computed with.
        device, dtype = super()._get_base_layer_device_and_dtype(self.ffn.down)
        hook = getattr(self.ffn.down, "_hf_hook", None)
        if getattr(hook, "offload", False):
            device = torch.device(hook.execution_device)
        return device, dtype

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # PEFT moves the dictionaries that it finds in this tuple, to the base's dtype too: tau stays float32.
        tau = self.locas_tau[adapter_name]
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        weight = self.locas_up[adapter_name].weight
        self.locas_tau[adapter_name] = tau if weight.is_meta else tau.to(weight.device)

    def __getattr__(self, name: str) -> Any:
        # Hosts read attributes off their FFN (T5 reads `wo.weight`): what the layer lacks, the wrapped module has.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(self.base_layer, name)

    def __repr__(self) -> str:
        return "locas." + super().__repr__()


def list_layers(model: nn.Module) -> list[LocasLayer]:
    """The FFNs of a model that memories lie beside, from the lowest on; none in a model without memories."""
    return [module for module in model.modules() if isinstance(module, LocasLayer)]


def list_active_memories(model: nn.Module) -> list[str]:
    """The names of a model's active memories, in the order in which its layers have them."""
    return list(
        dict.fromkeys(name for layer in list_layers(model) for name in layer.active_adapters if name in layer.locas_up)
    )
