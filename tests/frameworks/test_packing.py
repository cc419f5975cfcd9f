"""Packed rows hold what transformers' collator makes of the same documents, and train a model as they do alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from indices import IN_FRAMEWORKS

from sharded_loader import PackSampler, ShardedDataLoader
from sharded_loader.batchify import Pack

pytestmark = IN_FRAMEWORKS
transformers = pytest.importorskip("transformers")

LENGTHS = np.random.default_rng(0).integers(2, 30, 60)


def documents(labels: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    found: list[dict[str, Any]] = [{"input_ids": rng.integers(3, 32, length).tolist()} for length in LENGTHS]
    for document in found if labels else ():
        document["labels"] = [-100] * (len(document["input_ids"]) // 2)
        document["labels"] += document["input_ids"][len(document["labels"]) :]
    return found


@pytest.mark.parametrize("labels", [False, True])
def test_the_values_are_those_of_the_flattening_collator(labels: bool) -> None:
    data = documents(labels)
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    sampler = PackSampler(LENGTHS, tokens=32, rows=4, seed=0)
    loader = ShardedDataLoader(data, batch_sampler=sampler, batchify_fn=Pack(tokens=32))
    for indices, batch in zip(sampler.iter_epoch(0), loader, strict=True):
        expected = flatten([data[index] for index in indices])
        is_real = batch["segment_ids"] > 0
        for name in ("input_ids", "labels", "position_ids"):
            assert batch[name][is_real].equal(expected[name][0]) and batch[name].dtype == expected[name].dtype
        assert batch["cu_seqlens"].equal(expected["cu_seq_lens_q"])
        assert (batch["labels"][~is_real] == -100).all()


def test_packed_rows_give_the_loss_of_the_documents_alone() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=1,
        use_cache=False,  # with a cache, transformers does not look for documents in a row
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    data = documents(labels=False)
    sampler = PackSampler(LENGTHS, tokens=32, rows=4, seed=0)
    loader = ShardedDataLoader(data, batch_sampler=sampler, batchify_fn=Pack(tokens=32))
    batch, indices = next(iter(loader)), next(sampler.iter_epoch(0))
    with torch.no_grad():
        packed = model(**{name: batch[name] for name in ("input_ids", "position_ids", "labels")}).loss
        alone = [torch.tensor([data[index]["input_ids"]]) for index in indices]
        losses = [model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) for ids in alone]
    mean = torch.stack(losses).sum() / sum(ids.shape[1] - 1 for ids in alone)
    torch.testing.assert_close(packed, mean)
