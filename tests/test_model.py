import copy
import json
import sys
import threading
import warnings

import pytest
import torch
import transformers as tf
from accelerate import cpu_offload
from families import (
    VOCABULARY,
    logits,
    make_host,
    make_model,
    make_tokens,
    rewrite,
    same,
    snapshot,
    teach,
    weights_in,
)
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_layer_status,
    get_model_status,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from locas_peft import (
    LocasConfig,
    LocasLayer,
    LocasModel,
    TestTimeTrainer,
    calibrate,
    grow,
    rescale,
    uncalibrated_memories,
)
from locas_peft.memories import load_memory, save_memory
from locas_peft.tuner import adapters_disabled, find_ffns, list_layers
from locas_peft.tuner.modules import used_modules

# ------------------------------------------------------------------ PEFT's verbs


def test_auto_peft_model_loads_from_the_folder_alone(tmp_path):
    make_host("llama").save_pretrained(tmp_path / "base")
    base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LocasConfig(r=4, init_weights="random", task_type="CAUSAL_LM"))
    teach(model)
    model.save_pretrained(tmp_path / "memory")
    assert isinstance(PeftConfig.from_pretrained(tmp_path / "memory"), LocasConfig)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "memory")
    assert torch.equal(logits(loaded), logits(model.eval()))
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "memory", low_cpu_mem_usage=True)
    assert torch.equal(logits(loaded), logits(model))
    assert all(layer.locas_tau["default"].dtype == torch.float32 for layer in list_layers(loaded))


