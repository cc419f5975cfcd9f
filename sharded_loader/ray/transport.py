"""Ray actors as the transport of `pools.supervised`: start, send tasks, kill, explain deaths.

    start(job)                put the dataset into the object store once; request actors, or send them the new job
    choose(task), send(...)   a group of tasks is one call; its end, in any way, is an event
    follow(order)             one actor per node prefetches shards in this order; its groups carry the position
    explain_death(...)        Ray's explanation of a death, and the tasks of the actor
    look()                    detect a cluster without room for any actor, and a Ray that was shut down

A requested actor may come in a second, in an hour (the cluster grows), or never, so only ready actors get tasks. The
heartbeat dies with its actor: the culprit is known only if one task was sent *alone*, or if a stalled actor had
answered before it was killed. A node's death is no batch's fault.

Tasks of a lane (a part of iterable data, or workers that take turns) stay with one actor, which keeps the part open.
Moving a lane costs reopening it, and changes no batch. The first actor of a node to get tasks prefetches shards for the
node; if it dies, the next one takes over.

Owns the actors and the dataset in the object store. If an actor cannot begin, the others go on; if none can, or there
is never room for one, the pool fails.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sharded_loader.extend import Death, Job, Task, Transport, Worker
from sharded_loader.extend.engine import HELD, IN_BATCH, UNUSED, is_at
from sharded_loader.extend.tools import add_note, host_clock, logger
from sharded_loader.ray import cluster
from sharded_loader.ray.actor import Begun, LoaderActor

PATIENCE = 10.0
"""Seconds without any ready actor before a warning."""

LOOK_SECONDS = 0.5
"""Seconds between two looks at requested and watched actors. A shutdown of Ray causes no event."""

ANSWER_SECONDS = 1.0
"""Seconds to wait for an actor to write its stacks."""


Call = list[Task] | str
"""A call of an actor: the tasks of a group, or the name of another method."""


class ActorWorker(Worker):
    """One actor, with Ray's handle ``actor``; ``listen`` is `RayTransport.listen`.

    Attributes:
        is_alone: it reads a task that was sent alone, and gets no other tasks meanwhile.
        begun: its reply to `begin`; None until ready.
        heartbeat: last known heartbeat; while ``asked``, a newer one is requested.
        failed: it could not begin, and is not replaced.
    """

    def __init__(self, number: int, actor: Any, listen: Callable[[Any, ActorWorker, Call], None]) -> None:
        super().__init__(number)
        self.actor, self._listen = actor, listen
        self.begun: Begun | None = None
        self.heartbeat: Sequence[int] = UNUSED
        self.is_alone = self.asked = self.failed = False

    @property
    def who(self) -> str:
        said = self.begun
        return super().who + ("" if said is None else f" (pid {said.pid} on {said.host})")

    def control(self, name: str, *arguments: object) -> Any:
        """Call a method of the actor in its second thread."""
        return getattr(self.actor, name).options(concurrency_group="control").remote(*arguments)

    def where(self) -> Sequence[int] | None:
        """Return the last known heartbeat, and request a new one. None while the actor starts, or is idle."""
        if not self.ready or not self.tasks:
            return None
        if not self.asked:
            self.asked = True
            self._listen(self.control("where"), self, "where")
        return self.heartbeat

    def cancel(self, run: int) -> None:
        self.control("cancel", run)  # Ray's own ``cancel`` can hold up an actor for half a minute

    def tell(self) -> None:
        self.control("stacks")  # Ray brings what it writes to this process

    def kill_stalled(self, seconds: float) -> None:
        import ray

        ray.wait([self.control("stacks")], timeout=ANSWER_SECONDS)  # one that holds the GIL cannot write them
        cluster.stop([self.actor])

    def end_call(self, call: Call) -> list[Task]:
        """Remove the tasks of a call that has ended, and return them."""
        if isinstance(call, str):
            return []
        self.is_alone = False
        return [task for task in call if self.tasks.pop((task.run, task.seq), None) is not None]


Followed = tuple[int, object, Callable[[], "int | None"]]
"""Arguments of `Pool.follow`: an order for datasets that prefetch."""


class FetchAhead:
    """Lets one actor of each node (`readers`) prefetch by the order being read, and by no other."""

    def __init__(self) -> None:
        self.readers: dict[str, ActorWorker] = {}
        self._job: Job | None = None
        self._followed: Followed | None = None
        self._order: Any = None  # in the object store

    def begin(self, job: Job | None) -> None:
        """Begin with new actors, or with another job. None: the pool has closed, and may restart."""
        # With the same job, an interrupted step has closed the pool, and the run goes on.
        if job is not None and job is not self._job:
            self._job, self._followed = job, None
        self.follow(self._followed)

    def follow(self, followed: Followed | None) -> None:
        """Prefetch by this order from now on; None: by none."""
        self._followed, self._order = followed, None
        self.readers.clear()

    def leave(self, run: int, workers: Sequence[ActorWorker]) -> None:
        """Stop prefetching for a run."""
        if self._followed is not None and self._followed[0] == run:
            for worker in self.readers.values():
                if worker in workers:
                    worker.cancel(run)
            self.follow(None)

    def progress_for(self, worker: ActorWorker, workers: Sequence[ActorWorker]) -> tuple[int, ...]:
        """Return run and position if this actor prefetches for its node, as it does from now on if no other does."""
        if self._followed is None or worker.begun is None:
            return ()
        run, ahead, position_of_user = self._followed
        if (position := position_of_user()) is None:
            return ()
        if self.readers.get(worker.begun.node) not in workers:
            try:
                self._order = self._order or cluster.put(ahead, {})
            except (TypeError, MemoryError) as error:
                logger.warning("RayPool: no actor fetches shards ahead, as the order cannot be sent: %s", error)
                self._followed = None
                return ()
            self.readers[worker.begun.node] = worker
            worker.actor.follow.remote(run, position, self._order)
        return (run, position) if self.readers[worker.begun.node] is worker else ()


Bell = queue.SimpleQueue[None]

Event = tuple[ActorWorker, Call, "Future[Any]"]
"""A call that has ended: its actor, the call, and its outcome."""


class RayTransport(Transport[ActorWorker]):
    """Ray actors, and the calls to them.

    Attributes:
        actors: running actors; empty after `close`, and after a finalizer has stopped them.
        events: calls that have ended; `bell` rings for each.
    """

    _absent_since = 0.0  # when an actor was last requested while no other was ready
    _had_one = _is_told = False  # an actor has been ready; the present lack of any has been reported

    def __init__(self, num_workers: int, wanted: cluster.Wanted, start_timeout: float) -> None:
        self.num_workers, self._wanted, self._start_timeout = num_workers, wanted, start_timeout
        self.events: deque[Event] = deque()
        self.bell: Bell = queue.SimpleQueue()
        self.actors: list[Any] = []
        self.workers: list[ActorWorker] = []
        self.draining: list[ActorWorker] = []  # none: an actor is stopped at once
        self.ahead = FetchAhead()
        self._holders: dict[int, ActorWorker] = {}  # by lane, the actor that reads its tasks
        self._published: Any = None
        self._session: str | None = None
        self._pid = os.getpid()

    @property
    def ready(self) -> list[ActorWorker]:
        """Actors that have the dataset."""
        return [worker for worker in self.workers if worker.ready]

    @property
    def free(self) -> list[ActorWorker]:
        """Actors that accept any task."""
        return [worker for worker in self.workers if worker.ready and not worker.is_alone]

    def start(self, job: Job) -> list[Task]:
        begun: list[Task] = []
        self._pid = os.getpid()
        if self.workers and (not self.actors or self._session != cluster.session()):
            # A finalizer has stopped the actors, or Ray was started again.
            begun = [task for worker in self.workers for task in worker.tasks.values()]
            self.close()
        self._session = cluster.session()
        self._published = cluster.put(job, job.parts)
        self.ahead.begin(job)
        for worker in self.workers:
            self._begin(worker)
        self.launch_all(job)
        return begun

    def launch(self, number: int, job: Job) -> ActorWorker:
        import ray

        if not any(worker.ready for worker in self.workers if worker.number != number):
            self._absent_since = host_clock.now()
        threads = max(1, int(self._wanted["num_cpus"]))
        actor = ray.remote(**self._wanted)(LoaderActor).remote(number, self.num_workers, threads)
        self.actors.append(actor)
        worker = ActorWorker(number, actor, self.listen)
        self._begin(worker)
        return worker

    def _begin(self, worker: ActorWorker) -> None:
        self.listen(worker.actor.begin.remote(self._published), worker, "begin")

    def listen(self, ref: Any, worker: ActorWorker, what: Call) -> None:
        """Turn the end of a call into an `Event`."""
        ref.future().add_done_callback(functools.partial(_note, self.events, self.bell, worker, what))

    def has_begun(self, worker: ActorWorker, said: Begun) -> None:
        """Record that an actor has its job, and give it its share of the lanes."""
        worker.begun, ready = said, self.ready
        self._had_one, self._is_told = True, False
        share = -(-len(self._holders) // max(1, len(ready)))
        for one in ready:
            for lane in [lane for lane, holder in self._holders.items() if holder is one][share:]:
                del self._holders[lane]  # another actor gets the lane with its next task

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the actors
        self.workers = []
        cluster.stop(self.actors)
        self._holders.clear()
        self._published = None
        self.ahead.begin(None)
        # Calls in flight may still end, without an event. A step that waits in an outer frame continues.
        self.bell.put(None)
        self.events, self.bell = deque(), queue.SimpleQueue()
        self._had_one = self._is_told = False

    def closer(self) -> Callable[[], None]:
        """Return a function that stops the actors, without a reference to this object."""
        actors, pid = self.actors, self._pid
        return lambda: cluster.stop_from_anywhere(actors) if os.getpid() == pid else None

    # -- tasks ----------------------------------------------------------------------------------------------

    def choose(self, task: Task, group: int, *, alone: bool) -> ActorWorker | None:
        """Return the actor for a task; None if the task must wait."""
        if task.lane is None:
            most = 1 if alone else HELD * group
            free = [worker for worker in self.free if len(worker.tasks) < most]
            return min(free, key=lambda worker: len(worker.tasks) // group, default=None)
        worker, ready = self._holders.get(task.lane), self.ready
        if worker not in ready:
            held = list(self._holders.values())
            worker = min(ready, key=held.count, default=None)
        if worker is None:
            return None
        self._holders[task.lane] = worker
        return None if worker.is_alone or (alone and worker.tasks) else worker

    def send(self, worker: ActorWorker, tasks: Sequence[tuple[Task, object]], *, alone: bool) -> None:
        """Send tasks to an actor in one call, each with its `fields_of`."""
        content = pickle.dumps([(task.run, task.seq, fields) for task, fields in tasks], protocol=5)
        worker.is_alone = alone
        worker.tasks.update({(task.run, task.seq): task for task, _ in tasks})
        progress = self.ahead.progress_for(worker, self.workers)
        self.listen(worker.actor.read.remote(content, *progress), worker, [task for task, _ in tasks])

    def drain(self, worker: ActorWorker) -> None:
        cluster.stop(self.actors, worker.actor)
        self.bell.put(None)  # its tasks can go to another actor

    # -- actors that end, or stand still --------------------------------------------------------------------

    def explain_death(self, worker: ActorWorker, error: BaseException | None) -> Death:
        said = worker.begun or Begun(0, "", "")
        tasks = list(worker.tasks.values())
        heartbeat: Sequence[int] | None = None
        if not tasks:
            heartbeat = UNUSED
        elif worker.hung and any(is_at(worker.heartbeat, task) for task in tasks):
            heartbeat = worker.heartbeat
        elif worker.is_alone:
            heartbeat = tasks[0].run, tasks[0].seq, 0, IN_BATCH
        cause, is_final = cluster.cause_of(error), bool(getattr(error, "actor_init_failed", False))
        has_gone = cluster.is_of_node(error) or (said.node != "" and said.node not in cluster.alive())
        return Death(worker.number, said.pid, None, None, said.host, cause, worker.hung, heartbeat, has_gone, is_final)

    def release(self, worker: ActorWorker) -> None:
        cluster.stop(self.actors, worker.actor)

    def goes_on_without(self, worker: ActorWorker, error: Exception) -> bool:
        if "No module named 'sharded_loader'" in str(error):
            add_note(
                error,
                "sharded_loader: the nodes do not have this library. Install it there, or send it along: "
                'RayPool(n, runtime_env={"py_modules": [sharded_loader]})',
            )
        if worker.ready or not self.ready:
            return False  # it had begun before, so the job is to blame
        worker.failed = True
        cluster.stop(self.actors, worker.actor)
        logger.warning("RayPool: worker %s cannot start; the others read without it: %s", worker.number, error)
        return True

    @property
    def is_waiting(self) -> bool:
        """True if a requested actor may still come: a lack of room causes no event."""
        return any(not worker.ready and not worker.failed for worker in self.workers)

    def look(self) -> Exception | None:
        """Return the error that ends the pool, for what causes no event: no ready actor, or no Ray.

        Without an actor, it warns after `PATIENCE`. Only if there never was one, that ends the pool.
        """
        if self._session != cluster.session():
            return RuntimeError("Ray was shut down while the loader read: make the loader after ray.init()")
        passed = 0.0 if self.ready else host_clock.now() - self._absent_since
        if passed > PATIENCE and not self._is_told:
            self._is_told = True
            fate = f"after {PATIENCE:g} s no worker has begun, perhaps for want of room (start_timeout="
            fate += f"{self._start_timeout:g})"
            if self._had_one:
                fate = "all workers have ended, and there is no room for others. The loader goes on when there is"
            logger.warning("RayPool: %s: %s", fate, cluster.what_there_is(self._wanted))
        if passed > self._start_timeout and not self._had_one:
            return TimeoutError(
                f"no worker could start within {self._start_timeout:g} s (start_timeout=): "
                f"{cluster.what_there_is(self._wanted)}. Ask for less (num_cpus=, resources=), or add nodes"
            )
        return None


def _note(events: deque[Event], bell: Bell, worker: ActorWorker, what: Call, future: Future[Any]) -> None:
    """Record the end of a call; runs in a thread of Ray's."""
    events.append((worker, what, future))
    if bell.empty():
        bell.put(None)
