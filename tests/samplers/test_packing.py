"""`PackSampler`: each document once, rows nearly full, any position at once; `Pack`: the batch of these rows."""

import json
import pickle
import tracemalloc
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import Documents

from sharded_loader import PackSampler, ShardedBatchSampler, ShardedDataLoader, SimpleDataset
from sharded_loader.batchify import Pack
from sharded_loader.samplers import packing
from sharded_loader.samplers.packing import Packed, best_fit
from sharded_loader.sampling.tables import StridedTable
from sharded_loader.torch import DataLoader

TOKENS = 32


def some_lengths(count: int, seed: int = 0, mean: float = 2.0, most: int = TOKENS) -> npt.NDArray[np.int32]:
    drawn = np.random.default_rng(seed).lognormal(mean, 0.8, count)
    return np.clip(drawn, 1, most).astype(np.int32)


LENGTHS = some_lengths(500)


def sampler(lengths: Any = LENGTHS, **options: Any) -> PackSampler:
    given: dict[str, Any] = {"tokens": TOKENS, "rows": 3, "window": 40, "seed": 5}
    return PackSampler(lengths, **(given | options))


def loader(lengths: Any = LENGTHS, pool: Any = None, **options: Any) -> ShardedDataLoader[Any]:
    own = {name: options.pop(name) for name in ("num_replicas", "rank", "steps_per_epoch") if name in options}
    batches = sampler(lengths, **options)
    return ShardedDataLoader(Documents(lengths), batch_sampler=batches, batchify_fn=Pack(TOKENS), pool=pool, **own)


def tokens_of(batch: Any) -> list[int]:
    return batch["input_ids"][batch["segment_ids"] > 0].tolist()  # type: ignore[no-any-return]


def ranks(count: int, steps: int | None = None, state: Any = None, **options: Any) -> tuple[list[Any], Any]:
    """The batches of all ranks in the global order, and the state behind them."""
    found, after = [], None
    for rank in range(count):
        with loader(num_replicas=count, rank=rank, **options) as mine:
            if state is not None:
                mine.load_state_dict(state)
            found.append([tokens_of(batch) for batch in islice(mine, steps)])
            after = mine.state_dict()
    assert len(set(map(len, found))) == 1
    return [batch for step in zip(*found, strict=True) for batch in step], json.loads(json.dumps(after))


@pytest.mark.costly(5)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 7, 40, 10_000])
def test_each_document_comes_once_in_each_epoch_and_no_row_is_too_full(window: int, shuffle: bool) -> None:
    batches = sampler(window=window, shuffle=shuffle)
    for _ in range(2):
        epoch = list(batches)
        assert Counter(index for batch in epoch for index in batch) == Counter(range(len(LENGTHS)))
        for batch in epoch:
            assert isinstance(batch, Packed)
            row, begin, end, length = batch.places.T
            assert np.array_equal(length, LENGTHS[list(batch)]) and not begin.any() and np.array_equal(end, length)
            filled = np.bincount(row, weights=end - begin, minlength=batch.rows)
            assert filled.min() > 0 and filled.max() <= TOKENS and (np.diff(row) >= 0).all()
        assert [batch.rows for batch in epoch[:-1]] == [3] * (len(epoch) - 1)


def test_a_last_batch_of_fewer_rows_is_kept_or_discarded() -> None:
    kept, discarded = list(sampler(rows=7)), list(sampler(rows=7, last_batch="discard"))
    assert kept[-1].rows < 7 and discarded == kept[:-1]  # type: ignore[attr-defined]
    assert sampler(rows=7, last_batch="discard").len_epoch(0) == len(discarded)


