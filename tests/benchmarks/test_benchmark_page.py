"""The page of the benchmark: its sentences and pictures, made from given numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import loaders, pictures, report
from benchmarks.measure import Record
from tests.benchmarks.test_benchmarks import records_of


def test_the_findings_say_what_the_tables_say() -> None:
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


@pytest.mark.parametrize(
    ("same", "in_order", "says"),
    [
        ("a", "other", "All loaders delivered the same samples, in another order by grain on `tiny`."),
        ("x", "other", "Other samples were delivered by grain on `tiny`."),
    ],
)
def test_the_findings_name_who_delivered_other_samples(same: str, in_order: str, says: str) -> None:
    records = [*records_of("tiny", C=[1.0], ours=[1.0]), Record(0, "tiny", "grain", 1.0, same=same, in_order=in_order)]
    assert report.findings(records, 2).endswith(says)


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


ABOUT = {"date": "d", "command": "c", "cpu": "p", "cores": 2, "system": "s", "versions": {"torch": "2"}}


@pytest.mark.slow
def test_a_page_with_the_marker_lines_is_filled_in(tmp_path: Path) -> None:
    records = records_of("images", ours=[2.0], torch=[1.0])
    about = {**ABOUT, "settings": {"rounds": 1}, "note": ""}
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
