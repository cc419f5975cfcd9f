"""Many values become one array: dtypes, memory that was given, and shapes that do not fit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as npst

from sharded_loader.batchify import default_batchify_fn


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


class Labelled(torch.Tensor):
    pass


def test_views_and_subclasses_of_tensors_stack():
    base = torch.arange(6).reshape(2, 3).t()
    assert default_batchify_fn([base, base]).tolist() == [base.tolist()] * 2
    sparse = torch.eye(2).to_sparse()
    assert default_batchify_fn([sparse, sparse]).is_sparse
    labelled = torch.ones(2).as_subclass(Labelled)
    assert type(default_batchify_fn([labelled, labelled])) is Labelled


@pytest.mark.slow  # torch imports for seconds
def test_tensors_on_a_device_stack_there():
    meta = torch.zeros(2, device="meta")
    assert default_batchify_fn([meta, meta]).shape == (2, 2)


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


def test_rows_whose_sizes_add_up_by_chance_are_still_ragged():
    with pytest.raises(ValueError, match=r"\(2,\).*\(1,\).*\(3,\)"):
        default_batchify_fn([np.zeros(2), np.zeros(1), np.zeros(3)])
    with pytest.raises(ValueError, match="different shapes"):
        default_batchify_fn([np.zeros((2, 3)), np.zeros((2, 4))])
    with pytest.raises(ValueError, match="different shapes"):
        default_batchify_fn([np.zeros((2,)), np.zeros(())])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_nested_and_compressed_sparse_tensors_are_refused_with_advice():
    for sample in (torch.nested.nested_tensor([torch.ones(2)]), torch.eye(3).to_sparse_csr()):
        with pytest.raises(ValueError, match="List"):
            default_batchify_fn([sample, sample])
