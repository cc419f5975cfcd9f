"""Imports go downwards: no circle, none hidden, none from a lower floor to a higher one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.imports import HIDDEN, Import, circles, imports_of, parsed, read_sources, upward
from benchmarks.road import lost, read_targets
from benchmarks.sizes import FLOORS, OPTIONAL, out_of_core, sizes_of
from sharded_loader import PROVIDED, extend

ROOT = Path(__file__).parents[1]
SOURCES = read_sources(ROOT / "sharded_loader")


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    found = imports_of(SOURCES)
    parsed.cache_clear()  # 100 MB, which each fork of a later test would copy
    return found


def test_no_modules_import_each_other_and_no_import_goes_upwards_or_is_hidden(imports: list[Import]) -> None:
    assert circles(SOURCES, imports) == []
    assert upward(imports, FLOORS) == []
    assert [found for found in imports if found.kind == HIDDEN] == []


def test_the_core_imports_no_satellite(imports: list[Import]) -> None:
    assert out_of_core(imports) == []


BESIDE_THE_SEAM = {
    "batchify": 22,
    "caching": 25,
    "cli": 6,
    "demo": 1,
    "drop_in": 77,
    "instruments": 23,
    "integrations": 6,
    "mixing": 27,
    "parallel": 9,
    "ray": 25,
    "recordio": 7,
    "resident": 22,
    "samplers": 32,
    "storage": 13,
    "torch": 26,
}
"""How many other names of the core each satellite imports. A number may only go down."""


def test_satellites_take_the_names_of_the_seam_from_the_seam() -> None:
    """And few others of the core: what many need is to stand in the seam."""
    home_of = {name: f"sharded_loader.{home}" for home, names in extend.HOMES.items() for name in names.split()}
    beside: dict[str, set[tuple[str, str]]] = {}
    for module, source in SOURCES.items():
        room = module.split(".")[1] if "." in module else ""
        if room not in OPTIONAL or room == "extend":
            continue
        for node in ast.walk(parsed(source)):
            home = (isinstance(node, ast.ImportFrom) and node.module) or ""
            if not home.startswith("sharded_loader.") or home.split(".")[1] in OPTIONAL:
                continue
            names = {alias.name for alias in node.names}
            assert [name for name in names if home_of.get(name) == home] == [], f"{module} takes them from {home}"
            beside.setdefault(room, set()).update((home, name) for name in names if ".base." not in home)
    assert {room: len(names) for room, names in beside.items() if names} == BESIDE_THE_SEAM


def test_each_name_of_the_seam_is_there_and_says_what_it_is() -> None:
    for name in extend.__all__:
        assert getattr(extend, name).__doc__, name
    stub = (ROOT / "sharded_loader" / "extend.pyi").read_text(encoding="utf-8")
    typed = re.findall(r"^from sharded_loader\.(\S+) import (\w+) as \2$", stub, re.MULTILINE)
    assert typed == [(home, name) for home, names in extend.HOMES.items() for name in names.split()]


def test_what_satellites_give_to_the_core_is_there() -> None:
    for place in PROVIDED.values():
        module, _, name = place.partition(":")
        assert module in SOURCES and re.search(rf"^(class|def) {name}\b", SOURCES[module], re.MULTILINE)


@pytest.mark.slow
def test_no_target_of_the_sizes_that_was_reached_is_lost() -> None:
    sizes, _ = sizes_of(SOURCES)
    assert lost(sizes) == []
    assert {name for name in read_targets() if ", " not in name} <= sizes.keys()


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_every_floor_has_modules(floor: int) -> None:
    """The test above checks nothing of a floor whose names are gone."""
    assert any(name.split(".")[1] in FLOORS[floor] for name in SOURCES if "." in name)


def test_every_module_stands_on_a_floor() -> None:
    known = {room for floor in FLOORS for room in floor}
    assert [name for name in SOURCES if "." in name and name.split(".")[1] not in known] == []


def test_every_room_has_tests() -> None:
    rooms = [path.parent for path in (ROOT / "sharded_loader").rglob("__init__.py") if path.parent.parent != ROOT]
    missing = [room.name for room in rooms if not any((ROOT / "tests").rglob(f"{room.name}/test_*.py"))]
    assert missing == []
