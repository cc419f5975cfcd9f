"""Shards in S3, against a server on this machine: the samples are right in every pool."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_pool
from shards import write_tar

from sharded_loader import RandomSampler, ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler
from sharded_loader.storage import stores
from sharded_loader.storage.files import ShardError
from sharded_loader.storage.stores import ObjectStore

pytestmark = pytest.mark.stores

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

SHARDS, LENGTH = 6, 20


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """A server with six tar shards in a bucket: the options to reach it."""
    import s3fs

    with tempfile.TemporaryFile() as log:
        pipe = subprocess.PIPE
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, stderr=log, text=True)
        assert server.stdin is not None and server.stdout is not None
        options = {
            "key": "k",
            "secret": "very-secret",
            "endpoint_url": f"http://127.0.0.1:{int(server.stdout.readline())}",
        }
        system = s3fs.S3FileSystem(**options, skip_instance_cache=True)
        system.mkdir("bucket")
        options["client_kwargs"] = {"region_name": "us-east-1"}
        with tempfile.TemporaryDirectory() as folder:
            for shard in range(SHARDS):
                path = Path(folder, "x.tar")
                write_tar(path, {f"{i}.txt": str(i).encode() for i in range(shard * LENGTH, (shard + 1) * LENGTH)})
                system.pipe(f"bucket/train-{shard}.tar", path.read_bytes())
        yield options
        server.stdin.close()
        server.wait()
        server.stdout.close()


@pytest.fixture
def options(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With short pauses."""
    monkeypatch.setattr(stores, "PAUSE", 0.01)
    return s3


def text(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("method", ["inline", "thread", "fork", "spawn"])
def test_every_pool_reads_the_samples(options: dict[str, Any], method: str, cached: bool, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", "1 MB") if cached else None
    dataset = ShardDataset("s3://bucket/train-*.tar", None, options, cache, tmp_path / "indexes")
    assert dataset.lengths.tolist() == [LENGTH] * SHARDS
    order: Any = (
        ShardShuffleSampler(dataset.lengths, window=2, seed=1) if cached else RandomSampler(len(dataset), seed=1)
    )
    with ShardedDataLoader(dataset.transform(text), 16, sampler=order, pool=make_pool(method)) as loader:
        assert [i for batch in loader for i in batch.tolist()] == list(order.iter_epoch(0))
        assert loader.stats().retries == 0
    if cache is not None:
        assert cache.fetched == SHARDS
    dataset.close()


@pytest.mark.parametrize("name", ["bucket/nothing.tar", "nobucket/train-0.tar"])
def test_what_is_missing_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name.replace("/", ".*")):
        ShardDataset(f"s3://{name}", storage_options=options)


def test_no_message_shows_a_secret(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "TRIES", 2)
    store = ObjectStore(options)
    url = "s3://bucket/train-0.tar"
    assert len(store.ranges(url, [0], [4])[0]) == 4
    with pytest.raises(ShardError, match=r"train-0\.tar") as error:
        store.ranges(url, [10**7], [10**7 + 4])  # beyond its end
    assert "very-secret" not in str(error.value) and error.value.__cause__ is None
    assert store.retries <= 1
    store.close()


def test_a_shard_that_was_replaced_is_indexed_again(options: dict[str, Any], tmp_path: Path) -> None:
    import s3fs

    system = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    for first in (100, 500):
        write_tar(tmp_path / "x.tar", {f"{i}.txt": str(i).encode() for i in range(first, first + 3)})
        system.pipe("bucket/other.tar", (tmp_path / "x.tar").read_bytes())
        dataset = ShardDataset("s3://bucket/other.tar", None, options, ShardCache(tmp_path / "c", "1 MB"), tmp_path)
        assert [text(sample) for sample in dataset] == [first, first + 1, first + 2]
        dataset.close()


@pytest.mark.parametrize("cached", [False, True])
def test_a_shard_that_is_replaced_under_way_is_an_error(options: dict[str, Any], tmp_path: Path, cached: bool) -> None:
    import s3fs

    system = s3fs.S3FileSystem(**options, skip_instance_cache=True)

    def write(first: bytes, second: bytes) -> None:
        write_tar(tmp_path / "x.tar", {"0.txt": first, "1.txt": second})
        system.pipe("bucket/replaced.tar", (tmp_path / "x.tar").read_bytes())

    write(b"a" * 700, b"b" * 10)
    cache = ShardCache(tmp_path / "c", "1 MB") if cached else None
    dataset = ShardDataset("s3://bucket/replaced.tar", None, options, cache, tmp_path / "indexes")
    assert len(dataset) == 2  # the shard is indexed now
    if cache is not None:
        [path] = cache.folder.glob("*.shard")
        path.unlink()
    write(b"x" * 10, b"y" * 700)
    with pytest.raises(ShardError, match=r"replaced\.tar has changed since the dataset was made"):
        dataset[0]
    assert dataset.retries == 0
    dataset.close()
