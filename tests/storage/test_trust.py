"""What a list, an index file or a redirect names is data: it opens nothing elsewhere, and gets no credentials."""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import numpy as np
import pytest
from conftest import POOLS, make_pool
from shards import Served, closed, serves, serving  # noqa: F401
from yarl import URL

from sharded_loader import ShardDataset, ShardedDataLoader
from sharded_loader.storage import indexes
from sharded_loader.storage.files import ShardError, Stat, host_of, joined, shown, trusted
from sharded_loader.storage.indexes import dumped, loaded
from sharded_loader.storage.lists import parse_trust
from sharded_loader.storage.parts import bind_credentials
from sharded_loader.storage.stores import ObjectStore

SECRETS = ("s3cret-token", "s3cret-key", "s3cret-cookie", "s3cret-basic")
OPTIONS = {
    "headers": {"Authorization": SECRETS[0], "X-Api-Key": SECRETS[1]},
    "client_kwargs": {"cookies": {"session": SECRETS[2]}, "headers": {"X-Token": SECRETS[3]}},
}


@pytest.fixture
def other() -> Iterator[Served]:
    """A second server, beside `served`."""
    with serving() as found:
        yield found


def got(host: Served) -> set[str]:
    """The secrets that it got."""
    return {secret for secret in (*SECRETS, "Basic") if any(secret in heard for heard in host.heard)}


def _index(url: str, names: list[str]) -> bytes:
    return indexes.content(url, "lines", names, [Stat(4, "")] * len(names), [(2, dumped({}))] * len(names))


LISTS: dict[str, Callable[[str, list[str]], bytes]] = {
    "plain.json": lambda url, names: json.dumps(names).encode(),
    "mosaic.json": lambda url, names: json.dumps({"shards": [{"raw_data": {"basename": n}} for n in names]}).encode(),
    "wids.json": lambda url, names: json.dumps({"shardlist": [{"url": name} for name in names]}).encode(),
    "own.index": _index,
}


