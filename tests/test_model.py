import copy
import sys
import threading

import pytest
import torch
import transformers as tf
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from families import (
    VOCABULARY,
    logits,
    make_host,
    make_model,
    make_tokens,
    same,
    snapshot,
    teach,
    weights_in,
)
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_layer_status,
    get_model_status,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from training import SETTINGS

from locas_peft import (
    LocasConfig,
    LocasLayer,
    TestTimeTrainer,
    calibrate,
    grow,
    rescale,
    uncalibrated_memories,
)
from locas_peft.memories import load_memory, save_memory
from locas_peft.slots import widen_base
from locas_peft.tuner import adapters_disabled, find_ffns, list_layers
from locas_peft.tuner.modules import used_modules

# ------------------------------------------------------------------ PEFT's verbs


@pytest.fixture
def memory(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


def test_auto_peft_model_loads_from_the_folder_alone(tmp_path):
    make_host("llama").save_pretrained(tmp_path / "base")
    base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LocasConfig(r=4, init_weights="random", task_type="CAUSAL_LM"))
    teach(model)
    model.save_pretrained(tmp_path / "memory")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "memory")
    assert torch.equal(logits(loaded), logits(model.eval()))


def test_saved_file_holds_the_memory_and_nothing_else(memory):
    tensors = load_file(memory / "adapter_model.safetensors")
    # r x 3 x D x layers, two scales and a flag a layer
    assert sum(tensor.numel() for tensor in tensors.values()) == 4 * 3 * 16 * 2 + 6
    found = {path.name for path in memory.iterdir()}
    assert found == {"adapter_model.safetensors", "adapter_config.json", "README.md"}


def without_containers(modules):
    return [module for module in modules if not isinstance(module, torch.nn.ModuleDict)]


def test_modules_in_use_are_all_modules_but_those_of_inactive_memories():
    model = make_model(modules_to_save=["lm_head"])
    expected = without_containers(model.modules())
    model.add_adapter("inactive", LocasConfig(r=4))
    assert without_containers(used_modules(model)) == expected


def count_calls(act) -> int:
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_does_no_more_work_where_more_memories_are_attached():
    model = make_model().train()
    chunks = TestTimeTrainer(model, **SETTINGS).read(make_tokens(1, 128))

    def step():
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()

    def read():
        next(chunks)

    for act in (read, read, step):
        act()
    alone = count_calls(step), count_calls(read)
    for number in range(20):
        model.add_adapter(f"memory{number}", LocasConfig(r=4, init_weights="random"))
    step()
    assert (count_calls(step), count_calls(read)) == alone


def make_mixed(family, widths=(3, 3, 3)):
    """A model with three memories of different weights, in evaluation mode."""
    host = make_host(family, torch.float64)
    model = get_peft_model(host, LocasConfig(r=4, init_weights="gaussian"))
    for seed, (name, r) in enumerate(zip(["one", "two", "three"], widths, strict=True)):
        config = LocasConfig(r=r, init_weights="gaussian", seed=seed, scaling=1.0 + seed)
        model.add_adapter(name, config)
        teach(model, name, seed=seed)
    return model.to(torch.float64).eval()


