"""What went wrong, where, and how to see it again.

An error that the dataset raises reaches the loop as the object that was raised: same class, same attributes.
Two notes are added to it: where it happened (epoch, batch, shard, sample, worker) and, as the last line, the
call that repeats it in the main process. From a worker process the traceback travels as text and becomes the
``__cause__``.

The library has classes of its own only where no code raised an error, as when a worker died. They inherit from the
built-in class that a caller would catch.
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


class _WithFacts(Exception):
    """What is known of an error, as attributes of it."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        vars(self).update(facts)


class WorkerDiedError(_WithFacts, RuntimeError):
    """A worker process ended while the loader needed it (killed, out of memory, crashed, ``os._exit``).

    Raised in the batch's place, after ``restarts`` workers have died over it; or at once, if no worker can start.

    Attributes:
        worker: number of the worker, from 0.
        exitcode: its exit code; minus the number of the signal that killed it; None where unknown.
        pid: its process id.
        batch: number of the batch that it was reading, None if it was starting.
        epoch: number of the epoch, None likewise.
        index: the sample that it was reading, None if it was reading several at once, or none.

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


class WorkerTimeoutError(_WithFacts, TimeoutError):
    """A worker made no progress on one sample for the pool's ``timeout``.

    Attributes:
        batch: number of the batch that it was reading.
        epoch: its epoch.
        index: the sample, None if it was reading several at once, or was in ``batchify_fn``.

    Example:
        >>> WorkerTimeoutError("worker 1 hangs", batch=3, epoch=0, index=17).index
        17
    """

    batch: int
    epoch: int
    index: object = None


class TooManySkippedError(RuntimeError):
    """``on_error`` has skipped or replaced more samples of an epoch than the limit of `OnError`.

    Raised in the place of the batch. The ``__cause__`` is the error of the last sample.

    Attributes:
        skipped: how many samples of this epoch were skipped or replaced.

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
    """Stands in for an exception that cannot travel or must not pass through a ``for`` loop as itself.

    Some exceptions do not pickle; the message keeps their type name and text. Others must not be raised in the loop:
    ``StopIteration``, ``SystemExit`` and the like, which would end the loop or the program in silence.

    Example:
        >>> isinstance(SampleReadError("OddError: sample is odd"), RuntimeError)
        True
    """


class WorkerTraceback(Exception):
    """The traceback of a worker process, as text. Always the ``__cause__`` of the exception, which says the rest."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class SampleError:
    """A sample that could not be read, as ``on_error`` callables get it.

    Attributes:
        index: the index that the sampler yielded.
        epoch: number of the epoch, from 0.
        batch: number of the batch in the epoch, from 0.
        shard: number of the shard in the batch, from 0; None where batches have no shards.
        error: the exception that was raised.

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
    """Where in the stream, and in which worker, something happened."""

    epoch: int
    batch: int
    shard: int | None = None
    worker: str | None = None

    def note(
        self, error: BaseException, sample: Any = None, *, samples: Any = (), misfit: Any = None, but: str = ""
    ) -> None:
        """Add to ``error`` where it happened and how to see it again.

        Args:
            error: gets two notes.
            sample: the index that was being read, in a list of one; None if none was.
            samples: the indices of the shard, if it was not reading but e.g. ``batchify_fn`` that failed.
            misfit: the indices of two samples of it that do not fit together.
            but: what to beware of when it is seen again.
        """
        where = [f"{name} {at}" for name, at in zip(self._fields, self[:3], strict=False) if at is not None]
        if sample is not None:
            where.append(f"sample {sample[0]!r}")
        elif misfit is not None:
            where.append(f"sample {misfit[1]!r} (it does not fit sample {misfit[0]!r})")
        if self.worker is not None:
            where.append(self.worker)
        # A dataset may raise one and the same object again and again: only its last place is true.
        notes = [note for note in notes_of(error) if not note.startswith(_OUR_NOTES)]
        notes.append(f"{_OUR_NOTES[0]} in {', '.join(where)}")
        read = sample or misfit
        if read is None and len(samples):
            read = samples.tolist() if hasattr(samples, "tolist") else samples
            but += " (it was no single sample that failed)"
        if read is not None:
            notes.append(f"{_OUR_NOTES[1]} in this process{but}: {read_again(read, self.epoch)}")
        set_notes(error, notes)


_OUR_NOTES = ("sharded_loader:", "see it again,")


def read_again(samples: Sequence[object], epoch: int) -> str:
    """The line to type to read these samples in the main process.

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
    """``error``, or what stands in for it if a loop or a program would take it for its own end.

    Args:
        error: anything that was raised.
        where: by what, e.g. ``by the dataset``.
    """
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    what = type(error).__name__ + (f" ({text})" if (text := text_of(error)) else "")
    stand_in = SampleReadError(f"{what} raised {where}, which would end the loop in silence: raise another exception")
    stand_in.__cause__ = error
    return stand_in


def as_batch_error(error: BaseException, where: str) -> Exception:
    """`as_exception` in the main process, where what a signal handler raises belongs to no batch: it is raised again.

    Args:
        error: an exception that was caught just now.
        where: by what it was raised.
    """
    pass_on(error)
    return as_exception(error, where)


def text_of(error: BaseException) -> str:
    """What the exception says; nothing if its ``__str__`` raises, be it SystemExit."""
    try:
        return str(error)
    except BaseException:
        return ""


FULL_TRACEBACKS = "SHARDED_LOADER_FULL_TRACEBACKS"
"""The environment variable that keeps the library's own frames in tracebacks."""


