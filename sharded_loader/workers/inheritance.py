"""What a process of ours inherits from its trainer and must not keep, or keeps and must not pass on.

    template:   ignore_signals() -> handlers          the trainer's signal handlers are not for it
    worker:     forget_handlers()                     nor for a worker
                keep_from_children(conn, held)        the ends of pipes by which the trainer notices that it is dead
                die_with(path)                        the end of a pipe by which it notices that the trainer is dead

What can go wrong: the kernel refuses the signal that `die_with` asks for. Then the worker's receiver thread has to end
the process, which it cannot while code in C holds the GIL.
"""

from __future__ import annotations

import os
import signal
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    pass

from sharded_loader.process_hooks import is_readable


def ignore_signals() -> dict[int, Any]:
    """Ignore what the trainer's program handles: its handlers would run here too, in the wrong process.

    A whole process group gets a Ctrl-C or a batch system's SIGTERM, and the template ends with its pipe anyway. But
    SIGCHLD gets its default: with another handler the dead workers would be reaped before the trainer asks for them.

    Returns:
        What the workers do instead, by signal.
    """
    signal.set_wakeup_fd(-1)
    handlers: dict[int, Any] = {}
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            handlers[number] = signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        handlers.setdefault(signal.SIGCHLD, signal.SIG_IGN)  # the user's choice, which spawned workers inherit too
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return handlers


def forget_handlers() -> None:
    """Signal handlers that a forked worker has inherited are the trainer's: here SIGTERM ends the process."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def keep_from_children(conn: Any, held: int | None) -> None:
    """The ends by which the trainer notices the death of this process are not for what the user's code starts."""
    if not hasattr(os, "register_at_fork"):
        return
    ends = [conn.fileno(), *([] if held is None else [held])]
    for end in ends:
        os.set_inheritable(end, False)  # by other programs

    def close() -> None:
        conn.close()
        if held is not None:
            os.close(held)

    os.register_at_fork(after_in_child=close)


def die_with(path: str) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed. Linux.

    End-of-file on our own pipe is noticed by a thread, which needs the GIL; and PDEATHSIG fires when the *thread*
    ends that has started this process. The owner of a signal belongs to the open file, which workers share, so the
    pipe is opened once more, by its path under /proc.
    """
    try:
        own = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # no /proc, no descriptors: the receiver thread has to do
    try:
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        os.close(own)  # the kernel refuses: likewise
        return
    if is_readable(own):
        os._exit(1)  # it was closed just before
