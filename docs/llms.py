"""Add `llms.txt` and each page as Markdown to the site, for language models (https://llmstxt.org): a hook of mkdocs.

A page is at the address of its HTML page with `.md` at the end: `howto/library.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

_pages: dict[str, str] = {}


def make_index(name: str, description: str, nav: list[dict[str, Any]]) -> str:
    """Return `llms.txt` for the site's `nav`: a list of its pages, under the titles of their sections."""
    lines, sections = [f"# {name}", "", f"> {description}", "", "## Pages", ""], []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, str):
            lines.append(f"- [{title}]({target})")
        else:
            sections += [
                "",
                f"## {title}",
                "",
                *(f"- [{own}]({page})" for each in target for own, page in each.items()),
            ]
    return "\n".join([*lines, *sections, ""])


def on_page_content(html: str, page: Any, config: MkDocsConfig, files: Any) -> str:
    """Keep a page's Markdown, with what it includes."""
    _pages[page.file.src_uri] = page.markdown
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Write the pages and their index into the site."""
    site = Path(config.site_dir)
    for name, markdown in _pages.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(markdown, encoding="utf-8")
    index = make_index(config.site_name, config.site_description, config.nav)
    (site / "llms.txt").write_text(index, encoding="utf-8")
