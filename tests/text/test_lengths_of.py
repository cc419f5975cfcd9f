"""The lengths of documents, found in one pass and kept in a file that survives every kill."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_loader import PackSampler, ShardedDataLoader, lengths_of
from sharded_loader.batchify import Pack

FORKED = pytest.mark.skipif(sys.platform == "win32", reason="it forks")
TEXTS = [" ".join(["7"] * (1 + number % 13)) for number in range(1000)]
EXPECTED = [1 + number % 13 for number in range(1000)]


def words(text: str) -> list[int]:
    return list(map(int, text.split()))


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_are_found_once_and_then_read_from_the_file(workers: int, tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    found = lengths_of(TEXTS, path, workers, words)
    assert found.tolist() == EXPECTED and found.dtype == np.int32 and isinstance(found, np.memmap)
    assert listed(tmp_path) == ["lengths.npy"]
    assert lengths_of(TEXTS, str(path), tokenize=os.abort).tolist() == EXPECTED  # not called


def test_samplers_take_them(tmp_path: Path) -> None:
    documents = [{"input_ids": words(text)} for text in TEXTS]
    sampler = PackSampler(lengths_of(documents, tmp_path / "lengths.npy"), tokens=64, rows=4, seed=0)
    loader = ShardedDataLoader(documents, batch_sampler=sampler, batchify_fn=Pack(64))
    assert sum(int((batch["segment_ids"] > 0).sum()) for batch in loader) == sum(EXPECTED)


@FORKED
@pytest.mark.parametrize(("at", "workers"), [(0, 0), (300, 0), (999, 0), (600, 2)])
def test_a_killed_pass_continues_where_it_stopped(at: int, workers: int, tmp_path: Path) -> None:
    path, pid = tmp_path / "lengths.npy", os.getpid()

    def killing(text: str) -> list[int]:
        if text == "kill":
            os.kill(os.getpid() if os.getppid() == pid else os.getppid(), signal.SIGKILL)  # from a worker too
        return words(text)

    texts = [*TEXTS[:at], "kill", *TEXTS[at + 1 :]]
    process = multiprocessing.get_context("fork").Process(target=lengths_of, args=(texts, path, workers, killing))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not path.exists()
    read = []
    assert lengths_of(TEXTS, path, tokenize=lambda text: read.append(text) or words(text)).tolist() == EXPECTED
    assert workers or len(read) == 1000 - at // 256 * 256
    assert listed(tmp_path) == ["lengths.npy"]


@pytest.mark.parametrize("count", [0, 1, 256, 999, 1000])
def test_a_file_that_ends_anywhere_is_continued(count: int, tmp_path: Path) -> None:
    with open(tmp_path / "lengths.npy.part", "wb") as file:
        np.save(file, np.array(EXPECTED[:count] + [0] * (1000 - count), np.int32))
    (tmp_path / "lengths.npy.new.npy").write_text("of a killed process")
    read = []
    found = lengths_of(TEXTS, tmp_path / "lengths.npy", tokenize=lambda text: read.append(text) or words(text))
    assert found.tolist() == EXPECTED and read == TEXTS[count:]


def slow_once(path: str, folder: str) -> None:
    def count(text: str) -> list[int]:
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write(".")
        return words(text)

    assert lengths_of(TEXTS, path, tokenize=count).tolist() == EXPECTED


@FORKED
def test_of_several_processes_one_reads(tmp_path: Path) -> None:
    (counts := tmp_path / "counts").mkdir()
    context = multiprocessing.get_context("fork")
    given = str(tmp_path / "lengths.npy"), str(counts)
    processes = [context.Process(target=slow_once, args=given) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [path.stat().st_size for path in counts.iterdir()] == [1000]


def test_a_document_without_tokens_is_an_error_that_names_it(tmp_path: Path) -> None:
    texts: list[Any] = [*TEXTS[:300], "", *TEXTS[301:]]
    with pytest.raises(ValueError, match="give token ids") as caught:
        lengths_of(texts, tmp_path / "lengths.npy", tokenize=words)
    assert "sample 300" in str(caught.value.__notes__)
    texts[300] = "7"
    assert lengths_of(texts, tmp_path / "lengths.npy", tokenize=words)[300] == 1


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, array: Any) -> None:
        path.touch()
        raise OSError("1000 requested and 5 written")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", fill)
        with pytest.raises(OSError, match=r"lengths\.npy\.new\.npy cannot be written \(1000 requested and 5 written\)"):
            lengths_of(TEXTS, tmp_path / "lengths.npy", tokenize=words)
    assert listed(tmp_path) == ["lengths.npy.lock"]
    assert lengths_of(TEXTS, tmp_path / "lengths.npy", tokenize=words).tolist() == EXPECTED


def test_files_of_other_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    lengths_of(TEXTS, path, tokenize=words)
    with pytest.raises(ValueError, match="lengths.npy is no file of 999 lengths"):
        lengths_of(TEXTS[:-1], path)
    path.rename(f"{path}.part")
    with pytest.raises(ValueError, match="part is no file of 999 lengths"):
        lengths_of(TEXTS[:-1], path)
    for content in ("some text", ""):
        path.write_text(content)
        with pytest.raises(ValueError, match="is no file of 1000 lengths"):
            lengths_of(TEXTS, path)
    archive = tmp_path / "archive.npz"
    np.savez(archive, np.ones(1000, np.int32))
    np.save(tmp_path / "floats.npy", np.ones(1000))
    np.save(path, np.append(np.ones(500, np.int32), np.zeros(500, np.int32)))  # the power failed before all was on disk
    for other in (archive, tmp_path / "floats.npy", path):
        with pytest.raises(ValueError, match=rf"{other.name} is no file of 1000 lengths"):
            lengths_of(TEXTS, other)
    with pytest.raises(TypeError, match="lengths_of needs an object with __getitem__ and __len__"):
        lengths_of(iter(TEXTS), tmp_path / "other.npy")
