"""Draw the rooms of the package and their imports: `python -m benchmarks.drawing` writes docs/assets/folders.svg.

FLOORS, imports of the package -> boxes, the highest floor first -> an SVG with the colours of docs/assets/road.svg
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.imports import imports_of, read_sources
from benchmarks.sizes import FLOORS

ROOT = Path(__file__).parents[1]
DRAWING = ROOT / "docs/assets/folders.svg"
ABOUT = (
    "The folders of the package, the highest floor first. Each box says which other folders it imports. "
    "All of them lie further down."
)


def imports_of_folders() -> dict[str, list[str]]:
    """Of each folder of the package, the other folders that it imports, sorted."""
    folders = {path.parent.name for path in (ROOT / "sharded_loader").glob("*/__init__.py")}
    pairs = {
        (found.importer.split(".")[1], found.imported.split(".")[1])
        for found in imports_of(read_sources(ROOT / "sharded_loader"))
        if "." in found.importer and "." in found.imported
    }
    return {name: sorted(b for a, b in pairs if a == name != b and b in folders) for name in sorted(folders)}


def _box(name: str, imported: list[str], left: int, top: int, wide: int) -> str:
    text = f"imports {', '.join(imported) or 'no other folder'}"
    return (
        f'<rect class="box one" x="{left}" y="{top}" width="{wide}" height="52" rx="6"/>\n'
        f'<text class="name" x="{left + 12}" y="{top + 21}">{name}/</text>\n'
        f'<text class="small" x="{left + 12}" y="{top + 41}">{text}</text>\n'
    )


def drawing() -> str:
    """The drawing as SVG."""
    style = re.search(r"<style>.*?</style>", (ROOT / "docs/assets/road.svg").read_text(encoding="utf-8"), re.DOTALL)
    assert style is not None
    imported = imports_of_folders()
    rows: list[list[str]] = []
    for floor in reversed(FLOORS):
        names = [name for name in floor if name in imported]
        # Two boxes side by side where their texts are short.
        while names:
            count = 2 if all(len(", ".join(imported[name])) < 36 for name in names[:2]) else 1
            rows.append(names[:count])
            names = names[count:]
    parts, top = [], 14
    for number, row in enumerate(rows):
        if number:
            parts.append(f'<path class="way" d="M320 {top - 16}v9"/><path class="head" d="M320 {top}l-5-10h10z"/>\n')
        for column, name in enumerate(row):
            parts.append(_box(name, imported[name], 20 + 308 * column, top, 600 if len(row) == 1 else 292))
        top += 68
    return (
        f'<svg class="road" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {top}" role="img" '
        f'aria-labelledby="folders-title folders-text">\n'
        f'<title id="folders-title">The folders and their imports</title>\n'
        f'<desc id="folders-text">{ABOUT}</desc>\n{style[0]}\n'
        f'<rect class="sheet" width="640" height="{top}" rx="8"/>\n{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    DRAWING.write_text(drawing(), encoding="utf-8")
