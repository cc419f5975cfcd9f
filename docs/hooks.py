"""What of the site lies outside docs/: the notebooks of tutorials/, and the README of benchmarks/ with its files.

    tutorials/*.ipynb   -> pages below "Tutorials", in the order of their names: whichever are there
    benchmarks/         -> one page, and next to it what the page links to

MkDocs calls these functions while it builds; nothing of the library is imported.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = "tutorials.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"

_log = logging.getLogger("mkdocs.hooks.sharded_loader")


def notebooks() -> list[Path]:
    """The tutorials, in reading order."""
    return sorted((ROOT / "tutorials").glob("*.ipynb"))


def linked(page: Path) -> list[Path]:
    """The files beside a Markdown page that it links to or shows."""
    targets = re.findall(r"\]\(([\w./-]+)\)", page.read_text(encoding="utf-8"))
    return [page.parent / target for target in dict.fromkeys(targets) if (page.parent / target).is_file()]


def on_config(config: Any) -> Any:
    """Put the notebooks into the navigation, below their landing page."""
    pages = [{"Overview": TUTORIALS}, *(path.relative_to(ROOT).as_posix() for path in notebooks())]
    config.nav = [
        {title: pages if target == TUTORIALS else target} for entry in config.nav for title, target in entry.items()
    ]
    return config


# Before mkdocs-jupyter, which looks through the files for notebooks.
@event_priority(100)
def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/."""
    for path in [*notebooks(), BENCHMARKS, *linked(BENCHMARKS)]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


# What nbconvert adds to every notebook for formulas and diagrams: both would be fetched.
_FORMULAS = re.compile(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", re.DOTALL)
_DIAGRAMS = re.compile(r'<script type="module">(?:(?!</script>).)*mermaid(?:(?!</script>).)*</script>', re.DOTALL)

_FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?[\"'](?:https?:)?//[^>]*>|\bimport\(\"http|url\([\"']?(?:https?:)?//"
)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """In notebooks: links to other notebooks lead to their pages, and nothing is fetched from the network."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = re.sub(r'href="([\w./-]+)\.ipynb([#"])', r'href="\1.html\2', html)
    return _DIAGRAMS.sub("", _FORMULAS.sub("", html))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warnings, and so the end of a strict build: what a page would fetch from the network, and links within it that
    lead nowhere. (MkDocs looks at links in Markdown, not at the table of contents of a notebook.)"""
    for found in _FETCHED.findall(output):
        _log.warning("%s fetches something from the network: %s", page.file.src_uri, found[:120])
    places = set(re.findall(r'\bid="([^"]+)"', output))
    for link in sorted(set(re.findall(r'href="#([^"]+)"', output)) - places):
        _log.warning("%s has a link to #%s, which is not there", page.file.src_uri, link)
    return output
