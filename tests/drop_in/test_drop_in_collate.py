"""Batches are those of ``default_collate``: values, dtypes, types; and where it raises an error, the same error."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import covering
from drop_in_samples import TORCHS, Pair, Reads, assert_same, outcome
from hypothesis import example, given
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from sharded_loader import ArrayDataset, ShardedDataLoader, SimpleDataset
from sharded_loader.batchify import Pad, Stack
from sharded_loader.batching.tree import TensorBatch
from sharded_loader.drop_in.collate import Assembled, Collate
from sharded_loader.torch import DataLoader


def collated(samples: list[Any]) -> Any:
    found = Collate().assemble(samples, np.empty)
    return found.to_torch() if type(found) is TensorBatch else found


def assert_as_torchs_function(samples: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about arrays that are read-only
        expected, error = outcome(lambda: default_collate(samples))
        found, ours = outcome(lambda: collated(samples))
    if error is None:
        assert ours is None, ours
        assert_same(found, expected)
    else:
        assert type(ours) is type(error) and str(ours) == str(error), (ours, error)


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]
ARRAYS = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16", "g", ">f4", ">i8"]
ODD_ARRAYS = ["U3", "S3", "O", "M8[s]", "m8[s]", "V4", "i4,f4"]


def of_dtype(dtype: torch.dtype) -> list[Any]:
    return [torch.arange(6).reshape(2, 3).to(dtype), torch.ones(2, 3).to(dtype)]


SAMPLES: dict[str, Callable[[], list[Any]]] = {
    **{str(dtype): (lambda dtype=dtype: of_dtype(dtype)) for dtype in DTYPES},
    **{f"array {name}": (lambda name=name: [np.ones((2, 3), name), np.zeros((2, 3), name)]) for name in ARRAYS},
    **{f"array {name}": (lambda name=name: [np.zeros((2, 3), name), np.zeros((2, 3), name)]) for name in ODD_ARRAYS},
    **{f"scalar {name}": (lambda name=name: [np.dtype(name).type(1), np.dtype(name).type(0)]) for name in ARRAYS},
    "int beyond int64": lambda: [1, 2**63],
    "int far beyond": lambda: [1, 2**70],
    "int below int64": lambda: [1, -(2**63) - 1],
    "objects": lambda: [object(), object()],
    "sets": lambda: [{1}, {2}],
    "tuples": lambda: [(np.ones(2), 1), (np.zeros(2), 2)],
    "dicts": lambda: [{"a": np.ones(2), "b": 1}, {"a": np.zeros(2), "b": 2}],
    "dicts in another order": lambda: [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "dict without a key": lambda: [{"a": 1, "b": 2}, {"a": 3}],
    "dict with one more": lambda: [{"a": 1}, {"a": 3, "b": 2}],
    "ordered": lambda: [OrderedDict(a=1, b=2.0), OrderedDict(a=3, b=4.0)],
    "defaultdicts": lambda: [defaultdict(list, a=1), defaultdict(list, a=2)],
    "named": lambda: [Pair(np.ones(2), 1), Pair(np.zeros(2), 2)],
    "nested": lambda: [{"a": (np.ones(2), [1, "x"]), "b": Pair(torch.ones(1), {"c": 2.5})}] * 2,
    "tuple with a string": lambda: [(np.ones(2), "a"), (np.zeros(2), "b")],
    "tuple with None": lambda: [(1, None), (2, None)],
    "tuple with a tuple": lambda: [(1, (2, 3)), (4, (5, 6))],
    "one array twice": lambda: [(x := np.ones(2), x), (x, x)],
    "one tensor twice": lambda: [(x := torch.ones(2), x), (x, x)],
    "ragged arrays": lambda: [np.ones(2), np.ones(3)],
    "ragged tensors": lambda: [torch.ones(2), torch.ones(3)],
    "mixed dtypes of arrays": lambda: [np.ones(2, "f4"), np.ones(2, "f8")],
    "mixed dtypes of tensors": lambda: [torch.ones(2), torch.ones(2, dtype=torch.int64)],
    "transposed": lambda: [np.arange(6.0).reshape(2, 3).T, np.ones((3, 2))],
    "transposed tensors": lambda: [torch.arange(6.0).reshape(2, 3).T, torch.ones(3, 2)],
    "channels last": lambda: [torch.rand(2, 3, 4).permute(2, 0, 1)] * 2,
    "every second": lambda: [np.arange(6)[::2], np.arange(3)],
    "read-only": lambda: [np.broadcast_to(np.float32(1), (2, 3))] * 2,
    "subclass of arrays": lambda: [np.ones((2, 2)).view(np.matrix)] * 2,
    "memory maps": lambda: [np.ones(2).view(np.memmap)] * 2,
    "subclass of tensors": lambda: [torch.ones(2).as_subclass(Marked)] * 2,
    "parameters": lambda: [torch.nn.Parameter(torch.ones(2))] * 2,
    "with gradients": lambda: [torch.ones(2, requires_grad=True)] * 2,
    "sparse": lambda: [torch.eye(2).to_sparse()] * 2,
    "conjugated": lambda: [torch.tensor([1j, 2.0]).conj()] * 2,
    "negated": lambda: [torch.tensor([1j, 2.0]).conj().imag] * 2,
    "expanded": lambda: [torch.ones(1).expand(3)] * 2,
    "no samples": list,
    "one sample": lambda: [np.ones(3)],
    "ranges": lambda: [range(2), range(2, 4)],
    "slices": lambda: [slice(1), slice(2)],
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.costly(40)
def test_a_batch_is_torchs(kind: str) -> None:
    assert_as_torchs_function(SAMPLES[kind]())


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.costly(40)
def test_a_field_is_torchs(kind: str) -> None:
    for other in (7, "text"):
        assert_as_torchs_function([(other, sample) for sample in SAMPLES[kind]()])
        assert_as_torchs_function([[sample, other] for sample in SAMPLES[kind]()])
        assert_as_torchs_function([{"a": sample, "b": other} for sample in SAMPLES[kind]()])


numbers = st.one_of(
    st.integers(-(2**64), 2**64), st.floats(width=64), st.booleans(), st.complex_numbers(max_magnitude=9)
)
shapes = st.sampled_from([(), (1,), (2,), (0,), (2, 3), (3, 2), (2, 0)])
arrays = st.builds(
    lambda shape, dtype, begin: np.arange(begin, begin + int(np.prod(shape))).reshape(shape).astype(dtype),
    shapes,
    st.sampled_from([name for name in ARRAYS if name[0] != ">"]),
    st.integers(0, 5),
)
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype), shapes, st.sampled_from([*DTYPES, torch.float32, torch.int64])
)
texts = st.one_of(st.text(max_size=3), st.binary(max_size=3), st.none())
leaves = st.one_of(numbers, arrays, tensors, texts, st.builds(np.float32, st.integers(0, 9)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner),
        st.tuples(inner, inner),
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=5,
)


def alike(sample: Any) -> st.SearchStrategy[Any]:
    """Samples that are mostly of one kind, as those of a dataset are."""
    return st.lists(st.sampled_from([sample, sample, sample]) | st.just(sample), min_size=1, max_size=4)


def several(kind: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(kind, min_size=1, max_size=4)


@given(several(trees) | trees.flatmap(alike) | st.sampled_from([arrays, tensors, numbers]).flatmap(several))
@example([np.float32(1), 2.0])
def test_any_batch_is_torchs(samples: list[Any]) -> None:
    assert_as_torchs_function(samples)
    assert_as_torchs_function([(sample, 1) for sample in samples])


# -- through workers ----------------------------------------------------------------------------------------

HERE_ONLY = ("objects", "no samples", "sparse", "conjugated", "negated")
"""torch's own workers cannot put the last two into a batch; those of this library can."""


