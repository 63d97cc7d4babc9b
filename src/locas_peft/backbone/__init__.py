"""The embedded backbone: tinybook-glu, a 5.8M-parameter Qwen3-architecture model of English books.

It comes with the package, so that the `locas` command, the examples and the tests need no network. It writes period
prose with no sense in it and answers no questions: it is there to be taught.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "locas_peft/tinybook-glu"
"""What stands for this backbone in a memory's config: the folder differs from one machine to the next."""


def path() -> Path:
    """Gives the folder with the backbone's weights, config and tokenizer, as transformers loads them."""
    return Path(__file__).resolve().parent


def load(
    dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the backbone in evaluation mode, without the network.

    Its texts must have one paragraph a line, as `locas_peft.text.unwrap` makes them: it has seen no others.

    Args:
        dtype: of the weights; float32 where None (they are stored in bfloat16).
        device: where the weights go; the CPU where None.

    Returns:
        The model (vocabulary 4,096, hidden size 256, 6 layers, at most 2,048 positions) and its tokenizer.

    Example:
        >>> from locas_peft import backbone
        >>> model, tokenizer = backbone.load()
        >>> model.config.hidden_size
        256
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path(), dtype=dtype or torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path(), local_files_only=True)
    return (model.to(device) if device is not None else model).eval(), tokenizer


def is_embedded(name: str) -> bool:
    """Says whether a recorded model name means this backbone: `NAME`, or its folder in any installation."""
    return name == NAME or Path(name).parts[-2:] == ("locas_peft", "backbone")
