"""`Pad`: every value is kept, the rest is filled."""

import numpy as np
import pytest
import torch
from calls import calls_of
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader.batchify import Pad
from sharded_loader.batching.stack import COPIED_AT_ONCE, JOINED_BYTES


@given(st.lists(st.lists(st.integers(-(2**31), 2**31), max_size=9), min_size=1, max_size=6), st.integers(1, 8))
def test_pad_keeps_every_value_and_fills_the_rest(lists, round_to):
    padded, lengths = Pad(pad_val=-1, ret_length=True, dtype="int64", round_to=round_to)(lists)
    assert padded.shape[1] % round_to == 0 and padded.shape[1] - max(map(len, lists)) < round_to
    assert lengths.dtype == torch.int32 and lengths.tolist() == [len(x) for x in lists]
    for row, original in zip(padded.tolist(), lists, strict=True):
        assert row == original + [-1] * (len(row) - len(original))


def test_pad_of_integer_lists_is_int64_and_never_warns(recwarn):
    assert Pad()([[1, 2], [3], []]).dtype == torch.int64
    assert not recwarn.list


def test_pad_of_large_rows_is_the_same_as_of_small_ones():
    long = [np.arange(n, dtype=np.float64) for n in (5000, 3000)]
    padded = Pad(pad_val=7)(long)
    assert padded[1, :3000].tolist() == long[1].tolist() and set(padded[1, 3000:].tolist()) == {7.0}


def test_pad_takes_tensors_of_every_dtype():
    rows = [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16)]
    padded, lengths = Pad(axis=-1, ret_length=True)(rows)
    assert (
        padded.dtype == torch.bfloat16 and padded[1].tolist() == [[1, 0, 0], [1, 0, 0]] and lengths.tolist() == [3, 1]
    )
    assert Pad(axis=1, dtype="float32")(rows).dtype == torch.float32
    assert Pad()([torch.ones(2), torch.ones(1)]).tolist() == [[1, 1], [1, 0]]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=5),
    st.sampled_from([None, 4]),
)
def test_pad_of_every_axis_keeps_every_value_and_fills_the_rest(shapes, round_to):
    arrays = [np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    longest = [max(lengths) for lengths in zip(*shapes, strict=True)]
    wanted = [length if round_to is None else -(-length // round_to) * round_to for length in longest]
    fn = Pad(axis=None, pad_val=-1, ret_length=True, round_to=round_to)
    for samples in (arrays, [torch.from_numpy(a).bfloat16() for a in arrays]):
        batch, lengths = fn(samples)
        assert list(batch.shape) == [len(shapes), *wanted]
        assert lengths.dtype == torch.int32 and lengths.tolist() == [list(shape) for shape in shapes]
        for row, array in zip(batch.float().numpy(), arrays, strict=True):
            corner = tuple(map(slice, array.shape))
            assert (row[corner] == array).all()
            assert (row == -1).sum() == row.size - array.size


def test_pad_of_every_axis_refuses_other_numbers_of_axes():
    with pytest.raises(ValueError, match=r"Pad\(axis=None\) pads samples of the same number of axes"):
        Pad(axis=None)([[1], [[1]]])
    with pytest.raises(ValueError, match="no axis to pad: use Stack"):
        Pad(axis=None)([1, 2])
    with pytest.raises(ValueError, match=r"along every axis with Pad\(axis=None\)"):
        Pad()([np.zeros((2, 3)), np.zeros((3, 2))])


# -- rows joined as bytes, and rows written one by one -------------------------------------------------------------

ROWS = {
    "int64": lambda n: np.arange(n),
    "float16": lambda n: np.arange(n, dtype=np.float16),
    "bool": lambda n: np.arange(n) % 2 == 0,
    "complex64": lambda n: np.arange(n, dtype=np.complex64),
    "long double": lambda n: np.arange(n, dtype="g"),
    "big-endian": lambda n: np.arange(n, dtype=">i4"),
    "with gaps": lambda n: np.arange(2 * n)[::2],
    "backwards": lambda n: np.arange(n)[::-1],
    "read-only": lambda n: np.frombuffer(np.arange(n).tobytes(), np.int64) if n else np.zeros(0, np.int64),
    "mixed": lambda n: np.arange(n, dtype=(np.int32, np.int64)[n % 2]),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("lengths", [[3, 1, 0, 5], [4, 4], [0, 0], [0], [700, 5, 2999]])
@pytest.mark.parametrize("round_to", [None, 8])
def test_rows_of_any_kind_are_padded_alike_in_new_and_in_given_memory(kind, lengths, round_to):
    rows = [ROWS[kind](length) for length in lengths]
    fn = Pad(pad_val=1, round_to=round_to)
    wanted = np.ones((len(rows), -(-max(lengths) // (round_to or 1)) * (round_to or 1)), np.result_type(*rows))
    for row, values in zip(wanted, rows, strict=True):
        row[: len(values)] = values
    for empty in (np.empty, lambda shape, dtype: np.empty(shape, dtype)):
        found = fn.assemble(rows, empty)
        assert found.dtype == wanted.dtype.newbyteorder("=") and found.flags.writeable and found.flags.c_contiguous
        np.testing.assert_array_equal(found, wanted)


def test_short_rows_of_one_dtype_are_joined():
    def functions(length, dtype=None):
        rows = [np.arange(length), np.arange(3)]
        return calls_of(lambda: Pad(dtype=dtype).assemble(rows, np.empty))

    assert "_write" not in functions(100)
    assert "_write" in functions(100, "int32") and "_write" in functions(JOINED_BYTES)


@pytest.mark.parametrize(("more", "joins"), [(0, True), (1, False)])
def test_large_batches_are_not_copied_a_second_time_into_given_memory(more, joins):
    rows = [np.zeros(1024, np.uint8)] * (COPIED_AT_ONCE // 1024 + more)
    calls = calls_of(lambda: Pad().assemble(rows, lambda shape, dtype: np.empty(shape, dtype)))
    assert ("_write" not in calls) == joins
