"""What waits for the import of a module is called once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharded_loader.base.imports import call_after_import, forget_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported, and is not."""
    (tmp_path / "imported_later.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "imported_later"
    forget_import("imported_later")
    sys.modules.pop("imported_later", None)


def test_the_last_function_is_called_once_when_the_module_has_been_imported(module: str) -> None:
    called: list[Any] = []
    call_after_import(module, lambda: called.append("replaced"))
    call_after_import(module, lambda: called.append(sys.modules[module].value))
    assert called == []
    __import__(module)
    __import__(module)
    assert called == [5]
    call_after_import(module, lambda: called.append("at once"))
    assert called == [5, "at once"]


def test_an_import_that_was_forgotten_calls_nothing(module: str) -> None:
    before, called = list(sys.meta_path), []
    call_after_import(module, lambda: called.append(1))
    forget_import(module)
    __import__(module)
    assert (called, sys.meta_path) == ([], before)
