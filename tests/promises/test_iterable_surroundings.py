"""Iterable data in the middle of a program: Ctrl-C, several loops at a time, loops that are left, single samples."""

from __future__ import annotations

import itertools
import linecache
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch.utils.data
from conftest import POOLS, PROCESS_POOLS, covering
from failures import raise_lookup
from injection import PUMP, InterruptAt, next_interrupted
from stream_loaders import KINDS, SIZE, epochs_of, loader_of
from stream_samples import (
    LENGTHS,
    At,
    DrawsOwn,
    ItsOwnIterator,
    Own,
    Parts,
    Stateful,
    Told,
    WithStatefulRows,
    batches_of,
    values,
)

from sharded_loader import ShardedDataLoader, sample_rng
from sharded_loader.randomness.rng import reading

ROAD = ("epoch.py", "order.py", "reader.py", "parts.py")
"""The modules of iterable data, from the plan to the reader."""


class InterruptInParts(InterruptAt):
    """Not before the plain assignments with which a ``finally`` clause begins: Python looks for no signal there."""

    def __init__(self, number: int) -> None:
        super().__init__(number, (*PUMP, *ROAD))

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return (
            self
            if text.startswith(("here.part = ", "reading.set(", "_, here.part = "))
            else super().__call__(frame, event, arg)
        )


