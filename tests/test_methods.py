"""Methods: each leaves the base as it was, reads what it says, and saves whole memories or none."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from locas_peft import backbone, checkpoint, loading, methods, text
from locas_peft.files import format_json
from locas_peft.methods import Reading, Settings, attached, find_finished, read_with, score
from locas_peft.ttt import TestTimeTrainer
from locas_peft.tuner import STRATEGIES

CONTRACT = {
    "method",
    "model",
    "r",
    "init",
    "learning_rate",
    "window",
    "stride",
    "seed",
    "scored_tokens",
    "nll_nats",
    "perplexity",
    "perplexity_at",
    "extra_parameters",
    "seconds",
    "tokens_per_second",
    "peak_bytes",
    "memory_dir",
}
GATED_METHODS = ["none", "lora", "locas-glu"]


@pytest.fixture(scope="module")
def base():
    model, _ = loading.load_base(device="cpu")
    return model


@pytest.fixture(scope="module")
def input_ids():
    _, tokenizer = backbone.load()
    return text.tokenize(tokenizer, text.unwrap(text.python_reference()[:4000]), 500)


def small(method: str, **given) -> Settings:
    if method == "locas-glu":
        given = {"anchor": 0, **given}  # the writing of its text would take longer than these readings
    return Settings.from_preset(method, window=128, stride=64, **given)


def describe(model) -> dict:
    """All that a method could leave behind in a model."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "flags": [(name, parameter.requires_grad, parameter.grad) for name, parameter in model.named_parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("method", GATED_METHODS)
def test_the_base_is_what_it_was(method, base, input_ids):
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    before = describe(base)
    read_with(base, input_ids[:200], small(method))
    assert describe(base) == before
    assert base.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base.state_dict().items())


def test_the_base_is_what_it_was_after_an_error(base, input_ids):
    before = describe(base)

    def fail(chunk):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        read_with(base, input_ids, small("locas-glu"), on_chunk=fail)
    assert describe(base) == before


def test_trainable_parameters_and_training_mode_come_back():
    model = tiny_two_layer_host().train()
    with attached(model, small("none")):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("method", GATED_METHODS)
def test_a_reading_can_be_repeated(method, base, input_ids):
    first, second = (read_with(base, input_ids, small(method, seed=3)) for _ in range(2))
    assert first.nll_nats == second.nll_nats
    assert first.curve == second.curve


def test_methods_score_the_same_first_chunk_and_learn_from_then_on(base, input_ids):
    readings = {method: read_with(base, input_ids, small(method)) for method in GATED_METHODS}
    for method in ("lora", "locas-glu"):
        assert readings[method].curve[0] == pytest.approx(readings["none"].curve[0], rel=1e-5)
        assert readings[method].perplexity < readings["none"].perplexity
    assert readings["none"].extra_parameters == 0
    assert readings["lora"].extra_parameters == 1_867_776
    assert readings["locas-glu"].extra_parameters == 6 * 64 * 3 * 256


def test_norms_of_the_settings_reach_the_memory(base):
    for given, expected in (
        ({}, (1.0, 1.0)),
        ({"row_norm": 4.0, "max_slot_norm": 0.0}, (4.0, None)),
        ({"row_norm": 0.5, "max_slot_norm": 2.0}, (0.5, 2.0)),
    ):
        with attached(base, small("locas-glu", **given)) as model:
            config = model.peft_config["default"]
            assert (config.row_norm, config.max_slot_norm) == expected
    with pytest.raises(ValueError, match="row_norm has no meaning for the method 'lora', got 2.0: leave it out"):
        Settings.from_preset("lora", row_norm=2.0)
    with pytest.raises(ValueError, match="row_norm must be a finite number above 0, got -1.0"):
        Settings.from_preset("locas-glu", row_norm=-1.0)


