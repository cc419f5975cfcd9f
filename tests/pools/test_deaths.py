"""Who is to blame for a death, and when it is no use to go on: the rules alone."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_loader.base.errors import describe_exit
from sharded_loader.pools.deaths import IDLE_DEATHS, LOOK_SECONDS, PROVEN, Death, Deaths, Watch

KILLED, TERMINATED, CRASHED, LEFT, UNKNOWN = -9, -15, -11, 1, None


@pytest.mark.parametrize("exitcode", [CRASHED, LEFT, 0, -6])
@pytest.mark.parametrize("proven", [False, True])
def test_starts_that_fail_by_themselves_are_given_up_soon_whatever_is_killed_in_between(
    exitcode: int, proven: bool
) -> None:
    deaths = Deaths(3)
    if proven:
        deaths.begin_starts(proven=True)
    assert not any(deaths.record_start_death(Death(worker, 71, KILLED)) for worker in range(8))
    assert [deaths.record_start_death(Death(worker, 71, exitcode)) for worker in (0, 1, 2)] == [False, False, True]


@pytest.mark.parametrize("exitcode", [KILLED, TERMINATED, UNKNOWN])
def test_starts_that_are_killed_are_given_up_late_where_workers_are_known_to_start(exitcode: int | None) -> None:
    deaths = Deaths(3)
    assert [deaths.record_start_death(Death(0, 71, exitcode)) for _ in range(3)] == [False, False, True]
    deaths = Deaths(3)
    deaths.begin_starts(proven=True)
    last = 3 * PROVEN - 1
    assert [deaths.record_start_death(Death(0, 71, exitcode)) for _ in range(last + 1)] == [False] * last + [True]


def test_many_workers_that_are_killed_at_once_while_they_start_are_no_reason_to_stop() -> None:
    deaths = Deaths(3)
    assert not any(deaths.record_start_death(Death(worker, 71, KILLED)) for worker in range(64) for _ in range(2))
    deaths.begin_starts(proven=True)
    assert not any(deaths.record_start_death(Death(worker, 71, KILLED)) for worker in range(64) for _ in range(9))


def test_a_worker_that_is_ready_begins_the_count_anew_and_another_dataset_is_not_proven() -> None:
    deaths = Deaths(2)
    assert not deaths.record_start_death(Death(0, 71, LEFT))
    deaths.begin_starts(proven=True)
    assert not deaths.record_start_death(Death(0, 71, LEFT))
    assert deaths.record_start_death(Death(1, 71, LEFT))
    deaths.begin_starts(proven=False)
    assert not deaths.record_start_death(Death(0, 71, KILLED))
    assert deaths.record_start_death(Death(0, 71, KILLED))


def test_workers_that_die_idle_again_and_again_are_a_reason_to_stop_unless_a_batch_comes() -> None:
    deaths = Deaths(1)
    assert not any(deaths.record_idle_death(worker) for worker in range(64))  # all at once
    deaths = Deaths(3)
    for _ in range(2):
        assert not any(deaths.record_idle_death(0) for _ in range(IDLE_DEATHS - 1))
        deaths.resolve(0, 0)
    assert [deaths.record_idle_death(0) for _ in range(IDLE_DEATHS)] == [False] * (IDLE_DEATHS - 1) + [True]


def test_a_kill_is_told_as_what_is_known_of_it() -> None:
    assert describe_exit(KILLED).endswith(
        "often the kernel's out-of-memory killer: see dmesg, use fewer workers or smaller batches"
    )
    assert "this container's own limit was not the cause" in describe_exit(KILLED, 0)
    assert "has struck in this cgroup, 2 x since the workers started" in describe_exit(KILLED, 2)
    assert "memory" not in describe_exit(TERMINATED, 2) + describe_exit(LEFT, 2)


@pytest.mark.parametrize(("timeout", "to_start"), [(8.0, 600), (700.0, 700)])
def test_a_worker_that_starts_is_given_ten_minutes_or_the_timeout(
    timeout: float, to_start: int, host_time: Any
) -> None:
    watch, late = Watch(timeout), dict[str, float]()
    for look in range(1000):
        for who in watch.stalled([("reading", [0, 1, 0, 2]), ("starting", ())]):
            late.setdefault(who, look)
        host_time.move(1.0)
    assert late == {"reading": timeout, "starting": to_start}


def test_only_a_worker_that_stands_still_while_somebody_looks_is_late(host_time: Any) -> None:
    watch = Watch(4.0)
    assert watch.step == 0.5
    still, moves = [0, 1, 0, 2], [0, 1, 0, 0]

    def look(seconds: float, *others: tuple[str, list[int]]) -> list[str]:
        host_time.move(seconds)
        moves[3] += 1
        return watch.stalled([("moves", moves), *others])

    assert look(0.5, ("still", still)) == []
    assert look(3600, ("still", still)) == []  # the trainer was away: it counts as two steps
    assert [look(0.5, ("still", still)) for _ in range(6)] == [[]] * 5 + [["still"]]
    assert look(0.5) == []  # it has nothing to do
    assert [look(0.5, ("still", still)) for _ in range(9)] == [[]] * 8 + [["still"]]
    assert Watch(None).step == LOOK_SECONDS and Watch(None).stalled([("still", still)]) == []