def test_saved_file_holds_the_memory_and_nothing_else(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert (
        sum(t.numel() for t in tensors.values()) == 4 * 3 * 16 * 2 + 6
    )  # r x 3 x D x layers, two scales and a flag a layer
    found = {p.name for p in tmp_path.iterdir()}
    assert found == {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LOCAS"
    assert set(config["record"]["slots"]) == {"model.layers.0.mlp", "model.layers.1.mlp"}


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


def test_modules_in_use_are_all_modules_but_those_of_inactive_memories():
    model = make_model(modules_to_save=["lm_head"])
    model.add_adapter("inactive", LocasConfig(r=4))
    modules, used = list(model.modules()), list(used_modules(model))
    assert [module for module in modules if module in set(used)] == used
    left_out = [name for name, module in model.named_modules() if module not in set(used)]
    containers = {"locas_gate", "locas_up", "locas_down", "locas_gain"}
    assert {name.rpartition(".")[2] for name in left_out} == {"inactive"} | containers
    assert not any(name.endswith("modules_to_save") for name in left_out)


def test_a_step_does_no_more_work_where_more_memories_are_attached():
    model = make_model().train()
    ids = make_tokens(1, 128)
    chunks = TestTimeTrainer(model, window=16, stride=8, learning_rate=1e-3).read(ids)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step():
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def read():
        next(chunks)

    for act in (read, read, step):
        act()
    alone = count_calls(step)
    reading = count_calls(read)
    for number in range(20):
        model.add_adapter(f"memory{number}", LocasConfig(r=4, init_weights="random"))
    step()
    assert count_calls(step) == alone
    read()
    assert count_calls(read) == reading


def test_rows_of_a_batch_may_use_different_memories():
    for family in ("llama", "gpt2", "opt"):
        model = make_model(family, name="first").eval()
        model.add_adapter("second", LocasConfig(r=2, init_weights="gaussian"))
        teach(model, "second", seed=1)
        expected = {"__base__": logits(make_host(family))}
        for name in ("first", "second"):
            model.set_adapter(name)
            expected[name] = logits(model)
        names = ["second", "__base__", "first", "second"]
        mixed = logits(model, adapter_names=names)
        for row, name in enumerate(names):
            torch.testing.assert_close(mixed[row], expected[name][row], rtol=0, atol=1e-5)
        generated = model.generate(
            input_ids=make_tokens(),
            adapter_names=names,
            num_beams=2,
            max_new_tokens=3,
            do_sample=False,
        )
        model.set_adapter("first")
        alone = model.generate(
            input_ids=make_tokens()[2:3], num_beams=2, max_new_tokens=3, do_sample=False
        )
        assert torch.equal(generated[2, : alone.shape[1]], alone[0])


def make_mixed(family, names=("one", "two", "three"), widths=(3, 3, 3), dtype=torch.float64):
    """A model with several memories of different weights, in evaluation mode."""
    model = get_peft_model(make_host(family, dtype), LocasConfig(r=4, init_weights="gaussian"))
    for seed, (name, r) in enumerate(zip(names, widths, strict=True)):
        model.add_adapter(
            name, LocasConfig(r=r, init_weights="gaussian", seed=seed, scaling=1.0 + seed)
        )
        teach(model, name, seed=seed)
    return model.to(dtype).eval()


def gradients_of(model, names):
    return {
        key: None if parameter.grad is None else parameter.grad.clone()
        for key, parameter in model.named_parameters()
        if any(f".{name}." in key for name in names)
    }


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
    for layer in list_layers(model):
        for projection in (
            projection for name in memories for projection in layer.projections(name)
        ):
            projection.requires_grad_(True)
    ids = make_tokens(len(names), 12)
    losses = []
    for name in dict.fromkeys(names):
        rows = [row for row, other in enumerate(names) if other == name]
        if name == "__base__":
            with adapters_disabled(model), torch.no_grad():
                losses.append(model(input_ids=ids[rows], labels=ids[rows]).loss * len(rows))
            continue
        loss = model(
            input_ids=ids[rows], labels=ids[rows], adapter_names=[name] * len(rows)
        ).loss * len(rows)
        loss.backward()
        losses.append(loss.detach())
    expected = gradients_of(model, memories)
    assert all(gradient is not None and gradient.any() for gradient in expected.values())
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, adapter_names=names).loss * len(names)
    torch.testing.assert_close(loss.detach(), sum(losses), rtol=1e-6, atol=1e-6)
    loss.backward()
    for key, gradient in gradients_of(model, memories).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-7, msg=key)
    others = {"one", "two", "three", "default"} - set(memories)
    assert all(gradient is None for gradient in gradients_of(model, others).values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_of_a_mixed_batch_are_right(family):
    model = make_mixed(family)
    layer = list_layers(model)[-1]
    for config in model.peft_config.values():
        # The clip would undo the small changes of a numerical gradient.
        config.max_slot_norm = None
    names = ["two", "one", "__base__", "three", "one"]
    weights = [
        weight.detach() for name in ("one", "two", "three") for weight in weights_in(layer, name)
    ]
    inputs = torch.randn(5, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def forward(inputs, *weights):
        left = iter(weights)
        for name in ("one", "two", "three"):
            for projection in layer.projections(name):
                del projection.weight
                projection.weight = next(left)
        return layer(inputs, adapter_names=names)

    for name in ("one", "two", "three"):
        for projection in layer.projections(name):
            del projection._parameters["weight"]
            projection.weight = None
    assert torch.autograd.gradcheck(
        forward, (inputs.requires_grad_(), *(w.requires_grad_() for w in weights))
    )


def test_rows_of_one_name_take_the_plain_path(monkeypatch):
    model = make_mixed("llama", dtype=torch.float32)
    model.set_adapter("two")
    expected = logits(model)
    calls = []
    monkeypatch.setattr("locas_peft.tuner.layer.add_by_row", lambda *args: calls.append(args))
    assert torch.equal(logits(model, adapter_names=["two"] * 4), expected) and not calls


def test_one_batched_product_serves_rows_of_different_memories(monkeypatch):
    model = make_mixed("llama")
    recalled = []
    recall = LocasLayer.recall
    monkeypatch.setattr(
        LocasLayer,
        "recall",
        lambda self, names, inputs: (
            recalled.append((names, len(inputs))) or recall(self, names, inputs)
        ),
    )
    logits(model, make_tokens(3), adapter_names=["two", "one", "three"])
    assert recalled == [(["two", "one", "three"], 3)] * 2  # once a layer


def test_adapter_names_are_checked():
    model = make_model().eval()
    with pytest.raises(ValueError, match=r"Trying to infer with non-existing adapter\(s\): nobody"):
        logits(model, adapter_names=["nobody"] * 4)
    message = "Length of `adapter_names` should be the same as the number of inputs"
    with pytest.raises(ValueError, match=message):
        logits(model, adapter_names=["default"] * 3)
    model.train()
    message = "Cannot pass `adapter_names` when the model is in training mode."
    with pytest.raises(ValueError, match=message):
        logits(model, adapter_names=["default"] * 4)
    assert not any(layer._forward_pre_hooks for layer in list_layers(model))


def test_status_reports():
    model = make_model()
    status = get_model_status(model)
    assert (status.peft_types, status.adapter_model_type) == ({"default": "LOCAS"}, "LocasModel")
    assert status.enabled is True and status.active_adapters == ["default"]
    assert status.merged_adapters == []
    assert status.trainable_params == 4 * 3 * 16 * 2
    layer_status = get_layer_status(model)[0]
    assert layer_status.name == "model.model.layers.0.mlp"
    assert layer_status.module_type == "locas.LocasLayer"


def test_injection_and_transformers_own_verbs(tmp_path):
    config = LocasConfig(r=4, init_weights="random")
    injected = inject_adapter_in_model(config, make_host("llama"))
    teach(injected)
    expected = logits(injected)
    state = get_peft_model_state_dict(injected)
    fresh = inject_adapter_in_model(LocasConfig(r=4), make_host("llama"))
    assert set_peft_model_state_dict(fresh, state).unexpected_keys == []
    assert torch.equal(logits(fresh), expected)

    host = make_host("llama")
    host.add_adapter(LocasConfig(r=4, init_weights="random"), adapter_name="memory")
    teach(host, "memory")
    assert torch.equal(logits(host), expected)
    host.disable_adapters()
    assert torch.equal(logits(host), logits(make_host("llama")))
    host.enable_adapters()
    host.save_pretrained(tmp_path)
    again = make_host("llama")
    again.load_adapter(str(tmp_path), adapter_name="other")
    assert torch.equal(logits(again), expected)
    again.delete_adapter("other")
    assert torch.equal(logits(again), logits(make_host("llama")))


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


def test_rank_pattern_gives_widths_and_taus(tmp_path):
    model = make_model(rank_pattern={"layers.1.mlp": 8})
    assert [layer.locas_up["default"].out_features for layer in list_layers(model)] == [4, 8]
    expected = logits(model.eval())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(make_host("llama"), tmp_path)), expected)
    merged = model.merge_and_unload()  # the narrower is padded
    assert [ffn.width for ffn in find_ffns(merged).values()] == [32, 32]
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "autocast_adapter_dtype"), [(torch.bfloat16, True), (torch.float16, False)]
)
def test_half_bases(dtype, autocast_adapter_dtype):
    config = LocasConfig(r=4, init_weights="random")
    model = get_peft_model(
        make_host("llama", dtype), config, autocast_adapter_dtype=autocast_adapter_dtype
    )
    expected = torch.float32 if autocast_adapter_dtype else dtype
    assert {w.dtype for layer in list_layers(model) for w in weights_in(layer)} == {expected}
    teach(model)
    assert logits(model).dtype == dtype
    model.to(torch.bfloat16)
    scales = [
        entries["default"]
        for layer in list_layers(model)
        for entries in (layer.locas_tau, layer.locas_input_scale)
    ]
    assert {scale.dtype for scale in scales} == {torch.float32}