def gradients_of(model, names):
    found = {}
    for layer in list_layers(model):
        for name in names:
            for number, weight in enumerate(layer.weights(name)):
                found[layer.name, name, number] = weight.grad
    return found


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize(
    ("names", "widths"),
    [
        (["one", "one", "one"], (3, 3, 3)),
        (["two", "__base__", "one", "two", "three", "three"], (3, 3, 3)),
        (["one", "two", "three", "two"], (3, 2, 3)),
    ],
    ids=str,
)
def test_each_memory_of_a_mixed_batch_gets_the_gradient_of_its_rows(family, names, widths):
    model = make_mixed(family, widths=widths)
    memories = sorted(set(names) - {"__base__"})
    ids = make_tokens(len(names), 12)
    losses = []
    for name in sorted(set(names)):
        rows = [row for row, other in enumerate(names) if other == name]
        own = {"input_ids": ids[rows], "labels": ids[rows]}
        if name == "__base__":
            with torch.no_grad(), model.disable_adapter():
                losses.append(model(**own).loss * len(rows))
            continue
        # Not as rows of one name: what is compared is the way through the active memory.
        model.base_model.set_adapter(name)
        loss = model(**own).loss * len(rows)
        loss.backward()
        losses.append(loss.detach())
    expected = gradients_of(model, memories)
    assert all(gradient.any() for gradient in expected.values())
    model.zero_grad()
    for layer in list_layers(model):
        for name in memories:
            for weight in layer.weights(name):
                weight.requires_grad_(True)
    loss = model(input_ids=ids, labels=ids, adapter_names=names).loss * len(names)
    loss.backward()
    found = gradients_of(model, memories)
    torch.testing.assert_close(loss.detach(), sum(losses), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    others = {"one", "two", "three", "default"} - set(memories)
    assert set(gradients_of(model, others).values()) == {None}


def test_rows_of_one_name_take_the_plain_path(monkeypatch):
    model = make_mixed("llama")
    model.set_adapter("two")
    expected = logits(model)
    monkeypatch.setattr("locas_peft.tuner.layer.add_by_row", lambda *_: pytest.fail("by row"))
    assert torch.equal(logits(model, adapter_names=["two"] * 4), expected)


def test_one_batched_product_serves_rows_of_different_memories(monkeypatch):
    model = make_mixed("llama")
    recalled = []
    recall = LocasLayer.recall

    def note(self, names, inputs):
        recalled.append((names, len(inputs)))
        return recall(self, names, inputs)

    monkeypatch.setattr(LocasLayer, "recall", note)
    logits(model, make_tokens(3), adapter_names=["two", "one", "three"])
    # Once a layer.
    assert recalled == [(["two", "one", "three"], 3)] * 2


def test_adapter_names_are_checked():
    model = make_model().eval()
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): nobody"):
        logits(model, adapter_names=["nobody"] * 4)
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        logits(model, adapter_names=["default"] * 3)
    with pytest.raises(ValueError, match="`adapter_names` when the model is in training mode"):
        logits(model.train(), adapter_names=["default"] * 4)
    assert not any(layer._forward_pre_hooks for layer in list_layers(model))


def test_status_reports():
    model = make_model()
    status = get_model_status(model)
    assert (status.peft_types, status.adapter_model_type) == ({"default": "LOCAS"}, "LocasModel")
    assert status.enabled is True and status.active_adapters == ["default"]
    assert status.trainable_params == 4 * 3 * 16 * 2
    assert get_layer_status(model)[0].module_type == "locas.LocasLayer"


def test_transformers_own_verbs(tmp_path):
    host = make_host("llama")
    base = logits(host)
    host.add_adapter(LocasConfig(r=4, init_weights="random"), adapter_name="memory")
    teach(host, "memory")
    expected = logits(make_model())
    assert torch.equal(logits(host), expected)
    host.disable_adapters()
    assert torch.equal(logits(host), base)
    host.enable_adapters()
    host.save_pretrained(tmp_path)
    again = make_host("llama")
    again.load_adapter(str(tmp_path), adapter_name="other")
    assert torch.equal(logits(again), expected)
    again.delete_adapter("other")
    assert torch.equal(logits(again), base)


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"layers_to_transform": [1]}, ["model.layers.1.mlp"]),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, ["model.layers.0.mlp"]),
        ({"exclude_modules": ["model.layers.0.mlp"]}, ["model.layers.1.mlp"]),
        ({"target_modules": r".*\.0\.mlp"}, ["model.layers.0.mlp"]),
        ({"target_modules": "all-linear"}, ["model.layers.0.mlp", "model.layers.1.mlp"]),
    ],
    ids=str,
)
def test_targets(kwargs, names):
    assert make_model(**kwargs).base_model.targeted_module_names == names


def test_rank_pattern_gives_widths_and_taus():
    model = make_model(rank_pattern={"layers.1.mlp": 8})
    assert [layer.locas_up["default"].out_features for layer in list_layers(model)] == [4, 8]
    expected = logits(model)
    merged = model.merge_and_unload()  # the narrower is padded
    assert [ffn.width for ffn in find_ffns(merged).values()] == [32, 32]
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)


def test_the_scales_of_a_half_precision_model_stay_float32():
    model = make_model().to(torch.bfloat16)
    assert logits(model).dtype == torch.bfloat16
    for layer in list_layers(model):
        assert layer.locas_tau["default"].dtype == torch.float32
        assert layer.locas_input_scale["default"].dtype == torch.float32


def test_autocast_trains():
    model = make_model().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=make_tokens(), labels=make_tokens()).loss
    loss.backward()
    for layer in list_layers(model):
        for weight in weights_in(layer):
            assert weight.grad.isfinite().all() and weight.grad.dtype == torch.float32


