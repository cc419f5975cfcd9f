"""Shards in S3, against a server on this machine: the samples are right, with s3fs and with obstore, in every pool."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_pool
from shards import closed, number, tar_of_numbers  # noqa: F401

from sharded_loader import RandomSampler, ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler
from sharded_loader.storage import stores
from sharded_loader.storage.files import ShardError, Stat
from sharded_loader.storage.parts import FastS3, settings_of
from sharded_loader.storage.stores import ObjectStore

with_server = pytest.mark.stores

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

SHARDS, LENGTH = 6, 20


class Refusing:
    """Stands for obstore's `S3Store`: answers as many requests as it is told to, and refuses the others."""

    answers = 0

    def __init__(self, name: str, **settings: Any) -> None:
        self.settings = settings

    def get(self, key: str, options: dict[str, Any]) -> Any:
        if not Refusing.answers:
            raise RuntimeError("503")
        Refusing.answers -= 1
        begin, end = options["range"]
        return types.SimpleNamespace(meta={"e_tag": '"first"'}, bytes=lambda: b"x" * (end - begin))


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> type[Refusing]:
    """In place of obstore."""
    store = types.ModuleType("obstore.store")
    store.S3Store = Refusing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "obstore", types.ModuleType("obstore"))
    monkeypatch.setitem(sys.modules, "obstore.store", store)
    monkeypatch.setattr(FastS3, "_used_in", None)
    monkeypatch.setattr(Refusing, "answers", 0)
    return Refusing


def test_a_bucket_that_never_answered_is_left_to_fsspec_and_one_that_did_has_errors(
    refusing: Any, monkeypatch: Any
) -> None:
    fast = FastS3({})
    assert fast.read("bucket/a.tar", 0, 4, 30.0) is None
    refusing.answers = 1
    assert fast.read("bucket/a.tar", 0, 4, 30.0) is None
    assert fast.read("other/a.tar", 0, 4, 30.0) == (b"xxxx", "first")
    with pytest.raises(RuntimeError, match="503"):
        fast.read("other/a.tar", 0, 4, 30.0)
    assert FastS3._used_in == os.getpid(), "a child that is forked now asks fsspec"
    refusing.answers = 1
    monkeypatch.setattr(FastS3, "_used_in", os.getpid() + 1)  # as it is in such a child
    assert FastS3({}).read("bucket/a.tar", 0, 4, 30.0) is None and refusing.answers == 1


def test_an_answer_of_another_version_is_an_error_at_once(refusing: type[Refusing], monkeypatch: Any) -> None:
    refusing.answers = 2
    monkeypatch.setattr(
        ObjectStore, "_open", lambda self, url: self._fast.setdefault("s3://b", FastS3({})) and ("", "b/a")
    )
    store = ObjectStore()
    assert store.ranges("s3://b/a", [0], [2], Stat(9, "first")) == [b"xx"]
    with pytest.raises(ShardError, match="s3://b/a has changed since the dataset was made"):
        store.ranges("s3://b/a", [0], [2], Stat(9, "second"))
    assert store.requests == 2 and not refusing.answers


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"key": "k", "secret": "s", "token": "t"}, {"access_key_id": "k", "secret_access_key": "s", "token": "t"}),
        ({"anon": True, "endpoint_url": "http://a"}, {"skip_signature": True, "endpoint_url": "http://a"}),
        ({"client_kwargs": {"aws_access_key_id": "k"}}, {"aws_access_key_id": "k"}),
    ],
)
def test_options_mean_the_same_in_obstore(options: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(options) == settings


@with_server
@pytest.mark.parametrize("option", [{"client_kwargs": {"verify": False}}, {"requester_pays": True}, {"profile": "me"}])
def test_fsspec_reads_with_options_that_obstore_does_not_know(s3: dict[str, Any], option: dict[str, Any]) -> None:
    assert FastS3(s3).read("bucket/train-0.tar", 0, 4, 30.0) is not None
    assert FastS3(s3 | option).read("bucket/train-0.tar", 0, 4, 30.0) is None


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
        for shard in range(SHARDS):
            numbers = range(shard * LENGTH, (shard + 1) * LENGTH)
            system.pipe(f"bucket/train-{shard}.tar", tar_of_numbers(numbers))
        FastS3(options).read("bucket/train-0.tar", 0, 4, 30.0)  # the descriptors of obstore live as long as the process
        yield options
        server.stdin.close()
        server.wait()
        server.stdout.close()


@pytest.fixture(params=["s3fs", "obstore"])
def options(s3: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With obstore, or with s3fs alone."""
    monkeypatch.setattr(stores, "PAUSE", 0.01)
    if request.param == "s3fs":
        monkeypatch.setattr(FastS3, "read", lambda *_: None)
    else:
        monkeypatch.setattr(FastS3, "_used_in", None)
    return s3


@with_server
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("method", ["inline", "thread", "fork", "spawn"])
def test_every_pool_reads_the_samples(options: dict[str, Any], method: str, cached: bool, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", "1 MB") if cached else None
    dataset = ShardDataset("s3://bucket/train-*.tar", None, options, cache, tmp_path / "indexes")
    assert dataset.lengths.tolist() == [LENGTH] * SHARDS
    order: Any = (
        ShardShuffleSampler(dataset.lengths, window=2, seed=1) if cached else RandomSampler(len(dataset), seed=1)
    )
    with ShardedDataLoader(dataset.transform(number), 16, sampler=order, pool=make_pool(method)) as loader:
        assert [i for batch in loader for i in batch.tolist()] == list(order.iter_epoch(0))
        assert loader.stats().retries == 0
    if cache is not None:
        assert cache.fetched == SHARDS


@with_server
def test_parts_of_files_come_through_obstore_where_it_is_installed(s3: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(FastS3, "_used_in", None)
    fast = FastS3(s3)
    store = ObjectStore(s3)
    url = "s3://bucket/train-0.tar"
    expected = store.ranges(url, [0], [100])[0]
    assert fast.read("bucket/train-0.tar", 0, 100, 30.0) == (expected, store.stat(url).tag) and b"0.txt" in expected
    with pytest.raises(FileNotFoundError):
        fast.read("bucket/nothing.tar", 0, 4, 30.0)


@with_server
def test_a_bucket_that_obstore_cannot_reach_is_read_by_s3fs(s3: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(FastS3, "_used_in", None)
    nobody = "http://127.0.0.1:9"  # the port where nobody listens
    monkeypatch.setattr(
        "sharded_loader.storage.parts.settings_of", lambda options: settings_of(options | {"endpoint_url": nobody})
    )
    store = ObjectStore(s3)
    assert b"0.txt" in store.ranges("s3://bucket/train-0.tar", [0], [100])[0]
    assert store.retries == 0


@with_server
@pytest.mark.parametrize("name", ["bucket/nothing.tar", "nobucket/train-0.tar"])
def test_what_is_missing_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name.replace("/", ".*")):
        ShardDataset(f"s3://{name}", storage_options=options)


@with_server
def test_no_message_shows_a_secret(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "TRIES", 2)
    store = ObjectStore(options)
    url = "s3://bucket/train-0.tar"
    assert len(store.ranges(url, [0], [4])[0]) == 4
    with pytest.raises(ShardError, match=r"train-0\.tar") as error:
        store.ranges(url, [10**7], [10**7 + 4])  # beyond its end
    assert "very-secret" not in str(error.value) and error.value.__cause__ is None
    assert store.retries <= 1
