"""Iterable data: parts in turn, every sample once. Nothing depends on who reads, or on what goes wrong there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kinds
import pytest
from conftest import POOLS, PROCESS_POOLS, covering, make_pool
from failures import Fails, hang_for_a_while, kill, raise_lookup
from stream_loaders import ASK_TORCH, SIZE, epochs_of, loader_of
from stream_samples import (
    LENGTHS,
    At,
    GoOn,
    Late,
    NoIterator,
    Own,
    Parts,
    Told,
    WithoutState,
    WithStatefulRows,
    batches_of,
    exits,
    stops_early,
    values,
)

from sharded_loader import interleave
from sharded_loader.base.errors import WorkerTimeoutError, notes_of
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.task_reader import reader_for

TORCH_FREE = (Parts, GoOn, WithStatefulRows)
ASKING = (*ASK_TORCH, Late)
"""A spawned worker takes seconds to import torch."""


def until_the_end(iterator: Iterator[Any]) -> tuple[list[Any], list[Exception], list[Any]]:
    """An epoch's batches, its errors, and both in their order, an error as None."""
    places, errors = kinds.until_the_end(iterator)
    return [batch for batch in places if batch is not None], errors, places


# -- parts in turn, every sample once -----------------------------------------------------------------------------


@pytest.mark.costly
@covering(1, spawned=True, pool=POOLS, kind=TORCH_FREE, workers=[1, 2, 3, 4])
def test_batches_come_from_the_part_that_has_given_the_fewest_whoever_reads(
    pool: str, kind: Callable[..., Any], workers: int
) -> None:
    assert epochs_of(kind(), pool, workers, epochs=2) == [batches_of(LENGTHS, SIZE)] * 2


@pytest.mark.costly(3)
@covering(2, pool=POOLS[:3], kind=ASKING, workers=[1, 2, 3, 4])
def test_a_dataset_that_asks_torch_for_its_part_is_told_whoever_reads(
    pool: str, kind: Callable[..., Any], workers: int
) -> None:
    _as_promised(pool, kind, workers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Own, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ASKING[1:])])
