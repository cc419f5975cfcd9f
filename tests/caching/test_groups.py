"""``GroupReads``: batches and errors are those of plain reading, and each group is read once in a window of batches."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import METHODS, POOLS, covering, make_pool, with_errors

import sharded_loader
from sharded_loader import ShardedDataLoader, ThreadPool, sample_rng
from sharded_loader.caching.groups import GroupReads, Shelf, key_of
from sharded_loader.data.datasets import Dataset
from sharded_loader.torch import DataLoader

COUNT, PER_GROUP, BATCH, WINDOW = 240, 40, 10, 6
GROUPS, BATCHES = COUNT // PER_GROUP, COUNT // BATCH


class Videos(Dataset):
    """Samples of groups. ``bad`` ones raise, ``deadly`` ones kill their worker: the first time, or always."""

    def __init__(self, bad: tuple[int, ...] = (), deadly: dict[int, Path | None] | None = None) -> None:
        self.bad, self.deadly = bad, deadly or {}

    def __len__(self) -> int:
        return COUNT

    def group_of(self, index: int) -> str:
        return f"video {index // PER_GROUP}"

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        if index in self.deadly:
            note = self.deadly[index]
            if note is None or not note.exists():
                if note is not None:
                    note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return {"x": np.full((2, 3), index, np.int16), "i": index}


class Plain(Videos):
    """Without groups: a loader reads it sample by sample."""

    group_of: Any = None


class InOrder(Videos):
    """Reads in bulk: samples of one group, in ascending order, as a decoder wants them."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert indices == sorted(set(indices)) and len({index // PER_GROUP for index in indices}) == 1
        return [self[index] for index in indices]


def read(dataset: Any, epochs: int = 1, pool: str = "inline", **options: Any) -> list[Any]:
    """The batches of some epochs, or in their place the errors."""
    found = []
    with ShardedDataLoader(dataset, BATCH, shuffle=True, seed=3, pool=make_pool(pool), **options) as loader:
        for _ in range(epochs):
            for batch in with_errors(iter(loader)):
                if isinstance(batch, Exception):
                    found.append((type(batch).__name__, str(batch)))
                else:
                    found.append({name: value.tolist() for name, value in batch.items()})
    return found


def noisy(sample: Any) -> Any:
    return sample | {"noise": sample_rng().random(2), "other": random.random()}


