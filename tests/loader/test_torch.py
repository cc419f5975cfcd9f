"""`sharded_loader.torch.DataLoader` is torch's loader: its arguments, errors and attributes, and its batches."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
import torch.utils.data
from conftest import METHODS
from samples import Drawing
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from sharded_loader import OnError, ShardedDataLoader, interleave
from sharded_loader.drop_in.sampler import ShuffleSampler
from sharded_loader.torch import DataLoader

TORCHS = torch.utils.data.DataLoader
MANY = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), index), np.float32(index), {"text": str(index)}


class Parts(IterableDataset[int]):
    """Worker i yields as many samples as ``lengths`` says."""

    lengths = (7, 3, 5)

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        number = 0 if info is None else info.id
        return iter(range(100 * number, 100 * number + self.lengths[number]))


def epochs(kind: Any, dataset: Any, count: int = 1, **arguments: Any) -> str:
    """Batches as text: it tells of types and dtypes too."""
    torch.manual_seed(8)
    loader = kind(dataset, **arguments)
    return repr([list(loader) for _ in range(count)])


def test_it_is_torchs_loader_with_its_arguments_in_their_order_and_their_defaults() -> None:
    loader = DataLoader(Rows(), 2, shuffle=True)
    assert isinstance(loader, TORCHS) and isinstance(DataLoader[int], type(TORCHS[int]))
    assert isinstance(iter(loader), torch.utils.data.dataloader._BaseDataLoaderIter)
    assert type(loader.sampler) is ShuffleSampler and isinstance(loader.sampler, RandomSampler)
    assert loader.collate_fn is default_collate
    assert type(DataLoader(Rows(), 2, sampler=RandomSampler(Rows())).sampler) is RandomSampler
    own, torchs = (list(inspect.signature(kind.__init__).parameters.values()) for kind in (DataLoader, TORCHS))
    assert [(one.name, one.default, one.kind) for one in own[: len(torchs)]] == [
        (one.name, one.default, one.kind) for one in torchs
    ]


KEPT = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in ("self", "unknown")]
MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "batches": lambda: {"batch_size": 3},
    "no batches": lambda: {"batch_size": None},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "shuffle": lambda: {"batch_size": 3, "shuffle": True},
    "shuffle False": lambda: {"batch_size": 3, "shuffle": False},
    "sampler": lambda: {"batch_size": 2, "sampler": SequentialSampler(range(5))},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(range(5), 2, False)},
    "generator": lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "collate_fn": lambda: {"batch_size": 2, "collate_fn": itemgetter(0)},
    "workers": lambda: {"batch_size": 2, "num_workers": 2},
    "many workers": lambda: {"batch_size": 2, "num_workers": 2, "prefetch_factor": 1, "persistent_workers": True},
    "in any order": lambda: {"batch_size": 2, "in_order": False},
}
if "in_order" not in inspect.signature(TORCHS).parameters:  # torch 2.4
    del MADE["in any order"]


@pytest.mark.parametrize("name", MADE)
def test_its_attributes_and_its_length_are_torchs(name: str) -> None:
    own, torchs = vars(DataLoader(Rows(), **MADE[name]())), vars(TORCHS(Rows(), **MADE[name]()))
    assert set(torchs) <= set(own)
    simple = (int, float, bool, str, type(None))
    assert {n: v for n, v in own.items() if n in torchs and isinstance(v, simple)} == {
        n: v for n, v in torchs.items() if isinstance(v, simple)
    }
    for attribute in ("sampler", "batch_sampler", "dataset", "collate_fn"):
        assert isinstance(own[attribute], type(torchs[attribute]))
    assert len(DataLoader(Rows(), **MADE[name]())) == len(TORCHS(Rows(), **MADE[name]()))
    # Every argument is an attribute, but for two: torch keeps `shuffle` nowhere, and the context under a private name.
    assert set(KEPT) - set(own) == {"shuffle", "multiprocessing_context"}


NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "many workers" else name for name in MADE]


@pytest.mark.costly(7)
@pytest.mark.parametrize("name", NAMES)
def test_its_first_epoch_is_torchs(name: str) -> None:
    assert epochs(DataLoader, Rows(), **MADE[name]()) == epochs(TORCHS, Rows(), **MADE[name]())


@MANY
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "given", [{}, {"drop_last": True}, {"batch_size": None}, {"collate_fn": itemgetter(0)}], ids=" ".join
)
@pytest.mark.costly
def test_epochs_of_iterable_data_are_torchs(workers: int, given: dict[str, Any]) -> None:
    arguments = {"batch_size": 2, "num_workers": workers, **given}
    assert epochs(DataLoader, Parts(), 2, **arguments) == epochs(TORCHS, Parts(), 2, **arguments)


@METHODS
@pytest.mark.parametrize("dataset", [Parts, Rows])
@pytest.mark.parametrize(
    "given_as",
    [
        lambda method: {"start_method": method},
        lambda method: {"multiprocessing_context": method},
        lambda method: {"multiprocessing_context": torch.multiprocessing.get_context(method)},
    ],
    ids=["start_method", "name", "context"],
)
def test_epochs_are_torchs_with_persistent_workers_of_every_kind(method: str, dataset: Any, given_as: Any) -> None:
    found = []
    for kind, more in ((DataLoader, given_as(method)), (TORCHS, {})):
        if dataset is Rows:
            more |= {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        found.append(epochs(kind, dataset(), 3, batch_size=2, num_workers=2, persistent_workers=True, **more))
    assert found[0] == found[1]


class Longer(Parts):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("workers", [0, 1])
def test_iterable_data_that_is_longer_than_it_says_warns_as_torchs(workers: int) -> None:
    said = []
    for kind in (DataLoader, TORCHS):
        loader = kind(Longer(), batch_size=1, num_workers=workers)
        assert len(loader) == 3
        with pytest.warns(UserWarning, match="Length of IterableDataset") as caught:
            assert len(list(loader)) == 7
        # Since Python 3.12, torch's own fork beside threads warns too.
        texts = [str(one.message).partition("at 0x")[0] for one in caught]
        said.append([text for text in texts if "multi-threaded" not in text])
    assert said[0] == said[1]


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "workers below 0": (Rows, {"num_workers": -1}),
    "timeout below 0": (Rows, {"timeout": -1}),
    "prefetch_factor without workers": (Rows, {"prefetch_factor": 2}),
    "prefetch_factor below 0": (Rows, {"prefetch_factor": -1, "num_workers": 1}),
    "persistent without workers": (Rows, {"persistent_workers": True}),
    "sampler and shuffle": (Rows, {"sampler": range(3), "shuffle": True}),
    "batch_sampler and batch_size": (Rows, {"batch_sampler": [[1]], "batch_size": 2}),
    "batch_sampler and shuffle": (Rows, {"batch_sampler": [[1]], "shuffle": True}),
    "batch_sampler and sampler": (Rows, {"batch_sampler": [[1]], "sampler": range(3)}),
    "batch_sampler and drop_last": (Rows, {"batch_sampler": [[1]], "drop_last": True}),
    "drop_last without batches": (Rows, {"batch_size": None, "drop_last": True}),
    "batch_size 0": (Rows, {"batch_size": 0}),
    "batch_size no number": (Rows, {"batch_size": "3"}),
    "drop_last no bool": (Rows, {"drop_last": 3}),
    "method unknown": (Rows, {"multiprocessing_context": "thread", "num_workers": 1}),
    "method no context": (Rows, {"multiprocessing_context": 3, "num_workers": 1}),
    "method without workers": (Rows, {"multiprocessing_context": "fork"}),
    "stream and shuffle": (Parts, {"shuffle": True}),
    "stream and sampler": (Parts, {"sampler": range(3)}),
    "stream and batch_sampler": (Parts, {"batch_sampler": "some"}),
    "shuffle without a length": (object, {"shuffle": True}),
    "length of a stream without one": (Parts, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_the_same_error(name: str) -> None:
    dataset, arguments = REFUSED[name]
    data = dataset()
    errors = []
    for kind in (DataLoader, TORCHS):
        with pytest.raises((ValueError, TypeError)) as caught:
            len(kind(data, **arguments))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_without_workers_a_timeout_is_refused_as_torch_refuses_it() -> None:
    for kind in (TORCHS, DataLoader):
        with pytest.raises(AssertionError, match="timeout == 0|^$"):
            iter(kind(Rows(), timeout=3))


LATE: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "seed": (TypeError, "seed must be an integer", {"seed": "x"}),
    "generator": (TypeError, "must be a torch.Generator", {"generator": 3}),
    "collate_fn": (TypeError, "must be a function of a list of samples", {"collate_fn": 3}),
    "worker_init_fn": (TypeError, "must be a function of the worker's number", {"worker_init_fn": 3}),
    "start_method": (ValueError, "start_method is 'forks'; this platform has", {"start_method": "forks"}),
    "two methods": (
        ValueError,
        "leave out one of them",
        {"start_method": "spawn", "multiprocessing_context": "spawn", "num_workers": 1},
    ),
    "restarts": (ValueError, "restarts must be at least 0", {"restarts": -1}),
    "num_workers": (TypeError, "num_workers must be an integer, got 1.5", {"num_workers": 1.5}),
    "timeout": (ValueError, "timeout is nan", {"timeout": float("nan")}),
    "prefetch_factor": (TypeError, "prefetch_factor must be an integer", {"prefetch_factor": 1.5, "num_workers": 1}),
    "num_shards, device": (ValueError, "num_shards makes lists of shards", {"num_shards": 2, "device": "cpu"}),
    "streams": (ValueError, "is for iterable data", {"streams": 2}),
    "device": (ValueError, "device 'nowhere' is unknown", {"device": "nowhere"}),
    "devices": (ValueError, "device", {"device": "cpu", "devices": ["cpu"]}),
    "on_error": (ValueError, "on_error", {"on_error": "ignore"}),
    "unknown": (TypeError, "none of these 2 arguments:\n .*did you mean 'batch_size'", {"batchsize": 3, "nonsense": 2}),
}


@pytest.mark.parametrize("name", LATE)
def test_what_would_fail_at_the_first_batch_is_refused_at_construction(name: str) -> None:
    kind, text, arguments = LATE[name]
    with pytest.raises(kind, match=text):
        DataLoader(**{"dataset": Rows(), **arguments})


UNREADABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "sampler": ("sampler is 3; it must be an iterable", {"sampler": 3}),
    "batch_sampler": ("batch_sampler is 3; it must be an iterable", {"batch_sampler": 3}),
    "mock of a sampler": ("sampler is <Mock", {"sampler": Mock()}),
    "int": ("a dataset needs __getitem__, and int has none", {"dataset": 3}),
    "class": ("the dataset is the class Rows", {"dataset": Rows}),
    "None": ("a dataset needs __getitem__, and NoneType has none", {"dataset": None}),
    "mock": ("a dataset needs __getitem__, and Mock has none", {"dataset": Mock()}),
    "mock of a dataset": ("a dataset needs __getitem__, and Mock has none", {"dataset": Mock(spec=Dataset)}),
    "mock of a stream": ("a dataset needs __getitem__, and Mock has none", {"dataset": Mock(spec=IterableDataset)}),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_rejected_when_it_is_read_as_torch_does(name: str, workers: int) -> None:
    text, arguments = UNREADABLE[name]
    loader: Any = DataLoader(**{"dataset": Rows(), "num_workers": workers, **arguments})
    for read in (iter, copy.copy, DataLoader.state_dict):
        with pytest.raises(TypeError, match=text):
            list(read(loader))
    if "sampler" not in name and "stream" not in name:
        with pytest.raises(TypeError, match=text):
            loader.read(0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spec", [Rows, None])
def test_mocks_are_read_as_torch_reads_them(spec: Any, workers: int) -> None:
    dataset = MagicMock(spec=spec)
    dataset.__len__.return_value, dataset.__getitem__.side_effect = 2, lambda index: index * 10
    forks = {"multiprocessing_context": "fork"} if workers else {}  # a mock cannot be pickled
    for kind in (DataLoader, TORCHS):
        assert [batch.tolist() for batch in kind(dataset, num_workers=workers, **forks)] == [[0], [10]]
        collate_fn = Mock(return_value="batch")
        assert list(kind(Rows(), 11, collate_fn=collate_fn)) == ["batch"]
        assert len(collate_fn.call_args.args[0]) == 11


class Unopened(Dataset[int]):
    """Its file is opened by the first read in a worker, and until then only what was not asked for fails."""

    def __getitem__(self, index: int) -> int:
        self.count = 4
        return index

    def __len__(self) -> int:
        return self.count

    @property
    def shape(self) -> Any:
        raise RuntimeError("the file is not open")


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
def test_a_sampler_is_enough_for_a_dataset_whose_length_and_shape_cannot_be_told_yet(kind: Any) -> None:
    loader = kind(Unopened(), 2, sampler=[3, 1, 2], num_workers=1)
    assert next(iter(loader)).tolist() == [3, 1]
    loader.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in loader] == [[2]]
    with pytest.raises(AttributeError, match="count"):
        kind(Unopened(), 2, shuffle=True)


def test_a_length_that_cannot_be_told_any_more_is_its_own_error() -> None:
    dataset = Unopened()
    dataset.count = 4
    loader = ShardedDataLoader(dataset, 2)
    del dataset.count
    with pytest.raises(AttributeError, match="count"):
        loader.refresh()


class ToldStream(IterableDataset[int]):
    """A sample that shows which epoch the dataset was told of."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        torch.utils.data.get_worker_info()  # each part yields the same
        return iter([self.epoch] * len(self))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.epoch


