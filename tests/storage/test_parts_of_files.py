"""A file that is replaced, and servers that lie: the right bytes of one version, or an error that names the file."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import pickle
import random
import socket
import warnings
import zlib
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem
from hypothesis import given
from hypothesis import strategies as st
from shards import Served, closed, serves, tar  # noqa: F401

from sharded_loader import ShardCache, ShardDataset
from sharded_loader.storage import files, parts, stores
from sharded_loader.storage.files import ShardError, Stat
from sharded_loader.storage.parts import BadResponse, Landing, is_same, joined, tag_of, with_tags
from sharded_loader.storage.stores import ObjectStore

OLD = random.Random(1).randbytes(500_000)
NEW = OLD[::-1]
FIRST, SECOND = "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2020 07:28:00 GMT"


SERVED = {"/a.bin": OLD}


def replace(served: Served) -> None:
    """Put another file of the same size in its place."""
    served.files = {name: content[::-1] for name, content in served.files.items()}
    if served.tag is not None:
        served.tag = "second"
    if served.modified is not None:
        served.modified = SECOND


def known(served: Served) -> tuple[ObjectStore, str, Stat]:
    """A store, and the file and its version as it has seen it."""
    store, url = ObjectStore(), f"{served.url}/a.bin"
    return store, url, store.stat(url)


def fetched(store: ObjectStore, url: str, stat: Stat) -> bytes:
    file = io.BytesIO()
    store.fetch(url, file, stat)
    return file.getvalue()


TAGS = [("first", None), (None, FIRST), ("first", FIRST)]


@pytest.mark.parametrize(("tag", "modified"), TAGS, ids=["ETag", "Last-Modified", "both"])
def test_no_part_of_another_version_is_read(served: Served, tag: str | None, modified: str | None) -> None:
    served.tag, served.modified = tag, modified
    store, url, stat = known(served)
    assert store.ranges(url, [10], [20], stat) == [OLD[10:20]]
    replace(served)
    asked = len(served.asked)
    for begins, ends in (([10], [20]), ([10, 300_000], [20, 300_010])):
        with pytest.raises(ShardError, match=r"a\.bin has changed since the dataset was made.*make the dataset again"):
            store.ranges(url, begins, ends, stat)
    # The second part of two is left out if the first one has failed by then.
    assert store.retries == 0 and len(served.asked) - asked in (2, 3)
    assert store.ranges(url, [10], [20]) == [NEW[10:20]]  # of any version


@pytest.mark.costly(6)
@pytest.mark.parametrize(("tag", "modified"), TAGS, ids=["ETag", "Last-Modified", "both"])
@pytest.mark.parametrize("number", [1, 4, 6])  # of 10; up to 3 more may have been asked for
def test_a_file_that_is_replaced_while_it_is_fetched(
    served: Served, monkeypatch: pytest.MonkeyPatch, tag: str | None, modified: str | None, number: int
) -> None:
    monkeypatch.setattr(stores, "PIECE", 50_000)
    served.tag, served.modified = tag, modified
    store, url, stat = known(served)
    assert fetched(store, url, stat) == OLD
    done = len(served.asked) + number
    served.after = lambda: replace(served) if len(served.asked) >= done and served.files["/a.bin"] == OLD else None
    with pytest.raises(ShardError, match=r"a\.bin has changed since"):
        fetched(store, url, stat)


def test_a_server_whose_answers_have_no_tag_is_asked_once_more_at_the_end(served: Served) -> None:
    store, url, stat = known(served)
    # The tag is left out of the answers with bytes alone.
    served.lie = lambda *answer: setattr(served, "tag", None) or answer
    served.after = lambda: setattr(served, "tag", "first")
    assert fetched(store, url, stat) == OLD and store.ranges(url, [10], [20], stat) == [OLD[10:20]]
    served.after = lambda: replace(served) or setattr(served, "tag", "second")
    with pytest.raises(ShardError, match=r"a\.bin has changed since"):
        store.ranges(url, [10], [20], stat)


def test_a_file_system_without_tags_in_its_answers_is_asked_once_more() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/versions/a.bin", OLD)
    try:
        store = ObjectStore()
        [(url, stat)] = store.find("memory://versions/*.bin").items()
        assert store.stat(url) == stat  # a list and a question say the same
        assert store.ranges(url, [10], [20], stat) == [OLD[10:20]]
        assert fetched(store, url, stat) == OLD
        system.pipe("/versions/a.bin", NEW)
        for read in (lambda: store.ranges(url, [10], [20], stat), lambda: fetched(store, url, stat)):
            with pytest.raises(ShardError, match=r"a\.bin has changed since"):
                read()
    finally:
        system.rm("/versions", recursive=True)


def test_a_file_system_that_leaves_out_the_time_is_asked_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    info = HTTPFileSystem._info

    async def older(*arguments: Any, **named: Any) -> dict[str, Any]:
        return {name: value for name, value in (await info(*arguments, **named)).items() if name != "Last-Modified"}

    monkeypatch.setattr(HTTPFileSystem, "_info", older)
    served.tag, served.modified = None, FIRST
    store, url, stat = known(served)
    assert stat == Stat(len(OLD), f"lastmodified {FIRST}") and store.ranges(url, [10], [20], stat) == [OLD[10:20]]


def test_a_commit_of_hugging_face_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = ObjectStore(), []
    monkeypatch.setattr(ObjectStore, "_part", lambda self, url, begin, end, stat: (bytes(end - begin), False))
    monkeypatch.setattr(ObjectStore, "_open", lambda self, url: (asked.append(url) or io.BytesIO(), url))
    store.ranges(f"hf://datasets/me/mine@{'0af' * 13}0/a.tar", [0], [2], Stat(9, "blobid 1"))
    assert not asked
    with pytest.raises(AttributeError):  # what stands for the file system has no tags
        store.ranges("hf://datasets/me/mine@main/a.tar", [0], [2], Stat(9, "blobid 1"))
    assert len(asked) == 1


@pytest.mark.parametrize(("tag", "modified"), [*TAGS, (None, None)], ids=["ETag", "Last-Modified", "both", "neither"])
@pytest.mark.parametrize("is_cached", [False, True], ids=["parts", "cache"])
def test_a_later_dataset_reads_the_later_version_and_an_earlier_one_never(
    served: Served, tmp_path: Path, tag: str | None, modified: str | None, is_cached: bool
) -> None:
    served.tag, served.modified = tag, modified
    cache, sent = ShardCache(tmp_path / "cache", "1 MB") if is_cached else None, []
    for texts in ([b"a" * 700, b"b" * 10], [b"x" * 10, b"y" * 700]):
        served.files = {"/a.tar": tar({f"{number}.txt": text for number, text in enumerate(texts)})}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dataset = ShardDataset(f"{served.url}/a.tar", cache=cache, index_folder=tmp_path / "indexes")
        assert [sample["txt"] for sample in dataset] == texts
        dataset.close()
        sent.append(pickle.dumps(dataset))
        told = [str(one.message) for one in caught]
        assert len(told) == (tag is None and modified is None), told
        assert all("neither an ETag nor the time" in text and "/a.tar" in text for text in told)
        served.tag, served.modified = tag and "second", modified and SECOND
    for path in tmp_path.glob("cache/*.shard"):
        path.unlink()
    if tag or modified:
        assert len(list((tmp_path / "indexes").glob("*.arrays"))) == 2
        with pytest.raises(ShardError, match=r"a\.tar has changed since the dataset was made"):
            pickle.loads(sent[0])[0]


TAGGED: list[tuple[dict[str, Any], str]] = [
    ({"ETag": '"abc"', "LastModified": "x"}, "abc"),  # s3fs
    ({"ETag": "", "LastModified": datetime.fromtimestamp(5, timezone.utc)}, "lastmodified 5.0"),
    ({"etag": 'W/"abc"', "last_modified": "x"}, "abc"),  # adlfs
    ({"generation": "17", "updated": "x"}, "generation 17"),  # gcsfs
    ({"blob_id": "f00", "lfs": None, "xet_hash": None, "last_commit": None}, "blobid f00"),  # Hugging Face
    ({"xet_hash": "f00", "blob_id": None}, "xethash f00"),
    ({"mtime": 0}, "mtime 0"),
    ({"modify": "2015"}, "modify 2015"),  # ftp
    ({"size": 5, "type": "file"}, ""),
]


def test_file_systems_have_their_own_names_for_tags() -> None:
    assert [tag_of(info) for info, _ in TAGGED] == [tag for _, tag in TAGGED]
    assert is_same("lastmodified 1", "lastmodified 2") is False and is_same("abc", "lastmodified 2") is None
    found = {"http://h/a.tar": Stat(1, ""), "http://h/b.tar": Stat(1, "x"), "http://h/c.tar?key=s": Stat(1, "")}
    with pytest.warns(UserWarning, match=r"http://h/a\.tar \(and of 1 more shards\)"):
        first, second, third = with_tags(found)
    assert second == Stat(1, "x") and first.tag != third.tag != ""


LIES: dict[str, tuple[Callable[[int, bytes, str | None], tuple[int, bytes, str | None]], str]] = {
    "other bytes": (lambda _, content, part: (206, content, "0-9/500000"), "asked for.*says that it sends"),
    "no Content-Range": (lambda _, content, part: (206, content, None), "asked for.*says that it sends"),
    "nonsense in Content-Range": (lambda _, content, part: (206, content, "x"), "asked for.*says that it sends"),
    "more in Content-Range": (lambda _, content, part: (206, OLD[100:], "100-499999/500000"), "says that it sends"),
    "another size": (lambda _, content, part: (206, content, "100-109/9"), "has changed.*had 500,000"),
    "a page of an error": (lambda _, content, part: (200, b"<html>" * 90, None), "540 bytes came for the whole"),
    "a short body": (lambda _, content, part: (206, content[:5], part), "5 bytes came where 10 were asked for"),
    "no body": (lambda _, content, part: (206, b"", part), "0 bytes came where 10 were asked for"),
    "more bytes": (lambda _, content, part: (206, b"more" + content, part), "14 bytes came where 10 were asked for"),
    "nothing to send": (lambda _, content, part: (204, b"", None), "an answer without bytes came .HTTP 204"),
    "a redirect to nowhere": (lambda _, content, part: (302, b"", None), "an answer without bytes came .HTTP 302"),
    "no such range": (lambda _, content, part: (416, b"", None), "has changed.*HTTP 416"),
    "bad request": (lambda _, content, part: (400, b"", None), "400"),
}
ONCE = ("other bytes", "no Content-Range", "a page of an error", "a short body", "no body", "more bytes")
"""Those after which the server is asked again."""


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_asked_again_and_named(served: Served, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    store, url, stat = known(served)
    lying, message = LIES[lie]
    if lie in ONCE:
        left = [1]
        served.lie = lambda *answer: lying(*answer) if left and left.pop() else answer
        assert store.ranges(url, [100], [110], stat) == [OLD[100:110]] and store.retries == 1
    monkeypatch.setattr(stores, "TRIES", 2)
    served.lie = lying
    with pytest.raises(ShardError, match=rf"a\.bin.*{message}"):
        store.ranges(url, [100], [110], stat)
    served.lie = None
    assert store.ranges(url, [100], [110], stat) == [OLD[100:110]]


WHOLE: dict[str, tuple[Callable[[int, bytes, str | None], tuple[int, bytes, str | None]], str]] = {
    "a short body": (lambda _, content, part: (206, content[:-5], part), "where .* were asked for"),
    "more bytes": (lambda _, content, part: (206, content + b"more", part), "more bytes came than were asked for"),
    "other bytes": (lambda _, content, part: (206, content, "7-9/500000"), "asked for.*says that it sends"),
    "a page of an error": (lambda _, content, part: (200, b"<html>" * 90, None), "540 bytes came for the whole"),
    "nothing to send": (lambda _, content, part: (204, b"", None), "an answer without bytes came"),
}


@pytest.mark.parametrize("lie", WHOLE)
def test_a_file_is_fetched_whole_or_not_at_all_whatever_the_server_says(
    served: Served, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Chunks of a bad answer may be in the file already. Those of the next attempt replace them."""
    monkeypatch.setattr(stores, "PIECE", 150_000)
    store, url, stat = known(served)
    lying, message = WHOLE[lie]
    left = [1, 1]
    served.lie = lambda *answer: lying(*answer) if left and left.pop() else answer
    file = io.BytesIO()
    assert store.fetch(url, file, stat) == zlib.crc32(OLD) and file.getvalue() == OLD and store.retries == 2
    monkeypatch.setattr(stores, "TRIES", 2)
    served.lie = lying
    with pytest.raises(ShardError, match=rf"a\.bin.*{message}"):
        store.fetch(url, io.BytesIO(), stat)


