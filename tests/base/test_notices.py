"""What goes wrong quietly is said once, and counted."""

import logging
import os
import signal
import traceback
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import METHODS
from samples import Drawing

import sharded_loader
from sharded_loader import (
    FixedBucketSampler,
    LoaderWarning,
    OnError,
    ProcessPool,
    ShardedDataLoader,
    SimpleDataset,
    TooManySkippedError,
    interleave,
    sample_rng,
)
from sharded_loader.base.notices import Notices, is_ours, warn
from sharded_loader.engine import pipeline
from sharded_loader.torch import DataLoader

ZEROS = np.zeros((8, 1 << 18), np.uint8)
DAMAGED = Drawing(16, bad={1, 5, 9, 13})
"""Every fourth sample cannot be read."""

MAKERS = pytest.mark.parametrize("made", [ShardedDataLoader, DataLoader])


def levels(caplog, word):
    return [one.levelno for one in caplog.records if one.name == "sharded_loader" and word in one.getMessage()]


def warned(caplog):
    """The only line of its level."""
    [said] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    return said


def test_the_first_of_a_kind_is_a_line_of_the_logger_as_a_warning_and_the_others_are_information(caplog):
    caplog.set_level(logging.INFO, "sharded_loader")
    notices = Notices()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which it is not
        for kind in ("skipped_samples", "slow_batches", "skipped_samples"):
            notices.record(kind, f"about {kind}")
    assert levels(caplog, "skipped") == [logging.WARNING, logging.INFO] and levels(caplog, "slow") == [logging.WARNING]
    assert notices.counts["skipped_samples"] == 2


def test_one_category_has_all_warnings(tmp_path):
    dataset = SimpleDataset(range(4))
    with (tmp_path / "numbers").open("w+b") as dataset.file, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", LoaderWarning)
        loader = ShardedDataLoader(dataset, 2, num_workers=1, thread_pool=True, pin_memory=True)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        loader.close()
        FixedBucketSampler([1, 2], 1, num_buckets=3, bucket_keys=[2])


def test_a_warning_names_the_line_of_the_users_program():
    with pytest.warns(LoaderWarning, match="once") as caught:
        notices = Notices()
        notices.warn("kind", "once")
        notices.warn("kind", "once")
        warn("once, too")
    assert [one.filename for one in caught] == [__file__, __file__]
    assert is_ours(sharded_loader.__file__) and is_ours(pipeline.__file__) and not is_ours(__file__)


@MAKERS
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_left_out_are_said_once_and_counted(made, workers, caplog):
    loader = made(DAMAGED, 4, num_workers=workers, on_error="skip")
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 2, 3], [4, 6, 7], [8, 10, 11], [12, 14, 15]]
    assert "skipped or replaced sample 1 in epoch 0, batch 0: ValueError: bad 1" in warned(caplog)
    if made is ShardedDataLoader:
        assert loader.stats().as_dict("skipped_samples") == {"skipped_samples": 4.0}
        assert "4 samples skipped or replaced" in str(loader.stats())
        list(loader)
        assert [loader.stats(epoch).skipped_samples for epoch in (0, 1)] == [4, 4]
        loader.close()


@MAKERS
@pytest.mark.parametrize(
    "on_error", ["skip", "replace", lambda _: np.int64([0, 0])], ids=["skip", "replace", "function"]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_more_samples_than_the_limit_of_an_epoch_are_an_error_with_its_cause(made, on_error, workers):
    loader = made(DAMAGED, 4, num_workers=workers, on_error=OnError(on_error, limit=3))
    for _ in range(2):
        batches, got = iter(loader), []
        text = r"4 samples of this epoch, .* 3\. .* sample 13 in .*batch 3"
        with pytest.raises(TooManySkippedError, match=text) as caught:
            for batch in batches:
                got.append(batch)
        assert len(got) == 3 and caught.value.skipped == 4 and isinstance(caught.value.__cause__, ValueError)
        told = "".join(traceback.format_exception(caught.value))
        assert told.count("bad 13") == 1 and told.count("in __getitem__") == 1
    assert len(list(made(DAMAGED, 4, on_error=OnError(on_error, limit=4)))) == 4


@MAKERS
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_loses_all_samples_is_one_clear_warning(made, workers):
    data = Drawing(16, bad=range(16))
    loader = made(data, 4, num_workers=workers, on_error="skip", persistent_workers=workers > 0)
    with pytest.warns(LoaderWarning, match="^epoch 0, batch 0 was left out: no sample of it could be read") as caught:
        assert list(loader) == []
    assert len(caught) == 1


def test_the_action_is_known_and_a_limit_is_a_number_and_needs_an_action():
    for given, text in (
        (("drop",), "on_error is 'drop'; it must be"),
        (("raise", 3), 'needs the action "skip", "replace"'),
        (("skip", "1%"), "limit must be an integer, got '1%'"),
        (("skip", -1), "limit must be at least 0, got -1"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            OnError(*given)


@METHODS
def test_a_killed_worker_is_told_and_counted(method, caplog):
    with ShardedDataLoader(range(64), 4, pool=ProcessPool(1, start_method=method)) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(loader.pool.pids[0], signal.SIGKILL)
        assert len(list(batches)) == 15
        assert loader.stats().replaced_workers == 1 and "1 worker replaced" in str(loader.stats())
    said = warned(caplog)
    assert said.startswith("worker 0 (pid ") and "SIGKILL" in said and "Another worker has its place" in said


def test_batches_that_do_not_fit_into_shared_memory_are_told_and_counted(caplog):
    for max_bytes in (None, 1 << 18):
        assert caplog.records == []
        with ShardedDataLoader(ZEROS, 4, pool=ProcessPool(1, max_bytes=max_bytes)) as loader:
            assert [batch.shape for _ in range(3) for batch in loader] == [(4, 1 << 18)] * 6
            slow = loader.stats().slow_batches
            assert 6 <= slow <= 8 and f"{slow} batch" in str(loader.stats()) if max_bytes else slow == 0
    assert levels(caplog, "bytes finds no room in shared memory (max_bytes=262144") == [logging.WARNING]


@pytest.mark.parametrize("pool", ["inline", "thread", "process"])
def test_a_dataset_that_has_grown_without_a_refresh_is_a_warning(pool):
    data = list(range(8))
    with ShardedDataLoader(data, 4, num_workers=int(pool != "inline"), pool=pool) as loader:
        assert len(list(loader)) == 2
        data.extend([8, 9])
        with pytest.warns(LoaderWarning, match=r"has 10 samples, and had 8 .*call loader\.refresh"):
            assert len(list(loader)) == 2
        assert len(list(loader)) == 2
        loader.refresh()
        assert len(list(loader)) == 3


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "thread_pool": True}], ids=str)
def test_the_drop_in_reads_a_dataset_that_has_grown_as_torch_does(workers):
    data = list(range(8))
    for more in ({}, {"persistent_workers": True}) if "thread_pool" in workers else ({},):
        loader = DataLoader(data, 4, **workers, **more)
        before = len(list(loader))
        data.extend(range(8))
        assert len(loader) == len(list(loader)) == before + 2


