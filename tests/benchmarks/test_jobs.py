"""Whole jobs: each contender's samples are checked, and a row has every figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import jobs, jobs_child
from benchmarks.jobs_data import PACKED, SPEECH, Job, load, make
from benchmarks.jobs_loaders import OUR_NAME, TUNED, TUTORIAL, Contender, Opened
from benchmarks.jobs_others import CONTENDERS


class Listening(jobs_child.Alone):
    """A rank that keeps its events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def say(self, **event: Any) -> None:
        self.events.append(event)


def verdicts(contender: str, folder: Path) -> list[str]:
    team = Listening()
    jobs_child.work(team, contender, str(folder), str(folder / "own"), 0, 0.0, False, False)
    assert [next(iter(event)) for event in team.events] == ["first", "epoch", "epoch", "steps"]
    return [event["verdict"] for event in team.events if "epoch" in event]


@pytest.mark.parametrize("contender", [TUTORIAL, OUR_NAME])
def test_torch_and_ours_read_the_same_samples(contender: str, tmp_path: Path) -> None:
    make(SPEECH, tmp_path, 0)
    assert verdicts(contender, tmp_path) == ["same", "same"]


def test_a_contender_that_leaves_out_a_sample_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(job: Job, own: Path, workers: int) -> Opened:
        return Opened(lambda epoch: iter([(np.zeros((63, 4), np.int16), np.arange(63))]))

    make(SPEECH, tmp_path, 0)
    monkeypatch.setitem(CONTENDERS, "forgetful", Contender(forgetful))
    assert verdicts("forgetful", tmp_path) == ["1 SAMPLES MISSING"] * 2


def test_other_content_and_samples_that_come_twice_are_told() -> None:
    assert jobs_child.verdict(np.array([1, 1]), 7, 7) == "same"
    assert jobs_child.verdict(np.array([1, 1]), 8, 7) == "OTHER CONTENT"
    assert jobs_child.verdict(np.array([1, 2]), 8, 7) == "same, 1 twice"
    assert jobs_child.verdict(np.array([0, 2]), 7, 7) == "1 SAMPLES MISSING, 1 TWICE"


def test_documents_are_found_in_packed_rows(tmp_path: Path) -> None:
    from benchmarks.jobs_data import Documents

    make(PACKED, tmp_path, 0)
    job = load(tmp_path)
    documents = Documents(job)
    row = {"input_ids": np.concatenate([documents[index] for index in (5, 0, 63)])}
    assert job.ids(row).tolist() == [5, 0, 63] and job.content(row) == row["input_ids"].sum()


def test_the_tables_have_the_medians_and_say_who_is_ahead() -> None:
    rows = []
    for contender, seconds in ((TUTORIAL, 8.0), (TUNED, 4.0), (OUR_NAME, 2.0), ("lhotse", 1.0)):
        common = {"job": SPEECH, "contender": contender, "count": 64, "samples": ["same"], "batches": 4, "memory": 2e6}
        for number in range(3):
            row = {
                **common,
                "round": number,
                "first": 1.0,
                "epochs": [seconds, seconds],
                "files": 0,
                "utilisation": 0.5,
            }
            rows += [{**row, "step": 0.0, "kill": seconds, "again": 16}, {**row, "step": 0.1}]
    rows.append({"job": SPEECH, "contender": "Mosaic", "round": 0, "step": 0.0, "why": "not installed: streaming"})
    text = "\n".join(jobs.tables(rows, "a day"))
    assert f"| {SPEECH} | 1.00 | 2.00 | 2.00 | 2.00 | 1.00 | 0.50 | lhotse (0.50) |" in text
    assert "| ours | 1.00 | 2.00 | 2.00 | 2.00 | 0.50 | 2 + 0 | 2.00, 16 again | same |" in text
    assert "not installed: streaming" in text


@pytest.mark.slow
def test_a_row_has_every_figure(tmp_path: Path) -> None:
    make(SPEECH, tmp_path, 0.05)
    rows = list(jobs.rows_of(load(tmp_path), [TUTORIAL, OUR_NAME], 1, 0.001))
    assert len(rows) == 4
    for row in rows:
        assert row["first"] > 0 and len(row["epochs"]) == 2 and row["memory"] > 1e7, row
        assert {verdict.partition(",")[0] for verdict in row["samples"]} == {"same"}
        assert row["utilisation"] > 0 if row["step"] else row["kill"] > 0
    assert next(row for row in rows if row["contender"] == OUR_NAME and not row["step"])["again"] == 0
