"""What an error says: where it happened, how to see it again, and what stands in for one that must not pass."""

import signal
import sys
import traceback

import numpy as np
import pytest
from failures import Frozen
from samples import Drawing, DrawingInItems

import sharded_loader.torch
from sharded_loader import ShardedDataLoader
from sharded_loader.base import errors

HERE = errors.Location(epoch=1, batch=2, shard=3, worker="worker 4 (pid 5)")


class Exits(Exception):
    """Its text cannot be had."""

    def __str__(self):
        sys.exit(3)


AGAIN, BOTH = "see it again, in this process", "[loader.read(i, epoch=1) for i in (7, 9)]"
NO_SINGLE = f"{AGAIN}, which may hang too (it was no single sample that failed): {BOTH}"


@pytest.mark.parametrize(
    ("arguments", "place", "again"),
    [
        ({"sample": [7]}, ", sample 7", [f"{AGAIN}: loader.read(7, epoch=1)"]),
        ({"uncollatable": (7, 9)}, ", sample 9 (it does not fit sample 7)", [f"{AGAIN}: {BOTH}"]),
        ({"samples": np.array([7, 9]), "but": ", which may hang too"}, "", [NO_SINGLE]),
        ({}, "", []),
    ],
)
def test_an_error_says_where_it_was_and_how_to_see_it_again(arguments, place, again):
    for error in (ValueError("bad"), Frozen(3)):
        errors.add_note(error, "the user's own")
        errors.Location(0, 0).note(error, [1])  # where the same object was raised before
        HERE.note(error, **arguments)
        where = f"sharded_loader: in epoch 1, batch 2, shard 3{place}, worker 4 (pid 5)"
        assert errors.notes_of(error) == ["the user's own", where, *again]


def test_places_are_named_in_part_and_what_a_handler_raises_is_no_error_of_a_batch():
    error = ValueError()
    errors.Location(0, 5).note(error, ["a"])
    assert errors.notes_of(error)[0] == "sharded_loader: in epoch 0, batch 5, sample 'a'"
    assert errors.read_again(range(9), 0) == (
        "[loader.read(i, epoch=0) for i in (0, 1, 2, 3, 4, 5, 6, 7)]  # the first 8, 9 in all"
    )
    with pytest.raises(KeyboardInterrupt):
        errors.as_batch_error(KeyboardInterrupt(), "by the sampler")
    assert isinstance(errors.as_batch_error(StopIteration(), "by the sampler"), errors.SampleReadError)


@pytest.mark.parametrize("ends", [StopIteration("x"), StopAsyncIteration("x"), SystemExit("x"), GeneratorExit("x")])
def test_what_would_end_a_loop_or_the_program_has_a_stand_in(ends):
    stand_in = errors.as_exception(ends, "by the dataset")
    assert isinstance(stand_in, errors.SampleReadError) and stand_in.__cause__ is ends
    assert f"{type(ends).__name__} (x) raised by the dataset, which would end the loop in silence" in str(stand_in)
    error = ValueError()
    assert errors.as_exception(error, "by the dataset") is error


def test_a_traceback_becomes_text_without_the_notes_and_what_is_no_note_is_left_alone():
    for error in (ValueError("bad"), Frozen(3), Exits()):
        try:
            raise error
        except Exception as caught:
            errors.add_note(caught, "a note")
            text = errors.format_traceback(caught)
        assert "test_errors.py" in text and type(error).__name__ in text and "a note" not in text
        assert errors.notes_of(error) == ["a note"]
        assert errors.without_frames(error) is error and error.__traceback__ is None
        assert isinstance(error.__cause__, errors.WorkerTraceback) and "test_errors.py" in str(error.__cause__)
    assert errors.text_of(Exits()) == ""

    class Other(Exception):
        __notes__ = "text"

    class Raises(Exception):
        @property
        def __notes__(self):
            raise RuntimeError

    for error in (Other(), Raises()):
        assert errors.notes_of(error) == []
        errors.set_notes(error, ["x"])  # no error in the place of this one


def test_an_exit_code_in_words():
    says = {None: "exit code unknown", 3: "exit code 3", -200: "killed by signal 200 (signal 200)"}
    says[-int(signal.SIGTERM)] = "killed by SIGTERM (signal 15)"
    assert {code: errors.describe_exit(code, 0) for code in says} == says


# -- tracebacks show the user's frames, once --------------------------------------------------------------------------


class OneByOne(Drawing):
    def read(self, index, rng):
        return self.parse(index)

    def parse(self, index):
        if index == 3:
            raise ValueError(f"sample {index} is bad")
        return index


class InBulk(OneByOne, DrawingInItems):
    pass


def told(made, dataset, **how):
    loader = made(dataset, 4, **how)
    with pytest.raises(ValueError, match="sample 3 is bad") as caught:
        list(loader)
    return "".join(traceback.format_exception(caught.value))


LOADERS = [ShardedDataLoader, sharded_loader.torch.DataLoader]


@pytest.mark.costly
@pytest.mark.parametrize("dataset", [OneByOne(), InBulk()], ids=["one by one", "in bulk"])
@pytest.mark.parametrize("how", [{}, {"thread_pool": True}, {"num_workers": 1}], ids=["inline", "threads", "processes"])
@pytest.mark.parametrize("made", LOADERS, ids=["ours", "torch's"])
def test_a_traceback_leads_from_the_loop_to_the_line_of_the_user(made, how, dataset):
    if how:
        how = {"num_workers": 1, **how}
    text = told(made, dataset, **how)
    assert text.count("in parse") == 1 and "During handling" not in text
    assert "reader.py" not in text and "arrays.py" not in text


def test_with_the_environment_variable_all_frames_are_there(monkeypatch):
    monkeypatch.setenv("SHARDED_LOADER_FULL_TRACEBACKS", "1")
    for how in ({}, {"num_workers": 1}):
        assert "reader.py" in told(ShardedDataLoader, OneByOne(), **how)


def test_causes_are_shortened_and_an_error_of_the_library_keeps_its_last_frame():
    with pytest.raises(ValueError, match="could not parse") as caught:
        try:
            ShardedDataLoader(3, 2)
        except TypeError as error:
            raise ValueError("could not parse") from error
    cause = caught.value.__cause__
    assert cause is not None and len(traceback.extract_tb(cause.__traceback__)) > 1
    errors.shorten(caught.value)
    assert [one.filename for one in traceback.extract_tb(cause.__traceback__)] == [__file__]
    with pytest.raises(RuntimeError, match="closed") as of_library:
        loader = ShardedDataLoader(range(4), 2)
        loader.close()
        iter(loader)
    of_library.value.__traceback__ = of_library.value.__traceback__.tb_next
    errors.shorten(of_library.value)
    assert len(traceback.extract_tb(of_library.value.__traceback__)) == 1
