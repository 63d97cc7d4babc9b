"""Gains: factors on the host's own neurons, which a memory may train beside its slots."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf
from families import change_config, logits, make_host, make_tokens, rewrite, same, snapshot, teach
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from training import SETTINGS, assert_same, make_ids, read, resume, save, trained_weights

from locas_peft import LocasConfig, TestTimeTrainer, rescale
from locas_peft.memories import load_memory
from locas_peft.memories.base_sample import sample_weights
from locas_peft.slots import to_lora
from locas_peft.tuner import find_ffns, gains, list_layers
from locas_peft.tuner.ffn import _rows_of
from locas_peft.tuner.modules import trained_parameters
from locas_settings import ReadSettings

# A gated FFN, one with fused projections, a two-layer one of Conv1D, and a flat one.
DENSE = ["llama", "phi3", "gpt2", "opt"]


def set_gains(model, name="default", seed=0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in list_layers(model, name):
        gain = layer.locas_gain[name].weight
        gain.data = 0.3 * torch.randn(gain.shape, generator=generator).to(gain)


def make_model(family="llama", name="default", **fields) -> PeftModel:
    config = LocasConfig(r=4, init_weights="random", gains=True, **fields)
    model = get_peft_model(make_host(family), config, adapter_name=name)
    teach(model, name)
    set_gains(model, name)
    return model.eval()


def add(model, name, seed, **fields) -> None:
    model.add_adapter(name, LocasConfig(r=3, init_weights="random", **fields))
    teach(model, name, seed)
    model.eval()


@pytest.mark.parametrize("family", DENSE)
def test_fresh_gains_change_nothing(family):
    model = get_peft_model(make_host(family), LocasConfig(r=4, init_weights="random", gains=True))
    torch.testing.assert_close(logits(model.eval()), logits(make_host(family)))


@pytest.mark.parametrize("family", DENSE)
def test_gains_multiply_what_the_down_projection_receives(family):
    model = make_model(family)
    layers = list_layers(model)
    host = make_host(family)
    for layer, ffn in zip(layers, find_ffns(host).values(), strict=True):
        factors = 1 + gains.SCALE * layer.locas_gain["default"].weight
        _rows_of(ffn.down).mul_(factors.detach())
        layer.locas_down["default"].weight.data.zero_()
    assert (logits(host) - logits(make_host(family))).abs().max() > 0.1
    torch.testing.assert_close(logits(model), logits(host), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", DENSE)
def test_merging_multiplies_the_columns_and_unmerging_restores_the_bits(family, tmp_path):
    model = make_model(family)
    expected = logits(model)
    before = snapshot(model.get_base_model())
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    assert same(model.get_base_model(), before)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def test_gains_are_saved_and_loaded(tmp_path):
    model = make_model()
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(make_host("llama"), str(tmp_path))
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(load_memory(make_host("llama"), tmp_path)), logits(model))


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
        torch.testing.assert_close(row, alone[name][0], rtol=1e-4, atol=1e-4)

    model.base_model.set_adapter(["one", "two", "plain"])
    together = logits(model)
    model.merge_adapter(["one"])
    torch.testing.assert_close(logits(model), together, rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="Already following adapters were merged"):
        model.merge_adapter(["two", "plain"])
    torch.testing.assert_close(logits(model), together, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make_host(family)))


def test_rescaling_multiplies_gains_too():
    model = make_model()
    with rescale(model, 0.0):
        torch.testing.assert_close(logits(model), logits(make_host("llama")))
    half = make_model()
    for layer in list_layers(half):
        layer.locas_gain["default"].weight.data *= 0.5
        layer.locas_tau["default"] = layer.locas_tau["default"] * 0.5
    with rescale(model, 0.5):
        torch.testing.assert_close(logits(model), logits(half))


def test_a_reading_learns_gains():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, gains=True, task_type="CAUSAL_LM"))
    trained, _ = model.get_nb_trainable_parameters()
    plain = get_peft_model(make_host("llama"), LocasConfig(r=4, task_type="CAUSAL_LM"))
    widths = sum(layer.ffn.width for layer in list_layers(model))
    assert trained == plain.get_nb_trainable_parameters()[0] + widths
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=1e-2)
    for _ in trainer.read(make_tokens(1, 60)[0]):
        pass
    assert all(layer.locas_gain["default"].weight.all() for layer in list_layers(model))


def test_gains_of_a_half_precision_base_stay_float32(tmp_path):
    model = get_peft_model(
        make_host("llama", torch.bfloat16), LocasConfig(r=4, init_weights="random", gains=True)
    )
    set_gains(model)
    model.save_pretrained(str(tmp_path))
    host = make_host("llama", torch.bfloat16)
    loaded = PeftModel.from_pretrained(host, str(tmp_path), low_cpu_mem_usage=True)
    for one, other in zip(list_layers(model), list_layers(loaded), strict=True):
        assert one.locas_gain["default"].weight.dtype == torch.float32
        assert torch.equal(one.locas_gain["default"].weight, other.locas_gain["default"].weight)
    assert logits(loaded).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_compiled_model_applies_gains():
    model = make_model()
    expected = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled), expected, rtol=1e-4, atol=1e-4)


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


def test_gains_are_a_setting_of_memories_alone():
    from locas_peft.stages import complete

    assert complete(ReadSettings(gains=True)).gains is True
    assert complete(ReadSettings(gains=False)).gains is None
    with pytest.raises(ValueError, match="gains has no meaning for the method 'lora'"):
        complete(ReadSettings(method="lora", gains=True))


def test_gains_are_trained_or_refused():
    from locas_peft.stages import complete

    with pytest.raises(ValueError, match="gains must be trained, which update='ridge' alone"):
        complete(ReadSettings(gains=True, update="ridge"))
    assert complete(ReadSettings(gains=True, update="ridge", learning_rate=4e-3)).gains is True


def test_a_checkpoint_has_the_gains(tmp_path):
    ids = make_ids(60)

    def make_trainer() -> TestTimeTrainer:
        config = LocasConfig(r=4, gains=True, task_type="CAUSAL_LM")
        return TestTimeTrainer(get_peft_model(make_host("llama"), config), **SETTINGS)

    whole = make_trainer()
    expected = read(whole, ids)
    trainer = make_trainer()
    reading = trainer.read(ids)
    for _ in range(4):
        next(reading)
    save(trainer, tmp_path)
    resumed = make_trainer()
    resume(resumed, tmp_path)
    assert read(resumed, ids) == expected[4:]
    assert_same(trained_weights(resumed.model), trained_weights(whole.model))


def test_gains_of_a_frozen_memory_stay_frozen(tmp_path):
    model = make_model(task_type="CAUSAL_LM")
    model.save_pretrained(str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        loaded = PeftModel.from_pretrained(make_host("llama", dtype), str(tmp_path))
        assert not trained_parameters(loaded)
        loaded.load_adapter(str(tmp_path), "other")
        assert not trained_parameters(loaded)
        loaded.set_adapter("other")
        assert len(trained_parameters(loaded)) == 4 * len(list_layers(loaded))


def test_a_safe_merge_refuses_columns_that_overflow():
    model = get_peft_model(
        make_host("llama", torch.float16), LocasConfig(r=4, init_weights="random", gains=True)
    )
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
    host = make_host("gpt2")
    for module in host.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random", gains=True))
    set_gains(model)
    (layer, *_) = list_layers(model.train())
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
        for output, wanted in zip(
            pool.map(lambda t: logits(model, t), texts), expected, strict=True
        ):
            torch.testing.assert_close(output, wanted)


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
        factors = 1 + gains.SCALE * layer.locas_gain["default"].weight.detach()
        layer.ffn.owner.up_proj.weight.data *= factors[:, None]
        layer.locas_gain["default"].weight.data.zero_()
    torch.testing.assert_close(logits(model), found)
