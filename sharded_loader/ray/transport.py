"""Actors of Ray, as `pools.supervised` reaches them: asked for, given the job, sent tasks, killed; why they ended.

    start(job)                the dataset lies in the object store once; actors are asked for, or sent the new job
    choose(task), send(...)   a group of tasks is one call; when it has ended, however it has, that is an event
    follow(order)             one actor of each node fetches shards in this order; each group of its tasks says how far
    last_words(worker, error) what Ray says about its end, and what it read
    look()                    a cluster without room for any actor; a Ray that was shut down

An actor that has been asked for may come in a second, in an hour (the cluster grows), or never. So only actors that are
ready get tasks. The heartbeat of a dead actor is gone. What it read is known if it read one task *alone*, or if it had
said where it is before it was killed for its silence. A node that dies is no batch's fault.

The tasks of a lane (a part of iterable data, or workers that take turns) stay with one actor, which keeps the part
open. To give a lane to another actor costs the opening of a part, and changes no batch.

Under an order that datasets fetch ahead by, the first actor of a node that gets tasks is the one that fetches, for all
actors of the node. Each group of its tasks carries the position, so this needs no call. If it dies, the next actor that
gets tasks takes its place.

Owns the actors and the dataset in the object store. What can go wrong: no actor can begin, or there is never room for
one. Where others read, they go on without an actor that cannot begin.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sharded_loader.extend import Death, Job, Task, Transport, Worker
from sharded_loader.extend.engine import HELD, IN_BATCH, UNUSED, is_at
from sharded_loader.extend.tools import add_note, host_clock, logger
from sharded_loader.ray import cluster
from sharded_loader.ray.actor import Begun, LoaderActor

PATIENCE = 10.0
"""Seconds without any actor that is ready, before the user is told."""

LOOK_SECONDS = 0.5
"""Between two looks at what was asked for, and at those that are watched. If Ray is shut down, no event tells of it."""

ANSWER_SECONDS = 1.0
"""How long an actor that is to write its stacks is waited for."""


@dataclass(eq=False)
class Call:
    """A call of an actor that has not ended.

    Attributes:
        tasks: what it reads.
        alone: the actor had nothing else, and gets nothing else.
    """

    tasks: list[Task]
    alone: bool


class ActorWorker(Worker):
    """One actor.

    Args:
        number: see `Worker`.
        actor: Ray's handle.
        listen: notes the end of a call; see `RayTransport.listen`.

    Attributes:
        calls: the oldest first.
        begun: what it has said of itself; None before it is ready.
        heartbeat: where it was when it last answered.
        asked: it was asked where it is, and has not answered.
        failed: it could not begin, and no other is asked for in its place.
    """

    def __init__(self, number: int, actor: Any, listen: Callable[[Any, ActorWorker, Call | str], None]) -> None:
        super().__init__(number)
        self.actor, self._listen = actor, listen
        self.calls: list[Call] = []
        self.begun: Begun | None = None
        self.heartbeat: Sequence[int] = UNUSED
        self.asked = self.failed = False

    @property
    def who(self) -> str:
        said = self.begun
        return super().who + ("" if said is None else f" (pid {said.pid} on {said.host})")

    @property
    def is_alone(self) -> bool:
        """Whether it reads a task that travels alone."""
        return any(call.alone for call in self.calls)

    def control(self, name: str, *arguments: object) -> Any:
        """Call a method of the actor beside what it reads."""
        return getattr(self.actor, name).options(concurrency_group="control").remote(*arguments)

    def where(self) -> Sequence[int] | None:
        """The last known heartbeat. It is asked again. An actor may take any time to come."""
        if not self.ready or not self.calls:
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

    def end_call(self, call: Call | str) -> list[Task]:
        """A call has ended: the tasks that it had."""
        if not isinstance(call, Call) or call not in self.calls:
            return []
        self.calls.remove(call)
        for task in call.tasks:
            self.tasks.pop((task.run, task.seq), None)
        return call.tasks


Followed = tuple[int, object, Callable[[], "int | None"]]
"""An order that is read, for datasets that fetch ahead: what `Pool.follow` is given."""


class FetchAhead:
    """Has one actor of each node fetch ahead by the order that is read, and by no other one.

    Attributes:
        readers: by node, the actor whose dataset fetches ahead.
    """

    def __init__(self) -> None:
        self.readers: dict[str, ActorWorker] = {}
        self._job: Job | None = None
        self._followed: Followed | None = None
        self._order: Any = None  # in the object store

    def begin(self, job: Job | None) -> None:
        """The actors are new, or have another job. None: there are none, and they may come again."""
        # The same job: an interrupted step has closed the pool, and the run goes on.
        if job is not None and job is not self._job:
            self._job, self._followed = job, None
        self.follow(self._followed)

    def follow(self, followed: Followed | None) -> None:
        """Fetch by this order from now on; None: by none."""
        self._followed, self._order = followed, None
        self.readers.clear()

    def leave(self, run: int, workers: Sequence[ActorWorker]) -> None:
        """A run is not read any more."""
        if self._followed is not None and self._followed[0] == run:
            for worker in self.readers.values():
                if worker in workers:
                    worker.cancel(run)
            self.follow(None)

    def progress_for(self, worker: ActorWorker, workers: Sequence[ActorWorker]) -> tuple[int, ...]:
        """The run and its position, for the actor that fetches ahead on its node. If none lives, it is this one."""
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

Event = tuple[ActorWorker, "Call | str", "Future[Any]"]
"""A call that has ended: of which actor, the call (or its name, if it was no group), and how."""


class Absence:
    """The time without any actor that is ready, and what the user is told of it.

    Args:
        wanted: what each actor is asked for with.
        start_timeout: of the `RayPool`.

    Attributes:
        since: when it began.
    """

    def __init__(self, wanted: cluster.Wanted, start_timeout: float) -> None:
        self._wanted, self._start_timeout = wanted, start_timeout
        self.begin()

    def begin(self) -> None:
        """It begins, and no actor has been ready before."""
        self.since, self._is_told, self._had_one = host_clock.now(), False, False

    def end(self) -> None:
        """An actor is ready."""
        self._is_told, self._had_one = False, True

    def error(self) -> Exception | None:
        """The error that ends the pool, if there has been no actor for ``start_timeout``. Before that, a warning."""
        passed = host_clock.now() - self.since
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


class RayTransport(Transport[ActorWorker]):
    """Actors of Ray, and the calls to them.

    Args:
        num_workers: how many there are to be.
        wanted: what each is asked for with.
        start_timeout: of the `RayPool`.

    Attributes:
        actors: all actors that run; empty after `close`, and after a finalizer has stopped them.
        events: the calls that have ended.
        bell: rings when one has.
        ahead: see `FetchAhead`.
    """

    def __init__(self, num_workers: int, wanted: cluster.Wanted, start_timeout: float) -> None:
        self.num_workers, self._wanted, self._absence = num_workers, wanted, Absence(wanted, start_timeout)
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
        """The actors that have the dataset."""
        return [worker for worker in self.workers if worker.ready]

    @property
    def free(self) -> list[ActorWorker]:
        """The actors that any task may be sent to."""
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
            self._absence.since = host_clock.now()
        threads = max(1, int(self._wanted["num_cpus"]))
        actor = ray.remote(**self._wanted)(LoaderActor).remote(number, self.num_workers, threads)
        self.actors.append(actor)
        worker = ActorWorker(number, actor, self.listen)
        self._begin(worker)
        return worker

    def _begin(self, worker: ActorWorker) -> None:
        self.listen(worker.actor.begin.remote(self._published), worker, "begin")

    def listen(self, ref: Any, worker: ActorWorker, what: Call | str) -> None:
        """Make an `Event` of the end of a call."""
        ref.future().add_done_callback(functools.partial(_note, self.events, self.bell, worker, what))

    def has_begun(self, worker: ActorWorker, said: Begun) -> None:
        """An actor has its job. It gets its share of the lanes."""
        worker.begun, ready = said, self.ready
        self._absence.end()
        share = -(-len(self._holders) // max(1, len(ready)))
        for one in ready:
            for lane in [lane for lane, holder in self._holders.items() if holder is one][share:]:
                del self._holders[lane]  # others get it with its next task

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the actors
        self.workers = []
        cluster.stop(self.actors)
        self._holders.clear()
        self._published = None
        self.ahead.begin(None)
        # Calls that are under way may end yet: no event tells of it any more. Who waits in an outer step goes on.
        self.bell.put(None)
        self.events, self.bell = deque(), queue.SimpleQueue()
        self._absence.begin()

    def closer(self) -> Callable[[], None]:
        """Stops the actors, without a reference to this object."""
        actors, pid = self.actors, self._pid
        return lambda: cluster.stop_from_anywhere(actors) if os.getpid() == pid else None

    # -- tasks ----------------------------------------------------------------------------------------------

    def choose(self, task: Task, group: int, *, alone: bool) -> ActorWorker | None:
        """The actor that a task goes to; None if it has to wait."""
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
        return None if worker.is_alone or (alone and worker.calls) else worker

    def send(self, worker: ActorWorker, tasks: Sequence[tuple[Task, object]], *, alone: bool) -> None:
        """Have an actor read tasks, each with what is sent of it (`fields_of`), in one call."""
        content = pickle.dumps([(task.run, task.seq, fields) for task, fields in tasks], protocol=5)
        call = Call([task for task, _ in tasks], alone)
        worker.calls.append(call)
        worker.tasks.update({(task.run, task.seq): task for task in call.tasks})
        progress = self.ahead.progress_for(worker, self.workers)
        self.listen(worker.actor.read.remote(content, *progress), worker, call)

    def drain(self, worker: ActorWorker) -> None:
        cluster.stop(self.actors, worker.actor)
        self.bell.put(None)  # its tasks wait for another one

    # -- actors that end, or stand still --------------------------------------------------------------------

    def last_words(self, worker: ActorWorker, error: BaseException | None) -> Death:
        said = worker.begun or Begun(0, "", "")
        first = next(iter(worker.calls), None)
        heartbeat: Sequence[int] | None = None
        if first is None:
            heartbeat = UNUSED
        elif worker.hung and any(is_at(worker.heartbeat, task) for task in worker.tasks.values()):
            heartbeat = worker.heartbeat
        elif first.alone:
            heartbeat = first.tasks[0].run, first.tasks[0].seq, 0, IN_BATCH
        # A process that ends is told of by the program that has started it; if that is silent, the node has gone.
        has_gone = error is not None and cluster.is_of_node(error)
        death = Death(worker.number, said.pid, None, None, said.host, cluster.cause_of(error), worker.hung, heartbeat)
        return death._replace(
            is_of_machine=has_gone or bool(said.node and said.node not in cluster.alive()),
            is_final=bool(getattr(error, "actor_init_failed", False)),
        )

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
            return False  # it had begun before: then the job is to blame
        worker.failed = True
        cluster.stop(self.actors, worker.actor)
        logger.warning("RayPool: worker %s cannot start; the others read without it: %s", worker.number, error)
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether an actor that was asked for may come: no event tells that there is no room for it."""
        return any(not worker.ready and not worker.failed for worker in self.workers)

    def look(self) -> Exception | None:
        """What no event tells of: none that is ready, and no Ray. The error that ends the pool."""
        if self._session != cluster.session():
            return RuntimeError("Ray was shut down while the loader read: make the loader after ray.init()")
        return None if self.ready else self._absence.error()


def _note(events: deque[Event], bell: Bell, worker: ActorWorker, what: Call | str, future: Future[Any]) -> None:
    """In a thread of Ray's: a call has ended."""
    events.append((worker, what, future))
    if bell.empty():
        bell.put(None)
