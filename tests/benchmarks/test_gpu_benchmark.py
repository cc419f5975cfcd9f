"""The benchmark of a GPU, where there is none: its arithmetic on given numbers, and the program on the CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from benchmarks import gpu, gpu_costs, gpu_report, gpu_run, report
from benchmarks.ceilings import CEILINGS
from benchmarks.gpu_device import Device, cycles_for
from benchmarks.gpu_feeds import (
    EPOCH,
    Blocks,
    Depth,
    Feed,
    Fields,
    Images,
    copied,
    copied_ahead,
    ours,
    rows,
    settle,
    torch_loader,
)
from benchmarks.loaders import LOADERS
from benchmarks.measure import Record
from benchmarks.report import Bar
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.test_benchmarks import ABOUT as ABOUT_CPU
from tests.benchmarks.test_benchmarks import records_of

ABOUT = ABOUT_CPU | {"settings": {"rounds": 2}, "note": "", "device": "Some GPU, 80 GB", "driver": "1.2", "cpus": 16}


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bar", "values", "measured", "met"),
    [
        (Bar("bus 16 MB", "limit", 0.95), {"ours": [48e9, 24e9], "limit": [50e9, 25e9]}, 0.96, True),
        (Bar("host 16 MB", None, 150e-6, at_most=True), {"ours": [2e-4]}, 2e-4, False),
        (Bar("resident 256", "streamed", 3), {"streamed": [1e6]}, None, None),
        (Bar("pin 4 MB", "torch", 0.98), {"drop-in": [30.0], "ours": [1.0], "torch": [30.0]}, 1.0, True),
        (Bar("bus 16 MB", "limit", 0.95), {"ours": [40e9], "limit": [50e9], "workers": [60e9]}, 0.8, False),
        (Bar("bus 16 MB", "limit", 0.95), {"ours": [40e9], "limit": [50e9], "workers": [41e9]}, 0.8, None),
        (Bar("warm 16 MB, batches", None, 64, at_most=True), {"ours": [48.0]}, 48, True),
    ],
)
def test_bars(bar: Bar, values: dict[str, list[float]], measured: float | None, met: bool | None) -> None:
    verdict = gpu_report.judge(bar, records_of(bar.workload, **values))
    assert verdict.measured == (None if measured is None else pytest.approx(measured))
    assert verdict.met is met


def test_every_bar_is_about_something_that_the_parts_measure() -> None:
    scale = gpu_run.Scale()
    names = {f"bus {gpu_run.size_name(size)}" for size in scale.sizes}
    names |= {f"warm {gpu_run.size_name(size)}, batches" for size in scale.sizes}
    rests = [f"rest {1000 * rest:g} ms" for rest in gpu_costs.RESTS]
    names |= {f"host {size}, {rest}" for size in ("65 KB", "16 MB") for rest in rests}
    names |= {f"pin {gpu_run.size_name(size)}" for size in scale.pinned} | {"bound processor", "bound waiting"}
    columns = {table.prefix: table.columns for table in gpu_report.TABLES}
    assert set(columns) - {"pinning", "warm"} == set(gpu.PARTS)
    for bar in gpu_report.BARS:
        assert bar.workload in names | {"step"} | {f"resident {size}" for size in scale.gathered}
        assert {"ours", bar.of or "ours"} <= set(columns[bar.workload.split()[0]])


def test_a_table_shows_ratios_and_what_failed() -> None:
    records = records_of("bus 16 MB", ours=[48e9, 50e9], limit=[50e9, 50e9])
    records += [Record(0, "bus 16 MB", "torch", error="RuntimeError: Bus | error")]
    text = gpu_report.table(gpu_report.TABLES[0], records)
    row = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    failed = "RuntimeError: Bus / error"
    bars = ">= 0.9 bare copies: 0.980, met; >= 1.5 torch, prefetcher: -, not measured"
    ours = "49 GB/s (48 GB/s .. 50 GB/s)"
    assert row == ["16 MB", ours, "-", failed, "-", "-", "-", "50 GB/s", "0.98", "-", "-", bars]


@pytest.mark.parametrize(
    ("batches", "faults", "why"),
    [
        ([], [], ""),
        ([512], [], ""),
        ([], [0.3], ", and may still touch pages for the first time"),
        ([96], [0.002], ", into touched pages"),
    ],
)
def test_where_workers_are_slower_than_a_bar_the_row_says_so_and_why_only_if_it_was_measured(
    batches: list[float], faults: list[float], why: str
) -> None:
    records = records_of("bus 16 MB", ours=[20e9], limit=[50e9], workers=[21e9])
    records += records_of("warm 16 MB, batches", workers=batches)
    records += records_of("warm 16 MB, faults per page", workers=faults)
    bars = gpu_report.table(gpu_report.TABLES[0], records).split("|")[-2]
    assert f">= 0.9 bare copies: 0.400, workers bring no more to the host{why};" in bars


def test_the_report_names_the_device_and_counts_the_bars() -> None:
    records = records_of("step", ours=[99.0], ideal=[100.0]) + records_of("resident 256", ours=[2.0], streamed=[1.0])
    records += records_of("pin step", size=[0.03, 0.018, 0.03]) + records_of("pin 4 MB", torch=[30.0])
    text = gpu_report.whole(records, ABOUT, is_gpu=True)
    assert "Some GPU, 80 GB, driver 1.2, cpus 16" in text
    assert f"Bars: 1 met, 1 not met, {len(gpu_report.BARS) - 2} not judged: bus 16 MB; bus 64 MB; " in text
    assert "A step keeps the device busy for 30 ms (18 ms .. 30 ms), measured right after such steps." in text
    assert gpu_report.NO_GPU not in text
    assert text.count("**") == 2 * 3


class Clocked:
    """A device whose clock rises to its full rate while it works."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)

    def spin(self, cycles: int) -> float:
        return cycles / (self.rates.pop(0) if len(self.rates) > 1 else self.rates[0])


