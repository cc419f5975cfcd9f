"""A web server of files that answers requests for parts, for benchmarks and tests.

class Handler(RangeHandler): a subclass says in `answer` what happens to a request
"""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler
from typing import Any


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
