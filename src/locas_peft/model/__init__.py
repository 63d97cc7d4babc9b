"""A causal language model as the rooms above use it: its limits, its adapter, its logits."""

from .base_weights import compute_once, fingerprint
from .causal_lm import CausalLM, check_window, count_positions, find_cache
from .losses import candidate_divergences, divergences, token_losses

__all__ = [
    "CausalLM",
    "candidate_divergences",
    "check_window",
    "compute_once",
    "count_positions",
    "divergences",
    "find_cache",
    "fingerprint",
    "token_losses",
]