class ToldRows(Dataset[int]):
    """The same, read by index."""

    epoch, set_epoch, __len__, __getitem__ = -1, ToldStream.set_epoch, ToldStream.__len__, ToldStream.__getitem__


@pytest.mark.costly(4)
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: (told := ToldStream(), told),
        lambda: (told := ToldRows(), told),
        lambda: (told := ToldRows(), Subset(told, range(2))),
        lambda: (told := ToldRows(), ConcatDataset([Subset(told, range(2)), told])),
    ],
)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "start_method": "fork", "seed": 1},
        {"num_workers": 2, "thread_pool": True, "persistent_workers": True},
        {"num_workers": 2, "persistent_workers": True, "start_method": "fork"},
        pytest.param(
            {"num_workers": 2, "persistent_workers": True, "start_method": "spawn", "seed": 1}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_dataset_is_read_in_the_epoch_that_it_was_told_last(wrapped: Any, given: dict[str, Any]) -> None:
    data, dataset = wrapped()
    loader = DataLoader(dataset, 1, **given)
    found = []
    for tell, epoch in ((data, 5), (None, None), (data, 7), (loader, 2), (loader, 3), (data, 9), (None, None)):
        if tell is not None:
            tell.set_epoch(epoch)
        found.append({int(one) for batch in loader for one in batch})
    assert found == [{5}, {5}, {7}, {2}, {3}, {9}, {9}]
    loader.set_epoch(2)
    data.set_epoch(6)
    batches = iter(loader)
    next(batches)
    data, dataset = wrapped()
    other = DataLoader(dataset, 1, **given)
    other.load_state_dict(loader.state_dict())
    for rest in (batches, other):
        assert {int(one) for batch in rest for one in batch} == {6}


def test_a_mixture_goes_on_in_the_epoch_of_the_state() -> None:
    loader, other = (DataLoader(interleave([range(9)] * 2, shuffle=True, seed=1), 5) for _ in range(2))
    loader.set_epoch(3)
    batches = iter(loader)
    next(batches)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.costly)])
