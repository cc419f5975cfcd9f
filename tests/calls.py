"""Which functions of the library a call runs, so that a fast path that is lost is noticed."""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import sharded_loader

_ROOT = os.path.dirname(sharded_loader.__file__) + os.sep


def calls_of(do: Callable[[], Any]) -> list[str]:
    """The functions of the library that ``do()`` calls in this thread, in their order. Comprehensions do not count."""
    names: list[str] = []

    def note(frame: FrameType, kind: str, argument: object) -> None:
        name = frame.f_code.co_name
        if kind == "call" and frame.f_code.co_filename.startswith(_ROOT) and name not in ("<listcomp>", "<setcomp>"):
            names.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(before)
    return names
