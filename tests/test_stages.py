"""A stage leaves the base as it was, reports what it did, and saves a whole memory or none."""

import copy
import dataclasses
import errno
import html
import json
import math
import os
import shutil
import time
from contextlib import contextmanager

import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from locas_peft import LocasConfig, backbone, calibrate, stages, text
from locas_peft.bases import load_base
from locas_peft.evaluation.runs import summarize_stage
from locas_peft.files import format_json
from locas_peft.memories import (
    CHECKPOINT_FOLDER,
    RECORD,
    check_vacant,
    checkpoint,
    describe_memory,
    load_memory,
    load_memory_config,
    memory_attached,
)
from locas_peft.model import fingerprint
from locas_peft.selfstudy import Exchange, distillation, load_exchanges
from locas_peft.selfstudy.exchanges import EXCHANGES
from locas_peft.stages import (
    Place,
    ReadRecord,
    ReadSettings,
    StudyRecord,
    StudySettings,
    attached,
    complete,
    load_records,
    make_trainer,
    open_reading,
    open_study,
    parse_record,
    running,
    saving,
    score,
)
from locas_peft.stages.methods.method import find_layers
from locas_peft.ttt import Anchor, MeanOfReadings, write_own_text

CONTRACT = {
    "method", "model", "r", "init", "learning_rate", "window", "stride", "seed", "scored_tokens", "nll_nats",
    "perplexity", "perplexity_at", "extra_parameters", "seconds", "tokens_per_second", "peak_bytes", "memory_dir",
}  # fmt: skip
METHODS = ["none", "lora", "locas-glu"]  # for gated hosts
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base():
    return load_base(device="cpu")[0]


@pytest.fixture(scope="module")
def input_ids():
    _, tokenizer = backbone.load()
    return text.tokenize(tokenizer, text.unwrap(text.python_reference()[:4000]), 500)


def small(method: str = "locas-glu", **given) -> ReadSettings:
    if method == "locas-glu":
        given = {"anchor": 0, **given}  # writing its text would take longer than these readings
    return complete(ReadSettings(**{"method": method, "window": 128, "stride": 64} | given))


def read(
    base, input_ids, settings, *, tokenizer=None, start=None, on_step=None, **place
) -> ReadRecord:
    """Read a text; `place` has the fields of a `Place`."""
    options = {"tokenizer": tokenizer, "start": start, "on_step": on_step}
    return stages.read(base, input_ids, settings, Place(**place), **options)


def read_until(base, input_ids, settings, index: int, number: int = 0, **place) -> ReadRecord:
    """Read up to a chunk, and save what was learned."""
    with open_reading(base, input_ids, settings, Place(**place)) as run:
        for chunk in run:
            if (chunk.reading, chunk.index) == (number, index):
                break
        return run.finish()


def find_finished(folder, settings, input_ids) -> ReadRecord | None:
    """Find the finished reading of a text, as a reading that is resumed does."""
    expected = json.loads(json.dumps(vars(settings)))
    expected |= {"text_sha256": text.digest_ids(input_ids), "origin": None}
    return saving.find_finished(folder, expected)


def make_two_layer_host():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = GPTNeoXConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=64, hidden_act="relu"
    )
    return AutoModelForCausalLM.from_config(config).eval()


def make_ids(length: int) -> torch.Tensor:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(0))


