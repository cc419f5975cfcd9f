"""The library's own forks: a ``multiprocess`` process that Python does not warn about.

    trainer:  ForkedProcess(...).start() -> the template
    template: ForkedProcess(...).start() -> a worker

From Python 3.12 on, a fork beside threads is followed by a DeprecationWarning. Every program with torch has threads.
The user cannot act on the warning: the template runs only this library's code, and it has one thread. pytest shows it,
and it would be counted among the warnings that a test expects.

Why no filter: the list of filters belongs to all threads, and ``warnings.catch_warnings`` in one thread undoes what
another has set meanwhile. Python drops a warning from code whose module has no name (``__name__`` is None, as when an
interpreter shuts down). So this one fork runs in a namespace without a name; every other warning stays as it is.
"""

from __future__ import annotations

import types
from typing import Any

from multiprocess import popen_fork
from multiprocess.process import BaseProcess


class _Popen(popen_fork.Popen):  # type: ignore[misc]
    def _launch(self, process: ForkedProcess) -> None:
        launch = popen_fork.Popen._launch
        unnamed = {**vars(popen_fork), "__name__": None}
        types.FunctionType(launch.__code__, unnamed, closure=launch.__closure__)(self, process)


class ForkedProcess(BaseProcess):  # type: ignore[misc]
    """A process of the fork start method, before and after its start. Takes what ``multiprocess.Process`` takes."""

    _start_method = "fork"

    @staticmethod
    def _Popen(process: ForkedProcess) -> Any:
        return _Popen(process)
