"""Loaders of every kind, disturbed at random for as long as one likes, against undisturbed ones.

    python -m tests.soak --minutes 10 [--seed N] [--round N]
    python -m tests.soak --records 100000 [--seed N]         damaged RecordIO files instead: see `soak_records`

    Recipe (`soak_recipes`) --InlinePool-->  Reference: what each epoch must be, read once
                            --any pool---->  a loader  <-- faults
    Round: takes batches from it, compares each, disturbs it between them

A round is one recipe: dataset, order, errors, and then up to 60 steps. Pools, workers and prefetch change with every
resume. Seed and round give the recipe and the faults again, not their timing; ``--round`` runs one of them alone.

Prints a line every 10 s and a table at the end. Exit status 1: a batch differed, something was left behind, or a
step took a minute; then every thread's stack is printed. Not part of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psutil

from sharded_loader import LoaderClosedError
from sharded_loader.loader.iterator import EpochIterator
from tests import conftest, soak_records
from tests.injection import HANDLERS, TimeIsUp
from tests.soak_recipes import Recipe, Reference, frozen, outcome

HANG = 60.0
"""Seconds for one step. The slowest in order, a first batch from spawned workers on a busy machine, takes five."""

RESTARTS = 1000
"""Kills at random strike the same batch more than three times now and then; that is not the batch's fault."""

METHODS = [name for name in conftest.POOLS for _ in range({"fork": 4, "inline": 1, "spawn": 1}.get(name, 2))]
"""Spawned workers start slowly: a tenth of the loaders is enough."""

LEFT = ("processes", "threads", "descriptors", "shared memory")


@dataclass
class Tally:
    """What has happened in all rounds."""

    faults: Counter[str] = field(default_factory=Counter)
    pools: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    batches: int = 0
    held: int = 0
    differences: list[str] = field(default_factory=list)
    workers: dict[int, psutil.Process] = field(default_factory=dict)
    now: str = "starting"
    taking: bool = False
    step_began: float = field(default_factory=time.monotonic)

    def step(self) -> None:
        self.step_began = time.monotonic()
        faulthandler.dump_traceback_later(HANG + 10, exit=True)  # if even the monitor cannot run


@dataclass
class Reading:
    """An iterator that is alive, and how far it is. Before its first batch it is in no epoch."""

    iterator: Any
    epoch: int | None = None
    expected: list[Any] = field(default_factory=list)
    at: int = 0
    ended: bool = False


