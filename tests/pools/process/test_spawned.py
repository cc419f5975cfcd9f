"""The first lines of a new interpreter: a connection without ``multiprocess``, and what a forkserver imports."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from pathlib import Path

import multiprocess
import pytest

from sharded_loader.base.system import ONE_THREAD
from sharded_loader.pools.process import spawned
from sharded_loader.pools.process.spawned import PRELOAD, Connection

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 3_000_000])
def test_a_worker_s_connection_speaks_as_multiprocess_does(size: int) -> None:
    ours, theirs = multiprocess.Pipe()
    connection = Connection(os.dup(theirs.fileno()))
    data = os.urandom(size)
    buffer = bytearray(size)
    try:
        for send, receive in ((ours, connection), (connection, ours)):
            for read in (receive.recv_bytes, lambda end=receive: buffer[: end.recv_bytes_into(buffer)]):
                thread = threading.Thread(target=send.send_bytes, args=(data,))
                thread.start()
                assert read() == data
                thread.join()
        ours.close()
        with pytest.raises(EOFError):
            connection.recv_bytes()
    finally:
        theirs.close()
        connection.close()


def test_a_frame_of_more_than_two_gigabytes_has_a_long_size() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(theirs.detach())
    with ours:
        ours.sendall(struct.pack("!iQ", -1, 3) + b"abc")
        assert connection.recv_bytes() == b"abc"
    connection.close()


def test_a_forkserver_imports_what_it_is_told_with_one_thread_and_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanted_module.py").write_text("import os\nthreads = os.environ['OMP_NUM_THREADS']\n")
    (tmp_path / "broken_module.py").write_text("raise SystemExit(3)\n")
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    request = {"modules": ["broken_module", "no_such_module", "wanted_module"], "path": [str(tmp_path), *sys.path]}
    monkeypatch.setenv(PRELOAD, json.dumps(request))
    before = list(sys.path)
    spawned._preload()
    assert sys.modules.pop("wanted_module").threads == "1"
    assert sys.path == before and PRELOAD not in os.environ
    assert {name: os.environ[name] for name in ONE_THREAD if name in os.environ} == {"OMP_NUM_THREADS": "7"}
