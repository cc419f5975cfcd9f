"""litdata: a dataset on the disk is read by workers, each sample once. It leaves its files open in their processes."""

from __future__ import annotations

from typing import Any

import pytest
from indices import BOTH, IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def litdata() -> Any:
    return pytest.importorskip("litdata")


@pytest.fixture(scope="module")
def folder(litdata: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """24 samples in chunks of 3."""
    from litdata.streaming.writer import BinaryWriter

    where = tmp_path_factory.mktemp("litdata")
    writer = BinaryWriter(str(where), chunk_size=3)
    for index in range(24):
        writer[index] = {"x": index}
    writer.done()
    writer.merge()
    return str(where)


def found(loader: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


@BOTH
@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_sample_comes_once(litdata: Any, folder: str, make: Any, num_workers: int) -> None:
    batches = found(make(litdata.StreamingDataset(folder), batch_size=4, num_workers=num_workers))
    assert sorted(sum(batches, [])) == list(range(24))


def test_the_drop_in_reads_as_torchs_loader_does(litdata: Any, folder: str) -> None:
    import torch

    from sharded_loader.torch import DataLoader

    both = [
        cls(litdata.StreamingDataset(folder), 4, num_workers=2) for cls in (DataLoader, torch.utils.data.DataLoader)
    ]
    assert found(both[0]) == found(both[1])
