"""Whatever reads rows of arrays can be kept on the devices, in whole or in part, and no batch shows how much is."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import made, until
from injection import InterruptAt, TimeIsUp, next_interrupted
from simulated import Machine, rest_beside_the_caller
from torch.utils.data import Subset, TensorDataset

from sharded_loader import ArrayDataset, Placement, ShardedDataLoader, SimpleDataset, SubsetDataset
from sharded_loader import resident as module
from sharded_loader.base.errors import LoaderClosedError
from sharded_loader.devices.accelerator import Streams
from sharded_loader.devices.copies import HOST_AHEAD, PendingCopy
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.randomness import rng as shuffle
from sharded_loader.resident import ResidentPool, load_rows, memory_of, put_rows, take_rows

N = 60


def columns() -> ArrayDataset:
    """Columns of many kinds. Each row differs."""
    numbers = np.arange(N)
    return ArrayDataset(
        image=np.arange(N * 12, dtype=">f4").reshape(N, 3, 4),
        label=torch.arange(N, dtype=torch.int16),
        wide=(numbers * 1000).astype(np.uint16)[:, None],
        even=numbers % 2 == 0,
        brain=torch.arange(2 * N).reshape(N, 2).to(torch.bfloat16),
        tiny=torch.arange(N).to(torch.float8_e5m2),
        twofold=(numbers + 1j * numbers[::-1]).astype(np.complex128),
        none=np.zeros((N, 0), np.int32),
    )


def tensors(count: int = 2) -> TensorDataset:
    return TensorDataset(*[torch.arange(N * k, N * (k + 2)).reshape(N, 2) for k in range(count)])


def mapped(folder: Path) -> np.ndarray:
    np.save(folder / "values.npy", np.arange(N * 2).reshape(N, 2))
    return np.load(folder / "values.npy", mmap_mode="r")


DATASETS: dict[str, Callable[[Path], Any]] = {
    "columns": lambda folder: columns(),
    "columns by position": lambda folder: ArrayDataset(np.arange(N) * 2, torch.arange(N)),
    "one column": lambda folder: ArrayDataset(np.arange(N) * 2),
    "take": lambda folder: columns().take(41),
    "slice": lambda folder: columns().take(58)[50:3:-3],
    "shard": lambda folder: columns().shard(3, 1),
    "split": lambda folder: columns().split([0.7, 0.3], seed=3)[0],
    "filter": lambda folder: columns().filter(lambda sample: bool(sample["even"])),
    "repeated rows": lambda folder: SubsetDataset(columns(), [5, 5, 3, 59, 5, 0, -1, 3] * 6),
    "part of a part": lambda folder: columns().split([50, 10], seed=1)[0].take(40)[3:],
    "array": lambda folder: np.arange(N * 3).reshape(N, 3),
    "array of one axis": lambda folder: np.arange(N, dtype=np.float16),
    "array that is read-only": lambda folder: np.frombuffer(np.arange(N * 2).tobytes(), np.int64).reshape(N, 2),
    "file": mapped,
    "tensor": lambda folder: torch.arange(N * 3).reshape(N, 3).to(torch.bfloat16),
    "tensor in odd order": lambda folder: torch.arange(N * 3).reshape(3, N).T,
    "SimpleDataset": lambda folder: SimpleDataset(np.arange(N)).take(50),
    "TensorDataset": lambda folder: tensors(),
    "TensorDataset of one": lambda folder: tensors(1),
    "Subset": lambda folder: Subset(tensors(), [*range(40), 3, 3]),
    "Subset of columns": lambda folder: Subset(columns(), np.arange(N)[::-1].tolist()),
    "part of a Subset": lambda folder: SimpleDataset(Subset(columns().take(50), list(range(5, 50)))).shard(2, 0),
}

SHARES = [0.6, "auto", *(pytest.param(share, marks=pytest.mark.slow) for share in (True, 1.0, 0.01))]


def seen(machine: Machine | None, batches: Any) -> Iterator[Any]:
    """Everything about batches: structure, types, shapes and bytes."""
    for batch in batches:
        if machine is not None:
            machine.finish()
        yield described(batch)


def described(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: described(part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree), [described(part) for part in tree]
    assert type(tree) is torch.Tensor
    assert not tree.is_inference()
    return tree.dtype, tuple(tree.shape), tree.stride(), tree.contiguous().view(-1).view(torch.uint8).tolist()


def enough_for(dataset: Any, rows: int) -> tuple[int, int]:
    """Memory of a device that has room for some rows, beside the reserve."""
    (batch,) = ShardedDataLoader(dataset, len(dataset))
    tensors = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
    nbytes = sum(tensor.nbytes for tensor in tensors) // len(dataset) * rows
    return nbytes + 1000, 4000  # the reserve is 1000


def both(machine: Machine, dataset: Any, resident: Any, **options: Any) -> tuple[ShardedDataLoader, ShardedDataLoader]:
    """A loader that keeps rows on two devices, and one that keeps none."""
    options = {"seed": 5} | options
    return (
        made(dataset, devices=machine.devices, resident=resident, **options),
        made(dataset, devices=["cpu", "cpu"], **options),
    )


def kept(machine: Machine, data: Any, size: int, share: Any = 0.5, **options: Any) -> ShardedDataLoader:
    """A loader that keeps rows on the first device."""
    return made(data, size, device=machine.devices[0], resident=share, **options)


# -- what is kept ---------------------------------------------------------------------------------------------


@pytest.mark.costly(2)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_batches_are_those_that_are_sent_to_the_last_bit(
    machine: Machine, make: Callable[[Path], Any], share: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make(tmp_path)
    if share == "auto":
        machine.memory_bytes = enough_for(dataset, 20)
    kept = {0.6: round(0.6 * len(dataset)), 0.01: 1, "auto": 20}.get(share, len(dataset))
    for options in ({"devices": machine.devices}, {"device": machine.devices[0]}):
        on_host = {name: ["cpu", "cpu"] if name == "devices" else "cpu" for name in options}
        with (
            made(dataset, 7, shuffle=True, seed=5, resident=share, **options) as loader,
            made(dataset, 7, shuffle=True, seed=5, **on_host) as sent,
        ):
            for _ in range(2):
                assert list(seen(machine, loader)) == list(seen(None, sent))
            partly = f" ({kept} of {len(dataset)} samples)" if kept < len(dataset) else ""
            assert f"resident on privateuseone:0{partly}, " in repr(loader)


OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 16},
    "rolled over": {"batch_size": 16, "shuffle": True, "last_batch": "rollover"},
    "weighted": {"batch_size": 15, "shuffle": True, "shard_weights": [2, 1]},
    "a rank": {"batch_size": 8, "shuffle": True, "num_replicas": 3, "rank": 1},
    "given batches": {"batch_sampler": [[0, 5, -1], [7], [2, 2, 3, 59, 59, 2], [59, 58, 58], [1, 0], [40, 2]]},
    "given shards": {"batch_sampler": [[[0, 5], [-1]], [[7]], [[59, 59], [0, 0]]]},
}


@pytest.mark.costly(3)
@pytest.mark.parametrize("share", [True, 0.5, 0.02])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_order_and_shards_do_not_depend_on_what_is_kept(machine: Machine, options: dict[str, Any], share: Any) -> None:
    loader, sent = both(machine, columns(), share, **options)
    with loader, sent:
        for _ in range(2):
            assert list(seen(machine, loader)) == list(seen(None, sent))


def test_keys_that_are_no_row_numbers_are_read_as_always(machine: Machine) -> None:
    keys = [(3, 1), (5, 0), (59, 1)]
    loader, sent = both(machine, np.arange(N * 2).reshape(N, 2), "auto", batch_size=2, sampler=keys)
    with loader, sent:
        assert list(seen(machine, loader)) == list(seen(None, sent))


def test_a_part_keeps_its_own_rows_only(machine: Machine) -> None:
    whole = ArrayDataset(np.arange(10_000))
    machine.memory_bytes = 4000, 4000  # 3,000 bytes beside the reserve
    with kept(machine, whole.shard(100, 99), 50, True) as loader:
        first = next(iter(loader))
        machine.finish()
        assert first.tolist() == list(range(9900, 9950))
        assert "resident on privateuseone:0, " in repr(loader)


def test_rows_are_copied_in_stretches(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, load = [], machine.load
    monkeypatch.setattr(machine, "load", lambda device, to, host: copied.append(len(host)) or load(device, to, host))
    monkeypatch.setattr(module, "LOADED_AT_ONCE", 100)
    with kept(machine, np.arange(N), N) as loader:
        (batch,) = seen(machine, loader)
    assert copied == [12, 12, 6]
    assert batch == described(torch.arange(N))


def test_it_resumes_in_mid_epoch_with_another_share(machine: Machine) -> None:
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True}
    loader, sent = both(machine, columns(), 0.5, **options)
    other, _ = both(machine, columns(), 0.1, **options)
    with loader, sent, other:
        whole = list(seen(None, sent))
        batches = iter(loader)
        first = list(seen(machine, [next(batches), next(batches)]))
        other.load_state_dict(loader.state_dict())
        assert first + list(seen(machine, other)) == whole


# -- what is sent ---------------------------------------------------------------------------------------------


def test_rows_are_sent_from_pinned_memory_and_the_rest_is_not(machine: Machine) -> None:
    with kept(machine, np.arange(N * 100).reshape(N, 100), 10) as loader:
        batches = iter(loader)
        moved = []
        for _ in range(6):
            machine.log.clear()
            next(batches)
            moved.append(sum(what == "copy" for what, _ in machine.log))
        machine.finish()
    assert moved == [1, 1, 1, 1, 1, 1]  # the row numbers, or the rows: no batch is mixed
    with kept(machine, np.arange(N), 20) as loader:
        list(loader)
    assert machine.faults == []  # a copy from other memory is one


def test_a_host_that_runs_ahead_holds_pinned_memory_of_few_batches(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device does nothing until the host waits for it, and the thread waits no shorter than the caller."""
    rest_beside_the_caller(monkeypatch)
    with kept(machine, np.arange(N), 2, 0.01) as loader:
        batches = iter(loader)
        for _ in range(HOST_AHEAD):
            next(batches)
        assert machine.blocked == 0
        next(batches)
        assert machine.blocked > 0
        assert loader._placement.clock.behind > 0
        machine.finish()


