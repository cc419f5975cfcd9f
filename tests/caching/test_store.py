"""A store of samples: none is torn, foreign or of another type, whoever dies, and a full disk is no error."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import shutil
import signal
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import CacheMismatchError
from sharded_loader.base.limits import Limit
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.caching import store as stores
from sharded_loader.caching.shared import locked
from sharded_loader.caching.store import MISSING, Store, batched, fits_columns, flat, open_store, text_of, unflatten
from sharded_loader.recordio.positioned import write_at

COUNT = 20


def sample(index: int) -> Any:
    """Even ones are rows, odd ones are records of other lengths."""
    size = 2000 if index % 2 == 0 else 1000 + 10 * index
    return {"x": np.full(size, index, np.int64), "name": "even" if index % 2 == 0 else f"odd {index}", "label": index}


def make(path: Any = None, max_bytes: Any = "20 MB", **other: Any) -> Store:
    return open_store(path, max_bytes, **({"length": COUNT, "key": None, "first": sample(0)} | other))


def is_right(found: Any, index: int) -> bool:
    wanted = sample(index)
    return bool((found["x"] == wanted["x"]).all()) and found["name"] == wanted["name"] and found["label"] == index


def fill(store: Store, indices: Iterable[int] = range(COUNT)) -> None:
    for index in indices:
        store.write(index, sample(index))


def has(store: Store, indices: Iterable[int] = range(COUNT)) -> bool:
    """Whether each of these samples is there, and right."""
    return all(is_right(store.read(index), index) for index in indices)


def size_of(*indices: int) -> int:
    """How many bytes these samples take."""
    store = make()
    fill(store, indices)
    return store.used_bytes


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("sharded_loader"), "propagate", True)


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "samples.cache"


def test_a_sample_that_was_read_is_ones_own() -> None:
    store = make()
    fill(store, [0, 1])
    for index in (0, 1):
        store.read(index)["x"][:] = -1
    assert has(store, [0, 1])


def test_a_sample_is_written_once(path: Path | None) -> None:
    """Two workers may read the same sample, and the second one finds that there is no room for it any more."""
    store = make(path, size_of(*range(COUNT)))
    for index in range(COUNT):
        fill(store, (index, 0, index))
    assert has(store) and store.used_bytes == size_of(*range(COUNT)) == sum(map(size_of, range(COUNT)))


def test_nothing_is_evicted_at_the_bound(path: Path | None) -> None:
    store = make(path, max_bytes=5 * 16008)
    for _ in range(2):
        fill(store)
    kept = [index for index in range(COUNT) if store.read(index) is not MISSING]
    assert kept[:4] == [0, 1, 2, 3] and has(store, kept)
    assert 4 * 16008 < store.used_bytes <= 5 * 16008


# -- who dies ----------------------------------------------------------------------------------------------------------


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """An array whose writer dies instead of writing."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def tolist(self) -> Any:
        return self.array.tolist()

    __setitem__ = die


