"""Random numbers come from keys: of their own for each use, the same in every process, and used with all their bits."""

import ast
import enum
import itertools
import math
import os
import random
import re
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import Foreign

import sharded_loader
from sharded_loader import RandomSampler, ShardedDataLoader, sample_generator, sample_rng, sample_seed
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
from sharded_loader.samplers.bijections import FEW, Bijections, uniforms, uniforms_at
from sharded_loader.sampling.tables import BLOCK, checksum_of

MAKERS = ("derive_key", "philox", "key_parts", "shuffle", "kept_shuffle", "shuffled", "Bijection")
MAKERS += ("Bijections", "_order")

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


@pytest.mark.lint
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


def numpy_state() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return name, words.tobytes(), *rest


def test_numpy_goes_on_whatever_was_drawn_between_and_inside() -> None:
    """Normal numbers come in pairs, and the second one is kept beside the words of the generator."""
    choices = random.Random(0)
    draws: list[Callable[[], object]] = [np.random.rand, np.random.randn, lambda: np.random.randn(2), lambda: None]
    np.random.seed(5)
    for _ in range(500):
        choices.choice(draws)()
        expected = numpy_state()
        with seeded_globals(choices.getrandbits(64), whole=choices.random() < 0.5):
            choices.choice(draws)()
            with seeded_globals(1) if choices.random() < 0.2 else nullcontext():
                choices.choice(draws)()
        assert numpy_state() == expected


def test_words_that_come_again_may_have_another_half() -> None:
    """After one normal number and after two, the words are the same. A block with the key of the one around it, too."""
    for count in (2, 1, 2, 0):
        np.random.seed(0)
        np.random.randn(count)
        expected = numpy_state()
        with seeded_globals(5):
            within = numpy_state()
            with seeded_globals(5):
                pass
            assert numpy_state() == within
        assert numpy_state() == expected


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="new in NumPy 1.24")
def test_another_generator_in_the_place_of_numpys_own_goes_on() -> None:
    own = np.random.get_bit_generator()
    try:
        for generator in (np.random.MT19937(1), own):
            np.random.set_bit_generator(generator)
            expected = numpy_state()
            with seeded_globals(1):
                np.random.rand()
                np.random.set_bit_generator(np.random.MT19937(3))
            assert numpy_state() == expected and np.random.get_bit_generator() is generator
    finally:
        np.random.set_bit_generator(own)


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


# -- a shuffle of any size is a permutation, looks random, and is a pure function of its key ---------------------------


