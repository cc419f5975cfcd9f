"""P9: whatever a sample raises arrives in its place, with its sample; bad samples are dealt with alike everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import POOLS, covering, make_pool
from hostile_samples import HOSTILE, Hostile, StopsWhenCounted, StopsWhenMoved, negative
from samples import Drawing, DrawingInBatches, DrawingInItems

from sharded_loader import InlinePool, SampleReadError, ShardedDataLoader
from sharded_loader.engine.pool import Pool


def test_errors_whose_own_code_raises_name_their_sample_and_keep_their_class(pool: Pool) -> None:
    with ShardedDataLoader(Hostile(), 1, pool=pool, num_shards=1) as loader:
        batches = iter(loader)
        # A KeyboardInterrupt in the caller's own thread is the user's.
        for number, (_, name, attributes) in enumerate(HOSTILE[: -1 if isinstance(pool, InlinePool) else None]):
            with pytest.raises(Exception) as caught:
                next(batches)
            error = caught.value
            assert type(error).__name__ in (name, "SampleReadError" if name == "ExceptionGroup" else name)
            assert {key: getattr(error, key) for key in attributes} == attributes
            where, again = error.__notes__  # type: ignore[attr-defined]
            assert f"epoch 0, batch {2 * number}, shard 0, sample {2 * number}" in where
            assert again.endswith(f"loader.read({2 * number}, epoch=0)")
            assert [shard.tolist() for shard in next(batches)] == [[2 * number + 1]]


def test_whatever_a_sample_raises_it_is_skipped_if_it_is_an_exception(pool: Pool) -> None:
    with ShardedDataLoader(Hostile(), 2, pool=pool, on_error="skip") as loader:
        batches = iter(loader)
        bad = []
        for number, (make, _, _) in enumerate(HOSTILE[:-1]):
            if isinstance(make(), Exception):
                assert next(batches).tolist() == [2 * number + 1]
                bad.append(2 * number)
            else:
                with pytest.raises(SampleReadError):
                    next(batches)
        assert [index for index, _ in loader.skipped] == bad
        assert all(error.__traceback__ is None for _, error in loader.skipped)


class StopsAtOnce:
    def __iter__(self) -> Iterator[int]:
        raise StopIteration

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("options", [{"batch_size": 2, "sampler": StopsAtOnce()}, {"batch_sampler": StopsAtOnce()}])
def test_a_sampler_that_stops_before_it_has_begun_is_no_empty_epoch(pool: Pool, options: dict[str, Any]) -> None:
    with ShardedDataLoader(range(4), pool=pool, **options) as loader:
        with pytest.raises(RuntimeError, match="StopIteration raised by the sampler"):
            list(loader)


def test_a_batch_of_indices_that_would_end_the_loop_is_an_error_in_its_place(pool: Pool) -> None:
    with ShardedDataLoader(range(4), batch_sampler=[[0, 1], StopsWhenCounted(), [2, 3]], pool=pool) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(SampleReadError, match="StopIteration"):
            next(batches)
        assert next(batches).tolist() == [2, 3]


def test_a_batch_that_would_end_the_loop_when_it_is_moved_is_an_error_in_its_place(pool: Pool) -> None:
    def batchify(samples: list[int]) -> Any:
        return StopsWhenMoved() if 0 in samples else samples

    with ShardedDataLoader(range(4), 2, batchify_fn=batchify, pool=pool, device=torch.device("meta")) as loader:
        batches = iter(loader)
        with pytest.raises(SampleReadError, match="StopIteration") as caught:
            next(batches)
        assert any("epoch 0, batch 0" in note for note in caught.value.__notes__)  # type: ignore[attr-defined]
        assert next(batches) == [2, 3]


def tolerated(dataset: Any, pool: Pool, on_error: Any, **options: Any) -> Any:
    """All that a user sees of an epoch."""
    seen: list[Any] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        ShardedDataLoader(dataset, 4, pool=pool, on_error=on_error, seed=1, **options) as loader,
    ):
        warnings.simplefilter("always")
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except ValueError as error:
                seen.append(str(error))
            else:
                seen.append([part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist())
        skipped = sorted(index for index, _ in loader.skipped)
    return seen, skipped, [str(one.message) for one in warned]


@covering(
    1,
    name=POOLS,
    on_error=["skip", "replace", negative],
    options=[{}, {"num_shards": 2}, {"num_replicas": 2, "rank": 0}],
)
@pytest.mark.costly
def test_bad_samples_are_dealt_with_alike_one_by_one_and_in_bulk(
    name: str, on_error: Any, options: dict[str, Any]
) -> None:
    for bad in ([5], [4, 5, 6, 7], [4, 5], list(range(12))):
        expected = tolerated(Drawing(12, bad), InlinePool(), on_error, **options)
        for kind in (Drawing, DrawingInItems, DrawingInBatches):
            assert tolerated(kind(12, bad), make_pool(name, 1), on_error, **options) == expected, (kind, bad)
        seen, skipped, warned = expected
        mine = [index for index in bad if "num_replicas" not in options or index % 2 == 0]
        raised = [int(text.removeprefix("bad ")) for text in seen if isinstance(text, str)]
        assert sorted(skipped + raised) == mine
        if on_error is negative:
            assert not warned
        elif bad == list(range(12)):
            assert seen == (["bad 6", "bad 10"] if "num_replicas" in options else []) and bool(warned) != bool(seen)