def test_a_file_that_cannot_be_written_is_no_fault_of_the_server(served: Served) -> None:
    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    store, url, stat = known(served)
    with pytest.raises(OSError, match="No space left on device") as caught:
        store.fetch(url, Full(), stat)
    assert type(caught.value) is OSError and caught.value.errno == errno.ENOSPC and store.retries == 0


def test_an_attempt_that_was_given_up_writes_nothing_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, kept, landings = HTTPFileSystem._cat_file, [1], list[Landing]()

    async def fails_once(*arguments: Any, **named: Any) -> bytes:
        found: bytes = await reads(*arguments, **named)
        if kept and kept.pop():
            raise TimeoutError("it took too long")
        return found

    class Noted(Landing):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            landings.append(self)

    monkeypatch.setattr(parts, "Landing", Noted)
    monkeypatch.setattr(HTTPFileSystem, "_cat_file", fails_once)
    store, url, stat = known(served)
    assert fetched(store, url, stat) == OLD and store.retries == 1
    assert [landing.is_over for landing in landings] == [True, False]
    with pytest.raises(BadResponse):
        landings[0].take(b"late")


def test_bytes_of_another_version_never_reach_the_file(served: Served) -> None:
    store, url, stat = known(served)
    replace(served)
    file = io.BytesIO()
    with pytest.raises(ShardError, match=r"a\.bin has changed since"):
        store.fetch(url, file, stat)
    assert file.getvalue() == b""


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_checksums_of_pieces_are_joined_to_that_of_the_file(pieces: list[bytes]) -> None:
    found = 0
    for piece in pieces:
        found = joined(found, zlib.crc32(piece), len(piece))
    assert found == zlib.crc32(b"".join(pieces))


