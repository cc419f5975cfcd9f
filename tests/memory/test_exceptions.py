"""An exception arrives as itself, with what it carries; where it cannot, its text arrives. Nothing here raises."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from failures import TwoArguments

from sharded_loader.base.errors import SampleReadError, WorkerTraceback, add_note, notes_of
from sharded_loader.memory.codec import EncodedError, decode_error, encode_error


class OwnNew(Exception):
    def __new__(cls, *, code: int) -> OwnNew:
        error = super().__new__(cls)
        error.code = code  # type: ignore[attr-defined]
        return error

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Nasty(Exception):
    """Every method of it raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        sys.exit(1)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        self.kept = "kept"


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def through(error: BaseException) -> BaseException:
    encoded = encode_error(raised(error))
    return decode_error(pickle.loads(pickle.dumps(encoded)))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 3),
        KeyError("k"),
        FileNotFoundError(2, "No such file", "name.txt"),
        UnicodeDecodeError("utf-8", b"abc\xff", 3, 4, "invalid"),
        TwoArguments(1, 2),
        StopIteration(5),
        SystemExit(3),
        ExceptionGroup("several", [ValueError(1)]) if sys.version_info >= (3, 11) else ValueError(1),  # noqa: F821
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_as_itself(error: BaseException) -> None:
    got = through(error)
    assert type(got) is type(error)
    assert (str(got), [repr(arg) for arg in got.args]) == (str(error), [repr(arg) for arg in error.args])
    assert vars(got) == vars(error)


def test_one_whose_new_takes_arguments_of_its_own_arrives() -> None:
    got = through(OwnNew(code=7))
    assert type(got) is OwnNew and got.code == 7  # type: ignore[attr-defined]


def test_what_cannot_be_pickled_stays_behind_alone() -> None:
    got = through(HoldsLock("text"))
    assert type(got) is HoldsLock
    assert (str(got), got.kept, hasattr(got, "lock")) == ("text", "kept", False)


def test_where_it_cannot_arrive_its_text_does() -> None:
    error = type("Local", (Exception,), {"__module__": "nowhere"})("text")
    encoded = encode_error(raised(error))
    del error
    gc.collect()
    got = decode_error(encoded)
    assert isinstance(got, SampleReadError) and str(got) == "Local: text"


def test_one_whose_methods_all_raise_does_no_harm() -> None:
    got = through(Nasty("x"))
    assert type(got) is Nasty or isinstance(got, SampleReadError)


def test_the_worker_s_traceback_and_the_notes_travel() -> None:
    error = raised(ValueError("x"))
    add_note(error, "a note")  # type: ignore[arg-type]
    got = through(error)
    assert isinstance(got.__cause__, WorkerTraceback) and "in raised" in str(got.__cause__)
    assert notes_of(got) == ["a note"]


def test_cuda_in_a_forked_worker_comes_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="re-initialize CUDA") as caught:
        torch.cuda._lazy_init()  # torch's own words, without a GPU
    arrived = decode_error(encode_error(caught.value))
    assert type(arrived) is RuntimeError and str(arrived) == str(caught.value)
    (note,) = arrived.__notes__
    assert "give the loader device=" in note and 'start_method="spawn"' in note


def test_a_large_array_in_an_exception_arrives() -> None:
    got = through(ValueError(np.arange(100_000)))
    assert int(got.args[0].sum()) == sum(range(100_000))


def test_a_payload_that_cannot_be_read_here_is_the_text() -> None:
    got = decode_error(EncodedError(b"no pickle", "KeyError: 'k'", "Traceback: there", ("note",)))
    assert isinstance(got, SampleReadError) and str(got) == "KeyError: 'k'" and notes_of(got) == ["note"]