def describe(model) -> dict:
    """All that a method could leave behind in a model."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "flags": [
            (name, parameter.requires_grad, parameter.grad)
            for name, parameter in model.named_parameters()
        ],
        "modes": [module.training for module in model.modules()],
        "hooks": [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in model.modules()
        ],
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "config": model.config.to_dict(),
    }


def interrupt_at(index: int, number: int = 0):
    def interrupt(chunk):
        if (chunk.reading, chunk.index) == (number, index):
            raise KeyboardInterrupt

    return interrupt


def interrupted(base, input_ids, settings, *, at: int, number: int = 0, **options) -> None:
    with pytest.raises(KeyboardInterrupt):
        read(
            base,
            input_ids,
            settings,
            checkpoint_seconds=0,
            on_step=interrupt_at(at, number),
            **options,
        )


# The base


@pytest.mark.parametrize("method", METHODS)
def test_the_base_is_what_it_was(method, base, input_ids):
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    before = describe(base)
    read(base, input_ids[:200], small(method))
    assert describe(base) == before
    assert base.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base.state_dict().items())


def test_the_base_is_what_it_was_after_an_error(base, input_ids):
    before = describe(base)
    with pytest.raises(KeyboardInterrupt):
        read(base, input_ids, small(), on_step=interrupt_at(0))
    assert describe(base) == before


def test_trainable_parameters_and_training_mode_come_back():
    model = make_two_layer_host().train()
    with attached(model, small("none")):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


# Stopping


def test_a_loop_can_be_left_and_what_was_learned_is_kept(base, input_ids, tmp_path):
    settings = small(seed=3)
    record = read_until(base, input_ids, settings, 2, out=tmp_path / "stopped")
    read(base, input_ids[: 3 * 64], settings, out=tmp_path / "short")
    found = load_file(tmp_path / "stopped" / WEIGHTS).keys()
    assert found == load_file(tmp_path / "short" / WEIGHTS).keys()
    for name, tensor in load_file(tmp_path / "short" / WEIGHTS).items():
        assert torch.equal(tensor, load_file(tmp_path / "stopped" / WEIGHTS)[name]), name
    assert record.stopped and [tokens for tokens, _ in record.curve] == [64, 128, 192]
    assert load_records(tmp_path / "stopped") == [record]
    with pytest.raises(ValueError, match="holds the memory of a stage that was stopped early"):
        find_finished(tmp_path / "stopped", settings, input_ids)


def test_a_loop_can_be_left_at_a_chunk_of_the_checkpoint(base, input_ids, tmp_path):
    place = {
        "out": tmp_path / "memory",
        "checkpoint_dir": tmp_path / "memory" / CHECKPOINT_FOLDER,
    }
    with pytest.raises(KeyboardInterrupt):
        read(base, input_ids, small(), on_step=interrupt_at(2), **place)
    record = read_until(base, input_ids, small(), 0, resume=True, **place)
    assert record.stopped and [tokens for tokens, _ in record.curve] == [64, 128, 192]
    assert (tmp_path / "memory" / WEIGHTS).exists()


def test_a_second_reading_that_is_stopped_counts_its_own_tokens(base, input_ids):
    record = read_until(base, input_ids[:200], small(readings=2), 0, number=1)
    first, second = record.perplexities
    assert first == record.perplexity and 1 < second < 2 * first


# Figures


def test_methods_score_the_same_first_chunk_and_learn_from_then_on(base, input_ids):
    readings = {method: read(base, input_ids, small(method)) for method in METHODS}
    for method in ("lora", "locas-glu"):
        assert readings[method].curve[0] == pytest.approx(readings["none"].curve[0], rel=1e-5)
        assert readings[method].perplexity < readings["none"].perplexity
    assert readings["none"].extra_parameters == 0
    assert readings["lora"].extra_parameters == 1_867_776
    assert readings["locas-glu"].extra_parameters == 6 * 64 * 3 * 256


def test_settings_that_are_not_complete_are_completed(base, input_ids):
    given = ReadSettings(method="none", window=128)
    assert read(base, input_ids[:100], given).settings == complete(given, base)


def test_a_reading_records_what_it_did(base, input_ids):
    seen = []
    reading = read(base, input_ids, small(r=8, max_tokens=300), on_step=seen.append)
    assert [chunk.stop for chunk in seen] == [64, 128, 192, 256, 300]
    assert reading.scored_tokens == 299
    assert reading.nll_nats == pytest.approx(sum(chunk.nll_nats for chunk in seen))
    assert reading.perplexity == pytest.approx(math.exp(reading.nll_nats / 299))
    assert reading.curve[-1] == (300, reading.perplexity)
    assert reading.perplexities == [reading.perplexity]
    assert reading.perplexity_between == {"0-300": reading.perplexity}
    assert 0 <= reading.seconds - sum(chunk.seconds for chunk in seen) < 1
    assert reading.tokens_per_second == 299 / reading.seconds
    assert reading.peak_bytes > 0
    assert reading.memory_dir is None
    value = reading.to_json()
    assert value.keys() >= CONTRACT
    assert value["method"] == "locas-glu" and value["model"] == "locas_peft/tinybook-glu"
    assert value["r"] == 8
    assert parse_record(json.loads(json.dumps(value))) == reading


def test_the_record_names_the_digests_of_text_base_tokenizer_and_settings(
    base, input_ids, tmp_path
):
    tokenizer = backbone.load()[1]
    read(base, input_ids[:130], small(r=4), out=tmp_path / "one", tokenizer=tokenizer)
    read(base, input_ids[:130], small(r=8), out=tmp_path / "two", tokenizer=tokenizer)
    one, two = (describe_memory(tmp_path / name)["digests"] for name in ("one", "two"))
    assert one.keys() == {f"{name}_sha256" for name in ("text", "base", "tokenizer", "settings")}
    assert {name for name in one if one[name] != two[name]} == {"settings_sha256"}
    assert one["base_sha256"] == fingerprint(base)
    assert one["text_sha256"] == text.digest_ids(input_ids[:130])
    assert one["tokenizer_sha256"] == text.digest_tokenizer(tokenizer)
    (tmp_path / "one" / RECORD).write_text("[]")
    for load, rule in (
        (describe_memory, "be the record of a memory"),
        (load_records, "list the stages of a memory"),
    ):
        message = rf"record\.json must {rule}: copy or save the memory again$"
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "one")


def test_several_readings_of_a_text_are_several_perplexities(base, input_ids):
    seen, settings = [], small(r=8, readings=3)
    reading, once = (
        read(base, input_ids, settings, on_step=seen.append),
        read(base, input_ids, small(r=8)),
    )
    assert [chunk.reading for chunk in seen] == [0] * 8 + [1] * 8 + [2] * 8
    assert reading.nll_nats == once.nll_nats and reading.curve == once.curve
    assert reading.scored_tokens == 499
    assert reading.perplexities[0] == reading.perplexity == once.perplexity
    assert reading.perplexities[2] < reading.perplexities[1] < reading.perplexities[0]
    assert reading.tokens_per_second == 3 * 499 / reading.seconds


def test_the_speed_of_a_reading_that_was_stopped_counts_what_it_scored(base, input_ids):
    seen = []
    with open_reading(base, input_ids, small(r=4, readings=2)) as run:
        for chunk in run:
            seen.append(chunk)
            if chunk.reading == 1:
                break
        record = run.finish()
    scored = sum(chunk.tokens for chunk in seen)
    assert 499 < scored < 2 * 499
    assert record.tokens_per_second == scored / record.seconds
    assert summarize_stage(record.to_json())["scored_tokens"] == scored
    assert dataclasses.replace(record, all_scored_tokens=None).count_scored_tokens() == 2 * 499


def test_the_seconds_of_a_reading_have_those_of_its_end(base, input_ids, tmp_path, monkeypatch):
    def wait(self, trainer, number):
        time.sleep(0.1)

    monkeypatch.setattr(MeanOfReadings, "after_reading", wait)
    place = {"checkpoint_dir": tmp_path / "checkpoint"}
    settings = small(r=4, readings=2)
    interrupted(base, input_ids[:200], settings, at=0, number=1, **place)
    seen = []
    record = read(base, input_ids[:200], settings, resume=True, on_step=seen.append, **place)
    assert record.seconds > 0.2 + sum(chunk.seconds for chunk in seen)


def test_figures_that_overflowed_survive_json(base, input_ids):
    reading = read(base, input_ids[:130], small("none"))
    figures = {
        "perplexity_at": {"1": math.nan},
        "perplexity_between": {"0-1": math.nan},
        "perplexities": [math.nan],
    }
    broken = dataclasses.replace(
        reading, nll_nats=math.inf, perplexity=math.nan, curve=[(64, math.nan)], **figures
    )
    back = ReadRecord.from_json(json.loads(format_json(broken.to_json())))
    found = [back.nll_nats, back.perplexity, back.curve[0][1], *back.perplexities]
    found += [*back.perplexity_at.values(), *back.perplexity_between.values()]
    assert all(map(math.isnan, found))


def test_a_record_of_another_version_is_named(base, input_ids):
    value = read(base, input_ids[:130], small("none")).to_json()
    newer = ("layers_to_transform", "perplexities")
    older = {name: item for name, item in value.items() if name not in newer}
    assert ReadRecord.from_json(older).perplexities == []
    for wrong in (
        {**value, "surprise": 1},
        # A setting that has left.
        {**value, "objective": "nll"},
        {name: item for name, item in value.items() if name != "nll_nats"},
        {**value, "curve": [1, 2]},
    ):
        message = "^record.json must be one that this version wrote .*: read the text aga"
        with pytest.raises(ValueError, match=message):
            ReadRecord.from_json(wrong)


def test_scoring_needs_a_frozen_model(input_ids):
    model, _ = backbone.load()
    message = "^model must be frozen, got 68 trainable parameters: freeze them first$"
    with pytest.raises(ValueError, match=message):
        score(model, input_ids, small("none"))


# Adapters


def test_the_norm_of_the_settings_reaches_the_memory(base):
    for given, expected in (
        ({}, 1.0),
        ({"max_slot_norm": 0.0}, None),
        ({"max_slot_norm": 2.0}, 2.0),
    ):
        with attached(base, small(**given)) as model:
            assert model.peft_config["default"].max_slot_norm == expected


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"stride": 16}, (32, 16)),
        ({"stride": 1}, (32, 2)),
        ({"window": 512, "stride": 256}, (32, 128)),
    ],
)
def test_settings_make_the_anchor(base, given, texts):
    settings = small(**{"r": 4, "anchor": 0.5, "window": 32} | given)
    with attached(base, settings) as model:
        (made,) = make_trainer(model, settings).steps
        assert isinstance(made, Anchor)
        assert (made.weight, made.every, made.texts.shape) == (0.5, 4, texts)
        if texts[1] <= 16:  # more takes seconds to write
            assert torch.equal(made.texts[3], write_own_text(model, texts=4, tokens=texts[1])[3])
    with attached(base, small()) as model:
        assert make_trainer(model, small()).steps == []


@pytest.mark.parametrize("method", ["lora", "locas-glu"])
@pytest.mark.parametrize(
    ("layers", "indices"), [("upper", {3, 4, 5}), ([5, 0], {0, 5}), (None, set(range(6)))]
)
def test_some_layers_alone_are_trained(method, layers, indices, base):
    with attached(base, small(method, r=4, layers_to_transform=layers)) as model:
        trained = [
            name.split(".layers.")[1] for name, p in model.named_parameters() if p.requires_grad
        ]
        kinds = {
            name.partition(".")[2].partition(".locas_")[0].partition(".lora_")[0]
            for name in trained
        }
    assert {int(name.partition(".")[0]) for name in trained} == indices
    projections = {"self_attn." + part for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
    projections |= {"mlp." + part for part in ("gate_proj", "up_proj", "down_proj")}
    assert kinds == ({"mlp"} if method == "locas-glu" else projections)


def test_layers_that_a_model_does_not_have_are_named(base, input_ids):
    message = (
        "^layers_to_transform must lie below 6, the layers of Qwen3ForCausalLM, got 6: lower it$"
    )
    with pytest.raises(ValueError, match=message):
        read(base, input_ids, small(layers_to_transform=[5, 6]))


def test_the_upper_half_of_an_odd_number_of_layers_is_the_larger_one():
    host = make_two_layer_host()
    host.config.num_hidden_layers = 5
    settings = small("locas-mlp", layers_to_transform="upper")
    assert find_layers(settings, host) == [2, 3, 4]


def test_each_kind_of_host_has_its_own_method(base, input_ids):
    host, ids = make_two_layer_host(), make_ids(90)
    found = read(host, ids, small("locas-mlp", r=4, window=32, stride=16)).extra_parameters
    assert found == 2 * 4 * 2 * 16
    message = "^method 'locas-glu' needs gated FFNs, got GPTNeoXForCausalLM with two-layer ones: use 'locas-mlp'$"
    with pytest.raises(ValueError, match=message):
        read(host, ids, small(r=4, window=32, stride=16))
    message = "^method 'locas-mlp' needs two-layer FFNs, got Qwen3ForCausalLM with gated ones: use 'locas-glu'$"
    with pytest.raises(ValueError, match=message):
        read(base, input_ids, small("locas-mlp"))


RIDGE = {"init": "write", "update": "ridge"}


@pytest.mark.parametrize(
    "given", [{"preset": "paper"}, {"preset": "paper", "update": "nlsvd"}, {}, RIDGE], ids=str
)
def test_a_two_layer_memory_is_read_saved_and_merged(given, tmp_path):
    ids = make_ids(200)
    settings = small("locas-mlp", r=4, window=32, stride=16, **given)
    record = read(make_two_layer_host(), ids, settings, out=tmp_path / "memory")
    assert record.skipped_chunks == 0 and math.isfinite(record.perplexity)
    model, ids = load_memory(make_two_layer_host(), tmp_path / "memory"), ids[None, :32]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert not torch.equal(expected, make_two_layer_host()(input_ids=ids).logits)
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_values_are_written_in_closed_form_beside_rows_that_stay_or_are_trained(
    base, input_ids, tmp_path
):
    closed = {"update": "ridge"}
    ways = {
        "trained": {},
        "alone": {**closed, "anchor": None},
        "beside": {**closed, "learning_rate": 4e-3},
    }
    for name, given in ways.items():
        settings = small(**given)
        read(base, input_ids, settings, out=tmp_path / name)
        assert load_records(tmp_path / name)[-1].settings == settings
    trained, alone, beside = (load_file(tmp_path / name / WEIGHTS) for name in ways)
    rows = [key for key in trained if "locas_gate" in key or "locas_up" in key]
    values = [key for key in trained if "locas_down" in key]
    assert rows and values
    assert not any(torch.equal(alone[key], beside[key]) for key in (*rows, *values))
    assert not any(torch.equal(trained[key], beside[key]) for key in values)


# A memory's folder


def test_a_saved_memory_comes_back_on_a_fresh_base(base, input_ids, tmp_path):
    folder = tmp_path / "new" / "memory"
    record = read(base, input_ids, small(), out=folder)
    assert record.memory_dir == str(folder)
    assert sorted(os.listdir(folder)) == ["README.md", "adapter_config.json", WEIGHTS, RECORD]
    (stage,) = json.loads((folder / RECORD).read_text())["stages"]
    assert stage["perplexity"] == record.perplexity
    found = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert found == backbone.NAME
    texts = [path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"]
    assert str(backbone.path()) not in "".join(texts)

    fresh, _ = backbone.load()
    before = describe(fresh)
    with memory_attached(fresh, folder) as model:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        with_memory = score(model, input_ids, record.settings)
        with model.disable_adapter():
            without = score(model, input_ids, record.settings)
    assert with_memory < 0.9 * without
    fresh.requires_grad_(False)
    assert score(fresh, input_ids, record.settings) == without
    assert describe(fresh.requires_grad_(True))["modules"] == before["modules"]


def test_a_model_card_says_what_was_read(base, input_ids, tmp_path):
    title = "a|b](x) <script>1</script> `**x** www.x.y $1$\n---\nlicense: mit"
    settings = dataclasses.replace(small(r=4), model="owner/name: [x]")
    reading = read(base, input_ids[:200], settings, out=tmp_path, title=title)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "base_model": "owner/name: [x]",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["locas", "test-time-training"],
    }
    page = MarkdownIt("commonmark").enable("table").render(card.text)
    shown = html.escape(title.replace("\n", "\\n"))
    assert f"<h1>A memory of {shown}</h1>" in page and f"<td>{shown}</td>" in page
    for value in (f"{reading.perplexity:.2f}", "200</td>", "locas-glu, 18,432 parame"):
        assert f"<td>{value}" in page
    assert load_records(tmp_path)[-1].title == title


@pytest.mark.parametrize("name", ["", "someone/model"])
def test_a_memory_names_the_base_that_read(name, tmp_path):
    host = make_two_layer_host().to(torch.bfloat16)
    host.name_or_path = name
    settings = ReadSettings(method="locas-mlp", r=2, window=32)
    used = read(host, make_ids(40), settings, out=tmp_path / "m").settings
    assert (used.model, used.dtype, used.window) == (name, "bfloat16", 32)
    assert (
        json.loads((tmp_path / "m" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == name
    )
    assert complete(ReadSettings(r=2), host).window == 64, (
        "its positions, not the embedded model's window"
    )


def test_a_local_base_is_not_named_as_one_of_the_hub(base, input_ids, tmp_path):
    for model in (str(tmp_path), "x.gguf", backbone.NAME):
        read(base, input_ids[:100], small(r=2, model=model), out=tmp_path / "m", overwrite=True)
        assert ModelCard.load(tmp_path / "m" / "README.md").data.base_model is None


def test_the_method_none_has_nothing_to_save(base, input_ids, tmp_path):
    record = read(
        base, input_ids, small("none"), out=tmp_path / "memory", checkpoint_dir=tmp_path / "c"
    )
    assert record.memory_dir is None
    assert list(tmp_path.iterdir()) == []


def test_a_memory_is_replaced_on_demand_only(base, input_ids, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    read(base, input_ids[:130], small(r=4), out=tmp_path)
    before = (tmp_path / WEIGHTS).read_bytes()
    for resume, held in (
        (False, "^--out .* holds a memory"),
        (True, "^r must be 4 as in the memory in '.*', got 8"),
    ):
        message = f"{held}: choose another folder, or give --overwrite$"
        with pytest.raises(ValueError, match=message):
            read(base, input_ids[:130], small(r=8), out=tmp_path, resume=resume)
    assert (tmp_path / WEIGHTS).read_bytes() == before
    record = read(base, input_ids[:130], small(r=8), out=tmp_path, overwrite=True)
    assert find_finished(tmp_path, small(r=8), input_ids[:130]) == record
    assert (tmp_path / WEIGHTS).read_bytes() != before
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["README.md", "adapter_config.json", WEIGHTS, RECORD])
def test_foreign_files_are_never_replaced(base, input_ids, tmp_path, name):
    if name == RECORD:
        (tmp_path / name).symlink_to(tmp_path / "missing")
    elif name == WEIGHTS:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("mine")
    message = f"^--out .* holds a file {name} that no reading wrote: choose another folder, or move that file$"
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            check_vacant(tmp_path, overwrite=overwrite)
        options = {"overwrite": overwrite, "on_step": pytest.fail}
        with pytest.raises(ValueError, match=message):
            read(base, input_ids, small(), out=tmp_path, **options)
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_was_filled_meanwhile_is_refused_under_the_lock(
    base, input_ids, tmp_path, monkeypatch
):
    """Another process may finish the same memory after the command line has looked."""
    check_vacant(tmp_path)
    read(base, input_ids[:130], small(r=4), out=tmp_path)
    locked = []

    def check(directory, **options):
        with pytest.raises(checkpoint.InUse), checkpoint.locked(tmp_path / CHECKPOINT_FOLDER):
            pass
        locked.append(directory)
        check_vacant(directory, **options)

    monkeypatch.setattr(running, "check_vacant", check)
    message = "^--out .* holds a memory: choose another folder, or give --overwrite$"
    with pytest.raises(ValueError, match=message):
        read(
            base,
            input_ids[:130],
            small(r=4),
            out=tmp_path,
            checkpoint_dir=tmp_path / CHECKPOINT_FOLDER,
        )
    assert locked == [tmp_path] and CHECKPOINT_FOLDER not in os.listdir(tmp_path)


def test_a_finished_reading_is_found(base, input_ids, tmp_path):
    settings, folder = small(r=4, layers_to_transform=[4, 5]), tmp_path / "memory"
    assert find_finished(folder, settings, input_ids) is None
    record = read(base, input_ids[:130], settings, out=folder)
    assert find_finished(folder, settings, input_ids[:130]) == record
    for changed, message in (
        (small(r=5, layers_to_transform=[4, 5]), "r must be 4 as in the memory in .*, got 5"),
        (
            small(r=4, layers_to_transform="upper"),
            r"layers_to_transform must be \[4, 5\] as in the memory .*, got 'upp",
        ),
        (small("lora", r=4), "method must be 'locas-glu' as in the memory in .*, got 'lora'"),
    ):
        with pytest.raises(
            ValueError, match=f"^{message}.*: choose another folder, or give --overwrite$"
        ):
            find_finished(folder, changed, input_ids[:130])
    with pytest.raises(
        ValueError,
        match="^--out .* holds the memory of another text: choose another folder, or give",
    ):
        find_finished(folder, settings, input_ids)
    (folder / CHECKPOINT_FOLDER).mkdir()
    (
        folder / CHECKPOINT_FOLDER / checkpoint.LOCK
    ).touch()  # of a process that was killed after it had finished
    assert find_finished(folder, settings, input_ids[:130]) == record
    assert not (folder / CHECKPOINT_FOLDER).exists()
    (folder / RECORD).unlink()
    with pytest.raises(
        ValueError,
        match="^--out .* holds a memory that no reading here made: choose another folder",
    ):
        find_finished(folder, settings, input_ids)


# The third move puts the whole new folder beside the old files; test_files.py has each move.
@pytest.mark.parametrize("move", [1, 3, 4, 12])
def test_a_stopped_replacement_is_finished_before_the_folder_is_judged(
    base, input_ids, tmp_path, move
):
    """Killed between two moves, a folder must not hold new weights that pass for the old memory."""
    ids, moves, replace, folder = input_ids[:70], [], os.replace, tmp_path / "memory"
    read(base, ids, small(r=4), out=folder)

    def stop(*paths):
        moves.append(paths)
        if len(moves) == move:
            raise KeyboardInterrupt
        replace(*paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            read(base, ids, small(r=8), out=folder, overwrite=True)
    shutil.copytree(folder, tmp_path / "copy")
    width = 8 if move > 3 else 4
    assert find_finished(folder, small(r=width), ids).settings.r == width
    with pytest.raises(ValueError, match="^--out .* holds a memory: choose another folder"):
        check_vacant(tmp_path / "copy")
    assert load_memory_config(tmp_path / "copy")["r"] == width


# Unfinished readings


@pytest.mark.parametrize(
    ("method", "given", "number"),
    [
        ("lora", {}, 0),
        ("locas-glu", {"readings": 2}, 1),
        # Writing the anchor's text takes seconds.
        pytest.param("locas-glu", {"anchor": 0.3}, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_interrupted_reading_goes_on_bit_for_bit(
    method, given, number, base, input_ids, tmp_path, monkeypatch
):
    settings = small(method, r=8, **given)
    whole = read(base, input_ids, settings, out=tmp_path / "whole")
    folder = tmp_path / "parts"
    options = {"out": folder, "checkpoint_dir": folder / CHECKPOINT_FOLDER}
    interrupted(base, input_ids, settings, at=4, number=number, **options)
    assert os.listdir(folder) == [CHECKPOINT_FOLDER]
    message = "^--out .* holds an unfinished reading or study: go on with --resume, or give --over"
    with pytest.raises(ValueError, match=message):
        read(base, input_ids, settings, **options)
    torch.manual_seed(12345)
    monkeypatch.setattr("locas_peft.model.base_weights._KNOWN", {})  # as in another process
    seen = []
    parts = read(base, input_ids, settings, **options, resume=True, on_step=seen.append)
    assert [(chunk.reading, chunk.index) for chunk in seen] == [
        (n, i) for n in range(number + 1) for i in range(8)
    ]
    assert parts.nll_nats == whole.nll_nats and parts.curve == whole.curve
    assert parts.perplexities == whole.perplexities
    assert (folder / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    assert not (folder / CHECKPOINT_FOLDER).exists()


def test_an_interruption_between_two_checkpoints_loses_nothing(base, input_ids, tmp_path):
    options = {"out": tmp_path / "m", "checkpoint_dir": tmp_path / "m" / CHECKPOINT_FOLDER}
    with pytest.raises(KeyboardInterrupt):
        read(base, input_ids, small(), checkpoint_seconds=1e9, on_step=interrupt_at(4), **options)
    seen = []
    read(base, input_ids, small(), **options, resume=True, on_step=seen.append)
    assert [chunk.index for chunk in seen] == list(range(8))
    whole = read(base, input_ids, small())
    assert whole.nll_nats == sum(chunk.nll_nats for chunk in seen)


def test_a_full_disk_at_a_checkpoint_does_not_end_the_reading(
    base, input_ids, tmp_path, monkeypatch, caplog
):
    def full(directory, state):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    options = {
        "out": tmp_path / "m",
        "checkpoint_dir": tmp_path / "m" / CHECKPOINT_FOLDER,
        "checkpoint_seconds": 0,
    }
    read(base, input_ids, small(), **options)
    assert caplog.messages == [
        "no checkpoint can be saved (No space left on device); the stage goes on"
    ]
    found = sorted(os.listdir(tmp_path / "m"))
    assert found == ["README.md", "adapter_config.json", WEIGHTS, RECORD]


def test_overwrite_starts_afresh(base, input_ids, tmp_path):
    options = {"out": tmp_path / "m", "checkpoint_dir": tmp_path / "m" / CHECKPOINT_FOLDER}
    interrupted(base, input_ids[:200], small(r=4), at=2, **options)
    seen = []
    read(base, input_ids[:200], small(r=8), **options, overwrite=True, on_step=seen.append)
    assert [chunk.index for chunk in seen] == [0, 1, 2, 3]
    assert CHECKPOINT_FOLDER not in os.listdir(tmp_path / "m")


def test_an_unfinished_replacement_of_a_memory_goes_on(base, input_ids, tmp_path):
    folder = tmp_path / "m"
    options = {"out": folder, "checkpoint_dir": folder / CHECKPOINT_FOLDER}
    read(base, input_ids[:200], small(r=4), **options)
    interrupted(base, input_ids[:200], small(r=8), at=2, **options, overwrite=True)
    assert load_memory_config(folder)["r"] == 4
    assert find_finished(folder, small(r=8), input_ids[:200]) is None
    record = read(base, input_ids[:200], small(r=8), **options, resume=True)
    assert find_finished(folder, small(r=8), input_ids[:200]) == record


def test_resume_starts_afresh_without_a_checkpoint(base, input_ids, tmp_path):
    record = read(
        base, input_ids[:130], small(anchor=0.3), checkpoint_dir=tmp_path / "none", resume=True
    )
    assert record.scored_tokens == 129
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "lora"}, "method must be 'locas-glu' as in the checkpoint in '{}', got 'lora"),
        ({"seed": 1}, "seed must be 0 as in the checkpoint in '{}', got 1: give the former "),
        ({}, "the text must be the one begun in the checkpoint in '{}' (sha256 "),
    ],
    ids=str,
)
def test_another_reading_or_text_does_not_resume(base, input_ids, tmp_path, changed, message):
    interrupted(base, input_ids, small(), at=2, checkpoint_dir=tmp_path)
    before = (tmp_path / checkpoint.CHECKPOINT).read_bytes()
    with pytest.raises(ValueError) as raised:
        ids = input_ids if changed else input_ids.flip(0)
        read(
            base,
            ids,
            small(**{"method": "locas-glu"} | changed),
            checkpoint_dir=tmp_path,
            resume=True,
        )
    assert str(raised.value).startswith(message.format(tmp_path))
    assert (tmp_path / checkpoint.CHECKPOINT).read_bytes() == before


def test_the_checkpoint_stays_until_the_memory_is_saved(base, input_ids, tmp_path, monkeypatch):
    @contextmanager
    def full(directory):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    options = {
        "out": tmp_path / "m",
        "checkpoint_dir": tmp_path / "m" / CHECKPOINT_FOLDER,
        "checkpoint_seconds": 0,
    }
    with monkeypatch.context() as patch:
        patch.setattr("locas_peft.memories.folder.staged", full)
        with pytest.raises(OSError, match="No space left"):
            read(base, input_ids[:130], small(), **options)
    seen = []
    read(base, input_ids[:130], small(), **options, resume=True, on_step=seen.append)
    assert len(seen) == 3
    found = sorted(os.listdir(tmp_path / "m"))
    assert found == ["README.md", "adapter_config.json", WEIGHTS, RECORD]


def test_a_reading_has_its_folder_alone_from_the_first_chunk_on(base, input_ids, tmp_path):
    folder, refusals = tmp_path / "memory" / "checkpoint", []

    def intrude(chunk):
        with pytest.raises(checkpoint.InUse) as refusal:
            read(base, input_ids, small(), checkpoint_dir=folder, on_step=pytest.fail)
        refusals.append(refusal)

    read(base, input_ids[:130], small(), on_step=intrude, checkpoint_dir=folder)
    assert len(refusals) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "ids", [torch.tensor([5]), torch.ones(1, 8, dtype=torch.long)], ids=["one", "batch"]
)
def test_a_text_of_another_shape_is_refused(base, ids):
    message = (
        rf"^input_ids must be of shape \[T\] with T >= 2, got \{list(ids.shape)}: give more text$"
    )
    with pytest.raises(ValueError, match=message):
        read(base, ids, small("none"))


# Studies

GIVEN = [
    Exchange(f"Who built house {number}?", f"{name} built house {number} on the hill.")
    for number, name in enumerate(["Ann", "Bob", "Cid", "Dan", "Eva", "Fay", "Gus", "Hal"])
]
"""Of so many passages that a fresh memory gets rows that tell them apart."""


@pytest.fixture(scope="module")
def tokenizer():
    return backbone.load()[1]


def study_settings(**given) -> StudySettings:
    defaults = {"r": 16, "window": 256, "passes": 2, "anchor": 0.0, "exchanges": 2}
    return complete(StudySettings(**{**defaults, **given}))


@pytest.fixture
def rows_placed(monkeypatch):
    """The calls that put rows that tell passages apart into a memory."""
    calls = []
    place = distillation.place_discriminants

    def record(*args, **options):
        calls.append(options)
        return place(*args, **options)

    monkeypatch.setattr(distillation, "place_discriminants", record)
    return calls


def test_a_study_keeps_what_was_read(base, tokenizer, input_ids, rows_placed, tmp_path):
    read(base, input_ids, small(r=16), out=tmp_path / "read")
    before = load_file(tmp_path / "read" / WEIGHTS)
    options = {"start": tmp_path / "read", "exchanges": GIVEN}
    place = Place(out=tmp_path / "both")
    opened = open_study(base, tokenizer, input_ids, study_settings(), place, **options)
    with opened as run:
        begun = dict(run.stage._model.named_parameters())
        for name, weight in before.items():
            if name.endswith(("gate.weight", "up.weight", "down.weight")):
                own = begun[name.replace(".weight", ".default.weight")]
                assert torch.equal(own, weight), "the study begins with what was read"
        steps = iter(run)
        next(steps)
        # One step of a small rate: nothing was replaced, zeroed or frozen.
        after_one = {
            name.replace(".default", ""): weight.detach().clone()
            for name, weight in run.stage._model.named_parameters()
            if weight.requires_grad
        }
        for _ in steps:
            pass
        record = run.finish()
    trained = {
        name for name in before if name.endswith(("gate.weight", "up.weight", "down.weight"))
    }
    assert trained == after_one.keys() and len(trained) == 6 * 3
    for name in trained:
        moved = (after_one[name] - before[name]).norm()
        assert 0 < moved < 0.5 * before[name].norm(), name
    assert rows_placed == []
    after = load_file(tmp_path / "both" / WEIGHTS)
    scales = {name for name in before if name.endswith(("input_scale", "tau", "calibrated"))}
    assert scales and all(torch.equal(after[name], before[name]) for name in scales)
    assert load_memory_config(tmp_path / "both")["max_slot_norm"] == 1.0
    for name in trained:
        dim = 0 if name.endswith("down.weight") else 1
        assert after[name].norm(dim=dim).max() <= 1 + 1e-6, name

    first, second = load_records(tmp_path / "both")
    assert isinstance(first, ReadRecord) and isinstance(second, StudyRecord) and second == record
    assert load_exchanges(tmp_path / "both" / EXCHANGES) == GIVEN
    with memory_attached(base, tmp_path / "both") as model:
        with_memory = score(model, input_ids, first.settings)
        with model.disable_adapter():
            without = score(model, input_ids, first.settings)
    assert with_memory < 0.9 * without, "what was read is known after the study"


def test_the_card_of_a_memory_has_both_stages(base, tokenizer, input_ids, tmp_path):
    read(base, input_ids[:200], small(r=4), out=tmp_path)
    place = Place(out=tmp_path)
    options = {"start": tmp_path, "exchanges": GIVEN[:2]}
    stages.study(base, tokenizer, input_ids[:200], study_settings(r=4), place, **options)
    card = (tmp_path / "README.md").read_text()
    assert "trained by reading and studying one text" in card
    assert "| study | 2 exchanges in " in card and "| tokens | 200 |" in card


def test_a_studys_seconds_are_those_of_writing_and_learning(base, tokenizer, input_ids):
    seen = []
    record = stages.study(
        base, tokenizer, input_ids, study_settings(), exchanges=GIVEN[:2], on_step=seen.append
    )
    assert seen and record.seconds == record.writing_seconds + record.learning_seconds
    assert record.learning_seconds > 0 and not record.stopped
    back = parse_record(json.loads(json.dumps(record.to_json())))
    assert isinstance(back, StudyRecord) and back == record


def test_a_reading_keeps_the_exchanges_of_a_memory_that_has_studied(
    base, tokenizer, input_ids, tmp_path
):
    place = Place(out=tmp_path / "studied")
    stages.study(base, tokenizer, input_ids, study_settings(r=4), place, exchanges=GIVEN[:2])
    for out in ("studied", "new"):
        read(base, input_ids[:200], small(r=4), out=tmp_path / out, start=tmp_path / "studied")
        assert load_exchanges(tmp_path / out / EXCHANGES) == GIVEN[:2]
    kinds = [record.kind for record in load_records(tmp_path / "new")]
    assert kinds == ["study", "read", "read"]


def test_embeddings_of_a_memory_that_goes_on_are_gone_with_it(base, tmp_path):
    host = copy.deepcopy(base)
    with torch.no_grad():
        host.get_input_embeddings().weight.mul_(3)
    model = get_peft_model(host, LocasConfig(r=4))
    calibrate(model, [torch.arange(3, 30)[None]])
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with running.attached(base, small(r=4), start=tmp_path) as attached:
        assert not torch.equal(
            base.get_input_embeddings().weight, before["model.embed_tokens.weight"]
        )
        attached.merge_adapter()
    after = base.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_memory_that_goes_on_in_place_keeps_its_text(base, input_ids, tmp_path):
    texts = {"text.txt": "The lamp.", "sample.txt": "lamp"}
    ids, settings = input_ids[:130], small(r=4)
    read(base, ids, settings, out=tmp_path, kept_text="The lamp.", sample="lamp")
    read(base, ids, settings, out=tmp_path, start=tmp_path)
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
    other_path = tmp_path / "." / ".." / tmp_path.name
    read(base, ids, settings, out=tmp_path, start=other_path, overwrite=True)
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
    read(base, ids, settings, out=tmp_path, start=tmp_path, kept_text="The lamp. The bread.")
    texts["text.txt"] = "The lamp. The bread."
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
    read(base, ids, settings, out=tmp_path, start=tmp_path, kept_text="", sample="")
    assert not any((tmp_path / name).exists() for name in texts)


def test_a_second_reading_in_place_that_was_killed_is_no_finished_one(base, input_ids, tmp_path):
    ids, settings = input_ids[:130], small(r=4)
    read(base, ids, settings, out=tmp_path)
    read(base, ids, settings, out=tmp_path, start=tmp_path, resume=True)
    assert len(load_records(tmp_path)) == 2
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    read(base, ids, settings, out=tmp_path, start=tmp_path, resume=True)
    assert len(load_records(tmp_path)) == 2
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before


def test_a_reading_in_place_that_was_killed_after_its_memory_was_saved_is_finished(
    base, input_ids, tmp_path, monkeypatch
):
    ids, settings = input_ids[:300], small(r=4)
    read(base, ids, settings, out=tmp_path)
    place = {"out": tmp_path, "start": tmp_path, "checkpoint_dir": tmp_path / CHECKPOINT_FOLDER}
    with monkeypatch.context() as patched:
        patched.setattr(running.StageRun, "drop_checkpoint", lambda run: None)
        read(base, ids, settings, **place, checkpoint_seconds=0.0)
    assert (tmp_path / CHECKPOINT_FOLDER / checkpoint.CHECKPOINT).exists()
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    steps = []
    record = read(base, ids, settings, **place, resume=True, on_step=steps.append)
    # None is taken, or shown again: the memory is not its own start.
    assert steps == []
    assert load_records(tmp_path)[1:] == [record]
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before
    assert not (tmp_path / CHECKPOINT_FOLDER).exists()


def test_a_new_memory_in_the_place_of_another_removes_its_text(base, input_ids, tmp_path):
    ids, settings = input_ids[:130], small(r=4)
    read(base, ids, settings, out=tmp_path, kept_text="The lamp.", sample="lamp")
    read(base, ids, settings, out=tmp_path, overwrite=True)
    assert not (tmp_path / "text.txt").exists() and not (tmp_path / "sample.txt").exists()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_reading_without_a_scored_token_cannot_be_finished(base, input_ids, tmp_path, steps):
    settings = small(r=4, stride=1)
    with open_reading(base, input_ids[:130], settings, Place(out=tmp_path / "m")) as run:
        for _ in zip(range(steps), run, strict=False):
            pass
        with pytest.raises(ValueError, match=r"^nothing was read yet: take a step, .*$"):
            run.finish()
    assert not (tmp_path / "m").exists()


def test_a_study_does_not_resume_a_reading(base, tokenizer, input_ids, tmp_path):
    interrupted(base, input_ids, small(), at=2, checkpoint_dir=tmp_path)
    before = (tmp_path / checkpoint.CHECKPOINT).read_bytes()
    place = Place(checkpoint_dir=tmp_path, resume=True)
    message = "^the checkpoint in .* must be of the stage 'study', got one of the stage 'read': "
    with pytest.raises(ValueError, match=message):
        stages.study(base, tokenizer, input_ids, study_settings(), place, exchanges=GIVEN)
    assert (tmp_path / checkpoint.CHECKPOINT).read_bytes() == before