THROUGH_A_PIPE = [kind for kind in SAMPLES if kind not in HERE_ONLY]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if n % 6 == 0 else pytest.mark.slow) for n, k in enumerate(THROUGH_A_PIPE)]
)
@pytest.mark.parametrize("in_tuples", [False, True])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.costly(2)
def test_a_batch_is_torchs_also_behind_the_pipe_of_a_worker(kind: str, in_tuples: bool) -> None:
    samples = SAMPLES[kind]()
    if in_tuples:
        samples = [(1, sample) for sample in samples]
    # In a worker torch stacks into shared memory of the first sample's dtype, and without gradients.
    expected, error = outcome(lambda: list(TORCHS(samples, len(samples), num_workers=1)))
    found, ours = outcome(lambda: list(DataLoader(samples, len(samples), num_workers=1)))
    assert type(ours) is type(error), (ours, error)
    if error is None:
        assert_same(found, expected)


# -- functions of the user's --------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [DataLoader, ShardedDataLoader])
def test_gradients_flow_to_a_batch_that_a_workers_collate_fn_made_for_that(loader: Any) -> None:
    [batch] = loader([1.0, 2.0], 2, num_workers=1, collate_fn=lambda samples: torch.tensor(samples, requires_grad=True))
    batch.square().sum().backward()
    assert batch.grad.tolist() == [2, 4]


