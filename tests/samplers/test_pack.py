"""`Pack`: documents side by side, told apart by positions, segments, labels and `cu_seqlens`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
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
