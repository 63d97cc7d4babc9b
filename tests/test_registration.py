import copy
import enum
import importlib
import pickle
import subprocess
import sys

import peft
import pytest
from peft import PeftType
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)

import locas_peft
from locas_peft.registration import add_member, register


class Colour(str, enum.Enum):
    RED = "RED"


def test_added_member_is_a_member():
    member = add_member(Colour, "BLUE")
    assert Colour.BLUE is Colour("BLUE") is Colour["BLUE"] is member
    assert list(Colour) == ["RED", "BLUE"]
    assert (
        member == "BLUE" and hash(member) == hash("BLUE") and member.value == member.name == "BLUE"
    )
    assert repr(member) == "<Colour.BLUE: 'BLUE'>" and str(member) == str(Colour.RED).replace(
        "RED", "BLUE"
    )
    assert pickle.loads(pickle.dumps(member)) is member and copy.deepcopy(member) is member
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


def test_version_is_the_package_s():
    from importlib.metadata import version

    assert locas_peft.__version__ == version("locas_peft")
    assert tuple(map(int, peft.__version__.split(".")[:2])) >= (0, 21)
