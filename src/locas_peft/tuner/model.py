"""LocasModel: the tuner that adds memories to a model and merges them into checkpoints."""

import copy
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _ExcludedModule
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from .attached import list_layers
from .combination import combined_config, fill_combined
from .config import LocasConfig
from .errors import invalid
from .ffn import describe_children, forbid_packing
from .finding import AnyFFN, check_unshared, find_ffns, find_unknown_experts
from .host_hooks import HostHooks
from .initialization import STRATEGIES
from .layer import LocasLayer
from .load_checks import check_tensors, check_tokens, find_problem
from .memory_file import PREFIX, make_calibrated_flag, one_line, parse_key, remove_adapter_name
from .mixed_batch import RowNames
from .modules import (
    WRAPPED,
    host_modules,
    is_wrapper,
    plain_name,
    remember_modules,
    uncompiled,
    unwrap,
)
from .names import check_adapter_name
from .norm_clip import COLUMNS, ROWS, exceeds
from .state_keys import (
    add_names_of_wrapped,
    add_wrappers_to_names,
    map_memory,
    map_tied,
    restore_hidden,
)
from .trained_modules import (
    MemoryTokensLayer,
    check_active,
    check_mergeable_tokens,
    check_trained,
    replace_wrappers,
)
from .widths import WidthGroup, widen_to, widened_config, width_step

HOST_PROPERTIES = ("model_type", "ffns", "hidden_size", "gated", "activation")