def half(fd: int, data: Any, offset: int) -> None:
    write_at(fd, memoryview(data)[: len(data) // 2], offset)
    die()


MOMENTS: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
    "before the bytes": lambda store: (stores, "write_at", die),
    "in the middle": lambda store: (stores, "write_at", half),
    "before the checksum": lambda store: (store, "_entries", {"length": Deadly(store._entries["length"])}),
    "before it is the last one": lambda store: (store, "_counters", Deadly(store._counters)),
    "before the place": lambda store: (store, "places", Deadly(store.places)),
}
"""What is replaced, so that a writer dies there."""

INDICES = pytest.mark.parametrize("index", [4, 5], ids=["row", "record"])


def killed(work: Callable[[], Any]) -> bool:
    """Do this in a forked child: whether it was killed."""
    if not hasattr(os, "fork"):
        pytest.skip("forks")
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(3)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


def dies_writing(store: Store, index: int, moment: str) -> bool:
    return killed(lambda: (setattr(*MOMENTS[moment](store)), store.write(index, sample(index))))


@INDICES
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_killed_at_any_moment_leaves_no_torn_sample(path: Path | None, moment: str, index: int) -> None:
    store = make(path)
    fill(store, [2])
    assert dies_writing(store, index, moment) and store.read(index) is MISSING
    fill(store)  # the lock is free, and nobody writes over anything
    assert has(store)


@INDICES
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("programs", [1, 2])
def test_what_a_killed_writer_had_taken_is_given_back(tmp_path: Path, moment: str, index: int, programs: int) -> None:
    """There is room for each sample once. So each is stored, however often a writer dies."""
    total = size_of(*range(COUNT))
    path = None if programs == 1 else tmp_path / "samples.cache"
    store = make(path, total)
    others = [store if path is None else make(path, total) for _ in range(programs)]
    for one in range(0, COUNT, 3):
        fill(store, [one])
        assert dies_writing(store, index, moment)
    for one in range(COUNT):
        fill(others[one % programs], [one])
    for other in [*others, store if path is None else make(path, total)]:
        assert has(other) and other.used_bytes == total


@INDICES
def test_a_sample_that_its_writer_could_not_count_is_counted_by_the_next_one(path: Path | None, index: int) -> None:
    store = make(path)
    taken = store._taken

    def before_it_counts() -> Any:
        return die() if store.places[index] else taken()  # type: ignore[func-returns-value]

    assert killed(lambda: (setattr(store, "_taken", before_it_counts), store.write(index, sample(index))))
    assert has(store, [index]) and store.used_bytes == size_of(index)
    fill(store)
    assert has(store)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.costly
@pytest.mark.parametrize("seed", range(6))
def test_processes_killed_at_random_leave_only_whole_samples(path: Path | None, seed: int) -> None:
    store, rng = make(path, length=3000, max_bytes="60 MB"), random.Random(seed)
    told, tell = os.pipe()

    def work() -> None:
        own = np.random.default_rng(os.getpid())
        for index in own.permutation(3000).tolist():
            found = store.read(index)
            if found is MISSING:
                store.write(index, sample(index))
            elif not is_right(found, index):
                os._exit(7)
            os.write(tell, b".")
        os._exit(0)

    running: list[int] = []
    for _ in range(6):
        while len(running) < 3:
            pid = os.fork()
            if pid == 0:
                work()
            running.append(pid)
        os.read(told, rng.randrange(1, 60))  # anywhere in the work
        victim = running.pop(rng.randrange(3))
        os.kill(victim, signal.SIGKILL)
        assert os.waitpid(victim, 0)[1] in (signal.SIGKILL, 0)
    assert [os.waitpid(pid, 0)[1] for pid in running] == [0] * len(running)
    for fd in (told, tell):
        os.close(fd)
    found = [store.read(index) for index in range(3000)]
    assert all(one is MISSING or is_right(one, index) for index, one in enumerate(found))
    assert sum(one is MISSING for one in found) == 0 or store.used_bytes > 59e6


@pytest.mark.parametrize("done", range(6))
def test_the_next_one_makes_the_file_of_a_process_that_died_making_it(tmp_path: Path, done: int) -> None:
    path, calls = tmp_path / "samples.cache", []

    def write(fd: int, data: Any, offset: int) -> None:
        if len(calls) == done:
            die()
        calls.append(offset)
        write_at(fd, data, offset)

    def work() -> None:
        stores.write_at = write
        make(path)

    assert killed(work) == (done < 5)
    fill(make(path), [1])
    assert has(make(path), [1])
    assert os.listdir(tmp_path) == ["samples.cache"]


# -- files -------------------------------------------------------------------------------------------------------------


def filled(path: Path) -> int:
    """A file with all samples; how many bytes it has."""
    fill(make(path))
    return path.stat().st_size


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.costly
def test_damaged_bytes_are_never_samples(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "samples.cache", random.Random(seed)
    size = filled(path)
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 50])):
            damaged[rng.randrange(32, size)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(CacheMismatchError):
            store = make(path)
            assert has(store, [index for index in range(COUNT) if store.read(index) is not MISSING])
            fill(store)
            assert has(store)


@pytest.mark.parametrize("index", [4, 5])
def test_a_place_with_any_damaged_bit_is_that_of_no_sample(tmp_path: Path, index: int) -> None:
    path = tmp_path / "samples.cache"
    filled(path)
    store = make(path)
    whole = int(store.places[index])
    for bit in range(64):
        store.session.sound[:] = 0
        store.places[index] = whole ^ (1 << bit if bit < 63 else -(1 << 63))
        assert store.read(index) is MISSING


def test_a_damaged_sample_is_said_and_stored_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "samples.cache"
    filled(path)
    store = make(path)
    store.columns[0][2] += 1
    assert store.rows(np.array([0, 4])) is None and store.read(4) is MISSING
    assert [record.getMessage() for record in caplog.records] == [
        f"sample 4 of {path} is damaged in the cache: it is read again"
    ]
    store.write(4, sample(4))
    assert is_right(make(path).read(4), 4)


def test_counters_that_were_lost_with_the_power_overwrite_nothing(tmp_path: Path) -> None:
    path = tmp_path / "samples.cache"
    store = make(path)
    fill(store, range(COUNT // 2))
    store._counters[:] = 0
    store = make(path)
    assert has(store, range(COUNT // 2))
    fill(store)
    assert has(store)


def with_header(path: Path, **changed: Any) -> None:
    """Write a file whose header says something else."""
    make(path)
    fd = os.open(path, os.O_RDWR)
    layout = stores.read_layout(fd)
    assert layout is not None
    stores.make_header(fd, layout.header._replace(**changed))
    os.close(fd)


def cut(size: int) -> Callable[[Path], Any]:
    return lambda path: (filled(path), os.truncate(path, size))


OTHER_VERSION = "the version of the layout of the cache file .* is 2, and here 1: delete it"
OTHERS_WRITE = "other users may write to it: give a path in a folder of your own"
FOREIGN: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "text": (lambda path: path.write_text("precious"), CacheMismatchError, "is no cache of samples: give another"),
    "zeros": (lambda path: path.write_bytes(bytes(100)), CacheMismatchError, "is no cache of samples"),
    "folder": (Path.mkdir, OSError, "cannot be opened.*give a path that you can write to"),
    "header cut off": (cut(100), CacheMismatchError, "is damaged, or was cut off: delete it, or give another path"),
    "cut off": (cut(2000), CacheMismatchError, "was cut off: delete it"),
    "version": (lambda path: with_header(path, version=2), CacheMismatchError, OTHER_VERSION),
    "length": (lambda path: make(path, length=7), CacheMismatchError, "the number of samples of .* is 7, and here 20"),
    "key": (lambda path: make(path, key="a"), CacheMismatchError, "the key of .* is 'a', and here None"),
    "first sample": (lambda path: make(path, first=sample(1)), CacheMismatchError, "the digest of the first sample"),
}
if sys.platform != "win32":  # which has no O_NOFOLLOW and no such modes
    FOREIGN["link"] = (lambda path: path.symlink_to("other"), OSError, "cannot be opened")
    FOREIGN["writable by others"] = (lambda path: (make(path), path.chmod(0o666)), PermissionError, OTHERS_WRITE)


@pytest.mark.parametrize(("damage", "kind", "text"), FOREIGN.values(), ids=FOREIGN)
def test_another_file_is_rejected_and_stays(
    tmp_path: Path, damage: Callable[[Path], Any], kind: type[Exception], text: str
) -> None:
    path = tmp_path / "samples.cache"
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(kind, match=text):
        make(path)
    assert before is None or path.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "samples.cache"
    filled(path)
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        make(path)


def test_an_empty_file_becomes_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "samples.cache"
    path.touch(0o600)
    fill(make(path), [1])
    assert path.read_bytes().startswith(stores.MAGIC) and has(make(path), [1])
    path.write_bytes(stores.UNFINISHED)
    assert make(path).read(1) is MISSING


def test_a_later_run_finds_the_samples_in_a_file_that_holds_no_pickle(tmp_path: Path) -> None:
    path = tmp_path / "samples.cache"
    filled(path)
    assert has(make(path)) and path.stat().st_mode & 0o777 == 0o600
    text = path.read_bytes()
    assert json.JSONDecoder().raw_decode(text[64:].decode("latin-1"))[0][1] == COUNT
    assert b"numpy" not in text and b"torch" not in text


# -- no room -----------------------------------------------------------------------------------------------------------


def no_room(fd: int, data: Any, offset: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said_once_and_what_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(tmp_path / "samples.cache")
    fill(store, [1])
    monkeypatch.setattr(stores, "write_at", no_room)
    fill(store)
    assert has(store, [1]) and store.read(2) is MISSING
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "No space left" in record.getMessage()
    assert "it takes no more samples" in record.getMessage()


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="the system tells of no holes")
def test_what_is_written_through_the_mapping_is_no_hole(path: Path | None) -> None:
    """On a full disk, a write to a hole ends the process with a SIGBUS. On tmpfs, to read one does too."""
    for store in (make(path, length=100_000), make(path, length=100_000)):  # made, and found
        for one, begin in ((store, 100_000 * 16), (store.session, 100_000)):
            assert os.lseek(one.fd, 0, os.SEEK_HOLE) > begin


def test_a_cache_on_a_full_or_read_only_disk_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(stores, "write_at", no_room)
    with pytest.raises(OSError, match=r"cannot be opened \(No space left.*with free space"):
        make(tmp_path / "samples.cache")
    with pytest.raises(OSError, match="No space left"):
        make()
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(stores.os, "open", refuse)
    with pytest.raises(OSError, match=r"cannot be opened \(Read-only file system\): give a path that you can write to"):
        make(tmp_path / "samples.cache")


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_limit_of_the_file_size_is_no_error(tmp_path: Path) -> None:
    store = make(tmp_path / "samples.cache", first=sample(1))  # so that even ones are records, at the end of the file

    def work() -> None:
        import resource

        size = store._layout.log + 50_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        fill(store)
        if [index for index in range(COUNT) if store.read(index) is not MISSING] == [0, 1, 2, 3]:
            die()

    assert killed(work)


def test_full_memory_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = make()
    monkeypatch.setattr(stores, "LOOK", 1 << 16)
    monkeypatch.setattr(stores, "free_bytes", lambda: Limit(1000, "the cgroup"))
    fill(store)
    assert 0 < np.count_nonzero(store.places) < COUNT
    [record] = caplog.records
    assert "the cache in memory is full (the cgroup leaves 1,000 bytes)" in record.getMessage()


def test_a_share_is_that_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "free_bytes", lambda: Limit(4_000_000, "the machine"))
    bounds = {"50%": 2_000_000, "0.5%": 20_000, None: 3_000_000}
    assert {bound: make(max_bytes=bound).max_bytes for bound in bounds} == bounds
    room = shutil.disk_usage("/")._replace(total=900_000, free=400_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)  # as of /dev/shm
    assert make(max_bytes=None).max_bytes == 300_000


def test_what_runs_in_the_middle_of_a_write_stores_nothing() -> None:
    """A signal handler, or a finalizer, reads a sample while its thread has the lock."""
    store = make()
    with locked(store.fd) as alone:
        assert alone
        fill(store, [1])
    assert store.read(1) is MISSING and store.used_bytes == 0
    fill(store, [1])
    assert has(store, [1])


# -- a sample that was made flat comes back as it was ------------------------------------------------------------------

Point = namedtuple("Point", "x y")


def there_and_back(sample: Any) -> Any:
    node, leaves = flat(sample)
    rest = iter(leaves)
    found = unflatten(json.loads(text_of(node)), lambda dtype, shape: np.array(next(rest), dtype).reshape(shape))
    assert next(rest, None) is None
    return found


def same(a: Any, b: Any) -> bool:
    """Equal types, values, dtypes and shapes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same([*a.items()], [*b.items()])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


SAMPLES: dict[str, Any] = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "array of another order": np.arange(6).reshape(2, 3).T.copy("F"),
    "array without dimensions": np.array(3.5),
    "empty array": np.zeros((0, 3), np.int16),
    "big-endian array": np.arange(3, dtype=">i4"),
    "array of texts": np.array(["a", "bcd"]),
    "array of dates": np.array(["2020-01-01"], "M8[D]"),
    "array of long doubles": np.arange(2, dtype=np.longdouble),
    "view": np.arange(100)[10:20:3],
    "NumPy numbers": [np.float32(1.5), np.bool_(True), np.datetime64("2020-01-01")],
    "tensor": torch.arange(6).reshape(2, 3).T,
    "bfloat16": torch.ones(2, 3, dtype=torch.bfloat16),
    "number tensor": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty tensor": torch.zeros(0, 2),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "numbers": (1, -1.5, float("nan"), float("-inf"), -0.0, True, 1 + 2j, 2**70, -(2**63)),
    "many numbers": [list(range(50)), tuple([0.5] * 9), [True] * 8, [1, 2.5] * 8, [2**70] * 9],
    "texts": ["", "é\udc80\x00", "a" * 1000, b"", b"\x00\xff", None],
    "dict": {"a": {"b": [1, (2,)]}, 3: None, None: [], True: {}},
    "nothing": (),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_comes_back_with_its_types_and_values(sample: Any) -> None:
    found = there_and_back(sample)
    assert same(found, there_and_back(found))
    assert same(found, sample)
    node = flat(sample)[0]
    assert node == json.loads(text_of(node))


def test_keys_that_are_equal_and_differ_are_told_apart() -> None:
    assert flat({1: 2})[0] != flat({True: 2})[0] and flat({"1": 2})[0] != flat({1: 2})[0]


REFUSED: dict[str, tuple[Any, str]] = {
    "object": ({"a": [0, object()]}, r"field \['a'\]\[1\] of the sample is an object"),
    "objects in an array": ((1, np.array([None])), r"field \[1\] of the sample is an? ndarray \(object\)"),
    "structured array": (np.zeros(1, "i4,f4"), r"the sample is an? ndarray \(\[\('f0', '<i4'\)"),
    "text that ends with a zero": (np.bytes_(b"ab\0"), "the sample is a bytes_"),
    "masked array": (np.ma.array([1], mask=[True]), "the sample is a MaskedArray"),
    "namedtuple": ([Point(1, 2)], r"field \[0\] of the sample is a Point"),
    "subclass": (OrderedDict(a=1), "the sample is an OrderedDict"),
    "set": ({1}, "the sample is a set"),
    "key": ({"a": {(1, 2): 3}}, r"field \['a'\] of the sample is a dict with a tuple as a key"),
    "parameter": (torch.nn.Parameter(torch.zeros(1)), "the sample is a Parameter"),
    "requires grad": (
        {"x": torch.zeros(2, requires_grad=True)},
        r"field \['x'\] of the sample is a Tensor that requires grad \(call .detach\(\)\)",
    ),
    "sparse": (torch.eye(2).to_sparse(), r"the sample is a Tensor \(torch.float32, torch.sparse_coo, cpu\)"),
    "without values": (torch.zeros(2, device="meta"), r"the sample is a Tensor \(torch.float32, torch.strided, meta\)"),
    "class": (int, "the sample is a type"),
}


@pytest.mark.parametrize(("sample", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_named(sample: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text + ".*cannot store.*make it an array"):
        flat(sample)


COLUMNS: dict[str, list[Any]] = {
    "arrays": [np.full((2, 3), i, np.uint8) for i in range(3)],
    "numbers": [(i, i / 2, bool(i), 1j * i, np.float32(i), np.int8(i)) for i in range(3)],
    "tensors": [{"x": torch.full((2,), i), "y": (i, "same")} for i in range(3)],
    "without dimensions": [(np.array(i), torch.tensor(i)) for i in range(3)],
    "big-endian": [np.full(2, i, ">f4") for i in range(3)],
}


@pytest.mark.parametrize("samples", COLUMNS.values(), ids=COLUMNS)
def test_columns_become_the_batch_of_the_samples(samples: list[Any]) -> None:
    nodes, leaves = zip(*map(flat, samples), strict=True)
    node = nodes[0]
    assert all(one == node for one in nodes) and fits_columns(node)
    columns = [np.array(column) for column in zip(*leaves, strict=True)]
    columns = [column.astype(column.dtype.newbyteorder("=")) for column in columns]
    batch = batched(node, iter(columns), len(samples))
    assert same(batch, default_batchify_fn.assemble(samples, np.empty))


@pytest.mark.parametrize(
    "sample", [[1, 2], [0.5] * 9, None, b"a", np.array(["a"]), {}, (), torch.ones(1, dtype=torch.bfloat16)]
)
def test_what_is_batched_otherwise_is_read_one_by_one(sample: Any) -> None:
    assert not fits_columns(flat(sample)[0])
