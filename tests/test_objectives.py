"""Objectives: a divergence is one, and a memory taught by the longer window comes nearer to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from families import VOCABULARY, make_host
from peft import LoraConfig, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer
from locas_peft.ttt import losses as losses_module
from locas_peft.ttt.losses import WEIGHTINGS, divergences

SETTINGS = {"window": 16, "stride": 8, "learning_rate": 0.01}


def make_model(kind: str = "locas") -> torch.nn.Module:
    host = make_host("llama")
    torch.manual_seed(1)
    if kind == "lora":
        return get_peft_model(host, LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return get_peft_model(host, LocasConfig(r=4, scaling=4.0))


def make_ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))


def read(trainer: TestTimeTrainer, ids: torch.Tensor) -> list[float]:
    return [chunk.nll_nats for chunk in trainer.read(ids)]


def trained(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def test_divergence_is_the_kl_from_teacher_to_pupil():
    pupil = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    expected = F.kl_div(pupil.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergences(pupil, teacher), expected)
    assert torch.equal(divergences(pupil, pupil), torch.zeros(5))
    assert (divergences(pupil, teacher) > 0).all()


@pytest.mark.parametrize("piece", [1, 3 * 50, 2**23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_divergences_and_their_gradients_are_the_same_at_any_piece_size(monkeypatch, piece, dtype):
    monkeypatch.setattr(losses_module, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (5 * torch.randn(2, 10, 50, generator=generator)).to(dtype)
    logits, weights = logits.requires_grad_(), torch.randn(10, generator=generator)
    found = divergences(logits, teacher)
    (found * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    pupil, told = (part.to(found.dtype).log_softmax(-1) for part in (logits, teacher))
    expected = F.kl_div(pupil, told, log_target=True, reduction="none").sum(-1)
    (expected * weights).sum().backward()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, logits.grad)


def test_rounding_does_not_grow_with_the_logits():
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(10, 500, generator=generator, dtype=torch.float64)
    pupil = teacher + 0.01 * torch.randn(10, 500, generator=generator, dtype=torch.float64)
    expected = divergences(pupil, teacher)
    rounded = [(part.float() + 1000).requires_grad_() for part in (pupil, teacher)]
    exact = divergences(*(part.detach().double() for part in rounded))  # of the logits as float32 has them
    torch.testing.assert_close(divergences(*rounded).double(), exact, rtol=0.02, atol=0.0)
    assert expected.min() > 1e-5


def test_no_tokens_have_no_losses():
    logits = torch.zeros(0, 7)
    assert divergences(logits, logits).shape == losses_module.token_losses(logits, torch.zeros(0).long()).shape == (0,)


def test_no_gradient_flows_into_the_teacher():
    pupil, teacher = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    divergences(pupil, teacher).sum().backward()
    assert teacher.grad is None and pupil.grad is not None


def test_weights_by_loss_are_shares_of_the_loss():
    losses = torch.tensor([1.0, 3.0], requires_grad=True)
    weighed = WEIGHTINGS["loss"](losses)
    weighed.backward()
    assert weighed.item() == pytest.approx((1 * 1 + 3 * 3) / 4)
    assert losses.grad.tolist() == pytest.approx([0.25, 0.75])
    even = torch.full((6,), 2.5)
    assert WEIGHTINGS["loss"](even).item() == pytest.approx(WEIGHTINGS["uniform"](even).item())
    assert WEIGHTINGS["loss"](torch.zeros(3)).item() == 0


def test_a_teacher_that_sees_no_more_teaches_nothing():
    model = make_model()
    # Plain steps: Adam would blow rounding errors up to whole ones.
    trainer = TestTimeTrainer(model, **SETTINGS, optimizer="sgd", objective="distill", teacher_window=16)
    ids = make_ids(40)
    scores = read(trainer, ids)
    plain = TestTimeTrainer(make_host("llama"), window=16, stride=8, learning_rate=None)
    assert scores == pytest.approx(read(plain, ids), abs=1e-6)


@pytest.mark.parametrize("kind", ["locas", "lora"])
@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_the_pupil_comes_nearer_to_its_teacher(kind, context):
    model, ids = make_model(kind), make_ids(48)
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    trainer = TestTimeTrainer(model, **SETTINGS, context=context, objective="distill", teacher_window=48)

    def distance() -> float:
        with torch.no_grad():
            with model.disable_adapter():
                teacher = model(ids[:-1].unsqueeze(0)).logits[0, -8:]
            return divergences(model(ids[-17:-1].unsqueeze(0)).logits[0, -8:], teacher).mean().item()

    before = distance()
    first = None
    for _ in range(15):
        scores = read(trainer, ids)
        first = first or scores[0]
        trainer.rewind()
    for name, value in model.named_parameters():
        value.requires_grad_(flags[name])  # `disable_adapter` above switches them
    assert distance() < 0.7 * before
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags
    plain = TestTimeTrainer(make_model(kind), **SETTINGS, context=context)
    assert next(iter(plain.read(ids))).nll_nats == first, "the measure does not depend on the objective"


def test_reading_leaves_the_adapter_on_and_its_flags_alone():
    model = make_model("lora")
    frozen = next(name for name, value in model.named_parameters() if value.requires_grad)
    model.get_parameter(frozen).requires_grad_(False)
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    read(TestTimeTrainer(model, **SETTINGS, objective="distill", teacher_window=32), make_ids(40))
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags
    assert not any(getattr(module, "_disable_adapters", False) for module in model.modules())


@pytest.mark.parametrize("options", [{"objective": "distill", "teacher_window": 32}, {"token_weighting": "loss"}])
def test_a_resumed_reading_ends_where_an_unbroken_one_does(tmp_path, options):
    ids, whole, broken, resumed = make_ids(60), make_model(), make_model(), make_model()
    read(TestTimeTrainer(whole, **SETTINGS, **options), ids)
    first = TestTimeTrainer(broken, **SETTINGS, **options)
    for chunk in first.read(ids):
        if chunk.index == 3:
            first.save(tmp_path)
            break
    second = TestTimeTrainer(resumed, **SETTINGS, **options)
    assert second.resume(tmp_path)
    read(second, ids)
    expected, found = trained(whole), trained(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    with pytest.raises(
        ValueError, match=r"^(objective|token_weighting|teacher_window) must be .* as in the checkpoint"
    ):
        TestTimeTrainer(make_model(), **SETTINGS).resume(tmp_path)


def test_weighting_changes_what_is_learned_and_not_what_is_measured():
    models = {weighting: make_model() for weighting in WEIGHTINGS}
    scores = {
        weighting: read(TestTimeTrainer(model, **SETTINGS, token_weighting=weighting), make_ids(40))
        for weighting, model in models.items()
    }
    assert scores["uniform"][0] == scores["loss"][0]
    assert scores["uniform"][-1] != scores["loss"][-1]


def test_the_teacher_sees_four_windows_or_all_positions_by_default():
    assert TestTimeTrainer(make_model(), **SETTINGS, objective="distill").teacher_window == 64
    assert (
        TestTimeTrainer(make_model(), window=32, stride=8, learning_rate=0.1, objective="distill").teacher_window == 64
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "kl"}, r"^objective must be 'nll' or 'distill', got 'kl': choose one of the two$"),
        ({"token_weighting": "focal"}, r"^token_weighting must be one of uniform, loss, got 'focal': choose"),
        ({"teacher_window": 32}, r"^teacher_window has a meaning for the objective 'distill' only, got 32 with 'nll'"),
        (
            {"objective": "distill", "teacher_window": 15},
            r"^teacher_window must be from window \(16\) to the model's 64",
        ),
        (
            {"objective": "distill", "teacher_window": 65},
            r"^teacher_window must be .* got 65: the teacher sees at least",
        ),
    ],
)
def test_bad_options_are_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        TestTimeTrainer(make_model(), **SETTINGS, **options)
