"""The house: imports run one way, and nothing in the tuner knows what lies outside it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "locas_peft"
# A room may import the rooms after it, and those in front of the bar as well as its neighbours behind it.
FLOORS = [
    "cli",
    "studies",
    "report|methods",
    "loading",
    "ttt|evaluation",
    "checkpoint|text|files|backbone|registration",
    "tuner",
]


def imports_of(path: Path) -> set[str]:
    """The package's own rooms that a file imports: 'tuner', 'ttt', ..."""
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
        rooms |= {name[1] for name in names if name[0] == "locas_peft" and len(name) > 1}
    return rooms


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
LEVEL = {room: level for level, floor in enumerate(FLOORS) for room in floor.split("|")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    assert room in LEVEL, f"{room} is a new room: give it a floor"
    for imported in imports_of(path) & LEVEL.keys() - {room}:
        assert LEVEL[imported] >= LEVEL[room], f"{room} imports {imported}, which stands above it"


def test_the_tuner_could_be_moved_whole():
    for path in (PACKAGE / "tuner").rglob("*.py"):
        assert imports_of(path) <= {"tuner"}, path


def test_evaluation_knows_no_tuner():
    for path in (PACKAGE / "evaluation").rglob("*.py"):
        assert not imports_of(path) & {"tuner", "ttt", "registration"}, path
        assert "peft" not in {alias.name.split(".")[0] for node in ast.walk(ast.parse(path.read_text()))
                              if isinstance(node, ast.Import) for alias in node.names}, path  # fmt: skip


def test_examples_and_benchmarks_use_public_names():
    for path in [*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("locas_peft"):
                assert not any(alias.name.startswith("_") for alias in node.names), path
