"""``replay`` shows the batch of any step; ``diff`` names the first step in which two runs differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import ShardedDataLoader
from sharded_loader.cli.main import main
from sharded_loader.cli.runs import values_of
from sharded_loader.torch import DataLoader

SOURCE = """
import numpy as np
import torch.utils.data
import sharded_loader.torch
from sharded_loader import Dataset, ShardedDataLoader, sample_rng

class Scans(Dataset):
    def __len__(self): return 20
    def __getitem__(self, index):
        if index == 19: raise OSError("no such scan")
        scan = np.full((1, 8, 8), index, np.float32) + np.float32(sample_rng().random())
        if index == 13: scan[0, 2, 2] = np.nan
        return {"scan": scan, "label": index % 10, "name": f"scan {index}"}

GIVEN = {"batch_size": 4, "shuffle": True, "seed": 1, "num_workers": 2}
def make(**given): return ShardedDataLoader(Scans(), **{**GIVEN, **given})
def shards(): return make(devices=["cpu", "cpu"])
def evaluate(): return make(evaluate=True, shuffle=False, batch_size=3)
def other(): return make(batch_size=5)
def numbers(): return ShardedDataLoader(range(20), 4)
def changed(): return ShardedDataLoader(range(1, 21), 4)
def stream(): return ShardedDataLoader(lambda: iter(range(9)), 2, streams=3)
def rounds(): return ShardedDataLoader(lambda: iter(range(9)), 2, streams=3, steps_per_epoch=4)
class Stranger:
    indices = batch = lambda self, epoch, step: [epoch, step]
def stranger(): return Stranger()
class Endless:
    def __iter__(self): return iter(range(20))
def drop_in(**given): return sharded_loader.torch.DataLoader(Scans(), **{**GIVEN, **given})
def drop_in_shards(): return drop_in(num_shards=2)
def drop_in_drawn(): return drop_in(seed=None)
def drop_in_endless(): return drop_in(shuffle=False, sampler=Endless())
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(range(9))
def drop_in_stream(): return sharded_loader.torch.DataLoader(Stream(), 2, num_workers=2)
def torchs(): return torch.utils.data.DataLoader(Scans(), 4)
def nothing(): return None
def needs(root): return make()
def fails(): raise OSError("no such disk")
loader = make()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with the user's script, a state of it, and files that are none."""
    (tmp_path / "users_run.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    import users_run

    loader = users_run.make(seed=5)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    (tmp_path / "print.json").write_text(json.dumps({"fingerprint": "1", "state": loader.state_dict()}))
    (tmp_path / "damaged.json").write_text((tmp_path / "state.json").read_text()[:-9])
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "other.json").write_text(json.dumps(users_run.other().state_dict()))
    (tmp_path / "print_of_other.json").write_text(json.dumps(users_run.numbers().fingerprint().as_dict()))
    (tmp_path / "file").write_text("old")
    yield tmp_path, loader
    del sys.modules["users_run"]


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(list(map(str, arguments)))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("state", ["state.json", "print.json"])
def test_the_batch_of_a_step_is_shown_and_saved(folder: Any, capsys: Any, state: str) -> None:
    path, loader = folder
    asked = ["replay", "users_run:make", "--state", state, "--step", 7, "--save", "batch.pt"]
    code, out, err = run(capsys, *asked)
    indices, batch = loader.indices(1, 2), loader.batch(1, 2)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[:2] == ["step     2 of epoch 1", f"indices  {', '.join(map(str, indices))}"]
    assert lines[2].startswith("batch['scan']: torch.float32 (4, 1, 8, 8), from ")
    assert f"(sample {max(indices)})" in lines[2]
    assert lines[3].startswith("batch['label']: torch.int64 (4,), from ")
    assert lines[4] == "batch['name']: list (4,)"
    saved = torch.load(path / "batch.pt")
    assert (saved["epoch"], saved["step"], saved["indices"]) == (1, 2, indices)
    assert torch.equal(saved["batch"]["scan"], batch["scan"])
    assert run(capsys, *asked)[0] == 2, "the file exists"
    assert run(capsys, *asked, "--force", "--quiet")[0] == 0
    again = run(capsys, "replay", "users_run:make", "--epoch", 1, "--step", 2, "--state", state)[1]
    assert again.splitlines() == lines[:5]
    assert not list(path.glob(".*"))


