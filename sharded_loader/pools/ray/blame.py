"""Which batch is to blame for the death of an actor, and when it is given up.

    Blame.count(member, death) -> the error of a batch that is given up, or None
    Blame.travels_alone(task), Blame.marked(task)      how a task is read again
    Blame.settle(run, seq)                             a task is done

Nobody sees which task has killed an actor: it has groups of them, and a reply that was under way is lost with it. So
all its tasks are *suspects*. Each of them is then read alone, by an actor that has nothing else, and the deaths over it
are counted. After the first one the task is careful too: the actor tells the notebook of each sample, which the error
can then name (`pools.ray.actor`). Where one death is enough, suspects are careful at once.

Owns the notebook. What can go wrong: it dies, and errors do without the sample; or actors die, and no batch is to blame
(`PoolBroken`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sharded_loader.base.errors import add_note
from sharded_loader.engine.board import BEGINNING, is_at
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.pools.deaths import Death, Deaths, died, died_idle, died_in_start, timed_out
from sharded_loader.pools.ray.actor import LoaderNotebook
from sharded_loader.pools.ray.connect import here
from sharded_loader.pools.ray.members import Member

ANSWER_SECONDS = 5.0
"""How long the notebook is waited for."""


class Blame:
    """Counts what actors have died of.

    Args:
        restarts, timeout: of the `RayPool`.

    Attributes:
        deaths: how many, of what.
    """

    def __init__(self, restarts: int, timeout: float | None) -> None:
        self.deaths = Deaths(restarts)
        self._restarts = restarts
        self._timeout = timeout
        self._suspects: set[tuple[int, int]] = set()
        self._notebook: Any = None

    def notebook(self, register: Callable[[Any], Any]) -> Any:
        """The actor that is told of samples; made at the first call, on this node.

        Args:
            register: is given an actor that is made.
        """
        import ray

        if self._notebook is None:
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here(), soft=False)
            self._notebook = ray.remote(num_cpus=0, scheduling_strategy=strategy)(LoaderNotebook).remote()
            register(self._notebook)
        return self._notebook

    def travels_alone(self, task: Task) -> bool:
        """Whether an actor has died over this task, or over others of its group."""
        return (task.run, task.seq) in self._suspects

    def settle(self, run: int, seq: int) -> None:
        """A task is done."""
        if self.deaths.unsettled:
            self.deaths.settle(run, seq)
        self._suspects.discard((run, seq))

    def marked(self, task: Task) -> Task:
        """A task that has killed an actor alone is read carefully; if one death is enough, at once."""
        if self.deaths.count_of(task) or (self.travels_alone(task) and self._restarts <= 1):
            return task._replace(careful=True)
        return task

    def count(self, member: Member, death: Death, *, in_init: bool) -> Result | None:
        """An actor has died, and its node has not.

        Args:
            member: the actor, with what it had to read.
            death: how it has died.
            in_init: while it was made; so will all others.

        Returns:
            The error of the batch that has killed too many actors.

        Raises:
            PoolBroken: actors die without having done anything.
        """
        if member.begun is None:
            if self.deaths.record_start_death(death._replace(is_final=in_init)):
                raise PoolBroken(_explained(died_in_start(death)))
            return None
        calls = list(member.calls.values())
        task, words = None, member.words
        if member.hung:
            task = next((task for task in member.tasks if is_at(words, task)), None)
        if task is None and calls and calls[0].alone:
            task = calls[0].tasks[0]
            words = (task.run, task.seq, 0, BEGINNING)
            if task.careful and (noted := self._noted(member)) is not None:
                # Of an earlier task: this one had not begun. The actor had died before, and nobody knew.
                task, words = (task, noted) if is_at(noted, task) else (None, noted)
                calls = calls if task is not None else []
        if task is None:
            if calls:
                self._suspects.update((task.run, task.seq) for task in member.tasks)
            elif self.deaths.record_idle_death(member.number):
                raise PoolBroken(died_idle(death))
            return None
        self._suspects.add((task.run, task.seq))
        if not self.deaths.record_batch_death(task):
            return None
        tries = max(1, self._restarts)
        if member.hung and self._timeout is not None:
            late: Exception = timed_out(death.who, self._timeout, task, words, tries, killed=True)
            return Result(task.run, task.seq, error=late)
        return Result(task.run, task.seq, error=died(death, task, words, tries))

    def _noted(self, member: Member) -> Sequence[int] | None:
        """Where an actor was that read carefully; None if it did not, or if nobody knows."""
        if self._notebook is None:
            return None
        import ray

        try:
            return ray.get(self._notebook.last.remote(member.key), timeout=ANSWER_SECONDS)  # type: ignore[no-any-return]
        except Exception:  # the notebook has died too: the error does without, and the next one gets another
            self._notebook = None
            return None


def _explained(error: Exception) -> Exception:
    if "No module named 'sharded_loader'" in str(error):
        add_note(
            error,
            "sharded_loader: the nodes do not have this library. Install it there, or send it along: "
            'RayPool(n, runtime_env={"py_modules": [sharded_loader]})',
        )
    return error
