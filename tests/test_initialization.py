import copy
import multiprocessing
import socket
from datetime import timedelta

import pytest
import torch
import transformers as tf
from families import HIDDEN, VOCABULARY, logits, make_host, make_tokens, rewrite, teach, weights_in
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from test_families import SCALING, learn

from locas_peft import LocasConfig, calibrate, compress, uncalibrated_memories
from locas_peft.tuner import list_layers, trained_parameters
from locas_peft.tuner.initialization import STRATEGIES, Strategy, clone_slots

CALIBRATED = [
    name
    for name, strategy in STRATEGIES.items()
    if strategy.needs_calibration and not strategy.written
]
AT_ONCE = [name for name, strategy in STRATEGIES.items() if not strategy.needs_calibration]


def make_model(family="llama", **kwargs):
    return get_peft_model(make_host(family), LocasConfig(**{"r": 4, **kwargs}))


def weights_of(model):
    """All weights of a memory in one tensor."""
    return torch.cat([weight.detach().flatten() for weight in trained_parameters(model)])


def scales_of(model):
    scales = []
    for layer in list_layers(model):
        scales += [layer.locas_input_scale["default"], layer.locas_tau["default"]]
    return torch.stack(scales)


def slots_of(model):
    return model.peft_config["default"].get_record("slots")


def make_calibrated(tokens=None, **kwargs):
    model = make_model(**kwargs)
    calibrate(model, [make_tokens() if tokens is None else tokens])
    return model


def test_several_memories_are_calibrated_from_one_generator():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4), adapter_name="first")
    model.add_adapter("second", LocasConfig(r=2))
    model.base_model.set_adapter(["first", "second"])
    calibrate(model, iter([make_tokens()]))
    assert uncalibrated_memories(model) == []


@pytest.mark.parametrize("output_scale", ["measured", "paper"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("strategy", CALIBRATED + AT_ONCE)
def test_every_strategy_gives_unit_rows_and_zero_values(strategy, family, output_scale):
    model = make_model(family, init_weights=strategy, output_scale=output_scale)
    waits = strategy in CALIBRATED or output_scale == "measured"
    assert uncalibrated_memories(model) == (["default"] if waits else [])
    for layer in list_layers(model):
        # A memory is never empty.
        assert_unit_rows_and_zero_values(layer)
        assert layer.locas_input_scale["default"] == 1
        assert layer.locas_tau["default"] == pytest.approx(layer.ffn.mean_down_norm() / 4)
    calibrate(model, [make_tokens()])
    assert uncalibrated_memories(model) == []
    for layer in list_layers(model):
        assert_unit_rows_and_zero_values(layer)


def assert_unit_rows_and_zero_values(layer):
    *rows, down = weights_in(layer)
    for weight in rows:
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(4))
    assert not down.any()


def test_bottomk_is_the_other_end_of_topk():
    top, bottom = make_calibrated(r=24), make_calibrated(r=24, init_weights="bottomk")
    for name, slots in slots_of(top).items():
        assert slots == slots_of(bottom)[name][::-1]


def test_random_clones_different_slots_in_each_layer_and_the_same_again():
    slots = slots_of(make_model(init_weights="random"))
    assert slots == slots_of(make_model(init_weights="random"))
    assert slots != slots_of(make_model(init_weights="random", seed=1))
    first, second = slots.values()
    assert first != second and all(len(set(each)) == 4 for each in slots.values())


def test_activation_rows_are_normalised_ffn_inputs_of_the_same_tokens():
    model = make_model(init_weights="activation")
    seen = []
    for layer in list_layers(model):
        layer.base_layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    calibrate(model, [make_tokens()])
    chosen = []
    for layer, inputs in zip(list_layers(model), seen, strict=True):
        gate, up, _ = weights_in(layer)
        assert torch.equal(gate, up)
        matches = up @ torch.nn.functional.normalize(inputs.flatten(0, -2), dim=-1).T
        cosines, tokens = matches.max(dim=1)
        torch.testing.assert_close(cosines, torch.ones(4))
        chosen.append(tokens.tolist())
    assert chosen[0] == chosen[1]


def pad(tokens):
    """Return a batch with some columns of padding."""
    padding = torch.full((4, 6), 7)
    mask = torch.cat([torch.ones_like(tokens), torch.zeros_like(padding)], dim=1)
    return {"input_ids": torch.cat([tokens, padding], dim=1), "attention_mask": mask}


def test_padding_is_excluded():
    plain, padded = make_calibrated(), make_calibrated(pad(make_tokens()))
    assert torch.equal(weights_of(plain), weights_of(padded))
    torch.testing.assert_close(scales_of(plain), scales_of(padded), rtol=1e-5, atol=0)


_SHARED = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "decoder_start_token_id": 0}
TRANSLATORS = {
    "t5": tf.T5Config(**_SHARED, d_kv=8, d_ff=24, num_layers=1, num_heads=2),
    "bart": tf.BartConfig(
        **_SHARED, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, pad_token_id=0,
    ),
}  # fmt: skip