def test_the_sample_with_odd_numbers_is_named(folder: Any, capsys: Any) -> None:
    for epoch in range(9):
        code, out, _ = run(capsys, "replay", "users_run:loader", "--epoch", epoch, "--step", 0)
        assert code == 2 or ("NaN or infinite: sample 13" in out) == (" 13" in out.splitlines()[1])
        del sys.modules["users_run"]
    import users_run  # noqa: F401 - the fixture deletes it


def test_shards_and_evaluations_name_their_samples(folder: Any, capsys: Any) -> None:
    code, out, _ = run(capsys, "replay", "users_run.py:shards", "--step", 0)
    assert code == 0 and "batch[1]['scan']: torch.float32 (2, 1, 8, 8), from " in out
    code, out, _ = run(capsys, "replay", "users_run:evaluate", "--step", 1)
    assert code == 0 and "indices  3, 4, 5\nbatch['scan']: torch.float32 (3, 1, 8, 8), from 3" in out


def test_the_drop_in_is_replayed_too(folder: Any, capsys: Any) -> None:
    import users_run

    (folder[0] / "state.json").write_text(json.dumps(users_run.drop_in(seed=3).state_dict()))
    loader = users_run.drop_in()
    indices = ", ".join(map(str, loader.indices(1, 2)))
    code, out, _ = run(capsys, "replay", "users_run:drop_in", "--step", 7, "--save", "batch.pt")
    assert (code, out.splitlines()[:2]) == (0, ["step     2 of epoch 1", f"indices  {indices}"])
    assert torch.equal(torch.load("batch.pt")["batch"]["scan"], loader.batch(1, 2)["scan"])
    assert run(capsys, "replay", "users_run:drop_in", "--epoch", 1, "--step", 2)[1] == out.partition("written")[0]
    code, out, _ = run(capsys, "replay", "users_run:drop_in_drawn", "--state", "state.json", "--step", 2)
    assert (code, f"indices  {', '.join(map(str, users_run.drop_in(seed=3).indices(0, 2)))}\n" in out) == (0, True)
    assert "batch[1]['label']: torch.int64 (2,)" in run(capsys, "replay", "users_run:drop_in_shards", "--step", 0)[1]
    code, out, _ = run(capsys, "replay", "users_run:drop_in_endless", "--epoch", 3, "--step", 1)
    assert (code, out.splitlines()[1]) == (0, "indices  4, 5, 6, 7")


