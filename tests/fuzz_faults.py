"""Cases that are disturbed: killed workers, another number of workers, signals, a changed dataset, `close` in a thread.

    before a step    a timer, which kills a worker, changes their number or sends a signal while the loop waits in
                     ``next``, with luck
    steps            those of `Case`, and kill, kill_template, resize, refresh with a changed dataset, close_beside

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

from sharded_loader import LoaderClosedError
from sharded_loader.loader.iterator import EpochIterator
from tests import conftest, fuzz_cases
from tests.fuzz_steps import Case, Pair
from tests.injection import HANDLERS, TimeIsUp

METHODS = [name for name in conftest.POOLS for _ in range({"fork": 4, "inline": 1, "spawn": 1}.get(name, 2))]
"""Spawned workers start slowly: a tenth of the loaders is enough."""


COUNTS = [1, 2, 2, 3, 5]
"""Of workers."""


class Disturbed(Case):
    """A case with more samples, workers and steps, and with faults."""

    LENGTHS = (0, 1, 7, 40, 100, 300)
    BATCH_SIZES = (1, 3, 4, 16, 64)
    STEPS = (5, 20, 60)
    MAY_FAIL = True  # an interruption, too, knows the frames that held the iterator
    RESTARTS = 1000  # kills at random strike one batch more than three times now and then

    def __init__(self, seed: int, processes: bool = True) -> None:
        self.version = 0
        self.asked: Pair | None = None  # whose next batch the loop waits for
        self.struck = False  # whether a signal has raised in that call of ``next``
        self.interrupted: list[Pair] = []
        self.sent: Counter[int] = Counter()  # signals that have not arrived yet
        self.closing = False
        self.timers: list[threading.Timer] = []
        self.victims = random.Random()  # timers draw; the global generator belongs to datasets and samplers
        super().__init__(seed, processes)

    def draw_kind(self) -> fuzz_cases.Kind:
        self.slow, self.late = self.rng.choice([0.0, 0.0, 0.004]), self.rng.choice([0.0, 0.0, 0.02])
        return fuzz_cases.draw_kind(self.rng, self.length, wide=True)

    def make_dataset(self) -> Any:
        dataset = super().make_dataset()
        if isinstance(dataset, fuzz_cases.Plain):
            dataset.version, dataset.pause = self.version, 0.002
            dataset.slow, dataset.late = self.slow, self.late
        return dataset

    def draw_pool(self) -> tuple[str, int]:
        return self.rng.choice(METHODS), self.rng.choice(COUNTS)

    def draw_prefetch(self) -> dict[str, Any]:
        return super().draw_prefetch() | {"prefetch": self.rng.choice([None, None, 0, 1, 2, 7, 30])}

    # -- steps ----------------------------------------------------------------------------------------------

    def choices(self) -> list[tuple[int, Callable[[Pair], None]]]:
        faults = [(2, self.kill), (2, self.kill_template), (2, self.resize), (1, self.refresh), (2, self.close_beside)]
        return [*super().choices(), *faults]

    def run(self) -> int:
        with self.signals_that_raise():
            return super().run()

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
        super().close()

    def next_of(self, pair: Pair, at: int) -> bool:
        self.asked = pair
        try:
            return super().next_of(pair, at)
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

    def pids(self, pair: Pair) -> list[int]:
        return getattr(pair.loader.pool, "pids", [])

    def note_workers(self) -> None:
        for pid in self.pids(self.pair):
            if pid not in self.workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.workers[pid] = psutil.Process(pid)

    def later(self) -> None:
        """While the loop waits in ``next``, with luck."""
        number = getattr(signal, self.rng.choice(list(HANDLERS)))
        count = self.rng.choice(COUNTS)
        faults: list[Callable[[], None]] = [
            lambda: self.kill(self.pair),
            lambda: self.send(number),
            lambda: self.have(self.pair, count),
        ]
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
                if frame.f_code is EpochIterator.__next__.__code__:
                    self.struck = True
                    raise error
                frame = frame.f_back

        before = {
            name: signal.signal(getattr(signal, name), functools.partial(handle, error))
            for name, (error, _) in HANDLERS.items()
        }
        try:
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

    def resize(self, pair: Pair) -> None:
        self.have(pair, self.rng.choice(COUNTS))

    def have(self, pair: Pair, count: int) -> None:
        """The number of workers changes. Another thread may close the loader meanwhile."""
        if pair.loader.num_workers:
            with contextlib.suppress(LoaderClosedError):
                pair.loader.pool.resize(count)
                self.counts["fault: another number of workers"] += 1

    def kill_template(self, pair: Pair) -> None:
        crew = getattr(pair.loader.pool, "_transport", None)
        if crew is not None and crew.template is not None:
            with contextlib.suppress(ProcessLookupError, ValueError):
                crew.template._process.kill()
                self.counts["fault: template killed"] += 1

    def refresh(self, pair: Pair) -> None:
        """The dataset changes; epochs under way would see some of it, so they are left."""
        pair.drop_all()
        if isinstance(pair.loader.dataset, fuzz_cases.Plain) and self.rng.random() < 0.7:
            self.version += 1
            pair.loader.dataset.version = self.version
            self.samples.clear()
            if self.reader is not None:
                self.reader.close()
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
