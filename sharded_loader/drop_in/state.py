"""Position of a loader as a state, epochs that continue from it, and the samples of any step.

    LoaderState                                       entries of a state, named as in torchdata
    TorchProgress                                     position of a loader
    TorchRun(number, epoch=epoch, ...).state_dict()   position of an epoch
    stream_epoch(loader, seed, state, points)         epoch of iterable data that continues from a state
    job_of(loader, collate_fn) -> Job                 configuration of the workers
    TorchSteps(loader)                                samples of any step: `indices`, `fingerprint`, `check`

Owns the position. A state of another loader is a ValueError. The order is unknown for iterable data and datapipes
(TypeError), and for an epoch drawn from generators of the program, unless it is the newest one (ValueError).
"""

# ruff: noqa: RUF009 - entries make fields

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader as TorchsLoader
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, RandomSampler, SequentialSampler

from sharded_loader.drop_in import sampler as samplers
from sharded_loader.drop_in.collate import batchify_fn_of
from sharded_loader.drop_in.sampler import EpochCount, InOrderSampler, SamplerState, ShuffleSampler, TorchEpoch
from sharded_loader.drop_in.trainers import counted_by_fabric, fetched_by_lightning
from sharded_loader.extend import Job, PartPoint, Position, Run
from sharded_loader.extend import engine as core
from sharded_loader.extend import order as orders
from sharded_loader.extend.data import DataIdentity, epoch_listeners, epoch_setter, is_stateful
from sharded_loader.extend.tools import check_int, entries, refuse_async_iterable, refuse_class

if TYPE_CHECKING:
    from sharded_loader.drop_in.iterator import Engine, LoaderIterator
    from sharded_loader.torch import DataLoader

    Loader = DataLoader[Any]


# -- positions ---------------------------------------------------------------------------------------------------------

ADVICE = "give what state_dict() of such a loader has returned"


@dataclass(frozen=True)
class LoaderState:
    """Entries of a state. It looks like one of torchdata's loader, which also has snapshots of datasets.

    Attributes:
        yielded: Number of batches received in the epoch.
        finished: The user has seen the end of the epoch.
        base_seed: Base seed of the workers' generators.
        epoch: Number of the epoch.
        epoch_of_dataset: Epoch of the dataset, or of one inside it: its attribute ``epoch``, or the argument of the
            loader's last ``set_epoch``.
        generator: State of the loader's generator.
        next_draws: After the last batch, the draws of the next epoch: for the loader and for its sampler.
        sampler: Sampler of map-style data.
        stream: Position in iterable data; see `sharded_loader.streams.state`.
        length: Number of samples of a map-style dataset.
    """

    yielded: int = entries.entry(entries.integer(), name="_num_yielded")
    finished: bool = entries.entry(entries.true_or_false, name="_iterator_finished")
    base_seed: int = entries.entry(entries.integer(), name="_base_seed")
    epoch: int | None = entries.entry(entries.optional(entries.integer()), name="_epoch", default=None)
    epoch_of_dataset: int | None = entries.entry(
        entries.optional(entries.integer()), name="_epoch_of_dataset", default=None
    )
    generator: str | None = entries.entry(entries.optional(entries.string), name="_generator", default=None)
    next_draws: list[int] | None = entries.entry(entries.optional(samplers.pair), name="_next", default=None)
    sampler: SamplerState | None = entries.entry(
        entries.optional(entries.dict_of(SamplerState)), write=entries.to_state, name="_sampler", default=None
    )
    stream: Any = entries.entry(entries.anything, name="_stream", default=None)
    length: int | None = entries.entry(entries.optional(entries.integer(0)), name="_length", default=None)

    @property
    def epoch_to_begin(self) -> int:
        return (self.epoch or 0) + self.finished

    def check_length(self, now: int | None, sampler: object) -> None:
        """Reject a mid-epoch state if the dataset's length differs; data read in order may have grown."""
        was, is_begun = self.length, self.sampler is not None and self.sampler.yielded and not self.finished
        if not is_begun or now is None or was in (None, now) or (now > was and isinstance(sampler, SequentialSampler)):
            return
        what = f"read the epoch to its end from torch.utils.data.Subset(dataset, range({was}))"
        if now < was:
            what = f"samples {now} to {was - 1} are missing: give them back"
        text = f"the state cannot be resumed: the dataset had {was} samples, and has {now}: {what}, or begin an"
        raise ValueError(f"{text} epoch with all samples, without the state: set_epoch({(self.epoch or 0) + 1})")