class LocasModel(BaseTuner):
    """Add a memory beside each targeted FFN of a model.

    `get_peft_model(model, LocasConfig(...))` makes it. Merging appends the memories to the host's
    FFNs as neurons. `merge_and_unload` also pads all FFNs of the model to one width and writes it
    into the model's config, so that `save_pretrained` gives a checkpoint that loads without PEFT
    and without this package.
    """

    prefix: str = "locas_"
    tuner_layer_cls = LocasLayer
    target_module_mapping: dict[str, list[str]] = {}
    peft_config: dict[str, LocasConfig]

    # Set while memories are unloaded without a merge: adapters of other kinds stay.
    _keeps_others = False
    # The model's FFNs, found at the start of an injection.
    _ffns: dict[str, AnyFFN] = {}

    # ---------------------------------------------------------------- injection

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Add a memory to the model, or raise and leave the model as it was.

        See `BaseTuner.inject_adapter`.
        """
        check_adapter_name(adapter_name, self.peft_config[adapter_name])
        _check_wrappers(model)
        if kwargs.get("state_dict") is not None:
            kwargs["state_dict"] = add_wrappers_to_names(model, kwargs["state_dict"])
        twin = self._give_own_config(adapter_name)
        # A new memory would take a merged one for slots of the host.
        merged = self._unmerge_first()
        restore = remember_modules(self)
        former = list(model.parameters())
        trained = [parameter.requires_grad for parameter in former]
        has_adapters = any(isinstance(module, BaseTunerLayer) for module in model.modules())
        try:
            with warnings.catch_warnings():
                if any(map(is_wrapper, model.modules())):
                    # PEFT compares the patterns with names that have the wrappers.
                    warnings.filterwarnings("ignore", message="The following rank_pattern keys")
                super().inject_adapter(model, adapter_name, *args, **kwargs)
        except Exception:
            restore()
            for layer, names in merged.items():
                layer.merge(adapter_names=names)
            raise
        replace_wrappers(model)
        if twin is not None:
            # TRL makes its reference so, and then copies the parameters alone.
            for layer in list_layers(model, twin):
                layer.copy_scales(twin, adapter_name)
        if has_adapters:
            # PEFT leaves out parameters with the adapter's name in theirs, such as all of layer 0.
            for parameter, requires_grad in zip(former, trained, strict=True):
                parameter.requires_grad = requires_grad
        _remove_hooks(model)
        # The host keeps them.
        HostHooks(model)

    def _give_own_config(self, adapter_name: str) -> str | None:
        """Copy a config that another memory has too: each memory needs a record of its own.

        Returns:
            The name of the other memory; None without one.
        """
        config = self.peft_config[adapter_name]
        for name, other in self.peft_config.items():
            if name != adapter_name and other is config:
                config = copy.copy(config)
                config.set_record("slots", None)
                self.peft_config[adapter_name] = config
                return name
        return None

    def _prepare_adapter_config(self, peft_config: LocasConfig, model_config: dict) -> LocasConfig:
        forbid_packing(self.model)
        self._ffns = find_ffns(self.model, peft_config.ffn_parts)
        targets = peft_config.target_modules
        is_all_linear = (
            isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
        )
        if targets is None or is_all_linear:
            self._check_all_are_found(peft_config.ffn_parts)
            names = _to_suffixes(self._ffns, self.model)
            peft_config.target_modules = _keep_transformed(names, self._ffns, peft_config)
        host = _describe_host(self.model, self._ffns)
        if peft_config._expected_host is not None:
            _check_host(peft_config._expected_host, host)
        # A file also has a sample of the base's weights there.
        peft_config.set_record("host", {**(peft_config._expected_host or {}), **host})
        return peft_config

    def _check_all_are_found(self, ffn_parts: dict[str, str] | None) -> None:
        kind = type(self.model).__name__
        experts = find_unknown_experts(self.model, self._ffns)
        if experts:
            raise ValueError(
                f"{kind} has mixtures of experts of an unknown structure "
                f"({experts[0]} and {len(experts) - 1} more): "
                f"set target_modules to FFNs that get a memory (found: {self._list_found()})."
            )
        if self._ffns:
            return
        if ffn_parts is not None:
            names = ", ".join(ffn_parts.values())
            problem = f"no module of {kind} has all parts of ffn_parts as its own ({names})"
            raise ValueError(f"{problem}: a memory needs an FFN that is one module.")
        part = self.model
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module):
                part = module[0]
                break
        raise ValueError(
            f"{kind} has no FFN of a known structure; a layer of it has {describe_children(part)}. "
            "Set target_modules to its FFNs and ffn_parts to their parts."
        )

    def _list_found(self) -> str:
        suffixes = sorted(_to_suffixes(self._ffns, self.model))
        return ", ".join(map(repr, suffixes)) or "none"

    def _prepare_model(self, peft_config: LocasConfig, model: nn.Module) -> None:
        # All checks run here, before a module is replaced.
        check_tokens(peft_config, model)
        check_trained(peft_config, model)
        for name, module in host_modules(model):
            if self._is_targeted(peft_config, name, module):
                ffn = self._find_ffn(name, module)
                ffn.verify()
                _check_strategy(peft_config, plain_name(name), ffn)

    def _is_targeted(self, peft_config: LocasConfig, name: str, module: nn.Module) -> bool:
        former = unwrap(module)
        has_other_adapter = isinstance(former, BaseTunerLayer) and not isinstance(
            former, LocasLayer
        )
        if not name or has_other_adapter:
            return False
        if re.search(r"\.base_layer(\.|$)", name):
            return False
        matched = self._check_target_module_exists(peft_config, name)
        return bool(matched) and not isinstance(matched, _ExcludedModule)

    @staticmethod
    def _check_target_module_exists(peft_config: LocasConfig, key: str) -> Any:
        # A memory stands around the wrappers of an FFN, not inside.
        if key.rpartition(".")[2] in WRAPPED:
            return False
        return BaseTuner._check_target_module_exists(peft_config, plain_name(key))

    def _find_ffn(self, name: str, module: nn.Module) -> AnyFFN:
        if plain_name(name) in self._ffns:
            return self._ffns[plain_name(name)]
        raise ValueError(
            f"target_modules matches {name} ({type(module).__name__}), "
            "which is no FFN of a known structure: "
            f"name FFNs (found: {self._list_found()}), or the parts of this one in ffn_parts."
        )

    def _create_and_replace(
        self,
        peft_config: LocasConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        r = peft_config.width_of(plain_name(current_key))
        former = unwrap(target)
        if isinstance(former, LocasLayer):
            former.update_layer(adapter_name, peft_config, r)
            return
        ffn = self._find_ffn(current_key, target)
        layer = LocasLayer(target, ffn, plain_name(current_key), adapter_name, peft_config, r)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        # PEFT's method copies a Linear's weight, which an FFN does not have. The layer handles
        # devices itself.
        former = unwrap(child)
        is_other = isinstance(former, BaseTunerLayer) and not isinstance(former, LocasLayer)
        if self._keeps_others and is_other and not isinstance(former, MemoryTokensLayer):
            return
        if isinstance(former, LocasLayer):
            # PEFT gives the host's module without any adapter, such as a LoRA inside of this one.
            if self._keeps_others:
                new_module = former.base_layer
            former.release()
            while is_wrapper(child) and uncompiled(child) is child:
                # Activation checkpointing stays. A compiled module would call the former one.
                parent = child
                child_name, child = next(child.named_children())
        setattr(parent, child_name, new_module)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Activate memories, all others are switched off. See `BaseTuner.set_adapter`.

        Raises:
            ValueError: several of them train one module in full; nothing has changed.
        """
        if not isinstance(adapter_name, str):
            check_active(self.model, adapter_name)
        # PEFT unmerges the memories, but not the tokens that are trained beside them.
        self._unmerge_first()
        super().set_adapter(adapter_name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete a memory. See `BaseTuner.delete_adapter`."""
        config = self.peft_config.get(adapter_name)
        super().delete_adapter(adapter_name)
        if not any(layer.locas_up for layer in list_layers(self.model)):
            _remove_hooks(self.model)
        configs = self.peft_config
        if not isinstance(configs, ConfigsWithFormer):
            configs = ConfigsWithFormer(configs)
            self.peft_config = configs
            self.model.peft_config = configs
        # PEFT has refused a name without a config.
        assert config is not None
        # Without the record, of which a server that adds and deletes memories would keep ever more.
        former = copy.copy(config)
        former.record = {}
        configs.former[adapter_name] = former

    def _unmerge_first(self) -> dict[BaseTunerLayer, list[str]]:
        """Unmerge all memories; return which were merged in each layer."""
        merged = {}
        for layer in self.model.modules():
            if isinstance(layer, BaseTunerLayer) and layer.merged:
                merged[layer] = list(layer.merged_adapters)
        if merged:
            message = "Adapter cannot be set when the model is merged. Unmerging the model first."
            warnings.warn(message, stacklevel=3)
            self.unmerge_adapter()
        return merged

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        for module in self.model.modules():
            is_kept = isinstance(module, LocasLayer | MemoryTokensLayer)
            if is_kept and module.has_adapter(adapter_name):
                module.keeps_float32[adapter_name] = autocast_adapter_dtype
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)

    # ------------------------------------------------------------- mixed batches

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        self._check_adapter_names(adapter_names)
        rows = RowNames(list(adapter_names))
        rows.check_inputs(self.model, args, kwargs)
        with ExitStack() as contexts:
            hook = self.model.register_forward_pre_hook(rows.check_repeated, with_kwargs=True)
            contexts.enter_context(hook)
            for module in self.modules():
                if isinstance(module, AuxiliaryTrainingWrapper):
                    hook = module.register_forward_pre_hook(rows.pass_names, with_kwargs=True)
                    contexts.enter_context(hook)
            contexts.enter_context(rows.in_layers(list_layers(self)))
            yield

    def _check_adapter_names(self, adapter_names: list[str]) -> None:
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        known = {"__base__"}
        for layer in list_layers(self):
            known.update(layer.locas_up)
        unknown = sorted(set(adapter_names) - known)
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")

    # ------------------------------------------------------------------- merging

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        """Merge memories into the host's FFNs, in all layers or in none. See `LocasLayer.merge`."""
        if adapter_names is not None:
            self._check_named(adapter_names)
        self._check_mergeable(adapter_names)
        with self._merges_undone_on_failure():
            super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)

    def _check_named(self, adapter_names: list[str]) -> None:
        """Raise a `ValueError` if it is unclear what the model says after a merge."""
        inactive = [name for name in adapter_names if name not in self.active_adapters]
        for layer in list_layers(self.model):
            merged = [*layer.merged_adapters, *adapter_names]
            for name in layer.active_adapters:
                if inactive and name in layer.locas_up and name not in merged:
                    rule = f"be active, or merged with {name!r}, which is active"
                    raise invalid(
                        "adapter_names", rule, inactive, "set the adapters to be merged first"
                    )

    def _check_mergeable(self, adapter_names: list[str] | None) -> None:
        check_mergeable_tokens(self.model, adapter_names or self.active_adapters)
        widened = {}
        for layer in list_layers(self.model):
            names = layer.active_adapters if adapter_names is None else adapter_names
            for name in names:
                if name in layer.locas_up and name not in layer.merged_adapters:
                    layer.check_mergeable(name)
                    widened[layer.name] = layer.ffn
        check_unshared(self.model, widened)

    @contextmanager
    def _merges_undone_on_failure(self) -> Iterator[None]:
        # The memories, and the trained tokens that PEFT merges with them.
        layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        merged_before = {layer: list(layer.merged_adapters) for layer in layers}
        try:
            yield
        except Exception:
            for layer, names in merged_before.items():
                if layer.merged_adapters == names:
                    continue
                layer.unmerge()
                if names:
                    layer.merge(adapter_names=names)
            raise

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        # Merge and check everything before the memories are removed, so that a failure leaves the
        # model unchanged.
        if merge:
            unknown = sorted(set(adapter_names or ()) - set(self.peft_config))
            if unknown:
                raise invalid(
                    "adapter_names", "be the model's adapters", unknown, "check the names"
                )
            self._check_mergeable(adapter_names)
        config = None
        with self._merges_undone_on_failure():
            if merge:
                super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)
            groups, ffn_parts = self._plan_widths()
            if groups and isinstance(unwrap(self.model), PreTrainedModel):
                config = widened_config(self.model, groups, ffn_parts)
        with warnings.catch_warnings():
            # They are merged above.
            warnings.filterwarnings("ignore", message="All adapters are already merged")
            self._keeps_others = not merge
            try:
                model = super()._unload_and_optionally_merge(
                    merge=merge, safe_merge=safe_merge, adapter_names=adapter_names, **kwargs
                )
            finally:
                self._keeps_others = False
        widen_to(groups, model, config)
        _remove_hooks(self.model)
        return model

    def _plan_widths(self) -> tuple[list[WidthGroup], dict[str, str] | None]:
        """Return the groups of FFNs that a merge must pad to one width, and their `ffn_parts`."""
        layers = {layer.name: layer for layer in list_layers(self.model)}
        merged: set[str] = set()
        for layer in layers.values():
            merged.update(layer.merged_adapters)
        if not merged:
            return [], None
        multiple = 1
        ffn_parts = None
        for name in sorted(merged):
            config = self.peft_config[name]
            multiple = math.lcm(multiple, config.pad_to_multiple_of or 1)
            ffn_parts = ffn_parts or config.ffn_parts
        ffns = find_ffns(self.model, ffn_parts)
        for name, layer in layers.items():
            if layer.merged_adapters and name not in ffns:
                problem = f"the FFN {name} is not found again with its merged neurons"
                raise ValueError(f"{problem}: merge memories of the same ffn_parts only")
        groups: dict[tuple[type, int], WidthGroup] = {}
        for name, ffn in ffns.items():
            width = layers[name].base_width if name in layers else ffn.width
            group = groups.setdefault((type(ffn), width), WidthGroup(width, 0, {}))
            group.ffns[name] = ffn
            step = math.lcm(multiple, width_step(self.model, ffn))
            padded_width = math.ceil(ffn.width / step) * step
            group.new_width = max(group.new_width, padded_width)
        widened = [group for group in groups.values() if _is_widened(group)]
        padded: dict[str, AnyFFN] = {}
        for group in widened:
            _check_can_be_padded(group)
            padded |= group.ffns
        check_unshared(self.model, padded)
        # Some have no memory, and were not verified for one.
        for ffn in padded.values():
            ffn.verify()
        return widened, ffn_parts

    # ----------------------------------------------------------------- combining

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "cat",
    ) -> None:
        """Add a memory with the exact output of a weighted sum of others: their slots side by side.

        The others stay. The new memory is not active.

        Args:
            adapters: the names of different memories beside the same FFNs, none of them empty or
                merged. They have no `modules_to_save` and no trained tokens.
            weights: one finite number for each of them.
            adapter_name: the name of the new memory.
            combination_type: "cat"; other types of PEFT's methods have no meaning here.

        Raises:
            ValueError: a rule is broken; the model is unchanged.
        """
        self._check_combination(adapters, adapter_name, combination_type)
        configs = {name: self.peft_config[name] for name in adapters}
        self.peft_config[adapter_name] = combined_config(list_layers(self.model), configs, weights)
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        self._cast_adapter_dtype(adapter_name, self._is_any_float32(adapters))
        weight_of = dict(zip(adapters, weights, strict=True))
        for layer in list_layers(self.model, adapter_name):
            fill_combined(layer, adapter_name, weight_of)
            for parameter in layer.parameters_of(adapter_name):
                parameter.requires_grad_(False)

    def _is_any_float32(self, adapters: list[str]) -> bool:
        """Return whether one of several memories is in float32."""
        for name in adapters:
            for layer in list_layers(self.model, name):
                if layer.locas_up[name].weight.dtype == torch.float32:
                    return True
        return False

    def _check_combination(
        self, adapters: list[str], adapter_name: str, combination_type: str
    ) -> None:
        are_memories = all(isinstance(self.peft_config.get(name), LocasConfig) for name in adapters)
        if not adapters or not are_memories or len(set(adapters)) < len(adapters):
            raise invalid("adapters", "name different memories of the model", list(adapters))
        if adapter_name in self.peft_config:
            raise invalid(
                "adapter_name", "be new to the model", repr(adapter_name), "choose another"
            )
        if combination_type != "cat":
            raise invalid("combination_type", "be 'cat' for memories", repr(combination_type))

    # ------------------------------------------------------- saving and loading

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: LocasConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        # PEFT takes the modules and tokens that are trained beside the memory from `state_dict`
        # after this: what it has left out by mistake is put back there.
        restore_hidden(model, adapter_name, unwanted_adapter_names, state_dict)
        add_names_of_wrapped(model, adapter_name, state_dict)
        keys = map_memory(model, adapter_name)
        named = {key: state_dict[own] for key, own in keys.items() if own in state_dict}
        if any(isinstance(tensor, DTensor) for tensor in named.values()):
            raise ValueError(
                f"the memory '{adapter_name}' is sharded across processes: "
                "save_pretrained(folder, state_dict=state), "
                "with the whole state of get_model_state_dict or accelerator.get_state_dict."
            )
        # What could not be loaded again is not saved.
        expected = {key: named.get(key, torch.empty(0)) for key in keys} if named else {}
        problem = find_problem(named, expected=expected, config=config)
        if problem is not None:
            raise ValueError(
                f"the memory '{adapter_name}' has diverged and cannot be saved: {problem}."
            )
        if named and _is_empty(named, config):
            warnings.warn(
                f"the memory '{adapter_name}' is saved empty: it has learned nothing yet, "
                "and calibrates itself at its first training step.",
                stacklevel=2,
            )
        return {keys[key]: tensor for key, tensor in named.items()}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return remove_adapter_name(plain_name(key), adapter_name)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: LocasConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        named = {plain_name(key): tensor for key, tensor in state_dict.items()}
        _add_input_scales(named, config)
        _add_calibrated_flags(named)
        keys = map_memory(model, adapter_name) | map_tied(model, adapter_name)
        # A model without PEFT's wrapper has no prefix.
        keys |= {f"{PREFIX}{key}": own for key, own in keys.items()}
        own_keys = {plain_name(key): key for key in model.state_dict()}
        remapped = {keys.get(key, own_keys.get(key, key)): named[key] for key in named}
        check_tensors(model, adapter_name, config, remapped)
        _keep_long_rows(named, config)
        return remapped


