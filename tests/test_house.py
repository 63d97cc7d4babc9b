"""The house: imports run one way, and the tuner imports nothing from outside its folder.

The settings lie in a package of their own, below everything: the command line reads them before it
imports torch.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "locas_peft"
SETTINGS = ROOT / "src" / "locas_settings"
# A room may import the rooms below it, and the rooms on its own floor that stand to the right of it.
FLOORS = [
    ["app", "demo"],
    ["evaluation"],
    ["library"],
    ["stages"],
    ["progress"],
    ["memories", "selfstudy"],
    ["exchanges"],
    ["slots"],
    ["ttt"],
    ["asking"],
    ["model"],
    ["bases"],
    ["tables"],
    ["text", "files", "backbone", "registration", "processes"],
    ["checks"],
    ["tuner"],
    ["locas_settings"],
]


def imports_of(path: Path) -> set[str]:
    """The package's own rooms that a file imports: 'tuner', 'ttt', ..., and 'locas_settings'."""
    package = ["locas_peft", *path.relative_to(PACKAGE).parts[:-1]]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            full = (package[: len(package) - node.level + 1] + module) if node.level else module
            names = [full + [alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        rooms |= {
            name[1]
            for name in names
            if name[0] == "locas_peft" and len(name) > 1 and name[1] != "__version__"
        }
        rooms |= {name[0] for name in names if name[0] == SETTINGS.name}
    return rooms


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = [room for floor in FLOORS for room in floor]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    assert room in ROOMS, f"{room} is a new room: give it a floor"
    for imported in imports_of(path) - {room}:
        assert imported in ROOMS, f"{path} imports {imported}, which is not a room"
        assert ROOMS.index(imported) > ROOMS.index(room), (
            f"{room} imports {imported}, which stands above it"
        )


def packages_of(path: Path) -> set[str]:
    """The packages outside of this one that a file imports, without those of Python itself."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            packages.add(node.module.partition(".")[0])
    return packages - sys.stdlib_module_names


TUNER = sorted((PACKAGE / "tuner").rglob("*.py"))


@pytest.mark.parametrize("path", TUNER, ids=lambda path: path.name)
def test_the_tuner_could_be_moved_whole(path):
    assert imports_of(path) <= {"tuner"}
    # What PEFT itself needs.
    assert packages_of(path) <= {"accelerate", "peft", "safetensors", "torch", "transformers"}
    assert "`locas " not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(SETTINGS.rglob("*.py")), ids=lambda path: path.name)
def test_the_settings_are_below_everything(path):
    # Neither torch nor locas_peft, whose imports take seconds.
    assert packages_of(path) <= {"cyclopts"}
