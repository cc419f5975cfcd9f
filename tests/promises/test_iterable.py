"""Iterable data: parts in turn, every sample once, on from any state, whoever reads and whatever fails."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.utils.data
from conftest import METHODS, POOLS, PROCESS_POOLS, covering, make_pool
from failures import Fails, hang_for_a_while, kill, raise_lookup
from kinds import SIZE, STREAMS, WITHOUT_STATE, epochs_of, loader_of, rows_of, until_the_end
from stream_samples import (
    LENGTHS,
    At,
    Changing,
    Draws,
    DrawsOwn,
    GoOn,
    Late,
    NoIterator,
    Own,
    Parts,
    Told,
    WithoutState,
    WithStatefulRows,
    batches_of,
    endless_of,
    exits,
    stops_early,
    values,
)

from sharded_loader import PackStream, ShardedDataLoader, ShuffleBuffer, ThreadPool, interleave, sample_rng
from sharded_loader.base.errors import WorkerTimeoutError, notes_of
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.task_reader import reader_for
from sharded_loader.torch import DataLoader


def read_with_errors(loader: Any) -> tuple[list[Any], list[Any]]:
    """An epoch's batches, None in the place of each error; and the types and texts of the errors."""
    places, errors = until_the_end(iter(loader))
    return places, [(type(error), str(error)) for error in errors]


@pytest.mark.costly(5)
@covering(2, pool=POOLS, kind=[*STREAMS, Late], workers=[1, 2, 3, 4])
def test_batches_come_from_the_part_that_has_given_the_fewest_whoever_reads_and_asks_for_it(
    pool: str, kind: Callable[..., Any], workers: int
) -> None:
    expected, found = batches_of(LENGTHS, SIZE), epochs_of(kind(), pool, workers, epochs=2)
    if kind is Told:
        assert found == epochs_of(kind(), epochs=2)
        expected = sorted(sum(expected, []))
        assert [sorted(sum(epoch, [])) for epoch in found] == [expected, [1000 + value for value in expected]]
    else:
        assert found == [expected, expected]


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
    with loader_of(Parts(lengths), pool, streams=5, last_batch=last_batch, prefetch=prefetch) as loader:
        found = [(values(batch), loader.position) for batch in loader]
    expected = batches_of(lengths, SIZE, drop=last_batch == "discard")
    assert found == [(batch, number) for number, batch in enumerate(expected, 1)]


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


@pytest.mark.slow
def test_parts_that_are_slow_to_get_back_to_are_not_taken_for_hung(tmp_path: Path) -> None:
    """A worker that takes over reads all of the part again, which takes longer than one sample may."""
    dataset = Parts((40,), seconds=(0.03,), before=At(Fails(kill, tmp_path / "once", times=1), 0, 38))
    pool = make_pool("fork", 1, timeout=0.8)
    assert epochs_of(dataset, pool, streams=1) == [batches_of((40,), SIZE)]


@pytest.mark.also_spawned
@covering(1, pool=POOLS, at=[(0, 0), (3, 5), (0, 6)], prefetch=[1, 20])
def test_an_iterator_object_goes_on_with_the_sample_after_the_bad_one(
    pool: str, at: tuple[int, int], prefetch: int
) -> None:
    with loader_of(GoOn(before=At(raise_lookup, *at)), pool, prefetch=prefetch) as loader:
        places, errors = read_with_errors(loader)
    assert errors == [(LookupError, "of the test")] and places.count(None) == 1
    begin = at[1] // SIZE * SIZE
    lost = {100 * at[0] + place for place in range(begin, at[1] + 1)}  # those that its batch had already
    everything = {100 * part + place for part, length in enumerate(LENGTHS) for place in range(length)}
    assert sorted(sum(filter(None, places), [])) == sorted(everything - lost)


