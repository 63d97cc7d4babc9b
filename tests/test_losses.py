"""The losses and their gradients are those of PyTorch at any piece size."""

import pytest
import torch
import torch.nn.functional as F

from locas_peft.model import candidate_divergences, divergences, losses, token_losses


def draw(
    *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def kl_divergences(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    teacher = teacher.to(logits.dtype).log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("piece", [1, 3 * 50, 2**23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["nll", "divergence"])
def test_losses_and_their_gradients_are_the_same_at_any_piece_size(monkeypatch, name, dtype, piece):
    monkeypatch.setattr(losses, "PIECE", piece)
    logits, weights = draw(10, 50, scale=5, dtype=dtype).requires_grad_(), draw(10, seed=1)
    compute, plain, targets = token_losses, cross_entropies, torch.arange(0, 50, 5)
    if name == "divergence":
        compute, plain = divergences, kl_divergences
        targets = draw(10, 50, scale=5, dtype=dtype, seed=2)
    found = compute(logits, targets)
    (found * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    expected = plain(logits.to(found.dtype), targets)
    (expected * weights).sum().backward()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, logits.grad)


def test_all_other_tokens_are_one_outcome_beside_the_candidates():
    logits, teacher = draw(6, 9), draw(6, 9, seed=1).softmax(-1)
    top, candidates = teacher.topk(3)
    outcomes = []
    for probabilities in (logits.softmax(-1), teacher):
        of_candidates = probabilities.gather(1, candidates)
        others = 1 - of_candidates.sum(-1, keepdim=True)
        outcomes.append(torch.cat([of_candidates, others], -1).log())
    expected = F.kl_div(*outcomes, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(candidate_divergences(logits, candidates, top), expected)

    certain = candidate_divergences(logits, candidates[:, :1], torch.ones(6, 1))
    torch.testing.assert_close(certain, token_losses(logits, candidates[:, 0]))


def test_rounding_does_not_grow_with_the_logits():
    teacher = draw(10, 500).double()
    student = teacher + 0.01 * draw(10, 500, seed=1).double()
    rounded = [(logits.float() + 1000).requires_grad_() for logits in (student, teacher)]
    # Of the logits as float32 has them.
    exact = divergences(*(logits.detach().double() for logits in rounded))
    torch.testing.assert_close(divergences(*rounded).double(), exact, rtol=0.02, atol=0.0)
    assert exact.min() > 1e-5


def test_no_tokens_have_no_losses():
    logits = torch.zeros(0, 7)
    assert divergences(logits, logits).shape == (0,)
    assert token_losses(logits, torch.zeros(0).long()).shape == (0,)
