"""A loader and a naive one, driven by the same random steps and compared after each.

    seed -> Case: dataset, order, errors (cases) -> NaiveLoader (naive)      what must come
                  pool, workers, ranks, devices       -> ShardedDataLoader        what comes
                  steps: take, drop, look, resume ... -> both

Values, dtypes, shapes, nesting, errors, epoch, position and length are compared after every step; batches that are
held are compared again at the end. A case is decided by its seed alone. `run` runs many, `faults` disturbs them.
"""

import copy
import functools
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from sharded_loader import RandomSampler, SampleError, Sampler, SequentialSampler, ShardedDataLoader
from sharded_loader.sampling.base import for_ranks, ranks_of
from tests import conftest
from tests.fuzz import cases
from tests.naive import Failure, NaiveIterator, NaiveLoader

# Most cases read without processes, which start slowly; of those that have some, most fork.
METHODS = ["inline"] * 50 + ["thread"] * 35 + [name for name in ("fork",) if name in conftest.PROCESS_POOLS] * 9
SLOW_METHODS = [name for name in conftest.PROCESS_POOLS if name != "fork"]
DONE: Any = object()


class Difference(AssertionError):
    """The loader does something else than the naive one."""


def frozen(value: Any) -> Any:
    """A batch as a value that can be compared, down to types and dtypes, and that no later write can change."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, [(key, frozen(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [frozen(part) for part in value]
    if isinstance(value, cases.Item):
        return type(value).__name__, frozen(vars(value))
    return type(value).__name__, value


def filler(failed: SampleError) -> Any:
    """``on_error=``: says what it was told."""
    return np.array([-1 - failed.index, 1000 * failed.epoch + 10 * (0 if failed.shard is None else 1 + failed.shard)])


@dataclass
class Pair:
    """A loader, the naive one (of twins a loader, too), and the iterators over both that are alive."""

    loader: Any
    naive: Any
    may_fail: bool  # errors may be raised
    one_dataset: bool  # all iterators read one dataset object that is told the epoch: then only one may live
    iterators: list[tuple[Any, Any]] = field(default_factory=list)

    def drop(self, at: int) -> None:
        naive = self.iterators.pop(at)[1]
        if isinstance(naive, NaiveIterator):
            naive.alive = False
        if self.may_fail:
            gc.collect()  # an error that was raised in this thread knows the frames that held the iterator

    def drop_all(self) -> None:
        while self.iterators:
            self.drop(0)

    def both(self, verb: str) -> None:
        """``refresh`` or ``close``, of those that have it: the naive loader and torch's order have not."""
        for loader in (self.loader, self.naive):
            if not (verb == "refresh" and isinstance(loader, torch.utils.data.DataLoader)):
                getattr(loader, verb, lambda: None)()

    def close(self) -> None:
        if not isinstance(self.naive, NaiveLoader):
            self.drop_all()
        self.both("close")