def urls_of(dataset: ShardDataset) -> list[str]:
    return dataset._shards.urls


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_opens_no_file_here_and_no_other_host(served: Served, other: Served, tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret.txt").write_text("password\n")
    path = (tmp_path / "secret.txt").as_posix()
    other.files["/a.txt"] = b"one\ntwo\n"
    names = [path, f"file://{path}", f"local://{path}", f"simplecache::file://{path}", f"/{path}", f"FILE://{path}"]
    for name in (*names, f"{other.url}/a.txt", f"ftp://127.0.0.1/{path}", "memory://a.txt", "../a.txt", "x\0.txt"):
        served.files[f"/set/{kind}"] = LISTS[kind](f"{served.url}/set/{kind}", [name])
        with pytest.raises(ShardError, match=rf"/set/{kind} names .*\. If you trust this name, give ShardDataset"):
            ShardDataset(f"{served.url}/set/{kind}", "lines", index_folder=tmp_path)
    assert not other.heard


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_on_this_machine_is_data_too_however_it_is_named(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    real, root = tmp_path / "real" / "set", tmp_path.as_posix()
    for folder in (real, tmp_path / "from"):
        folder.mkdir(parents=True)
        (folder.parent / "b.txt").write_text("1\n2\n")
    (real / "a.txt").write_text("1\n2\n")
    (tmp_path / "link").symlink_to(real, target_is_directory=True)
    monkeypatch.chdir(tmp_path / "from")

    def read(name: str, trust: Any = False, url: Any = real / kind) -> list[str]:
        (real / kind).write_bytes(LISTS[kind]((real / kind).as_posix(), [name]))
        return urls_of(ShardDataset(url, index_folder=tmp_path / "indexes", format="lines", trust=trust))

    for name in ("a.txt", f"{root}/real/set/a.txt", "../set/a.txt"):
        assert read(name) == [f"{root}/real/set/a.txt"]
    # The parent of a link is that of its folder, as for the system.
    places = ("../real/set/", "../from/../real//set/", f"{root}//real/./set/", f"file://{root}/from/../real/set/")
    for url in (*places, "../link/../set/"):
        assert read("a.txt", url=url + kind) == [f"{root}/real/set/a.txt"], url
    for name in (f"{root}/real/b.txt", "../b.txt", f"file://{root}/real/set/../b.txt"):
        with pytest.raises(ShardError, match=rf"names .*b\.txt'.*trust='{root}/real/'\)"):
            read(name)
        places = (real.parent, f"file://{root}/real", [f"{real.parent}/"], {str(real.parent): {}}, True)
        for trust in (*places, "../real", Path("..") / "real", f"file://{root}/from/../real"):
            assert read(name, trust) == [f"{root}/real/b.txt"]
        for trust in (".", "../rea", "../real/../from"):
            with pytest.raises(ShardError, match=r"names .*b\.txt"):
                read(name, trust)
    for trust in (5, [5], None, {"s3://b": 7}):
        with pytest.raises(TypeError, match="trust must be a URL or path, a list of them"):
            read("a.txt", trust)


@pytest.mark.parametrize(
    "name",
    ["../b", "x/../../b", "%2e%2e/b", "%252E%252e/b", "..\\b", "x/..", "..?q", "/etc/passwd", "//evil/b", "a\tb"]
    + ["x%00b", "http://evil/b", "https://host/b", "http://host:81/b", "http://host.evil/b", "http://evil\\@host/b"]
    + ["http://host@evil/b", "http://evil#@host/b", "http://evil?@host/b", "http://host\t@evil/b", "HTTP://host/b"]
    + ["x::http://host/b", "simplecache::file", "http://host/%2e%2e/b", "s3://host/b", "://b", "file:///b"],
)
def test_no_spelling_leads_out_of_the_place_of_a_list(name: str) -> None:
    for trust in (False, parse_trust("http://host/set"), parse_trust(["s3://", "/etc/pass", "http://ev"])):
        if not (isinstance(trust, dict) and trusted(name, trust)):
            with pytest.raises(ShardError, match=r"^http://host/set/i\.json names "):
                joined("http://me:pw@host/set/i.json?key=a/b", ["ok", name], trust)
    for name in ("a b", "x/a..b", "..a", "a?x=1", "http://host/other", "http://you@host/b", "C:/b"):
        [found] = joined("http://me:pw@host/set/i.json?key=a/b", [name])
        assert host_of(found) == "http://host" and ("other" in found or "//you@" in found or "host/set/" in found)


def test_another_bucket_is_another_place() -> None:
    for name in ("s3://b-2/x", "s3://b2/x", "s3a://b/x", "gs://b/x", "s3://b/../b2/x"):
        with pytest.raises(ShardError, match="names"):
            joined("s3://b/set/i.json", [name], parse_trust("s3://b-1"))
    store = ObjectStore({"key": "mine"}, parse_trust({"s3://c/": {"key": "other"}}))
    store.limit_options(["s3://b/i.json"])
    keys = [store._access(f"s3://{bucket}/x")[1].get("key") for bucket in ("b", "b-2", "c", "c-2")]
    assert keys == ["mine", None, "other", None]
    assert joined("s3://b/i.json", ["s3://c/x", "s3://c-2/y", "s3://b/z"], parse_trust("s3://"))[2] == "s3://b/z"


def test_an_index_file_beside_shards_opens_nothing_that_was_not_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    place = (tmp_path / "shards.index").as_posix()
    Path(place).write_bytes(_index(place, ["/etc/passwd"]))
    with pytest.warns(UserWarning, match=r"names '/etc/passwd'.*indexed one by one"):
        assert list(ShardDataset(tmp_path / "*.txt", index_folder=tmp_path / "indexes")) == ["one"]


def test_nothing_that_is_read_is_unpickled() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was unpickled",)

    content = dumped({"length": np.array([Evil()], object)})
    assert loaded(content) is None
    for dtype, shape in (("O", [1]), ("i8,O", [1]), ([["a", "O"]], [1]), ("<i8", [10**15])):
        crafted = zlib.compress(json.dumps({"length": [dtype, shape]}).encode() + b"\n" + bytes(16))
        assert loaded(crafted + hashlib.sha256(crafted).digest()) is None, (dtype, shape)


@pytest.mark.costly
@pytest.mark.parametrize("method", POOLS)
def test_credentials_go_to_the_host_they_are_for(served: Served, other: Served, tmp_path: Path, method: str) -> None:
    served.files["/a.txt"], other.files["/b.txt"] = b"0\n1\n", b"2\n3\n"
    served.files["/index.json"] = json.dumps(["a.txt", f"{other.url}/b.txt"]).encode()
    theirs = {"headers": {"X-Api-Key": "theirs"}}
    for trust, is_theirs in ((True, False), (other.url, False), ({other.url: theirs}, True)):
        other.heard.clear()
        dataset = ShardDataset(
            f"{served.url}/index.json", storage_options=OPTIONS, index_folder=tmp_path / f"{is_theirs}", trust=trust
        )
        with ShardedDataLoader(dataset.transform(int), 2, pool=make_pool(method)) as loader:
            assert [number for batch in loader for number in batch.tolist()] == [0, 1, 2, 3]
        assert len(other.heard) > 1 and got(other) == set() and got(served) == set(SECRETS)
        assert all(("theirs" in heard) == is_theirs for heard in other.heard)
    named = ShardDataset([f"{served.url}/a.txt", f"{other.url}/b.txt"], None, OPTIONS, index_folder=tmp_path / "named")
    assert list(named) == ["0", "1", "2", "3"] and got(other) == set(SECRETS)  # the user has named both hosts


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # what aiohttp has said since 3.14
    AUTH = aiohttp.BasicAuth("me", "s3cret-password")
GIVEN: dict[str, dict[str, Any]] = {
    "headers": OPTIONS,
    "auth": {"auth": AUTH},
    "auth of the session": {"client_kwargs": {"auth": AUTH}},
    "cookies": {"cookies": {"session": SECRETS[2]}},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("given", GIVEN)
def test_a_redirect_takes_no_credentials_along(served: Served, other: Served, tmp_path: Path, given: str) -> None:
    for host in (served, other):
        served.moved["/a.txt"] = f"{host.url}/b.txt"
        host.files["/b.txt"] = b"one\ntwo\n"
        folder = tmp_path / host.url.rpartition(":")[2]
        dataset = ShardDataset(f"{served.url}/a.txt", storage_options=GIVEN[given], index_folder=folder)
        assert list(dataset) == ["one", "two"]
        dataset.close()
    sent = [heard for heard in served.heard if heard.startswith("/b.txt")]
    if given != "cookies":  # which old versions of aiohttp do not send to an address
        assert sent and all(any(secret in heard for secret in (*SECRETS, "Basic")) for heard in sent)
    assert got(other) == set() and "Cookie" not in "".join(other.heard)
    assert any("Range: bytes=" in heard for heard in other.heard)


def test_a_redirect_from_https_to_http_is_an_error() -> None:
    chained = bind_credentials("simplecache::https://host/a.tar", {"https": {"headers": {}}, "x": 1}, 30.0)
    assert chained["x"] == 1 and chained["https"]["headers"] == {}
    request = chained["https"]["client_kwargs"]["request_class"]
    with pytest.raises(aiohttp.InvalidURL, match="without encryption"):
        request("GET", URL("http://host/a.tar"))


def test_a_redirect_never_leads_to_a_file(served: Served, other: Served, tmp_path: Path) -> None:
    served.moved["/a.txt"] = f"file://{tmp_path.as_posix()}/secret.txt"
    (tmp_path / "secret.txt").write_text("password\n")
    with pytest.raises(ShardError, match=r"a\.txt: NonHttp"):
        list(ShardDataset(f"{served.url}/a.txt", index_folder=tmp_path))


def test_no_error_and_no_repr_shows_a_credential(served: Served, other: Served, tmp_path: Path) -> None:
    served.files["/a.txt"] = b"0\n"
    url = served.url.replace("://", "://me:hunter@22@") + "/a.txt?X-Amz-Signature=abcdef"
    dataset = ShardDataset(url.replace("hunter@22", "hunter22"), index_folder=tmp_path, trust={other.url: OPTIONS})
    said = f"{dataset!r} {dataset} {ObjectStore(OPTIONS, {other.url: OPTIONS})!r} {shown(url)}"
    served.files["/index.json"] = json.dumps([url.replace(served.url[7:], other.url[7:])]).encode()
    for trust in (False, {other.url: OPTIONS}):
        with pytest.raises(ShardError) as caught:
            ShardDataset(f"{served.url}/index.json", storage_options=OPTIONS, trust=trust)
        said += f"{caught.value!r} {caught.value}"
    assert not any(secret in said for secret in (*SECRETS, "hunter", "22@", "abcdef"))


def test_a_place_in_memory_is_a_place(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe({"/trust/set/a.txt": b"one\n", "/trust/i.json": b'["set/a.txt", "memory://trust/set/a.txt"]'})
    try:
        assert list(ShardDataset("memory://trust/i.json", index_folder=tmp_path)) == ["one"]
        store = pickle.loads(pickle.dumps(ObjectStore({}, {"memory://x": {}})))
        assert store.trust == {"memory://x": {}}
    finally:
        system.rm("/trust", recursive=True)