@dataclass(eq=False, kw_only=True)
class TorchRun(Run):
    """Run of an epoch, and its position. After a ``break`` the loader keeps it when the iterator is gone.

    Attributes:
        yielded: Number of batches received in the epoch.
        points_at_start: Part of iterable data, or worker -> its position after the previous epoch, if the workers live
            on.
        unread: Parts of iterable data that had ended in a loaded state: no worker has read them.
        epoch_of_dataset: As in `LoaderState`, when the epoch began.
    """

    epoch: TorchEpoch | core.StreamEpoch
    job: Job
    base_seed: int
    yielded: int
    points_at_start: Mapping[int, PartPoint]
    unread: set[int]
    epoch_of_dataset: int | None

    def state_dict(self, loader: Loader) -> dict[str, Any]:
        fetched, is_over = fetched_by_lightning()
        finished, epoch = self.ended or is_over, self.epoch
        delivered = max(epoch.first, self.delivered - fetched)
        generator = following = None
        if loader.generator is not None:
            generator = samplers.generator_state(loader.generator)
        elif finished or (isinstance(epoch, TorchEpoch) and epoch.ends_after(delivered)):
            # A new iterator draws the loader's seed, then the sampler draws its own.
            following = [self.base_seed, *samplers.next_draws(1)] if lives_on(loader) else samplers.next_draws(2)
        if isinstance(epoch, TorchEpoch):
            position = epoch.position(delivered, finished)
            named = {"sampler": position.mark, "length": core.length(loader.dataset)}
            datasets = position.mark.datasets or [None] * max(1, loader.num_workers)
            snapshots = [{"dataset_state": dataset, "fetcher_state": None} for dataset in datasets]
        else:
            position = self._stream_position(epoch, delivered, is_over)
            named = {"stream": epoch.state(position)}
            snapshots = [_snapshot(position, part) for part in position.counts]
        yielded = max(0, self.yielded - fetched)
        own = LoaderState(
            yielded, finished, self.base_seed, epoch.number, self.epoch_of_dataset, generator, following, **named
        )
        if loader.num_workers == 0:
            return {**entries.to_state(own), **snapshots[0]}
        workers = {f"worker_{i}": {"worker_id": i, **snapshot} for i, snapshot in enumerate(snapshots)}
        return {**entries.to_state(own), "_snapshot": {"_worker_snapshots": workers}}

    def _stream_position(self, epoch: core.StreamEpoch, delivered: int, is_over: bool) -> Position:
        position = epoch.position(delivered)
        if is_over:  # Lightning continues with the next epoch, which has new datasets
            position = replace(position, points={})
        if not position.counts:
            position = epoch.at_beginning()
        # Parts without a batch so far are still where the previous epoch left them.
        untouched = {part: point for part, point in self.points_at_start.items() if not position.counts[part]}
        return replace(position, points={**position.points, **untouched})

    def after(self) -> dict[int, PartPoint]:
        """Return the positions at the start of the next epoch; empty if the end of iterable data was not seen."""
        if isinstance(self.epoch, TorchEpoch):
            return self.epoch.points_after(self.delivered)
        return dict(next_epoch(self.epoch.position(self.delivered)).points) if self.ended else {}


