"""Placement: Accelerate's device and precision, a base split over CPU and disk, quantised bases."""

import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from transformers import Qwen3Config, Qwen3ForCausalLM

from locas_peft import backbone
from locas_peft.asking import Answerer, Question
from locas_peft.bases import choose_device, load_base, placing
from locas_peft.memories import memory_attached
from locas_peft.model import CausalLM
from locas_peft.selfstudy import Exchange
from locas_peft.stages import Place, ReadSettings, StudySettings, read, score, study


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny base with the embedded tokenizer, saved."""
    path = tmp_path_factory.mktemp("base")
    tokenizer = backbone.load()[1]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=1024,
        num_hidden_layers=6,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def split(folder, monkeypatch):
    """Load the base where the CPU's memory has room for a part of it."""
    sizes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr(placing, "get_max_memory", lambda: {"cpu": int(0.95 * sizes)})
    base, _ = load_base(str(folder))
    assert is_split(base)
    return base


def is_split(base) -> bool:
    return set(map(str, base.hf_device_map.values())) == {"cpu", "disk"}


def test_accelerate_chooses_device_and_dtype():
    assert choose_device("auto") == PartialState().device
    for precision, expected in (("no", torch.float32), ("bf16", torch.bfloat16)):
        AcceleratorState._reset_state(reset_partial_state=True)
        Accelerator(mixed_precision=precision, cpu=True)
        assert load_base()[0].dtype == expected
        assert load_base(dtype="float16")[0].dtype == torch.float16


def test_a_gpu_without_float64_is_not_used(monkeypatch):
    apple = types.SimpleNamespace(device=torch.device("mps"))
    monkeypatch.setattr(placing, "join_processes", lambda: apple)
    assert choose_device("auto") == torch.device("cpu")
    # As where torch can use one.
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match="^device must have float64, got mps: give cpu$"):
        choose_device("mps")


def test_a_base_that_fits_is_on_one_device(folder):
    base, _ = load_base(str(folder))
    assert {parameter.device.type for parameter in base.parameters()} == {"cpu"}


def test_a_split_base_reads_saves_loads_and_answers_as_a_whole_one(folder, tmp_path, monkeypatch):
    ids = torch.randint(5, 500, (96,), generator=torch.Generator().manual_seed(0))
    settings = ReadSettings(r=4, window=32, stride=16, anchor=0.0)
    readings, scores = {}, {}
    whole, _ = load_base(str(folder))
    for name, base in (("whole", whole), ("split", split(folder, monkeypatch))):
        readings[name] = read(base, ids, settings, Place(out=tmp_path / name))
        with memory_attached(base, tmp_path / name) as model:
            scores[name] = score(model, ids, readings[name].settings)
        assert base(ids[None, :8]).logits.isfinite().all()
    assert is_split(base)
    assert readings["split"].nll_nats == pytest.approx(readings["whole"].nll_nats, abs=1e-3)
    assert scores["split"] == pytest.approx(scores["whole"], rel=1e-4)


def test_no_indices_are_given_to_a_base_on_several_devices(folder, monkeypatch):
    # An index on the device of the embeddings cannot select hidden states on that of the last layer.
    base, given = load_base(str(folder))[0], []
    monkeypatch.setattr(
        type(base),
        "forward",
        lambda self, input_ids, logits_to_keep=0: given.append(logits_to_keep),
    )
    for devices, kind in (({"": 0}, torch.Tensor), ({"model": 0, "lm_head": 1}, int)):
        base.hf_device_map = devices
        CausalLM(base).outputs(torch.zeros(1, 3, dtype=torch.long), 1)
        CausalLM(base).outputs(torch.zeros(2, 3, dtype=torch.long), 2)
        assert [type(each) for each in given[-2:]] == [kind] * 2


def test_a_split_base_studies_and_is_asked(folder, monkeypatch):
    base, tokenizer = split(folder, monkeypatch), backbone.load()[1]
    settings = StudySettings(r=4, window=32, anchor=0.0, passes=1)
    exchange = Exchange("Who keeps the light?", "Jonas Hale keeps the light.")
    record = study(base, tokenizer, torch.arange(5, 69), settings, exchanges=[exchange])
    assert record.steps > 0 and record.skipped_steps == 0
    answerer = Answerer(base, tokenizer, max_new_tokens=4)
    assert len(answerer.answer([Question(exchange.question)])) == 1


@pytest.mark.parametrize(
    ("name", "quantize", "package", "message"),
    [
        (backbone.NAME, "nf4", "installed", "^quantize is for a folder or a name .*, got 'nf4' "),
        ("folder", "int3", "installed", "^quantize must be one of nf4, int8, got 'int3': choose"),
        ("folder", "nf4", None, "^quantize must have .* without bitsandbytes: pip install"),
    ],
)
def test_refused_quantisations(name, quantize, package, message, monkeypatch):
    monkeypatch.setattr(placing.importlib.util, "find_spec", lambda _: package)
    with pytest.raises(ValueError, match=message):
        load_base(name, quantize=quantize)