def test_batches_come_on_the_stream_of_the_caller(machine: Machine) -> None:
    """Iterators take turns on two streams: each batch belongs to the stream that asks for it."""
    device = machine.devices[0]
    home, mine = machine.stream(device), machine.new_stream(device)
    for share in (True, 0.5):
        found: list[Any] = []
        with kept(machine, np.arange(12), 4, share) as loader:
            iterators = [iter(loader), iter(loader)]
            for number in range(3):
                for batches, stream in zip(iterators, (home, mine), strict=True):
                    machine.log.clear()
                    with machine.on(device, stream):
                        machine.kernel(device, next(batches), lambda values, found=found: found.append(values.tolist()))
                    if share is True:
                        assert {name for what, name in machine.log if what in ("allocate", "copy")} == {stream.name}
                    if not number:  # the columns are of the first stream
                        assert (("record_use", mine.name) in machine.log) is (stream is mine)
            machine.finish()
        assert sorted(found) == sorted(2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])


def test_batches_that_are_begun_in_inference_mode_can_be_trained_with(machine: Machine) -> None:
    with kept(machine, np.arange(12.0), 4) as loader:
        with torch.inference_mode():
            batches = list(loader)
        machine.finish()
        assert not any(batch.is_inference() for batch in batches)


def test_iterators_that_are_dropped_and_mixed_lose_nothing(machine: Machine) -> None:
    loader, sent = both(machine, columns(), 0.4, batch_size=7, shuffle=True)
    with loader, sent:
        whole = list(seen(None, sent))
        first, dropped = iter(loader), iter(loader)
        head = list(seen(machine, [next(first)]))
        next(dropped)
        del dropped
        assert head + list(seen(machine, first)) == whole


