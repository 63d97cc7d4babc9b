"""Register LOCAS with PEFT. This is the only module that writes to PEFT's registries.

PEFT lists its methods in a closed `str` enum, whose members status reports, hot-swapping and mixed
models format: a plain string does not do.
"""

from enum import Enum

from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method

from .tuner import LocasConfig, LocasModel

NAME = "LOCAS"


def register() -> PeftType:
    """Register LOCAS with PEFT: type, config, tuner and prefix. A second call changes nothing."""
    member = add_member(PeftType, NAME)
    if member not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=NAME.lower(), config_cls=LocasConfig, model_cls=LocasModel)
    return member


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
