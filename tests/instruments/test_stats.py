"""Where the time of a training loop goes."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import ahead
from torch.utils.data import BatchSampler

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, SimpleDataset, ThreadPool, WorkerTimeoutError
from sharded_loader.engine.messages import Result
from sharded_loader.engine.pipeline import Entry, Pipeline
from sharded_loader.engine.pool import Pool
from sharded_loader.engine.split import Split
from sharded_loader.instruments import stats
from sharded_loader.instruments.stats import Counts, LoaderStats, Meter
from sharded_loader.instruments.times import CAUSES, STAGES, Histograms, StageTimes, WorkerTimes
from sharded_loader.torch import DataLoader
from tests.failures import Fails, kill
from tests.samples import Drawing


def note(meter: Meter, counts: Counts, result: Result) -> None:
    """A batch that took 2.5 s, of which 1.5 in ``next``, 0.5 for its placement, and 0.25 behind a device."""
    pipeline, entry = Pipeline(InlinePool(), Split()), Entry(result.seq, None, result, placing=0.5)
    meter.step(counts, entry, (1.0, 2.0, 3.5, 0.25, False), pipeline)


def test_counts_report_what_was_noted() -> None:
    meter, counts = Meter(), Counts()
    for number in range(2):
        note(meter, counts, Result(0, number, samples=3, seconds=0.75, began=2.0))
    found = counts.report(LoaderStats())
    assert (found.batches, found.samples, found.seconds, found.reading_seconds) == (2, 6, 5.0, 1.5)
    assert (found.waiting_seconds, found.placing_seconds, found.device_seconds) == (2.5, 0.5, 0.5)
    causes = {name: seconds for name, seconds in found.causes.items() if seconds}
    assert causes == {"compute": 1.5, "placing": 0.5, "main_process": 0.5}
    assert [(one.epoch, one.step, one.samples) for one in counts.state[1]] == [(-1, 0, 3), (-1, 1, 3)]


def test_rates_and_shares_are_of_the_time_in_epochs_and_of_the_samples() -> None:
    stats = LoaderStats(batches=10, samples=640, seconds=2.0, waiting_seconds=0.5)
    assert (stats.samples_per_second, stats.waiting_share) == (320.0, 0.25)
    assert (LoaderStats().samples_per_second, LoaderStats().waiting_share) == (0.0, 0.0)
    assert LoaderStats(sources=(0, 0)).shares == (0, 0)


NAMES = [
    "batches", "samples", "seconds", "waiting_seconds", "reading_seconds", "placing_seconds", "retries",
    "replaced_workers", "skipped_samples", "slow_batches", "device_seconds", "device_waiting_seconds",
    "recycled_workers", "discarded_samples", "cache_hits", "cache_misses", "cache_bytes", "samples_per_second",
    "waiting_share", *[f"cause_{name}" for name in CAUSES],
    *[f"stage_{stage}_{name}" for stage in STAGES for name in StageTimes._fields], "slowest_seconds",
]  # fmt: skip


def test_the_numbers_have_names_that_stay_and_are_floats() -> None:
    stats = LoaderStats(batches=10, samples=640, seconds=2.0, waiting_seconds=0.5, retries=3)
    found = stats.as_dict()
    assert list(found) == NAMES, "dashboards of users depend on the names"
    assert {type(value) for value in found.values()} == {float}
    assert found["samples"] == 640 and found["samples_per_second"] == 320 and found["waiting_share"] == 0.25
    json.dumps(found)
    loader = ShardedDataLoader(range(4), 2)
    list(loader)
    assert loader.stats().stages["queued"] == (0.0,) * 5  # the main process has waited for no worker
    assert list(loader.stats().as_dict())[len(NAMES) :] == [f"worker_-1_{name}" for name in WorkerTimes._fields]


def test_some_numbers_can_be_chosen_and_named_otherwise() -> None:
    stats = LoaderStats(batches=2, samples=8)
    assert stats.as_dict("samples", "batches") == {"samples": 8.0, "batches": 2.0}
    assert stats.as_dict("samples", prefix="train/") == {"train/samples": 8.0}
    assert stats.as_dict("cause_start", "stage_read_p99") == {"cause_start": 0.0, "stage_read_p99": 0.0}
    with pytest.raises(ValueError, match=r"no number 'speed': choose from batches, samples, .* waiting_share"):
        stats.as_dict("samples", "speed")


def counts(loader: ShardedDataLoader[Any], epoch: int | None = None) -> tuple[int, int]:
    stats = loader.stats(epoch)
    assert stats.seconds >= stats.waiting_seconds >= stats.placing_seconds >= 0
    return stats.batches, stats.samples


def every_other(part: int, parts: int) -> range:
    return range(part, 10, parts)


def test_each_epoch_has_its_own_numbers_and_they_add_up(pool: Pool) -> None:
    with ShardedDataLoader(range(10), 4, pool=pool) as loader:
        assert counts(loader, 0) == (0, 0)
        for epoch in range(3):
            for number, _batch in enumerate(loader, 1):
                assert counts(loader, epoch)[0] == number
                assert counts(loader, epoch + 1) == (0, 0)
            assert counts(loader, epoch) == (3, 10)
        every = [loader.stats(epoch) for epoch in range(3)]
        total = loader.stats()
    for name in NAMES[:7]:
        assert sum(one.as_dict()[name] for one in every) == pytest.approx(total.as_dict()[name])
    with ShardedDataLoader(every_other, 2, streams=2, pool=pool) as loader:  # iterable data too
        sizes = [sum(map(len, loader)) for _ in range(2)]
        assert [counts(loader, epoch)[1] for epoch in range(2)] == sizes


def test_an_epoch_that_was_broken_off_counts_what_was_delivered(pool: Pool) -> None:
    with ShardedDataLoader(range(10), 2, pool=pool) as loader:
        for number, _batch in enumerate(loader):
            if number == 1:
                break
        list(loader)
        assert [counts(loader, epoch) for epoch in range(3)] == [(2, 4), (5, 10), (0, 0)]


def test_iterators_side_by_side_count_for_their_own_epochs(pool: Pool) -> None:
    with ShardedDataLoader(range(10), 2, pool=pool) as loader:
        first, second = iter(loader), iter(loader)
        for _ in range(2):
            next(first), next(second)
        next(second)
        assert [counts(loader, epoch) for epoch in range(2)] == [(2, 4), (3, 6)]
        list(first)
        assert [counts(loader, epoch) for epoch in range(2)] == [(5, 10), (3, 6)]
        assert counts(loader) == (8, 16)


def test_the_newest_iterator_of_an_epoch_counts() -> None:
    loader = ShardedDataLoader(range(10), 2)
    older = iter(loader)
    next(older)
    loader.set_epoch(0)
    newer = iter(loader)
    assert counts(loader, 0) == (1, 2), "an epoch begins with its first batch"
    next(newer)
    next(older)
    assert (counts(loader, 0), counts(loader)) == ((1, 2), (3, 6))


def test_after_a_resume_an_epoch_counts_from_there(pool: Pool) -> None:
    with ShardedDataLoader(range(10), 2) as before:
        iterator = iter(before)
        next(iterator), next(iterator)
        state = before.state_dict()
    with ShardedDataLoader(range(10), 2, pool=pool) as loader:
        loader.load_state_dict(state)
        list(loader)
        assert (counts(loader, 0), counts(loader)) == ((3, 6), (3, 6))
        list(loader)
        assert counts(loader, 1) == (5, 10)


def test_an_epoch_whose_first_batch_was_interrupted_has_not_begun() -> None:
    struck = Mock(side_effect=[KeyboardInterrupt, 0, 1])
    loader = ShardedDataLoader(SimpleDataset(range(4)).transform(struck), 2)
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert loader.stats(0) == LoaderStats()
    next(iterator)
    assert counts(loader, 0) == (1, 2)


def test_a_batch_that_is_interrupted_when_it_is_counted_counts_when_it_comes_again(monkeypatch: Any) -> None:
    loader = ShardedDataLoader(range(4), 2)
    iterator = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr(Meter, "step", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]
    assert counts(loader, 0) == counts(loader, None) == (2, 4)


def test_an_error_in_place_of_a_batch_is_no_batch_of_the_epoch() -> None:
    loader = ShardedDataLoader([0, "a", 2, 3], batch_sampler=[[0], [0, 1], [2, 3]])
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError):
        next(iterator)
    next(iterator)
    assert counts(loader, 0) == (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, None])
def test_another_thread_can_ask_at_any_time(epoch: int | None, tmp_path: Path) -> None:
    over = threading.Event()
    with ShardedDataLoader(range(2000), 2, pool=ThreadPool(2)) as loader, ThreadPoolExecutor(2) as threads:
        next(iterator := iter(loader))  # the trace has at least one batch
        seen = threads.submit(lambda: [counts(loader, epoch)[0] for _ in iter(over.is_set, True)])
        traced = threads.submit(lambda: [loader.trace(tmp_path / "trace.json") for _ in iter(over.is_set, True)])
        list(iterator)
        over.set()
        traced.result()
    assert seen.result() == sorted(seen.result())
    assert counts(loader, 0) == (1000, 2000), "also after the loader was closed"


class Retrying(SimpleDataset):
    """It tries a request again for some samples, in this process."""

    retries = 0

    def __getitem__(self, index: int) -> int:
        self.retries += index % 2
        return index

    def follow(self, *args: Any) -> None:
        """It wants to know what comes."""


def test_retries_of_this_process_count_for_the_epoch_that_began_last() -> None:
    dataset = Retrying(range(6))
    loader = ShardedDataLoader(dataset, 2)
    assert loader.stats(0).retries == 0
    list(loader)
    assert (loader.stats(0).retries, loader.stats().retries) == (3, 3)
    dataset.retries += 1  # between epochs
    list(loader)
    assert [loader.stats(epoch).retries for epoch in (0, 1, None)] == [4, 3, 7]


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_that_were_replaced_are_counted(start_method: str, tmp_path: Path) -> None:
    pool = ProcessPool(2, start_method=start_method)
    dies_once = Drawing(40, [17], Fails(kill, tmp_path / "count", times=1))
    with ahead(ShardedDataLoader(dies_once, 5, pool=pool), False) as loader:
        for _ in range(2):
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(len(dies_once)))
        assert [loader.stats(epoch).replaced_workers for epoch in (0, 1, None)] == [1, 0, 1]
    with ShardedDataLoader(range(12), 2, pool=pool) as loader:
        list(loader)
        assert loader.stats().replaced_workers == 0, "those of another loader do not count"


@pytest.mark.slow
def test_a_thread_that_stands_still_and_is_replaced_is_counted() -> None:
    go_on = threading.Event()
    dataset = SimpleDataset(range(4)).transform(lambda index: go_on.wait(300) if index == 3 else index)
    with ShardedDataLoader(dataset, 2, pool=ThreadPool(2, timeout=1.0)) as loader:
        with pytest.raises(WorkerTimeoutError):
            list(loader)
        assert loader.stats().replaced_workers == 1
        go_on.set()


@pytest.mark.parametrize("epoch", [-1, 1.5, "0", True])
def test_an_epoch_that_is_none_is_refused(epoch: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="epochs count from 0"):
        ShardedDataLoader(range(4), 2).stats(epoch)


def test_the_sum_has_what_old_and_repeated_epochs_add_and_a_thousand_have_numbers_of_their_own() -> None:
    meter, result = Meter(), Result(0, 0, samples=3)
    iterators = []
    for epoch in (0, 0, *range(1, Meter.KEPT_EPOCHS + 5)):
        iterators.append(Counts())
        meter.begin(epoch, iterators[-1])
    for counts in iterators:
        note(meter, counts, result)
    stats = meter.stats()
    assert (stats.batches, stats.samples) == (len(iterators), 3 * len(iterators))
    assert (stats.waiting_seconds, stats.seconds) == (1.25 * len(iterators), 2.5 * len(iterators))
    assert (stats.placing_seconds, stats.device_seconds) == (0.25 * len(iterators), 0.25 * len(iterators))
    assert sum(meter.stats(epoch).batches for epoch in range(Meter.KEPT_EPOCHS + 5)) == Meter.KEPT_EPOCHS
    assert [meter.stats(epoch).batches for epoch in (4, 5, Meter.KEPT_EPOCHS + 4)] == [0, 1, 1]
    for index in range(Meter.KEPT + 5):
        meter.skip([(index, KeyError(index))])
    assert meter.notices.counts["skipped_samples"] == Meter.KEPT + 5  # of so many the last ones are kept
    assert [index for index, _ in meter.skipped] == list(range(5, Meter.KEPT + 5))


@pytest.mark.parametrize("pool", [None, ThreadPool(1)], ids=["inline", "thread"])
def test_samples_that_all_fail_have_stats_too(pool: Pool | None) -> None:
    with ShardedDataLoader(Drawing(8, range(8)), 2, pool=pool) as loader:
        iterator = iter(loader)
        for _ in range(4):
            with pytest.raises(ValueError, match="bad"):
                next(iterator)
        for stats in (loader.stats(), loader.stats(0), loader.stats(1)):
            assert "0 samples in 0 batches" in str(stats)
            assert (stats.samples_per_second, stats.shares, stats.as_dict()["samples"]) == (0, (), 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_discard_leaves_out_of_an_epoch_is_counted(ranks: int) -> None:
    left_out = []
    for rank in range(ranks):
        with ShardedDataLoader(range(43), 8, last_batch="discard", num_replicas=ranks, rank=rank) as loader:
            list(loader)
            left_out.append(loader.stats(0).discarded_samples)
    assert left_out == ([3] if ranks == 1 else [6, 5])
    for loader in (ShardedDataLoader(range(3), 4, drop_last=True), DataLoader(range(3), 4, drop_last=True)):
        with pytest.warns(UserWarning, match="has left out 3 samples: the whole epoch had fewer than a batch"):
            assert list(loader) == []
        assert list(loader) == [] and loader.stats().discarded_samples == 6
    assert list(ShardedDataLoader([], 4, drop_last=True)) == list(DataLoader([], 4, drop_last=True)) == []


@pytest.mark.parametrize("drop_last", [None, True])
def test_of_the_users_batch_sampler_nothing_is_counted_as_discarded(drop_last: bool | None) -> None:
    class Rest(BatchSampler):
        """As Accelerate's ``SkipBatchSampler``: it may have no attributes of its base class."""

        def __init__(self) -> None:
            vars(self).update({} if drop_last is None else {"drop_last": drop_last})

        __iter__, __len__ = lambda self: iter([[2, 3]]), lambda self: 1  # type: ignore[assignment]

    loader = DataLoader(range(5), batch_sampler=Rest())
    assert [batch.tolist() for batch in loader] == [[2, 3]]
    assert loader.stats().discarded_samples == 0


def test_epochs_that_have_ended_are_not_summed_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShardedDataLoader(range(4), 2)
    for _ in range(50):
        assert len(list(loader)) == 2
    assert loader.stats().batches == 100
    summed, with_rows = list[Any](), stats.with_rows
    monkeypatch.setattr(stats, "with_rows", lambda *given: summed.append(given) or with_rows(*given))
    assert len(list(loader)) == 2
    assert loader.stats().batches == 102 and loader.stats(50).batches == 2
    assert len(summed) < 10  # with 1,000 epochs, it took 70 ms


def test_the_histograms_of_a_few_epochs_are_kept_though_each_epoch_is_asked_for() -> None:
    def histograms() -> list[Histograms]:
        return [one for one in gc.get_objects() if type(one) is Histograms and one.num_workers]

    before, loader = histograms(), DataLoader(range(8), 2)  # its first batch of each epoch is measured
    for epoch in range(4 * Meter.KEPT_TIMES):
        list(loader)
        assert loader.stats(epoch).batches == 4
    assert Meter.KEPT_TIMES <= len(histograms()) - len(before) <= 3 * Meter.KEPT_TIMES