def simple_best_fit(sizes: list[int], tokens: int) -> list[list[int]]:
    """The algorithm as it is published: the longest first, each into the row where it leaves the least."""
    spare: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for document in sorted(range(len(sizes)), key=lambda document: -sizes[document]):
        place = bisect_left(spare, (sizes[document], -1))
        left, row = spare.pop(place) if place < len(spare) else (tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        insort(spare, (left - sizes[document], row))
    return rows


@given(st.lists(st.lists(st.integers(1, TOKENS), max_size=30), min_size=1, max_size=5))
def test_windows_side_by_side_are_packed_as_each_is_alone(windows: list[list[int]]) -> None:
    sizes = np.array([size for window in windows for size in window], np.int32)
    numbers = np.repeat(np.arange(len(windows)), [len(window) for window in windows])
    rows, counts = best_fit([sizes], numbers, len(windows), [TOKENS])
    for number, window in enumerate(windows):
        expected = simple_best_fit(window, TOKENS)
        assert counts[number] == len(expected)
        mine = rows[numbers == number].tolist()
        assert [[document for document, row in enumerate(mine) if row == n] for n in range(len(expected))] == [
            sorted(row) for row in expected
        ]


@pytest.mark.parametrize("size", [11, 17, 32])
def test_documents_that_leave_much_of_a_row_empty_get_rows_enough(size: int) -> None:
    _, counts = best_fit([np.full(600, size, np.int32)], np.repeat(np.arange(2), 300), 2, [TOKENS])
    assert counts.tolist() == [300 // (TOKENS // size)] * 2


@pytest.mark.parametrize(("mean", "window"), [(8, 1024), (600, 1024), (100, 8192), (20, 16384)])
def test_the_usual_window_fills_64_rows(mean: int, window: int) -> None:
    assert PackSampler(np.full(50_000, mean), tokens=8 * mean if mean < 20 else 8192, seed=0).window == window


def test_rows_of_8192_tokens_waste_at_most_2_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.9, 20_000).clip(1, 8192).astype(np.int64)
    rows = sum(batch.rows for batch in PackSampler(lengths, tokens=8192, rows=4, seed=0))  # type: ignore
    assert 1 - lengths.sum() / (rows * 8192) < 0.02


def test_rows_of_a_window_are_shuffled() -> None:
    """Best fit opens rows for the longest documents first."""
    longest = [max(LENGTHS[list(batch)]) for batch in sampler(window=500, rows=1)]
    assert longest != sorted(longest, reverse=True)
    unshuffled = [max(LENGTHS[list(batch)]) for batch in sampler(window=500, rows=1, shuffle=False)]
    assert unshuffled == sorted(longest, reverse=True)


def test_documents_longer_than_a_row_are_cut_into_rows_and_a_rest_or_left_out() -> None:
    lengths = np.array([70, 5, 64, 33, 1])
    found: dict[int, list[tuple[int, int]]] = {}
    for batch in sampler(lengths, long="cut", window=3):
        assert isinstance(batch, Packed)
        assert np.bincount(batch.places[:, 0], weights=batch.places[:, 2] - batch.places[:, 1]).max() <= TOKENS
        for index, (_, begin, end, length) in zip(batch, batch.places.tolist(), strict=True):
            assert length == lengths[index]
            found.setdefault(index, []).append((begin, end))
    pieces = [[(0, 32), (32, 64), (64, 70)], [(0, 5)], [(0, 32), (32, 64)], [(0, 32), (32, 33)], [(0, 1)]]
    assert {index: sorted(found[index]) for index in found} == dict(enumerate(pieces))
    dropped = sampler([70, 5, 32, 33, 1], long="drop", rows=1)
    assert sorted(index for batch in dropped for index in batch) == [1, 2, 4]


def test_an_epoch_is_a_function_of_seed_and_epoch_whatever_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {epoch: list(sampler().iter_epoch(epoch)) for epoch in (0, 3)}
    assert expected[0] != expected[3] != list(sampler(seed=6).iter_epoch(3))
    monkeypatch.setattr(packing, "GROUP", 80)  # two windows at once
    batches = sampler()
    assert batches.len_epoch(3) == len(expected[3])
    for epoch, start in ((3, 20), (0, 5), (3, 0), (0, 31), (3, 44)):
        assert list(batches.iter_epoch(epoch, start)) == expected[epoch][start:]


def test_a_row_checkpoint_far_ahead_hides_nothing_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "GROUP", 80)
    known = sampler()
    expected = list(known.iter_epoch(0))
    ahead = sampler()
    ahead.add_row_checkpoint(0, known.known(0)[5])
    table = ahead.epoch_table(0)
    for position in (45, 2, 30, 17, 44, 31, 0):
        assert table.at(np.array([position])) == [expected[position]]


