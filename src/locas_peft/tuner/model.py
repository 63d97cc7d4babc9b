"""LocasModel: the tuner that puts memories into a model, and makes plain checkpoints of them."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _ExcludedModule
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from .config import LocasConfig
from .ffn import (
    WIDENABLE_DTYPES,
    HostFFN,
    WidthGroup,
    copy_widths,
    describe_without_ffn,
    find_experts,
    find_ffns,
    widened_config,
)
from .initialization import STRATEGIES
from .layer import LocasLayer, list_layers


class LocasModel(BaseTuner):
    """Puts a memory beside each targeted FFN of a model. Made by `get_peft_model(model, LocasConfig(...))`.

    Merging makes the memories neurons of the host; `merge_and_unload` also brings all FFNs of the model to one width
    and writes it into the model's config, so that `save_pretrained` gives a checkpoint that needs neither PEFT nor us.
    """

    prefix: str = "locas_"
    tuner_layer_cls = LocasLayer
    target_module_mapping: dict[str, list[str]] = {}

    # ---------------------------------------------------------------- injection

    _ffns: dict[str, HostFFN] = {}  # of the injection under way
    _mask_hook = None

    def _prepare_adapter_config(self, peft_config: LocasConfig, model_config: dict) -> LocasConfig:
        self._ffns = find_ffns(self.model, peft_config.ffn_parts)
        targets = peft_config.target_modules
        if targets is None or (isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND):
            self._check_all_are_dense()
            peft_config.target_modules = _to_suffixes(self._ffns, self.model)
        host = _describe_host(self.model, self._ffns)
        expected = peft_config._expected_host
        if expected is not None and expected != host:
            raise ValueError(
                f"this memory was made for another base ({_list_differences(expected, host)}): load the base that it "
                "was made for, or make a new memory."
            )
        peft_config.host = host
        return peft_config

    def _check_all_are_dense(self) -> None:
        experts = find_experts(self.model)
        if experts:
            dense = ", ".join(repr(name) for name in sorted(_to_suffixes(self._ffns, self.model))) or "none"
            raise ValueError(
                f"{type(self.model).__name__} is a mixture of experts ({experts[0]} and {len(experts) - 1} more): set "
                f"target_modules to the dense FFNs that shall get a memory (found: {dense})."
            )
        if not self._ffns:
            raise ValueError(
                f"{type(self.model).__name__} has no FFN that we can read; a layer of it has "
                f"{describe_without_ffn(self.model)}. Set target_modules to its FFNs and ffn_parts to their parts."
            )

    def _prepare_model(self, peft_config: LocasConfig, model: nn.Module) -> None:
        # All that can be refused is refused here, before a module is replaced.
        experiment = False
        for name, module in model.named_modules():
            if not name or isinstance(module, BaseTunerLayer) or re.search(r"\.base_layer(\.|$)", name):
                continue
            matched = self._check_target_module_exists(peft_config, name)
            if not matched or isinstance(matched, _ExcludedModule):
                continue
            ffn = self._find_ffn(name, module, peft_config)
            experiment |= _check_variant(peft_config, name, ffn)
            r = peft_config.width_of(name)
            if STRATEGIES[peft_config.init_strategy].clones and r > ffn.width:
                raise ValueError(
                    f"r must be at most the host's width where slots are cloned, got r={r} for {name} with "
                    f"{ffn.width} slots: lower r, or set init_strategy='gaussian'."
                )
        if experiment:
            warnings.warn(
                "variant 'mlp' beside gated FFNs is an experiment: the paper finds that inputs of such hosts separate "
                "poorly under ReLU, and the memory cannot be merged.",
                stacklevel=2,
            )

    def _find_ffn(self, name: str, module: nn.Module, peft_config: LocasConfig) -> HostFFN:
        if name in self._ffns:
            return self._ffns[name]
        names = ", ".join(sorted(_to_suffixes(self._ffns, self.model))) or "none"
        raise ValueError(
            f"target_modules matches {name} ({type(module).__name__}), which is no dense FFN that we can read: "
            f"name FFNs (found: {names}), or the parts of this one in ffn_parts."
        )

    def _create_and_replace(
        self,
        peft_config: LocasConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        r = peft_config.width_of(current_key)
        if isinstance(target, LocasLayer):
            target.update_layer(adapter_name, peft_config, r)
            return
        ffn = self._find_ffn(current_key, target, peft_config)
        layer = LocasLayer(target, ffn, current_key, adapter_name, peft_config, r)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # PEFT's own hands a Linear's weight over, which an FFN does not have. Devices are the layer's business.
        setattr(parent, child_name, new_module)
        if isinstance(child, LocasLayer):
            child.release()

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        if any(other is config for name, other in self.peft_config.items() if name != adapter_name):
            # One object for two memories: each notes slots of its own.
            self.peft_config[adapter_name] = copy.copy(config)
            self.peft_config[adapter_name].slots = None
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        if self._mask_hook is None:
            self._mask_hook = model.register_forward_pre_hook(_hand_out_token_mask, with_kwargs=True)

    def _remove_mask_hook(self) -> None:
        if self._mask_hook is not None:
            self._mask_hook.remove()
            self._mask_hook = None

    # ------------------------------------------------------------- mixed batches

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        layers = list_layers(self)
        known = {name for layer in layers for name in layer.locas_up}
        unknown = sorted(set(adapter_names) - known - {"__base__"})
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")
        # Beam search repeats each row; an encoder still sees every row once.
        beams = kwargs.get("num_beams") or 1
        repeated = [name for name in adapter_names for _ in range(beams)]
        encoder = self.model.get_encoder() if beams > 1 and self.model.config.is_encoder_decoder else None
        inside_encoder = set() if encoder is None else set(encoder.modules())
        handles = []
        try:
            for module in self.modules():
                if isinstance(module, LocasLayer | AuxiliaryTrainingWrapper):
                    names = adapter_names if module in inside_encoder else repeated
                    hook = partial(_pass_adapter_names, adapter_names=names)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    # ------------------------------------------------------------------- merging

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merges memories into the host's FFNs; if one layer cannot, none is. See `LocasLayer.merge`."""
        with self._all_or_none(adapter_names):
            super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)

    def unmerge_adapter(self, adapter_names: list[str] | None = None) -> None:
        """Cuts merged memories off again, all or (beyond PEFT) the named ones; the base's bits are as they were."""
        for layer in self._tuner_layers():
            _unmerge(layer, layer.merged_adapters if adapter_names is None else adapter_names)

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        # Merge and check everything while the memories are still in place, so that a failure leaves all as it was.
        with self._all_or_none(adapter_names if merge else []):
            if merge:
                super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)
            groups = self._plan_widths()
            config = widened_config(self.model, groups) if groups and isinstance(self.model, PreTrainedModel) else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="All adapters are already merged")
            model = super()._unload_and_optionally_merge(
                merge=merge, progressbar=progressbar, safe_merge=safe_merge, adapter_names=adapter_names
            )
        for group in groups:
            for ffn in group.ffns.values():
                ffn.pad(group.new_width)
        if config is not None:
            copy_widths(config, model.config)
        self._remove_mask_hook()
        return model

    def _plan_widths(self) -> list[WidthGroup]:
        """The FFNs that must come to one width because a memory is merged into one of them."""
        layers = {layer.name: layer for layer in self._layers()}
        merged = {name for layer in layers.values() for name in layer.merged_adapters}
        configs = [self.peft_config[name] for name in sorted(merged)]
        multiple = math.lcm(*(config.pad_to_multiple_of or 1 for config in configs))
        groups: dict[int, WidthGroup] = {}
        parts = next((config.ffn_parts for config in configs if config.ffn_parts), None)
        for name, ffn in find_ffns(self.model, parts).items() if merged else ():
            width = layers[name].base_width if name in layers else ffn.width
            group = groups.setdefault(width, WidthGroup(width, 0, {}))
            group.ffns[name] = ffn
            group.new_width = max(group.new_width, math.ceil(ffn.width / multiple) * multiple)
        groups = {width: g for width, g in groups.items() if any(f.width != width for f in g.ffns.values())}
        for group in groups.values():
            for name, ffn in group.ffns.items():
                obstacle = ffn.width < group.new_width and ffn.find_obstacle()
                if obstacle:
                    raise ValueError(f"cannot bring {name} to the width {group.new_width} of the others: {obstacle}.")
        return list(groups.values())

    @contextmanager
    def _all_or_none(self, adapter_names: list[str] | None) -> Iterator[None]:
        """Undoes the merges of a failed merge."""
        before = {layer: list(layer.merged_adapters) for layer in self._tuner_layers()}
        try:
            for layer in self._layers():
                for name in layer.active_adapters if adapter_names is None else adapter_names:
                    if name in layer.locas_up and name not in layer.merged_adapters:
                        layer.check_mergeable(name)
            yield
        except Exception:
            for layer, merged in before.items():
                _unmerge(layer, [name for name in layer.merged_adapters if name not in merged])
            raise

    def _layers(self) -> list[LocasLayer]:
        return list_layers(self.model)

    def _tuner_layers(self) -> list[BaseTunerLayer]:
        # Memories, and the trained tokens that PEFT merges along with them.
        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]

    # ------------------------------------------------------- saving and loading

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: LocasConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, torch.Tensor]:
        selected = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        # Other tuners' weights under the same adapter name are not this memory's.
        selected = {key: tensor for key, tensor in selected.items() if f".{cls.prefix}" in key}
        if not any(tensor.is_meta or tensor.any() for key, tensor in selected.items() if ".locas_up." in key):
            raise ValueError(
                f"the memory '{adapter_name}' is empty: calibrate(model, batches) or train it before it is saved."
            )
        return selected

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: LocasConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        problem = _find_load_problem(model, adapter_name, remapped) or _find_base_weight(model, remapped)
        if problem:
            if _is_arriving(model, config, adapter_name):
                _discard(model, adapter_name)
            raise ValueError(f"the memory does not fit the model: {problem}.")
        return remapped