def test_autocast_trains():
    model = make_model().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=make_tokens(), labels=make_tokens()).loss
    loss.backward()
    assert all(
        p.grad.isfinite().all() and p.grad.dtype == torch.float32
        for p in model.parameters()
        if p.requires_grad
    )


def test_rescale_is_undone():
    model = make_model().eval()
    before = logits(model)
    with rescale(model, 0.0):
        assert torch.equal(logits(model), logits(make_host("llama")))
    with pytest.raises(RuntimeError), rescale(model, 2.0):
        raise RuntimeError
    assert torch.equal(logits(model), before)
    with (
        pytest.raises(ValueError, match="no LOCAS memory 'x' to rescale"),
        rescale(model, 1.0, "x"),
    ):
        pass
    with rescale(model, 4.0), rescale(model, 0.25):
        torch.testing.assert_close(logits(model), before)
    assert torch.equal(logits(model), before)
    with rescale(model, 0.0):
        clone = copy.deepcopy(model)  # is not in the context
    assert torch.equal(logits(clone), before)


def test_a_memory_saved_while_it_is_rescaled_keeps_its_scale(tmp_path):
    model = make_model().eval()
    before = logits(model)
    with rescale(model, 0.0):
        model.save_pretrained(tmp_path)
        state = get_peft_model_state_dict(model)
    assert all(tau == 4.0 for key, tau in state.items() if "locas_tau" in key)
    assert torch.equal(logits(PeftModel.from_pretrained(make_host("llama"), tmp_path)), before)


