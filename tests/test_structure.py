"""Imports go downwards: no circle, none hidden, none from a lower floor to a higher one."""

import ast
import re
from pathlib import Path

import pytest

import sharded_loader
from benchmarks.imports import HIDDEN, Import, circles, imports_of, parsed, read_sources, upward
from benchmarks.road import lost, read_targets
from benchmarks.sizes import FLOORS, OPTIONAL, out_of_core, sizes_of
from sharded_loader import PROVIDED

pytestmark = pytest.mark.lint

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


def room_of(module: str) -> str:
    """The folder below the package, or the module there; the package itself has none."""
    return f"{module}.".split(".")[1]


def names_of_seam() -> dict[str, list[str]]:
    """The names in the stub of each module of the seam."""
    found = {}
    for path in sorted((ROOT / "sharded_loader" / "extend").glob("*.pyi")):
        _, _, *lines = path.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if not re.fullmatch(r"from \S+ import (\w+) as \1", line)] == [], path
        found[f"sharded_loader.extend.{path.stem}".removesuffix(".__init__")] = [line.split()[-1] for line in lines]
    return found


def imported_by_satellites() -> list[tuple[str, str, str]]:
    """Each import of the core or of the seam by a satellite: the satellite, the module, the name.

    A whole module of the seam is imported under another name, ``core``: then each ``core.name`` counts.
    """
    found, seam = [], "sharded_loader.extend"
    for satellite in (module for module in SOURCES if room_of(module) in {*OPTIONAL} - {"extend"}):
        whole = dict(re.findall(rf"^from {seam} import (\w+) as (\w+)$", SOURCES[satellite], re.MULTILINE))
        for topic, alias in whole.items():
            used = set(re.findall(rf"\b{alias}\.(\w+)", SOURCES[satellite]))
            found += [(satellite, f"{seam}.{topic}", name) for name in used]
        for node in ast.walk(parsed(SOURCES[satellite])):
            if isinstance(node, ast.Import):
                found += [(satellite, alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{satellite}: give the whole name of the module, as elsewhere"
                names = [alias.name for alias in node.names if node.module != seam or alias.name not in whole]
                found += [(satellite, node.module or "", name) for name in names]
    rooms = {*OPTIONAL} - {"extend"}
    return [one for one in found if one[1].split(".")[0] == "sharded_loader" and room_of(one[1]) not in rooms]


def test_satellites_import_the_core_only_through_the_seam() -> None:
    """What they need stands in a stub of ``sharded_loader/extend``, or is a public name of the package."""
    allowed = {**names_of_seam(), "sharded_loader": [*sharded_loader.__all__, *OPTIONAL, "__version__"]}
    assert [one for one in imported_by_satellites() if one[2] not in allowed.get(one[1], ())] == []


def test_each_name_on_the_second_shelf_of_the_seam_is_used_by_a_satellite() -> None:
    """What nobody uses is taken out: so the stubs say what the core has to go on having."""
    used = {(module, name) for _, module, name in imported_by_satellites()}
    for module, names in names_of_seam().items():
        assert module == "sharded_loader.extend" or {(module, name) for name in names} <= used


def test_what_satellites_give_to_the_core_is_there() -> None:
    for place in PROVIDED.values():
        module, _, name = place.partition(":")
        assert module in SOURCES and re.search(rf"^(class|def) {name}\b", SOURCES[module], re.MULTILINE)


def test_no_target_of_the_sizes_that_was_reached_is_lost() -> None:
    sizes, _ = sizes_of(SOURCES)
    assert lost(sizes) == []
    assert {name for name in read_targets() if ", " not in name} <= sizes.keys()


def test_every_module_stands_on_a_floor_and_every_floor_has_modules() -> None:
    rooms = {room_of(name) for name in SOURCES if "." in name}
    assert rooms <= {room for floor in FLOORS for room in floor}
    assert all(rooms & {*floor} for floor in FLOORS)


def test_every_room_has_tests() -> None:
    rooms = [path.parent for path in (ROOT / "sharded_loader").rglob("__init__.py") if path.parent.parent != ROOT]
    assert [room.name for room in rooms if not any((ROOT / "tests").rglob(f"{room.name}/test_*.py"))] == []
