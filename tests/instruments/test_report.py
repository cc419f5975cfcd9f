"""What a loader tells of itself: in the terminal, as a page, and of all ranks together. A failure loses nothing."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, HostClock, make_pool
from torch.utils.data import DistributedSampler

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.instruments.page import compared, trace_of
from sharded_loader.instruments.stats import LoaderStats
from sharded_loader.instruments.times import CAUSES
from sharded_loader.torch import DataLoader
from tests.samples import Drawing, pass_time


class Slow:
    """A dataset that takes so many seconds for each sample, and longer for the first one."""

    def __init__(self, seconds: float = 0.001, length: int = 60) -> None:
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        pass_time(self.seconds * (1 if index else 20))
        return index


def read(pool: str, kind: type = ShardedDataLoader, **given: Any) -> Any:
    """A loader that has read an epoch. The caller closes it, if it can be closed."""
    workers: dict[str, Any] = {}
    if kind is DataLoader:
        of = {"inline": {}, "thread": {"thread_pool": True, "num_workers": 2}}
        workers = of.get(pool, {"start_method": pool, "num_workers": 2})  # type: ignore[assignment]
    else:
        workers = {"pool": make_pool(pool, 2)}
    loader = kind(given.pop("dataset", Slow()), batch_size=given.pop("batch_size", 6), **workers, **given)
    for _ in loader:
        pass
    return loader


@pytest.fixture
def loader(host_time: HostClock) -> Iterator[ShardedDataLoader[Any]]:
    with read("inline") as made:
        yield made


@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("pool", POOLS)
def test_a_report_tells_what_the_numbers_tell(
    pool: str, kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if pool in ("inline", "thread", "fork"):  # the others have a clock of their own
        request.getfixturevalue("host_time")
    loader = read(pool, kind, dataset=Slow(length=18))  # the slowest 20 are told
    capsys.readouterr()
    assert loader.report() is None
    told, stats = capsys.readouterr().out, loader.stats()
    loader.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    if hasattr(loader, "close"):
        loader.close()
    assert told.startswith(str(stats))
    for text in (html.unescape(page), told):
        assert [one for one in stats.causes if stats.causes[one] and one not in text] == []
        assert [one for one in stats.stages if one not in text] == []
        for title in ("Causes", "Stages", "Workers", "Slowest samples", "Arguments"):
            assert title in text
        assert stats.verdict in text and stats.advice in text
        assert "Slow of length 18" in text and "batch_size" in text
    assert re.search(r"^  0 +.*  0 +(main process|[01])$", told, re.MULTILINE)  # the slowest sample


def test_a_page_shows_the_waits_leaves_its_file_for_nothing_and_markup_in_it_is_text(
    host_time: HostClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(word: str) -> int:
        host_time.move(0.001)
        return len(word)

    words = SimpleDataset({"</script><b>&amp;": "word"}).transform(slow)
    with ShardedDataLoader(
        words, batch_sampler=[["</script><b>&amp;"] * 4] * 2, num_workers=2, pool="thread"
    ) as loader:
        list(loader)
    loader.report()  # it is closed, and still tells
    assert "8 samples in 2 batches" in capsys.readouterr().out
    loader.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    [(name, drawn)] = re.findall(r'<svg [^>]*aria-label="([^"]*)">(.*?)</svg>', page)
    assert name.startswith("The share of the time that was waiting") and "<path" in drawn
    assert re.findall(r"(?:src|href|url|@import|http)[^>]{0,20}", page) == ['href="data:,"']
    assert "<b>&amp;" not in page and html.escape("'</script><b>&amp;'") in page


def test_a_report_in_mid_epoch_changes_no_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 2, "pool": "thread"}
    with ShardedDataLoader(Drawing(24), 4, **given) as plain, ShardedDataLoader(Drawing(24), 4, **given) as told:
        expected, found = list(plain), []
        for number, batch in enumerate(told):
            told.report()
            told.report(tmp_path / f"{number}.html")
            told.trace(tmp_path / f"{number}.json")
            found.append(batch)
    np.testing.assert_equal([one.tolist() for one in found], [one.tolist() for one in expected])


# -- files that cannot be written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("method", ["report", "trace"])
@pytest.mark.parametrize("where", ["missing", "file"])
def test_no_batch_yet_and_a_file_in_no_folder_are_errors_that_say_so(
    kind: type, method: str, where: str, tmp_path: Path
) -> None:
    loader = kind(Slow(), batch_size=6)
    with pytest.raises(RuntimeError, match=rf"^{method}: the loader has delivered no batch yet: iterate over it first"):
        getattr(loader, method)(tmp_path / "report.html")
    assert len(list(loader)) == 10
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / where / "report.html"
    kinds = (FileNotFoundError, NotADirectoryError)
    with pytest.raises(kinds, match=r"report.html cannot be written \(.*\): give a file in a folder that exists"):
        getattr(loader, method)(path)
    for name in ("report.json", "report", "report.htm"):
        with pytest.raises(ValueError, match=r"does not end in \.html: give such a name, or none to print it"):
            loader.report(tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert len(list(loader)) == 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("method", ["report", "trace"])
def test_a_full_disk_leaves_the_old_file(loader: Any, method: str, code: int, tmp_path: Path, monkeypatch: Any) -> None:
    path, real = tmp_path / "report.html", Path.write_bytes
    path.write_text("older")

    def write_half(self: Path, data: bytes) -> int:
        real(self, data[:100])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
        getattr(loader, method)(path)
    assert caught.value.errno == code
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"] and path.read_text() == "older"


# -- the ranks of a job ------------------------------------------------------------------------------------------------


def rank_of(waited: float, cause: str = "input") -> tuple[LoaderStats, str]:
    """What a rank tells that has waited for so many of 100 seconds."""
    causes = dict.fromkeys(CAUSES, 0.0) | {cause: waited}
    return LoaderStats(100, 800, 100.0, waited, reading_seconds=1.0, causes=causes), "here"


@pytest.mark.parametrize(
    ("waited", "cause", "slow", "says", "disk"),
    [
        ((0.0, 40.0, 1.0), "placing", 1, "Rank 1 is slow: the others wait for it for 39% of the time.", False),
        (
            (20.0, 30.0, 25.0),
            "input",
            None,
            "No rank is much slower than the others. The slowest waits for data for 30%",
            True,
        ),
        ((0.2, 0.0), "input", None, "No rank waits for data: the training loop is", False),
    ],
    ids=["one is slow", "all wait alike", "none waits"],
)
def test_the_slow_rank_is_named_and_why_it_is_slow(
    waited: tuple[float, ...], cause: str, slow: int | None, says: str, disk: bool
) -> None:
    found, text = compared(dict(enumerate(rank_of(seconds, cause) for seconds in waited)))
    assert found == slow and text.startswith(says) and ("wait for a disk" in text) == disk
    if slow == 1:
        assert text.splitlines()[1] == "Training waits while the main process converts and copies batches."
        assert [line.split()[0] for line in text.splitlines()[-3:]] == ["0", "1", "2"] and "Ranks: 3" in text


@pytest.mark.parametrize(
    ("environ", "told"), [({"WORLD_SIZE": "2", "RANK": "1"}, "1 of 2"), ({"WORLD_SIZE": "2"}, "0 of 1")]
)
def test_the_drop_in_is_of_the_rank_that_the_launcher_has_set(
    environ: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Slow(), 6, sampler=DistributedSampler(range(60), 2, 1))  # type: ignore[arg-type]
    list(loader)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    loader.report(tmp_path / "report.html")
    assert f"rank {told}, on " in (tmp_path / "report.html").read_text(encoding="utf-8")


RANKS = """
import sys, time
import torch
from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.torch import DataLoader

