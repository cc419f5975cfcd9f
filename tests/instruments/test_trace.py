"""A trace is what "Trace Event Format" says, and says what the batches have done.

No trace processor is at hand here, so `check_format` is strict about what Perfetto's would drop without a word: slices
that overlap.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from conftest import POOLS

from sharded_loader import ShardedDataLoader
from sharded_loader.instruments.page import trace_of
from sharded_loader.torch import DataLoader
from tests.instruments.test_report import Slow, read

Event = dict[str, Any]


def rows_of(loader: Any) -> list[Any]:
    """The times of the last batches."""
    found: list[Any] = loader._meter.rows()
    return found


def ns(microseconds: float) -> int:
    """As Perfetto reads a stamp; it must be a whole number of nanoseconds."""
    whole = round(1000 * microseconds)
    assert abs(whole - 1000 * microseconds) < 1e-2
    return whole


def check_format(trace: dict[str, Any]) -> dict[str, list[Event]]:
    """The slices by the name of their lane."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[int, str] = {}
    lanes: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "name", "cat", "pid", "tid", "ts"} <= set(event)
        assert type(event["pid"]) is int and type(event["tid"]) is int and ns(event["ts"]) >= 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X" and ns(event["dur"]) >= 0
            lanes[event["tid"]].append(event)
    assert set(lanes) <= set(names)
    for slices in lanes.values():
        open_until: list[int] = []
        for one in sorted(slices, key=lambda one: ns(one["ts"])):  # stable, as a trace processor sorts
            first, last = ns(one["ts"]), ns(one["ts"]) + ns(one["dur"])
            while open_until and open_until[-1] <= first:
                open_until.pop()
            assert not open_until or last <= open_until[-1], "slices overlap"
            open_until.append(last)
    return {names[lane]: slices for lane, slices in lanes.items()}


@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("pool", POOLS)
def test_a_trace_has_each_batch_and_each_worker(pool: str, kind: type, tmp_path: Path) -> None:
    loader = read(pool, kind)
    for _ in loader:
        pass
    loader.trace(tmp_path / "trace.json")
    rows = rows_of(loader)
    if hasattr(loader, "close"):
        loader.close()
    lanes = check_format(json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")))
    steps = [(row.epoch, row.step) for row in rows]
    assert steps == sorted(set(steps)) and {epoch for epoch, _ in steps} == {0, 1}
    calls = [one for one in lanes["next()"] if one["name"] == "next"]
    assert [(one["args"]["epoch"], one["args"]["step"]) for one in calls] == steps
    workers = {"main process"} if pool == "inline" else {"worker 0", "worker 1"}
    assert set(lanes) - {"next()"} <= workers
    reads = [one["args"] for name in workers & set(lanes) for one in lanes[name] if one["name"] == "read"]
    assert {(one["epoch"], one["step"]) for one in reads} == {(row.epoch, row.step) for row in rows if row.began}


def test_a_batch_shows_its_stages() -> None:
    def collate(samples: list[int]) -> list[int]:
        sum(range(20_000))
        return samples

    with read("inline", collate_fn=collate) as loader:
        rows = rows_of(loader)
    lanes = check_format(trace_of(rows, "rank 0"))
    measured = [row for row in rows if row.collate]
    assert measured
    for row in measured:
        stages = [one for one in lanes["main process"] if one["args"]["step"] == row.step]
        assert [one["name"] for one in stages] == ["read", "collate"]
        assert ns(stages[0]["ts"]) + ns(stages[0]["dur"]) == ns(stages[1]["ts"])
        [call] = [one for one in lanes["next()"] if one["args"]["step"] == row.step]
        assert {"epoch", "samples", "waited_seconds", "placing_seconds", "cause"} <= set(call["args"])


def test_slices_of_clocks_that_differ_do_not_overlap() -> None:
    with read("thread", dataset=Slow(0.0)) as loader:
        rows = rows_of(loader)
    for row in rows:
        row.began, row.seconds = row.began - 0.5 * (row.step % 2), row.seconds + 0.1
    check_format(trace_of(rows, "rank 0"))


def test_batches_of_iterators_that_take_turns_stay_where_they_were_read() -> None:
    with ShardedDataLoader(Slow(), 6, num_workers=1, pool="thread", prefetch=4) as loader:
        first, second = iter(loader), iter(loader)
        next(first), next(second)
        list(first), list(second)
        rows = rows_of(loader)
    lanes = check_format(trace_of(rows, "rank 0"))
    start = min(stamp for row in rows for stamp in (row.asked, row.began) if stamp)
    found = sorted(ns(one["ts"]) for one in lanes["worker 0"] if one["name"] == "read")
    assert found == sorted(round(1e9 * (row.began - start)) for row in rows)