def test_a_row_checkpoint_of_other_lengths_is_an_error_instead_of_a_hang() -> None:
    batches = sampler()
    batches.add_row_checkpoint(0, (10**6, 3))
    with pytest.raises(ValueError, match="has counted more rows behind window 0 of PackSampler than there are"):
        batches.epoch_table(0).at(np.array([10**5]))


def windows_packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The windows that are packed from now on, in a list that grows."""
    packed: list[int] = []
    pack = PackSampler.pack

    def noted(self: PackSampler, order: Any, last: int, window: int) -> Any:
        packed.extend(range(window, min(window + self.at_once, last)))
        return pack(self, order, last, window)

    monkeypatch.setattr(PackSampler, "pack", noted)
    monkeypatch.setattr(packing, "GROUP", 40)  # one window of 40 documents at once
    return packed


@pytest.mark.parametrize("after", [1, 2, 3])
def test_nothing_before_a_state_is_packed_again(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = windows_packed(monkeypatch)
    first, state = ranks(2, steps=13)
    assert len(json.dumps(state)) < 700 and len(state["landmark"]) == 2
    rows_before, window = state["landmark"]
    assert window > 5 and 0 <= len(first) * 3 - rows_before < 40
    packed.clear()
    rest, _ = ranks(after, steps=2, state=state)
    assert len(rest) == 2 * after and min(packed) == window
    assert rest == [tokens_of(batch) for batch in loader()][len(first) : len(first) + len(rest)]


def test_reading_and_saving_take_no_pass_over_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = windows_packed(monkeypatch)
    mine = loader()
    assert "length=500" in repr(mine.batch_sampler) and "unknown number of batches" in repr(mine)
    next(iter(mine))
    state = mine.state_dict()
    mine.load_state_dict(state)
    next(iter(mine))
    assert max(packed) < 3
    assert len(mine) == len(list(sampler().iter_epoch(0))) and max(packed) == 12


def test_steps_per_epoch_need_no_length_and_go_on_from_epoch_to_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = windows_packed(monkeypatch)
    with loader(steps_per_epoch=20) as mine:
        assert len(mine) == 20 and not packed
        epochs = [[tokens_of(batch) for batch in mine] for _ in range(6)]
        state = json.loads(json.dumps(mine.state_dict()))
        following = [tokens_of(batch) for batch in mine]
    found = Counter(token // 1000 for epoch in epochs for batch in epoch for token in set(batch) if token % 1000 == 0)
    assert set(found.values()) == {2, 3} and len(found) == 500  # 120 batches: almost three passes
    assert all(len(epoch) == 20 for epoch in epochs)
    packed.clear()
    with loader(steps_per_epoch=20) as resumed:
        resumed.load_state_dict(state)
        assert [tokens_of(batch) for batch in resumed] == following
    assert min(packed) == state["landmark"][1] > 13
    with loader(steps_per_epoch=20) as far:
        far.set_epoch(6)
        assert [tokens_of(batch) for batch in far] == following


def test_a_rank_of_thousands_packs_each_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = windows_packed(monkeypatch)
    lengths = some_lengths(10_000)
    batches = sampler(lengths, rows=1)
    table = StridedTable(batches.epoch_table(0), 200, 199)
    found = [table.slice(step, step + 1)[0] for step in range(5)]
    assert len(packed) == len(set(packed))
    assert found == [batch for n, batch in enumerate(sampler(lengths, rows=1)) if n % 200 == 199][:5]


def test_a_thousand_million_lengths_are_not_copied() -> None:
    lengths = np.broadcast_to(np.int32(600), 10**9)  # 4 bytes
    tracemalloc.start()
    batches = PackSampler(lengths, tokens=8192, rows=4, seed=0)
    assert batches.epoch_table(0).at(np.array([100]))[0].rows == 4
    assert "length=1000000000" in repr(batches)
    assert tracemalloc.get_traced_memory()[1] < 60e6
    tracemalloc.stop()


def as_lists(batches: Any) -> list[dict[str, Any]]:
    return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in batches]


CUT = np.where(LENGTHS > 20, 3 * LENGTHS, LENGTHS)
"""Lengths of which some are longer than a row."""


def test_every_pool_makes_the_same_batches(pool: Any) -> None:
    with loader(CUT, pool, long="cut") as mine:
        found = as_lists(mine)
    assert found == as_lists(loader(CUT, long="cut"))
    tokens = Counter(token for batch in found for row in batch["input_ids"] for token in row if token)
    assert tokens == Counter(1000 * i + j for i, length in enumerate(CUT) for j in range(length) if i + j)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_drop_in_reads_packed_rows_too(num_workers: int) -> None:
    batches = sampler(CUT, long="cut")
    found = DataLoader(Documents(CUT), batch_sampler=batches, collate_fn=Pack(TOKENS), num_workers=num_workers)
    assert as_lists(found) == as_lists(loader(CUT, long="cut"))


@pytest.mark.parametrize("how", ["num_shards", "sampler"])
def test_shards_are_whole_rows(how: str) -> None:
    batches: Any = ShardedBatchSampler(sampler(rows=5), 2) if how == "sampler" else sampler(rows=5)
    given = {} if how == "sampler" else {"num_shards": 2}
    found = list(ShardedDataLoader(Documents(LENGTHS), batch_sampler=batches, batchify_fn=Pack(TOKENS), **given))
    assert [len(shard["input_ids"]) for shard in found[0]] == [3, 2]
    for shards, whole in zip(found, loader(rows=5), strict=True):
        assert [row for shard in shards for row in shard["input_ids"].tolist()] == whole["input_ids"].tolist()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_document_that_cannot_be_read_leaves_its_place_empty(on_error: Any) -> None:
    def read(document: Any) -> Any:
        if document[0] // 1000 % 50 == 7:
            raise ValueError("unreadable")
        return document

    documents = SimpleDataset(Documents(LENGTHS)).transform(read)
    mine = ShardedDataLoader(documents, batch_sampler=sampler(), batchify_fn=Pack(TOKENS), on_error=on_error)
    for batch, expected in zip(mine, loader(), strict=True):
        assert batch["input_ids"].shape == expected["input_ids"].shape
        assert tokens_of(batch) == [token for token in tokens_of(expected) if token // 1000 % 50 != 7]


def test_more_lengths_than_are_looked_at_are_checked_where_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "IN_MEMORY", 100)
    lengths = LENGTHS.copy()
    lengths[250] = 0
    with pytest.raises(ValueError, match="document 250 has 0 tokens"):
        list(sampler(lengths))
    lengths[250] = 40
    with pytest.raises(ValueError, match="document 250 has 40 tokens"):
        list(sampler(lengths))
    assert list(sampler()) == list(sampler())


def test_no_documents_give_no_batches_and_an_endless_order_of_none_is_an_error() -> None:
    assert list(sampler([])) == [] and len(sampler([])) == 0
    with pytest.raises(ValueError, match="PackSampler leaves out all documents: each has more than 32 tokens"):
        list(loader([40, 50], long="drop", steps_per_epoch=3))
    with pytest.raises(ValueError, match="ended after 0 items"):
        list(loader([], steps_per_epoch=3))
    assert list(loader([40, 50], long="drop")) == []


def test_few_documents_are_not_packed_for_thousands_of_epochs(monkeypatch):
    epochs = []
    order = PackSampler.order
    monkeypatch.setattr(PackSampler, "order", lambda self, epoch: epochs.append(epoch) or order(self, epoch))
    sampler = PackSampler([3, 5, 2, 4], tokens=7, window=2, seed=0)
    with ShardedDataLoader(range(4), batch_sampler=sampler, steps_per_epoch=1, batchify_fn=list) as loader:
        next(iter(loader))
    assert len(epochs) < 10


# -- `Pack`: documents side by side, told apart by positions, segments, labels and `cu_seqlens` ------------------------


DOCUMENTS = [[11, 12, 13], [21, 22], [31, 32, 33, 34]]


def test_a_batch_is_what_the_guide_says() -> None:
    batch = Pack(tokens=6, pad_id=9)(DOCUMENTS)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[11, 12, 13, 21, 22, 9], [31, 32, 33, 34, 9, 9]],
        "position_ids": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]],
        "segment_ids": [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]],
        "labels": [[-100, 12, 13, -100, 22, -100], [-100, 32, 33, 34, -100, -100]],
        "cu_seqlens": [0, 3, 5, 9],
    }
    assert [tensor.dtype for tensor in batch.values()] == [torch.int64] * 4 + [torch.int32]
    assert repr(Pack(8)) == "Pack(tokens=8)" and repr(Pack(8, pad_id=3)) == "Pack(tokens=8, pad_id=3)"
    # Labels that are given are kept, but for the first of each document.
    labelled = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 7]}, {"input_ids": [4, 5], "labels": [8, 9]}]
    assert Pack(6)(labelled)["labels"].tolist() == [[-100, -100, 7, -100, 9, -100]]


def test_documents_of_every_kind_give_the_same_batch_in_the_memory_that_is_given() -> None:
    given_out: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        given_out.append(np.full(shape, 77, dtype))
        return given_out[-1]

    expected = Pack(6).assemble(DOCUMENTS, empty)
    assert [id(array) for array in expected.values()] == [id(array) for array in given_out]
    kinds: list[Callable[[list[int]], Any]] = [
        lambda ids: np.array(ids, np.uint16),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        tuple,
        lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)},
        lambda ids: {"input_ids": torch.tensor(ids)},
    ]
    for kind in kinds:
        found = Pack(6)([kind(ids) for ids in DOCUMENTS])
        assert all(np.array_equal(found[name].numpy(), expected[name]) for name in expected)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(12, 40))
def test_every_token_can_be_found_again(lengths: list[int], tokens: int) -> None:
    documents = [[100 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    batch = {name: tensor.numpy() for name, tensor in Pack(tokens, pad_id=-1)(documents).items()}
    is_real = batch["segment_ids"] > 0
    flat = batch["input_ids"][is_real]
    pieces = [
        flat[begin:end].tolist() for begin, end in zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False)
    ]
    assert pieces == documents
    assert np.array_equal(batch["position_ids"][is_real], flat % 100)
    assert (batch["input_ids"][~is_real] == -1).all() and not batch["position_ids"][~is_real].any()
    is_target = is_real & (batch["position_ids"] > 0)
    assert np.array_equal(batch["labels"], np.where(is_target, batch["input_ids"], -100))


def test_pieces_of_a_cut_document_count_as_documents() -> None:
    lengths = [20, 3]
    documents = [
        {"input_ids": list(range(100, 120)), "labels": list(range(20))},
        {"input_ids": [1, 2, 3], "labels": [4] * 3},
    ]
    batches = PackSampler(lengths, tokens=8, rows=3, long="cut", shuffle=False)
    (batch,) = ShardedDataLoader(documents, batch_sampler=batches, batchify_fn=Pack(8))
    assert batch["input_ids"].tolist() == [[*range(100, 108)], [*range(108, 116)], [116, 117, 118, 119, 1, 2, 3, 0]]
    assert batch["labels"][1].tolist() == [-100, *range(9, 16)]
    assert batch["position_ids"][2].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch["cu_seqlens"].tolist() == [0, 8, 16, 20, 23]


def test_packed_indices_are_a_list_that_survives_a_pipe_and_a_cut() -> None:
    batch = Packed([7, 3, 5], np.array([[0, 0, 4, 4], [0, 0, 2, 2], [2, 0, 6, 6]]), 3)
    twin = pickle.loads(pickle.dumps(batch))
    assert twin == batch == [7, 3, 5] and type(twin) is Packed
    assert twin.rows == 3 and np.array_equal(twin.places, batch.places)
    first, second = batch.cut([1, 2])
    assert (first, second, second.rows, second.places[:, 0].tolist()) == ([7, 3], [5], 2, [1])
