"""`Pack`: documents side by side, told apart by positions, segments, labels and `cu_seqlens`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import PackSampler, ShardedDataLoader
from sharded_loader.batchify import Pack
from sharded_loader.samplers.packing import Packed

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


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "arrays": lambda ids: np.array(ids, np.uint16),
    "tensors": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "tuples": tuple,
    "mappings": lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)},
    "mappings of tensors": lambda ids: {"input_ids": torch.tensor(ids)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_every_kind_give_the_same_batch(kind: str) -> None:
    found, expected = Pack(6)([KINDS[kind](ids) for ids in DOCUMENTS]), Pack(6)(DOCUMENTS)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_labels_that_are_given_are_kept_but_for_the_first_of_each_document() -> None:
    documents = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 7]}, {"input_ids": [4, 5], "labels": [8, 9]}]
    assert Pack(6)(documents)["labels"].tolist() == [[-100, -100, 7, -100, 9, -100]]


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


def test_the_batch_is_written_into_the_memory_that_is_given() -> None:
    given_out: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        given_out.append(np.full(shape, 77, dtype))
        return given_out[-1]

    batch = Pack(6).assemble(DOCUMENTS, empty)
    assert [id(array) for array in batch.values()] == [id(array) for array in given_out]


def test_packed_indices_are_a_list_that_survives_a_pipe_and_a_cut() -> None:
    batch = Packed([7, 3, 5], np.array([[0, 0, 4, 4], [0, 0, 2, 2], [2, 0, 6, 6]]), 3)
    twin = pickle.loads(pickle.dumps(batch))
    assert twin == batch == [7, 3, 5] and type(twin) is Packed
    assert twin.rows == 3 and np.array_equal(twin.places, batch.places)
    first, second = batch.cut([1, 2])
    assert (first, second, second.rows, second.places[:, 0].tolist()) == ([7, 3], [5], 2, [1])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Pack(0), "tokens must be at least 1"),
        (lambda: Pack(2.5), "tokens must be an integer"),  # type: ignore[arg-type]
        (lambda: Pack(8, pad_id=None), "pad_id must be an integer"),  # type: ignore[arg-type]
        (lambda: Pack(3)(DOCUMENTS), 'sample 2 of the batch has 4 tokens, and a row has 3: cut it, or .*long="cut"'),
        (lambda: Pack(8)([]), "a batch of no samples"),
        (lambda: Pack(8)([[1], []]), r"sample 1 of the batch is a list of shape \(0,\) .* at least one integer"),
        (lambda: Pack(8)([[1], [2.5]]), "sample 1 of the batch is a list of shape .* float64"),
        (lambda: Pack(8)([np.ones((2, 2), int)]), r"sample 0 of the batch is a ndarray of shape \(2, 2\)"),
        (lambda: Pack(8)([5]), "sample 0 of the batch is"),
        (lambda: Pack(8)(["text"]), "sample 0 of the batch is a str: give each document as .* Tokenise texts first"),
        (lambda: Pack(8)([{"text": "a"}]), r"sample 0 of the batch has no 'input_ids' \(it has keys \['text'\]\)"),
        (lambda: Pack(8)([{"input_ids": [1], "labels": [1]}, [2]]), "sample 1 .* has no labels, and sample 0 has some"),
        (lambda: Pack(8)([{"input_ids": [1, 2], "labels": [1]}]), r"documents of \[2\] input_ids have \[1\] labels"),
    ],
)
def test_bad_documents_are_errors_that_say_what_to_do(make: Callable[[], Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()


def test_lengths_of_other_documents_are_an_error_that_names_the_document() -> None:
    batches = PackSampler([9, 2, 3], tokens=4, long="cut", shuffle=False, rows=9)
    documents = [list(range(9)), [1, 2], [1, 2]]
    with pytest.raises(ValueError, match="document 2 has 2 tokens, and PackSampler has the length 3 for it") as caught:
        list(ShardedDataLoader(documents, batch_sampler=batches, batchify_fn=Pack(4)))
    assert "sample 2" in "".join(caught.value.__notes__)


def test_rows_of_another_size_than_planned_are_an_error() -> None:
    batches = PackSampler([6, 2], tokens=8, shuffle=False)
    with pytest.raises(ValueError, match="has planned a row of 8 tokens, and Pack makes rows of 4"):
        list(ShardedDataLoader([[1] * 6, [2] * 2], batch_sampler=batches, batchify_fn=Pack(4)))


def test_a_repr_is_the_call() -> None:
    assert repr(Pack(8)) == "Pack(tokens=8)" and repr(Pack(8, pad_id=3)) == "Pack(tokens=8, pad_id=3)"
