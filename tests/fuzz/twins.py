"""Two loaders of the same arguments, one without workers, the other one disturbed: every verb gives the same from both.

    seed -> Twins: `ShardedDataLoader`, or torch's ``DataLoader`` of this library; also over mixtures and iterable data
    steps        -> those of `Disturbed`, and look_up, rescale, weigh, report, `resume` with ``skip``

The naive loader of `steps` says what must come. Here the steps are more, and in any order: what the loader without
workers does with them is what must come from workers, too. After each step both are at the same place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharded_loader import InlinePool, interleave
from sharded_loader.torch import DataLoader
from tests import conftest, failures, stream_samples
from tests.fuzz import cases
from tests.fuzz.faults import Disturbed, allowed_bytes
from tests.fuzz.steps import DONE, Case, Difference, Pair, frozen

DROP_IN_ORDERS = ("in order", "shuffle", "a list", "an array", "a list of batches", "a list of keys")
"""Others draw from the global generators, or count their epochs themselves."""

STREAM_FUNCTIONS = ("Parts", "GoOn", "WithStatefulRows", "DrawsOwn")
STREAM_OBJECTS = ("Own", "Stateful", "Told", "ItsOwnIterator", "Late")

BY_WORKERS = "_base_seed", "_snapshot", "dataset_state", "fetcher_state", "_next", "_generator"

WORKER = re.compile(r"\b(in |by )?(worker|thread) \d+( \(pid \d+\))?")


class Twins(Disturbed):
    """A case whose naive loader is a loader without workers.

    Attributes:
        drop_in: it is torch's loader.
        mixture: seed and weights of a mixture; None: the dataset is none.
        streams: how many parts iterable data has; 0: it is read by index.
        persistent: the workers of the drop-in live on, with the dataset as it was.
    """

    def __init__(self, seed: int, processes: bool = True) -> None:
        self.drop_in = random.Random(f"drop-in {seed}").random() < 0.4
        self.mixture: tuple[int, list[int]] | None = None
        self.streams, self.persistent, self.endless = 0, False, dict[str, Any]()
        super().__init__(seed, processes)

    def __str__(self) -> str:
        mixed = f"mixture: {self.mixture}, " if self.mixture else ""
        return f"{'drop-in' if self.drop_in else 'loader'} and its twin, {mixed}{super().__str__()}"

    # -- what there is to drive -----------------------------------------------------------------------------

    def draw_kind(self) -> cases.Kind:
        kind = super().draw_kind()
        while kind.takes_epoch:  # threads, and a loader without workers, have one dataset, which is in one epoch
            kind = super().draw_kind()
        if not self.drop_in and self.length and self.rng.random() < 0.3:
            bad = frozenset(self.rng.sample(range(self.length), min(2, self.length - 1)))
            self.mixture = self.rng.randrange(9), [self.rng.randint(1, 5) for _ in range(2)]
            kind = cases.Kind("mixture", self.mix, bad=bad)
        elif not self.drop_in and self.rng.random() < 0.25:
            lengths = [self.rng.choice([0, 1, 7, 40]) for _ in range(self.rng.randint(1, 5))]
            if self.rng.random() < 0.3 and all(lengths):
                self.endless = {"steps_per_epoch": self.rng.choice([3, 7])}
            self.streams, name = len(lengths), self.rng.choice([*STREAM_FUNCTIONS, *STREAM_OBJECTS])
            more: dict[str, Any] = {}
            if name in STREAM_FUNCTIONS:
                more["seconds"] = [self.rng.choice([0.0, 0.004])] * len(lengths)
                if self.rng.random() < 0.2:
                    at = self.rng.randrange(len(lengths)), self.rng.randrange(5)
                    more["before"] = stream_samples.At(failures.raise_lookup, *at)
            kind = cases.Kind(name, functools.partial(getattr(stream_samples, name), lengths, **more))
        return kind

    def mix(self) -> Any:
        assert self.mixture is not None
        seed, weights = self.mixture
        sources = [self.disturbed(cases.Plain(length, self.kind.bad)) for length in (self.length, 2 * self.length)]
        return interleave(sources, weights, seed=seed, shuffle=True, stop=2 * self.length + 5)

    def draw_order(self) -> cases.Order:
        if self.mixture or self.streams:
            return cases.Order("in order")
        while True:
            order = cases.draw_order(self.rng, self.kind, self.length)
            of_torch = order.name in DROP_IN_ORDERS and (self.length or not order.shuffle)
            if order.sized and (of_torch or not self.drop_in):
                return order

    def make_pair(self, state: Any = None, sampler: Any = None) -> Pair:
        order = self.order
        made = None if order.make is None else order.make()
        options: dict[str, Any] = {"seed": 7, "on_error": self.on_error, **self.draw_shards()}
        options.pop("shard_weights", None)  # of a batch, they are those of the moment when a worker is given it
        options.pop("resident", None)
        shuffle = order.shuffle if made is None else None
        one_by_one = {"batch_size": self.batch_size, "sampler": made, "shuffle": shuffle}
        options |= {"batch_sampler": made} if order.batches else one_by_one
        options["collate_fn"] = self.kind.batchify[0]
        method, workers = self.draw_pool()
        if self.drop_in:
            options |= {} if order.batches else {"drop_last": self.last_batch == "discard"}
            given, without = self.drop_in_workers(method, workers), {}
            kind: Any = DataLoader
        else:
            options |= {"streams": self.streams, **self.endless} if self.streams else self.draw_ranks()
            # Iterable data does not roll over, and has no last batch if it is endless.
            has_none = self.streams and (self.last_batch == "rollover" or self.endless)
            options |= {} if order.batches or has_none else {"last_batch": self.last_batch}
            given = self.give_workers(method, workers) | self.draw_prefetch()
            kind, without = conftest.made, {"pool": InlinePool()}
        self.counts[f"loaders, {method}, {kind.__name__}"] += 1
        self.steps.append(f"loader: {given} {options}")
        pace, self.pace = self.pace, (0.0, 0.0)
        twin, self.pace = kind(self.make_dataset(), **copy.deepcopy(options), **without), pace
        pair = Pair(kind(self.make_dataset(), **options, **given), twin, True, False)
        self.allow_kills(pair)
        return pair

    def drop_in_workers(self, method: str, workers: int) -> dict[str, Any]:
        self.persistent = False
        if method == "inline":
            return {"num_workers": 0}
        given: dict[str, Any] = {"num_workers": "auto" if self.rng.random() < 0.3 else workers}
        given["prefetch_factor"], self.persistent = self.rng.choice([None, 1, 2, 7]), self.rng.random() < 0.4
        given["persistent_workers"] = self.persistent
        if method == "thread":
            return given | {"thread_pool": True}
        if method == "fork" and self.leaks:
            given["max_worker_memory"] = allowed_bytes()
        return given | {"start_method": method, "restarts": self.RESTARTS}

    def pool(self, pair: Pair) -> Any:
        if not self.drop_in:
            return pair.loader.pool
        run = pair.loader._progress.current_run
        newest = None if run is None else pair.loader._progress.live.get(run.number)
        return None if newest is None or newest._shutdown or not pair.loader.num_workers else newest._engine.pool

    # -- both -----------------------------------------------------------------------------------------------

    def both(self, what: str, ask: Callable[[Any], Any]) -> Any:
        """What the loader without workers says; a `Difference` if the other one says something else."""
        expected = Case.outcome(self, lambda: ask(self.pair.naive))
        self.compare(self.outcome(lambda: ask(self.pair.loader)), expected, what)
        return expected

    def compare(self, got: Any, expected: Any, where: str, naive: Any = None) -> None:
        if self.shown(got) != self.shown(expected):
            error = got if isinstance(got, BaseException) else None
            raise Difference(f"{where}: {self.shown(got)}\n    twin: {self.shown(expected)}") from error

    def shown(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return type(value).__name__, WORKER.sub("", str(value)), getattr(value, "index", None)
        return frozen(value)

    def expected(self, naive: Any, got: Any) -> Any:
        return Case.outcome(self, functools.partial(next, naive))

    def place_of(self, naive: Any, expected: Any) -> str:
        return "end" if expected is DONE else f"{self.pair.naive.state_dict().get('samples', '')}"

    def check_place(self, pair: Pair) -> None:
        self.both("place", lambda loader: [len(loader), json.dumps(self.state_of(loader))])
        if not self.drop_in:
            self.both("epoch", lambda loader: [loader.epoch, loader.position])

    def state_of(self, loader: Any) -> dict[str, Any]:
        """A state; of the drop-in without what depends on the workers, and on torch's generator."""
        state: dict[str, Any] = loader.state_dict()
        state["_sampler"] = {**(state.get("_sampler") or {}), "rng": None}
        return {key: state[key] for key in sorted(state) if key not in BY_WORKERS}

    def check_skipped(self, pair: Pair) -> None:
        if not self.drop_in and pair not in self.interrupted:
            self.both("num_skipped", lambda loader: loader.num_skipped)

    # -- steps ----------------------------------------------------------------------------------------------

    def choices(self) -> list[tuple[int, Callable[[Pair], None]]]:
        steps = [(8, self.begin), (14, self.take), (5, self.take_all), (3, self.drop), (4, self.resume)]
        steps += [(2, self.load_here), (3, self.set_epoch), (2, self.read), (3, self.look_up)]
        steps += [(2, self.report), (1, self.refresh)]
        if not self.drop_in:
            steps += [(2, self.peek), (3, self.rescale), (5 if self.mixture else 1, self.weigh)]
            steps += [(1, self.change_prefetch)]
        return steps + self.faults()

    def faults(self) -> list[tuple[int, Callable[[Pair], None]]]:
        faults = [(2, self.kill), (1, self.stop), (2, self.kill_zygote)]
        return faults if self.drop_in else faults + [(3, self.resize), (2, self.close_beside)]

    def begin(self, pair: Pair) -> None:
        if self.mixture or self.persistent:  # its epoch is that of all who share it; its workers have one iterator
            pair.drop_all()
        if len(pair.iterators) >= 3:
            pair.drop(self.rng.randrange(3))
        pair.iterators.append((iter(pair.loader), iter(pair.naive)))

    def left(self, iterator: Any) -> int:
        return self.rng.randrange(20)

    def resume(self, pair: Pair) -> None:
        """Go on in new loaders, with other workers; perhaps without some steps."""
        state = json.loads(json.dumps(pair.naive.state_dict()))
        pair.close()
        self.pair = self.make_pair()
        skip = None
        if self.rng.random() < 0.3:
            first = self.rng.randrange(30)
            skip = [(first, first + self.rng.randrange(4))]
            self.note(f"skip={skip}")
        self.both("load_state_dict", lambda loader: loader.load_state_dict(state, skip=skip))

    def load_here(self, pair: Pair) -> None:
        if self.saved is None or self.rng.random() < 0.5:
            self.saved = json.loads(json.dumps(pair.naive.state_dict()))
        if self.drop_in:  # its persistent workers end
            pair.drop_all()
        self.both("load_state_dict", lambda loader: loader.load_state_dict(self.saved))

    def set_epoch(self, pair: Pair) -> None:
        epoch = self.rng.randrange(4)
        self.note(epoch)
        self.both("set_epoch", lambda loader: loader.set_epoch(epoch))

    def is_free(self) -> bool:
        """Whether any epoch can be read: threads share a mixture."""
        return not self.mixture or not self.pair.iterators

    def peek(self, pair: Pair) -> None:
        if self.is_free():
            self.both("peek", lambda loader: loader.peek())

    def one_index(self) -> Any:
        length = 2 * self.length + 5 if self.mixture else self.length
        return self.rng.choice(self.kind.keys) if self.kind.keys else self.rng.randrange(length + (length < 3))

    def read(self, pair: Pair) -> None:
        index, epoch = self.one_index(), self.rng.randrange(4)
        if self.is_free():
            self.both(f"read({index!r}, {epoch})", lambda loader: loader.read(index, epoch))

    def look_up(self, pair: Pair) -> None:
        epoch, step = self.rng.randrange(4), self.rng.choice([0, 1, 2, 7, 30])
        self.both(f"indices({epoch}, {step})", lambda loader: loader.indices(epoch, step))
        if self.is_free():
            self.both(f"batch({epoch}, {step})", lambda loader: loader.batch(epoch, step))

    def rescale(self, pair: Pair) -> None:
        replicas, size = self.rng.choice([1, 1, 2, 3]), self.rng.choice([None, None, 1, 3, 16])
        rank = self.rng.randrange(replicas)
        self.note(f"{replicas}, {rank}, {size}")
        done = self.both("rescale", lambda loader: loader.rescale(replicas, rank, size))
        if size is not None and not isinstance(done, Exception):
            self.batch_size = size

    def weigh(self, pair: Pair) -> None:
        weights = self.rng.choice([None, [1, 1], [0, 1], [5, 1], [1, 9], [1, 2, 3]])
        self.note(weights)
        self.both("set_weights", lambda loader: loader.set_weights(weights))

    def report(self, pair: Pair) -> None:
        """What the loader says of itself; it disturbs nothing."""
        if pair not in self.interrupted:
            self.both("stats", lambda loader: [loader.stats().batches, loader.stats().samples])
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(RuntimeError):  # no batch yet
            pair.loader.report(Path(folder) / "report.html")
            pair.loader.trace(Path(folder) / "trace.json")

    def refresh(self, pair: Pair) -> None:
        if not self.persistent:
            super().refresh(pair)

    def datasets(self, pair: Pair) -> list[Any]:
        return [pair.loader.dataset, pair.naive.dataset]


class Calm(Twins):
    """Twins that nothing disturbs: they do the same each time."""

    def draw_kind(self) -> cases.Kind:
        kind = super().draw_kind()
        self.leaks, self.pace = False, (0.0, 0.0)
        return kind

    def faults(self) -> list[tuple[int, Callable[[Pair], None]]]:
        return []

    def later(self) -> None:
        pass

    def tune(self, meter: Any, pipeline: Any, now: float) -> None:
        pass
