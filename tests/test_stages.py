"""A stage leaves the base as it was, reports what it did, and saves a whole memory or none."""

import copy
import dataclasses
import errno
import functools
import html
import json
import math
import os
import re
import shutil
import time

import pytest
import torch
from families import logits, make_tokens, same, snapshot
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from peft import get_peft_model
from safetensors.torch import load_file
from training import assert_same, make_ids
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from locas_peft import LocasConfig, backbone, calibrate, stages, text
from locas_peft.bases import load_base
from locas_peft.evaluation.runs import summarize_stage
from locas_peft.exchanges import EXCHANGES
from locas_peft.files import check_output_directory, format_json
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
from locas_peft.selfstudy import Exchange, load_exchanges
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
    score,
)
from locas_peft.stages.methods.method import find_layers
from locas_peft.ttt import MeanOfReadings, write_own_text

CONTRACT = {
    "method", "model", "r", "init", "learning_rate", "window", "stride", "seed", "scored_tokens", "nll_nats",
    "perplexity", "perplexity_at", "extra_parameters", "seconds", "tokens_per_second", "peak_bytes", "memory_dir",
}  # fmt: skip
METHODS = ["none", "lora", "locas-glu"]  # for gated hosts
WEIGHTS = "adapter_model.safetensors"
FILES = ["README.md", "adapter_config.json", WEIGHTS, RECORD]


@functools.cache
def load():
    return load_base(device="cpu")


@pytest.fixture
def base():
    return load()[0]


@pytest.fixture
def tokenizer():
    return load()[1]


@functools.cache
def load_ids() -> torch.Tensor:
    return text.tokenize(load()[1], text.unwrap(text.python_reference()[:4000]), 500)


@pytest.fixture
def long_ids():
    return load_ids()


@pytest.fixture
def input_ids():
    return load_ids()[:200]


def small(method: str = "locas-glu", **given) -> ReadSettings:
    if method == "locas-glu":
        given = {"anchor": 0, **given}  # writing its text would take longer than these readings
    return complete(ReadSettings(**{"method": method, "window": 128, "stride": 64} | given))


def read(
    settings, ids=None, *, base=None, tokenizer=None, start=None, on_step=None, **place
) -> ReadRecord:
    """Read a text, of four chunks if it is not given; `place` has the fields of a `Place`."""
    ids = load_ids()[:200] if ids is None else ids
    options = {"tokenizer": tokenizer, "start": start, "on_step": on_step}
    return stages.read(base or load()[0], ids, settings, Place(**place), **options)


def read_until(settings, index: int, number: int = 0, **place) -> ReadRecord:
    """Read up to a chunk, and save what was learned."""
    with open_reading(load()[0], load_ids()[:200], settings, Place(**place)) as run:
        for chunk in run:
            if (chunk.reading, chunk.index) == (number, index):
                break
        return run.finish()


def place_in(folder) -> dict:
    """The memory's folder, and in it the one of the checkpoint."""
    return {"out": folder, "checkpoint_dir": folder / CHECKPOINT_FOLDER}


def take_finished(settings, folder, ids=None) -> ReadRecord:
    """Resume a finished reading, which takes no step."""
    return read(settings, ids, out=folder, resume=True, on_step=pytest.fail)


def score_with_and_without(base, folder, input_ids, settings) -> tuple[float, float]:
    """Return a text's perplexity with a saved memory, and with the memory switched off."""
    with memory_attached(base, folder) as model:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        with_memory = score(model, input_ids, settings)
        with model.disable_adapter():
            return with_memory, score(model, input_ids, settings)


def make_two_layer_host():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = GPTNeoXConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=64, hidden_act="relu"
    )
    return AutoModelForCausalLM.from_config(config).eval()


def describe(model) -> dict:
    """All that a method could leave behind in a model."""
    found = {"config": model.config.to_dict()}
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        hooks_count = [len(each) for each in hooks]
        found[name] = (type(module), module.training, sorted(module.__dict__), hooks_count)
    for name, parameter in model.named_parameters():
        found[name] = (parameter.requires_grad, parameter.grad)
    return found