def _hand_out_token_mask(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Before a training-mode forward of the host: tells its memories which tokens are padding."""
    if module.training:
        two_texts = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        for layer in module.modules():
            if isinstance(layer, LocasLayer):
                decoding = two_texts and "decoder" in layer.name.split(".")
                layer.token_mask = kwargs.get("decoder_attention_mask" if decoding else "attention_mask")


def _pass_adapter_names(module: nn.Module, args: tuple, kwargs: dict, adapter_names: list[str]) -> tuple:
    return args, {**kwargs, "adapter_names": adapter_names}


def _unmerge(layer: BaseTunerLayer, adapter_names: list[str]) -> None:
    """Unmerges some adapters of a layer; PEFT's layers can only unmerge all, so the others are merged again."""
    if isinstance(layer, LocasLayer):
        layer.unmerge(adapter_names)
        return
    kept = [name for name in layer.merged_adapters if name not in adapter_names]
    if kept != layer.merged_adapters:
        layer.unmerge()
        if kept:
            layer.merge(adapter_names=kept)


def _check_variant(config: LocasConfig, name: str, ffn: HostFFN) -> bool:
    """Refuses a structure that does not suit an FFN; says whether it is the experiment beside a gated one."""
    if not ffn.gated:
        return False
    if config.variant != "mlp":
        if STRATEGIES[config.init_strategy].written:
            raise ValueError(
                f"init_strategy={config.init_strategy!r} needs a two-layer memory, got the gated FFN {name}: use "
                "'topk', or variant='mlp' with gated_host_experiment=True."
            )
        return False
    if not config.gated_host_experiment:
        raise ValueError(
            f"variant 'mlp' needs two-layer FFNs, got the gated FFN {name}: leave variant at 'auto', or set "
            "gated_host_experiment=True to try it all the same."
        )
    return True


def _to_suffixes(ffns: dict[str, HostFFN], model: nn.Module) -> set[str]:
    """The shortest names that pick these FFNs and no other module: {"mlp"}, say; full names where that cannot be."""
    suffixes = {name.rpartition(".")[2] for name in ffns}
    taken = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in ffns}
    return suffixes if suffixes.isdisjoint(taken) else set(ffns)