class FailsToBegin(Parts):
    """Part 2 fails when it is begun."""

    def __init__(self, fail: Callable[[], Any] = raise_lookup) -> None:
        super().__init__((9, 9, 9, 9))
        self.fail = fail

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        if part == 2:
            self.fail()
        return super().__call__(part, parts)


WITHOUT_PART_2 = [
    [*range(100 * part + at, 100 * part + min(at + SIZE, 9))] if part != 2 else None
    for at in (0, 4, 8)
    for part in range(4)
    if part != 2 or at == 0
]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("prefetch", [1, 20])
@pytest.mark.costly
def test_a_part_that_cannot_be_opened_is_one_error(pool: str, prefetch: int) -> None:
    with loader_of(FailsToBegin(), pool, prefetch=prefetch) as loader:
        for _ in range(2):
            places, errors = until_the_end(iter(loader))
            assert places == WITHOUT_PART_2
            assert [type(error) for error in errors] == [LookupError]
            assert "sample (2, 0)" in "".join(notes_of(errors[0]))


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_what_is_left_out_counts_once_whoever_dies(method: str, tmp_path: Path) -> None:
    lengths = (20, 20)
    calls = [At(raise_lookup, 0, 2), At(Fails(kill, tmp_path / "once", times=1), 0, 14)]
    dataset = GoOn(lengths, before=lambda *at: [call(*at) for call in calls])
    with loader_of(dataset, method, streams=2, on_error="skip") as loader:
        found = sum((values(batch) for batch in loader), [])
        assert sorted(found) == [value for value in sorted(sum(batches_of(lengths, SIZE), [])) if value != 2]
        assert loader.num_skipped == 1 and [index for index, _ in loader.skipped] == [(0, 2)]
        assert (loader.stats().samples, loader.stats().batches) == (39, 10)
    assert (tmp_path / "once").exists()


ODD: dict[str, tuple[Any, list[Any]]] = {
    "stops": (stops_early, [None] * 4),
    "exits": (exits, [[0, 1, 2, 3]] * 4 + [None] * 4),
    "no iterator": (NoIterator(), [None] * 4),
    "no state": (WithoutState((9, 3, 0, 4)), [[0, 1, 2, 3], [100, 101, 102], [300, 301, 302, 303], None, None]),
}


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


@pytest.mark.costly(12)
@covering(1, pool=[*POOLS, "the last first"], name=ODD, prefetch=[1, 8, 30])
def test_odd_datasets_give_the_same_errors_once_whichever_worker_meets_them_first(
    pool: str, name: str, prefetch: int
) -> None:
    dataset, places = ODD[name]
    with loader_of(dataset) as inline:
        expected = read_with_errors(inline)
    assert expected[0] == places
    with (
        loader_of(dataset) as inline,
        loader_of(dataset, pool if pool in POOLS else LastFirst(), prefetch=prefetch) as loader,
    ):
        assert read_with_errors(loader) == expected
        if name != "no state":
            inline.load_state_dict(loader.state_dict())
            assert read_with_errors(inline)[0] == places  # the next epoch


@pytest.mark.parametrize("pool", POOLS[1:])
@pytest.mark.slow
def test_a_part_that_hangs_when_it_is_opened_is_one_error(pool: str) -> None:
    options: dict[str, Any] = {} if pool == "thread" else {"restarts": 1}
    dataset = FailsToBegin(hang_for_a_while)
    with loader_of(dataset, make_pool(pool, timeout=1.0, **options), prefetch=9) as loader:
        places, errors = until_the_end(iter(loader))
    assert places == WITHOUT_PART_2
    assert [type(error) for error in errors] == [WorkerTimeoutError]


