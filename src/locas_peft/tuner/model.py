"""LocasModel: the tuner that injects memories into a model and merges them into plain checkpoints."""

import copy
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _ExcludedModule
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from . import load_checks
from .attached import list_layers
from .combination import combined_config, fill_combined
from .config import LocasConfig
from .ffn import describe_children, forbid_packing
from .finding import AnyFFN, find_ffns, find_unknown_experts
from .host_hooks import HostHooks
from .initialization import STRATEGIES
from .layer import LocasLayer
from .memory_file import one_line
from .modules import remember_modules
from .norm_clip import COLUMNS, ROWS, exceeds
from .widths import WidthGroup, widen_to, widened_config, width_step


class LocasModel(BaseTuner):
    """Add a memory beside each targeted FFN of a model. Made by `get_peft_model(model, LocasConfig(...))`.

    Merging appends the memories to the host's FFNs as neurons. `merge_and_unload` also pads all FFNs of the model to
    one width and writes it into the model's config, so that `save_pretrained` gives a checkpoint that loads without
    PEFT and without this package.
    """

    prefix: str = "locas_"
    tuner_layer_cls = LocasLayer
    target_module_mapping: dict[str, list[str]] = {}

    _ffns: dict[str, AnyFFN] = {}  # the model's FFNs, found at the start of an injection
    _hooks: HostHooks | None = None

    # ---------------------------------------------------------------- injection

    def _prepare_adapter_config(self, peft_config: LocasConfig, model_config: dict) -> LocasConfig:
        forbid_packing(self.model)
        self._ffns = find_ffns(self.model, peft_config.ffn_parts)
        targets = peft_config.target_modules
        if targets is None or (
            isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
        ):
            self._check_all_are_found()
            peft_config.target_modules = _to_suffixes(self._ffns, self.model)
        host, expected = _describe_host(self.model, self._ffns), peft_config._expected_host
        if expected is not None:
            keys = [
                key
                for key in {**host, **expected}
                if key != "weights" and expected.get(key) != host.get(key)
            ]
            if keys:
                found = ", ".join(
                    f"{key} {expected.get(key)!r}, this base has {host.get(key)!r}" for key in keys
                )
                problem = f"this memory was made for another base ({one_line(found)})"
                raise ValueError(
                    f"{problem}: load the base that it was made for, or make a new memory."
                )
            if not load_checks.may_be_same_weights(expected.get("weights"), host["weights"]):
                what = "this memory was made for a base of the same shapes with other weights"
                remedy = "its output is not what was learned; load the base that it was made for."
                warnings.warn(f"{what}: {remedy}", stacklevel=2)
        peft_config.host = host
        return peft_config

    def _check_all_are_found(self) -> None:
        experts, kind = find_unknown_experts(self.model, self._ffns), type(self.model).__name__
        if experts:
            what = f"{kind} has mixtures of experts of an unknown structure ({experts[0]} and {len(experts) - 1} more)"
            raise ValueError(
                f"{what}: set target_modules to FFNs that get a memory (found: {self._list_found()})."
            )
        if not self._ffns:
            layers = next(
                (
                    one
                    for one in self.model.modules()
                    if isinstance(one, nn.ModuleList) and len(one)
                ),
                None,
            )
            parts = describe_children(self.model if layers is None else layers[0])
            what = f"{kind} has no FFN of a known structure; a layer of it has {parts}"
            raise ValueError(
                f"{what}. Set target_modules to its FFNs and ffn_parts to their parts."
            )

    def _list_found(self) -> str:
        return ", ".join(map(repr, sorted(_to_suffixes(self._ffns, self.model)))) or "none"

    def _prepare_model(self, peft_config: LocasConfig, model: nn.Module) -> None:
        # All checks run here, before a module is replaced.
        load_checks.check_tokens(peft_config, model)
        for name, module in model.named_modules():
            if (
                not name
                or isinstance(module, BaseTunerLayer)
                or re.search(r"\.base_layer(\.|$)", name)
            ):
                continue
            matched = self._check_target_module_exists(peft_config, name)
            if not matched or isinstance(matched, _ExcludedModule):
                continue
            ffn, r = self._find_ffn(name, module), peft_config.width_of(name)
            strategy = STRATEGIES[peft_config.init_strategy]
            if ffn.gated and strategy.written:
                what = f"init_strategy={peft_config.init_strategy!r} needs a two-layer memory"
                raise ValueError(
                    f"{what}, got the gated FFN {name}: use 'topk', or a base with two-layer FFNs."
                )
            if strategy.clones and r > ffn.slots:
                what = f"r must be at most the host's width where slots are cloned, got r={r} for {name}"
                raise ValueError(
                    f"{what} with {ffn.slots} slots: lower r, or set init_strategy='gaussian'."
                )

    def _find_ffn(self, name: str, module: nn.Module) -> AnyFFN:
        if name in self._ffns:
            return self._ffns[name]
        what = f"target_modules matches {name} ({type(module).__name__}), which is no FFN of a known structure"
        raise ValueError(
            f"{what}: name FFNs (found: {self._list_found()}), or the parts of this one in ffn_parts."
        )

    def _create_and_replace(
        self,
        peft_config: LocasConfig,
        adapter_name: str,
        target,
        target_name,
        parent,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        r = peft_config.width_of(current_key)
        if isinstance(target, LocasLayer):
            target.update_layer(adapter_name, peft_config, r)
            return
        layer = LocasLayer(
            target, self._find_ffn(current_key, target), current_key, adapter_name, peft_config, r
        )
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        # PEFT's method copies a Linear's weight, which an FFN does not have. The layer handles devices itself.
        setattr(parent, child_name, new_module)
        if isinstance(child, LocasLayer):
            child.release()

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Add a memory to the model; where its config or its file does not fit, raise and leave the model as it was.

        See `BaseTuner.inject_adapter`.
        """
        config = self.peft_config[adapter_name]
        if any(other is config for name, other in self.peft_config.items() if name != adapter_name):
            # One config object was given for two memories: each needs its own record of slots.
            config = self.peft_config[adapter_name] = copy.copy(config)
            config.slots = None
        restore, file = remember_modules(self), config.file
        try:
            if file is not None:
                tensors, widths = load_checks.load_memory_file(file, config)
                config.name_modules(widths)  # no regular expression of a file is ever matched
                load_checks.check_task(config, model)
            super().inject_adapter(model, adapter_name, *args, **kwargs)
            if file is not None:  # before PEFT copies a tensor of it into the model
                tensors = {key: tensor.to("meta") for key, tensor in tensors.items()}
                tensors = load_checks.rename_trained_modules(model, adapter_name, tensors)
                self._remap_adapter_state_dict_for_load(model, config, adapter_name, tensors)
        except Exception as error:
            restore()
            if file is None or isinstance(error, ValueError):
                raise
            reason = one_line(f"{type(error).__name__}: {error}")
            what = f"the memory does not fit the model ({reason})"
            raise ValueError(f"{what}: load the base that it was made for.") from error
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = HostHooks(model)

    # ------------------------------------------------------------- mixed batches

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        known = {name for layer in list_layers(self) for name in layer.locas_up}
        unknown = sorted(set(adapter_names) - known - {"__base__"})
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")
        # Beam search repeats each row; an encoder still sees every row once.
        beams = kwargs.get("num_beams") or 1
        repeated = [name for name in adapter_names for _ in range(beams)]
        encoder = (
            self.model.get_encoder() if beams > 1 and self.model.config.is_encoder_decoder else None
        )
        inside_encoder = set() if encoder is None else set(encoder.modules())
        with ExitStack() as hooks:
            for module in self.modules():
                if isinstance(module, LocasLayer | AuxiliaryTrainingWrapper):
                    names = adapter_names if module in inside_encoder else repeated
                    hook = partial(_pass_adapter_names, adapter_names=names)
                    hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            yield

    # ------------------------------------------------------------------- merging

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        """Merge memories into the host's FFNs, in all layers or in none. See `LocasLayer.merge`."""
        with self._all_or_none(adapter_names):
            super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        # Merge and check everything before the memories are removed, so that a failure leaves the model unchanged.
        with self._all_or_none(adapter_names if merge else []):
            if merge:
                super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)
            groups, parts = self._plan_widths()
            has_config = groups and isinstance(self.model, PreTrainedModel)
            config = widened_config(self.model, groups, parts) if has_config else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="All adapters are already merged")
            model = super()._unload_and_optionally_merge(
                merge=merge, safe_merge=safe_merge, adapter_names=adapter_names, **kwargs
            )
        widen_to(groups, model, config)
        self._hooks.remove()
        self._hooks = None
        return model

    def _plan_widths(self) -> tuple[list[WidthGroup], dict[str, str] | None]:
        """Group the FFNs that must be padded to one width, for a merge; also return the `ffn_parts` they have."""
        layers = {layer.name: layer for layer in list_layers(self.model)}
        merged = {name for layer in layers.values() for name in layer.merged_adapters}
        configs = [self.peft_config[name] for name in sorted(merged)]
        multiple = math.lcm(*(config.pad_to_multiple_of or 1 for config in configs))
        groups: dict[tuple, WidthGroup] = {}
        parts = next((config.ffn_parts for config in configs if config.ffn_parts), None)
        for name, ffn in find_ffns(self.model, parts).items() if merged else ():
            width = layers[name].base_width if name in layers else ffn.width
            group = groups.setdefault((type(ffn), width), WidthGroup(width, 0, {}))
            group.ffns[name] = ffn
            step = math.lcm(multiple, width_step(self.model, ffn))
            group.new_width = max(group.new_width, math.ceil(ffn.width / step) * step)
        widened = [
            group
            for group in groups.values()
            if any(f.width != group.width for f in group.ffns.values())
        ]
        for group in widened:
            for name, ffn in group.ffns.items():
                obstacle = ffn.width < group.new_width and ffn.find_obstacle()
                if obstacle:
                    raise ValueError(
                        f"cannot bring {name} to the width {group.new_width} of the others: {obstacle}."
                    )
        return widened, parts

    @contextmanager
    def _all_or_none(self, adapter_names: list[str] | None) -> Iterator[None]:
        """Check that memories can be merged, and undo the merges of a failed merge."""
        # The memories, and the trained tokens that PEFT merges with them.
        mergeable = [
            module for module in self.model.modules() if isinstance(module, BaseTunerLayer)
        ]
        before = {layer: list(layer.merged_adapters) for layer in mergeable}
        try:
            for layer in list_layers(self.model):
                for name in layer.active_adapters if adapter_names is None else adapter_names:
                    if name in layer.locas_up and name not in layer.merged_adapters:
                        layer.check_mergeable(name)
            yield
        except Exception:
            for layer, merged in before.items():
                if layer.merged_adapters != merged:
                    layer.unmerge()
                    if merged:
                        layer.merge(adapter_names=merged)
            raise

    # ----------------------------------------------------------------- combining

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "cat",
    ) -> None:
        """Add a memory that adds what the weighted sum of others adds, exactly: all their slots side by side.

        The others, beside the same FFNs and none of them empty or merged, stay; the new one is not active. `weights`
        has one finite number for each. A broken rule is a `ValueError`, and the model is unchanged.
        """
        unknown = [
            name for name in adapters if not isinstance(self.peft_config.get(name), LocasConfig)
        ]
        if unknown or not adapters or len(set(adapters)) < len(adapters):
            raise ValueError(
                f"adapters must name different memories of the model, got {list(adapters)}."
            )
        if adapter_name in self.peft_config:
            raise ValueError(
                f"adapter_name must be new to the model, got {adapter_name!r}: choose another."
            )
        if combination_type != "cat":
            raise ValueError(
                f"combination_type must be 'cat' for memories, got {combination_type!r}."
            )
        configs = {name: self.peft_config[name] for name in adapters}
        self.peft_config[adapter_name] = combined_config(list_layers(self.model), configs, weights)
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        for layer in list_layers(self.model, adapter_name):
            fill_combined(layer, adapter_name, dict(zip(adapters, weights, strict=True)))
            for projection in layer.projections(adapter_name):
                projection.weight.requires_grad_(False)

    # ------------------------------------------------------- saving and loading

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: LocasConfig, adapter_name: str, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        selected = super()._get_adapter_state_dict(model, config, adapter_name, *args, **kwargs)
        # Leave out other tuners' weights under the same adapter name.
        selected = {key: tensor for key, tensor in selected.items() if f".{cls.prefix}" in key}
        if any(isinstance(tensor, DTensor) for tensor in selected.values()):
            remedy = "with the whole state of get_model_state_dict or accelerator.get_state_dict"
            what = f"the memory '{adapter_name}' is sharded across processes"
            raise ValueError(f"{what}: save_pretrained(folder, state_dict=state), {remedy}.")
        named = {
            cls._remove_adapter_name_from_key(key, adapter_name): tensor
            for key, tensor in selected.items()
        }
        problem = load_checks.find_divergence(named, config)
        if problem:
            raise ValueError(
                f"the memory '{adapter_name}' has diverged and cannot be saved: {problem}."
            )
        if _is_empty(selected, config):
            what = f"the memory '{adapter_name}' is saved empty: it has learned nothing yet"
            warnings.warn(
                f"{what}, and calibrates itself at its first training step.", stacklevel=2
            )
        return selected

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: LocasConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        remapped = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, state_dict
        )
        taus = [key for key in remapped if ".locas_tau." in key]
        if taus and not any(
            ".locas_input_scale." in key for key in remapped
        ):  # from before there was such a scale
            remapped.update(
                {
                    key.replace(".locas_tau.", ".locas_input_scale."): torch.tensor(1.0)
                    for key in taus
                }
            )
            config.output_scale = "paper"
        _add_calibrated_flags(remapped)
        _keep_long_rows(remapped, config)
        problem = load_checks.find_misfit(model, adapter_name, config, remapped)
        if problem:
            raise ValueError(f"the memory does not fit the model: {problem}.")
        return remapped