def test_merged_memories_are_not_rescaled_and_rescaled_ones_not_merged():
    model = make_model()
    before = snapshot(model)
    with rescale(model, 0.5):
        for verb in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(ValueError) as error:
                verb()
            assert str(error.value) == (
                "the memory 'default' cannot be merged inside rescale(), got the multiplier 0.5: merge it outside, or "
                "set the config's scaling."
            )
    assert same(model, before)
    model.merge_adapter()
    with pytest.raises(ValueError) as error, rescale(model, 0.5):
        pass
    found = str(error.value)
    assert found == "the memory 'default' is merged: call unmerge_adapter() before it is rescaled."
    model.unmerge_adapter()
    assert same(model, before)


def test_a_memory_deleted_while_it_is_rescaled_stays_deleted():
    model = make_model(name="first")
    model.add_adapter("second", LocasConfig(r=4, init_weights="gaussian"))
    with rescale(model, 2.0, "second"), rescale(model, 2.0, "second"):
        model.delete_adapter("second")
    assert not any(layer.locas_multiplier for layer in list_layers(model))


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_adapters_are_switched_off_and_on_again():
    config = LocasConfig(r=4, init_weights="random", modules_to_save=["lm_head"])
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    host = inject_adapter_in_model(lora, make_host("llama"), adapter_name="lora")
    del host.peft_config
    model = get_peft_model(host, config)
    teach(model)
    head = model.get_base_model().lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.add_(0.1)
    trained = [(name, p.requires_grad) for name, p in model.named_parameters()]
    before, first = logits(model), list_layers(model)[0]
    first.enable_adapters(False)
    partly = logits(model)
    with pytest.raises(RuntimeError), adapters_disabled(model):
        assert torch.equal(logits(model), logits(make_host("llama")))
        raise RuntimeError
    assert torch.equal(logits(model), partly) and not torch.equal(
        partly, before
    )  # what was off stays off
    first.enable_adapters(True)
    with adapters_disabled(model, except_for=[head]):
        with_head = logits(model)
    assert not torch.equal(with_head, logits(make_host("llama")))
    assert not torch.equal(with_head, before)
    assert torch.equal(logits(model), before)
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == trained


def test_a_decoder_s_tokens_are_not_masked_by_its_encoder_s_padding():
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )
    config.decoder_start_token_id = 0
    model = get_peft_model(tf.T5ForConditionalGeneration(config), LocasConfig(r=4)).train()
    mask = (torch.arange(32) < 16).long().expand(4, 32)
    seen = {}
    for layer in list_layers(model):
        layer.register_forward_pre_hook(
            lambda layer, args: seen.update({layer.name: layer.token_mask})
        )
    model(input_ids=make_tokens(), attention_mask=mask, labels=make_tokens())
    encoder, decoder = list_layers(model)
    assert seen[encoder.name] is mask and seen[decoder.name] is None
    assert encoder.token_mask is None and decoder.token_mask is None
    assert uncalibrated_memories(model) == []


def test_replicas_of_data_parallel_do_not_calibrate():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4)).train()
    hidden_states = torch.randn(2, 3, 16)
    with pytest.raises(ValueError, match="cannot calibrate itself under DataParallel: calibrate"):
        list_layers(model)[0]._replicate_for_data_parallel()(hidden_states)
    assert uncalibrated_memories(model) == ["default"]
    model = get_peft_model(make_host("opt"), LocasConfig(r=4))
    calibrate(model, [make_tokens()])
    with pytest.raises(ValueError, match="layers.0.fc2 cannot run under DataParallel"):
        list_layers(model)[0]._replicate_for_data_parallel()(hidden_states)


