"""The runner of damaged files tells right samples, errors, wrong samples, raw errors and deaths apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from mutations import Subject, verdicts

from sharded_loader.storage.files import ShardError

CONTENT = bytes(range(100, 200))


def read(path: str) -> list[Any]:
    """A format of one sample, which cannot notice changes of its bytes 20 to 100, and dies of some of the others."""
    content = Path(path).read_bytes()
    if len(content) != 100:
        raise ShardError(f"{path} is cut" if len(content) < 100 else f"{path} is too long at byte 100")
    if content[:10] != CONTENT[:10]:
        os._exit(3)
    if content[10:15] != CONTENT[10:15]:
        raise KeyError("raw")
    return [content[15:]]


@pytest.mark.slow
def test_each_mutant_has_its_verdict_and_a_crash_costs_one_of_them(tmp_path: Path) -> None:
    counts, defects = verdicts(Subject("a.bin", CONTENT, [(20, 100)], read=read), range(300), tmp_path)
    assert sum(counts.values()) == 300
    assert set(counts) == {"right", "refused", "unnoticeable", "vague", "wrong", "raw", "crash"}
    assert sum(counts[kind] for kind in ("vague", "wrong", "raw", "crash")) == len(defects)
    assert any("exit code 3" in line for line in defects) and any("KeyError: 'raw'" in line for line in defects)
