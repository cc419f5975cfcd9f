"""A web server of files that answers requests for parts, for benchmarks and tests.

    class Handler(RangeHandler)         a subclass says in `answer` what happens to a request
    serving(folder, speed, fault)       the files of a folder, by a process of its own, slowly, and with faults

To clients of S3, the folders inside the folder are buckets.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import random
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LATENCY = 0.02
"""Seconds before each answer of `serving`."""

REFUSED, CUT, NO_PARTS, CHANGED = "503", "cut", "no parts", "changed"
"""Faults: 30 % of the requests fail; 30 % of the answers are cut in the middle; the answer to each request is the whole
file; after a request for ``/change``, files of ``changed/`` take the place of those of the same name."""

COUNTS, CHANGE = "/counts", "/change"
"""Requests that do not count: how many bytes were sent and requests were answered, and the one of `CHANGED`."""


class RangeHandler(BaseHTTPRequestHandler):
    """Answers HEAD and GET.

    Attributes:
        tag: the etag of every file. None: none is said.
        modified: when every file was changed last. None: that is not said.
    """

    protocol_version = "HTTP/1.1"
    tag: str | None = "1"
    modified: str | None = None

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_bytes: bool) -> None:
        """Answer the request; without the bytes if it is a HEAD."""
        raise NotImplementedError

    def asked(self, size: int) -> tuple[int, int] | None:
        """Which bytes of a file are asked for, from and up to; None: all."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        return None if match is None else (int(match[1]), min(int(match[2] or size) + 1, size))

    def head(self, status: int, length: int, part: str | None = None, **headers: str) -> None:
        """Send everything before the bytes.

        Args:
            status: of the answer.
            length: how many bytes follow.
            part: which bytes of how many these are, such as "0-9/500".
            headers: others, with _ in place of -.
        """
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        if self.tag is not None:
            self.send_header("ETag", f'"{self.tag}"')
        if self.modified is not None:
            self.send_header("Last-Modified", self.modified)
        if part is not None:
            self.send_header("Content-Range", f"bytes {part}")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


def serve(folder: Path, speed: float | None, fault: str, ports: Any, sent: Any) -> None:
    """Answer requests for the files of a folder until the process is ended."""
    rng, is_changed = random.Random(0), False

    @functools.cache
    def content_of(path: str, changed: float) -> bytes:
        return Path(path).read_bytes()

    class Handler(RangeHandler):
        def answer(self, with_bytes: bool) -> None:
            nonlocal is_changed
            name = self.path.partition("?")[0].lstrip("/")
            if self.path in (COUNTS, CHANGE):
                is_changed = is_changed or self.path == CHANGE
                counts = json.dumps(list(sent)).encode()
                self.head(200, len(counts))
                self.wfile.write(counts)
                return None
            is_other = is_changed and fault == CHANGED and (folder / "changed" / name).exists()
            self.tag, path = ("2", folder / "changed" / name) if is_other else ("1", folder / name)
            with sent.get_lock():
                sent[1] += 1
            time.sleep(LATENCY)
            if fault == REFUSED and rng.random() < 0.3:
                return self.head(503, 0)
            if not path.is_file():
                return self.head(404, 0)
            content = memoryview(content_of(str(path), path.stat().st_mtime))
            size = len(content)
            begin, end = (None if fault == NO_PARTS else self.asked(size)) or (0, size)
            is_part = (begin, end) != (0, size)
            # MosaicML's forked workers would read the answers to each other on the connection of the main process.
            closes = {"Connection": "close"} if name.endswith("index.json") else {}
            part = f"{begin}-{end - 1}/{size}" if is_part else None
            self.head(206 if is_part else 200, end - begin, part, **closes)
            if with_bytes and fault == CUT and rng.random() < 0.3:
                end, self.close_connection = (begin + end) // 2, True
            if with_bytes:
                self.send(content[begin:end])
            return None

        def send(self, content: memoryview) -> None:
            with sent.get_lock():
                sent[0] += len(content)
            due = time.perf_counter()
            for at in range(0, len(content), 1 << 18):
                piece = content[at : at + (1 << 18)]
                self.wfile.write(piece)
                if speed:  # sleeping for each piece alone would add the time that writing took
                    due = max(due, time.perf_counter() - 0.01) + len(piece) / speed
                    time.sleep(max(0.0, due - time.perf_counter()))

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # of 5, connections beyond them are tried again after a second

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that goes away is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    ports.put(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def serving(folder: Path, speed: float | None, fault: str = "") -> Iterator[tuple[str, Any]]:
    """The URL of a folder, and how many bytes were sent and requests were answered."""
    context = multiprocessing.get_context("spawn")
    ports, sent = context.SimpleQueue(), context.Array("q", 2)
    server = context.Process(target=serve, args=(folder, speed, fault, ports, sent), daemon=True)
    server.start()
    port = ports.get()
    try:
        yield f"http://127.0.0.1:{port}", sent
    finally:
        server.terminate()
        server.join()
