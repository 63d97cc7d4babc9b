"""Find the FFNs of a language model: dense ones and mixtures of experts, by their structure."""

import re
from dataclasses import fields

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .ffn import FFNParts, HostFFN, find_dense, list_known_parts
from .mixture import HostMixture

# Towers beside a multimodal model's language model. Their FFNs get no memory unless they are named.
OTHER_MODALITIES = re.compile(r"(^|[._])(vision|visual|image|audio|speech)")

AnyFFN = HostFFN | HostMixture  # what a memory can stand beside: one FFN, or one mixture's block


def find_ffns(model: nn.Module, parts: dict[str, str] | None = None) -> dict[str, AnyFFN]:
    """Find the FFNs of a language model, with adapters or without, by their structure, in the model's order.

    The experts of a mixture are one FFN together, with the shared expert beside them. Vision and audio towers, and
    mixtures of an unknown structure, are left out. The keys are the names of the modules that a memory wraps: the FFN,
    the mixture's block, or the down projection of a flat FFN. `parts` is `LocasConfig.ffn_parts`.
    """
    candidates = list_known_parts() if parts is None else [to_parts(parts)]
    found: dict[str, AnyFFN] = {}
    blocks: tuple[str, ...] = ()
    for name, module in model.named_modules():
        inside = name.startswith(blocks) or "experts" in name.split(".")
        if isinstance(module, BaseTunerLayer) or inside or OTHER_MODALITIES.search(name):
            continue
        host = _plain_name(name)
        if hasattr(module, "experts"):
            try:
                found[host] = HostMixture(module, host)
            except ValueError:
                continue
            blocks += (f"{name}.",)
        elif dense := find_dense(module, host, candidates, given=parts is not None):
            found[f"{host}.{dense.parts.down}" if dense.is_flat else host] = dense
    found.pop("", None)
    first_of_class: dict[tuple, AnyFFN] = {}
    for ffn in found.values():
        first_of_class.setdefault((type(ffn.owner), ffn.parts), ffn)
    for ffn in first_of_class.values():
        if isinstance(ffn, HostFFN):
            ffn.verify()
        elif not ffn.is_sum_of_experts():
            found = {
                name: other
                for name, other in found.items()
                if type(other.owner) is not type(ffn.owner)
            }
    return found


def to_parts(names: dict[str, str]) -> FFNParts:
    """Return a user's names of an FFN's parts; raise a `ValueError` if they do not make an FFN."""
    unknown = set(names) - {field.name for field in fields(FFNParts)}
    if unknown or "down" not in names or ("up" in names) == ("gate_up" in names):
        what = "ffn_parts must name down and either up (with gate, if gated) or gate_up, and may name activation"
        raise ValueError(f"{what}; got {dict(names)}.")
    return FFNParts(**names)


def find_unknown_experts(model: nn.Module, found: dict[str, AnyFFN]) -> list[str]:
    """Name the modules that hold the experts of mixtures which are not among the FFNs that were found."""
    experts = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    return [name for name in experts if _plain_name(name.rpartition(".")[0]) not in found]


def _plain_name(name: str) -> str:
    """Return a module's name before an adapter wrapped it."""
    return re.sub(r"(\.base_layer)+$", "", name)
