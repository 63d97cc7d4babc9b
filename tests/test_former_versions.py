"""Memories, records and configs that former versions wrote load, and say what they said."""

import copy
import functools
import json
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from families import logits, make_host, make_model
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file

from locas_peft import LocasConfig, backbone
from locas_peft.files import load_json
from locas_peft.memories import describe_memory, load_memory
from locas_peft.stages import ReadRecord, load_records
from locas_peft.tuner import find_ffns

FORMER = Path(__file__).parent / "fixtures" / "0.2.0"
MEMORIES = sorted(path.parent for path in FORMER.rglob("adapter_config.json"))
LOCAS = [folder for folder in MEMORIES if folder.name != "lora"]


def name_of(folder: Path) -> str:
    return str(folder.relative_to(FORMER))


def load_config(folder: Path) -> dict:
    return load_json(folder / "adapter_config.json")


@functools.cache
def load_base(name: str) -> torch.nn.Module:
    return backbone.load(name=name)[0]


def make_base(folder: Path) -> torch.nn.Module:
    return copy.deepcopy(load_base(load_config(folder)["base_model_name_or_path"]))


@contextmanager
def added(base: torch.nn.Module, folder: Path):
    """Add a memory to its base by the paper's formulas, from the tensors of its file alone."""
    tensors = load_file(folder / "adapter_model.safetensors")
    scaling = load_config(folder)["scaling"]
    with ExitStack() as stack:
        for name, ffn in find_ffns(base).items():
            prefix = f"base_model.model.{name}.locas_"
            own = {
                key.removeprefix(prefix).removesuffix(".weight"): tensor
                for key, tensor in tensors.items()
                if key.startswith(prefix)
            }

            def add(module, args, output, own=own, act=ffn.act):
                inputs = own["input_scale"] * args[0]
                slots = inputs @ own["up"].T
                if "gate" in own:
                    slots = act(inputs @ own["gate"].T) * slots
                else:
                    slots = act(slots)
                return output + scaling * own["tau"] * (slots @ own["down"].T)

            stack.enter_context(base.get_submodule(name).register_forward_hook(add))
        yield


@pytest.mark.parametrize("folder", LOCAS, ids=name_of)
@pytest.mark.parametrize("load", [load_memory, PeftModel.from_pretrained])
def test_a_memory_of_0_2_0_says_what_its_tensors_say(folder, load):
    base = make_base(folder)
    plain = logits(base)
    with added(base, folder):
        expected = logits(base)
    assert not torch.allclose(expected, plain, atol=1e-3)
    with ExitStack() as stack:
        if folder.name == "locas-mlp-ridge":
            # Maps that 0.2.0 wrote have rows beyond the clip. A memory that loads with a warning
            # must not change its function.
            remark = "the memory has rows that are longer than its max_slot_norm of 1: it is loaded"
            stack.enter_context(pytest.warns(UserWarning, match=f"^{remark}"))
        model = load(base, folder).eval()
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("folder", LOCAS, ids=name_of)
def test_the_config_of_0_2_0_is_translated(folder):
    former = load_config(folder)
    config = LocasConfig.from_pretrained(folder)
    assert config.strategy == former["init_strategy"]
    assert config.init_weights is True or config.init_weights == former["init_strategy"]
    for name in ("host", "slots", "saved_embeddings"):
        assert config.get_record(name) == former[name]
    for name in ("r", "scaling", "output_scale", "max_slot_norm", "seed"):
        assert getattr(config, name) == former[name]
    found = describe_memory(folder)
    assert (found["r"], found["init"]) == (former["r"], former["init_strategy"])
    assert found["learned"]
    slots = {layer["name"]: layer["slots"] for layer in found["layers"]}
    assert slots == (former["slots"] or dict.fromkeys(slots))


def test_another_adapter_of_0_2_0_loads():
    folder = FORMER / "lora"
    base = make_base(folder)
    plain = logits(base)
    assert describe_memory(folder)["r"] == load_config(folder)["r"]
    assert not torch.allclose(logits(load_memory(base, folder).eval()), plain, atol=1e-3)


@pytest.mark.parametrize("folder", MEMORIES, ids=name_of)
def test_the_record_of_a_reading_of_0_2_0_loads(folder):
    former = load_json(folder / "reading.json")
    (record,) = load_records(folder)
    assert isinstance(record, ReadRecord)
    assert (record.method, record.perplexity) == (former["method"], former["perplexity"])
    for name in ("r", "learning_rate", "window", "stride", "seed", "anchor"):
        assert getattr(record.settings, name) == former[name], name


@pytest.fixture
def write_former(tmp_path):
    """Return a function that saves a memory with a config as 0.2.0 would have written it."""

    def write(**fields) -> Path:
        make_model().save_pretrained(tmp_path)
        config = load_config(tmp_path)
        record = config.pop("record")
        config |= {"row_norm": 1.0, "init_strategy": "random", "init_weights": True}
        config |= {name: record.get(name) for name in ("host", "slots", "saved_embeddings")}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | fields))
        return tmp_path

    return write


# The fields of the config in the file, and those of the config that is loaded.
HAND_MADE = [
    ({"row_norm": 4.0, "max_slot_norm": None}, {"max_slot_norm": None, "strategy": "random"}),
    ({"init_strategy": "topk"}, {"init_weights": True, "strategy": "topk"}),
    ({"init_strategy": "write", "init_weights": False}, {"init_weights": False}),
    ({"gated_host_experiment": False, "variant": "auto"}, {"r": 4}),
    ({"saved_embeddings": None, "slots": None, "host": None}, {"r": 4}),
]


@pytest.mark.parametrize(("fields", "expected"), HAND_MADE, ids=lambda value: str(value)[:40])
def test_configs_of_former_versions_load(fields, expected, write_former):
    folder = write_former(**fields)
    config = LocasConfig.from_pretrained(folder)
    assert {name: getattr(config, name) for name in expected} == expected
    assert torch.equal(logits(load_memory(make_host("llama"), folder)), logits(make_model()))


def test_a_former_config_that_peft_itself_reads_loads_with_a_warning(write_former):
    # PEFT asks the base class to translate the fields, which knows none of ours.
    with pytest.warns(UserWarning, match="Unexpected keyword arguments"):
        config = PeftConfig.from_pretrained(write_former())
    assert (config.r, config.record) == (4, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_strategy": "best"}, "init_weights must be True, False or one of 'topk', "),
        ({"host": 5}, r"record\['host'\] must be a dictionary, got 5"),
    ],
)
def test_a_damaged_former_config_is_refused_in_one_line(fields, message, write_former):
    with pytest.raises(ValueError, match=message) as caught:
        load_memory(make_host("llama"), write_former(**fields))
    assert "\n" not in str(caught.value)
