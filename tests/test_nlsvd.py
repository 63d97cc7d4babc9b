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


def make_memory(d=12, r=8, layers=(), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(*layers, d, r, generator=generator, dtype=torch.float64)
    value = torch.randn(*layers, r, d, generator=generator, dtype=torch.float64)
    return key.to(dtype), value.to(dtype)


def difference(reduced, key, value, probes, activation=torch.relu):
    """The relative difference between two memories' answers."""
    expected = recall(key, value, probes, activation)
    found = recall(reduced.key, reduced.value, probes, activation)
    return (found - expected).norm() / expected.norm()


@pytest.mark.parametrize("d, r", [(12, 8), (8, 12), (8, 8)], ids=["narrow", "wide", "square"])
@pytest.mark.parametrize("rank", [1, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_probes_are_orthonormal_and_the_memory_answers_at_them(d, r, rank, dtype, tolerance):
    key, value = make_memory(d, r, layers=(3,), dtype=dtype)
    reduced = nl_svd(key, value, rank)
    assert reduced.key.shape == (3, d, rank) and reduced.value.shape == (3, rank, d)
    assert reduced.key.dtype == reduced.value.dtype == dtype and reduced.kept.all()
    products = reduced.key.mT @ reduced.key
    identity = torch.eye(rank, dtype=dtype).expand(3, -1, -1)
    torch.testing.assert_close(products, identity, rtol=0, atol=tolerance)
    for length in (1.0, 7.5):  # ReLU: the whole ray through a probe
        assert difference(reduced, key, value, length * reduced.key.mT) < tolerance


def test_orthogonal_keys_with_distinct_scales_come_back_whole():
    square, value = make_memory(12, 6)
    key = torch.linalg.qr(square).Q * torch.tensor([3.0, 0.5, 2.0, 1.0, 5.0, 0.1])
    reduced = nl_svd(key, value, 6)
    inputs = torch.randn(50, 12, generator=torch.Generator().manual_seed(1)).double()
    assert difference(reduced, key, value, inputs) < 1e-11
    # The strongest s_i = |k_i| |v_i| first, each with its own key's direction and side.
    order = (key.norm(dim=0) * value.norm(dim=1)).argsort(descending=True)
    torch.testing.assert_close(reduced.key, normalize(key, dim=0)[:, order], **EXACT)


def test_the_span_of_the_probes_is_not_reproduced():
    """The paper says that it is. Two keys at 60 degrees in the plane, values e_1 and e_2, nothing discarded."""
    key = torch.tensor([[1.0, 0.5], [0.0, math.sqrt(0.75)]], dtype=torch.float64)
    value = torch.eye(2, dtype=torch.float64)
    reduced = nl_svd(key, value, 2)
    probes = reduced.key.mT
    assert difference(reduced, key, value, probes) < 1e-11
    # The second key is silent at one of the probes and speaks at their sum: f is not additive.
    assert difference(reduced, key, value, probes.sum(dim=0, keepdim=True)) > 0.1


def test_both_signs_of_a_probe_are_tried():
    key, value = make_memory()
    reduced = nl_svd(key, value, 8)
    strengths = []
    for side in (1, -1):
        answers = torch.relu(side * reduced.key.mT @ key) * value.norm(dim=1)
        strengths.append(answers.norm(dim=-1))
    assert (strengths[0] >= strengths[1]).all()
    mirrored = nl_svd(-key, value, 8)  # f(-A): the same directions, the other sides
    torch.testing.assert_close(mirrored.key, -reduced.key, **EXACT)
    torch.testing.assert_close(mirrored.value, reduced.value, **EXACT)


def test_a_scale_moved_between_key_and_value_changes_nothing():
    key, value = make_memory()
    factor = torch.tensor([0.1, 10.0, 3.0, 1.0, 0.5, 2.0, 7.0, 0.3], dtype=torch.float64)
    scaled = nl_svd(key * factor, value / factor[:, None], 5)
    torch.testing.assert_close(scaled, nl_svd(key, value, 5), **EXACT)


@pytest.mark.parametrize("probe_norm", [1.0, 4.0])
def test_another_activation_is_matched_at_the_probes_norm_alone(probe_norm):
    key, value = make_memory()
    reduced = nl_svd(key, value, 5, activation=gelu, probe_norm=probe_norm)
    probes = probe_norm * reduced.key.mT
    assert difference(reduced, key, value, probes, gelu) < 1e-11
    assert difference(reduced, key, value, 2 * probes, gelu) > 1e-3


def test_directions_that_are_not_there_give_zero_slots():
    key, value = make_memory(12, 3)
    # Six slots, three directions.
    reduced = nl_svd(key.repeat(1, 2), value.repeat(2, 1), 6)
    assert reduced.kept.tolist() == [True] * 3 + [False] * 3
    assert not reduced.key[:, 3:].any() and not reduced.value[3:].any()
    wide = nl_svd(*make_memory(4, 9), 6)  # no more than D directions
    assert wide.kept.tolist() == [True] * 4 + [False] * 2 and wide.key.shape == (4, 6)


KEY, VALUE = make_memory()
NAN = float("nan")


@pytest.mark.parametrize(
    ("key", "value", "rank", "error", "message"),
    [
        (KEY.bfloat16(), VALUE.bfloat16(), 4, TypeError, "key must be float32 or float64"),
        (KEY, VALUE.half(), 4, TypeError, "value must be .*, got torch.float16"),
        (KEY, VALUE.float(), 4, TypeError, "one dtype, got torch.float64 and torch.float32"),
        (KEY, VALUE, 9, ValueError, "rank must be at most the memory's width 8, got 9:"),
        (KEY, VALUE, 0, ValueError, "rank must be at least 1, got 0: raise it"),
        (KEY, VALUE, 4.0, TypeError, "rank must be an int, got float"),
        (KEY.mT, VALUE, 4, ValueError, r"got \[8, 12\] and \[8, 12\]: transpose one of"),
        (KEY, VALUE * NAN, 4, ValueError, "key and value must be finite"),
        (KEY, VALUE * 0, 4, ValueError, "got an empty memory: write one first"),
    ],
)
def test_bad_input_is_named(key, value, rank, error, message):
    with pytest.raises(error, match=message):
        nl_svd(key, value, rank)


def test_an_activation_that_is_silent_at_the_probes_is_refused():
    with pytest.raises(ValueError, match="probe_norm must be above 0 and activate"):
        nl_svd(*make_memory(), 4, probe_norm=-1.0)