def _describe_host(model: nn.Module, ffns: dict[str, HostFFN]) -> dict[str, Any]:
    """What a memory depends on. Not the host's width: other memories may be merged into it since."""
    ffn = next(iter(ffns.values()), None)
    return {
        "model_type": getattr(getattr(model, "config", None), "model_type", None),
        "ffns": len(ffns),
        "hidden_size": ffn and ffn.hidden_size,
        "gated": ffn and ffn.gated,
        "activation": ffn and ffn.activation_name,
    }


def _list_differences(expected: dict[str, Any], found: dict[str, Any]) -> str:
    keys = [key for key in {**found, **expected} if expected.get(key) != found.get(key)]
    return ", ".join(f"{key} {expected.get(key)!r}, this base has {found.get(key)!r}" for key in keys)


def _find_load_problem(model: nn.Module, adapter_name: str, state_dict: dict[str, torch.Tensor]) -> str | None:
    """Compares the tensors about to be loaded with the memory's places in the model."""
    places = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LocasLayer) and adapter_name in layer.locas_up:
            for part, dictionary in layer.named_children():
                if part.startswith("locas_") and adapter_name in dictionary:
                    tensor = dictionary[adapter_name]
                    suffix = ".weight" if isinstance(tensor, nn.Module) else ""
                    tensor = tensor.weight if suffix else tensor
                    places[f"{name}.{part}.{adapter_name}{suffix}"] = tuple(tensor.shape)
    given = {key: tensor for key, tensor in state_dict.items() if re.search(r"\.locas_(gate|up|down|tau)\b", key)}
    given = {key if key in places else key.removeprefix("base_model.model."): given[key] for key in given}
    for key in places.keys() - given.keys():
        return f"the file has no {key}; load the base that the memory was made for"
    for key, tensor in given.items():
        if key not in places:
            return f"the model has no place for {key}; load the base that the memory was made for"
        if tuple(tensor.shape) != places[key]:
            return f"{key} has shape {list(tensor.shape)}, the model expects {list(places[key])}; check the config's r"
        if tensor.dtype not in WIDENABLE_DTYPES:
            return f"{key} is of {tensor.dtype}, a floating dtype of 16 bits or more expected; save the memory again"
        if not tensor.isfinite().all():
            return f"{key} holds values that are not finite; save or copy the memory again"
    return None


