"""What is known of a dataset before it is read: what it can do, open files in it, and its fingerprint."""

from __future__ import annotations

import functools
import io
import json
import logging
import tarfile
import threading
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from stream_samples import Own, Parts, Stateful, Told
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import sharded_loader.torch
from sharded_loader import (
    ArrayDataset,
    LoaderWarning,
    ProcessPool,
    ShardDataset,
    ShardedDataLoader,
    SimpleDataset,
    SubsetDataset,
    ThreadPool,
    interleave,
    sample_rng,
)
from sharded_loader.data.inspection import (
    fingerprint_of,
    is_indexed,
    is_stateful,
    is_stream,
    keeps_place,
    known_parts,
    open_file,
    takes_two,
)
from sharded_loader.engine.pool import Pool
from sharded_loader.mixing.schedule import Schedule


class Lines(torch_data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Counted(Lines):
    def __len__(self) -> int:  # how many samples there are: no index
        return 3


class Indexed(torch_data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Both:
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __getitem__(self, index: int) -> int:
        return index


class CountedBoth(Counted):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Own(), Parts(), Lines(), lambda: range(3), functools.partial(range, 3), {1}, len])
def test_what_can_only_be_read_in_its_own_order_is_iterable_data(dataset: Any) -> None:
    assert is_stream(dataset) and not is_indexed(dataset)


@pytest.mark.parametrize(
    "dataset", [[1], range(3), {"a": 1}, np.arange(3), CountedBoth(), Indexed(), Both(), 3, Own, ""]
)
def test_what_has_an_index_or_is_a_class_or_nothing_is_not(dataset: Any) -> None:
    """What is read by index has a length too."""
    assert not is_stream(dataset)
    assert is_indexed(dataset) == (hasattr(dataset, "__len__") and not isinstance(dataset, type))
    assert not any(map(is_indexed, (Counted(), iter([]))))


def test_what_keeps_its_state_has_both_methods() -> None:
    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {}

    class AsksHowMuch(Stateful):
        """As MosaicML's: its own loader tells it how many samples were read."""

        def state_dict(self, num_samples: int, from_beginning: bool) -> Any:  # type: ignore[override]
            return {}

    class MayBeAsked(Stateful):
        def state_dict(self, full: bool = True) -> Any:
            return {}

    assert is_stateful(Stateful()) and is_stateful(MayBeAsked())
    assert not any(map(is_stateful, (Own(), None, Half(), AsksHowMuch())))
    assert [keeps_place(one) for one in (Stateful(), Told(), iter([]), Own(), Parts())] == [True] * 3 + [False] * 2


def test_some_datasets_know_how_many_parts_they_have() -> None:
    class Shards:
        num_shards: Any = 3

    shards = Shards()
    assert known_parts(shards) == 3
    for odd in (0, -1, True, "3", 2.0, None):
        shards.num_shards = odd
        assert known_parts(shards) is None
    shards.n_shards = 5  # type: ignore[attr-defined]
    assert known_parts(shards) == 5 and known_parts(Own()) is None


def test_a_function_of_two_arguments_takes_its_part() -> None:
    def optional(part: int = 0, parts: int = 1) -> list[int]:
        return []

    def named(*, part: int, parts: int) -> list[int]:
        return []

    assert takes_two(lambda part, parts: [])
    assert not any(map(takes_two, (list, lambda part: [], optional, named, functools.partial(range, 3))))


class Numbers:
    """Reads number i at place i of a file, which is open all the time."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __getitem__(self, index: int) -> int:
        self.file.seek(index)
        return self.file.read(1)[0]

    def __len__(self) -> int:
        return 20


class Holds(Numbers):
    """Does not read its file: what threads would read is a matter of luck."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[Numbers]:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(20)))
    dataset = Numbers(path)
    with dataset.file:
        yield dataset


@pytest.mark.parametrize("pool", [lambda: ProcessPool(2, start_method="fork"), lambda: ThreadPool(2)])
def test_workers_that_share_an_open_file_are_warned_of(numbers: Numbers, pool: Any) -> None:
    pool, dataset = pool(), Holds(Path(numbers.file.name))
    warned = pytest.warns(RuntimeWarning, match=r"dataset\.file is an open file.*share its position.*os\.pread")
    with dataset.file, warned as caught, ShardedDataLoader(dataset, 5, pool=pool) as loader:
        list(loader)
        list(loader)
    assert len(caught) == 1


