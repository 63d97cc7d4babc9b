"""A causal language model as the rooms above use it: its limits, its adapter, its logits."""

from .causal_lm import CausalLM, check_window, count_positions
from .losses import divergences, token_losses

__all__ = ["CausalLM", "check_window", "count_positions", "divergences", "token_losses"]
