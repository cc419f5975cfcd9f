"""The road of a batch: counted on given events and sources, and once for real."""

from __future__ import annotations

import doctest
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import imports, road, sizes, walk
from benchmarks.imports import FUNCTION, HIDDEN, TOP, Import, imports_of
from benchmarks.walk import Step

ROOT = os.sep.join(["", "here", "p"])
A, B = (os.sep.join([ROOT, *names]) for names in (["a.py"], ["low", "b.py"]))
OUTSIDE = os.sep.join(["", "here", "p_tests", "c.py"])


# -- walks ------------------------------------------------------------------------------------------------------


def test_a_walk_holds_the_calls_inside_the_folder_with_their_depth() -> None:
    events = [
        ("return", A, "opened_before", 1),
        ("call", A, "f", 2),
        ("call", OUTSIDE, "user", 3),
        ("call", B, "g", 4),
        ("return", B, "g", 4),
        ("return", OUTSIDE, "user", 3),
        ("call", B, "g", 4),
        ("return", B, "g", 4),
        ("return", A, "f", 2),
        ("call", B, "h", 5),
    ]
    steps = walk.walk_of(events, ROOT)
    assert steps == [
        Step("a.py", "f", 2, 0),
        Step("low/b.py", "g", 4, 1),
        Step("low/b.py", "g", 4, 1),
        Step("low/b.py", "h", 5, 0),
    ]
    assert walk.counts_of(steps) == {"calls": 4, "functions": 3, "files": 2, "changes of file": 1}


def test_the_summary_is_one_of_the_steady_turns_and_shows_their_most_frequent_median_walk() -> None:
    f, g, seam = (Step(file, name, 1, 0) for file, name in (("a", "f"), ("b", "g"), ("c", "seam")))
    steady = [[f], [f, g], [f, g], [g, f], [f, g, f], [f, f]]
    epoch = [[seam], [seam], *steady, [seam], [seam] * 9]
    summary = walk.summary_of([epoch])
    assert summary["epoch"] == {"functions": 2, "files": 2}
    counts = {"calls": 2, "functions": 2, "files": 2, "changes of file": 1}
    assert summary["next()"] == counts | {"mean calls": 2, "mean changes of file": 5 / 6}
    assert summary["walk"] == (f, g)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 records the drop in no turn")
def test_each_turn_of_a_loop_is_recorded_from_its_next_to_the_drop_of_the_batch_before(tmp_path: Path) -> None:
    inner, source = ModuleType("inner"), "def read(n):\n    return n\nclass Batch:\n    def __del__(self): pass"
    exec(compile(source, str(tmp_path / "p" / "inner.py"), "exec"), vars(inner))

    def user(number: int) -> int:
        return inner.read(number)

    class Loader:
        def __iter__(self) -> Iterator[object]:
            for number in range(4):
                user(number)
                yield inner.Batch()

    walks = walk.record_walks(Loader(), str(tmp_path / "p"), epochs=2, pause=0)
    names = [[[step.function.rpartition(".")[2] for step in turn] for turn in epoch] for epoch in walks]
    assert names == [[["read"], *[["read", "__del__"]] * 3]] * 2, "the turn that ends an epoch is left out"
    assert sys.getprofile() is None


# -- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("\n# comment\n\n", 0),
        ('"""Docstring\n\nof three lines."""\nx = 1\n', 1),
        ('x = 1\n"""About x."""\n', 1),
        ('def f():\n    """Text."""\n    return """\n\nnot a docstring\n"""\n', 4),
        ("x = [  # comment\n    1,\n\n    # comment\n    2,\n]\n", 4),
        ("if x: y = 1; z = 2\n", 1),
        ("x = 1 + \\\n    2\n", 2),
        ("x = 1", 1),
    ],
)
def test_code_lines_are_neither_blank_nor_comments_nor_docstrings(source: str, lines: int) -> None:
    assert sizes.code_lines(source) == lines


def test_a_package_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "FLOORS", (("rng",), ("memory",), ("data",), ("loader",), ("cli",)))
    package = {
        "p": "import p.loader\n",
        "p.__main__": "import p.cli\n",
        "p.cli": "import p.loader\n",
        "p.data": "",
        "p.data.base": "import p.memory.codec\nimport sys\nsys.modules.get('p.loader')\n",
        "p.loader": "import p.data.base\n",
        "p.memory": "",
        "p.memory.arena": "import p.rng  # type: ignore\n",
        "p.memory.codec": "import p.memory.arena\n" + "x = 1\n" * 49,
        "p.rng": "def f():\n    from p.memory.arena import x\n",
    }
    numbers, notes = sizes.sizes_of(package)
    assert numbers == {
        "code lines": 60,
        "code lines of the core": 58,
        "modules": 8,
        "modules of the core": 6,
        "modules of less than 50 code lines": 5,  # p, p.__main__, p.data, p.memory and p.memory.codec are none
        "rooms of the core": 4,
        "arrows between rooms of the core": 4,
        "floors of rooms": 4,  # cli, loader, data, memory with rng
        "levels of modules": 6,  # __main__, cli, loader, data.base, memory.codec, memory.arena with rng
        "circles of modules": 2,
        "circles of folders": 2,
        "upward imports": 2,
        "hidden imports": 1,
        "functions over 50 code lines": 0,
        "class names with several meanings": 0,
        "type: ignore": 1,
    }
    assert "circle of modules: p.memory.arena, p.rng" in notes
    assert "circle of folders: p.data, p.loader" in notes
    assert "upward: p.rng, line 2, imports p.memory.arena" in notes
    assert "hidden: p.data.base, line 3, imports p.loader" in notes