def test_rescale_is_undone(tmp_path):
    model = make_model().eval()
    before = logits(model)
    with rescale(model, 0.0):
        assert torch.equal(logits(model), logits(make_host("llama")))
        # Copies and files are not in the context.
        clone = copy.deepcopy(model)
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(clone), before)
    assert torch.equal(logits(PeftModel.from_pretrained(make_host("llama"), tmp_path)), before)
    with pytest.raises(RuntimeError), rescale(model, 2.0):
        raise RuntimeError
    assert torch.equal(logits(model), before)
    message = "no LOCAS memory 'x' to rescale"
    with pytest.raises(ValueError, match=message), rescale(model, 1.0, "x"):
        pass
    with rescale(model, 4.0), rescale(model, 0.25):
        torch.testing.assert_close(logits(model), before)
    assert torch.equal(logits(model), before)


def test_merged_memories_are_not_rescaled_and_rescaled_ones_not_merged():
    model = make_model()
    before = snapshot(model)
    with rescale(model, 0.5):
        for verb in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(
                ValueError, match=r"inside rescale\(\), got .* 0.5: merge it outside"
            ):
                verb()
    assert same(model, before)
    model.merge_adapter()
    message = r"is merged: call unmerge_adapter\(\) before it is rescaled"
    with pytest.raises(ValueError, match=message), rescale(model, 0.5):
        pass
    model.unmerge_adapter()
    assert same(model, before)


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", ["q_proj"]), ("llama", ["q_proj", "down_proj"]), ("opt", ["q_proj", "fc1", "fc2"])],
)
def test_unloading_a_memory_keeps_the_lora_that_was_there_before(family, targets):
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    tuned = get_peft_model(make_host(family), lora).eval()
    expected = logits(tuned)
    host = tuned.base_model.model
    del host.peft_config
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random"))
    teach(model)
    assert not torch.equal(logits(model), expected)
    assert torch.equal(logits(model.unload()), expected)
    assert not torch.equal(expected, logits(make_host(family)))


def tie_ffns() -> tf.PreTrainedModel:
    """A host whose layers have one FFN's weights."""
    host = make_host("llama")
    first, second = (layer.mlp for layer in host.model.layers)
    for part in ("gate_proj", "up_proj", "down_proj"):
        getattr(second, part).weight = getattr(first, part).weight
    return host


def share_ffn() -> tf.PreTrainedModel:
    """A host whose layers have one FFN."""
    host = make_host("llama")
    host.model.layers[1].mlp = host.model.layers[0].mlp
    return host


@pytest.mark.parametrize("make", [tie_ffns, share_ffn])
def test_an_ffn_that_another_module_shares_is_not_widened(make):
    model = get_peft_model(make(), LocasConfig(r=4, init_weights="random"))
    teach(model)
    expected = logits(model)
    message = "cannot widen model.layers.0.mlp: another module of the model has its weights too"
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=message):
            merge()
        assert torch.equal(logits(model), expected)
    base = make()
    before = snapshot(base)
    with pytest.raises(ValueError, match=message):
        widen_base(base, 4)
    assert same(base, before)


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute in the model")
def test_a_fresh_memory_does_not_keep_the_gains_of_a_former_one_of_its_name():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights="random", gains=True))
    for layer in list_layers(model):
        layer.locas_gain["default"].weight.data.fill_(0.2)
    host = model.base_model.model
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random"))
    assert torch.equal(logits(model), logits(make_host("llama")))


def test_the_record_of_a_deleted_memory_is_not_kept():
    model = make_model(name="first")
    for _ in range(2):
        model.add_adapter("second", LocasConfig(r=4, init_weights="random"))
        model.delete_adapter("second")
    config = model.base_model.peft_config["second"]
    assert config.peft_type == "LOCAS" and not config.get_record("slots")
    assert model.peft_config["first"].get_record("slots")


def test_a_down_projection_that_stays_in_float32_can_have_a_memory(tmp_path):
    # transformers keeps T5's in float32.
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2
    )
    config.decoder_start_token_id = 0
    tf.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    host = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float16)
    assert host.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random"))
    assert len(list_layers(model)) == 2


def test_a_memory_deleted_while_it_is_rescaled_stays_deleted():
    model = make_model(name="first")
    model.add_adapter("second", LocasConfig(r=4, init_weights="gaussian"))
    with rescale(model, 2.0, "second"), rescale(model, 2.0, "second"):
        model.delete_adapter("second")
    assert not any(layer.locas_multiplier for layer in list_layers(model))