def test_only_persistent_workers_have_the_old_dataset_and_a_sampler_may_know_of_the_new_one():
    data = list(range(8))
    loader = DataLoader(data, 4, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 2
    del data[4:]
    with pytest.warns(LoaderWarning, match=r"has 4 samples, and had 8 .*leave out persistent_workers") as caught:
        assert [len(list(loader)), len(list(loader))] == [1, 1]
    assert [one.filename for one in caught] == [__file__]
    data, indices = [0, 1], [0, 1]
    with ShardedDataLoader(data, 2, sampler=indices) as loader:
        assert len(list(loader)) == 1
        data.extend([2, 3]), indices.extend([2, 3])
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_ranks_without_a_process_group_that_read_the_same_are_told(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.warns(LoaderWarning, match=r'one of 2 ranks \(WORLD_SIZE\), and each reads .* num_replicas="auto"'):
        list(ShardedDataLoader(range(4), 2))
    assert len(list(ShardedDataLoader(range(4), 2, num_replicas=1))) == 2
    assert len(list(ShardedDataLoader(range(4), 2, num_replicas="auto"))) == 1
    assert caplog.records == []
    list(DataLoader(range(4), 2))  # torch's loader reads so on purpose: no warning
    assert levels(caplog, "give sampler=DistributedSampler(dataset)") == [logging.WARNING]
    sampler = torch.utils.data.DistributedSampler(range(4), num_replicas=2, rank=1)
    list(DataLoader(range(4), 2, sampler=sampler))
    assert len(caplog.records) == 1


class Plain(torch.utils.data.IterableDataset[int]):
    """Iterable data that may ask which part it is to read."""

    def __init__(self, asks=False, shuffles=False):
        self.asks, self.shuffles = asks, shuffles

    def __iter__(self):
        numbers = list(range(12))
        if self.shuffles:
            sample_rng().shuffle(numbers)
        info = torch.utils.data.get_worker_info() if self.asks else None
        for place in range(0 if info is None else info.id, 12, 1 if info is None else info.num_workers):
            yield numbers[place]


@pytest.mark.parametrize("pool", ["inline", "thread", "process", "torch's"])
@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.costly
def test_iterable_data_that_does_not_ask_for_its_part_is_a_warning(pool, shuffles):
    def make(dataset):
        if pool == "torch's":
            return nullcontext(DataLoader(dataset, 3, num_workers=2, seed=0))
        return ShardedDataLoader(dataset, 3, num_workers=2 * (pool != "inline"), pool=pool, streams=2, seed=0)

    text = r"read in 2 parts, but its __iter__ has not asked .* streams=1"
    with make(Plain(shuffles=shuffles)) as loader, pytest.warns(LoaderWarning, match=text) as caught:
        batches = []
        for batch in loader:
            assert shuffles or len(batches) < 2 or caught  # two parts that begin alike: known after their first batches
            batches.append(batch)
        assert sorted(torch.cat(batches).tolist()) == sorted([*range(12)] * 2)
        assert len(list(loader)) == 8
    assert [one.filename for one in caught] == [__file__]  # said once
    with make(Plain(asks=True)) as loader:
        assert len(list(loader)) == 4


def test_iterable_data_that_is_divided_is_no_warning():
    def by_part(part, parts):
        return iter(range(part, 12, parts))

    for dataset, streams in (
        (by_part, 2),
        (interleave([Plain(asks=True), by_part]), 2),
        (interleave([[1], [2]]), None),
    ):
        list(ShardedDataLoader(dataset, 3, streams=streams))
    with pytest.warns(LoaderWarning, match="has not asked"):  # unlike these
        list(ShardedDataLoader(interleave([Plain(), Plain()]), 3, streams=2))


def test_where_warnings_are_errors_the_warning_of_parts_costs_no_batch():
    batches, got = iter(ShardedDataLoader(Plain(), 3, streams=2)), []
    with pytest.raises(LoaderWarning, match="has not asked"):
        for batch in batches:
            got.append(batch.tolist())
    assert len(got) == 2
    assert got + [batch.tolist() for batch in batches] == [[i, i + 1, i + 2] for i in (0, 0, 3, 3, 6, 6, 9, 9)]
    assert ShardedDataLoader(range(4), 2, num_workers=-1).num_workers == 0
    with pytest.raises(ValueError, match="non-negative"):
        DataLoader(range(4), 2, num_workers=-1)
