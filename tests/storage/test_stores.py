"""Bytes of files wherever they lie: right, in few requests, tried again, and errors that tell no secret."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import json
import os
import pickle
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from shards import Served, closed, serves  # noqa: F401

from sharded_loader import ShardDataset
from sharded_loader.storage import stores
from sharded_loader.storage.files import LocalFile, ShardError, ShardFile, Stat, redacted, shown
from sharded_loader.storage.lists import expanded
from sharded_loader.storage.stores import ObjectStore, RemoteFile, merge_ranges

CONTENT = bytes(range(256)) * 2000


SERVED = {"/a.bin": CONTENT}


SIGNS = ["run[1]", "run?", "run*", "run{1,2}", "run[!x]", "{0..1}[a]"]


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("kind", [str, Path, Path.joinpath, list, "file://{}".format, "relative", "index"])
def test_a_name_that_exists_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str, kind: Any) -> None:
    """The name of a folder, of a file, or of both. Beside it lies what it would match as a pattern."""
    for name in ("run1", "runs", "0a", "1a", sign):
        for path in (f"{name}/a.txt", f"{name}/{name}.txt"):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(f"{name}\n")
    folder = tmp_path / sign
    (folder / "index.json").write_text(json.dumps(["a.txt", f"{sign}.txt"]))
    given = {"index_folder": tmp_path / "indexes", "format": "lines"}
    names = ["a.txt", f"{sign}.txt", "*.txt", "{a,b,c}.txt"][: 2 if kind is list else 3]
    if kind == "relative":
        monkeypatch.chdir(folder)
        found: list[Any] = names
    elif kind == "index":
        found = [folder / "index.json"]
    else:
        make = {list: lambda path: [str(path)], Path.joinpath: lambda path: [path, path]}.get(kind, kind)
        found = [make(folder / name) for name in names]
    for one in found:
        assert set(ShardDataset(one, **given)) == {sign}, one


BRACES = {
    "{000..002}": ["000", "001", "002"], "{8..10}": ["8", "9", "10"], "{08..10}": ["08", "09", "10"],
    "{0..1}-{1..2}": ["0-1", "0-2", "1-1", "1-2"], "{a..c}": ["{a..c}"], "{a,b}": ["{a,b}"], "{x}": ["{x}"],
    "a": ["a"], "{}": ["{}"], "{1..}": ["{1..}"],
}  # fmt: skip


@pytest.mark.parametrize("braces", BRACES)
def test_numbers_in_braces_are_expanded_as_webdataset_does(tmp_path: Path, braces: str) -> None:
    assert expanded(braces) == BRACES[braces]
    for name in BRACES[braces]:
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
        fsspec.filesystem("memory").pipe_file(f"/braces/{name}.txt", f"{name}\n".encode())
    for place in (str(tmp_path), "memory://braces", f"file://{tmp_path}"):
        dataset = ShardDataset(f"{place}/{braces}.txt", index_folder=tmp_path / "indexes")
        assert list(dataset) == BRACES[braces]
    fsspec.filesystem("memory").rm("/braces", recursive=True)


class Hosted(MemoryFileSystem):  # type: ignore[misc]
    """Its paths leave out the host of the URL, or a part of the bucket, as those of sftp, ftp, hdfs and abfs do."""

    protocol, store, pseudo_dirs = "hosted", {}, [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        inside = path.partition("://")[2] or path
        if "@" not in inside:
            return "/" + inside.strip("/")
        bucket = f"/{inside.partition('@')[0]}" if cls.protocol == "account" else ""
        return f"{bucket}/{inside.partition('/')[2]}"


class Account(Hosted):
    protocol = "account"


@pytest.mark.parametrize("url", ["hosted://me@host:22/run", "account://run@host", "hosted://me@host/a/run"])
def test_a_pattern_names_files_of_its_own_host(tmp_path: Path, url: str) -> None:
    for kind in (Hosted, Account):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    store = ObjectStore()
    for name in ("0.txt", "1.txt"):
        store.write(f"{url}/{name}", f"{name}\n".encode())
    assert list(store.find(f"{url}/*.txt")) == [f"{url}/0.txt", f"{url}/1.txt"]
    assert list(ShardDataset(f"{url}/*.txt", index_folder=tmp_path)) == ["0.txt", "1.txt"]


@pytest.mark.filterwarnings("ignore:.*Until then, shards are indexed one by one")
@pytest.mark.parametrize(
    "url", ["foo://bucket/a.tar", "foo://bucket/*.tar", "simplecache::foo://b/{0..2}.tar", "zip://a.tar"]
)
def test_a_url_that_no_file_system_can_be_made_for_is_named(url: str) -> None:
    with pytest.raises(ShardError, match=r"(a|\*|0)\.tar: .*Check the URL, and storage_options="):
        ShardDataset(url, storage_options={"secret": "Error"}).close()


@pytest.mark.filterwarnings("ignore:.*Until then, shards are indexed one by one")
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def url_to_fs(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'fetch'", name="fetch")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    with pytest.raises(ShardError, match="No module named 'fetch'. pip install fetch"):
        ShardDataset(["http://127.0.0.1/a.tar"])


def test_braces_of_what_is_missing_or_with_too_many_names_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "0-a.txt").write_text("0\n")
    with pytest.raises(FileNotFoundError, match=r"1-a\.txt: the shard is missing"):
        ShardDataset(tmp_path / "{0..1}-a.txt")
    with pytest.raises(FileNotFoundError, match=r"no files match .*1-\*\.txt"):
        ShardDataset(os.fsencode(tmp_path / "{0..1}-*.txt"))  # type: ignore[arg-type]
    for braces in ("{000..99999999999}", "{0..1000000}", "{0..999}x{0..1000}", "{0..9}" * 30):
        with pytest.raises(ValueError, match=r"braces of a-{.*}-{0\.\.0}\.tar mean more than 1,000,000 names"):
            expanded(f"a-{braces}-{{0..0}}.tar")


def test_parts_come_in_the_order_in_which_they_are_asked_for(served: Served) -> None:
    store, url = ObjectStore(), f"{served.url}/a.bin"
    begins = [400_000, 5, 0, 200_000, 100_000, 100_010]
    found = store.ranges(url, begins, [begin + 7 for begin in begins])
    assert found == [CONTENT[begin : begin + 7] for begin in begins]
    assert len(served.asked) == 4  # neighbours are one request
    assert store.ranges(url, [], []) == []
    assert store.ranges(url, [5], [5]) == [b""] and len(served.asked) == 4  # an empty sample costs no request


@pytest.mark.parametrize(
    ("given", "expected"), [({}, {"total_max_attempts": 1}), ({"retries": {"mode": "adaptive"}}, {"mode": "adaptive"})]
)
def test_s3fs_does_not_try_again_by_itself(monkeypatch: pytest.MonkeyPatch, given: Any, expected: Any) -> None:
    system = Mock(retries=5, protocol=("s3",), info=lambda path: {"size": 5, "ETag": "x"}, _strip_protocol=str)
    opened = Mock(return_value=(system, "b/a.tar"))
    monkeypatch.setattr("fsspec.core.url_to_fs", opened)
    assert ObjectStore({"config_kwargs": {**given, "max_pool_connections": 9}}).stat("s3://b/a.tar") == Stat(5, "x")
    assert opened.call_args[1]["config_kwargs"] == {"retries": expected, "max_pool_connections": 9}
    assert system.retries == 1


@pytest.mark.costly
@pytest.mark.parametrize("trouble", ["fail", "truncate"])
def test_a_request_that_fails_is_tried_again(served: Served, trouble: str) -> None:
    setattr(served, trouble, 2)
    store = ObjectStore()
    assert store.ranges(f"{served.url}/a.bin", [10], [20]) == [CONTENT[10:20]]
    assert store.retries == 2


HOPELESS: dict[str, tuple[dict[str, Any], type[OSError], str, int]] = {
    "refused": ({"fail": 1000}, ShardError, r".*503.*tried 6 times\)\. Check the server", 6),
    "cut": ({"truncate": 1000}, ShardError, "5 bytes came where 10 were asked for.*cut.*tried 6 times", 6),
    "401": ({"fail": 1000, "status": 401}, PermissionError, "", 1),
    "403": ({"fail": 1000, "status": 403}, PermissionError, "", 1),
    "404": ({"fail": 1000, "status": 404}, FileNotFoundError, "", 1),
}


@pytest.mark.parametrize(("trouble", "error", "said", "asked"), HOPELESS.values(), ids=HOPELESS)
def test_trouble_without_end_is_an_error_that_names_the_file(
    served: Served, monkeypatch: pytest.MonkeyPatch, trouble: Any, error: type[OSError], said: str, asked: int
) -> None:
    """What cannot be helped is not tried again."""
    monkeypatch.setattr(stores, "PAUSE", 0.0001)
    vars(served).update(trouble)
    with pytest.raises(error, match=rf"a\.bin.*{said}"):
        ObjectStore().ranges(f"{served.url}/a.bin", [10], [20])
    assert len(served.asked) == asked


@pytest.mark.slow
def test_no_message_tells_a_secret(served: Served) -> None:
    served.fail = 1000
    url = served.url.replace("://", "://me:hunter22@") + "/a.bin?X-Amz-Signature=abcdef"
    store = ObjectStore({"client_kwargs": {"headers": {"X-Token": "t0ken-of-mine"}}})
    with pytest.raises(OSError, match=r"a\.bin") as error:
        store.ranges(url, [10], [20])
    shown_chain, one = "", error.value
    while one is not None:
        shown_chain += f"{one!r} {one} "
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)  # type: ignore[assignment]
    assert not [secret for secret in ("hunter22", "abcdef", "t0ken-of-mine") if secret in shown_chain]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_store_works_in_a_forked_child(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STALL", 2.0)
    store, url = ObjectStore(), f"{served.url}/a.bin"
    store.ranges(url, [0], [10])  # its file system is open here, and its connection

    def read_twice() -> bool:
        found = store.ranges(url, [10], [20])
        gc.collect()
        return found == store.ranges(url, [10], [20]) == [CONTENT[10:20]]

    if (pid := os.fork()) == 0:
        os._exit(not read_twice())
    assert os.waitpid(pid, 0)[1] == 0 and read_twice() and store.retries == 0


@pytest.mark.parametrize("chain", ["", "simplecache::", "filecache::"])
def test_a_store_that_is_closed_leaves_the_others_open(served: Served, chain: str) -> None:
    """fsspec shares the file system inside a chain."""
    first = ObjectStore({})
    for store in (first, second := pickle.loads(pickle.dumps(first)), first, second):
        assert store.ranges(f"{chain}{served.url}/a.bin", [1], [3]) == [CONTENT[1:3]]
        store.close()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the pieces begin that stores ask for; what comes is `CONTENT`, the first piece after all others."""
    asked, last = list[int](), threading.Event()

    def part(store: ObjectStore, url: str, begin: int, end: int, stat: Stat, write: Any) -> tuple[int, bool]:
        asked.append(begin)
        if end == stat.size:
            last.set()
        assert begin or end == stat.size or last.wait(60)
        write(begin, CONTENT[begin:end])
        return zlib.crc32(CONTENT[begin:end]), True

    monkeypatch.setattr(ObjectStore, "_part", part)
    return asked


