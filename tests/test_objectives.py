"""Objectives: the losses and their gradients at any piece size, the teacher, and an objective from outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from training import CONTEXTS, SETTINGS, make_ids, make_model, make_trainer, read, sgd

from locas_peft import TestTimeTrainer, backbone
from locas_peft.reading.settings import ReadingSettings
from locas_peft.reading.teaching import memorize
from locas_peft.ttt import OBJECTIVES, WEIGHTINGS, Objective, divergences, objectives, token_losses


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def kl_divergences(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    teacher = teacher.to(logits.dtype).log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("piece", [1, 3 * 50, 2**23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("losses", "plain"), [(token_losses, cross_entropies), (divergences, kl_divergences)], ids=["nll", "divergence"]
)
def test_losses_and_their_gradients_are_the_same_at_any_piece_size(monkeypatch, losses, plain, dtype, piece):
    monkeypatch.setattr(objectives, "PIECE", piece)
    logits, weights = draw(10, 50, scale=5, dtype=dtype).requires_grad_(), draw(10, seed=1)
    targets = draw(10, 50, scale=5, dtype=dtype, seed=2) if losses is divergences else torch.arange(0, 50, 5)
    found = losses(logits, targets)
    (found * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    expected = plain(logits.to(found.dtype), targets)
    (expected * weights).sum().backward()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, logits.grad)


def test_a_divergence_is_zero_where_the_two_agree_and_positive_elsewhere():
    student, teacher = draw(5, 5), draw(5, 5, seed=1)
    assert torch.equal(divergences(student, student), torch.zeros(5))
    assert (divergences(student, teacher) > 0).all()


def test_rounding_does_not_grow_with_the_logits():
    teacher = draw(10, 500).double()
    student = teacher + 0.01 * draw(10, 500, seed=1).double()
    rounded = [(part.float() + 1000).requires_grad_() for part in (student, teacher)]
    exact = divergences(*(part.detach().double() for part in rounded))  # of the logits as float32 has them
    torch.testing.assert_close(divergences(*rounded).double(), exact, rtol=0.02, atol=0.0)
    assert divergences(student, teacher).min() > 1e-5


def test_no_tokens_have_no_losses():
    logits = torch.zeros(0, 7)
    assert divergences(logits, logits).shape == token_losses(logits, torch.zeros(0).long()).shape == (0,)


def test_no_gradient_flows_into_the_teacher():
    student, teacher = draw(3, 4).requires_grad_(), draw(3, 4).requires_grad_()
    divergences(student, teacher).sum().backward()
    assert teacher.grad is None and student.grad is not None


def test_weights_by_loss_are_shares_of_the_loss():
    losses = torch.tensor([1.0, 3.0], requires_grad=True)
    weighted = WEIGHTINGS["loss"](losses)
    weighted.backward()
    assert weighted.item() == pytest.approx((1 * 1 + 3 * 3) / 4)
    assert losses.grad.tolist() == pytest.approx([0.25, 0.75])
    even = torch.full((6,), 2.5)
    assert WEIGHTINGS["loss"](even).item() == pytest.approx(WEIGHTINGS["uniform"](even).item())
    assert WEIGHTINGS["loss"](torch.zeros(3)).item() == 0


def test_a_teacher_with_the_students_context_teaches_nothing():
    # Plain steps: Adam would scale rounding errors up to whole steps.
    settings = {"learning_rate": None, "optimizer": sgd(0.01), "objective": "distill", "teacher_window": 16}
    scores = read(make_trainer(**settings), make_ids(40))
    assert scores == pytest.approx(read(make_trainer("plain"), make_ids(40)), abs=1e-6)


@pytest.mark.parametrize("kind", ["locas", "lora"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_student_comes_nearer_to_its_teacher(kind, context):
    model, ids = make_model(kind), make_ids(48)
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    settings = {"context": context, "learning_rate": 0.01}
    trainer = TestTimeTrainer(model, **SETTINGS | settings, objective="distill", teacher_window=48)

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
    plain = make_trainer(kind, **settings)
    assert next(iter(plain.read(ids))).nll_nats == first, "the measure does not depend on the objective"


def test_a_teacher_leaves_the_adapter_on_and_its_flags_alone():
    model = make_model("lora")
    next(value for value in model.parameters() if value.requires_grad).requires_grad_(False)
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    read(TestTimeTrainer(model, **SETTINGS, objective="distill", teacher_window=32), make_ids(40))
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags
    assert not any(getattr(module, "_disable_adapters", False) for module in model.modules())


def test_weighting_changes_what_is_learned_and_not_what_is_measured():
    scores = {name: read(make_trainer(token_weighting=name), make_ids(40)) for name in WEIGHTINGS}
    assert scores["uniform"][0] == scores["loss"][0]
    assert scores["uniform"][-1] != scores["loss"][-1]


@pytest.mark.parametrize("window", [16, 32])
def test_the_teacher_has_four_windows_or_all_positions_by_default(window):
    assert make_trainer(objective="distill", window=window).settings.teacher_window == 64


@pytest.mark.parametrize("window", [15, 65])
def test_a_teachers_window_lies_between_the_window_and_the_models_positions(window):
    with pytest.raises(ValueError) as caught:
        make_trainer(objective="distill", teacher_window=window)
    assert str(caught.value) == (
        f"teacher_window must be from window (16) to the model's 64 positions, got {window}: the teacher's context is "
        "at least the student's"
    )


def focal_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """An objective as a user would add it: tokens that are predicted well count less."""
    losses = token_losses(logits, targets)
    return (1 - (-losses).exp()) ** 2 * losses


def reversed_divergences(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    student, teacher = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return (student.exp() * (student - teacher)).sum(-1)


@pytest.mark.parametrize(
    ("objective", "options"),
    [(Objective(focal_losses), {}), (Objective(reversed_divergences, needs_teacher=True), {"teacher_window": 32})],
    ids=["focal", "reversed"],
)
def test_an_objective_from_outside_is_one_function_and_one_row(monkeypatch, objective, options):
    monkeypatch.setitem(OBJECTIVES, "mine", objective)
    ids, trainer = make_ids(64).repeat(3), make_trainer(objective="mine", **options)
    plain, scores = read(make_trainer(), ids), read(trainer, ids)
    assert scores[0] == plain[0], "the measure does not depend on the objective"
    assert scores[1:] != plain[1:] and all(chunk.learned for chunk in trainer.chunks)


def test_an_objective_from_outside_reaches_a_reading(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "mine", Objective(focal_losses))
    base, _ = backbone.load()
    readings = [
        memorize(base, make_ids(200), ReadingSettings(objective=name, window=64, stride=32, r=4, anchor=0))
        for name in ("nll", "mine")
    ]
    assert readings[1].settings.training.objective == "mine"
    assert readings[0].curve[0] == readings[1].curve[0]
    assert readings[0].curve[-1] != readings[1].curve[-1]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="^objective must be one of nll, distill, got 'mine': choose one of them$"):
        ReadingSettings(objective="mine")
