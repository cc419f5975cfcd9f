"""The first lines of a spawned worker: a bare interpreter becomes one, without importing ``multiprocess``.

    trainer: pools/spawning.py  --pickled dict through a pipe-->  main(orders) -> worker.main

``multiprocess`` imports dill: 20 ms, half as long as NumPy takes, for things that a worker never does. Where the
user's dataset imports it after all, it finds itself as in any child process: name, authentication key, daemon.

BLAS and OpenMP are limited to one thread here, before NumPy is imported. Nothing may be imported at the top that
imports NumPy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import traceback
from typing import Any

from sharded_loader.process_hooks import call_after_import
from sharded_loader.workers.preload import THREADS

_SIZE = struct.Struct("!i")
_LONG_SIZE = struct.Struct("!Q")


class Connection:
    """The part of ``multiprocess.connection.Connection`` that a worker uses, with the same bytes on the wire.

    Args:
        fd: of a socket, taken over.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send_bytes(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        size = view.nbytes
        prefix = _SIZE.pack(size) if size <= 0x7FFFFFFF else _SIZE.pack(-1) + _LONG_SIZE.pack(size)
        if size > 16384:  # not worth a copy
            self._socket.sendall(prefix)
            self._socket.sendall(view)
        else:
            self._socket.sendall(prefix + view)

    def recv_bytes(self) -> bytearray:
        data = bytearray(self._receive_size())
        self._fill(memoryview(data))
        return data

    def recv_bytes_into(self, buffer: Any) -> int:
        size = self._receive_size()
        self._fill(memoryview(buffer).cast("B")[:size])
        return size

    def _receive_size(self) -> int:
        (size,) = _SIZE.unpack(self._fill(memoryview(bytearray(_SIZE.size))))
        if size == -1:
            (size,) = _LONG_SIZE.unpack(self._fill(memoryview(bytearray(_LONG_SIZE.size))))
        return int(size)

    def _fill(self, view: memoryview) -> memoryview:
        rest = view
        while rest.nbytes:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return view


def main(orders: dict[str, Any]) -> None:
    """Be a worker until the pipe is closed.

    Args:
        orders: what `spawning` sent.
    """
    os.environ.update(dict.fromkeys(THREADS, "1"))
    sys.argv = orders["argv"]
    os.chdir(orders["dir"])
    _close_stdin()
    call_after_import("multiprocess", lambda: _tell_multiprocess(orders))
    conn = Connection(orders["fd"])
    try:
        from sharded_loader.workers import worker
    except BaseException:
        _crash(conn, traceback.format_exc())
        raise SystemExit(1) from None
    worker.main(conn, orders["number"], orders["num_workers"], None, fresh=True, held=orders["alive"])


def _crash(conn: Connection, text: str) -> None:
    """As `worker` tells why it ends (`messages.CRASHED`), without NumPy, which may be what cannot be imported."""
    with contextlib.suppress(OSError):
        conn.send_bytes(struct.pack("!Icqq", 0, b"X", 0, 0) + text.encode(errors="replace"))


def _close_stdin() -> None:
    """As ``multiprocess`` does: several processes that read one terminal help nobody."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdin.close()
    with contextlib.suppress(OSError, ValueError):
        sys.stdin = open(os.open(os.devnull, os.O_RDONLY), encoding="utf-8", closefd=False)  # noqa: SIM115


def _tell_multiprocess(orders: dict[str, Any]) -> None:
    from multiprocess import process, resource_tracker

    current: Any = process.current_process()
    current._name = orders["name"]
    current._config.update(authkey=process.AuthenticationString(orders["authkey"]), daemon=True)
    process.ORIGINAL_DIR = orders["orig_dir"]
    resource_tracker._resource_tracker._fd = orders["tracker"]