@covering(1, pool=POOLS[:3], kind=STREAMS, workers=[1, 4], streams=[1, 4])
def test_loops_and_looks_do_not_disturb_each_other_wherever_a_dataset_keeps_its_place(
    pool: str, kind: Callable[..., Any], workers: int, streams: int
) -> None:
    lengths = LENGTHS if streams == 4 else (20,)
    whole = epochs_of(kind(lengths), epochs=6, streams=streams)
    with loader_of(kind(lengths), pool, workers, streams=streams) as loader:
        for epoch in range(2):  # left
            assert rows_of(itertools.islice(loader, 2)) == whole[epoch][:2]
        loops = [iter(loader) for _ in range(3)]
        found: list[list[Any]] = [[], [], []]
        for turn in (0, 1, 2, 1, 0):
            found[turn].append(values(next(loops[turn])))
            assert int(loader.read((0, 1), epoch=3)) == whole[3][0][1]
        assert [one + rows_of(loop) for one, loop in zip(found, loops, strict=True)] == whole[2:5]
        assert values(loader.peek()) == values(loader.peek()) == whole[5][0]
        assert rows_of(loader) == whole[5]


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
        assert rows_of(loader) == batches_of((500, 500), SIZE)


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
        epochs = [rows_of(loader) for _ in range(3)]
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
        assert rows_of(loader) == batches_of((5, 5), SIZE)
        dataset.lengths = (2, 9)
        if pool in PROCESS_POOLS:
            assert rows_of(loader) == batches_of((5, 5), SIZE)
        loader.refresh()
        assert rows_of(loader) == batches_of((2, 9), SIZE)


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
        with loader_of(kind(), pool) as loader:
            assert rows_of(itertools.islice(loader, 3)) == whole[0][:3]
            state = loader.state_dict()
            assert rows_of(loader) == whole[1]
            loader.load_state_dict(state)
            assert rows_of(loader) == whole[0][3:]
            assert loader.read((3, 7), epoch=0) in whole[0][-2]


def test_batchify_draws_by_its_batch() -> None:
    def noisy(samples: list[int]) -> Any:
        return np.array([*samples, sample_rng().integers(1 << 40)])

    whole = epochs_of(Parts(), batchify_fn=noisy)[0]
    assert len({batch[-1] for batch in whole}) == len(whole)
    for pool in ("thread", "fork"):
        assert epochs_of(Parts(), batchify_fn=noisy, pool=pool, prefetch=9)[0] == whole


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
        return whole.index(rows_of(loader))

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
        for told in range(2):
            dataset = Told()
            with loader_of(dataset, pool) as loader:
                loader.load_state_dict(state)
                (dataset, loader)[told].set_epoch(epoch)
                assert rows_of(loader) == expected


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
            assert rows_of(one) == whole[epoch]
        assert rows_of(other) == whole[0]
        dataset.set_epoch(3)
        for loader in (one, other):
            assert rows_of(loader) == whole[3]


def through_json(state: Any) -> Any:
    loaded = json.loads(json.dumps(state))
    assert loaded == state
    return loaded


def save_after(dataset: Any, batches: int, epoch: int = 0, pool: Any = "inline", **options: Any) -> Any:
    """The state after so many batches of an epoch; the epochs before it were read."""
    with loader_of(dataset, pool, **options) as loader:
        for _ in range(epoch):
            assert list(loader)
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        return loader.state_dict()


def go_on(dataset: Any, state: Any, pool: Any = "inline", **options: Any) -> Iterator[list[Any]]:
    """The epochs from a state on, of one loader."""
    with loader_of(dataset, pool, **options) as loader:
        loader.load_state_dict(state)
        while True:
            yield rows_of(loader)


@pytest.mark.filterwarnings("ignore:epoch .. last_batch=.discard.")
@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("last_batch", ["keep", "discard"])
def test_a_state_after_any_batch_of_any_epoch_is_gone_on_from(kind: Callable[..., Any], last_batch: str) -> None:
    whole = epochs_of(kind(), epochs=3, last_batch=last_batch)
    travels = through_json if kind in WITHOUT_STATE else copy.deepcopy
    for epoch, count in itertools.product(range(2), range(len(whole[0]) + 1)):
        state = travels(save_after(kind(), count, epoch, last_batch=last_batch))
        assert (state["epoch"], state["batches"]) == (epoch, count)
        rest = go_on(kind(), state, last_batch=last_batch)
        expected = [whole[epoch][count:], *whole[epoch + 1 :]]
        for one in filter(None, expected):
            assert next(rest) == one, (epoch, count)


