"""LocasLayer: one FFN of the host with its memories.

Axes used throughout the tuner: B batch, T tokens, D hidden size, F host FFN width, R memory width. With A `[B, T, D]`
the FFN's input, after its norm, and k and tau one number each per layer and memory (paper, sections "Two Variants" and
"Output Scaling Factor"):

    gated      output = FFN(A) + tau * Wdown M,  M = act(k Wgate A) * (k Wup A)
    two-layer  output = FFN(A) + tau * Wdown M,  M = act(k Wup A)

`scale.py` measures k and tau. In the paper k is 1. A memory has the host's structure and its activation `act`: only
then is a merged memory exactly R more neurons of the host.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from .config import LocasConfig
from .ffn import HostFFN, SumActivity
from .finding import AnyFFN
from .initialization import STRATEGIES, Calibration, Rows, Statistics, make_generator
from .mixed_batch import add_by_row, check_adapter_names
from .mixture import HostMixture
from .norm_clip import clip_after_optimizer_steps
from .scale import SAMPLED_TOKENS, ScaleDict, measure_input_scale, measure_output_scale


class LocasLayer(nn.Module, BaseTunerLayer):
    """One FFN of the host with its memories. It replaces the module `base_layer`, whose name in the model is `name`.

    That module is the FFN, or the down projection of a flat FFN, whose parts are attributes of the decoder layer.
    """

    adapter_layer_names: tuple[str, ...] = ("locas_gate", "locas_up", "locas_down")
    other_param_names: tuple[str, ...] = (
        "locas_input_scale",
        "locas_tau",
        "locas_config",
        "locas_multiplier",
    )

    def __init__(
        self,
        base_layer: nn.Module,
        ffn: AnyFFN,
        name: str,
        adapter_name: str,
        config: LocasConfig,
        r: int,
    ):
        super().__init__()
        self.base_layer = base_layer
        self.training = (
            base_layer.training
        )  # a new module starts in training mode, where a forward calibrates
        self.ffn, self.name = ffn, name
        self.in_features = self.out_features = ffn.hidden_size
        self.locas_gate, self.locas_up, self.locas_down = (
            nn.ModuleDict(),
            nn.ModuleDict(),
            nn.ModuleDict(),
        )
        self.locas_input_scale = ScaleDict(persistent=True)  # k; 0 until it is measured
        self.locas_tau = ScaleDict(persistent=True)
        self.locas_config: dict[str, LocasConfig] = {}
        self.locas_multiplier: dict[
            str, float
        ] = {}  # factors on the outputs, inside the context of `rescale`
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.cast_input_dtype_enabled = True
        # While set, forwards run the host's FFN alone and collect its activations here (explicit calibration).
        self.calibration: Calibration | None = None
        self.token_mask: Tensor | None = (
            None  # of the current forward [B, T], nonzero where a token is no padding
        )
        # While set, called with A and the layer's output in each forward with gradients (`SlotWriter`).
        self.recorder: Callable[[Tensor, Tensor], None] | None = None
        self._ready: set[str] = set()  # memories known to need no calibration
        self._calibrated: set[str] = set()  # memories that calibrated themselves in a forward
        self._ffn_input: Tensor | None = None
        self._inlet_hook = None
        if isinstance(ffn, HostFFN) and ffn.is_flat:
            self._inlet_hook = ffn.inlet.register_forward_pre_hook(self._keep_ffn_input)
        self.update_layer(adapter_name, config, r)
        clip_after_optimizer_steps(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.locas_multiplier = {}  # a copy is outside the `rescale` context of the original
        clip_after_optimizer_steps(self)

    # ----------------------------------------------------------------- memories

    def update_layer(self, adapter_name: str, config: LocasConfig, r: int) -> None:
        """Add a memory of width `r` to this FFN. The output does not change until the memory is trained."""
        d = self.ffn.hidden_size
        self.locas_config[adapter_name] = config
        if self.ffn.gated:
            self.locas_gate[adapter_name] = nn.Linear(d, r, bias=False)
        self.locas_up[adapter_name] = nn.Linear(d, r, bias=False)
        self.locas_down[adapter_name] = nn.Linear(r, d, bias=False)
        unmeasured = config.output_scale == "measured" and config.init_weights
        self.locas_input_scale[adapter_name] = torch.tensor(
            0.0 if unmeasured else 1.0, dtype=torch.float32
        )
        # The paper's tau, from the base as it is now: merging memories later would change it.
        self.locas_tau[adapter_name] = torch.tensor(
            self.ffn.mean_down_norm() / r, dtype=torch.float32
        )
        weights = [module.weight for module in self.projections(adapter_name)]
        if not weights[-1].is_meta:  # low_cpu_mem_usage: the weights are loaded from a file
            for weight in weights:
                nn.init.zeros_(weight) if config.init_weights else nn.init.normal_(weight)
            if config.init_weights and not STRATEGIES[config.strategy].needs_calibration:
                self.initialize(adapter_name, self.make_rows(adapter_name))
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def projections(self, adapter_name: str) -> list[nn.Linear]:
        """Return a memory's gate (if the host is gated) and up, weights `[R, D]`, and down, weight `[D, R]`."""
        dicts = (self.locas_gate, self.locas_up, self.locas_down)
        return [modules[adapter_name] for modules in dicts if adapter_name in modules]

    def is_empty(self, adapter_name: str) -> bool:
        """Return whether a memory has no rows: all its up rows are zero."""
        weight = self.locas_up[adapter_name].weight
        return weight.is_meta or not weight.any()

    def is_written(self, adapter_name: str) -> bool:
        """Return whether a memory's slots are written in closed form (`SlotWriter`) instead of calibrated."""
        return STRATEGIES[self.locas_config[adapter_name].strategy].written

    def has_learned(self, adapter_name: str) -> bool:
        """Return whether a memory's value matrix is no longer zero."""
        return bool(self.locas_down[adapter_name].weight.any())

    def needs_calibration(self, adapter_name: str) -> bool:
        """Return whether a memory waits for its rows or for its scale."""
        if adapter_name not in self._ready:
            if not self.locas_input_scale[adapter_name].any():
                return True
            if self.is_empty(adapter_name) and not self.is_written(adapter_name):
                return True
            self._ready.add(adapter_name)
        return False

    def start_calibration(
        self, adapter_name: str, r: int | None = None, across_processes: bool = True
    ) -> Calibration:
        """Return a calibration that has seen nothing yet, for a memory of its own width or of width `r`."""
        samples = max(SAMPLED_TOKENS, r or self.locas_up[adapter_name].out_features)
        return Calibration(samples, self.locas_config[adapter_name].seed, across_processes)

    def make_rows(self, adapter_name: str, statistics: Statistics | None = None) -> Rows:
        """Return a memory's initial rows by its strategy. The memory does not change."""
        config = self.locas_config[adapter_name]
        generator = make_generator(config.seed, self.name)
        r = self.locas_up[adapter_name].out_features
        return STRATEGIES[config.strategy].make(self.ffn, statistics, r, generator)

    @torch.no_grad()
    def initialize(
        self, adapter_name: str, rows: Rows | None, statistics: Statistics | None = None
    ) -> None:
        """Fill an empty memory: load its rows, zero its values, and measure its scale.

        Without rows, rows and values stay as they are. The scale is measured on the statistics; without, it stays.
        """
        config, up = self.locas_config[adapter_name], self.locas_up[adapter_name].weight
        if rows is not None:
            if adapter_name in self.locas_gate:
                self.locas_gate[adapter_name].weight.copy_(rows.gate)
            up.copy_(rows.up)
            self.locas_down[adapter_name].weight.zero_()
            if rows.slots is not None:
                slots = config.get_record("slots") or {}
                config.set_record("slots", {**slots, self.name: rows.slots.tolist()})
        if statistics is not None and config.output_scale == "measured":
            tau = self.locas_tau[adapter_name]
            self.locas_input_scale[adapter_name].copy_(measure_input_scale(statistics.inputs))
            activations = self.activate([adapter_name], statistics.inputs)
            tau.copy_(
                measure_output_scale(
                    activations, statistics.output_norms, self.ffn.hidden_size, otherwise=tau
                )
            )
        if rows is not None and self.is_written(adapter_name):
            up.zero_()

    def delete_adapter(self, adapter_name: str) -> None:
        self._ready.discard(adapter_name)
        self._calibrated.discard(adapter_name)
        super().delete_adapter(adapter_name)

    # ------------------------------------------------------------------ forward

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the FFN's output plus the active memories' outputs, `[B, T, D]` in the host's dtype.

        `hidden_states` is the wrapped module's input: A `[B, T, D]`, or M `[..., F]` of a flat FFN. The keyword
        `adapter_names` has one memory's name, or "__base__", for each row of the batch.
        """
        adapter_names = kwargs.pop("adapter_names", None)
        ffn_input, self._ffn_input = self._ffn_input if self.ffn.is_flat else hidden_states, None
        if getattr(self, "_is_replica", False):
            self._check_replica()
        if self.calibration is not None:
            return self._forward_observed(
                [self.calibration], ffn_input, hidden_states, *args, **kwargs
            )
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(hidden_states, *args, **kwargs)
        if adapter_names is not None:
            check_adapter_names(self, adapter_names, ffn_input)
            if len(set(adapter_names)) > 1:
                result = self.base_layer(hidden_states, *args, **kwargs)
                return add_by_row(self, adapter_names, ffn_input, result)
        elif self.merged:
            return self.base_layer(hidden_states, *args, **kwargs)

        memories = self._memories(
            self.active_adapters if adapter_names is None else adapter_names[:1]
        )
        # Trainers also generate, and score with a reference, in training mode: those forwards are no step.
        calibrating = torch.is_grad_enabled() and (self.training or self.recorder is not None)
        waiting = [name for name in memories if calibrating and self.needs_calibration(name)]
        if waiting:
            result = self._forward_calibrating(waiting, ffn_input, hidden_states, *args, **kwargs)
        else:
            result = self.base_layer(hidden_states, *args, **kwargs)
        for name in memories:
            result = result + self.recall([name], ffn_input).to(result.dtype)
        if self.recorder is not None and torch.is_grad_enabled():
            if not result.requires_grad:
                result = result.detach().requires_grad_()
            self.recorder(ffn_input, result)
        return result

    def _memories(self, adapter_names: Iterable[str]) -> list[str]:
        return [name for name in adapter_names if name in self.locas_up]

    def recall(self, adapter_names: Sequence[str], ffn_input: Tensor) -> Tensor:
        """Return tau * Wdown M, the output of a memory, `[..., D]`, for A `[..., D]`.

        With the names of N memories of one shape, A is `[N, T, D]`, one entry for each.
        """
        down = self._projection(self.locas_down, adapter_names)
        return _scale(
            down(self.activate(adapter_names, ffn_input)),
            [self.scale(name) for name in adapter_names],
        )

    def activate(self, adapter_names: Sequence[str], ffn_input: Tensor) -> Tensor:
        """Return M, the activations of a memory's slots, `[..., R]` in its dtype. Arguments as for `recall`."""
        ffn_input = self._cast_input_dtype(ffn_input, self.locas_up[adapter_names[0]].weight.dtype)
        k = [self.locas_input_scale[name] for name in adapter_names]
        up = _scale(self._projection(self.locas_up, adapter_names)(ffn_input), k)
        if not self.ffn.gated:
            return self.ffn.act(up)
        return (
            self.ffn.act(_scale(self._projection(self.locas_gate, adapter_names)(ffn_input), k))
            * up
        )

    @staticmethod
    def _projection(
        modules: nn.ModuleDict, adapter_names: Sequence[str]
    ) -> Callable[[Tensor], Tensor]:
        """Return one memory's projection, or one batched product with the projections of several memories."""
        if len(adapter_names) == 1:
            return modules[adapter_names[0]]
        weights = torch.stack([modules[name].weight for name in adapter_names])  # [N, out, in]
        return lambda inputs: inputs @ weights.mT

    def scale(self, adapter_name: str) -> Tensor:
        """Return the factor on a memory's output, a float32 scalar: the saved scale times `rescale`'s multiplier."""
        return self.saved_scale(adapter_name) * self.locas_multiplier.get(adapter_name, 1.0)

    def saved_scale(self, adapter_name: str) -> Tensor:
        """Return tau times the config's `scaling`, a float32 scalar."""
        return self.locas_tau[adapter_name] * self.locas_config[adapter_name].scaling

    def _forward_observed(
        self, calibrations: Collection[Calibration], ffn_input: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:

        def update(sum_activity: SumActivity, output: Tensor) -> None:
            for calibration in calibrations:
                calibration.update(ffn_input, sum_activity, output, self.token_mask)

        with self.ffn.observing(update):
            return self.base_layer(*args, **kwargs)

    def _forward_calibrating(
        self, waiting: list[str], ffn_input: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the host's FFN and calibrate memories: their values are zero, so that no other pass is needed."""
        # Within a forward, FSDP and ZeRO-3 show gathered copies of the parameters: what is written there is lost.
        lost = [name for name in waiting if name in self._calibrated]
        if lost:
            problem = f"the memory '{lost[0]}' has lost the rows of its calibration, since the model is sharded"
            remedy = "calibrate(model, batches) before it is (before Trainer, accelerator.prepare or fully_shard)."
            raise ValueError(f"{problem}: {remedy}")
        calibrations = {name: self.start_calibration(name) for name in waiting}
        result = self._forward_observed(calibrations.values(), ffn_input, *args, **kwargs)
        for name, calibration in calibrations.items():
            statistics = calibration.finish()
            self.initialize(
                name, self.make_rows(name, statistics) if self.is_empty(name) else None, statistics
            )
            self._calibrated.add(name)
        return result

    def _check_replica(self) -> None:
        # Trainer wraps a model in torch.nn.DataParallel on several GPUs. What a replica writes is lost, and its hooks
        # are the original's.
        if self.training and any(map(self.needs_calibration, self._memories(self.active_adapters))):
            problem = "a memory cannot calibrate itself under DataParallel"
            remedy = (
                "calibrate(model, batches) first, or train with DistributedDataParallel (torchrun)."
            )
            raise ValueError(f"{problem}: {remedy}")
        if self.ffn.is_flat:
            what = (
                f"{self.name} cannot run under DataParallel, since its FFN has no module of its own"
            )
            raise ValueError(
                f"{what}: train with DistributedDataParallel (torchrun), or on one device."
            )

    def _keep_ffn_input(self, module: nn.Module, args: tuple) -> None:
        self._ffn_input = args[0]

    # ------------------------------------------------------------------- merging

    @property
    def base_width(self) -> int:
        """F without the merged memories."""
        widths = (self.locas_up[name].out_features for name in self.merged_adapters)
        return self.ffn.width - sum(map(self.ffn.merged_width, widths))

    @torch.no_grad()
    def neurons(self, adapter_name: str) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return a memory as neurons of the host: gate `[R, D]` or `None`, up `[R, D]`, down `[D, R]`, all scaled."""
        weights = [module.weight for module in self.projections(adapter_name)]
        return scale_neurons(
            weights, self.locas_input_scale[adapter_name], self.scale(adapter_name)
        )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Append memories (`None`: the active ones) to the host FFN as R neurons each, or raise a `ValueError`.

        `unmerge` restores the base's weights bit for bit. `safe_merge` refuses values that are not finite.
        """
        for name in self._memories(check_adapters_to_merge(self, adapter_names)):
            self.check_mergeable(name)
            neurons = self.neurons(name)
            if safe_merge and not all(
                part.isfinite().all() for part in neurons if part is not None
            ):
                raise ValueError(
                    f"NaNs detected in the merged weights. The adapter {name} seems to be broken"
                )
            self.ffn.widen(*neurons)
            self.merged_adapters.append(name)

    def check_mergeable(self, adapter_name: str) -> None:
        """Raise a `ValueError` if a memory is rescaled, or its host cannot be widened."""
        self.check_exportable(adapter_name)
        obstacle = self.ffn.find_obstacle()
        if obstacle:
            way_out = (
                ""
                if isinstance(self.ffn, HostMixture)
                else "; or use the memory without merging it"
            )
            raise ValueError(f"cannot merge into {self.name}: {obstacle}{way_out}.")

    def check_exportable(self, adapter_name: str) -> None:
        """Raise a `ValueError` if a memory is rescaled, or its host has another adapter."""
        if adapter_name in self.locas_multiplier:
            rule, got = (
                f"'{adapter_name}' cannot be merged inside rescale()",
                self.locas_multiplier[adapter_name],
            )
            remedy = "merge it outside, or set the config's scaling."
            raise ValueError(f"the memory {rule}, got the multiplier {got}: {remedy}")
        adapter = self.ffn.find_other_adapter()
        if adapter:
            raise ValueError(f"cannot merge into {self.name}: {adapter}.")

    def unmerge(self) -> None:
        """Remove all merged memories from the host FFN, whose weights are then those of before, bit for bit."""
        if self.merged_adapters:
            self.ffn.narrow(self.base_width)
            self.merged_adapters.clear()

    def release(self) -> nn.Module:
        """Remove the layer's hook from the host and return the wrapped module."""
        if self._inlet_hook is not None:
            self._inlet_hook.remove()
            self._inlet_hook = None
        return self.base_layer

    # ----------------------------------------------------------- PEFT's interface

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module):
        # An FFN has no weight of its own: take its down projection's, quantised or not, or its experts'. Offloaded
        # weights are on the meta device between forwards; the memory stays on the device that computes.
        if isinstance(self.ffn, HostMixture):
            module, weight = self.ffn.experts, self.ffn.experts.down_proj
            device, dtype = weight.device, weight.dtype
        else:
            module = self.ffn.down
            device, dtype = super()._get_base_layer_device_and_dtype(module)
        hook = getattr(module, "_hf_hook", None)
        if getattr(hook, "offload", False):
            device = torch.device(hook.execution_device)
        return device, dtype

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        # PEFT also casts what it moves to the base's dtype: the scales stay float32.
        scales = [
            (scales, scales[adapter_name]) for scales in (self.locas_input_scale, self.locas_tau)
        ]
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        weight = self.locas_up[adapter_name].weight
        for dictionary, scale in scales:
            dictionary[adapter_name] = scale if weight.is_meta else scale.to(weight.device)

    def __getattr__(self, name: str) -> Any:
        # Hosts read attributes of their FFN (T5 reads `wo.weight`): delegate what the layer lacks.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(self.base_layer, name)

    def __repr__(self) -> str:
        return "locas." + super().__repr__()


def scale_neurons(
    weights: Sequence[Tensor], k: Tensor | float, tau: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return a memory's weights, gate (if gated), up and down, times their scales; the gate is `None` without one."""
    scales = [*[k] * (len(weights) - 1), tau]
    *rows, down = (
        (w.float() * scale).to(w.dtype) for w, scale in zip(weights, scales, strict=True)
    )
    return rows[0] if len(rows) > 1 else None, rows[-1], down


def _scale(tensor: Tensor, scales: list[Tensor]) -> Tensor:
    """Multiply a tensor by one memory's scale, or `[N, T, ...]` by the scales of N memories; the dtype stays."""
    factor = scales[0] if len(scales) == 1 else torch.stack(scales).reshape(-1, 1, 1)
    return (tensor * factor).to(tensor.dtype)
