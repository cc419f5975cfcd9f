"""Cases that are disturbed: workers that are killed or stopped, or that take too much memory, another number of them,
signals, slow samples, a changed dataset, `close` in a thread. None of it changes what must come.

    before a step    a timer, which kills or stops a worker, changes their number or sends a signal while the loop waits
                     in ``next``, with luck
    Disturbed        the steps of `Case`, and kill, stop, kill_zygote, resize, close_beside, refresh of changed data
    Twins            in the place of the naive loader a loader without workers: `ShardedDataLoader`, or torch's
                     ``DataLoader`` of this library, also over mixtures and iterable data; the steps are more: look_up,
                     rescale, weigh, report, `resume` with ``skip``
    loaders          also with ``num_workers="auto"``, of another number every few steps, and ``max_worker_memory``
"""

import contextlib
import copy
import functools
import json
import os
import random
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from sharded_loader import (
    InlinePool,
    LoaderClosedError,
    ShardedDataLoader,
    SimpleDataset,
    WeightedRandomSampler,
    interleave,
)
from sharded_loader.base.limits import private_bytes
from sharded_loader.drop_in.iterator import LoaderIterator
from sharded_loader.instruments.auto import Tuner
from sharded_loader.loader.iterator import EpochIterator
from sharded_loader.pools.deaths import Deaths
from sharded_loader.sampling.base import nested
from sharded_loader.torch import DataLoader
from tests import conftest, failures, stream_samples
from tests.fuzz import cases
from tests.fuzz.steps import DONE, Case, Difference, Pair, frozen
from tests.injection import HANDLERS, TimeIsUp

# Other orders draw from the global generators, or count their epochs themselves.
DROP_IN_ORDERS = ("in order", "shuffle", "a list", "an array", "a list of batches", "a list of keys")
STREAM_FUNCTIONS = ("Parts", "GoOn", "WithStatefulRows", "DrawsOwn")
STREAM_OBJECTS = ("Own", "Stateful", "Told", "ItsOwnIterator", "Late")
STREAMS_OF_TORCH = ("Own", "ItsOwnIterator", "Late")
BY_WORKERS = "_base_seed", "_snapshot", "dataset_state", "fetcher_state", "_next", "_generator"
WORKER = re.compile(r"\b(in |by )?(worker|thread) \d+( \(pid \d+\))?")
IN_NEXT = EpochIterator.__next__.__code__, LoaderIterator.__next__.__code__
OFTEN = {"fork": 100, "thread": 80, "inline": 12}  # spawned workers start slowly: a hundredth is enough
METHODS = [name for name in conftest.POOLS for _ in range(OFTEN.get(name, 1))]


@functools.cache
def allowed_bytes() -> int:
    """``max_worker_memory`` for forked workers: beside those of one that has just begun, of 15 batches that leak."""
    sizes = SimpleDataset([0]).transform(lambda sample: private_bytes())
    with ShardedDataLoader(sizes, 1, pool=conftest.make_pool("fork", 1)) as loader:
        return int(next(iter(loader))) + (60 << 20)


