"""Where messages of an Arrow file lie, and which of them a record batch needs."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from sharded_loader.storage.tables import BATCH, DICTIONARY, SCHEMA, check_layout, check_nulls, messages, needed


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"nonsense" * 20, b"\xff" * 4 + b"\0" * 4, b"ARROW1" * 20])
def test_what_is_no_arrow_file_is_an_error_with_a_place(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"byte \d+"):
        messages(io.BytesIO(content), len(content))


def test_a_batch_needs_the_schema_and_its_dictionaries() -> None:
    rows = [(SCHEMA, 0, 1, 0, 0)]
    rows += [(DICTIONARY, 1, 2, 7, 0), (DICTIONARY, 2, 3, 8, 0), (BATCH, 3, 4, 5, 0)]
    rows += [(DICTIONARY, 4, 5, 7, 1), (DICTIONARY, 5, 6, 8, 0), (BATCH, 6, 7, 5, 0)]  # one grows, one is replaced
    found = np.array(rows, np.int64)
    assert needed(found, 0)[:, 1].tolist() == [0, 1, 2, 3]
    assert needed(found, 1)[:, 1].tolist() == [0, 1, 4, 5, 6]


def stream() -> tuple[Any, bytes]:
    pyarrow = pytest.importorskip("pyarrow")
    sink, batch = io.BytesIO(), pyarrow.record_batch({"x": list(range(20)), "s": ["a"] * 20})
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch[:7])
    return batch, sink.getvalue()


def test_messages_are_found_with_their_rows() -> None:
    _, content = stream()
    found = messages(io.BytesIO(content), len(content))
    assert found[:, 0].tolist() == [SCHEMA, BATCH, BATCH] and found[1:, 3].tolist() == [20, 7]
    assert found[1:, 1].tolist() == found[:-1, 2].tolist() and found[-1, 2] == len(content) - 8
    with pytest.raises(ValueError, match=f"no whole message at byte {found[-1, 2]}"):
        messages(io.BytesIO(content[:-8]), len(content) - 8)


def test_a_buffer_in_another_place_is_an_error() -> None:
    _, content = stream()
    begin, end = messages(io.BytesIO(content), len(content))[1, 1:3].tolist()
    whole = content[begin:end]
    check_layout(whole)
    place = whole.index(np.array([0, 160], "<i8").tobytes())  # the buffer of x
    for position, value in ((place, 64), (place + 8, 8), (place + 8, 1 << 40)):
        damaged = bytearray(whole)
        damaged[position : position + 8] = np.array(value, "<i8").tobytes()
        with pytest.raises(ValueError, match="end to end"):
            check_layout(bytes(damaged))


def test_a_count_of_nulls_that_damage_has_made_0_is_an_error() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    columns = {"n": list(range(20)), "x": [None, *range(19)], "s": [*"ab" * 9, None, "c"], "l": [[1, None]] * 20}
    batch = pyarrow.record_batch(columns)
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()
    schema, (begin, end) = (
        content[: messages(io.BytesIO(content), len(content))[0, 2]],
        messages(io.BytesIO(content), len(content))[1, 1:3].tolist(),
    )
    whole = content[begin:end]
    check_nulls(whole, batch.columns)
    counts = [at for at in range(len(whole) - 16) if whole[at : at + 16] == np.array([20, 1], "<i8").tobytes()]
    assert len(counts) == 2
    for at in counts:
        damaged = whole[: at + 8] + bytes(8) + whole[at + 16 :]
        read = pyarrow.ipc.open_stream(schema + damaged).read_next_batch()
        read.validate(full=True)  # pyarrow sees nothing
        with pytest.raises(ValueError, match="no nulls, but it has some"):
            check_nulls(damaged, read.columns)
