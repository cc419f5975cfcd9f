"""Which batch is to blame for the death of an actor."""

from __future__ import annotations

import pytest

from sharded_loader import WorkerDiedError, WorkerTimeoutError
from sharded_loader.engine.messages import Task
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.pools.deaths import IDLE_DEATHS, Death
from sharded_loader.pools.ray.actor import Begun
from sharded_loader.pools.ray.blame import Blame
from sharded_loader.pools.ray.members import Call, Member

DEATH = Death(0, 71, None, None, "10.0.0.1", "It exited.")


def task(seq: int) -> Task:
    return Task(0, seq, 0, 0, ([10 * seq, 10 * seq + 1],), False)


def member(*calls: Call) -> Member:
    return Member(0, "0-0", None, dict(enumerate(calls)), Begun(71, "node", "10.0.0.1"))


def test_all_tasks_of_an_actor_that_died_are_suspects_and_none_is_blamed() -> None:
    blame = Blame(3, None)
    had = member(Call([task(0), task(1)], alone=False), Call([task(2)], alone=False))
    assert blame.count(had, DEATH, in_init=False) is None
    assert all(blame.travels_alone(task(seq)) for seq in range(3))
    assert not blame.travels_alone(task(3))
    assert not blame.marked(task(0)).careful


def test_a_task_that_kills_alone_is_careful_then_and_given_up_at_last() -> None:
    blame = Blame(3, None)
    blame.count(member(Call([task(0), task(1)], alone=False)), DEATH, in_init=False)
    for _ in range(2):
        assert blame.count(member(Call([task(1)], alone=True)), DEATH, in_init=False) is None
        assert blame.marked(task(1)).careful
    given_up = blame.count(member(Call([task(1)], alone=True)), DEATH, in_init=False)
    assert given_up is not None
    error = given_up.error
    assert isinstance(error, WorkerDiedError)
    assert (given_up.seq, error.batch, error.exitcode) == (1, 1, None)
    assert "worker 0 (pid 71 on 10.0.0.1) died: It exited." in str(error)
    assert not blame.marked(task(0)).careful


def test_where_one_death_is_enough_suspects_are_read_carefully_at_once() -> None:
    blame = Blame(1, None)
    blame.count(member(Call([task(0), task(1)], alone=False)), DEATH, in_init=False)
    assert blame.marked(task(0)).careful
    assert blame.count(member(Call([task(0)], alone=True)), DEATH, in_init=False) is not None


def test_a_task_that_is_done_is_no_suspect_any_more() -> None:
    blame = Blame(3, None)
    blame.count(member(Call([task(0)], alone=False)), DEATH, in_init=False)
    blame.settle(0, 0)
    assert not blame.travels_alone(task(0))


def test_an_actor_that_hung_was_in_the_task_that_its_board_says() -> None:
    blame = Blame(1, 2.0)
    had = member(Call([task(0), task(1)], alone=False))
    had.hung, had.words = True, [0, 1, 0, 1]
    given_up = blame.count(had, DEATH, in_init=False)
    assert given_up is not None
    assert isinstance(given_up.error, WorkerTimeoutError)
    assert given_up.error.index == 11


def test_a_careful_task_that_had_not_begun_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    blame = Blame(1, None)
    careful = task(4)._replace(careful=True)
    monkeypatch.setattr(blame, "_noted", lambda member: [0, 3, 0, 1])  # the last that the actor has told was another
    assert blame.count(member(Call([careful], alone=True)), DEATH, in_init=False) is None
    monkeypatch.setattr(blame, "_noted", lambda member: [0, 4, 0, 1])
    given_up = blame.count(member(Call([careful], alone=True)), DEATH, in_init=False)
    assert given_up is not None
    assert isinstance(given_up.error, WorkerDiedError)
    assert given_up.error.index == 41


def test_actors_that_die_without_a_task_again_and_again_break_the_pool() -> None:
    blame = Blame(3, None)
    for _ in range(IDLE_DEATHS - 1):
        assert blame.count(member(), DEATH, in_init=False) is None
    with pytest.raises(PoolBroken, match="between batches"):
        blame.count(member(), DEATH, in_init=False)


def test_actors_that_cannot_be_made_break_the_pool_at_once() -> None:
    unborn = Member(0, "0-0", None)
    lacking = DEATH._replace(cause="ModuleNotFoundError: No module named 'sharded_loader'")
    with pytest.raises(PoolBroken) as caught:
        Blame(3, None).count(unborn, lacking, in_init=True)
    assert "py_modules" in "\n".join(caught.value.error.__notes__)


def test_actors_that_die_in_their_start_break_the_pool_after_a_few() -> None:
    blame = Blame(2, None)
    assert blame.count(Member(0, "0-0", None), DEATH, in_init=False) is None
    with pytest.raises(PoolBroken, match="while it started"):
        blame.count(Member(0, "0-1", None), DEATH, in_init=False)
