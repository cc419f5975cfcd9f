"""`RayPool`: reads in Ray actors, on this machine or on a cluster.

    driver                                              actor i, on any node (ray/actor.py)
    submit -> a group of tasks is a call   ==Ray==>     Reader -> memory of the actor
    wait <- the call has ended             <==Ray==     copied into the node's object store
         <- arrays over this node's copy of it, lent out (ray/cluster.py)

Tasks and results are those of every pool, so order, randomness, resuming, shards and devices are, too. Ray starts
processes, moves bytes and detects deaths; `pools.supervised` decides what a death means. A Ray call costs 1 to 2 ms of
CPU, ten times as much as a message through a pipe, hence larger groups: `GROUP_SECONDS` of work.

Failures:
  * an actor or its node dies, or stalls for ``timeout`` seconds and is killed: another actor reads its batches. A batch
    that kills ``restarts`` actors is a `WorkerDiedError` in its place, without the sample, unknown after the death;
  * a finished batch lay on a node that died: it is read again;
  * the cluster has too little room: the actors that fit read, others join later. Without any, there is a warning after
    10 s, and an error after ``start_timeout``;
  * an actor cannot begin (unpicklable dataset, missing module, ``worker_init_fn`` raises): that error;
  * the driver dies: Ray ends the actors.
"""

from __future__ import annotations

import contextlib
import queue
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from sharded_loader.extend import Empty, Job, PoolBroken, Register, Result, SupervisedPool, Task
from sharded_loader.extend.engine import HELD, Grouping, check_timeout, decode, decode_error, fields_of, unpack_reply
from sharded_loader.extend.tools import add_note, as_batch_error, bytes_of_text, host_clock
from sharded_loader.ray import cluster
from sharded_loader.ray.actor import Begun, Group
from sharded_loader.ray.transport import LOOK_SECONDS, ActorWorker, Call, RayTransport

GROUP_SECONDS = 16e-3
"""Work in one call. On images (2 workers), relative to `ProcessPool`: 0.38 with 6 ms, 0.55 with 12, 0.57 with 16."""

MAX_GROUP = 64
"""Maximum number of batches in one call."""

GROUP_BYTES = 32 << 20
"""Maximum bytes in one call, because the batches of a group are freed together."""

STORE_SHARE = 4
"""The default of ``max_bytes`` is one STORE_SHARE-th of this node's object store."""


class RayWorker(NamedTuple):
    """One worker of a `RayPool`: its number, ``"ready"`` or ``"starting"``, and where it runs."""

    number: int
    state: str
    pid: int | None
    node: str | None
    host: str | None