def test_a_refreshed_dataset_is_copied_again_before_the_next_epoch(machine: Machine) -> None:
    data = TensorDataset(torch.arange(8), torch.arange(8))
    with kept(machine, data, 4) as loader:
        under_way = iter(loader)
        next(under_way)
        data.tensors = (torch.arange(8) * 10, torch.arange(8).to(torch.uint8))
        loader.refresh()
        (second,) = seen(machine, under_way)  # goes on, over what is there
        assert second == described([torch.arange(4, 8), torch.arange(4, 8)])
        (batch, _) = seen(machine, loader)
        assert batch == described([torch.arange(4) * 10, torch.arange(4).to(torch.uint8)])
        data.tensors = (torch.arange(8), (torch.arange(8) * 1j).conj())  # no memory holds these numbers
        loader.refresh()
        (batch, _) = seen(machine, loader)
        assert batch == described([torch.arange(4), (torch.arange(4) * -1j).clone()])
        assert "resident" not in repr(loader)


def test_batches_that_were_gathered_ahead_of_a_refresh_are_gathered_again(machine: Machine) -> None:
    data = TensorDataset(torch.arange(12))
    with kept(machine, data, 2, True) as loader:
        list(islice(loader, 4))  # with the fourth batch the last two are gathered
        machine.finish()
        state = loader.state_dict()
        data.tensors = (torch.arange(12) * 10,)
        loader.refresh()
        loader.load_state_dict(state, strict=False)
        assert list(seen(machine, loader)) == [described([torch.arange(n, n + 2) * 10]) for n in (8, 10)]


def test_close_gives_the_memory_back(machine: Machine) -> None:
    loader = kept(machine, np.arange(N), 7)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(batches)
    del batches
    machine.empty_cache()
    assert machine.allocated <= 1  # the batch, until the collector comes


_ROAD = "__init__ background copies epochs iterator loader local pipeline placement pool"
MODULES = tuple(f"{name}.py" for name in _ROAD.split())