def test_one_config_object_may_serve_two_memories_of_a_model():
    config = LocasConfig(r=4)
    model = get_peft_model(make_host("llama"), config, adapter_name="first")
    calibrate(model, [make_tokens(seed=1)], "first")
    slots = dict(model.peft_config["first"].get_record("slots"))
    model.add_adapter("second", config)
    calibrate(model, [make_tokens(seed=7, length=4)], "second")
    assert (
        model.peft_config["first"].get_record("slots")
        == slots
        != model.peft_config["second"].get_record("slots")
    )


def make_calibrated(**kwargs) -> PeftModel:
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, **kwargs))
    calibrate(model, [make_tokens()])
    return model


def slots_of(model) -> dict[str, list[int]] | None:
    return model.peft_config["default"].get_record("slots")


@pytest.mark.parametrize("strategy", ["topk", "random"])
@pytest.mark.parametrize("options", [{}, {"low_cpu_mem_usage": True}], ids=str)
def test_a_loaded_memory_keeps_the_record_of_the_slots_it_was_cloned_from(
    tmp_path, strategy, options
):
    model = make_calibrated(init_weights=strategy)
    teach(model)
    grow(model, 6, batches=[make_tokens(seed=5)])
    expected = slots_of(model)
    assert all(len(set(slots)) == 6 for slots in expected.values())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, **options)
    assert slots_of(loaded) == expected
    grow(loaded, 9, batches=[make_tokens(seed=5)])
    assert all(len(set(slots)) == 9 for slots in slots_of(loaded).values())


def test_no_slots_are_recorded_for_rows_that_only_keep_a_place():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    assert slots_of(model) is None
    calibrate(model, [make_tokens()])
    assert slots_of(model)


def test_no_slots_are_recorded_for_tensors_that_are_loaded_over_a_memory(tmp_path):
    make_model().save_pretrained(tmp_path)
    model = make_model(seed=3)
    assert slots_of(model)
    model.load_adapter(tmp_path, "default")
    assert slots_of(model) is None
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path)
    assert slots_of(loaded)
    set_peft_model_state_dict(loaded, load_peft_weights(tmp_path, device="cpu"))
    assert slots_of(loaded) is None


def test_a_file_s_slots_are_not_those_of_a_memory_that_is_made_anew(tmp_path):
    make_calibrated().save_pretrained(tmp_path)
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
    expected = json.loads((tmp_path / "first" / "adapter_config.json").read_text())["record"]
    assert expected["host"]["weights"]
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    record = json.loads((tmp_path / "second" / "adapter_config.json").read_text())["record"]
    assert record == expected


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_copy_is_independent(family):
    model = make_model(family).eval()
    clone = copy.deepcopy(model)
    expected = logits(model)
    teach(model, seed=5)
    assert torch.equal(logits(clone), expected) and not torch.equal(logits(model), expected)
    clone.merge_and_unload()
    assert isinstance(model.base_model, LocasModel) and list_layers(model)


# ----------------------------------------------------------- beside other adapters


def test_lora_first_then_a_memory_around_it():
    host = inject_adapter_in_model(
        LoraConfig(target_modules=["q_proj", "gate_proj"], init_lora_weights=False),
        make_host("llama"),
    )
    with_lora = logits(host)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT: the model already has a peft_config
        del host.peft_config
        model = get_peft_model(host, LocasConfig(r=4, init_weights="random"), adapter_name="memory")
    torch.testing.assert_close(logits(model), with_lora)
    teach(model, "memory")
    model.set_adapter("memory")
    with pytest.raises(ValueError) as error:
        model.merge_adapter()
    assert str(error.value) == (
        "cannot merge into model.layers.0.mlp: gate_proj carries another adapter: merge or unload that one first."
    )


# ------------------------------------------------------------------------ merging