@pytest.mark.parametrize("dataset", [range(10), Parts()], ids=["map-style", "iterable"])
def test_the_batch_sampler_may_get_another_batch_size_between_epochs(dataset: Any, workers: int) -> None:
    found = []
    for kind in (TORCHS, DataLoader):
        loader: Any = kind(dataset, 2, num_workers=workers)
        batches = [batch.tolist() for batch in loader]
        loader.batch_sampler.batch_size = 3
        found.append([batches, [batch.tolist() for batch in loader]])
    assert found[0] == found[1]


@pytest.mark.parametrize("given", [{}, {"num_workers": 2}, {"streams": 4}, {"streams": 4, "batch_size": None}], ids=str)
def test_the_length_of_iterable_data_is_that_of_torch_where_that_is_exact(given: dict[str, Any]) -> None:
    loader = DataLoader(ToldStream(), **{"batch_size": 4, **given})
    if not given or given.get("batch_size", 4) is None:
        assert len(loader) == (2 if given else 1)
        return
    with pytest.raises(TypeError, match=r"a ToldStream decides how many samples each of its [24] parts.*steps_per_ep"):
        len(loader)


def test_a_state_of_several_parts_takes_the_length_away() -> None:
    saved = DataLoader(ToldStream(), 2, streams=2)
    next(iter(saved))
    loader = DataLoader(ToldStream(), 2)
    assert len(loader) == 1
    loader.load_state_dict(saved.state_dict())
    for _ in range(2):
        with pytest.raises(TypeError, match="of its 2 parts"):
            len(loader)
        iterator = iter(loader)
        next(iterator)
    list(iterator)