def interrupted(settings, ids=None, *, at: int, number: int = 0, **options) -> None:
    def interrupt(chunk) -> None:
        if (chunk.reading, chunk.index) == (number, at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(settings, ids, on_step=interrupt, **options)


# The base


@pytest.mark.parametrize("method", METHODS)
def test_the_base_is_what_it_was_also_after_an_error(method, base):
    weights = snapshot(base)
    before = describe(base)
    read(small(method))
    assert describe(base) == before
    interrupted(small(method), at=0)
    assert describe(base) == before
    assert same(base, weights)


def test_trainable_parameters_and_training_mode_come_back():
    model = make_two_layer_host().train()
    with attached(model, small("none")):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


# Stopping


def test_a_loop_can_be_left_and_what_was_learned_is_kept(input_ids, tmp_path):
    settings = small(seed=3)
    record = read_until(settings, 1, out=tmp_path / "stopped")
    read(settings, input_ids[:128], out=tmp_path / "short")
    stopped, short = (load_file(tmp_path / name / WEIGHTS) for name in ("stopped", "short"))
    assert_same(stopped, short)
    assert record.stopped and [tokens for tokens, _ in record.curve] == [64, 128]
    assert load_records(tmp_path / "stopped") == [record]
    with pytest.raises(ValueError, match="holds the memory of a stage that was stopped early"):
        take_finished(settings, tmp_path / "stopped")


def test_a_loop_can_be_left_at_a_chunk_of_the_checkpoint(tmp_path):
    place = place_in(tmp_path / "memory")
    interrupted(small(), at=2, **place)
    record = read_until(small(), 0, resume=True, **place)
    assert record.stopped and [tokens for tokens, _ in record.curve] == [64, 128, 192]
    assert (tmp_path / "memory" / WEIGHTS).exists()


def test_a_second_reading_that_is_stopped_counts_what_it_scored():
    record = read_until(small(r=4, readings=2), 0, number=1)
    first, second = record.perplexities
    assert first == record.perplexity and 1 < second < 2 * first
    scored = 199 + 63
    assert record.tokens_per_second == scored / record.seconds
    assert summarize_stage(record.to_json())["scored_tokens"] == scored
    assert dataclasses.replace(record, all_scored_tokens=None).count_scored_tokens() == 2 * 199


# Figures


def test_methods_score_the_same_first_chunk_and_learn_from_then_on(long_ids):
    plain, *learned = (read(small(method), long_ids) for method in METHODS)
    for record in learned:
        assert record.curve[0] == pytest.approx(plain.curve[0], rel=1e-5)
        assert record.perplexity < plain.perplexity
    counts = [record.extra_parameters for record in (plain, *learned)]
    assert counts == [0, 1_867_776, 6 * 64 * 3 * 256]


def test_a_reading_records_what_it_did(long_ids):
    seen = []
    record = read(small(r=8, max_tokens=300, readings=2), long_ids, on_step=seen.append)
    assert [chunk.stop for chunk in seen] == [64, 128, 192, 256, 300] * 2
    assert [chunk.reading for chunk in seen] == [0] * 5 + [1] * 5
    assert record.scored_tokens == 299
    assert record.nll_nats == pytest.approx(sum(chunk.nll_nats for chunk in seen[:5]))
    assert record.perplexity == pytest.approx(math.exp(record.nll_nats / 299))
    assert record.curve[-1] == (300, record.perplexity)
    first, second = record.perplexities
    assert second < first == record.perplexity
    assert record.perplexity_between == {"0-300": record.perplexity}
    assert 0 <= record.seconds - sum(chunk.seconds for chunk in seen) < 1
    assert record.tokens_per_second == 2 * 299 / record.seconds
    assert record.peak_bytes > 0
    value = record.to_json()
    assert value.keys() >= CONTRACT
    named = {"method": "locas-glu", "model": "locas_peft/tinybook-glu", "r": 8, "memory_dir": None}
    assert named.items() <= value.items()
    assert parse_record(json.loads(json.dumps(value))) == record


def test_the_record_names_the_digests_of_text_base_tokenizer_and_settings(
    base, tokenizer, input_ids, tmp_path
):
    record = read(small(r=4), out=tmp_path, tokenizer=tokenizer)
    assert describe_memory(tmp_path)["digests"] == {
        "text_sha256": text.digest_ids(input_ids),
        "base_sha256": fingerprint(base),
        "tokenizer_sha256": text.digest_tokenizer(tokenizer),
        "settings_sha256": text.digest_json(vars(record.settings)),
    }
    (tmp_path / RECORD).write_text("[]")
    for load, rule in (
        (describe_memory, "be the record of a memory"),
        (load_records, "list the stages of a memory"),
    ):
        with pytest.raises(ValueError, match=rf"record\.json must {rule}: copy or save the mem"):
            load(tmp_path)


def test_the_seconds_of_a_reading_have_those_of_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(MeanOfReadings, "after_reading", lambda *_: time.sleep(0.1))
    settings, place, seen = small(r=4, readings=2), {"checkpoint_dir": tmp_path}, []
    interrupted(settings, at=0, number=1, **place)
    record = read(settings, resume=True, on_step=seen.append, **place)
    assert record.seconds > 0.2 + sum(chunk.seconds for chunk in seen)


@pytest.fixture
def plain_record():
    return read(small("none"))


def test_figures_that_overflowed_survive_json(plain_record):
    broken = dataclasses.replace(
        plain_record,
        nll_nats=math.inf,
        perplexity=math.nan,
        curve=[(64, math.nan)],
        perplexity_at={"1": math.nan},
        perplexity_between={"0-1": math.nan},
        perplexities=[math.nan],
    )
    back = ReadRecord.from_json(json.loads(format_json(broken.to_json())))
    found = [back.nll_nats, back.perplexity, back.curve[0][1], *back.perplexities]
    found += [*back.perplexity_at.values(), *back.perplexity_between.values()]
    assert all(map(math.isnan, found))


def test_a_record_of_another_version_is_named(plain_record):
    value = plain_record.to_json()

    def without(*names) -> dict:
        return {name: item for name, item in value.items() if name not in names}

    assert ReadRecord.from_json(without("layers_to_transform", "perplexities")).perplexities == []
    # The first is a setting that has left.
    for wrong in ({**value, "objective": "nll"}, without("nll_nats"), {**value, "curve": [1, 2]}):
        message = "^record.json must be one that this version wrote .*: read the text aga"
        with pytest.raises(ValueError, match=message):
            ReadRecord.from_json(wrong)


def test_scoring_needs_a_frozen_model():
    message = "^model must be frozen, got 28 trainable parameters: freeze them first$"
    with pytest.raises(ValueError, match=message):
        score(make_two_layer_host(), make_ids(20), small("none"))


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
    ("window", "stride", "tokens"), [(32, 16, 16), (32, 1, 2), (512, 256, 128)]
)
def test_settings_make_the_anchor(base, window, stride, tokens):
    settings = small(r=4, anchor=0.5, window=window, stride=stride, seed=3)
    with attached(base, settings) as model:
        (made,) = make_trainer(model, settings).steps
        assert (made.weight, made.every, made.texts.shape) == (0.5, 4, (32, tokens))
        # More tokens take seconds to write.
        if tokens <= 16:
            own = write_own_text(model, texts=8, tokens=tokens, seed=3)
            assert torch.equal(made.texts[3], own[3])
    with attached(base, small()) as model:
        assert make_trainer(model, small()).steps == []