@pytest.mark.parametrize(
    ("piece", "size", "is_waited_for", "count"),
    [(100, 1950, False, 20), (None, 300_000, False, 1), (None, 300_000, True, 4), (None, 100_000, True, 2)]
    + [(None, 1000, True, 1)],
)
def test_a_file_is_fetched_in_pieces_and_no_slow_one_holds_up_the_others(
    monkeypatch: pytest.MonkeyPatch, pieces: list[int], piece: int | None, size: int, is_waited_for: bool, count: int
) -> None:
    """A file that is waited for uses all connections."""
    monkeypatch.setattr(stores, "LEAST_PIECE", 50_000)
    monkeypatch.setattr(stores, "PIECE", piece or stores.PIECE)
    file = io.BytesIO()
    checksum = ObjectStore().fetch("s3://b/a.bin", file, Stat(size, "tag"), is_waited_for=is_waited_for)
    assert file.getvalue() == CONTENT[:size] and file.tell() == size and checksum == zlib.crc32(file.getvalue())
    assert len(pieces) == count and len({*pieces}) == count


def test_a_piece_that_fails_ends_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, is_over = list[int](), threading.Event()

    def part(store: ObjectStore, url: str, begin: int, *rest: Any, write: Any) -> tuple[int, bool]:
        pieces.append(begin)
        if begin == 10:
            raise ShardError("it has changed")
        assert is_over.wait(60)
        return 0, True

    class Threads(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_over.set()
            super().shutdown(wait)

    monkeypatch.setattr(stores, "PIECE", 10)
    monkeypatch.setattr(ObjectStore, "_part", part)
    monkeypatch.setattr(stores, "ThreadPoolExecutor", Threads)
    with pytest.raises(ShardError, match="it has changed"):
        ObjectStore().fetch("s3://b/a.bin", io.BytesIO(), Stat(1000, "tag"))
    assert len(pieces) <= stores.CONNECTIONS + 1


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), min_size=1), st.integers(0, 50))
def test_merged_stretches_hold_the_given_ones(pairs: list[tuple[int, int]], gap: int) -> None:
    begins = [begin for begin, _ in pairs]
    ends = [begin + length for begin, length in pairs]
    spans, where = merge_ranges(begins, ends, gap)
    assert spans == sorted(spans)
    assert all(later[0] - earlier[1] > gap for earlier, later in itertools.pairwise(spans))
    for number, begin, end in zip(where, begins, ends, strict=True):
        assert spans[number][0] <= begin <= end <= spans[number][1]


