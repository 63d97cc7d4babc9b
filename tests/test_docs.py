"""The documentation: its commands exist, its code runs, its figures are those of their scripts.

`.ci/run` builds the site, which checks every link and anchor.
"""

import dataclasses
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cyclopts.exceptions import MissingArgumentError

import locas_peft
from locas_command.program import app
from locas_peft import backbone
from locas_peft.bases.gguf import is_installed
from locas_peft.demo import INSTALL
from locas_peft.text import python_reference, tokenize, unwrap

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OWN_PAGES = [
    DOCS / "index.md",
    *sorted((DOCS / "concepts").glob("*.md")),
    *sorted((DOCS / "howto").glob("*.md")),
]
READ_PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    DOCS / "results.md",
    DOCS / "serving.md",
    DOCS / "week.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def load_script(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebook, llms = load_script(DOCS / "notebook.py"), load_script(DOCS / "llms.py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def list_commands(page: Path) -> list[str]:
    """Return the `locas` commands of a page: those of its blocks, of a launcher, and of its text."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    in_blocks = re.findall(r"^(?:\$ )?(locas .+)", text, flags=re.MULTILINE)
    launched = re.findall(r"-m (locas_peft [^`.\n][^`\n]+)", text)
    return [*in_blocks, *launched, *re.findall(r"`(locas [^`\n]+)`", text)]


@pytest.mark.parametrize("page", [*READ_PAGES, *OWN_PAGES, notebook.TUTORIAL], ids=name_of)
def test_commands_are_those_of_the_program(page):
    for command in list_commands(page):
        words = [word for word in shlex.split(command)[1:] if word not in ("&", "...")]
        if words[0] == "COMMAND":
            continue
        assert words[0] in app and words[0] != "memorize", command
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except MissingArgumentError:  # a command that is only named
            assert not any(word.startswith("-") for word in words), command


@pytest.mark.parametrize("page", OWN_PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    for path in re.findall(
        r"`((?:src|examples|docs|benchmarks)/[\w./]+)`", page.read_text(encoding="utf-8")
    ):
        assert (ROOT / path).exists(), path


def test_every_public_name_is_documented():
    documented = re.findall(
        r"^::: locas_peft\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(documented) == sorted(locas_peft.__all__)


def test_each_field_of_the_config_is_explained():
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(locas_peft.LocasConfig):
        if field.name in locas_peft.LocasConfig.__annotations__:
            default = field.default
            if default is dataclasses.MISSING:
                default = field.default_factory()
            assert f"| `{field.name}` | `{default!r}` | {field.metadata['help']} |" in page


def test_a_notebook_has_a_cell_for_each_block_that_runs():
    page = "Text, [more](concepts/study.md).\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n\n"
    page += '```bash title="not run"\nserve\n```\n'
    cells = notebook.to_notebook(page)["cells"]
    assert [(cell["cell_type"], cell["source"]) for cell in cells] == [
        ("markdown", "Text, more."),
        ("code", "x = 1"),
        ("code", "%%bash\nls"),
        ("markdown", '```bash title="not run"\nserve\n```'),
    ]


def test_the_site_has_an_index_and_its_pages_as_markdown(tmp_path):
    nav = [{"Home": "index.md"}, {"How to": [{"Sign": "howto/signing.md"}]}]
    config = SimpleNamespace(
        site_dir=tmp_path, site_name="name", site_description="About.", nav=nav
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/signing.md"), markdown="# Sign")
    assert llms.on_page_content("<h1>", page, config, None) == "<h1>"
    llms.on_post_build(config)
    assert (tmp_path / "howto" / "signing.md").read_text() == "# Sign"
    index = "# name\n\n> About.\n\n## Pages\n\n- [Home](index.md)\n\n## How to\n\n- [Sign](howto/signing.md)\n"
    assert (tmp_path / "llms.txt").read_text() == index


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("smollm2"), reason=f"SmolLM2 is not installed: {INSTALL}")
def test_the_tutorial_runs_as_a_notebook(tmp_path):
    """Every block of the tutorial runs, in order; the model answers from its memory as often as the page says."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    document = nbformat.from_dict(
        notebook.to_notebook(notebook.TUTORIAL.read_text(encoding="utf-8"))
    )
    nbformat.validate(document)
    nbclient.NotebookClient(
        document, timeout=900, resources={"metadata": {"path": tmp_path}}
    ).execute()
    cells = [cell for cell in document.cells if cell.cell_type == "code"]
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    _, read, studied, asked, saved, merged, exported, served = printed
    perplexities = [float(number) for number in re.findall(r"perplexity ([\d.]+)", read)]
    assert len(perplexities) == 4 and perplexities == sorted(perplexities, reverse=True)
    assert float(re.search(r"to ([\d.]+) nats", studied)[1]) < 0.1
    answers = re.findall(r"without: (.*)\n  with: +(.*)", asked)
    for fact, (without, answer) in zip(
        ("Elias Thorne", "Marigold", "nine"), answers[:3], strict=True
    ):
        assert fact in answer and fact not in without
    assert "13.3 MB" in saved and "Elias Thorne" in saved
    assert "FFN width 1536, merged 1600" in merged and "Marigold" in merged
    assert "rank 64" in exported and "nine" in served


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in OWN_PAGES if BLOCK.search(page.read_text("utf-8"))], ids=name_of
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, tokenizer = backbone.load()
    ids = tokenize(tokenizer, unwrap(python_reference()), max_tokens=600)
    names = {"base": base, "tokenizer": tokenizer, "ids": ids}
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, name_of(page), "exec"), names)


@pytest.mark.slow
def test_figures_are_those_of_their_scripts(tmp_path):
    shutil.copytree(DOCS / "figures", tmp_path / "figures")
    (tmp_path / "images").mkdir()
    scripts = [path for path in (tmp_path / "figures").glob("*.py") if path.name != "drawing.py"]
    for script in scripts:
        subprocess.run([sys.executable, script], check=True)
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    kept = {path.name: path.read_bytes() for path in (DOCS / "images").glob("*.svg")}
    assert drawn.keys() == kept.keys() and len(kept) == len(scripts)
    # The plot of activations depends on the machine's rounding.
    assert [name for name in kept if kept[name] != drawn[name] and name != "calibration.svg"] == []