def test_the_base_is_as_before_a_merge_and_the_embeddings_of_a_memory_that_goes_on(base, tmp_path):
    host = copy.deepcopy(base)
    host.get_input_embeddings().weight.data.mul_(3)
    model = get_peft_model(host, LocasConfig(r=4))
    calibrate(model, [make_ids(30)[None]])
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    before = snapshot(base)
    with attached(base, small(r=4), start=tmp_path) as model:
        embeddings = base.get_input_embeddings().weight
        assert not torch.equal(embeddings, before["model.embed_tokens.weight"])
        model.merge_adapter()
    assert same(base, before)


@pytest.mark.parametrize("method", ["lora", "locas-glu"])
@pytest.mark.parametrize(("layers", "indices"), [("upper", {3, 4, 5}), ([5, 0], {0, 5})])
def test_some_layers_alone_are_trained(method, layers, indices, base):
    with attached(base, small(method, r=4, layers_to_transform=layers)) as model:
        names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {int(re.search(r"\.layers\.(\d+)\.", name)[1]) for name in names} == indices


def test_layers_that_a_model_does_not_have_are_named():
    message = "^layers_to_transform must lie below 6, .* got 6: lower it$"
    with pytest.raises(ValueError, match=message):
        read(small(layers_to_transform=[5, 6]))


def test_the_upper_half_of_an_odd_number_of_layers_is_the_larger_one():
    host = make_two_layer_host()
    host.config.num_hidden_layers = 5
    settings = small("locas-mlp", layers_to_transform="upper")
    assert find_layers(settings, host) == [2, 3, 4]


def test_each_kind_of_host_has_its_own_method(base):
    host, ids = make_two_layer_host(), make_ids(90)
    given = {"r": 4, "window": 32, "stride": 16}
    assert read(small("locas-mlp", **given), ids, base=host).extra_parameters == 2 * 4 * 2 * 16
    for wrong, method, message in (
        (host, "locas-glu", "needs gated FFNs, got .* with two-layer ones: use 'locas-mlp'$"),
        (base, "locas-mlp", "needs two-layer FFNs, got .* with gated ones: use 'locas-glu'$"),
    ):
        with pytest.raises(ValueError, match=f"^method '{method}' {message}"):
            read(small(method, **given), ids, base=wrong)


RIDGE = {"init": "write", "update": "ridge"}


