"""Tensors become one array or tensor in the memory that was given, or an error that says what to do."""

import numpy as np
import pytest
import torch

from sharded_loader.batchify import default_batchify_fn
from sharded_loader.batching.tree import as_numpy, empty_tensor, is_plain


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
