"""What the way to a device costs: the host's time, its processors, and memory. Each part is a function of a `Run`.

part(run)  -> run.records
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_feeds import FIELDS, ROW, Blocks, Depth, Feed, Fields, Objects, copied_ahead, ours
from benchmarks.gpu_feeds import torch_loader as torchs
from benchmarks.gpu_run import MB, ROW_BYTES, Run, Values, size_name

RESTS = (0.0, 0.002, 0.034)
"""Seconds in which the host sleeps before each call that is timed."""


def host(run: Run) -> None:
    """Seconds of the host's time per ``next``, with batches that are finished, beyond torch's own calls."""
    large = 16 * MB if run.device.is_gpu else MB
    cases: dict[str, tuple[int, Any, list[tuple[int, ...]]]] = {
        f"host {size_name(ROW_BYTES)}": (ROW_BYTES, Blocks, [(ROW,)]),
        f"host {size_name(large)}": (large, Blocks, [(ROW,)]),
        f"host {FIELDS} tensors": (large, Fields, [(ROW // FIELDS,)] * FIELDS),
        "host an object": (large, Objects, [(ROW,), ()]),
    }

    def once(name: str, nbytes: int, kind: Any, rows: list[tuple[int, ...]]) -> Values:
        data, size, depth = run.blocks(nbytes, kind)
        with contextlib.closing(ours(data, size, depth, device=run.device.device)) as feed:
            next_calls(run, name, feed, depth, [run.device.host((size, *row)) for row in rows])
        return {}  # what was measured is kept already

    for name, case in cases.items():
        run.measure(name, "ours", 0, functools.partial(once, name, *case))


def next_calls(run: Run, name: str, feed: Feed, depth: Depth, hosts: list[torch.Tensor]) -> None:
    """Time ``next`` call by call, in turn with torch's calls for such a copy, after equal rests of host and device."""
    device, stats = run.device, feed.loader.stats  # type: ignore[attr-defined]
    calls = device.copy_calls(hosts)
    # For the workers. They are not asked: what `next` has to do with their answers is its own time.
    pause = 0.004 + 4e-9 * sum(host.nbytes for host in hosts)

    def timed(act: Callable[[], Any], rest: float) -> float:
        device.sync()
        time.sleep(rest)
        began = time.perf_counter()
        kept = act()
        took = time.perf_counter() - began
        del kept
        return took

    def burst(rest: float) -> tuple[list[tuple[float, float]], float]:
        """Pairs of calls, as many as batches that are finished allow, and `placing_seconds` of one."""
        time.sleep(pause)
        timed(feed.__next__, rest), timed(calls, rest)  # these come after the pause, and do not count
        placing, count = stats().placing_seconds, max(1, depth.batches // 2)
        pairs = [(timed(feed.__next__, rest), timed(calls, rest)) for _ in range(count)]
        return pairs, (stats().placing_seconds - placing) / count

    for _ in range(2 * depth.batches):
        next(feed)
        timed(calls, 0)
    for number, rest in itertools.product(range(run.scale.rounds), RESTS):
        bursts = [burst(rest) for _ in range(math.ceil(run.scale.calls / max(1, depth.batches // 2)))]
        pairs = [pair for pairs, _ in bursts for pair in pairs]
        whole, alone = (statistics.median(column) for column in zip(*pairs, strict=True))
        row = f"{name}, rest {1000 * rest:g} ms"
        run.keep(row, "next()", number, whole)
        run.keep(row, "torch's calls", number, alone)
        run.keep(row, "ours", number, whole - alone)
        run.keep(row, "placing", number, statistics.mean(placing for _, placing in bursts))


PIN_STEP, BOUND_STEP = 0.03, 0.01
"""Seconds of a step, by which work is calibrated. How long it was is measured."""


def pin(run: Run) -> None:
    """Steps per second of a loop that makes its copies itself, from batches of ``pin_memory=True``; and processors."""
    device, busy = run.device.device, run.device.sleeper(PIN_STEP)
    for nbytes in run.scale.pinned:
        name = size_name(nbytes)
        if run.needs_gpu(f"pin {name}"):
            continue
        data, size, depth = run.blocks(nbytes)

        def step(batch: torch.Tensor) -> None:
            batch.to(device, non_blocking=True)
            busy()
            run.device.wait_asleep()

        def take(feed: Feed, name: str = name, depth: Depth = depth) -> Values:
            for _ in range(depth.batches):
                step(next(feed))
            began, processor = time.perf_counter(), time.process_time()
            for _ in range(run.scale.steps):
                step(next(feed))
            seconds, processor = time.perf_counter() - began, time.process_time() - processor
            run.keep("pin step", "size", 0, run.device.timed(busy))
            return {f"pin {name}": run.scale.steps / seconds, f"pinning {name}": processor / run.scale.steps}

        pins = functools.partial(torchs, data, size, depth, device, iter)
        run.in_turn(
            f"pin {name}",
            {
                "ours": functools.partial(ours, data, size, depth, pin_memory=True),
                "drop-in": functools.partial(pins, drop_in=True),
                "torch": pins,
            },
            take,
        )


def bound(run: Run) -> None:
    """Who waits for whom in a loop that the device limits, and that nobody synchronises."""
    data, size, depth = run.blocks(4 * MB)
    device, busy = run.device.device, run.device.sleeper(BOUND_STEP)

    def take(feed: Feed) -> Values:
        def steps(count: int) -> None:
            for _ in range(count):
                next(feed)
                busy()
            run.device.wait_asleep()

        steps(2 * depth.batches)
        stats = getattr(feed.loader, "stats", None)
        before = stats and stats()
        began, processor = time.perf_counter(), time.thread_time()
        steps(run.scale.steps)
        seconds, processor = time.perf_counter() - began, time.thread_time() - processor
        found = {"bound processor": processor / seconds}
        if stats is not None:
            found["bound waiting"] = (stats().waiting_seconds - before.waiting_seconds) / seconds
            next(feed)  # times of the device are read when the next batch is begun
            found["bound device"] = (stats().device_waiting_seconds - before.device_waiting_seconds) / seconds
        run.keep("bound step", "size", 0, run.device.timed(busy))
        return found

    run.in_turn(
        "bound processor",
        {
            "ours": functools.partial(ours, data, size, depth, device=device),
            "drop-in": functools.partial(torchs, data, size, depth, device, iter, drop_in=True, copies=True),
            "torch, ahead": functools.partial(torchs, data, size, depth, device, copied_ahead),
        },
        take,
    )


def memory(run: Run) -> None:
    """The most bytes of the device, and of pinned host memory, that a loop holds beside its step."""
    if run.needs_gpu("memory device"):
        return
    data, size, depth = run.blocks(run.scale.kept)
    device, busy = run.device, run.device.sleeper(BOUND_STEP)
    openers: dict[str, Callable[[], Feed]] = {
        "ours": functools.partial(ours, data, size, depth, device=device.device),
        "ours, threads": functools.partial(ours, data, size, depth, threads=True, device=device.device),
        "torch": functools.partial(torchs, data, size, depth, device.device),
        "torch, ahead": functools.partial(torchs, data, size, depth, device.device, copied_ahead),
    }

    def once(open_feed: Callable[[], Feed]) -> Values:
        held = device.watch()
        with contextlib.closing(open_feed()) as feed:
            for _ in range(2 * depth.batches + run.scale.steps):
                batch = next(feed)
                busy()
            del batch
            device.sync()
            return dict(zip(("memory device", "memory pinned"), held(feed), strict=True))

    run.keep("memory batch", "size", 0, size * ROW_BYTES)
    for name, open_feed in openers.items():  # one after the other: each alone
        run.measure("memory device", name, 0, functools.partial(once, open_feed))


def lock(run: Run) -> None:
    """Seconds per GB to page-lock a segment, and to unlock it."""
    from sharded_loader.devices.accelerator import Registrar, Streams
    from sharded_loader.memory.segments import create

    def once(name: str, number: int, nbytes: int) -> float:
        segment = create(0, nbytes)
        try:
            began = time.perf_counter()
            undo = Registrar(Streams(run.device.device), lambda: None).register(segment.mapping)
            locked = time.perf_counter()
            if undo is None:
                raise RuntimeError("page-locking was refused")
            undo()
            run.keep(name, "unlock", number, (time.perf_counter() - locked) / (nbytes / 1e9))
            return (locked - began) / (nbytes / 1e9)
        finally:
            segment.close()

    for nbytes in run.scale.registered:
        name = f"lock {nbytes >> 20} MiB"
        if not run.needs_gpu(name, "lock"):
            for number in range(run.scale.rounds):
                run.measure(name, "lock", number, functools.partial(once, name, number, nbytes))
