"""The measurements on a device. Each is a function of a `Run`, which takes the times and looks at the clock.

    part(run)  opens its contestants, measures them in turn, round after round -> run.records

What fails, or no longer fits into the time, becomes a record with an error, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_device import Device
from benchmarks.gpu_feeds import EPOCH, ROW, Blocks, Depth, Feed, Images, always, depth_for, ours, shared_room
from benchmarks.gpu_feeds import torch_loader as torchs
from benchmarks.measure import Record

MB = 1_000_000
ROW_BYTES = 4 * ROW


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        sizes: of batches, in bytes.
        rounds: how often.
        span: seconds of a timed stretch.
        calls: of ``next`` that are timed one by one.
        side: of the training images, in pixels.
        step: seconds that a training step takes at least; the batch is made as large as that needs.
        samples: of the data that stays on the device.
        gathered: samples in a batch of it.
        registered: bytes of the segments that are page-locked.
        room: bytes for batches in flight.
    """

    sizes: tuple[int, ...] = (1 * MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
    rounds: int = 5
    span: float = 0.4
    calls: int = 60
    side: int = 224
    step: float = 0.008
    samples: int = 50_000
    gathered: tuple[int, ...] = (256, 4096)
    registered: tuple[int, ...] = (1 << 26, 1 << 28, 1 << 30)
    room: int = 2_500 * MB


QUICK = Scale(sizes=(1 * MB, 16 * MB, 64 * MB), rounds=3, span=0.2, calls=30, step=0.005, registered=(1 << 26, 1 << 28))
SMOKE = Scale(
    sizes=(MB // 4, MB),
    rounds=1,
    span=0.02,
    calls=3,
    side=16,
    step=0,
    samples=512,
    gathered=(64, 256),
    registered=(1 << 20,),
    room=8 * MB,
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

    def measure(self, workload: str, loader: str, number: int, once: Callable[[], float]) -> None:
        """Take one value, or the reason why there is none."""
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
        self.keep(workload, loader, number, value)

    def keep(self, workload: str, loader: str, number: int, value: float) -> None:
        """Record a value."""
        self.records.append(Record(number, workload, loader, value))
        self.say(f"round {number + 1}  {workload:14} {loader:14} {value:.6g}")

    def fail(self, workload: str, loader: str, number: int, why: str) -> None:
        """Record why there is no value, and ask for no more of this kind."""
        self._failed.add((workload, loader))
        self.records.append(Record(number, workload, loader, error=why))
        self.say(f"round {number + 1}  {workload:14} {loader:14} {why}")

    def in_turn(self, workload: str, openers: dict[str, Callable[[], Any]], take: Callable[[Any], float]) -> None:
        """Open each contestant once, and measure them round after round, in another order each time."""
        opened: dict[str, Any] = {}

        def once(name: str) -> float:
            if name not in opened:
                opened[name] = openers[name]()
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


def size_name(nbytes: int) -> str:
    """As the tables name it.

    Example:
        >>> size_name(16_000_000), size_name(250_000)
        ('16 MB', '250 KB')
    """
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // 1000} KB"


def bus(run: Run) -> None:
    """Bytes per second to the device."""
    device, scale = run.device, run.scale
    for nbytes in scale.sizes:
        size = max(1, round(nbytes / ROW_BYTES))
        real = size * ROW_BYTES
        depth = depth_for(real, run.workers, shared_room(scale.room))
        data = Blocks(size * EPOCH)

        def bare(real: int = real) -> Callable[[int], float]:
            copies = device.copies(real)
            copies(3)
            return copies

        def take(one: Any, real: int = real, warm: int = 2 * depth.batches) -> float:
            if isinstance(one, Feed):
                return run.rate(one, warm) * real
            single = one(3) / 3
            count = max(3, min(20_000, int(scale.span / max(single, 1e-6))))
            return count * real / float(one(count))

        to: dict[str, Any] = {"device": device.device}
        run.in_turn(
            f"bus {size_name(nbytes)}",
            {
                "ours": functools.partial(ours, data, size, depth, **to),
                "ours, threads": functools.partial(ours, data, size, depth, threads=True, **to),
                "torch": functools.partial(torchs, data, size, depth, device.device),
                "limit": bare,
            },
            take,
        )


class Network(torch.nn.Module):
    """Convolutions, in the proportions of a small residual network."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        inputs = 3
        for width, stride in ((32, 2), (64, 2), (128, 2), (128, 1), (128, 1), (256, 2), (256, 1), (256, 1)):
            layers += [torch.nn.Conv2d(inputs, width, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(width)]
            layers.append(torch.nn.ReLU(inplace=True))
            inputs = width
        self.features = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(inputs, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


def trainer(device: torch.device) -> Callable[[Any], None]:
    """A training step, as a function of a batch of `Images`."""
    torch.backends.cudnn.benchmark = True
    model = Network().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> None:
        images, labels = batch
        scaled = images.to(torch.bfloat16).div_(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(scaled), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step(run: Run) -> None:
    """Training steps per second."""
    device, scale = run.device, run.scale
    train = trainer(device.device)
    data = Images(scale.side)

    def fixed(size: int) -> Feed:
        images, labels = data.get_batch(range(size))
        return always([torch.from_numpy(images).to(device.device), torch.from_numpy(labels).to(device.device)])

    size = 64 if device.is_gpu else 8
    while size < 1024:
        seconds = 1 / run.rate(fixed(size), 5, train)
        if seconds >= scale.step:
            break
        size *= 2
    run.say(f"steps of {size} images")
    run.keep("step batch", "size", 0, size)
    depth = depth_for(size * 3 * scale.side**2, run.workers, shared_room(scale.room))
    warm = 2 * depth.batches
    run.in_turn(
        "step",
        {
            "ours": functools.partial(ours, data, size, depth, device=device.device),
            "torch": functools.partial(torchs, data, size, depth, device.device),
            "ideal": functools.partial(fixed, size),
        },
        lambda feed: run.rate(feed, warm, train),
    )


def host(run: Run) -> None:
    """Seconds of the host's time per ``next``, with batches that are finished, beyond torch's own calls."""
    device, scale = run.device, run.scale
    for nbytes in (ROW_BYTES, 16 * MB if device.is_gpu else MB):
        size = max(1, round(nbytes / ROW_BYTES))
        name = f"host {size_name(nbytes)}"
        feed: Feed | None = None
        try:
            depth = depth_for(size * ROW_BYTES, run.workers, shared_room(scale.room))
            feed = ours(Blocks(size * EPOCH), size, depth, device=device.device)
            calls = device.copy_calls(device.host((size, ROW)))
            pause = 0.002 + 2e-9 * nbytes  # for the workers: some memory is to be cleared by the system

            def timed(act: Callable[[], Any], pause: float = pause) -> float:
                device.sync()
                time.sleep(pause)
                began = time.perf_counter()
                kept = act()
                took = time.perf_counter() - began
                del kept
                return took

            for _ in range(2 * depth.batches):
                next(feed)
                timed(calls)
            for number in range(scale.rounds):
                pairs = [(timed(feed.__next__), timed(calls)) for _ in range(scale.calls)]
                whole, alone = (statistics.median(column) for column in zip(*pairs, strict=True))
                run.keep(name, "next()", number, whole)
                run.keep(name, "torch's calls", number, alone)
                run.keep(name, "ours", number, whole - alone)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            run.fail(name, "ours", 0, f"{type(error).__name__}: {error}")
        finally:
            if feed is not None:
                feed.close()


def lock(run: Run) -> None:
    """Seconds per GB to page-lock a segment, and to unlock it."""
    from sharded_loader.devices.pinning import Registrar
    from sharded_loader.devices.streams import Streams
    from sharded_loader.memory.segments import create

    for nbytes in run.scale.registered:
        name = f"lock {nbytes >> 20} MiB"
        if not run.device.is_gpu:
            run.fail(name, "lock", 0, "needs a GPU")
            continue
        for number in range(run.scale.rounds):
            segment = create(0, nbytes)
            undo: list[Callable[[], None]] = []

            def take(segment: Any = segment, undo: list[Any] = undo, nbytes: int = nbytes) -> float:
                began = time.perf_counter()
                made = Registrar(Streams(run.device.device), lambda: None).register(segment.mapping)
                took = time.perf_counter() - began
                if made is None:
                    raise RuntimeError("page-locking was refused")
                undo.append(made)
                return took / (nbytes / 1e9)

            def give(undo: list[Any] = undo, nbytes: int = nbytes) -> float:
                began = time.perf_counter()
                undo.pop()()
                return (time.perf_counter() - began) / (nbytes / 1e9)

            run.measure(name, "lock", number, take)
            if undo:
                run.measure(name, "unlock", number, give)
            for function in undo:  # there was no time left to measure it
                function()
            segment.close()


def resident(run: Run) -> None:
    """Samples per second of data that stays on the device, and of the same data streamed."""
    from sharded_loader import ArrayDataset

    rng, count = np.random.default_rng(0), run.scale.samples
    data = ArrayDataset(rng.integers(0, 256, (count, 3, 32, 32), np.uint8), rng.integers(0, 10, count))
    device, depth = run.device.device, Depth(run.workers, 2)
    shuffled: dict[str, Any] = {"shuffle": True, "seed": 0, "device": device, "last_batch": "discard"}

    def kept(size: int) -> Feed:
        feed = ours(data, size, Depth(0, 0), resident=True, **shuffled)
        next(feed)
        return feed

    for size in run.scale.gathered:
        run.in_turn(
            f"resident {size}",
            {
                "ours": functools.partial(kept, size),
                "streamed": functools.partial(ours, data, size, depth, **shuffled),
                "inline": functools.partial(ours, data, size, Depth(0, 0), **shuffled),
            },
            lambda feed, size=size: run.rate(feed, 2 * depth.batches) * size,  # type: ignore[misc]
        )


def shards(run: Run) -> None:
    """Bytes per second of batches for one device, in one piece and in two shards."""
    nbytes = 16 * MB if run.device.is_gpu else MB
    size = 2 * max(1, round(nbytes / ROW_BYTES / 2))
    depth = depth_for(size * ROW_BYTES, run.workers, shared_room(run.scale.room))
    data, device = Blocks(size * EPOCH), run.device.device
    run.in_turn(
        "shards",
        {
            "ours": functools.partial(ours, data, size, depth, devices=[device, device]),
            "one": functools.partial(ours, data, size, depth, device=device),
        },
        lambda feed: run.rate(feed, 2 * depth.batches) * size * ROW_BYTES,
    )


PARTS: dict[str, Callable[[Run], None]] = {
    "bus": bus,
    "step": step,
    "host": host,
    "lock": lock,
    "resident": resident,
    "shards": shards,
}