@pytest.mark.parametrize(
    "given", [{"preset": "paper"}, {"preset": "paper", "update": "nlsvd"}, {}, RIDGE], ids=str
)
def test_a_two_layer_memory_is_read_and_saved(given, tmp_path):
    settings = small("locas-mlp", r=4, window=32, stride=16, **given)
    record = read(settings, make_ids(200), base=make_two_layer_host(), out=tmp_path)
    assert record.skipped_chunks == 0 and math.isfinite(record.perplexity)
    tokens = make_tokens()
    found = logits(load_memory(make_two_layer_host(), tmp_path), tokens)
    assert not torch.equal(found, logits(make_two_layer_host(), tokens))


def test_values_are_written_in_closed_form_beside_rows_that_stay_or_are_trained(tmp_path):
    memories = []
    ridge = {"update": "ridge"}
    for given in ({}, {**ridge, "anchor": None}, {**ridge, "learning_rate": 4e-3}):
        settings = small(**given)
        read(settings, out=tmp_path, overwrite=True)
        assert load_records(tmp_path)[-1].settings == settings
        memories.append(load_file(tmp_path / WEIGHTS))
    trained, alone, beside = memories
    weights = [key for key in trained if key.endswith(".weight")]
    values = [key for key in weights if "locas_down" in key]
    assert values and not any(torch.equal(alone[key], beside[key]) for key in weights)
    assert not any(torch.equal(trained[key], beside[key]) for key in values)


# A memory's folder


