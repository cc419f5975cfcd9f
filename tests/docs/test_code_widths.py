"""Code in the documentation fits: nobody scrolls sideways to read a line of it.

`tests/docs/render.py` measures the boxes. This test counts columns, so it needs no browser and names the lines.
`tests/tutorials/test_tutorials.py` does so for notebooks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_docs import documented, find

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]

COLUMNS = 88  # of pages and docstrings: at 1,300 px a few more fit, see docs/assets/extra.css


def wide(lines: list[str], columns: int) -> list[str]:
    return [f"{len(line)} columns: {line}" for line in lines if len(line) > columns]


def fenced(text: str) -> Iterator[str]:
    """The lines of the code blocks of a Markdown page. The browser breaks the lines that a program prints."""
    blocks = re.findall(r"^( *)(```+|~~~+) *(\w*)[^\n]*\n(.*?)^\1\2", text, re.MULTILINE | re.DOTALL)
    for indent, _, language, code in blocks:
        for line in code.splitlines():
            if language not in ("console", "text") or line.startswith(f"{indent}$ "):
                yield line.removeprefix(indent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_of_a_page_fits(page: Path) -> None:
    assert wide([*fenced(page.read_text(encoding="utf-8"))], COLUMNS) == []


def test_examples_of_docstrings_fit() -> None:
    lines = []
    for name in documented():
        found = find(name)
        members = vars(found).values() if inspect.isclass(found) else ()
        for one in (found, *members):
            text = inspect.getdoc(one) if isinstance(getattr(one, "__doc__", None), str) else None
            lines += re.findall(r"^ *((?:>>>|\.\.\.) .*)$", text or "", re.MULTILINE)
    assert len(lines) > 100
    assert wide(lines, COLUMNS) == []


def test_a_wide_line_is_found() -> None:
    page = f"```python\nshort\n{'x' * 89}\n```\n{'prose ' * 40}\n- item\n\n  ```\n  {'y' * 88}\n  ```\n"
    console = f"```console\n$ {'z' * 87}\n{'printed ' * 20}\n```\n"
    assert wide([*fenced(page + console)], COLUMNS) == [f"89 columns: {'x' * 89}", f"89 columns: $ {'z' * 87}"]
