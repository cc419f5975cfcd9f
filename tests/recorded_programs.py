"""Random programs that write down what their loaders do: every batch, error and state.

    Fuzz(seed), DropIn(seed), Streams(seed)      .run() fills .arguments and .events

`Fuzz` is a case of `tests.fuzz`. `DropIn` is `sharded_loader.torch.DataLoader`. `Streams` is `ShardedDataLoader` over
iterable data, on one or several ranks. An event is ``[step, what came]``. It holds nothing that depends on time, on
addresses, or on the module that a class lies in.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import Any

from sharded_loader import interleave
from sharded_loader.torch import DataLoader
from tests import conftest, failures, fuzz_cases, fuzz_steps, stream_samples
from tests.drop_in import drop_in_samples

PASSING = [
    (re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*(?:\n|$))*"), "Traceback\n"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x"),
    (re.compile(r"sharded_loader(\.\w+)*\.(?=[A-Z])"), ""),
    (re.compile(r"\b(pid|worker|thread) \d+"), r"\1 N"),
]
"""What a text has of one run, or of one version of the source."""

# -- values as texts ---------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    for pattern, replacement in PASSING:
        text = pattern.sub(replacement, text)
    return text


def digest(value: Any) -> str:
    return hashlib.blake2b(clean(repr(value)).encode(), digest_size=6).hexdigest()


def shown(value: Any) -> str:
    """A batch, or whatever a call returns."""
    if hasattr(value, "__next__"):
        return "an iterator"
    if isinstance(value, int | str | None):
        return clean(repr(value))
    return f"{digest(fuzz_steps.frozen(value))} {clean(' '.join(str(value).split()))[:60]}"


def error_text(error: BaseException) -> str:
    texts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    cause = error.__cause__
    return clean("\n".join(texts)) + ("" if cause is None else f"\nfrom {error_text(cause)}")


def outcome(call: Callable[[], Any], show: Callable[[Any], Any] = shown) -> Any:
    try:
        return show(call())
    except StopIteration:
        return "end"
    except Exception as error:
        return error_text(error)


def plain(value: Any) -> Any:
    """A state as JSON. Long texts, long lists and arrays are shortened to a checksum."""
    if isinstance(value, dict):
        return {f"{key}": plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        long = len(value) > 12 and not any(isinstance(part, dict) for part in value)
        return f"{len(value)} items {digest(value)}" if long else [type(value).__name__, *map(plain, value)]
    if value is None or type(value) in (bool, int, float):
        return value
    return value if isinstance(value, str) and len(value) < 80 else f"{type(value).__name__} {digest(value)}"


def state_of(loader: Any) -> Any:
    return outcome(loader.state_dict, plain)


# -- programs ----------------------------------------------------------------------------------------------------------


class Fuzz(fuzz_steps.Case):
    """A case of the fuzz test."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        self.events: list[Any] = []
        super().__init__(seed, processes)

    @property
    def arguments(self) -> list[str]:
        return [clean(line) for line in str(self).split("\n    ")]

    def outcome(self, ask: Callable[[], Any]) -> Any:
        returned = super().outcome(ask)
        text = error_text(returned) if isinstance(returned, Exception) else shown(returned)
        self.events.append([self.steps[-1].partition(" ")[0], "end" if returned is fuzz_steps.DONE else text])
        return returned

    def next_of(self, pair: fuzz_steps.Pair, at: int) -> bool:
        more = super().next_of(pair, at)
        self.events.append(["state", state_of(pair.loader)])
        return more


