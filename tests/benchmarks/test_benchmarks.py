"""The benchmark: its arithmetic, sentences and pictures on given numbers, and one workload measured for real."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import ceilings, child, loaders, measure, pictures, plans, report, samples, workloads
from benchmarks import other_loaders as others
from benchmarks.measure import Record
from benchmarks.report import Bar

ABOUT: dict[str, Any] = {
    "date": "d", "command": "c", "cpu": "p", "cores": 2, "system": "s", "versions": {"torch": "2"}
}  # fmt: skip


def records_of(workload: str, **values: list[float]) -> list[Record]:
    return [
        Record(number, workload, loader, value, same="a", in_order="b")
        for loader, rounds in values.items()
        for number, value in enumerate(rounds)
    ]


def test_a_ratio_is_taken_within_a_round_and_the_median_over_rounds() -> None:
    """The machine is twice as fast in one round and half as fast in another: the ratio does not see it."""
    records = records_of("images", ours=[50, 100, 25], C=[100, 200, 50])
    assert report.ratio(records, "images", "ours", "C") == 0.5
    assert statistics.median([50, 100, 25]) / statistics.median([100, 200, 50]) == 0.5
    uneven = records_of("images", ours=[50, 100, 30], C=[100, 100, 50])
    assert report.ratio(uneven, "images", "ours", "C") == 0.6


@pytest.mark.parametrize(
    ("bar", "values", "measured", "met"),
    [
        (Bar("images", "C", 0.6), {"ours": [60, 70], "C": [100, 100]}, 0.65, True),
        (Bar("images", "C", 0.6), {"ours": [59], "C": [100]}, 0.59, False),
        (Bar("tiny", "torch", 0.08, at_most=True), {"ours": [200], "torch": [10]}, 0.05, True),
        (Bar("first-spawn", "torch", 0.1, at_most=True), {"ours": [0.5], "torch": [2.0]}, 0.25, False),
        (Bar("close", None, 0.02, at_most=True), {"ours": [0.01, 0.03, 0.015]}, 0.015, True),
        (Bar("gap", None, 1.3, at_most=True), {"ours": [1.1, 1.4, 1.35]}, 1.35, False),
        (Bar("images", "seqtools", 1.5), {"ours": [160], "seqtools": [100]}, 1.6, True),
        (Bar("images", "C", 0.6), {"C": [100]}, None, None),
    ],
)
def test_bars(bar: Bar, values: dict[str, list[float]], measured: float | None, met: bool | None) -> None:
    verdict = report.judge(bar, records_of(bar.workload, **values))
    assert verdict.measured == (None if measured is None else pytest.approx(measured))
    assert verdict.met is met


def test_every_bar_is_about_something_that_is_measured() -> None:
    for bar in report.BARS:
        workload = workloads.WORKLOADS[bar.workload]
        assert bar.of in (None, *measure.contestants(workload, list(loaders.LOADERS)))
        assert str(bar)


def test_check_objects_to_missed_bars_other_samples_and_our_own_failures() -> None:
    assert report.failures(records_of("images", ours=[170], C=[100])) == []
    missed = records_of("images", ours=[10], C=[100])
    assert "the bar is >= 1 C" in report.failures(missed)[0]
    wrong = [*records_of("images", ours=[170], C=[100]), Record(0, "images", "torch", 1.0, same="x", in_order="y")]
    assert report.failures(wrong) == ["50k images 3x32x32 uint8, batch 256: torch delivered other samples"]
    failed = [Record(0, "images", "ours", error="ValueError: no"), Record(0, "images", "grain", error="whatever")]
    assert report.failures(failed) == ["50k images 3x32x32 uint8, batch 256: ours: ValueError: no"]


def test_samples_are_compared_with_the_ceiling() -> None:
    records = [
        Record(0, "images", "torch", 1.0, same="s", in_order="2"),
        Record(0, "images", "ours", 1.0, same="s", in_order="1"),
        Record(0, "images", "C", 1.0, same="s", in_order="1"),
        Record(1, "images", "ours", 1.0, same="other", in_order="1"),
        Record(0, "images", "grain", error="not installed"),
    ]
    assert report.compare_samples(records, "images") == {"torch": "other order", "ours": "MISMATCH", "C": "ok"}


def test_a_digest_sees_samples_and_order_but_no_padding() -> None:
    first, second = np.array([[1, 2], [3, 4]]), np.array([[5, 6]])
    digest = child.digest([first, second])
    assert digest == child.digest([first, second])
    assert child.digest([second, first])["same"] == digest["same"]
    assert child.digest([second, first])["in_order"] != digest["in_order"]
    assert child.digest([np.array([[1, 2, 0], [3, 4, 0]]), second])["same"] == digest["same"]
    assert child.digest([first, second + 1])["same"] != digest["same"]
    assert child.digest([(first,), [second]]) == digest  # wrapped or not


def plan_of(workload: str, **changes: Any) -> plans.Plan:
    """A plan over 12 rows, in batches of 4."""
    work = dataclasses.replace(workloads.WORKLOADS[workload], batch_size=4, **changes)
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    return plans.Plan(work, samples.Source(samples.Rows(rows), rows), 2, seconds=1e-6)


def test_all_loaders_are_given_the_same_batches() -> None:
    order = workloads.order(10)
    batches = workloads.RepeatedBatches(order, 4)
    sampler = iter(workloads.Repeated(order))
    listed = workloads.epochs_of(order, 48)
    assert len(listed) == 50
    for number in range(12):
        assert batches[number].tolist() == [next(sampler) for _ in range(4)] == listed[4 * number : 4 * number + 4]
    assert len(workloads.RepeatedBatches(order, 25)[3]) == 25


def test_a_loader_that_runs_out_of_batches_is_an_error_and_no_hang() -> None:
    work = dataclasses.replace(workloads.WORKLOADS["images"], batch_size=2)
    with pytest.raises(RuntimeError, match="the batches ended after"):
        child._spend(iter([np.zeros((2, 3))] * 9), work, 60)
    with pytest.raises(RuntimeError, match="choose a shorter --span"):
        child._spend(iter([]), work, 60)
    for batch in (np.zeros((2, 3)), [np.zeros((2, 3))], (np.zeros(2), np.zeros(2))):
        assert child._spend(itertools.repeat(batch), work, 0)[0] == 2 * work.cycle
    records = dataclasses.replace(workloads.WORKLOADS["records"], batch_size=2)
    assert child._spend(itertools.repeat([b"one", b"other"]), records, 0)[0] == 2 * records.cycle


@pytest.mark.parametrize("name", sorted(set(ceilings.CEILINGS) - {"N"}))
def test_every_ceiling_runs(name: str) -> None:
    plan = plan_of("images")
    if name in "PD" and "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("bare processes are forked")
    assert ceilings.measure_ceiling(name, plan.workload, plan.source, plan.batches, 2, 0.01, 0.02) > 0


def test_the_gap_is_that_of_as_many_batches_as_are_read_together() -> None:
    even = [[1.0, 2, 3, 4], [5.0, 6, 7, 8], [9.0, 10, 11, 12]]
    assert child.gap_of(even, 1) == child.gap_of(even, 2) == 1
    pairs = [[2.0, 2, 4, 4], [6.0, 6, 8, 8], [10.0, 10, 12, 12]]
    assert child.gap_of(pairs, 2) == 1
    late = [[2.0, 2, 4, 4], [8.0, 8, 10, 10], [14.0, 14, 16, 16]]
    assert child.gap_of(late, 2) == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="two epochs of at least 2"):
        child.gap_of([[1.0, 2.0]], 2)
    with pytest.raises(ValueError, match="two epochs of at least 2"):
        child.gap_of([[1.0, 2.0], [3.0]], 2)


def test_every_round_measures_everything_once_in_another_order() -> None:
    settings = measure.Settings(("images", "close"), ("ours", "torch", "spdl"), 6, 2, 0.1, 0.1)
    rounds = measure.plan(settings)
    assert len({tuple(pairs) for pairs in rounds}) > 1
    for pairs in rounds:
        assert sorted(pairs) == sorted(rounds[0])
        assert len(set(pairs)) == len(pairs) == 8
        assert [name for name, _ in pairs] == ["images"] * 5 + ["close"] * 3  # what is compared is close in time


def test_what_is_not_installed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = loaders.Loader("grain", "no-such-package", ("no_such_module",), others.open_grain, lambda _: None)
    monkeypatch.setitem(loaders.LOADERS, "grain", absent)
    settings = measure.Settings(("large",), ("grain",), 1, 2, 0.1, 0.1)
    monkeypatch.setattr(measure, "run_child", lambda request, timeout: {"value": 1.0})
    records = list(measure.run(settings, lambda line: None))
    assert [(r.loader, r.error) for r in records if r.error] == [("grain", "not installed")]
    assert "not installed" in report.workload_table(records, workloads.WORKLOADS["large"])


@pytest.mark.slow
def test_a_child_that_fails_is_a_record_and_one_that_hangs_is_ended() -> None:
    result = measure.run_child({"workload": "no such", "loader": "C", "workers": 1, "warm": 0, "span": 0}, 30)
    assert result == {"error": "KeyError: 'no such'"}
    result = measure.run_child({"workload": "latency", "loader": "S", "workers": 1, "warm": 0, "span": 60}, 1.5)
    assert result == {"error": "no result after 2 s"}


def test_an_interrupted_run_reports_what_it_has(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "run_child", Mock(side_effect=[{"value": 5.0}, KeyboardInterrupt]))
    assert command.main(["--only", "close", "--loaders", "ours", "torch"]) == 0
    assert "interrupted after 1 measurements" in capsys.readouterr().err


def test_the_report_names_bars_ceilings_and_who_is_ahead() -> None:
    records = records_of(
        "images", ours=[70.0, 80.0], C=[100.0, 100.0], J=[50.0, 50.0], torch=[10.0, 20.0], seqtools=[90.0, 90.0]
    )
    text = report.whole(records, {**ABOUT, "settings": {"rounds": 2}, "note": "A note."})
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    }
    assert rows["50k images 3x32x32 uint8, batch 256"] == [">= 1.5 seqtools", "0.83", "not met", ""]
    assert "| >= 1 C " in text
    assert text.count("seqtools (0.83)") == 1, "with the first bar of a workload"
    assert rows["C: one core, one copy"] == ["100", "100 .. 100", "1.00", "2.00", "0.75", "ok"]
    assert rows["ours"] == ["75", "70 .. 80", "0.75", "1.50", "", "ok"]
    assert rows["torch"] == ["15", "10 .. 20", "0.15", "0.30", "5.5", "ok"]
    assert "A note." in text


@pytest.mark.slow
def test_measures_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--span", "0.1", "--only", "tiny", "--loaders", "ours", "torch", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    written: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert {record["loader"]: record["error"] for record in written["records"]} == dict.fromkeys(
        ["C", "J", "ours", "torch"]
    )
    assert all(record["value"] > 1000 for record in written["records"])
    assert len({record["in_order"] for record in written["records"]}) == 1
    shown = capsys.readouterr().out
    assert "float32[16] rows, batch 16" in shown
    assert shown.count(" ok ") == 4
    assert "All loaders delivered the same samples." in shown
    page = (tmp_path / "results.md").read_text()
    assert all(part in page for part in shown.strip().split("\n\n"))


def test_the_findings_say_what_the_tables_say_and_who_delivered_other_samples() -> None:
    records = [
        *records_of("images", ours=[70.0, 80.0], C=[100.0, 100.0], torch=[10.0, 20.0], seqtools=[90.0, 90.0]),
        *records_of("jpeg", ours=[110.0], torch=[100.0], grain=[220.0], seqtools=[110.2]),
        *records_of("close", ours=[0.02], torch=[0.01]),
        *records_of("memory", ours=[100], torch=[900]),
    ]
    assert report.findings(records, 2) == (
        "On these 2 cores, sharded_loader reads between 1.10 (`jpeg`) and 5.5 (`images`) times as fast as "
        "torch's DataLoader. It is behind seqtools on `images` (0.83), behind grain on `jpeg` (0.50) and "
        "behind torch on `close` (0.50). All loaders delivered the same samples."
    )
    for same, says in (
        ("a", "All loaders delivered the same samples, in another order by grain on `tiny`."),
        ("x", "Other samples were delivered by grain on `tiny`."),
    ):
        other = Record(0, "tiny", "grain", 1.0, same=same, in_order="other")
        assert report.findings([*records_of("tiny", C=[1.0], ours=[1.0]), other], 2).endswith(says)


@pytest.mark.slow
def test_pictures_fit_on_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [
        *records_of("images", C=[9.0], **{name: [5.0, 6.0] for name in loaders.LOADERS}),
        *records_of("gap", ours=[1.0, 1.1], torch=[2.0, 2.1]),
    ]
    for draw in (pictures.draw_chart, pictures.draw_panels):
        assert draw(records, tmp_path / "picture.png")
        raw = (tmp_path / "picture.png").read_bytes()
        assert int.from_bytes(raw[16:20], "big") <= 1300, "pixels wide"
    assert not pictures.draw_chart(records_of("images", ours=[1.0]), tmp_path / "none.png"), "there is no torch"
    assert not pictures.draw_panels([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.slow
def test_a_page_with_the_marker_lines_is_filled_in(tmp_path: Path) -> None:
    records = records_of("images", ours=[2.0], torch=[1.0])
    about: dict[str, Any] = {**ABOUT, "settings": {"rounds": 1}, "note": ""}
    page = tmp_path / "README.md"
    page.write_text(Path(report.__file__).with_name("README.md").read_text())
    command.write(tmp_path, records, about)
    filled = page.read_text()
    found, tables = report.findings(records, 2), report.whole(records, about)
    assert filled.index(report.BEGIN_FINDINGS) < filled.index(found) < filled.index(report.END_FINDINGS)
    assert filled.index(report.END_FINDINGS) < filled.index(report.BEGIN) < filled.index(tables)
    assert {path.name for path in tmp_path.iterdir()} >= {"README.md", "results.json"}
    assert not (tmp_path / "results.md").exists()
    command.write(tmp_path, records, about)
    assert page.read_text() == filled
    page.write_text("# A page without marker lines\n")
    command.write(tmp_path, records, about)
    assert found in (tmp_path / "results.md").read_text()
    assert page.read_text() == "# A page without marker lines\n"
