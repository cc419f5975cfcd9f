"""A public name keeps its signature, or CHANGELOG.md says what has changed; each argument has a type and a text."""

import inspect
import json
import re
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import NoReturn

import pytest
from signatures import FILE, changes, merged, sections, shown, signatures, unnamed

from sharded_loader import Lease, LoaderStats

pytestmark = pytest.mark.lint

LAYERS = json.loads(FILE.read_text(encoding="utf-8"))


def test_a_signature_changes_only_with_a_line_in_the_changelog() -> None:
    top, *_ = sections()
    advice = (
        f"Public signatures have changed. For each, add a line with the name in backquotes under [{top}] in "
        f"CHANGELOG.md, then run `python -m tests.signatures --write`"
    )
    assert changes(merged(LAYERS), signatures()) == {}, advice
    _, *later = LAYERS
    assert {at: names for at in later if (names := unnamed(LAYERS[at], sections().get(at, "")))} == {}, advice


def test_a_change_without_its_line_is_noticed() -> None:
    before, now = (
        {"p.kept": "()", "p.C.changed": "()", "p.gone": "()"},
        {"p.kept": "()", "p.C.changed": "(a)", "p.new": "()"},
    )
    found = changes(before, now)
    assert found == {"p.C.changed": "(a)", "p.gone": None, "p.new": "()"}
    assert merged({"1.0": before, "1.1": found}) == {**now, "p.gone": None}
    assert changes(merged({"1.0": before, "1.1": found}), now) == {}
    assert unnamed(found, "- `C.changed(a=)` is there; gone is named without backquotes; so is `news`.") == [
        "p.gone",
        "p.new",
    ]


def undocumented(name: str, call: object, text: str) -> Iterator[str]:
    """The arguments of a function that have no type, or of which its docstring says nothing before the example."""
    if not text:
        yield f"{name} has no docstring"
    words = set(re.findall(r"\w+", re.split(r"^ *>>> ", text, maxsplit=1, flags=re.MULTILINE)[0]))
    for one in inspect.signature(call).parameters.values():  # type: ignore[arg-type]
        if one.name not in ("self", "cls") and one.annotation not in (NoReturn, "NoReturn"):
            if one.annotation is one.empty:
                yield f"{name}: {one.name} has no type"
            if one.name not in words:
                yield f"{name}: its docstring does not name {one.name}"


MADE_BY_THE_LOADER = (BaseException, Lease, LoaderStats)


def test_every_public_name_has_a_docstring_and_every_argument_a_type_and_a_text() -> None:
    found = []
    own = {name: members for name, members in shown().items() if name.count(".") < 3}  # not the types in signatures
    for name, members in own.items():
        one = resolve_name(name)
        is_made = inspect.isclass(one) and "__init__" in vars(one) and not issubclass(one, MADE_BY_THE_LOADER)
        if inspect.isfunction(one) or (is_made and inspect.isfunction(one.__init__)):
            found += undocumented(name, one, inspect.getdoc(one) or "")
        methods = {member: inspect.getattr_static(one, member, None) for member in members}
        for member, method in methods.items():
            if inspect.isfunction(method) and method.__module__.startswith("sharded_loader"):
                found += undocumented(f"{name}.{member}", method, inspect.getdoc(getattr(one, member)) or "")
    assert found == []