@pytest.mark.parametrize(
    ("rates", "calibrated"),
    [
        ([2e9], 2e9),
        ([*[1.2e9] * 5, *[1.6e9] * 10, 2e9], 2e9),
        ([1e8, 1e8, 1e8, 2e9], 1e8),  # it has worked for long enough
        ([1e8, *[1e7, 2e7] * 9], 2e7),  # a clock that never rests: as it is after three seconds
    ],
)
def test_work_is_calibrated_on_a_busy_clock(rates: list[float], calibrated: float) -> None:
    assert cycles_for(0.03, Clocked(*rates).spin) == pytest.approx(0.03 * calibrated)


class Touching(Feed):
    """A loader whose workers touch so many pages for the first time with each batch; then none."""

    def __init__(self, *touched: int) -> None:
        super().__init__([0])
        self.touched, self.total, self.taken = list(touched), 0, 0

    def __next__(self) -> int:
        self.taken += 1
        self.total += self.touched.pop(0) if self.touched else 0
        return 0

    def faults(self) -> int | None:
        return self.total


class Uncounted(Touching):
    """The same, on a system that counts no faults."""

    def faults(self) -> None:
        return None


DEPTH = Depth(2, 4)


@pytest.mark.parametrize(
    ("feed", "found", "taken"),
    [
        (Touching(), {"batches": 0, "faults per page": 0}, 64),
        (Touching(*[100] * 20), {"batches": 20, "faults per page": 0}, 84),
        (Touching(*[1] * 70), {"batches": 7, "faults per page": 63 / 64 / 100}, 71),
        (Touching(*[100] * 1000), {"batches": "not after 224", "faults per page": 1}, 64 + 5 * 2 * 16),
        (Uncounted(), {"batches": 2 * 16}, 2 * 16),
    ],
)
def test_the_bus_is_measured_when_no_page_is_new(feed: Touching, found: dict[str, float], taken: int) -> None:
    assert settle(feed, 100, DEPTH, math.inf) == found
    assert feed.taken == taken