def test_a_reading_says_what_it_did(base, input_ids):
    seen = []
    reading = read_with(base, input_ids, small("locas-glu", r=8, max_tokens=300), on_chunk=seen.append)
    assert [chunk.stop for chunk in seen] == [64, 128, 192, 256, 300]
    assert reading.scored_tokens == 299
    assert reading.nll_nats == pytest.approx(sum(chunk.nll_nats for chunk in seen))
    assert reading.perplexity == pytest.approx(math.exp(reading.nll_nats / 299))
    assert reading.curve[-1] == (300, reading.perplexity)
    assert 0 <= reading.seconds - sum(chunk.seconds for chunk in seen) < 1  # the trainer's making
    assert reading.tokens_per_second == 299 / reading.seconds
    assert reading.peak_bytes > 0
    assert reading.memory_dir is None
    value = reading.to_json()
    assert value.keys() >= CONTRACT
    assert (value["method"], value["model"], value["r"]) == ("locas-glu", "locas_peft/tinybook-glu", 8)
    assert Reading.from_json(json.loads(json.dumps(value))) == reading


def test_figures_that_overflowed_survive_json(base, input_ids):
    reading = read_with(base, input_ids[:130], small("none"))
    broken = dataclasses.replace(reading, nll_nats=math.inf, perplexity=math.nan, curve=[(64, math.nan)])
    back = Reading.from_json(json.loads(format_json(broken.to_json())))
    assert all(math.isnan(value) for value in (back.nll_nats, back.perplexity, back.curve[0][1]))


def test_a_saved_memory_comes_back_on_a_fresh_base(base, input_ids, tmp_path):
    folder = tmp_path / "new" / "memory"
    reading = read_with(base, input_ids, small("locas-glu"), memory_dir=folder)
    assert reading.memory_dir == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "reading.json",
    ]
    assert json.loads((folder / "reading.json").read_text())["perplexity"] == reading.perplexity
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == backbone.NAME
    assert str(backbone.path()) not in "".join(
        path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"
    )

    fresh, _ = backbone.load()
    fresh.requires_grad_(False)
    without = score(fresh, input_ids, reading.settings)
    model = PeftModel.from_pretrained(fresh, folder)
    assert score(model, input_ids, reading.settings) < 0.9 * without
    with model.disable_adapter():
        assert score(model, input_ids, reading.settings) == without


def test_the_method_none_has_nothing_to_save(base, input_ids, tmp_path):
    reading = read_with(base, input_ids, small("none"), memory_dir=tmp_path / "memory", checkpoint_dir=tmp_path / "c")
    assert reading.memory_dir is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["lora", "locas-glu"])
def test_an_interrupted_reading_goes_on_bit_for_bit(method, base, input_ids, tmp_path):
    settings = small(method, r=8)
    whole = read_with(base, input_ids, settings, memory_dir=tmp_path / "whole")

    def interrupt(chunk):
        if chunk.index == 4:
            raise KeyboardInterrupt

    places = {"memory_dir": tmp_path / "parts", "checkpoint_dir": tmp_path / "parts" / "checkpoint"}
    with pytest.raises(KeyboardInterrupt):
        read_with(base, input_ids, settings, **places, checkpoint_seconds=0, on_chunk=interrupt)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["checkpoint"]
    torch.manual_seed(12345)
    seen = []
    parts = read_with(base, input_ids, settings, **places, resume=True, on_chunk=seen.append)
    assert [chunk.index for chunk in seen] == list(range(8))
    assert parts.nll_nats == whole.nll_nats
    assert parts.curve == whole.curve
    name = "adapter_model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "parts" / "checkpoint").exists()


def test_resume_starts_afresh_without_a_checkpoint(base, input_ids, tmp_path):
    reading = read_with(base, input_ids[:130], small("locas-glu"), checkpoint_dir=tmp_path / "none", resume=True)
    assert reading.scored_tokens == 129