class ConfigsWithFormer(dict[str, LocasConfig]):
    """The configs of a model's memories, which also knows those of deleted memories.

    A `PeftModel` goes on asking for the config of the adapter that was active, in each forward.
    """

    def __init__(self, configs: dict[str, LocasConfig]) -> None:
        super().__init__(configs)
        self.former: dict[str, LocasConfig] = {}

    def __missing__(self, name: str) -> LocasConfig:
        return self.former[name]


def _remove_hooks(host: nn.Module) -> None:
    """Take the memories' hooks off a host.

    They are found on the host: each `add_adapter` of transformers makes a `LocasModel` of its own.
    """
    for hook in list(host._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, HostHooks):
            owner.remove()


def _check_wrappers(model: nn.Module) -> None:
    """Raise a `ValueError` if a model is wrapped for several processes already."""
    wrappers = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
    for module in model.modules():
        if isinstance(module, wrappers):
            rule = "be added before the model is wrapped"
            got = f"a model in {type(module).__name__}"
            raise invalid("a memory", rule, got, "wrap the model that has the memory")


def _check_host(expected: dict[str, Any], host: dict[str, Any]) -> None:
    """Raise a `ValueError` if a base is not like the one that a memory was made for."""
    differences = []
    for key in HOST_PROPERTIES:
        if expected.get(key) != host[key]:
            differences.append(f"{key} {expected.get(key)!r}, this base has {host[key]!r}")
    if differences:
        raise ValueError(
            f"this memory was made for another base ({one_line(', '.join(differences))}): "
            "load the base that it was made for, or make a new memory."
        )


