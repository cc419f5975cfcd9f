"""Random numbers come from keys: of their own for each use, the same in every process, and used with all their bits."""

from __future__ import annotations

import ast
import enum
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharded_loader
from sharded_loader import ShardedDataLoader, global_generators, sample_generator, sample_rng, sample_seed
from sharded_loader.engine.pool import Pool
from sharded_loader.global_generators import seed_globals, seed_torch, seeded_globals
from sharded_loader.rng import LABELS, OfBatch, SampleScope, derive_key, key_parts, reading

MAKERS = ("derive_key", "philox", "key_parts", "shuffle", "shuffled")

# `SplitSampler` says "order" and "extra" behind the label that all of its keys have.
INNER = {"order": 1, "extra": 1}


def labels_in_the_code() -> Iterator[str]:
    """The text in each key: the arguments of functions that make keys, and tuples that begin with a seed or a key."""
    for file in Path(sharded_loader.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
                parts = node.args if called in MAKERS else []
            elif isinstance(node, ast.Tuple) and node.elts:
                first = node.elts[0].value if isinstance(node.elts[0], ast.Starred) else node.elts[0]
                name = first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", None)
                parts = node.elts[1:] if name in ("seed", "key") else []
            else:
                continue
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            yield from texts
            if isinstance(node, ast.Call) and called == "key_parts" and not texts[0].startswith("transform"):
                yield texts[0] + " of batchify_fn"


def test_every_use_of_a_key_has_a_label_of_its_own() -> None:
    used = Counter(labels_in_the_code())
    used["sample"] -= 1  # with an index and without one: one use in two lines
    used["sample of batchify_fn"] -= 1
    assert used - Counter(INNER) == Counter(dict.fromkeys(LABELS, 1))


def test_a_batch_and_an_index_that_looks_like_it_have_different_keys() -> None:
    scope = SampleScope(1, 0)
    scope.at(OfBatch(3, 0))
    of_batch = key_parts(scope, "sample")
    keys = {derive_key(*of_batch)}
    for index in ((3, 0), ("batchify_fn", 3, 0), ("OfBatch", 3, 0), repr(OfBatch(3, 0))):
        scope.at(index)
        keys.add(derive_key(*key_parts(scope, "sample")))
    assert len(keys) == 5


# -- seeds of all bits ----------------------------------------------------------------------------------------


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


def test_generators_seeded_by_one_key_draw_different_numbers() -> None:
    # All are Mersenne Twisters: from the same words they would draw the same.
    with seeded_globals(2**128 - 1):
        drawn = [draw() for _ in range(1000)]
    assert len({number for three in drawn for number in three}) == 3000
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef([three[one] for three in drawn], [three[other] for three in drawn])[0, 1]) < 0.15


def test_torch_numbers_are_uniform_and_its_seed_is_known() -> None:
    generator = torch.Generator()
    seed_torch(generator, 9 + (3 << 63))
    assert generator.initial_seed() == 9
    drawn = torch.rand(100_000, generator=generator)
    assert abs(drawn.mean() - 0.5) < 0.005 and abs(drawn.std() - 12**-0.5) < 0.005
    normal = torch.randn(1001, generator=generator)
    seed_torch(generator, 9 + (3 << 63))
    torch.rand(100_000, generator=generator)
    assert torch.equal(torch.randn(1001, generator=generator), normal)
    # Nothing is left of what was drawn before: a kept half of a pair of normal numbers, say.
    seed_torch(generator, 4)
    first = torch.randn(1, generator=generator)
    seed_torch(generator, 4)
    assert torch.equal(torch.randn(1, generator=generator), first)


def test_where_torch_keeps_its_words_elsewhere_its_own_seed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_generators, "_torch_state", lambda: None)
    generator, own = torch.Generator(), torch.Generator().manual_seed(77)
    seed_torch(generator, 77 + (1 << 63))
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=own))


def test_samples_whose_seeds_agree_in_32_bits_draw_different_torch_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "scope", SampleScope(0, 0), raising=False)
    monkeypatch.setattr("sharded_loader.rng.derive_key", lambda *parts: 7 + (parts[-1] << 32))
    assert len({torch.rand((), generator=sample_generator(index)).item() for index in range(20)}) == 20


# -- keys that are no numbers ---------------------------------------------------------------------------------


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
    program = f"import test_keys; from test_keys import *; print([derive_key(7, 'sample', 0, i) for i in {INDICES}])"
    for hash_seed in "12":
        found = subprocess.run(
            [sys.executable, "-c", program],
            env=dict(os_environ(), PYTHONHASHSEED=hash_seed),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ast.literal_eval(found.stdout) == here


def os_environ() -> dict[str, str]:
    root = str(Path(sharded_loader.__file__).parents[1])
    return dict(os.environ, PYTHONPATH=os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))))


def test_equal_indices_of_different_types_are_one_key() -> None:
    for one, other in ((3, np.int64(3)), ("a", np.str_("a")), ("a", Text("a")), (1.5, np.float64(1.5)), (1, True)):
        assert one == other and derive_key(one) == derive_key(other)
    assert derive_key((3, "a")) == derive_key((np.int64(3), np.str_("a")))


@pytest.mark.parametrize("index", [Address(1), (1, Address(1)), frozenset({Address(1)}), lambda: 1])
def test_an_index_without_a_value_of_its_own_is_rejected(index: Any) -> None:
    with pytest.raises(TypeError, match=r"another text in each run: let the sampler yield integers, strings or tuples"):
        derive_key(7, "sample", 0, index)


class Keyed:
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return self.draw()


def by_seed() -> float:
    with sample_seed():
        return random.random()


@pytest.mark.parametrize(
    "draw_one", [lambda: sample_rng().random(), lambda: sample_generator().initial_seed(), by_seed]
)
def test_the_loader_says_which_index_cannot_be_a_key(pool: Pool, draw_one: Any) -> None:
    with ShardedDataLoader(Keyed(draw_one), 1, sampler=["a", Address(1)], seed=1, pool=pool) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(TypeError, match="give Address a __repr__ that shows its value"):
            next(iterator)
