"""What is known of a dataset before it is read: what it can do, its open files, its fingerprint, digests of samples."""

import contextlib
import datetime
import decimal
import enum
import functools
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import threading
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from stream_samples import Own, Parts, Stateful, Told
from torch.utils.data import ConcatDataset, Subset, SubsetRandomSampler, TensorDataset

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
)
from sharded_loader.data.datasets import can_follow, follow
from sharded_loader.data.inspection import (
    exact,
    fingerprint_of,
    is_stateful,
    is_stream,
    keeps_place,
    known_parts,
    open_file,
    sampled,
    takes_two,
)
from sharded_loader.mixing.in_order import is_indexed
from sharded_loader.mixing.schedule import Schedule


class Lines(torch_data.IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


class Counted(Lines):
    def __len__(self):  # how many samples there are: no index
        return 3


class Indexed(torch_data.Dataset[int]):
    def __getitem__(self, index):
        return index


class Both:
    def __iter__(self):
        return iter(())

    def __getitem__(self, index):
        return index


class CountedBoth(Counted):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("dataset", [Own(), Parts(), Lines(), lambda: range(3), functools.partial(range, 3), {1}, len])
def test_what_can_only_be_read_in_its_own_order_is_iterable_data(dataset):
    assert is_stream(dataset) and not is_indexed(dataset)


@pytest.mark.parametrize(
    "dataset", [[1], range(3), {"a": 1}, np.arange(3), CountedBoth(), Indexed(), Both(), 3, Own, ""]
)
def test_what_has_an_index_or_is_a_class_or_nothing_is_not(dataset):
    """What is read by index has a length too."""
    assert not is_stream(dataset)
    assert is_indexed(dataset) == (hasattr(dataset, "__len__") and not isinstance(dataset, type))
    assert not any(map(is_indexed, (Counted(), iter([]))))


def test_methods_and_arguments_say_what_a_dataset_can_do():
    half = type("Half", (), {"state_dict": lambda self: {}})()
    # As MosaicML's: its own loader tells it how many samples were read.
    asks = type("Asks", (Stateful,), {"state_dict": lambda self, num_samples, from_beginning: {}})()
    may_be_asked = type("MayBeAsked", (Stateful,), {"state_dict": lambda self, full=True: {}})()
    assert is_stateful(Stateful()) and is_stateful(may_be_asked)
    assert not any(map(is_stateful, (Own(), None, half, asks)))
    assert [keeps_place(one) for one in (Stateful(), Told(), iter([]), Own(), Parts())] == [True] * 3 + [False] * 2
    shards = SimpleNamespace(num_shards=3)
    assert known_parts(shards) == 3
    for shards.num_shards in (0, -1, True, "3", 2.0, None):
        assert known_parts(shards) is None
    shards.n_shards = 5
    assert known_parts(shards) == 5 and known_parts(Own()) is None
    assert takes_two(lambda part, parts: [])
    for other in (
        lambda part=0, parts=1: [],
        lambda *, part, parts: [],
        lambda part: [],
        list,
        functools.partial(range, 3),
    ):
        assert not takes_two(other)


class Numbers:
    """Reads number i at place i of a file, which is open all the time."""

    def __init__(self, path):
        self.file = path.open("rb")

    def read(self, index):
        self.file.seek(index)
        return self.file.read(1)[0]

    def __getitem__(self, index):
        return self.read(index)

    def __len__(self):
        return 20


@pytest.fixture
def numbers(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(20)))
    dataset = Numbers(path)
    with dataset.file:
        yield dataset


@pytest.mark.parametrize("pool", [lambda: ProcessPool(2, start_method="fork"), lambda: ThreadPool(2)])
def test_workers_that_share_an_open_file_are_warned_of(numbers, pool):
    numbers.read = int  # not of its file: what threads would read is a matter of luck
    warned = pytest.warns(LoaderWarning, match=r"dataset\.file is an open file.*share its position.*os\.pread")
    with warned as caught, ShardedDataLoader(numbers, 5, pool=pool()) as loader:
        list(loader)
        list(loader)
    assert len(caught) == 1