def test_a_server_that_ignores_ranges_is_named_once_and_sends_the_right_bytes(served: Served, caplog: Any) -> None:
    served.knows_parts = False
    store, url, stat = known(served)
    assert fetched(store, url, stat) == OLD
    assert store.ranges(url, [100], [110], stat) == store.ranges(url, [100], [110], stat) == [OLD[100:110]]
    [record] = caplog.records
    assert f"the server of {served.url} ignores requests for parts" in record.message and "ShardCache" in record.message
    served.files["/a.bin"] += b"longer"
    with pytest.raises(ShardError, match=r"a\.bin: 500,006 bytes came for the whole file, which has 500,000"):
        store.ranges(url, [100], [110], stat)


@pytest.mark.parametrize("status", [200, 206])
def test_compressed_answers_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(stores, "TRIES", 2)
    store, url, stat = known(served)
    served.lie = lambda _, content, part: (status, gzip.compress(content), part if status == 206 else None)
    served.headers = {"Content_Encoding": "gzip"}
    with pytest.raises(ShardError, match=r"a\.bin: the server sends it compressed \(Content-Encoding: gzip\)"):
        store.ranges(url, [100], [110], stat)


def test_redirects_are_followed(served: Served) -> None:
    store, stat = ObjectStore(), Stat(len(OLD), "first")
    served.fail, served.status, served.headers = 1, 307, {"Location": f"{served.url}/a.bin"}
    assert store.ranges(f"{served.url}/moved.bin", [100], [110], stat) == [OLD[100:110]]
    served.fail, served.headers = 1000, {"Location": f"{served.url}/moved.bin"}
    with pytest.raises(ShardError, match=r"moved\.bin: TooManyRedirects"):
        store.ranges(f"{served.url}/moved.bin", [100], [110], stat)