def test_without_patience_what_is_left_to_touch_is_not_waited_for() -> None:
    assert settle(Touching(100), 100, DEPTH, -math.inf) == {"batches": "not after 0"}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="faults are counted in /proc")
@pytest.mark.parametrize("threads", [False, True])
def test_faults_are_those_of_the_processes_that_fill_batches(threads: bool) -> None:
    with closing(ours(Blocks(EPOCH * 16), 16, Depth(1, 2), threads=threads)) as feed:
        next(feed)
        before = feed.faults()
        held = [next(feed) for _ in range(16)]  # each in memory of its own
        after = feed.faults()
        assert before is not None and after is not None
        assert after - before > 0.5 * len(held) * 16 * gpu_run.ROW_BYTES / mmap.PAGESIZE


@pytest.mark.parametrize("kind", [Blocks, Fields])
def test_rows_are_there_before_workers_are_forked(kind: Any) -> None:
    rows.cache_clear()
    kind(1)
    assert rows.cache_info().currsize == 1


def run_on_the_cpu(rounds: int = 2) -> gpu_run.Run:
    scale = dataclasses.replace(gpu_run.SMOKE, rounds=rounds)
    return gpu_run.Run(Device("cpu"), scale, 1, math.inf, lambda line: None)


def test_one_that_fails_is_a_record_and_the_others_are_measured() -> None:
    run, broken = run_on_the_cpu(), Mock(side_effect=RuntimeError("no such loader\nand more"))
    run.in_turn("bus", {"ours": broken, "limit": lambda: {"bus": 2.0, "warm": "not after 3"}}, lambda one: one)
    found = [(r.loader, r.value, r.error) for r in run.records if r.workload == "bus"]
    assert found == [("ours", None, "RuntimeError: no such loader"), ("limit", 2.0, None), ("limit", 2.0, None)]
    assert [r.error for r in run.records if r.workload == "warm"] == ["not after 3"] * 2


def test_contestants_take_turns_and_are_closed() -> None:
    run, taken, closed = run_on_the_cpu(rounds=3), [], []

    class Named(Feed):
        def __init__(self, name: str) -> None:
            super().__init__([name], lambda: closed.append(name))

        def is_full(self) -> bool:
            return True

    def take(feed: Feed) -> float:
        taken.append(next(feed))
        return 1.0

    run.in_turn("bus", {name: lambda name=name: Named(name) for name in "abc"}, take)
    assert "".join(taken) == "abcbcacab"
    assert closed == ["a", "b", "c"]


@pytest.mark.costly(2)
@pytest.mark.parametrize("through", [copied, copied_ahead])
@pytest.mark.parametrize("drop_in", [False, True])
def test_the_users_copies_are_in_order(through: Any, drop_in: bool) -> None:
    with closing(torch_loader(Blocks(1000), 2, Depth(1, 2), CPU, through, drop_in=drop_in)) as feed:
        assert [next(feed)[0, 0].item() for _ in range(5)] == [0, 2, 4, 6, 8]


def test_torchs_loader_is_given_the_same_batches() -> None:
    data = Images(4)
    with closing(torch_loader(data, 8, Depth(1, 2), CPU)) as theirs, closing(ours(data, 8, Depth(0, 0))) as mine:
        for _ in range(3):
            their, own = next(theirs), next(mine)
            assert all(torch.equal(a, b) for a, b in zip(their, own, strict=True))
            assert own[0].dtype == torch.uint8
            assert own[1].tolist() == (np.arange(8) + own[1][0].item()).__mod__(10).tolist()


