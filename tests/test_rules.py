"""What no test may do: `make lint` reads the tests for it. The number that is left only goes down."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.changed import left_out

pytestmark = pytest.mark.lint

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "sharded_loader"

CLOCKS = {"sleep", "perf_counter", "monotonic", "time", "perf_counter_ns", "monotonic_ns", "time_ns", "process_time"}
"""Of the module `time`: a quick test waits for an event, and has `host_clock.now` in the place of a clock."""

MAY_WAIT = (
    # The harness: what stands there waits or hangs because a test asks for it.
    *("conftest.py", "failures.py", "programs.py", "samples.py", "stream_samples.py", "stress.py", "fuzz/"),
    *("docs/report_pictures.py", "damaged_records.py"),  # programs
    "simulated.py",  # a device takes real time, unless its clock is replaced
    "instruments/test_check.py",  # the source of randomness that is to be found is the time
)

SLOW = {"slow", "gpu", "frameworks", "ray", "stores"}

PRIVATE_LEFT = 122
"""Uses of private attributes of the package."""


def is_slow(marks: list[ast.expr]) -> bool:
    """Whether one of the marks is that of a test which `make test` leaves out."""
    names = (node.attr for mark in marks for node in ast.walk(mark) if isinstance(node, ast.Attribute))
    return not SLOW.isdisjoint(names)


def clocks(node: ast.AST) -> Iterator[int]:
    """The lines that ask a clock, outside of tests that are slow."""
    marks = [one for one in getattr(node, "decorator_list", ()) if "parametrize" not in ast.unparse(one)]
    if is_slow(marks):
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
        if node.attr in CLOCKS:
            yield node.lineno
    elif isinstance(node, ast.ImportFrom) and node.module == "time":
        yield from (node.lineno for alias in node.names if alias.name in CLOCKS)
    for child in ast.iter_child_nodes(node):
        yield from clocks(child)


def asks_clocks(tree: ast.Module) -> int:
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    marks = [node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    return 0 if is_slow(marks) else len([*clocks(tree)])


def test_quick_tests_ask_no_clock_and_do_not_sleep() -> None:
    found = {name: clocks for name, (clocks, _) in counted().items() if clocks and not name.startswith(MAY_WAIT)}
    assert found == {}


@functools.cache
def private_names() -> set[str]:
    """Names with one underscore that the package gives to functions, classes and attributes."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_uses(tree: ast.Module) -> int:
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in private_names()]
    return sum(ast.unparse(node.value) not in ("self", "cls") for node in used)


@functools.cache
def counted() -> dict[str, tuple[int, int]]:
    """Clocks and private attributes by file. No tree is kept: together they have 100 MB."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[path.relative_to(TESTS).as_posix()] = asks_clocks(tree), private_uses(tree)
    return found


def test_private_attributes_of_the_package_are_used_no_more_often_than_before() -> None:
    found = {name: private for name, (_, private) in counted().items() if private}
    assert sum(found.values()) <= PRIVATE_LEFT, found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import time\ndef test_it():\n    time.sleep(1)", 1),
        ("from time import monotonic", 1),
        ("class Late:\n    def __getitem__(self, index):\n        time.sleep(0.1)", 1),
        ("@pytest.mark.slow\ndef test_it():\n    time.sleep(1)", 0),
        ("pytestmark = [pytest.mark.slow]\ntime.sleep(1)", 0),
        ("@pytest.mark.parametrize('x', [param(1, marks=pytest.mark.slow)])\ndef test_it(x): time.time()", 1),
        ("output.time.monotonic, found.sleep(1), time.strftime('x')", 0),
    ],
)
def test_a_clock_is_found(source: str, count: int) -> None:
    assert asks_clocks(ast.parse(source)) == count


@pytest.mark.parametrize(
    ("changed", "runs", "rests"),
    [
        (["sharded_loader/loader/loader.py"], {"mixing", "drop_in", "storage"}, set()),
        (["tests/conftest.py", "sharded_loader/mixing/schedule.py"], {"mixing", "storage"}, set()),
        (["sharded_loader/mixing/schedule.py", "docs/index.md"], {"mixing"}, {"storage", "drop_in"}),
        (["sharded_loader/torch.py"], {"drop_in", "integrations"}, {"mixing"}),
        (["tests/recordio/test_files.py"], {"recordio", "storage", "caching", "mixing", "cli"}, {"batchify"}),
        (["CHANGELOG.md"], set(), {"mixing", "drop_in", "storage"}),
    ],
)
def test_satellites_rest_that_a_change_does_not_reach(changed: list[str], runs: set[str], rests: set[str]) -> None:
    found = {folder.removeprefix("tests/") for folder in left_out(changed)}
    assert found >= rests and not found & runs