class Program:
    """What is drawn from one seed and run: it raises a `Difference`, or counts what was done."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        self.rng, self.processes = random.Random(seed), processes
        self.counts = Counter[str]()  # what was done, and how often
        self.last_sign = time.monotonic()  # when it was last seen that nothing hangs
        # By their pid those that must be gone in the end although they may be nobody's children any more.
        self.workers: dict[int, psutil.Process] = {}


class Case(Program):
    """A loader and a naive one, and steps of both."""

    LENGTHS: Sequence[int] = (0, 1, 2, 3, 5, 8, 13, 21, 40, 60)
    BATCH_SIZES: Sequence[int] = (1, 2, 3, 4, 7, 16, 100)
    STEPS: Sequence[int] = (4, 10, 25)
    COUNTS: Sequence[int] = (1, 2, 3)  # of workers
    MAY_FAIL = False
    RESTARTS = 3

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng = self.rng
        torch.manual_seed(seed)
        self.steps, self.held = list[str](), list[tuple[Any, Any]]()
        self.known, self.samples = dict[Any, Any](), dict[Any, Any]()
        self.step_ranks: int | None = None
        self.asked: Pair | None = None  # whose next batch is waited for
        self.length = rng.choice(self.LENGTHS)
        self.kind = kind = self.draw_kind()
        self.order = order = self.draw_order()
        self.seed: Any = rng.choice([None, 0, rng.randrange(1 << 62)])
        self.on_error: Any = rng.choice(["raise", "skip", "replace", "fill"]) if kind.bad else "raise"
        if self.on_error == "fill":
            self.on_error = filler if kind.name in ("plain", "batches", "items") else "skip"
        last = rng.choice([None, "keep", "discard", "rollover"])
        self.last_batch = None if order.batches or (last == "rollover" and not order.sized) else last
        self.batch_size = None if order.batches else rng.choice(self.BATCH_SIZES)
        self.reader: ShardedDataLoader | None = None
        self.saved: Any = None
        self.pair = self.make_pair()

    def __str__(self) -> str:
        first = f"{self.length} samples: {self.kind.name}, bad: {sorted(self.kind.bad)}, order: {self.order.name}"
        return "\n    ".join([first, *self.steps])

    def draw_kind(self) -> cases.Kind:
        return cases.draw_kind(self.rng, self.length)

    def draw_order(self) -> cases.Order:
        return cases.draw_order(self.rng, self.kind, self.length)

    def make_dataset(self) -> Any:
        return self.kind.make()

    def make_pair(self, state: Any = None, sampler: Any = None) -> Pair:
        """A loader with a pool, ranks and shards of its own; with ``sampler`` beside another one over it."""
        rng, kind, order = self.rng, self.kind, self.order
        seed = self.seed if sampler is None else self.seed_used
        options: dict[str, Any] = {"seed": seed if state is None else rng.choice([None, 5, seed])}
        options |= self.draw_ranks() | self.draw_shards()
        made = sampler if sampler is not None else None if order.make is None else order.make()
        if order.batches:
            options["batch_sampler"] = made
        else:
            options |= {"batch_size": self.batch_size, "sampler": made, "shuffle": order.shuffle}
            options["last_batch"] = self.last_batch
        if kind.batchify[0] is not None:
            options["batchify_fn"] = kind.batchify[0]
        method, workers = self.draw_pool()
        self.counts[f"loaders, {method}"] += 1
        options |= {"on_error": self.on_error, **self.draw_prefetch()}
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        self.steps.append(f"loader: {method}({workers}), {shown}")
        loader = conftest.made(self.make_dataset(), **self.give_workers(method, workers), **options)
        reference = self.make_reference(loader) if state is None else self.reference
        if state is None:
            self.seed_used = loader.seed
        if sampler is None:
            self.user_sampler, self.reference = made, reference
        length = None if kind.keys is not None else self.length
        epochs = functools.partial(self.epoch_order, reference, self.seed_used)
        naive = NaiveLoader(epochs, self.sample, length, order.sized, kind.batchify[1], options)
        one_dataset = kind.takes_epoch and method in ("inline", "thread")
        return Pair(loader, naive, self.MAY_FAIL or bool(kind.bad) or order.batches, one_dataset)

    def draw_ranks(self) -> dict[str, Any]:
        """A rank among several, as arguments."""
        replicas = 1 if self.order.distributed else self.rng.choice([1, 1, 1, 2, 3, 5])
        with torch.random.fork_rng(devices=[]):  # a sampler may draw its seed
            made = self.order.make() if self.order.batches and self.order.make is not None else None
        if ranks_of(made) is not None:  # `ranks` has cases where the number of ranks changes
            replicas = self.step_ranks = self.step_ranks or replicas
        rank = self.rng.randrange(replicas)
        replicated = not self.order.distributed and (replicas > 1 or self.rng.random() < 0.1)
        return {"num_replicas": replicas, "rank": rank} if replicated else {}

    def draw_shards(self) -> dict[str, Any]:
        """Devices, shards and their weights, as arguments."""
        rng = self.rng
        how = rng.choice(["plain", "plain", "device", "num_shards", "devices", "both"])
        count = rng.choice([1, 2, 3, 4])
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "device": {"device": "cpu"},
            "num_shards": {"num_shards": count},
            "devices": {"devices": ["cpu"] * count},
            "both": {"devices": ["cpu"] * 4, "num_shards": count},
        }
        options = ways[how]
        weights = [rng.choice([1, 1, 2, 3.5, 40]) for _ in range(count)]
        if how not in ("plain", "device") and rng.random() >= 0.6:
            options["shard_weights"] = weights
        if self.kind.name == "named columns" and "devices" in options and rng.random() < 0.5:
            options["resident"] = ("auto", True, 0.6)[count % 3]
        return options

    def draw_method(self) -> str:
        return self.rng.choice(SLOW_METHODS if SLOW_METHODS and self.rng.random() < 0.01 else METHODS)

    def draw_pool(self) -> tuple[str, int]:
        """The name of a pool, and its number of workers."""
        method = self.draw_method()
        if not self.processes and method in conftest.PROCESS_POOLS:
            method = "thread"
        return method, self.rng.choice(self.COUNTS)

    def give_workers(self, method: str, workers: int, **options: Any) -> dict[str, Any]:
        """The arguments of a loader that say who reads."""
        options |= {"restarts": self.RESTARTS} if method in conftest.PROCESS_POOLS else {}
        return {"pool": conftest.make_pool(method, workers, **options)}

    def draw_prefetch(self) -> dict[str, Any]:
        prefetch = self.rng.choice([None, None, 0, 1, 3, 20])
        return {"prefetch": prefetch, "prefetch_epochs": self.rng.choice([None, True, False])}

    def make_reference(self, loader: ShardedDataLoader) -> Any:
        """Another sampler of the order that the loader reads: made again, with the seeds that were drawn."""
        if self.order.make is None:
            plain = SequentialSampler(self.length)
            return RandomSampler(self.length, seed=loader.seed) if self.order.shuffle else plain
        made = again = self.order.make()
        sampler = loader.batch_sampler if self.order.batches else loader.sampler
        while isinstance(sampler, Sampler):
            if isinstance(sampler.seed, int):
                again.seed = int(sampler.seed)
            sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
            again = getattr(again, "sampler", getattr(again, "batch_sampler", None))
        return made

    def epoch_order(self, reference: Any, seed: int, epoch: int) -> Any:
        key = "order", id(reference), seed, epoch
        if key not in self.known:
            self.known[key] = self.order.of(for_ranks(reference, self.step_ranks or 1), epoch, seed)
            self.known["kept", id(reference)] = reference
        return copy.deepcopy(self.known[key])

    def sample(self, index: Any, epoch: int) -> Any:
        """A sample, with the random numbers that belong to it."""
        key = type(index), index, epoch  # a sample may hold its index as it was given
        if key not in self.samples:
            self.reader = self.reader or ShardedDataLoader(self.make_dataset(), 1, sampler=[0], seed=self.seed_used)
            self.samples[key] = self.reader.read(index, epoch=epoch)
        return copy.deepcopy(self.samples[key])

    def choices(self) -> list[tuple[int, Callable[[Pair], None]]]:
        """The steps, and how often each is drawn."""
        steps = [(8, self.begin), (14, self.take), (5, self.take_all), (2, self.drop), (4, self.resume)]
        steps += [(1, self.load_here), (3, self.set_epoch), (2, self.peek), (1, self.read), (3, self.look)]
        return steps + [(1, self.refresh), (1, self.change_prefetch), (1, self.another_loader)]

    def run(self) -> int:
        """Drive both; how many batches were compared."""
        weights, choices = zip(*self.choices(), strict=True)
        try:
            for _ in range(self.rng.choice(self.STEPS)):
                self.do(self.rng.choices(choices, weights)[0])
            self.check_skipped(self.pair)
            while self.held:
                self.check_held()
        finally:
            self.close()
        return self.counts["batches compared"]

    def do(self, step: Callable[[Pair], None]) -> None:
        self.steps.append(step.__name__)
        self.counts[f"step: {step.__name__}"] += 1
        self.last_sign = time.monotonic()
        step(self.pair)
        self.check_place(self.pair)

    def close(self) -> None:
        self.pair.close()

    def note(self, text: object) -> None:
        self.steps[-1] += f" {text}"

    def begin(self, pair: Pair) -> None:
        if len(pair.iterators) >= (1 if pair.one_dataset else 3):
            pair.drop(self.rng.randrange(len(pair.iterators)))
        pair.iterators.append((iter(pair.loader), NaiveIterator(pair.naive)))

    def take(self, pair: Pair) -> None:
        self.take_some(pair, lambda iterator: self.rng.choice([1, 1, 2, 5]))

    def take_all(self, pair: Pair) -> None:
        """To the end; now and then all batches are taken, but the end is not seen."""
        self.take_some(pair, lambda iterator: self.left(iterator) if self.rng.random() < 0.3 else 1 << 30)

    def take_some(self, pair: Pair, draw_count: Callable[[Any], int]) -> None:
        if not pair.iterators:
            self.begin(pair)
        at = self.rng.randrange(len(pair.iterators))
        for _ in range(draw_count(pair.iterators[at][1])):
            if not self.next_of(pair, at):
                return pair.drop(at)

    def left(self, iterator: Any) -> int:
        if not iterator.begun:
            return len(iterator.loader.batches(*iterator.loader.next_place))
        return len(iterator.batches) - (iterator.number - iterator.first)

    def next_of(self, pair: Pair, at: int) -> bool:
        """Compare one batch, or error; whether there may be more."""
        iterator, naive = pair.iterators[at]
        self.asked = pair
        try:
            got = self.outcome(functools.partial(next, iterator))
        finally:
            self.asked = None
        expected = self.expected(naive, got)
        self.note(f"{at}:{self.place_of(naive, expected)}")
        self.compare(got, expected, f"iterator {at}", naive)
        self.counts["batches compared"] += 1
        self.counts["errors compared"] += isinstance(got, Exception)
        if got is not DONE and not isinstance(got, Exception) and self.rng.random() < 0.3:
            self.held.append((got, frozen(got)))
        return expected is not DONE

    def place_of(self, naive: Any, expected: Any) -> str:
        return f"{naive.epoch}/{'end' if expected is DONE else naive.number - 1}"

    def expected(self, naive: Any, got: Any) -> Any:
        try:
            return naive.next(lambda shard, place, good: self.replaced(got, naive, shard, place, good))
        except StopIteration:
            return DONE

    def replaced(self, got: Any, naive: NaiveIterator, shard: int | None, place: int, good: list[Any]) -> Any:
        """Which sample stands in for a bad one: one of the batch, and always the same one."""
        index = self.kind.where(got if shard is None else got[shard])[place]
        key = "replaced", naive.epoch, naive.number - 1, shard, place, tuple(good)
        if index not in good or self.known.setdefault(key, index) != index:
            raise Difference(f"{key}: replaced by {index}, before by {self.known.get(key)}")
        return index

    def outcome(self, ask: Callable[[], Any]) -> Any:
        self.last_sign = time.monotonic()
        try:
            return ask()
        except StopIteration:
            return DONE
        except Exception as error:
            return error

    def compare(self, got: Any, expected: Any, where: str, naive: Any = None) -> None:
        if naive is not None:
            where += f": epoch {naive.epoch}, batch {naive.number - 1}"
        if isinstance(expected, Failure):
            notes, index = "".join(getattr(got, "__notes__", [])), getattr(got, "index", None)
            place = "" if naive is None else f"epoch {naive.epoch}, batch {naive.number - 1},"
            same = isinstance(got, expected.kind) and (not expected.indices or index in expected.indices)
            if same and naive is not None and expected.indices:
                same = place in notes and f"sample {index!r}" in notes
            if not same or isinstance(got, Difference):
                raise Difference(f"{where}: {got!r} of sample {index!r} instead of {expected}; it says: {notes}")
            return
        if isinstance(got, Exception):
            raise Difference(f"{where}: {type(got).__name__} instead of {expected}") from got
        if self.kind.name == "drawing batchify_fn" and naive is not None and got is not DONE:
            got = self.without_draws(got, naive)
        if frozen(got) != frozen(expected):
            raise Difference(f"{where}: {got}\n    expected: {expected}")

    def without_draws(self, got: Any, naive: NaiveIterator, shard: int = 0) -> Any:
        """Draws in ``batchify_fn`` belong to epoch, batch and shard."""
        if isinstance(got, list):
            return [self.without_draws(batch, naive, shard) for shard, batch in enumerate(got)]
        key = "drawn", naive.epoch, naive.number - 1, shard
        if self.known.setdefault(key, got["drawn"]) != got["drawn"]:
            raise Difference(f"{key}: {got['drawn']}, before {self.known[key]}")
        return {"twice": got["batch"] * 2, "count": len(got["batch"])}

    def check_held(self) -> None:
        batch, as_it_was = self.held.pop(0)
        if frozen(batch) != as_it_was:
            raise Difference(f"a batch that was held has changed: {as_it_was}\nnow: {batch}")

    def drop(self, pair: Pair) -> None:
        if pair.iterators:
            pair.drop(self.rng.randrange(len(pair.iterators)))

    def state(self, pair: Pair) -> Any:
        state = pair.loader.state_dict()
        if state != pair.loader.state_dict():
            raise Difference("state_dict() has changed the state")
        return json.loads(json.dumps(state)) if self.rng.random() < 0.8 else state

    def resume(self, pair: Pair) -> None:
        """Go on in a new loader: another pool, other ranks, other shards; perhaps another batch size."""
        state, place = self.state(pair), pair.naive.place
        self.note(place)
        self.check_skipped(pair)
        pair.drop_all()
        if self.rng.random() < 0.8:
            pair.loader.close()
        strict = self.batch_size is None or self.rng.random() < 0.8
        if not strict:
            self.batch_size = self.rng.choice([1, 2, 4, 7, 16])
        self.pair = self.make_pair(state)
        self.pair.loader.load_state_dict(state, strict=strict)
        self.pair.naive.load(place)

    def load_here(self, pair: Pair) -> None:
        """Load a state into the loader that it is from, or an older one: iterators that are alive go on."""
        if self.saved is None or self.rng.random() < 0.5:
            self.saved = self.state(pair), pair.naive.place, self.batch_size
        state, place, batch_size = self.saved
        self.note(place)
        pair.loader.load_state_dict(state, strict=batch_size == self.batch_size)
        pair.naive.load(place)

    def set_epoch(self, pair: Pair) -> None:
        now = pair.naive.next_place[0]
        epoch = self.rng.choice([now, now, max(0, now - 1), now + 1, self.rng.randrange(5)])
        batches = pair.loader.batch_sampler
        inner = [pair.loader.sampler, batches, getattr(batches, "sampler", None)]
        told = self.rng.choice([pair.loader, *(one for one in inner if callable(getattr(one, "set_epoch", None)))])
        if pair.naive.may_be_over and epoch in (now, now + 1):
            return  # it depends on what was read which of the two is next anyway
        self.note(f"{epoch} on the {type(told).__name__}")
        told.set_epoch(epoch)
        pair.naive.set_epoch(epoch)

    def peek(self, pair: Pair) -> None:
        if (pair.one_dataset and pair.iterators) or pair.naive.may_be_over:
            return  # in the second case `peek` says that the epoch is over, where `next` goes on to the next one
        got = self.outcome(pair.loader.peek)
        naive = NaiveIterator(copy.copy(pair.naive))  # the copy begins an epoch, not the loader
        expected = self.expected(naive, got)
        self.compare(got, Failure(IndexError) if expected is DONE else expected, "peek", naive)

    def read(self, pair: Pair) -> None:
        if self.length and not (pair.one_dataset and pair.iterators):
            index: Any = self.rng.randrange(self.length) if self.kind.keys is None else self.rng.choice(self.kind.keys)
            got, epoch = self.outcome(lambda: pair.loader.read(index)), pair.loader.epoch
            expected = Failure(cases.BadSample, [index]) if index in self.kind.bad else self.sample(index, epoch)
            self.compare(got, expected, f"sample {index} of epoch {epoch}")

    def look(self, pair: Pair) -> None:
        """Inspect the loader and its samplers, begin iterators and drop them: the loader stays where it is."""
        loader, before = pair.loader, self.facts(pair)
        one = self.rng.choice([loader.sampler, loader.batch_sampler, loader])
        ways: list[Callable[[Any], Any]] = [repr, len, list, lambda one: next(iter(one), None)]
        for look in self.rng.sample(ways, 2):
            self.outcome(functools.partial(iter if one is loader and look not in ways[:2] else look, one))
        if self.facts(pair) != before:
            raise Difference(f"looked at a {type(one).__name__}: {before} before, {self.facts(pair)} after")

    def facts(self, pair: Pair) -> list[Any]:
        """What a loader says of itself."""
        lengths = [len(pair.loader), len(iter(pair.loader))] if self.order.sized else []
        return [pair.loader.state_dict(), pair.loader.epoch, pair.loader.position, *lengths]

    def refresh(self, pair: Pair) -> None:
        pair.both("refresh")

    def change_prefetch(self, pair: Pair) -> None:
        pair.loader.prefetch = self.rng.choice([None, 0, 1, 10])

    def another_loader(self, pair: Pair) -> None:
        """Another loader over the same sampler."""
        if self.order.make is None:
            return
        beside = self.make_pair(sampler=self.user_sampler)
        with beside.loader:
            beside.naive.next_place = (beside.loader.epoch, beside.naive.begin(beside.loader.epoch))
            for _ in range(self.rng.choice([1, 3])):
                self.rng.choice([self.begin, self.take, self.take_all])(beside)
            beside.drop_all()

    def check_place(self, pair: Pair) -> None:
        if pair.naive.may_be_over:
            return
        found, wanted = [pair.loader.epoch, pair.loader.position], [pair.naive.place[0], pair.naive.position]
        if self.order.sized:
            found, wanted = [*found, len(pair.loader)], [*wanted, pair.naive.batches_in_epoch()]
        if found != wanted:
            raise Difference(f"epoch, position and length are {found} instead of {wanted}")

    def check_skipped(self, pair: Pair) -> None:
        if pair.loader.num_skipped != pair.naive.skipped:
            raise Difference(f"num_skipped is {pair.loader.num_skipped} instead of {pair.naive.skipped}")
        self.counts["samples skipped or replaced"] += pair.naive.skipped
