"""What the way to a device costs: the host's time, its processors, and memory. Each part is a function of a `Run`.

part(run)  -> run.records
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_feeds import (
    EPOCH,
    FIELDS,
    ROW,
    Blocks,
    Depth,
    Feed,
    Fields,
    Objects,
    copied_ahead,
    depth_for,
    ours,
    shared_room,
)
from benchmarks.gpu_feeds import torch_loader as torchs
from benchmarks.gpu_run import MB, ROW_BYTES, Run, Values, size_name


def host(run: Run) -> None:
    """Seconds of the host's time per ``next``, with batches that are finished, beyond torch's own calls."""
    large = 16 * MB if run.device.is_gpu else MB
    cases: dict[str, tuple[int, Any, list[tuple[int, ...]]]] = {}
    for nbytes in (ROW_BYTES, large):
        size = max(1, round(nbytes / ROW_BYTES))
        cases[f"host {size_name(nbytes)}"] = size, Blocks, [(size, ROW)]
    cases[f"host {FIELDS} tensors"] = size, Fields, [(size, ROW // FIELDS)] * FIELDS
    cases["host an object"] = size, Objects, [(size, ROW), (size,)]
    for name, (size, kind, shapes) in cases.items():
        feed: Feed | None = None
        try:
            depth = depth_for(size * ROW_BYTES, run.workers, shared_room(run.scale.room))
            feed = ours(kind(size * EPOCH), size, depth, device=run.device.device)
            next_calls(run, name, feed, depth, [run.device.host(shape) for shape in shapes])
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            run.fail(name, "ours", 0, f"{type(error).__name__}: {error}")
        finally:
            if feed is not None:
                feed.close()


def next_calls(run: Run, name: str, feed: Feed, depth: Depth, hosts: list[torch.Tensor]) -> None:
    """Time ``next`` call by call, in turn with torch's calls for such a copy, on a device that rests."""
    device, stats = run.device, feed.loader.stats  # type: ignore[attr-defined]
    calls = device.copy_calls(hosts)
    # For the workers. They are not asked: what `next` has to do with their answers is its own time.
    pause = 0.002 + 2e-9 * sum(host.nbytes for host in hosts)

    def timed(act: Callable[[], Any]) -> float:
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
    for number in range(run.scale.rounds):
        placing = stats().placing_seconds
        pairs = [(timed(feed.__next__), timed(calls)) for _ in range(run.scale.calls)]
        whole, alone = (statistics.median(column) for column in zip(*pairs, strict=True))
        run.keep(name, "next()", number, whole)
        run.keep(name, "torch's calls", number, alone)
        run.keep(name, "ours", number, whole - alone)
        run.keep(name, "placing", number, (stats().placing_seconds - placing) / run.scale.calls)


PIN_STEP, BOUND_STEP = 0.03, 0.01
"""Seconds of a step."""


def pin(run: Run) -> None:
    """Steps per second of a loop that makes its copies itself, from batches of ``pin_memory=True``; and processors."""
    device = run.device.device
    for nbytes in run.scale.pinned:
        name = size_name(nbytes)
        if run.needs_gpu(f"pin {name}"):
            continue
        size = max(1, round(nbytes / ROW_BYTES))
        depth = depth_for(size * ROW_BYTES, run.workers, shared_room(run.scale.room))
        data, busy = Blocks(size * EPOCH), run.device.sleeper(PIN_STEP)

        def step(batch: torch.Tensor, busy: Callable[[], None] = busy) -> None:
            batch.to(device, non_blocking=True)
            busy()
            run.device.wait_asleep()

        def take(feed: Feed, name: str = name, depth: Depth = depth, step: Any = step) -> Values:
            for _ in range(depth.batches):
                step(next(feed))
            began, processor = time.perf_counter(), time.process_time()
            for _ in range(run.scale.steps):
                step(next(feed))
            seconds, processor = time.perf_counter() - began, time.process_time() - processor
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
    size, device = max(1, round(4 * MB / ROW_BYTES)), run.device.device
    depth = depth_for(size * ROW_BYTES, run.workers, shared_room(run.scale.room))
    data, busy = Blocks(size * EPOCH), run.device.sleeper(BOUND_STEP)

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
    size, device = max(1, round(run.scale.kept / ROW_BYTES)), run.device
    depth = depth_for(size * ROW_BYTES, run.workers, shared_room(run.scale.room))
    data, busy = Blocks(size * EPOCH), device.sleeper(BOUND_STEP)
    openers: dict[str, Callable[[], Feed]] = {
        "ours": functools.partial(ours, data, size, depth, device=device.device),
        "ours, threads": functools.partial(ours, data, size, depth, threads=True, device=device.device),
        "torch": functools.partial(torchs, data, size, depth, device.device),
        "torch, ahead": functools.partial(torchs, data, size, depth, device.device, copied_ahead),
    }

    def once(open_feed: Callable[[], Feed]) -> Values:
        with device.watched() as held:
            feed = open_feed()
            try:
                for _ in range(2 * depth.batches + run.scale.steps):
                    batch = next(feed)
                    busy()
                    held.look(feed)
                del batch
                device.sync()
            finally:
                feed.close()
        return {"memory device": held.device, "memory pinned": held.pinned}

    run.keep("memory batch", "size", 0, size * ROW_BYTES)
    for name, open_feed in openers.items():  # one after the other: each alone
        run.measure("memory device", name, 0, functools.partial(once, open_feed))


def lock(run: Run) -> None:
    """Seconds per GB to page-lock a segment, and to unlock it."""
    from sharded_loader.devices.accelerator import Registrar, Streams
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