def _describe_host(model: nn.Module, ffns: dict[str, AnyFFN]) -> dict[str, Any]:
    """Return the properties of the base that a memory depends on.

    The width is none of them: merging changes it.
    """
    host = dict.fromkeys(HOST_PROPERTIES)
    host["model_type"] = getattr(getattr(model, "config", None), "model_type", None)
    host["ffns"] = len(ffns)
    if ffns:
        ffn = next(iter(ffns.values()))
        host["hidden_size"] = ffn.hidden_size
        host["gated"] = ffn.gated
        # A function has a name; a module's type has one.
        host["activation"] = getattr(ffn.act, "__name__", None) or type(ffn.act).__name__
    return host


def _check_strategy(config: LocasConfig, name: str, ffn: AnyFFN) -> None:
    """Raise a `ValueError` if a strategy cannot make rows for an FFN."""
    strategy = STRATEGIES[config.strategy]
    if ffn.gated and strategy.written:
        raise ValueError(
            f"init_weights={config.strategy!r} needs a two-layer memory, got the gated FFN {name}: "
            "use 'topk', or a base with two-layer FFNs."
        )
    r = config.width_of(name)
    if strategy.clones and r > ffn.slots:
        raise ValueError(
            f"r must be at most the host's width where slots are cloned, got r={r} for {name} "
            f"with {ffn.slots} slots: lower r, or set init_weights='gaussian'."
        )


