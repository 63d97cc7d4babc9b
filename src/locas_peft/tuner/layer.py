"""LocasLayer: one FFN of the host with its memories.

Axes used throughout the tuner: B batch, T tokens, D hidden size, F host FFN width, R memory width.
With A `[B, T, D]` the FFN's input, after its norm, and k and tau one number each per layer and
memory (paper, sections "Two Variants" and "Output Scaling Factor"):

    gated      output = FFN(A) + tau * Wdown M,  M = act(k Wgate A) * (k Wup A)
    two-layer  output = FFN(A) + tau * Wdown M,  M = act(k Wup A)

`scale.py` measures k and tau. In the paper k is 1. A memory has the host's structure and its
activation `act`: only then is a merged memory exactly R more neurons of the host. A memory may also
have gains, factors on the host's own neurons (`gains.py`).
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import LocasConfig
from .ffn import HostFFN, SumActivity
from .finding import AnyFFN
from .gains import Gain, combine_gains, multiply
from .initialization import (
    STRATEGIES,
    Calibration,
    Observer,
    Rows,
    Statistics,
    Strategy,
    clone_random,
    is_distributed,
    make_generator,
)
from .memory_file import make_calibrated_flag
from .mixed_batch import add_by_row, check_row_names
from .mixture import HostMixture
from .modules import evaluating, load_offloaded, unwrap
from .norm_clip import COLUMNS, ROWS, NormClip, clip_traced_, exceeds
from .scale import SAMPLED_TOKENS, ScaleDict, measure_input_scale, measure_output_scale


class LocasLayer(nn.Module, BaseTunerLayer):
    """One FFN of the host with its memories.

    Args:
        base_layer: the module that this one replaces. It is the FFN, or the down projection of a
            flat FFN, whose parts are attributes of the decoder layer.
        ffn: the FFN, with its parts by their roles.
        name: the name of `base_layer` in the model.
        adapter_name: the first memory's name.
        config: the first memory's configuration.
        r: the first memory's width R here.
    """

    adapter_layer_names: tuple[str, ...] = ("locas_gate", "locas_up", "locas_down", "locas_gain")
    other_param_names: tuple[str, ...] = (
        "locas_input_scale",
        "locas_tau",
        "locas_calibrated",
        "locas_config",
        "locas_multiplier",
        "keeps_float32",
    )

    def __init__(
        self,
        base_layer: nn.Module,
        ffn: AnyFFN,
        name: str,
        adapter_name: str,
        config: LocasConfig,
        r: int,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.training = base_layer.training
        self.ffn = ffn
        self.name = name
        self.in_features = ffn.hidden_size
        self.out_features = ffn.hidden_size
        self.locas_gate = nn.ModuleDict()
        self.locas_up = nn.ModuleDict()
        self.locas_down = nn.ModuleDict()
        # Of the memories that have gains.
        self.locas_gain = nn.ModuleDict()
        self.locas_input_scale = ScaleDict(persistent=True)
        self.locas_tau = ScaleDict(persistent=True)
        # 1 where rows and scale were made from a text or need none, else 0.
        self.locas_calibrated = ScaleDict(persistent=True)
        self.locas_config: dict[str, LocasConfig] = {}
        # Factors on the outputs, inside the context of `rescale`.
        self.locas_multiplier: dict[str, float] = {}
        # Whether a memory stays in float32 beside a half-precision base.
        self.keeps_float32: dict[str, bool] = {}
        self.merged_adapters: list[str] = []
        # The host's own down columns, while merged gains have changed them.
        self._own_columns: Tensor | None = None
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.cast_input_dtype_enabled = True
        # While set, forwards run the host's FFN alone and collect its activations here.
        self.observer: Observer | None = None
        # Of the current forward, [B, T], nonzero where a token is no padding.
        self.token_mask: Tensor | None = None
        # In a mixed batch, the memory of each row, or "__base__"; else None.
        self.row_names: list[str] | None = None
        # While set, called with A and the layer's output in each forward with gradients.
        self.recorder: Callable[[Tensor, Tensor], None] | None = None
        # While set, called with an active memory's name and M in each forward.
        self.slot_recorder: Callable[[str, Tensor], None] | None = None
        self._norm_clips: dict[str, NormClip] = {}
        # Whether a memory waits for its calibration: read once, or each forward would wait for the
        # accelerator.
        self._waits: dict[str, bool] = {}
        # The host slots that a memory's file names, until the file's tensors are loaded.
        self._slots_of_file: dict[str, list[int] | None] = {}
        # Copies of the rows that calibrations in a forward made, until the next forward.
        self._made_rows: dict[str, Tensor] = {}
        self._is_sharded = False
        # A of a flat FFN, by the thread that runs the forward.
        self._ffn_inputs: dict[int, Tensor] = {}
        # The same where a compiled graph keeps it: a graph would keep its first thread's key.
        self._traced_ffn_input: Tensor | None = None
        self._inlet_hook = None
        if isinstance(ffn, HostFFN) and ffn.is_flat:
            self._inlet_hook = ffn.inlet.register_forward_pre_hook(self._keep_ffn_input)
        self.update_layer(adapter_name, config, r)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        # A copy is outside the contexts of the original: `rescale`, and a mixed batch.
        self.locas_multiplier = {}
        self.row_names = None

    # ----------------------------------------------------------------- memories

    def update_layer(self, adapter_name: str, config: LocasConfig, r: int) -> None:
        """Add a memory of width `r` to this FFN. The output does not change until it is trained.

        Its rows are those of its strategy, or random clones of the host's slots until calibration.
        """
        d = self.ffn.hidden_size
        self.locas_config[adapter_name] = config
        if self.ffn.gated:
            self.locas_gate[adapter_name] = nn.Linear(d, r, bias=False)
        self.locas_up[adapter_name] = nn.Linear(d, r, bias=False)
        self.locas_down[adapter_name] = nn.Linear(r, d, bias=False)
        if config.gains:
            self.locas_gain[adapter_name] = self._make_gain()
        elif adapter_name in self.locas_gain:
            # Of a former memory of this name.
            del self.locas_gain[adapter_name]
        # The paper's tau, from the base as it is now: merging memories later would change it.
        mean_down_norm = self.ffn.mean_down_norm()
        needs_text = self._strategy(adapter_name).needs_calibration
        needs_text = needs_text or config.output_scale == "measured"
        is_calibrated = not (needs_text and config.init_weights)
        self.locas_input_scale[adapter_name] = torch.tensor(1.0)
        self.locas_tau[adapter_name] = torch.tensor(mean_down_norm / r, dtype=torch.float32)
        self.locas_calibrated[adapter_name] = torch.tensor(float(is_calibrated))
        self._forget(adapter_name)
        slots_of_file = self._find_slots_of_file(config)
        # Without weights yet, nothing is known of the rows.
        self.record_slots(adapter_name, None)
        # With low_cpu_mem_usage, the weights are loaded from a file.
        if not self.locas_up[adapter_name].weight.is_meta:
            self._reset_weights(adapter_name, has_host_weights=not math.isnan(mean_down_norm))
        self._slots_of_file[adapter_name] = slots_of_file
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @property
    def _dense(self) -> HostFFN:
        """The FFN of a layer with gains."""
        assert isinstance(self.ffn, HostFFN)
        return self.ffn

    def _make_gain(self) -> Gain:
        """Return gains that change nothing."""
        is_wrapped = unwrap(self.base_layer) is not self.base_layer
        is_mixture = isinstance(self.ffn, HostMixture)
        if is_mixture or is_wrapped or not self._dense.takes_input_alone():
            problem = f"{self.name} ({type(self.base_layer).__name__}) can have no gains"
            reason = "it is a mixture, takes more than its input, or is wrapped by torch"
            raise ValueError(f"{problem}: {reason}. Leave gains out.")
        return Gain(self.base_width)

    @torch.no_grad()
    def _reset_weights(self, adapter_name: str, has_host_weights: bool) -> None:
        config = self.locas_config[adapter_name]
        for weight in self.weights(adapter_name):
            if config.init_weights:
                weight.zero_()
            else:
                weight.normal_()
        if not config.init_weights and config.gains:
            self.locas_gain[adapter_name].weight.normal_(std=0.1)
        strategy = self._strategy(adapter_name)
        if not config.init_weights or strategy.written:
            return
        if not strategy.needs_calibration:
            self._set_rows(adapter_name, self.make_rows(adapter_name))
        elif has_host_weights:
            generator = make_generator(config.seed, self.name)
            r = self.locas_up[adapter_name].out_features
            # They keep a place until calibration: no record.
            self._load_rows(adapter_name, clone_random(self.ffn, None, r, generator))

    def _find_slots_of_file(self, config: LocasConfig) -> list[int] | None:
        """Return the host slots that a config from a file names; None for a config made here."""
        if config._expected_host is None:
            return None
        return (config.get_record("slots") or {}).get(self.name)

    def projections(self, adapter_name: str) -> list[nn.Linear]:
        """Return a memory's gate (if gated) and up, weights `[R, D]`, and down, weight `[D, R]`."""
        dicts = (self.locas_gate, self.locas_up, self.locas_down)
        return [modules[adapter_name] for modules in dicts if adapter_name in modules]

    def weights(self, adapter_name: str) -> list[nn.Parameter]:
        """Return the weights of `projections`."""
        return [module.weight for module in self.projections(adapter_name)]

    def parameters_of(self, adapter_name: str) -> list[nn.Parameter]:
        """Return all that is trained of a memory: `weights`, and its gains where it has them."""
        parameters = self.weights(adapter_name)
        if adapter_name in self.locas_gain:
            parameters.append(self.locas_gain[adapter_name].weight)
        return parameters

    @property
    def _gains(self) -> dict[str, Tensor]:
        """g `[F]` of each memory that has gains."""
        return {name: load_offloaded(gain) for name, gain in self.locas_gain.items()}

    def _strategy(self, adapter_name: str) -> Strategy:
        return STRATEGIES[self.locas_config[adapter_name].strategy]

    def has_adapter(self, adapter_name: str) -> bool:
        """Return whether the layer has a memory of that name."""
        return adapter_name in self.locas_up

    def is_written(self, adapter_name: str) -> bool:
        """Return whether a memory's slots are written in closed form (`SlotWriter`)."""
        return self._strategy(adapter_name).written

    def has_learned(self, adapter_name: str) -> bool:
        """Return whether a memory's values or gains are no longer zero."""
        gain = self._gains.get(adapter_name)
        has_gains = gain is not None and bool(gain.any())
        return has_gains or bool(self.locas_down[adapter_name].weight.any())

    def delete_adapter(self, adapter_name: str) -> None:
        self._forget(adapter_name)
        self._slots_of_file.pop(adapter_name, None)
        super().delete_adapter(adapter_name)

    def _forget(self, adapter_name: str) -> None:
        """Forget what is known of a memory's weights and flag, which are replaced."""
        self._norm_clips.pop(adapter_name, None)
        self._waits.pop(adapter_name, None)
        self._made_rows.pop(adapter_name, None)

    # -------------------------------------------------------------- calibration

    def needs_calibration(self, adapter_name: str) -> bool:
        """Return whether a memory waits for its rows or for its scale."""
        if adapter_name not in self._waits:
            flag = self.locas_calibrated[adapter_name]
            self._waits[adapter_name] = not (flag.is_meta or flag.any())
        return self._waits[adapter_name]

    def pass_on_forward(self) -> None:
        """Give a forward that was put on this layer to the host's FFN, for which it was meant.

        Kernels such as Liger's replace the forward of each FFN, which they take from the decoder
        layer; Trainer does this after the memory is added.
        """
        replaced = self.__dict__.get("forward")
        # Accelerate's hooks put a function there.
        if isinstance(replaced, MethodType) and replaced.__self__ is self:
            del self.__dict__["forward"]
            ffn = unwrap(self.base_layer)
            ffn.__dict__["forward"] = MethodType(replaced.__func__, ffn)

    def copy_scales(self, source: str, adapter_name: str) -> None:
        """Give a new memory the scales of another one of the same width; it stays uncalibrated."""
        if self.locas_up[source].out_features == self.locas_up[adapter_name].out_features:
            for scales in (self.locas_input_scale, self.locas_tau):
                scales[adapter_name] = scales[source].clone()

    def may_calibrate(self) -> bool:
        """Return whether the next forward with gradients may calibrate an active memory."""
        if self.disable_adapters:
            return False
        names = self._select_memories(self.active_adapters)
        return any(
            self._calibrates_itself(name) for name in names if name not in self.merged_adapters
        )

    def _calibrates_itself(self, adapter_name: str) -> bool:
        """Return whether a forward with gradients calibrates a memory: it waits and is trained.

        An exported graph reads no values, and changes none.
        """
        if torch.compiler.is_exporting() or not self.needs_calibration(adapter_name):
            return False
        return any(each.requires_grad for each in self.parameters_of(adapter_name))

    def start_calibration(
        self, adapter_name: str, r: int | None = None, across_processes: bool = True
    ) -> Calibration:
        """Return a calibration that has seen nothing yet, for a memory of its own width or `r`."""
        samples = max(SAMPLED_TOKENS, r or self.locas_up[adapter_name].out_features)
        return Calibration(samples, self.locas_config[adapter_name].seed, across_processes)

    def make_rows(self, adapter_name: str, statistics: Statistics | None = None) -> Rows:
        """Return a memory's initial rows by its strategy. The memory does not change."""
        generator = make_generator(self.locas_config[adapter_name].seed, self.name)
        r = self.locas_up[adapter_name].out_features
        return self._strategy(adapter_name).make(self.ffn, statistics, r, generator)

    @torch.no_grad()
    def initialize(self, adapter_name: str, rows: Rows | None, statistics: Statistics) -> None:
        """Complete a calibration: load the rows, zero the values, and measure the scale.

        Args:
            adapter_name: a memory whose values are zero.
            rows: its new rows; without, they stay.
            statistics: what the host does on the text that the scale is measured on.
        """
        if rows is not None:
            self._set_rows(adapter_name, rows)
        if self.locas_config[adapter_name].output_scale == "measured":
            tau = self.locas_tau[adapter_name]
            self.locas_input_scale[adapter_name].copy_(measure_input_scale(statistics.inputs))
            activations = self.activate([adapter_name], statistics.inputs)
            hidden_size = self.ffn.hidden_size
            tau.copy_(measure_output_scale(activations, statistics.output_norms, hidden_size, tau))
        if self.is_written(adapter_name):
            # The rows served to measure the scale; the slots stay free.
            self.locas_up[adapter_name].weight.zero_()
        # Autocast keeps the former rows, in half precision, until its context ends.
        torch.clear_autocast_cache()
        self.locas_calibrated[adapter_name].fill_(1.0)
        self._forget(adapter_name)

    def _set_rows(self, adapter_name: str, rows: Rows) -> None:
        """Load rows, set the values to zero, and record the host slots that were cloned."""
        self._load_rows(adapter_name, rows)
        self.record_slots(adapter_name, None if rows.slots is None else rows.slots.tolist())

    def _load_rows(self, adapter_name: str, rows: Rows) -> None:
        if adapter_name in self.locas_gate:
            self.locas_gate[adapter_name].weight.copy_(rows.gate)
        self.locas_up[adapter_name].weight.copy_(rows.up)
        self.locas_down[adapter_name].weight.zero_()

    def record_slots(self, adapter_name: str, slots: list[int] | None) -> None:
        """Record which host slots a memory's rows were cloned from; None where that is unknown."""
        self._slots_of_file.pop(adapter_name, None)
        config = self.locas_config[adapter_name]
        recorded = dict(config.get_record("slots") or {})
        recorded.pop(self.name, None)
        if slots is not None:
            recorded[self.name] = slots
        config.set_record("slots", recorded or None)

    def recorded_slots(self, adapter_name: str) -> list[int] | None:
        """Return which host slots a memory's rows were cloned from; None where that is unknown."""
        return (self.locas_config[adapter_name].get_record("slots") or {}).get(self.name)

    # Hooks of compiled modules are not called: what follows runs outside of compiled code.
    @torch.compiler.disable
    def _calibrate(self, names: list[str], ffn_input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's FFN and calibrate memories on this forward.

        Their values are zero, so that their outputs are zero before and after.
        """
        calibrations = {name: self.start_calibration(name) for name in names}
        observers: list[Observer] = [each.update for each in calibrations.values()]
        result = self._observe(observers, ffn_input, *args, **kwargs)
        for name, calibration in calibrations.items():
            statistics = calibration.finish()
            rows = None
            if self._strategy(name).needs_calibration:
                rows = self.make_rows(name, statistics)
            self.initialize(name, rows, statistics)
            if rows is not None and not self.is_written(name) and is_distributed():
                self._made_rows[name] = self.locas_up[name].weight.detach().clone()
        return result

    @torch.compiler.disable
    def _calibrate_apart(
        self, names: list[str], ffn_input: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Calibrate memories on a run of the host's FFN whose result is not used.

        Gradient checkpointing recomputes a forward when its memories are calibrated: this run keeps
        nothing for a backward pass, and draws no numbers for dropout.
        """
        with torch.no_grad(), evaluating(self.base_layer):
            self._calibrate(names, ffn_input, *args, **kwargs)

    @torch.compiler.disable
    def _observe(
        self, observers: list[Observer], ffn_input: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the host's FFN alone and show observers what it does."""

        def update(sum_activity: SumActivity, output: Tensor) -> None:
            for observer in observers:
                observer(ffn_input, sum_activity, output, self.token_mask)

        with torch.compiler.set_stance("force_eager"), self.ffn.observing(update):
            return self.base_layer(*args, **kwargs)

    def _list_waiting(self, names: list[str]) -> list[str]:
        """Return the memories that this forward calibrates."""
        if not torch.is_grad_enabled():
            return []
        waiting = []
        for name in names:
            if name in self._made_rows:
                self._check_made_rows(name)
            if not self._calibrates_itself(name):
                continue
            if self.has_learned(name):
                # Calibrating would lose what it has learned: the rows and the scale stay.
                self.locas_calibrated[name].fill_(1.0)
                self._waits[name] = False
            else:
                waiting.append(name)
        return waiting

    def _check_made_rows(self, adapter_name: str) -> None:
        # Within a forward, FSDP and ZeRO-3 show gathered copies of the parameters: what is written
        # there is lost. An optimizer's step cannot turn the rows away: values of zero give them
        # none.
        made = self._made_rows.pop(adapter_name)
        up = self.locas_up[adapter_name].weight.detach()
        if torch.cosine_similarity(up.float(), made.float(), dim=-1).mean() < 0.5:
            raise make_sharded_error(adapter_name)

    def _check_replica(self) -> None:
        # Trainer wraps a model in torch.nn.DataParallel on several GPUs. What a replica writes is
        # lost, and its hooks are the original's.
        if not getattr(self, "_is_replica", False):
            return
        if self._list_waiting(self._select_memories(self.active_adapters)):
            problem = "a memory cannot calibrate itself under DataParallel"
            remedy = "calibrate(model, batches) first, or train with DistributedDataParallel"
            raise ValueError(f"{problem}: {remedy} (torchrun).")
        remedy = "train with DistributedDataParallel (torchrun), or on one device."
        if any(name in self.locas_gain for name in self.active_adapters):
            raise ValueError(f"{self.name} cannot have gains under DataParallel: {remedy}")
        if self.ffn.is_flat:
            problem = f"{self.name} cannot run under DataParallel"
            reason = "since its FFN has no module of its own"
            raise ValueError(f"{problem}, {reason}: {remedy}")

    # ---------------------------------------------------------------- norm clip

    def clip_(self, adapter_name: str) -> None:
        """Project a memory's rows and columns into the ball of radius `max_slot_norm`, in place."""
        max_norm = self.locas_config[adapter_name].max_slot_norm
        if max_norm is not None:
            weights = self.weights(adapter_name)
            self._norm_clip(adapter_name).clip_(weights, _list_dims(weights), max_norm)

    def exceeds_clip(self, adapter_name: str) -> bool:
        """Return whether rows or columns are too long for the clip by more than rounding."""
        max_norm = self.locas_config[adapter_name].max_slot_norm
        if max_norm is None:
            return False
        weights = self.weights(adapter_name)
        pairs = zip(weights, _list_dims(weights), strict=True)
        return any(exceeds(weight, dim, max_norm) for weight, dim in pairs)

    def keep_weights(self, adapter_name: str) -> None:
        """Take a memory's weights as clipped ones, after they were written back in place."""
        self._forget(adapter_name)

    def clip_before_use(self, adapter_name: str) -> None:
        """Clip a memory before a forward, unless its weights cannot have changed since the last."""
        max_norm = self.locas_config[adapter_name].max_slot_norm
        if max_norm is None or torch.compiler.is_exporting():
            return
        weights = self.weights(adapter_name)
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() and weights[-1].requires_grad:
                clip_traced_(weights, _list_dims(weights), max_norm)
        elif self._norm_clip(adapter_name).is_due(weights):
            self.clip_(adapter_name)

    def prepare_shards(self) -> None:
        """Before a forward of the host: if the memories are sharded, clip the shards.

        In the forward itself there are gathered copies, in which writes are lost.
        """
        names = self._select_memories(self.active_adapters)
        self._is_sharded = any(_is_shard(self.locas_up[name].weight) for name in names)
        if not self._is_sharded or self.disable_adapters or self.merged:
            return
        waiting = self._list_waiting(names)
        if waiting:
            raise make_sharded_error(waiting[0])
        for name in names:
            self.clip_before_use(name)

    def _norm_clip(self, adapter_name: str) -> NormClip:
        return self._norm_clips.setdefault(adapter_name, NormClip())

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        # What is saved is clipped; the projections are saved after the layer's own tensors.
        for name in self.locas_config:
            # DeepSpeed's ZeRO-3 leaves flat parts of the parameters, which are not what is saved.
            if all(weight.dim() == 2 for weight in self.weights(name)):
                self.clip_(name)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in self.locas_config:
            up = state_dict.get(f"{prefix}locas_up.{name}.weight")
            if up is None:
                continue
            self._forget(name)
            # Only the first file that is loaded is the one that the config came from.
            self.record_slots(name, self._slots_of_file.get(name))
            flag = f"{prefix}locas_calibrated.{name}"
            input_scale = state_dict.get(f"{prefix}locas_input_scale.{name}")
            if flag not in state_dict and input_scale is not None:
                state_dict[flag] = make_calibrated_flag(up, input_scale)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # ------------------------------------------------------------------ forward

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the FFN's output plus the active memories' outputs, in the host's dtype.

        Args:
            hidden_states: the wrapped module's input: A `[B, T, D]`, or M `[..., F]` of a flat FFN.
            args, kwargs: the wrapped module's other arguments.

        Returns:
            `[B, T, D]`, or `[..., D]` of a flat FFN.
        """
        ffn_input = self._take_ffn_input() if self.ffn.is_flat else hidden_states
        if self.observer is not None:
            return self._observe([self.observer], ffn_input, hidden_states, *args, **kwargs)
        row_names = self.row_names
        memories = self._choose_memories(row_names, ffn_input)
        if not memories:
            return self.base_layer(hidden_states, *args, **kwargs)
        if row_names is not None and len(set(row_names)) == 1:
            row_names = None
        result = self._run_host(memories, row_names, ffn_input, hidden_states, *args, **kwargs)
        if not self._is_sharded:
            for name in memories:
                self.clip_before_use(name)
        if row_names is not None:
            return add_by_row(self, row_names, ffn_input, result)
        for name in memories:
            result = self._add_recalled(name, ffn_input, result)
        if self.recorder is not None and torch.is_grad_enabled():
            if not result.requires_grad:
                result = result.detach().requires_grad_()
            self.recorder(ffn_input, result)
        return result

    def _run_host(
        self,
        memories: list[str],
        row_names: list[str] | None,
        ffn_input: Tensor,
        hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the output of the host's FFN, and calibrate the memories that wait for it."""
        # Merged memories are no slots of the host, which calibration would take them for.
        waiting = [] if row_names or self.merged else self._list_waiting(memories)
        factors = self._find_factors(memories, row_names)
        if factors is None and waiting:
            return self._calibrate(waiting, ffn_input, hidden_states, *args, **kwargs)
        if factors is None:
            return self.base_layer(hidden_states, *args, **kwargs)
        if waiting:
            self._calibrate_apart(waiting, ffn_input, hidden_states, *args, **kwargs)
        return self._run_scaled(factors, hidden_states, *args, **kwargs)

    def _find_factors(self, memories: list[str], row_names: list[str] | None) -> Tensor | None:
        """Return the factors on the host's neurons, float32; None where no memory has gains.

        They are `[F]`, or `[N, F]` for the N names of a mixed batch.
        """
        if not any(name in self.locas_gain for name in memories):
            return None
        gains = self._gains
        if row_names is None:
            return combine_gains(gains, self.locas_multiplier, memories)
        by_name = {}
        for name in dict.fromkeys(row_names):
            by_name[name] = combine_gains(gains, self.locas_multiplier, [name])
        return torch.stack([by_name[name] for name in row_names])

    def _run_scaled(
        self, factors: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the host FFN's output with factors on its own neurons."""
        # Memories that are merged have neurons there too.
        added = self.ffn.width - factors.shape[-1]
        factors = nn.functional.pad(factors, (0, added), value=1.0)
        if self.ffn.is_flat:
            return self.base_layer(multiply(hidden_states, factors), *args, **kwargs)
        scale = partial(multiply, factors=factors)
        return self._dense.run_scaled(scale, hidden_states, *args, **kwargs)

    def _choose_memories(self, row_names: list[str] | None, ffn_input: Tensor) -> list[str]:
        """Return the memories that take part in a forward, each once."""
        self._check_replica()
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return []
        if row_names is not None:
            check_row_names(self, row_names, ffn_input)
            return self._select_memories(dict.fromkeys(row_names))
        active = self._select_memories(self.active_adapters)
        # Those that are merged are in the host's FFN.
        return [name for name in active if name not in self.merged_adapters]

    def _select_memories(self, adapter_names: Iterable[str]) -> list[str]:
        return [name for name in adapter_names if name in self.locas_up]

    def recall(self, adapter_names: Sequence[str], ffn_input: Tensor) -> Tensor:
        """Return tau * Wdown M, the output of a memory, `[..., D]`, for A `[..., D]`.

        With the names of N memories of one shape, A is `[N, T, D]`, one entry for each.
        """
        down = self._stack_weights(self.locas_down, adapter_names)
        activations = self.activate(adapter_names, ffn_input)
        return _multiply(self._scale_slots(adapter_names, activations), down)

    def _add_recalled(self, adapter_name: str, ffn_input: Tensor, result: Tensor) -> Tensor:
        """Return the FFN's output `[..., D]` plus a memory's, in the former's dtype."""
        activations = self.activate([adapter_name], ffn_input)
        if self.slot_recorder is not None:
            self.slot_recorder(adapter_name, activations)
        scaled = self._scale_slots([adapter_name], activations)
        down = load_offloaded(self.locas_down[adapter_name])
        if scaled.dtype != result.dtype:
            return result + _multiply(scaled, down).to(result.dtype)
        # One kernel for the product and the sum.
        added = torch.addmm(result.flatten(0, -2), scaled.flatten(0, -2), down.mT)
        return added.view(result.shape)

    def _scale_slots(self, adapter_names: Sequence[str], activations: Tensor) -> Tensor:
        """Return tau M `[..., R]`: R numbers a token are fewer to scale than the output's D."""
        return _scale(activations, [self.scale(name) for name in adapter_names])

    def activate(self, adapter_names: Sequence[str], ffn_input: Tensor) -> Tensor:
        """Return M, the activations of a memory's slots, `[..., R]` in its dtype.

        The arguments are those of `recall`.
        """
        dtype = self.locas_up[adapter_names[0]].weight.dtype
        ffn_input = self._cast_input_dtype(ffn_input, dtype)
        k = [load_offloaded(self.locas_input_scale, name) for name in adapter_names]
        rows = self._stack_weights(self.locas_up, adapter_names)
        if not self.ffn.gated:
            return self.ffn.act(_scale(_multiply(ffn_input, rows), k))
        gate_rows = self._stack_weights(self.locas_gate, adapter_names)
        # One product for both. A copy of the rows takes less than a second product.
        rows = torch.cat([gate_rows, rows], dim=-2)
        gate, up = _scale(_multiply(ffn_input, rows), k).chunk(2, dim=-1)
        return self.ffn.act(gate) * up

    @staticmethod
    def _stack_weights(modules: nn.ModuleDict, adapter_names: Sequence[str]) -> Tensor:
        """Return a memory's weight `[out, in]`, or those of several, `[N, out, in]`."""
        if len(adapter_names) == 1:
            return load_offloaded(modules[adapter_names[0]])
        return torch.stack([load_offloaded(modules[name]) for name in adapter_names])

    def scale(self, adapter_name: str) -> Tensor:
        """Return the factor on a memory's output, float32: `saved_scale` times the multiplier."""
        scale = self.saved_scale(adapter_name)
        multiplier = self.locas_multiplier.get(adapter_name)
        return scale if multiplier is None else scale * multiplier

    def saved_scale(self, adapter_name: str) -> Tensor:
        """Return tau times the config's `scaling`, a float32 scalar."""
        tau = load_offloaded(self.locas_tau, adapter_name)
        scaling = self.locas_config[adapter_name].scaling
        # On a GPU a product with 1 takes as long as any other kernel.
        return tau if scaling == 1.0 else tau * scaling

    def _take_ffn_input(self) -> Tensor:
        """Return A of a flat FFN, which its first projection was given in this forward."""
        ffn_input = self._traced_ffn_input
        self._traced_ffn_input = None
        if ffn_input is None:
            ffn_input = self._take_from_thread()
        is_used = not self.disable_adapters and bool(self.locas_up)
        if ffn_input is None and is_used:
            self._check_replica()
            parts = self.ffn.parts
            assert parts is not None
            problem = f"{self.name} was run without {parts.inlet} before it"
            remedy = "wrap the decoder layer in activation checkpointing"
            raise ValueError(f"{problem}: {remedy}, in place of {parts.down} alone.")
        return ffn_input

    def _keep_ffn_input(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            self._traced_ffn_input = args[0]
        else:
            self._ffn_inputs[threading.get_ident()] = args[0]

    # A layer that is compiled without its first projection has a graph break here.
    @torch.compiler.disable
    def _take_from_thread(self) -> Tensor | None:
        return self._ffn_inputs.pop(threading.get_ident(), None)

    # ------------------------------------------------------------------- merging

    @property
    def base_width(self) -> int:
        """F without the merged memories."""
        widths = (self.locas_up[name].out_features for name in self.merged_adapters)
        return self.ffn.width - sum(map(self.ffn.merged_width, widths))

    @torch.no_grad()
    def neurons(self, adapter_name: str) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return a memory as neurons of the host, clipped and scaled.

        Returns:
            gate `[R, D]`, or `None` for a two-layer memory; up `[R, D]`; down `[D, R]`.
        """
        self.clip_(adapter_name)
        k = self.locas_input_scale[adapter_name]
        return scale_neurons(self.weights(adapter_name), k, self.scale(adapter_name))

    # A base that is merged within inference mode can be trained afterwards.
    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Append memories to the host's FFN as R neurons each, and multiply by their gains.

        `unmerge` restores the host's bits.

        Args:
            safe_merge: whether to refuse values that are not finite in the host's dtype.
            adapter_names: the memories; `None` for the active ones.

        Raises:
            ValueError: where a memory cannot be merged (`check_mergeable`), or is not finite.
        """
        for name in self._select_memories(check_adapters_to_merge(self, adapter_names)):
            self.check_mergeable(name)
            neurons = self.ffn.fit_neurons(*self.neurons(name))
            own, columns = self._scale_columns([*self.merged_adapters, name])
            checked = [*neurons, columns]
            finite = all(part is None or part.isfinite().all() for part in checked)
            if safe_merge and not finite:
                problem = "NaNs detected in the merged weights."
                raise ValueError(f"{problem} The adapter {name} seems to be broken")
            self.ffn.widen(*neurons)
            self.merged_adapters.append(name)
            if columns is not None:
                self._own_columns = own
                self._dense.replace_columns(columns)

    def own_down_weight(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return the host's down weight before gains were merged, by its own; else nothing."""
        if self._own_columns is None:
            return {}
        own = self._dense.as_stored(self._own_columns)
        return {self._dense.down.weight: nn.Parameter(own, requires_grad=False)}

    def _scale_columns(self, adapter_names: list[str]) -> tuple[Tensor | None, Tensor | None]:
        """Return the host's own down columns, and these times the gains of memories.

        Both are None where no memory has gains.
        """
        factors = self._find_factors(adapter_names, None)
        if factors is None:
            return None, None
        own = self._own_columns
        if own is None:
            own = self._dense.copy_columns(self.base_width)
        weight = self._dense.down.weight
        return own, (own.to(weight.device) * factors).to(weight.dtype)

    def check_mergeable(self, adapter_name: str) -> None:
        """Raise a `ValueError` if a memory is rescaled, or its host cannot be widened."""
        self.check_exportable(adapter_name)
        obstacle = self.ffn.find_obstacle()
        if obstacle:
            way_out = "; or use the memory without merging it"
            if isinstance(self.ffn, HostMixture):
                way_out = ""
            raise ValueError(f"cannot merge into {self.name}: {obstacle}{way_out}.")

    def check_exportable(self, adapter_name: str) -> None:
        """Raise a `ValueError` if a memory is rescaled, or its host has another adapter."""
        if adapter_name in self.locas_multiplier:
            problem = f"the memory '{adapter_name}' cannot be merged inside rescale()"
            got = f"got the multiplier {self.locas_multiplier[adapter_name]}"
            raise ValueError(f"{problem}, {got}: merge it outside, or set the config's scaling.")
        adapter = self.ffn.find_other_adapter()
        if adapter:
            raise ValueError(f"cannot merge into {self.name}: {adapter}.")

    @torch.inference_mode(False)
    def unmerge(self) -> None:
        """Remove all merged memories from the host's FFN, which is then as before, bit for bit."""
        if self.merged_adapters:
            self.ffn.narrow(self.base_width)
            self.merged_adapters.clear()
        if self._own_columns is not None:
            self._dense.replace_columns(self._own_columns)
            self._own_columns = None

    def release(self) -> nn.Module:
        """Remove the layer's hook from the host and return the wrapped module."""
        if self._inlet_hook is not None:
            self._inlet_hook.remove()
            self._inlet_hook = None
        return self.base_layer

    # ----------------------------------------------------------- PEFT's interface

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple:
        # An FFN has no weight of its own: take its down projection's, quantised or not, or its
        # experts'. Offloaded weights are on the meta device between forwards; the memory stays on
        # the device that computes.
        if isinstance(self.ffn, HostMixture):
            module = self.ffn.experts
            device = module.down_proj.device
            dtype = module.down_proj.dtype
        else:
            module = self.ffn.down
            device, dtype = super()._get_base_layer_device_and_dtype(module)
        hook = getattr(module, "_hf_hook", None)
        if hook is not None and getattr(hook, "offload", False):
            device = torch.device(hook.execution_device)
        return device, dtype

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        # PEFT also casts what it moves to the base's dtype: the scales stay float32. So do weights
        # that were loaded with low_cpu_mem_usage, if PEFT would cast them back after this.
        dicts = (self.locas_input_scale, self.locas_tau, self.locas_calibrated)
        scales = [scales[adapter_name] for scales in dicts]
        former = [parameter.data for parameter in self.parameters_of(adapter_name)]
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        if self.keeps_float32.get(adapter_name, False):
            for parameter, data in zip(self.parameters_of(adapter_name), former, strict=True):
                parameter.data = data.to(parameter.device)
        weight = self.locas_up[adapter_name].weight
        for dictionary, scale in zip(dicts, scales, strict=True):
            dictionary[adapter_name] = scale if weight.is_meta else scale.to(weight.device)

    def __getattr__(self, name: str) -> Any:
        # Hosts read attributes of their FFN (T5 reads `wo.weight`): delegate what the layer lacks.
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Accelerate deletes its hook where it finds one: that of the FFN is the FFN's own.
            if name in ("base_layer", "_hf_hook", "_old_forward"):
                raise
            return getattr(self.base_layer, name)

    def __repr__(self) -> str:
        return "locas." + super().__repr__()


def make_sharded_error(adapter_name: str) -> ValueError:
    """Return the error for a memory that would calibrate itself while the model is sharded."""
    problem = f"a forward cannot calibrate the memory '{adapter_name}', since the model is sharded"
    remedy = "calibrate(model, batches) before it is"
    return ValueError(f"{problem}: {remedy} (before Trainer, accelerator.prepare or fully_shard).")


def scale_neurons(
    weights: Sequence[Tensor], k: Tensor | float, tau: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return a memory's weights times their scales.

    Args:
        weights: gate (if gated) and up, `[R, D]`, and down, `[D, R]`.
        k: the scale of the input, which multiplies the rows.
        tau: the scale of the output, which multiplies the columns.

    Returns:
        gate, or `None` without one; up; down; in the weights' dtypes.
    """
    *rows, down = weights
    rows = [(row.float() * k).to(row.dtype) for row in rows]
    gate = rows[0] if len(rows) > 1 else None
    return gate, rows[-1], (down.float() * tau).to(down.dtype)


def _list_dims(weights: Sequence[Tensor]) -> list[int]:
    """Return along which dimension the slots of a memory's weights lie."""
    return [ROWS] * (len(weights) - 1) + [COLUMNS]


def _is_shard(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) or weight.dim() < 2


def _multiply(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return inputs times a weight `[out, in]`, or `[N, T, in]` times `[N, out, in]`."""
    if weight.dim() == 2:
        return nn.functional.linear(inputs, weight)
    return inputs @ weight.mT


def _scale(tensor: Tensor, scales: list[Tensor]) -> Tensor:
    """Multiply by one memory's scale, or `[N, T, ...]` by those of N memories; the dtype stays."""
    factor = scales[0] if len(scales) == 1 else torch.stack(scales).reshape(-1, 1, 1)
    return (tensor * factor).to(tensor.dtype)
