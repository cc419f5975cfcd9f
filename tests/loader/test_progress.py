"""The position of a loader, on numbers: ten samples in threes are four batches."""

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


def test_the_states_and_what_leads_from_one_to_the_next() -> None:
    progress = progress_of()
    assert (progress.at(), progress.length(), progress.now, progress.run()) == ((0, 0), 4, At.BEGINNING, None)
    before = progress.rollback_point()
    run, iterator = begin(progress)
    progress.roll_back(before, run)  # the first next was interrupted
    assert (progress.at(), progress.rollback_point(), progress.live_runs()) == ((0, 0), before, [])
    run, iterator = begin(progress)
    assert (progress.now, progress.at(), progress.run()) == (At.RUN, (0, 1), run)
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
    assert (progress.now, progress.at()) == (At.RUN, (0, 2)), "its iterator is alive, so its epoch is shown"
    del iterator
    assert (progress.now, progress.at()) == (At.BEGINNING, (3, 0)) and run.epoch.number == 0
    run, _iterator = begin(progress)
    run.ended = True
    assert (progress.now, progress.at(), progress.run()) == (At.BEGINNING, (4, 0), None)


def test_after_a_break_the_position_stays_although_the_iterator_is_gone() -> None:
    progress = progress_of()
    run, iterator = begin(progress)
    del iterator
    assert progress.run() is run and progress.live_runs() == []


@pytest.mark.parametrize("delivered", [1, 2, 3, 4])
def test_a_state_leads_back_to_its_position_and_set_epoch_keeps_it_in_that_epoch_alone(delivered: int) -> None:
    progress = progress_of()
    run, _iterator = begin(progress)
    deliver(progress, run, delivered - 1)
    state = progress.state()
    assert (state["epoch"], state["samples"]) == (0, min(3 * delivered, 10))
    other = progress_of()
    other.load(state, strict=True)
    if delivered == 4:  # the last batch: the next epoch begins
        assert other.at() == (1, 0)
        return
    assert (other.at(), other.now, other.length()) == ((0, delivered), At.LOADED, 4) and other.state() == state
    other.set_epoch(0)
    assert other.at() == (0, delivered)
    for epoch in (1, 0):  # it does not come back with its epoch
        other.set_epoch(epoch)
        assert (other.at(), other.now) == ((epoch, 0), At.BEGINNING)
    with pytest.raises(ValueError, match="batch_size was 3, and is 4"):
        (another := progress_of(batch_size=4)).load(state, strict=True)
    assert (another.at(), another.now) == ((0, 0), At.BEGINNING)


def test_with_rollover_the_rest_of_an_epoch_begins_the_next_one() -> None:
    progress = progress_of(last_batch="rollover")
    run, _iterator = begin(progress)
    deliver(progress, run, 2)
    state = progress.state()
    assert (state["epoch"], state["samples"]) == (0, 9)
    run.ended = True
    assert (progress.state()["epoch"], progress.state()["samples"]) == (1, -1)