def test_an_unknown_name_does_not_throw_the_memory_away():
    model = make_model().eval()
    before = logits(model)
    with pytest.raises(
        ValueError, match="^adapter_names must be the model's adapters, got .'typo'"
    ):
        model.merge_and_unload(adapter_names=["typo"])
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("safe_serialization", [True, False])
def test_an_empty_memory_is_saved_and_calibrates_after_loading(
    family, safe_serialization, tmp_path
):
    model = get_peft_model(make_host(family), LocasConfig(r=4))
    with pytest.warns(
        UserWarning, match="^the memory 'default' is saved empty: it has learned nothing yet"
    ):
        model.save_pretrained(tmp_path, safe_serialization=safe_serialization)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path, is_trainable=True)
    assert uncalibrated_memories(loaded) == ["default"]
    assert torch.equal(logits(loaded.eval()), logits(make_host(family)))
    optimizer = torch.optim.SGD((p for p in loaded.parameters() if p.requires_grad), lr=1.0)
    loaded.train()(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    assert uncalibrated_memories(loaded) == []
    optimizer.step()
    assert not torch.equal(logits(loaded.eval()), logits(make_host(family)))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "opt"])
def test_an_empty_memory_merges_to_neurons_of_zeros(family):
    model = get_peft_model(make_host(family), LocasConfig(r=4)).eval()
    before, expected = snapshot(model), logits(make_host(family))
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    message = r"^the memory 'default' is merged: call unmerge_adapter\(\) before it is"
    with pytest.raises(ValueError, match=message):
        calibrate(model, [make_tokens()])
    model.unmerge_adapter()
    assert same(model, before) and uncalibrated_memories(model) == ["default"]
    calibrate(model, [make_tokens()])
    assert uncalibrated_memories(model) == []
    merged = get_peft_model(make_host(family), LocasConfig(r=4)).merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("verb", ["merge_adapter", "merge_and_unload"])
def test_a_failed_safe_merge_leaves_all_as_it_was(verb):
    model = make_model()
    list_layers(model)[1].locas_down["default"].weight.data[0, 0] = torch.nan
    before = {name: p for name, p in snapshot(model).items() if "locas" not in name}
    with pytest.raises(ValueError) as error:
        getattr(model, verb)(safe_merge=True)
    found = str(error.value)
    assert found == "NaNs detected in the merged weights. The adapter default seems to be broken"
    assert all(torch.equal(model.state_dict()[name], p) for name, p in before.items())
    assert not list_layers(model)[0].merged and list_layers(model)[0].ffn.width == 24


@pytest.mark.parametrize(
    ("family", "verb", "allocations"),
    [
        # Two of a merge are of the norm clip.
        ("llama", "merge_adapter", 5),
        ("llama", "unmerge_adapter", 3),
        ("phi3", "merge_adapter", 5),
        ("phi3", "unmerge_adapter", 3),
        ("gpt2", "merge_adapter", 5),
        ("gpt2", "unmerge_adapter", 3),
        ("mixtral", "merge_adapter", 4),
        ("mixtral", "unmerge_adapter", 1),
    ],
)
def test_without_memory_for_a_weight_no_layer_changes_in_part(
    family, verb, allocations, monkeypatch
):
    model = make_model(family)
    if verb == "unmerge_adapter":
        model.merge_adapter()
    before = snapshot(model)
    widths = [layer.ffn.width for layer in list_layers(model)]
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
        for allocation in range(allocations):
            left = allocation + 1
            with pytest.raises(torch.OutOfMemoryError):
                getattr(model, verb)()
            assert same(model, before)
            assert [layer.ffn.width for layer in list_layers(model)] == widths
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


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_safe_merge_refuses_values_that_overflow_in_the_host_s_dtype(family):
    model = get_peft_model(make_host(family, torch.float16), LocasConfig(r=4))
    teach(model)
    for layer in list_layers(model):
        layer.locas_tau["default"] = torch.tensor(1e6)
    before = snapshot(model)
    with pytest.raises(ValueError, match="NaNs detected in the merged weights. The adapter def"):
        model.merge_adapter(safe_merge=True)
    assert same(model, before)


