"""Signals at a chosen line of the library: a Ctrl-C, or one whose handler raises."""

import dis
import linecache
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import sharded_loader

# The modules of the road, from the iterator to the pool and back.
_ROAD = "loader iterator epochs stats pipeline split order messages pool local link supervised codec arena placement"
PUMP = tuple(f"{name}.py" for name in f"{_ROAD} tree deaths".split())


class TimeIsUp(Exception):
    """What the handler of SIGALRM raises."""


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(75)


HANDLERS: dict[str, tuple[type[BaseException], Any]] = {
    "SIGINT": (KeyboardInterrupt, signal.default_int_handler),
    "SIGTERM": (SystemExit, _exit),
}
if hasattr(signal, "SIGALRM"):
    HANDLERS["SIGALRM"] = (TimeIsUp, _time_is_up)
"""What is raised, and the handler that raises it, by the name of the signal."""


class InterruptAtReturn:
    """Sends this process a SIGINT as the n-th C function returns to these modules, and keeps the KeyboardInterrupt.

    These are moments between two lines, such as that in which a lock is released.
    """

    def __init__(self, number: int, modules: Sequence[str]) -> None:
        self.left, self.modules = number, modules

    @property
    def fired(self) -> bool:
        return self.left <= 0

    def __enter__(self) -> "InterruptAtReturn":
        sys.setprofile(self)
        return self

    def __exit__(self, kind: object, *_: object) -> bool:
        sys.setprofile(None)
        return kind is KeyboardInterrupt

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        self.left -= event == "c_return" and os.path.basename(frame.f_code.co_filename) in self.modules
        if self.fired:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


class InterruptAt:
    """Sends this process a signal, with a handler in place, before the n-th line of modules that this thread runs."""

    def __init__(self, number: int, modules: Sequence[str] = PUMP, name: str = "SIGINT") -> None:
        folder = Path(sharded_loader.__file__).parent
        gone = set(modules) - {path.name for path in folder.rglob("*.py")} - {"test_resume.py"}
        assert not gone, f"the library has no module {gone}"
        self.modules, self.signal = modules, getattr(signal, name)
        self.left, self.fired = number, False
        self.before: dict[int, int] = {}  # by frame, its line before

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "__del__":
            return None  # what is raised there nobody gets to see
        if os.path.basename(name) not in self.modules or "sharded_loader" not in name:
            return None
        before, self.before[id(frame)] = self.before.get(id(frame), 0), frame.f_lineno
        if event == "line" and not _leaves_a_block(name, before, frame.f_lineno):
            if self.left == 1 and _ends_a_handler(frame):
                return self
            self.left -= 1
            if self.left == 0:
                self.fired = True
                sys.settrace(None)
                signal.raise_signal(self.signal)
        return self


def _leaves_a_block(name: str, before: int, line: int) -> bool:
    """Whether the line runs no call at which a real Ctrl-C could strike before the block's end: ``try:``, the first
    line of a ``with`` block, which comes once more before ``__exit__`` is called, and those that hand out a batch.
    """
    text, text_before = linecache.getline(name, line), linecache.getline(name, before)
    if text.strip().startswith(("try:", "if error is None:", "return batch  #")):
        return True
    deeper = len(text_before) - len(text_before.lstrip()) > len(text) - len(text.lstrip())
    return text.lstrip().startswith("with ") and line < before and deeper


def _ends_a_handler(frame: FrameType) -> bool:
    """Whether the line begins with the end of an ``except`` block, where Python looks for no signal.

    An exception at that instruction skips it (Python 3.11 and later). The handled exception then stays the thread's
    current one, and keeps all that its frames refer to.
    """
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "POP_EXCEPT"


def next_interrupted(iterator: Any, number: int, interrupt: Any = InterruptAt) -> tuple[list[Any], bool]:
    """One call of ``next``, interrupted at line ``number``; the batch, if it came all the same."""
    tracer = interrupt(number)
    raised = next(kind for name, (kind, _) in HANDLERS.items() if getattr(signal, name) == tracer.signal)
    got, before = [], sys.gettrace()
    try:
        sys.settrace(tracer)
        got.append(next(iterator))
    except raised:
        assert tracer.fired
    finally:
        sys.settrace(before)
    assert sys.exc_info() == (None, None, None)  # no exception of the library's is left as the current one
    return got, tracer.fired