IN_TORCHS_TABLE = [np.ones(2), 1, 2.5, torch.ones(2), "a", True, torch.ones(2).as_subclass(Marked)]


@pytest.mark.parametrize("sample", IN_TORCHS_TABLE, ids=lambda sample: type(sample).__name__)
def test_a_type_that_was_changed_or_added_in_torchs_table_is_collated_by_it(
    sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, type(sample), lambda batch, *, collate_fn_map=None: ["own", *batch])
    for samples in ([sample, sample], [(sample, 0.5), (sample, 0.5)], [(1, torch.ones(2))] * 2):
        assert_same(collated(samples), default_collate(samples))
    assert_same(next(iter(DataLoader([sample, sample], 2))), default_collate([sample, sample]))
    if type(sample) is torch.Tensor:
        assert_same(list(DataLoader(torch.arange(3), 2)), [["own", *torch.arange(2)], ["own", torch.tensor(2)]])


def test_the_memory_comes_from_who_asks() -> None:
    given: list[Any] = []

    def empty(shape: Any, dtype: Any) -> Any:
        given.append(np.empty(shape, dtype))
        return given[-1]

    for sample in (
        (np.ones(2), torch.ones(3), 1),
        {"x": np.ones(2), "more": [torch.ones(3), {"y": np.float32(1)}], "name": "a"},
        Pair(np.ones(2), (torch.ones(3), b"a", np.int64(1))),
    ):
        given.clear()
        batch = Collate().assemble([sample] * 2, empty)
        assert type(batch) is TensorBatch
        assert [array.shape for array in given] == [(2, 2), (2, 3)]


