"""Register LOCAS with PEFT. This is the only module that writes to PEFT's registries.

PEFT lists its methods in a closed `str` enum, whose members status reports, hot-swapping and mixed
models format: a plain string does not do.
"""

import inspect
import warnings
from enum import Enum

import peft
from packaging.version import Version

NAME = "LOCAS"
NEWEST_TESTED = "0.21"
"""The newest minor version of PEFT that the tests ran with. A newer one is used with a warning.

The package sets no upper bound for PEFT: pip would install an older PEFT without a warning.
"""


def _explain(what: str) -> str:
    rule = f"locas_peft works with PEFT {NEWEST_TESTED}, got {peft.__version__}"
    return f"{rule} ({what}): pip install 'peft=={NEWEST_TESTED}.*', or a newer locas_peft"


# This module is imported before all others that need PEFT.
try:
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import register_peft_method

    from .tuner import LocasConfig, LocasModel
except ImportError as error:
    if (error.name or "").partition(".")[0] != "peft":
        raise
    raise ImportError(_explain(str(error)), name=error.name) from error


def register() -> PeftType:
    """Register LOCAS with PEFT: type, config, tuner and prefix. A second call changes nothing.

    Raises:
        ImportError: PEFT's registries have another form; nothing is written to them.
    """
    if NAME in PeftType.__members__ and NAME in PEFT_TYPE_TO_CONFIG_MAPPING:
        return PeftType[NAME]
    _check_peft()
    member = add_member(PeftType, NAME)
    register_peft_method(name=NAME.lower(), config_cls=LocasConfig, model_cls=LocasModel)
    return member


def _check_peft() -> None:
    """Raise an `ImportError` where PEFT has other registries; warn where it is newer."""
    if not (issubclass(PeftType, str) and issubclass(PeftType, Enum)):
        raise ImportError(_explain("PeftType is no str enum"), name="peft")
    parameters = inspect.signature(register_peft_method).parameters
    missing = {"name", "config_cls", "model_cls"} - parameters.keys()
    if missing:
        what = f"register_peft_method has no {min(missing)}"
        raise ImportError(_explain(what), name="peft")
    if Version(peft.__version__).release[:2] > Version(NEWEST_TESTED).release:
        warnings.warn(_explain("it is newer than the tests"), stacklevel=3)


def add_member(enum: type[Enum], name: str) -> Enum:
    """Add a member whose value is its name to a `str` enum, or return the existing one.

    It works with Python 3.10 to 3.13.
    """
    if name in enum.__members__:
        return enum[name]
    member = str.__new__(enum, name)
    member._name_ = name
    member._value_ = name
    member.__objclass__ = enum
    member._sort_order_ = len(enum.__members__)
    # Python 3.12 looks members up as class attributes. The metaclass refuses this once the name is
    # in the map.
    setattr(enum, name, member)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[name] = member
    if hasattr(enum, "_hashable_values_"):  # Python 3.13 uses it for `value in enum`
        enum._hashable_values_.append(name)
    return member
