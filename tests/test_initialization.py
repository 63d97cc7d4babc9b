import copy
import multiprocessing
import socket
import warnings
from datetime import timedelta

import pytest
import torch
import transformers as tf
from families import HIDDEN, VOCABULARY, make_host, make_tokens, rewrite, teach, weights_in
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model

from locas_peft import LocasConfig, calibrate, compress, uncalibrated_memories
from locas_peft.tuner import list_layers
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
    return torch.cat(
        [w.detach().flatten() for layer in list_layers(model) for w in weights_in(layer)]
    )


def scales_of(model):
    return torch.stack(
        [
            e["default"]
            for layer in list_layers(model)
            for e in (layer.locas_input_scale, layer.locas_tau)
        ]
    )


def test_several_memories_are_calibrated_from_one_generator():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4), adapter_name="first")
    model.add_adapter("second", LocasConfig(r=2))
    model.base_model.set_adapter(["first", "second"])
    calibrate(model, (tokens for tokens in [make_tokens()]))
    assert uncalibrated_memories(model) == []


@pytest.mark.parametrize("output_scale", ["measured", "paper"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("strategy", CALIBRATED + AT_ONCE)
def test_every_strategy_gives_unit_rows_and_zero_values(strategy, family, output_scale):
    model = make_model(family, init_weights=strategy, output_scale=output_scale)
    waits = strategy in CALIBRATED or output_scale == "measured"
    assert uncalibrated_memories(model) == (["default"] if waits else [])
    if waits:
        calibrate(model, [make_tokens()])
    assert uncalibrated_memories(model) == []
    for layer in list_layers(model):
        *rows, down = weights_in(layer)
        for weight in rows:
            torch.testing.assert_close(weight.norm(dim=1), torch.ones(4))
        assert not down.any()


def test_bottomk_is_the_other_end_of_topk():
    top, bottom = make_model(r=24), make_model(r=24, init_weights="bottomk")
    for model in (top, bottom):
        calibrate(model, [make_tokens()])
    for name, slots in top.peft_config["default"].get_record("slots").items():
        assert slots == bottom.peft_config["default"].get_record("slots")[name][::-1]


def test_random_clones_different_slots_in_each_layer_and_the_same_again():
    slots = make_model(init_weights="random").peft_config["default"].get_record("slots")
    assert slots == make_model(init_weights="random").peft_config["default"].get_record("slots")
    assert slots != make_model(init_weights="random", seed=1).peft_config["default"].get_record(
        "slots"
    )
    first, second = slots.values()
    assert first != second and all(len(set(s)) == 4 for s in slots.values())


def test_activation_rows_are_normalised_ffn_inputs_of_the_same_tokens():
    model = make_model(init_weights="activation")
    seen = {}
    for layer in list_layers(model):
        layer.base_layer.register_forward_pre_hook(
            lambda module, args, name=layer.name: seen.__setitem__(name, args[0].flatten(0, -2))
        )
    calibrate(model, [make_tokens()])
    chosen = []
    for layer in list_layers(model):
        gate, up, _ = weights_in(layer)
        assert torch.equal(gate, up)
        matches = up @ torch.nn.functional.normalize(seen[layer.name], dim=-1).T
        torch.testing.assert_close(matches.max(dim=1).values, torch.ones(4))
        chosen.append(matches.argmax(dim=1).tolist())
    assert chosen[0] == chosen[1]


def test_padding_is_excluded():
    tokens, padding = make_tokens(), torch.zeros(4, 6, dtype=torch.long)
    mask = torch.cat([torch.ones_like(tokens), padding], dim=1)
    plain, padded = make_model(), make_model()
    calibrate(plain, [tokens])
    calibrate(
        padded, [{"input_ids": torch.cat([tokens, padding + 7], dim=1), "attention_mask": mask}]
    )
    assert torch.equal(weights_of(plain), weights_of(padded))
    torch.testing.assert_close(scales_of(plain), scales_of(padded), rtol=1e-5, atol=0)


def make_translator(family: str) -> PeftModel:
    """A model with an encoder and a decoder, and a memory beside the FFNs of both."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "decoder_start_token_id": 0}
    if family == "t5":
        config = tf.T5Config(**common, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
        host = tf.T5ForConditionalGeneration(config)
    else:
        layers = {"encoder_layers": 1, "decoder_layers": 1}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        widths = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
        config = tf.BartConfig(**common, **layers, **heads, **widths, pad_token_id=0)
        host = tf.BartForConditionalGeneration(config)
    return get_peft_model(host.eval(), LocasConfig(r=4, task_type="SEQ_2_SEQ_LM"))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_models_of_two_texts_are_calibrated_on_both_without_their_padding(family):
    source, target = make_tokens(), make_tokens(length=24, seed=2)
    starts = torch.zeros(4, 1, dtype=torch.long)
    decoder_input = torch.cat([starts, target[:, :-1]], dim=1)
    padding = torch.full((4, 8), 7)
    batches = [
        {"input_ids": source, "labels": target},
        {
            "input_ids": torch.cat([source, padding], dim=1),
            "attention_mask": torch.arange(40).lt(32).long().expand(4, 40),
            "decoder_input_ids": torch.cat([decoder_input, padding], dim=1),
            "decoder_attention_mask": torch.arange(32).lt(24).long().expand(4, 32),
        },
    ]
    plain, padded = make_translator(family), make_translator(family)
    for model, batch in zip((plain, padded), batches, strict=True):
        calibrate(model, [batch])
    torch.testing.assert_close(weights_of(plain), weights_of(padded), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scales_of(plain), scales_of(padded), rtol=1e-4, atol=0)
    for model, batch in zip((plain, padded), batches, strict=True):
        teach(model)
        compress(model, 2, batches=[batch])
    torch.testing.assert_close(weights_of(plain), weights_of(padded), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen2_moe"])
def test_a_plain_loop_learns_in_evaluation_mode(family):
    model = make_model(family)
    assert not model.training or not model.get_base_model().training
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(8):
        loss = model(input_ids=make_tokens(), labels=make_tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))
    assert losses[-1] < losses[0] - 0.05
    assert uncalibrated_memories(model) == []


@pytest.mark.parametrize("strategy", CALIBRATED)
def test_a_memory_is_never_empty(strategy):
    model, calibrated = make_model(init_weights=strategy), make_model(init_weights=strategy)
    calibrate(calibrated, [make_tokens()])
    for layer, other in zip(list_layers(model), list_layers(calibrated), strict=True):
        *rows, down = weights_in(layer)
        for weight in rows:
            torch.testing.assert_close(weight.norm(dim=1), torch.ones(4))
        assert not torch.equal(rows[-1], weights_in(other)[-2])
        assert not down.any() and layer.locas_input_scale["default"] == 1
        assert layer.locas_tau["default"] == pytest.approx(layer.ffn.mean_down_norm() / 4)
        assert layer.locas_calibrated["default"] == 0 and other.locas_calibrated["default"] == 1


def test_a_memory_that_has_learned_uncalibrated_is_not_calibrated_any_more():
    model = make_model()
    for layer in list_layers(model):
        layer.locas_down["default"].weight.data.fill_(0.01)
    before = weights_of(model)
    model(input_ids=make_tokens()).logits.sum().backward()
    assert torch.equal(weights_of(model), before) and uncalibrated_memories(model) == []


def test_the_padding_mask_is_forgotten_after_each_forward():
    model = make_model()
    seen = []
    layer = list_layers(model)[0]
    layer.register_forward_pre_hook(lambda layer, args: seen.append(layer.token_mask))
    mask = torch.ones_like(make_tokens())
    with torch.no_grad():
        model(input_ids=make_tokens(), attention_mask=mask)
    model.get_base_model()(make_tokens(), mask)
    model(input_ids=make_tokens(), attention_mask=mask)
    assert seen[0] is None and seen[1] is mask and seen[2] is None
    assert layer.token_mask is None
    model = make_model()
    layer = list_layers(model)[0]
    with pytest.raises(IndexError):
        model(input_ids=make_tokens() + 1000, attention_mask=mask)
    assert layer.token_mask is None
    calibrate(model, [{"input_ids": make_tokens(), "attention_mask": mask}])
    assert layer.token_mask is None


def test_files_without_the_flag_are_calibrated_where_they_have_rows_and_a_scale(tmp_path):
    for calibrated in (True, False):
        model = make_model()
        if calibrated:
            calibrate(model, [make_tokens()])
        else:
            for layer in list_layers(model):
                for weight in weights_in(layer):
                    weight.data.zero_()
                layer.locas_input_scale["default"].zero_()
        folder = tmp_path / str(calibrated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder)
        rewrite(folder, lambda tensors: [tensors.pop(k) for k in list(tensors) if "calib" in k])
        for low_cpu_mem_usage in (False, True):
            loaded = PeftModel.from_pretrained(
                make_host("llama"), folder, low_cpu_mem_usage=low_cpu_mem_usage
            )
            assert uncalibrated_memories(loaded) == ([] if calibrated else ["default"])
            assert torch.equal(weights_of(loaded), weights_of(model))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_first_forward_with_gradients_calibrates_as_calibrate_does(family):
    tokens, padding = make_tokens(), torch.zeros(4, 6, dtype=torch.long)
    batch = {
        "input_ids": torch.cat([tokens, padding + 7], dim=1),
        "attention_mask": torch.cat([torch.ones_like(tokens), padding], dim=1),
    }
    explicit, implicit = make_model(family), make_model(family)
    for dropout in (m for m in implicit.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    if family == "opt":
        for layer in implicit.get_base_model().model.decoder.layers:
            layer.dropout = 0.0
    calibrate(explicit, [batch])
    implicit.train(family == "llama")  # in both modes
    with torch.no_grad():
        implicit(**batch)
    assert uncalibrated_memories(implicit) == [
        "default"
    ]  # not without gradients, as GRPO generates
    loss = implicit(**batch, labels=batch["input_ids"]).loss
    assert uncalibrated_memories(implicit) == []
    assert torch.equal(weights_of(explicit), weights_of(implicit))
    torch.testing.assert_close(scales_of(explicit), scales_of(implicit), rtol=1e-5, atol=0)
    loss.backward()  # the very pass that calibrated can be learned from
    assert all(layer.locas_down["default"].weight.grad.any() for layer in list_layers(implicit))


def test_several_batches_are_one_mean():
    tokens = make_tokens()
    whole, parts = make_model(), make_model()
    calibrate(whole, [tokens])
    calibrate(parts, iter([tokens[:1], tokens[1:]]))
    assert torch.equal(weights_of(whole), weights_of(parts))


def test_calibration_costs_one_forward_without_the_head():
    model = make_model()
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "locas" not in name:
            module.register_forward_hook(lambda m, a, o, name=name: calls.append(name))
    calibrate(model, [make_tokens()])
    assert (
        len(calls) == len(set(calls)) == 2 * 7
    )  # each projection of the two layers once; not the head


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


@pytest.mark.parametrize("how", ["explicit", "implicit"])
def test_nan_activations_are_refused_and_change_nothing(how):
    model = make_model()
    list_layers(model)[1].base_layer.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="activations are not finite on the calibration text"):
        if how == "explicit":
            calibrate(model, [make_tokens()])
        else:
            model.train()(input_ids=make_tokens())
    assert uncalibrated_memories(model) == ["default"]
    if how == "explicit":
        before = make_model()
        assert torch.equal(weights_of(model), weights_of(before))


def test_a_memory_that_has_learned_is_not_calibrated_away():
    model = make_model()
    calibrate(model, [make_tokens()])
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
    model, reference = make_model(), make_model()
    calibrate(reference, [make_tokens()])
    model = get_peft_model(
        make_host("llama"), LocasConfig(r=4, init_weights=False), adapter_name="loud"
    )
    model.add_adapter("default", LocasConfig(r=4))
    calibrate(model, [make_tokens()], adapter_name="default")
    assert torch.equal(weights_of(model), weights_of(reference))


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
            model = make_model(init_weights=strategy)
            calibrate(model, [make_tokens()])
            assert torch.equal(weights_of(model), first[0])
            torch.testing.assert_close(scales_of(model), first[1], rtol=1e-5, atol=0)


def test_a_strategy_from_outside_is_one_function_and_one_row(monkeypatch, tmp_path):
    def clone_first(ffn, statistics, r, generator):
        return clone_slots(ffn, torch.arange(r))

    monkeypatch.setitem(STRATEGIES, "first", Strategy(clone_first, needs_calibration=False))
    model = make_model(init_weights="first", output_scale="paper")
    assert set(map(tuple, model.peft_config["default"].get_record("slots").values())) == {
        (0, 1, 2, 3)
    }
    assert uncalibrated_memories(model) == []
    gate, up, down = weights_in(list_layers(model)[0])
    assert gate.any() and up.any() and not down.any()
    model.save_pretrained(tmp_path)
    assert torch.equal(
        weights_of(PeftModel.from_pretrained(make_host("llama"), tmp_path)), weights_of(model)
    )


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_adapters_of_other_kinds_are_part_of_the_host_that_is_calibrated():
    host = inject_adapter_in_model(
        LoraConfig(target_modules=["q_proj"], init_lora_weights=False), make_host("llama")
    )
    del host.peft_config
    explicit = get_peft_model(host, LocasConfig(r=4))
    implicit = copy.deepcopy(explicit)
    calibrate(explicit, [make_tokens()])
    implicit.train()(input_ids=make_tokens())
    assert torch.equal(weights_of(explicit), weights_of(implicit))
    alone = make_model()
    calibrate(alone, [make_tokens()])
    assert not torch.equal(weights_of(explicit), weights_of(alone))


def test_the_flag_is_saved_and_keeps_a_loaded_memory_from_calibrating_again(tmp_path):
    model = make_model()
    calibrate(model, [make_tokens()])
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, is_trainable=True)
    before = weights_of(loaded)
    loaded(input_ids=make_tokens(seed=9)).logits.sum().backward()
    assert torch.equal(weights_of(loaded), before) and torch.equal(before, weights_of(model))