def _to_suffixes(ffns: dict[str, AnyFFN], model: nn.Module) -> set[str]:
    """Return names that match these FFNs and no other module: suffixes, or else full names."""
    suffixes = {name.rpartition(".")[2] for name in ffns}
    for wrapped_name, _ in host_modules(model):
        name = plain_name(wrapped_name)
        if name not in ffns and name.rpartition(".")[2] in suffixes:
            return set(ffns)
    return suffixes


def _keep_transformed(names: set[str], ffns: dict[str, AnyFFN], config: LocasConfig) -> set[str]:
    """Return the full names that `layers_to_transform` selects; suffixes stay.

    PEFT asks for the layer of a module that a suffix matches, and takes each full name.
    """
    indices = config.layers_to_transform
    if names.isdisjoint(ffns) or indices is None or indices == []:
        return names
    trial = copy.copy(config)
    trial.exclude_modules = None
    trial.modules_to_save = None
    kept = set()
    for name in names:
        trial.target_modules = {name.rpartition(".")[2]}
        if BaseTuner._check_target_module_exists(trial, name):
            kept.add(name)
    if not kept:
        rule = "select a layer that has an FFN"
        raise invalid("layers_to_transform", rule, indices, "use indices of its layers")
    return kept


def _is_widened(group: WidthGroup) -> bool:
    return any(ffn.width != group.width for ffn in group.ffns.values())