@pytest.mark.parametrize(
    ("share", "step"), [(True, 11), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((True, 1), (0.5, 1)))]
)
def test_an_interrupt_at_every_line_loses_no_batch(machine: Machine, share: Any, step: int) -> None:
    shuffled = {"shuffle": True, "seed": 1}
    wanted = [index for (index,) in made(range(3000), 1, **shuffled).__iter__()]
    with kept(machine, np.arange(6000).reshape(3000, 2), 1, share, **shuffled) as loader:
        line, fired, batches, number = 0, 2, iter(loader), 0
        while fired:
            line += step
            got, has_fired = next_interrupted(batches, line, lambda at: InterruptAt(at, MODULES))
            fired = 2 if has_fired else fired - 1  # of a batch that is kept, and of one that is sent
            got.append(next(batches))
            machine.finish()
            for batch in got:
                assert batch.tolist() == [[2 * int(wanted[number]), 2 * int(wanted[number]) + 1]]
                number += 1
        if share is True:
            assert sum(what == "allocate" for what, _ in machine.log) <= 1 + 4 * number  # the column came once
    assert machine.faults == []
    assert line > 50


@pytest.mark.parametrize("signal_name", ["SIGALRM"], indirect=True)
def test_what_a_signal_handler_raises_is_no_error_of_a_batch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, signal_name: str
) -> None:
    real, asked = module.core.checked_indices, list[int]()

    def struck(*arguments: Any, **named: Any) -> Any:
        asked.extend(arguments[1:])  # of each batch that is waited for the length; the rows are found with it by name
        if len(asked) == 2 and not named:
            signal.raise_signal(signal.SIGALRM)
        return real(*arguments, **named)

    monkeypatch.setattr(module.core, "checked_indices", struck)
    with kept(machine, np.arange(12), 4) as loader:
        batches = iter(loader)
        found = [next(batches)]
        with pytest.raises(TimeIsUp):
            next(batches)
        found += batches
        machine.finish()
    assert [batch.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_loader_that_is_closed_while_rows_are_copied_keeps_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loader = machine.load, kept(machine, np.arange(12), 4, True)
    monkeypatch.setattr(machine, "load", lambda *arguments: (load(*arguments), loader.close()))
    with pytest.raises(LoaderClosedError):
        next(iter(loader))
    machine.empty_cache()
    assert machine.allocated == 0


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_every_line_of_a_first_batch_changes_no_order(machine: Machine, step: int) -> None:
    """While a thread shuffles the next epoch, or ``next`` waits for it."""
    options: dict[str, Any] = {"shuffle": True, "seed": 1}
    with kept(machine, np.arange(30), 10, True, **options) as loader, made(range(30), 10, **options) as sent:
        line, has_fired = 0, True
        while has_fired:
            line += step
            batches = iter(loader)
            found, has_fired = next_interrupted(batches, line, lambda at: InterruptAt(at, MODULES))
            found += batches
            machine.finish()
            assert [batch.tolist() for batch in found] == [batch.tolist() for batch in sent]
    assert line > 100


# -- several batches at once ------------------------------------------------------------------------------------


def gathers(machine: Machine, loader: ShardedDataLoader, batches: Iterator[Any], count: int) -> tuple[list[int], Any]:
    """How often rows are gathered for each of the next batches, and these."""
    counts, found = [], []
    for _ in range(count):
        with mock.patch.object(machine, "take", wraps=machine.take) as take:
            found.append(next(batches))
            counts.append(take.call_count)
    machine.finish()
    return counts, found


def test_once_the_order_was_foreseen_small_batches_are_gathered_by_eights(machine: Machine) -> None:
    with kept(machine, np.arange(100), 4, True, shuffle=True, seed=1) as loader:
        first, _ = gathers(machine, loader, iter(loader), 25)
        second, _ = gathers(machine, loader, iter(loader), 25)
    assert first == [1, 1, 0, 1, 0, 0, 0] + [1, 0, 0, 0, 0, 0, 0, 0] * 2 + [1, 0]
    assert second == [1, 0, 0, 0, 0, 0, 0, 0] * 3 + [1]


def test_large_batches_are_gathered_alone_and_their_indices_are_sent_by_eights(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER_BYTES", 8192)  # of one batch, with its rows up to a multiple of 16
    with kept(machine, np.arange(6400).reshape(100, 64), 4, True) as loader:
        for _ in range(2):
            batches, sent = iter(loader), list[int]()
            for number in range(25):
                before = len(machine.log)
                counts, [batch] = gathers(machine, loader, batches, 1)
                sent.append([entry[0] for entry in machine.log[before:]].count("copy"))
                assert (counts, batch.untyped_storage().nbytes()) == ([1], 4 * 64 * 8)
                assert batch[:, 0].tolist() == [64 * index for index in range(4 * number, 4 * number + 4)]
            assert list(batches) == []
    assert sent == [1, 0, 0, 0, 0, 0, 0, 0] * 3 + [1]


def test_shards_are_gathered_by_eights_on_each_device(machine: Machine) -> None:
    data = np.arange(100)
    with made(data, 8, devices=machine.devices, resident=True, shard_weights=[3, 1]) as loader:
        list(loader)
        counts, found = gathers(machine, loader, iter(loader), 13)
    assert counts == [2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 1, 2]  # at the end of the order, each shard is careful
    assert [[shard.tolist() for shard in shards] for shards in found[:2]] == [
        [[*range(6)], [6, 7]],
        [[*range(8, 14)], [14, 15]],
    ]
    assert [len(shard) for shard in found[-1]] == [3, 1]


def test_a_wrong_guess_costs_one_gather_and_the_next_guess_is_careful(machine: Machine) -> None:
    with kept(machine, np.arange(200), 2, True) as loader:
        batches = iter(loader)
        gathers(machine, loader, batches, 20)
        loader.rescale(1, 0, batch_size=4)  # other batches of the same samples
        counts, found = gathers(machine, loader, batches, 10)
        assert [batch.tolist() for batch in found] == np.arange(40, 80).reshape(10, 4).tolist()
        assert counts == [1, 1, 0, 1, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("together", [1, 3, 8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_do_not_depend_on_how_many_are_gathered_at_once(
    machine: Machine, options: dict[str, Any], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops that are left, and go on from a state in the middle of a gather, included."""
    monkeypatch.setattr(module, "TOGETHER", together)
    options = {**options, "batch_size": 3} if "batch_size" in options else options
    loader, sent = both(machine, columns(), True, **options)
    with loader, sent:
        for is_left in (False, True, False, True):
            found = list(seen(machine, islice(loader, 2 if is_left else None)))
            if is_left:
                state = loader.state_dict()
                next(iter(loader))  # of the next epoch, which is left, too
                loader.load_state_dict(state)
                found += seen(machine, loader)
            assert found == list(seen(None, sent))


def test_a_batch_keeps_few_others_and_a_large_one_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER_BYTES", 2048)
    with kept(machine, np.zeros((N, 8)), 16, True) as loader, kept(machine, np.zeros((N, 2)), 16, True) as small:
        for batch in loader:  # 1024 bytes
            assert batch.untyped_storage().nbytes() <= 2048
        assert [batch.untyped_storage().nbytes() for batch in small] == [256, 512, 512, 192]
        monkeypatch.setattr(module, "TOGETHER_BYTES", 1023)
        assert [batch.untyped_storage().nbytes() // 64 for batch in loader] == [16, 16, 16, 12]


@pytest.mark.parametrize("size", [16, 5, 1])
def test_batches_of_one_gather_are_tensors_of_their_own(machine: Machine, size: int) -> None:
    """One may change while autograd needs another."""
    weight = torch.ones(3, requires_grad=True)
    with kept(machine, TensorDataset(torch.rand(N, 3), torch.arange(N).to(torch.uint8)), size, True) as loader:
        batches = list(loader)
        machine.finish()
        for x, y in batches:
            assert x.data_ptr() % 16 == y.data_ptr() % 16 == 0
            loss = (weight * x).sum()
            for other, _ in batches:
                if other is not x:
                    other.mul_(1)
            loss.backward()
        before = [described(batch) for batch in batches]
        for number, batch in enumerate(batches):
            assert described(batch) == before[number]
            for tensor in batch:
                tensor.fill_(7)


def test_a_loop_that_was_left_keeps_no_more_than_a_few_batches(machine: Machine) -> None:
    with kept(machine, np.arange(1600), 16, True) as loader:
        for _ in range(20):
            for number, _batch in enumerate(loader):
                if number == 5:
                    break
        del _batch
        machine.finish()
        gc.collect()
        machine.empty_cache()
        assert machine.in_use <= 2  # the column, and batches that were gathered ahead


# -- the next order ----------------------------------------------------------------------------------------------


@pytest.fixture
def shuffles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that shuffle an epoch."""
    names, real = list[str](), shuffle.shuffled

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(shuffle, "shuffled", noted)
    return names


def orders(loader: ShardedDataLoader, count: int = 1, limit: int | None = None) -> list[list[int]]:
    return [[int(i) for batch in islice(loader, limit) for i in batch] for _ in range(count)]


def test_a_thread_shuffles_the_next_epoch_during_this_one(machine: Machine, shuffles: list[str]) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 4}
    sent = orders(made(range(N), 7, **options), 3)
    del shuffles[:]
    with kept(machine, np.arange(N), 7, True, **options) as loader:
        for number in range(3):
            batches = list(loader)
            machine.finish()
            assert [i for batch in batches for i in batch.tolist()] == sent[number]
    assert "sharded_loader-order" not in {thread.name for thread in threading.enumerate()}
    assert shuffles == ["MainThread", *["sharded_loader-order"] * 3]


SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 4}

CHANGES: dict[str, Callable[[ShardedDataLoader], object]] = {
    "another epoch": lambda loader: loader.set_epoch(7),
    "a state": lambda loader: loader.load_state_dict(made(np.arange(N), 7, **SHUFFLED).state_dict()),
    "other ranks": lambda loader: loader.rescale(7, 1, batch_size=1),
    "a refresh": lambda loader: loader.refresh(),
    "another seed": lambda loader: setattr(loader.sampler, "seed", 9),
    "nothing": lambda loader: None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_order_that_was_made_for_other_facts_is_made_again(
    machine: Machine, change: Callable[..., object], shuffles: list[str]
) -> None:
    loader, sent = kept(machine, np.arange(N), 7, True, **SHUFFLED), made(np.arange(N), 7, **SHUFFLED)
    with loader, sent:
        for one in (loader, sent):
            orders(one, limit=2)
            until(lambda: "sharded_loader-order" in shuffles)
            change(one)
        for _ in range(3):
            batches = list(loader)
            machine.finish()
            assert [[int(i) for batch in batches for i in batch]] == orders(sent)


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_of_the_thread_is_raised_with_the_next_epoch_if_it_still_occurs(
    machine: Machine, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, errors = shuffle.shuffled, iter([None, *[MemoryError("full")] * times])

    def full(*key: Any) -> Any:
        if (error := next(errors, None)) is not None:
            raise error
        return real(*key)

    with kept(machine, np.arange(N), N, True, **SHUFFLED) as loader, made(np.arange(N), N, **SHUFFLED) as sent:
        wanted = orders(sent, 2)
        monkeypatch.setattr(shuffle, "shuffled", full)
        found = list(loader)
        with pytest.raises(MemoryError, match="full") if times == 2 else contextlib.nullcontext():
            found += loader
        machine.finish()
        assert [batch.tolist() for batch in found] == wanted[: 3 - times]


@pytest.mark.parametrize(
    "options", [{}, {"sampler": [3, 1, 2]}, {"shuffle": True, "resident": False}], ids=["in order", "a list", "sent"]
)
def test_there_is_no_thread_where_none_is_needed(machine: Machine, options: dict[str, Any]) -> None:
    with made(np.arange(N), 7, **{"device": machine.devices[0], "resident": True} | options) as loader:
        list(loader)
        assert "sharded_loader-order" not in {thread.name for thread in threading.enumerate()}


# -- how much fits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "asked"), [(True, 480), (0.5, 240)])
def test_rows_that_do_not_fit_are_sent_with_a_warning(machine: Machine, share: Any, asked: int) -> None:
    machine.memory_bytes = 1080, 4000
    message = rf"privateuseone:0 keeps 10 rows only \({asked} bytes of columns, room for 80\): it is sent the others"
    with kept(machine, np.arange(N), N, share) as loader:
        with pytest.warns(UserWarning, match=message) as caught:
            batches = list(seen(machine, loader))
        assert len(caught) == 1
        assert batches == [described(torch.arange(N))] == list(seen(machine, loader))
        assert "(10 of 60 samples)" in repr(loader)


def test_each_device_keeps_what_it_has_room_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = dict(zip(machine.devices, (1240, 900), strict=True))
    monkeypatch.setattr(machine, "memory_of", lambda device: (rooms[device], 4000))
    loader, sent = both(machine, SubsetDataset(np.arange(N), range(N)[::-1]), "auto", batch_size=7, shuffle=True)
    with loader, sent:
        assert list(seen(machine, loader)) == list(seen(None, sent))
        assert "resident on privateuseone:0 (30 of 60 samples), I" in repr(loader)


@pytest.mark.parametrize(("rows", "is_kept"), [(29, False), (30, True)])
def test_auto_leaves_the_reading_to_workers_if_less_than_half_fits(
    machine: Machine, worker_pool: Pool, rows: int, is_kept: bool
) -> None:
    machine.memory_bytes = 1000 + 8 * rows, 4000
    with kept(machine, np.arange(N), N, "auto", pool=worker_pool) as loader:
        (batch,) = seen(machine, loader)
        assert batch == described(torch.arange(N))
        assert loader.pool.started is not is_kept
        assert ("resident" in repr(loader)) is is_kept


def test_an_empty_dataset_and_empty_rows_need_no_room(machine: Machine) -> None:
    machine.memory_bytes = 0, 4000
    with kept(machine, np.zeros((0, 3)), 4, True) as loader:
        assert list(loader) == []
    with kept(machine, np.zeros((5, 0)), 5, True) as loader:
        assert [tuple(batch.shape) for batch in loader] == [(5, 0)]
        assert "resident" in repr(loader)


@pytest.mark.parametrize(("share", "is_kept"), [(True, True), ("auto", False)])
def test_where_a_device_does_not_tell_its_memory_it_is_tried_if_the_user_insists(
    machine: Machine, share: Any, is_kept: bool
) -> None:
    machine.memory_bytes = None
    with kept(machine, columns(), 16, share) as loader:
        batch = next(iter(loader))
        machine.finish()
        assert batch["label"].tolist() == list(range(16))
        assert ("resident on" in repr(loader)) is is_kept


# -- what is no resident row ----------------------------------------------------------------------------------


def test_a_bad_index_is_its_batch_s_error(machine: Machine) -> None:
    with made(columns(), device=machine.devices[0], resident=True, batch_sampler=[[1], [2, 500], [3]]) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(IndexError, match="epoch 0, batch 1: the sampler yielded index 500"):
            next(batches)
        third = next(batches)
        machine.finish()
        assert third["label"].tolist() == [3]


def test_on_the_cpu_batches_are_gathered_in_the_loop(worker_pool: Pool) -> None:
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 3, "devices": ["cpu", "cpu"]}
    with (
        made(columns(), pool=worker_pool, resident=True, **options) as loader,
        made(columns(), **options) as plain,
    ):
        assert list(seen(None, loader)) == list(seen(None, plain))
        assert not loader.pool.started


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (ArrayDataset([1, 2]), {"device": "cpu"}, TypeError, r"column 0 is a list, which a device cannot hold"),
        (
            ArrayDataset(name=np.array(["a", "b"])),
            {"device": "cpu"},
            TypeError,
            "column 'name' is a ndarray of <U1, wh",
        ),
        (SimpleDataset([1, 2]), {"device": "cpu"}, TypeError, r"reads something else: SimpleDataset\(2 "),
        (ArrayDataset(np.zeros(2)).transform(abs), {"device": "cpu"}, TypeError, "Apply a transform before"),
        (TensorDataset(torch.zeros(2)), {"device": "cpu", "collate_fn": list}, ValueError, "collate_fn cannot run"),
        (np.array(["a", "b"]), {"device": "cpu"}, TypeError, "reads something else"),
        (ArrayDataset(np.zeros(2)), {}, ValueError, "give device= or devices= as well"),
        (ArrayDataset(np.zeros(2)), {"device": "cpu", "batchify_fn": list}, ValueError, "leave it out"),
    ],
)
def test_what_cannot_be_resident_is_refused_or_with_auto_read_as_always(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        made(data, 1, resident=True, **options)
    with made(data, 1, resident="auto", **options) as loader:
        assert len(list(loader)) == 2


@pytest.mark.parametrize("value", ["yes", 1, 0, 0.0, -1, -0.5, 1.5, float("nan"), float("inf"), None, np.zeros(2)])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match='it must be True, False, "auto", or a fraction of the rows: a float above 0'):
        ShardedDataLoader(ArrayDataset(np.zeros(2)), 1, device=Placement("cpu", resident=value))


# -- no memory ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_memory_in(machine: Machine, name: str, device: torch.device) -> Iterator[None]:
    """Inside, what a device is asked to do needs more memory than it has."""
    real: Any = getattr(machine, name)

    def full(where: Any, *arguments: Any) -> Any:
        if (machine.device_of(where) if isinstance(where, torch.Tensor) else where) == device:
            raise torch.OutOfMemoryError("simulated: full\nand more")
        return real(where, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, name, full)
        yield


@pytest.mark.costly(9)
@pytest.mark.parametrize("share", [True, 0.5, "auto"])
@pytest.mark.parametrize("name", ["take", "put", "allocate", "load"])
def test_a_device_without_memory_is_sent_batches_from_then_on(machine: Machine, name: str, share: Any) -> None:
    machine.memory_bytes = 5000 if share is True else 1000 + 8 * 50, 4000
    loader, sent = both(machine, np.arange(N), share, batch_size=12, shuffle=True)
    with loader, sent:
        wanted, found = list(seen(None, sent)), list[Any]()
        batches, pool = iter(loader), loader._epochs.resident
        if name in ("take", "put"):
            found += seen(machine, [next(batches)])
        needed = name != "put" or share is not True  # nothing is put where all rows are kept
        expected = pytest.warns(UserWarning, match=r"0 does not keep the data \(simulated: full\): it is sent batches$")
        with (
            no_memory_in(machine, name, machine.devices[0]),
            expected if needed else contextlib.nullcontext() as caught,
        ):
            if name == "allocate":
                pool.load(again=False)  # type: ignore[union-attr]
            else:
                found += seen(machine, [next(batches)])
        found += seen(machine, batches)
        assert found == wanted
        if needed:
            assert (len(caught), machine.caches_emptied) == (1, 1)  # type: ignore[arg-type]
            assert list(pool.counts) == machine.devices[1:]  # type: ignore[union-attr]
        assert list(seen(machine, loader)) == list(seen(None, sent))


def test_a_device_that_has_lost_its_rows_holds_no_memory_of_them(machine: Machine) -> None:
    with kept(machine, np.arange(N), 10, True) as loader:
        batches = iter(loader)
        next(batches)
        machine.finish()
        gc.collect()
        before = machine.allocated
        with no_memory_in(machine, "take", machine.devices[0]), pytest.warns(UserWarning, match="does not keep"):
            next(batches)
        gc.collect()
        machine.empty_cache()
        assert machine.allocated < before  # the rows, when nothing held them any more
        machine.finish()


# -- the pool by itself ---------------------------------------------------------------------------------------


def test_one_task_is_gathered_in_each_wait_and_closing_drops_the_others_but_not_the_rows(machine: Machine) -> None:
    pool = ResidentPool(columns(), Placer(machine.devices, pin_memory=False), share=1.0, insists=True, least=0.0)
    assert pool.load(again=False)
    pool.start(Job(columns(), None, 0))
    pool.submit([Task(0, seq, 0, 0, shards, True) for seq, shards in enumerate((([3, -1], [7]), ([2], [1]), ([5],)))])
    assert pool.wait(block=False) == ()
    results = [*pool.wait(), *pool.wait()]
    machine.finish()
    assert [(result.seq, result.samples) for result in results] == [(0, 3), (1, 2)]
    first, second = results[0].batch
    assert (type(first), type(second)) == (PendingCopy, PendingCopy)
    assert (first.batch["label"].tolist(), second.batch["label"].tolist()) == ([3, 59], [7])
    pool.close()
    assert (pool.started, pool.wait(), list(pool.counts)) == (False, (), machine.devices)
    pool.forget()
    assert pool.counts == {}


def test_what_goes_wrong_in_a_gather_is_the_batchs_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(machine, np.arange(12), 4, True) as loader:
        batches = iter(loader)
        next(batches)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="simulated: broken") as caught:
            patch.setattr(machine, "take", mock.Mock(side_effect=RuntimeError("simulated: broken")))
            next(batches)
        assert "epoch 0, batch 1" in "\n".join(caught.value.__notes__)
        (third,) = seen(machine, batches)
        assert third == described(torch.arange(8, 12))


# -- pools change ---------------------------------------------------------------------------------------------


def test_an_epoch_under_way_goes_on_in_the_pool_of_the_next(machine: Machine, new_pool: Callable[..., Pool]) -> None:
    """The devices have lost their room, and later find it again."""
    with kept(machine, np.arange(40), 4, "auto", pool=new_pool()) as loader:
        first = iter(loader)
        found = [next(first)]
        assert "resident on" in repr(loader)
        for memory in ((0, 0), (1 << 30, 1 << 30)):
            machine.memory_bytes = memory
            loader.refresh()
            other = next(iter(loader))
            machine.finish()
            assert other.tolist() == [0, 1, 2, 3]
            assert loader.pool.started is (memory == (0, 0))
            assert ("resident on" in repr(loader)) is (memory != (0, 0))
            found.append(next(first))
        found += first
        machine.finish()
    assert [batch.tolist() for batch in found] == np.arange(40).reshape(10, 4).tolist()


def test_an_epoch_under_way_survives_an_interrupted_copy_of_the_columns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    with kept(machine, np.arange(12), 4, True) as loader:
        first = iter(loader)
        found = [next(first)]
        loader.refresh()
        with monkeypatch.context() as patch:
            patch.setattr(machine, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
        found += first
        machine.finish()
        assert [batch.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# -- what is asked of a device ---------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> Streams:
    return Streams(torch.device("cuda", 1))  # this asks nothing of a device


def test_what_is_loaded_is_there_before_anybody_uses_it(cuda: Streams) -> None:
    log: list[Any] = []
    event = SimpleNamespace(synchronize=lambda: log.append("waited"))
    cuda.caller_stream = lambda: SimpleNamespace(record_event=lambda: log.append("recorded") or event)
    target: Any = SimpleNamespace(copy_=lambda host: log.append(("copied", host)))
    host: Any = "rows"
    load_rows(cuda, target, host)
    assert log == [("copied", "rows"), "recorded", "waited"]


WORDS = ["bool", "uint8", "uint16", "uint32", "uint64", "bfloat16", "float8_e5m2", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 0), (6, 2, 2)], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_rows_of_every_dtype_are_taken_and_put(name: str, shape: tuple[int, ...]) -> None:
    column = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(getattr(torch, name))
    taken = take_rows(column, torch.tensor([5, 0, 0]))
    assert (taken.dtype, taken.tolist()) == (column.dtype, [column.tolist()[row] for row in (5, 0, 0)])
    put_rows(column, torch.tensor([1, 4, 3]), taken)
    assert [column.tolist()[row] for row in (1, 4, 3)] == taken.tolist()
    assert column.tolist()[2] == torch.arange(1, math.prod(shape) + 1).reshape(shape).to(column.dtype).tolist()[2]


def test_the_memory_that_torch_has_cached_can_be_used(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(**functions: Any) -> None:
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**functions))

    asked: dict[str, Any] = {"memory_reserved": lambda device: 30, "memory_allocated": lambda device: 20}
    answer(mem_get_info=lambda device: (100, 200), **asked)
    assert memory_of(cuda) == (110, 200)
    answer(**asked)
    assert memory_of(cuda) is None