@pytest.mark.slow
def test_the_program_runs_with_the_cpu_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text(f"{gpu_report.BEGIN}\nas it was\n{gpu_report.END}\n")
    arguments = ["--device", "cpu", "--workers", "1", "--out", str(tmp_path)]
    assert gpu.main([*arguments, "--only", "host", "lock", "resident", "shards", "bound", "pin", "memory"]) == 0
    shown = capsys.readouterr().out
    assert gpu_report.NO_GPU in shown
    assert "needs a GPU" in shown
    written = json.loads((tmp_path / "gpu.json").read_text())
    values = {(r["workload"], r["loader"]) for r in written["records"] if r["value"] is not None}
    assert {
        ("host 65 KB, rest 0 ms", "next()"),
        ("host 256 tensors, rest 2 ms", "ours"),
        ("host an object, rest 34 ms", "placing"),
        ("bound step", "size"),
        ("bound waiting", "drop-in"),
        ("bound device", "ours"),
        ("resident 64", "ours"),
        ("resident 256", "streamed"),
        ("shards", "one"),
    } <= values
    assert [r["error"] for r in written["records"] if r["error"]] == ["needs a GPU"] * 3
    # Numbers of a CPU do not get among those of GPUs.
    assert "as it was" in (tmp_path / "README.md").read_text()
    assert shown.strip() in (tmp_path / "gpu.md").read_text()


def test_without_the_device_there_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cuda:99"]) == 2
    assert "--device cuda:99: torch sees" in capsys.readouterr().err


HANGING = """
import sys, time
from benchmarks import gpu
def hang(run):
    run.keep("bus 16 MB", "ours", 0, 5e9)
    time.sleep(100)
gpu.PARTS["bus"], gpu.GRACE = hang, 0.5
gpu.main(["--device", "cpu", "--only", "bus", "--budget", sys.argv[1], "--out", sys.argv[2]], watched=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["the budget is over", "it is told to end"])
def test_one_that_is_cut_off_shows_what_there_is(tmp_path: Path, end: str) -> None:
    told = end == "it is told to end"
    command = [sys.executable, "-c", HANGING, "100" if told else "0.5", str(tmp_path)]
    root = Path(report.__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "gpu.json").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        if told:
            process.terminate()
        out, err = process.communicate(timeout=300)
    assert process.returncode == (0 if told else 1)
    assert "5 GB/s" in out
    assert "5 GB/s" in (tmp_path / "gpu.md").read_text()
    assert ("in hang" in err) is not told
    assert ("interrupted after 1 measurements" in err) is told


PRETENDED = """
import dataclasses, sys
import simulated_cuda
simulated_cuda.install()
from benchmarks import gpu, gpu_run
gpu.QUICK = dataclasses.replace(gpu_run.SMOKE, rounds=2)
sys.exit(gpu.main(["--quick", "--workers", "1", "--out", *sys.argv[1:]]))
"""


def run_pretended(folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """What the benchmark says of a GPU that is pretended, and its records, which have no errors."""
    root, readme = Path(report.__file__).parent.parent, folder / "README.md"
    readme.write_text(f"{gpu_report.BEGIN}\nas it was\n{gpu_report.END}\n")
    path = os.pathsep.join([str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, env = [sys.executable, "-c", PRETENDED, str(folder), *arguments], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    records = json.loads((folder / "gpu.json").read_text())["records"]
    # torch's workers write each batch to new pages.
    assert [one for one in records if one["error"] and not one["error"].startswith("not after ")] == []
    assert "pretended" in readme.read_text() and "as it was" not in readme.read_text()
    return done.stdout, records


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_every_part_runs_to_its_end_on_a_gpu_that_is_pretended(tmp_path: Path) -> None:
    """What is written for a GPU alone is run here too, so that no minute of a real one is spent on a slip."""
    shown, records = run_pretended(tmp_path)
    names = {(record["workload"].split()[0], record["loader"]) for record in records}
    for table in gpu_report.TABLES:
        assert {(table.prefix, loader) for loader in table.columns} <= names
    assert "pretended" in shown


def test_the_readme_has_the_marker_lines_and_names_everything() -> None:
    text = Path(report.__file__).with_name("README.md").read_text()
    markers = [(), (report.BEGIN_FINDINGS, report.END_FINDINGS), (gpu_report.BEGIN, gpu_report.END)]
    assert all(report.fill(text, "", *marker) is not None for marker in markers)
    for name in (*gpu.PARTS, *WORKLOADS, *LOADERS, *CEILINGS):
        assert f"`{name}`" in text or f"**{name}**" in text, name