def _check_can_be_padded(group: WidthGroup) -> None:
    for name, ffn in group.ffns.items():
        if ffn.width == group.new_width:
            continue
        obstacle = ffn.find_obstacle()
        if obstacle:
            raise ValueError(
                f"cannot bring {name} to the width {group.new_width} of the others: {obstacle}."
            )


def _is_empty(tensors: dict[str, Tensor], config: LocasConfig) -> bool:
    """Return whether a memory that is saved still waits for its rows, or for its first slot."""
    flags = [tensor for key, tensor in tensors.items() if key.endswith(".locas_calibrated")]
    ups = [tensor for key, tensor in tensors.items() if key.endswith(".locas_up.weight")]
    if any(tensor.is_meta for tensor in (*flags, *ups)):
        return False
    downs = [tensor for key, tensor in tensors.items() if key.endswith(".locas_down.weight")]
    is_calibrated = any(map(bool, flags)) or any(down.any() for down in downs)
    waits = STRATEGIES[config.strategy].needs_calibration and not is_calibrated
    return waits or not any(up.any() for up in ups)


def _add_calibrated_flags(tensors: dict[str, Tensor]) -> None:
    """Add the flags that files of 0.2.0 lack."""
    for key in [key for key in tensors if key.endswith(".locas_up.weight")]:
        ffn = key.removesuffix(".locas_up.weight")
        flag = f"{ffn}.locas_calibrated"
        scale = tensors.get(f"{ffn}.locas_input_scale")
        if flag not in tensors and scale is not None:
            tensors[flag] = make_calibrated_flag(tensors[key], scale)


