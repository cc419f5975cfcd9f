"""What pools have in common whose workers are other processes: each has a supervisor, and messages to send and to read.

    task -> own_pickle -> bytes, where its indices are the user's own objects
    reply (`messages.pack_reply`) -> decode_result -> Result, its exceptions as exceptions

A batch that cannot be sent or read has an error as its result.
"""

from __future__ import annotations

import io
import pickle
import types
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic

import cloudpickle
import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.base.errors import Location, as_batch_error, leave_frames
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.engine.grouping import Grouping
from sharded_loader.engine.messages import BatchTimes, NewJob, Result, Task, unpack_result
from sharded_loader.engine.pool import WorkerPool
from sharded_loader.memory.arena import RecentSizes
from sharded_loader.memory.codec import SetApart, decode_error, is_findable
from sharded_loader.memory.publish import script_by_value
from sharded_loader.pools.supervisor import Supervisor, W

_PLAIN = {int, str}


class SupervisedPool(WorkerPool, Generic[W]):
    """A pool whose workers are other processes, kept running by a `Supervisor`, which the subclass makes.

    Args:
        num_workers, worker_init_fn, timeout, restarts: of the pool.
        grouping: how many tasks travel together.

    Raises:
        ValueError, TypeError: as a `WorkerPool`, and for ``restarts``.
    """

    shares_dataset = False
    _supervisor: Supervisor[W]
    _group_bytes: int | None = None

    def __init__(
        self,
        num_workers: int,
        worker_init_fn: Callable[[int], Any] | None,
        timeout: float | None,
        restarts: int,
        grouping: Grouping,
    ) -> None:
        super().__init__(num_workers, worker_init_fn, timeout)
        self.restarts = check_int("restarts", restarts, 0, "a batch that kills this number of workers is given up")
        self._grouping = grouping
        self._sizes = RecentSizes()
        self._rejected: list[Result] = []  # of tasks that could not be sent

    def _start(self, new: NewJob) -> None:
        """Start the workers. Those that run already get the new job before any later task."""
        self._supervisor.notices = self.notices
        self._supervisor.start(new)
        self._count_room()

    def _have(self, num_workers: int) -> None:
        try:
            self._supervisor.resize(num_workers)
        finally:
            self.num_workers = self._supervisor.num_workers
            self._count_room()

    @abstractmethod
    def _count_room(self) -> None:
        """Set `room`, and what else follows from the tasks that the workers have."""

    def cancel(self, run: int) -> None:
        self._supervisor.cancel(run)

    def tell_of_wait(self, text: str, task: Task | None) -> Callable[[], None] | None:
        return self._supervisor.tell_of_wait(text, task)

    def close(self) -> None:
        self._supervisor.close()
        self.room = 0
        self._rejected.clear()

    def _reject(self, task: Task, raised: Exception) -> None:
        """A task cannot be sent to a worker: that is the error of its batch."""
        error = as_batch_error(raised, "while the batch was sent to a worker")
        Location(task.epoch, task.seq).note(error, samples=task.shards[0])
        leave_frames(error)  # as in `Pipeline._fill`
        self._rejected.append(Result(task.run, task.seq, error=error))

    def _result(
        self,
        run: int,
        seq: int,
        wanted: int,
        pickled: memoryview,
        buffers: list[Any],
        task: Task | None,
        times: BatchTimes | None,
    ) -> Result:
        """The result in a reply (`messages.unpack_reply`), whose buffers are here."""
        result, rebuilt = decode_result(run, seq, pickled, buffers, task, times), self._supervisor.rebuilt
        if rebuilt and (run, seq) in rebuilt:
            rebuilt.discard((run, seq))
            result = result._replace(rebuilt=True)
        if result.seconds:  # it was not dropped
            self._sizes.note(wanted)
            self.group = self._grouping.note(result.seconds)
            if self._group_bytes is not None:
                self.group = max(1, min(self.group, self._group_bytes // max(1, self._sizes.wanted)))
        deaths = self._supervisor.deaths
        if deaths.unsettled:
            deaths.settle(run, seq)
        return result


class _ToForked(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and is_findable(obj):
            return NotImplemented  # by name, those of ``__main__`` too
        return super().reducer_override(obj)


def own_pickle(task: Task, *, forked: bool) -> bytes | None:
    """The task's pickle, if it holds keys of the user's own classes; else None.

    Args:
        task: what a worker is sent.
        forked: the worker was forked, and has the very classes that the dataset knows. One that was spawned does not
            have the script that they come from: they go by value, as they did with the dataset.
    """
    if task.part is not None and task.part.point.state is None:
        return None
    for shard in task.shards:
        if not isinstance(shard, np.ndarray) and not _PLAIN.issuperset(map(type, shard)):
            break
    else:
        return None
    try:
        if forked:
            stream = io.BytesIO()
            _ToForked(stream, protocol=5).dump(task)
            return stream.getvalue()
        with script_by_value():
            return bytes(cloudpickle.dumps(task, protocol=5))
    except Exception as error:
        raise TypeError(
            f"the indices of a batch cannot be sent to a worker process ({error}): let the sampler yield integers "
            f"or strings, or read with threads (thread_pool=True)"
        ) from error


def decode_result(
    run: int, seq: int, pickled: memoryview, buffers: list[Any], task: Task | None, times: BatchTimes | None = None
) -> Result:
    """The result in a reply; if it cannot be unpickled here, that is its batch's error."""
    try:
        reply = pickle.loads(pickled, buffers=buffers)  # what `codec.encode` has made
        if type(reply) is tuple:
            return unpack_result(run, seq, reply, buffers, times)
    except Exception as error:
        if is_from_outside(error):
            raise
        failure = TypeError(
            f"the batch left its worker, but cannot be unpickled in this process ({type(error).__name__}: {error}): "
            f"return arrays, tensors and plain objects, or read with threads (thread_pool=True)"
        )
        failure.__cause__ = error
        if task is not None:
            Location(task.epoch, seq).note(failure, samples=task.shards[0])
        return Result(run, seq, error=failure)
    if type(reply) is SetApart:
        reply = reply.reply
    if reply.error is None and not reply.skipped:
        return reply.result if times is None else reply.result._replace(times=times)  # type: ignore[no-any-return]
    return reply.result._replace(  # type: ignore[no-any-return]
        error=None if reply.error is None else decode_error(reply.error),
        skipped=tuple((index, decode_error(error)) for index, error in reply.skipped),
        times=times,
    )
