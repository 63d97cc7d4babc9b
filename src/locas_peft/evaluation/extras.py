"""Import of the packages that only some measures need."""

from importlib import import_module
from types import ModuleType

__all__ = ["import_extra"]


def import_extra(name: str) -> ModuleType:
    """Import a module of the extra 'eval' by its full name, such as "nltk.stem.porter".

    Raises:
        ValueError: its package is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ValueError(
            f"this measure needs {package}: install the extra with pip install 'locas_peft[eval]'"
        ) from None
