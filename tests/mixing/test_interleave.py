"""Mixtures: the right samples at every position, read in bulk, resumed exactly, in torch's loaders too."""

import itertools
import json
import operator
import pickle
import subprocess
import sys
from collections import Counter
from multiprocessing import resource_tracker

import numpy as np
import pytest
import torch
from conftest import covering
from hypothesis import given
from hypothesis import strategies as st
from samples import Foreign, NoLength
from stream_samples import Parts, StatefulRows
from torch.utils.data import DataLoader, IterableDataset

import sharded_loader
from sharded_loader import (
    ArrayDataset,
    ProcessPool,
    ShardedDataLoader,
    SimpleDataset,
    ThreadPool,
    interleave,
    sample_rng,
)
from sharded_loader.mixing.in_order import BEGINNING, END, Source, SourcePoint

MIXTURES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=5).filter(
    lambda pairs: any(weight for _, weight in pairs)
)
STOPS = pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])


def column(number, size):
    return [f"{number}.{index}" for index in range(size)]


def turns(weights, seed):
    """The source at each position, for ever."""
    sources = [NoLength(lambda source=source: itertools.repeat(source)) for source in range(len(weights))]
    return iter(interleave(sources, weights, seed))


def naive(sizes, mixed, stop):
    """The mixture by the words of its documentation: (samples, whether it has ended) of the order of sources."""
    taken, samples = dict.fromkeys(sizes, 0), []
    for source in mixed:
        if stop == "first_exhausted" and taken[source] == sizes[source]:
            break
        samples.append(f"{source}.{taken[source] % sizes[source]}")
        taken[source] += 1
        if stop == "all_exhausted" and all(taken[one] >= size for one, size in sizes.items()):
            break
    return samples


class Stream(IterableDataset):
    """A stream that divides itself among workers, and says so."""

    epoch = 0

    def __init__(self, name, size, num_shards=None):
        self.name, self.size = name, size
        if num_shards is not None:
            self.num_shards = num_shards

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (f"{self.name}.{index}@{self.epoch}" for index in range(first, self.size, step))

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.costly
@STOPS
@given(MIXTURES, st.integers())
def test_samples_come_by_the_schedule_each_dataset_in_its_order(stop, pairs, seed):
    sizes, weights = zip(*pairs, strict=True)
    datasets = [column(number, size) for number, size in enumerate(sizes)]
    mixed = interleave(datasets, weights, seed, stop)
    read = {number: size for number, size in enumerate(sizes) if weights[number]}
    assert list(mixed) == naive(read, turns(weights, seed), stop)
    assert [mixed[-1 - n] for n in range(len(mixed))] == list(mixed)[::-1]


def test_a_mixture_is_a_dataset_with_all_its_methods():
    mixed = interleave([column("a", 10), column("b", 10)], [3, 1], seed=3)
    assert isinstance(mixed, sharded_loader.Dataset)
    assert list(mixed[2:5]) == list(mixed)[2:5] == list(mixed.take(5))[2:]
    assert list(pickle.loads(pickle.dumps(mixed))) == list(mixed)
    assert list(interleave([mixed, mixed.transform(str.upper)]))
    assert repr(mixed).endswith(f"weights=[3, 1]; {len(mixed)} samples)")
    with pytest.raises(IndexError, match=f"out of range for a dataset of {len(mixed)} samples"):
        mixed[len(mixed)]
    with pytest.raises(TypeError, match="is not an integer"):
        mixed["a"]


def test_bulk_methods_are_there_where_all_datasets_that_are_read_have_them():
    array = ArrayDataset(np.arange(3))
    for datasets, weights, offered in (
        ([array, array], [1, 1], True),
        ([array, [1, 2, 3]], [1, 1], False),
        ([array, [1, 2, 3]], [1, 0], True),
    ):
        mixed = interleave(datasets, weights)
        assert hasattr(mixed, "get_batch") is hasattr(mixed, "__getitems__") is offered
        assert not hasattr(mixed, "set_epoch")


def test_a_dataset_of_weight_0_is_never_read():
    class Untouched(Foreign):
        def __getitem__(self, index):
            raise AssertionError

    assert list(interleave([Untouched([], AssertionError()), [1, 2]], [0, 5])) == [1, 2]
    assert list(interleave([NoLength([]), NoLength([1, 2])], [0, 5])) == [1, 2]


