"""Cases that are disturbed: workers that are killed or stopped, or that take too much memory, another number of them,
signals, slow samples, a changed dataset, `close` in a thread.

    before a step    a timer, which kills or stops a worker, changes their number or sends a signal while the loop waits
                     in ``next``, with luck
    steps            those of `Case`, and kill, stop, kill_zygote, resize, close_beside, refresh of changed data
    loaders          also with ``num_workers="auto"``, which has another number every few steps, and
                     ``max_worker_memory`` over samples that leave memory behind

None of it changes what must come. The seed gives the case and its faults again, not their timing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil
import pytest

from sharded_loader import LoaderClosedError, ShardedDataLoader, SimpleDataset
from sharded_loader.base.limits import private_bytes
from sharded_loader.drop_in.iterator import LoaderIterator
from sharded_loader.instruments.auto import Tuner
from sharded_loader.loader.iterator import EpochIterator
from sharded_loader.pools.deaths import Deaths
from tests import conftest
from tests.fuzz import cases
from tests.fuzz.steps import Case, Pair
from tests.injection import HANDLERS, TimeIsUp

IN_NEXT = EpochIterator.__next__.__code__, LoaderIterator.__next__.__code__

OFTEN = {"fork": 100, "thread": 80, "inline": 12}
METHODS = [name for name in conftest.POOLS for _ in range(OFTEN.get(name, 1))]
"""Spawned workers start slowly: a hundredth of the loaders is enough."""


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
        self.asked: Pair | None = None  # whose next batch the loop waits for
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
        if (pool := self.pool(pair)) is not None and hasattr(pool, "restarts"):
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

    # -- steps ----------------------------------------------------------------------------------------------

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
        self.note_workers()
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

    def ask_next(self, pair: Pair, iterator: Any) -> Any:
        self.asked = pair
        try:
            return super().ask_next(pair, iterator)
        finally:
            self.asked = None

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

    # -- faults ---------------------------------------------------------------------------------------------

    def pool(self, pair: Pair) -> Any:
        """The pool that reads; None: there is none."""
        return pair.loader.pool

    def pids(self, pair: Pair) -> list[int]:
        return getattr(self.pool(pair), "pids", [])

    def note_workers(self) -> None:
        for pid in self.pids(self.pair):
            if pid not in self.workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.workers[pid] = psutil.Process(pid)

    def later(self) -> None:
        """While the loop waits in ``next``, with luck."""
        number, count = getattr(signal, self.rng.choice(list(HANDLERS))), self.rng.choice(self.COUNTS)
        faults: list[Callable[[], None]] = [lambda: self.kill(self.pair), lambda: self.stop(self.pair)]
        faults += [lambda: self.send(number), lambda: self.have(self.pair, count)]
        self.timers = [timer for timer in self.timers if timer.is_alive()]
        self.timers.append(threading.Timer(self.rng.choice([0.0, 0.001, 0.005, 0.03]), self.rng.choice(faults)))
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
        pids = self.pids(pair)
        if pids:
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
                self.timers.append(threading.Timer(self.victims.choice([0.01, 0.1, 0.4]), self.go_on, [pid]))
                self.timers[-1].start()

    def go_on(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self.stopped.discard(pid)

    def resize(self, pair: Pair) -> None:
        self.have(pair, self.rng.choice(self.COUNTS))

    def have(self, pair: Pair, count: int) -> None:
        """The number of workers changes. Another thread may close the loader meanwhile."""
        pool = self.pool(pair)
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
            for dataset in self.datasets(pair):
                dataset.version = self.version
            self.samples.clear()
            self.reader = None
            self.counts["fault: dataset changed"] += 1
        super().refresh(pair)

    def datasets(self, pair: Pair) -> list[Any]:
        return [pair.loader.dataset]

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
