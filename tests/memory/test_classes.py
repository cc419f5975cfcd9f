"""A class that a worker names is the very class of this process, however it came into being."""

from __future__ import annotations

import gc
import sys

import cloudpickle
import pytest

from sharded_loader.memory import codec as classes
from sharded_loader.memory.codec import class_reference, is_findable, resolve_class


class Outer:
    class Inner:
        pass


def make_class(name: str = "Local") -> type:
    class Local:
        pass

    Local.__name__ = name
    return Local


def resolved(cls: type) -> type:
    function, arguments = class_reference(cls)
    assert function is resolve_class
    return resolve_class(*arguments)


@pytest.mark.parametrize(
    ("obj", "findable"),
    [(Outer, True), (Outer.Inner, True), (make_class, True), (make_class(), False), (lambda: None, False), (len, True)],
)
def test_what_is_found_under_its_name(obj: object, findable: bool) -> None:
    assert is_findable(obj) == findable


def test_a_class_whose_name_was_given_to_another_is_not_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Outer
    monkeypatch.setattr(sys.modules[__name__], "Outer", make_class())
    assert not is_findable(before)


def test_classes_arrive_by_name() -> None:
    assert resolved(Outer) is Outer and resolved(Outer.Inner) is Outer.Inner


def test_a_class_that_was_sent_by_value_is_known_by_its_tracker() -> None:
    cls = make_class()
    twin = cloudpickle.loads(cloudpickle.dumps(cls))
    assert resolved(twin) is cls


def test_among_classes_of_one_name_the_address_tells() -> None:
    one, other = make_class(), make_class()
    assert resolved(one) is one and resolved(other) is other
    module, qualname = one.__module__, one.__qualname__
    with pytest.raises(AttributeError, match=r"Local, used by a worker .* top level of a module"):
        resolve_class(module, qualname, None, 1)


def test_the_only_class_of_its_name_is_found_whatever_its_address() -> None:
    def make_only() -> type:
        class Only:
            pass

        return Only

    cls = make_only()
    assert resolve_class(cls.__module__, cls.__qualname__, None, 1) is cls


@pytest.mark.parametrize(("base", "expected"), [(object, "first"), (ValueError, "second")])
def test_a_cell_that_runs_again_takes_the_name_of_an_error_only(
    monkeypatch: pytest.MonkeyPatch, base: type, expected: str
) -> None:
    """The loop catches errors under their new name; batches that are on their way keep their class."""
    made = {
        name: type("Cell", (base,), {"__module__": "__main__", "__qualname__": "Cell"}) for name in ("first", "second")
    }
    monkeypatch.setattr(sys.modules["__main__"], "Cell", made["second"], raising=False)
    assert resolved(made["first"]) is made[expected] and resolved(made["second"]) is made["second"]


@pytest.mark.slow
def test_a_class_that_was_looked_for_is_remembered_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = make_class()
    assert resolved(cls) is cls
    with monkeypatch.context() as patched:
        patched.setattr(classes, "_all_classes", lambda: pytest.fail("walked again"))
        assert resolved(cls) is cls
    key = cls.__module__, cls.__qualname__, id(cls)
    assert key in classes._searched_classes
    del cls
    gc.collect()
    assert key not in classes._searched_classes
