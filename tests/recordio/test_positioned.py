"""A file is told from a later one, also if both were written in one tick of the clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader.recordio import positioned
from sharded_loader.recordio.positioned import checksums, stable_stat, tag_of


def test_a_change_in_the_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for round in range(10):
        path.write_bytes(b"%d" % round)
        found = tag_of(stable_stat(str(path)))
        path.write_bytes(b"x")
        assert tag_of(stable_stat(str(path))) != found


def test_a_clock_of_whole_seconds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [1_700_000_000_500_000_000], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += int(seconds * 1e9)

    written = SimpleNamespace(st_mtime_ns=1_700_000_000 * 10**9, st_ctime_ns=1_700_000_000 * 10**9)
    monkeypatch.setattr(positioned, "os", SimpleNamespace(stat=lambda path: written))
    monkeypatch.setattr(positioned, "time", SimpleNamespace(time_ns=lambda: now[0], sleep=sleep))
    positioned.stable_stat("a.tar")
    assert slept == [1.5]


def test_a_file_that_is_always_written_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        positioned, "os", SimpleNamespace(stat=lambda path: SimpleNamespace(st_mtime_ns=7, st_ctime_ns=7))
    )
    monkeypatch.setattr(positioned, "time", SimpleNamespace(time_ns=lambda: 7, sleep=lambda seconds: None))
    assert positioned.stable_stat("a.tar").st_mtime_ns == 7


@given(content=st.binary(min_size=1, max_size=40_000), data=st.data())
def test_what_is_left_of_a_file_has_the_checksums_that_it_had(content: bytes, data: st.DataObject) -> None:
    def read(begin: int, size: int) -> bytes:
        return content[begin : begin + size]

    whole = checksums(read, len(content))
    end = data.draw(st.integers(0, len(content)))
    left = checksums(read, len(content), end)
    assert left == whole[: len(left)] and len(whole) == 8
    other = bytes(byte ^ 255 for byte in content)
    assert checksums(lambda begin, size: other[begin : begin + size], len(content)) != whole
