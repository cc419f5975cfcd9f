"""Errors of the loader, and the notes and tracebacks of errors that users' code raises.

An error raised by the dataset reaches the loop as the original object, with its class and attributes. Two notes are
added: where it happened and, as the last line, the call that reproduces it in the main process. From a worker process
the traceback travels as text and becomes the ``__cause__``. The library's own classes cover only what no user code
raised, such as the death of a worker. They inherit from the built-in class that a caller would catch.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from sharded_loader.base.interrupts import pass_on
from sharded_loader.base.notices import is_ours
from sharded_loader.base.system import is_on


class LoaderClosedError(RuntimeError):
    """The loader was closed; make a new one.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> loader = ShardedDataLoader(range(4), 2)
        >>> loader.close()
        >>> iter(loader)
        Traceback (most recent call last):
        ...
        sharded_loader.base.errors.LoaderClosedError: the loader is closed: make a new ShardedDataLoader
    """

    def __init__(self, text: str = "the loader is closed: make a new ShardedDataLoader") -> None:
        super().__init__(text)


class _ErrorWithAttributes(Exception):
    """Base class that stores keyword arguments as attributes of the error."""

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        vars(self).update(attributes)


class WorkerDiedError(_ErrorWithAttributes, RuntimeError):
    """A worker process exited while the loader needed it (killed, out of memory, crashed, ``os._exit``).

    Raised in place of the batch after ``restarts`` workers have died reading it, or at once if no worker can start.

    Attributes:
        worker: number of the worker, from 0.
        exitcode: exit code, or minus the number of the signal that killed it; None if unknown.
        pid: process id.
        batch: number of the batch being read; None during startup.
        epoch: number of the epoch; None during startup.
        index: sample being read; None if several were being read at once, or none.

    Example:
        >>> WorkerDiedError("worker 1 died", worker=1, exitcode=-9, batch=12).exitcode
        -9

    Source of the idea: loky's ``TerminatedWorkerError``.
    """

    worker: int
    exitcode: int | None
    pid: int | None = None
    batch: int | None = None
    epoch: int | None = None
    index: object = None


class WorkerTimeoutError(_ErrorWithAttributes, TimeoutError):
    """A worker made no progress on one sample for the pool's ``timeout``.

    Attributes:
        batch: number of the batch being read.
        epoch: number of its epoch.
        index: sample being read; None if several were being read at once, or ``batchify_fn`` was running.

    Example:
        >>> WorkerTimeoutError("worker 1 hangs", batch=3, epoch=0, index=17).index
        17
    """

    batch: int
    epoch: int
    index: object = None


class TooManySkippedError(RuntimeError):
    """``on_error`` skipped or replaced more samples of an epoch than the limit of `OnError`.

    Raised in place of the batch. The ``__cause__`` is the error of the last sample.

    Attributes:
        skipped: number of samples of this epoch that were skipped or replaced.

    Example:
        >>> TooManySkippedError(2, 1, "epoch 0, batch 3", 17, ValueError("bad")).skipped
        2
    """

    def __init__(self, skipped: int, limit: int, where: str, index: object, error: BaseException) -> None:
        super().__init__(
            f"on_error has skipped or replaced {skipped} samples of this epoch, and the limit is {limit}. The last "
            f"is sample {index!r} in {where}; its {type(error).__name__} is the cause above. Look at loader.skipped. "
            f"If you expect as many, raise the limit: on_error=OnError(..., limit=)"
        )
        self.skipped = skipped
        self.__cause__ = error


class SampleReadError(RuntimeError):
    """Replacement for an exception that cannot be pickled, or must not reach the loop as itself.

    ``StopIteration``, ``SystemExit`` and similar exceptions would end the loop or the program silently. The message
    keeps the original type and text.

    Example:
        >>> isinstance(SampleReadError("OddError: sample is odd"), RuntimeError)
        True
    """


class WorkerTraceback(Exception):
    """Traceback of a worker process as text; always the ``__cause__`` of the actual exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class SampleError:
    """A sample that could not be read, as passed to ``on_error`` callables.

    Attributes:
        index: index yielded by the sampler.
        epoch: number of the epoch, from 0.
        batch: number of the batch in the epoch, from 0.
        shard: number of the shard in the batch, from 0; None if batches have no shards.
        error: the exception raised by the dataset.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> words = ["1", "two", "3"]
        >>> from sharded_loader import SimpleDataset
        >>> numbers = SimpleDataset(words).transform(int)
        >>> next(iter(ShardedDataLoader(numbers, 3, on_error=lambda failed: -failed.index)))
        tensor([ 1, -1,  3])
    """

    index: Hashable
    epoch: int
    batch: int
    shard: int | None
    error: BaseException


