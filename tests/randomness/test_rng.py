"""Random numbers come from keys: of their own for each use, the same in every process, and used with all their bits."""

import ast
import enum
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import Foreign

import sharded_loader
from sharded_loader import ShardedDataLoader, sample_generator, sample_rng, sample_seed
from sharded_loader.engine.pool import Pool
from sharded_loader.randomness import rng
from sharded_loader.randomness.rng import (
    NO_SAMPLE,
    OF_BATCH,
    OfBatch,
    SampleScope,
    derive_key,
    key_parts,
    philox,
    reading,
    seed_globals,
    seed_torch,
    seeded_globals,
)

MAKERS = ("derive_key", "philox", "key_parts", "shuffle", "shuffled", "Bijections", "_order")

# `SplitSampler` says "order", `ShardShuffleSampler` "short", and `CostSampler` "mixed", behind the label that all their
# keys have.
INNER = {"order": 1, "short": 1, "mixed": 1}


def labels_in_the_code() -> Iterator[str]:
    """The text in each key: the arguments of functions that make keys, and tuples that begin with a seed or a key."""
    sources = [file.read_text(encoding="utf-8") for file in Path(sharded_loader.__file__).parent.rglob("*.py")]
    for source in filter(re.compile(rf"\b(?:(?:{'|'.join(MAKERS)})\(|(?:seed|key),)").search, sources):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
                parts = node.args if called in MAKERS else []
            elif isinstance(node, ast.Tuple) and node.elts:
                first = node.elts[0].value if isinstance(node.elts[0], ast.Starred) else node.elts[0]
                name = first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", None)
                parts = node.elts[1:] if name in ("seed", "key") else []
                if isinstance(first, ast.Constant) and [getattr(one, "id", None) for one in node.elts[1:]] == ["epoch"]:
                    parts = node.elts  # the rest of a key: the seed comes before it
            else:
                continue
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            yield from texts
            if isinstance(node, ast.Call) and called == "key_parts" and not texts[0].startswith("transform"):
                yield texts[0] + " of batchify_fn"


def test_every_use_of_a_key_has_a_label_of_its_own() -> None:
    table = (rng.__doc__ or "").partition("who draws")[2]
    listed = re.findall(r"^    ([a-z_](?: ?[a-z_]+)*)  +\S", table, re.MULTILINE)
    assert len(listed) > 20
    used = Counter(labels_in_the_code())
    used["sample"] -= 1  # with an index and without one: one use in two lines
    used["sample of batchify_fn"] -= 1
    used["fixed bucket"] -= 1  # whole buckets, and what is left of each
    assert used - Counter(INNER) == Counter(listed)


def test_a_batch_and_an_index_that_looks_like_it_have_different_keys() -> None:
    class InBatch(SampleScope):
        of_batch = OfBatch(3, 0)

    indices = (OF_BATCH, (3, 0), ("batchify_fn", 3, 0), ("OfBatch", 3, 0), repr(OfBatch(3, 0)))
    keys = {derive_key(*key_parts(InBatch(1, 0, index), "sample")) for index in indices}
    assert len(keys) == 5


@pytest.fixture
def scope() -> Iterator[SampleScope]:
    """This thread reads sample 3 of epoch 2, under seed 5."""
    reading.set(made := SampleScope(5, 2, 3))
    yield made
    reading.set(None)


def test_a_sample_has_one_generator_whose_numbers_are_those_of_its_key(scope: SampleScope) -> None:
    first, expected = sample_rng(), philox(5, "sample", 2, 3).random()
    assert sample_rng() is first
    assert sample_rng(3).random() == first.random() == expected
    assert sample_generator().initial_seed() == derive_key(5, "torch", 2, 3) & 0x7FFFFFFFFFFFFFFF
    scope.index, scope.drawn = 4, None  # the next one is read
    assert sample_rng().random() == philox(5, "sample", 2, 4).random()
    assert len({philox(5, "sample", 2, 4).random(), philox(5, "sample", 1, 3).random(), expected}) == 3
    scope.index, scope.drawn = NO_SAMPLE, None  # several at once need an index
    for draw_one in (sample_rng, sample_generator, lambda: sample_seed().__enter__()):
        with pytest.raises(ValueError, match=r"call sample_rng\(index\) with the index"):
            draw_one()
    assert sample_rng(3).random() == expected


def test_outside_of_a_loader_in_other_threads_and_in_forked_children_numbers_are_fresh(scope: SampleScope) -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(reading.get()))
    thread.start()
    thread.join()
    assert seen == [None] and reading.get() is scope
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if reading.get() is None else 1)
        assert os.waitpid(pid, 0)[1] == 0 and reading.get() is scope
    reading.set(None)
    assert sample_rng().random() != sample_rng().random()
    random.seed(1)
    state = random.getstate()
    with sample_seed():
        assert random.getstate() == state


@pytest.mark.usefixtures("scope")
def test_samples_whose_seeds_agree_in_32_bits_draw_different_torch_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharded_loader.randomness.rng.derive_key", lambda *parts: 7 + (parts[-1] << 32))
    assert len({torch.rand((), generator=sample_generator(index)).item() for index in range(20)}) == 20


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Patient:
    name: str
    scans: frozenset[str]


class Text(str):
    pass


class Address:
    """Equal by what it holds, but its ``repr`` shows where it lies."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other.number == self.number


INDICES = """[
    frozenset("abcdef"), (1, frozenset({"x", ("y", frozenset("uvw"))})), {"b", "a", "c"}, None, 1.5, "1.5", b"1.5",
    Patient("a", frozenset("xyz")), Colour.RED, Text("text"), ("a", ("b", 2)), True, range(3)]"""


@pytest.mark.slow
def test_an_index_is_one_key_in_every_process() -> None:
    here = [derive_key(7, "sample", 0, index) for index in eval(INDICES)]
    assert len(set(here)) == len(here)
    program = f"from test_rng import *; print([derive_key(7, 'sample', 0, i) for i in {INDICES}])"
    path = os.pathsep.join(map(str, (Path(__file__).parent, *sys.path)))
    for hash_seed in "12":
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}
        found = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
        assert ast.literal_eval(found.stdout.decode()) == here


def test_equal_indices_of_different_types_are_one_key() -> None:
    for one, other in ((3, np.int64(3)), ("a", np.str_("a")), ("a", Text("a")), (1.5, np.float64(1.5)), (1, True)):
        assert one == other and derive_key(one) == derive_key(other)
    assert derive_key((3, "a")) == derive_key((np.int64(3), np.str_("a")))


@pytest.mark.parametrize("index", [Address(1), (1, Address(1)), frozenset({Address(1)}), lambda: 1])
def test_an_index_without_a_value_of_its_own_is_rejected(index: Any) -> None:
    with pytest.raises(TypeError, match=r"another text in each run: let the sampler yield integers, strings or tuples"):
        derive_key(7, "sample", 0, index)


def by_seed() -> float:
    with sample_seed():
        return random.random()


@pytest.mark.parametrize(
    "draw_one", [lambda: sample_rng().random(), lambda: sample_generator().initial_seed(), by_seed]
)
def test_the_loader_says_which_index_cannot_be_a_key(pool: Pool, draw_one: Any) -> None:
    class AnyKey(Foreign):
        def __getitem__(self, index: Any) -> Any:
            return draw_one()

    with ShardedDataLoader(AnyKey([], 3), 1, sampler=["a", Address(1)], seed=1, pool=pool) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(TypeError, match="give Address a __repr__ that shows its value"):
            next(iterator)


# -- the generators that all threads share: seeded with every bit of a key, by one thread at a time, and put back ------


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