class Program:
    """The loaders of all ranks, driven at random. Subclasses make them.

    Attributes:
        unordered: batches come in any order, so whole epochs are written down, sorted and without states.
    """

    unordered = False

    def __init__(self, seed: int, processes: bool = True) -> None:
        self.rng, self.processes = random.Random(f"{type(self).__name__} {seed}"), processes
        self.events: list[Any] = []
        self.arguments: list[str] = []
        self.loaders: list[Any] = []
        self.iterators: list[Any] = []
        self.states: Any = None

    def make(self) -> list[Any]:
        raise NotImplementedError

    def run(self) -> None:
        steps = [(10, self.take), (4, self.take_all), (1, self.leave), (4, self.resume), (1, self.go_back)]
        steps += [(2, self.set_epoch), (1, self.look)]
        try:
            self.loaders = self.make()
            weights, choices = zip(*steps, strict=True)
            for step in self.rng.choices(choices, weights, k=self.rng.choice([4, 8])):
                step()
        finally:
            self.close()

    def ask_all(self, step: str, call: Callable[[Any], Any]) -> None:
        for rank, loader in enumerate(self.loaders):
            self.events.append([f"{step} of rank {rank}", outcome(functools.partial(call, loader))])

    def close(self) -> None:
        self.iterators = []
        for loader in self.loaders:
            getattr(loader, "close", lambda: None)()
        self.loaders = []
        gc.collect()

    def take(self, count: int | None = None) -> None:
        count = 1000 if self.unordered else count or self.rng.choice([1, 2, 4])
        self.iterators = self.iterators or [iter(loader) for loader in self.loaders]
        ended = []
        for rank, (loader, iterator) in enumerate(zip(self.loaders, self.iterators, strict=True)):
            events: list[Any] = []
            while len(events) < count and ["next", "end"] not in events[-1:]:
                events.append(["next", outcome(functools.partial(next, iterator))])
                if not self.unordered:
                    self.events += [[f"next of rank {rank}", events[-1][1]], ["state", state_of(loader)]]
            ended.append(["next", "end"] in events)
            self.events += sorted(events) if self.unordered else []
        if all(ended):
            self.iterators = []

    def take_all(self) -> None:
        self.take(60)

    def leave(self) -> None:
        self.iterators = []

    def save(self) -> None:
        states = [loader.state_dict() for loader in self.loaders]
        with contextlib.suppress(TypeError):  # a dataset's own state
            states = json.loads(json.dumps(states))
        self.states = states[0] if len(states) == 1 else states

    def load(self) -> None:
        self.iterators = []
        self.ask_all("load", lambda loader: loader.load_state_dict(self.states))
        self.events += [["state", state_of(loader)] for loader in self.loaders]

    def resume(self) -> None:
        """Go on in new loaders: other workers, perhaps another number of ranks."""
        self.save()
        self.close()
        self.loaders = self.make()
        self.load()

    def go_back(self) -> None:
        """Load a state, perhaps an older one, into the loaders that are there."""
        if self.states is None or self.rng.random() < 0.5:
            self.save()
        self.load()

    def set_epoch(self) -> None:
        epoch = self.rng.randrange(4)
        self.ask_all(f"set_epoch({epoch})", lambda loader: loader.set_epoch(epoch))

    def look(self) -> None:
        self.ask_all("len", len)


