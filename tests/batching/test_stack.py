"""Many values become one array or tensor: dtypes, memory that was given, and shapes that do not fit."""

from unittest import mock

import numpy as np
import pytest
import torch
from calls import calls_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sharded_loader.batchify import default_batchify_fn
from sharded_loader.batching import default
from sharded_loader.batching.default import COPIED_AT_ONCE, COPIED_BYTES, JOINED_BYTES
from sharded_loader.batching.tree import as_numpy, empty_tensor, is_plain


@pytest.mark.parametrize(
    ("samples", "dtype", "values"),
    [
        ([1, 2], "int64", [1, 2]),
        ([1.0, 2], "float64", [1.0, 2.0]),
        ([True, 2], "int64", [1, 2]),
        ([1j, 2], "complex128", [1j, 2 + 0j]),
        ([2**63, 1], "uint64", [2**63, 1]),
        ([[2**63, 1], [0, 2]], "uint64", [[2**63, 1], [0, 2]]),
        ([np.float32(1), np.float32(2)], "float32", [1.0, 2.0]),
        ([np.int8(1), np.int8(2)], "int8", [1, 2]),
        ([[1, 2.5], [3, 4]], "float64", [[1.0, 2.5], [3.0, 4.0]]),
        ([[[1], [2]], [[3], [4]]], "int64", [[[1], [2]], [[3], [4]]]),
        ([[(1, 2)], [(3, 4)]], "int64", [[[1, 2]], [[3, 4]]]),
        ([[], []], "float64", [[], []]),
        ([torch.tensor(1.5), np.array(2.0)], "float64", [1.5, 2.0]),
        ([np.zeros(1, ">f4"), np.ones(1, ">f4")], "float32", [[0.0], [1.0]]),
    ],
)
def test_numbers_get_the_dtype_that_holds_them(samples, dtype, values):
    batch = default_batchify_fn(samples)
    assert str(batch.dtype) == f"torch.{dtype}"
    assert batch.tolist() == values


@given(
    npst.arrays(
        npst.scalar_dtypes().filter(lambda d: d.kind in "biufc" and d.itemsize <= 16 and d.char not in "gG"),
        npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
    )
)
def test_stacking_rows_gives_the_array_back(array):
    if len(array) == 0:
        return
    samples = [np.array(row) for row in array]
    stacked = default_batchify_fn.assemble(samples, np.empty)
    np.testing.assert_array_equal(stacked, array)
    assert stacked.dtype == array.dtype.newbyteorder("=")


# -- memory that is new, and memory that was given: the same batch, and the same errors -------------------------------


def given_memory(shape, dtype):
    """As a slot: not `numpy.empty` itself."""
    return np.empty(shape, dtype)


def outcome(samples, empty):
    try:
        return default_batchify_fn.assemble(samples, empty)
    except ValueError as error:
        return str(error)


def check_alike(samples):
    """New memory, and given memory that is written with joining, get what given memory gets without."""
    with mock.patch.object(default, "JOINED_BYTES", 0):
        given = outcome(samples, given_memory)
    for new in outcome(samples, np.empty), outcome(samples, given_memory):
        if isinstance(given, str):
            assert new == given
            continue
        assert (new.dtype, new.shape, type(new)) == (given.dtype, given.shape, np.ndarray) and type(given) is np.ndarray
        np.testing.assert_array_equal(new, given)
        assert new.flags.writeable and new.flags.c_contiguous
        assert not any(np.shares_memory(new, sample) for sample in samples if isinstance(sample, np.ndarray))


