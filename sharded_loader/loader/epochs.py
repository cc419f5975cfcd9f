"""Epochs of a loader: its position, the run that each iterator gets, and how the pool reads it.

    next(iterator), the first time:   choose -> Run      plans batches; changes nothing in the loader
                                      open               the pool starts, or learns of the run, and reads
                                      Progress.begun     the first batch is handed out: the epoch has begun
    each next(iterator):              current_run        the position is that of the iterator's run
    interrupted before a batch came:  keep               the epoch has not begun; the same run is chosen again
    all of an epoch is planned:       read_ahead         the run of the next epoch, if nothing changes before that
    the first batch is handed out:    open_ahead         the same where no worker reads: a thread shuffles it
    load_state_dict:                  Progress.pending   the position is pending until an epoch begins

The position belongs to the iterator that began or delivered last. Reading ahead needs an order that is a pure function
of the epoch, as with samplers of this library. The batches are dropped if the order, or the next epoch, changes.

Owns the position and the run kept for later. The pipeline owns open runs. The order knows the next epoch, a run how
much of it was delivered.

Readers inline and in threads share one dataset. If it has ``set_epoch``, it can be in one epoch only: runs of another
epoch end with an error. A process worker has a dataset of its own, and its `Reader` calls ``set_epoch``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from sharded_loader.base.imports import provided
from sharded_loader.base.interrupts import pass_on, uninterrupted
from sharded_loader.base.notices import Notices
from sharded_loader.base.private import is_owned
from sharded_loader.data.bulk import takes_arrays
from sharded_loader.data.datasets import can_follow, follow
from sharded_loader.data.inspection import DataIdentity
from sharded_loader.data.seeding import epoch_setter
from sharded_loader.devices.background import Background, Later
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Job
from sharded_loader.engine.order import Epoch, Position
from sharded_loader.engine.pipeline import Pipeline, Run
from sharded_loader.loader.arguments import length
from sharded_loader.sampling.base import nested
from sharded_loader.sampling.epoch import Ahead, MapEpoch
from sharded_loader.sampling.order import MapOrder
from sharded_loader.sampling.own import RandomSampler
from sharded_loader.sampling.state import has_weights
from sharded_loader.streams.order import StreamOrder


class At(Enum):
    BEGINNING = "the beginning of the next epoch"
    LOADED = "a loaded position in the next epoch"
    RUN = "behind the batches that a run has delivered"


RollbackPoint = tuple[int, Any, Run | None]
"""Facts that decide a position: the next epoch, `pending` and `current_run`. Equal points mean equal positions."""


class Place:
    """Position of a loader in its epochs, as a state machine; `now` is its state.

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
        left     the run's iterator is gone, and the next epoch is not the one after the run's

    The two loaders begin an epoch differently, hence the subclasses. `Progress` can plan any epoch repeatedly: it
    creates, drops and recreates epochs. The drop-in draws an epoch once, when an iterator is made, as torch does:
    `TorchProgress` has an iterator waiting for its first ``next``, and a loaded state that fits any epoch.

    Attributes:
        current_run: Run that handed out a batch, or its end, most recently.
        pending: Loaded position, or the start of the next epoch as the last one left it.
        live: Living iterators that have begun an epoch, by the numbers of their runs.
        keeps: True if ``set_epoch`` drops no position: no arrow from LOADED to BEGINNING, and none for ``left``.
    """

    keeps = False
    current_run: Run | None = None

    def __init__(self, epochs: Any) -> None:
        self._order = epochs
        self.pending: Any = None
        self.live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def now(self) -> At:
        run, coming, pending = self.current_run, self._order.next_epoch, self.pending
        if pending is not None:  # a signal handler that asks for a state may drop it meanwhile
            if self.keeps or pending.epoch == coming:
                return At.LOADED
            self.pending = None  # dropped for good, even if its epoch comes back
        if run is None or run.ended:
            return At.BEGINNING
        is_last = run.epoch.number + 1 == coming
        return At.RUN if self.keeps or is_last or self.live.get(run.number) is not None else At.BEGINNING

    def run(self) -> Run | None:
        """Return the run at the position, or None."""
        return self.current_run if self.now is At.RUN else None

    def begun(self, run: Run, iterator: object) -> None:
        """Record that an epoch has begun with its first batch; the one after it is next."""
        self.live[run.number] = iterator
        self._order.set_epoch(run.epoch.number + 1)
        self.pending = run.epoch.carry


class Progress(Place):
    """Position of a loader in the batches of its order.

    An interrupted first ``next`` has not begun its epoch: `roll_back` restores the `rollback_point` before it. Batches
    planned at a rollback point belong to the next epoch as long as the point stays the same. ``entries`` returns the
    entries of a state that describe the data.
    """

    _order: MapOrder | StreamOrder
    pending: Position | None
    share = 1.0  # of the batch delivered last

    def __init__(self, order: MapOrder | StreamOrder, entries: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__(order)
        self._entries = entries
        self._length: int | None = None  # of the dataset, when a position in it was loaded

    def live_runs(self) -> list[Run]:
        # The list copies the references in one step: iterating would fail while another thread begins an epoch.
        iterators = [reference() for reference in self.live.valuerefs()]
        return [run for one in iterators if one is not None and (run := one.run) is not None]

    def rollback_point(self) -> RollbackPoint:
        return self._order.next_epoch, self.pending, self.current_run

    def roll_back(self, point: RollbackPoint, run: Run) -> None:
        """Undo the start of an epoch whose first ``next`` was interrupted."""
        self.live.pop(run.number, None)
        epoch, self.pending, self.current_run = point
        self._order.set_epoch(epoch)

    def replace(self, run: Run, by: Run, iterator: object) -> None:
        """Let an iterator continue with another run of the same epoch."""
        self.live.pop(run.number, None)
        self.live[by.number] = iterator
        if self.current_run is run:
            self.current_run = by

    def was_over(self, run: Run) -> bool:
        """Return True at the end of a run whose epoch was already over at the loaded position.

        The next epoch is then the one after it, unless ``set_epoch`` has asked for the run's epoch since: that begins
        again.
        """
        epoch = run.epoch
        if not epoch.in_mid_epoch or epoch.batches(run.delivered) != epoch.first:
            return False
        if self._order.asked and self._order.next_epoch == epoch.number + 1:
            self._order.set_epoch(epoch.number)
        return True

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; a position loaded in another epoch is dropped."""
        with uninterrupted():
            self._order.set_epoch(epoch)
            self._order.asked = True
            self._loaded()

    def begin(self) -> Epoch:
        """Return the epoch that begins now. A ValueError if the dataset's length differs from that of the loaded
        position.
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
        """Return the next epoch, starting at the loaded position if there is one."""
        position = self._loaded()
        return self._order.epoch(self._order.next_epoch, position)

    def _loaded(self) -> Position | None:
        return self.pending if self.now is At.LOADED else None

    def at(self) -> tuple[int, int]:
        """Return the epoch and the number of batches delivered in it."""
        if (run := self.run()) is not None:
            return run.epoch.number, run.epoch.batches(run.delivered)
        return self._order.next_epoch, self.coming().first if self.now is At.LOADED else 0

    def length(self) -> int:
        """Return the number of batches in the epoch of `at`."""
        if (run := self.run()) is not None and run.epoch.resumed:
            return run.epoch.length()
        return self.coming().length() if self.now is At.LOADED else self._order.length(self.at()[0])

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
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
        """Continue at the position of a state; return True if the loader's seeds have changed.

        A state that does not fit, or an error of ``check``, changes nothing.
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
        self._order.set_epoch(position.epoch)
        self.pending, self._order.asked = position, False
        self._length = self._order.dataset_length