def test_with_a_state_of_its_own_no_sample_is_read_twice() -> None:
    read: list[tuple[int, int]] = []
    for kind, again in ((WithStatefulRows, 0), (GoOn, 4)):
        whole = epochs_of(kind())[0]
        state = save_after(kind(), 4)
        read.clear()
        assert next(go_on(kind(before=lambda *at: read.append(at)), state)) == whole[4:]
        assert len(read) == sum(map(len, whole[4:])) + again


@pytest.mark.slow
@METHODS
def test_what_the_global_generators_draw_is_the_same_after_going_on(method: str) -> None:
    (whole,) = epochs_of(Draws(), pool=method)
    for count in (1, 3, 4):
        rest = go_on(Draws(), save_after(Draws(), count, pool=method), method, workers=1)
        assert next(rest) == whole[count:]
        rest.close()


def with_draws(part: int, parts: int) -> Iterator[Any]:
    return (number + float(sample_rng().random()) for number in range(part, 14, parts))


def shuffled_when_begun(part: int, parts: int) -> Iterator[Any]:
    return iter(sample_rng().permutation(range(part, 14, parts)).tolist())


def a_random_half(part: int, parts: int) -> Iterator[Any]:
    return (number for number in range(part, 28, parts) if sample_rng().random() < 0.5)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "mixture": lambda stream: interleave([stream, WithStatefulRows([9, 9]), stream], [2, 1, 1]),
    "mixture of mixtures": lambda stream: interleave([interleave([stream, range(8)], seed=1), stream]),
    "buffer": lambda stream: ShuffleBuffer(stream, 4),
    "buffer of a mixture": lambda stream: ShuffleBuffer(interleave([range(8), stream]), 3),
    "mixture of buffers": lambda stream: interleave([ShuffleBuffer(stream, 3), range(8)]),
    "packed": lambda stream: PackStream(stream, 3, window=4, tokenize=lambda number: [int(100 * number)]),
}


@pytest.mark.costly(3)
@pytest.mark.parametrize("stream", [with_draws, shuffled_when_begun, a_random_half])
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_read_again_inside_a_mixture_a_buffer_or_rows_draws_what_it_drew(
    holder: str, kind: Any, stream: Any
) -> None:
    def make() -> Any:
        return kind(HOLDERS[holder](stream), 2, streams=2, seed=3, collate_fn=repr)

    whole, batches = list(make()), iter(loader := make())
    for count in range(len(whole)):
        other, state = make(), json.loads(json.dumps(loader.state_dict()))
        other.load_state_dict(state)
        assert list(other) == whole[count:], count
        assert next(batches) == whole[count]


class InTheOrderOfTheEpoch(torch.utils.data.IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(20).tolist())


@pytest.mark.parametrize("of", ["loader", "dataset"])
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_stream_inside_is_read_again_in_the_order_of_its_epoch(holder: str, kind: Any, of: str) -> None:
    first, other = (kind(HOLDERS[holder](InTheOrderOfTheEpoch()), 2, seed=3, collate_fn=repr) for _ in range(2))
    (first if of == "loader" else first.dataset).set_epoch(2)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    other.load_state_dict(first.state_dict())
    assert list(other) == list(batches)