def test_bases_that_cannot_be_widened_are_refused():
    class Int8Parameter(torch.nn.Parameter):
        pass

    quantised = make_model()
    list_layers(quantised)[1].ffn.owner.down_proj.weight.__class__ = Int8Parameter
    with pytest.raises(ValueError) as error:
        quantised.merge_adapter()
    assert str(error.value) == (
        "cannot merge into model.layers.1.mlp: down_proj is a Linear of torch.float32, quantised or custom: load the "
        "base in full precision first; or use the memory without merging it."
    )
    assert not list_layers(quantised)[0].merged

    meta = make_model()
    list_layers(meta)[1].ffn.owner.to("meta")
    message = "gate_proj is offloaded or on the meta device: load the base onto one device"
    with pytest.raises(ValueError, match=message):
        meta.merge_and_unload()
    assert not list_layers(meta)[0].merged

    sharded = make_model()
    list_layers(sharded)[0].ffn.owner.up_proj.weight.full_tensor = None
    message = "up_proj is sharded across processes: gather the base first"
    with pytest.raises(ValueError, match=message):
        sharded.merge_adapter()


def test_a_family_whose_config_has_no_width_cannot_be_unloaded_into_a_checkpoint():
    config = tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
    model = get_peft_model(
        tf.BloomForCausalLM(config).eval(), LocasConfig(r=4, init_weights="random")
    )
    teach(model)
    expected = logits(model)
    with pytest.raises(ValueError) as error:
        model.merge_and_unload()
    assert str(error.value) == (
        "no field of BloomConfig makes transformer.h.0.mlp 68 wide: in this family a memory can be used, merged and "
        "unmerged, but not unloaded into a plain checkpoint."
    )
    assert torch.equal(logits(model), expected)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_offloaded_base_gets_the_same_memory_but_is_not_merged(family):
    reference = get_peft_model(make_host(family), LocasConfig(r=4))
    calibrate(reference, [make_tokens()])
    host = cpu_offload(make_host(family), execution_device=torch.device("cpu"))
    model = get_peft_model(host, LocasConfig(r=4))
    calibrate(model, [make_tokens()])
    for layer, expected in zip(list_layers(model), list_layers(reference), strict=True):
        assert all(map(torch.equal, weights_in(layer)[:2], weights_in(expected)[:2]))
    for taught in (model, reference):
        teach(taught)
    assert torch.equal(logits(model), logits(reference))
    message = "is offloaded or on the meta device: load the base onto one device first"
    with pytest.raises(ValueError, match=message):
        model.merge_adapter()


def test_unload_leaves_no_hook():
    for family in ("llama", "opt"):
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


def test_memories_that_come_and_go_leave_no_hooks():
    host = make_host("llama")
    for _ in range(3):
        host.add_adapter(LocasConfig(r=4), adapter_name="one")
        assert len(host._forward_pre_hooks) == len(host._forward_hooks) == 1
        host.delete_adapter("one")
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    host = model.get_base_model()
    model.add_adapter("two", LocasConfig(r=4))
    model.delete_adapter("two")
    assert len(host._forward_pre_hooks) == len(host._forward_hooks) == 1
    model = copy.deepcopy(model)
    model.add_adapter("two", LocasConfig(r=4))
    assert len(model.get_base_model()._forward_pre_hooks) == 1
    assert len(host._forward_pre_hooks) == 1
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    model.base_model.delete_adapter("default")
    host = model.get_base_model()
    assert not host._forward_pre_hooks and not host._forward_hooks


# ------------------------------------------------------------------------------ files


@pytest.fixture
def memory(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


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
    saved = []
    for number in range(4):
        save_memory(make_model(), tmp_path / str(number), "base", "card")
        saved.append((tmp_path / f"{number}/adapter_model.safetensors").read_bytes())
    assert set(saved) == {saved[0]}
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
        ValueError, match=f"^the memory 'default' has diverged and cannot be saved: .*{message}"
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("**/*.safetensors")) and not list(tmp_path.glob("**/*.json"))


def test_what_unload_keeps(tmp_path):
    model = make_model(modules_to_save=["norm"], trainable_token_indices=[5])
    with torch.no_grad():
        model.get_base_model().model.norm.modules_to_save["default"].weight.add_(1.0)
        model.get_base_model().model.embed_tokens.token_adapter.trainable_tokens_delta[
            "default"
        ].add_(1.0)
    model.save_pretrained(tmp_path)
    unloaded, before = (
        PeftModel.from_pretrained(make_host("llama"), tmp_path).unload(),
        make_host("llama").state_dict(),
    )
    changed = [
        name
        for name, tensor in unloaded.state_dict().items()
        if not torch.equal(tensor, before[name])
    ]
    assert changed == ["model.norm.weight"]