class Round:
    """One recipe. `run` takes batches and disturbs the loader between them, or while it waits for them."""

    def __init__(self, name: str, recipe: Recipe, rng: random.Random, tally: Tally) -> None:
        self.name, self.recipe, self.rng, self.tally = name, recipe, rng, tally
        self.reference = Reference(recipe)
        self.version = 0
        self.next_epoch = 0
        self.pending = 0
        self.readings: list[Reading] = []
        self.last: Reading | None = None
        self.held: deque[tuple[Any, Any]] = deque()
        self.timers: list[threading.Timer] = []
        self.closing = False
        self.make_loader()

    def make_loader(self) -> None:
        rng = self.rng
        method = rng.choice(METHODS)
        workers = rng.choice([1, 2, 2, 3, 5])
        options = {"restarts": RESTARTS} if method in conftest.PROCESS_POOLS else {}
        prefetch = rng.choice([None, None, 0, 1, 2, 7, 30])
        self.dataset = self.recipe.dataset()
        self.dataset.version = self.version
        pool = conftest.make_pool(method, workers, **options)
        ahead = rng.choice([None, True, False])
        self.loader = self.recipe.loader(self.dataset, pool=pool, prefetch=prefetch, prefetch_epochs=ahead)
        self.tally.pools[method] += 1
        self.tally.now = f"{self.name}: {self.recipe}, {pool!r}, prefetch {prefetch}"

    def run(self) -> None:
        faults = [self.kill, self.kill_template, self.resume, self.leave, self.refresh, self.another, self.stop_beside]
        faults += [self.look, self.look]
        try:
            for _ in range(self.rng.choice([5, 20, 60])):
                self.tally.step()
                if not self.readings:
                    self.begin()
                self.note_workers()
                if self.rng.random() < 0.25:
                    self.rng.choice(faults)()
                if self.rng.random() < 0.2:
                    self.later(self.rng.choice([self.interrupt, self.kill]))
                for _ in range(self.rng.choice([1, 1, 3, 10])):
                    if self.readings:
                        self.take(self.rng.choice(self.readings))
        finally:
            for timer in self.timers:
                timer.cancel()
                timer.join()
            self.readings.clear()
            self.tally.faults["samples skipped or replaced"] += self.loader.num_skipped
            self.loader.close()
            while self.held:
                self.check_held()

    def begin(self) -> None:
        """An iterator. Its epoch begins with its first batch."""
        self.check_place()
        self.readings.append(Reading(iter(self.loader)))

    def check_place(self) -> None:
        place = self.loader.epoch, self.loader.position
        # Batches of which no sample is good are counted, but not delivered.
        if place[0] != self.place()[0] or (place != self.place() and self.recipe.on_error == "raise"):
            self.differ(f"at {place} instead of {self.place()}")

    def take(self, reading: Reading) -> None:
        self.check_place()
        batches: list[Any] = []
        while True:
            try:
                got = self.next_of(reading, batches)
                break
            except (KeyboardInterrupt, SystemExit, TimeIsUp) as raised:
                self.tally.faults[f"{type(raised).__name__} raised by a signal handler in next()"] += 1
            except LoaderClosedError:
                if not self.closing:
                    raise
                return self.resume()
        if reading.epoch is None:
            reading.epoch, reading.at = self.next_epoch, self.pending
            reading.expected = self.reference.epoch(self.next_epoch, self.version)
            self.next_epoch, self.pending = self.next_epoch + 1, 0
        self.last = reading
        expected = reading.expected[reading.at] if reading.at < len(reading.expected) else None
        self.tally.batches += 1
        if got != expected:
            self.differ(f"epoch {reading.epoch}, batch {reading.at}: {got!r:.400}\n    expected: {expected!r:.400}")
        self.tally.faults["sample that raises"] += isinstance(got, str)
        if got is None:
            reading.ended = True
        else:
            reading.at += 1
        if got is None or got != expected:
            self.drop(reading)
        if batches and self.rng.random() < 0.4:
            self.held.append((batches[0], got))
        while self.held and (len(self.held) > 30 or self.rng.random() < 0.3):
            self.check_held()
        if self.closing:
            self.resume()

    def next_of(self, reading: Reading, batches: list[Any]) -> Any:
        self.tally.step()
        self.tally.taking = True
        try:
            return outcome(reading.iterator, batches.append)
        finally:
            self.tally.taking = False

    def drop(self, reading: Reading) -> None:
        self.readings.remove(reading)
        reading.iterator = None
        if self.recipe.bad:
            gc.collect()  # an error that was raised in this thread knows the frames that held the iterator

    def check_held(self) -> None:
        batch, as_it_was = self.held.popleft()
        self.tally.held += 1
        if frozen(batch) != as_it_was:
            self.differ(f"a batch that was held has changed: {as_it_was!r:.400}\n    now: {frozen(batch)!r:.400}")

    def differ(self, what: str) -> None:
        self.tally.differences.append(f"{self.tally.now}\n    {what}")
        print(self.tally.differences[-1], flush=True)

    # -- faults ---------------------------------------------------------------------------------------------

    def note_workers(self) -> None:
        for pid in self._pids():
            if pid not in self.tally.workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.tally.workers[pid] = psutil.Process(pid)

    def _pids(self) -> list[int]:
        return getattr(self.loader.pool, "pids", [])

    def later(self, fault: Callable[[], None]) -> None:
        """While the loop waits in ``next``, with luck."""
        self.timers = [timer for timer in self.timers if timer.is_alive()]
        self.timers.append(threading.Timer(self.rng.choice([0.0, 0.001, 0.005, 0.03]), fault))
        self.timers[-1].start()

    def kill(self) -> None:
        pids = self._pids()
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(pids), signal.SIGKILL)
                self.tally.faults["worker killed"] += 1

    def kill_template(self) -> None:
        crew = getattr(self.loader.pool, "_transport", None)
        if crew is not None and crew.template is not None:
            with contextlib.suppress(ProcessLookupError, ValueError):
                crew.template._process.kill()
                self.tally.faults["template killed"] += 1

    def interrupt(self) -> None:
        names = ["SIGINT", "SIGTERM", "SIGALRM"]
        if self.loader.num_workers == 0:
            names.pop()  # an Exception inside the dataset is its batch's error
        os.kill(os.getpid(), getattr(signal, self.rng.choice(names)))

    def leave(self) -> None:
        """Break out of an epoch; the next one begins."""
        if self.readings:
            self.drop(self.rng.choice(self.readings))
            self.tally.faults["epoch left in the middle"] += 1

    def another(self) -> None:
        """A second iterator over the same loader."""
        if len(self.readings) < 3:
            self.tally.faults["epoch begun beside another"] += bool(self.readings)
            self.begin()

    def refresh(self) -> None:
        """The dataset changes; epochs under way would see some of it, so they are left."""
        for reading in list(self.readings):
            self.drop(reading)
        if self.rng.random() < 0.7:
            self.version += 1
            self.dataset.version = self.version
        self.loader.refresh()
        self.tally.faults["refresh"] += 1

    def resume(self) -> None:
        """The state goes into a new loader, in another pool; all iterators of the old one are left."""
        if self.closing:
            self.closer.join()
            self.closing = False
        state, (epoch, at) = self.loader.state_dict(), self.place()
        self.readings.clear()
        if self.rng.random() < 0.8:
            self.loader.close()  # else it is left to the garbage collector
        self.make_loader()
        self.loader.load_state_dict(json.loads(json.dumps(state)))
        self.tally.faults["resumed elsewhere"] += 1
        # After the last batch it is the next epoch, unless there is another one, of which no sample is good.
        over = at and at == len(self.reference.epoch(epoch, self.version))
        if over and (self.recipe.on_error == "raise" or self.loader.epoch == epoch + 1):
            epoch, at = epoch + 1, 0
        self.last, self.next_epoch, self.pending = None, epoch, at
        self.begin()

    def place(self) -> tuple[int, int]:
        """Epoch and batch where the loader must say that it is."""
        last = self.last
        if (
            last is not None
            and last.epoch is not None
            and not last.ended
            and (last.epoch + 1 == self.next_epoch or last in self.readings)
        ):
            return last.epoch, last.at
        return self.next_epoch, self.pending

    def look(self) -> None:
        """Look at the loader and its samplers, begin iterators and drop them: the loader stays where it is."""
        if self.closing:
            return
        loader = self.loader
        looks: dict[str, Callable[[], Any]] = {
            "repr": lambda: repr([loader, loader.sampler, loader.batch_sampler]),
            "len": lambda: [len(loader), len(loader.batch_sampler), len(iter(loader))],
            "iterator dropped unread": lambda: iter(loader),
            "sampler iterated": lambda: list(loader.sampler or ()),
            "batch_sampler iterated": lambda: list(loader.batch_sampler),
            "batch_sampler begun": lambda: next(iter(loader.batch_sampler), None),
            "peek": self.peek,
            "another loader over the sampler": self.read_beside,
        }
        name = self.rng.choice(list(looks))
        before = loader.state_dict(), loader.epoch, loader.position, len(loader)
        looks[name]()
        after = loader.state_dict(), loader.epoch, loader.position, len(loader)
        if after != before:
            self.differ(f"looked at: {name}: {before} before, {after} after")
        self.tally.faults[f"looked at: {name}"] += 1

    def peek(self) -> None:
        try:
            got = outcome(self.loader.peek() for _ in [None])
        except IndexError:
            got = None
        expected = [*self.reference.epoch(self.next_epoch, self.version), None][self.pending]
        if got != expected:
            self.differ(f"peek at epoch {self.next_epoch}: {got!r:.400}\n    expected: {expected!r:.400}")

    def read_beside(self) -> None:
        """Another loader reads the same sampler, from its own first epoch on."""
        with self.recipe.loader(
            self.dataset, sampler=self.loader.sampler, batch_sampler=self.loader.batch_sampler
        ) as one:
            epoch = self.rng.choice([None, 0, self.next_epoch])
            if epoch is not None:
                one.set_epoch(epoch)
            expected = self.reference.epoch(epoch or 0, self.version)
            iterator = iter(one)
            for batch in expected[: self.rng.choice([1, 3, 1000])]:
                if (got := outcome(iterator)) != batch:
                    self.differ(f"beside, epoch {one.epoch}: {got!r:.400}\n    expected: {batch!r:.400}")

    def stop_beside(self) -> None:
        """``close()`` from another thread, in the middle of an epoch; then resumed elsewhere."""
        if self.readings and not self.closing:
            self.closing = True
            self.closer = threading.Timer(self.rng.choice([0.0, 0.001, 0.01]), self.loader.close)
            self.closer.start()
            self.tally.faults["closed by another thread"] += 1


