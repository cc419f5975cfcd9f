"""The documentation speaks of what there is: every public name, real messages, real files, pages within reach."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

import sharded_loader
from benchmarks.drawing import drawing
from sharded_loader.batching.default import Batchify
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.process.link import SLOT_BYTES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@functools.cache
def messages() -> str:
    """The texts in the library's code, docstrings apart, with a 1 between them; what is filled in is a NUL."""
    found = []
    for path in (ROOT / "sharded_loader").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(node.value)
    return "\1".join(found)


def is_said(quoted: str) -> bool:
    """Whether the code has a message like this, in which ``…`` stands for anything."""
    return re.search("[^\1]*".join(map(re.escape, quoted.split("…"))), messages()) is not None


def rows(page: str) -> list[str]:
    """The first cells of the tables of a page, without heads."""
    lines = [line.split("|")[1].strip() for line in PAGES[page].splitlines() if line.startswith("|")]
    heads = {number - 1 for number, cell in enumerate(lines) if cell.startswith("---")}
    return [cell for number, cell in enumerate(lines) if number not in heads and not cell.startswith("---")]


SYMPTOMS = rows("guides/troubleshooting.md")


@pytest.mark.lint
def test_a_symptom_is_what_the_code_says() -> None:
    assert len(SYMPTOMS) > 30
    assert [cell for cell in SYMPTOMS if not re.fullmatch("`[^`]+`", cell) or not is_said(cell.strip("`"))] == []
    assert not is_said("the loader is ajar")


@pytest.mark.lint
def test_messages_that_are_quoted_elsewhere_are_those_of_the_code() -> None:
    spans = [span for text in PAGES.values() for span in re.findall("`([^`\n]+)`", text)]
    assert [span for span in spans if "…" in span and span != "…" and not is_said(span)] == []


def test_batches_that_go_through_a_pipe_are_as_small_as_the_memory_guide_says() -> None:
    assert f"Batches of less than {SLOT_BYTES >> 10} KB go through a pipe" in PAGES["guides/memory.md"]


# -- reference ----------------------------------------------------------------------------------------------


def documented(types: bool = False) -> list[str]:
    """The names that have an entry, either those that one may import, or those that signatures mention."""
    pages = [text for page, text in PAGES.items() if (page == "reference/types.md") == types]
    return [name for text in pages for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


def test_the_reference_has_every_public_name_once() -> None:
    modules = ("batchify", "recordio", "torch")
    public = {id(getattr(sharded_loader, name)): name for name in sharded_loader.__all__ if name not in modules}
    for module in map(importlib.import_module, (f"sharded_loader.{name}" for name in modules)):
        public |= {id(getattr(module, name)): name for name in module.__all__}
    shown = [id(resolve_name(name)) for name in documented()]
    assert sorted(public[one] for one in set(public) - set(shown)) == []
    assert sorted(public.get(one, "not public") for one in shown) == sorted(public.values())


def test_completion_knows_every_public_name_once() -> None:
    assert [name for name in sharded_loader.__all__ if dir(sharded_loader).count(name) != 1] == []


def test_every_attribute_of_a_loader_is_in_the_reference() -> None:
    # Without its indentation, which Python 3.13 takes away and others keep.
    shown = inspect.getdoc(resolve_name("sharded_loader.ShardedDataLoader")) or ""
    assert "inherited_members: true" in PAGES["reference/loader.md"]
    # What the constructor sets hides the property below it from the reference.
    source = (ROOT / "sharded_loader/loader/loader.py").read_text(encoding="utf-8")
    names = [name for name in vars(sharded_loader.ShardedDataLoader) if not name.startswith("_")]
    hidden = [name for name in names if re.search(rf"^ +self\.{name} = ", source, re.MULTILINE)]
    assert hidden
    assert [name for name in hidden if f"\n    {name}: " not in shown.partition("Attributes:")[2]] == []


def test_every_public_name_has_an_example() -> None:
    assert [name for name in documented() if ">>>" not in (resolve_name(name).__doc__ or "")] == []


# -- pages --------------------------------------------------------------------------------------------------


@pytest.mark.lint
def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^ .*?([\w/-]+\.md)$", CONFIG.partition("\nnav:")[2], re.MULTILINE)
    assert sorted(navigation) == sorted([*PAGES, "benchmarks/README.md", "benchmarks/jobs.md", "CHANGELOG.md"])


@pytest.mark.lint
def test_links_between_pages_lead_somewhere() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            # What lies outside docs/ is brought in under its own path (docs/hooks.py).
            place = Path(os.path.normpath(Path(page).parent / target))
            outside = place.parts[0] in ("tutorials", "benchmarks", "CHANGELOG.md")
            assert ((ROOT if outside else DOCS) / place).is_file(), f"{page}: {target}"


@pytest.mark.lint
def test_files_classes_and_functions_that_are_spoken_of_are_there() -> None:
    paths = re.findall(r"`((?:sharded_loader|tests)/[\w/]+\.py)`", PAGES["how-it-works.md"])
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "sharded_loader").rglob("*.py"))
    defined = {*re.findall(r"\b(?:def|class) (\w+)", source), *re.findall(r"\b(\w+)(?:: [^=\n]+)? = ", source)}
    names = re.findall(r"`([A-Z]\w+(?:\.\w+)*)(?:\(\))?`", PAGES["how-it-works.md"])
    assert min(len(paths), len(names)) > 15
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert [name for name in names if not {*name.split(".")} <= defined] == []


