"""Batches of other libraries that move themselves are copied ahead: all their tensors can be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from indices import IN_FRAMEWORKS
from torch.nn.utils.rnn import pack_sequence

from sharded_loader.devices.copies import CopyStream

pytestmark = IN_FRAMEWORKS


def encoding() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding({name: torch.ones(2, 3) for name in ("input_ids", "attention_mask")})


def graphs() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.zeros(2, 1, dtype=torch.long)
    return data.Batch.from_data_list([data.Data(x=torch.ones(2, 3), edge_index=edges)] * 2)


def dictionary() -> Any:
    return pytest.importorskip("tensordict").TensorDict({"x": torch.ones(2, 3)}, batch_size=[2])


@pytest.mark.parametrize("make", [encoding, graphs, dictionary, lambda: pack_sequence([torch.ones(3), torch.ones(2)])])
def test_they_move_on_the_copy_stream(machine: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    from simulated import SimulatedStreams

    streams, own = SimulatedStreams(machine, machine.devices[0]), make()
    copies, asked = CopyStream(streams), []

    def noted(batch: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(streams.caller_stream().name)
        return batch

    monkeypatch.setattr(type(own), "to", noted)
    monkeypatch.setattr(copies, "_stage", lambda leaf: leaf)  # these pin themselves, which needs an accelerator
    copies.begin([own, torch.arange(100_000)])
    assert asked == [copies._stream.name]
    machine.finish()
    copies.drain()