def interrupt_in_next(tally: Tally, number: int, frame: FrameType | None) -> None:
    """Raise, but only where the loader can do something about it: outside of ``next`` Python may lose the batch."""
    while frame is not None and tally.taking:
        if frame.f_code is EpochIterator.__next__.__code__:
            raise HANDLERS[signal.Signals(number).name][0]
        frame = frame.f_back


# -- the whole run ---------------------------------------------------------------------------------------------------


def watch(tally: Tally, began: float, over: threading.Event) -> None:
    """Say every 10 s how far it is; end the program when a step hangs."""
    said = time.monotonic()
    while not over.wait(1.0):
        now = time.monotonic()
        if now - tally.step_began > HANG:
            print(f"HANG of {HANG:.0f} s in {tally.now}", flush=True)
            faulthandler.dump_traceback(all_threads=True)
            show(tally, {})
            sys.stdout.flush()
            os._exit(1)
        if now - said >= 10:
            said = now
            print(
                f"{now - began:5.0f} s: {tally.rounds} rounds, {tally.batches} batches, "
                f"{sum(tally.faults.values())} faults, {len(tally.differences)} differences",
                flush=True,
            )


def show(tally: Tally, left: dict[str, Any]) -> None:
    """The table."""
    rows = [
        ("rounds", tally.rounds),
        *((f"loaders, {name}", count) for name, count in sorted(tally.pools.items())),
        *sorted(tally.faults.items()),
        ("batches compared", tally.batches),
        ("held batches compared again", tally.held),
        ("differences", len(tally.differences)),
        *((f"{kind} left at the end", len(left.get(kind, ()))) for kind in LEFT),
    ]
    for name, count in rows:
        print(f"{name:44}{count:>10,}")


