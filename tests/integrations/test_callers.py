"""A function of another library is found among the callers, by its name and its package."""

from __future__ import annotations

import sys
import types

import pytest

from sharded_loader import ShardedDataLoader
from sharded_loader.integrations.callers import called_by, refuse_skipping


def library() -> types.ModuleType:
    """A module with a function that calls what it is given."""
    module = types.ModuleType("accelerate.data_loader")
    exec("def skip_first_batches(function): return function()", vars(module))
    return module


def test_a_caller_is_found_by_its_name_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    skip = library().skip_first_batches
    frame = skip(lambda: called_by("skip_first_batches", "accelerate"))
    assert frame.f_code.co_name == "skip_first_batches"
    assert skip(lambda: called_by("prepare", "accelerate")) is None
    assert skip(lambda: called_by("skip_first_batches", "lightning")) is None
    assert called_by("skip_first_batches", "accelerate") is None


def test_only_iterable_data_refuses_to_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    skip = library().skip_first_batches
    stream, listed = ShardedDataLoader(lambda: range(4), 2), ShardedDataLoader(range(4), 2)
    refuse_skipping(stream)
    with pytest.raises(TypeError, match=r"prepare\(\)"):
        skip(lambda: stream.multiprocessing_context)
    assert skip(lambda: listed.multiprocessing_context) is None
