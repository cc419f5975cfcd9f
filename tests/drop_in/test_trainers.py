"""What Lightning and Accelerate do to a loader is seen from the functions that have called it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sharded_loader import ShardedDataLoader
from sharded_loader.drop_in.trainers import called_by, counted_by_fabric, fetched_by_lightning, refuse_skipping
from sharded_loader.torch import DataLoader


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


class FitLoop:
    """What Lightning's loop knows while it saves a checkpoint."""

    def __init__(self, ahead: int, is_over: bool) -> None:
        self._data_fetcher = types.SimpleNamespace(batches=[None] * ahead)
        self.epoch_loop = types.SimpleNamespace(_num_ready_batches_reached=lambda: is_over)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [ShardedDataLoader, DataLoader])
def test_what_lightning_has_fetched_ahead_is_not_done(monkeypatch: pytest.MonkeyPatch, make: Any, stream: bool) -> None:
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    module = types.ModuleType("lightning.pytorch.loops.fit_loop")
    exec("def on_save_checkpoint(self): return self.state_dict()", vars(module))

    def saved(loader: Any, **knows: Any) -> Any:
        loop: Any = FitLoop(**knows)
        loop.state_dict = loader.state_dict
        return module.on_save_checkpoint(loop)

    def rest(state: Any) -> list[list[int]]:
        other = make(Stream() if stream else range(8), batch_size=2)
        other.load_state_dict(state)
        return [batch.tolist() for batch in other]

    loader = make(Stream() if stream else range(8), batch_size=2)
    batches = iter(loader)
    next(batches), next(batches)
    assert rest(loader.state_dict()) == rest(saved(loader, ahead=0, is_over=False)) == [[4, 5], [6, 7]]
    assert rest(saved(loader, ahead=1, is_over=False)) == [[2, 3], [4, 5], [6, 7]]
    if stream or make is DataLoader:  # Lightning tells our samplers the epoch
        assert rest(saved(loader, ahead=0, is_over=True)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert fetched_by_lightning() == (0, False)


class Stream(torch.utils.data.IterableDataset[int]):
    """Iterable data."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Wrapper:
    """What Fabric makes of a loader."""

    _num_iter_calls = 1


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_goes_on_to_count_from_the_epoch_of_a_state(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    module = types.ModuleType(f"{package}.wrappers")
    exec("def __iter__(self): return self.count()", vars(module))
    wrapper: Any = Wrapper()
    wrapper.count = lambda: counted_by_fabric(3)
    assert module.__iter__(wrapper)
    assert wrapper._num_iter_calls == 4
    assert not counted_by_fabric(3)
    assert not module.__iter__(types.SimpleNamespace(count=wrapper.count))
