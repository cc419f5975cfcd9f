"""Iterable data goes on from a state: after any batch, in any pool, with any number of workers and of ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import METHODS, POOLS, covering
from failures import raise_lookup
from kinds import rows_of, until_the_end
from stream_loaders import KINDS, SIZE, WITHOUT_STATE, epochs_of, loader_of
from stream_samples import (
    LENGTHS,
    At,
    Changing,
    Draws,
    GoOn,
    Own,
    Parts,
    WithStatefulRows,
    batches_of,
    endless_of,
    values,
)

from sharded_loader import ShardedDataLoader, ThreadPool, interleave


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
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_a_dataset_whose_samples_change_is_one_error_that_names_it(pool: str) -> None:
    state = save_after(Changing(), 2, streams=1)
    with loader_of(Changing(), pool, streams=1, prefetch=8) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        with pytest.raises(
            ValueError,
            match="cannot go on after a resume or a lost worker: part 0 of the dataset, a Changing, yields other",
        ):
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


@covering(1, pool=POOLS[:3], kind=KINDS, count=[0, 1, 3, 5])
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