def make_host_with_lora():
    """A host that PEFT takes for one without an adapter."""
    lora = LoraConfig(target_modules=["q_proj", "gate_proj"], init_lora_weights=False)
    host = inject_adapter_in_model(lora, make_host("llama"), adapter_name="lora")
    del host.peft_config
    return host


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_adapters_are_switched_off_and_on_again():
    config = LocasConfig(r=4, init_weights="random", modules_to_save=["lm_head"])
    model = get_peft_model(make_host_with_lora(), config)
    teach(model)
    head = model.get_base_model().lm_head
    head.modules_to_save["default"].weight.data.add_(0.1)
    trained = [(name, p.requires_grad) for name, p in model.named_parameters()]
    base = logits(make_host("llama"))
    before, first = logits(model), list_layers(model)[0]
    # What was off stays off.
    first.enable_adapters(False)
    partly = logits(model)
    with pytest.raises(RuntimeError), adapters_disabled(model):
        assert torch.equal(logits(model), base)
        raise RuntimeError
    assert torch.equal(logits(model), partly) and not torch.equal(partly, before)
    first.enable_adapters(True)
    with adapters_disabled(model, except_for=[head]):
        with_head = logits(model)
    assert not torch.equal(with_head, base) and not torch.equal(with_head, before)
    assert torch.equal(logits(model), before)
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == trained


def test_a_decoder_s_tokens_are_not_masked_by_its_encoder_s_padding():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = tf.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0)
    model = get_peft_model(tf.T5ForConditionalGeneration(config), LocasConfig(r=4)).train()
    mask = (torch.arange(32) < 16).long().expand(4, 32)
    seen = []
    for layer in list_layers(model):
        layer.register_forward_pre_hook(lambda layer, args: seen.append(layer.token_mask))
    model(input_ids=make_tokens(), attention_mask=mask, labels=make_tokens())
    in_encoder, in_decoder = seen
    assert in_encoder is mask and in_decoder is None
    assert all(layer.token_mask is None for layer in list_layers(model))
    assert uncalibrated_memories(model) == []


def test_replicas_of_data_parallel_do_not_calibrate():
    hidden_states = torch.randn(2, 3, 16)
    model = get_peft_model(make_host("llama"), LocasConfig(r=4)).train()
    with pytest.raises(ValueError, match="cannot calibrate itself under DataParallel: calibrate"):
        list_layers(model)[0]._replicate_for_data_parallel()(hidden_states)
    assert uncalibrated_memories(model) == ["default"]
    layer = list_layers(make_model("opt"))[0]
    with pytest.raises(ValueError, match="layers.0.fc2 cannot run under DataParallel"):
        layer._replicate_for_data_parallel()(hidden_states)
    layer = list_layers(make_model("llama", gains=True))[0]
    with pytest.raises(ValueError, match="layers.0.mlp cannot have gains under DataParallel"):
        layer._replicate_for_data_parallel()(hidden_states)


def run_fused(self, x):
    """The forward of a library's kernel for a gated FFN."""
    return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def test_a_kernel_that_replaces_the_forward_of_an_ffn_leaves_the_memory():
    model = make_model()
    expected = logits(model)
    fresh = get_peft_model(make_host("llama"), LocasConfig(r=4)).train()
    for one in (model, fresh):
        for layer in one.get_base_model().model.layers:
            # As Liger does.
            layer.mlp.__dict__["forward"] = run_fused.__get__(layer.mlp)
    torch.testing.assert_close(logits(model), expected)
    assert all(layer.base_layer.forward.__func__ is run_fused for layer in list_layers(model))
    fresh(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    assert uncalibrated_memories(fresh) == []
    assert all(layer.locas_down["default"].weight.grad.any() for layer in list_layers(fresh))


def test_a_copy_by_the_same_config_says_the_same_once_it_has_the_weights(tmp_path):
    model = make_model()
    expected = logits(model)
    # TRL makes its reference so.
    model.add_adapter("ref", model.peft_config["default"])
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if ".default." in name:
            parameters[name.replace(".default.", ".ref.")].data.copy_(parameter.data)
    model.set_adapter("ref")
    assert torch.equal(logits(model), expected)
    # Without a warning that it is empty.
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path / "ref")
    assert torch.equal(logits(loaded), expected)


def test_accelerate_s_hook_of_an_ffn_is_not_the_layer_s():
    model = make_model()
    expected = logits(model)
    layer = list_layers(model)[0]
    add_hook_to_module(layer.base_layer, ModelHook())
    remove_hook_from_submodules(model)
    assert not hasattr(layer.base_layer, "_hf_hook")
    assert torch.equal(logits(model), expected)


