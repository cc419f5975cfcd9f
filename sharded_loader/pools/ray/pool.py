"""Actors of Ray that read, on this machine or on all of a cluster.

    driver                                              actor i, on any node (pools/ray/actor.py)
    submit -> a group of tasks is a call   ==Ray==>     Reader -> memory of the actor
    wait <- the call has ended             <==Ray==     copied into the node's object store
         <- arrays over this node's copy of it, lent out (pools/ray/lent.py)

Order, randomness, errors, resuming, shards and devices are those of every pool: tasks and results are the same. Ray
starts the processes, moves the bytes, and notices deaths. What an actor's death means is decided in `pools.ray.team`.

A call of Ray costs 1 to 2 ms of CPU time, ten times as much as a message through a pipe. So a group is larger here:
`GROUP_SECONDS` of work.

What can go wrong, and what then:
  * an actor or its node dies: another actor reads its batches again. A batch that kills ``restarts`` actors is a
    `WorkerDiedError` in its place;
  * a finished batch lay on a node that died: it is read again;
  * an actor stands still for ``timeout`` seconds: it is killed, and then as above;
  * the cluster has room for some of the actors only: these read, and the others join them when there is room. Without
    room for any there is a warning after 10 s, and an error after ``start_timeout``;
  * an actor cannot begin (unpicklable dataset, a module that its node lacks, ``worker_init_fn`` raises): that error;
  * the driver dies: Ray ends the actors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import call_of
from sharded_loader.base.errors import Location, add_note, as_batch_error
from sharded_loader.batching.protocol import Empty
from sharded_loader.engine.grouping import HELD, Grouping
from sharded_loader.engine.messages import Job, NewJob, Result, Task, unpack_reply
from sharded_loader.engine.pool import Pool, check_init_fn, check_num_workers, check_timeout
from sharded_loader.memory.arena import RecentSizes, Register
from sharded_loader.pools.ray.actor import Group
from sharded_loader.pools.ray.connect import check_address, check_installed, connect, store_bytes
from sharded_loader.pools.ray.lent import Lent
from sharded_loader.pools.ray.members import Member, cause_of, check_wanted, is_lost, is_of_call
from sharded_loader.pools.ray.team import Team
from sharded_loader.pools.translation import decode_result, not_sent, own_pickle

GROUP_SECONDS = 16e-3
"""Work in one call. Measured on images (2 workers, of the rate of `ProcessPool`): 0.38 with 6 ms, 0.55 with 12 ms, 0.57
with 16 ms."""

MAX_GROUP = 64
"""Batches in one call."""

GROUP_BYTES = 32 << 20
"""Bytes in one call: the batches of a group are given back together."""

STORE_SHARE = 4
"""Unless ``max_bytes`` says otherwise, the user may hold a quarter of this node's object store."""


class RayWorker(NamedTuple):
    """One worker of a `RayPool`: its number, ``"ready"`` or ``"starting"``, and where it runs."""

    number: int
    state: str
    pid: int | None
    node: str | None
    host: str | None