@pytest.mark.slow
def test_a_slow_answer_is_awaited_as_long_as_bytes_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STALL", 5.0)
    served.pace = 0.7  # ten times: longer than a stall altogether
    store, url, stat = known(served)
    assert fetched(store, url, stat) == OLD and store.retries == 0


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STALL", 0.2)
    monkeypatch.setattr(stores, "TRIES", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.bin"
        with pytest.raises(ShardError, match=r"a\.bin: .*Timeout.*tried 2 times"):
            ObjectStore().stat(url)


@pytest.mark.slow
def test_a_server_that_trickles_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STALL", 0.2)
    monkeypatch.setattr(stores, "TRIES", 2)
    served.stalls, served.stall = 2, 1.0
    with pytest.raises(ShardError, match=r"a\.bin: .*Timeout.*tried 2 times"):
        ObjectStore().ranges(f"{served.url}/a.bin", [100], [110], Stat(len(OLD), "first"))


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_asks_for_a_pause_gets_it(served: Served, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    pauses: list[float] = []
    # Not of the module itself: threads of other tests may sleep too.
    monkeypatch.setattr(stores, "time", SimpleNamespace(sleep=pauses.append))
    store, url = ObjectStore(), f"{served.url}/a.bin"
    for said, least, most in (("7", 7, 7), ("9999", 60, 60), ("soon", 0, 0.2), ("-5", 0, 0.2), ("\xc2\xb2", 0, 0.2)):
        served.fail, served.status, served.headers = 1, status, {"Retry_After": said}
        assert store.ranges(url, [100], [110]) == [OLD[100:110]]
        assert least <= pauses.pop() <= most, said


@pytest.mark.parametrize(("status", "error"), [(403, PermissionError), (404, FileNotFoundError), (503, ShardError)])
def test_a_server_that_describes_no_file_says_why(
    served: Served, monkeypatch: pytest.MonkeyPatch, status: int, error: type[OSError]
) -> None:
    monkeypatch.setattr(stores, "TRIES", 2)
    served.refuses = status
    with pytest.raises(error, match=r"a\.bin") as caught:
        ObjectStore().stat(f"{served.url}/a.bin")
    assert isinstance(caught.value, error) and (status == 404 or str(status) in str(caught.value))


def test_a_file_that_is_empty_only_by_its_description_is_an_error(served: Served, tmp_path: Path) -> None:
    """Some web frameworks answer HEAD without bytes, and say how many those are. A text would have no lines."""
    served.files.update({"/full.txt": b"one line\n", "/empty.txt": b""})
    served.size = 0
    with pytest.raises(ShardError, match=r"full\.txt: the server says that it has 0 bytes \(HEAD\), and sends some"):
        ShardDataset(f"{served.url}/full.txt", index_folder=tmp_path)
    for status in (200, 416):
        served.lie = lambda *answer, status=status: (status, b"", None)
        assert len(ShardDataset(f"{served.url}/empty.txt", index_folder=tmp_path)) == 0


def test_a_web_page_is_no_text(served: Served, tmp_path: Path) -> None:
    """A portal answers every request with one, those for a description too."""
    served.files["/a.txt"] = b"<!DOCTYPE html>\n<title>Log in</title>\n"
    with pytest.raises(ShardError, match=r"a\.txt is a web page: see what it says"):
        len(ShardDataset(f"{served.url}/a.txt", index_folder=tmp_path))


def test_a_server_may_have_an_address_with_colons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which fsspec takes for a chain of file systems."""
    monkeypatch.setattr(HTTPFileSystem, "info", lambda self, path, **how: {"name": path, "size": 3, "ETag": "one"})
    url = "http://[::1]:80/a.txt"
    assert ObjectStore().find(url) == {url: Stat(3, "one")}
    assert files.joined("http://[::1]:80/list.json", [url]) == [url]
    with pytest.raises(ShardError, match="may name only"):
        files.joined("http://[::1]:80/list.json", ["http://[::1]:80/a::file:///b"])


def test_a_description_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trickle(self: Any, path: str, **options: Any) -> None:
        await asyncio.sleep(600)

    monkeypatch.setattr(HTTPFileSystem, "_info", trickle)
    monkeypatch.setattr(stores, "STALL", 0.05)
    monkeypatch.setattr(stores, "TRIES", 1)
    with pytest.raises(ShardError, match=r"a\.bin: FSTimeoutError: the answer took too long, or broke off \(tried"):
        ObjectStore().stat("http://host/a.bin")


def test_a_list_of_a_web_server_says_no_sizes(served: Served) -> None:
    served.files["/"] = b'<a href="a.bin">a.bin</a><a href="b.bin">b.bin</a><a href="c.txt">c</a>'
    served.files["/b.bin"] = b"123"
    served.headers = {"Content_Type": "text/html"}
    found = ObjectStore().find(f"{served.url}/*.bin")
    assert list(found.values()) == [Stat(len(OLD), "first"), Stat(3, "first")]