def everything_left(tally: Tally, before: Any) -> dict[str, Any]:
    """What is still there although every loader is closed or garbage, after a grace for what is ending."""
    deadline = time.monotonic() + conftest.PATIENCE
    while True:
        gc.collect()
        left = conftest.remains(*before)
        # Those whose template was killed are nobody's children any more.
        alive = {pid for pid, worker in tally.workers.items() if _lives(worker)}
        if alive:
            left["processes"] = left.get("processes", set()) | alive
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--round", type=int, help="only this one, again and again")
    parser.add_argument("--records", type=int, metavar="FILES", help="damaged RecordIO files instead")
    arguments = parser.parse_args()
    if arguments.records is not None:
        print(f"python -m tests.soak --records {arguments.records} --seed {arguments.seed}", flush=True)
        return soak_records.run(arguments.records, arguments.seed)
    print(f"python -m tests.soak --minutes {arguments.minutes:g} --seed {arguments.seed}", flush=True)
    warnings.simplefilter("ignore")  # batches that are left out
    tally, over, began = Tally(), threading.Event(), time.monotonic()
    for name in HANDLERS:
        signal.signal(getattr(signal, name), functools.partial(interrupt_in_next, tally))
    conftest.start_helpers()
    before = conftest.here()
    monitor = threading.Thread(target=watch, args=(tally, began, over))
    monitor.start()
    try:
        while time.monotonic() - began < 60 * arguments.minutes:
            number = tally.rounds if arguments.round is None else arguments.round
            rng = random.Random(f"{arguments.seed} {number}")
            Round(f"round {number}", Recipe.draw(rng), rng, tally).run()
            tally.rounds += 1
    except BaseException:
        print(f"in {tally.now}:", flush=True)
        raise
    finally:
        over.set()
        monitor.join()
        faulthandler.cancel_dump_traceback_later()
    left = everything_left(tally, before)
    show(tally, left)
    for kind, items in left.items():
        print(f"left: {kind}: {items}")
    return 1 if left or tally.differences else 0


if __name__ == "__main__":
    sys.exit(main())
