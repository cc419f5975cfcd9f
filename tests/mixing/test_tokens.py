"""`TokenWindows`: every window of token files and arrays, in bulk, in every pool; what is no token file is an error."""

import itertools
import os
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_loader import ShardedDataLoader, TokenWindows
from sharded_loader.engine.pool import Pool
from sharded_loader.mixing import tokens as module
from tests.pages import blocks, promised

Ids = np.ndarray[Any, Any]


def ids(count: int, dtype: str = "uint16", seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 60_000, count).astype(dtype)


def naive(tokens: Ids, length: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """The windows of one stream, cut one by one."""
    found = []
    for begin in range(0, len(tokens), stride):
        window = tokens[begin : begin + length + 1].tolist()
        if len(window) == length + 1:
            found.append((window[:-1], window[1:]))
    return found


def listed(samples: Any) -> list[tuple[list[int], list[int]]]:
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in samples]


def write_megatron(prefix: Path, documents: list[Ids], sentences: list[int]) -> None:
    """A ``.bin`` and its ``.idx``, as Megatron-LM describes them. Each document has a number of sequences."""
    sizes = [len(one) for one in documents]
    code = {"int32": 4, "uint16": 8}[str(documents[0].dtype)]
    firsts = np.cumsum([0, *sentences])
    head = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([code])
    head += np.array([len(sizes), len(firsts)], "<u8").tobytes()
    begins = (np.cumsum([0, *sizes])[:-1] * documents[0].itemsize).astype("<i8")
    index = head + np.array(sizes, "<i4").tobytes() + begins.tobytes() + firsts.astype("<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(np.concatenate(documents).tobytes())


def in_documents(documents: list[Ids], length: int, stride: int) -> list[tuple[list[int], list[int]]]:
    return [window for document in documents for window in naive(document, length, stride)]


@pytest.mark.costly(12)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64", ">u2"])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, None), (5, 2), (3, 7), (99, None)])
def test_windows_are_those_of_a_loop(tmp_path: Path, dtype: str, length: int, stride: int | None) -> None:
    tokens = (ids(100) % 200).astype(dtype)
    expected = naive(tokens, length, stride or length)
    tokens.tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "tokens.npy", tokens)
    for given, known in ((tokens, None), (tmp_path / "raw.bin", dtype), (str(tmp_path / "tokens.npy"), None)):
        dataset = TokenWindows(given, length, stride, dtype=known)
        assert listed(dataset) == expected and len(dataset) == len(expected)
        inputs, targets = dataset.get_batch(range(len(dataset)))
        assert inputs.dtype == targets.dtype == np.int64
        assert listed(zip(inputs, targets, strict=True)) == expected