def test_autocast_forgets_the_rows_that_served_to_measure_the_scale():
    # Slots that are written in closed form stay free.
    model = get_peft_model(make_host("opt"), LocasConfig(r=4, init_weights="write")).train()
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    for layer in list_layers(model):
        assert layer.locas_calibrated["default"]
        assert not layer.locas_down["default"].weight.grad.any()


def test_one_config_object_may_serve_two_memories_of_a_model():
    config = LocasConfig(r=4)
    model = get_peft_model(make_host("llama"), config, adapter_name="first")
    calibrate(model, [make_tokens(seed=1)], "first")
    slots = dict(slots_of(model, "first"))
    model.add_adapter("second", config)
    calibrate(model, [make_tokens(seed=7, length=4)], "second")
    assert slots_of(model, "first") == slots != slots_of(model, "second")


def slots_of(model, name="default") -> dict[str, list[int]] | None:
    return model.peft_config[name].get_record("slots")


@pytest.mark.parametrize(
    ("strategy", "options"), [("topk", {}), ("random", {"low_cpu_mem_usage": True})], ids=str
)
def test_a_loaded_memory_keeps_the_record_of_the_slots_it_was_cloned_from(
    tmp_path, strategy, options
):
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights=strategy))
    calibrate(model, [make_tokens()])
    grow(model, 6, batches=[make_tokens(seed=5)])
    expected = slots_of(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, **options)
    assert slots_of(loaded) == expected
    grow(loaded, 9, batches=[make_tokens(seed=5)])
    assert all(len(set(slots)) == 9 for slots in slots_of(loaded).values())


def test_no_slots_are_recorded_for_rows_that_only_keep_a_place():
    assert slots_of(get_peft_model(make_host("llama"), LocasConfig(r=4))) is None


def test_no_slots_are_recorded_for_tensors_that_are_loaded_over_a_memory(memory):
    model = make_model(seed=3)
    assert slots_of(model)
    model.load_adapter(memory, "default")
    assert slots_of(model) is None
    loaded = PeftModel.from_pretrained(make_host("llama"), memory)
    assert slots_of(loaded)
    set_peft_model_state_dict(loaded, load_peft_weights(memory, device="cpu"))
    assert slots_of(loaded) is None


def test_a_file_s_slots_are_not_those_of_a_memory_that_is_made_anew(tmp_path):
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    calibrate(model, [make_tokens()])
    model.save_pretrained(tmp_path)
    model = get_peft_model(make_host("llama"), LocasConfig.from_pretrained(tmp_path))
    calibrate(model, [make_tokens(seed=9)])
    model.load_adapter(tmp_path, "default")
    assert slots_of(model) is None


def test_a_memory_that_is_loaded_and_saved_keeps_the_sample_of_its_base_s_weights(
    tmp_path, monkeypatch
):
    # PEFT would look for the base.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_memory(make_model(), tmp_path / "first", "base", "card")
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    expected, found = (
        LocasConfig.from_pretrained(tmp_path / name).record for name in ("first", "second")
    )
    assert found == expected and found["host"]["weights"]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_copy_is_independent(family):
    model = make_model(family).eval()
    clone = copy.deepcopy(model)
    expected = logits(model)
    clone.merge_and_unload()
    assert torch.equal(logits(model), expected)
    clone = copy.deepcopy(model)
    teach(model, seed=5)
    assert torch.equal(logits(clone), expected) and not torch.equal(logits(model), expected)


# ----------------------------------------------------------- beside other adapters


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_lora_first_then_a_memory_around_it():
    host = make_host_with_lora()
    with_lora = logits(host)
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random"))
    torch.testing.assert_close(logits(model), with_lora)
    teach(model)
    message = "cannot merge into .*layers.0.mlp: gate_proj carries another adapter: merge or unload"
    with pytest.raises(ValueError, match=message):
        model.merge_adapter()


# ------------------------------------------------------------------------ merging


