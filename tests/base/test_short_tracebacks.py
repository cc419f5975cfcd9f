"""Tracebacks show the user's frames, once."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from samples import Drawing, DrawingInItems

import sharded_loader.torch
from sharded_loader import ShardedDataLoader
from sharded_loader.base.errors import shorten


class OneByOne(Drawing):
    def read(self, index: int, rng: Any) -> Any:
        return self.parse(index)

    def parse(self, index: int) -> int:
        if index == 3:
            raise ValueError(f"sample {index} is bad")
        return index


class InBulk(OneByOne, DrawingInItems):
    pass


def told(made: Any, dataset: Any, **how: Any) -> str:
    loader = made(dataset, 4, **how)
    with pytest.raises(ValueError, match="sample 3 is bad") as caught:
        list(loader)
    return "".join(traceback.format_exception(caught.value))


LOADERS = [ShardedDataLoader, sharded_loader.torch.DataLoader]


@pytest.mark.costly
@pytest.mark.parametrize("dataset", [OneByOne(), InBulk()], ids=["one by one", "in bulk"])
@pytest.mark.parametrize("how", [{}, {"thread_pool": True}, {"num_workers": 1}], ids=["inline", "threads", "processes"])
@pytest.mark.parametrize("made", LOADERS, ids=["ours", "torch's"])
def test_a_traceback_leads_from_the_loop_to_the_line_of_the_user(made: Any, how: Any, dataset: Any) -> None:
    if how:
        how = {"num_workers": 1, **how}
    text = told(made, dataset, **how)
    assert text.count("in parse") == 1 and "During handling" not in text
    assert "reader.py" not in text and "arrays.py" not in text


def test_with_the_environment_variable_all_frames_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDED_LOADER_FULL_TRACEBACKS", "1")
    for how in ({}, {"num_workers": 1}):
        assert "reader.py" in told(ShardedDataLoader, OneByOne(), **how)


def test_causes_are_shortened_and_an_error_of_the_library_keeps_its_last_frame() -> None:
    with pytest.raises(ValueError, match="could not parse") as caught:
        try:
            ShardedDataLoader(3, 2)
        except TypeError as error:
            raise ValueError("could not parse") from error
    cause = caught.value.__cause__
    assert cause is not None and len(traceback.extract_tb(cause.__traceback__)) > 1
    shorten(caught.value)
    assert [one.filename for one in traceback.extract_tb(cause.__traceback__)] == [__file__]
    with pytest.raises(RuntimeError, match="closed") as of_library:
        loader = ShardedDataLoader(range(4), 2)
        loader.close()
        iter(loader)
    of_library.value.__traceback__ = of_library.value.__traceback__.tb_next  # type: ignore[union-attr]
    shorten(of_library.value)
    assert len(traceback.extract_tb(of_library.value.__traceback__)) == 1