def test_a_state_goes_on_where_parts_had_failed() -> None:
    for kind, at in itertools.product((Parts, GoOn), [(0, 0), (3, 5)]):
        dataset = kind(before=At(raise_lookup, *at))
        with loader_of(dataset) as loader:
            whole, _ = until_the_end(iter(loader))
        assert whole.count(None) == 1
        with loader_of(dataset) as loader:
            iterator = iter(loader)
            for count in range(len(whole)):
                with loader_of(dataset, "thread") as other:
                    other.load_state_dict(through_json(loader.state_dict()))
                    assert until_the_end(iter(other))[0] == whole[count:], (kind, at, count)
                with contextlib.suppress(LookupError):
                    next(iterator)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_a_dataset_whose_samples_change_is_one_error_that_names_it(pool: str, is_mixed: bool) -> None:
    first, other = (interleave([Changing()]) if is_mixed else Changing() for _ in range(2))
    name = "an InterleavedIterable" if is_mixed else "a Changing"
    state = save_after(first, 2, streams=1)
    with loader_of(other, pool, streams=1, prefetch=8) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        text = f"cannot go on after a resume or a lost worker: part 0 of the dataset, {name}, yields other"
        with pytest.raises(ValueError, match=text):
            next(iterator)
        assert list(iterator) == []
        assert len(list(loader)) == 5


def test_a_dataset_that_has_become_shorter_is_told_so() -> None:
    state = save_after(Parts((9, 9)), 5, streams=2)
    with loader_of(Parts((9, 3)), streams=2) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="part 1 .*yields only 3 samples, where it had yielded 8"):
            next(iter(loader))


def test_a_part_that_has_changed_costs_the_others_nothing() -> None:
    def rows(part: int, parts: int) -> Iterator[int]:
        return iter(range(100 * part + offset * (part == 0), 100 * part + 12))

    offset = 0
    state = save_after(rows, 4, streams=2)
    offset = 1
    with loader_of(rows, streams=2) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        with pytest.raises(ValueError, match="the epoch cannot go on after a resume"):
            next(iterator)
        assert rows_of(iterator) == [[108, 109, 110, 111]]


def test_a_state_of_another_loader_is_rejected_and_changes_nothing() -> None:
    state = save_after(Parts(), 2)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (Own(), {}, "the dataset was a Parts, and is a Own"),
        (Parts(), {"batch_size": 3}, "batch_size was 4, and is 3"),
        (Parts((5, 5)), {"streams": 2}, r"there were 4 parts \(streams\), and are 2"),
        (Parts(), {"steps_per_epoch": 3}, "steps_per_epoch was None, and is 3"),
        (Parts(), {"drop_last": True}, "last_batch was 'keep', and is 'discard'"),
    ]
    for dataset, options, text in cases:
        with loader_of(dataset, **options) as loader:
            before = loader.state_dict()
            with pytest.raises(ValueError, match=text):
                loader.load_state_dict(state)
            assert loader.state_dict() == before
    with loader_of(range(20), streams=None) as loader:
        with pytest.raises((ValueError, TypeError)):
            loader.load_state_dict(state)
        other = loader.state_dict()
    with loader_of(Parts()) as loader, pytest.raises(ValueError, match="has no 'dataset'"):
        loader.load_state_dict(other)


@pytest.mark.parametrize("has_read", [False, True])
@pytest.mark.parametrize("count", [0, 2, 6])
def test_parts_that_nobody_has_chosen_come_from_the_state(count: int, has_read: bool) -> None:
    """By default there is a part for each worker; a state goes on with another number of workers all the same."""

    def shared(part: int, parts: int) -> Iterator[int]:
        return iter(range(part, 20, parts))

    state = save_after(shared, count, streams=None, pool=ThreadPool(4))
    whole = epochs_of(shared, epochs=2, streams=4)
    with loader_of(shared, ThreadPool(2), streams=None) as loader:
        if has_read:
            assert sorted(sum((values(batch) for batch in loader), [])) == list(range(20))
        loader.load_state_dict(state)
        assert rows_of(loader) == (whole[0][count:] or whole[1])