class RayPool(SupervisedPool[ActorWorker]):
    """Read in Ray actors, on all machines of a cluster or on this one.

    The batches are those of every other pool. The dataset is put into Ray's object store once; its arrays are shared by
    the workers of a node, read-only.

    Args:
        num_workers: number of actors. If the cluster has room for fewer, those start.
        num_cpus: CPUs that Ray reserves for each.
        resources: other resources for each, such as ``{"reader": 1}``.
        address: of the cluster: ``"auto"``, or host and port of its head. None: the instance that this process has
            joined, else RAY_ADDRESS, else the one that runs on this machine, else a new one.
        runtime_env: Ray's runtime environment for the nodes (``{"working_dir": "."}``).
        scheduling_strategy: ``"SPREAD"`` over the nodes, ``"DEFAULT"`` (few nodes), or a strategy object of Ray's.
        restarts: number of workers that a batch may kill before `next` raises `WorkerDiedError` in its place. The first
            death over a group of batches does not count, because any of them may be the cause.
        timeout: seconds without progress on one sample, after which its worker is killed and the batch read again.
            None: never.
        worker_init_fn: called with the worker's number in each, before it reads; again with a changed dataset.
        max_bytes: bytes of this node's object store that you may hold, or a text such as ``"2 GB"``; beyond it, batches
            are copied. Default: a quarter.
        start_timeout: seconds to wait for the first worker.

    Attributes:
        workers: number, state, process and node of each; empty before the first epoch and after `close`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a number is out of range, or the address is Ray Client.
        TypeError: an argument has the wrong type.

    Example:
        >>> from sharded_loader import RayPool, ShardedDataLoader
        >>> loader = ShardedDataLoader(range(8), 4, pool=RayPool(2))  # doctest: +SKIP
        >>> [batch.tolist() for batch in loader]  # doctest: +SKIP
        [[0, 1, 2, 3], [4, 5, 6, 7]]

    Source of the idea: Ray's own actor pools; the supervision is that of `ProcessPool`.
    """

    is_here = False
    _transport: RayTransport

    def __init__(
        self,
        num_workers: int,
        *,
        num_cpus: float = 1,
        resources: dict[str, float] | None = None,
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        scheduling_strategy: object = "SPREAD",
        restarts: int = 3,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        max_bytes: int | str | None = None,
        start_timeout: float = 600,
    ) -> None:
        grouping = Grouping(GROUP_SECONDS, MAX_GROUP, most_bytes=GROUP_BYTES, patient=True)
        super().__init__(num_workers, worker_init_fn, timeout, restarts, grouping)
        self.address = cluster.check_address(address)
        self.max_bytes = None if max_bytes is None else bytes_of_text(max_bytes, 0, "0 or more")
        if start_timeout is None:
            raise TypeError("start_timeout is None; it must be a number of seconds")
        self.start_timeout = check_timeout(start_timeout) or start_timeout
        wanted = cluster.check_wanted(num_cpus, resources, runtime_env, scheduling_strategy)
        self.num_cpus, self.resources = wanted["num_cpus"], wanted["resources"]
        self.runtime_env, self.scheduling_strategy = runtime_env, scheduling_strategy
        cluster.check_installed()
        self._transport = RayTransport(self.num_workers, wanted, self.start_timeout)
        self._lent = cluster.Lent(0)
        self._looked = 0.0

    def _options(self) -> Any:
        kind, options = super()._options()
        return kind, {**options, "resources": (self.resources, {})}  # None means none

    def use_memory(self, empty: Empty, register: Register, *, pinned: Empty | None = None) -> None:
        self._lent.empty, self._lent.copies_all = empty, pinned is not None

    @property
    def started(self) -> bool:
        return bool(self._transport.actors)

    @property
    def workers(self) -> tuple[RayWorker, ...]:
        """Number, state, process and node of each worker."""
        begun = [(one.number, one.begun) for one in self._transport.workers]
        return tuple(RayWorker(n, "ready" if said else "starting", *(said or (None,) * 3)[:3]) for n, said in begun)

    # -- verbs ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        cluster.connect(self.address)
        self._lent.notices = self.notices
        self._lent.max_bytes = cluster.store_bytes() // STORE_SHARE if self.max_bytes is None else self.max_bytes
        self._start(replace(job, worker_init_fn=self.worker_init_fn, notes_samples=self.timeout is not None))

    def submit(self, tasks: Sequence[Task]) -> None:
        transport, suspects = self._transport, self.deaths.crash_suspects
        unsent = defaultdict[ActorWorker, list[tuple[Task, object]]](list)
        filling: ActorWorker | None = None
        held: set[int] = set()  # lanes with a waiting task, which later ones must not overtake
        for task in tasks:
            alone, lane = (task.run, task.seq) in suspects, task.lane
            if lane is None and not alone:
                # Chosen for a whole group: a worker for each task would cut groups into small calls, 2 ms of CPU each.
                if filling is None or len(unsent[filling]) == 0:  # its group is full
                    filling = transport.choose(task, self.group, alone=False)
                worker = filling
            else:
                worker = None if lane in held else transport.choose(task, self.group, alone=alone)
            if worker is None or (alone and unsent[worker]):
                if lane is not None:
                    held.add(lane)
                self.requeued.append(task)
                continue
            try:
                unsent[worker].append((task, fields_of(task, forked=False)))
            except Exception as raised:
                self._reject(task, raised)
                continue
            if alone or len(unsent[worker]) >= self.group:
                transport.send(worker, unsent.pop(worker), alone=alone)
        for worker, group in unsent.items():
            if group:
                transport.send(worker, group, alone=False)
        self._count_room()

    def follow(self, run: int, ahead: object, position: Callable[[], int | None]) -> None:
        self._transport.ahead.follow((run, ahead, position))

    def cancel(self, run: int) -> None:
        super().cancel(run)
        self._transport.ahead.leave(run, self._transport.workers)

    def wait(self, block: bool = True) -> Sequence[Result]:
        transport = self._transport
        if not transport.workers:
            return ()
        step = min(LOOK_SECONDS, self._watch.step) if transport.is_waiting else self._watch.step
        if block and not transport.events and not self._rejected:
            bell, self.waiting = transport.bell, True
            with contextlib.suppress(queue.Empty):
                bell.get(timeout=step)
            self.waiting = False
            if bell is not transport.bell:
                return ()  # a signal handler has closed the pool
        results, self._rejected = self._rejected, []
        while transport.events:
            self._take(*transport.events.popleft(), results)
        if transport.workers and (now := host_clock.now()) - self._looked >= min(LOOK_SECONDS, step):
            self._looked = now
            if (error := transport.look()) is not None:
                self.close()
                raise PoolBroken(error)
            self.kill_stalled_workers()
        waiting, self.requeued = self.requeued, deque()
        self.submit(tuple(waiting))
        return results

    def _take(self, worker: ActorWorker, what: Call, future: Future[Any], results: list[Result]) -> None:
        """Process a call that has ended."""
        error = future.exception()
        if what == "where":
            worker.asked = False
            worker.heartbeat = worker.heartbeat if error is not None else future.result()
        elif error is None and what == "begin":
            said: Begun = future.result()
            if worker not in self._transport.workers:
                return
            if said.failure is not None:
                self.give_up_worker(worker, decode_error(decode(said.failure)))  # type: ignore[arg-type]
            else:
                self.record_start(worker)
                self._transport.has_begun(worker, said)
        elif error is None:
            tasks = worker.end_call(what)
            self._decode(future.result(), {(task.run, task.seq): task for task in tasks}, results)
        elif cluster.is_of_call(error):
            results += [self._failed(task, error) for task in worker.end_call(what)]
            if what == "begin":
                self.give_up_worker(worker, as_batch_error(error, "while a worker started"))
        elif cluster.is_lost(error):  # it lay on a node that has died
            self.take_back(worker.end_call(what))
        else:  # it has died, was killed for want of memory, or is out of reach
            results += self.replace(worker, error)

    def _decode(self, group: Group, tasks: dict[tuple[int, int], Task], results: list[Result]) -> None:
        """Append the results of a group, over its memory."""
        replies, places, memory, rest = group
        buffers = self._lent.buffers(places, memory, rest)
        content, now, made = memoryview(replies), host_clock.now(), list[Result]()
        while len(content):
            reply = unpack_reply(content)
            content = reply[5]
            made.append(self._result(reply, [next(buffers) for _ in range(reply[3])], tasks.get(reply[:2])))
        # Times are by another machine's clock; the last batch of the group has ended about now.
        late = now - max((one.began + one.seconds for one in made if one.began), default=now)
        results += [replace(one, began=one.began + late) if one.began else one for one in made]

    def _failed(self, task: Task, error: Any) -> Result:
        """Return the error of a batch that Ray could not deliver."""
        failure = task.error(error, "while Ray brought the batch")
        has = f"The object store of this node has {cluster.store_bytes():,} bytes"
        text = f"Ray could not bring this batch. {has}: if it is full, start Ray with a larger object_store_memory"
        add_note(failure, f"sharded_loader: {text}")
        self.deaths.resolve(task.run, task.seq)
        return Result(task.run, task.seq, error=failure)

    def _count_room(self) -> None:
        """Update `room`. Requeued tasks go first; tasks in flight have room in the object store."""
        free = [] if self.requeued else self._transport.free
        held = sum(len(worker.tasks) for worker in self._transport.workers)
        self.room = HELD * self.group * len(free) - sum(len(worker.tasks) for worker in free)
        if self._sizes.wanted:
            fits = (self._lent.max_bytes - self._lent.nbytes) // self._sizes.wanted
            self.room = min(self.room, max(fits, len(free)) - held)

    def wake(self) -> None:
        self._transport.bell.put(None)

    def closer(self) -> Callable[[], None]:
        return self._transport.closer()
