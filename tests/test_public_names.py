"""Examples, benchmarks and documentation use names in the `__all__` of their module only."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("examples", "benchmarks", "docs")
FENCE = re.compile(r"^```(?:python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def list_sources() -> list:
    """Return the source of each script, and of each Python block in a Markdown page."""
    paths = [ROOT / "README.md"]
    for folder in FOLDERS:
        paths += sorted((ROOT / folder).rglob("*.*"))
    sources = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            sources.append(pytest.param(path.read_text(encoding="utf-8"), id=name))
        elif path.suffix == ".md":
            blocks = FENCE.findall(path.read_text(encoding="utf-8"))
            sources += [pytest.param(block, id=name) for block in blocks]
    return sources


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # The name before it is of no package.
        return False


def find_problem(module: str, name: str) -> str | None:
    """Return what is wrong with a name that is taken from a module; None for a public one."""
    if "._" in module:
        return f"{module} is private"
    if name in getattr(importlib.import_module(module), "__all__", ()):
        return None
    if not name.startswith("_") and is_module(f"{module}.{name}"):
        return None
    return f"{name} is not in {module}.__all__"


def list_problems(source: str) -> list[str]:
    """Return what is wrong with our names that a script imports, or takes from our modules."""
    tree = ast.parse(source)
    # Our modules by the script's names, and the names that are taken from a module.
    modules = {}
    taken = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node.module):
            for alias in node.names:
                taken.append((node.module, alias.name))
                path = f"{node.module}.{alias.name}"
                if "._" not in path and is_module(path):
                    modules[alias.asname or alias.name] = path
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name) and alias.asname:
                    modules[alias.asname] = alias.name
                elif is_ours(alias.name):
                    modules["locas_peft"] = "locas_peft"
    for node in ast.walk(tree):
        is_of_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_of_name and node.value.id in modules:
            taken.append((modules[node.value.id], node.attr))
    problems = [find_problem(*pair) for pair in taken]
    return [problem for problem in problems if problem]


def is_ours(module: str | None) -> bool:
    return (module or "").split(".")[0] == "locas_peft"


@pytest.mark.parametrize("source", list_sources())
def test_only_public_names_are_used(source):
    assert list_problems(source) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from locas_peft import register", "register is not in locas_peft.__all__"),
        ("from locas_peft import __version__", "__version__ is not in locas_peft.__all__"),
        ("from locas_peft.stages import _detach", "_detach is not in locas_peft.stages.__all__"),
        ("from locas_peft.stages._x import y", "locas_peft.stages._x is private"),
        ("import locas_peft.stages._x as x\nx.y", "locas_peft.stages._x is private"),
        (
            "from locas_peft import stages\nstages._detach",
            "_detach is not in locas_peft.stages.__all__",
        ),
        ("import locas_peft.text as r\nr.hashlib", "hashlib is not in locas_peft.text.__all__"),
        ("import locas_peft\nlocas_peft.register()", "register is not in locas_peft.__all__"),
        ("import locas_peft\nlocas_peft.LocasConfig()", None),
        ("from locas_peft import LocasConfig, stages", None),
        ("from locas_peft.memories import checkpoint\ncheckpoint.load", None),
        ("import torch\ntorch._C", None),
    ],
)
def test_the_check_finds_names_that_are_not_public(source, problem):
    assert list_problems(source) == ([problem] if problem else [])