@pytest.mark.costly
@covering(pool=POOLS, kind=(Videos, InOrder))
def test_batches_are_those_of_plain_reading_and_each_group_is_read_once_in_a_window(pool: str, kind: Any) -> None:
    grouped = GroupReads(kind(), batches=WINDOW)
    assert read(grouped, 2, pool) == read(Plain(), 2, pool)
    found, samples, _ = grouped.counts
    # Of each group, a window more than fit, as it may begin in the middle of one. A group has samples in each batch
    # but a few, and a worker may come late to one that another has read for later batches.
    windows = 2 * GROUPS * (BATCHES // WINDOW + 1)
    assert grouped.reads <= windows * (1 if pool == "inline" else 1.5) and found + samples >= 2 * COUNT
    assert samples == 2 * COUNT or pool != "inline"


@pytest.mark.costly
@pytest.mark.parametrize("pool", POOLS)
def test_random_numbers_behind_it_are_those_of_plain_reading(pool: str) -> None:
    def dataset(base: Any) -> Any:
        return base.transform(noisy, seeded=True)

    assert read(dataset(GroupReads(Videos(), WINDOW)), 2, pool) == read(dataset(Plain()), 2, pool)


@pytest.mark.costly
@pytest.mark.parametrize("max_bytes", [0, 1, 700, 3000, "20 kB"])
@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_too_little_memory_costs_reads_and_nothing_else(pool: str, max_bytes: int | str) -> None:
    grouped = GroupReads(Videos(), 3 * WINDOW, max_bytes)
    assert read(grouped, 2, pool) == read(Plain(), 2, pool)
    assert grouped.counts[2] <= 20_000 and grouped.reads > 2 * GROUPS


@pytest.mark.costly
@pytest.mark.parametrize("pool", ["inline", "fork"])
def test_states_resume_in_the_middle_of_a_window_on_other_ranks(pool: str) -> None:
    def numbers(grouped: bool, ranks: int, state: Any, steps: int | None) -> Any:
        loaders, found = [], []
        for rank in range(ranks):
            dataset = GroupReads(Videos(), WINDOW) if grouped else Plain()
            options = {"num_replicas": ranks, "rank": rank, "pool": make_pool(pool if grouped else "inline")}
            loaders.append(ShardedDataLoader(dataset, BATCH, shuffle=True, seed=3, **options))
            if state is not None:
                loaders[-1].load_state_dict(state, strict=False)
            found.append([batch["i"].tolist() for _, batch in zip(range(steps or COUNT), loaders[-1], strict=False)])
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.close()
        return found, state

    (first, plain_first), (state, plain_state) = zip(numbers(True, 2, None, 4), numbers(False, 2, None, 4), strict=True)
    assert first == plain_first and state == plain_state
    assert numbers(True, 3, state, None)[0] == numbers(False, 3, state, None)[0]


def test_broken_off_epochs_leave_no_samples_that_keep_others_out() -> None:
    grouped, plain = GroupReads(InOrder(), WINDOW, "40 kB"), Plain()
    with ShardedDataLoader(grouped, BATCH, shuffle=True, seed=3) as loader:
        for epoch in range(70):
            loader.set_epoch(2 * epoch % 7)
            next(iter(loader))
        loader.set_epoch(0)
        before = grouped.reads
        assert [batch["i"].tolist() for batch in loader] == [batch["i"] for batch in read(plain)]
    assert grouped.reads - before <= GROUPS * (BATCHES // WINDOW + 1)


def test_two_loaders_at_once_get_their_own_batches() -> None:
    grouped = GroupReads(InOrder(), WINDOW)
    loaders = [ShardedDataLoader(grouped, BATCH, shuffle=True, seed=seed, pool=ThreadPool(2)) for seed in (3, 4)]
    pairs = [[batch["i"].tolist() for batch in pair] for pair in zip(*loaders, strict=True)]
    for loader in loaders:
        loader.close()
    assert [one for one, _ in pairs] == [batch["i"] for batch in read(Plain())]
    assert sorted(i for _, batch in pairs for i in batch) == list(range(COUNT))


# -- errors and deaths -------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_a_bad_sample_fails_in_its_own_batch_alone(pool: str, on_error: str) -> None:
    bad = (7, 90, 91, 200)
    found, plain = (read(one, 1, pool, on_error=on_error) for one in (GroupReads(InOrder(bad), WINDOW), Plain(bad)))
    assert found == plain and (on_error != "raise" or "sample 7 is damaged" in str(plain))


@METHODS
def test_a_killed_worker_changes_nothing(method: str, tmp_path: Path) -> None:
    deadly: dict[int, Path | None] = {index: tmp_path / str(index) for index in (5, 50, 130)}
    assert read(GroupReads(InOrder(deadly=deadly), WINDOW), 2, method) == read(Plain(), 2)
    assert len(os.listdir(tmp_path)) == 3


def test_a_sample_that_always_kills_is_the_error_of_its_own_batch() -> None:
    found = read(GroupReads(InOrder(deadly={130: None}), WINDOW), pool="fork")
    errors = [(number, one) for number, one in enumerate(found) if isinstance(one, tuple)]
    plain = [one["i"] for one in read(Plain())]
    assert [(number, one[0]) for number, one in errors] == [
        (next(number for number, batch in enumerate(plain) if 130 in batch), "WorkerDiedError")
    ]
    assert [one["i"] for one in found if isinstance(one, dict)] == [batch for batch in plain if 130 not in batch]


def draws_itself(index: int) -> Any:
    return index, sample_rng().random()


def draws_globally(index: int) -> Any:
    return index, np.random.random()


@pytest.mark.parametrize(("fn", "words"), [(draws_itself, "sample_rng"), (draws_globally, "draws from numpy.random")])
def test_samples_that_draw_are_an_error(fn: Any, words: str) -> None:
    class Drawing(Videos):
        def __getitem__(self, index: int) -> Any:
            return fn(index)

    with pytest.raises(ValueError, match=words):
        for _ in ShardedDataLoader(GroupReads(Drawing(), WINDOW), BATCH, shuffle=True, pool=make_pool("fork")):
            pass


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1, 2],), TypeError, r"has no group_of\(index\)"),
        ((Videos().take(4),), TypeError, r"call take or transform on the result"),
        ((Videos(), 0), ValueError, "batches"),
        ((Videos(), 1025), ValueError, "at most 1024"),
        ((Videos(), 2, "much"), ValueError, "max_bytes"),
    ],
)
def test_bad_arguments_are_errors(arguments: tuple[Any, ...], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        GroupReads(*arguments)


# -- where it stands ---------------------------------------------------------------------------------------------------


def test_it_works_under_wrappers_that_translate_indices() -> None:
    def odd(base: Any) -> Any:
        return (base + base.take(30)).transform(noisy, seeded=True).take(200)

    grouped = GroupReads(InOrder(), WINDOW)
    assert read(odd(grouped)) == read(odd(Plain()))
    assert grouped.reads < 100


def test_a_sample_that_comes_twice_is_two_objects() -> None:
    grouped = GroupReads(Videos(), WINDOW)
    one, other = grouped.__getitems__([3, 3])
    one["x"][:] = 0
    assert other["x"].tolist() == Plain()[3]["x"].tolist() == grouped[-COUNT + 3]["x"].tolist()
    assert grouped[2:4][1]["i"] == 3


def test_another_librarys_sampler_groups_within_a_batch() -> None:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1)).tolist()
    grouped = GroupReads(InOrder(), WINDOW)
    with ShardedDataLoader(grouped, BATCH, sampler=iter_of(order)) as loader:
        assert [i for batch in loader for i in batch["i"].tolist()] == order
    assert grouped.counts[0] == 0 and GROUPS * 4 < grouped.reads <= GROUPS * BATCHES


