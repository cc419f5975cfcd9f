"""The imports of a package, read from its source."""

from __future__ import annotations

import doctest
import itertools
from pathlib import Path

import pytest

from benchmarks import imports, sizes
from benchmarks.imports import FUNCTION, HIDDEN, TOP, Import


def found(**sources: str) -> set[tuple[str, str, str]]:
    """The imports of a package ``p``; ``__`` in a name stands for a dot."""
    dotted = {"p": "", **{f"p.{name.replace('__', '.')}": source for name, source in sources.items()}}
    return {(each.importer, each.imported, each.kind) for each in imports.imports_of(dotted)}


@pytest.mark.parametrize("module", [imports, sizes])
def test_the_examples_of_the_docstrings_hold(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import p.b", TOP),
        ("import p.b as other", TOP),
        ("from p import b", TOP),
        ("from p.b import name", TOP),
        ("from p.b import *", TOP),
        ("from . import b", TOP),
        ("from .b import name", TOP),
        ("class C:\n    from p import b", TOP),
        ("try:\n    import p.b\nexcept ImportError:\n    pass", TOP),
        ("import importlib\nb = importlib.import_module('p.b')", TOP),
        ("def f():\n    from p.b import name", FUNCTION),
        ("class C:\n    async def f(self):\n        if self:\n            import p.b", FUNCTION),
        ("def f():\n    return importlib.import_module('p.b')", FUNCTION),
        ("b = lambda: __import__('p.b')", FUNCTION),
        ("def f():\n    return sys.modules['p.b'].name", HIDDEN),
        ("b = sys.modules.get('p.b')", HIDDEN),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import p.b", TOP),
    ],
)
def test_every_form_of_an_import_is_found(source: str, kind: str) -> None:
    assert found(a=source, b="") == {("p.a", "p.b", kind)}


@pytest.mark.parametrize(
    "source",
    [
        "if TYPE_CHECKING:\n    from p import b",
        "if typing.TYPE_CHECKING:\n    import p.b",
        "def f():\n    if TYPE_CHECKING:\n        import p.b",
        "import numpy, pb, p.a",
        "from other.b import p",
        "torch = sys.modules.get('torch')",
        "names = {'p.b': 1}.get('p.b')",
        "'''from p import b'''  # import p.b",
    ],
)
def test_what_never_runs_or_imports_something_else_is_left_out(source: str) -> None:
    assert not found(a=source, b="")


def test_relative_imports_begin_at_the_folder_of_the_module() -> None:
    inner = "from . import x\nfrom .. import low\nfrom ..low import y"
    assert found(low="", f="from .inner import x\nfrom .. import low", f__inner=inner) == {
        ("p.f", "p.f.inner", TOP),
        ("p.f", "p.low", TOP),
        ("p.f.inner", "p.f", TOP),
        ("p.f.inner", "p.low", TOP),
    }


def chain(*names: str) -> list[Import]:
    return [Import(name, below, TOP, 1) for name, below in itertools.pairwise(names)]


def test_a_level_is_the_longest_chain_and_a_circle_is_one_module_of_it() -> None:
    assert imports.levels("abcd", [*chain(*"abcd"), *chain(*"ad")]) == {"a": 4, "b": 3, "c": 2, "d": 1}
    assert imports.levels("abcd", [*chain(*"abcd"), *chain(*"cb")]) == {"a": 3, "b": 2, "c": 2, "d": 1}
    assert imports.levels("ab", chain(*"abc")) == {"a": 2, "b": 1}, "c is not among the modules"
    assert imports.levels("ab", []) == {"a": 1, "b": 1}


def test_circles_are_found_whole_and_apart() -> None:
    assert imports.circles("abcde", chain(*"abcde")) == []
    assert imports.circles("abcdef", [*chain(*"abca"), *chain(*"cd"), *chain(*"efe")]) == [list("abc"), list("ef")]
    assert imports.circles("ab", chain(*"abca")) == [], "the circle goes through a module that is left out"


def test_only_imports_from_a_lower_floor_to_a_higher_one_are_upward() -> None:
    floors = [["rng"], ["memory", "data"], ["loader"]]
    bad = [*chain("p.rng", "p.data.base"), *chain("p.memory.codec", "p.loader")]
    good = [*chain("p.loader", "p.data.base", "p.memory", "p.rng"), *chain("p.memory", "p.data")]
    unknown = [*chain("p.rng", "p.new", "p.loader"), *chain("p.rng", "p")]
    assert imports.upward([*bad, *good, *unknown], floors) == bad


def test_sources_are_read_by_dotted_name(tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "f").mkdir(parents=True)
    for name in ("__init__", "a", "f/__init__", "f/b"):
        (package / f"{name}.py").write_text(f"# {name} \N{GREEK SMALL LETTER PI}\n", encoding="utf-8")
    (package / "f" / "notes.txt").write_text("")
    sources = imports.read_sources(package)
    assert list(sources) == ["p", "p.a", "p.f", "p.f.b"]
    assert sources["p.f"].startswith("# f/__init__ \N{GREEK SMALL LETTER PI}")