def test_an_unknown_name_does_not_throw_the_memory_away():
    model = make_model().eval()
    before = logits(model)
    with pytest.raises(
        ValueError, match="^adapter_names must be the model's adapters, got .'typo'"
    ):
        model.merge_and_unload(adapter_names=["typo"])
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("family", "safe_serialization"), [("llama", True), ("gpt2", False), ("opt", True)]
)
def test_an_empty_memory_is_saved_and_calibrates_after_loading(
    family, safe_serialization, tmp_path
):
    model = get_peft_model(make_host(family), LocasConfig(r=4))
    with pytest.warns(UserWarning, match="^the memory 'default' is saved empty"):
        model.save_pretrained(tmp_path, safe_serialization=safe_serialization)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path, is_trainable=True)
    assert uncalibrated_memories(loaded) == ["default"]
    assert torch.equal(logits(loaded), logits(make_host(family)))
    loaded(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    assert uncalibrated_memories(loaded) == []


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "opt"])
def test_an_empty_memory_merges_to_neurons_of_zeros(family):
    model = get_peft_model(make_host(family), LocasConfig(r=4)).eval()
    before, expected = snapshot(model), logits(make_host(family))
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"is merged: call unmerge_adapter\(\) before it is calib"):
        calibrate(model, [make_tokens()])
    model.unmerge_adapter()
    assert same(model, before) and uncalibrated_memories(model) == ["default"]
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)


# Two allocations of a merge are of the norm clip.
DENSE = {"merge_adapter": 5, "unmerge_adapter": 3}
MIXTURE = {"merge_adapter": 4, "unmerge_adapter": 1}


