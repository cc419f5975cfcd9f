"""Calls of ``set_epoch`` on samplers are noticed, once, whoever makes them."""

from __future__ import annotations

import copy
import copyreg
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
from torch.utils.data import DistributedSampler

from sharded_loader import RandomSampler
from sharded_loader.data.seeding import epoch_setter
from sharded_loader.engine.epoch_requests import EpochRequests


class Foreign:
    """A sampler of another library."""

    def __init__(self, epoch: Any = 0) -> None:
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> str:
        self.epoch = epoch
        return f"now {epoch}"


class Slotted:
    __slots__ = ("epoch",)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stateful(Foreign):
    def __getstate__(self) -> tuple[int, dict[str, Any]]:
        return 1, dict(vars(self))

    def __setstate__(self, state: tuple[int, dict[str, Any]]) -> None:
        vars(self).update(state[1])


class Copying(Foreign):
    def __copy__(self) -> Copying:
        other = Copying.__new__(Copying)
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: Any) -> Copying:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (Copying,), vars(self)  # type: ignore[attr-defined]


class Above(Foreign):
    def set_epoch(self, epoch: int) -> str:
        return super().set_epoch(epoch)


@dataclass(frozen=True)
class Frozen:
    epoch: int

    def set_epoch(self, epoch: int) -> None:
        pass


def listening(*samplers: Any) -> EpochRequests:
    requests = EpochRequests()
    requests.listen(samplers)
    return requests


def test_requests_are_taken_once_and_may_be_dropped() -> None:
    sampler = RandomSampler(4, seed=1)
    requests, others = listening(sampler), listening(sampler)
    assert requests.take() is None
    sampler.set_epoch(3)
    assert (requests.take(), requests.take()) == (3, None)
    sampler.set_epoch(4)
    requests.drop()
    assert (requests.take(), others.take()) == (None, 4)


def test_a_sampler_of_another_library_is_heard_and_does_what_it_did() -> None:
    sampler = Foreign()
    requests, others = listening(sampler), listening(sampler)
    assert sampler.set_epoch(5) == "now 5" and sampler.epoch == 5
    assert (requests.take(), others.take(), requests.take()) == (5, 5, None)
    assert "set_epoch" not in vars(Foreign()) and Foreign().set_epoch(1) == "now 1"
    torch_sampler = DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type]
    requests = listening(torch_sampler)
    torch_sampler.set_epoch(2)
    assert requests.take() == 2 and torch_sampler.epoch == 2


def test_a_call_that_came_before_counts_if_it_can_be_seen() -> None:
    assert listening(Foreign(3)).take() == 3
    assert listening(Foreign(0)).take() is None and listening(Foreign("odd")).take() is None


def test_a_call_of_a_loader_is_none_of_the_users_also_above_a_class_that_is_listened_to() -> None:
    one, requests = Above(), listening(Foreign())
    one.set_epoch = lambda epoch: Above.set_epoch(one, epoch)  # type: ignore[method-assign]
    requests = listening(one)
    epoch_setter(one)(3)
    assert (one.epoch, requests.take()) == (3, None)
    one.set_epoch(4)
    assert (one.epoch, requests.take()) == (4, 4)
    del one.set_epoch
    assert one.set_epoch(5) == "now 5" and requests.take() == 5


def test_the_latest_of_several_calls_counts() -> None:
    one, other, third = Foreign(), RandomSampler(4, seed=1), Foreign()
    requests = listening(one, other, third)
    one.set_epoch(7)
    other.set_epoch(2)
    assert (requests.take(), requests.take()) == (2, None)
    other.set_epoch(4)
    third.set_epoch(9)
    assert requests.take() == 9


def test_to_listen_again_keeps_what_was_seen_and_forgets_the_others() -> None:
    one, other = Foreign(), Foreign()
    requests = listening(one, other)
    one.set_epoch(1)
    assert requests.take() == 1
    requests.listen([one])
    assert requests.take() is None
    other.set_epoch(2)
    assert requests.take() is None
    one.set_epoch(3)
    assert requests.take() == 3


def test_what_has_no_set_epoch_is_left_alone_and_what_cannot_be_heard_is_an_error() -> None:
    assert listening([1, 2], range(3), object()).take() is None
    with pytest.raises(TypeError, match=r"set_epoch of a Slotted cannot be heard.*class Heard\(Slotted\): pass"):
        listening(Slotted())
    for one in (Frozen(0), type("Heard", (Slotted,), {})()):
        requests = listening(one)
        one.set_epoch(4)
        assert requests.take() == 4


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "cloudpickle": lambda one: cloudpickle.loads(cloudpickle.dumps(one)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["plain", "own state", "own copy", "own method"])
def test_a_copy_is_told_by_itself(kind: str, way: str) -> None:
    one = {"own state": Stateful, "own copy": Copying}.get(kind, Foreign)()
    if kind == "own method":
        one.set_epoch = print  # type: ignore[method-assign]
    requests = listening(one)
    one.epoch = 2  # a loader has told it
    other = COPIES[way](one)
    assert listening(COPIES[way](one)).take() is None
    other.set_epoch(5)
    assert (one.epoch, requests.take()) == (2, None)
    if kind != "own method":
        assert other.epoch == 5 and listening(other).take() == 5
    one.set_epoch(7)
    assert requests.take() == 7 and other.epoch != 7


def test_a_sampler_that_was_pickled_is_heard_too() -> None:
    sampler = RandomSampler(4, seed=1)
    sampler.set_epoch(6)
    requests = listening(pickle.loads(pickle.dumps(sampler)))
    assert (requests.take(), requests.take()) == (6, None)
