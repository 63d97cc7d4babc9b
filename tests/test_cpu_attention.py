"""Attention by matrix products gives what torch's own gives, and is used only where it is faster."""

import pytest
import torch
from families import make_host, make_tokens
from torch.nn.functional import scaled_dot_product_attention as fused

from locas_peft.model import CausalLM, cpu_attention
from locas_peft.model.cpu_attention import CpuAttention
from locas_peft.ttt import TestTimeTrainer


def draw(heads: int, tokens: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(2, heads, tokens, 16, dtype=dtype).requires_grad_()


@pytest.fixture
def used(monkeypatch):
    calls = []
    attend = cpu_attention._attend
    monkeypatch.setattr(
        cpu_attention, "_attend", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs)
    )
    return calls


def make_mask(kind: str) -> torch.Tensor:
    """Queries after two cached keys; the first row begins with a key of padding."""
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    if kind == "two-dimensional":
        return mask
    mask = mask.repeat(2, 1, 1, 1)
    mask[0, :, :, 0] = False
    if kind == "bool":
        return mask
    return torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("kind", ["bool", "added", "two-dimensional"])
@pytest.mark.parametrize("groups", [4, 2])
def test_values_and_gradients_are_those_of_exact_attention(used, kind, groups):
    torch.manual_seed(0)
    query, key, value, mask = draw(4, 5), draw(groups, 7), draw(groups, 7), make_mask(kind)
    options = {"attn_mask": mask, "enable_gqa": groups < 4, "scale": 0.3}
    with CpuAttention():
        ours = fused(query, key, value, **options)
    assert used and ours.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    options["attn_mask"] = mask if mask.dtype == torch.bool else mask.double()
    expected = fused(*exact, **options)
    torch.testing.assert_close(ours.double(), expected, atol=0.02, rtol=0.02)
    outer = torch.randn_like(ours)
    ours.backward(outer)
    expected.backward(outer.double())
    for own, other in zip((query, key, value), exact, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, atol=0.05, rtol=0.05)


def test_a_query_that_attends_to_nothing_is_finite():
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    with CpuAttention():
        assert fused(draw(4, 5), draw(4, 7), draw(4, 7), attn_mask=mask).isfinite().all()


def test_torchs_own_kernel_is_kept_without_a_mask_in_other_dtypes_and_outside(used):
    mask = make_mask("bool")
    with CpuAttention():
        fused(draw(4, 7), draw(4, 7), draw(4, 7), is_causal=True)
        fused(*(draw(4, tokens, torch.float32) for tokens in (5, 7, 7)), attn_mask=mask)
        fused(draw(4, 5), draw(4, 7), draw(4, 7), attn_mask=mask, dropout_p=0.1)
        fused(draw(4, 5), draw(4, 7), draw(4, 7), attn_mask=mask, is_causal=True)
    fused(draw(4, 5), draw(4, 7), draw(4, 7), attn_mask=mask)
    assert not used


@pytest.mark.parametrize(("dtype", "uses"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_chunk_after_cached_tokens_uses_it_in_bfloat16(used, dtype, uses):
    model = make_host("llama").to(dtype)
    model.set_attn_implementation("sdpa")
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=None, context="cache")
    for _ in trainer.read(make_tokens(1, 32)[0]):
        pass
    assert bool(used) is uses
    before = len(used)
    CausalLM(model).logits(make_tokens(1, 8), 8, use_cache=False)  # no mask
    assert len(used) == before