# -- epochs ------------------------------------------------------------------------------------------------------------


def warn_of_length(dataset: object, known: int | None, notices: Notices, then: str) -> None:
    """Warn if a dataset's length differs from the known one. ``then`` states the consequence and the remedy."""
    now = None if known is None else length(dataset)
    if now is not None and now != known:
        notices.warn("length", f"the dataset has {now} samples, and had {known} when the loader last looked. {then}")


class Epochs:
    """Epochs of one loader. Its pool reads, unless ``resident`` has room to gather the batches on the devices.

    ``stale`` is True if the dataset or the seed has changed since it was last sent to the workers. ``prefetch_epochs``
    may be set at any time. ``sources`` makes the second part of each batch out of its task and result; None: there is
    none.
    """

    sources: Callable[[Any, Any], object] | None = None

    def __init__(
        self, job: Job, order: MapOrder | StreamOrder, pipeline: Pipeline, placement: Placer, resident: Any = None
    ) -> None:
        self.job, self.dataset, self.batchify_fn = job, job.dataset, job.batchify_fn
        self.order, self.pipeline, self.placement, self.resident = order, pipeline, placement, resident
        self.known = DataIdentity(job.dataset)
        self.progress = Progress(order, self.known.entries)
        self._workers = pipeline.pool
        self.prefetch_epochs = not pipeline.pool.shares_dataset
        self._numbers = itertools.count()
        order.arrays = job.batchify_fn is None and takes_arrays(job.dataset)
        order.max_shards = pipeline.split.max_shards
        pipeline.split.costs = order.shard_costs
        # A run that has delivered no batch, the facts behind its batches if prefetched (None: they are final), and the
        # call of a thread that opens it.
        self._kept: tuple[Run, Any, Later | None] | None = None
        self.stale = False
        for sampler in order.sampling.samplers if isinstance(order, MapOrder) else ():
            if hasattr(type(sampler), "read_by"):  # its changes call `replan`
                sampler.read_by(self)

    def choose(self) -> Run:
        """Return a run of the next epoch for an iterator's first ``next``; change nothing else.

        After an interruption it is the same run: a third-party sampler may not yield the planned batches a second time.
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
        """Have the pool read an iterator's run, within a step of the pipeline."""
        run.epoch.opened_by(iterator)
        resident = self.resident
        pool = resident if resident is not None and resident.load(again=self.stale) else self._workers
        if pool.shares_dataset:
            self.placement.create_streams()
            self._tell_epoch(run)
        self.order.begun(run.epoch)
        self.pipeline.open(run, self.job_now(), renew=self.stale, pool=pool)
        self.stale = False
        self._tell_order(run, iterator)

    def keep(self, run: Run) -> None:
        """Keep a run whose first ``next`` was interrupted: its epoch has not begun."""
        self.progress.roll_back(run.rollback_point, run)
        before, self._kept = self._kept, (run, None, None)
        if before is not None:
            self._drop(before[0])

    def replan(self, change: Callable[[int, int], object]) -> None:
        """Change the order after the samples that the user has received; a RuntimeError inside ``next``.

        ``change`` gets the sampler's epoch and the number of its items received on all ranks. Its errors change
        nothing.
        """
        pipeline, progress, order = self.pipeline, self.progress, self.order
        if is_owned(pipeline.lock):
            raise RuntimeError("the order cannot be changed inside next() of the same loader: do it in your loop")
        with pipeline.lock, uninterrupted():  # halfway, the runs would not be of the order
            current = progress.run()
            epoch = progress.coming() if current is None else current.epoch
            assert isinstance(order, MapOrder) and isinstance(epoch, MapEpoch)  # only its order can be changed
            change(*epoch.reached(epoch.first if current is None else current.delivered))
            if self._kept is not None:  # planned in the old order
                self._drop(self._kept[0])
                self._kept = None
            for iterator in list(progress.live.values()):
                run = iterator.run
                if run is not None and not run.ended and run.dead is None:
                    rest = self._rest_of(run)
                    progress.replace(run, rest, iterator)
                    pipeline.replace(run, rest)
                    self._tell_order(rest, iterator)
                    iterator.run = rest
            if progress.run() is current is not None:
                progress.current_run = self._rest_of(current)  # its iterator is gone, but states still refer to it

    def _rest_of(self, run: Run) -> Run:
        """Return a run over the undelivered rest of a run, in the current order."""
        position = run.epoch.position(run.delivered)
        if isinstance(self.order, MapOrder) and isinstance(run.epoch, MapEpoch):
            position = self.order.moved(*self.order.regrouped(position, run.epoch.source.signature))
        rest = self.new_run(self.order.epoch(position.epoch, position))
        rest.epoch.in_mid_epoch = False  # it ends where the epoch ends
        return rest

    def read_ahead(self, run: Run) -> None:
        """Have the pool read the first batches of the next epoch behind a run whose batches are all planned.

        Not where that is visible: third-party samplers would draw early, threads would call ``set_epoch`` twice on one
        dataset.
        """
        pool = self.pipeline.pool
        # The search for set_epoch comes last: it takes up to 1 ms, and this is asked at each batch.
        if not (self.prefetch_epochs and pool.num_workers) or (pool.shares_dataset and epoch_setter(self.dataset)):
            return
        if (ahead := self._plan_ahead(None)) is not None:
            self.pipeline.open(ahead, self.job_now())
            run.next = ahead

    def open_ahead(self, run: Run) -> None:
        """Have a thread shuffle the next epoch, if the batches are gathered on devices: nothing else takes as long.

        Other samplers may run the user's code, or keep what they have read.
        """
        order, is_resident = self.order, self.resident is not None and self.pipeline.pool is self.resident
        if is_resident and isinstance(order, MapOrder) and type(order.sampling.items) is RandomSampler:
            self._plan_ahead(self.resident.background)

    def _plan_ahead(self, thread: Background | None) -> Run | None:
        """Keep a run of the next epoch, which the thread opens. Return None if there cannot be one yet."""
        if self.stale or self._kept is not None:
            return None
        point = self.progress.rollback_point()
        try:
            facts = self.order.facts(point[0])
            if facts is None:
                return None
            ahead = self.new_run(self.progress.begin())
        except Exception as error:
            pass_on(error)
            return None  # raised when the epoch begins, if it still occurs
        ahead.is_ahead, ahead.rollback_point = True, point
        opening = None if thread is None else thread.submit(partial(ahead.epoch.task, ahead.epoch.first))
        self._kept = ahead, (facts, self.pipeline.split.weights), opening
        return ahead

    def _take_kept(self, point: RollbackPoint) -> Run | None:
        """Return the kept run if it is the one that begins now; otherwise drop it."""
        if self._kept is None:
            return None
        run, order, opening = self._kept  # until it is taken or dropped, so that a Ctrl-C does not lose it
        is_wanted = run.rollback_point == point and not self.stale and run.dead is None
        is_wanted = is_wanted and order in (None, (self.order.facts(run.epoch.number), self.pipeline.split.weights))
        # An error of the thread is raised when the epoch begins, if it still occurs.
        if is_wanted and (opening is None or not isinstance(opening.wait(), Exception)):
            self._kept, run.is_ahead = None, False
            return run
        self._drop(run)
        self._kept = None
        return None

    def _drop(self, run: Run) -> None:
        run.is_ahead = False  # otherwise the run before it would keep filling its window
        self.pipeline.drop(run.number)

    def refresh(self) -> None:
        """Send the changed dataset to the workers before the next epoch."""
        self.stale = True
        self.known.forget()
        self.order.resize(length(self.dataset, needed=self.order.dataset_length is not None))
        self.pipeline.split.costs = self.order.shard_costs

    def rescale(self, num_replicas: object, rank: object, batch_size: object) -> None:
        """Use other ranks from the next batch on, also for iterators in progress; an error changes nothing."""
        order, progress = self.order, self.progress
        if isinstance(order, StreamOrder):
            text = "rescale needs a dataset that is read by index: the parts of iterable data belong to ranks"
            raise TypeError(f"{text}. Save the states of all ranks, and load them as a list into loaders of new ranks")

        def change(*_: int) -> None:
            now, state, is_live = progress.now, progress.state(), any(not run.ended for run in progress.live_runs())
            goes_on = is_live or now is At.LOADED or order.rolls_over or order.skip
            advice = "Give other ranks, or a batch_size= with which all read as many samples in a step as before"
            doing = "rescale: the position belongs to the ranks before: "
            position = order.rescale(
                num_replicas, rank, batch_size, lambda: order.load(state, False, doing, advice)[0] if goes_on else None
            )
            if position is not None and (now is At.LOADED or (now is At.BEGINNING and not order.steps)):
                progress.begin_at(position)

        self.replan(change)
        if not self.job.keep_batch:
            self.job, self.stale = replace(self.job, keep_batch=True), True

    def load(self, state: Any, strict: bool, skip: Any, digest: Callable[..., str], doing: ExitStack) -> None:
        """Continue at the position of a state, of these data if ``strict``; see `Progress.load` and
        `KnownSteps.digest`. Signals are deferred, within ``doing``, as soon as the state is known to fit.
        """

        def check() -> None:
            if strict:
                self.known.check(state[0] if isinstance(state, list | tuple) else state, digest)
            doing.enter_context(uninterrupted())  # no sample is read any more

        with provided("sampler", "grown").loading(self.order, state):
            self.stale |= self.progress.load(state, strict, skip, check)  # a changed seed must reach the workers

    def forget(self) -> None:
        """Release the kept run and the resident data when the loader is closed."""
        self._kept = None
        if self.resident is not None:
            self.resident.forget()

    def new_run(self, epoch: Epoch) -> Run:
        is_known = self.order.stream is not None or any(map(has_weights, nested(self.order.sampler)))
        if not is_known and not isinstance(self.dataset, Mapping):
            epoch.limit = length(self.dataset, needed=self.order.dataset_length is not None)
        return Run(next(self._numbers), epoch)

    def job_now(self) -> Job:
        return replace(self.job, seed=self.order.seed, stream=self.order.stream)

    # -- datasets that look ahead ---------------------------------------------------------------------------

    def _tell_order(self, run: Run, iterator: Any) -> None:
        """Announce the coming samples, and the user's position, to a dataset that can follow them."""
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
            epoch.announced = follow(self.dataset, ahead.batches, position, ahead.later)
        else:  # each remote machine has its own cache
            self._workers.follow(run.number, ahead, position)

    # -- datasets with set_epoch ----------------------------------------------------------------------------

    def _tell_epoch(self, begins: Run) -> None:
        """Call the dataset's ``set_epoch``, if it has one, and stop the runs that were in another epoch."""
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
        """Return the dataset's ``set_epoch``, or None. That of iterable data is called when a part is opened."""
        return None if self.order.stream is not None else epoch_setter(self.dataset)

    def reading(self) -> list[Run]:
        """Return the runs in progress; all of one epoch if they share a dataset with ``set_epoch``."""
        return [run for run in self.progress.live_runs() if not run.ended and run.dead is None]