def _snapshot(position: Position, part: int) -> dict[str, Any]:
    """Return the state of one part in torchdata's form."""
    point = position.points.get(part, PartPoint())
    dataset, items, *_ = point.state or (None, None)
    fetcher = {"dataset_iter_state": items, "fetcher_ended": point.ended}
    return {"dataset_state": dataset, "fetcher_state": fetcher}


class TorchProgress(core.Place):
    """Position of a loader that reads in torch's order; `Place` draws its states.

    The next epoch begins at the loaded state, ``pending``, whatever its number. Until its first batch is asked for, an
    iterator waits with a plan, and plans again after a loaded state or a call of ``set_epoch``.

    Attributes:
        live: As of `Place`, but only the iterator that has begun an epoch last.
        data: Fingerprint of the dataset, once it was needed.
        requests: Calls of ``set_epoch`` of the dataset: persistent workers have copies of it.
        waiting: Newest iterator, if it waits.
        is_promised: A state was taken of the epoch that ``waiting`` begins, so the next ``iter()`` returns it.
        rng_at_load: State of torch's default generator when a state was loaded.
        following: Draws of the epoch after the resumed one.
        is_of_fabric: The state is loaded under Lightning's Fabric, which names epochs from 0 on.
        engine: That of an iterator that is over, with spawned workers, which wait for the dataset of the next one.
        listeners: The dataset and those inside it that have ``set_epoch``, outermost first; None: not yet searched.
    """

    current_run: TorchRun | None = None
    pending: dict[str, Any] | None = None
    waiting: LoaderIterator | None = None
    keeps, is_promised = True, False
    rng_at_load: torch.Tensor | None = None
    following: list[int] | None = None
    is_of_fabric = False
    data: str | None = None
    engine: Engine | None = None
    listeners: list[Any] | None = None

    def __init__(self, count: EpochCount, given_skip: tuple[tuple[int, int], ...]) -> None:
        super().__init__(count)
        self.count, self.given_skip = count, given_skip
        self.requests, self.steps = core.EpochRequests(), orders.StepCount(None)

    def __reduce__(self) -> Any:  # a copy of the loader has its own iterators and states
        kept = {"requests": self.requests, "data": self.data, "steps": self.steps}
        return TorchProgress, (copy.copy(self.count), self.given_skip), kept

    def set_epoch(self, epoch: int) -> None:
        self.is_promised = False
        self.count.note(epoch)

    def load(self, state: dict[str, Any], epoch: int) -> None:
        """Begin the next epoch, number ``epoch``, at a state. A later ``set_epoch`` counts."""
        self.pending, self.rng_at_load = state, torch.get_rng_state()
        self.waiting, self.is_promised = None, False
        self.count.set_epoch(epoch)

    def state_to_begin(self, sampler: object) -> LoaderState | None:
        """Return the loaded state, if no epoch has begun since; see `at_named_epoch`."""
        if self.pending is None:
            return None
        state = entries.from_state(LoaderState, self.pending, ADVICE)
        self.is_of_fabric = counted_by_fabric(state.epoch_to_begin)
        return state if self.is_of_fabric else at_named_epoch(state, sampler, self.count)

    def begun(self, run: Any, iterator: object) -> None:
        self.live.clear()  # with persistent workers an iterator has several runs in turn
        super().begun(run, iterator)
        self.current_run, self.waiting, self.is_promised = run, None, False

    def promised(self) -> LoaderIterator | None:
        """Return the promised iterator, once."""
        is_promised, self.is_promised = self.is_promised, False
        return self.waiting if is_promised else None

    def epoch_of_dataset(self, loader: Loader) -> int | None:
        """Return the epoch of the dataset, or of one inside it, for a state; None if it was never set.

        The innermost attribute comes first, because a program may set the epoch of an inner dataset alone.
        """
        is_stream, request = isinstance(loader.dataset, IterableDataset), self.count.request
        if is_stream or self.listeners is None:
            self.listeners = [*epoch_listeners(loader.dataset, but=loader)]
        epochs = [getattr(one, name, None) for one in reversed(self.listeners) for name in ("epoch", "_epoch")]
        if self.listeners and request is not None:
            epochs.append(request[1])
        epoch = next((number for number in epochs if isinstance(number, int)), None)
        return epoch if epoch or is_stream or request is not None else None  # 0: as it was made

    def known_run(self, loader: Loader) -> TorchRun | None:
        """Return the run whose state is the loader's, or None. A waiting iterator becomes promised."""
        if self.waiting is None or self.run() is not None:
            return self.current_run
        self.waiting.plan_again(loader)
        self.is_promised = True
        return self.waiting.run

    @property
    def epoch(self) -> int:
        """Number of the epoch in progress, or of the next one."""
        run, coming = self.run(), self.count.next_epoch
        return coming - (run is not None and run.epoch.number + 1 == coming)