@pytest.mark.costly(2)
@pytest.mark.parametrize("given", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_stats_count_every_epoch_and_copies_count_for_themselves(given: dict[str, Any]) -> None:
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, **given)
    for _ in range(2):
        list(loader)
    next(iter(loader))
    counted = [loader.stats(epoch).as_dict("batches", "samples") for epoch in range(4)]
    assert [(one["batches"], one["samples"]) for one in counted] == [(3, 11), (3, 11), (1, 4), (0, 0)]
    assert loader.stats().samples == 26 and loader.stats().seconds > 0
    for other in () if given else (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.stats().batches == 0
        other.load_state_dict(loader.state_dict())
        list(other)
        assert other.stats(2).samples == 7 and loader.stats().batches == 7  # of a loaded epoch: from its position on


def test_stats_count_what_was_skipped_and_which_workers_were_replaced(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Drawing(11, bad=[5]), batch_size=4, on_error="skip")
    for _ in range(2):
        list(loader)
    assert [index for index, _ in loader.skipped] == [5, 5]
    assert (loader.num_skipped, loader.stats(1).skipped_samples) == (2, 1)
    assert "skipped or replaced sample 5" in caplog.text
    loader = DataLoader(Rows(), batch_size=1, num_workers=1)
    for _ in range(2):
        batches: Any = iter(loader)
        next(batches)
        batches._workers[0].kill()  # as torch's iterators have them
        list(batches)
    assert (loader.stats().replaced_workers, loader.stats(1).replaced_workers) == (2, 1)


def test_what_torch_does_not_let_be_set_is_not_set_here() -> None:
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
            setattr(DataLoader(Rows()), name, None)


def rebuilt(loader: Any) -> Any:
    """As Lightning makes a loader again: from its attributes."""
    found = {name: value for name, value in vars(copy.deepcopy(loader)).items() if name in KEPT}
    if found["batch_size"] is None and found["batch_sampler"] is not None:
        for name in ("batch_size", "sampler", "drop_last"):
            found.pop(name)
    else:
        found.pop("batch_sampler")
    if not loader.num_workers:
        found.pop("prefetch_factor")
    return DataLoader(**found)


def test_public_attributes_are_arguments_from_which_a_loader_is_built_again() -> None:
    """Ignite's DeterministicEngine and MONAI build a loader from ``vars(loader)``."""
    given = {"num_workers": 2, "prefetch_factor": 3, "timeout": 5, "generator": torch.Generator(), "seed": 3}
    ours = {"start_method": "spawn", "on_error": OnError("skip", limit=4), "shuffle": True, "device": "cpu"}
    for kind, arguments in ((DataLoader, {**given, **ours}), (DataLoader, {}), (ShardedDataLoader, {"num_workers": 2})):
        loader: Any = kind(Rows(), batch_size=2, **arguments)
        public = {key: value for key, value in vars(loader).items() if not key.startswith("_")}
        assert set(public) <= set(inspect.signature(kind.__init__).parameters)
        if kind is DataLoader:
            chosen = ("batch_size", "sampler", "drop_last", "batch_sampler")
            rest = {key: value for key, value in public.items() if key not in chosen}
            again = DataLoader(**rest, batch_sampler=[[1, 2], [0]])
            assert {key: getattr(again, key) for key in rest} == rest
        else:
            loader.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one)), rebuilt])