def test_another_text_does_not_resume(base, input_ids, tmp_path):
    def interrupt(chunk):
        if chunk.index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_with(
            base, input_ids, small("locas-glu"), checkpoint_dir=tmp_path, checkpoint_seconds=0, on_chunk=interrupt
        )
    with pytest.raises(ValueError, match="^adapter 'default': r must be 64 as in the checkpoint"):
        read_with(base, input_ids, small("locas-glu", r=8), checkpoint_dir=tmp_path, resume=True)
    message = (
        f"text must be the one that the checkpoint in '{tmp_path}' was begun with, to the last token: "
        "give that text and the same limit of tokens, or choose another folder"
    )
    with pytest.raises(ValueError) as raised:
        read_with(base, input_ids.flip(0), small("locas-glu"), checkpoint_dir=tmp_path, resume=True)
    assert str(raised.value) == message


def test_a_full_disk_leaves_nothing(base, input_ids, tmp_path, monkeypatch):
    def fill(self, folder, **options):
        Path(folder, "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PeftModel, "save_pretrained", fill)
    with pytest.raises(OSError, match="No space left"):
        read_with(base, input_ids[:130], small("locas-glu"), memory_dir=tmp_path / "a" / "b" / "memory")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_first_checkpoint_leaves_nothing(base, input_ids, tmp_path, monkeypatch):
    def fill(self, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TestTimeTrainer, "save", fill)
    folder = tmp_path / "memory" / "checkpoint"
    with pytest.raises(OSError, match="No space left"):
        read_with(base, input_ids, small("locas-glu"), checkpoint_dir=folder, checkpoint_seconds=0)
    assert list(tmp_path.iterdir()) == []


def test_a_reading_has_its_folder_alone_from_the_first_chunk_on(base, input_ids, tmp_path):
    pytest.importorskip("fcntl")
    folder, refusals = tmp_path / "memory" / "checkpoint", []

    def intrude(chunk):
        with pytest.raises(ValueError, match="^checkpoint folder must have one writer") as refusal:
            checkpoint.Lock(folder)
        refusals.append(refusal)

    read_with(base, input_ids[:130], small("locas-glu"), on_chunk=intrude, checkpoint_dir=folder)
    assert len(refusals) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_finished_reading_is_found(base, input_ids, tmp_path):
    settings = small("locas-glu", r=4)
    assert find_finished(tmp_path / "memory", settings, input_ids) is None
    reading = read_with(base, input_ids[:130], settings, memory_dir=tmp_path / "memory")
    assert find_finished(tmp_path / "memory", settings, input_ids[:130]) == reading
    with pytest.raises(ValueError, match="^r must be 4 as in the memory in .*, got 5: choose another folder, or give"):
        find_finished(tmp_path / "memory", dataclasses.replace(settings, r=5), input_ids[:130])
    with pytest.raises(ValueError, match="^--out .* holds the memory of another text: choose another folder, or give"):
        find_finished(tmp_path / "memory", settings, input_ids)
    (tmp_path / "memory" / "reading.json").unlink()
    with pytest.raises(ValueError, match="^--out .* holds a memory that no reading here made: choose another folder"):
        find_finished(tmp_path / "memory", settings, input_ids)


def tiny_two_layer_host():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        hidden_act="relu",
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_two_layer_hosts_have_their_own_method():
    host = tiny_two_layer_host()
    ids = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(0))
    reading = read_with(host, ids, Settings.from_preset("locas-mlp", r=4, window=32, stride=16))
    assert reading.extra_parameters == 2 * 4 * 2 * 16
    message = "method 'locas-glu' needs gated FFNs, got GPTNeoXForCausalLM with two-layer ones: use 'locas-mlp'"
    with pytest.raises(ValueError) as raised:
        read_with(host, ids, Settings.from_preset("locas-glu", r=4, window=32, stride=16))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "given",
    [{"preset": "paper"}, {"preset": "paper", "update": "nlsvd"}, {"preset": "tuned"}],
    ids=["bp", "nlsvd", "topk"],
)
def test_a_two_layer_memory_is_read_saved_and_merged(given, tmp_path):
    ids = torch.randint(0, 64, (200,), generator=torch.Generator().manual_seed(0))
    settings = Settings.from_preset("locas-mlp", r=4, window=32, stride=16, **given)
    reading = read_with(tiny_two_layer_host(), ids, settings, memory_dir=tmp_path / "memory")
    assert reading.skipped_chunks == 0 and math.isfinite(reading.perplexity)
    torch.manual_seed(0)
    model = loading.load_memory(tiny_two_layer_host(), tmp_path / "memory")
    with torch.no_grad():
        expected = model(input_ids=ids[None, :32]).logits
        assert not torch.equal(expected, tiny_two_layer_host()(input_ids=ids[None, :32]).logits)
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(plain(input_ids=ids[None, :32]).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_a_written_memory_does_not_use_is_left_out():
    bp, nlsvd = (Settings.from_preset("locas-mlp", "paper", update=update) for update in (None, "nlsvd"))
    topk = Settings.from_preset("locas-mlp")
    assert (bp.init, bp.update) == ("write", "bp") and bp.learning_rate and bp.epsilon
    assert nlsvd.learning_rate is None and nlsvd.epsilon
    assert topk.learning_rate and (topk.update, topk.epsilon, topk.slots_per_chunk) == (None, None, None)
    with pytest.raises(ValueError, match="^learning_rate has no meaning with update='nlsvd', got 0.1: leave it out$"):
        Settings.from_preset("locas-mlp", "paper", update="nlsvd", learning_rate=0.1)
    with pytest.raises(ValueError, match="^epsilon has no meaning with init='topk', got 0.1: leave it out$"):
        Settings.from_preset("locas-mlp", init="topk", epsilon=0.1)
    with pytest.raises(ValueError, match="^update must be one of bp, nlsvd, got 'sgd'$"):
        Settings.from_preset("locas-mlp", "paper", update="sgd")
    with pytest.raises(ValueError, match="^update has no meaning for the method 'locas-glu', got bp: leave it out$"):
        Settings.from_preset("locas-glu", update="bp")


def test_gated_hosts_refuse_the_two_layer_method(base, input_ids):
    message = "method 'locas-mlp' needs two-layer FFNs, got Qwen3ForCausalLM with gated ones: use 'locas-glu'"
    with pytest.raises(ValueError) as raised:
        read_with(base, input_ids, small("locas-mlp"))
    assert str(raised.value) == message


def test_scoring_needs_a_frozen_model(input_ids):
    model, _ = backbone.load()
    with pytest.raises(ValueError, match="^model must be frozen, got 68 trainable parameters: freeze them first$"):
        score(model, input_ids, small("none"))


def test_presets_fill_in_what_is_not_given():
    tuned, paper = Settings.from_preset("locas-glu", r=16), Settings.from_preset("locas-glu", "paper", r=16)
    assert (tuned.learning_rate, tuned.scaling, tuned.init, tuned.anchor) == (4e-3, 16.0, "topk", 0.3)
    assert (paper.learning_rate, paper.scaling, paper.init, paper.anchor) == (4e-3, 1.0, "topk", None)
    assert Settings.from_preset("locas-glu", scaling=2.5).scaling == 2.5
    lora, none = Settings.from_preset("lora"), Settings.from_preset("none")
    assert (lora.r, lora.learning_rate, lora.init, lora.scaling, lora.anchor) == (64, 1e-3, None, None, None)
    assert (none.r, none.learning_rate, none.init, none.scaling) == (None, None, None, None)


@pytest.mark.parametrize("method", ["lora", "locas-glu"])
@pytest.mark.parametrize(("layers", "indices"), [("upper", {3, 4, 5}), ([5, 0], {0, 5}), (None, set(range(6)))])
def test_some_layers_alone_are_trained(method, layers, indices, base):
    settings = small(method, r=4, layers_to_transform=layers)
    with attached(base, settings) as model:
        trained = [name.split(".layers.")[1] for name, p in model.named_parameters() if p.requires_grad]
        kinds = {name.partition(".")[2].partition(".locas_")[0].partition(".lora_")[0] for name in trained}
    assert {int(name.partition(".")[0]) for name in trained} == indices
    projections = {"self_attn." + part for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
    projections |= {"mlp." + part for part in ("gate_proj", "up_proj", "down_proj")}
    assert kinds == ({"mlp"} if method == "locas-glu" else projections)


@pytest.mark.parametrize("method", ["lora", "locas-glu"])
def test_all_layers_named_are_all_layers(method, base, input_ids):
    named, all_of_them = (
        read_with(base, input_ids[:200], small(method, r=4, layers_to_transform=layers))
        for layers in (tuple(range(6)), None)
    )
    assert named.settings.layers_to_transform == [0, 1, 2, 3, 4, 5]
    assert (named.nll_nats, named.extra_parameters) == (all_of_them.nll_nats, all_of_them.extra_parameters)


def test_layers_survive_json_and_an_older_reading_has_none(base, input_ids, tmp_path):
    settings = small("locas-glu", r=4, layers_to_transform=(4, 5))
    reading = read_with(base, input_ids[:130], settings, memory_dir=tmp_path)
    assert find_finished(tmp_path, settings, input_ids[:130]) == reading
    message = "^layers_to_transform must be \\[4, 5\\] as in the memory in .*, got 'upper': choose another folder"
    with pytest.raises(ValueError, match=message):
        find_finished(tmp_path, small("locas-glu", r=4, layers_to_transform="upper"), input_ids[:130])
    older = small("locas-glu", r=4)
    value = dataclasses.replace(reading, settings=older).to_json()
    del value["layers_to_transform"]
    assert Reading.from_json(value).settings == older


def test_layers_that_a_model_does_not_have_are_named(base, input_ids):
    message = "layers_to_transform must lie below 6, the layers of Qwen3ForCausalLM, got 6: lower it"
    for method in ("lora", "locas-glu"):
        with pytest.raises(ValueError) as raised:
            read_with(base, input_ids, small(method, layers_to_transform=[5, 6]))
        assert str(raised.value) == message


def test_the_upper_half_of_an_odd_number_of_layers_is_the_larger_one():
    host = tiny_two_layer_host()
    host.config.num_hidden_layers = 5
    assert methods.find_layers(host, "upper") == [2, 3, 4]


@pytest.mark.parametrize("preset", methods.PRESETS)
def test_presets_know_every_method(preset):
    assert methods.PRESETS[preset].keys() == methods.METHODS.keys()


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("memo", {}, "method must be one of none, lora, locas-glu, locas-mlp, got 'memo'"),
        ("lora", {"preset": "best"}, "preset must be one of paper, tuned, got 'best'"),
        ("locas-glu", {"init": "zero"}, f"init must be one of {', '.join(STRATEGIES)}, got 'zero'"),
        ("lora", {"init": "topk"}, "init has no meaning for the method 'lora', got topk: leave it out"),
        *(
            (
                "lora",
                {"layers_to_transform": layers},
                f"layers_to_transform must be 'upper' or different layer indices from 0 on, got {layers!r}: "
                "leave it out for all layers",
            )
            for layers in ("lower", [], [-1], [1, 1], [True], 3)
        ),
        (
            "none",
            {"layers_to_transform": "upper"},
            "layers_to_transform has no meaning for the method 'none', got upper: leave it out",
        ),
        ("none", {"r": 8}, "r has no meaning for the method 'none', got 8: leave it out"),
        ("lora", {"r": 0}, "r must be at least 1, got 0: raise it, or leave it out"),
        (
            "lora",
            {"window": 8, "stride": 9},
            "window must be at least the stride (9), got 8: the window holds the chunk; raise it, or lower the stride",
        ),
        (
            "lora",
            {"learning_rate": math.inf},
            "learning_rate must be a finite number above 0, got inf: leave it out for the preset's",
        ),
    ],
)
def test_settings_name_what_is_wrong(method, given, message):
    with pytest.raises(ValueError) as raised:
        Settings.from_preset(method, **given)
    assert str(raised.value) == message


def test_a_text_of_one_token_is_refused(base):
    with pytest.raises(ValueError, match=r"^input_ids must be of shape \[T\] with T >= 2, got \[1\]: give more text$"):
        read_with(base, torch.tensor([5]), small("none"))
