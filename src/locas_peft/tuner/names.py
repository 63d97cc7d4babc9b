"""Which names an adapter with a memory can have."""

from torch import nn

from .config import LocasConfig
from .errors import invalid
from .modules import WRAPPED
from .scale import ScaleDict

# In a mixed batch it stands for a row without an adapter.
BASE_NAME = "__base__"
REMEDY = "choose another name"


def check_adapter_name(name: object, config: LocasConfig) -> None:
    """Raise a `ValueError` if the dictionaries of a layer cannot hold an adapter's name.

    The message is one line. Names like those of the model's modules are allowed.
    """
    if not isinstance(name, str) or not name:
        raise invalid("adapter_name", "be a string that is not empty", repr(name))
    if "." in name:
        raise invalid("adapter_name", "have no '.'", repr(name), REMEDY)
    if name == BASE_NAME:
        rule = "not be the name of the base in a mixed batch"
        raise invalid("adapter_name", rule, repr(name), REMEDY)
    if name in WRAPPED:
        rule = "not be the name of what a wrapper of torch wraps"
        raise invalid("adapter_name", rule, repr(name), REMEDY)
    dictionaries: list[nn.Module] = [nn.ModuleDict(), ScaleDict()]
    if config.trainable_token_indices:
        dictionaries.append(nn.ParameterDict())
    for dictionary in dictionaries:
        if hasattr(dictionary, name):
            rule = f"not be an attribute of {type(dictionary).__name__}"
            raise invalid("adapter_name", rule, repr(name), REMEDY)
