"""NL-SVD: what holds of a folded memory, and what the paper says of it that does not."""

import math

import pytest
import torch
from torch.nn.functional import gelu, normalize

from locas_peft.slots.nlsvd import nl_svd

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def recall(key, value, inputs, activation=torch.relu):
    """f(A) = V^T phi(K^T A) of inputs as rows."""
    return activation(inputs @ key) @ value


def make_memory(d=12, r=8, layers=(), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(*layers, d, r, generator=generator, dtype=torch.float64)
    value = torch.randn(*layers, r, d, generator=generator, dtype=torch.float64)
    return key.to(dtype), value.to(dtype)


@pytest.mark.parametrize("d, r", [(12, 8), (8, 12), (8, 8)], ids=["narrow", "wide", "square"])
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_probes_are_orthonormal_and_the_memory_answers_at_them(d, r, rank):
    key, value = make_memory(d, r, layers=(3,))
    reduced = nl_svd(key, value, rank)
    assert reduced.key.shape == (3, d, rank) and reduced.value.shape == (3, rank, d)
    assert reduced.kept.all()
    torch.testing.assert_close(
        reduced.key.mT @ reduced.key, torch.eye(rank).double().expand(3, -1, -1), **EXACT
    )
    for length in (1.0, 7.5):  # ReLU: the whole ray through a probe
        probes = length * reduced.key.mT
        torch.testing.assert_close(
            recall(reduced.key, reduced.value, probes), recall(key, value, probes), **EXACT
        )


def test_float32_keeps_the_guarantees_too():
    key, value = make_memory(64, 48, layers=(2,), dtype=torch.float32)
    reduced = nl_svd(key, value, 24)
    assert reduced.key.dtype == reduced.value.dtype == torch.float32
    torch.testing.assert_close(
        reduced.key.mT @ reduced.key, torch.eye(24).expand(2, -1, -1), rtol=0, atol=1e-5
    )
    probes = reduced.key.mT
    expected = recall(key, value, probes)
    error = (recall(reduced.key, reduced.value, probes) - expected).norm() / expected.norm()
    assert error < 1e-5


def test_orthogonal_keys_with_distinct_scales_come_back_whole():
    directions = torch.linalg.qr(
        torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).double()
    ).Q
    key = directions * torch.tensor([3.0, 0.5, 2.0, 1.0, 5.0, 0.1])
    _, value = make_memory(12, 6)
    reduced = nl_svd(key, value, 6)
    inputs = torch.randn(50, 12, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(
        recall(reduced.key, reduced.value, inputs), recall(key, value, inputs), **EXACT
    )
    # The strongest s_i = |k_i| |v_i| first, each with its own key's direction and side.
    order = (key.norm(dim=0) * value.norm(dim=1)).argsort(descending=True)
    torch.testing.assert_close(reduced.key, normalize(key, dim=0)[:, order], **EXACT)


def test_the_span_of_the_probes_is_not_reproduced():
    """The paper says that it is. Two keys at 60 degrees in the plane, values e_1 and e_2, nothing discarded."""
    key = torch.tensor([[1.0, 0.5], [0.0, math.sqrt(0.75)]], dtype=torch.float64)
    value = torch.eye(2, dtype=torch.float64)
    reduced = nl_svd(key, value, 2)
    probes = reduced.key.mT
    torch.testing.assert_close(
        recall(reduced.key, reduced.value, probes), recall(key, value, probes), **EXACT
    )
    point = probes.sum(dim=0, keepdim=True)
    # The second key is silent at one of the probes and speaks at their sum: f is not additive.
    assert (recall(reduced.key, reduced.value, point) - recall(key, value, point)).norm() > 0.1


def test_both_signs_of_a_probe_are_tried():
    key, value = make_memory(12, 8)
    reduced = nl_svd(key, value, 8)
    here, there = (
        (torch.relu(side * reduced.key.mT @ key) * value.norm(dim=1)).square().sum(dim=-1)
        for side in (1, -1)
    )
    assert (here >= there).all()
    mirrored = nl_svd(-key, value, 8)  # f(-A): the same directions, the other sides
    torch.testing.assert_close(mirrored.key, -reduced.key, **EXACT)
    torch.testing.assert_close(mirrored.value, reduced.value, **EXACT)


def test_a_scale_moved_between_key_and_value_changes_nothing():
    key, value = make_memory()
    factor = torch.tensor([0.1, 10.0, 3.0, 1.0, 0.5, 2.0, 7.0, 0.3], dtype=torch.float64)
    once, again = nl_svd(key, value, 5), nl_svd(key * factor, value / factor[:, None], 5)
    torch.testing.assert_close(again.key, once.key, **EXACT)
    torch.testing.assert_close(again.value, once.value, **EXACT)


def test_layers_are_folded_each_for_itself():
    key, value = make_memory(layers=(2, 3))
    together = nl_svd(key, value, 4)
    alone = nl_svd(key[1, 2], value[1, 2], 4)
    for batched, single in zip(together, alone, strict=True):
        torch.testing.assert_close(batched[1, 2], single, **EXACT)


@pytest.mark.parametrize("probe_norm", [1.0, 4.0])
def test_another_activation_is_matched_at_the_probes_norm_alone(probe_norm):
    key, value = make_memory()
    reduced = nl_svd(key, value, 5, activation=gelu, probe_norm=probe_norm)

    def error(length):
        probes = length * reduced.key.mT
        return (
            recall(reduced.key, reduced.value, probes, gelu) - recall(key, value, probes, gelu)
        ).norm()

    assert error(probe_norm) < 1e-9
    assert error(2 * probe_norm) > 1e-3


def test_directions_that_are_not_there_give_zero_slots():
    key, value = make_memory(12, 3)
    key, value = key.repeat(1, 2), value.repeat(2, 1)  # six slots, three directions
    reduced = nl_svd(key, value, 6)
    assert reduced.kept.tolist() == [True] * 3 + [False] * 3
    assert not reduced.key[:, 3:].any() and not reduced.value[3:].any()
    wide = nl_svd(*make_memory(4, 9), 6)  # no more than D directions
    assert wide.kept.tolist() == [True] * 4 + [False] * 2 and wide.key.shape == (4, 6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda k, v: (k.bfloat16(), v.bfloat16(), 4), TypeError, "key must be float32 or float64"),
        (lambda k, v: (k, v.half(), 4), TypeError, "value must be .*, got torch.float16"),
        (
            lambda k, v: (k, v.float(), 4),
            TypeError,
            "one dtype, got torch.float64 and torch.float32",
        ),
        (lambda k, v: (k, v, 9), ValueError, "rank must be at most the memory's width 8, got 9:"),
        (lambda k, v: (k, v, 0), ValueError, "rank must be at least 1, got 0: raise it"),
        (lambda k, v: (k, v, 4.0), TypeError, "rank must be an int, got float"),
        (lambda k, v: (k.mT, v, 4), ValueError, r"got \[8, 12\] and \[8, 12\]: transpose one of"),
        (lambda k, v: (k, v * float("nan"), 4), ValueError, "key and value must be finite"),
        (lambda k, v: (k, v * 0, 4), ValueError, "got an empty memory: write one first"),
    ],
)
def test_bad_input_is_named(change, error, message):
    key, value, rank = change(*make_memory())
    with pytest.raises(error, match=message):
        nl_svd(key, value, rank)


def test_an_activation_that_is_silent_at_the_probes_is_refused():
    with pytest.raises(ValueError, match="probe_norm must be above 0 and activate"):
        nl_svd(*make_memory(), 4, probe_norm=-1.0)
