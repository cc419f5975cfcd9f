"""Shards for tests, and a server of files on this machine that answers ranges, and fails, stalls and lies."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.asyn import get_loop

from benchmarks.range_server import RangeHandler
from sharded_loader import ShardCache, ShardDataset
from sharded_loader.storage import stores
from sharded_loader.storage.files import LocalFile, Stat
from sharded_loader.storage.stores import ObjectStore


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For modules that import it: the datasets and stores that a test has made are closed at its end."""
    made: list[Any] = []
    for kind in (ShardDataset, ObjectStore):

        def noting(self: Any, *args: Any, init: Any = kind.__init__, **options: Any) -> None:
            init(self, *args, **options)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", functools.wraps(kind.__init__)(noting))
    yield
    for one in made:
        one.close()


def tar(members: dict[str, bytes]) -> bytes:
    """A tar file of these members, in this order."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as out:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.write_bytes(tar(members))


def tar_of_numbers(numbers: range) -> bytes:
    """A tar file whose samples are these numbers as texts."""
    return tar({f"{number:03}.txt": b"%d" % number for number in numbers})


def number(sample: dict[str, Any]) -> int:
    """The number that a sample is."""
    return int(sample["txt"])


def place_of(cache: ShardCache, url: str, stat: Stat) -> Path:
    """The file that a shard is, or will be, in a cache."""
    return cache._path(url, stat)


def read_rows(format: Any, path: Path, rows: list[int]) -> Any:
    """Samples of a shard of this machine."""
    file = LocalFile(str(path))
    try:
        return format.read(file, format.index(file), rows)
    finally:
        file.close()


def write_mds(path: Path, columns: dict[str, tuple[str, int | None]], rows: list[list[bytes]]) -> None:
    """An MDS file. Columns have an encoding, and a size where it is fixed; rows the encoded columns of each sample."""
    names = sorted(columns)
    config = {
        "column_names": names,
        "column_encodings": [columns[name][0] for name in names],
        "column_sizes": [columns[name][1] for name in names],
    }
    samples = []
    for row in rows:
        free = [len(value) for name, value in zip(names, row, strict=True) if columns[name][1] is None]
        samples.append(np.array(free, "<u4").tobytes() + b"".join(row))
    text = json.dumps(config).encode()
    begin = 4 * (len(rows) + 2) + len(text)
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4")
    path.write_bytes(np.array([len(rows)], "<u4").tobytes() + offsets.tobytes() + text + b"".join(samples))


get_loop()  # fsspec's thread lives as long as the process: no test has left it behind


@dataclass
class Served:
    """What the server does. Of the requests for bytes that come next, so many fail, are cut in half, or stall."""

    files: dict[str, bytes] = field(default_factory=dict)  # by path, such as "/a.tar"
    fail: int = 0
    truncate: int = 0
    stalls: int = 0
    stall: float = 0.0  # seconds
    pace: float = 0.0  # seconds before each tenth of the bytes
    status: int = 503  # of failures
    refuses: int = 0  # the status of all answers, those without bytes too; 0: the server does not refuse
    moved: dict[str, str] = field(default_factory=dict)  # where it redirects to, by path
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (path, range) of each request for bytes
    heard: list[str] = field(default_factory=list)  # the path and all headers of each request
    tag: str | None = "first"  # of all files; None: it is not said
    modified: str | None = None
    headers: dict[str, str] = field(default_factory=dict)  # of answers with bytes and of failures; _ in place of -
    lie: Callable[[int, bytes, str | None], tuple[int, bytes, str | None]] | None = None
    """Takes the status, the bytes, and which they are ("0-9/500", or None), and gives others."""
    size: int | None = None  # of all files, as answers without bytes say; None: the right one
    after: Callable[[], Any] = lambda: None  # called when the bytes of an answer are decided, before they are sent
    knows_parts: bool = True  # else it always sends the whole file
    lock: Any = field(default_factory=threading.Lock)
    url: str = ""

    def takes(self, name: str) -> bool:
        """Whether one more of these is due."""
        with self.lock:
            left = getattr(self, name)
            if left:
                setattr(self, name, left - 1)
            return bool(left)


class Server(ThreadingHTTPServer):
    """Ends its connections too when it is closed: clients would keep theirs for 15 seconds."""

    daemon_threads = True

    def __init__(self, handler: type[RangeHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving() -> Iterator[Served]:
    """A server while the block runs."""
    served = Served()

    class Handler(RangeHandler):
        disable_nagle_algorithm = True  # otherwise the bytes wait 40 ms for the client to acknowledge the head

        @property
        def tag(self) -> str | None:  # type: ignore[override]
            return served.tag

        @property
        def modified(self) -> str | None:  # type: ignore[override]
            return served.modified

        def answer(self, with_bytes: bool) -> None:
            path = self.path.partition("?")[0]
            content = served.files.get(path)
            served.heard.append(f"{self.path}\n{self.headers}")
            if served.refuses:
                return self.head(served.refuses, 0)
            if path in served.moved:
                return self.head(307, 0, Location=served.moved[path])
            if with_bytes:
                with served.lock:
                    served.asked.append((path, self.headers.get("Range")))
                if served.takes("stalls"):
                    threading.Event().wait(served.stall)
                if served.takes("fail"):
                    return self.head(served.status, 0, **served.headers)
            if content is None:
                return self.head(404, 0)
            size, asked = len(content), self.asked(len(content)) if served.knows_parts else None
            begin, end = asked or (0, size)
            sent = content[begin:end]
            if asked and with_bytes and served.takes("truncate"):
                sent = sent[: len(sent) // 2]
            status, part = (206, f"{begin}-{end - 1}/{size}") if asked else (200, None)
            if with_bytes and served.lie is not None:
                status, sent, part = served.lie(status, sent, part)
            said = len(sent) if with_bytes or served.size is None else served.size
            self.head(status, said, part, **(served.headers if with_bytes else {}))
            if with_bytes:
                served.after()
                step = max(1, -(-len(sent) // 10)) if served.pace else len(sent) or 1
                for at in range(0, len(sent), step):
                    threading.Event().wait(served.pace)
                    self.wfile.write(sent[at : at + step])
            return None

    server = Server(Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(name="served")
def serves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of the files in `SERVED` of the module, if it has such; what fails is tried again soon."""
    monkeypatch.setattr(stores, "PAUSE", 0.01)
    with serving() as found:
        found.files.update(getattr(request.module, "SERVED", {}))
        yield found