# -- epochs that go on from a state ------------------------------------------------------------------------------------


def at_named_epoch(state: LoaderState, sampler: Any, count: EpochCount) -> LoaderState:
    """Return the state, marked as finished if its epoch has no batch left and ``set_epoch`` has named another one.

    This happens when a training loop loads a checkpoint of the last step and starts at ``step // len(loader)``.
    """
    saved, length = state.sampler, orders.known_length(sampler, state.epoch or 0)
    if saved is None or state.finished or length is None or saved.yielded < length:
        return state
    pairs = [(count.next_epoch, count.next_epoch if state.epoch is None else state.epoch)]
    kept = zip(samplers.keep_epochs(sampler), saved.epochs or (), strict=False)
    pairs += [(one.epoch, before) for one, before in kept if getattr(one, "epoch_request", before) is not None]
    if saved.shuffle is not None:
        shuffles = [one for one in orders.nested(sampler) if isinstance(one, ShuffleSampler) and one.is_named]
        pairs += [(one.epoch, saved.shuffle.get("epoch", state.epoch or 0)) for one in shuffles]
    named = next((now for now, before in pairs if now != before), None)
    if named is None:
        return state
    count.next_epoch = named
    return replace(state, finished=True)


def next_epoch(position: Position) -> Position:
    """Return the beginning of an epoch that continues with the datasets as they are at a position."""
    points = {}
    for part, point in position.points.items():
        state = None if point.state is None else (*point.state[:2], "next")
        points[part] = PartPoint(passes=point.passes, state=state, asked=point.asked)
    return Position(0, 0, None, dict.fromkeys(position.counts, 0), points)


def stream_order(loader: Loader, seed: int) -> core.StreamOrder:
    order = core.StreamOrder(
        loader.dataset,
        batch_size=getattr(loader.batch_sampler, "batch_size", 1),  # programs change it between epochs
        last_batch="discard" if loader.drop_last else None,
        seed=seed,
        streams=loader.streams or max(1, loader.num_workers),
        num_workers=loader.num_workers,
    )
    order.is_bound = False
    return order


def stream_epoch(
    loader: Loader, seed: int, state: LoaderState | None, points: dict[int, PartPoint]
) -> core.StreamEpoch:
    """Return an epoch of iterable data at ``state``, or at its beginning with parts at ``points``."""
    order = stream_order(loader, seed)
    position = Position(0, 0, None, {}, points) if points else None
    if state is not None:
        doing = "the state cannot be resumed, it was saved by another loader: "
        position, *_ = order.take_over(state.stream, False, doing, "Make the loader as it was then")
        position = next_epoch(position) if state.finished else replace(position, epoch=0)
    epoch = order.epoch(0, position)
    order.begun(epoch)
    return epoch