class Location(NamedTuple):
    """Position in the epoch, and the worker, to which an error belongs."""

    epoch: int
    batch: int
    shard: int | None = None
    worker: str | None = None

    def note(
        self, error: BaseException, sample: Any = None, *, samples: Any = (), uncollatable: Any = None, but: str = ""
    ) -> None:
        """Add two notes to ``error``: where it happened, and how to reproduce it.

        Args:
            error: the exception.
            sample: the index being read, as a list of one; None if no single sample was being read.
            samples: all indices of the shard, if for example ``batchify_fn`` failed.
            uncollatable: the indices of two samples that could not be collated.
            but: a caveat about reproducing the error.
        """
        where = [f"{name} {at}" for name, at in zip(self._fields, self[:3], strict=False) if at is not None]
        if sample is not None:
            is_batch = isinstance(sample[0], list) or getattr(sample[0], "ndim", 0) > 0
            where.append(f"sample {sample[0]!r}" + " (several indices: batches need batch_sampler=)" * is_batch)
        elif uncollatable is not None:
            where.append(f"sample {uncollatable[1]!r} (it does not fit sample {uncollatable[0]!r})")
        if self.worker is not None:
            where.append(self.worker)
        # A dataset may raise the same object repeatedly: only the last location is true.
        notes = [note for note in notes_of(error) if not note.startswith(_OUR_NOTES)]
        notes.append(f"{_OUR_NOTES[0]} in {', '.join(where)}")
        read = sample or uncollatable
        if read is None and len(samples):
            read = samples.tolist() if hasattr(samples, "tolist") else samples
            but += " (it was no single sample that failed)"
        if read is not None:
            notes.append(f"{_OUR_NOTES[1]} in this process{but}: {read_again(read, self.epoch)}")
        set_notes(error, notes)


_OUR_NOTES = ("sharded_loader:", "see it again,")


def read_again(samples: Sequence[object], epoch: int) -> str:
    """Return the expression that reads these samples in the main process.

    Example:
        >>> read_again([3], 1), read_again(range(50), 0)[-9:]
        ('loader.read(3, epoch=1)', '50 in all')
    """
    if len(samples) == 1:
        return f"loader.read({samples[0]!r}, epoch={epoch})"
    shown = ", ".join(map(repr, samples[:8]))
    rest = f"  # the first 8, {len(samples)} in all" if len(samples) > 8 else ""
    return f"[loader.read(i, epoch={epoch}) for i in ({shown})]{rest}"


def as_exception(error: BaseException, where: str) -> Exception:
    """Return ``error``, or a `SampleReadError` if it (raised ``where``) would end a loop or the program."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    what = type(error).__name__ + (f" ({text})" if (text := text_of(error)) else "")
    stand_in = SampleReadError(f"{what} raised {where}, which would end the loop in silence: raise another exception")
    stand_in.__cause__ = error
    return stand_in


def as_batch_error(error: BaseException, where: str) -> Exception:
    """Like `as_exception`, in the main process, but raise exceptions of signal handlers, which belong to no batch."""
    pass_on(error)
    return as_exception(error, where)


def text_of(error: BaseException) -> str:
    """Return the message of an exception; empty if its ``__str__`` raises anything, including SystemExit."""
    try:
        return str(error)
    except BaseException:
        return ""


FULL_TRACEBACKS = "SHARDED_LOADER_FULL_TRACEBACKS"
"""Environment variable that keeps the library's own frames in tracebacks."""


