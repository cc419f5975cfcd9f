"""`PackSampler` with several limits: rows obey each, nearly full; `Pack` joins the media fields of their documents."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import PackSampler, ShardedDataLoader
from sharded_loader.batchify import Pack
from sharded_loader.samplers.packing import best_fit
from sharded_loader.torch import DataLoader

LIMITS = {"tokens": 64, "patches": 40}
RNG = np.random.default_rng(0)
TOKENS = np.clip(RNG.lognormal(2.0, 0.8, 400), 1, 64).astype(np.int64)
PATCHES = np.where(RNG.random(400) < 0.5, 0, np.clip(RNG.lognormal(2.0, 0.8, 400), 1, 40)).astype(np.int64)
LENGTHS = {"tokens": TOKENS, "patches": PATCHES}


def sampler(**options: Any) -> PackSampler:
    given: dict[str, Any] = {"lengths": LENGTHS, "limits": LIMITS, "rows": 3, "window": 60, "seed": 5}
    return PackSampler(**(given | options))


def document(index: int) -> dict[str, Any]:
    """A text with pictures, each of two patches, or of one; all values say whose they are."""
    patches = int(PATCHES[index])
    pictures = -(-patches // 2)
    return {
        "input_ids": np.full(TOKENS[index], index),
        "pixel_values": np.full((patches, 3), index, np.float32),
        "image_grid_thw": np.tile([1, 2, index], (pictures, 1)),
    }


class Documents:
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> Any:
        return document(index)


@pytest.mark.parametrize("window", [7, 60, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_document_comes_once_and_no_row_has_too_much_of_anything(window: int, shuffle: bool) -> None:
    batches = list(sampler(window=window, shuffle=shuffle).iter_epoch(1))
    assert Counter(index for batch in batches for index in batch) == Counter(range(400))
    rows = 0
    for batch in batches:
        row = batch.places[:, 0]  # type: ignore[attr-defined]
        for name, column in LENGTHS.items():
            assert np.bincount(row, column[list(batch)]).max() <= LIMITS[name]
        rows += row.max() + 1
    least = max(TOKENS.sum() / 64, PATCHES.sum() / 40)
    assert rows <= least * (1.15 if window > 7 else 1.6)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_rows_have_room_and_none_is_empty(columns: int, count: int) -> None:
    rng = np.random.default_rng(columns)
    limits = np.array([50, 9, 1000])[:columns]
    sizes = np.stack([rng.integers(0, limit + 1, 200) for limit in limits], axis=1)
    sizes[:, 0] = np.maximum(sizes[:, 0], 1)
    windows = np.sort(rng.integers(0, count, 200))
    rows, counts = best_fit(list(sizes.T), windows, count, limits.tolist())
    for window in range(count):
        here = windows == window
        assert sorted(set(rows[here])) == list(range(counts[window]))
        for column, limit in enumerate(limits):
            assert np.bincount(rows[here], sizes[here, column]).max() <= limit


def test_one_limit_in_a_dict_packs_as_tokens_does() -> None:
    old = PackSampler(TOKENS, 64, 3, window=60, seed=5)
    new = sampler(lengths={"tokens": TOKENS}, limits={"tokens": 64})
    for one, other in zip(old.iter_epoch(0), new.iter_epoch(0), strict=True):
        assert list(one) == list(other) and np.array_equal(one.places, other.places)  # type: ignore[attr-defined]
    cut = sampler(lengths={"tokens": TOKENS}, limits={"tokens": 20}, long="cut")
    whole = PackSampler(TOKENS, 20, 3, window=60, seed=5, long="cut")
    assert list(map(list, cut.iter_epoch(0))) == list(map(list, whole.iter_epoch(0)))


@pytest.mark.parametrize("pool", [None, "thread", "process"])
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_pack_joins_the_pictures_in_the_order_of_the_documents(kind: Any, pool: str | None) -> None:
    given = (
        {} if pool is None else {"num_workers": 1, "pool": pool} if kind is ShardedDataLoader else {"num_workers": 1}
    )
    pack = Pack(64, pad_id=-1, media=("pixel_values", "image_grid_thw"))
    loader = kind(Documents(), batch_sampler=sampler(), collate_fn=pack, **given)
    for batch in loader:
        grids = pixels = 0
        for row, ids in enumerate(batch["input_ids"]):
            order = torch.unique_consecutive(ids[ids >= 0]).tolist()
            wanted = [document(index) for index in order]
            here = batch["pixel_values"][pixels:][: batch["pixel_values_per_row"][row]]
            assert np.array_equal(here, np.concatenate([one["pixel_values"] for one in wanted]))
            there = batch["image_grid_thw"][grids:][: batch["image_grid_thw_per_row"][row]]
            assert np.array_equal(there, np.concatenate([one["image_grid_thw"] for one in wanted]))
            pixels, grids = pixels + len(here), grids + len(there)
        assert (pixels, grids) == (len(batch["pixel_values"]), len(batch["image_grid_thw"]))
        assert batch["pixel_values"].dtype == torch.float32
    getattr(loader, "close", bool)()


def test_texts_without_pictures_may_lack_the_field() -> None:
    pack, text, picture = Pack(8, media=["pixels"]), {"input_ids": [1, 2]}, torch.ones(3, 2, dtype=torch.float16)
    mixed = pack([text, text | {"pixels": picture}, text | {"pixels": None}, text | {"pixels": []}])
    assert torch.equal(mixed["pixels"], picture) and mixed["pixels_per_row"].tolist() == [3]
    alone = pack([text, text | {"pixels": None}])
    assert "pixels" not in alone and alone["pixels_per_row"].tolist() == [0]
    assert pack([text | {"pixels": picture[:0]}])["pixels"].shape == (0, 2)
    assert repr(pack) == "Pack(tokens=8, media=['pixels'])" and repr(Pack(8)) == "Pack(tokens=8)"


def test_shards_have_their_own_pictures() -> None:
    pack = Pack(64, media=["pixel_values"])
    loader = ShardedDataLoader(Documents(), batch_sampler=sampler(rows=4), batchify_fn=pack, num_shards=2)
    for shards in islice(loader, 5):
        for shard in shards:
            assert set(shard["pixel_values"][:, 0].int().tolist()) <= set(shard["input_ids"].flatten().tolist())
            assert shard["pixel_values_per_row"].sum() == len(shard["pixel_values"])


def test_ranks_resume_on_other_ranks() -> None:
    def read(ranks: int, state: Any = None, steps: int | None = None) -> tuple[list[Any], Any]:
        found: list[Any] = []
        for rank in range(ranks):
            loader = ShardedDataLoader(range(400), batch_sampler=sampler(), num_replicas=ranks, rank=rank)
            if state is not None:
                loader.load_state_dict(state)
            found.append([batch.tolist() for batch in islice(loader, steps)])
            after = json.loads(json.dumps(loader.state_dict()))
        return [batch for step in zip(*found, strict=True) for batch in step], after

    whole, _ = read(1)
    first, state = read(2, steps=4)
    rest, _ = read(3, state)
    assert (first + rest)[: len(whole)] == whole
    for changed in ({"limits": LIMITS | {"patches": 50}}, {"lengths": LENGTHS | {"patches": PATCHES[::-1]}}):
        other = ShardedDataLoader(range(400), batch_sampler=sampler(**changed))
        with pytest.raises(ValueError, match="limits of the PackSampler was|lengths of the PackSampler changed"):
            other.load_state_dict(state)
    one = ShardedDataLoader(range(400), batch_sampler=PackSampler(TOKENS, 64, 3, window=60, seed=5))
    assert "PackSampler.limits" not in one.state_dict()["sampler_arguments"]
    with pytest.raises(ValueError, match="lengths of the PackSampler changed"):
        one.load_state_dict(state)


def test_documents_above_a_limit_are_named_or_left_out() -> None:
    patches = PATCHES.copy()
    patches[[7, 9]] = 41, 4000
    given = {"lengths": LENGTHS | {"patches": patches}}
    with pytest.raises(ValueError, match="document 7 has 41 patches, and a row has 0 to 40"):
        sampler(**given)
    kept = [index for batch in sampler(**given, long="drop").iter_epoch(0) for index in batch]
    assert sorted(kept) == sorted(set(range(400)) - {7, 9})


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tokens": 8}, TypeError, "packs to tokens=, or to several limits="),
    ({"lengths": TOKENS}, TypeError, "both limits and lengths are dicts"),
    ({"limits": [64, 40]}, TypeError, "both limits and lengths are dicts"),
    ({"limits": None}, TypeError, "PackSampler packs to tokens=, or to several limits="),
    ({"limits": {"tokens": 64}}, ValueError, r"limits for \['tokens'\] and lengths for \['patches', 'tokens'\]"),
    ({"limits": {"patches": 40}, "lengths": {"patches": PATCHES}}, ValueError, "'tokens' among them"),
    ({"limits": {"tokens": 64, "patches": 0}}, ValueError, "patches must be at least 1"),
    ({"limits": LIMITS | {"patches": 2**31}}, ValueError, "below 2"),
    ({"limits": LIMITS | {"patches": 5}, "long": "cut"}, ValueError, "patches, and a row has 0 to 5"),
    ({"lengths": LENGTHS | {"patches": PATCHES[1:]}}, ValueError, "different numbers of documents"),
    ({"lengths": LENGTHS | {"patches": -PATCHES}}, ValueError, "patches, and a row has 0 to 40"),
    ({"lengths": LENGTHS | {"patches": PATCHES / 2}}, ValueError, "lengths of patches must be integers"),
    ({"lengths": LENGTHS | {"tokens": PATCHES}}, ValueError, "has 0 tokens, and a row has 1 to 64"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_limits_are_refused_in_words(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        sampler(**options)


def test_wrong_media_are_refused_in_words() -> None:
    text = {"input_ids": [1, 2]}
    with pytest.raises(TypeError, match="media is 'pixels': give names"):
        Pack(8, media="pixels")
    with pytest.raises(ValueError, match="pixels of the documents cannot be joined: .*: give each document an array"):
        Pack(8, media=["pixels"])([text | {"pixels": np.ones((3, 2))}, text | {"pixels": np.ones((3, 4))}])
    cut = PackSampler([5], 4, long="cut", seed=0)
    data = [{"input_ids": [1] * 5, "pixels": np.ones((3, 2))}]
    loader = ShardedDataLoader(data, batch_sampler=cut, batchify_fn=Pack(4, media=["pixels"]))
    with pytest.raises(ValueError, match="document 0 is cut, and it has pixels"):
        next(iter(loader))
