"""A server of files on this machine that answers ranges, and fails, stalls, truncates and forbids on purpose."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fsspec.asyn import get_loop

get_loop()  # fsspec's thread lives as long as the process: no test has left it behind


class Served:
    """What the server does.

    Attributes:
        files: the bytes by path, such as ``"/a.tar"``.
        fail: how many requests for bytes fail next, with this status.
        stall: seconds that each of the next ``stalls`` requests takes before it is answered.
        truncate: how many answers are cut in half next.
        status: of failures.
        asked: the (path, range) of each request for bytes.
        tag: of all files.
        knows_parts: whether it answers requests for parts, or always sends the whole file.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fail = self.truncate = self.stalls = 0
        self.status, self.stall = 503, 0.0
        self.asked: list[tuple[str, str | None]] = []
        self.tag = "first"
        self.knows_parts = True
        self.lock = threading.Lock()
        self.url = ""

    def takes(self, name: str) -> bool:
        """Whether one more of these is due."""
        with self.lock:
            left = getattr(self, name)
            if left:
                setattr(self, name, left - 1)
            return bool(left)


@contextmanager
def serving() -> Iterator[Served]:
    """A server while the block runs."""
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, with_bytes: bool) -> None:
            path = self.path.partition("?")[0]
            content = served.files.get(path)
            wanted = self.headers.get("Range")
            if with_bytes:
                with served.lock:
                    served.asked.append((path, wanted))
                if served.takes("stalls"):
                    time.sleep(served.stall)
                if served.takes("fail"):
                    return self._send(served.status, b"", with_bytes)
            if content is None:
                return self._send(404, b"", with_bytes)
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
            if match is None or not served.knows_parts:
                return self._send(200, content, with_bytes)
            begin, end = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            part = content[begin : end + 1]
            if with_bytes and served.takes("truncate"):
                part = part[: len(part) // 2]
            self._send(206, part, with_bytes, f"bytes {begin}-{end}/{len(content)}")
            return None

        def _send(self, status: int, content: bytes, with_bytes: bool, part: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{served.tag}"')
            if part:
                self.send_header("Content-Range", part)
            self.end_headers()
            if with_bytes:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
