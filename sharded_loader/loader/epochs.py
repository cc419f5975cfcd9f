"""A loader's epochs: where the loader is in them, which run an iterator gets, and how the pool comes to read it.

    next(iterator), the first time:   choose -> Run      which batches; changes nothing in the loader
                                      open               the pool is started, or told, and reads
                                      Progress.begun     the first batch is handed out: the epoch has begun
    each next(iterator):              current_run        the position is that of the iterator's run
    interrupted before a batch came:  keep               the epoch has not begun; the same run is chosen again
    all of an epoch is planned:       read_ahead         the run of the next epoch, if nothing changes before that
    load_state_dict:                  Progress.pending   the position is pending until an epoch begins

`Place` draws the states of the position. Of several iterators, the one that began or delivered last has it.

While the last batches of an epoch are consumed, workers read the first ones of the next. This is done where the order
is a pure function of the epoch: with samplers of this library. If another epoch is asked for, or the order is another
one by then, the prefetched batches are dropped.

Owns the position and the run that is kept. The pipeline owns the runs that are open. The order knows which epoch is
next, a run how much of it was delivered.

Inline and in threads all readers share one dataset. If it has ``set_epoch``, it can be in one epoch only: runs of
another epoch end with an error. In a process worker the dataset is the worker's own, and its `Reader` tells it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from sharded_loader.base.imports import provided
from sharded_loader.base.interrupts import pass_on
from sharded_loader.base.notices import Notices
from sharded_loader.base.private import is_owned
from sharded_loader.data.bulk import takes_arrays
from sharded_loader.data.datasets import can_follow, follow
from sharded_loader.data.inspection import Known
from sharded_loader.data.seeding import set_epoch_of
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Job
from sharded_loader.engine.order import Epoch, Position
from sharded_loader.engine.pipeline import CurrentRun, Pipeline, Run
from sharded_loader.loader.arguments import length
from sharded_loader.sampling.base import nested
from sharded_loader.sampling.epoch import Ahead, MapEpoch
from sharded_loader.sampling.order import MapOrder
from sharded_loader.sampling.state import has_weights
from sharded_loader.streams.order import StreamOrder


class At(Enum):
    """The state of a `Place`."""

    BEGINNING = "the beginning of the next epoch"
    LOADED = "a loaded position in the next epoch"
    RUN = "behind the batches that a run has delivered"


RollbackPoint = tuple[int, Any, Run | None]
"""What decides a position: the next epoch, `pending` and `current_run`. Equal ones begin at the same place."""


class Place(CurrentRun):
    """Where a loader is in its epochs, as a state machine. `now` is its state.

                set_epoch: another
            +-------------------------+
            v          load           |
         BEGINNING  ------------->  LOADED
          |     ^                    ^  |
    begun |     | over, left    load |  | begun
          v     |                    |  v
         +--------------------------------+
         |  RUN  a batch: current_run=run |
         +--------------------------------+

     begun    the first batch of an epoch, or its end, is handed out
     over     the end of the run was seen
     left     the run's iterator is gone, and another epoch is next than the one after the run's

     Both loaders have these states. How an epoch begins differs, so each has a subclass: in one class each method would
     ask which of the two it serves. The order of a `ShardedDataLoader` gives the batches of any epoch, as often as it
     is asked: `Progress` makes an epoch, drops it, and makes it again. The drop-in draws an epoch once, as torch does,
     when an iterator is made. So `TorchProgress` has an iterator that waits with its epoch for the first ``next``, and
     a loaded state that fits any epoch.

     Args:
         epochs: count the epochs, by ``next_epoch`` and ``set_epoch``: an order, or the drop-in's count.

     Attributes:
         pending: the loaded position, or where the last epoch has left the next one.
         current_run: the run that began or delivered last; None: none has since a position was loaded.
         live: the iterators that have begun an epoch and are alive, by the numbers of their runs.
         keeps: ``set_epoch`` drops no position: there is no arrow from LOADED to BEGINNING, and none for ``left``.
    """

    keeps = False

    def __init__(self, epochs: Any) -> None:
        self._order = epochs
        self.pending: Any = None
        self.live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def now(self) -> At:
        """The state."""
        run, coming = self.current_run, self._order.next_epoch
        if self.pending is not None:
            if self.keeps or self.pending.epoch == coming:
                return At.LOADED
            self.pending = None  # it does not come back with its epoch
        if run is None or run.ended:
            return At.BEGINNING
        is_last = run.epoch.number + 1 == coming
        return At.RUN if self.keeps or is_last or self.live.get(run.number) is not None else At.BEGINNING

    def run(self) -> Run | None:
        """The run that is at the position, if one is."""
        return self.current_run if self.now is At.RUN else None

    def begun(self, run: Run, iterator: object) -> None:
        """An epoch has begun, with its first batch: the one after it is next."""
        self.live[run.number] = iterator
        self._order.set_epoch(run.epoch.number + 1)
        self.pending = run.epoch.carry


class Progress(Place):
    """The position of a loader in the batches of its order.

    A first ``next`` that was interrupted has not begun its epoch: `roll_back` restores the `rollback_point`
    before it. Batches planned for a rollback point are those of the next epoch as long as that point is the same.

    Args:
        order: the loader's. ``set_epoch`` of samplers and of the dataset may change which epoch is next, too.
        entries: a function that returns what a state has of the data.
    """

    _order: MapOrder | StreamOrder
    pending: Position | None

    def __init__(self, order: MapOrder | StreamOrder, entries: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__(order)
        self._entries = entries
        self._length: int | None = None  # of the dataset, when a position in it was loaded

    def live_runs(self) -> list[Run]:
        """The runs of the iterators that are alive."""
        # A list of references is made in one step. Iterating would fail while another thread begins an epoch.
        iterators = [reference() for reference in self.live.valuerefs()]
        return [run for one in iterators if one is not None and (run := one.run) is not None]

    def rollback_point(self) -> RollbackPoint:
        """What `roll_back` restores."""
        return self._order.next_epoch, self.pending, self.current_run

    def roll_back(self, point: RollbackPoint, run: Run) -> None:
        """The first ``next`` of a run was interrupted: its epoch has not begun."""
        self.live.pop(run.number, None)
        epoch, self.pending, self.current_run = point
        self._order.set_epoch(epoch)

    def replace(self, run: Run, by: Run, iterator: object) -> None:
        """An iterator goes on with another run of the same epoch."""
        self.live.pop(run.number, None)
        self.live[by.number] = iterator
        if self.current_run is run:
            self.current_run = by

    def was_over(self, run: Run) -> bool:
        """The end of a run was seen. Whether its epoch was over already where the loaded position was.

        `load` notices this where the sampler has a length. The next epoch is the one after it. If ``set_epoch`` has
        asked for the run's epoch since, that epoch begins again.
        """
        epoch = run.epoch
        if not epoch.in_mid_epoch or epoch.batches(run.delivered) != epoch.first:
            return False
        if self._order.asked and self._order.next_epoch == epoch.number + 1:
            self._order.set_epoch(epoch.number)
        return True

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; if another was, the loaded position is dropped."""
        self._order.set_epoch(epoch)
        self._order.asked = True
        self._loaded()

    def begin(self) -> Epoch:
        """The epoch that begins now.

        Raises:
            ValueError: the dataset has changed its length since a position in it was loaded.
        """
        position = self._loaded()
        moved = position is not None and (position != Position(position.epoch) or self._order.rolls_over)
        if position is not None and moved and self._length != self._order.dataset_length:
            raise ValueError(
                f"the loaded state is a position in a dataset of {self._length} samples, and loader.refresh() found "
                f"{self._order.dataset_length}: drop the position with "
                f"set_epoch({position.epoch + 1}), and begin any epoch"
            )
        coming = self.coming()
        if position is None and self.current_run is not None:
            coming.go_on_from(self.current_run.epoch)
        return coming

    def coming(self) -> Epoch:
        """The epoch that begins next, from the loaded position on if there is one."""
        position = self._loaded()
        return self._order.epoch(self._order.next_epoch, position)

    def _loaded(self) -> Position | None:
        return self.pending if self.now is At.LOADED else None

    def at(self) -> tuple[int, int]:
        """Epoch, and batches delivered in it."""
        run = self.run()
        if run is not None:
            return run.epoch.number, run.epoch.batches(run.delivered)
        return self._order.next_epoch, self.coming().first if self.now is At.LOADED else 0

    def length(self) -> int:
        """Batches in the epoch of `at`."""
        run = self.run()
        if run is not None and run.epoch.resumed:
            return run.epoch.length()
        return self.coming().length() if self.now is At.LOADED else self._order.length(self.at()[0])

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The position as a state."""
        run = self.run()
        epoch = self.coming() if run is None else run.epoch
        ahead, is_over = provided("trainer", "fetched")()
        if run is not None and is_over and self._order.stream is not None:
            run, epoch = None, self._order.epoch(epoch.number + 1)
        position = epoch.position(epoch.first if run is None else max(epoch.first, run.delivered - ahead))
        ended = self.current_run
        if run is None and ended is not None and ended.ended and ended.epoch.number + 1 == position.epoch:
            position = ended.epoch.after(position)
        return {**epoch.state(position), **self._entries()}

    def load(
        self, state: object, strict: bool, skip: object = None, check: Callable[[], object] = lambda: None
    ) -> bool:
        """Continue at the position of a state, unless ``check`` raises an error.

        Returns:
            Whether the loader's seeds have changed with it.

        Raises:
            TypeError, ValueError: the state does not fit. Nothing has changed then.
        """
        before = self._order.given_skip
        try:
            self._order.add_skip(skip)
            position, changed = self._order.load(state, strict, check=check)
        except BaseException:
            self._order.given_skip = before
            raise
        self.current_run = None
        self.begin_at(position)
        return changed

    def begin_at(self, position: Position) -> None:
        """The next epoch begins at this position."""
        self._order.set_epoch(position.epoch)
        self.pending, self._order.asked = position, False
        self._length = self._order.dataset_length


# -- epochs ------------------------------------------------------------------------------------------------------------


def warn_of_length(dataset: object, known: int | None, notices: Notices, then: str) -> None:
    """Warn if a dataset has another length than is known. ``then`` says what that means, and what to do."""
    try:
        now = None if known is None else length(dataset)
    except Exception as error:  # what reads it will say so
        pass_on(error)
        return
    if now is not None and now != known:
        notices.warn("length", f"the dataset has {now} samples, and had {known} when the loader last looked. {then}")


class Epochs:
    """The epochs of one loader.

    Args:
        job: what is read, and how. Seed and parts are those of the order when an epoch begins.
        order: which epoch is next, and its batches.
        pipeline: of the loader. Its pool is the one that reads where ``resident`` does not.
        placement: of the loader.
        resident: gathers batches on the devices, if they have room.

    Attributes:
        dataset, batchify_fn: of the job.
        order, pipeline, placement, resident: as above.
        known: what states have of the data.
        progress: the loader's position.
        stale: the dataset or the seed has changed since the workers were told.
        prefetch_epochs: read the next epoch's first batches while the last ones of an epoch are consumed. May be set
            at any time.
    """

    def __init__(
        self, job: Job, order: MapOrder | StreamOrder, pipeline: Pipeline, placement: Placer, resident: Any = None
    ) -> None:
        self._job, self.dataset, self.batchify_fn = job, job.dataset, job.batchify_fn
        self.order, self.pipeline, self.placement, self.resident = order, pipeline, placement, resident
        self.known = Known(job.dataset)
        self.progress = Progress(order, self.known.entries)
        self._workers = pipeline.pool
        self.prefetch_epochs = not pipeline.pool.shares_dataset
        self._numbers = itertools.count()
        order.arrays = job.batchify_fn is None and takes_arrays(job.dataset)
        order.max_shards = pipeline.split.max_shards
        pipeline.split.costs = order.shard_costs
        # A run that has given no batch, and what decided its batches if it is prefetched; None: they are what they are.
        self._kept: tuple[Run, Any] | None = None
        self.stale = False

    def choose(self) -> Run:
        """A run of the epoch that is next, for an iterator that is asked for its first batch. Changes nothing else.

        If the first ``next`` was interrupted, the epoch has not begun, and its run is taken up again here: a sampler of
        another library may not yield the batches twice that were planned already.
        """
        self.pipeline.check_open()
        self.order.settle_replicas()
        if isinstance(self.order, MapOrder) and not (
            self.stale or (self._workers.shares_dataset and self.order.sampling.given is not None)
        ):
            then = "The loader still reads the old number, and workers may have old copies"
            then = f"{then}: call loader.refresh() after you change the dataset"
            warn_of_length(self.dataset, self.order.dataset_length, self._workers.notices, then)
        point = self.progress.rollback_point()
        run = self._take_kept(point) or self.new_run(self.progress.begin())
        run.rollback_point = point
        return run

    def open(self, run: Run, iterator: Any) -> None:
        """Have the pool read an iterator's run. The pipeline's step has begun."""
        pool, resident = self._workers, self.resident
        if resident is not None and resident.load(again=self.stale):
            pool = resident
        if pool.shares_dataset:
            self.placement.settle()
            self._tell_epoch(run)
        self.order.begun(run.epoch)
        self.pipeline.open(run, self.job_now(), renew=self.stale, pool=pool)
        self.stale = False
        self._tell_order(run, iterator)

    def keep(self, run: Run) -> None:
        """The first ``next`` of an iterator was interrupted: its epoch has not begun."""
        self.progress.roll_back(run.rollback_point, run)
        before, self._kept = self._kept, (run, None)
        if before is not None:
            self._drop(before[0])

    def replan(self, change: Callable[[int, int], object]) -> None:
        """Change the order of the samples behind those that the user has received.

        Args:
            change: is told the epoch of the sampler, and how many of its items all ranks have received. If it raises an
                error, nothing has changed.

        Raises:
            RuntimeError: this is called inside ``next``.
        """
        pipeline, progress, order = self.pipeline, self.progress, self.order
        if is_owned(pipeline.lock):
            raise RuntimeError("the order cannot be changed inside next() of the same loader: do it in your loop")
        with pipeline.lock:
            current = progress.run()
            epoch = progress.coming() if current is None else current.epoch
            assert isinstance(order, MapOrder) and isinstance(epoch, MapEpoch)  # only its order can be changed
            change(*epoch.reached(epoch.first if current is None else current.delivered))
            if self._kept is not None:  # its batches were planned before
                self._drop(self._kept[0])
                self._kept = None
            for iterator in list(progress.live.values()):
                run = iterator.run
                if run is not None and not run.ended and run.dead is None:
                    iterator.run = self._go_on(run, iterator)
            if progress.run() is current is not None:
                progress.current_run = self._rest_of(current)  # its iterator is gone, but a state is taken from it

    def _rest_of(self, run: Run) -> Run:
        """A run that reads what a run has not delivered yet, by the order as it is now."""
        position = run.epoch.position(run.delivered)
        if isinstance(self.order, MapOrder) and isinstance(run.epoch, MapEpoch):
            position = self.order.moved(*self.order.regrouped(position, run.epoch.source.signature))
        rest = self.new_run(self.order.epoch(position.epoch, position))
        rest.epoch.in_mid_epoch = False  # it ends where the epoch ends
        return rest

    def _go_on(self, run: Run, iterator: object) -> Run:
        """Let an iterator go on by the order as it is now."""
        going_on = self._rest_of(run)
        self.progress.replace(run, going_on, iterator)
        self.pipeline.replace(run, going_on)
        self._tell_order(going_on, iterator)
        return going_on

    def read_ahead(self, run: Run) -> None:
        """All batches of a run are planned: have the pool read the first ones of the next epoch behind them.

        Skip this where it is visible: another library's sampler would draw early, or threads would call ``set_epoch``
        twice on one dataset.
        """
        pool = self.pipeline.pool
        shares_epoch = pool.shares_dataset and set_epoch_of(self.dataset) is not None
        if not (self.prefetch_epochs and pool.num_workers) or shares_epoch or self.stale or self._kept is not None:
            return
        point = self.progress.rollback_point()
        try:
            facts = self.order.facts(point[0])
            if facts is None:
                return
            ahead = self.new_run(self.progress.begin())
        except Exception as error:
            pass_on(error)
            return  # what cannot be asked now is an error when the epoch begins, if it is one then
        ahead.is_ahead, ahead.rollback_point = True, point
        self._kept = ahead, (facts, self.pipeline.split.weights)
        self.pipeline.open(ahead, self.job_now())
        run.next = ahead

    def _take_kept(self, point: RollbackPoint) -> Run | None:
        """The run that is kept, if it is what begins now; otherwise it is dropped."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        run, order = kept
        is_wanted = run.rollback_point == point and not self.stale and run.dead is None
        if is_wanted and order in (None, (self.order.facts(run.epoch.number), self.pipeline.split.weights)):
            run.is_ahead = False
            return run
        self._drop(run)
        return None

    def _drop(self, run: Run) -> None:
        run.is_ahead = False  # or the run before it, if that goes on, would go on to fill its window
        self.pipeline.drop(run.number)

    def refresh(self) -> None:
        """The dataset has changed: the workers get it before the next epoch."""
        self.stale = True
        self.known.forget()
        self.order.resize(length(self.dataset))
        self.pipeline.split.costs = self.order.shard_costs

    def rescale(self, num_replicas: object, rank: object, batch_size: object) -> None:
        """There are other ranks from the next batch on. Iterators that are under way go on with them.

        Raises:
            TypeError, ValueError: wrong arguments, or a position that others cannot go on from. Nothing has changed.
        """
        order, progress = self.order, self.progress
        if isinstance(order, StreamOrder):
            raise TypeError(
                "rescale needs a dataset that is read by index: the parts of iterable data belong to ranks. Save the "
                "states of all ranks, and load them as a list into loaders of the new ranks"
            )

        def change(*_: int) -> None:
            resumes, state = progress.now is At.LOADED, progress.state()
            goes_on = resumes or order.steps is not None or any(not run.ended for run in progress.live_runs())
            advice = "Give other ranks, or a batch_size= with which all read as many samples in a step as before"
            doing = "rescale: the position belongs to the ranks before: "
            position = order.rescale(
                num_replicas, rank, batch_size, lambda: order.load(state, False, doing, advice)[0] if goes_on else None
            )
            if resumes and position is not None:
                progress.begin_at(position)

        self.replan(change)
        if not self._job.keep_batch:
            self._job, self.stale = replace(self._job, keep_batch=True), True

    def load(self, state: Any, strict: bool, skip: Any, digest: Callable[..., str]) -> None:
        """Continue at the position of a state; see `Progress.load`.

        Args:
            state, strict, skip: as given. Unless ``strict`` is False, the state has to be of these data.
            digest: of one sample; see `KnownSteps`.
        """

        def check() -> None:
            if strict:
                self.known.check(state[0] if isinstance(state, list | tuple) else state, digest)

        self.stale |= self.progress.load(state, strict, skip, check)  # workers are sent a seed that has changed

    def forget(self) -> None:
        """Let go of what is kept: the loader is closed."""
        self._kept = None
        if self.resident is not None:
            self.resident.forget()

    def new_run(self, epoch: Epoch) -> Run:
        is_known = self.order.stream is not None or any(map(has_weights, nested(self.order.sampler)))
        if not is_known and not isinstance(self.dataset, Mapping):
            epoch.limit = length(self.dataset)
        return Run(next(self._numbers), epoch)

    def job_now(self) -> Job:
        return replace(self._job, seed=self.order.seed, stream=self.order.stream)

    # -- datasets that look ahead ---------------------------------------------------------------------------

    def _tell_order(self, run: Run, iterator: Any) -> None:
        """Tell the dataset, if it wants to know, which samples come, and how far the user is."""
        epoch, order = run.epoch, self.order
        if isinstance(order, StreamOrder) or not isinstance(epoch, MapEpoch) or not can_follow(self.dataset):
            return
        if order.facts(epoch.number) is None:
            return
        ahead, held = Ahead(epoch.again(), order.epoch(epoch.number + 1)), weakref.ref(iterator)

        def position() -> int | None:
            reader = held()
            seen = None if reader is None else reader.run
            return None if seen is None or seen.ended or seen.dead is not None else int(seen.delivered)

        if self._workers.is_here:
            follow(self.dataset, ahead.batches, position, ahead.later)
        else:  # each of their machines has a cache of its own
            self._workers.follow(run.number, ahead, position)

    # -- datasets with set_epoch ----------------------------------------------------------------------------

    def _tell_epoch(self, begins: Run) -> None:
        """Tell the dataset, if it wants to know, and stop the runs that were in another epoch."""
        set_epoch = self.set_epoch_of_data()
        if set_epoch is None:
            return
        new = begins.epoch.number
        for run in self.reading():
            if run is not begins and run.epoch.number != new:
                run.dead = (
                    f"epoch {run.epoch.number} cannot go on: epoch {new} was begun. The dataset, which has "
                    f"set_epoch and is shared by all iterators of this pool, can be in one epoch only. "
                    f"Use worker processes, or finish one epoch before the next"
                )
                run.rollback()
        set_epoch(new)

    def set_epoch_of_data(self) -> Any:
        """The dataset's ``set_epoch``. That of iterable data is called when a part is opened."""
        return None if self.order.stream is not None else set_epoch_of(self.dataset)

    def reading(self) -> list[Run]:
        """The runs that are under way. If they share a dataset with set_epoch, of one epoch."""
        return [run for run in self.progress.live_runs() if not run.ended and run.dead is None]


class OneRun(CurrentRun):
    """What an iterator asks of `Epochs`, where its run is known from the start.

    Args:
        pipeline, placement: of the loader.
        run: the run.
        job: what the workers of the run read.
    """

    def __init__(self, pipeline: Pipeline, placement: Placer, run: Run, job: Job) -> None:
        self.pipeline, self.placement, self._run, self._job = pipeline, placement, run, job

    @property
    def progress(self) -> OneRun:
        """No attribute: an object that holds itself waits for the garbage collector."""
        return self

    def choose(self) -> Run:
        return self._run

    def open(self, run: Run, iterator: object) -> None:
        self.pipeline.open(run, self._job)

    def was_over(self, run: Run) -> bool:
        return False

    def begun(self, *_: object) -> None:
        pass

    keep = read_ahead = begun
