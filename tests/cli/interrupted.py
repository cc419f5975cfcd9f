"""Ctrl-C, as a terminal sends it: to the command and to all of its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any


def interrupt(command: Sequence[str], until_it_works: Callable[[subprocess.Popen[str]], Any], **where: Any) -> Any:
    """Start a command, interrupt it when it works, and check that it ends with one line and its own exit code.

    Args:
        command: The program and its arguments.
        until_it_works: Waits until the command is at work.
        where: For `subprocess.Popen`.

    Returns:
        What ``until_it_works`` returned, and what the command had printed to stdout.
    """
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **where)
    try:
        found = until_it_works(running)
        os.killpg(running.pid, signal.SIGINT)
        out, said = running.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    # A shell sees 130 either way: Python ends itself by the signal where it struck inside an exec().
    assert running.returncode in (130, -signal.SIGINT)
    assert said.splitlines()[-1] == "sharded-loader: stopped by Ctrl-C"
    assert "Traceback" not in said
    return found, out