@pytest.mark.filterwarnings("ignore:part . of 4 has ended too early")
@pytest.mark.parametrize("kind", [Parts, GoOn])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_samples_that_were_left_out_are_so_again(kind: Callable[..., Any], on_error: str) -> None:
    dataset = kind(before=At(raise_lookup, 3, 5))
    whole = epochs_of(dataset, on_error=on_error)[0]
    bad = next(number for number, batch in enumerate(whole) if 304 in batch)
    for count in range(len(whole) + 1):
        state = through_json(save_after(dataset, count, pool="thread", on_error=on_error))
        with loader_of(dataset, on_error=on_error) as loader:
            loader.load_state_dict(state)
            assert rows_of(loader) == (whole[count:] or whole)
            assert loader.num_skipped == (count <= bad or count == len(whole))


def test_without_batches_before_it_another_batch_size_is_allowed_if_asked_for() -> None:
    state = save_after(Parts(), 0)
    with loader_of(Parts(), batch_size=3) as loader:
        with pytest.raises(ValueError, match="strict=False allows another batch size"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, strict=False)
        assert rows_of(loader) == batches_of(LENGTHS, 3)


@pytest.mark.filterwarnings("ignore:each rank reads parts of its own")
@covering(1, pool=POOLS, replicas=[2, 3, 4])
def test_ranks_have_parts_of_their_own_and_all_of_them_everything_once(pool: str, replicas: int) -> None:
    found = []
    for rank in range(replicas):
        mine = epochs_of(Parts(), pool=pool, num_replicas=replicas, rank=rank)[0]
        assert mine == batches_of(LENGTHS, SIZE, parts=range(rank, len(LENGTHS), replicas))
        found += mine
    assert sorted(map(tuple, found)) == sorted(map(tuple, batches_of(LENGTHS, SIZE)))


@pytest.mark.filterwarnings("ignore:each rank reads parts of its own")
@covering(steps=[None, 5], ranks=[(2, 1), (1, 2), (2, 4), (4, 3), (3, 2)], count=[0, 1, 2, 4])
def test_all_states_go_on_on_another_number_of_ranks(steps: int | None, ranks: tuple[int, int], count: int) -> None:
    before, after = ranks
    lengths = (20, 17, 18, 30)
    options: dict[str, Any] = {"streams": 4, "steps_per_epoch": steps}
    states, done = [], []
    for rank in range(before):
        with loader_of(Parts(lengths), num_replicas=before, rank=rank, **options) as loader:
            iterator = iter(loader)
            done += [values(next(iterator)) for _ in range(count)]
            states.append(through_json(loader.state_dict()))
    rest = []
    for rank in range(after):
        with loader_of(Parts(lengths), num_replicas=after, rank=rank, **options) as loader:
            loader.load_state_dict(states)
            rest.append(rows_of(loader))
    if steps is None:
        assert sorted(map(tuple, done + sum(rest, []))) == sorted(map(tuple, batches_of(lengths, SIZE)))
    else:
        assert [len(one) for one in rest] == [steps - count] * after
        assert all(len(batch) == SIZE for one in rest for batch in one)


@pytest.mark.filterwarnings("ignore:each rank reads parts of its own")
def test_the_state_of_one_rank_alone_is_not_enough_for_another_number() -> None:
    state = save_after(Parts(), 1, num_replicas=2, rank=0)
    for replicas, rank in ((1, 0), (2, 1), (4, 1)):
        with loader_of(Parts(), num_replicas=replicas, rank=rank) as loader:
            with pytest.raises(ValueError, match=r"state of rank 0 of 2.*load all of them"):
                loader.load_state_dict(state)
    with loader_of(Parts(), num_replicas=2, rank=0) as loader:
        loader.load_state_dict([state])
        assert rows_of(loader) == batches_of(LENGTHS, SIZE, parts=[0, 2])[1:]


