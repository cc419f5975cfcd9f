"""What of the site lies outside docs/, and what pages need that Markdown does not give them.

    tutorials/*.ipynb   -> pages below "Tutorials", in the order of their names: whichever are there
    benchmarks/         -> one page, and next to it what the page links to
    CHANGELOG.md        -> one page, with an anchor for each version
    sharded_loader/     -> the list of modules, in "How it works"
    sharded_loader      -> the version, beside the name of the site
    code                -> copy buttons leave prompts and output out
    tables              -> each cell knows its heading, for phones
    search              -> guides and the reference come before tutorials, without the code of notebooks

MkDocs calls these functions while it builds; nothing of the library is imported.
"""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = "tutorials.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
PACKAGE = ROOT / "sharded_loader" / "__init__.py"

BOOSTS = {"tutorials/": 0.002, "benchmarks/": 0.002, "CHANGELOG.md": 0.001, "how-it-works.md": 0.01, "reference/": 2.0}
"""How much a hit in these pages counts in the search; 3 for other pages, which are guides. A hit in a heading counts a
thousand times as much as one in the text, and still a tutorial's heading comes after a guide's text."""

SENTENCE = 40
"""Characters. A table with a longer cell after its first column is read row by row on a phone; others are scrolled."""

_log = logging.getLogger("mkdocs.hooks.sharded_loader")


def notebooks() -> list[Path]:
    """The tutorials, in reading order."""
    return sorted((ROOT / "tutorials").glob("*.ipynb"))


def linked(page: Path) -> list[Path]:
    """The files beside a Markdown page that it links to or shows."""
    targets = re.findall(r"\]\(([\w./-]+)\)", page.read_text(encoding="utf-8"))
    return [page.parent / target for target in dict.fromkeys(targets) if (page.parent / target).is_file()]


def version() -> str:
    """The version of the library."""
    found = re.search(r'^__version__ = "(.+)"$', PACKAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def on_config(config: Any) -> Any:
    """Put the notebooks into the navigation, below their landing page, and the version beside the name."""
    config.site_name = f"{config.site_name} {version()}"
    pages = [{"Overview": TUTORIALS}, *(path.relative_to(ROOT).as_posix() for path in notebooks())]
    config.nav = [
        {title: pages if target == TUTORIALS else target} for entry in config.nav for title, target in entry.items()
    ]
    return config


# Before mkdocs-jupyter, which looks through the files for notebooks.
@event_priority(100)
def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/."""
    jobs = BENCHMARKS.with_name("jobs.md")
    for path in sorted({*notebooks(), BENCHMARKS, *linked(BENCHMARKS), *linked(jobs), CHANGELOG}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def modules() -> str:
    """The modules of the package, a table for each folder, each module with the first paragraph of its docstring."""
    lines = []
    for folder in sorted({path.parent for path in PACKAGE.parent.rglob("*.py")}):
        lines += [f"\n### `{folder.relative_to(ROOT).as_posix()}/`\n", "| module | what it does |", "|---|---|"]
        for path in sorted(folder.glob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            sentence = " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
            lines.append(f"| `{path.name}` | {sentence} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """In the changelog: ``## [0.1.0]`` is a heading without brackets, and its anchor is the version."""
    if page.file.src_uri == "how-it-works.md":
        return markdown.replace("<!-- modules -->", modules())
    if page.file.src_uri != CHANGELOG.name:
        return markdown
    return re.sub(r"^## \[(.+?)\](.*)$", r"## \1\2 { #\1 }", markdown, flags=re.MULTILINE)


# What nbconvert adds to every notebook for formulas and diagrams: both would be fetched.
_FORMULAS = re.compile(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", re.DOTALL)
_DIAGRAMS = re.compile(r'<script type="module">(?:(?!</script>).)*mermaid(?:(?!</script>).)*</script>', re.DOTALL)

_FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?[\"'](?:https?:)?//[^>]*>|\bimport\(\"http|url\([\"']?(?:https?:)?//"
)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """What is said above of code, tables, and the search. In notebooks: links to other notebooks lead to their pages,
    and nothing is fetched from the network."""
    name = page.file.src_uri
    boost = next((boost for begin, boost in BOOSTS.items() if name.startswith(begin)), 3.0)
    page.meta.setdefault("search", {"boost": boost})
    if name.endswith(".ipynb"):
        html = re.sub(r'href="([\w./-]+)\.ipynb([#"])', r'href="\1.html\2', html)
        html = _DIAGRAMS.sub("", _FORMULAS.sub("", html))
    soup = BeautifulSoup(html, "html.parser")
    for block in soup.select(".language-pycon, .language-console"):
        block["data-copy"] = runnable(block.get_text())
    for signature in soup.select(".doc-signature"):
        signature["class"] = [*signature["class"], "no-copy"]
    for table in soup("table"):
        head_cells(table)
    # The search leaves elements out that contain no element of their own kind: no cell, but its parts.
    for left_out in soup.select(
        ".jp-CodeCell pre, .clipboard-copy-txt, clipboard-copy, .anchor-link, details.mkdocstrings-source"
    ):
        left_out["data-search-exclude"] = "true"
    return str(soup)


def runnable(session: str) -> str:
    """The commands of a session in Python or a shell, without prompts and output."""
    # A line of a shell that ends with a backslash goes on without a prompt.
    commands = re.findall(r"^(?:(?:>>>|\.\.\.)(?: .*)?|\$ (?:.*\\\n)*.*)$", session, re.MULTILINE)
    return (
        "\n".join(re.sub(r"^(?:>>>|\.\.\.|\$) ?", "", command) for command in commands)
        if commands
        else session.strip("\n")
    )


def head_cells(table: Any) -> None:
    """Give each cell of a table its heading, and mark tables of sentences."""
    heads = [head.get_text(" ", strip=True) for head in table.select("thead th")]
    rows = [row.find_all("td", recursive=False) for row in table.select("tbody > tr")]
    if heads and any(len(cell.get_text()) > SENTENCE for row in rows for cell in row[1:]):
        table["data-sentences"] = ""
    for row in rows:
        for cell, head in zip(row, heads, strict=False):
            cell["data-heading"] = head


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warnings, and so the end of a strict build: what a page would fetch from the network, and links within it that
    lead nowhere. (MkDocs looks at links in Markdown, not at the table of contents of a notebook.)"""
    for found in _FETCHED.findall(output):
        _log.warning("%s fetches something from the network: %s", page.file.src_uri, found[:120])
    places = set(re.findall(r'\bid="([^"]+)"', output))
    for link in sorted(set(re.findall(r'href="#([^"]+)"', output)) - places):
        _log.warning("%s has a link to #%s, which is not there", page.file.src_uri, link)
    return output