class Text:
    """An object whose class makes its part of a batch."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    @staticmethod
    def assemble_samples(samples: list[Text], empty: Any) -> Any:
        memory = empty((len(samples),), np.dtype(np.uint8))
        memory[:] = [len(sample.text) for sample in samples]
        return memory


NESTED: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "in a tuple": lambda value: (value, 1),
    "in a dict beside a text": lambda value: {"name": "n", "value": value},
    "deep": lambda value: {"a": [("x", {"value": value})]},
}


@pytest.mark.parametrize("where", NESTED)
@pytest.mark.parametrize("make", [ShardedDataLoader, DataLoader])
def test_a_class_makes_its_part_of_a_batch(make: Any, where: str) -> None:
    nest = NESTED[where]
    [batch] = make([nest(Text(b"a")), nest(Text(b"bcd"))], batch_size=2)
    [expected] = make([nest(np.uint8(1)), nest(np.uint8(3))], batch_size=2)
    assert_same(batch, expected)


def test_a_batchify_function_of_this_library_gives_tensors() -> None:
    samples = [np.ones(2), np.ones(3)]
    found = Assembled(Pad(-1)).assemble(samples, np.empty)
    assert type(found) is TensorBatch
    assert_same(list(DataLoader(samples, 2, collate_fn=Pad(-1))), [found.to_torch()])
    assert_same(Assembled(Stack())(samples[:1]), torch.ones(1, 2, dtype=torch.float64))


# -- rows of tensors ---------------------------------------------------------------------------------------------------


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(30).reshape(10, 3) % 2).to(dtype)


ROWS: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.arange(30.0).reshape(10, 3),
    "a tensor of numbers": lambda: torch.arange(10),
    "one column": lambda: TensorDataset(torch.arange(30.0).reshape(10, 3)),
    "every dtype": lambda: TensorDataset(*map(rows_of, DTYPES)),
    "a part": lambda: Subset(TensorDataset(torch.arange(30.0).reshape(10, 3), torch.arange(10)), [9, 0, 3, 3, 1, -1]),
    "a part of a part": lambda: Subset(Subset(TensorDataset(torch.arange(10)), range(8)), [7, 0, 2]),
    "with gaps in memory": lambda: TensorDataset(torch.arange(60.0).reshape(10, 6)[:, ::2]),
    "that is learned": lambda: TensorDataset(torch.arange(10.0, requires_grad=True), torch.arange(10)),
    "conjugate": lambda: TensorDataset(torch.arange(10).to(torch.complex64).conj()),
    "none": lambda: torch.zeros(0, 3),
    "columns": lambda: ArrayDataset(
        x=np.arange(30, dtype=np.float32).reshape(10, 3), y=np.arange(10), z=torch.arange(10), t=np.arange(10) % 2 == 0
    ),
    "columns by position": lambda: ArrayDataset(np.arange(10, dtype=np.float16), torch.arange(20).reshape(10, 2)),
    "a column of arrays": lambda: ArrayDataset(np.arange(60, dtype=np.uint8).reshape(10, 6)[:, ::2]),
    "a part of columns": lambda: Subset(ArrayDataset(np.arange(10), np.arange(10.0)).take(9)[1:], [7, 0, 3]),
    "columns of unsigned numbers": lambda: ArrayDataset(np.arange(10, dtype=np.uint16), np.arange(10, dtype=np.uint32)),
    "columns of texts": lambda: ArrayDataset(np.arange(10), [f"text {i}" for i in range(10)]),
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.costly(2))])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_tensors_are_torchs_batches(kind: str, num_workers: int) -> None:
    if kind == "that is learned" and num_workers:
        pytest.skip("torch's workers cannot send it")
    dataset = ROWS[kind]()
    expected = list(torch.utils.data.DataLoader(dataset, 4))
    found = list(DataLoader(dataset, 4, num_workers=num_workers))
    assert_same(found, expected)
    one_by_one = ("that is learned", "conjugate", "columns of unsigned numbers", "columns of texts")
    assert (Collate().bulk_of(dataset) is None) == (kind in one_by_one)


CACHED: dict[str, tuple[Callable[[int], Any], bool]] = {
    "array": (lambda i: np.full((3, 2), i, np.float32), True),
    "image and label": (lambda i: (np.full((2, 2, 3), i, np.uint8), i), True),
    "dict in a tuple": (lambda i: ({"x": torch.full((3,), i), "y": np.int16(i)}, i / 7, i % 2 == 0), True),
    "numbers of NumPy": (lambda i: (np.float32(i), np.bool_(i % 2), np.float64(i), np.array(i)), True),
    "tensor without dimensions": (lambda i: torch.tensor(i * 0.5), True),
    "nothing in it": (lambda i: (np.zeros((0, 3)), i), True),
    "bool": (lambda i: i % 2 == 0, True),
    "complex arrays": (lambda i: np.full(2, i * 1j), True),
    "text": (lambda i: (np.full(2, i), "train"), False),
    "text in a dict": (lambda i: {"x": i, "split": "train"}, False),
    "list": (lambda i: [np.full(2, i), i], False),
    "foreign bytes": (lambda i: np.full(2, i, ">i4"), False),
    "none": (lambda i: (i, None), False),
    "complex": (lambda i: i * 1j, False),
    "no dtype of torch's": (lambda i: np.full(2, i, "U3"), False),
    "bfloat16": (lambda i: torch.full((2,), i, dtype=torch.bfloat16), False),
    "other shapes": (lambda i: np.zeros(1 + i // 9), True),
}
"""Samples, and whether there is a way to read them at once."""


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.costly(2))])
@pytest.mark.parametrize("kind", CACHED)
def test_what_is_cached_is_torchs_batches(kind: str, num_workers: int) -> None:
    make, at_once = CACHED[kind]
    plain = SimpleDataset(range(12)).transform(make)
    for part in (lambda one: one, lambda one: Subset(one, [5, 1, 11, 3]), lambda one: one.take(9)[2:]):
        cached = part(plain.cache("1 MB"))
        assert (Collate().bulk_of(cached) is not None) == at_once
        loader = DataLoader(cached, 4, num_workers=num_workers, persistent_workers=num_workers > 0)
        expected, error = outcome(lambda part=part: list(TORCHS(part(plain), 4)))  # type: ignore[misc]
        for _ in range(2):
            found, ours = outcome(lambda loader=loader: list(loader))  # type: ignore[misc]
            assert type(ours) is type(error), ours
            if error is None:
                assert_same(found, expected)


def cached_rows() -> Any:
    cached = SimpleDataset(range(8)).transform(CACHED["image and label"][0]).cache("1 MB")
    list(DataLoader(cached, 4))
    return cached


def columns_of_rows() -> Any:
    return ArrayDataset(np.arange(8), np.arange(8))


@pytest.mark.parametrize(
    "make", [cached_rows, columns_of_rows, lambda: TensorDataset(torch.arange(8), torch.arange(8))]
)
def test_rows_are_read_at_once_unless_the_dataset_changes_them(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make()

    class Twice(type(dataset)):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * column for column in super().__getitem__(index))

        __getitems__ = None

    twice = copy.copy(dataset)
    twice.__class__ = Twice
    assert next(iter(DataLoader(twice, 4)))[1].tolist() == [0, 2, 4, 6]
    for name in ("__getitem__", "__getitems__"):
        monkeypatch.setattr(type(dataset), name, None, raising=False)
    [batch] = DataLoader(Subset(dataset, [3, 1]), 4)
    assert batch[1].tolist() == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_index_that_is_no_row_is_named(num_workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), sampler=[1, 2, 10], batch_size=3, num_workers=num_workers)
    with pytest.raises(IndexError, match="10") as error:
        next(iter(loader))
    assert "batch 0, sample 10" in "".join(getattr(error.value, "__notes__", []))


class Of:
    """A batch as one object, with a truth of its own, as tensordict's."""

    def __init__(self, indices: list[int]) -> None:
        self.numbers = torch.tensor(indices)

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("it is no list")