def iter_of(order: list[int]) -> Any:
    class Given(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter(order)

        def __len__(self) -> int:
            return len(order)

    return Given()


def test_the_drop_in_groups_within_a_batch() -> None:
    grouped = GroupReads(InOrder(), WINDOW)
    loaders = [DataLoader(one, BATCH, shuffle=True, seed=5, num_workers=2) for one in (grouped, Plain())]
    batches = [[batch["i"].tolist() for batch in loader] for loader in loaders]
    assert batches[0] == batches[1] and grouped.counts[0] == 0 and grouped.reads <= GROUPS * BATCHES


def test_statistics_count_the_samples_found() -> None:
    with ShardedDataLoader(GroupReads(Videos(), WINDOW), BATCH, shuffle=True) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats.cache_misses == COUNT and stats.cache_hits > COUNT // 2


# -- the shelf ---------------------------------------------------------------------------------------------------------


def test_a_shelf_is_one_memory_and_one_that_is_gone_is_empty() -> None:
    shelf = Shelf(10_000)
    assert shelf.put(5, 1, {7: "seven", 8: np.arange(3)})
    twin = pickle.loads(pickle.dumps(shelf))
    assert twin.take(5, [7, 9]) == {7: "seven"} and twin.take(5)[8].tolist() == [0, 1, 2] and twin.take(6) == {}
    assert Shelf(10_000, None, shelf.name, b"another token 16").take(5) == {}
    assert Shelf(10_000, None, "/proc/1/fd/x", shelf.token).take(5) == {}


def test_memory_written_over_by_another_worker_is_not_read() -> None:
    shelf = Shelf(10_000)
    shelf.put(5, 1, {7: "seven", 8: "eight"})
    raw = os.pread(shelf.fd, 1 << 20, 0)
    for word in (b"seven", (8).to_bytes(8, "little")):
        assert shelf.take(5)[8] == "eight"
        os.pwrite(shelf.fd, b"?" * len(word), raw.rindex(word))
        assert 7 not in shelf.take(5)
    assert shelf.take(5) == {}


def test_pieces_go_when_their_batches_are_done_and_leave_no_gap() -> None:
    shelf, piece = Shelf(4096), {1: np.zeros(1000, np.uint8)}
    assert [shelf.put(key, key, piece) for key in (1, 2, 3, 4)] == [True, True, True, False]
    shelf.done[0] = 2
    assert [shelf.put(key, key, piece) for key in (5, 6, 7)] == [True, True, False]
    assert [key for key in range(8) if shelf.take(key)] == [3, 5, 6]
    assert 3000 < shelf.kept()["size"].sum() == 4096 - shelf.gaps()[1].max()


def test_keys_are_claimed_by_one() -> None:
    shelf, taken = Shelf(0), []
    with shelf.claim(7, block=False) as mine:
        pid = os.fork()
        if pid == 0:
            with shelf.claim(7, block=False) as theirs, shelf.claim(8, block=True) as other:
                os._exit(10 * theirs + other)
        taken = [mine, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    assert taken == [True, 1] and key_of("a") == key_of("a") != key_of("b")


def test_copies_share_what_is_read() -> None:
    grouped = GroupReads(Videos(), WINDOW)
    twin = copy.deepcopy(grouped)
    twin[3]
    assert grouped.counts[1] == 1 and repr(twin) == f"GroupReads({Videos()!r}, batches=6, max_bytes=1000000000)"
    assert sharded_loader.GroupReads is GroupReads