class Disturbed(Case):
    """A case with more samples, workers and steps, and with faults."""

    LENGTHS = (0, 1, 7, 40, 100, 300)
    BATCH_SIZES = (1, 3, 4, 16, 64)
    STEPS = (5, 20, 60)
    COUNTS = (1, 2, 2, 3, 5)
    MAY_FAIL = True  # an interruption, too, knows the frames that held the iterator
    RESTARTS = 1000  # kills at random strike one batch more than three times now and then

    def __init__(self, seed: int, processes: bool = True) -> None:
        self.version, self.closing = 0, False
        self.struck = False  # whether a signal has raised in that call of ``next``
        self.interrupted, self.timers = list[Pair](), list[threading.Timer]()
        self.sent = Counter[int]()  # signals that have not arrived yet
        self.stopped = set[int]()
        self.victims = random.Random()  # timers draw; the global generator belongs to datasets and samplers
        super().__init__(seed, processes)

    def draw_kind(self) -> cases.Kind:
        self.leaks = self.rng.random() < 0.3
        self.pace = self.rng.choice([0.0, 0.0, 0.004]), self.rng.choice([0.0, 0.0, 0.02])
        return cases.draw_kind(self.rng, self.length, wide=True)

    def make_dataset(self) -> Any:
        return self.disturbed(super().make_dataset())

    def disturbed(self, dataset: Any) -> Any:
        if isinstance(dataset, cases.Plain):
            dataset.version, dataset.pause, (dataset.slow, dataset.late) = self.version, 0.002, self.pace
            dataset.leak = (4 << 20) // (self.batch_size or 300) if self.leaks else 0
        return dataset

    def make_pair(self, state: Any = None, sampler: Any = None) -> Pair:
        pair = super().make_pair(state, sampler)
        self.allow_kills(pair)
        return pair

    def allow_kills(self, pair: Pair) -> None:
        """A loader that makes its pool itself has no ``restarts=``."""
        if hasattr(pool := self.pool(pair), "restarts"):
            pool.restarts, pool.deaths = self.RESTARTS, Deaths(self.RESTARTS)

    def draw_method(self) -> str:
        return self.rng.choice(METHODS)

    def give_workers(self, method: str, workers: int, **_: Any) -> dict[str, Any]:
        which = self.rng.random()
        if method in ("thread", "fork") and which < 0.2:
            return {"num_workers": "auto", "pool": "thread" if method == "thread" else "process"}
        if method == "fork" and which < 0.6 and self.leaks:
            return super().give_workers(method, workers, max_worker_memory=allowed_bytes())
        watched = {"timeout": 600.0} if method in ("thread", "fork") and which < 0.4 else {}  # none is late
        return super().give_workers(method, workers, **watched)

    def draw_prefetch(self) -> dict[str, Any]:
        return super().draw_prefetch() | {"prefetch": self.rng.choice([None, None, 0, 1, 2, 7, 30])}

    def choices(self) -> list[tuple[int, Callable[[Pair], None]]]:
        faults = [(2, self.kill), (1, self.stop), (2, self.kill_zygote), (2, self.resize), (1, self.refresh)]
        return [*super().choices(), *faults, (2, self.close_beside)]

    def run(self) -> int:
        with self.signals_that_raise(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tuner, "look", self.tune)
            return super().run()

    def tune(self, meter: Any, pipeline: Any, now: float) -> None:
        """In the place of ``Tuner.look``, which takes seconds to come to a decision."""
        pool = pipeline.pool
        if self.victims.random() < 0.3 and pool.num_workers:
            pool.wanted = self.victims.choice(self.COUNTS)
            pipeline.scheduler.per_worker = self.victims.choice([1, 2, 8])
            pipeline.scheduler.update_prefetch(pool)
            self.counts["fault: another number of workers, auto"] += 1

    def do(self, step: Callable[[Pair], None]) -> None:
        for pid in {*self.pids(self.pair)} - {*self.workers}:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.workers[pid] = psutil.Process(pid)
        if self.rng.random() < 0.2:
            self.later()
        super().do(step)
        while self.held and (len(self.held) > 30 or self.rng.random() < 0.3):
            self.check_held()

    def close(self) -> None:
        for timer in self.timers:
            timer.cancel()
            timer.join()
        for pid in list(self.stopped):
            self.go_on(pid)
        super().close()

    def outcome(self, ask: Callable[[], Any]) -> Any:
        """What is asked for, again after each interruption."""
        while True:
            self.struck = False
            try:
                got = super().outcome(ask)
            except (KeyboardInterrupt, SystemExit) as raised:
                if not self.struck:
                    raise  # the user's own
                got = raised
            closed = isinstance(got, LoaderClosedError) and self.closing
            if not closed and not isinstance(got, KeyboardInterrupt | SystemExit | TimeIsUp):
                return got
            if self.asked is not None:
                self.interrupted.append(self.asked)
            if closed:
                raise got
            self.counts[f"fault: {type(got).__name__} raised by a signal handler in next()"] += 1

    def check_skipped(self, pair: Pair) -> None:
        """An interruption may strike when a sample was counted, and its batch has not been handed out."""
        if pair in self.interrupted:
            pair.naive.skipped = max(pair.naive.skipped, pair.loader.num_skipped)
        super().check_skipped(pair)

    def pool(self, pair: Pair) -> Any:
        """The pool that reads; None: there is none."""
        return pair.loader.pool

    def pids(self, pair: Pair) -> list[int]:
        return getattr(self.pool(pair), "pids", [])

    def later(self) -> None:
        """While the loop waits in ``next``, with luck."""
        number, count = getattr(signal, self.rng.choice(list(HANDLERS))), self.rng.choice(self.COUNTS)
        faults: list[Callable[[], None]] = [lambda: self.kill(self.pair), lambda: self.stop(self.pair)]
        faults += [lambda: self.send(number), lambda: self.resize(self.pair, count)]
        self.after(self.rng.choice([0.0, 0.001, 0.005, 0.03]), self.rng.choice(faults))

    def after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        self.timers = [timer for timer in self.timers if timer.is_alive()]
        self.timers.append(threading.Timer(seconds, do, arguments))
        self.timers[-1].start()

    def send(self, number: int) -> None:
        self.sent[number] += 1
        os.kill(os.getpid(), number)

    @contextlib.contextmanager
    def signals_that_raise(self) -> Iterator[None]:
        """Inside, a signal raises where the loader can do something about it, and does nothing anywhere else.

        That is inside its ``next``: outside of it Python may lose the batch. Signals from outside do what they did.
        """

        def handle(error: type[BaseException], number: int, frame: FrameType | None) -> None:
            if not self.sent[number]:
                signal.signal(number, before[signal.Signals(number).name])
                signal.raise_signal(number)
                return
            self.sent[number] -= 1
            if self.asked is None or self.struck:
                return  # one at a time: a second one could strike where the loader deals with the first
            if error is TimeIsUp and self.asked.loader.num_workers == 0:
                return  # an Exception inside the dataset is its batch's error
            while frame is not None:
                if frame.f_code in IN_NEXT:
                    self.struck = True
                    raise error
                frame = frame.f_back

        before: dict[str, Any] = {}
        try:
            for name, (error, _) in HANDLERS.items():
                before[name] = signal.signal(getattr(signal, name), functools.partial(handle, error))
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)

    def kill(self, pair: Pair) -> None:
        if pids := self.pids(pair):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.victims.choice(pids), signal.SIGKILL)
                self.counts["fault: worker killed"] += 1

    def stop(self, pair: Pair) -> None:
        """A worker stands still for a while."""
        if hasattr(signal, "SIGSTOP") and (pids := self.pids(pair)):
            pid = self.victims.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.stopped.add(pid)
                self.counts["fault: worker stopped for a while"] += 1
                self.after(self.victims.choice([0.01, 0.1, 0.4]), self.go_on, pid)

    def go_on(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self.stopped.discard(pid)

    def resize(self, pair: Pair, count: int = 0) -> None:
        """The number of workers changes. Another thread may close the loader meanwhile."""
        count, pool = count or self.rng.choice(self.COUNTS), self.pool(pair)
        if pool is not None and pool.num_workers:
            with contextlib.suppress(LoaderClosedError):
                pool.resize(count)
                self.counts["fault: another number of workers"] += 1

    def kill_zygote(self, pair: Pair) -> None:
        crew = getattr(self.pool(pair), "_transport", None)
        if crew is not None and crew.zygote is not None:
            with contextlib.suppress(ProcessLookupError, ValueError):
                crew.zygote._process.kill()
                self.counts["fault: template killed"] += 1

    def refresh(self, pair: Pair) -> None:
        """The dataset changes; epochs under way would see some of it, so they are left."""
        pair.drop_all()
        if isinstance(pair.loader.dataset, cases.Plain) and self.rng.random() < 0.7:
            self.version += 1
            for loader in (pair.loader, pair.naive):
                if hasattr(loader, "dataset"):
                    loader.dataset.version = self.version
            self.samples.clear()
            self.reader = None
            self.counts["fault: dataset changed"] += 1
        super().refresh(pair)

    def close_beside(self, pair: Pair) -> None:
        """``close()`` from another thread, in the middle of an epoch; then go on elsewhere."""
        closer = threading.Timer(self.rng.choice([0.0, 0.001, 0.01]), pair.loader.close)
        self.closing = True
        closer.start()
        try:
            self.take(pair)
        except LoaderClosedError:
            self.counts["fault: closed in next() by another thread"] += 1
        finally:
            closer.join()
            self.closing = False
        self.resume(pair)


class Twins(Disturbed):
    """A case whose naive loader is a loader without workers."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        self.drop_in = random.Random(f"drop-in {seed}").random() < 0.4  # it is torch's loader
        self.persistent = False  # the workers of the drop-in live on, with the dataset as it was
        self.mixture: tuple[int, list[int]] | None = None  # its seed and weights; None: the dataset is none
        self.streams = 0  # how many parts iterable data has; 0: it is read by index
        self.endless: dict[str, Any] = {}
        super().__init__(seed, processes)

    def __str__(self) -> str:
        mixed = f"mixture: {self.mixture}, " if self.mixture else ""
        return f"{'drop-in' if self.drop_in else 'loader'} and its twin, {mixed}{super().__str__()}"

    def draw_kind(self) -> cases.Kind:
        kind = super().draw_kind()
        while kind.takes_epoch:  # threads, and a loader without workers, have one dataset, which is in one epoch
            kind = super().draw_kind()
        if not self.drop_in and self.length and self.rng.random() < 0.3:
            bad = frozenset(self.rng.sample(range(self.length), min(2, self.length - 1)))
            self.mixture = self.rng.randrange(9), [self.rng.randint(1, 5) for _ in range(2)]
            kind = cases.Kind("mixture", self.mix, bad=bad)
        elif self.rng.random() < 0.25:
            lengths = [self.rng.choice([0, 1, 7, 40]) for _ in range(self.rng.randint(1, 3 if self.drop_in else 5))]
            if not self.drop_in and self.rng.random() < 0.3 and all(lengths):
                self.endless = {"steps_per_epoch": self.rng.choice([3, 7])}
            names = STREAMS_OF_TORCH if self.drop_in else [*STREAM_FUNCTIONS, *STREAM_OBJECTS]
            self.streams, name = len(lengths), self.rng.choice(names)
            more: dict[str, Any] = {}
            if name in STREAM_FUNCTIONS:
                more["seconds"] = [self.rng.choice([0.0, 0.004])] * len(lengths)
                if self.rng.random() < 0.2:
                    at = self.rng.randrange(len(lengths)), self.rng.randrange(5)
                    more["before"] = stream_samples.At(failures.raise_lookup, *at)
            make = functools.partial(getattr(stream_samples, name), lengths, **more)
            kind = cases.Kind(name, (lambda: cases.OfTorch(make())) if self.drop_in else make)
        # Batches come in any order, so whole epochs are compared.
        self.unordered = self.drop_in and not (kind.bad or self.streams) and self.rng.random() < 0.15
        return kind

    def mix(self) -> Any:
        seed, weights = self.mixture
        sources = [self.disturbed(cases.Plain(length, self.kind.bad)) for length in (self.length, 2 * self.length)]
        return interleave(sources, weights, seed=seed, shuffle=True, stop=2 * self.length + 5)

    def draw_order(self) -> cases.Order:
        if self.mixture or self.streams:
            return cases.Order("in order")
        while True:
            order = cases.draw_order(self.rng, self.kind, self.length)
            of_torch = order.name in DROP_IN_ORDERS and (self.length or not order.shuffle)
            if order.sized and (of_torch or not self.drop_in):
                return order

    def make_pair(self, state: Any = None, sampler: Any = None) -> Pair:
        order = self.order
        made = None if order.make is None else order.make()
        options: dict[str, Any] = {"seed": 7, "on_error": self.on_error, **self.draw_shards()}
        options.pop("shard_weights", None)  # of a batch, they are those of the moment when a worker is given it
        options.pop("resident", None)
        shuffle = order.shuffle if made is None else None
        one_by_one = {"batch_size": self.batch_size, "sampler": made, "shuffle": shuffle}
        options |= {"batch_sampler": made} if order.batches else one_by_one
        options["collate_fn"] = self.kind.batchify[0]
        method, workers = self.draw_pool()
        if self.drop_in:
            options |= {} if order.batches else {"drop_last": self.last_batch == "discard"}
            given, without = self.drop_in_workers(method, workers), {}
            if self.streams:  # the twin has workers too, for each its part
                without = {"num_workers": self.streams, "thread_pool": True}
            kind: Any = DataLoader
        else:
            options |= {"streams": self.streams, **self.endless} if self.streams else self.draw_ranks()
            # Iterable data does not roll over, and has no last batch if it is endless.
            has_none = self.streams and (self.last_batch == "rollover" or self.endless)
            options |= {} if order.batches or has_none else {"last_batch": self.last_batch}
            given = self.give_workers(method, workers) | self.draw_prefetch()
            kind, without = conftest.made, {"pool": InlinePool()}
        self.counts[f"loaders, {method}, {kind.__name__}"] += 1
        self.steps.append(f"loader: {given} {options}")
        pace, self.pace = self.pace, (0.0, 0.0)
        twin, self.pace = kind(self.make_dataset(), **copy.deepcopy(options), **without), pace
        pair = Pair(kind(self.make_dataset(), **options, **given), twin, True, False)
        self.allow_kills(pair)
        return pair

    def drop_in_workers(self, method: str, workers: int) -> dict[str, Any]:
        self.persistent = False
        if method == "inline" and not self.streams:
            return {"num_workers": 0}
        count = "auto" if self.rng.random() < 0.3 else workers
        given: dict[str, Any] = {"num_workers": self.streams or count, "in_order": not self.unordered}
        given["prefetch_factor"], self.persistent = self.rng.choice([None, 1, 2, 7]), self.rng.random() < 0.4
        given["persistent_workers"] = self.persistent
        if method in ("thread", "inline"):
            return given | {"thread_pool": True}
        if method == "fork" and self.leaks:
            given["max_worker_memory"] = allowed_bytes()
        return given | {"start_method": method, "restarts": self.RESTARTS}

    def pool(self, pair: Pair) -> Any:
        if not self.drop_in:
            return pair.loader.pool
        run = pair.loader._progress.current_run
        newest = None if run is None else pair.loader._progress.live.get(run.number)
        return None if newest is None or newest._shutdown or not pair.loader.num_workers else newest._engine.pool

    def both(self, what: str, ask: Callable[[Any], Any]) -> Any:
        """What the loader without workers says; a `Difference` if the other one says something else."""
        expected = Case.outcome(self, lambda: ask(self.pair.naive))
        self.compare(self.outcome(lambda: ask(self.pair.loader)), expected, what)
        return expected

    def compare(self, got: Any, expected: Any, where: str, naive: Any = None) -> None:
        if self.shown(got) != self.shown(expected):
            error = got if isinstance(got, BaseException) else None
            raise Difference(f"{where}: {self.shown(got)}\n    twin: {self.shown(expected)}") from error

    def shown(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return type(value).__name__, WORKER.sub("", str(value)), getattr(value, "index", None)
        return frozen(value)

    def expected(self, naive: Any, got: Any) -> Any:
        return Case.outcome(self, functools.partial(next, naive))

    def place_of(self, naive: Any, expected: Any) -> str:
        return "end" if expected is DONE else f"{self.pair.naive.state_dict().get('samples', '')}"

    def check_place(self, pair: Pair) -> None:
        def place(loader: Any) -> list[Any]:
            """Of the drop-in without what depends on the workers, and on torch's generator."""
            state: dict[str, Any] = loader.state_dict()
            state["_sampler"] = {**(state.get("_sampler") or {}), "rng": None}
            if self.endless:  # how much of what was given a part has told depends on the workers
                state["parts"] = (state.get("parts") or {}).get("given")
            shown = json.dumps({key: state[key] for key in sorted(state) if key not in BY_WORKERS})
            return [len(loader), shown, *([] if self.drop_in else [loader.epoch, loader.position])]

        self.both("place", place)

    def check_skipped(self, pair: Pair) -> None:
        if not self.drop_in and pair not in self.interrupted:
            self.both("num_skipped", lambda loader: loader.num_skipped)

    def choices(self) -> list[tuple[int, Callable[[Pair], None]]]:
        steps, left_out = Case.choices(self), ["look", "another_loader"]
        if self.drop_in:
            left_out += ["peek", "change_prefetch"]
        else:
            has_weights = self.mixture or weighted_in(self.pair.naive)
            steps += [(3, self.rescale), (5 if has_weights else 1, self.weigh)]
        steps += [(2, self.look_up), (2, self.report), *self.faults()]
        return [(weight, step) for weight, step in steps if step.__name__ not in left_out]

    def faults(self) -> list[tuple[int, Callable[[Pair], None]]]:
        faults = [(2, self.kill), (1, self.stop), (2, self.kill_zygote)]
        return faults if self.drop_in else faults + [(3, self.resize), (2, self.close_beside)]

    def begin(self, pair: Pair) -> None:
        if self.mixture or self.persistent:  # its epoch is that of all who share it; its workers have one iterator
            pair.drop_all()
        if len(pair.iterators) >= 3:
            pair.drop(self.rng.randrange(3))
        one, other = pair.loader, pair.naive
        if self.unordered:
            one, other = (sorted(loader, key=lambda batch: repr(frozen(batch))) for loader in (one, other))
        pair.iterators.append((iter(one), iter(other)))

    def left(self, iterator: Any) -> int:
        return self.rng.randrange(20)

    def resume(self, pair: Pair) -> None:
        """Go on in new loaders, with other workers; perhaps without some steps."""
        state = json.loads(json.dumps(pair.naive.state_dict()))
        pair.close()
        self.pair = self.make_pair()
        skip = None
        if self.rng.random() < 0.3:
            first = self.rng.randrange(30)
            skip = [(first, first + self.rng.randrange(4))]
            self.note(f"skip={skip}")
        self.both("load_state_dict", lambda loader: loader.load_state_dict(state, skip=skip))

    def load_here(self, pair: Pair) -> None:
        if self.saved is None or self.rng.random() < 0.5:
            self.saved = json.loads(json.dumps(pair.naive.state_dict()))
        if self.drop_in:  # its persistent workers end
            pair.drop_all()
        self.both("load_state_dict", lambda loader: loader.load_state_dict(self.saved))

    def set_epoch(self, pair: Pair) -> None:
        epoch = self.rng.randrange(4)
        self.note(epoch)
        self.both("set_epoch", lambda loader: loader.set_epoch(epoch))

    def both_if_free(self, what: str, ask: Callable[[Any], Any]) -> None:
        """If any epoch can be read: threads share a mixture."""
        if not self.mixture or not self.pair.iterators:
            self.both(what, ask)

    def peek(self, pair: Pair) -> None:
        self.both_if_free("peek", lambda loader: loader.peek())

    def read(self, pair: Pair) -> None:
        length = 2 * self.length + 5 if self.mixture else self.length
        index = self.rng.choice(self.kind.keys or range(length + (length < 3)))
        epoch = self.rng.randrange(4)
        self.both_if_free(f"read({index!r}, {epoch})", lambda loader: loader.read(index, epoch))

    def look_up(self, pair: Pair) -> None:
        epoch, step = self.rng.randrange(4), self.rng.choice([0, 1, 2, 7, 30])
        self.both(f"indices({epoch}, {step})", lambda loader: loader.indices(epoch, step))
        self.both_if_free(f"batch({epoch}, {step})", lambda loader: loader.batch(epoch, step))

    def rescale(self, pair: Pair) -> None:
        replicas, size = self.rng.choice([1, 1, 2, 3]), self.rng.choice([None, None, 1, 3, 16])
        rank = self.rng.randrange(replicas)
        self.note(f"{replicas}, {rank}, {size}")
        done = self.both("rescale", lambda loader: loader.rescale(replicas, rank, size))
        if size is not None and not isinstance(done, Exception):
            self.batch_size = size

    def weigh(self, pair: Pair) -> None:
        if weighted_in(pair.naive):
            some = [self.rng.randrange(self.length + 1) for _ in range(self.rng.randrange(4))]
            change = some, [self.rng.choice([0, 1, 2.5, 90]) for _ in some]
            self.note(change)
            self.both("update", lambda loader: weighted_in(loader)[0].update(*change))
            return
        weights = self.rng.choice([None, [1, 1], [0, 1], [5, 1], [1, 9], [1, 2, 3]])
        self.note(weights)
        self.both("set_weights", lambda loader: loader.set_weights(weights))

    def report(self, pair: Pair) -> None:
        """What the loader says of itself; it disturbs nothing."""
        if pair not in self.interrupted:
            self.both("stats", lambda loader: [loader.stats().batches, loader.stats().samples])
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(RuntimeError):  # no batch yet
            pair.loader.report(Path(folder) / "report.html")
            pair.loader.trace(Path(folder) / "trace.json")

    def refresh(self, pair: Pair) -> None:
        if not self.persistent:
            super().refresh(pair)


def weighted_in(loader: Any) -> list[WeightedRandomSampler]:
    """The innermost sampler of a loader, if its weights can be changed."""
    return [one for one in nested(loader.batch_sampler) if isinstance(one, WeightedRandomSampler)]


class Calm(Twins):
    """Twins that nothing disturbs: they do the same each time."""

    def draw_kind(self) -> cases.Kind:
        kind = super().draw_kind()
        self.leaks, self.pace = False, (0.0, 0.0)
        return kind

    def faults(self, *_: Any) -> list[Any]:
        return []

    later = tune = faults