@pytest.mark.parametrize("pool", [ProcessPool(1, start_method="fork"), ThreadPool(1), None])
def test_a_single_worker_may_have_an_open_file(numbers: Numbers, pool: Pool | None) -> None:
    with warnings.catch_warnings(), ShardedDataLoader(numbers, 5, pool=pool) as loader:
        warnings.simplefilter("error")
        assert np.concatenate([batch.numpy() for batch in loader]).tolist() == list(range(20))


def test_a_file_inside_wrappers_lists_and_dicts_is_found(numbers: Numbers) -> None:
    assert open_file(SubsetDataset(SubsetDataset(numbers, [0]), [0])) is not None
    assert open_file(SimpleNamespace(files={"a": [numbers.file]})) == "dataset.files['a'][0]"
    assert open_file([numbers]) == "dataset[0].file"
    numbers.lock = threading.Lock()  # type: ignore[attr-defined]  # taken to guard it from threads
    assert open_file(numbers, in_threads=True) is None and open_file(numbers) == "dataset.file"


def test_what_has_no_position_that_is_read_is_not_found(numbers: Numbers, tmp_path: Path) -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    numbers.file.close()
    logger = logging.Logger("alone")
    logger.addHandler(logging.FileHandler(tmp_path / "log"))
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    holders = [SimpleNamespace(held=one) for one in (io.BytesIO(b"x"), logger, Touchy())]
    for harmless in (numbers, *holders, loop, io, 3):
        assert open_file(harmless) is None
    logger.handlers[0].close()


class Files:
    def __init__(self, root: str, change: str = "") -> None:
        self.root, self.paths = root, [f"{root}/{i}{change}.jpg" for i in range(40)]
        self._seen = np.random.default_rng().random(40)
        self.transform = object()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("a sample costs much")


class Named(list[int]):
    def __init__(self, name: str) -> None:
        super().__init__(range(4))
        self._fingerprint = name