def shorten(error: BaseException) -> None:
    """Remove the library's frames, unless nothing remains, from the tracebacks of an error and its causes."""
    for link in [] if is_on(FULL_TRACEBACKS) else _chain(error):
        frames, short = _frames(link), None
        for frame in reversed(list(filter(_is_user_frame, frames)) or frames[-1:]):
            short = TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        BaseException.__setattr__(link, "__traceback__", short)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error with all its causes and contexts."""
    chain: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in chain:
            chain[id(link)] = link
            pending += [link.__cause__, link.__context__]
    return list(chain.values())


def _frames(error: BaseException) -> list[TracebackType]:
    frames = [error.__traceback__] if error.__traceback__ else []
    while frames and (inner := frames[-1].tb_next):
        frames.append(inner)
    return frames


def _is_user_frame(frame: TracebackType) -> bool:
    return not is_ours(frame.tb_frame.f_code.co_filename)


def format_traceback(error: BaseException, whole: bool = True) -> str:
    """Format the traceback as Python does, without the notes, which stay on the exception. Never raises.

    With ``whole`` it ends with the exception itself. If the only traceback is a `WorkerTraceback`, return its text.
    """
    if error.__traceback__ is None and isinstance(error.__cause__, WorkerTraceback):
        return str(error.__cause__.args[0])
    try:
        shown = traceback.TracebackException.from_exception(error)
        shown.__notes__ = None
        lines = list(shown.format())
        own = 0 if whole or getattr(shown, "exceptions", None) else len(list(shown.format_exception_only()))
        return "".join(lines[: len(lines) - own])
    except BaseException:  # a user's __str__ may call sys.exit, which `traceback` does not expect
        return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__


def without_frames(error: BaseException) -> BaseException:
    """Replace the traceback of ``error`` by its text: the frames would keep the whole batch alive."""
    if error.__traceback__ is not None:
        text = format_traceback(error, whole=False)
        # Bypasses classes that reject attributes (frozen dataclasses).
        for name, value in (("__traceback__", None), ("__context__", None), ("__cause__", WorkerTraceback(text))):
            BaseException.__setattr__(error, name, value)
    return error


def leave_frames(error: BaseException) -> None:
    """Detach an error from its frames, which keep callers and their iterators alive; keep user frames as text."""
    chain = _chain(error)
    if is_on(FULL_TRACEBACKS) or any(_is_user_frame(frame) for link in chain for frame in _frames(link)):
        without_frames(error)
        return
    for link in chain:
        BaseException.__setattr__(link, "__traceback__", None)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception; empty if its class uses the attribute for something else, or raises."""
    try:
        notes = getattr(error, "__notes__", None)
    except Exception:
        return []
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def set_notes(error: BaseException, notes: list[str]) -> None:
    """Replace the notes of an exception, even on Python 3.10, which stores but does not print them.

    Classes that reject attributes (frozen dataclasses) are bypassed. An object without room for attributes stays
    without notes: raising here would hide the original error.
    """
    try:
        BaseException.__setattr__(error, "__notes__", notes)
    except (AttributeError, TypeError):
        return


HAS_ENDED = (
    "has ended too early: its generator raised, and a generator cannot go on after that. Its other samples are lost. "
    "Catch the error inside the generator, or give an iterator whose __next__ can go on"
)
"""End of the note on an error that ended a part of iterable data although ``on_error`` skipped it."""


def add_note(error: BaseException, text: str) -> None:
    """Like `BaseException.add_note`, for every Python version and exception class."""
    set_notes(error, [*notes_of(error), text])


def describe_exit(exitcode: int | None, oom_kills: int | None = None) -> str:
    """Describe an exit code (minus a signal number), given the kernel's OOM kills since the workers started, if known.

    Example:
        >>> describe_exit(-9, 1)[:83]
        "killed by SIGKILL (signal 9); the kernel's out-of-memory killer has struck in this "
    """
    if exitcode is None:
        return "exit code unknown"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    name = {number.value: number.name for number in signal.Signals}.get(-exitcode, f"signal {-exitcode}")
    killed = f"killed by {name} (signal {-exitcode})"
    if exitcode != -9:
        return killed
    advice = "use fewer workers or smaller batches"
    if oom_kills:
        kills = f"has struck in this cgroup, {oom_kills} x since the workers started: {advice}"
        return f"{killed}; the kernel's out-of-memory killer {kills}"
    ruled_out = "" if oom_kills is None else " (this container's own limit was not the cause)"
    return f"{killed}; often the kernel's out-of-memory killer{ruled_out}: see dmesg, {advice}"
