"""Several workers read a slow batch, and nobody sees it but the clock."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset, ThreadPool, WorkerTimeoutError, sample_rng
from sharded_loader.data.inspection import is_read_once
from sharded_loader.engine.messages import PIECE, Result, Task
from sharded_loader.engine.pieces import FIRST_SECONDS, BatchPieces, cuts, late_after, limit_of
from sharded_loader.pools.task_reader import TaskReader
from sharded_loader.randomness.global_generators import global_states
from sharded_loader.torch import DataLoader

POOLS = ("thread", "fork", "spawn")


def pool_of(kind: str, workers: int = 4, **options: Any) -> Any:
    """A pool of this kind."""
    return ThreadPool(workers, **options) if kind == "thread" else ProcessPool(workers, start_method=kind, **options)


class Slow:
    """Samples that take 5 ms. ``draws``: they draw from the global generators. ``marks``: a folder for who has read."""

    def __init__(
        self, marks: Path, draws: bool = False, bad: tuple[int, ...] = (), kills: int = -1, hangs: int = -1
    ) -> None:
        self.marks, self.draws, self.bad, self.kills, self.hangs = marks, draws, bad, kills, hangs

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        if index == self.kills and not (done := self.marks / "killed").exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while index == self.hangs and not (self.marks / "over").exists():
            time.sleep(0.01)
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        drawn = random.random() if self.draws else 0.0
        x, reader = np.full(3, index + sample_rng().normal(), np.float32), threading.get_native_id()
        return {"x": x, "drawn": drawn, "text": str(index), "reader": reader}


def numbers(loader: ShardedDataLoader) -> list[Any]:
    """What comes of a loader: batches as lists, and errors as texts."""
    found: list[Any] = []
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return found
        except ValueError as error:
            found.append(str(error))
        else:
            shards = batch if isinstance(batch, list) else [batch]
            found.append([(one["x"].tolist(), one["drawn"].tolist(), one["text"]) for one in shards])


def read(pool: Any, dataset: Slow, **options: Any) -> tuple[list[Any], int]:
    """Two epochs, and how many pieces came."""
    pieces = 0
    came = BatchPieces.came

    def spy(self: BatchPieces, result: Result, workers: int) -> Result | None:
        nonlocal pieces
        pieces += result.seq >= PIECE and result.samples < 0
        return came(self, result, workers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchPieces, "came", spy)
        given = {"batch_size": 24, "seed": 3, "prefetch": 1, "shuffle": True, **options}
        with ShardedDataLoader(dataset, pool=pool, **given) as loader:
            return numbers(loader) + numbers(loader), pieces


# -- policy ------------------------------------------------------------------------------------------------------------


def test_only_slow_batches_are_shared_out_and_only_while_workers_are_idle() -> None:
    assert limit_of(None, 0, 4) == FIRST_SECONDS
    assert limit_of(1.0, 3, 4) == 0.0
    assert limit_of(1.0, 1, 4, lead=0.5) == 0.0 and limit_of(1.0, 1, 4, lead=2.0) is None, "one is done before"
    assert limit_of(1.0, 4, 4) is None and limit_of(0.001, 0, 4) is None and limit_of(1.0, 0, 1) is None


def test_pieces_cover_the_rest_of_a_batch_once() -> None:
    for begin, end, seconds, workers in ((1, 64, 0.02, 8), (3, 5, 1.0, 8), (0, 100, 1e-5, 8), (9, 10, 1.0, 2)):
        places = cuts(begin, end, seconds, workers)
        assert places[0] == begin and places[-1] == end and places == sorted(set(places))
        assert len(places) <= workers + 1


def test_a_worker_is_late_at_four_times_the_median() -> None:
    assert late_after(1.0, 0, pays=False) == 4.0, "at no single sample"
    assert late_after(1.0, 64, pays=False) == 1.0 and late_after(1.0, 1, pays=False) == 4.0
    assert late_after(1.0, 64, pays=True) == 4 / 64 and late_after(1.0, 0, pays=True) == 4.0


def test_a_piece_that_fails_is_left_to_the_worker_that_puts_the_batch_together() -> None:
    pieces = BatchPieces()
    [task] = pieces.shared(Task(0, 5, 0, 0, (list(range(8)),), False), 0, 2, 0.0, by_any=False)
    assert task.limit == FIRST_SECONDS
    assert pieces.came(Result(0, 5, ["a"], -1, seconds=0.02), 2) is None
    first, second = pieces.take(True), pieces.take(True)
    assert first is not None and second is not None
    assert (first.shards, second.shards, first.number) == (([1, 2, 3],), ([4, 5, 6, 7],), 5)
    pieces.came(Result(0, first.seq, error=ValueError()), 2)
    pieces.came(Result(0, second.seq, list("efgh"), -4, seconds=0.08), 2)
    whole = pieces.take(True)
    assert whole is not None and whole.seq == 5 and whole.careful
    assert dict(whole.given) == {0: ["a"], 4: ["e", "f", "g", "h"]}


# -- values, errors, deaths --------------------------------------------------------------------------------------------


@pytest.mark.costly(2)
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("options", [{}, {"num_shards": 2}, {"on_error": "skip"}, {"on_error": "replace"}])
@pytest.mark.parametrize("bad", [(), (11, 40)])
def test_values_and_errors_are_those_of_one_reader(
    kind: str, options: dict[str, Any], bad: tuple[int, ...], tmp_path: Path
) -> None:
    dataset = Slow(tmp_path, bad=bad)
    alone, _ = read(pool_of(kind, 1), dataset, **options)
    found, pieces = read(pool_of(kind), dataset, **options)
    assert found == alone
    assert pieces


def test_samples_that_are_large_for_their_time_do_not_go_to_another_process() -> None:
    reader, samples = TaskReader(0, 2, "worker 0"), [np.zeros(1_000_000, np.uint8)]
    reader._generators = global_states()
    assert reader._leave(samples, seconds=0.02) is not None
    assert reader._leave(samples, seconds=0.005) is None


def test_batches_are_shared_out_only_while_there_are_fewer_than_workers(tmp_path: Path) -> None:
    numbers_of: list[int] = []
    shared = BatchPieces.shared

    def spy(self: BatchPieces, task: Task, *args: Any, **options: Any) -> list[Task]:
        given = shared(self, task, *args, **options)
        if given != [task]:
            numbers_of.append(task.number)
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchPieces, "shared", spy)
        with ShardedDataLoader(Slow(tmp_path), 8, pool=pool_of("fork", 2), prefetch=2) as loader:
            assert len(list(loader)) == 12
    assert 0 in numbers_of and set(numbers_of) <= {0, 1, 2}, "of this epoch, and of the next one, which is read ahead"


@pytest.mark.parametrize("kind", ("fork", "spawn"))
def test_samples_that_draw_from_the_global_generators_are_not_shared_out(kind: str, tmp_path: Path) -> None:
    dataset = Slow(tmp_path, draws=True)
    assert read(pool_of(kind), dataset) == read(pool_of(kind, 1), dataset)


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("restarts", (1, 3))
def test_a_worker_that_is_killed_over_a_piece_changes_nothing_or_is_named(restarts: int, tmp_path: Path) -> None:
    alone, _ = read(pool_of("fork", 1), Slow(tmp_path))
    dataset = Slow(tmp_path, kills=50)
    if restarts == 3:
        found, pieces = read(pool_of("fork", restarts=restarts), dataset)
        assert found == alone and pieces
        return
    with ShardedDataLoader(dataset, 24, pool=pool_of("fork", restarts=1), prefetch=1) as loader:
        batches = iter(loader)
        texts = []
        for _ in range(4):
            try:
                texts.append(next(batches)["text"])
            except RuntimeError as error:
                assert "sample 50" in str(error) and "batch 2" in str(error)
                texts.append([])
        assert [len(one) for one in texts] == [24, 24, 0, 24]


@pytest.mark.parametrize("options", [{"num_shards": 2}, {"devices": ["cpu", "cpu"]}])
def test_workers_read_the_shards_of_one_batch(options: dict[str, Any], tmp_path: Path) -> None:
    with ShardedDataLoader(Slow(tmp_path), 24, pool=pool_of("fork"), prefetch=1, **options) as loader:
        shards = next(iter(loader))
    assert [text for shard in shards for text in shard["text"]] == [str(index) for index in range(24)]
    assert len({reader for shard in shards for reader in shard["reader"].tolist()}) > 1


def test_threads_of_the_drop_in_share_out_a_batch(tmp_path: Path) -> None:
    loader = DataLoader(Slow(tmp_path), 24, num_workers=2, prefetch_factor=1, thread_pool=True)
    batches = list(loader)
    assert [batch["text"] for batch in batches] == [[str(i) for i in range(n, n + 24)] for n in range(0, 96, 24)]
    assert len(set(batches[0]["reader"].tolist())) > 1


@pytest.mark.parametrize("kind", ("thread", pytest.param("spawn", marks=pytest.mark.slow)))
def test_a_state_in_mid_epoch_goes_on_with_the_same_batches(kind: str, tmp_path: Path) -> None:
    with ShardedDataLoader(Slow(tmp_path), 24, pool=pool_of(kind, 2), shuffle=True, seed=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [batch["text"] for batch in batches]
    with ShardedDataLoader(Slow(tmp_path), 24, pool=pool_of("thread"), shuffle=True, seed=1, prefetch=1) as loader:
        loader.load_state_dict(state)
        assert [batch["text"] for batch in loader] == rest


# -- late workers ------------------------------------------------------------------------------------------------------


class Stuck:
    """Samples that stand still for 30 s the first time that they are read, wherever that is.

    Args:
        marks: a folder for what has been read.
        stuck: these samples.
        kills: before that they kill a worker.
    """

    read_once = False

    def __init__(self, marks: Path, stuck: tuple[int, ...] = (20,), kills: bool = False) -> None:
        self.marks, self.stuck, self.kills = marks, stuck, kills

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index in self.stuck and self.kills and not (mark := self.marks / "killed").exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.stuck and not (mark := self.marks / f"stuck{index}").exists():
            mark.touch()
            for _ in range(50 if self.kills else 3000):
                if (self.marks / "over").exists():  # a thread ends soon after the test
                    break
                time.sleep(0.01)
        return index


@pytest.mark.parametrize("kind", ("thread", "fork"))
def test_a_batch_that_stands_still_is_read_by_an_idle_worker_too(kind: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    with ShardedDataLoader(Stuck(tmp_path), 4, pool=pool_of(kind, 2)) as loader:
        found = [batch.tolist() for batch in loader]
        took = time.perf_counter() - began
        stats = loader.stats()
        (tmp_path / "over").touch()
    assert found == [list(range(first, first + 4)) for first in range(0, 64, 4)]
    assert took < 25 and stats.second_reads >= 1 and stats.replaced_workers == 0


@pytest.mark.parametrize("kind", ("thread", "fork"))
def test_an_interrupt_during_a_second_reading_loses_nothing(kind: str, tmp_path: Path) -> None:
    with ShardedDataLoader(Stuck(tmp_path), 4, pool=pool_of(kind, 2)) as loader:
        batches, found = iter(loader), list[Any]()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BatchPieces, "given_to_another", _interrupt)
            found += (batch.tolist() for batch in batches)
        (tmp_path / "over").touch()
        assert found == [list(range(first, first + 4)) for first in range(0, 20, 4)]
        found += (batch.tolist() for batch in batches)
    assert found == [list(range(first, first + 4)) for first in range(0, 64, 4)]


@pytest.mark.parametrize("kind", ("thread", "fork"))
def test_late_workers_are_replaced_while_that_pays(kind: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    with ShardedDataLoader(Stuck(tmp_path, (10, 20, 30, 40, 50)), 4, pool=pool_of(kind, 2)) as loader:
        found = [batch.tolist() for batch in loader]  # without new workers, none would read after the second one
        took = time.perf_counter() - began
        stats = loader.stats()
        (tmp_path / "over").touch()
    assert found == [list(range(first, first + 4)) for first in range(0, 64, 4)]
    assert took < 25 and stats.second_reads >= 5 and stats.replaced_workers == 0


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(("restarts", "kills"), [(2, False), (3, True)])
def test_the_last_tries_of_a_batch_are_those_of_one_worker(restarts: int, kills: bool, tmp_path: Path) -> None:
    pool = pool_of("fork", 2, restarts=restarts)
    with ShardedDataLoader(Stuck(tmp_path, kills=kills), 4, pool=pool) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        if not kills:
            threading.Timer(0.2, (tmp_path / "over").touch).start()
        assert len(list(batches)) == 11
        assert loader.stats().second_reads == 0 and loader.stats().replaced_workers == kills


def test_a_dataset_that_says_so_is_read_once(tmp_path: Path) -> None:
    dataset = Stuck(tmp_path)
    dataset.read_once = True
    with ShardedDataLoader(dataset, 4, pool=ThreadPool(2)) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        future = loader.fetch([1])
        future.result(30)
        time.sleep(0.2)
        (tmp_path / "over").touch()
        assert len(list(batches)) == 11
        assert loader.stats().second_reads == 0


@pytest.mark.parametrize("wrap", (lambda one: SimpleDataset(one).transform(str), lambda one: Subset(one, range(9))))
def test_the_innermost_dataset_says_whether_it_is_read_once(wrap: Any, tmp_path: Path) -> None:
    dataset = Stuck(tmp_path)
    assert not is_read_once(wrap(dataset)) and not is_read_once(ConcatDataset([wrap(dataset), [1, 2]]))
    dataset.read_once = True
    assert is_read_once(wrap(dataset)) and is_read_once(ConcatDataset([[1, 2], wrap(dataset)]))


def test_the_pool_does_not_keep_workers_whose_loader_is_gone() -> None:
    pool = pool_of("fork", 2)
    assert len(list(ShardedDataLoader(Slow(Path()), 24, pool=pool, prefetch=1))) == 4
    gc.collect()
    assert pool._stands is not None and not pool.workers  # `nothing_left_behind` looks for their memory


def test_the_first_of_two_answers_counts_and_says_whether_a_second_reading_pays() -> None:
    pieces = BatchPieces()
    late, second = Result(0, 5, "late", 4, began=1.0), Result(0, 5, "second", 4, began=3.1)
    for answers, pays in (([second, late], 2), ([late, second], 1), ([late, second], 0), ([second, late], 1)):
        pieces.twice[0, 5] = (3.0, 1)
        assert [pieces.is_first(one) for one in answers] == [True, False]
        assert pieces.pays == pays
    assert pieces.is_first(late._replace(seq=6))
    pieces.twice[0, 5] = (3.0, 1)
    assert pieces.is_first(late._replace(samples=-1)), "its first samples: the others are shared out"
    assert pieces.is_first(second) and not pieces.is_first(late)


# -- the end in the middle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("thread", "fork"))
@pytest.mark.parametrize("end", ("close", "drop", "interrupt"))
def test_an_epoch_may_end_while_pieces_are_out(kind: str, end: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"prefetch": 1, "seed": 1, "shuffle": True}
    with ShardedDataLoader(Slow(tmp_path), 24, pool=pool_of(kind), **given) as loader:
        batches = iter(loader)
        first = next(batches)["text"]
        time.sleep(0.01)  # pieces of the second batch are out, with luck
        if end == "interrupt":
            came = BatchPieces.came
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BatchPieces, "came", _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    next(batches)
            assert BatchPieces.came is came
            assert len(list(batches)) == 3
        if end == "drop":
            del batches
        if end == "close":
            loader.close()
            return
        assert next(iter(loader))["text"] != first
        loader.set_epoch(0)
        assert next(iter(loader))["text"] == first


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ("thread", "fork"))
def test_a_piece_that_stands_still_for_timeout_is_the_error_of_its_batch(kind: str, tmp_path: Path) -> None:
    dataset = Slow(tmp_path, hangs=70)
    options = {} if kind == "thread" else {"restarts": 1}
    with ShardedDataLoader(dataset, 24, pool=pool_of(kind, timeout=1.0, **options), prefetch=1) as loader:
        batches, found = iter(loader), []
        for _ in range(4):
            try:
                found.append(len(next(batches)["text"]))
            except WorkerTimeoutError as error:
                assert "sample 70" in str(error) and error.batch == 2
                found.append(0)
        (tmp_path / "over").touch()
    assert found == [24, 24, 0, 24]
