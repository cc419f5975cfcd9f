"""The cards of the page "Tutorials": picture, title, minutes, and what you can do afterwards.

    tutorials/*.ipynb   -> first heading, first sentence, minutes   -> a card in the place of "<!-- cards -->"
                        -> first picture of the outputs             -> tutorials/*.png of the site

MkDocs calls the last two functions while it builds. A notebook that lacks one of these things ends the build.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
PAGE = "tutorials.md"
MARK = "<!-- cards -->"


class Card(NamedTuple):
    """One notebook.

    Attributes:
        name: the file, without its ending.
        title: the first heading.
        promise: what you can do afterwards, as a sentence.
        minutes: to read it.
        picture: the first picture of the outputs, a PNG.
    """

    name: str
    title: str
    promise: str
    minutes: int
    picture: bytes

    def markdown(self) -> str:
        """The card, as an item of a list."""
        page = f"tutorials/{self.name}.ipynb"
        return (
            f"-   [![{self.title}](tutorials/{self.name}.png)]({page})\n\n"
            f"    **{int(self.name[:2])}. [{self.title}]({page})**\n\n"
            f"    {self.promise} *{self.minutes} minutes*\n"
        )


def card(path: Path) -> Card:
    """The card of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    opening = "".join(cells[0]["source"])
    found = re.match(
        r"# (.+)\n\nAfter this notebook you can (.+?\.)\n\nIt takes about (\d+) minutes", opening, re.DOTALL
    )
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = [data["image/png"] for data in outputs if "image/png" in data]
    if found is None or not pictures:
        raise ValueError(f"{path.name}: no title, promise or minutes in the first cell, or no picture")
    title, promise, minutes = found.groups()
    return Card(
        path.stem,
        title,
        " ".join((promise[0].upper() + promise[1:]).split()),
        int(minutes),
        base64.b64decode("".join(pictures[0])),
    )


def cards() -> list[Card]:
    """The cards of all notebooks, in reading order."""
    return [card(path) for path in sorted(TUTORIALS.glob("*.ipynb"))]


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures."""
    from mkdocs.structure.files import File  # here: the tests read cards without MkDocs

    for one in cards():
        files.append(File.generated(config, f"tutorials/{one.name}.png", content=one.picture))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the cards into their page."""
    if page.file.src_uri != PAGE:
        return markdown
    items = "\n".join(one.markdown() for one in cards())
    return markdown.replace(MARK, f'<div class="grid cards tutorials" markdown>\n\n{items}\n</div>')