def chi_square_z(counts: np.ndarray) -> float:
    """How many standard deviations the counts are from uniform."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def is_uniform(values: np.ndarray, bins: int) -> bool:
    """Whether numbers from 0 to 1 are spread evenly."""
    return abs(chi_square_z(np.histogram(values, bins=bins, range=(0, 1))[0])) < 6


@given(lengths=st.lists(st.integers(1, 300) | st.integers(1, 3000), min_size=1, max_size=9), key=st.integers())
def test_shuffles_of_every_kind_reach_every_index_once(lengths: list[int], key: int) -> None:
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)
    of_each, numbers = np.repeat(lengths, lengths), np.repeat(np.arange(len(lengths)), lengths)
    shuffles = Bijections(key)
    mixed = shuffles(positions, of_each, numbers)
    assert mixed.dtype == np.int64
    for number, length in enumerate(lengths):
        here = numbers == number
        assert shuffles(positions[here], of_each[here], numbers[here]).tolist() == mixed[here].tolist()  # alone
        single = rng.Bijection(length, key)(np.arange(length, dtype=np.uint64))
        assert single.dtype == np.int64
        for order in (mixed[here], single, rng.shuffled(length, key)):
            assert sorted(order.tolist()) == list(range(length))
    assert len(rng.shuffled(0, key)) == 0


@pytest.mark.parametrize("in_memory", [2**24, 0])
@pytest.mark.parametrize("length", [0, 1, 2, 1000, BLOCK + 5])
def test_the_order_is_the_same_from_any_position(monkeypatch: pytest.MonkeyPatch, in_memory: int, length: int) -> None:
    monkeypatch.setattr(rng, "IN_MEMORY", in_memory)
    sampler = RandomSampler(length, seed=3)
    whole = list(sampler.iter_epoch(2))
    assert sorted(whole) == list(range(length))
    for start in {0, 1, length // 2, max(length - 1, 0), length, length + 7}:
        assert list(sampler.iter_epoch(2, start)) == whole[start:]


@pytest.mark.parametrize("length", [2**24 + 1, 10**12, 2**62 - 1, 2**62])
def test_huge_shuffles_start_anywhere_at_once(length: int) -> None:
    sampler = RandomSampler(length, seed=1)
    assert len(sampler) == length
    tail = list(sampler.iter_epoch(0, length - 5))
    assert len(set(tail)) == 5
    assert all(0 <= index < length for index in tail)
    middle = length // 2
    ahead = list(itertools.islice(sampler.iter_epoch(0, middle), 10))
    assert ahead[4:] == list(itertools.islice(sampler.iter_epoch(0, middle + 4), 6))
    assert ahead != list(itertools.islice(sampler.iter_epoch(1, middle), 10))


def of_windows(length: int, count: int) -> np.ndarray:
    return Bijections("structure")(np.arange(count), np.full(count, length), np.full(count, 12345))


@pytest.mark.parametrize(
    ("make", "length"),
    [
        *((None, length) for length in (2**25, 2**25 + 1, 10**8 + 7, 10**12, 2**61 + 3)),
        *((of_windows, length) for length in (1000, 2**14, 160_000, 2**33 + 1)),
    ],
)
def test_shuffles_show_no_structure_between_neighbours(make: Any, length: int) -> None:
    count = min(length, 100_000)
    values = make(length, count) if make else rng.Bijection(length, "structure")(np.arange(count, dtype=np.uint64))
    place = values / length
    if make is None:
        assert is_uniform(place, 256) and abs(chi_square_z(np.bincount(values & 255, minlength=256))) < 6
    for distance in (1, 2, 16, 256, 4096) if make is None else (1, 2, 16, 256):
        assert is_uniform((place[distance:] - place[:-distance]) % 1, 64 if make else 256)
        assert abs(np.corrcoef(place[distance:], place[:-distance])[0, 1]) < (0.12 if make else 0.02)
        if make is None:
            low_bits = (values[distance:] ^ values[:-distance]) & 255
            assert abs(chi_square_z(np.bincount(low_bits, minlength=256))) < 6


@pytest.mark.parametrize(
    ("make", "length"), [("bijection", 21), ("shuffled", 21), *(("windows", n) for n in (2, 21, 64))]
)
def test_over_many_keys_every_index_comes_everywhere_equally_often(make: str, length: int) -> None:
    places, count = np.arange(length), 1500
    if make == "windows":
        numbers = np.repeat(np.arange(count) * 7919, length)
        mixed = Bijections("spread")(np.tile(places, count), np.full(count * length, length), numbers)
        orders = mixed.reshape(count, length)
    elif make == "bijection":
        orders = np.array([rng.Bijection(length, key)(places.astype(np.uint64)) for key in range(count)])
    else:
        orders = np.array([rng.shuffled(length, key) for key in range(count)])
    seen = np.zeros((length, length), dtype=np.int64)
    np.add.at(seen, (np.tile(places, count), orders.ravel()), 1)
    assert abs(chi_square_z(seen.ravel())) < 6
    # A random permutation has one fixed point on average, whatever its length.
    assert (orders == places).sum() / count == pytest.approx(1, abs=0.15)
    if length == 64:  # windows do not resemble their neighbours
        assert abs(chi_square_z(np.bincount((orders[1:] - orders[:-1]).ravel() % length))) < 6


@pytest.mark.parametrize("length", range(2, FEW + 1))
def test_all_orders_of_few_indices_are_equally_likely(length: int) -> None:
    count, orders = 40_000, math.factorial(length)
    of_each = np.full(count * length, length)
    mixed = Bijections("few")(np.tile(np.arange(length), count), of_each, np.repeat(np.arange(count), length))
    seen = np.zeros(orders, np.int64)
    found = np.unique(mixed.reshape(count, length), axis=0, return_counts=True)[1]
    seen[: len(found)] = found
    assert abs(chi_square_z(seen)) < 5
    assert sorted(set(mixed.tolist())) == list(range(length))


def test_a_random_number_depends_on_its_position_alone() -> None:
    draws = uniforms_at("draws")
    positions = np.array([0, 10**15, 7, 2**62 - 1])
    assert draws(positions).tolist() == [float(draws(positions[i : i + 1])[0]) for i in range(4)]
    for stride in (1, 2, 64, 4096, 2**32):
        found = draws(np.arange(50_000) * stride)
        assert 0 <= found.min() < found.max() < 1 and is_uniform(found, 100)
        for lag in (1, 2, 16, 4096):
            assert is_uniform((found[lag:] - found[:-lag]) % 1, 64)
    found = uniforms(50_000, "uniform")
    assert found.dtype == np.float64 and 0 <= found.min() < found.max() < 1 and is_uniform(found, 100)


def test_the_order_is_the_same_in_every_release() -> None:
    """A resumed run may meet a newer version of this library, NumPy or Python."""
    assert list(RandomSampler(8, seed=7)) == [3, 5, 7, 2, 6, 4, 1, 0]
    assert list(itertools.islice(RandomSampler(10**12, seed=7), 3)) == [885393042808, 368485720333, 767832743092]
    windows = Bijections(7, "pinned")(np.arange(4), np.full(4, 1000), np.array([0, 0, 1, 1]))
    assert windows.tolist() == [784, 937, 747, 31]
    # The order of `SubsetRandomSampler` over long ranges, and saved states, depend on their checksums.
    assert checksum_of(range(0, 10**12, 2)) == zlib.crc32(b"range(0, 1000000000000, 2)")


def test_a_checksum_is_that_of_64_bit_numbers_in_c_order_and_copies_none_of_them() -> None:
    table = np.arange(12.0).reshape(3, 4)
    for numbers in (
        table,
        table.T,
        table[:, ::2],
        table[::-1],
        table[:0],
        table.astype(">i4"),
        np.float32(3),
        [],
        [True],
    ):
        array = np.asarray(numbers)
        expected = array.astype("<f8" if array.dtype.kind == "f" else "<i8").tobytes()
        assert checksum_of(numbers) == zlib.crc32(expected)
    many = np.arange(10**6)
    tracemalloc.start()
    try:
        checksum_of(many)
        assert tracemalloc.get_traced_memory()[1] < 10**6  # it was 8 MB
    finally:
        tracemalloc.stop()
