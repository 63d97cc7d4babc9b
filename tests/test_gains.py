"""Gains: factors on the host's own neurons, which a memory may train beside its slots."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf
from families import change_config, logits, make_host, make_tokens, rewrite, same, snapshot, teach
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from training import (
    SETTINGS,
    assert_same,
    make_ids,
    read,
    resume,
    save,
    trained_weights,
    without_time,
)

from locas_peft import LocasConfig, TestTimeTrainer, rescale
from locas_peft.memories import load_memory
from locas_peft.memories.base_sample import sample_weights
from locas_peft.slots import to_lora
from locas_peft.stages import complete
from locas_peft.tuner import find_ffns, gains, list_layers
from locas_peft.tuner.ffn import _rows_of
from locas_peft.tuner.modules import trained_parameters
from locas_settings import ReadSettings

# A gated FFN, one with fused projections, a two-layer one of Conv1D, and a flat one.
DENSE = ["llama", "phi3", "gpt2", "opt"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def set_gains(model, name="default", seed=0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in list_layers(model, name):
        gain = layer.locas_gain[name].weight
        gain.data = 0.3 * torch.randn(gain.shape, generator=generator).to(gain)


def factors_of(layer) -> torch.Tensor:
    return 1 + gains.SCALE * layer.locas_gain["default"].weight.detach()


def make_fresh(family="llama", name="default", dtype=torch.float32, **fields) -> PeftModel:
    config = LocasConfig(r=4, init_weights="random", gains=True, **fields)
    return get_peft_model(make_host(family, dtype), config, adapter_name=name).eval()


def make_model(family="llama", name="default", **options) -> PeftModel:
    model = make_fresh(family, name, **options)
    teach(model, name)
    set_gains(model, name)
    return model


def add(model, name, seed, **fields) -> None:
    model.add_adapter(name, LocasConfig(r=3, init_weights="random", **fields))
    teach(model, name, seed)
    model.eval()


@pytest.mark.parametrize("family", DENSE)
def test_fresh_gains_change_nothing(family):
    torch.testing.assert_close(logits(make_fresh(family)), logits(make_host(family)))


@pytest.mark.parametrize("family", DENSE)
def test_gains_multiply_what_the_down_projection_receives(family):
    model, host = make_model(family), make_host(family)
    for layer, ffn in zip(list_layers(model), find_ffns(host).values(), strict=True):
        _rows_of(ffn.down).mul_(factors_of(layer))
        layer.locas_down["default"].weight.data.zero_()
    assert (logits(host) - logits(make_host(family))).abs().max() > 0.1
    torch.testing.assert_close(logits(model), logits(host), **CLOSE)


@pytest.mark.parametrize("family", DENSE)
def test_merging_multiplies_the_columns_and_unmerging_restores_the_bits(family):
    model = make_model(family)
    expected = logits(model)
    before = snapshot(model.get_base_model())
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(logits(model), expected, **CLOSE)
    model.unmerge_adapter()
    assert same(model.get_base_model(), before)
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_gains_are_loaded_in_float32_and_stay_frozen(dtype, tmp_path):
    model = make_model(dtype=dtype, task_type="CAUSAL_LM")
    model.save_pretrained(str(tmp_path))
    with_memory = load_memory(make_host("llama", dtype), tmp_path)
    assert torch.equal(logits(with_memory), logits(model))
    host, is_half = make_host("llama", dtype), dtype == torch.bfloat16
    loaded = PeftModel.from_pretrained(host, str(tmp_path), low_cpu_mem_usage=is_half)
    assert torch.equal(logits(loaded), logits(model)) and logits(loaded).dtype == dtype
    layers = list_layers(loaded)
    for one, other in zip(list_layers(model), layers, strict=True):
        gain = other.locas_gain["default"].weight
        assert gain.dtype == torch.float32
        assert torch.equal(gain, one.locas_gain["default"].weight)
    loaded.load_adapter(str(tmp_path), "other")
    assert not trained_parameters(loaded)
    loaded.set_adapter("other")
    assert len(trained_parameters(loaded)) == 4 * len(layers)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_memories_with_and_without_gains_together(family):
    model = make_model(family, "one")
    add(model, "two", 1, gains=True)
    set_gains(model, "two", 1)
    add(model, "plain", 2)
    tokens = make_tokens(batch=1)
    alone = {"__base__": logits(make_host(family), tokens)}
    for name in ("one", "two", "plain"):
        model.set_adapter(name)
        alone[name] = logits(model, tokens)
    names = ["two", "__base__", "one", "plain", "one"]
    rows = logits(model, tokens.repeat(len(names), 1), adapter_names=names)
    for name, row in zip(names, rows, strict=True):
        torch.testing.assert_close(row, alone[name][0], **CLOSE)

    model.base_model.set_adapter(["one", "two", "plain"])
    together = logits(model)
    model.merge_adapter(["one"])
    torch.testing.assert_close(logits(model), together, **CLOSE)
    with pytest.warns(UserWarning, match="Already following adapters were merged"):
        model.merge_adapter(["two", "plain"])
    torch.testing.assert_close(logits(model), together, **CLOSE)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make_host(family)))


def test_rescaling_multiplies_gains_too():
    model, half = make_model(), make_model()
    with rescale(model, 0.0):
        torch.testing.assert_close(logits(model), logits(make_host("llama")))
    for layer in list_layers(half):
        layer.locas_gain["default"].weight.data.mul_(0.5)
        layer.locas_tau["default"].mul_(0.5)
    with rescale(model, 0.5):
        torch.testing.assert_close(logits(model), logits(half))


def test_a_reading_learns_gains():
    model, plain = (
        get_peft_model(make_host("llama"), LocasConfig(r=4, gains=has_gains, task_type="CAUSAL_LM"))
        for has_gains in (True, False)
    )
    (trained, _), (without, _) = (each.get_nb_trainable_parameters() for each in (model, plain))
    layers = list_layers(model)
    assert trained == without + sum(layer.ffn.width for layer in layers)
    read(TestTimeTrainer(model, **SETTINGS), make_ids(60))
    assert all(layer.locas_gain["default"].weight.all() for layer in layers)


@pytest.mark.slow
def test_a_compiled_model_applies_gains():
    model = make_model()
    expected = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled), expected, **CLOSE)


def test_other_ffns_can_have_none():
    # Bloom's FFN adds the residual stream itself.
    bloom = tf.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
    for host in (make_host("qwen2_moe"), tf.BloomForCausalLM(bloom)):
        with pytest.raises(ValueError, match="can have no gains"):
            get_peft_model(host, LocasConfig(r=4, gains=True))


def test_what_needs_slots_alone_refuses_gains():
    model = make_model()
    with pytest.raises(ValueError, match="have slots alone"):
        to_lora(model)
    add(model, "two", 1)
    with pytest.raises(ValueError, match="have slots alone"):
        model.add_weighted_adapter(["default", "two"], [1.0, 1.0], "both")


def test_a_file_that_contradicts_its_config(tmp_path):
    make_model().save_pretrained(str(tmp_path))
    change_config(tmp_path, gains=False)
    with pytest.raises(ValueError, match="gains is False"):
        load_memory(make_host("llama"), tmp_path)
    change_config(tmp_path, gains=True)

    def shorten(tensors):
        for key in tensors:
            if key.endswith("locas_gain.weight"):
                tensors[key] = tensors[key][:-1].clone()

    rewrite(tmp_path, shorten)
    with pytest.raises(ValueError, match=r"locas_gain.weight has shape \[23\]"):
        load_memory(make_host("llama"), tmp_path)


def test_gains_are_a_setting_of_memories_that_are_trained():
    assert complete(ReadSettings(gains=True)).gains is True
    assert complete(ReadSettings(gains=False)).gains is None
    with pytest.raises(ValueError, match="gains must be trained, which update='ridge' alone"):
        complete(ReadSettings(gains=True, update="ridge"))
    with pytest.raises(ValueError, match="gains has no meaning for the method 'lora'"):
        complete(ReadSettings(method="lora", gains=True))
    assert complete(ReadSettings(gains=True, update="ridge", learning_rate=4e-3)).gains is True


def test_a_checkpoint_has_the_gains(tmp_path):
    ids = make_ids(60)

    def make_trainer() -> TestTimeTrainer:
        return TestTimeTrainer(make_fresh(task_type="CAUSAL_LM"), **SETTINGS)

    whole, resumed = make_trainer(), make_trainer()
    for chunk in whole.read(ids):
        if chunk.index == 3:
            save(whole, tmp_path)
    resume(resumed, tmp_path)
    read(resumed, ids)
    assert without_time(resumed.chunks) == without_time(whole.chunks)
    assert_same(trained_weights(resumed.model), trained_weights(whole.model))


def test_a_safe_merge_refuses_columns_that_overflow():
    model = make_fresh(dtype=torch.float16)
    for layer in list_layers(model):
        layer.locas_gain["default"].weight.data.fill_(1e6)
    before = snapshot(model)
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert same(model, before)


def test_a_merged_memory_is_saved_for_its_base(tmp_path):
    model = make_model("gpt2")
    model.merge_adapter()
    assert sample_weights(model) == sample_weights(make_host("gpt2"))


def test_dropout_and_hooks_of_the_ffn_stay():
    model = make_model("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    layer = list_layers(model.train())[0]
    calls = []
    layer.base_layer.register_forward_hook(lambda *args: calls.append(1))
    inputs = torch.randn(1, 3, layer.in_features)
    assert not torch.equal(layer(inputs), layer(inputs))
    assert len(calls) == 2


def test_threads_share_a_model_with_gains():
    model = make_model()
    texts = [make_tokens(seed=seed) for seed in range(8)]
    expected = [logits(model, tokens) for tokens in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda tokens: logits(model, tokens), texts))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_another_adapter_on_the_down_projection_receives_the_scaled_neurons():
    lora = LoraConfig(target_modules=["down_proj"], init_lora_weights=False)
    host = inject_adapter_in_model(lora, make_host("llama"))
    del host.peft_config
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random", gains=True)).eval()
    fresh = logits(model)
    set_gains(model)
    found = logits(model)
    assert not torch.allclose(found, fresh)
    # A neuron's factor is also one of its up row.
    for layer in list_layers(model):
        layer.ffn.owner.up_proj.weight.data *= factors_of(layer)[:, None]
        layer.locas_gain["default"].weight.data.zero_()
    torch.testing.assert_close(logits(model), found)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the names of transformers 6
def test_dropout_is_the_same_when_gradient_checkpointing_recomputes_the_first_forward():
    gradients = []
    for checkpointed in (False, True):
        host = make_host("gpt2")
        for module in host.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        model = get_peft_model(host, LocasConfig(r=4, gains=True)).train()
        if checkpointed:
            options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
            model.gradient_checkpointing_enable(**options)
            model.enable_input_require_grads()
        torch.manual_seed(7)
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
        gradients.append([weight.grad for weight in trained_parameters(model)])
    torch.testing.assert_close(*gradients)
    assert any(gradient.any() for gradient in gradients[0])
