"""One dataset of a mixture: it continues from any position, by its own state where it has one."""

import copy
import json

import pytest
from conftest import covering

from sharded_loader.base.entries import from_state, to_state
from sharded_loader.mixing.in_order import BEGINNING, END, Source, SourcePoint


class Again:
    """Begins anew each time."""

    def __iter__(self):
        return iter(range(5))


class OwnState(Again):
    """Its state stays loaded, as with Hugging Face's: each later iteration would begin there too."""

    begin = at = 0

    def __init__(self):
        self.made = []

    def __iter__(self):
        for number in range(self.begin, 5):
            self.made.append(number)
            self.at = number + 1
            yield number

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = self.at = state["at"]


class SharesAttributes(OwnState):
    """As Hugging Face's: what ``copy.copy`` makes has the attributes of the original."""

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__ = state


class Steps:
    """An iterator with a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class StatefulIterator:
    def __iter__(self):
        return Steps()


KINDS = [
    Again,
    OwnState,
    SharesAttributes,
    StatefulIterator,
    lambda: Steps,
    lambda: lambda: iter(range(5)),
    lambda: range(5),
]


def rest(source):
    return list(iter(source.read, END))


@covering(make=KINDS, taken=range(6))
def test_a_dataset_continues_at_any_position(make, taken):
    source = Source("data", make(), BEGINNING)
    assert [source.read() for _ in range(taken)] == list(range(taken))
    state = from_state(SourcePoint, json.loads(json.dumps(to_state(source.state()))), "")
    assert rest(Source("data", make(), state)) == rest(source) == list(range(taken, 5))


@pytest.mark.parametrize("make", KINDS)
def test_a_pass_after_a_resumed_one_begins_at_the_beginning(make):
    source = Source("data", make(), BEGINNING)
    source.read(), source.read()
    resumed = Source("data", make(), source.state())
    assert rest(resumed) == [2, 3, 4]
    resumed.start_over()
    assert to_state(resumed.state()) == {"pass": 1, "taken": 0}
    assert rest(resumed) == [0, 1, 2, 3, 4]
    assert (resumed.passes, resumed.taken) == (1, 5)


@pytest.mark.parametrize(("entry", "made"), [({"dataset": {"at": 3}}, [3]), ({}, [0, 1, 2, 3])])
def test_only_without_a_state_are_the_samples_before_made_again(entry, made):
    dataset = OwnState()
    assert Source("data", dataset, SourcePoint(0, 3, **entry)).read() == 3
    assert dataset.made == made
    assert dataset.begin == 0  # the state went into a copy


def test_a_dataset_that_is_read_by_index_continues_without_reading_again():
    class Counted(list):
        asked = ()

        def __getitem__(self, index):
            self.asked = (*self.asked, index)
            return super().__getitem__(index)

    dataset = Counted("abcde")
    assert rest(Source("data", dataset, SourcePoint(0, 3))) == ["d", "e"]
    assert dataset.asked == (3, 4)


def test_a_state_of_a_dataset_that_was_not_opened_yet_is_kept():
    state = SourcePoint(2, 3, {"at": 3})
    source = Source("data", OwnState(), state)
    assert source.state() == state
    assert rest(source) == [3, 4]


def test_a_dataset_that_a_mixture_has_twice_is_resumed_by_counting():
    one = OwnState()
    source = Source("data", one, BEGINNING, is_alone=False)
    source.read()
    assert source.state() == SourcePoint(0, 1)


def test_a_dataset_that_has_become_shorter_is_an_error():
    with pytest.raises(ValueError, match="number 3, an Again, has 5 samples, and the state was saved after 6"):
        Source("number 3", Again(), SourcePoint(0, 6)).read()


def test_an_exception_passes_as_it_is_and_leaves_a_state():
    def broken():
        yield 1
        raise OSError("disk")

    source = Source("data", broken, BEGINNING)
    source.read()
    with pytest.raises(OSError, match="disk"):
        source.read()
    assert source.state() == SourcePoint(0, 1)


def test_entries_are_not_changed():
    entry = SourcePoint(0, 1, {"at": 1})
    before = copy.deepcopy(entry)
    source = Source("data", OwnState(), entry)
    rest(source)
    source.start_over()
    assert entry == before


# -- in workers ---------------------------------------------------------------------------------------------


def part(number, parts):
    return range(number, 10, parts)


@pytest.mark.parametrize("dataset", [range(10), part])
@pytest.mark.parametrize("parts", [1, 3, 20])
def test_workers_divide_what_is_read_by_index_and_what_a_function_returns(dataset, parts):
    found = []
    for number in range(parts):
        source = Source("data", dataset, BEGINNING, (number, parts))
        source.read()
        found += [*([number] if source.taken else []), *rest(Source("data", dataset, source.state(), (number, parts)))]
        source.start_over()
        assert rest(source) == list(range(number, 10, parts))
    assert sorted(found) == list(range(10))
