"""One run of the benchmark on a device: how much is measured, in turn, round after round, while there is time.

    run.in_turn(workload, openers, take) -> run.records     opens the contestants, and takes a value of each in a round
    run.rate(feed, warm, use)                               batches per second of a stretch

What fails, or no longer fits into the time, becomes a record with an error, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_device import Device
from benchmarks.gpu_feeds import EPOCH, ROW, Blocks, Depth, Feed, depth_for, fill
from benchmarks.measure import Record

MB = 1_000_000
ROW_BYTES = 4 * ROW


Values = float | Mapping[str, float | str]
"""What is measured at once: a value, or several by the names of their workloads, or a text why there is none."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        sizes: of batches, in bytes.
        rounds: how often.
        span: seconds of a timed stretch.
        calls: of ``next`` that are timed one by one.
        side: of the training images, in pixels.
        images: of the smallest training batch.
        step: seconds that a training step takes at least; the batch is made as large as that needs.
        samples: of the data that stays on the device.
        gathered: samples in a batch of it.
        registered: bytes of the segments that are page-locked.
        pinned: bytes of the batches of `pin`.
        kept: bytes of the batches of `memory`.
        steps: of a loop that the device limits.
        room: bytes for batches in flight.
        patience: seconds in which the workers of `bus` have to have touched their memory.
    """

    sizes: tuple[int, ...] = (1 * MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
    rounds: int = 5
    span: float = 0.4
    calls: int = 40
    side: int = 224
    images: int = 64
    step: float = 0.008
    samples: int = 50_000
    gathered: tuple[int, ...] = (256, 4096)
    registered: tuple[int, ...] = (1 << 26, 1 << 28, 1 << 30)
    pinned: tuple[int, ...] = (4 * MB, 40 * MB)
    kept: int = 64 * MB
    steps: int = 60
    room: int = 2_500 * MB
    patience: float = 4


QUICK = Scale(
    sizes=(16 * MB, 64 * MB, 256 * MB),
    rounds=3,
    span=0.2,
    calls=15,
    step=0.005,
    registered=(1 << 26, 1 << 28),
    steps=20,
)
SMOKE = Scale(
    sizes=(MB // 4, MB),
    rounds=1,
    span=0.02,
    calls=3,
    side=16,
    images=8,
    step=0,
    samples=512,
    gathered=(64, 256),
    registered=(1 << 20,),
    pinned=(MB // 4,),
    kept=MB,
    steps=4,
    room=8 * MB,
    patience=0.2,
)


@dataclass
class Run:
    """One run of the benchmark.

    Attributes:
        device: what is measured.
        scale: how much.
        workers: of each loader.
        deadline: of `time.monotonic`, when nothing more is begun.
        records: what was measured so far.
    """

    device: Device
    scale: Scale
    workers: int
    deadline: float
    say: Callable[[str], None]
    records: list[Record] = field(default_factory=list)
    _lasted: dict[tuple[str, str], float] = field(default_factory=dict)
    _failed: set[tuple[str, str]] = field(default_factory=set)

    def measure(self, workload: str, loader: str, number: int, once: Callable[[], Values]) -> None:
        """Take one value, or several, or the reason why there is none."""
        key = workload, loader
        if key in self._failed:
            return
        began = time.monotonic()
        if began + self._lasted.get(key, 0) > self.deadline:
            self.fail(workload, loader, number, "skipped: no time left")
            return
        try:
            value = once()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.fail(workload, loader, number, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return
        self._lasted[key] = time.monotonic() - began
        for name, one in value.items() if isinstance(value, Mapping) else ((workload, value),):
            if isinstance(one, str):
                self.fail(name, loader, number, one)
            else:
                self.keep(name, loader, number, one)

    def keep(self, workload: str, loader: str, number: int, value: float) -> None:
        """Record a value."""
        self.records.append(Record(number, workload, loader, value))
        self.say(f"round {number + 1}  {workload:14} {loader:14} {value:.6g}")

    def fail(self, workload: str, loader: str, number: int, why: str) -> None:
        """Record why there is no value, and ask for no more of this kind."""
        self._failed.add((workload, loader))
        self.records.append(Record(number, workload, loader, error=why))
        self.say(f"round {number + 1}  {workload:14} {loader:14} {why}")

    def in_turn(self, workload: str, openers: dict[str, Callable[[], Any]], take: Callable[[Any], Values]) -> None:
        """Open each contestant once, and measure them round after round, in another order each time.

        Nobody's workers have anything to do when one is measured but its own: all are waited for before.
        """
        opened: dict[str, Any] = {}

        def once(name: str) -> Values:
            if name not in opened:
                opened[name] = openers[name]()
                if isinstance(opened[name], Feed):
                    next(opened[name])
            fill(one for one in opened.values() if isinstance(one, Feed))
            return take(opened[name])

        names = list(openers)
        try:
            for number in range(self.scale.rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    self.measure(workload, name, number, functools.partial(once, name))
        finally:
            for one in opened.values():
                if isinstance(one, Feed):
                    with contextlib.suppress(Exception):
                        one.close()

    def rate(self, feed: Any, warm: int, use: Callable[[Any], Any] = lambda batch: None) -> float:
        """Batches per second of a stretch in which ``use`` gets each; the device has done all of it at the end.

        Args:
            warm: batches before it: what is finished already when it begins must not count.
        """
        for _ in range(warm):
            use(next(feed))
        self.device.sync()
        began, count = time.perf_counter(), 0
        while count < 3 or time.perf_counter() - began < self.scale.span:
            use(next(feed))
            count += 1
        self.device.sync()
        return count / (time.perf_counter() - began)

    def blocks(self, nbytes: int, kind: Callable[[int], Any] = Blocks) -> tuple[Any, int, Depth]:
        """A dataset, how many of its rows make a batch of about so many bytes, and how many batches are in flight."""
        size = max(1, round(nbytes / ROW_BYTES))
        return kind(size * EPOCH), size, self.depth(size * ROW_BYTES)

    def depth(self, nbytes: int) -> Depth:
        """Batches in flight, for batches of so many bytes."""
        return depth_for(nbytes, self.workers, self.scale.room)

    def needs_gpu(self, workload: str, loader: str = "ours") -> bool:
        """Whether the CPU stands in for one, which cannot be measured; then a record says so."""
        if not self.device.is_gpu:
            self.fail(workload, loader, 0, "needs a GPU")
        return not self.device.is_gpu


def size_name(nbytes: int) -> str:
    """As the tables name it.

    Example:
        >>> size_name(16_000_000), size_name(250_000)
        ('16 MB', '250 KB')
    """
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // 1000} KB"