ROWS = np.arange(80.0).reshape(40, 2)
MAKERS: dict[str, Any] = {
    "array": lambda k: ROWS + k,
    "tensor": lambda k: torch.arange(40) + k,
    "bfloat16": lambda k: (torch.arange(40) * (k + 1)).numpy(),
    "columns": lambda k: ArrayDataset(ROWS, ROWS + k),
    "columns by name": lambda k: ArrayDataset({"x": ROWS, "y": ROWS + k}),
    "list": lambda k: list(range(k, k + 40)),
    "pairs": lambda k: [(f"/data{k}/{i}.jpg", i + k) for i in range(40)],
    "dicts": lambda k: [{"text": f"number {i + k}"} for i in range(40)],
    "strings": lambda k: np.array([f"number {i + k}" for i in range(40)]),
    "wrapped": lambda k: SimpleDataset(ROWS + k).transform(abs).take(30).cache(),
    "chosen": lambda k: SubsetDataset(ROWS, [k, *range(20)]),
    "torch's": lambda k: ConcatDataset([Subset(TensorDataset(torch.arange(40) + k), range(9))]),
    "subset": lambda k: Subset(range(50), [k, *range(20)]),  # type: ignore[arg-type]
    "files": lambda k: Files(f"/data{k}", "" if k == 0 else "-new"),
    "named": lambda k: Named(f"abc{k}"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_other_data_of_the_same_length_have_another_fingerprint(kind: str) -> None:
    one, same, other = (fingerprint_of(MAKERS[kind](k)) for k in (0, 0, 1))
    assert one == same and None not in (one, other) and one != other
    assert fingerprint_of(Files("/data")) == fingerprint_of(Files("/mnt/data"))  # a folder that has moved


@pytest.mark.parametrize("data", [range(9), Files, object(), [object()] * 3, np.float64(3), "text"])
def test_what_nothing_is_known_of_has_none(data: Any) -> None:
    assert fingerprint_of(data) in (None, fingerprint_of([object(), object(), object()]))


def test_much_data_are_not_read(tmp_path: Path) -> None:
    large = np.lib.format.open_memmap(str(tmp_path / "a.npy"), mode="w+", dtype=np.float32, shape=(25_000, 1000))
    resource = pytest.importorskip("resource")  # POSIX
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert fingerprint_of(large) is not None
    read = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    large.sum()
    assert 10 * read < resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, "page faults, of a few and of all"


def write_shards(folder: Path, content: bytes) -> None:
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        for i in range(3):
            member = tarfile.TarInfo(f"{i}.txt")
            member.size = len(content)
            tar.addfile(member, BytesIO(content))


def test_shards_are_known_by_names_and_sizes_wherever_they_lie(tmp_path: Path) -> None:
    for name, content in (("a", b"1"), ("b", b"1"), ("c", bytes(3000))):
        write_shards(tmp_path / name, content)
    a, b, c = (
        fingerprint_of(ShardDataset(str(tmp_path / name / "*.tar"), index_folder=tmp_path / f"{name}i"))
        for name in "abc"
    )
    assert a == b != c


def load(made: Any, state: Any, data: Any, **how: Any) -> list[str]:
    loader = made(data, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.load_state_dict(state, **how)
    assert all(one.category is LoaderWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("made", [ShardedDataLoader, sharded_loader.torch.DataLoader])
def test_a_state_is_not_taken_on_over_other_data_of_the_same_length(made: Any) -> None:
    loader = made([1, 2, 3, 4], 2)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    assert load(made, state, [1, 2, 3, 4]) == []
    if made is ShardedDataLoader:
        other = made([5, 6, 7, 8], 2)
        with pytest.raises(
            ValueError, match="saved with other data: the fingerprint of the dataset was .*strict=False"
        ):
            other.load_state_dict(state, skip=[(1, 1)])
        assert (other.epoch, other.position, other.skip) == (0, 0, [])  # nothing has changed
        assert load(made, state, [5, 6, 7, 8], strict=False) == []
    else:  # as in torch, nothing says that the change is meant
        [text] = load(made, state, [5, 6, 7, 8])
        assert text.startswith("the state was saved with other data: the fingerprint of the dataset was ")
    old = {name: value for name, value in state.items() if name not in ("data", "_data")}
    assert load(made, old, [5, 6, 7, 8]) == [], "a state of an older version says nothing of the data"


def test_iterable_data_with_a_name_are_compared_too() -> None:
    class Stream:
        def __init__(self, name: str) -> None:
            self._fingerprint = name

        def __iter__(self) -> Any:
            return iter([sample_rng().random()] * 4)

    loader = ShardedDataLoader(Stream("a"), 2)
    next(iter(loader))
    state = loader.state_dict()
    assert load(ShardedDataLoader, state, Stream("a")) == []
    with pytest.raises(ValueError, match="other data"):
        load(ShardedDataLoader, [state], Stream("b"))


def test_after_a_refresh_the_fingerprint_is_that_of_the_changed_data() -> None:
    data = [1, 2, 3, 4]
    loader = ShardedDataLoader(data, 2)
    before = loader.state_dict()["data"]
    data[0] = 9
    assert loader.state_dict()["data"] == before
    loader.refresh()
    assert loader.state_dict()["data"] == fingerprint_of(data) != before


@pytest.mark.costly
@pytest.mark.parametrize("nested", [False, True])
def test_a_state_over_a_mixture_knows_weights_seed_and_turns(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(weights: Any, seed: int = 0) -> ShardedDataLoader:
        mixed = interleave([range(600), range(600, 1200)], weights, seed)
        return ShardedDataLoader((interleave([mixed, [1] * 900]) if nested else mixed).take(400), 4, seed=0)

    state = json.loads(json.dumps(loader([3, 1]).state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader([6, 2]).load_state_dict(state)
    for other in (loader([1, 3]), loader([3, 1], seed=1)):
        with pytest.raises(ValueError, match="saved with other data"):
            other.load_state_dict(state)
    monkeypatch.setattr(Schedule, "owner", lambda schedule, position: position % 2)  # as another version may mix
    with pytest.raises(ValueError, match="saved with other data"):
        loader([3, 1]).load_state_dict(state)