@pytest.mark.parametrize("pool", [ProcessPool(1, start_method="fork"), ThreadPool(1), None])
def test_a_single_worker_may_have_an_open_file_until_others_join_it(numbers, pool):
    with ShardedDataLoader(numbers, 5, pool=pool) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.concatenate([batch.numpy() for batch in loader]).tolist() == list(range(20))
        if pool is not None:
            next(iter(loader))
            pool.resize(2)
            with pytest.warns(LoaderWarning, match=r"dataset\.file is an open file.*share its position"):
                pool.adopt()


def test_a_file_is_found_inside_of_anything_if_its_position_is_read(numbers, tmp_path):
    assert open_file(SubsetDataset(SubsetDataset(numbers, [0]), [0])) is not None
    assert open_file(SimpleNamespace(files={"a": [numbers.file]})) == "dataset.files['a'][0]"
    assert open_file([numbers]) == "dataset[0].file"
    numbers.lock = threading.Lock()  # taken to guard it from threads
    assert open_file(numbers, in_threads=True) is None and open_file(numbers) == "dataset.file"

    class Touchy:
        def __getattribute__(self, name):
            raise AssertionError(name)

    numbers.file.close()
    logger = logging.Logger("alone")
    logger.addHandler(logging.FileHandler(tmp_path / "log"))
    loop = {}
    loop["loop"] = loop
    holders = [SimpleNamespace(held=one) for one in (io.BytesIO(b"x"), logger, Touchy())]
    for harmless in (numbers, *holders, loop, io, 3):
        assert open_file(harmless) is None
    logger.handlers[0].close()


class Files:
    def __init__(self, root, change=""):
        self.root, self.paths = root, [f"{root}/{i}{change}.jpg" for i in range(40)]
        self._seen = np.random.default_rng().random(40)
        self.transform = object()

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        raise RuntimeError("a sample costs much")


class Named(list[int]):
    def __init__(self, name):
        super().__init__(range(4))
        self._fingerprint = name


