"""The width of the host's FFNs in the model's config, which follows where merging widens them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .finding import AnyFFN, find_ffns
from .mixture import HostMixture
from .modules import unwrap

# Fields of a transformers config that hold the FFN's width.
WIDTH_FIELDS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "d_ff",
    "ffn_hidden_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "hidden_dim",
)
# Of a mixture: the width of an expert, that of the shared expert, and its width in experts.
EXPERT_FIELDS = ("moe_intermediate_size", "intermediate_size", "ffn_dim")
SHARED_FIELDS = ("shared_expert_intermediate_size", "shared_intermediate_size")
SHARED_COUNT_FIELDS = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
)
# LFM2 derives the width from intermediate_size where this is set.
ADJUSTMENT = "block_auto_adjust_ff_dim"


@dataclass
class WidthGroup:
    """FFNs of one original width, set by one field of the config, and their width after merging."""

    width: int
    new_width: int
    ffns: dict[str, AnyFFN]


def widened_config(
    model: PreTrainedModel, groups: list[WidthGroup], ffn_parts: dict[str, str] | None = None
) -> PretrainedConfig:
    """Return a copy of a model's config with the FFNs' new widths.

    A model that is built from it has exactly these shapes.

    Args:
        model: the model; unchanged.
        groups: the FFNs with their widths.
        ffn_parts: the names that the FFNs were found by.

    Raises:
        ValueError: where no field makes these widths.
    """
    config = copy.deepcopy(model.config)
    for part in _language_configs(config):
        for group in groups:
            _set_width(part, group)
    try:
        with torch.device("meta"):
            rebuilt = find_ffns(type(unwrap(model))(copy.deepcopy(config)), ffn_parts)
    except Exception as error:
        # The code of an unknown family may fail in any way with an odd width.
        problem = f"{type(model).__name__} cannot be rebuilt with wider FFNs: {error}"
        raise ValueError(problem) from None
    for group in groups:
        for name, ffn in group.ffns.items():
            if name not in rebuilt or rebuilt[name].slots != ffn.slots_at(group.new_width):
                field = f"no field of {type(config).__name__} makes {name} {group.new_width} wide"
                uses = "in this family a memory can be used, merged and unmerged"
                raise ValueError(f"{field}: {uses}, but not unloaded into a plain checkpoint.")
    return config


@torch.inference_mode(False)
def widen_to(groups: list[WidthGroup], model: nn.Module, config: PretrainedConfig | None) -> None:
    """Pad FFNs to their new widths, and write the widths into the model's own config object.

    Args:
        groups: the FFNs; mutated.
        model: their model; its config is mutated in place, since its modules share the object.
        config: what `widened_config` returned; `None` for a model without a config.
    """
    for group in groups:
        for ffn in group.ffns.values():
            ffn.pad(group.new_width)
    if config is None:
        return
    fields = (*WIDTH_FIELDS, *EXPERT_FIELDS, *SHARED_FIELDS, *SHARED_COUNT_FIELDS, ADJUSTMENT)
    for new, old in zip(_language_configs(config), _language_configs(model.config), strict=True):
        for field in fields:
            if hasattr(new, field) and getattr(new, field) != getattr(old, field):
                setattr(old, field, getattr(new, field))


def _language_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def width_step(model: nn.Module, ffn: AnyFFN) -> int:
    """Return the number that an FFN's width in the model's config is a multiple of."""
    if not isinstance(ffn, HostMixture) or not ffn.widens_shared or not hasattr(model, "config"):
        return 1
    config = model.config.get_text_config()
    if any(hasattr(config, field) for field in SHARED_FIELDS):
        return 1
    return ffn.expert_width


def _set_width(config: PretrainedConfig, group: WidthGroup) -> None:
    for ffn in group.ffns.values():
        if isinstance(ffn, HostMixture):
            _set_mixture_width(config, group, ffn)
            return
    if getattr(config, ADJUSTMENT, False):
        setattr(config, ADJUSTMENT, False)
        config.intermediate_size = group.new_width
        return
    # GPT-2's n_inner is None for this width.
    is_default = group.width == 4 * getattr(config, "hidden_size", 0)
    for field in WIDTH_FIELDS:
        value = getattr(config, field, 0)
        if value == group.width or (value is None and is_default):
            setattr(config, field, group.new_width)


def _set_mixture_width(config: PretrainedConfig, group: WidthGroup, mixture: HostMixture) -> None:
    if not mixture.widens_shared:
        _set_first(config, EXPERT_FIELDS, group.width, group.new_width)
        return
    step = mixture.expert_width
    if not _set_first(config, SHARED_FIELDS, group.width, group.new_width):
        _set_first(config, SHARED_COUNT_FIELDS, group.width / step, group.new_width // step)


def _set_first(config: PretrainedConfig, fields: Sequence[str], value: float, new: int) -> bool:
    """Set the first of some fields that has a value to a new one; return whether there is one."""
    for field in fields:
        if getattr(config, field, None) == value:
            setattr(config, field, new)
            return True
    return False