def test_requests_begin_few_at_a_time_and_become_more() -> None:
    """A small server lets few connections wait. The others would come a second later."""
    store, events, lock = ObjectStore(), list[str](), threading.Lock()
    few, many = threading.Event(), threading.Event()

    def request() -> None:
        with lock:
            events.append("asked")
            running = events.count("asked") - events.count("answered")
            if running == stores.CONNECTIONS:
                few.set()
            if running == stores.MAX_REQUESTS:
                many.set()
        few.wait(60)
        if len(events) > 2 * stores.MAX_REQUESTS:
            many.wait(60)
        with lock:
            events.append("answered")

    with ThreadPoolExecutor(3 * stores.MAX_REQUESTS) as threads:
        asked = [threads.submit(store._with_retries, "http://host/a", request) for _ in range(4 * stores.MAX_REQUESTS)]
    assert [one.result() for one in asked] == [None] * len(asked)
    assert events[:5] == ["asked"] * stores.CONNECTIONS + ["answered"]
    running = list(itertools.accumulate(1 if event == "asked" else -1 for event in events))
    assert max(running) == stores.MAX_REQUESTS


@pytest.mark.parametrize("is_local", [True, False])
def test_parts_and_streams_of_a_file_have_its_bytes(served: Served, tmp_path: Path, is_local: bool) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    store, url = ObjectStore(), f"{served.url}/a.bin"
    file: ShardFile = LocalFile(str(tmp_path / "a.bin")) if is_local else RemoteFile(store, url, store.stat(url))
    size, begins, ends = len(CONTENT), [900, 0, 7, 9990, 40], [950, 1, 7, 10_000, 45]
    assert file.size == size
    assert file.ranges(begins, ends) == [CONTENT[begin:end] for begin, end in zip(begins, ends, strict=True)]
    stream = file.stream()
    assert stream.read(3) == CONTENT[:3]
    assert stream.seek(-5, io.SEEK_END) == size - 5 and stream.read() == CONTENT[-5:]
    stream.seek(100)
    assert stream.read(10) == CONTENT[100:110] and stream.tell() == 110
    assert stream.seek(size + 9) and stream.read(1) == b""
    file.kept["table"] = object()  # what a format keeps goes with the file
    file.close()
    assert not file.kept
    assert file.ranges([7], [20]) == [CONTENT[7:20]]  # by a thread that was about to read


