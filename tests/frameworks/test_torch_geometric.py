"""PyTorch Geometric: graphs become a `Batch`, also with a batch sampler that counts nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def geometric() -> Any:
    return pytest.importorskip("torch_geometric")


def graphs(count: int = 10) -> list[Any]:
    """Graph i is a path of i + 1 nodes."""
    from torch_geometric.data import Data

    return [
        Data(
            x=torch.full((i + 1, 2), float(i)), edge_index=torch.stack([torch.arange(i), torch.arange(i) + 1]), number=i
        )
        for i in range(count)
    ]


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_librarys_own_loader(geometric: Any, make: Any, num_workers: int) -> None:
    from torch_geometric.loader import DataLoader
    from torch_geometric.loader.dataloader import Collater

    expected = list(DataLoader(graphs(), batch_size=4))
    found = list(make(graphs(), batch_size=4, num_workers=num_workers, collate_fn=Collater(graphs())))
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        for name in ("x", "edge_index", "batch", "ptr", "number"):
            assert torch.equal(ours[name], theirs[name])
        assert ours.to_data_list()[-1].num_nodes == theirs.to_data_list()[-1].num_nodes


@BOTH
def test_a_batch_sampler_that_counts_nodes(geometric: Any, make: Any) -> None:
    from torch_geometric.loader import DynamicBatchSampler
    from torch_geometric.loader.dataloader import Collater

    sampler = DynamicBatchSampler(graphs(), max_num=20, mode="node", shuffle=False)
    loader = make(graphs(), batch_sampler=sampler, num_workers=2, collate_fn=Collater(graphs()))
    batches = [batch for batch in loader]  # noqa: C416  # list() asks for the length, which the sampler does not know
    assert [batch.number.tolist() for batch in batches] == [list(one) for one in sampler]
    assert all(batch.num_nodes <= 20 for batch in batches)
