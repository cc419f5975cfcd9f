"""The benchmark: its arithmetic on given numbers, and one workload measured for real."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import ceilings, child, loaders, measure, report, workloads
from benchmarks.measure import Record
from benchmarks.report import Bar


def records_of(workload: str, **values: list[float]) -> list[Record]:
    return [
        Record(number, workload, loader, value, same="a", in_order="b")
        for loader, rounds in values.items()
        for number, value in enumerate(rounds)
    ]


# -- ratios and bars ------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_a_round_and_the_median_over_rounds() -> None:
    """The machine is twice as fast in one round and half as fast in another: the ratio does not see it."""
    records = records_of("images", ours=[50, 100, 25], C=[100, 200, 50])
    assert report.ratio(records, "images", "ours", "C") == 0.5
    assert statistics.median([50, 100, 25]) / statistics.median([100, 200, 50]) == 0.5
    uneven = records_of("images", ours=[50, 100, 30], C=[100, 100, 50])
    assert report.ratio(uneven, "images", "ours", "C") == 0.6


def test_a_ratio_uses_only_rounds_that_have_both() -> None:
    records = [Record(0, "images", "ours", 10.0), Record(1, "images", "ours", 30.0), Record(1, "images", "C", 60.0)]
    assert report.ratio(records, "images", "ours", "C") == 0.5
    assert report.ratio(records, "images", "ours", "T") is None


def test_above_one_is_better_whatever_is_measured() -> None:
    assert report.ratio(records_of("images", ours=[200], torch=[100]), "images", "ours", "torch") == 2
    assert report.ratio(records_of("first-spawn", ours=[1], torch=[4]), "first-spawn", "ours", "torch") == 4
    assert report.ratio(records_of("memory", ours=[100], torch=[300]), "memory", "ours", "torch") == 3


@pytest.mark.parametrize(
    ("bar", "values", "measured", "met"),
    [
        (Bar("images", "C", 0.6), {"ours": [60, 70], "C": [100, 100]}, 0.65, True),
        (Bar("images", "C", 0.6), {"ours": [59], "C": [100]}, 0.59, False),
        (Bar("tiny", "torch", 0.08, at_most=True), {"ours": [200], "torch": [10]}, 0.05, True),
        (Bar("first-spawn", "torch", 0.1, at_most=True), {"ours": [0.5], "torch": [2.0]}, 0.25, False),
        (Bar("close", None, 0.02, at_most=True), {"ours": [0.01, 0.03, 0.015]}, 0.015, True),
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
        assert bar.of in (None, workload.ceiling, *measure.contestants(workload, list(loaders.LOADERS)))
        assert str(bar)


def test_check_objects_to_missed_bars_other_samples_and_our_own_failures() -> None:
    assert report.failures(records_of("images", ours=[70], C=[100])) == []
    missed = records_of("images", ours=[10], C=[100])
    assert "the bar is >= 0.6 C" in report.failures(missed)[0]
    wrong = [*records_of("images", ours=[70], C=[100]), Record(0, "images", "torch", 1.0, same="x", in_order="y")]
    assert report.failures(wrong) == ["50k images 3x32x32 uint8, batch 256: torch delivered other samples"]
    failed = [Record(0, "images", "ours", error="ValueError: no"), Record(0, "images", "grain", error="whatever")]
    assert report.failures(failed) == ["50k images 3x32x32 uint8, batch 256: ours: ValueError: no"]


# -- samples --------------------------------------------------------------------------------------------------


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


def test_all_loaders_are_given_the_same_batches() -> None:
    order = workloads.order(10)
    batches = workloads.RepeatedBatches(order, 4)
    sampler = iter(workloads.Repeated(order))
    for number in range(12):
        assert batches[number].tolist() == [next(sampler) for _ in range(4)]
    assert len(workloads.RepeatedBatches(order, 25)[3]) == 25


def test_padding_reference() -> None:
    assert workloads.pad([np.array([1, 2, 3]), np.array([4])]).tolist() == [[1, 2, 3], [4, 0, 0]]


# -- the run --------------------------------------------------------------------------------------------------


def test_every_round_measures_everything_once_in_another_order() -> None:
    settings = measure.Settings(("images", "close"), ("ours", "torch", "spdl"), 6, 2, 0.1, 0.1)
    rounds = measure.plan(settings)
    assert len({tuple(pairs) for pairs in rounds}) > 1
    for pairs in rounds:
        assert sorted(pairs) == sorted(rounds[0])
        assert len(set(pairs)) == len(pairs) == 7
        assert [name for name, _ in pairs] == ["images"] * 4 + ["close"] * 3  # what is compared is close in time


def test_loaders_that_cannot_do_a_workload_are_left_out() -> None:
    names = list(loaders.LOADERS)
    assert "seqtools" not in measure.contestants(workloads.WORKLOADS["images-inline"], names)
    assert "grain" not in measure.contestants(workloads.WORKLOADS["first-fork"], names)
    assert "torch-bulk" in measure.contestants(workloads.WORKLOADS["columns"], names)
    assert measure.contestants(workloads.WORKLOADS["import"], names) == ["N", "ours", "torch"]


def test_what_is_not_installed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = loaders.Loader("grain", "no-such-package", ("no_such_module",), loaders._open_grain, lambda _: None)
    monkeypatch.setitem(loaders.LOADERS, "grain", absent)
    settings = measure.Settings(("large",), ("grain",), 1, 2, 0.1, 0.1)
    monkeypatch.setattr(measure, "run_child", lambda request, timeout: {"value": 1.0})
    records = list(measure.run(settings, lambda line: None))
    assert [(r.loader, r.error) for r in records if r.error] == [("grain", "not installed")]
    assert "not installed" in report.workload_table(records, workloads.WORKLOADS["large"])


def test_a_child_that_fails_is_a_record() -> None:
    result = measure.run_child({"workload": "no such", "loader": "C", "workers": 1, "warm": 0, "span": 0}, 30)
    assert result == {"error": "KeyError: 'no such'"}


@pytest.mark.slow
def test_a_child_that_hangs_is_ended() -> None:
    result = measure.run_child({"workload": "latency", "loader": "S", "workers": 1, "warm": 0, "span": 60}, 1.5)
    assert result == {"error": "no result after 2 s"}


def test_an_interrupted_run_reports_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter([{"value": 5.0}])

    def interrupted(request: object, timeout: float) -> dict[str, float]:
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(measure, "run_child", interrupted)
    assert command.main(["--only", "close", "--loaders", "ours", "torch"]) == 0
    assert "interrupted after 1 measurements" in capsys.readouterr().err


# -- tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("rate", 1_234_567, "1.23 M"),
        ("rate", 567_890, "568 k"),
        ("rate", 56_789, "56.8 k"),
        ("rate", 3_152, "3152"),
        ("first", 1.234, "1.23 s"),
        ("close", 0.0123, "12.3 ms"),
        ("memory", 755e6, "755 MB"),
    ],
)
def test_values_have_units(kind: str, value: float, shown: str) -> None:
    assert report.format_value(kind, value) == shown


def test_tables_are_aligned_markdown() -> None:
    lines = report.markdown([["a", "long head"], ["longer", "b"]]).splitlines()
    assert lines == ["| a      | long head |", "|--------|-----------|", "| longer | b         |"]


def test_the_report_names_bars_ceilings_and_who_is_ahead() -> None:
    records = records_of("images", ours=[70.0, 80.0], C=[100.0, 100.0], torch=[10.0, 20.0], seqtools=[90.0, 90.0])
    about = {"date": "d", "command": "c", "cpu": "p", "cores": 2, "system": "s", "versions": {"torch": "2"}}
    text = report.whole(records, {**about, "settings": {"rounds": 2}, "note": "A note."})
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    }
    assert rows["50k images 3x32x32 uint8, batch 256"] == [">= 0.6 C", "0.75", "met", "seqtools (0.83)"]
    assert rows["C: one core, one copy"] == ["100", "100 .. 100", "1.00", "0.75", "ok"]
    assert rows["ours"] == ["75", "70 .. 80", "0.75", "", "ok"]
    assert rows["torch"] == ["15", "10 .. 20", "0.15", "5.5", "ok"]
    assert "A note." in text


def test_results_go_between_the_marker_lines() -> None:
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    filled = report.fill(text, "new")
    assert filled == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    assert report.fill(filled, "new") == filled
    assert report.fill("no markers", "new") is None


def test_the_readme_has_the_marker_lines_and_names_everything() -> None:
    text = Path(report.__file__).with_name("README.md").read_text()
    assert report.fill(text, "") is not None
    for name in (*workloads.WORKLOADS, *loaders.LOADERS, *ceilings.CEILINGS):
        assert f"`{name}`" in text or f"**{name}**" in text, name


# -- for real -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_measures_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--span", "0.1", "--only", "tiny", "--loaders", "ours", "torch", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    written: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert {record["loader"]: record["error"] for record in written["records"]} == dict.fromkeys(["C", "ours", "torch"])
    assert all(record["value"] > 1000 for record in written["records"])
    assert len({record["in_order"] for record in written["records"]}) == 1
    shown = capsys.readouterr().out
    assert "float32[16] rows, batch 16" in shown
    assert shown.count(" ok ") == 3
    assert shown.strip() in (tmp_path / "results.md").read_text()


def test_the_memory_of_a_process_tree_counts_what_it_holds() -> None:
    before = child.tree_pss()
    held = np.ones(20_000_000, np.uint8)
    assert child.tree_pss() - before > 0.9 * held.nbytes