class Epochal(list):
    epoch = 0

    def __getitem__(self, index):
        return (*super().__getitem__(slice(index, index + 1)), self.epoch)

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_the_loader_reads_a_mixture_in_every_epoch():
    mixed = interleave([Epochal([1, 2, 3, 4]), Epochal([10, 20, 30, 40])], seed=1)
    with ShardedDataLoader(mixed, 4, shuffle=True, seed=0, num_workers=2, thread_pool=True) as loader:
        for epoch in range(2):
            samples = [(x, y) for xs, ys in loader for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
            assert sorted(samples) == [(x, epoch) for x in (1, 2, 3, 4, 10, 20, 30, 40)]


def noise(sample):
    return sample, int(sample_rng().integers(10**9))


def test_a_sample_that_comes_again_draws_other_numbers_and_the_same_in_bulk():
    datasets = [ArrayDataset(np.arange(8)).transform(noise), ArrayDataset(np.arange(100, 102)).transform(noise)]
    mixed = interleave(datasets, stop="all_exhausted")
    [(samples, drawn)] = ShardedDataLoader(mixed, len(mixed), seed=4)
    again = drawn[samples >= 100].tolist()
    assert len(set(again)) == len(again) > 6

    class Singly(Foreign):
        def __getitem__(self, index):
            return mixed[index]

    [singly] = ShardedDataLoader(Singly([], len(mixed)), len(mixed), seed=4)
    assert singly[1].tolist() == drawn.tolist()


@STOPS
@given(MIXTURES, st.integers())
def test_a_mixture_in_order_gives_what_the_one_by_index_gives(stop, pairs, seed):
    sizes, weights = zip(*pairs, strict=True)
    datasets = [column(number, size) for number, size in enumerate(sizes)]
    by_index = list(interleave(datasets, weights, seed, stop))
    mixture = interleave([NoLength(one) for one in datasets], weights, seed, stop)
    in_order = list(mixture)
    assert in_order == list(mixture) and in_order[: len(by_index)] == by_index
    if stop == "first_exhausted":
        assert in_order == by_index
        return
    # It goes on until the last dataset is asked once more.
    read = {number: size for number, size in enumerate(sizes) if weights[number]}
    assert in_order == naive(read, itertools.islice(turns(weights, seed), len(in_order)), "for ever")
    counts = Counter(itertools.islice(turns(weights, seed), len(in_order) + 1))
    assert all(counts[source] > size for source, size in read.items())
    counts = Counter(itertools.islice(turns(weights, seed), len(in_order)))
    assert not all(counts[source] > size for source, size in read.items())


class OwnState:
    """As Hugging Face's: its state stays loaded, and what ``copy.copy`` makes has the attributes of the original."""

    begin = at = 0

    def __init__(self):
        self.made = []

    def __iter__(self):
        for number in range(self.begin, 5):
            self.made.append(number)
            self.at = number + 1
            yield number

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = self.at = state["at"]

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__ = state


def stateful_rows():
    return StatefulRows(Parts((5,)), 0)


def kinds(*arguments):
    own_states = [OwnState(), NoLength(stateful_rows), stateful_rows]
    each = [Stream("a", 5), lambda: iter(column("c", 4)), column("d", 6), NoLength([1, 2, 3])]
    return interleave([*own_states, *each], *arguments)


RESUMED = {
    "first": lambda: kinds([2, 1, 1, 3, 1, 1, 2], 5, "first_exhausted"),
    "all": lambda: kinds([2, 1, 1, 3, 1, 1, 2], 5, "all_exhausted"),
    "a mixture of mixtures": lambda: interleave([kinds(None, 1), Stream("x", 9)], [5, 2], stop="all_exhausted"),
    "one object mixed with itself": lambda: interleave([OwnState()] * 2, [2, 1]),
}


@pytest.mark.parametrize("make", RESUMED.values(), ids=RESUMED)
def test_an_iteration_continues_exactly_from_every_position_also_one_that_was_resumed(make):
    whole, after_one = list(make()), make().state_dict()
    for position in range(len(whole) + 1):
        mixture = make()
        samples = iter(mixture)
        assert list(itertools.islice(samples, position)) == whole[:position]
        state = json.loads(json.dumps(mixture.state_dict()))
        assert state == after_one and state["position"] == position
        for other in (make(), mixture):
            other.load_state_dict(state)
            assert other.state_dict() == state
            assert list(other) == whole[position:]
            assert list(other) == whole  # what was resumed once begins anew
        assert list(samples) == whole[position:]  # an iterator under way goes on
        resumed = make()
        resumed.load_state_dict(state)
        assert [*itertools.islice(iter(resumed), 1)] == whole[position : position + 1]
        after_one = resumed.state_dict()


def test_the_state_is_that_of_the_iterator_that_began_or_yielded_last():
    mixture = interleave([NoLength("abcd")])
    one, two = iter(mixture), iter(mixture)
    assert mixture.state_dict()["position"] == 0
    next(one), next(one), next(two)
    assert mixture.state_dict()["position"] == 1
    next(one)
    assert mixture.state_dict()["position"] == 3
    assert [*one, *two] == ["d", "b", "c", "d"]
    assert mixture.state_dict()["position"] == 0  # the iteration has ended
    next(iter(mixture))
    assert list(pickle.loads(pickle.dumps(mixture))) == list("abcd")  # a pickle begins where the mixture will begin
    mixture.load_state_dict(mixture.state_dict())
    assert list(pickle.loads(pickle.dumps(mixture))) == list("bcd")


def test_the_epoch_is_passed_on_and_decides_whether_a_position_stays():
    def make():
        return interleave([Stream("a", 3), Epochal([1, 2, 3])], seed=1)

    whole = {}
    for epoch in (2, 3):
        mixture = make()
        mixture.set_epoch(epoch)
        whole[epoch] = list(mixture)
    assert {"a.0@2", (1, 2)} <= set(whole[2]) and {"a.0@3", (1, 3)} <= set(whole[3])
    mixture = make()
    mixture.set_epoch(2)
    samples = iter(mixture)
    assert [next(samples), next(samples)] == whole[2][:2]
    state = mixture.state_dict()
    for epoch, begins_anew in (None, False), (2, False), (3, True):
        other = make()
        other.load_state_dict(state)  # which sets the epoch of the state
        if epoch is not None:
            other.set_epoch(epoch)
        assert (other.state_dict()["position"] == 0) is begins_anew
        assert list(other) == (whole[3] if begins_anew else whole[2][2:])
    mixture.set_epoch(3)
    assert mixture.state_dict()["position"] == 0


def test_an_error_of_a_dataset_loses_no_position():
    def sick():
        yield 1
        yield 2
        raise OSError("disk")

    mixture = interleave([NoLength(sick), NoLength("abc")], seed=0)
    found = []
    with pytest.raises(OSError, match="disk"):
        for sample in mixture:
            found.append(sample)
    assert mixture.state_dict()["position"] == len(found) in (4, 5)
    healthy = interleave([NoLength([1, 2, 3]), NoLength("abc")], seed=0)
    healthy.load_state_dict(mixture.state_dict())
    assert 3 in list(healthy)


def test_the_number_of_shards_is_that_of_the_dataset_with_the_fewest():
    old = NoLength([1])
    old.n_shards = 3  # its name before
    assert interleave([Stream("a", 9, 8), old, NoLength([1]), [1]]).num_shards == 3
    assert interleave([Stream("a", 9, 8), old], [1, 0]).num_shards == 8
    assert not hasattr(interleave([NoLength([1]), [1]]), "num_shards")


def part_of_c(number, parts):
    return (f"c.{index}" for index in range(number, 8, parts))


def test_torchs_loader_takes_a_mixture_in_order_for_an_iterable_dataset():
    mixture = interleave([NoLength([1, 2, 3]), range(10, 13)], seed=1)
    assert isinstance(mixture, IterableDataset)
    assert not isinstance(interleave([range(3)]), IterableDataset)
    assert torch.cat(list(DataLoader(mixture, batch_size=2))).tolist() == list(mixture)


@pytest.fixture(scope="module")
def tracker():
    """The standard library starts it for the first process that is spawned, and keeps it."""
    resource_tracker.ensure_running()


@pytest.mark.usefixtures("tracker")
@pytest.mark.parametrize("context", ["fork", "spawn"] if sys.platform != "win32" else ["spawn"])
def test_torchs_workers_divide_the_samples(context):
    mixture = interleave([Stream("a", 8), column("b", 8), part_of_c], seed=1)
    next(iter(mixture))  # the workers begin at the beginning, whatever was read here
    loader = DataLoader(mixture, batch_size=None, num_workers=2, multiprocessing_context=context)
    parts = [interleave([column("a", 8)[n::2], column("b", 8)[n::2], list(part_of_c(n, 2))], seed=1) for n in range(2)]
    assert sorted(one.removesuffix("@0") for one in loader) == sorted([*parts[0], *parts[1]])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_of_torchdata_continues_exactly():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return stateful.StatefulDataLoader(kinds([2, 1, 1, 3, 1, 1, 2], 5), batch_size=2, collate_fn=list)

    whole = list(make())
    loader, other = make(), make()
    batches = iter(loader)
    next(batches), next(batches)
    other.load_state_dict(loader.state_dict())
    assert list(other) == whole[2:]
    assert list(other) == whole  # the next epoch


PROGRAM = """
import pickle, sys
from functools import partial
from sharded_loader import interleave
by_index = interleave([range(3), range(3)])
mixture = pickle.loads(pickle.dumps(interleave([range(3), partial(range, 3)])))
list(mixture), mixture.state_dict()
assert "torch" not in sys.modules
from torch.utils.data import DataLoader, IterableDataset
assert isinstance(mixture, IterableDataset) and len(list(DataLoader(mixture, batch_size=None))) in (5, 6)
"""


@pytest.mark.slow
def test_torch_is_not_imported_and_knows_mixtures_that_were_made_before_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("tracker")
@pytest.mark.parametrize("method", ["spawn"] if sys.platform == "win32" else ["spawn", "forkserver", "fork"])
def test_each_part_reads_its_own_samples_in_every_pool(method):
    def batches(pool):
        # A spawned worker imports neither this module nor torch for it. Each part gives all of the numbers.
        mixture = interleave([range(4).__iter__, column("i", 8)], seed=1)
        with ShardedDataLoader(mixture, 2, streams=2, batchify_fn=list, pool=pool) as loader:
            return list(loader)

    found = batches(ProcessPool(2, start_method=method))
    read = [one for one in sum(found, []) if isinstance(one, str)]
    assert found == batches(ThreadPool(2)) and len(read) == len(set(read)) > 4


@pytest.mark.costly(3)
@covering(inner=[[1, 1, 1], [5, 3, 2]], outer=[[1, 1], [3, 1]], ranks=[1, 2, 3, 4, 8, 16])
def test_each_rank_has_the_shares_of_a_mixture_within_a_mixture(inner, outer, ranks):
    """Also of one within a view. With one schedule for both, a rank is up to 94 of 1,000 samples off."""
    within = interleave([ArrayDataset(np.full(20_000, k)) for k in range(len(inner))], inner)
    mixed = interleave([within.transform(operator.neg), ArrayDataset(np.full(50_000, 1))], outer)
    found = -np.asarray(mixed.__getitems__(list(range(ranks - 1, len(mixed), ranks))))
    found = found[found >= 0][:1000]
    counts = np.cumsum(found[:, None] == np.arange(len(inner)), axis=0)
    shares = np.array(inner) / sum(inner)
    assert np.abs(counts - shares * np.arange(1, 1 + len(found))[:, None]).max() < 31


# -- one dataset of a mixture continues from any position, by its own state where it has one ---------------------------


def test_only_without_a_state_are_the_samples_before_made_again_and_never_by_index():
    made = []
    by_index = SimpleDataset(range(5)).transform(lambda number: made.append(number) or number)
    assert Source("data", by_index, SourcePoint(0, 3)).read() == 3 and made == [3]
    for entry, made in ({"dataset": {"at": 3}}, [3]), ({}, [0, 1, 2, 3]):
        dataset = OwnState()
        assert Source("data", dataset, SourcePoint(0, 3, **entry)).read() == 3
        assert dataset.made == made and dataset.begin == 0  # the state went into a copy


def test_a_state_is_kept_until_the_dataset_is_opened_and_is_not_changed():
    state = SourcePoint(2, 3, {"at": 3})
    source = Source("data", OwnState(), state)
    assert source.state() == state
    assert list(iter(source.read, END)) == [3, 4]
    source.start_over()
    assert state == SourcePoint(2, 3, {"at": 3})
    source = Source("data", OwnState(), BEGINNING, is_alone=False)  # a mixture has it twice: it is resumed by counting
    source.read()
    assert source.state() == SourcePoint(0, 1)
    with pytest.raises(ValueError, match="number 3, a NoLength, has 5 samples, and the state was saved after 6"):
        Source("number 3", NoLength(range(5)), SourcePoint(0, 6)).read()