def check_data(loader: Loader) -> None:
    """Reject a dataset or a sampler that cannot be read (TypeError); not earlier, because programs make loaders of
    mocks.
    """
    for name, given in (("sampler", loader.sampler), ("batch_sampler", loader.batch_sampler)):
        if given is not None and not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
            raise TypeError(f"{name} is {given!r}; it must be an iterable of indices, or of lists of them")
    if getattr(loader.sampler, "data_source", None) is loader.dataset:
        core.length(loader.dataset, needed=True)
    refuse_class("the dataset", loader.dataset)
    refuse_async_iterable(loader.dataset)
    if not any(hasattr(loader.dataset, name) for name in ("__getitem__", "__getitems__", "__iter__")):
        raise TypeError(f"a dataset needs __getitem__, and {type(loader.dataset).__name__} has none")


def keeps_state(dataset: object) -> bool:
    """Return True if workers save the state of map-style data. That of a loader is no state of data: a loader may be
    its own dataset, as PyTorch Geometric's ``GraphSAINTSampler``.
    """
    return not isinstance(dataset, TorchsLoader) and is_stateful(dataset)


def lives_on(loader: Loader) -> bool:
    """Return True if the next epoch has the same workers."""
    return loader.persistent_workers and loader.num_workers > 0


def job_of(loader: Loader, collate_fn: object, drawn: int | None = None) -> Job:
    batched, seed = loader._auto_collation, int((drawn or 0) if loader.seed is None else loader.seed)
    base = drawn if loader.seed is None and loader._tuner is None else None  # None: nothing depends on the workers
    batchify, (action, _) = batchify_fn_of(collate_fn, batched=batched), core.action_and_limit(loader.on_error)
    return Job(loader.dataset, batchify, seed, action, in_bulk=batched, base_seed=base, sets_epoch=False)


# -- any step ----------------------------------------------------------------------------------------------------------


