"""Examples, benchmarks and documentation use public names only: those in the `__all__` of their module."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("examples", "benchmarks", "docs")
FENCE = re.compile(r"^```(?:python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def list_sources() -> list[tuple[str, str]]:
    """Return (name, source) of each script, and of each Python block in a Markdown page."""
    scripts = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    pages = [
        ROOT / "README.md",
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    ]
    sources = [(path, path.read_text(encoding="utf-8")) for path in sorted(scripts)]
    sources += [
        (path, block)
        for path in sorted(pages)
        for block in FENCE.findall(path.read_text(encoding="utf-8"))
    ]
    return [(str(path.relative_to(ROOT)), source) for path, source in sources]


def is_module(name: str) -> bool:
    parent = name.rpartition(".")[0]
    if parent and not (is_module(parent) and hasattr(importlib.import_module(parent), "__path__")):
        return False
    return importlib.util.find_spec(name) is not None


def find_problem(module: str, name: str) -> str | None:
    """Return what is wrong with a name that is taken from a module; None for a public name or submodule."""
    if name in getattr(importlib.import_module(module), "__all__", ()):
        return None
    if not name.startswith("_") and is_module(f"{module}.{name}"):
        return None
    return f"{name} is not in {module}.__all__"


def list_problems(source: str) -> list[str]:
    """Return what is wrong with the names of ours that a script imports, and that it takes from imported modules."""
    tree, modules, problems = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "locas_peft":
            problems += [find_problem(node.module, alias.name) for alias in node.names]
            paths = {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
            modules |= {name: path for name, path in paths.items() if is_module(path)}
            imported = [node.module]
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == "locas_peft"]
            modules |= {
                alias.asname or "locas_peft": alias.name if alias.asname else "locas_peft"
                for alias in ours
            }
            imported = [alias.name for alias in ours]
        else:
            continue
        problems += [f"{path} is private" for path in imported if "._" in path]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            problems.append(find_problem(modules[node.value.id], node.attr))
    return [problem for problem in problems if problem]


@pytest.mark.parametrize(
    "source", [pytest.param(source, id=name) for name, source in list_sources()]
)
def test_only_public_names_are_used(source):
    assert list_problems(source) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from locas_peft import register", "register is not in locas_peft.__all__"),
        ("from locas_peft import __version__", "__version__ is not in locas_peft.__all__"),
        ("from locas_peft.stages import _detach", "_detach is not in locas_peft.stages.__all__"),
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
