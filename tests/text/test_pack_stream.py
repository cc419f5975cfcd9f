"""Rows of tokens, packed as documents are read: each document once, the same rows everywhere, resumed anywhere."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from conftest import POOLS, make_pool
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import PackSampler, PackStream, ShardedDataLoader, sample_rng
from sharded_loader.batchify import Pack
from sharded_loader.streams.reader import Copies
from sharded_loader.torch import DataLoader

LENGTHS = np.random.default_rng(0).integers(1, 25, 100).tolist()
DOCUMENTS = [[number + 1] * length for number, length in enumerate(LENGTHS)]
TEXTS = [" ".join(map(str, document)) for document in DOCUMENTS]


def words(text: str) -> list[int]:
    return list(map(int, text.split()))


def stream(documents: Any = DOCUMENTS, tokens: int = 30, **given: Any) -> PackStream:
    return PackStream(documents, tokens, **{"window": 12, "seed": 3, **given})


def plain(row: Any) -> Any:
    return {name: values.tolist() for name, values in row.items()}


def documents_of(row: Any) -> list[tuple[int, ...]]:
    """The documents, or pieces of them, in a row or a batch."""
    rows = zip(np.atleast_2d(row["input_ids"]), np.atleast_2d(row["segment_ids"]), strict=True)
    return [tuple(ids[segments == n].tolist()) for ids, segments in rows for n in range(1, segments.max() + 1)]


def batches_of(loader: Any, count: int | None = None) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in islice(loader, count)]


class Lines:
    """Iterable data of several parts; its iterators tell where they are, if ``is_stateful``."""

    def __init__(self, is_stateful: bool) -> None:
        self.is_stateful = is_stateful

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        rows = StatefulRows(TEXTS[part::parts])
        return rows if self.is_stateful else iter(list(rows))


class StatefulRows:
    def __init__(self, texts: list[str]) -> None:
        self.texts, self.place = texts, 0

    def __iter__(self) -> "StatefulRows":
        return self

    def __next__(self) -> str:
        if self.place == len(self.texts):
            raise StopIteration
        self.place += 1
        return self.texts[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


SOURCES: dict[str, Callable[..., PackStream]] = {
    "by index": partial(stream, TEXTS, tokenize=words),
    "iterable": partial(stream, Lines(False), tokenize=words),
    "iterable with a state": partial(stream, Lines(True), tokenize=words),
}


# -- rows --------------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    tokens=st.integers(1, 30),
    window=st.integers(1, 50),
    most=st.none() | st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_every_document_comes_once_in_rows_that_are_not_too_long(
    lengths: list[int], tokens: int, window: int, most: int | None, epoch: int
) -> None:
    documents = [[number + 1] * length for number, length in enumerate(lengths)]
    rows = stream(documents, tokens, window=window, max_documents=most)
    rows.set_epoch(epoch)
    found = list(rows)
    pieces = [tuple(one[n : n + tokens]) for one in documents for n in range(0, len(one), tokens)]
    assert Counter(piece for row in found for piece in documents_of(row)) == Counter(pieces)
    assert all(row["input_ids"].shape == (tokens,) for row in found)
    assert all(1 <= row["segment_ids"].max() <= (most or tokens) for row in found)


def test_rows_are_those_of_pack_sampler_for_the_same_windows() -> None:
    sampler = PackSampler(LENGTHS, 30, window=12, shuffle=False)
    expected = list(ShardedDataLoader(DOCUMENTS, batch_sampler=sampler, batchify_fn=Pack(30)))
    found = list(ShardedDataLoader(stream(shuffle=False), 1, batchify_fn=Pack(30)))
    assert Counter(map(str, map(plain, found))) == Counter(map(str, map(plain, expected)))
    assert {name: (one.dtype, one.shape) for name, one in found[0].items()} == {
        name: (one.dtype, one.shape) for name, one in expected[0].items()
    }


@pytest.mark.parametrize("epoch", [0, 1])
def test_rows_are_the_same_for_any_number_of_parts(epoch: int) -> None:
    def rows(parts: int) -> Counter[str]:
        loader = ShardedDataLoader(stream(), 1, streams=parts)
        loader.set_epoch(epoch)
        return Counter(str(plain(batch)) for batch in loader)

    assert rows(1) == rows(2) == rows(7) == rows(20)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_the_same_in_every_pool_for_any_number_of_workers(source: str, pool: str) -> None:
    given = {} if source == "by index" else {"streams": 3}
    expected = batches_of(ShardedDataLoader(SOURCES[source](), 2, **given))
    with ShardedDataLoader(SOURCES[source](), 2, pool=make_pool(pool), **given) as loader:
        assert batches_of(loader) == expected


def test_waste_at_the_default_window_is_below_two_percent() -> None:
    lengths = np.random.default_rng(1).lognormal(np.log(600) - 0.5, 1, 3000).astype(int) + 1
    rows = [row["segment_ids"] > 0 for row in PackStream([np.ones(n, np.int32) for n in lengths])]
    assert sum(map(np.sum, rows)) == lengths.sum() > 0.98 * 8192 * len(rows)


def test_a_window_is_read_little_by_little() -> None:
    read = 0

    def count(document: Any) -> Any:
        nonlocal read
        read += 1
        return document

    rows, reads = iter(stream(tokenize=count, window=50)), [0]
    for _ in rows:
        reads.append(read)
    assert reads[1] < 55 and max(np.diff(reads[1:])) <= 4 and read == 100


def test_parts_that_begin_again_read_equally_many_windows() -> None:
    loader = ShardedDataLoader(stream(DOCUMENTS[:60]), 1, streams=4, steps_per_epoch=400)
    counts = Counter(number for batch in loader for piece in documents_of(batch) for number in piece[:1])
    assert len(counts) == 60 and max(counts.values()) - min(counts.values()) <= 4


# -- documents ---------------------------------------------------------------------------------------------------------

MASKED = [-100, 6, 7]


@pytest.mark.parametrize(
    "document",
    [
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]},
        {"input_ids": np.array([5, 6, 7], np.uint16), "assistant_masks": [0, 1, 1]},
        (5, 6, 7),
    ],
)
def test_a_tokenizer_returns_ids_and_perhaps_labels(document: Any) -> None:
    (row,) = stream(["text"], 4, tokenize=lambda text: document)
    assert plain(row) == {
        "input_ids": [5, 6, 7, 0],
        "position_ids": [0, 1, 2, 0],
        "segment_ids": [1, 1, 1, 0],
        "labels": [*MASKED, -100],
    }


def test_labels_are_masked_as_the_template_of_the_tokenizer_says() -> None:
    documents = [{"input_ids": [1, 2, 3, 4], "assistant_masks": [0, 0, 1, 0]}, {"input_ids": [5, 6]}]
    (row,) = stream(documents, 7, shuffle=False, pad_id=9)
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert row["labels"].tolist() == [-100, -100, 3, -100, -100, 6, -100]


def test_long_documents_are_cut_left_out_or_an_error() -> None:
    documents = [[1] * 7, [2] * 2, [3] * 3]
    kept, cut = {(2, 2): 1, (3, 3, 3): 1}, {(1, 1, 1): 2, (1,): 1}
    for long, expected in ("cut", kept | cut), ("drop", kept):
        assert Counter(piece for row in stream(documents, 3, long=long) for piece in documents_of(row)) == expected
    with pytest.raises(ValueError, match="7 tokens, and a row has 3") as caught:
        list(stream(documents, 3, long="error"))
    assert "document 0 of PackStream in epoch 0" in caught.value.__notes__[0]


def test_a_part_whose_documents_are_all_left_out_is_an_error() -> None:
    loader = ShardedDataLoader(stream([[1] * 7] * 4, 3, long="drop"), 2)
    with pytest.raises(ValueError, match="all documents of a part have more than 3 tokens"):
        list(loader)
    assert list(ShardedDataLoader(stream([], 3, long="drop"), 2, streams=1)) == []


def add_noise(text: str) -> list[int]:
    return [int(sample_rng().integers(1000)), *words(text)]


@pytest.mark.parametrize("steps", [None, 45])
def test_random_numbers_belong_to_the_document_and_not_to_its_row(steps: int | None) -> None:
    def loader() -> ShardedDataLoader[Any]:
        return ShardedDataLoader(stream(TEXTS, tokenize=add_noise), 2, seed=1, streams=2, steps_per_epoch=steps)

    expected, interrupted, resumed = batches_of(loader()), loader(), loader()
    interrupted.set_epoch(0)
    batches_of(interrupted, place := len(expected) // 2 + 1)
    resumed.load_state_dict(interrupted.state_dict())
    assert batches_of(resumed) == expected[place:]


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("source", SOURCES)
def test_an_iterator_continues_after_any_row_from_a_small_state(source: str) -> None:
    expected = list(map(plain, SOURCES[source]()))
    rows = iter(SOURCES[source]())
    for place in range(len(expected)):
        state = json.loads(json.dumps(rows.state_dict()))
        resumed = iter(SOURCES[source]())
        resumed.load_state_dict(state)
        assert list(map(plain, resumed)) == expected[place:]
        assert len(json.dumps(state)) < 300
        next(rows)
    assert set(iter(SOURCES["by index"]()).state_dict()) == {"version", "packing", "epoch", "window", "row"}


@pytest.mark.costly
@pytest.mark.parametrize("source", SOURCES)
def test_one_three_and_eight_ranks_continue_from_each_others_states(source: str) -> None:
    def loader(ranks: int, rank: int) -> ShardedDataLoader[Any]:
        given = {"streams": 24, "steps_per_epoch": 100, "num_replicas": ranks, "rank": rank}
        return ShardedDataLoader(SOURCES[source](window=3), 1, **given)

    expected, found, states = batches_of(loader(1, 0)), list[Any](), list[Any]()
    for ranks, steps in ((1, 5), (3, 7), (8, 5), (1, 6)):
        loaders = [loader(ranks, rank) for rank in range(ranks)]
        for one in loaders if states else ():
            one.load_state_dict(json.loads(json.dumps(states)))
        found += [batch for one in loaders for batch in batches_of(one, steps)]
        states = [one.state_dict() for one in loaders]
        assert Counter(map(str, found)) == Counter(map(str, expected[: len(found)]))


@pytest.mark.parametrize("count", [1, 3])
def test_a_killed_worker_changes_nothing(count: int, tmp_path: Path) -> None:
    def once(text: str) -> list[int]:
        mark = tmp_path / "killed"
        if text.startswith("50 ") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return words(text)

    documents = ["50 " * 3 if n == 50 else text for n, text in enumerate(TEXTS)]
    expected = batches_of(ShardedDataLoader(stream(documents, tokenize=words), 2))
    with ShardedDataLoader(stream(documents, tokenize=once), 2, pool=make_pool("fork", count)) as loader:
        assert batches_of(loader) == expected


def test_a_state_knows_its_epoch() -> None:
    rows = stream()
    rows.set_epoch(3)
    expected = list(map(plain, rows))
    (saved := iter(rows)).__next__()
    resumed = iter(stream())
    resumed.load_state_dict(saved.state_dict())
    assert list(map(plain, resumed)) == expected[1:]


def test_a_state_of_other_arguments_or_documents_is_refused() -> None:
    rows = iter(stream())
    for _ in range(3):
        next(rows)
    state = rows.state_dict()
    for other in (stream(tokens=31), stream(DOCUMENTS[:-1]), stream(seed=4), stream(long="drop"), stream(window=13)):
        with pytest.raises(ValueError, match="PackStream: the state is that of another one: it was PackStream"):
            iter(other).load_state_dict(state)
    with pytest.raises(ValueError, match="has fewer samples than when the state was saved"):
        iter(stream(tokenize=lambda document: document[:1])).load_state_dict(state)
    with pytest.raises(ValueError, match="the state has no 'window'"):
        iter(stream()).load_state_dict({"packing": "", "epoch": 0})
    with pytest.raises(TypeError, match="it must be a dict"):
        iter(stream()).load_state_dict([1, 2])  # type: ignore[arg-type]


# -- other loaders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_drop_in_and_torchs_loader_read_every_document_once(workers: int) -> None:
    for kind in (DataLoader, torch_data.DataLoader):
        loader: Any = kind(stream(TEXTS, tokenize=words), batch_size=2, num_workers=workers)
        found = Counter(
            piece for batch in loader for piece in documents_of({n: np.asarray(v) for n, v in batch.items()})
        )
        assert found == Counter(map(tuple, DOCUMENTS))


def test_the_drop_in_resumes() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(stream(), batch_size=2, streams=3)

    expected, interrupted, resumed = batches_of(loader()), loader(), loader()
    batches_of(interrupted, 5)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert batches_of(resumed) == expected[5:]


def test_parts_of_a_process_share_documents_and_tokenizer() -> None:
    rows = stream(TEXTS, tokenize=TEXTS.index)
    copy = Copies(rows).make()
    assert copy is not rows and copy.dataset is TEXTS


# -- bad input ---------------------------------------------------------------------------------------------------------


def fragile(text: str) -> list[int]:
    if text.startswith(("7 ", "50 ")):
        raise OSError("the text is damaged")
    return words(text)


@pytest.mark.parametrize("source", SOURCES)
def test_a_document_that_fails_is_named_and_the_others_are_packed(source: str) -> None:
    lost = [number for number in (6, 49) if TEXTS[number].startswith(f"{number + 1} ")]
    assert lost
    loader = ShardedDataLoader(SOURCES[source](tokenize=fragile), 2, streams=3, on_error="skip")
    found = Counter(piece for batch in loader for piece in documents_of(plain_arrays(batch)))
    assert found == Counter(tuple(one) for number, one in enumerate(DOCUMENTS) if number not in lost)
    texts = [str(error.__notes__) for _, error in loader.skipped]
    names = (
        {f"document {n} of" for n in lost}
        if source == "by index"
        else {f"document ({n % 3}, {n // 3}) of" for n in lost}
    )
    assert all(any(name in text for text in texts) for name in names) and len(texts) == len(lost)
    with pytest.raises(OSError, match="damaged"):
        batches_of(ShardedDataLoader(SOURCES[source](tokenize=fragile), 2, streams=3))


def plain_arrays(batch: Any) -> Any:
    return {name: np.asarray(value) for name, value in batch.items()}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (None, "a document became None, with {}: give token ids"),
        ([], r"a document became \[\], with {'input_ids': \(\(0,\)"),
        ({"ids": [1]}, "with {}: give token ids"),
        ("text", "a document became 'text', with .*no text"),
        ([[1, 2]], r"{'input_ids': \(\(1, 2\), 'int64'\)}: give token ids"),
        ([0.5], "'float64'"),
        ({"input_ids": [1, 2], "labels": [1]}, r"'input_ids': \(\(2,\), 'int64'\), 'labels': \(\(1,\)"),
        ({"input_ids": [1, 2], "assistant_masks": [1]}, "perhaps as many"),
    ],
)
def test_a_tokenizer_that_returns_something_else_is_an_error_that_names_the_document(document: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        next(iter(ShardedDataLoader(stream(["text"], tokenize=lambda text: document), 1)))
    assert "raised for document 0 of PackStream in epoch 0" in caught.value.__notes__


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"tokens": 0}, ValueError, "tokens must be at least 1"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"max_documents": 0}, ValueError, "max_documents must be at least 1"),
        ({"long": "keep"}, ValueError, "long"),
        ({"tokenize": "gpt2"}, TypeError, "tokenize is 'gpt2'; it must be a function"),
        ({"documents": "text"}, TypeError, "not a dataset"),
        ({"documents": iter([1])}, TypeError, "read only once"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        stream(**given)


def test_a_window_larger_than_the_data_is_one_window_and_no_documents_give_no_rows() -> None:
    assert sum(1 for _ in stream(window=10**9)) == -(-sum(LENGTHS) // 30) and list(stream([])) == []
    with pytest.raises(ValueError, match="has 1 shards, but there are 2 ranks"):
        ShardedDataLoader(stream(window=100), 2, num_replicas=2, rank=0).state_dict()
    with pytest.raises(ValueError, match="part 1 of 2 has no samples, so it cannot start over"):
        batches_of(ShardedDataLoader(stream(window=100), 2, streams=2, steps_per_epoch=9))
