"""The position of a loader, on numbers: ten samples in threes are four batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sharded_loader.engine.pipeline import Run
from sharded_loader.loader.epochs import At, Progress
from sharded_loader.sampling.order import MapOrder

NUMBERS = itertools.count()


class Iterator:
    """Stands for an iterator: progress holds it weakly, and asks for its run."""

    run: Run | None = None


def progress_of(**given: Any) -> Progress:
    arguments: dict[str, Any] = dict.fromkeys(("sampler", "last_batch", "batch_sampler", "num_replicas", "rank"))
    return Progress(MapOrder(10, **{**arguments, "batch_size": 3, "shuffle": False, "seed": 1, **given}))


def begin(progress: Progress) -> tuple[Run, Iterator]:
    """An iterator has been given its first batch."""
    run, iterator = Run(next(NUMBERS), progress.begin()), Iterator()
    iterator.run = run
    deliver(progress, run)
    progress.begun(run, iterator)
    return run, iterator


def deliver(progress: Progress, run: Run, count: int = 1) -> None:
    run.delivered += count
    progress.current_run = run


def test_before_any_batch_a_loader_is_at_the_beginning_of_epoch_0() -> None:
    progress = progress_of()
    assert (progress.at(), progress.length(), progress.now, progress.run()) == ((0, 0), 4, At.BEGINNING, None)


def test_the_states_and_what_leads_from_one_to_the_next() -> None:
    progress = progress_of()
    run, iterator = begin(progress)
    assert progress.now is At.RUN
    state = progress.state()
    progress.load(state, strict=True)
    assert progress.now is At.LOADED, "whatever iterators are alive"
    progress.set_epoch(0)
    assert progress.now is At.LOADED
    mark = progress.rollback_point()
    again, _other = begin(progress)
    assert progress.now is At.RUN
    progress.roll_back(mark, again)
    assert (progress.now, progress.at()) == (At.LOADED, (0, 1))
    progress.set_epoch(3)
    assert progress.now is At.BEGINNING
    deliver(progress, run)
    assert progress.now is At.RUN, "its iterator is alive"
    del iterator
    assert progress.now is At.BEGINNING
    run, _iterator = begin(progress)
    run.ended = True
    assert (progress.now, progress.at()) == (At.BEGINNING, (4, 0))


def test_the_position_is_that_of_the_run_that_delivered_last() -> None:
    progress = progress_of()
    run, _iterator = begin(progress)
    assert progress.at() == (0, 1)
    deliver(progress, run, 2)
    assert (progress.at(), progress.run()) == ((0, 3), run)


def test_after_the_end_of_an_epoch_the_next_one_begins() -> None:
    progress = progress_of()
    run, _iterator = begin(progress)
    deliver(progress, run, 3)
    run.ended = True
    assert (progress.at(), progress.run()) == ((1, 0), None)


def test_after_a_break_the_position_stays_although_the_iterator_is_gone() -> None:
    progress = progress_of()
    run, iterator = begin(progress)
    del iterator
    assert progress.run() is run
    assert progress.live_runs() == []


def test_set_epoch_makes_another_epoch_the_next_one() -> None:
    progress = progress_of()
    run, iterator = begin(progress)
    progress.set_epoch(5)
    assert progress.at() == (0, 1), "the iterator is alive, so its epoch is shown"
    del iterator
    assert progress.at() == (5, 0)
    assert run.epoch.number == 0


def test_a_first_next_that_was_interrupted_leaves_the_position_as_it_was() -> None:
    progress = progress_of()
    mark = progress.rollback_point()
    run, _iterator = begin(progress)
    progress.roll_back(mark, run)
    assert (progress.at(), progress.rollback_point(), progress.live_runs()) == ((0, 0), mark, [])


@pytest.mark.parametrize("delivered", [1, 2, 3])
def test_a_state_leads_back_to_its_position(delivered: int) -> None:
    progress = progress_of()
    run, _iterator = begin(progress)
    deliver(progress, run, delivered - 1)
    state = progress.state()
    assert (state["epoch"], state["samples"]) == (0, 3 * delivered)
    other = progress_of()
    other.load(state, strict=True)
    assert (other.at(), other.now, other.length()) == ((0, delivered), At.LOADED, 4)
    assert other.state() == state


def test_a_state_after_the_last_batch_is_the_beginning_of_the_next_epoch() -> None:
    progress = progress_of()
    run, _iterator = begin(progress)
    deliver(progress, run, 3)
    other = progress_of()
    other.load(progress.state(), strict=True)
    assert other.at() == (1, 0)


def test_set_epoch_keeps_a_loaded_position_in_that_epoch_and_drops_it_in_another() -> None:
    progress = progress_of()
    begin(progress)
    other = progress_of()
    other.load(progress.state(), strict=True)
    other.set_epoch(0)
    assert other.at() == (0, 1)
    other.set_epoch(1)
    assert (other.at(), other.now) == ((1, 0), At.BEGINNING)


def test_a_loaded_position_does_not_come_back_with_its_epoch() -> None:
    progress = progress_of()
    begin(progress)
    other = progress_of()
    other.load(progress.state(), strict=True)
    other.set_epoch(1)
    other.set_epoch(0)
    assert (other.at(), other.now) == ((0, 0), At.BEGINNING)


def test_with_rollover_the_rest_of_an_epoch_begins_the_next_one() -> None:
    progress = progress_of(last_batch="rollover")
    run, _iterator = begin(progress)
    deliver(progress, run, 2)
    state = progress.state()
    assert (state["epoch"], state["samples"]) == (0, 9)
    run.ended = True
    assert (progress.state()["epoch"], progress.state()["samples"]) == (1, -1)


def test_a_state_of_another_loader_is_refused_and_changes_nothing() -> None:
    progress = progress_of()
    begin(progress)
    other = progress_of(batch_size=4)
    with pytest.raises(ValueError, match="batch_size was 3, and is 4"):
        other.load(progress.state(), strict=True)
    assert (other.at(), other.now) == ((0, 0), At.BEGINNING)
