"""The actors of a pool on Ray: asked for, given a job, replaced when they end.

    start(new_job)    the dataset lies in the object store once; actors are asked for, or told of the new job
    send(worker, ...) a group of tasks is one call; when it has ended, however it has, that is an event
    bury(worker, ...) an actor has ended -> another is asked for; its tasks wait; the error of a batch that is given up
    look()            actors that stand still are killed; a cluster without room for any is told about
    close()           no actor is left

An actor that has been asked for may come in a second, in an hour (the cluster grows), or never. So only actors that are
ready get tasks. Who is to blame for a death, `pools.ray.blame` finds out. A node that dies is nobody's fault.

Owns the actors and the dataset in the object store. What can go wrong: no actor can begin, or there is
never room for one (`PoolBroken`). The actors are stopped then.
"""

from __future__ import annotations

import functools
import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.notices import logger
from sharded_loader.engine.grouping import HELD
from sharded_loader.engine.messages import NOTHING, NewJob, Result, Task, pack_tasks
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.memory.classes import classes_of_main
from sharded_loader.memory.codec import decode
from sharded_loader.memory.exceptions import decode_error
from sharded_loader.pools.deaths import Death, Watch, unreachable_after
from sharded_loader.pools.ray.actor import Begun, LoaderActor
from sharded_loader.pools.ray.blame import Blame
from sharded_loader.pools.ray.connect import alive, put_job, session, what_there_is
from sharded_loader.pools.ray.lanes import Lanes
from sharded_loader.pools.ray.members import Call, Member, Wanted, cause_of, is_of_node, stop, stop_from_anywhere

PATIENCE = 10.0
"""Seconds without any actor that is ready, before the user is told."""

LOOK_SECONDS = 0.5
"""Between two looks at what was asked for, and at those that are watched."""

IDLE_SECONDS = 2.0
"""Between two looks where everything is as it should be. If Ray is shut down, no event tells of it."""

ANSWER_SECONDS = 1.0
"""How long an actor that is to write its stacks is waited for."""

Event = tuple[Member, "int | str", "Future[Any]"]
"""A call that has ended: of which actor, its number (or its name, if it was no group), and how."""