ROW = np.arange(12, dtype=np.int16).reshape(3, 4)
ODD = {
    "alike": [ROW, ROW + 1],
    "another dtype": [ROW, ROW.astype(np.int32)],
    "another dtype of the same size": [ROW, ROW.view(np.uint16)],
    "another byte order": [ROW, ROW.astype(">i2")],
    "all of the other byte order": [ROW.astype(">i2"), ROW.astype(">i2")],
    "another shape of the same size": [ROW, ROW.reshape(4, 3)],
    "another number of axes": [ROW, ROW.reshape(12)],
    "another size": [ROW, ROW[:2]],
    "a column": [ROW.reshape(12), ROW.reshape(12, 1)],
    "transposed": [ROW.T, ROW.T],
    "transposed, the second one": [ROW, np.asfortranarray(ROW)],
    "gaps": [ROW[:, ::2], ROW[:, ::2]],
    "backwards": [ROW[::-1], ROW],
    "repeated": [np.broadcast_to(ROW[:1], (3, 4)), ROW],
    "read-only": [np.frombuffer(ROW.tobytes(), np.int16).reshape(3, 4), ROW],
    "no axes": [ROW[0, 0:1].reshape(()), np.array(7, np.int16)],
    "no axes, and one": [np.array(7, np.int16), np.array([7], np.int16)],
    "empty": [ROW[:0], ROW[:0]],
    "empty, another shape": [ROW[:0], ROW[:, :0]],
    "a subclass": [ROW.view(np.matrix), ROW],
    "a subclass of recarray": [ROW.view(np.recarray), ROW],
    "dates": [np.array(["2020-01-01"], "M8[D]"), np.array(["2021-01-01"], "M8[D]")],
    "dates of another unit": [np.array(["2020-01-01"], "M8[D]"), np.array(["2021-01-01"], "M8[s]")],
    "structures": [np.zeros(2, [("x", "i4"), ("y", "f8")]), np.ones(2, [("x", "i4"), ("y", "f8")])],
    "strings": [np.array(["a", "bc"]), np.array(["d", "ef"])],
    "strings of another width": [np.array(["a", "bc"]), np.array(["def", "g"])],
    "objects": [np.array([1, "x"], object), np.array([2, "y"], object)],
    "bool": [ROW > 3, ROW > 5],
    "complex": [ROW + 1j, ROW - 1j],
    "long double": [ROW.astype("g"), ROW.astype("g")],
    "an int beside an array": [ROW[0], [1, 2, 3, 4]],
    "a masked array": [np.ma.masked_array([1, 2], [True, False]), np.array([1, 2])],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("first", [0, 1])
def test_new_and_given_memory_get_the_same_batch_or_the_same_error(odd, first):
    check_alike([*ODD[odd][first:], *ODD[odd][:first]])
    check_alike([*ODD[odd][:1] * 20, *ODD[odd][first:]])


@given(st.data())
def test_arrays_of_any_kind_get_the_same_in_both(data):
    shapes = st.sampled_from([(), (0,), (3,), (3, 1), (1, 3), (2, 3), (3, 2)])
    dtypes = st.sampled_from(["u1", "i1", "i8", ">i8", "f4", "f2", "c8", "?"])
    turned = st.sampled_from([lambda a: a, lambda a: a.T, lambda a: a[..., ::-1] if a.ndim else a, np.asfortranarray])
    one = st.builds(lambda shape, dtype, turn: turn(np.ones(shape, dtype)), shapes, dtypes, turned)
    alike = st.builds(lambda array, count: [array] * count, one, st.integers(1, 5))
    check_alike(data.draw(st.lists(one, min_size=1, max_size=5) | alike))


@pytest.mark.parametrize("nbytes", [1, 100, COPIED_BYTES, COPIED_BYTES + 1, JOINED_BYTES, JOINED_BYTES + 1])
def test_samples_of_any_size_are_stacked_alike(nbytes):
    samples = [np.full(nbytes, number, np.uint8) for number in range(40)]
    check_alike(samples)
    names = calls_of(lambda: default_batchify_fn.assemble(samples, np.empty))
    assert ("join" in names) == (nbytes <= JOINED_BYTES)  # the fast path is noticed if it is lost
    names = calls_of(lambda: default_batchify_fn.assemble(samples, given_memory))
    assert ("join" in names) == (nbytes <= COPIED_BYTES)


def test_large_batches_are_not_copied_a_second_time_and_rows_whose_sizes_add_up_by_chance_are_ragged():
    for more, joins in ((0, True), (1, False)):
        samples = [np.zeros(COPIED_BYTES, np.uint8)] * (COPIED_AT_ONCE // COPIED_BYTES + more)
        assert ("join" in calls_of(lambda: default_batchify_fn.assemble(samples, given_memory))) == joins  # noqa: B023
    for shapes in ([2, 1, 3], [(2, 3), (2, 4)], [(2,), ()]):
        with pytest.raises(ValueError, match="different shapes"):
            default_batchify_fn([np.zeros(shape) for shape in shapes])


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_tensors_keep_their_dtype_in_memory_that_was_given(dtype, shape):
    given = []

    def empty(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    tensors = [torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)]
    batch = default_batchify_fn(tensors)
    assert batch.dtype == dtype and batch.float().tolist() == torch.stack([t.float() for t in tensors]).tolist()
    result = default_batchify_fn.assemble(tensors, empty)
    pointer = result.data_ptr() if isinstance(result, torch.Tensor) else result.ctypes.data
    assert len(given) == 1 and (pointer == given[0].ctypes.data or not given[0].size)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_tensors_of_odd_kinds_stack_or_are_refused_with_advice():
    sparse, labelled = torch.eye(2).to_sparse(), torch.ones(2).as_subclass(type("Labelled", (torch.Tensor,), {}))
    assert default_batchify_fn([sparse, sparse]).is_sparse
    assert type(default_batchify_fn([labelled, labelled])) is type(labelled)
    meta = torch.zeros(2, device="meta")
    assert default_batchify_fn([meta, meta]).shape == (2, 2)
    for sample in (torch.nested.nested_tensor([torch.ones(2)]), torch.eye(3).to_sparse_csr()):
        with pytest.raises(ValueError, match="List"):
            default_batchify_fn([sample, sample])
    with pytest.raises(ValueError, match=r"\(2,\) \(sample 0 of the batch\), \(3,\) \(sample 1 of the batch\)"):
        default_batchify_fn([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize("switch", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_that_requires_grad_is_an_error_whatever_autograd_does(switch, place):
    tensors = [torch.ones(2), torch.ones(2)]
    tensors[place] = torch.ones(2, requires_grad=True)
    with switch(), pytest.raises(ValueError, match=rf"requires grad \(sample {place} of the batch\).*detach"):
        default_batchify_fn.assemble(tensors, np.empty)
    with switch():
        assert default_batchify_fn.assemble([one.detach() for one in tensors], np.empty).tolist() == [[1, 1], [1, 1]]


MIXED = {
    "dtypes": [torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.float64)],
    "conjugates": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])],
    "negatives": [torch.tensor([1 + 2j]).conj().imag, torch.tensor([3.0])],
    "transposed": [torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(3, 2)],
    "repeated": [torch.ones(1).expand(4), torch.zeros(4)],
    "numbers": [torch.tensor(1.5), torch.tensor(2.5)],
}


@pytest.mark.parametrize("what", MIXED)
def test_tensors_of_any_kind_stack_as_torch_stacks_them(what):
    tensors = MIXED[what]
    joint = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    wanted = torch.stack([one.to(joint) for one in tensors])
    found = default_batchify_fn(tensors)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_and_an_array_over_the_same_memory(dtype):
    array, tensor = empty_tensor((3, 2), dtype, np.empty)
    tensor.fill_(1)
    assert is_plain([tensor]) and tensor.shape == (3, 2) and tensor.dtype == dtype
    assert (array is None) == (dtype is torch.bfloat16)
    if array is not None:
        assert (array == 1).all() and np.shares_memory(array, as_numpy(tensor))