@pytest.mark.parametrize("verb", ["merge_adapter", "unmerge_adapter"])
@pytest.mark.parametrize(
    ("family", "allocations"),
    [("llama", DENSE), ("phi3", DENSE), ("gpt2", DENSE), ("mixtral", MIXTURE)],
)
def test_without_memory_for_a_weight_no_layer_changes_in_part(
    family, verb, allocations, monkeypatch
):
    model = make_model(family)
    if verb == "unmerge_adapter":
        model.merge_adapter()
    before = snapshot(model)
    concatenate = torch.cat
    left = 0

    def fail_later(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            raise torch.OutOfMemoryError("out of memory")
        return concatenate(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", fail_later)
        # The first layer's allocations, one after another.
        for allocation in range(allocations[verb]):
            left = allocation + 1
            with pytest.raises(torch.OutOfMemoryError):
                getattr(model, verb)()
            assert same(model, before)
    getattr(model, verb)()
    assert not same(model, before)


def test_a_merged_ffn_that_is_not_found_again_undoes_the_merge(monkeypatch):
    model = make_model()
    before = snapshot(model)

    def find_others(*args):
        found = find_ffns(*args)
        found.pop("model.layers.1.mlp")
        return found

    monkeypatch.setattr("locas_peft.tuner.model.find_ffns", find_others)
    message = r"^the FFN model.layers.1.mlp is not found again with its merged neurons: merge mem"
    with pytest.raises(ValueError, match=message):
        model.merge_and_unload()
    assert same(model, before)


@pytest.mark.parametrize("verb", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_safe_merge_refuses_values_that_overflow_in_the_host_s_dtype(family, verb):
    model = get_peft_model(make_host(family, torch.float16), LocasConfig(r=4))
    teach(model)
    # The other layer's merge is undone.
    list_layers(model)[1].locas_tau["default"] = torch.tensor(1e6)
    before = snapshot(model)
    with pytest.raises(ValueError, match="NaNs detected in the merged weights. The adapter def"):
        getattr(model, verb)(safe_merge=True)
    assert same(model, before)


class Int8Parameter(torch.nn.Parameter):
    """As a quantised weight: a parameter of another class."""


def quantise(ffn):
    ffn.down_proj.weight.__class__ = Int8Parameter


def offload(ffn):
    ffn.to("meta")


def shard(ffn):
    ffn.up_proj.weight.full_tensor = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (quantise, "down_proj is a Linear of torch.float32, quantised or custom: load .* or use"),
        (offload, "gate_proj is offloaded or on the meta device: load the base onto one device"),
        (shard, "up_proj is sharded across processes: gather the base first"),
    ],
)
def test_bases_that_cannot_be_widened_are_refused(change, message):
    model = make_model()
    first, second = list_layers(model)
    change(second.ffn.owner)
    with pytest.raises(ValueError, match=f"^cannot merge into model.layers.1.mlp: {message}"):
        model.merge_adapter()
    assert not first.merged


def test_a_family_whose_config_has_no_width_cannot_be_unloaded_into_a_checkpoint():
    config = tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
    host = tf.BloomForCausalLM(config).eval()
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random"))
    teach(model)
    expected = logits(model)
    message = "no field of BloomConfig makes transformer.h.0.mlp 68 wide: .* but not unloaded"
    with pytest.raises(ValueError, match=message):
        model.merge_and_unload()
    assert torch.equal(logits(model), expected)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_offloaded_base_gets_the_same_memory_but_is_not_merged(family):
    offloaded = cpu_offload(make_host(family), execution_device=torch.device("cpu"))
    models = []
    for host in (make_host(family), offloaded):
        model = get_peft_model(host, LocasConfig(r=4))
        calibrate(model, [make_tokens()])
        teach(model)
        models.append(model)
    assert torch.equal(*map(logits, models))
    with pytest.raises(ValueError, match="is offloaded or on the meta device"):
        models[1].merge_adapter()


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_memory_that_is_offloaded_is_used_as_before(family, offload, tmp_path):
    model = make_model(family, gains=True).eval()
    for layer in list_layers(model):
        layer.locas_gain["default"].weight.data.uniform_(-0.1, 0.1)
    expected = logits(model)
    place = {"offload_dir": tmp_path} if offload is disk_offload else {}
    options = {"execution_device": torch.device("cpu"), "offload_buffers": True, **place}
    with torch.no_grad():
        offload(model, **options)
    assert all(weight.is_meta for weight in list_layers(model)[0].parameters_of("default"))
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_unload_leaves_no_hook(family):
    host = make_host(family)
    model = get_peft_model(host, LocasConfig(r=4))
    assert host._forward_pre_hooks
    assert model.unload() is host
    assert not any(module._forward_pre_hooks for module in host.modules())
    assert not hasattr(host, "peft_config")


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_forward_of_another_thread_changes_nothing(family):
    model = make_model(family)
    tokens = [make_tokens(), make_tokens(batch=2, length=9, seed=2)]
    expected = [logits(model, each) for each in tokens]
    found = []
    other = threading.Thread(target=lambda: found.append(logits(model, tokens[1])))

    def run_other(layer, args):
        # Between the two projections of a flat FFN.
        hook.remove()
        other.start()
        other.join()

    hook = list_layers(model)[0].register_forward_pre_hook(run_other)
    assert torch.equal(logits(model, tokens[0]), expected[0])
    assert len(found) == 1 and torch.equal(found[0], expected[1])


def count_hooks(host) -> tuple[int, int]:
    return len(host._forward_pre_hooks), len(host._forward_hooks)


def test_memories_that_come_and_go_leave_no_hooks():
    host = make_host("llama")
    for _ in range(2):
        host.add_adapter(LocasConfig(r=4), adapter_name="one")
        assert count_hooks(host) == (1, 1)
        host.delete_adapter("one")
    host = make_host("llama")
    model = get_peft_model(host, LocasConfig(r=4))
    model.add_adapter("two", LocasConfig(r=4))
    model.delete_adapter("two")
    assert count_hooks(host) == (1, 1)
    clone = copy.deepcopy(model)
    clone.add_adapter("two", LocasConfig(r=4))
    assert count_hooks(clone.get_base_model()) == count_hooks(host) == (1, 1)
    model.base_model.delete_adapter("default")
    assert count_hooks(host) == (0, 0)


# ------------------------------------------------------------------------------ files


def test_a_loaded_memory_names_its_modules(tmp_path):
    model = make_model(target_modules=r".*\.[01]\.mlp", rank_pattern={r".*\.1\.mlp": 8}).eval()
    model.save_pretrained(tmp_path)
    loaded = load_memory(make_host("llama"), tmp_path)
    config = loaded.peft_config["default"]
    assert config.target_modules == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert config.rank_pattern == {r"model\.layers\.0\.mlp": 4, r"model\.layers\.1\.mlp": 8}
    assert torch.equal(logits(loaded), logits(model))
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path)
    assert loaded.peft_config["default"].target_modules == r".*\.[01]\.mlp"
    assert torch.equal(logits(loaded), logits(model))


def test_a_loaded_config_may_be_changed_and_used_for_a_new_memory(memory):
    config = LocasConfig.from_pretrained(memory)
    config.r = 8
    model = get_peft_model(make_host("llama"), config)
    assert [layer.locas_up["default"].out_features for layer in list_layers(model)] == [8, 8]


def test_the_same_memory_is_the_same_bytes(tmp_path):
    saved = set()
    for number in range(4):
        save_memory(make_model(), tmp_path / str(number), "base", "card")
        saved.add((tmp_path / f"{number}/adapter_model.safetensors").read_bytes())
    assert len(saved) == 1
    with safe_open(tmp_path / "0/adapter_model.safetensors", framework="pt") as file:
        assert file.metadata().keys() == {"format", "locas_digest"}