@covering(1, pool=POOLS, lengths=[(7, 3, 12), (5,), (1, 30), (8, 8)], steps=[1, 4, 7])
def test_every_epoch_has_as_many_full_batches_and_goes_on_where_the_last_one_ended(
    pool: str, lengths: tuple[int, ...], steps: int
) -> None:
    options: dict[str, Any] = {"streams": len(lengths), "steps_per_epoch": steps}
    found = epochs_of(Parts(lengths), epochs=4, pool=pool, **options)
    assert [len(epoch) for epoch in found] == [steps] * 4
    assert sum(found, []) == endless_of(lengths, SIZE, 4 * steps)
    with loader_of(Parts(lengths), pool, **options) as loader:
        assert len(loader) == steps
        for _ in range(2):  # loops that are left
            assert rows_of(itertools.islice(loader, 1)) and loader.position == 1
        for epoch in (2, 0, 3):
            assert rows_of(loader) == found[epoch]
            loader.set_epoch(0 if epoch == 2 else 3)


@covering(1, pool=POOLS[:3], kind=STREAMS, count=[0, 1, 3, 5])
def test_an_endless_order_goes_on_from_a_state_in_any_epoch(pool: str, kind: Callable[..., Any], count: int) -> None:
    options: dict[str, Any] = {"streams": 3, "steps_per_epoch": 5}
    lengths = (7, 3, 12)
    whole = epochs_of(kind(lengths), epochs=4, **options)
    state = copy.deepcopy(save_after(kind(lengths), count, epoch=2, pool=pool, **options))
    rest = go_on(kind(lengths), state, pool, workers=1, **options)
    assert next(rest) == (whole[2][count:] or whole[3])
    assert count == 5 or next(rest) == whole[3]
    rest.close()


def test_data_that_can_be_read_once_only_is_an_error_and_no_wait_for_ever() -> None:
    items = iter(range(6))
    once = type("Once", (), {"__iter__": lambda self: items})
    with loader_of(once(), streams=1, steps_per_epoch=3) as loader:
        iterator = iter(loader)
        assert values(next(iterator)) == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(ValueError, match="has no samples"):
                next(iterator)


def test_steps_of_ranks_are_equally_many_and_disjoint() -> None:
    lengths = (12, 4, 8, 8)
    found = [epochs_of(Parts(lengths), epochs=2, num_replicas=2, rank=rank, steps_per_epoch=3) for rank in range(2)]
    for rank in range(2):
        assert sum(found[rank], []) == endless_of(lengths, SIZE, 6, parts=range(rank, 4, 2))


@pytest.mark.filterwarnings("ignore:each rank reads parts of its own")
@pytest.mark.parametrize("steps", [None, 3])
def test_4_ranks_of_4_go_on_as_2_ranks_of_8_only_at_the_beginning_of_an_epoch(steps: int | None) -> None:
    def part(number: int, parts: int) -> Iterator[int]:
        return iter(range(1000 * number, 1000 * number + 40))

    def loader(ranks: int, rank: int, size: int) -> ShardedDataLoader:
        mixed = interleave([part])
        return ShardedDataLoader(mixed, size, num_replicas=ranks, rank=rank, streams=4, steps_per_epoch=steps)

    states, read = [], []
    for rank in range(4):
        one = loader(4, rank, 4)
        batches = iter(one)
        read += [number for _ in range(2) for number in values(next(batches))]
        states.append(one.state_dict())
    stays = "within an epoch and with steps_per_epoch=, it must stay 4" if steps else "within an epoch it must stay 4"
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"batch_size was 4, and is 8 .{stays}") as caught:
            loader(2, 0, 8).load_state_dict(states, strict=strict)
        assert "strict=False" not in str(caught.value)
    for rank in range(2):
        other = loader(2, rank, 4)
        other.load_state_dict(states)
        read += [number for batch in other for number in values(batch)]
    assert len(set(read)) == len(read) and len(read) == (160 if steps is None else 32 + 2 * 4)
    if steps is None:
        ended = loader(4, 0, 4)
        list(ended)
        wider = loader(2, 0, 8)
        wider.load_state_dict(ended.state_dict())
        assert (wider.epoch, wider.position) == (1, 0)