def bits(model):
    """The bytes of a base's weights by name, whatever wraps them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        name.replace("base_layer.", ""): tensor.contiguous().view(torch.uint8).clone()
        for name, tensor in base.state_dict().items()
        if ".locas_" not in name
    }


def unharmed(model, before):
    after = bits(model)
    return after.keys() == before.keys() and all(
        torch.equal(after[name], before[name]) for name in before
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama with biases", "phi3", "gpt2", "gpt_neox", "opt"])
def test_the_base_is_unharmed(family, dtype, tmp_path):
    host = make_host(family, dtype)
    before, names, expected = bits(host), [name for name, _ in host.named_modules()], logits(host)
    model = get_peft_model(host, LocasConfig(r=4))
    assert unharmed(model, before)
    calibrate(model, [make_tokens()])
    assert unharmed(model, before)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        model.train()(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert unharmed(model.eval(), before) and not torch.equal(logits(model), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "memory")
    model.add_adapter("second", LocasConfig(r=3, init_weights="gaussian"))
    teach(model, "second", seed=1)
    for _ in range(10):
        model.merge_adapter(["default", "second"])
        assert not unharmed(model, before)
        model.unmerge_adapter()
        assert unharmed(model, before)
    model.load_adapter(tmp_path / "memory", "again")
    assert unharmed(model, before)
    model.delete_adapter("again")
    with pytest.warns(UserWarning, match="Setting active adapter"):
        model.delete_adapter("default")
    rewrite(tmp_path / "memory", lambda tensors: tensors[sorted(tensors)[0]].fill_(torch.nan))
    with pytest.raises(ValueError, match="not finite"):
        model.load_adapter(tmp_path / "memory", "hostile")
    assert unharmed(model, before)
    assert model.unload() is host
    assert unharmed(host, before) and [name for name, _ in host.named_modules()] == names
    assert torch.equal(logits(host), expected)


@pytest.mark.parametrize("strategy", ["topk", "bottomk", "random"])
def test_r_above_the_host_s_width_where_cloning(strategy):
    host = make_host("llama")
    names = [name for name, _ in host.named_modules()]
    with pytest.raises(ValueError) as error:
        get_peft_model(host, LocasConfig(r=25, init_weights=strategy))
    assert str(error.value) == (
        "r must be at most the host's width where slots are cloned, got r=25 for model.layers.0.mlp with 24 slots: "
        "lower r, or set init_weights='gaussian'."
    )
    assert [name for name, _ in host.named_modules()] == names
    assert make_model(r=25, init_weights="gaussian")


def test_a_state_of_0_2_0_loads_with_its_rows():
    former = get_peft_model(make_host("llama"), LocasConfig(r=4))
    former(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    state = {key: value for key, value in former.state_dict().items() if "calibrated" not in key}
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, seed=1))
    model.load_state_dict(state)
    assert uncalibrated_memories(model) == []
    model(input_ids=make_tokens(seed=3), labels=make_tokens(seed=3)).loss.backward()
    for key, value in model.state_dict().items():
        assert "locas_up" not in key or torch.equal(value, state[key])


def test_a_frozen_memory_is_not_calibrated():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    model.requires_grad_(False)
    model(input_ids=make_tokens(), attention_mask=torch.ones_like(make_tokens()))
    assert uncalibrated_memories(model) == ["default"]
    assert all(layer.token_mask is None for layer in list_layers(model))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("gains", [False, True])
def test_padding_does_not_count_under_gradient_checkpointing(use_reentrant, gains):
    mask = torch.ones_like(make_tokens())
    mask[:, 8:] = 0
    tokens = {"input_ids": make_tokens(), "attention_mask": mask, "labels": make_tokens()}
    scales = []
    for checkpoints in (False, True):
        model = get_peft_model(make_host("llama"), LocasConfig(r=4, gains=gains)).train()
        with warnings.catch_warnings():
            # The names of transformers 6.
            warnings.simplefilter("ignore", FutureWarning)
            if checkpoints:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model(**tokens, use_cache=False).loss.backward()
        scales.append([layer.locas_tau["default"].item() for layer in list_layers(model)])
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)
