"""Find the FFNs of a language model: dense ones and mixtures of experts, by their structure."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .ffn import FFNParts, HostFFN, find_dense, list_known_parts
from .mixture import HostMixture
from .modules import host_modules, is_wrapper, plain_name

# Towers beside a multimodal model's language model. Their FFNs get no memory.
OTHER_MODALITIES = re.compile(
    r"(^|[._])(vision|visual|image|audio|speech|connector|perceiver|resampler|codec)"
)
# The inputs of models whose encoder sees an image, which its name does not tell.
OF_IMAGES = ("pixel_values", "flattened_patches")

# A gated norm may have two small projections and an activation inside.
INSIDE_NORM = re.compile(r"norm[^.]*\.")
# What a memory can stand beside: one FFN, or one mixture's block.
AnyFFN = HostFFN | HostMixture


def find_ffns(model: nn.Module, parts: dict[str, str] | None = None) -> dict[str, AnyFFN]:
    """Find the FFNs of a language model by their structure, with adapters or without.

    The experts of a mixture are one FFN together, with the shared expert beside them. Vision and
    audio towers, and the experts of mixtures of an unknown structure, are left out. Whether a dense
    FFN computes what its parts say is not checked here (`HostFFN.verify`).

    Args:
        model: the model.
        parts: `LocasConfig.ffn_parts`.

    Returns:
        The FFNs in the model's order, by the names of the modules that a memory wraps: the FFN, the
        mixture's block, or the down projection of a flat FFN.
    """
    candidates = list_known_parts() if parts is None else [to_parts(parts)]
    ffns: dict[str, AnyFFN] = {}
    # What names begin with whose modules are left out: an encoder of images, mixtures' blocks.
    left_out: tuple[str, ...] = ()
    if getattr(model, "main_input_name", None) in OF_IMAGES and hasattr(model, "decoder"):
        left_out += ("encoder.",)
    sums: dict[type, bool] = {}
    for name, module in host_modules(model):
        is_inside = name.startswith(left_out) or "experts" in name.split(".")
        if isinstance(module, BaseTunerLayer) or is_wrapper(module):
            continue
        if is_inside or OTHER_MODALITIES.search(name) or INSIDE_NORM.search(name):
            continue
        plain = _name_in_host(name)
        if hasattr(module, "experts"):
            mixture = _find_mixture(module, plain, sums)
            if mixture is not None:
                ffns[plain] = mixture
                left_out += (f"{name}.",)
            continue
        dense = find_dense(module, plain, candidates, given=parts is not None)
        if dense is not None:
            ffns[f"{plain}.{dense.parts.down}" if dense.is_flat else plain] = dense
    ffns.pop("", None)
    return ffns


def _find_mixture(module: nn.Module, name: str, sums: dict[type, bool]) -> HostMixture | None:
    """Return the mixture of experts that a module is; None where it is another sum, or more.

    Args:
        sums: whether a block of each class is the sum of its experts; completed here.
    """
    try:
        mixture = HostMixture(module, name)
    except ValueError:
        return None
    kind = type(module)
    if kind not in sums:
        sums[kind] = mixture.is_sum_of_experts()
    return mixture if sums[kind] else None


def check_unshared(model: nn.Module, ffns: Mapping[str, AnyFFN]) -> None:
    """Raise a `ValueError` where a weight of some FFNs is used by another module of the model too.

    Widening it would widen that module, as in models whose layers share their FFN.
    """
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for name, ffn in ffns.items():
        if any(uses[id(weight)] > 1 for weight in ffn.list_weights()):
            problem = f"cannot widen {name}: another module of the model has its weights too"
            raise ValueError(f"{problem}; use the memory without merging it.")


def to_parts(names: dict[str, str]) -> FFNParts:
    """Return a user's names of an FFN's parts; raise a `ValueError` if they do not make an FFN."""
    unknown = set(names) - {field.name for field in fields(FFNParts)}
    if unknown or "down" not in names or ("up" in names) == ("gate_up" in names):
        ups = "either up (with gate, if gated) or gate_up"
        problem = f"ffn_parts must name down and {ups}, and may name activation"
        raise ValueError(f"{problem}; got {dict(names)}.")
    return FFNParts(**names)


def find_unknown_experts(model: nn.Module, ffns: dict[str, AnyFFN]) -> list[str]:
    """Name the modules that hold the experts of mixtures which are not among the FFNs."""
    unknown = []
    for name, _ in host_modules(model):
        block, _, last = name.rpartition(".")
        if last == "experts" and _name_in_host(block) not in ffns:
            unknown.append(name)
    return unknown


def _name_in_host(name: str) -> str:
    """Return a module's name before an adapter or torch wrapped it."""
    return re.sub(r"(\.base_layer)+$", "", plain_name(name))
