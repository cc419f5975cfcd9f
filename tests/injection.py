"""KeyboardInterrupts at a chosen line of the library."""

from __future__ import annotations

import linecache
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

PUMP = ("pipeline.py", "plan.py", "process.py", "thread.py", "inline.py", "link.py", "loader.py", "order.py")


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line of some of the library's modules that this thread runs."""

    def __init__(self, number: int, modules: Sequence[str] = PUMP) -> None:
        self.modules = modules
        self.left = number
        self.fired = False
        self.before: dict[int, int] = {}  # by frame, its line before

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "__del__":
            return None  # what is raised there nobody gets to see
        if os.path.basename(name) not in self.modules or "sharded_loader" not in name:
            return None
        before, self.before[id(frame)] = self.before.get(id(frame), 0), frame.f_lineno
        if event == "line" and not _leaves_a_block(name, before, frame.f_lineno) and not _is_held_back():
            self.left -= 1
            if self.left == 0:
                self.fired = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def _leaves_a_block(name: str, before: int, line: int) -> bool:
    """Whether the line runs no call at which a real Ctrl-C could strike before the block's end.

    At the end of a ``with`` block its first line comes once more, before ``__exit__`` is called; ``try:`` does nothing.
    """
    text, text_before = linecache.getline(name, line), linecache.getline(name, before)
    if text.strip() == "try:":
        return True
    deeper = len(text_before) - len(text_before.lstrip()) > len(text) - len(text.lstrip())
    return text.lstrip().startswith("with ") and line < before and deeper


def _is_held_back() -> bool:
    """Whether a real Ctrl-C would wait for the end of a block (`sharded_loader.interrupts`)."""
    handler = signal.getsignal(signal.SIGINT)
    return callable(handler) and handler is not signal.default_int_handler


def next_interrupted(iterator: Any, number: int, interrupt: Any = InterruptAt) -> tuple[list[Any], bool]:
    """One call of ``next``, interrupted at line ``number``; the batch, if it came all the same."""
    tracer = interrupt(number)
    got = []
    before = sys.gettrace()
    try:
        sys.settrace(tracer)
        got.append(next(iterator))
    except KeyboardInterrupt:
        assert tracer.fired
    finally:
        sys.settrace(before)
    return got, tracer.fired