@pytest.mark.parametrize("pool", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_dataset_that_imports_torch_only_when_it_asks_is_told(pool: str, kind: Callable[..., Any]) -> None:
    _as_promised(pool, kind, 1)


def _as_promised(pool: str, kind: Callable[..., Any], workers: int) -> None:
    expected = batches_of(LENGTHS, SIZE)
    first, second = epochs_of(kind(), pool, workers, epochs=2)
    if kind is Told:
        assert [first, second] == epochs_of(kind(), epochs=2)
        for epoch, found in enumerate((first, second)):
            assert [len(batch) for batch in found] == [len(batch) for batch in expected]
            ordered = sorted(sum(found, []))
            assert ordered == [1000 * epoch + value for value in sorted(sum(expected, []))]
    else:
        assert first == second == expected


@covering(1, pool=POOLS[:3], stop=["first_exhausted", "all_exhausted"], workers=[1, 2, 4])
def test_a_mixture_of_iterable_data_is_cut_into_parts_whoever_reads(pool: str, stop: str, workers: int) -> None:
    mixed = interleave([Own((3, 9)), lambda: range(1000, 1004)], [2, 1], stop=stop)
    expected = epochs_of(mixed, "inline", streams=2, epochs=2)
    assert epochs_of(mixed, pool, workers, streams=2, epochs=2) == expected
    of_the_first = {value for batch in sum(expected, []) for value in batch if value < 1000}
    if stop == "all_exhausted":
        assert of_the_first == {0, 1, 2, *range(100, 109)}


@covering(1, pool=POOLS, lengths=[(1,), (0,), (5, 5), (0, 0, 9), (40, 1, 1, 8, 0, 3), (4, 4), (1,) * 9])
def test_parts_of_any_length_in_any_pool(pool: str, lengths: tuple[int, ...]) -> None:
    expected = batches_of(lengths, SIZE)
    assert epochs_of(Parts(lengths), pool, streams=len(lengths), epochs=2) == [expected] * 2
    assert sorted(sum(expected, [])) == [100 * part + i for part, n in enumerate(lengths) for i in range(n)]


@pytest.mark.filterwarnings("ignore:epoch .. last_batch=.discard.")
@covering(1, pool=POOLS, last_batch=["keep", "discard"], prefetch=[2, 9])
def test_short_batches_end_their_parts_and_may_be_left_out(pool: str, last_batch: str, prefetch: int) -> None:
    lengths = (5, 9, 3, 0, 13)
    loader = loader_of(Parts(lengths), pool, streams=5, last_batch=last_batch, prefetch=prefetch)
    expected = batches_of(lengths, SIZE, drop=last_batch == "discard")
    with loader:
        found = []
        for number, batch in enumerate(loader, 1):
            found.append(values(batch))
            assert loader.position == number
        assert found == expected and loader.drop_last == (last_batch == "discard")


def test_a_function_without_arguments_and_a_torch_dataset_know_their_part_from_torch() -> None:
    import torch.utils.data as torch_data

    class Lines(torch_data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = torch_data.get_worker_info()
            assert info is not None and type(info) is torch_data._utils.worker.WorkerInfo
            assert isinstance(info.dataset, Lines) and isinstance(info.seed, int)
            yield from range(info.id, 20, info.num_workers)

    def lines() -> Iterator[int]:
        info = torch_data.get_worker_info()
        yield from range(info.id, 20, info.num_workers)

    expected = [[*range(part, 20, 2)][at : at + SIZE] for at in range(0, 10, SIZE) for part in range(2)]
    for dataset, pool in itertools.product((Lines(), lines), ("inline", "thread", "fork")):
        assert epochs_of(dataset, pool, streams=2) == [expected]
        assert torch_data.get_worker_info() is None


def test_parts_have_seeds_of_their_own_that_follow_from_the_loader_s() -> None:
    import torch.utils.data as torch_data

    def seeds() -> Iterator[int]:
        info = torch_data.get_worker_info()
        yield info.seed

    found = [epochs_of(seeds, pool, batch_size=1, epochs=2) for pool in ("inline", "thread", "fork")]
    assert found[0] == found[1] == found[2]
    assert len({batch[0] for epoch in found[0] for batch in epoch}) == 8
    assert epochs_of(seeds, seed=6, batch_size=1, epochs=2) != found[0]


# -- workers that die or stand still ------------------------------------------------------------------------------


def without_the_rest(part: int, batch: int, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    """The batches of an epoch in which a part ends with an error at a batch; None for the error."""
    found: list[Any] = []
    for one in batches_of(lengths, SIZE):
        number = one[0] % 100 // SIZE
        if one[0] // 100 == part and number >= batch:
            found += [None] * (number == batch)
        else:
            found.append(one)
    return found


@pytest.mark.slow
def test_parts_that_are_slow_to_get_back_to_are_not_taken_for_hung(tmp_path: Path) -> None:
    """A worker that takes over reads all of the part again, which takes longer than one sample may."""
    dataset = Parts((40,), seconds=(0.03,), before=At(Fails(kill, tmp_path / "once", times=1), 0, 38))
    pool = make_pool("fork", 1, timeout=0.8)
    assert epochs_of(dataset, pool, streams=1) == [batches_of((40,), SIZE)]


# -- errors of the dataset ----------------------------------------------------------------------------------------


@pytest.mark.also_spawned
@covering(1, pool=POOLS, at=[(0, 0), (3, 5), (0, 6)], prefetch=[1, 20])
def test_an_iterator_object_goes_on_with_the_sample_after_the_bad_one(
    pool: str, at: tuple[int, int], prefetch: int
) -> None:
    with loader_of(GoOn(before=At(raise_lookup, *at)), pool, prefetch=prefetch) as loader:
        batches, errors, _ = until_the_end(iter(loader))
    assert [type(error) for error in errors] == [LookupError]
    begin = at[1] // SIZE * SIZE
    lost = {100 * at[0] + place for place in range(begin, at[1] + 1)}  # those that its batch had already
    everything = {100 * part + place for part, length in enumerate(LENGTHS) for place in range(length)}
    assert sorted(sum(batches, [])) == sorted(everything - lost)


class FailsToBegin(Parts):
    """Part 2 fails when it is begun."""

    def __init__(self, lengths: Sequence[int], fail: Callable[[], Any] = raise_lookup) -> None:
        super().__init__(lengths)
        self.fail = fail

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        if part == 2:
            self.fail()
        return super().__call__(part, parts)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("prefetch", [1, 20])
@pytest.mark.costly
def test_a_part_that_cannot_be_opened_is_one_error(pool: str, prefetch: int) -> None:
    with loader_of(FailsToBegin((9, 9, 9, 9)), pool, prefetch=prefetch) as loader:
        for _ in range(2):
            _, errors, places = until_the_end(iter(loader))
            assert places == without_the_rest(2, 0, (9, 9, 9, 9))
            assert [type(error) for error in errors] == [LookupError]
            assert "sample (2, 0)" in "".join(notes_of(errors[0]))


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_what_is_left_out_counts_once_whoever_dies(method: str, tmp_path: Path) -> None:
    lengths = (20, 20)
    calls = [At(raise_lookup, 0, 2), At(Fails(kill, tmp_path / "once", times=1), 0, 14)]
    dataset = GoOn(lengths, before=Both(*calls))
    with loader_of(dataset, method, streams=2, on_error="skip") as loader:
        found = sum((values(batch) for batch in loader), [])
        assert sorted(found) == [value for value in sorted(sum(batches_of(lengths, SIZE), [])) if value != 2]
        assert loader.num_skipped == 1 and [index for index, _ in loader.skipped] == [(0, 2)]
        assert (loader.stats().samples, loader.stats().batches) == (39, 10)
    assert (tmp_path / "once").exists()


class Both:
    """Calls both."""

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other

    def __call__(self, part: int, place: int) -> None:
        self.one(part, place)
        self.other(part, place)


ODD = {
    stops_early: [None] * 4,
    exits: [[0, 1, 2, 3]] * 4 + [None] * 4,
    NoIterator(): [None] * 4,
    WithoutState((9, 3, 0, 4)): [[0, 1, 2, 3], [100, 101, 102], [300, 301, 302, 303], None, None],
}


@pytest.mark.costly(3)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dataset", ODD, ids=["stops", "exits", "no iterator", "no state"])
def test_odd_datasets_give_the_same_errors_everywhere(pool: str, dataset: Any) -> None:
    with loader_of(dataset, pool, prefetch=8) as loader, loader_of(dataset) as inline:
        _, errors, places = until_the_end(iter(loader))
        _, expected, _ = until_the_end(iter(inline))
    assert places == ODD[dataset]
    assert [(type(error), str(error)) for error in errors] == [(type(error), str(error)) for error in expected]


class LastFirst(Pool):
    """Every batch by another reader, the last one first: as if parts moved to other workers all the time."""

    num_workers, room, started = 1, 1 << 30, False

    def start(self, job: Job) -> None:
        self._job, self._tasks, self.started = job, list[Task](), True

    def submit(self, tasks: Sequence[Task]) -> None:
        self._tasks += tasks

    def wait(self, block: bool = True) -> Sequence[Result]:
        tasks, self._tasks = self._tasks, []
        return [reader_for(self._job).read(task, "a worker", self.empty) for task in reversed(tasks)]

    def close(self) -> None:
        self.started = False


@pytest.mark.parametrize("prefetch", [1, 8, 30])
@pytest.mark.parametrize("dataset", list(ODD)[:3], ids=["stops", "exits", "no iterator"])
def test_an_error_that_ends_a_part_is_told_once_whichever_worker_meets_it_first(dataset: Any, prefetch: int) -> None:
    with loader_of(dataset) as loader:
        _, expected, _ = until_the_end(iter(loader))
    with loader_of(dataset, LastFirst(), prefetch=prefetch) as loader:
        _, errors, places = until_the_end(iter(loader))
        state = loader.state_dict()
    assert places == ODD[dataset]
    assert [(type(error), str(error)) for error in errors] == [(type(error), str(error)) for error in expected]
    with loader_of(dataset) as other:
        other.load_state_dict(state)
        assert until_the_end(iter(other))[2] == ODD[dataset]  # the next epoch


@pytest.mark.parametrize("pool", POOLS[1:])
@pytest.mark.slow
def test_a_part_that_hangs_when_it_is_opened_is_one_error(pool: str) -> None:
    options: dict[str, Any] = {} if pool == "thread" else {"restarts": 1}
    dataset = FailsToBegin((9, 9, 9, 9), fail=hang_for_a_while)
    with loader_of(dataset, make_pool(pool, timeout=1.0, **options), prefetch=9) as loader:
        _, errors, places = until_the_end(iter(loader))
    assert places == without_the_rest(2, 0, (9, 9, 9, 9))
    assert [type(error) for error in errors] == [WorkerTimeoutError]
