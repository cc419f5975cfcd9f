"""Spawned workers from the trainer's side: a ``multiprocess`` process whose child does not import ``multiprocess``.

    SpawnedProcess(number, num_workers, conn).start()
        a bare interpreter, with ``theirs`` and the ends of two pipes
        --pickled dict-->  workers/spawned.py

All that comes after the start (join, kill, exit code, sentinel) is ``multiprocess``'s own. Not on Windows, where
handles take another way, and not in a frozen program, whose interpreter takes no ``-c``: those get its own process.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from multiprocess import process, resource_tracker, spawn, util
from multiprocess.context import SpawnProcess

AVAILABLE = sys.platform != "win32" and not getattr(sys, "frozen", False)

# The path first: without it the library itself might not be found.
_PROGRAM = (
    "import pickle, sys; orders = pickle.load(open({pipe}, 'rb')); sys.path = orders['path']; "
    "from sharded_loader.workers.spawned import main; main(orders)"
)

if AVAILABLE:
    from multiprocess import popen_spawn_posix

    class _Popen(popen_spawn_posix.Popen):  # type: ignore[misc]
        def _launch(self, worker: SpawnedProcess) -> None:
            # Where one runs. None is started for a worker, which makes nothing that it would look after: 20 ms, 11 MB.
            tracker = resource_tracker._resource_tracker._fd
            data = spawn.get_preparation_data(worker.name)
            ends: list[int] = []
            try:
                ends += os.pipe()
                ends += os.pipe()
                sentinel, alive, source, orders = ends
                program = _PROGRAM.format(pipe=source)
                command = [spawn.get_executable(), *util._args_from_interpreter_flags(), "-c", program]
                inherited = [worker.conn.fileno(), source, alive, *([] if tracker is None else [tracker])]
                self.pid = util.spawnv_passfds(command[0], [*command, "--multiprocessing-fork"], inherited)
                self.sentinel = sentinel
                with open(orders, "wb", closefd=False) as stream:
                    pickle.dump(
                        {
                            "path": data["sys_path"],
                            "argv": data["sys_argv"],
                            "dir": data["dir"],
                            "orig_dir": data["orig_dir"],
                            "name": worker.name,
                            "authkey": bytes(process.current_process().authkey),
                            "tracker": tracker,
                            "fd": worker.conn.fileno(),
                            "alive": alive,
                            "number": worker.number,
                            "num_workers": worker.num_workers,
                        },
                        stream,
                    )
            finally:
                for end in ends[1:]:
                    os.close(end)
                if ends:
                    self.finalizer = util.Finalize(self, util.close_fds, ends[:1])


class SpawnedProcess(SpawnProcess):  # type: ignore[misc]
    """A worker's process, before and after its start.

    Args:
        number: of the worker.
        num_workers: how many there are.
        conn: the worker's end of the pipe; closed by the caller when the process has started.
    """

    def __init__(self, number: int, num_workers: int, conn: Any) -> None:
        super().__init__(name=f"sharded_loader-worker-{number}", daemon=True)
        self.number = number
        self.num_workers = num_workers
        self.conn = conn

    @staticmethod
    def _Popen(worker: SpawnedProcess) -> Any:
        return _Popen(worker)