def shorten(error: BaseException) -> None:
    """Leave the user's frames in the traceback of an error, and of those that it comes from; the last one, if all are
    the library's."""
    for one in [] if is_on(FULL_TRACEBACKS) else _chain(error):
        frames, short = _frames(one), None
        for at in reversed(list(filter(_is_of_user, frames)) or frames[-1:]):
            short = TracebackType(short, at.tb_frame, at.tb_lasti, at.tb_lineno)
        BaseException.__setattr__(one, "__traceback__", short)


def _chain(error: BaseException) -> list[BaseException]:
    """An error, and those that it comes from."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            waiting += [one.__cause__, one.__context__]
    return list(found.values())


def _frames(error: BaseException) -> list[TracebackType]:
    frames = [error.__traceback__] if error.__traceback__ else []
    while frames and (inner := frames[-1].tb_next):
        frames.append(inner)
    return frames


def _is_of_user(at: TracebackType) -> bool:
    return not is_ours(at.tb_frame.f_code.co_filename)


def format_traceback(error: BaseException, whole: bool = True) -> str:
    """The traceback as Python prints it, without the notes: they stay with the exception itself. Never raises.

    Args:
        error: any exception. If a `WorkerTraceback` is all that it has, its text.
        whole: with the lines at the end that say what `error` is.
    """
    if error.__traceback__ is None and isinstance(error.__cause__, WorkerTraceback):
        return str(error.__cause__.args[0])
    try:
        shown = traceback.TracebackException.from_exception(error)
        shown.__notes__ = None
        lines = list(shown.format())
        own = 0 if whole or getattr(shown, "exceptions", None) else len(list(shown.format_exception_only()))
        return "".join(lines[: len(lines) - own])
    except BaseException:  # the user's __str__ may exit, which Python does not expect
        return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__


def without_frames(error: BaseException) -> BaseException:
    """``error`` with its traceback as text: the frames would keep the whole batch alive."""
    if error.__traceback__ is not None:
        text = format_traceback(error, whole=False)
        # Past a class that takes no attributes (a frozen dataclass).
        for name, value in (("__traceback__", None), ("__context__", None), ("__cause__", WorkerTraceback(text))):
            BaseException.__setattr__(error, name, value)
    return error


def leave_frames(error: BaseException) -> None:
    """Cut an error off from the frames that it was raised in: a frame leads to those that have called it, and these to
    what is iterated over. If the user's code is among them, the traceback stays as text."""
    chain = _chain(error)
    if is_on(FULL_TRACEBACKS) or any(_is_of_user(at) for one in chain for at in _frames(one)):
        without_frames(error)
        return
    for one in chain:
        BaseException.__setattr__(one, "__traceback__", None)


def notes_of(error: BaseException) -> list[str]:
    """The notes of an exception; none if its class does something else with the name, or raises."""
    try:
        notes = getattr(error, "__notes__", None)
    except Exception:
        return []
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def set_notes(error: BaseException, notes: list[str]) -> None:
    """Give an exception these notes, on Python 3.10 too, which keeps but does not print them.

    An exception of a class that takes no attributes (a frozen dataclass) is written all the same; one
    that has no room for them stays without: better no notes than another error in its place.
    """
    try:
        BaseException.__setattr__(error, "__notes__", notes)
    except (AttributeError, TypeError):
        return


HAS_ENDED = (
    "has ended too early: its generator raised, and a generator cannot go on after that. Its other samples are lost. "
    "Catch the error inside the generator, or give an iterator whose __next__ can go on"
)
"""The end of a note on the error that ended a part of iterable data, although ``on_error`` skipped it."""


def add_note(error: BaseException, text: str) -> None:
    """`BaseException.add_note`, for every Python and every exception class."""
    set_notes(error, [*notes_of(error), text])


def describe_exit(exitcode: int | None, oom_kills: int | None = None) -> str:
    """An exit code in words: ``killed by SIGKILL (signal 9); often the out-of-memory killer``.

    Args:
        exitcode: minus the number of a signal; None if unknown.
        oom_kills: how often the kernel has killed in this cgroup since the workers started; None if unknown.

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
        struck = f"has struck in this cgroup, {oom_kills} x since the workers started: {advice}"
        return f"{killed}; the kernel's out-of-memory killer {struck}"
    unmoved = "" if oom_kills is None else " (this container's own limit was not the cause)"
    return f"{killed}; often the kernel's out-of-memory killer{unmoved}: see dmesg, {advice}"
