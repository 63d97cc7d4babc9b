"""What holds for a memory in every family of hosts."""

import json
import subprocess
import sys

import pytest
import torch
from families import (
    FAMILIES,
    GATED,
    HIDDEN,
    MIXTURES,
    VOCABULARY,
    each_family,
    logits,
    make_host,
    make_tokens,
    weights_in,
)
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from locas_peft import LocasConfig, LocasLayer, calibrate
from locas_peft.tuner import find_ffns, list_layers

R = 4
SCALING = 80.0  # large enough that a memory is seen


def make_memory(family: str, **kwargs) -> PeftModel:
    """A calibrated memory, fresh."""
    model = get_peft_model(make_host(family), LocasConfig(**{"r": R, "scaling": SCALING, **kwargs}))
    calibrate(model, [make_tokens()])
    return model


def learn(model: PeftModel, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=4.0)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=make_tokens(), labels=make_tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


DENSE = [family for family in FAMILIES if family not in MIXTURES]


@pytest.fixture(params=each_family())
def family(request) -> str:
    return request.param


def test_fresh_memory_changes_no_bit(family):
    expected = logits(make_host(family))
    model = get_peft_model(make_host(family), LocasConfig(r=R))
    assert torch.equal(logits(model), expected)
    calibrate(model, [make_tokens()])
    assert torch.equal(logits(model), expected)


def test_every_ffn_gets_one_memory_of_the_host_structure(family):
    model = make_memory(family)
    layers = [module for module in model.modules() if isinstance(module, LocasLayer)]
    assert len(layers) == 2
    for layer in layers:
        assert layer.ffn.gated == (family in GATED)
        assert [tuple(w.shape) for w in weights_in(layer)] == [(R, HIDDEN)] * (
            1 + layer.ffn.gated
        ) + [(HIDDEN, R)]


@pytest.mark.parametrize("family", each_family(DENSE))
def test_topk_clones_the_most_active_slots(family):
    host = make_host(family)
    activity = {}

    def note(name):
        return lambda module, args: activity.__setitem__(
            name, args[0].flatten(0, -2).abs().mean(dim=0)
        )

    down = {"c_proj", "down_proj", "w2", "dense_4h_to_h", "fc2", "fc_out"}
    for name, module in host.named_modules():
        if name.rpartition(".")[2] in down and "attn" not in name:
            module.register_forward_pre_hook(note(name))
    logits(host)
    model = make_memory(family)
    for expected, slots in zip(
        activity.values(), model.peft_config["default"].get_record("slots").values(), strict=True
    ):
        assert slots == expected.topk(R).indices.tolist()


def test_rows_are_unit_clones_and_values_zero(family):
    model = make_memory(family)
    for layer in model.modules():
        if isinstance(layer, LocasLayer):
            slots = torch.tensor(model.peft_config["default"].get_record("slots")[layer.name])
            *rows, down = weights_in(layer)
            host_rows = [host for host in layer.ffn.gate_and_up_rows(slots) if host is not None]
            for weight, host in zip(rows, host_rows, strict=True):
                assert torch.equal(weight, torch.nn.functional.normalize(host, dim=-1))
            assert not layer.has_learned("default")


@pytest.mark.parametrize("family", each_family(DENSE))
def test_the_papers_tau_is_the_mean_down_norm_over_r(family):
    model = make_memory(family, output_scale="paper")
    for layer in model.modules():
        if isinstance(layer, LocasLayer):
            weight = (
                layer.ffn.down.weight if family != "gpt2" else layer.ffn.down.weight.T
            )  # [D, F]
            expected = weight.norm(dim=0).mean() / R
            torch.testing.assert_close(layer.locas_tau["default"], expected, rtol=1e-6, atol=0)
            assert layer.locas_input_scale["default"] == 1.0


def test_learns_and_leaves_the_base_alone(family):
    base = {name: p.clone() for name, p in make_host(family).state_dict().items()}
    model = make_memory(family)
    losses = learn(model)
    assert losses[-1] < losses[0] - 0.1
    restored = model.unload().state_dict()
    assert restored.keys() == base.keys()
    assert all(torch.equal(restored[name], base[name]) for name in base)