def test_a_file_that_was_cut_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.tar"
    path.write_bytes(CONTENT)
    file = LocalFile(str(path))
    path.write_bytes(CONTENT[:50])
    with pytest.raises(ShardError, match=r"cut\.tar ends within bytes 40 to 60, of which 10 are there"):
        file.ranges([0, 40], [10, 60])
    file.close()
    file.close()
    with pytest.raises(ShardError, match=r"nothing\.tar: the shard is missing .*put it back") as caught:
        LocalFile(str(tmp_path / "nothing.tar"))
    assert isinstance(caught.value, FileNotFoundError) and isinstance(caught.value.__cause__, FileNotFoundError)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ShardError, match="pip install pyarrow"):
        ShardDataset(tmp_path / "a.parquet", index_folder=tmp_path)


def test_a_url_is_shown_without_what_it_hides_and_options_without_their_values() -> None:
    for url, expected in (
        ("/data/a b?.tar", "/data/a b?.tar"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        ("https://me:pass@host:80/a.tar?sig=1&b=2#x", "https://host:80/a.tar"),
        ("ftp://token@host/a@b.tar", "ftp://host/a@b.tar"),
    ):
        assert shown(url) == expected
    options = {"key": "AKIA1234", "client": {"headers": [("Authorization", "Bearer abcdef")]}, "anon": False, "n": "ab"}
    text = "403 for AKIA1234 with Bearer abcdef at https://u:p@h/x?sig=9, see https://h/y?z (ab)"
    assert redacted(text, options) == "403 for *** with *** at https://h/x see https://h/y (ab)"


@pytest.mark.skipif(sys.platform == "win32", reason="links need a permission there")
def test_a_link_that_leads_back_gives_no_shard_twice(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for name in ("data/a/a.txt", "other/b.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "broken").symlink_to(tmp_path / "none")
    pattern = f"{tmp_path}/data/**/*.txt"
    assert list(ShardDataset(pattern, index_folder=tmp_path / "indexes")) == ["data/a/a.txt", "other/b.txt"]
    (tmp_path / "other" / "back").symlink_to(tmp_path / "data")
    with pytest.raises(ShardError, match=r"link/back: this link leads back to a folder that it is in\. Remove"):
        ShardDataset(pattern, index_folder=tmp_path / "indexes")


def test_an_index_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "write_whole", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ShardError, match=r"a\.index cannot be written \(.*No space left on device\): free space"):
        ObjectStore().write(str(tmp_path / "a.index"), b"")
