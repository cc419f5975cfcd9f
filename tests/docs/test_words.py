"""The words of the documentation: no banned phrase and no long sentence in the prose of a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize(
    "text", ["- The batch is made again.", "Stop. Else wait.", "word " * 31, "A *bug*\nwas mended."]
)
def test_what_breaks_a_rule_is_noticed(text: str) -> None:
    assert wrong(text)


@pytest.mark.parametrize(
    "text", ["```\nmade again\n```", "| made again |", "`made again`", "Elsewhere: " + "Go on. " * 40]
)
def test_code_tables_and_good_text_are_accepted(text: str) -> None:
    assert wrong(text) == []