@pytest.mark.costly(11)
def test_a_copy_and_a_loader_that_is_made_from_the_attributes_give_the_same_batches(
    name: str, again: Callable[[Any], Any]
) -> None:
    if again is copy.copy and name in ("shuffle", "generator"):
        return  # it shares the sampler, whose next epoch comes
    torch.manual_seed(2)
    loader = DataLoader(Rows(), **MADE[name](), seed=None if name == "generator" else 3)
    copied = again(loader)
    assert repr(list(copied)) == repr(list(loader))


def test_a_loader_is_copied_in_the_middle_of_an_epoch_too() -> None:
    loader = DataLoader(range(6), 2, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    for copied in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch.tolist() for batch in copied] == [[0, 1], [2, 3], [4, 5]]
        assert copied._iterator is not loader._iterator
        copied._iterator._shutdown_workers()
    assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5]]
    loader = DataLoader(range(4), 2, num_workers=1, multiprocessing_context="spawn")
    assert pickle.loads(pickle.dumps(loader)).multiprocessing_context.get_start_method() == "spawn"
    made: Any = DataLoader.__new__(DataLoader)  # as it is, if __init__ has not run
    made.name = "found"
    assert copy.copy(made).name == pickle.loads(pickle.dumps(made)).name == "found"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_is_replaced_after_the_state_was_taken_gives_the_order(workers: int) -> None:
    """Accelerate takes the state when it wraps a loader, and then replaces the sampler in its batch sampler."""
    batches: Any = BatchSampler(RandomSampler(range(8)), 4, False)
    loader = DataLoader(range(8), batch_sampler=batches, num_workers=workers)
    loader.state_dict()
    batches.sampler = range(7, -1, -1)
    assert [batch.tolist() for batch in loader] == [[7, 6, 5, 4], [3, 2, 1, 0]]