def test_long_functions_are_named_but_neither_constructors_nor_those_of_the_programs() -> None:
    body = "    x = [\n" + "        1,\n\n" * 47 + "    ]\n"  # 49 code lines
    method = "\n".join("    " + line for line in f"{body}    y = 1".splitlines())
    source = (
        f'def fits():\n    """Text\n    of two lines."""\n{body}\n'
        f"async def long(\n    x,\n):\n{body}\n"
        f"class C:\n    def __init__(self):\n{method}\n\n    def f(self):\n{method}\n"
    )
    numbers, notes = sizes.sizes_of({"p": "", "p.a": source, "p.demo": source, "p.cli.b": source})
    assert numbers["functions over 50 code lines"] == 2
    assert notes[:2] == ["long: p.a.long has 52 code lines", "long: p.a.C.f has 51 code lines"]


def test_an_import_out_of_the_core_is_one_of_an_optional_module_by_another_one() -> None:
    package = {"p": "", "p.cli": "import p.storage", "p.loader": "import p.pools\ndef f(): import p.ray"}
    package |= {"p.pools": "", "p.ray": "import p.pools", "p.storage": ""}
    assert sizes.core_of(package) == ["p", "p.loader", "p.pools"]
    outward = sizes.out_of_core(imports_of(package))
    assert [(found.importer, found.imported) for found in outward] == [("p.loader", "p.ray")]


# -- the command ------------------------------------------------------------------------------------------------


def test_a_table_has_ratios_of_two_or_targets_of_one_with_the_distance() -> None:
    table = road.table_of({"before": {"calls": 90, "circles": 0}, "after": {"calls": 45, "circles": 1}})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert cells[0] == ["", "before", "after", "ratio"]
    assert cells[2:] == [["calls", "90", "45", "0.50"], ["circles", "0", "1", ""]]
    targets = {"calls": {"target": 40, "best": 45}, "files": {"target": 8, "best": 8}}
    lines = road.table_of({"now": {"calls": 45, "files": 8, "lines": 7}}, targets).splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["40, +5", "8", ""]


def test_only_better_values_are_recorded_and_a_target_that_was_reached_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(road, "TARGETS", path := tmp_path / "targets.json")
    path.write_text('{"calls": {"target": 40, "best": 45}, "files": {"target": 8, "best": 7}}')
    assert road.lost({"calls": 99, "files": 8, "lines": 1}) == []
    assert road.lost({"files": 9}) == ["files is 9; the target 8 was reached: 7"]
    road.record({"calls": 40, "files": 8, "lines": 1})
    lines = ["{", '"calls": {"target": 40, "best": 40},', '"files": {"target": 8, "best": 7}', "}"]
    assert path.read_text().splitlines() == lines
    assert road.lost({"calls": 41}) == ["calls is 41; the target 40 was reached: 40"]


@pytest.mark.slow
def test_no_target_of_a_road_that_was_reached_is_lost() -> None:
    names = [name for name in road.read_targets() if ", " in name]
    roads = [name for name in road.ROADS if any(f", {name}:" in row for row in names)]
    assert roads == ["process", "inline", "iterable", "drop-in", "device"]
    with road.Checkout(road.ROOT) as checkout:
        rows = road.rows_of({name: checkout.ask("walk", name) for name in roads})
    assert rows.keys() >= set(names)
    assert road.lost(rows) == []


@pytest.mark.parametrize(("arguments", "says"), [(["--rounds", "0"], "at least 1"), (["--pool", "x"], "unrecognized")])
def test_a_wrong_command_line_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        road.main(arguments)
    assert says in capsys.readouterr().err


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


def test_a_level_is_the_longest_chain_and_a_circle_is_found_whole_and_is_one_module_of_it() -> None:
    assert imports.levels("abcd", [*chain(*"abcd"), *chain(*"ad")]) == {"a": 4, "b": 3, "c": 2, "d": 1}
    assert imports.levels("abcd", [*chain(*"abcd"), *chain(*"cb")]) == {"a": 3, "b": 2, "c": 2, "d": 1}
    assert imports.levels("ab", chain(*"abc")) == {"a": 2, "b": 1}, "c is not among the modules"
    assert imports.levels("ab", []) == {"a": 1, "b": 1}
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
