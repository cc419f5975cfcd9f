"""What travels between the main process and a worker arrives as it was sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharded_loader.engine.messages import (
    NOTHING,
    Result,
    pack_reply,
    pack_result,
    unpack_reply,
)
from sharded_loader.memory.codec import SlotWriter, decode, encode
from sharded_loader.pools.supervised import decode_result


@pytest.mark.parametrize("batch", [np.arange(6).reshape(2, 3), [np.arange(2), np.ones(2, "f4")]], ids=["one", "two"])
def test_results_of_plain_arrays_travel_without_their_classes(batch: Any) -> None:
    encoded = pack_result(Result(1, 2, batch, 2, seconds=0.5), SlotWriter(None))
    assert encoded is not None
    got = decode_result(1, 2, memoryview(encoded.head), list(encoded.buffers), None)
    assert (got.run, got.seq, got.samples, got.seconds, got.error) == (1, 2, 2, 0.5, None)
    np.testing.assert_equal(got.batch, batch)


@pytest.mark.parametrize(
    "result",
    [
        Result(0, 0, np.ones(2), error=ValueError()),
        Result(0, 0, np.ones(2), skipped=((1, ValueError()),)),
        Result(0, 0, np.ones(2), lost_shards=(1,)),
        Result(0, 0, {"x": np.ones(2)}),
        Result(0, 0, [np.ones(2), 1]),
        Result(0, 0, [np.ones(5000)] * 2),
    ],
    ids=["error", "skipped", "lost", "dict", "number", "one array twice"],
)
def test_other_results_do_not(result: Result) -> None:
    assert pack_result(result, SlotWriter(None)) is None


def test_several_replies_lie_one_behind_the_other() -> None:
    rest = memoryview(pack_reply(1, 2, 30, encode("a")) + pack_reply(4, 5, 60, encode("b")))
    found = []
    while len(rest):
        run, seq, wanted, buffers, pickled, rest, _ = unpack_reply(rest)
        found.append((run, seq, wanted, buffers, decode(pickled, [])))
    assert found == [(1, 2, 30, 0, "a"), (4, 5, 60, 0, "b")]


def test_nothing_is_itself_in_every_process() -> None:
    assert decode(encode(NOTHING).head, []) is NOTHING