class Whole(Reads):
    """Its ``__getitems__`` gives the batch in a form of its own."""

    def __init__(self, form: str) -> None:
        super().__init__(int, 8)
        self.form = form

    def __getitems__(self, indices: list[int]) -> Any:
        return FORMS[self.form](indices)


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "object": Of,
    "dict of columns": lambda indices: {"x": torch.tensor(indices)},
    "tensor": torch.tensor,
    "array": np.array,
    "tuple": tuple,
    "generator": iter,
    "fewer": lambda indices: indices[:-1],
    "None": lambda indices: None,
}


def with_type(batch: Any) -> Any:
    numbers = batch.numbers if type(batch) is Of else batch
    return type(batch).__name__, str(list(numbers) if hasattr(numbers, "__next__") else numbers)


@covering(
    form=FORMS,
    part=(lambda d: d, lambda d: Subset(d, range(6)), lambda d: SimpleDataset(d).take(6)),
    options=({}, {"num_workers": 1}, {"num_workers": 1, "thread_pool": True}, {"on_error": "skip"}),
)
def test_what_getitems_returns_is_what_collate_fn_gets(form: str, part: Any, options: dict[str, Any]) -> None:
    wanted = list(
        torch.utils.data.DataLoader(Subset(Whole(form), range(len(part(Whole(form))))), 4, collate_fn=with_type)
    )
    assert list(DataLoader(part(Whole(form)), 4, collate_fn=with_type, **options)) == wanted
    assert list(ShardedDataLoader(part(Whole(form)), 4, batchify_fn=with_type, **options)) == wanted


def test_each_shard_gets_an_object_of_its_own() -> None:
    loader = ShardedDataLoader(Whole("object"), 4, num_shards=2, batchify_fn=with_type)
    assert next(iter(loader)) == [("Of", "tensor([0, 1])"), ("Of", "tensor([2, 3])")]