def _is_empty(tensors: dict[str, Tensor], config: LocasConfig) -> bool:
    """Return whether a memory that is saved still waits for its rows, or for its first slot."""
    flags = [tensor for key, tensor in tensors.items() if ".locas_calibrated." in key]
    ups = [tensor for key, tensor in tensors.items() if ".locas_up." in key]
    if any(tensor.is_meta for tensor in (*flags, *ups)):
        return False
    waits = STRATEGIES[config.init_strategy].needs_calibration and not any(map(bool, flags))
    return waits or not any(up.any() for up in ups)


def _add_calibrated_flags(tensors: dict[str, Tensor]) -> None:
    """Add the flags that files of 0.2.0 lack: set where there are rows and an input scale."""
    for key in [key for key in tensors if ".locas_up." in key]:
        flag = key.replace(".locas_up.", ".locas_calibrated.").removesuffix(".weight")
        up, scale = tensors[key], tensors.get(flag.replace("calibrated", "input_scale"))
        if flag in tensors or scale is None:
            continue
        is_calibrated = up.is_meta or bool(up.any() and scale.any())
        tensors[flag] = torch.tensor(float(is_calibrated), device=up.device)


def _keep_long_rows(tensors: dict[str, Tensor], config: LocasConfig) -> None:
    """Switch the norm clip off where a file's rows are longer than its radius: they keep their function."""
    max_norm = config.max_slot_norm
    if max_norm is None:
        return
    dims = {".locas_gate.": ROWS, ".locas_up.": ROWS, ".locas_down.": COLUMNS}
    for key, tensor in tensors.items():
        dim = next((dim for part, dim in dims.items() if part in key), None)
        if dim is None or tensor.is_meta or tensor.dim() != 2:
            continue
        if exceeds(tensor, dim, max_norm):
            config.max_slot_norm = None
            problem = f"the memory has rows that are longer than its max_slot_norm of {max_norm:g}"
            remedy = "it is loaded with max_slot_norm=None, so that it keeps its function."
            warnings.warn(f"{problem}: {remedy}", stacklevel=2)
            return


def _pass_adapter_names(
    module: nn.Module, args: tuple, kwargs: dict, adapter_names: list[str]
) -> tuple:
    return args, {**kwargs, "adapter_names": adapter_names}


def _to_suffixes(ffns: dict[str, AnyFFN], model: nn.Module) -> set[str]:
    """Return names that match these FFNs and no other module: suffixes such as {"mlp"}, or else full names."""
    suffixes = {name.rpartition(".")[2] for name in ffns}
    taken = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in ffns}
    return suffixes if suffixes.isdisjoint(taken) else set(ffns)


def _describe_host(model: nn.Module, ffns: dict[str, AnyFFN]) -> dict[str, Any]:
    """Return the properties of the base that a memory depends on. The width is none of them: merging changes it."""
    ffn = next(iter(ffns.values()), None)
    return {
        "model_type": getattr(getattr(model, "config", None), "model_type", None),
        "ffns": len(ffns),
        "hidden_size": ffn and ffn.hidden_size,
        "gated": ffn and ffn.gated,
        "activation": ffn and (getattr(ffn.act, "__name__", None) or type(ffn.act).__name__),
        "weights": load_checks.sample_weights(model),
    }
