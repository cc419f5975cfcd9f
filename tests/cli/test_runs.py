"""``diff`` names the first step in which two runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharded_loader import ShardedDataLoader
from sharded_loader.cli import main
from sharded_loader.torch import DataLoader


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(list(map(str, arguments)))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_the_first_step_that_differs_is_named(kind: Any, tmp_path: Path, capsys: Any) -> None:
    loaders = [kind(range(40), 4, shuffle=True, seed=1, skip=skip) for skip in (None, [(3, 3)])]
    files = [write(tmp_path / f"{n}.json", loader.fingerprint(0).as_dict()) for n, loader in enumerate(loaders)]
    code, out, err = run(capsys, "diff", *files)
    assert (code, err) == (1, "")
    assert out == "The first step that differs is step 3 of epoch 0.\nThe skip was (), and is ((3, 3),).\n"
    assert run(capsys, "diff", *files, "--quiet") == (1, "", "")
    assert run(capsys, "diff", files[0], files[0]) == (0, "No step differs.\n", "")
    code, _, err = run(capsys, "diff", files[0], write(tmp_path / "state", loaders[1].state_dict()))
    assert (code, err.count("\n")) == (2, 1)
    assert "give a file with json.dumps(loader.fingerprint().as_dict())\n" in err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": 3}', '{"version": 99}'])
def test_what_is_no_run_is_one_line(content: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a").write_text(content)
    found = write(tmp_path / "b", ShardedDataLoader(range(4), 2).fingerprint().as_dict())
    for files in ((tmp_path / "a", found), (found, tmp_path / "a")):
        code, out, err = run(capsys, "diff", *files)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "a has no fingerprint" in err
    assert "does not exist" in run(capsys, "diff", found, tmp_path / "absent")[2]
