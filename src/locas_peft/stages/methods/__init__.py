"""The methods that can read a text, in the same loop. A new one is a file and a row here."""

from .locas_glu import LocasGlu
from .locas_mlp import LocasMlp
from .lora import Lora
from .memory import choose_memory
from .method import Method
from .none import NoAdapter

__all__ = ["METHODS", "Method", "choose_memory"]

METHODS: dict[str, Method] = {
    method.name: method for method in (NoAdapter(), Lora(), LocasGlu(), LocasMlp())
}