class RayPool(Pool):
    """Read in actors of Ray: on all machines of a cluster, or on this one.

    The batches are those of every other pool. The dataset is put into Ray's object store once; its arrays are shared by
    the workers of a node, and are read-only there.

    Args:
        num_workers: how many actors. It may be more than the cluster has room for: those that fit begin.
        num_cpus: CPUs that Ray reserves for each.
        resources: other resources that each needs, such as ``{"reader": 1}``.
        address: of the cluster: ``"auto"``, or host and port of its head. None: the instance that this process has
            joined, else RAY_ADDRESS, else the one that runs on this machine, else a new one.
        runtime_env: what the nodes need to read the dataset, as Ray has it (``{"working_dir": "."}``).
        scheduling_strategy: ``"SPREAD"`` over the nodes, ``"DEFAULT"`` (few nodes), or a strategy object of Ray's.
        restarts: the number of workers that a batch may kill. Then `next` raises `WorkerDiedError` in its place. The
            first death over a group of batches does not count: nobody knows which of them it was.
        timeout: seconds without progress on one sample, after which its worker is killed and the batch read again.
            None: never.
        worker_init_fn: called with the worker's number, once in each, before it reads.
        max_bytes: how many bytes of this node's object store you may hold. Past it batches are copied. None: a quarter
            of it.
        start_timeout: seconds to wait for the first worker.

    Attributes:
        workers: number, state, process and node of each; empty before the first epoch and after `close`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a number out of its range, or an address of Ray Client.
        TypeError: an argument of the wrong type.

    Example:
        >>> from sharded_loader import RayPool, ShardedDataLoader
        >>> loader = ShardedDataLoader(range(8), 4, pool=RayPool(2))  # doctest: +SKIP
        >>> [batch.tolist() for batch in loader]  # doctest: +SKIP
        [[0, 1, 2, 3], [4, 5, 6, 7]]

    Source of the idea: Ray's own actor pools; the supervision is that of `ProcessPool`.
    """

    shares_dataset = False
    is_here = False

    def __init__(
        self,
        num_workers: int,
        *,
        num_cpus: float = 1,
        resources: dict[str, float] | None = None,
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        scheduling_strategy: Any = "SPREAD",
        restarts: int = 3,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        max_bytes: int | None = None,
        start_timeout: float = 600,
    ) -> None:
        self.num_workers = check_num_workers(num_workers)
        check_init_fn(worker_init_fn)
        self.timeout = check_timeout(timeout)
        self.address = check_address(address)
        self.worker_init_fn = worker_init_fn
        self.restarts = check_int("restarts", restarts, 0, "a batch that kills so many workers is given up")
        if max_bytes is not None:
            max_bytes = check_int("max_bytes", max_bytes, 0, "bytes of the object store, or None")
        self._max_bytes = max_bytes
        patience = check_timeout(start_timeout)
        if patience is None:
            raise TypeError("start_timeout is None; it must be a number of seconds")
        self._wanted = check_wanted(num_cpus, resources, runtime_env, scheduling_strategy)
        check_installed()
        self._arguments = (self.restarts, self.timeout, patience)
        self._team = Team(self.num_workers, self._wanted, *self._arguments)
        self._lent = Lent(0)
        self._sizes = RecentSizes()
        self._grouping = Grouping(GROUP_SECONDS, MAX_GROUP, patient=True)
        self._refused: list[Result] = []
        self._pid = os.getpid()

    def __repr__(self) -> str:
        wanted, (restarts, timeout, patience) = self._wanted, self._arguments
        return call_of(
            self,
            [self.num_workers],
            num_cpus=(wanted.num_cpus, 1),
            resources=(wanted.resources, {}),
            address=(self.address, None),
            runtime_env=(wanted.runtime_env, None),
            scheduling_strategy=(wanted.scheduling_strategy, "SPREAD"),
            restarts=(restarts, 3),
            timeout=(timeout, None),
            worker_init_fn=(self.worker_init_fn, None),
            max_bytes=(self._max_bytes, None),
            start_timeout=(patience, 600),
        )

    def __reduce__(self) -> Any:
        # A dataset may refer to the pool that it is being sent to: there it is one that has not been started.
        restarts, timeout, start_timeout = self._arguments
        make = functools.partial(
            RayPool,
            self.num_workers,
            **self._wanted._asdict(),
            address=self.address,
            restarts=restarts,
            timeout=timeout,
            worker_init_fn=self.worker_init_fn,
            max_bytes=self._max_bytes,
            start_timeout=start_timeout,
        )
        return make, ()

    def use_memory(self, empty: Empty, register: Register, *, pinned: bool = False) -> None:
        self._lent.empty, self._lent.copies_all = empty, pinned

    @property
    def started(self) -> bool:
        return bool(self._team.actors)

    @property
    def workers(self) -> tuple[RayWorker, ...]:
        """Number, state, process and node of each worker."""
        return tuple(
            RayWorker(member.number, "starting", None, None, None)
            if (said := member.begun) is None
            else RayWorker(member.number, "ready", said.pid, said.node, said.host)
            for member in self._team.members
        )

    # -- verbs ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        connect(self.address)
        self._pid = os.getpid()
        self._lent.notices = self.notices
        self._lent.max_bytes = store_bytes() // STORE_SHARE if self._max_bytes is None else self._max_bytes
        self._team.start(NewJob(job, self.worker_init_fn, self.timeout is not None))
        self._count_room()

    def submit(self, tasks: Sequence[Task]) -> None:
        team, unsent = self._team, defaultdict[Member, list[tuple[Task, bytes | None]]](list)
        filling: Member | None = None
        held: set[int] = set()  # lanes whose later tasks must not overtake one that waits
        for task in tasks:
            alone, lane = team.blame.travels_alone(task), task.lane
            if lane is None and not alone:
                if filling is None or len(unsent[filling]) == 0:  # its group is full
                    filling = team.for_task(task, self.group)
                member = filling
            else:
                member = None if lane in held else team.for_task(task, self.group)
            if member is None or (alone and unsent[member]):
                if lane is not None:
                    held.add(lane)
                team.requeued.append(task)
                continue
            try:
                own = own_pickle(task, forked=False)
            except Exception as raised:
                self._refused.append(not_sent(task, raised))
                continue
            unsent[member].append((task, own))
            if alone or len(unsent[member]) >= self.group:
                team.send(member, unsent.pop(member))
        for member, some in unsent.items():
            if some:
                team.send(member, some)
        self._count_room()

    def wait(self, block: bool = True) -> Sequence[Result]:
        team = self._team
        if not team.members:
            return ()
        if block and not team.events and not self._refused:
            bell, self.waiting = team.bell, True
            with contextlib.suppress(queue.Empty):
                bell.get(timeout=team.step)
            self.waiting = False
            if bell is not team.bell:
                return ()  # a signal handler has closed the pool
        results, self._refused = self._refused, []
        while team.events:
            self._take(*team.events.popleft(), results)
        if team.members:
            team.look()
        waiting, team.requeued = team.requeued, deque()
        self.submit(tuple(waiting))
        return results

    def _take(self, member: Member, what: int | str, future: Future[Any], results: list[Result]) -> None:
        """Deal with a call that has ended."""
        team, error = self._team, future.exception()
        call = member.calls.get(what) if isinstance(what, int) else None
        if what == "where":
            member.asked = False
            member.words = member.words if error is not None else future.result()
        elif error is None or is_of_call(error):
            member.calls.pop(what, None)  # type: ignore[arg-type]
            if what == "begin" and error is not None:
                team.cannot_begin(member, as_batch_error(error, "while a worker started"))
            elif what == "begin":
                team.begun(member, future.result())
            elif call is not None and error is not None:
                results += [self._failed(task, error) for task in call.tasks]
            elif call is not None:
                self._decode(future.result(), {(task.run, task.seq): task for task in call.tasks}, results)
        elif is_lost(error):  # it lay on a node that has died
            member.calls.pop(what, None)  # type: ignore[arg-type]
            team.take_back(call.tasks if call is not None else ())
        else:  # it has died, was killed for want of memory, or is out of reach
            if member in team.members:  # not told of before
                fate = f"worker {member.number} died: {cause_of(error)}. The loader has asked for another worker"
                self.notices.happened("replaced_workers", fate)
            results += team.bury(member, error)

    def _decode(self, group: Group, tasks: dict[tuple[int, int], Task], results: list[Result]) -> None:
        """The results of a group, over its memory."""
        replies, places, memory, rest = group
        mapped = self._lent.take(memory) if memory.nbytes else memory
        others = (self._lent.take(buffer) for buffer in rest)
        buffers = (next(others) if at < 0 else mapped[at : at + nbytes] for at, nbytes in places)
        content = memoryview(replies)
        while len(content):
            run, seq, wanted, count, pickled, content = unpack_reply(content)
            mine = [next(buffers) for _ in range(count)]
            result = decode_result(run, seq, pickled, mine, tasks.get((run, seq)))
            if result.seconds:  # it was not dropped
                self._sizes.note(wanted)
                most = GROUP_BYTES // max(1, self._sizes.wanted)
                self.group = max(1, min(self._grouping.note(result.seconds), most))
            self._team.blame.settle(run, seq)
            results.append(result)

    def _failed(self, task: Task, error: BaseException) -> Result:
        """The error of a batch that Ray could not bring."""
        failure = as_batch_error(error, "while Ray brought the batch")
        add_note(
            failure,
            f"sharded_loader: Ray could not bring this batch. The object store of this node has {store_bytes():,} "
            f"bytes: if it is full, start Ray with a larger object_store_memory",
        )
        Location(task.epoch, task.seq).note(failure, samples=task.shards[0])
        self._team.blame.settle(task.run, task.seq)
        return Result(task.run, task.seq, error=failure)

    def _count_room(self) -> None:
        """What has come back goes out again first. What is under way has room in the object store."""
        team = self._team
        if team.requeued:
            self.room = 0
            return
        free = team.free
        held = sum(member.load for member in team.members)
        self.room = HELD * self.group * len(free) - sum(member.load for member in free)
        if self._sizes.wanted:
            fits = (self._lent.max_bytes - self._lent.nbytes) // self._sizes.wanted
            self.room = min(self.room, max(fits, len(free)) - held)

    def wake(self) -> None:
        self._team.bell.put(None)

    def cancel(self, run: int) -> None:
        self._team.cancel(run)

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._team.close()
        self.room = 0
        self._refused.clear()

    def closer(self) -> Callable[[], None]:
        close, pid = self._team.closer(), self._pid
        return lambda: close() if os.getpid() == pid else None
