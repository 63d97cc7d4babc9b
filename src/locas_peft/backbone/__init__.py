"""The embedded backbones: two small models of English books, which need no network.

They generate prose without meaning. tinybook-glu (Qwen3 architecture, gated FFNs) is the default
everywhere; tinybook-mlp (GPT-NeoX with ReLU, two-layer FFNs) is the host for Locas-MLP. They share
a tokenizer.
"""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checks import check_choice

__all__ = ["MLP_NAME", "NAME", "is_embedded", "load", "name_of", "path"]

NAME = "locas_peft/tinybook-glu"
"""The default backbone's name in a memory's config; its folder differs between machines."""
MLP_NAME = "locas_peft/tinybook-mlp"
"""The name of the backbone with two-layer FFNs."""
# The ends of the backbones' folders.
_FOLDERS = {NAME: ("locas_peft", "backbone"), MLP_NAME: ("locas_peft", "backbone", "tinybook_mlp")}


def path(name: str = NAME) -> Path:
    """Return a backbone's folder: weights, config and tokenizer, as transformers loads them."""
    check_choice("name", name, _FOLDERS)
    return Path(__file__).resolve().parent.joinpath(*_FOLDERS[name][2:])


def load(
    dtype: torch.dtype | None = None, device: torch.device | str | None = None, name: str = NAME
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a backbone in evaluation mode, without the network: the model and its tokenizer.

    The model has a vocabulary of 4,096 tokens, hidden size 256, 6 layers, and at most 2,048
    positions. Its texts must have one paragraph a line, as `locas_peft.text.unwrap` makes them: it
    has seen no others. The weights, which are stored in bfloat16, are float32 on the CPU if nothing
    else is given.
    """
    folder = path(name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if device is not None:
        model = model.to(device)
    return model.eval(), tokenizer


def is_embedded(name: str) -> bool:
    """Return whether a name is one of these backbones, or the folder of one in any installation."""
    return name_of(name) in _FOLDERS


def name_of(name: str) -> str:
    """Return the name of the backbone that a name or a folder, of any installation, means.

    Other names are returned unchanged.
    """
    if name in _FOLDERS:
        return name
    parts = Path(name).parts
    for known_name, end in _FOLDERS.items():
        if parts[-len(end) :] == end:
            return known_name
    return name