@pytest.mark.costly(2)
@pytest.mark.parametrize("step", [97, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
@pytest.mark.parametrize("kind", [Parts, Stateful, WithStatefulRows])
@pytest.mark.parametrize("pool", [*POOLS[:3], *(pytest.param(pool, marks=pytest.mark.slow) for pool in POOLS[3:])])
def test_a_ctrl_c_at_any_line_of_next_loses_no_batch(pool: str, kind: Callable[..., Any], step: int) -> None:
    if pool in ("forkserver", "spawn"):  # their workers take long to start again
        step = max(step, 7)
    lengths = (2500 // step, 1000 // step, 5000 // step)
    expected = iter(batches_of(lengths, 2))
    with loader_of(kind(lengths), pool, streams=3, batch_size=2, prefetch=4) as loader:
        iterator, line = iter(loader), 1
        while True:
            got, fired = next_interrupted(iterator, line, InterruptInParts)
            for batch in got:
                assert values(batch) == next(expected), line
            assert reading.get() is None and worker_info() is None, line
            if not fired:
                break
            for _ in range(2):
                assert values(next(iterator)) == next(expected), line
            line += step
        assert line > 60
        assert [values(batch) for batch in iterator] == list(expected)


def worker_info() -> Any:
    from torch.utils.data import get_worker_info

    return get_worker_info()


@pytest.mark.costly
@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pool", ["inline", "thread"])
@pytest.mark.parametrize("steps", [None, 3])
def test_a_ctrl_c_in_the_first_next_begins_no_epoch(pool: str, step: int, steps: int | None) -> None:
    options: dict[str, Any] = {"streams": 2, "steps_per_epoch": steps}
    lengths, line = (9, 6), 1
    whole = epochs_of(Parts(lengths), epochs=3, **options)
    while True:
        with loader_of(Parts(lengths), pool, **options) as loader:
            assert [values(batch) for batch in loader] == whole[0]
            state = loader.state_dict()
            iterator = iter(loader)
            got, fired = next_interrupted(iterator, line, InterruptInParts)
            if not got:
                assert (loader.epoch, loader.position, loader.state_dict()) == (1, 0, state), line
            rest = [values(batch) for batch in (iterator if got or line % 2 else loader)]
            assert [*map(values, got), *rest] == whole[1], line
            assert [values(batch) for batch in loader] == whole[2], line
        if not fired:
            break
        line += step
    assert line > 100


@covering(1, pool=POOLS[:3], kind=KINDS, workers=[1, 4])
def test_several_loops_over_one_loader_do_not_disturb_each_other(
    pool: str, kind: Callable[..., Any], workers: int
) -> None:
    whole = epochs_of(kind(), epochs=3)
    with loader_of(kind(), pool, workers) as loader:
        iterators = [iter(loader) for _ in range(3)]
        found: list[list[Any]] = [[], [], []]
        for turn in itertools.cycle((0, 1, 2, 1)):
            batch = next(iterators[turn], None)
            if batch is None:
                break
            found[turn].append(values(batch))
        for one, iterator in zip(found, iterators, strict=True):
            one += [values(batch) for batch in iterator]
    assert found == whole


@covering(1, pool=POOLS[:3], kind=[Stateful, Told, ItsOwnIterator], workers=[1, 4], streams=[1, 4])
def test_also_where_the_dataset_keeps_its_place_in_itself(
    pool: str, kind: Callable[..., Any], workers: int, streams: int
) -> None:
    lengths = LENGTHS if streams == 4 else (20,)
    whole = epochs_of(kind(lengths), epochs=3, streams=streams)
    with loader_of(kind(lengths), pool, workers, streams=streams) as loader:
        for epoch in range(2):
            assert [values(batch) for batch in itertools.islice(loader, 2)] == whole[epoch][:2]
        assert [values(batch) for batch in loader] == whole[2]


@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
@pytest.mark.costly
def test_files_that_a_part_holds_open_are_closed_with_it(pool: str, tmp_path: Path) -> None:
    for part in range(2):
        (tmp_path / str(part)).write_text("".join(f"{100 * part + i}\n" for i in range(500)))

    def lines(part: int, parts: int) -> Iterator[int]:
        with (tmp_path / str(part)).open() as file:
            yield from map(int, file)

    with loader_of(lines, pool, streams=2) as loader:
        for _ in range(3):
            assert values(next(iter(loader))) == [0, 1, 2, 3]
        if pool == "inline":
            opened = [file.path for file in psutil.Process().open_files()]
            assert sum(name.startswith(str(tmp_path)) for name in opened) <= 4
        assert [values(batch) for batch in loader] == batches_of((500, 500), SIZE)


@covering(1, pool=POOLS[:3], kind=KINDS)
def test_peek_and_read_disturb_nothing(pool: str, kind: Callable[..., Any]) -> None:
    whole = epochs_of(kind(), epochs=3)
    with loader_of(kind(), pool) as loader:
        assert values(loader.peek()) == values(loader.peek()) == whole[0][0]
        assert loader.read((0, 0)) == whole[0][0][0] and loader.read((3, 1), epoch=2) == whole[2][2][1]
        assert not loader.pool.started
        found = []
        for batch in loader:
            found.append(values(batch))
            assert values(loader.peek()) == whole[1][0]
            assert int(loader.read((0, 1))) == whole[0][0][1]
        assert found == whole[0]
        assert [[values(batch) for batch in loader] for _ in range(2)] == whole[1:]


def test_read_gives_the_sample_that_the_batch_has_and_says_what_there_is() -> None:
    with loader_of(Parts()) as loader:
        everything = sum((values(batch) for batch in loader), [])
        assert sorted(everything) == [loader.read((p, i)) for p, n in enumerate(LENGTHS) for i in range(n)]
        for wrong in ((0, 7), (1, 0), (4, 0), (-1, 0), (0, -1)):
            with pytest.raises(IndexError, match=r"has no sample.*there are 4 parts"):
                loader.read(wrong)
        for odd in (3, "ab", (1, 2, 3), (1, None), None):
            with pytest.raises(TypeError, match=r"is read as \(part, position\)"):
                loader.read(odd)
    with loader_of(DrawsOwn()) as loader:
        batch = values(next(iter(loader)))
        assert [loader.read((0, place), epoch=0).tolist() for place in range(SIZE)] == batch


def test_read_in_an_endless_order_counts_over_all_passes() -> None:
    with loader_of(DrawsOwn((3, 5)), streams=2, steps_per_epoch=4) as loader:
        epochs = [[values(batch) for batch in loader] for _ in range(3)]
        for part in range(2):
            mine = sum((batch for epoch in epochs for batch in epoch[part::2]), [])
            assert [loader.read((part, place)).tolist() for place in range(len(mine))] == mine
    with loader_of(Parts((0, 5)), streams=2, steps_per_epoch=4) as loader:
        with pytest.raises(IndexError, match="part 0 of epoch 0 has no sample 2"):
            loader.read((0, 2))


def test_peek_at_nothing_and_at_an_error() -> None:
    with loader_of(Parts((0, 0)), streams=2) as loader, pytest.raises(IndexError, match="no batches to peek at"):
        loader.peek()
    with loader_of(Parts(before=At(raise_lookup, 0, 2))) as loader:
        with pytest.raises(LookupError):
            loader.peek()
    with loader_of(Parts((3, 9)), streams=2, drop_last=True) as loader:
        assert values(loader.peek()) == [100, 101, 102, 103]


@pytest.mark.parametrize("pool", POOLS)
def test_refresh_sends_the_dataset_as_it_is_now(pool: str) -> None:
    dataset = Parts((5, 5))
    with loader_of(dataset, pool, streams=2) as loader:
        assert [values(batch) for batch in loader] == batches_of((5, 5), SIZE)
        dataset.lengths = (2, 9)
        if pool in PROCESS_POOLS:
            assert [values(batch) for batch in loader] == batches_of((5, 5), SIZE)
        loader.refresh()
        assert [values(batch) for batch in loader] == batches_of((2, 9), SIZE)


@pytest.mark.costly
@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_what_a_dataset_draws_when_it_is_begun_is_the_same_everywhere(pool: str) -> None:
    class Shuffled(Parts):
        def __call__(self, part: int, parts: int) -> Iterator[Any]:
            return iter((100 * part + sample_rng().permutation(self.lengths[part])).tolist())

    class InAGenerator(Shuffled):
        def __call__(self, part: int, parts: int) -> Iterator[Any]:
            yield from super().__call__(part, parts)

    whole = epochs_of(Shuffled(), epochs=2)
    assert whole[0] != whole[1] and sorted(sum(whole[0], [])) == sorted(sum(batches_of(LENGTHS, SIZE), []))
    for kind in (Shuffled, InAGenerator):
        assert epochs_of(kind(), epochs=2, pool=pool) == whole
        with loader_of(kind(), pool) as loader:
            iterator = iter(loader)
            for _ in range(3):
                next(iterator)
            state = loader.state_dict()
        with loader_of(kind(), pool) as loader:
            loader.load_state_dict(state)
            assert [values(batch) for batch in loader] == whole[0][3:]
            assert loader.read((3, 7), epoch=0) in whole[0][-2]


def test_batchify_draws_by_its_batch() -> None:
    def noisy(samples: list[int]) -> Any:
        return np.array([*samples, sample_rng().integers(1 << 40)])

    whole = epochs_of(Parts(), batchify_fn=noisy)[0]
    assert len({batch[-1] for batch in whole}) == len(whole)
    for pool in ("thread", "fork"):
        assert epochs_of(Parts(), batchify_fn=noisy, pool=pool, prefetch=9)[0] == whole


def test_what_is_no_iterable_data_is_rejected_with_advice() -> None:
    for dataset, text in (
        ((i for i in range(3)), "a generator, which can be read once.*give the function that makes it"),
        (iter([1, 2]), "a list_iterator, which can be read once"),
        (itertools.count(), "a count, which can be read once"),
        ({1, 2}, r"a set, whose order is not defined: give sorted\(dataset\)"),
        (frozenset({1}), "a frozenset"),
        (Own, "is the class Own itself"),
        (3, "needs __getitem__ and __len__, or __iter__ for iterable data; int has neither"),
        (None, "NoneType has neither"),
    ):
        with pytest.raises(TypeError, match=text):
            ShardedDataLoader(dataset, 2)


def test_arguments_that_iterable_data_cannot_have_are_rejected() -> None:
    for options, text in (
        ({"shuffle": True}, "leave out shuffle.*give ShuffleBuffer"),
        ({"sampler": [1]}, "leave out sampler"),
        ({"batch_sampler": [[1]], "batch_size": None}, "leave out batch_sampler"),
        ({"streams": 0}, "streams"),
        ({"streams": -1}, "streams"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"last_batch": "rollover"}, '"keep" or "discard"'),
        ({"last_batch": "discard", "steps_per_epoch": 2}, "contradict each other"),
        ({"drop_last": True, "steps_per_epoch": 2}, "contradict each other"),
        ({"streams": 1, "num_replicas": 2, "rank": 0}, "streams is 1, but there are 2 ranks, and each needs a part"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            ShardedDataLoader(Own(), **{"batch_size": 2, **options})
    for options in ({"streams": 1.5}, {"streams": True}, {"steps_per_epoch": "3"}, {"batch_size": 2.5}):
        with pytest.raises((ValueError, TypeError)):
            ShardedDataLoader(Own(), **{"batch_size": 2, **options})


def test_fewer_shards_of_the_dataset_than_ranks_are_rejected() -> None:
    class Shards(Parts):
        num_shards = 2

    with pytest.raises(ValueError, match="has 2 shards, but there are 3 ranks, and each needs one"):
        with ShardedDataLoader(Shards((4, 4)), 2, num_replicas=3, rank=0) as loader:
            next(iter(loader))


class Numbers(Own):
    """0, 1, 2, ... A part yields every ``parts``-th of them."""

    def __len__(self) -> int:
        return sum(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        yield from range(len(self)) if info is None else range(info.id, len(self), info.num_workers)


@covering(
    2, pool=POOLS, lengths=[(22,), (20,), (3,), ()], how=[{}, {"last_batch": "discard"}], parts=[1, 2, 4], ranks=[1, 2]
)
def test_a_length_is_the_number_of_batches_or_an_error_that_names_steps_per_epoch(
    pool: str, lengths: tuple[int, ...], how: dict[str, Any], parts: int, ranks: int
) -> None:
    parts = max(parts, ranks)
    shared = {"num_replicas": 2, "rank": 1} if ranks == 2 else {}
    with warnings.catch_warnings(), loader_of(Numbers(lengths), pool, streams=parts, **how, **shared) as loader:
        warnings.simplefilter("ignore")  # ranks; parts without a batch
        if parts == 1:
            assert f"{len(loader)} batches of 4" in repr(loader)
            assert len(loader) == len(iter(loader)) == len(list(loader))
        else:
            with pytest.raises(TypeError, match=f"a Numbers decides how many samples each of its {parts} parts has.*s"):
                len(loader)
            assert "unknown number of batches" in repr(loader)
            assert bool(iter(loader)) is True


def test_the_steps_are_the_length_and_without_a_length_of_the_dataset_there_is_none() -> None:
    with loader_of(Own(), steps_per_epoch=9) as loader:
        assert len(loader) == len(iter(loader)) == 9
    with (
        loader_of(Own((5,)), streams=1) as loader,
        pytest.raises(TypeError, match="the loader has no length.*Give steps_per_epoch=, or the dataset a"),
    ):
        len(loader)


@pytest.mark.parametrize("pool", POOLS)
def test_what_discard_leaves_out_is_counted_and_whole_parts_are_warned_of(pool: str) -> None:
    with loader_of(Parts((9, 4, 6)), pool, streams=3, last_batch="discard") as loader:
        assert [sum(map(len, loader)) for _ in range(2)] == [16, 16]
        assert [loader.stats(epoch).discarded_samples for epoch in (0, 1, None)] == [3, 3, 6]
    with loader_of(Parts((3, 4, 2)), pool, streams=3, last_batch="discard") as loader:
        with pytest.warns(UserWarning, match="has left out 5 samples: 2 of its 3 parts had fewer"):
            assert [len(batch) for batch in loader] == [4]
    with loader_of(Parts((3, 5)), pool, streams=2) as loader:
        assert sum(map(len, loader)) == 8 and loader.stats().discarded_samples == 0


@pytest.mark.parametrize("pool", POOLS)
def test_set_epoch_of_the_dataset_is_heard_as_that_of_the_loader(pool: str) -> None:
    whole, dataset = epochs_of(Told(), epochs=10), Told()

    def read() -> int:
        return whole.index([values(batch) for batch in loader])

    with loader_of(dataset, pool) as loader:
        dataset.set_epoch(5)
        assert loader.epoch == 5 and [read(), read()] == [5, 6]
        dataset.set_epoch(3)
        loader.set_epoch(8)  # the last one that is told
        assert [read(), read()] == [8, 9]
    dataset = Told()
    with loader_of(dataset, pool) as loader:
        dataset.set_epoch(2)
        iterator = iter(loader)
        assert [values(next(iterator)) for _ in range(2)] == whole[2][:2]
        state = loader.state_dict()
    for epoch, expected in ((2, whole[2][2:]), (4, whole[4])):
        dataset = Told()
        with loader_of(dataset, pool) as loader:
            loader.load_state_dict(state)
            dataset.set_epoch(epoch)
            assert [values(batch) for batch in loader] == expected


def test_an_epoch_that_a_dataset_has_is_the_first_and_bad_ones_are_errors() -> None:
    dataset = Told()
    dataset.set_epoch(3)
    with loader_of(dataset) as loader:
        assert loader.epoch == 3
        dataset.set_epoch(-1)
        with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
            next(iter(loader))


def test_loaders_that_share_a_dataset_do_not_hear_each_other() -> None:
    dataset, whole = Told((5,)), epochs_of(Told((5,)), epochs=4, streams=1)
    with loader_of(dataset, streams=1) as one, loader_of(dataset, streams=1) as other:
        for epoch in range(3):
            assert [values(batch) for batch in one] == whole[epoch]
        assert [values(batch) for batch in other] == whole[0]
        dataset.set_epoch(3)
        for loader in (one, other):
            assert [values(batch) for batch in loader] == whole[3]