@pytest.mark.lint
def test_every_module_begins_with_a_sentence_for_the_list_of_modules() -> None:
    assert "<!-- modules -->" in PAGES["how-it-works.md"]
    wrong = []
    for path in (ROOT / "sharded_loader").rglob("*.py"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if not text.partition("\n\n")[0].endswith((".", ":", "?")):
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


@pytest.mark.lint
def test_the_drawing_of_the_folders_shows_what_they_import_and_all_ten_promises_are_told() -> None:
    """``python -m benchmarks.drawing`` makes it anew."""
    assert (DOCS / "assets/folders.svg").read_text(encoding="utf-8") == drawing()
    assert re.findall(r"^\| (P\d+) ", PAGES["how-it-works.md"], re.MULTILINE) == [f"P{n}" for n in range(1, 11)]


# -- CONTRIBUTING.md ------------------------------------------------------------------------------------------

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.lint
def test_files_and_folders_that_contributors_are_sent_to_are_there() -> None:
    paths = re.findall(r"`((?:sharded_loader|tests|docs|benchmarks|\.ci)/[\w/.-]*|constraints\.txt)`", CONTRIBUTING)
    paths += [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", CONTRIBUTING)]
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.lint
def test_commands_and_verbs_that_contributors_are_given_exist() -> None:
    verbs = {"Sampler": re.findall(r"`Sampler\.(\w+)`", CONTRIBUTING), "Batchify": ["assemble"]}
    verbs["Pool"] = ["start", "submit", "wait", "wake", "cancel", "close"]
    for one in (Batchify, Pool, sharded_loader.Sampler):
        assert [verb for verb in verbs[one.__name__] if not hasattr(one, verb)] == []
    targets = set(re.findall(r"make ([a-z-]+)", CONTRIBUTING))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(targets) > 5
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    for module, options in re.findall(r"`python -m ((?:tests|benchmarks)[\w.]*)([^`]*)`", CONTRIBUTING):
        found = importlib.util.find_spec(module)
        found = importlib.util.find_spec(f"{module}.__main__") if found and found.submodule_search_locations else found
        assert found and found.origin, module
        source = Path(found.origin).read_text(encoding="utf-8")
        assert [option for option in re.findall(r"--\w+", options) if f'"{option}"' not in source] == [], module


def test_every_name_that_a_page_refers_to_exists_and_the_list_has_all() -> None:
    """`make docs` finds this out too, but only where MkDocs is installed."""
    links = {page: set(re.findall(r"\]\[(sharded_loader[\w.]*)\]", text)) for page, text in PAGES.items()}
    assert links["reference/index.md"] == {*documented(), *documented(types=True)}
    assert set().union(*links.values()) <= links["reference/index.md"]
    assert len(links["reference/index.md"]) > 90
    assert [name for name in sorted(links["reference/index.md"]) if resolve_name(name) is None] == []


# -- code fits: nobody scrolls sideways to read a line of it -----------------------------------------------------------

# `tests/docs/render.py` measures the boxes. Here are counted columns, which needs no browser and names the lines.
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


@pytest.mark.lint
def test_code_of_pages_fits() -> None:
    pages = {**PAGES, "benchmarks": (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")}
    assert {page: found for page, text in pages.items() if (found := wide([*fenced(text)], COLUMNS))} == {}


@pytest.mark.lint
def test_examples_of_docstrings_fit() -> None:
    lines = []
    for name in documented():
        found = resolve_name(name)
        members = vars(found).values() if inspect.isclass(found) else ()
        for one in (found, *members):
            text = inspect.getdoc(one) if isinstance(getattr(one, "__doc__", None), str) else None
            lines += re.findall(r"^ *((?:>>>|\.\.\.) .*)$", text or "", re.MULTILINE)
    assert len(lines) > 100
    assert wide(lines, COLUMNS) == []


@pytest.mark.lint
def test_a_wide_line_is_found() -> None:
    page = f"```python\nshort\n{'x' * 89}\n```\n{'prose ' * 40}\n- item\n\n  ```\n  {'y' * 88}\n  ```\n"
    console = f"```console\n$ {'z' * 87}\n{'printed ' * 20}\n```\n"
    assert wide([*fenced(page + console)], COLUMNS) == [f"89 columns: {'x' * 89}", f"89 columns: $ {'z' * 87}"]