def of_itself(base: Any) -> Any:
    """A class of loaders that are their own dataset, as PyTorch Geometric's ``GraphSAINTSampler``."""

    class Own(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(self, 1, collate_fn=itemgetter(0), **arguments)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(1)

    return Own


@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_loader_may_be_its_own_dataset(given: dict[str, Any]) -> None:
    found, is_persistent = [], "persistent_workers" in given
    for base in (DataLoader, TORCHS):
        torch.manual_seed(8)
        loader = of_itself(base)(shuffle=True, **given)
        if base is TORCHS and is_persistent:  # such workers of torch's end after ten seconds: with other data
            loader = TORCHS(range(5), 1, shuffle=True, collate_fn=itemgetter(0), **given)
        first = copy.copy(loader)  # it has another dataset: the loader that it is a copy of
        epochs: Any = [list(one) for one in (first, loader, loader)]
        if base is DataLoader and is_persistent:
            epochs = [[number for number, _ in epoch] for epoch in epochs]
        found.append(repr(epochs))
    assert found[0] == found[1]
    loader = of_itself(DataLoader)(shuffle=True, **given)
    loader.set_epoch(3)
    assert sorted(number for number, _ in loader) == [0, 1, 2, 3, 4]
    next(iter(loader))
    other = copy.deepcopy(loader)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 4


@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_dataset_may_hold_the_loader_that_reads_it(given: dict[str, Any]) -> None:
    dataset: Any = Rows()
    dataset.loader = loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=1, **given)
    expected = [repr(list(loader)) for _ in range(2)]
    for epoch in (1, 0):
        loader.set_epoch(epoch)
        assert repr(list(loader)) == expected[epoch]
    batches = iter(loader)
    next(batches)
    dataset.loader = other = DataLoader(dataset, batch_size=4, shuffle=True, **given)
    other.load_state_dict(loader.state_dict())
    assert repr(list(other)) == repr(list(batches))


def test_datapipes_are_read_by_torchs_own_workers() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    loader = DataLoader(IterableWrapper(range(5)), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="datapipes are read by torch's own workers, which have no state_dict"):
        loader.state_dict()


def test_a_sample_is_read_again_by_its_index_and_of_iterable_data_by_its_part_and_place() -> None:
    assert DataLoader(range(4)).read(1) == 1  # before any epoch
    loader = DataLoader(Parts(), 2)
    with pytest.raises(RuntimeError, match="before an epoch has begun"):
        loader.read((0, 1))
    next(iter(loader))
    assert loader.read((0, 1)) == 1
