"""What a loader tells of itself: in the terminal, as a page, and of all ranks together. A failure loses nothing."""

from __future__ import annotations

import errno
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, HostClock, make_pool
from torch.utils.data import DistributedSampler

from sharded_loader import ShardedDataLoader
from sharded_loader.instruments.page import compared
from sharded_loader.instruments.stats import LoaderStats
from sharded_loader.instruments.times import CAUSES
from sharded_loader.torch import DataLoader
from tests.samples import Drawing, pass_time


class Slow:
    """A dataset that takes a time for each sample, and longer for the first one.

    Args:
        seconds: of a sample.
        length: how many there are.
    """

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


# -- one loader --------------------------------------------------------------------------------------------------------


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


def test_the_plot_shows_the_waits(host_time: HostClock, tmp_path: Path) -> None:
    with read("thread") as loader:
        loader.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    [(name, drawn)] = re.findall(r'<svg [^>]*aria-label="([^"]*)">(.*?)</svg>', page)
    assert name.startswith("The share of the time that was waiting") and "<path" in drawn


def test_a_page_leaves_its_file_for_nothing(loader: Any, tmp_path: Path) -> None:
    loader.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href|url|@import|http)[^>]{0,20}", page) == ['href="data:,"']


def test_markup_in_arguments_and_indices_is_text(host_time: HostClock, tmp_path: Path) -> None:
    class Words:
        def __getitem__(self, index: str) -> int:
            host_time.move(0.001)
            return len(index)

        def __len__(self) -> int:
            return 1

    with ShardedDataLoader(Words(), batch_sampler=[["</script><b>&amp;"] * 4], pool="inline") as loader:
        list(loader)
        loader.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>&amp;" not in page
    assert html.escape("'</script><b>&amp;'") in page


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


def test_a_closed_loader_still_tells(loader: Any, capsys: pytest.CaptureFixture[str]) -> None:
    loader.close()
    loader.report()
    assert "60 samples in 10 batches" in capsys.readouterr().out


# -- files that cannot be written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("method", ["report", "trace"])
def test_before_the_first_batch_there_is_nothing_to_tell(kind: type, method: str, tmp_path: Path) -> None:
    loader = kind(Slow(), batch_size=6)
    with pytest.raises(RuntimeError, match=rf"^{method}: the loader has delivered no batch yet: iterate over it first"):
        getattr(loader, method)(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
    assert len(list(loader)) == 10


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("method", ["report", "trace"])
@pytest.mark.parametrize("where", ["missing", "file"])
def test_a_file_in_no_folder_is_an_error_that_names_it(kind: type, method: str, where: str, tmp_path: Path) -> None:
    loader = read("inline", kind)
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / where / "report.html"
    kinds = (FileNotFoundError, NotADirectoryError)
    with pytest.raises(kinds, match=r"report.html cannot be written \(.*\): give a file in a folder that exists"):
        getattr(loader, method)(path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert len(list(loader)) == 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("method", ["report", "trace"])
def test_a_full_disk_leaves_the_older_file(
    loader: Any, method: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")
    real = Path.write_bytes

    def write_half(self: Path, data: bytes) -> int:
        real(self, data[:100])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
        getattr(loader, method)(path)
    assert caught.value.errno == code
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "older"


@pytest.mark.parametrize("name", ["report.json", "report", "report.htm"])
def test_the_name_of_a_page_says_that_it_is_one(loader: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not end in \.html: give such a name, or none to print it"):
        loader.report(tmp_path / name)


# -- the ranks of a job ------------------------------------------------------------------------------------------------


def rank_of(waited: float, cause: str = "input") -> tuple[LoaderStats, str]:
    """What a rank tells that has waited for so many of 100 seconds."""
    causes = dict.fromkeys(CAUSES, 0.0) | {cause: waited}
    return LoaderStats(100, 800, 100.0, waited, reading_seconds=1.0, causes=causes), "here"


def of_ranks(*told: tuple[LoaderStats, str]) -> tuple[int | None, str]:
    return compared(dict(enumerate(told)))


def test_the_slow_rank_is_named_and_why_it_is_slow() -> None:
    slow, text = of_ranks(rank_of(0.0), rank_of(40.0, "placing"), rank_of(1.0))
    first, verdict, *_ = text.splitlines()
    assert slow == 1 and first == "Rank 1 is slow: the others wait for it for 39% of the time."
    assert verdict == "Training waits while the main process converts and copies batches."
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["0", "1", "2"]
    assert "Ranks: 3" in text


def test_no_rank_is_blamed_where_all_wait_alike() -> None:
    slow, text = of_ranks(*map(rank_of, (20.0, 30.0, 25.0)))
    assert slow is None
    assert text.startswith("No rank is much slower than the others. The slowest waits for data for 30% of the time.")
    assert "wait for a disk" in text


def test_ranks_that_do_not_wait_are_not_blamed() -> None:
    slow, text = of_ranks(rank_of(0.2), rank_of(0.0))
    assert slow is None and text.startswith("No rank waits for data: the training loop is")
    assert "wait for a disk" not in text


@pytest.mark.parametrize(
    ("environ", "told"), [({"WORLD_SIZE": "2", "RANK": "1"}, (2, 1)), ({"WORLD_SIZE": "2"}, (1, 0))]
)
def test_the_drop_in_is_of_the_rank_that_the_launcher_has_set(
    environ: dict[str, str], told: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Slow(), 6, sampler=DistributedSampler(range(60), 2, 1))  # type: ignore[arg-type]
    list(loader)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    loader.report(tmp_path / "report.html")
    assert f"rank {told[1]} of {told[0]}, on " in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_gather_their_numbers_and_name_the_slowest(ranks: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("reporting_ranks.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(ranks), str(rank)],
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