class DropIn(Program):
    """`sharded_loader.torch.DataLoader` over a map-style or an iterable dataset."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng = self.rng
        kind, samples = fuzz_cases.draw_kind(rng, 13), drop_in_samples
        order = rng.choice(list(samples.SAMPLERS))
        given: dict[str, Any] = {"seed": rng.choice([None, None, 7])}
        if rng.random() < 0.35:
            streams = [samples.Uneven, samples.Shared, samples.StatefulStream, samples.StatefulItems]
            kind, order = fuzz_cases.Kind("", rng.choice(streams)), "iterable"
            given |= {"batch_size": rng.choice([1, 2, 4, None]), "streams": rng.choice([None, None, 3])}
        elif rng.random() < 0.4:
            kind = fuzz_cases.Kind("", rng.choice([samples.Squares, samples.Seeds, samples.Counting]))
        self.unordered = kind.make in (samples.Squares, samples.Uneven) and rng.random() < 0.2
        given |= {"collate_fn": kind.batchify[0], "in_order": not self.unordered}
        given |= {"on_error": rng.choice(["raise", "skip", "replace"]), "num_shards": rng.choice([None, None, None, 2])}
        if order != "iterable" and rng.random() < 0.2:
            given["drop_last"] = True
        self.order, self.kind, self.given = order, kind, given

    def make(self) -> list[Any]:
        rng = self.rng
        workers, in_threads = rng.choice([0, 0, 0, 1, 2]), rng.random() < 0.5
        if (self.kind.takes_epoch and in_threads) or not self.processes:
            workers = 0  # threads share what `set_epoch` is called on
        options: dict[str, Any] = {"num_workers": workers}
        if workers:
            options |= {"persistent_workers": rng.random() < 0.5, "prefetch_factor": rng.choice([None, 1, 3])}
            options |= {"thread_pool": True} if in_threads else {"start_method": "fork"}
            if self.order == "random, one generator" and options["prefetch_factor"] is None:
                options["prefetch_factor"] = 2  # the state of the generator shows how far ahead the sampler was asked
        order = {} if self.order == "iterable" else drop_in_samples.SAMPLERS[self.order]()
        dataset, given = self.kind.make(), self.given | order | options
        self.arguments.append(clean(f"{type(dataset).__name__} {self.kind.name}, {self.order}, {given}"))
        return [DataLoader(dataset, **given)]


class Streams(Program):
    """`ShardedDataLoader` over iterable data, on one or several ranks."""

    FUNCTIONS = ("Parts", "GoOn", "WithStatefulRows", "Draws", "DrawsOwn", "WithoutState")
    OBJECTS = ("Own", "Stateful", "Told", "ItsOwnIterator", "Late")

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng = self.rng
        self.lengths = tuple(rng.choice([0, 1, 5, 8, 13]) for _ in range(rng.choice([1, 2, 3, 4])))
        self.kind = kind = rng.choice([*self.FUNCTIONS, *self.OBJECTS, "mixture"])
        steps = rng.choice([None, None, None, 3, 7])
        self.given: dict[str, Any] = {
            "batch_size": rng.choice([1, 3, 4]),
            "last_batch": rng.choice([None, "keep", "discard"]) if steps is None else None,
            "streams": rng.choice([None, 2, 3]) if kind == "mixture" else len(self.lengths),
            "seed": rng.choice([None, 5]),
            "steps_per_epoch": steps,
            "on_error": rng.choice(["raise", "skip"]),
            "num_shards": rng.choice([None, None, 2]),
        }
        fails = rng.random() < 0.3 and kind in self.FUNCTIONS
        self.bad = (rng.randrange(len(self.lengths)), rng.randrange(5)) if fails else None

    def mixture(self, lengths: Any) -> Any:
        sources = [functools.partial(iter, range(100 * at, 100 * at + length)) for at, length in enumerate(lengths)]
        stop = "all_exhausted" if len(lengths) % 2 else "first_exhausted"
        return interleave([range(900, 917), *sources], seed=3, stop=stop)

    def make(self) -> list[Any]:
        rng = self.rng
        ranks = min(rng.choice([1, 1, 1, 2, 3]), self.given["streams"] or 3)
        method, workers = rng.choice(fuzz_steps.METHODS), rng.choice([1, 2, 3])
        # Threads share the global generators. After errors of states the number of a batch depends on time.
        if not self.processes or self.kind == "WithoutState" or (self.kind == "Draws" and method == "thread"):
            method = "inline"
        options: Any = {
            "prefetch": rng.choice([None, None, 0, 1, 9]),
            "prefetch_epochs": rng.choice([None, True, False]),
        }
        make = self.mixture if self.kind == "mixture" else getattr(stream_samples, self.kind)
        text = f"{self.kind}{self.lengths} bad: {self.bad}, ranks: {ranks}, {method}({workers})"
        self.arguments.append(f"{text} {self.given | options}")
        loaders = []
        for rank in range(ranks):
            before = {} if self.bad is None else {"before": stream_samples.At(failures.raise_lookup, *self.bad)}
            replicas: Any = {} if ranks == 1 else {"num_replicas": ranks, "rank": rank}
            pool, dataset = conftest.make_pool(method, workers), make(self.lengths, **before)
            loaders.append(conftest.made(dataset, pool=pool, **self.given, **options, **replicas))
        return loaders

    def look(self) -> None:
        super().look()
        self.ask_all("peek", lambda loader: loader.peek())
