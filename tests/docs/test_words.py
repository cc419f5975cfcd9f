"""The words of pages, docstrings, comments and messages: no banned phrase, and no long sentence."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "sharded_loader").glob("*/**/*.py"))
LABELS = {"foreign sampler"}
"""Labels of random numbers (`sharded_loader.randomness.rng`): with other words the numbers would be others."""

LONGEST = 30  # words in a sentence; writers aim at 25
BANNED = {
    r"made again|anew": "retried, built again, redistributed",
    r"Else": "Otherwise",
    r"mend(?:s|ed|ing)?": "fix, fixed",
    r"the loop itself|the trainer": "the main process",
    r"refused": "rejected with an error",
    r"page-locked(?! memory\))": "pinned memory",
    r"read ahead": "prefetched",
    r"foreign samplers?": "other libraries' samplers",
    r"so many|such a one|there on": "name the thing",
    r"nobody|somebody|whoever": "name who",
}


def prose(text: str) -> list[str]:
    """The paragraphs and list items of a page, without code, tables, headings, HTML and lists of links."""
    text = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", "", text, flags=re.DOTALL)
    lines = [
        line for line in text.splitlines() if not re.match(r"\s*(\||#|:::|--8<--|!\[|\w+:\s*\S+$)|    options:", line)
    ]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.|:) )", "\n".join(lines))
    found = []
    for block in blocks:
        block = re.sub(r"^\s*(?:[-*+]|\d+\.|:)\s+", "", block)
        if len(re.findall(r"\]\(|\]\[", block)) > 3:
            continue  # a list of links
        block = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", block)
        block = re.sub(r"(`+)(?:(?!\1).)+\1", "CODE", block, flags=re.DOTALL)
        found.append(" ".join(block.replace("*", "").split()))
    return [block for block in found if block]


def sentences(block: str) -> list[str]:
    """Sentences, and what comes before and after a colon."""
    return re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?:])\)?\s+", block)


def texts(source: str) -> Iterator[str]:
    """The docstrings, messages and comments of a module. What a message fills in is CODE."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {part for node in filled for part in ast.walk(node) if part is not node}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = docstring_prose(node.value) if node in docstrings else node.value
            yield "" if text in LABELS else text
    yield from comments(source)


def docstring_prose(text: str) -> str:
    """A docstring without examples, tables and drawings; each argument is a paragraph of its own."""
    text = re.sub(r"^ *>>> .*?(?=\n\s*\n|\Z)", "", inspect.cleandoc(text), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.split("\n") if not re.search(r"\S  +\S|->", line)]
    return re.sub(r"\n(?= *(?:[*\w]+, )*[*\w]+: )", "\n\n", "\n".join(lines))


def comments(source: str) -> Iterator[str]:
    """The comments of a module. One of several lines is one text."""
    found: list[tuple[int, int, str]] = []  # line after it, column, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), text = token.start, token.string.lstrip("#: ")
            is_alone = not token.line[:column].strip()
            if is_alone and found and found[-1][:2] == (line, column):
                text = f"{found.pop()[2]} {text}"
            found.append((line + 1 if is_alone else 0, column, text))
    return (text for _, _, text in found)


def wrong(text: str) -> list[str]:
    """What breaks a rule in the text of a page."""
    found = []
    for block in prose(text):
        for pattern, better in BANNED.items():
            hit = re.search(rf"(?<![\w-])(?:{pattern})(?![\w-])", block, 0 if pattern == "Else" else re.IGNORECASE)
            if hit:
                found.append(f"{hit[0]!r} (write: {better}): {block[max(hit.start() - 40, 0) : hit.end() + 40]}")
        found += [f"{len(one.split())} words: {one}" for one in sentences(block) if len(one.split()) > LONGEST]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_page_is_in_plain_words(page: Path) -> None:
    assert wrong(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_docstrings_comments_and_messages_are_in_plain_words(module: Path) -> None:
    assert [line for text in texts(module.read_text(encoding="utf-8")) for line in wrong(text)] == []


def test_what_breaks_a_rule_is_noticed() -> None:
    bad = ["- The batch is made again.", "Stop. Else wait.", "word " * 31, "A *bug*\nwas mended."]
    good = ["```\nmade again\n```", "| made again |", "`made again`", "Elsewhere: " + "Go on. " * 40]
    assert [text for text in bad if not wrong(text)] == [text for text in good if wrong(text)] == []
    in_modules = {
        '"""The batch is made again."""': True,
        'def f():\n    """Do.\n\n    Args:\n        x: what\n            was mended.\n    """': True,
        "x = 1  # whoever asks": True,
        "# one line, and\n# the next is made\n# again": True,
        'raise ValueError(f"the loop {x} was refused")': True,
        '"""Do.\n\nExample:\n    >>> mended\n    made again\n"""': False,
        '"""Do.\n\na -> mended\n"""': False,
        "mended = anew": False,
    }
    assert {source: any(map(wrong, texts(source))) for source in in_modules} == in_modules
