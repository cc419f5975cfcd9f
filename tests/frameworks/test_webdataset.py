"""WebDataset: tar files are read by several workers, each sample once, and resumed exactly."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def webdataset() -> Any:
    return pytest.importorskip("webdataset")


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Four tar files of six samples each."""
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for index in range(6 * shard, 6 * shard + 6):
                content = str(index).encode()
                member = tarfile.TarInfo(f"{index:04}.cls")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return [str(tmp_path / f"{shard}.tar") for shard in range(4)]


def stream(webdataset: Any, shards: list[str]) -> Any:
    return webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode().to_tuple("cls")


def found(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@BOTH
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_sample_comes_once(webdataset: Any, shards: list[str], make: Any, num_workers: int) -> None:
    batches = found(make(stream(webdataset, shards), batch_size=4, num_workers=num_workers))
    assert sorted(sum(batches, [])) == list(range(24))


def test_the_drop_in_reads_as_torchs_loader_does(webdataset: Any, shards: list[str]) -> None:
    from sharded_loader.torch import DataLoader

    theirs = torch.utils.data.DataLoader(stream(webdataset, shards), batch_size=4, num_workers=2)
    assert found(DataLoader(stream(webdataset, shards), batch_size=4, num_workers=2)) == found(theirs)


def test_the_order_depends_on_the_streams_and_not_on_the_workers(webdataset: Any, shards: list[str]) -> None:
    from sharded_loader import ShardedDataLoader

    orders = [found(ShardedDataLoader(stream(webdataset, shards), 4, streams=2, num_workers=n)) for n in (0, 1, 2)]
    assert orders[0] == orders[1] == orders[2]


@BOTH
def test_reading_is_resumed_exactly(webdataset: Any, shards: list[str], make: Any) -> None:
    loaders = [make(stream(webdataset, shards), batch_size=4, num_workers=2) for _ in range(2)]
    batches = iter(loaders[0])
    next(batches), next(batches), next(batches)
    state, rest = loaders[0].state_dict(), found(batches)
    loaders[1].load_state_dict(state)
    assert rest
    assert found(loaders[1]) == rest


def test_a_pipeline_goes_on_behind_the_drop_in(webdataset: Any, shards: list[str]) -> None:
    from sharded_loader.torch import DataLoader

    batched = stream(webdataset, shards).batched(4)
    loader = DataLoader(batched, batch_size=None, num_workers=2)
    pipeline = webdataset.DataPipeline(loader, webdataset.unbatched(), webdataset.batched(8))
    assert sorted(int(number) for batch in pipeline for number in batch[0]) == list(range(24))