def test_a_saved_memory_comes_back_on_a_fresh_base(long_ids, tmp_path):
    folder = tmp_path / "new" / "memory"
    record = read(small(), long_ids, out=folder)
    assert record.memory_dir == str(folder)
    assert sorted(os.listdir(folder)) == FILES
    (stage,) = json.loads((folder / RECORD).read_text())["stages"]
    assert stage["perplexity"] == record.perplexity
    assert load_memory_config(folder)["base_model_name_or_path"] == backbone.NAME
    texts = [path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"]
    assert str(backbone.path()) not in "".join(texts)

    fresh = backbone.load()[0].requires_grad_(False)
    before = describe(fresh)
    with_memory, without = score_with_and_without(fresh, folder, long_ids, record.settings)
    assert with_memory < 0.9 * without
    assert score(fresh, long_ids, record.settings) == without
    assert describe(fresh) == before


def test_a_model_card_says_what_was_read(tmp_path):
    title = "a|b](x) <script>1</script> `**x** www.x.y $1$\n---\nlicense: mit"
    settings = dataclasses.replace(small(r=4), model="owner/name: [x]")
    reading = read(settings, out=tmp_path, title=title)
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
def test_a_memory_in_float32_names_the_base_that_read(name, tmp_path):
    host = make_two_layer_host().to(torch.bfloat16)
    host.name_or_path = name
    settings = ReadSettings(method="locas-mlp", r=2, window=32)
    record = read(settings, make_ids(40), base=host, out=tmp_path)
    used = record.settings
    assert (used.model, used.dtype, used.window) == (name, "bfloat16", 32)
    assert record.skipped_chunks == 0 and math.isfinite(record.perplexity)
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {torch.float32}
    assert load_memory_config(tmp_path)["base_model_name_or_path"] == name
    # Its positions, not the embedded model's window.
    assert complete(ReadSettings(r=2), host).window == 64


def test_a_local_base_is_not_named_as_one_of_the_hub(tmp_path):
    for model in (str(tmp_path), "x.gguf", backbone.NAME):
        read(small(r=2, model=model), out=tmp_path / "m", overwrite=True)
        assert ModelCard.load(tmp_path / "m" / "README.md").data.base_model is None


def test_the_method_none_has_nothing_to_save(tmp_path):
    record = read(small("none"), **place_in(tmp_path / "memory"))
    assert record.memory_dir is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_foreign_files_are_never_replaced(tmp_path, name):
    if name == RECORD:
        (tmp_path / name).symlink_to(tmp_path / "missing")
    elif name == WEIGHTS:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("mine")
    message = f"^--out .* holds a file {name} that no reading wrote: .* or move that file$"
    for overwrite in (False, True):
        place = {"out": tmp_path, "overwrite": overwrite}
        with pytest.raises(ValueError, match=message):
            read(small(), on_step=pytest.fail, **place)
    assert os.listdir(tmp_path) == [name]


def test_a_memory_is_not_written_beside_a_model(tmp_path):
    base, tokenizer = load()
    base.save_pretrained(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="^--out .* holds a model, by its config.json: choose "):
        read(small(), out=tmp_path, overwrite=True, on_step=pytest.fail)
    with pytest.raises(ValueError, match="^--out .* holds a model, by its config.json: choose "):
        place = Place(out=tmp_path)
        stages.study(base, tokenizer, load_ids(), study_settings(), place, exchanges=GIVEN)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_folder_that_was_filled_meanwhile_is_refused_under_the_lock(tmp_path, monkeypatch):
    """Another process may finish a memory after the command line has looked."""
    place, locked = place_in(tmp_path), []
    check_vacant(tmp_path)
    read(small(r=4), out=tmp_path)

    def check(directory, **options):
        with pytest.raises(checkpoint.InUse), checkpoint.locked(place["checkpoint_dir"]):
            pass
        locked.append(directory)
        check_vacant(directory, **options)

    monkeypatch.setattr(running, "check_vacant", check)
    message = "^--out .* holds a memory: choose another folder, or give --overwrite$"
    with pytest.raises(ValueError, match=message):
        read(small(r=8), **place, on_step=pytest.fail)
    assert locked == [tmp_path] and CHECKPOINT_FOLDER not in os.listdir(tmp_path)
    assert load_memory_config(tmp_path)["r"] == 4


def test_a_finished_reading_is_taken(input_ids, tmp_path):
    folder, given = tmp_path / "memory", {"r": 4, "layers_to_transform": [4, 5]}
    record = read(small(**given), out=folder, resume=True)
    # Of a process that was killed after it had finished.
    (folder / CHECKPOINT_FOLDER).mkdir()
    (folder / CHECKPOINT_FOLDER / checkpoint.LOCK).touch()
    assert take_finished(small(**given), folder) == record
    assert not (folder / CHECKPOINT_FOLDER).exists()
    for changed, message in (
        ({"r": 5}, "r must be 4 as in the memory in .*, got 5"),
        ({"layers_to_transform": "upper"}, r".* must be \[4, 5\] as in the memory .*, got 'upper'"),
        ({"method": "lora"}, "method must be 'locas-glu' as in the memory in .*, got 'lora'"),
    ):
        message = f"^{message}: choose another folder, or give --overwrite$"
        with pytest.raises(ValueError, match=message):
            take_finished(small(**{**given, **changed}), folder)
    with pytest.raises(ValueError, match="^--out .* holds the memory of another text: choose"):
        take_finished(small(**given), folder, input_ids[:65])
    (folder / RECORD).unlink()
    with pytest.raises(ValueError, match="^--out .* holds a memory that no reading here made: ch"):
        take_finished(small(**given), folder)


# The third move puts the whole new folder beside the old files; test_files.py has each move.
@pytest.mark.parametrize("move", [3, 4, 12])
def test_a_stopped_replacement_is_finished_before_the_folder_is_judged(tmp_path, move):
    """Killed between two moves, a folder must not hold new weights that pass for the old memory."""
    moves, replace, folder = [], os.replace, tmp_path / "memory"
    read(small(r=4), out=folder)

    def stop(*paths):
        moves.append(paths)
        if len(moves) == move:
            raise KeyboardInterrupt
        replace(*paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            read(small(r=8), out=folder, overwrite=True)
    shutil.copytree(folder, tmp_path / "copy")
    width = 8 if move > 3 else 4
    assert take_finished(small(r=width), folder).settings.r == width
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
    method, given, number, long_ids, tmp_path, monkeypatch
):
    settings, folder = small(method, r=8, **given), tmp_path / "parts"
    whole = read(settings, long_ids, out=tmp_path / "whole")
    place = place_in(folder)
    # Between two checkpoints that the time asks for.
    interrupted(settings, long_ids, at=4, number=number, checkpoint_seconds=1e9, **place)
    assert os.listdir(folder) == [CHECKPOINT_FOLDER]
    earlier = checkpoint.load(folder / CHECKPOINT_FOLDER)["chunks"]
    message = "^--out .* holds an unfinished reading or study: go on with --resume, or give --over"
    with pytest.raises(ValueError, match=message):
        read(settings, long_ids, **place)
    torch.manual_seed(12345)
    monkeypatch.setattr("locas_peft.model.base_weights._KNOWN", {})  # as in another process
    seen = []
    parts = read(settings, long_ids, **place, resume=True, on_step=seen.append)
    assert [chunk.index for chunk in seen] == [*range(8)] * (number + 1)
    # With their times: they are shown, and not read again.
    assert [dataclasses.asdict(chunk) for chunk in seen[: 8 * number + 5]] == earlier
    assert parts.nll_nats == whole.nll_nats and parts.curve == whole.curve
    assert parts.perplexities == whole.perplexities
    assert (folder / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    assert not (folder / CHECKPOINT_FOLDER).exists()


def raise_full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_a_checkpoint_does_not_end_the_reading(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "save", raise_full_disk)
    read(small(), **place_in(tmp_path / "m"), checkpoint_seconds=0)
    message = "no checkpoint can be saved (No space left on device); the stage goes on"
    assert caplog.messages == [message]
    assert sorted(os.listdir(tmp_path / "m")) == FILES


def test_overwrite_starts_afresh(tmp_path):
    place, seen = place_in(tmp_path), []
    interrupted(small(r=4), at=2, **place)
    read(small(r=8), **place, overwrite=True, on_step=seen.append)
    assert [chunk.index for chunk in seen] == [0, 1, 2, 3]
    assert CHECKPOINT_FOLDER not in os.listdir(tmp_path)


def test_an_unfinished_replacement_of_a_memory_goes_on(tmp_path):
    place = place_in(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    read(small(r=4), **place)
    interrupted(small(r=8), at=2, **place, overwrite=True)
    assert load_memory_config(tmp_path)["r"] == 4
    record = read(small(r=8), **place, resume=True)
    assert take_finished(small(r=8), tmp_path) == record
    assert {*os.listdir(tmp_path)} == {*FILES, "notes.txt"}


def test_another_stage_setting_or_text_does_not_resume(base, tokenizer, input_ids, tmp_path):
    interrupted(small(), at=0, checkpoint_dir=tmp_path)
    before = (tmp_path / checkpoint.CHECKPOINT).read_bytes()
    place = Place(checkpoint_dir=tmp_path, resume=True)

    def study():
        stages.study(base, tokenizer, input_ids, study_settings(), place, exchanges=GIVEN)

    where = f"the checkpoint in {str(tmp_path)!r}"
    for resume, message in (
        (
            lambda: stages.read(base, input_ids, small("lora"), place),
            f"method must be 'locas-glu' as in {where}, got 'lora': give the former ",
        ),
        (
            lambda: stages.read(base, input_ids.flip(0), small(), place),
            f"the text must be the one begun in {where} (sha256 ",
        ),
        (study, f"{where} must be of the stage 'study', got one of the stage 'read': "),
    ):
        with pytest.raises(ValueError) as raised:
            resume()
        assert str(raised.value).startswith(message)
        assert (tmp_path / checkpoint.CHECKPOINT).read_bytes() == before


def test_the_checkpoint_stays_until_the_memory_is_saved(tmp_path, monkeypatch):
    place = {**place_in(tmp_path), "checkpoint_seconds": 0}
    with monkeypatch.context() as patch:
        patch.setattr("locas_peft.memories.folder.staged", raise_full_disk)
        with pytest.raises(OSError, match="No space left"):
            read(small(), **place)
    assert len(checkpoint.load(tmp_path / CHECKPOINT_FOLDER)["chunks"]) == 4
    read(small(), **place, resume=True)
    assert sorted(os.listdir(tmp_path)) == FILES


def test_a_reading_has_its_folder_alone_from_the_first_chunk_on(tmp_path):
    place, refusals = {"checkpoint_dir": tmp_path / "memory" / "checkpoint"}, []

    def intrude(chunk):
        with pytest.raises(checkpoint.InUse) as refusal:
            read(small(), **place, on_step=pytest.fail)
        refusals.append(refusal)

    read(small(), **place, on_step=intrude)
    assert len(refusals) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [torch.tensor([5]), torch.ones(1, 8).long()], ids=["one", "batch"])
def test_a_text_of_another_shape_is_refused(ids):
    message = r"^input_ids must be of shape \[T\] with T >= 2, got \[.*\]: give more text$"
    with pytest.raises(ValueError, match=message):
        read(small("none"), ids)


# Studies

GIVEN = [
    Exchange(f"Who built house {number}?", f"{name} built house {number} on the hill.")
    for number, name in enumerate(["Ann", "Bob", "Cid", "Dan", "Eva", "Fay", "Gus", "Hal"])
]
"""Of so many passages that a fresh memory gets rows that tell them apart."""


def study_settings(**given) -> StudySettings:
    defaults = {"r": 16, "window": 256, "passes": 2, "anchor": 0.0, "exchanges": 2}
    return complete(StudySettings(**{**defaults, **given}))


@pytest.mark.parametrize(("passages", "norm"), [(2, 1.0), (8, None), (3, 1.0)])
def test_a_study_without_discriminants_keeps_the_norm_clip(
    passages, norm, base, tokenizer, input_ids, tmp_path
):
    # Of 16 slots 3 to 8 passages have rows that tell them apart, of 4 slots none of 3.
    settings = study_settings(r=4 if passages == 3 else 16)
    exchanges = GIVEN[:passages]
    stages.study(base, tokenizer, input_ids, settings, Place(out=tmp_path), exchanges=exchanges)
    assert load_memory_config(tmp_path)["max_slot_norm"] == norm
    weights = load_file(tmp_path / WEIGHTS)
    longest = max(weights[key].norm(dim=0).max() for key in weights if "locas_down" in key)
    assert longest <= 1.001 or norm is None


def test_a_study_keeps_what_was_read(base, tokenizer, long_ids, tmp_path):
    read(small(r=16), long_ids, out=tmp_path / "read")
    before = load_file(tmp_path / "read" / WEIGHTS)
    learned = {name: value for name, value in before.items() if name.endswith(".weight")}
    scales = before.keys() - learned.keys()
    assert len(learned) == 6 * 3 and scales
    options = {"start": tmp_path / "read", "exchanges": GIVEN}
    place = Place(out=tmp_path / "both")
    opened = open_study(base, tokenizer, long_ids, study_settings(), place, **options)
    with opened as run:

        def list_trained() -> dict[str, torch.Tensor]:
            return {
                name.replace(".default", ""): weight.detach().clone()
                for name, weight in run.stage._model.named_parameters()
                if weight.requires_grad
            }

        assert_same(list_trained(), learned)
        steps = iter(run)
        next(steps)
        # One step of a small rate: nothing was replaced, zeroed or frozen.
        for name, weight in list_trained().items():
            moved = (weight - learned[name]).norm()
            assert 0 < moved < 0.5 * learned[name].norm(), name
        for _ in steps:
            pass
        record = run.finish()
    after = load_file(tmp_path / "both" / WEIGHTS)
    assert all(torch.equal(after[name], before[name]) for name in scales)
    assert load_memory_config(tmp_path / "both")["max_slot_norm"] == 1.0

    first, second = load_records(tmp_path / "both")
    assert isinstance(first, ReadRecord) and isinstance(second, StudyRecord) and second == record
    assert record.seconds == record.writing_seconds + record.learning_seconds
    assert record.learning_seconds > 0 and not record.stopped
    assert load_exchanges(tmp_path / "both" / EXCHANGES) == GIVEN
    found = score_with_and_without(base, tmp_path / "both", long_ids, first.settings)
    assert found[0] < 0.9 * found[1], "what was read is known after the study"


def test_a_reading_keeps_the_exchanges_of_a_memory_that_has_studied(
    base, tokenizer, input_ids, tmp_path
):
    studied, new = tmp_path / "studied", tmp_path / "new"
    settings = study_settings(r=4)
    stages.study(base, tokenizer, input_ids, settings, Place(out=studied), exchanges=GIVEN[:2])
    for out in (studied, new):
        read(small(r=4), out=out, start=studied)
        assert load_exchanges(out / EXCHANGES) == GIVEN[:2]
    assert [record.kind for record in load_records(new)] == ["study", "read", "read"]
    card = (new / "README.md").read_text()
    assert "trained by studying and reading one text" in card
    assert "| study | 2 exchanges in " in card and "| tokens | 200 |" in card


def test_a_memory_that_goes_on_in_place_keeps_its_text(input_ids, tmp_path):
    texts = {"text.txt": "The lamp.", "sample.txt": "lamp"}
    longer = {**texts, "text.txt": "The lamp. The bread."}
    given = {"kept_text": "The lamp.", "sample": "lamp"}
    for place, expected in (
        (given, texts),
        ({"start": tmp_path}, texts),
        ({"start": tmp_path / "." / ".." / tmp_path.name, "overwrite": True}, texts),
        ({"start": tmp_path, "kept_text": longer["text.txt"]}, longer),
        ({"start": tmp_path, "kept_text": "", "sample": ""}, {}),
        ({"start": tmp_path, **given}, texts),
        # A new memory in the place of another.
        ({"overwrite": True}, {}),
    ):
        read(small(r=4), input_ids[:65], out=tmp_path, **place)
        names = [name for name in texts if (tmp_path / name).exists()]
        assert {name: (tmp_path / name).read_text() for name in names} == expected


def test_a_finished_reading_in_place_is_not_done_again_where_it_is_resumed(tmp_path):
    place = {"out": tmp_path, "start": tmp_path, "resume": True}
    read(small(r=4), out=tmp_path)
    read(small(r=4), **place)
    before = (tmp_path / WEIGHTS).read_bytes()
    read(small(r=4), **place)
    assert len(load_records(tmp_path)) == 2
    assert (tmp_path / WEIGHTS).read_bytes() == before


def test_a_reading_in_place_that_was_killed_after_its_memory_was_saved_is_finished(
    tmp_path, monkeypatch
):
    read(small(r=4), out=tmp_path)
    place = {**place_in(tmp_path), "start": tmp_path}
    with monkeypatch.context() as patched:
        patched.setattr(running.StageRun, "drop_checkpoint", lambda run: None)
        read(small(r=4), **place, checkpoint_seconds=0)
    assert checkpoint.has_checkpoint(tmp_path / CHECKPOINT_FOLDER)
    before = (tmp_path / WEIGHTS).read_bytes()
    # No step is taken, or shown again: the memory is not its own start.
    record = read(small(r=4), **place, resume=True, on_step=pytest.fail)
    assert load_records(tmp_path)[1:] == [record]
    assert (tmp_path / WEIGHTS).read_bytes() == before
    assert not (tmp_path / CHECKPOINT_FOLDER).exists()


def test_another_text_is_learned_after_such_a_kill(input_ids, tmp_path, monkeypatch):
    read(small(r=4), out=tmp_path)
    place = {**place_in(tmp_path), "start": tmp_path}
    with monkeypatch.context() as patched:
        patched.setattr(running.StageRun, "drop_checkpoint", lambda run: None)
        read(small(r=4), **place, checkpoint_seconds=0)
    record = read(small(r=4), input_ids[:150], **place, resume=True)
    records = load_records(tmp_path)
    assert len(records) == 3 and records[-1] == record
    assert record.text_sha256 == text.digest_ids(input_ids[:150])


def test_a_finished_memory_loses_its_text_where_none_is_to_be_kept(tmp_path):
    texts = {"sample": "lamp", "kept_text": "The lamp."}
    read(small(r=4), out=tmp_path, **texts)
    read(small(r=4), out=tmp_path, resume=True, on_step=pytest.fail)
    assert (tmp_path / "text.txt").exists() and (tmp_path / "sample.txt").exists()
    read(small(r=4), out=tmp_path, resume=True, on_step=pytest.fail, **dict.fromkeys(texts, ""))
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)


def test_patterns_of_a_file_are_not_matched_where_its_memory_is_studied_further(
    base, tokenizer, input_ids, tmp_path
):
    read(small(r=4), out=tmp_path / "read")
    path = tmp_path / "read" / "adapter_config.json"
    config = json.loads(path.read_text())
    place = functools.partial(Place, out=tmp_path / "both", overwrite=True)
    options = {"start": tmp_path / "read", "exchanges": GIVEN}
    settings = study_settings(r=4, passes=1, anchor=0.1)
    learned = []
    for pattern in (config["target_modules"], "(([a-z0-9._]+)+)+!"):
        path.write_text(json.dumps({**config, "target_modules": pattern}))
        began = time.process_time()
        stages.study(base, tokenizer, input_ids, settings, place(), **options)
        learned.append(load_file(tmp_path / "both" / WEIGHTS))
    assert time.process_time() - began < 60
    assert_same(*learned)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"curve": []}, "record.json must be one that this version wrote .its curve is empty.: "),
        ({"curve": [[1]]}, "record.json must be one that this version wrote "),
        ({"model": 5}, "model must be a string, got 5: give its name"),
    ],
)
def test_a_record_that_no_stage_wrote_is_refused(changed, message, tmp_path):
    read(small(r=4), out=tmp_path)
    content = json.loads((tmp_path / RECORD).read_text())
    content["stages"][0].update(changed)
    (tmp_path / RECORD).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^{message}"):
        load_records(tmp_path)


def test_the_file_of_a_record_does_not_say_where_the_memory_was_made(tmp_path):
    record = read(small(r=4), out=tmp_path / "one")
    assert record.memory_dir == str(tmp_path / "one")
    assert str(tmp_path) not in (tmp_path / "one" / RECORD).read_text()
    (tmp_path / "one").rename(tmp_path / "two")
    (loaded,) = load_records(tmp_path / "two")
    assert loaded.memory_dir == str(tmp_path / "two")


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode on Windows")
def test_a_folder_whose_name_is_not_unicode_is_refused_before_the_reading(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/m\xe9")
    with pytest.raises(ValueError, match=r"^--out must be valid UTF-8, got '.*m.udce9': rename "):
        check_output_directory("--out", folder)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_reading_without_a_scored_token_cannot_be_finished(base, input_ids, tmp_path, steps):
    settings = small(r=4, stride=1)
    with open_reading(base, input_ids, settings, Place(out=tmp_path / "m")) as run:
        for _ in zip(range(steps), run, strict=False):
            pass
        with pytest.raises(ValueError, match=r"^nothing was read yet: take a step, .*$"):
            run.finish()
    assert not (tmp_path / "m").exists()