def test_saving_over_an_older_memory_leaves_no_wrong_digest(memory):
    host = make_host("llama")
    host.add_adapter(LocasConfig(r=4, init_weights="random"))
    teach(host, seed=3)
    host.save_pretrained(memory)  # transformers writes the config first, then the tensors
    loaded = load_memory(make_host("llama"), memory)
    assert torch.equal(logits(loaded), logits(host))


@pytest.mark.parametrize(
    ("factor", "message"), [(torch.nan, "not finite"), (1e14, "at most"), (1e6, "product")]
)
def test_a_diverged_memory_is_not_saved(factor, message, tmp_path):
    model = make_model(max_slot_norm=None)
    for weight in weights_in(list_layers(model)[1]):
        weight.data.mul_(factor)
    with pytest.raises(
        ValueError, match=f"'default' has diverged and cannot be saved: .*{message}"
    ):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.glob("**/*.safetensors"), *tmp_path.glob("**/*.json")]


def test_what_unload_keeps(tmp_path):
    model = make_model(modules_to_save=["model.norm"], trainable_token_indices=[5])
    for key, parameter in model.named_parameters():
        if "modules_to_save" in key or "trainable_tokens_delta" in key:
            parameter.data.add_(1.0)
    model.save_pretrained(tmp_path)
    unloaded = PeftModel.from_pretrained(make_host("llama"), tmp_path).unload()
    before = make_host("llama").state_dict()
    changed = []
    for name, tensor in unloaded.state_dict().items():
        if not torch.equal(tensor, before[name]):
            changed.append(name)
    assert changed == ["model.norm.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama with biases", "phi3", "gpt2", "gpt_neox", "opt"])
def test_the_base_is_unharmed(family, dtype, tmp_path):
    host = make_host(family, dtype)
    before, expected = snapshot(host), logits(host)
    modules = [name for name, _ in host.named_modules()]
    model = get_peft_model(host, LocasConfig(r=4, init_weights="random"), adapter_name="first")
    teach(model, "first")
    model.save_pretrained(tmp_path)
    model.add_adapter("second", LocasConfig(r=3, init_weights="gaussian"))
    teach(model, "second", seed=1)
    assert not torch.equal(logits(model), expected)
    for _ in range(3):
        model.merge_adapter(["first", "second"])
        assert {layer.ffn.width - layer.base_width for layer in list_layers(model)} == {7}
        model.unmerge_adapter()
    model.load_adapter(tmp_path / "first", "again")
    with pytest.warns(UserWarning, match="Setting active adapter"):
        model.delete_adapter("first")
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert model.unload() is host
    assert same(host, before) and torch.equal(logits(host), expected)
    assert [name for name, _ in host.named_modules()] == modules


@pytest.mark.parametrize("strategy", ["topk", "bottomk", "random"])
def test_r_above_the_host_s_width_where_cloning(strategy):
    host = make_host("llama")
    modules = list(host.modules())
    message = "r must be at most the host's width .* got r=25 for model.layers.0.mlp with 24 slots"
    with pytest.raises(ValueError, match=message):
        get_peft_model(host, LocasConfig(r=25, init_weights=strategy))
    assert list(host.modules()) == modules
    assert make_model(r=25, init_weights="gaussian")


def test_a_state_of_0_2_0_loads_with_its_rows():
    former = get_peft_model(make_host("llama"), LocasConfig(r=4))
    calibrate(former, [make_tokens()])
    state = {key: value for key, value in former.state_dict().items() if "calibrated" not in key}
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, seed=1))
    model.load_state_dict(state)
    assert uncalibrated_memories(model) == []
    model(input_ids=make_tokens(seed=3), labels=make_tokens(seed=3)).loss.backward()
    assert same(model, former.state_dict())


def test_a_frozen_memory_is_not_calibrated():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    model.requires_grad_(False)
    model(input_ids=make_tokens(), attention_mask=torch.ones_like(make_tokens()))
    assert uncalibrated_memories(model) == ["default"]
    assert all(layer.token_mask is None for layer in list_layers(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the names of transformers 6
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("gains", [False, True])
def test_padding_does_not_count_under_gradient_checkpointing(use_reentrant, gains):
    mask = torch.ones_like(make_tokens())
    mask[:, 8:] = 0
    tokens = {"input_ids": make_tokens(), "attention_mask": mask, "labels": make_tokens()}
    scales = []
    for checkpoints in (False, True):
        model = get_peft_model(make_host("llama"), LocasConfig(r=4, gains=gains)).train()
        if checkpoints:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(**tokens, use_cache=False).loss.backward()
        scales.append([layer.locas_tau["default"].item() for layer in list_layers(model)])
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)