def test_disabled_is_the_base(family):
    model = make_memory(family)
    learn(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make_host(family)))


def test_save_and_load_are_bitwise(family, tmp_path):
    model = make_memory(family)
    learn(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path)
    assert torch.equal(logits(loaded), logits(model))


def test_merge_equals_unmerged_and_unmerge_restores_bits(family):
    model = make_memory(family)
    learn(model)
    expected = logits(model)
    base = {name: p.clone() for name, p in model.state_dict().items()}
    for _ in range(3):
        model.merge_adapter()
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
        model.unmerge_adapter()
        assert all(torch.equal(p, base[name]) for name, p in model.state_dict().items())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    "kwargs", [{}, {"pad_to_multiple_of": 16}, {"layers_to_transform": [1]}], ids=str
)
def test_merged_checkpoint_is_plain(family, kwargs, tmp_path):
    model = make_memory(family, **kwargs)
    learn(model)
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-4)
    if family in MIXTURES:
        return  # test_mixture.py looks at their widths
    widths = {ffn.width for ffn in find_ffns(plain).values()}
    base_width = next(iter(find_ffns(make_host(family)).values())).width
    assert widths == {_round_up(base_width + R, kwargs.get("pad_to_multiple_of", 1))}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@pytest.mark.parametrize("activation", ["relu", "gated-gelu"])
def test_memories_of_encoder_and_decoder_merge_into_a_plain_checkpoint(activation, tmp_path):
    sizes = {"d_model": HIDDEN, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config(
        vocab_size=VOCABULARY, **sizes, feed_forward_proj=activation, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = get_peft_model(
        T5ForConditionalGeneration(config).eval(),
        LocasConfig(r=R, init_weights="random", scaling=SCALING),
    )
    inputs = {"input_ids": make_tokens(), "labels": make_tokens(seed=2)}

    def losses(model):
        with torch.no_grad():
            return model(**inputs).logits

    before = losses(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model.train()(**inputs).loss.backward()
    optimizer.step()
    expected, state = (
        losses(model.eval()),
        {name: p.clone() for name, p in model.state_dict().items()},
    )
    assert (expected - before).abs().max() > 1e-3
    assert [layer.ffn.gated for layer in list_layers(model)] == [activation != "relu"] * 4
    model.merge_adapter()
    torch.testing.assert_close(losses(model), expected, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert all(torch.equal(p, state[name]) for name, p in model.state_dict().items())
    model.merge_and_unload().save_pretrained(tmp_path)
    plain = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert plain.config.d_ff == 24 + R
    torch.testing.assert_close(losses(plain), expected, rtol=0, atol=1e-4)


def test_bf16_merge_is_within_bf16_rounding(family):
    exact = make_memory(family)
    learn(exact)
    expected = logits(exact)
    model = get_peft_model(make_host(family), LocasConfig(r=R, scaling=SCALING))
    model.load_state_dict(exact.state_dict())
    model.to(torch.bfloat16)

    def error(model):
        return (logits(model).float() - expected).square().mean().sqrt()

    # bf16's own error: host and memory rounded to bf16, not merged.
    own_error = error(model)
    assert error(model.merge_and_unload()) <= 1.5 * own_error


def test_plain_checkpoints_in_a_process_without_us(tmp_path):
    expected = {}
    for family in ("qwen3", "phi3", "lfm2", "gpt2", "opt"):
        model = make_memory(family)
        learn(model)
        expected[family] = logits(model)
        model.merge_and_unload().save_pretrained(tmp_path / family)
    script = (
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "tokens = torch.tensor(json.loads(sys.argv[1]))\n"
        "for folder in sys.argv[2:]:\n"
        "    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager').eval()\n"
        "    print(json.dumps(model(input_ids=tokens).logits.tolist()))\n"
        "assert 'locas_peft' not in sys.modules and 'peft' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, json.dumps(make_tokens().tolist()), *expected]
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    for (family, wanted), line in zip(expected.items(), output.splitlines(), strict=True):
        found = torch.tensor(json.loads(line))
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=1e-4, msg=lambda text, family=family: f"{family}: {text}"
        )
