"""Turn the tutorial into a notebook: `docs/tutorial.md` is the only source of both.

python docs/notebook.py     # writes tutorial.ipynb; the site has it as a download

A fenced block becomes a cell where its first line is exactly ```python or ```bash. All other text stays Markdown,
blocks with a title and blocks of output among it. A link to another page of the site becomes its text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

TUTORIAL = Path(__file__).parent / "tutorial.md"
_BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_LINK_TO_ITSELF = re.compile(r"^.*\]\(tutorial\.ipynb\).*\n", re.MULTILINE)
_LINK_TO_PAGE = re.compile(r"\[([^]]+)\]\([\w/]+\.md\)")


def to_notebook(markdown: str) -> dict[str, Any]:
    """Return a page as a notebook of nbformat 4, a cell for each block that runs and for the text between two."""
    cells = []
    text, *blocks = _BLOCK.split(_LINK_TO_ITSELF.sub("", markdown))
    for language, code, following in [
        ("", "", text),
        *zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True),
    ]:
        if language:
            source = code if language == "python" else f"%%bash\n{code}"
            cells.append(
                {
                    "cell_type": "code",
                    "execution_count": None,
                    "outputs": [],
                    "source": source.rstrip(),
                }
            )
        if following.strip():
            cells.append(
                {"cell_type": "markdown", "source": _LINK_TO_PAGE.sub(r"\1", following.strip())}
            )
    cells = [{"id": f"cell-{number}", "metadata": {}, **cell} for number, cell in enumerate(cells)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebook to the site (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    notebook = json.dumps(to_notebook(TUTORIAL.read_text(encoding="utf-8")), indent=1)
    files.append(File.generated(config, "tutorial.ipynb", content=notebook))
    return files


if __name__ == "__main__":
    Path("tutorial.ipynb").write_text(
        json.dumps(to_notebook(TUTORIAL.read_text(encoding="utf-8")), indent=1)
    )