def _keep_long_rows(tensors: dict[str, Tensor], config: LocasConfig) -> None:
    """Switch the norm clip off where a file has longer rows: they keep their function."""
    max_norm = config.max_slot_norm
    if max_norm is None:
        return
    dims = {"locas_gate": ROWS, "locas_up": ROWS, "locas_down": COLUMNS}
    for key, tensor in tensors.items():
        parsed = parse_key(key)
        if parsed is None:
            continue
        _, part = parsed
        dim = dims.get(part)
        if dim is None or tensor.is_meta or tensor.dim() != 2:
            continue
        if exceeds(tensor, dim, max_norm):
            config.max_slot_norm = None
            problem = f"the memory has rows that are longer than its max_slot_norm of {max_norm:g}"
            remedy = "it is loaded with max_slot_norm=None, so that it keeps its function."
            warnings.warn(f"{problem}: {remedy}", stacklevel=2)
            return


def _add_input_scales(state: dict[str, Tensor], config: LocasConfig) -> None:
    """Add k = 1 to a memory from before there was an input scale: it has the paper's scales."""
    if any(key.endswith(".locas_input_scale") for key in state):
        return
    taus = [key for key in state if key.endswith(".locas_tau")]
    if not taus:
        return
    for key in taus:
        ffn = key.removesuffix(".locas_tau")
        state[f"{ffn}.locas_input_scale"] = torch.tensor(1.0)
    config.output_scale = "paper"