@pytest.mark.parametrize("dtype", ["int32", "uint16"])
def test_megatrons_files_are_read_by_the_function_of_the_page(tmp_path, dtype, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    page = Path(__file__).parents[2] / "docs" / "guides" / "pretraining.md"
    [code] = [block for block in blocks(page, "python") if "def megatron" in block]
    exec(code, scope)
    assert promised(code) == [capsys.readouterr().out.strip()]
    sequences = [ids(count, dtype, count) for count in (12, 3, 25, 0, 8, 1, 6)]
    write_megatron(tmp_path / "corpus", sequences, [2, 1, 3, 1])
    documents = [np.concatenate(sequences[a:b]) for a, b in itertools.pairwise([0, 2, 3, 6, 7])]
    arguments = scope["megatron"](tmp_path / "corpus")
    assert listed(TokenWindows(length=4, **arguments)) == in_documents(documents, 4, 4)
    del arguments["documents"]
    assert listed(TokenWindows(length=4, **arguments)) == naive(np.concatenate(sequences), 4, 4)


def test_windows_inside_many_documents_are_those_of_a_loop() -> None:
    random = np.random.default_rng(3)
    for count in (1, 4, 15, 16, 17, 100):
        lengths = random.integers(0, 30, count)
        lengths[count // 2] = 30
        tokens = ids(int(lengths.sum()))
        documents = np.split(tokens, np.cumsum(lengths)[:-1])
        for length, stride in ((5, 5), (7, 3)):
            dataset = TokenWindows(tokens, length, stride, documents=lengths)
            expected = in_documents(documents, length, stride)
            assert len(dataset) == len(expected) and listed(dataset.__getitems__(range(len(dataset)))) == expected
    parts = [ids(20), ids(15, seed=1)]  # documents of several files are given as a list
    found = listed(TokenWindows(parts, 4, documents=[[9, 11], [15]]))
    assert found == in_documents([parts[0][:9], parts[0][9:], parts[1]], 4, 4)


@pytest.mark.costly
@pytest.mark.also_spawned
def test_every_pool_gives_the_same_batches(pool: Pool, tmp_path: Path) -> None:
    parts = [ids(200, seed=1), ids(90, seed=2)]
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path, part in zip(paths, parts, strict=True):
        np.save(path, part)
    dataset = TokenWindows(paths, 8)
    expected = [window for part in parts for window in naive(part, 8, 8)]
    with ShardedDataLoader(dataset, 5, shuffle=True, seed=0, pool=pool) as loader:
        for epoch in range(2):
            batches = list(loader)
            assert all(str(field.dtype) == "torch.int64" for field in batches[0])
            found = [sample for inputs, targets in batches for sample in listed(zip(inputs, targets, strict=True))]
            assert sorted(found) == sorted(expected) and found != expected, epoch


def test_a_state_of_two_ranks_continues_on_one_but_not_over_other_tokens() -> None:
    def loader(ranks: int, rank: int, seed: int = 0) -> ShardedDataLoader[Any]:
        dataset = TokenWindows([ids(300, seed=seed), ids(300, seed=9)], 9)
        return ShardedDataLoader(dataset, 8 // ranks, shuffle=True, seed=0, num_replicas=ranks, rank=rank)

    def firsts(batches: Any) -> list[int]:
        return sorted(first for inputs, _ in batches for first in inputs[:, 0].tolist())

    two = [loader(2, rank) for rank in range(2)]
    epochs = [iter(one) for one in two]
    for epoch in epochs * 3:
        next(epoch)
    state = two[1].state_dict()
    rest = [firsts(step) for step in zip(*epochs, strict=True)]
    resumed = loader(1, 0)
    resumed.load_state_dict(state)
    assert [firsts([batch]) for batch in resumed] == rest and len(rest) > 3
    with pytest.raises(ValueError, match="was saved with other data"):
        loader(2, 0, seed=1).load_state_dict(state)


def test_a_token_of_another_dtype_is_an_error_in_any_window() -> None:
    tokens = np.arange(100, dtype=np.uint32)
    tokens[80] = 70_000
    dataset = TokenWindows(tokens, 10, vocab_size=50_257)
    dataset.get_batch([0, 5])
    with pytest.raises(ValueError, match="token id 70000, and vocab_size is 50,257.*another dtype than uint32"):
        dataset.get_batch([0, 7])


def test_a_million_million_tokens_need_no_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "huge.bin", 10**12
    with open(path, "wb") as file:
        try:
            file.truncate(2 * count)
        except OSError:
            pytest.skip("no sparse files of this size here")
        for token in (0, count // 2, count - 1025):
            file.seek(2 * token)
            file.write(np.arange(1, 1026, dtype="<u2").tobytes())
    tracemalloc.start()
    try:
        dataset = TokenWindows(path, 1024, stride=1, dtype="<u2")
        assert len(dataset) == count - 1024
        inputs, targets = dataset.get_batch([0, count // 2, -1])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert inputs.tolist() == [list(range(1, 1025))] * 3 and targets[2].tolist() == list(range(2, 1026))
    assert peak < 1_000_000
    assert len(pickle.dumps(dataset)) < 2_000


def test_the_table_of_documents_goes_with_the_pickle(tmp_path: Path) -> None:
    np.save(path := tmp_path / "corpus.npy", np.tile(ids(6), 50_000))
    pickled = pickle.dumps(TokenWindows(path, 4, documents=[6] * 50_000))
    assert len(pickled) < 50_000 * 16 + 2_000
    assert pickle.loads(pickled)[49_999][0].tolist() == ids(6)[:4].tolist()


def test_more_files_than_stay_mapped_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN", 2)
    parts = [ids(10, seed=number) for number in range(5)]
    for number, part in enumerate(parts):
        part.tofile(tmp_path / f"{number}.bin")
    dataset = TokenWindows([tmp_path / f"{number}.bin" for number in range(5)], 4, dtype=np.uint16)
    expected = [naive(parts[file], 4, 4)[row] for file, row in [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1)]]
    assert listed(dataset.__getitems__([0, 2, 4, 6, 8, 1])) == expected
    assert len(dataset._maps) == 2
    dataset.close()
    assert not dataset._maps and dataset[0][0].tolist() == parts[0][:4].tolist()


def test_bad_files_are_errors_when_the_dataset_is_made(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(bytes(101))
    (tmp_path / "empty.bin").write_bytes(b"")
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.uint16))
    np.save(tmp_path / "floats.npy", np.zeros(40))
    np.save(tmp_path / "cut.npy", np.zeros(40, np.uint16))
    os.truncate(tmp_path / "cut.npy", 150)
    (tmp_path / "none.npy").write_bytes(b"")
    np.savez(tmp_path / "archive.npz", np.zeros(40, np.uint16))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    for name, more, kind, text in [
        ("missing.bin", {"dtype": "uint16"}, FileNotFoundError, "missing.bin"),
        ("odd.bin", {}, TypeError, "give dtype="),
        ("odd.bin", {"dtype": "uint16"}, ValueError, "odd.bin has 101 bytes, no whole number of uint16: another"),
        ("empty.bin", {"dtype": "uint16"}, ValueError, "empty.bin is empty"),
        ("", {"dtype": "uint16"}, ValueError, "or no file"),
        ("square.npy", {}, ValueError, r"shape \(4, 4\)"),
        ("floats.npy", {}, TypeError, "float64"),
        ("cut.npy", {}, ValueError, "cut.npy is not a complete .npy file"),
        ("none.npy", {}, ValueError, "none.npy is not a complete .npy file"),
        ("archive.npy", {}, ValueError, "archive.npy is not a complete .npy file"),
    ]:
        with pytest.raises(kind, match=text):
            TokenWindows(tmp_path / name, 4, **more)  # type: ignore[arg-type]


def copied(path: Path, content: bytes) -> Path:
    path.with_name("new").write_bytes(content)
    return path.with_name("new")


CHANGES: dict[str, Callable[[Path, bytes], Any]] = {
    "cut": lambda path, content: os.truncate(path, len(content) // 2),
    "longer": lambda path, content: path.write_bytes(content + b"ab"),
    "replaced": lambda path, content: os.replace(copied(path, content), path),
    "written": lambda path, content: path.write_bytes(bytes(len(content))),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_while_it_is_open_is_an_error(tmp_path: Path, how: str) -> None:
    (path := tmp_path / "corpus.bin").write_bytes(ids(100).tobytes())
    dataset = TokenWindows(path, 9, dtype="uint16", documents=[40, 60])
    dataset.get_batch([0, 3])
    if sys.platform == "win32":
        dataset.close()  # a mapped file cannot be changed there
    CHANGES[how](path, path.read_bytes())
    with pytest.raises(OSError, match="corpus.bin was changed since the dataset was made: make the dataset again"):
        dataset.get_batch([0, 3])


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be changed there")
def test_a_file_that_changes_during_a_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens.bin"
    ids(100).tofile(path)
    dataset = TokenWindows(path, 9, dtype="uint16")
    mapped = TokenWindows._array

    def written(*given: Any) -> Any:
        with open(path, "r+b") as file:
            file.write(b"other tokens")
        return mapped(*given)

    monkeypatch.setattr(TokenWindows, "_array", written)
    with pytest.raises(OSError, match="was changed"):
        dataset[0]


def test_a_copy_on_another_machine_may_have_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids(100).tofile(tmp_path / "tokens.bin")
    dataset = TokenWindows(tmp_path / "tokens.bin", 9, dtype="uint16")
    expected = listed(dataset)
    dataset.close()
    (tmp_path / "copy").write_bytes((tmp_path / "tokens.bin").read_bytes())
    os.replace(tmp_path / "copy", tmp_path / "tokens.bin")
    monkeypatch.setattr(module.platform, "node", lambda: "another")
    assert listed(pickle.loads(pickle.dumps(dataset))) == expected
    dataset.close()
    os.truncate(tmp_path / "tokens.bin", 100)
    with pytest.raises(OSError, match="was changed"):
        dataset[0]
