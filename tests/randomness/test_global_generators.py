"""The generators that all threads share: seeded with every bit of a key, by one thread at a time, and put back."""

import os
import random
import threading

import numpy as np
import pytest
import torch

from sharded_loader.randomness import rng
from sharded_loader.randomness.rng import derive_key, seed_globals, seed_torch, seeded_globals


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand((), dtype=torch.float64).item()]


@pytest.mark.parametrize("bit", [0, 31, 32, 62, 63, 64, 100, 127])
def test_every_bit_of_a_key_counts_in_every_generator(bit: int) -> None:
    with seeded_globals(5):
        before = draw()
        seed_globals(5)
        assert draw() == before
        seed_globals(5 ^ 1 << bit)
        after = draw()
    assert len({*before, *after}) == 6
    generators = torch.Generator(), torch.Generator()
    for generator, key in zip(generators, (5, 5 ^ 1 << bit), strict=True):
        seed_torch(generator, key)
    assert torch.rand((), generator=generators[0]) != torch.rand((), generator=generators[1])


def test_generators_seeded_by_one_key_draw_different_numbers_also_for_each_batch_of_a_worker() -> None:
    # All are Mersenne Twisters: from the same words they would draw the same.
    with seeded_globals(2**128 - 1):
        drawn = [draw() for _ in range(1000)]
    assert len({number for three in drawn for number in three}) == 3000
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef([three[one] for three in drawn], [three[other] for three in drawn])[0, 1]) < 0.15
    keys = [derive_key(1, "batch globals", 0, position) for position in range(300)]
    drawn = []
    with seeded_globals(0):
        for key in [*keys, *keys]:
            seed_globals(key, whole=False)
            drawn.append(draw())
    assert drawn[:300] == drawn[300:]  # whoever builds the batch
    assert len({number for three in drawn for number in three}) == 900


def test_torch_numbers_are_uniform_and_its_seed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()
    seed_torch(generator, 9 + (3 << 63))
    assert generator.initial_seed() == 9
    drawn = torch.rand(100_000, generator=generator)
    assert abs(drawn.mean() - 0.5) < 0.005 and abs(drawn.std() - 12**-0.5) < 0.005
    first = []
    for _ in range(2):
        # Nothing is left of what was drawn before: a kept half of a pair of normal numbers, say.
        seed_torch(generator, 4)
        first.append(torch.randn(1001, generator=generator))
    assert torch.equal(*first)
    # Where torch keeps its words elsewhere, its own seed is used.
    monkeypatch.setattr(rng, "_torch_state", lambda: None)
    seed_torch(generator, 77 + (1 << 63))
    own = torch.Generator().manual_seed(77)
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=own))


# -- turns ----------------------------------------------------------------------------------------------------


def states() -> list[object]:
    """The states of the three generators, to be compared."""
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_the_states_come_back_also_after_an_error_and_turns_nest() -> None:
    before = states()
    with pytest.raises(KeyError), seeded_globals(1):
        first = draw()
        inside = states()
        with seeded_globals(1):
            assert draw() == first
        assert states() == inside
        raise KeyError
    assert states() == before


class Holder(threading.Thread):
    """A thread that has the generators until it is let go."""

    def __init__(self) -> None:
        super().__init__(name="holder")
        self.has_them, self.go_on = threading.Event(), threading.Event()

    def run(self) -> None:
        with seeded_globals(3):
            self.has_them.set()
            self.go_on.wait()


def test_the_generators_are_seeded_for_one_thread_at_a_time() -> None:
    before, first, second = states(), Holder(), Holder()
    first.start()
    assert first.has_them.wait(300)
    inside = states()
    second.start()
    assert not second.has_them.wait(0.01)
    assert states() == inside != before
    first.go_on.set()
    assert second.has_them.wait(300)
    second.go_on.set()
    first.join()
    second.join()
    assert states() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_does_not_wait_for_a_thread_that_is_gone() -> None:
    holder = Holder()
    holder.start()
    assert holder.has_them.wait(300)
    pid = os.fork()
    if pid == 0:
        with seeded_globals(1):
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    holder.go_on.set()
    holder.join()