def make_translator(family: str) -> PeftModel:
    """A model with an encoder and a decoder, and a memory beside the FFNs of both."""
    torch.manual_seed(0)
    host = tf.AutoModelForSeq2SeqLM.from_config(copy.deepcopy(TRANSLATORS[family]))
    return get_peft_model(host.eval(), LocasConfig(r=4, task_type="SEQ_2_SEQ_LM"))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_models_of_two_texts_are_calibrated_on_both_without_their_padding(family):
    source, target = make_tokens(), make_tokens(length=24, seed=2)
    # As the model makes it of the labels.
    shifted = target.roll(1, dims=1)
    shifted[:, 0] = 0
    padded_batch = pad(source)
    for name, tensor in pad(shifted).items():
        padded_batch[f"decoder_{name}"] = tensor
    models = []
    for batch in ({"input_ids": source, "labels": target}, padded_batch):
        model = make_translator(family)
        calibrate(model, [batch])
        calibrated = weights_of(model)
        teach(model)
        compress(model, 2, batches=[batch])
        models.append((calibrated, scales_of(model), weights_of(model)))
    plain, padded = models
    torch.testing.assert_close(plain[0], padded[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain[1], padded[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(plain[2], padded[2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen2_moe"])
def test_a_plain_loop_learns_in_evaluation_mode(family):
    model = make_model(family, scaling=SCALING)
    assert not model.get_base_model().training
    losses = learn(model)
    assert losses[-1] < losses[0] - 0.05
    assert uncalibrated_memories(model) == []


def test_a_memory_that_has_learned_uncalibrated_is_not_calibrated_any_more():
    model = make_model()
    for layer in list_layers(model):
        layer.locas_down["default"].weight.data.fill_(0.01)
    before = weights_of(model)
    model(input_ids=make_tokens()).logits.sum().backward()
    assert torch.equal(weights_of(model), before) and uncalibrated_memories(model) == []


def test_the_padding_mask_is_forgotten_after_each_forward():
    model = make_model()
    layer = list_layers(model)[0]
    mask = torch.ones_like(make_tokens())
    seen = []
    layer.register_forward_pre_hook(lambda layer, args: seen.append(layer.token_mask))
    model.get_base_model()(make_tokens(), mask)
    # A memory that does not wait needs none.
    model(input_ids=make_tokens(), attention_mask=mask)
    assert seen[0] is mask and seen[1] is None
    assert layer.token_mask is None
    model = make_model()
    with pytest.raises(IndexError):
        model(input_ids=make_tokens() + 1000, attention_mask=mask)
    assert all(layer.token_mask is None for layer in list_layers(model))


@pytest.mark.parametrize("is_calibrated", [True, False])
@pytest.mark.parametrize("has_flag", [True, False])
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.filterwarnings("ignore:the memory 'default' is saved empty")
def test_a_loaded_memory_calibrates_itself_where_it_has_not_yet(
    is_calibrated, has_flag, low, tmp_path
):
    model = make_calibrated() if is_calibrated else make_model()
    if not is_calibrated and not has_flag:
        # Version 0.2.0 saved such a memory without rows and scale.
        for layer in list_layers(model):
            layer.locas_up["default"].weight.data.zero_()
            layer.locas_input_scale["default"].zero_()
    model.save_pretrained(tmp_path)
    if not has_flag:
        rewrite(tmp_path, drop_flags)
    options = {"is_trainable": True, "low_cpu_mem_usage": low}
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, **options)
    assert uncalibrated_memories(loaded) == ([] if is_calibrated else ["default"])
    assert torch.equal(weights_of(loaded), weights_of(model))
    loaded(input_ids=make_tokens(seed=9)).logits.sum().backward()
    assert torch.equal(weights_of(loaded), weights_of(model)) == is_calibrated


def drop_flags(tensors):
    for key in list(tensors):
        if "calibrated" in key:
            tensors.pop(key)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_first_forward_with_gradients_calibrates_as_calibrate_does(family):
    batch = pad(make_tokens())
    explicit, implicit = make_calibrated(batch, family=family), make_model(family)
    implicit.train(family == "llama")  # in both modes
    # Not without gradients, as GRPO generates.
    with torch.no_grad():
        implicit(**batch)
    assert uncalibrated_memories(implicit) == ["default"]
    loss = implicit(**batch, labels=batch["input_ids"]).loss
    assert uncalibrated_memories(implicit) == []
    assert torch.equal(weights_of(explicit), weights_of(implicit))
    torch.testing.assert_close(scales_of(explicit), scales_of(implicit), rtol=1e-5, atol=0)
    # The very pass that calibrated can be learned from.
    loss.backward()
    assert all(weights_in(layer)[-1].grad.any() for layer in list_layers(implicit))


def test_several_batches_are_one_mean():
    tokens = make_tokens()
    parts = make_model()
    calibrate(parts, iter([tokens[:1], tokens[1:]]))
    assert torch.equal(weights_of(make_calibrated()), weights_of(parts))


def test_one_batch_may_stand_alone_and_another_shape_is_refused():
    for batch in (make_tokens(), {"input_ids": make_tokens()}):
        model = make_model()
        calibrate(model, batch)
        assert torch.equal(weights_of(make_calibrated()), weights_of(model))
    message = r"^each batch must have input_ids \[B, T\], got {}: give ids\[None\] for one text\.$"
    for batches, got in (
        (make_tokens()[0], r"\[\]"),
        ([make_tokens()[0]], r"\[\d+\]"),
        (["a text"], "str"),
    ):
        with pytest.raises(ValueError, match=message.format(got)):
            calibrate(make_model(), batches)


def test_calibration_costs_one_forward_without_the_head():
    model = make_model()
    host = model.get_base_model()
    calls = []
    for module in (host.lm_head, host.model, *host.model.layers):
        module.register_forward_hook(lambda module, *_: calls.append(module))
    calibrate(model, [make_tokens()])
    assert calls == [*host.model.layers, host.model]


def test_calibration_restores_modes():
    model = make_model().train()
    calibrate(model, [make_tokens()])
    assert all(module.training for module in model.modules())


PADDING = {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.zeros(1, 3)}


@pytest.mark.parametrize("batches", [[], [PADDING]])
def test_empty_calibration_is_refused(batches):
    model = make_model()
    message = r"^calibration saw no tokens: give at least one batch with a token that is "
    with pytest.raises(ValueError, match=message):
        calibrate(model, batches)
    assert uncalibrated_memories(model) == ["default"]
    assert torch.equal(weights_of(model), weights_of(make_model()))


def test_nan_activations_are_refused_and_change_nothing():
    model = make_model()
    list_layers(model)[1].base_layer.up_proj.weight.data[0, 0] = torch.nan
    message = "activations are not finite on the calibration text"
    with pytest.raises(ValueError, match=message):
        calibrate(model, [make_tokens()])
    assert torch.equal(weights_of(model), weights_of(make_model()))
    with pytest.raises(ValueError, match=message):
        model.train()(input_ids=make_tokens())
    assert uncalibrated_memories(model) == ["default"]


def test_a_memory_that_has_learned_is_not_calibrated_away():
    model = make_calibrated()
    list_layers(model)[0].locas_down["default"].weight.data.fill_(0.1)
    before = weights_of(model)
    message = "the memory 'default' has learned already: calibrating would lose it"
    with pytest.raises(ValueError, match=message):
        calibrate(model, [make_tokens()])
    assert torch.equal(weights_of(model), before)


def test_no_memory_to_calibrate():
    with pytest.raises(ValueError, match="the model has no LOCAS memory 'other' to calibrate"):
        calibrate(make_model(), [make_tokens()], adapter_name="other")


def test_only_the_named_memory_is_calibrated_and_the_others_are_silent_meanwhile():
    config = LocasConfig(r=4, init_weights=False)
    model = get_peft_model(make_host("llama"), config, adapter_name="loud")
    model.add_adapter("default", LocasConfig(r=4))
    calibrate(model, [make_tokens()], adapter_name="default")
    model.set_adapter("default")
    assert torch.equal(weights_of(model), weights_of(make_calibrated()))


LIMIT = timedelta(minutes=2)


def _calibrate_in_a_process(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=LIMIT
    )
    for strategy in CALIBRATED + AT_ONCE:
        model = make_model(init_weights=strategy)
        calibrate(model, [make_tokens()[2 * rank : 2 * rank + 2]])
        torch.save((weights_of(model), scales_of(model)), f"{folder}/{strategy}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_choose_the_same_slots_as_one(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(
        target=_calibrate_in_a_process, args=(1, port, str(tmp_path)), daemon=True
    )
    other.start()
    _calibrate_in_a_process(0, port, str(tmp_path))
    other.join()
    assert other.exitcode == 0
    for strategy in CALIBRATED + AT_ONCE:
        first, second = (torch.load(tmp_path / f"{strategy}-{rank}.pt") for rank in range(2))
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
        if strategy != "activation":  # which draws its tokens
            model = make_calibrated(init_weights=strategy)
            assert torch.equal(weights_of(model), first[0])
            torch.testing.assert_close(scales_of(model), first[1], rtol=1e-5, atol=0)


def test_a_strategy_from_outside_is_one_function_and_one_row(monkeypatch):
    def clone_first(ffn, statistics, r, generator):
        return clone_slots(ffn, torch.arange(r))

    monkeypatch.setitem(STRATEGIES, "first", Strategy(clone_first, needs_calibration=False))
    model = make_model(init_weights="first", output_scale="paper")
    assert list(slots_of(model).values()) == [[0, 1, 2, 3]] * 2
    assert uncalibrated_memories(model) == []
    assert_unit_rows_and_zero_values(list_layers(model)[0])


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_adapters_of_other_kinds_are_part_of_the_host_that_is_calibrated():
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    host = inject_adapter_in_model(lora, make_host("llama"))
    del host.peft_config
    explicit = get_peft_model(host, LocasConfig(r=4))
    implicit = copy.deepcopy(explicit)
    calibrate(explicit, [make_tokens()])
    implicit.train()(input_ids=make_tokens())
    assert slots_of(explicit) == slots_of(implicit) != slots_of(make_calibrated())


@pytest.mark.parametrize("frozen", [[0], [0, 1]])
def test_no_frozen_memory_takes_part_in_a_calibration(frozen):
    alone = get_peft_model(make_host("llama"), LocasConfig(r=4, layers_to_transform=[1]))
    calibrate(alone, [make_tokens()])
    config = LocasConfig(r=4, init_weights="random", layers_to_transform=frozen)
    model = get_peft_model(make_host("llama"), config, adapter_name="frozen")
    teach(model, "frozen")
    model.add_adapter("default", LocasConfig(r=4, layers_to_transform=[1]))
    model.base_model.set_adapter(["frozen", "default"])
    for layer in list_layers(model, "frozen"):
        for weight in layer.weights("frozen"):
            weight.requires_grad_(False)
    before = logits(model)
    calibrate(model, [make_tokens()], "default")
    (found,) = list_layers(model, "default")
    (expected,) = list_layers(alone)
    assert torch.equal(found.locas_input_scale["default"], expected.locas_input_scale["default"])
    assert torch.equal(found.locas_tau["default"], expected.locas_tau["default"])
    assert torch.equal(logits(model), before)


def test_a_mask_for_each_kind_of_attention_is_no_mask_of_padding():
    host = make_host("gemma3")
    tokens = make_tokens()
    length = tokens.shape[1]
    causal = torch.full((len(tokens), 1, length, length), torch.finfo(torch.float32).min).triu(1)
    masks = {"full_attention": causal, "sliding_attention": causal}
    model = get_peft_model(host, LocasConfig(r=4)).train()
    model(input_ids=tokens, labels=tokens, attention_mask=masks).loss.backward()
    assert uncalibrated_memories(model) == []