folder, ranks, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
distributed = torch.distributed
distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
slow = SimpleDataset(range(80)).transform(lambda index: time.sleep(0.01 * (rank == 1)) or index)
loaders = [ShardedDataLoader(slow, 2, num_replicas="auto"), DataLoader(slow, 2)]
for loader in loaders:
    try:
        loader.stats_of_ranks()
    except RuntimeError as error:
        assert "rank 0 has delivered no batch yet" in str(error)
    for _ in loader:
        distributed.barrier()
    found = loader.stats_of_ranks()
    assert found.slowest == 1 and str(found).startswith("Rank 1 is slow: the others wait for it for"), str(found)
    assert list(found.stats) == list(range(ranks)) and f"Ranks: {ranks}" in found.text
    assert found.stats[rank] == loader.stats()
    told = [None] * ranks
    distributed.all_gather_object(told, found.text)
    assert set(told) == {found.text}
group = distributed.new_group([0, 1])
if rank < 2:
    assert list(loaders[0].stats_of_ranks(group).stats) == [0, 1]
distributed.barrier()
distributed.destroy_process_group()
print("told")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_gather_their_numbers_and_name_the_slowest(ranks: int, tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(tmp_path), str(ranks), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    told = [one.communicate(timeout=300)[0] for one in started]
    assert all(text.endswith("told\n") for text in told), "\n".join(told)


def test_without_a_process_group_a_rank_has_its_own_numbers(loader: Any) -> None:
    found = loader.stats_of_ranks()
    assert found.stats == {0: loader.stats()} and found.slowest is None
    assert "Ranks: 1" in str(found)
    with pytest.raises(RuntimeError, match="stats_of_ranks: rank 0 has delivered no batch yet: iterate over its"):
        ShardedDataLoader(range(4), 2).stats_of_ranks()


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
    with read("inline", collate_fn=lambda samples: (sum(range(20_000)), samples)[1]) as loader:
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
