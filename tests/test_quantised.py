"""A memory beside a quantised base: rows of the dequantised weights, training, files, LoRA export; merging is refused.

Each library is tested where it is installed: `pip install --no-deps torchao==0.18.0 bitsandbytes==0.50.2`. They are no
part of the `dev` extra, since PEFT then imports them in every process.
"""

from collections.abc import Callable

import pytest
import torch
import transformers as tf
from families import VOCABULARY, make_tokens, weights_in
from peft import PeftModel, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from locas_peft import LocasConfig, calibrate, to_lora, widen_base
from locas_peft.tuner import list_layers

R = 4


def torchao_int8() -> tf.TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return tf.TorchAoConfig(Int8WeightOnlyConfig())


# name: (the library, its setting)
QUANTISERS: dict[str, tuple[str, Callable]] = {
    "torchao int8": ("torchao", torchao_int8),
    "bitsandbytes int8": ("bitsandbytes", lambda: tf.BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes nf4": (
        "bitsandbytes",
        lambda: tf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the libraries' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A saved host in full precision, wide enough for a block of each quantiser."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    path = str(tmp_path_factory.mktemp("host"))
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(params=list(QUANTISERS))
def quantiser(request) -> str:
    pytest.importorskip(QUANTISERS[request.param][0], exc_type=ImportError)
    return request.param


def load(folder: str, quantiser: str | None = None, dtype=torch.float32):
    if quantiser is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = QUANTISERS[quantiser][1]()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config, device_map="cpu"
    )


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=make_tokens()).logits


def train(model, steps: int = 3) -> list[float]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.05), []
    for _ in range(steps):
        losses.append(model.train()(input_ids=make_tokens(), labels=make_tokens()).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def load_dequantised(folder: str, quantiser: str):
    """The host in float32, with the numbers that the quantised one computes with."""
    model = load(folder)
    for name, module in load(folder, quantiser).named_modules():
        if name.endswith("_proj"):
            original = model.get_submodule(name).weight
            weight = dequantize_module_weight(module).detach()
            assert 0 < (weight - original).abs().max() < 0.2 * original.abs().max()
            original.data.copy_(weight)
    return model


def test_calibration_and_gradients_are_those_of_the_dequantised_weights(folder, quantiser):
    bases = load_dequantised(folder, quantiser), load(folder, quantiser)
    models = [get_peft_model(base, LocasConfig(r=R)) for base in bases]
    for model in models:
        logits(model)  # with the weights as a forward leaves them
        calibrate(model, [make_tokens()])
        for layer in list_layers(model):
            weights_in(layer)[2].data.fill_(0.1)
        model.train()(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    for expected, found in zip(*map(list_layers, models), strict=True):
        assert found.locas_config["default"].get_record("slots") == expected.locas_config[
            "default"
        ].get_record("slots")
        for scale in ("locas_tau", "locas_input_scale"):
            close(getattr(found, scale)["default"], getattr(expected, scale)["default"])
        close(torch.tensor(found.ffn.mean_down_norm()), torch.tensor(expected.ffn.mean_down_norm()))
        for weight, reference in zip(weights_in(found), weights_in(expected), strict=True):
            assert weight.dtype == torch.float32
            close(weight, reference)
            close(weight.grad, reference.grad)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.any()
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_memory_trains_and_is_saved_and_loaded(folder, quantiser, dtype, tmp_path):
    model = get_peft_model(load(folder, quantiser, dtype), LocasConfig(r=R, scaling=16.0))
    untouched = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), untouched)
    losses = train(model)
    assert losses[-1] < losses[0]
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(load(folder, quantiser, dtype), str(tmp_path))
    assert torch.equal(logits(loaded), logits(model)) and not torch.equal(logits(model), untouched)


def test_merging_names_the_ways_out_and_both_work(folder, quantiser, tmp_path):
    model = get_peft_model(load(folder, quantiser), LocasConfig(r=R, scaling=16.0))
    train(model)
    untouched = logits(model)
    for merge in (model.merge_adapter, model.merge_and_unload):
        message = r"quantised or custom: load the base in full.*LoRA \(to_lora"
        with pytest.raises(ValueError, match=message) as error:
            merge()
        assert "\n" not in str(error.value)
    assert torch.equal(logits(model), untouched)

    model.save_pretrained(str(tmp_path / "memory"))
    beside_full = PeftModel.from_pretrained(load(folder), str(tmp_path / "memory"))
    expected = logits(beside_full)
    torch.testing.assert_close(
        logits(beside_full.merge_and_unload()), expected, rtol=1e-4, atol=1e-4
    )

    config, tensors = to_lora(model)
    config.save_pretrained(str(tmp_path / "lora"))
    save_file(tensors, str(tmp_path / "lora" / "adapter_model.safetensors"))
    wide = load(folder)
    widen_base(wide, R)
    lora = PeftModel.from_pretrained(wide, str(tmp_path / "lora"))
    torch.testing.assert_close(logits(lora), expected, rtol=1e-4, atol=1e-4)
    message = "cannot widen model.layers.0.mlp: gate_proj is a .*quantised or custom"
    with pytest.raises(ValueError, match=message):
        widen_base(model.unload(), R)


def test_weights_that_bitsandbytes_packed_for_the_cpu_are_refused(folder):
    functional = pytest.importorskip("bitsandbytes.functional", exc_type=ImportError)
    if not functional.has_avx512bf16():
        pytest.skip("bitsandbytes packs weights for CPUs with bfloat16 instructions")
    base = load(folder, "bitsandbytes nf4")
    logits(base)
    message = "packed by bitsandbytes .*: load the base again, and add the memory before"
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, LocasConfig(r=R))
