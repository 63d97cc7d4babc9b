"""The width of the host's FFNs in the model's config, which must follow where merged memories widen them."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .finding import AnyFFN, find_ffns
from .mixture import HostMixture

# Fields of a transformers config that hold the FFN's width.
WIDTH_FIELDS = tuple(
    "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim".split()
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


@dataclass
class WidthGroup:
    """FFNs of one original width, set by one field of the model's config, and their width after merging."""

    width: int
    new_width: int
    ffns: dict[str, AnyFFN]


def widened_config(
    model: PreTrainedModel, groups: list[WidthGroup], ffn_parts: dict[str, str] | None = None
) -> PretrainedConfig:
    """Return a copy of a model's config with the FFNs' new widths. A model built from it has exactly these shapes.

    `ffn_parts` are the names that the FFNs were found by. Where no field makes these widths, raise a `ValueError`.
    """
    config = copy.deepcopy(model.config)
    for part in _language_configs(config):
        for group in groups:
            _set_width(part, group)
    try:
        with torch.device("meta"):
            rebuilt = find_ffns(type(model)(copy.deepcopy(config)), ffn_parts)
    except (
        Exception
    ) as error:  # a config of an unknown family may fail in any way with an odd width
        raise ValueError(
            f"{type(model).__name__} cannot be rebuilt with wider FFNs: {error}"
        ) from None
    for group in groups:
        for name, ffn in group.ffns.items():
            if name not in rebuilt or rebuilt[name].slots != ffn.slots_at(group.new_width):
                what = f"no field of {type(config).__name__} makes {name} {group.new_width} wide"
                family = "in this family a memory can be used, merged and unmerged"
                raise ValueError(f"{what}: {family}, but not unloaded into a plain checkpoint.")
    return config


def widen_to(groups: list[WidthGroup], model: nn.Module, config: PretrainedConfig | None) -> None:
    """Pad the FFNs to their new widths, and write those of `widened_config` into the model's own config object."""
    for group in groups:
        for ffn in group.ffns.values():
            ffn.pad(group.new_width)
    if config is None:
        return
    fields = (
        *WIDTH_FIELDS,
        *EXPERT_FIELDS,
        *SHARED_FIELDS,
        *SHARED_COUNT_FIELDS,
        "block_auto_adjust_ff_dim",
    )
    # In place: the model's modules share the object.
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
    return (
        1
        if any(hasattr(model.config.get_text_config(), field) for field in SHARED_FIELDS)
        else ffn.expert_width
    )


def _set_width(config: PretrainedConfig, group: WidthGroup) -> None:
    width, new_width = group.width, group.new_width
    mixture = next((ffn for ffn in group.ffns.values() if isinstance(ffn, HostMixture)), None)
    if mixture is not None:
        step, shared = mixture.expert_width, mixture.widens_shared
        sizes: list[tuple[str, float, int]]
        sizes = [
            (field, width, new_width) for field in (SHARED_FIELDS if shared else EXPERT_FIELDS)
        ]
        sizes += [
            (field, width / step, new_width // step)
            for field in (SHARED_COUNT_FIELDS if shared else ())
        ]
        for field, old, new in sizes:
            if getattr(config, field, None) == old:
                setattr(config, field, new)
                return
        return
    if getattr(
        config, "block_auto_adjust_ff_dim", False
    ):  # LFM2 derives the width from intermediate_size
        config.block_auto_adjust_ff_dim = False
        config.intermediate_size = new_width
        return
    for field in WIDTH_FIELDS:
        default = 4 * getattr(config, "hidden_size", 0)  # the width of GPT-2 with n_inner=None
        if getattr(config, field, 0) in (width, None if width == default else width):
            setattr(config, field, new_width)