ROWS = np.arange(80.0).reshape(40, 2)
MAKERS = {
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
    "subset": lambda k: Subset(range(50), [k, *range(20)]),
    "files": lambda k: Files(f"/data{k}", "" if k == 0 else "-new"),
    "named": lambda k: Named(f"abc{k}"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_other_data_of_the_same_length_have_another_fingerprint(kind):
    one, same, other = (fingerprint_of(MAKERS[kind](k)) for k in (0, 0, 1))
    assert one == same and None not in (one, other) and one != other
    assert fingerprint_of(Files("/data")) == fingerprint_of(Files("/mnt/data"))  # a folder that has moved


@pytest.mark.parametrize("data", [range(9), Files, object(), [object()] * 3, np.float64(3), "text"])
def test_what_nothing_is_known_of_has_none(data):
    assert fingerprint_of(data) in (None, fingerprint_of([object(), object(), object()]))


def test_much_data_are_not_read_and_shards_are_known_by_names_and_sizes(tmp_path):
    large = np.lib.format.open_memmap(str(tmp_path / "a.npy"), mode="w+", dtype=np.float32, shape=(25_000, 1000))
    resource = pytest.importorskip("resource")  # POSIX
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert fingerprint_of(large) is not None
    read = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    large.sum()
    assert 10 * read < resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, "page faults, of a few and of all"
    found = []
    for name, content in (("a", b"1"), ("b", b"1"), ("c", bytes(3000))):
        (tmp_path / name).mkdir()
        with tarfile.open(tmp_path / name / "0.tar", "w") as tar:
            for i in range(3):
                member = tarfile.TarInfo(f"{i}.txt")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        shards = ShardDataset(str(tmp_path / name / "*.tar"), index_folder=tmp_path / f"{name}i")
        found.append(fingerprint_of(shards))
    assert found[0] == found[1] != found[2]


def load(made, state, data, **how):
    loader = made(data, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.load_state_dict(state, **how)
    assert all(one.category is LoaderWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("made", [ShardedDataLoader, sharded_loader.torch.DataLoader])
def test_a_state_is_not_taken_on_over_other_data_of_the_same_length(made):
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


def test_iterable_data_with_a_name_are_compared_too_and_changed_data_after_a_refresh():
    def named(name):
        vars(made := Own((4,)))["_fingerprint"] = name
        return made

    loader = ShardedDataLoader(named("a"), 2)
    next(iter(loader))
    state = loader.state_dict()
    assert load(ShardedDataLoader, state, named("a")) == []
    with pytest.raises(ValueError, match="other data"):
        load(ShardedDataLoader, [state], named("b"))
    data = [1, 2, 3, 4]
    loader = ShardedDataLoader(data, 2)
    before = loader.state_dict()["data"]
    data[0] = 9
    assert loader.state_dict()["data"] == before
    loader.refresh()
    assert loader.state_dict()["data"] == fingerprint_of(data) != before


@pytest.mark.costly
@pytest.mark.parametrize("nested", [False, True])
def test_a_state_over_a_mixture_knows_weights_seed_and_turns(nested, monkeypatch):
    def loader(weights, seed=0):
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


# -- digests, the same everywhere: exact ones, and of parts of large values --------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass
class Boxes:
    corners: Any
    label: int


class Scan:
    """An object of the user's, which refers to itself."""

    def __init__(self, values):
        self.values, self.self = values, self


class Color(enum.Enum):
    RED, BLUE = 1, 2


def padded(byte):
    """Long doubles in memory that was filled with a byte, which stays behind each of them."""
    memory = np.full(3 * np.dtype(np.longdouble).itemsize, byte, np.uint8).view(np.longdouble)
    return np.multiply(np.arange(3), np.longdouble(0.5), out=memory)


# Each row: a sample, an equal one made otherwise, another one.
DIGESTS = {
    "float": (1.5, 1.5, 1.25),
    "integer and float": (1, 1, 1.0),
    "integer and truth": (1, 1, True),
    "nothing": (None, None, 0),
    "text": ("a / b", "a / b", "x / b"),
    "bytes": (b"ab", b"ab", "ab"),
    "array": (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6)),
    "byte order": (np.arange(3), np.arange(3).astype(">i8"), np.arange(3).astype(np.int32)),
    "strides": (np.arange(10)[::2], np.array([0, 2, 4, 6, 8]), np.arange(10)[1::2]),
    "long doubles": (padded(0), padded(255), padded(0) * 2),
    "scalar": (np.float32(1.5), np.float32(1.5), np.float32(2.5)),
    "objects": (np.array(["a", None], object), np.array(["a", None], object), np.array(["b", None], object)),
    "fields": (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 2.0)], "i4,f8"), np.array([(2, 2.0)], "i4,f8")),
    "time": (np.datetime64("2020-01-01"), np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
    "tensor": (torch.arange(4), torch.arange(8)[:4].clone(), torch.arange(4) + 1),
    "bfloat16": (torch.ones(2, dtype=torch.bfloat16), torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
    "conjugated": (torch.tensor([1 - 2j]), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
    "needs gradients": (torch.ones(2, requires_grad=True), torch.ones(2), torch.zeros(2)),
    "dict": ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": [2], "b": 1}),
    "ordered": (OrderedDict(a=1), {"a": 1}, {"a": 2}),
    "set": ({"x", "y", "z"}, {"z", "y", "x"}, {"x", "y"}),
    "nested": ([[1], [2, 3]], ([1], [2, 3]), [[1, 2], [3]]),
    "empty": ([], (), {}),
    "named": (Pair(1, 2), Pair(1, 2), Pair(2, 1)),
    "dataclass": (Boxes(np.arange(2000), 1), Boxes(np.arange(2000), 1), Boxes(np.arange(2000) + 1, 1)),
    "object": (Scan(np.arange(2000)), Scan(np.arange(2000)), Scan(np.arange(2000) + 1)),
    "name": (Color.RED, Color.RED, Color.BLUE),
    "day": (datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2)),
    "decimal": (decimal.Decimal("1.5"), decimal.Decimal("1.5"), decimal.Decimal("1.6")),
    "moved folder": ("/data/x/1.jpg", "/mnt/1.jpg", "/mnt/2.jpg"),
    "path": (Path("/data/1.jpg"), PureWindowsPath("C:\\data\\1.jpg"), Path("/data/2.jpg")),
    "has no value": (object(), object(), lambda: 1),
}


with contextlib.suppress(ImportError):  # Pillow is optional
    from PIL import Image

    DIGESTS["picture"] = (Image.new("L", (3, 4), 5), Image.new("L", (3, 4), 5), Image.new("L", (4, 3), 5))


@pytest.mark.parametrize("row", DIGESTS)
def test_equal_samples_have_equal_digests_and_others_have_others(row):
    one, same, other = map(exact, DIGESTS[row])
    assert one == same != other
    assert len(one) == 16


def test_the_digests_are_the_same_in_every_process():
    sample = "{'x': np.arange(3), 'y': (1.5, {'b', 'a'}, np.float32(2)), 'z': '/a/b.png'}"
    program = f"import numpy as np; from sharded_loader.data.inspection import exact; print(exact({sample}))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["864762ac51cff9f1"]


SAMPLES = [
    *(1, 2, True, 1.5, None, "a", b"a", 1j, [1], [], {"a": 1}, {"b": 1}, {"a": "b"}, [*range(40)], [*range(41)]),
    *(np.arange(3), np.arange(3, dtype=np.int32), np.arange(4), np.zeros((2, 0)), np.float32(1)),
    *(torch.arange(4, dtype=torch.int32), torch.arange(5.0), io.StringIO(), ValueError()),
    *([np.arange(2), {"x": torch.zeros(2)}], [np.arange(2), {"x": torch.ones(2)}]),
]


def test_samples_that_differ_have_other_digests_of_parts_as_far_as_one_can_look_into_them():
    found = [sampled(sample) for sample in SAMPLES]
    assert len(set(found)) == len(found)
    assert found == [sampled(sample) for sample in SAMPLES]
    assert sampled(torch.ones(3, device="meta")) == sampled(torch.ones(2, device="meta"))
    assert sampled(io.StringIO("a")) == sampled(io.StringIO("b"))
    assert sampled("\ud800") != sampled("a")


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_of_large_samples_parts_count(kind):
    large = np.zeros((1 << 12, 1 << 12), np.uint8)
    before = sampled(kind(large))
    large[1000, 1] = 1
    assert sampled(kind(large)) == before != sampled(kind(large[:, :-1]))
    large[-1, -4] = 1
    assert sampled(kind(large)) != before
    long = np.zeros(1 << 17, np.uint8)
    before = sampled(kind(long))
    long[900] = 1
    assert sampled(kind(long)) != before
    assert sampled(kind(large)[:, ::2]) == sampled(kind(large[:, ::2].copy()))


# -- a dataset is told which of its own samples come, through any stack of wrappers ----------------------------------


class Follows(SimpleDataset):
    """Remembers what it was told."""

    def __init__(self, length):
        super().__init__(range(length))
        self.told = []

    def follow(self, batches, position, later):
        self.told = [np.asarray(batches(number)).tolist() for number in range(2)]
        assert batches(2) is None and position() == 7
        assert [np.asarray(later(number)).tolist() for number in range(2)] == self.told[::-1]


ORDER = ([0, 5, 3], [4, 1])
STACKS = {
    "itself": (lambda told: told, [[0, 5, 3], [4, 1]]),
    "transformed": (lambda told: told.transform(str).cache(), [[0, 5, 3], [4, 1]]),
    "a part of it": (lambda told: told.shard(2, 1), [[10, 15, 13], [14, 11]]),
    "a part of a part": (lambda told: told.shard(2, 1).transform(str).take(8)[1:], [[11, 16, 14], [15, 12]]),
    "shuffled": (lambda told: SimpleDataset(told).sample(InOrder([9, 8, 7, 6, 5, 4])), [[9, 4, 6], [5, 8]]),
    "the first of two": (lambda told: told.take(4) + ["x"] * 9, [[0, 3], [1]]),
    "the second of two": (lambda told: ArrayDataset(np.arange(4)) + told, [[1], [0]]),
}


class InOrder(SubsetRandomSampler):
    def __iter__(self):
        return iter(self.indices)


@pytest.mark.parametrize("stack", STACKS)
def test_a_dataset_is_told_its_own_indices(stack):
    made, expected = STACKS[stack]
    told = Follows(20)
    dataset = made(told)
    assert can_follow(dataset)
    later = ORDER[::-1]
    follow(dataset, lambda number: ORDER[number] if number < 2 else None, lambda: 7, lambda number: later[number])
    assert told.told == expected


def test_who_does_not_want_to_know_is_not_told():
    for dataset in ([1, 2], SimpleDataset([1, 2]).take(1), ArrayDataset(np.arange(3)) + [4]):
        assert not can_follow(dataset)
        follow(dataset, lambda number: None, lambda: 0, lambda number: None)
