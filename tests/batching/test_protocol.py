"""What all batchify functions share: the rule about overrides, and errors that name the field."""

import pickle

import numpy as np
import pytest

from sharded_loader import empty
from sharded_loader.batchify import Stack, default_batchify_fn
from sharded_loader.batching.protocol import BatchifyError, assembler, fast_method, in_fields, ragged


def test_errors_survive_pickling():
    with pytest.raises(ValueError, match="in field") as caught:
        default_batchify_fn([(np.zeros(1),), (np.zeros(2),)])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class Base:
    def one(self): ...
    def many(self): ...


class OverridesOne(Base):
    def one(self): ...


class KnowsTheOverride(OverridesOne):
    def many(self): ...


class Further(KnowsTheOverride):
    pass


class MixedInBehind(OverridesOne, Base):
    pass


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Base, Base.many),
        (OverridesOne, None),
        (KnowsTheOverride, KnowsTheOverride.many),
        (Further, KnowsTheOverride.many),
        (MixedInBehind, None),
        (object, None),
    ],
)
def test_a_fast_method_is_used_only_if_it_knows_the_override(kind, found):
    assert fast_method(kind, "many", ["one"]) is found


def test_fields_of_fields_are_one_path():
    def fails(samples, empty):
        raise BatchifyError("no", "do")

    def len_of(samples, empty):
        return len(samples)

    def inner(samples, empty):
        return in_fields("x", "[{!r}]", [fails], [samples], empty)

    with pytest.raises(BatchifyError, match=r"^no, in field \[1\]\['x'\]: do$"):
        in_fields([0, 1], "[{}]", [len_of, inner], [[], []], np.empty)


def test_each_shape_is_shown_once_with_the_first_sample_that_has_it():
    assert ragged([(1,), (2,), (1,)]).problem.endswith(
        "cannot be stacked: (1,) (sample 0 of the batch), (2,) (sample 1 of the batch)"
    )
    assert ragged([(k,) for k in range(7)]).problem.endswith("(4,) (sample 4 of the batch), ... (7 in all)")


def test_a_users_function_finds_the_memory_in_empty():
    given = []

    def allocator(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    assert assembler(lambda samples: empty((2,), "i4"))([1, 2], allocator) is given[0]
    assert assembler(Stack())([1, 2], allocator) is given[1]