def _find_base_weight(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> str | None:
    """Finds a tensor that would replace a weight of the base: of those only embeddings travel with an adapter."""
    allowed: set[int] = set()
    for module in model.modules():
        if isinstance(module, LocasLayer):
            allowed.update(
                id(tensor) for name, tensor in module.state_dict(keep_vars=True).items() if "locas_" in name
            )
        elif isinstance(module, AuxiliaryTrainingWrapper):
            allowed.update(map(id, module.state_dict(keep_vars=True).values()))
        for embedding in (
            ("get_input_embeddings", "get_output_embeddings") if isinstance(module, PreTrainedModel) else ()
        ):
            with suppress(NotImplementedError, AttributeError):  # a part of the model may have none, or no answer
                allowed.update(map(id, getattr(module, embedding)().state_dict(keep_vars=True).values()))
    own = model.state_dict(keep_vars=True)
    for key in state_dict:
        for name in (key, key.removeprefix("base_model.model.")):
            if name in own and id(own[name]) not in allowed:
                return f"{key} is a weight of the base and no part of a memory; get the file from whom you trust"
    return None


def _is_arriving(model: nn.Module, config: LocasConfig, adapter_name: str) -> bool:
    """Whether a memory was put into the model for the file that could not be loaded: one that was there stays."""
    downs = [
        m.locas_down[adapter_name].weight
        for m in model.modules()
        if isinstance(m, LocasLayer)
        if adapter_name in m.locas_down
    ]
    return config._expected_host is not None and not any(not down.is_meta and bool(down.any()) for down in downs)


def _discard(model: nn.Module, adapter_name: str) -> None:
    """Takes a memory that could not be loaded out of a model again, and the layers that then hold none."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LocasLayer) and adapter_name in layer.locas_up:
            layer.delete_adapter(adapter_name)
            if not layer.locas_up:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, layer.release())
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    configs = model.peft_config
    configs.pop(adapter_name, None)
    if configs:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, AuxiliaryTrainingWrapper):
            parent, _, child = name.rpartition(".")
            plain = module.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
            setattr(model.get_submodule(parent), child, plain)
    for key, hook in list(base._forward_pre_hooks.items()):
        if hook is _hand_out_token_mask:
            del base._forward_pre_hooks[key], base._forward_pre_hooks_with_kwargs[key]
    if hasattr(base, "peft_config"):
        del base.peft_config