class TorchSteps(core.KnownSteps):
    """Steps of a loader, past or future. Digests use ``seed=``, or seed 0: torch draws another seed in each run."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._sampler = loader, loader._index_sampler
        self.dataset, self.known = loader.dataset, DataIdentity(loader.dataset)

    @property
    def job(self) -> Job:
        """Configuration of the newest epoch's workers; before the first epoch, as far as known."""
        check_data(self._loader)
        run = self._loader._progress.current_run
        return job_of(self._loader, self._loader.collate_fn) if run is None else run.job

    @property
    def parts(self) -> int:
        """Number of parts of the epoch in progress or the next one; 1 for data that is read by index."""
        loader = self._loader
        if not isinstance(self.dataset, IterableDataset):
            return 1
        order, loaded, run = stream_order(loader, 0), loader._progress.pending, loader._progress.current_run
        parts = order.parts
        if loaded is not None and loaded["_stream"] is not None:
            return max(parts, core.parse(loaded["_stream"], order.replicas())[1].streams)
        if run is not None and not run.ended and isinstance(run.epoch, core.StreamEpoch):
            return max(parts, run.epoch.stream.parts)
        return parts

    @property
    def left_out(self) -> Callable[[int], tuple[range, ...]]:
        """Function from an epoch to the numbers of its left-out batches. It does not hold the loader."""
        within, skip = self._loader._progress.steps.within, tuple(self._loader.skip)
        return partial(within, skip, length=partial(orders.len_epoch, self._sampler))

    def job_now(self) -> Job:
        is_told, seed = self._loader._progress.count.request is not None, int(self._loader.seed or 0)
        return replace(self.job, seed=seed, base_seed=None, keeps_state=False, sets_epoch=is_told)

    def in_epoch(self, epoch: int) -> AbstractContextManager[None]:
        progress, request = self._loader._progress, self._loader._progress.count.request
        live = None if progress.current_run is None else progress.live.get(progress.current_run.number)
        set_epoch, named = (None, 0) if request is None else (epoch_setter(self.dataset, self._loader), request[1])
        reads = live is not None and not live._shutdown and live._num_workers and live._engine.pool.shares_dataset
        return core.in_epoch(set_epoch, epoch, lambda: named, [progress.epoch] if reads else ())

    def samples_of(self, epoch: int, step: int) -> list[Any]:
        step = check_int("step", step, 0, "steps count from 0 in each epoch")
        found = self._look_up(epoch, range(step, step + 1), list)
        if not found:
            raise IndexError(f"epoch {epoch} has no step {step}: it has fewer steps, which count from 0")
        return list(found[0])

    def some_indices(self, epoch: int, steps: Iterable[int], each: int) -> list[Any]:
        try:
            return super().some_indices(epoch, steps, each)
        except ValueError:
            sampler, count = getattr(self._sampler, "sampler", self._sampler), core.length(self.dataset)
            if not isinstance(sampler, RandomSampler) or not count:
                raise
            # The order is not drawn yet, or not by number; any order includes these samples.
            return list(range(0, count, -(-count // (each * len(list(steps))))))

    def checksums(self, epoch: int) -> list[str]:
        found = self._look_up(epoch, range(sys.maxsize), lambda indices: orders.step_checksum([indices]))
        left_out = self.left_out(epoch)
        return [orders.LEFT_OUT if any(step in one for one in left_out) else text for step, text in enumerate(found)]

    def _look_up(self, epoch: object, steps: range, of: Callable[[list[Any]], object]) -> list[Any]:
        loader, epoch = self._loader, check_int("epoch", epoch, 0, "epochs count from 0")
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            raise TypeError("datapipes are read by torch's own workers: which samples a step has is not known")
        if isinstance(self.dataset, IterableDataset):
            raise stream_order(loader, 0).no_steps()
        if len(steps) > 1:
            self.length(epoch)  # rejects an endless sampler
        self._check_by_number(epoch)
        batched = loader._auto_collation

        def by_number(turn: int) -> list[Any]:
            items = itertools.islice(orders.table_of(self._sampler, epoch, turn).items(steps.start), len(steps))
            return [of(core.plain_indices(item if batched else [item])) for item in items]

        with orders.undisturbed(orders.nested(self._sampler), but=self.dataset):
            return orders.read_twice(by_number, self._sampler, epoch)

    def _check_by_number(self, epoch: int) -> None:
        """Reject a sampler whose epochs are not numbered as the loader's, because its order is unknown."""
        progress = self._loader._progress
        if any(isinstance(one, ShuffleSampler) and one.seed is None for one in orders.nested(self._sampler)):
            drawn = "shuffle=True draws its order when the epoch begins. Give the loader a seed="
            raise ValueError(f"epoch {epoch} cannot be looked up: {drawn}")
        run, number, known = progress.current_run, None, None
        if progress.pending is not None:
            loaded = entries.from_state(LoaderState, progress.pending, ADVICE)
            number, known = loaded.epoch, loaded.sampler
        elif run is not None and isinstance(run.epoch, TorchEpoch):
            number, known = run.epoch.number, run.epoch.drawn.start.state
        kept = zip(samplers.keep_epochs(self._sampler), (known and known.epochs) or (), strict=False)
        if {named for one, named in kept if not isinstance(one, InOrderSampler)} - {number}:
            text = f"epoch {epoch} cannot be looked up: the sampler's epochs do not have the loader's numbers"
            raise ValueError(f"{text}. Call loader.set_epoch(epoch) before each epoch")

    def length(self, epoch: int) -> int:
        return orders.len_epoch(self._sampler, epoch)

    def state_of(self, epoch: int) -> dict[str, Any]:
        loader, samplers = self._loader, list(orders.nested(self._sampler))
        seeds, arguments = tuple(map(orders.seed_of, samplers)), orders.arguments_of(samplers)
        kind, last_batch = orders.kind_of(self._sampler), "discard" if loader.drop_last else "keep"
        data = int(loader.seed or 0), core.length(self.dataset), kind, None, seeds
        return orders.dump(
            Position(epoch), orders.Signature(*data, loader.batch_size, last_batch, arguments, skip=tuple(loader.skip))
        )