class Team:
    """Keeps the actors of a pool running.

    Args:
        num_workers: how many there are to be.
        wanted: what each is asked for with.
        restarts, timeout, start_timeout: of the `RayPool`.

    Attributes:
        members: the workers, by number.
        actors: all actors that run; empty after `close`, and after a finalizer has stopped them.
        requeued: tasks that wait for an actor that may read them.
        events: the calls that have ended.
        bell: rings when one has.
        blame: who is to blame when actors die.
        watch: how long each of them has stood still.
    """

    def __init__(
        self, num_workers: int, wanted: Wanted, restarts: int, timeout: float | None, start_timeout: float
    ) -> None:
        self.num_workers = num_workers
        self.restarts = restarts
        self.start_timeout = start_timeout
        self.members: list[Member] = []
        self.requeued: deque[Task] = deque()
        self.events: deque[Event] = deque()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.blame = Blame(restarts, timeout)
        self.watch = Watch(timeout)
        self._wanted = wanted
        self._lanes = Lanes()
        self._numbers = itertools.count()
        self.actors: list[Any] = []
        self._new: NewJob | None = None
        self._published: Any = None
        self._classes: list[type] = []
        self._without = time.monotonic()  # since when no actor is ready
        self._looked = 0.0
        self._session: str | None = None
        self._cancelled: set[int] = set()
        self._has_had = self._printed = False

    # -- actors ---------------------------------------------------------------------------------------------

    def start(self, new: NewJob) -> None:
        """Ask for actors. Those that are there are sent the new job before any later task."""
        if self.members and (not self.actors or self._session != session()):
            self.close()  # a finalizer has stopped the actors, or Ray was started again
        self._session = session()
        self._new, self._classes = new, classes_of_main()
        self._published = put_job(new)
        self.blame.deaths.new_job()
        if self.members:
            for member in self.members:
                self._begin(member)
            return
        try:
            self._without = time.monotonic()
            for number in range(self.num_workers):
                with uninterrupted():
                    self.members.append(self._ask_for(number))
        except BaseException:
            self.close()
            raise

    def _ask_for(self, number: int) -> Member:
        import ray

        threads = max(1, int(self._wanted.num_cpus))
        actor = ray.remote(**self._wanted.options())(LoaderActor).remote(number, self.num_workers, threads)
        self.actors.append(actor)
        member = Member(number, f"{number}-{next(self._numbers)}", actor)
        self._begin(member)
        return member

    def _begin(self, member: Member) -> None:
        self._listen(member.actor.begin.remote(self._published), member, "begin")

    def _listen(self, ref: Any, member: Member, what: int | str) -> None:
        ref.future().add_done_callback(functools.partial(_note, self.events, self.bell, member, what))

    @property
    def ready(self) -> list[Member]:
        """The actors that have the dataset."""
        return [member for member in self.members if member.begun is not None]

    @property
    def free(self) -> list[Member]:
        """The actors that any task may be sent to."""
        return [member for member in self.members if member.begun is not None and not member.is_alone]

    @property
    def step(self) -> float:
        """Seconds until the next `look`."""
        if any(member.begun is None and not member.failed for member in self.members):
            return LOOK_SECONDS
        return self.watch.step or IDLE_SECONDS

    def begun(self, member: Member, said: Begun) -> None:
        """An actor has answered to a job.

        Raises:
            PoolBroken: it cannot take it.
        """
        if member not in self.members:
            return
        if said.failure is not None:
            self.cannot_begin(member, decode_error(decode(said.failure)))  # type: ignore[arg-type]
            return
        member.begun, self._has_had, self._printed = said, True, False
        self.blame.deaths.record_start()
        self._lanes.share(self.ready)

    def cannot_begin(self, member: Member, error: Exception) -> None:
        """An actor could not take its job. If others read, they go on without it.

        Raises:
            PoolBroken: no other actor reads, or the actor had begun before: then the job is to blame.
        """
        if member.begun is not None or not self.ready:
            self.close()
            raise PoolBroken(error)
        member.failed = True
        stop(self.actors, member.actor)
        logger.warning("RayPool: worker %s cannot start; the others read without it: %s", member.number, error)

    def close(self) -> None:
        """Stop the actors, and give back what belongs to them."""
        self.members = []
        stop(self.actors)
        self.requeued.clear()
        self._lanes.clear()
        self._new, self._published, self._classes = None, None, []
        self._cancelled.clear()
        # Calls that are under way may end yet: nobody listens any more. Who waits in an outer step goes on.
        self.bell.put(None)
        self.events, self.bell = deque(), queue.SimpleQueue()
        self.blame, self._has_had, self._printed = Blame(self.restarts, self.watch.timeout), False, False

    def closer(self) -> Callable[[], None]:
        """`close` as far as others see it, without a reference to the team."""
        return functools.partial(stop_from_anywhere, self.actors)

    # -- tasks ----------------------------------------------------------------------------------------------

    def for_task(self, task: Task, group: int) -> Member | None:
        """The actor that a task goes to; None if it has to wait."""
        alone = self.blame.travels_alone(task)
        if task.lane is None:
            most = 1 if alone else HELD * group
            free = [member for member in self.free if member.load < most]
            return min(free, key=lambda member: member.load // group, default=None)
        member = self._lanes.holder(task.lane, self.ready)
        if member is None:
            return None
        return None if member.is_alone or (alone and member.calls) else member

    def send(self, member: Member, tasks: Sequence[tuple[Task, bytes | None]]) -> None:
        """Have an actor read tasks: in one call, or one that travels alone."""
        number, only = next(self._numbers), tasks[0][0]
        content, alone = pack_tasks([(None, task, own) for task, own in tasks]), self.blame.travels_alone(only)
        arguments: tuple[Any, ...] = (content,)
        if only.careful:
            arguments = content, self.blame.notebook(self.actors.append), member.key
        member.calls[number] = Call([task for task, _ in tasks], alone)
        self._listen(member.actor.read.remote(*arguments), member, number)

    def cancel(self, run: int) -> None:
        """Drop the tasks of a run that have not begun. Ray's own ``cancel`` can hold up an actor for half a minute."""
        self._cancelled.add(run)
        self.requeued = deque(task for task in self.requeued if task.run != run)
        for member in self.members:
            if any(task.run == run for task in member.tasks):
                member.actor.cancel.options(concurrency_group="control").remote(run)

    # -- actors that end, or stand still --------------------------------------------------------------------

    def bury(self, member: Member, error: BaseException) -> list[Result]:
        """An actor has ended: another is asked for, and its tasks wait.

        Args:
            member: the actor. Each of its calls ends with an error; the first one counts.
            error: Ray's.

        Returns:
            The error of the batch that has killed too many actors, and no batch for those that end with it.

        Raises:
            PoolBroken: actors die without having done anything.
        """
        if member not in self.members:
            return []
        cause = cause_of(error)
        begun = member.begun or Begun(0, "", "")
        death = Death(member.number, begun.pid, None, None, begun.host, cause)
        # A process that ends is told of by the program that has started it; if that is silent, the node has gone.
        is_gone = is_of_node(error) or (begun.node and begun.node not in alive())
        waiting, given_up = member.tasks, None
        try:
            if not is_gone:
                given_up = self.blame.count(member, death, in_init=getattr(error, "actor_init_failed", False))
        except PoolBroken as broken:
            self.cannot_begin(member, broken.error)
            return []
        results: list[Result] = []
        if given_up is not None:
            assert self._new is not None  # its actors read
            task = next(task for task in waiting if (task.run, task.seq) == (given_up.run, given_up.seq))
            waiting.remove(task)
            ended = unreachable_after(task, [*self.requeued, *waiting], self._new.job)
            waiting = [task for task in waiting if task not in ended]
            self.requeued = deque(task for task in self.requeued if task not in ended)
            results = [given_up, *(Result(task.run, task.seq, NOTHING) for task in ended)]
        for one in results:
            self.blame.settle(one.run, one.seq)
        with uninterrupted():
            stop(self.actors, member.actor)
            self.members[member.number] = self._ask_for(member.number)
        if not self.ready:
            self._without = time.monotonic()
        self.take_back(waiting)
        return results

    def take_back(self, tasks: Sequence[Task]) -> None:
        """Tasks that were under way wait again. They are older than all that wait."""
        wanted = [self.blame.marked(task) for task in tasks if task.run not in self._cancelled]
        self.requeued.extendleft(reversed(wanted))

    def look(self) -> None:
        """What no event tells of: actors that stand still, none that is ready, and no Ray.

        Raises:
            PoolBroken: there was never room for an actor, or somebody has shut Ray down.
        """
        now = time.monotonic()
        if now - self._looked < min(LOOK_SECONDS, self.step):
            return
        self._looked = now
        if self._session != session():
            self.close()
            raise PoolBroken(RuntimeError("Ray was shut down while the loader read: make the loader after ray.init()"))
        if self.watch.timeout is not None:
            self._stop_late()
        if self.ready:
            return
        passed = now - self._without
        if passed > PATIENCE and not self._printed:
            self._printed = True
            if self._has_had:
                fate = "all workers have ended, and there is no room for others. The loader goes on when there is"
            else:
                fate = f"after {PATIENCE:g} s no worker has begun, perhaps for want of room (start_timeout="
                fate += f"{self.start_timeout:g})"
            logger.warning("RayPool: %s: %s", fate, what_there_is(self._wanted.amounts))
        if passed > self.start_timeout and not self._has_had:
            asked = what_there_is(self._wanted.amounts)
            self.close()
            raise PoolBroken(
                TimeoutError(
                    f"no worker could start within {self.start_timeout:g} s (start_timeout=): {asked}. Ask for less "
                    f"(num_cpus=, resources=), or add nodes"
                )
            )

    def _stop_late(self) -> None:
        """Kill the actors that stand still. Their deaths are dealt with as such."""
        import ray

        busy = [member for member in self.ready if member.calls and not member.hung]
        for member in busy:
            if not member.asked:
                member.asked = True
                ref = member.actor.where.options(concurrency_group="control").remote()
                self._listen(ref, member, "where")
        late = self.watch.late([(member, member.words) for member in busy])
        if late:
            told = [member.actor.stacks.options(concurrency_group="control").remote() for member in late]
            ray.wait(told, num_returns=len(told), timeout=ANSWER_SECONDS)  # one that holds the GIL cannot write them
        for member in late:
            member.hung = True
            stop([member.actor])


def _note(
    events: deque[Event], bell: queue.SimpleQueue[None], member: Member, what: int | str, future: Future[Any]
) -> None:
    """In a thread of Ray's: a call has ended."""
    events.append((member, what, future))
    if bell.empty():
        bell.put(None)
