import copy
import enum
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import peft
import pytest
from peft import PeftType
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)

import locas_peft
from locas_peft import registration
from locas_peft.registration import NEWEST_TESTED, add_member, register


class Colour(str, enum.Enum):
    RED = "RED"


def test_added_member_is_a_member():
    member = add_member(Colour, "BLUE")
    assert Colour.BLUE is Colour("BLUE") is Colour["BLUE"] is member
    assert list(Colour) == ["RED", "BLUE"]
    assert member == member.value == member.name == "BLUE" and hash(member) == hash("BLUE")
    assert repr(member) == "<Colour.BLUE: 'BLUE'>"
    assert str(member) == str(Colour.RED).replace("RED", "BLUE")
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member
    assert add_member(Colour, "BLUE") is member and len(Colour) == 2
    with pytest.raises(ValueError):
        Colour("GREEN")


def test_locas_is_registered():
    assert PeftType.LOCAS in list(PeftType)
    assert PEFT_TYPE_TO_CONFIG_MAPPING["LOCAS"] is locas_peft.LocasConfig
    assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LOCAS] is locas_peft.LocasModel
    assert PEFT_TYPE_TO_PREFIX_MAPPING[PeftType.LOCAS] == "locas_"
    assert locas_peft.LocasConfig().peft_type is PeftType.LOCAS


def test_second_registration_changes_nothing():
    before = list(PeftType)
    assert register() is PeftType.LOCAS
    importlib.reload(locas_peft)
    assert list(PeftType) == before


def test_import_registers_and_does_nothing_else():
    script = (
        "import torch, peft, transformers, logging, random\n"
        "from torch.optim.optimizer import _global_optimizer_post_hooks as step_hooks\n"
        "state = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), logging.root.handlers[:]\n"
        "hooks = len(step_hooks)\n"
        "import locas_peft\n"
        "assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()\n"
        "assert state[2:] == (torch.get_default_dtype(), logging.root.handlers[:])\n"
        "assert hooks == len(step_hooks)\n"
        "import sys; assert 'matplotlib' not in sys.modules and 'typer' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True
    )
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


@pytest.mark.parametrize("version", ["1.0.0.dev0", "0.22.0rc1"])
def test_a_newer_peft_is_used_with_one_line(version, monkeypatch):
    monkeypatch.setattr(peft, "__version__", version)
    message = rf"^locas_peft works with PEFT {NEWEST_TESTED}, got {version} \(.*newer locas_peft$"
    with pytest.warns(UserWarning, match=message) as found:
        registration._check_peft()
    assert len(found) == 1


def test_a_tested_peft_is_used_without_a_word(monkeypatch):
    monkeypatch.setattr(peft, "__version__", f"{NEWEST_TESTED}.99")
    # Warnings are errors.
    registration._check_peft()


@pytest.mark.parametrize(
    ("name", "other", "reason"),
    [
        ("PeftType", enum.Enum("PeftType", "LORA"), "PeftType is no str enum"),
        (
            "register_peft_method",
            lambda name, classes: None,
            "register_peft_method has no config_cls",
        ),
    ],
)
def test_a_peft_of_another_form_is_refused(name, other, reason, monkeypatch):
    monkeypatch.setattr(registration, name, other)
    with pytest.raises(ImportError, match=f"^locas_peft works with PEFT.*{reason}.*newer locas"):
        registration._check_peft()


@pytest.mark.slow
def test_a_peft_without_a_part_is_refused_and_nothing_is_written():
    members = "assert 'LOCAS' not in getattr(peft.PeftType, '__members__', {})"
    attempt = f"try:\n    import locas_peft\nexcept ImportError:\n    {members}\n    raise"
    script = f"import peft\nimport peft.tuners.tuners_utils as u; del u.BaseTuner\n{attempt}"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = process.stderr.splitlines()[-1]
    assert process.returncode == 1 and last.startswith("ImportError: locas_peft works with PEFT")
    assert "cannot import name 'BaseTuner'" in last


def test_the_newest_tested_peft_is_that_of_the_constraints():
    constraints = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8")
    assert f"\npeft=={NEWEST_TESTED}." in constraints


def test_version_is_the_package_s():
    from importlib.metadata import version

    assert locas_peft.__version__ == version("locas_peft")
    assert tuple(map(int, peft.__version__.split(".")[:2])) >= (0, 21)
