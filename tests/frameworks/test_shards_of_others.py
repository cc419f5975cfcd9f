"""Shards that other libraries have written hold the same samples here as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from indices import IN_FRAMEWORKS

from sharded_loader.storage.dataset import ShardDataset

pytestmark = IN_FRAMEWORKS

SAMPLES = 11


def test_tar_shards_of_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(str(tmp_path / "s-%03d.tar"), maxcount=4, verbose=0) as writer:
        for i in range(SAMPLES):
            writer.write({"__key__": f"key{i:04}", "cls": i, "npy": np.arange(i), "txt": f"text {i}"})
    urls = sorted(map(str, tmp_path.glob("*.tar")))
    expected = list(webdataset.WebDataset(urls, shardshuffle=False))
    found = list(ShardDataset(str(tmp_path / "*.tar"), index_folder=tmp_path / "indexes"))
    names = ("__key__", "cls", "npy", "txt")
    assert [{name: one[name] for name in names} for one in expected] == found
    assert len(found) == SAMPLES


def test_mds_shards_of_mosaicml_streaming(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    image = pytest.importorskip("PIL.Image").fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    columns = {
        "label": "int",
        "small": "uint16",
        "weight": "float32",
        "text": "str",
        "raw": "bytes",
        "free": "ndarray",
        "typed": "ndarray:int32",
        "fixed": "ndarray:float64:2,3",
        "config": "json",
        "exact": "str_decimal",
        "image": "png",
        "pixels": "pil",
    }

    def sample(i: int) -> dict[str, Any]:
        from decimal import Decimal

        return {
            "label": i - 3,
            "small": np.uint16(i * 1000),
            "weight": np.float32(i / 3),
            "text": "é" * i,
            "raw": bytes([i]) * i,
            "free": np.arange(i + 1, dtype=np.int8).reshape(1, -1),
            "typed": np.arange((i + 1) * 300, dtype=np.int32).reshape(-1, i + 1),
            "fixed": np.full((2, 3), i, dtype=np.float64),
            "config": {"i": [i]},
            "exact": Decimal(i) / 8,
            "image": image,
            "pixels": image,
        }

    folder = str(tmp_path / "mds")
    with streaming.MDSWriter(out=folder, columns=columns, size_limit=20_000) as writer:
        for i in range(SAMPLES):
            writer.write(sample(i))
    dataset = ShardDataset(f"{folder}/*.mds", index_folder=tmp_path / "indexes")
    assert len(dataset.lengths) > 1 and len(dataset) == SAMPLES
    for i, found in enumerate(dataset):
        expected = sample(i)
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            if isinstance(value, np.ndarray) or name in ("image", "pixels"):
                assert np.array_equal(np.asarray(found[name]), np.asarray(value)), name
                assert np.asarray(found[name]).dtype == np.asarray(value).dtype, name
            else:
                assert found[name] == value and type(found[name]) is type(value), name
