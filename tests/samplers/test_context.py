"""``Pack(context=...)``: each rank of a group has its chunks of each document, and all together have the whole row."""

import json
import pickle
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from sharded_loader import PackSampler, ShardedDataLoader
from sharded_loader.batchify import Pack
from sharded_loader.torch import DataLoader

NAMES = ("input_ids", "position_ids", "segment_ids", "labels")


def documents_of(lengths: list[int]) -> list[dict[str, Any]]:
    """All tokens differ; labels too, and some are left out of the loss."""
    ends = np.cumsum(lengths)
    ids = [np.arange(end - length, end) + 1 for end, length in zip(ends, lengths, strict=True)]
    return [{"input_ids": one, "labels": np.where(one % 5 == 0, -100, one + 1000)} for one in ids]


def chunks_of(bounds: list[int], rank: int, size: int) -> list[int]:
    """Positions in whole rows that a rank has: of each document, chunks ``rank`` and ``2 * size - 1 - rank``."""
    found: list[int] = []
    for begin, end in pairwise(bounds):
        chunk = (end - begin) // (2 * size)
        assert chunk * 2 * size == end - begin
        for number in (rank, 2 * size - 1 - rank):
            found += range(begin + number * chunk, begin + (number + 1) * chunk)
    return found


def together(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole rows from the parts of all ranks."""
    size, rows = len(parts), len(parts[0]["input_ids"])
    whole = {name: torch.full((parts[0][name].numel() * size,), -7) for name in NAMES}
    for rank, part in enumerate(parts):
        assert part["cu_seqlens_padded"].equal(parts[0]["cu_seqlens_padded"])
        assert part["cu_seqlens"].equal(parts[0]["cu_seqlens"])
        places = chunks_of(part["cu_seqlens_padded"].tolist(), rank, size)
        for name in NAMES:
            whole[name][places] = part[name].flatten()
    return {name: value.reshape(rows, -1) for name, value in whole.items()}


@pytest.mark.costly(60)
@given(lengths=st.lists(st.integers(1, 48), min_size=1, max_size=12), size=st.integers(2, 4), rows=st.integers(1, 3))
def test_the_parts_of_all_ranks_are_the_whole_rows(lengths: list[int], size: int, rows: int) -> None:
    documents = documents_of(lengths)
    sampler = PackSampler(lengths, 48, rows, multiple=2 * size, seed=1)
    for batch in sampler.iter_epoch(0):
        loaders = [
            ShardedDataLoader(documents, batch_sampler=[batch], batchify_fn=Pack(48, -1, context=(rank, size)))
            for rank in range(size)
        ]
        parts = [next(iter(loader)) for loader in loaders]
        number = len(parts[0]["input_ids"])
        assert {part["input_ids"].shape for part in parts} == {(number, 48 // size)}
        whole, bounds = together(parts), parts[0]["cu_seqlens_padded"].tolist()
        assert parts[0]["cu_seqlens"].diff().tolist() == [lengths[document] for document in batch]
        flat = {name: value.flatten().tolist() for name, value in whole.items()}
        assert bounds[-1] == number * 48 and set(range(0, bounds[-1], 48)) <= set(bounds)
        row_begins = 0
        for begin, end, document in zip(bounds, bounds[1:], batch, strict=False):
            one = documents[document]
            row_begins = 0 if begin % 48 == 0 else row_begins + 1
            filler = end - begin - len(one["input_ids"])
            assert flat["input_ids"][begin:end] == [*one["input_ids"], *[-1] * filler]
            assert flat["position_ids"][begin:end] == [*range(len(one["input_ids"])), *[0] * filler]
            assert flat["segment_ids"][begin:end] == [*[row_begins + 1] * len(one["input_ids"]), *[0] * filler]
            assert flat["labels"][begin:end] == [*one["labels"][1:], *[-100] * (filler + 1)]


def test_the_loss_of_the_parts_is_that_of_the_whole_row() -> None:
    torch.manual_seed(0)
    documents = [{"input_ids": one["input_ids"] % 50} for one in documents_of([13, 5, 22, 9, 1, 30])]
    logits = torch.nn.Embedding(50, 50, dtype=torch.float64)  # stands for a model: each position by its token
    whole = Pack(48)(documents)
    there = cross_entropy(logits(whole["input_ids"])[:, :-1].mT, whole["labels"][:, 1:], reduction="sum")
    for size in (1, 2, 3, 4):
        parts = [Pack(48, context=(rank, size))(documents) for rank in range(size)]
        sums = [cross_entropy(logits(part["input_ids"]).mT, part["labels"], reduction="sum") for part in parts]
        assert torch.allclose(torch.stack(sums).sum(), there)


def test_one_rank_has_the_whole_row_with_shifted_labels() -> None:
    documents = documents_of([7, 5, 11, 3])
    whole, part = Pack(16, -1)(documents), Pack(16, -1, context=(0, 1))(documents)
    for name in ("input_ids", "position_ids", "segment_ids", "cu_seqlens"):
        assert part[name].equal(whole[name])
    assert part["labels"][:, :-1].equal(whole["labels"][:, 1:]) and (part["labels"][:, -1] == -100).all()
    assert list(PackSampler([7, 5, 11], 16, multiple=1, seed=0)) == list(PackSampler([7, 5, 11], 16, seed=0))


@pytest.mark.costly
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_groups_of_ranks_read_the_same_rows_through_workers_and_resume(kind: Any, workers: int) -> None:
    """Two replicas of two ranks each."""
    lengths = np.random.default_rng(0).integers(1, 30, 60).tolist()
    documents = documents_of(lengths)

    def made(replica: int, rank: int) -> Any:
        sampler = PackSampler(lengths, 32, 2, multiple=4, seed=3)
        given = {"batch_sampler": sampler, "collate_fn": Pack(32, -1, context=(rank, 2)), "num_workers": workers}
        return kind(documents, num_replicas=2, rank=replica, **given)

    seen: list[int] = []
    for replica in range(2):
        loaders = [made(replica, rank) for rank in range(2)]
        steps = [list(loader) for loader in loaders]
        for parts in zip(*steps, strict=True):
            ids = together(list(parts))["input_ids"]
            seen += ids[ids > 0].tolist()
        half, again = made(replica, 0), made(replica, 1)
        first = list(islice(half, 2))
        again.load_state_dict(json.loads(json.dumps(half.state_dict())))
        assert [one["input_ids"].tolist() for one in first] == [one["input_ids"].tolist() for one in steps[0][:2]]
        assert [one["input_ids"].tolist() for one in again] == [one["input_ids"].tolist() for one in steps[1][2:]]
        for loader in (*loaders, half, again):
            getattr(loader, "close", bool)()
    assert set(seen) == set(range(1, sum(lengths) + 1))


def test_documents_that_cannot_be_read_leave_filler() -> None:
    class Torn(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index in (0, 2):
                raise OSError("torn")
            return super().__getitem__(index)

    documents = Torn(documents_of([16, 9, 5, 16]))
    sampler = PackSampler([16, 9, 5, 16], 16, 4, multiple=4, seed=0)
    given: dict[str, Any] = {"batch_sampler": sampler, "on_error": "skip"}
    packs = [Pack(16, context=(rank, 2)) for rank in range(2)]
    parts = [next(iter(ShardedDataLoader(documents, batchify_fn=pack, **given))) for pack in packs]
    whole = together(parts)
    rows = sorted(row[row > 0].tolist() for row in whole["input_ids"])
    assert rows == [[], [], [*range(17, 26)], [*range(31, 47)]]


def test_long_documents_are_cut_to_rows_of_chunks() -> None:
    sampler = PackSampler([50, 7], 16, 2, long="cut", multiple=4, seed=0)
    documents = documents_of([50, 7])
    seen: list[int] = []
    packs = [Pack(16, context=(rank, 2)) for rank in range(2)]
    loaders = [ShardedDataLoader(documents, batch_sampler=sampler, batchify_fn=pack) for pack in packs]
    for steps in zip(*loaders, strict=True):
        ids = together(list(steps))["input_ids"]
        seen += ids[ids > 0].tolist()
    assert sorted(seen) == list(range(1, 58))


def mesh_of(place: tuple[int, ...] | None, shape: tuple[int, ...], *names: str) -> Any:
    """What a `DeviceMesh` tells a process at this place."""
    return SimpleNamespace(
        ndim=len(shape), mesh_dim_names=names or None, get_coordinate=lambda: place, size=lambda dim: shape[dim]
    )


def test_a_mesh_says_rank_and_size_and_is_not_sent_to_workers() -> None:
    for mesh in mesh_of((1, 2, 0), (2, 4, 2), "dp", "cp", "tp"), mesh_of((2,), (4,), "cp"):
        pack = Pack(16, context=mesh)
        assert repr(pickle.loads(pickle.dumps(pack))) == repr(pack) == "Pack(tokens=16, context=[2, 4])"


WRONG: list[tuple[Any, type[Exception], str]] = [
    ((0, 3), ValueError, "a row has 16 tokens, and 3 ranks cut it into 6 chunks: give a multiple of 6"),
    ((2, 2), ValueError, "context is rank 2 of 2"),
    ((-1, 2), ValueError, "the rank of context"),
    ((0, 0), ValueError, "the size of context"),
    ((0, 2.5), TypeError, "the size of context"),
    (2, TypeError, r"context is 2: give \(rank, size\)"),
    ("cp", TypeError, "context is 'cp'"),
    ((0, 1, 2), TypeError, "context is"),
    (
        mesh_of((0, 0), (2, 2), "dp", "tp"),
        ValueError,
        "with the dimensions .*'dp', 'tp'.*a mesh with the dimension 'cp'",
    ),
    (mesh_of((0,), (2,)), ValueError, "no place in the mesh"),
    (mesh_of(None, (2,), "cp"), ValueError, "this process has no place in the mesh"),
]


@pytest.mark.parametrize(("context", "error", "message"), WRONG)
def test_a_wrong_context_is_refused_in_words(context: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Pack(16, context=context)


def test_a_plan_that_does_not_fit_the_chunks_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="multiple is 6, and a row of 16 tokens is no multiple"):
        PackSampler([3], 16, multiple=6)
    with pytest.raises(ValueError, match="multiple"):
        PackSampler([3], 16, multiple=0)
    with pytest.raises(ValueError, match="media cannot be cut"):
        Pack(16, media=["pixels"], context=(0, 2))
    lengths = [5, 5, 6]  # 16 tokens, but 24 in chunks
    loader = ShardedDataLoader(
        documents_of(lengths), batch_sampler=PackSampler(lengths, 16, seed=0), batchify_fn=Pack(16, context=(0, 2))
    )
    with pytest.raises(ValueError, match="planned a row of 24 tokens.*multiple=4"):
        next(iter(loader))
    state = ShardedDataLoader(documents_of(lengths), batch_sampler=PackSampler(lengths, 16, seed=0)).state_dict()
    assert "PackSampler.multiple" not in state["sampler_arguments"]


def test_a_state_of_other_chunks_is_refused() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 60).tolist()

    def made(multiple: int) -> ShardedDataLoader[Any]:
        return ShardedDataLoader(range(60), batch_sampler=PackSampler(lengths, 32, 2, multiple=multiple, seed=3))

    loader = made(4)
    next(iter(loader))
    with pytest.raises(ValueError, match="multiple of the PackSampler was 4, and is 8"):
        made(8).load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="lengths of the PackSampler changed"):
        made(1).load_state_dict(loader.state_dict())