ROWS: dict[str, tuple[list[Any], str]] = {
    "no such step": (["users_run:make", "--epoch", 0, "--step", 5], "epoch 0 has no step 5: it has 5 steps"),
    "negative": (["users_run:make", "--step", -1], "-1 is not in the range"),
    "no step": (["users_run:make"], "Missing option '--step'"),
    "iterable": (["users_run:stream", "--epoch", 0, "--step", 4], "step 4 of epoch 0 is batch 1 of part 1 of 3"),
    "iterable, step of all": (["users_run:rounds", "--step", 6], "step 2 of epoch 1 is batch 2 of part 0 of 3"),
    "no step of all": (["users_run:stranger", "--step", 6], "counted in each epoch: give --epoch"),
    "drop-in, no length": (["users_run:drop_in_endless", "--step", 6], "counted in each epoch: give --epoch"),
    "drop-in, iterable": (["users_run:drop_in_stream", "--step", 3], "step 3 of epoch 0 is batch 1 of part 1 of 2"),
    "drop-in, not known": (["users_run:drop_in_drawn", "--step", 6], "Give the loader a seed="),
    "drop-in, no such step": (["users_run:drop_in", "--epoch", 0, "--step", 5], "epoch 0 has no step 5"),
    "drop-in, state of ours": (["users_run:drop_in", "--state", "state.json", "--step", 0], "state_dict() of such a"),
    "torch's own": (
        ["users_run:torchs", "--epoch", 0, "--step", 0],
        "gives a DataLoader, not a loader of",
    ),
    "other loader": (["users_run:make", "--state", "other.json", "--step", 0], "batch_size was 5, and is 4"),
    "other data": (["users_run:changed", "--state", "print_of_other.json", "--step", 0], "saved with other data"),
    "damaged": (["users_run:make", "--state", "damaged.json", "--step", 0], "damaged.json has no JSON"),
    "list": (["users_run:make", "--state", "list.json", "--step", 0], "give what state_dict() of a ShardedDataLoader"),
    "absent": (["users_run:make", "--state", "absent.json", "--step", 0], "'absent.json' does not exist"),
    "no module": (["users_walk:make", "--step", 0], "there is no module 'users_walk'"),
    "no function": (["users_run:mak", "--step", 0], "did you mean 'make'?"),
    "no name": (["users_run", "--step", 0], "does not name a function that makes a loader"),
    "returns nothing": (["users_run:nothing", "--step", 0], "gives a NoneType, not a loader of this library"),
    "needs arguments": (["users_run:needs", "--step", 0], "a function without arguments that returns the loader"),
    "fails": (["users_run:fails", "--step", 0], "calling users_run:fails failed: OSError: no such disk"),
    "no folder": (["users_run:make", "--step", 0, "--save", "absent/x.pt"], "there is no folder"),
    "exists": (["users_run:make", "--step", 0, "--save", "file"], "there is already file"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_is_wrong_is_one_line_and_nothing_is_written(row: str, folder: Any, capsys: Any) -> None:
    arguments, message = ROWS[row]
    before = {file: file.stat().st_mtime_ns for file in folder[0].iterdir() if file.is_file()}
    code, _, err = run(capsys, "replay", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert {file: file.stat().st_mtime_ns for file in folder[0].iterdir() if file.is_file()} == before


def test_values_of_all_kinds_are_told() -> None:
    short = torch.ones(2, 3, dtype=torch.bfloat16)
    batch = [short, np.array([True, False]), torch.empty(0, 3), torch.tensor(4.0), "text"]
    assert list(values_of(batch, [5, 7])) == [
        "batch[0]: torch.bfloat16 (2, 3), from 1 (sample 5) to 1 (sample 5)",
        "batch[1]: bool (2,), from 0 (sample 7) to 1 (sample 5)",
        "batch[2]: torch.float32 (0, 3)",
        "batch[3]: torch.float32 ()",
        "batch[4]: str ()",
    ]
    assert list(values_of(torch.tensor([[np.inf], [np.nan]]), [5, 7])) == [
        "batch: torch.float32 (2, 1), NaN or infinite: sample 5, 7"
    ]
    assert next(values_of(np.arange(3), [5, 7])).endswith("from 0 (sample in row 0) to 2 (sample in row 2)")


# -- diff --------------------------------------------------------------------------------------------------------------


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_first_step_that_differs_is_named(tmp_path: Path, capsys: Any) -> None:
    loaders = [ShardedDataLoader(range(40), 4, shuffle=True, seed=1, skip=skip) for skip in (None, [(3, 3)])]
    files = [write(tmp_path / f"{n}.json", loader.fingerprint(0).as_dict()) for n, loader in enumerate(loaders)]
    code, out, err = run(capsys, "diff", *files)
    assert (code, err) == (1, "")
    assert out == "The first step that differs is step 3 of epoch 0.\nThe skip was (), and is ((3, 3),).\n"
    assert run(capsys, "diff", *files, "--quiet") == (1, "", "")
    states = [write(tmp_path / f"{n}.json", loader.state_dict()) for n, loader in enumerate(loaders)]
    assert run(capsys, "diff", *states)[:2] == (1, out)
    assert run(capsys, "diff", states[0], states[0]) == (0, "No step differs.\n", "")


def test_of_the_drop_in_fingerprints_are_compared_and_states_are_not(tmp_path: Path, capsys: Any) -> None:
    loaders = [DataLoader(range(40), 4, shuffle=True, seed=1, skip=skip) for skip in (None, [(3, 3)])]
    files = [write(tmp_path / f"{n}.json", loader.fingerprint(0).as_dict()) for n, loader in enumerate(loaders)]
    code, out, err = run(capsys, "diff", *files)
    assert (code, err) == (1, "")
    assert out == "The first step that differs is step 3 of epoch 0.\nThe skip was (), and is ((3, 3),).\n"
    assert run(capsys, "diff", files[0], files[0]) == (0, "No step differs.\n", "")
    code, _, err = run(capsys, "diff", files[0], write(tmp_path / "state", loaders[1].state_dict()))
    assert (code, err.count("\n")) == (2, 1)
    assert "give a file with json.dumps(loader.fingerprint().as_dict())\n" in err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": 3}', '{"version": 99}'])
def test_what_is_no_run_is_one_line(content: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a").write_text(content)
    state = write(tmp_path / "b", ShardedDataLoader(range(4), 2).state_dict())
    for files in ((tmp_path / "a", state), (state, tmp_path / "a")):
        code, out, err = run(capsys, "diff", *files)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "a has no state and no fingerprint" in err
    assert "does not exist" in run(capsys, "diff", state, tmp_path / "absent")[2]
