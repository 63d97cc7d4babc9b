"""What `locas inspect` marks beside other memories of the same base."""

import json
import shutil
import warnings

import pytest
import torch
from families import change_config, make_host, rewrite
from peft import get_peft_model

from locas_command import program
from locas_peft import LocasConfig, calibrate
from locas_peft.memories.loading import describe_memory, find_unusual

LAYER = "model.layers.1.mlp"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Seven memories of one base, one of another base, and a damaged one."""
    folder = tmp_path_factory.mktemp("library")
    for number in range(8):
        model = get_peft_model(make_host("llama" if number < 7 else "qwen3"), LocasConfig(r=3))
        calibrate(
            model, [torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(number))]
        )
        for name, parameter in model.named_parameters():
            if "locas_down" in name:
                parameter.data.normal_(
                    std=0.05 + 0.01 * number, generator=torch.Generator().manual_seed(number)
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder / str(number))
    shutil.copytree(folder / "0", folder / "damaged")
    (folder / "damaged" / "adapter_model.safetensors").write_bytes(b"x")
    return folder


@pytest.fixture
def library(made, tmp_path):
    return shutil.copytree(made, tmp_path / "library")


def names_of(folder, others=()):
    found = find_unusual(describe_memory(folder), others)
    assert found["others"] == 6
    return [each["quantity"] for each in found["unusual"]]


def test_honest_memories_have_no_marks(library):
    assert [names_of(library / str(number)) for number in range(7)] == [[]] * 7


def scale(part, factor, layer="layers.1.", slots=slice(None)):
    def change(tensors):
        for key in tensors:
            if part in key and layer in key:
                tensors[key].view(-1, max(tensors[key].shape[-1:] or [1]))[:, slots] *= factor

    return change


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        (scale("locas_down", 5), f"down in {LAYER} over that median"),
        (scale("locas_up", 5), f"up in {LAYER} over that median"),
        (scale("locas_tau", 5), f"tau in {LAYER} over that median"),
        (scale("locas_down", 30, "layers."), "down, median of the layers"),
        (scale("locas_down", 30, slots=0), f"down in {LAYER}, largest norm over the mean"),
    ],
)
def test_planted_values_are_marked(library, change, quantity):
    rewrite(library / "3", change)
    assert quantity in names_of(library / "3")
    assert names_of(library / "2") == [], "one planted memory does not move what is usual"


def test_a_foreign_scale_and_another_width_are_marked(library):
    change_config(library / "3", scaling=5.0)
    assert names_of(library / "3") == ["scaling"]
    found = describe_memory(library / "2")
    for layer in found["layers"]:
        layer["r"] = 64
    assert [each["quantity"] for each in find_unusual(found)["unusual"]] == [
        "r, median of the layers"
    ]


def test_the_command_prints_a_line_each_and_says_where_nothing_can_be_known(
    library, tmp_path, capsys
):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            program.main(["inspect", *map(str, arguments)])
        return ended.value.code, capsys.readouterr()

    rewrite(library / "3", scale("locas_down", 10))
    code, printed = run(library / "3", "--json", tmp_path / "i.json")
    (mark,) = json.loads((tmp_path / "i.json").read_text())["unusual"]
    assert code == 0 and mark["low"] < 1 < mark["high"] < mark["value"]
    assert f"unusual    down in {LAYER} over that median: " in printed.out
    assert "unusual    1, beside 6 other memories of this base\n" in printed.out
    alone = shutil.copytree(library / "3", tmp_path / "alone" / "3")
    line = "unusual    not known: 5 are needed, beside 0 other memories of this base\n"
    assert line in run(alone)[1].out
    assert "unusual    1, beside 7 other" in run(alone, "--others", library)[1].out
    code, printed = run(alone, "--others", tmp_path / "none")
    assert code == 2 and printed.err.startswith(
        "error: a library must be a folder of memories, got "
    )
