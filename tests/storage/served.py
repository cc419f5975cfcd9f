"""A server of files on this machine that answers ranges, and fails, stalls, truncates and forbids on purpose."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from fsspec.asyn import get_loop

from benchmarks.range_server import RangeHandler

get_loop()  # fsspec's thread lives as long as the process: no test has left it behind


class Served:
    """What the server does.

    Attributes:
        files: the bytes by path, such as ``"/a.tar"``.
        fail: how many requests for bytes fail next, with this status.
        stall: seconds that each of the next ``stalls`` requests takes before it is answered.
        truncate: how many answers are cut in half next.
        status: of failures.
        refuses: the status of all answers, those without bytes too; 0: the server does not refuse.
        asked: the (path, range) of each request for bytes.
        tag, modified: of all files; None: it is not said.
        headers: others, of answers with bytes and of failures, with _ in place of -.
        lie: takes the status, the bytes, and which they are ("0-9/500", or None), and gives others. None: no lies.
        after: called when the bytes of an answer are decided, before they are sent.
        knows_parts: whether it answers requests for parts, or always sends the whole file.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fail = self.truncate = self.stalls = self.refuses = 0
        self.status, self.stall = 503, 0.0
        self.asked: list[tuple[str, str | None]] = []
        self.tag: str | None = "first"
        self.modified: str | None = None
        self.headers: dict[str, str] = {}
        self.lie: Callable[[int, bytes, str | None], tuple[int, bytes, str | None]] | None = None
        self.after: Callable[[], None] = lambda: None
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
def listening(handler: type[RangeHandler]) -> Iterator[str]:
    """The URL of a server of these answers, while the block runs."""
    server = Server(handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
            if served.refuses:
                return self.head(served.refuses, 0)
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
            self.head(status, len(sent), part, **(served.headers if with_bytes else {}))
            if with_bytes:
                served.after()
                self.wfile.write(sent)
            return None

    with listening(Handler) as served.url:
        yield served
