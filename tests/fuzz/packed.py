"""Documents packed as they are read, and filtered samples, by ranks that are killed, and that resume on other ranks.

seed -> documents, the arguments of a `PackStream`, parts -> the batches of each part, as its iterator alone gives them
     -> or an order and a filter                         -> the batches of each part, by a few lines of Python
     -> phases: some ranks, each in its own pool, read some steps; workers are killed over documents; the states of
        all ranks go through JSON to the next ranks
     -> after each batch: it is the next one of the part that has advanced in the rank's state
"""

import itertools
import json
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from sharded_loader import PackStream, RandomSampler, SequentialSampler, ShardedDataLoader
from sharded_loader.streams.worker_info import Part, here
from tests.conftest import make_pool
from tests.fuzz.steps import Difference, Program


class Texts:
    """Iterable data, of which parts read every n-th text; its iterators tell where they are, if ``is_stateful``."""

    def __init__(self, texts: list[str], is_stateful: bool) -> None:
        self.texts, self.is_stateful = texts, is_stateful

    def __call__(self, part: int, parts: int) -> Iterator[str]:
        rows = Rows(self.texts[part::parts])
        return rows if self.is_stateful else map(str, rows)


class Rows(Iterator[str]):
    def __init__(self, texts: list[str]) -> None:
        self.texts, self.place = texts, 0

    def __next__(self) -> str:
        if self.place == len(self.texts):
            raise StopIteration
        self.place += 1
        return self.texts[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Tokenizer:
    """Tokens of a text. It fails over one, and over others it kills the worker that reads it, once."""

    def __init__(self, bad: str | None, folder: str, deadly: set[str]) -> None:
        self.bad, self.folder, self.deadly, self.program = bad, folder, deadly, os.getpid()

    def __call__(self, text: str) -> list[int]:
        mark = f"{self.folder}/{text[:8].strip()}"
        if text in self.deadly and os.getpid() != self.program and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if text == self.bad:
            raise OSError(text)
        return list(map(int, text.split()))


class Phases(Program):
    """A `PackStream`, and ranks that read it one after the other."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng, self.folder = self.rng, tempfile.TemporaryDirectory()
        self.parts, self.size = rng.choice([1, 2, 3, 6, 8]), rng.randint(1, 3)
        self.window = rng.choice([1, 2, 5, 9, 40])
        count = self.parts * self.window + rng.randint(2, 80)  # no part is empty
        texts = [" ".join([str(number + 1)] * rng.choice([1, 3, rng.randint(1, 30)])) for number in range(count)]
        self.kind = rng.choice(["list", "list", "iterable", "stateful"])
        self.steps = rng.choice([None, 1, 5, 17])  # per epoch
        may_fail = self.size > 1 and self.window > 4 and self.kind == "list" and count % self.window != 1
        bad, deadly = rng.choice([None, rng.choice(texts)]) if may_fail else None, set(rng.sample(texts, 2))
        given = {"tokens": rng.choice([20, 30, 64]), "window": self.window, "seed": rng.randrange(9)}
        given |= {"shuffle": rng.random() < 0.8, "max_documents": rng.choice([None, 1, 4])}
        dataset = texts if self.kind == "list" else Texts(texts, self.kind == "stateful")
        tokenizer = Tokenizer(bad, self.folder.name, deadly)
        # Loaders listen to ``set_epoch``, so the expected rows come from another one.
        self.rows, self.alone = (PackStream(dataset, tokenize=tokenizer, **given) for _ in range(2))
        self.sequences = {part: self.sequence(part) for part in range(self.parts)}
        self.known: dict[int, list[Any]] = defaultdict(list)
        self.epoch = 0

    dataset: Any = property(lambda self: self.rows)
    arguments: Mapping[str, Any] = MappingProxyType({"on_error": "skip"})
    read_batch: Callable[[Any], Any] = staticmethod(lambda batch: batch["input_ids"].tolist())

    def __str__(self) -> str:
        return f"{self.rows!r}, {self.kind}, parts={self.parts}, size={self.size}, steps={self.steps}"

    def sequence(self, part: int) -> Iterator[Any]:
        """The batches of a part, in all its passes, which are one endless one with ``steps``."""
        batch, passes = list[Any](), 0
        while True:
            self.alone.set_epoch(passes if self.steps else self.epoch)
            here.part = Part(part, self.parts, 0, self.alone)
            items, here.part = iter(self.alone), None
            while True:
                try:
                    batch.append(next(items)["input_ids"].tolist())
                except StopIteration:
                    break
                except OSError:
                    batch.append(None)  # it takes a place
                if len(batch) == self.size:
                    yield [row for row in batch if row is not None]
                    batch = []
            if not self.steps:
                yield from [[row for row in batch if row is not None]] if batch else []
                return
            passes += 1

    def expected(self, part: int, number: int) -> Any:
        known = self.known[part]
        known += islice(self.sequences[part], max(0, number + 1 - len(known)))
        return known[number]

    def run(self) -> None:
        with self.folder:
            states: Any = None
            for _ in range(self.rng.randint(2, 6)):
                ranks = self.rng.randint(1, self.parts) if self.steps else 1
                count = self.rng.randint(0, self.steps or 6)
                states = [self.read(ranks, rank, count, states) for rank in range(ranks)]
                if states[0]["epoch"] and not self.steps:
                    break  # of one epoch

    def read(self, ranks: int, rank: int, count: int, states: Any) -> Any:
        """Let a rank read some batches, and return its state."""
        kinds = ["inline", "thread", *["fork"] * (2 * self.processes)]
        pool = make_pool(self.rng.choice(kinds if ranks < 3 else kinds[:2]), self.rng.randint(1, 3))
        given: dict[str, Any] = {"num_replicas": ranks, "rank": rank} if self.steps else {}
        given |= {"streams": self.parts, "steps_per_epoch": self.steps, "seed": 5, "pool": pool, **self.arguments}
        with ShardedDataLoader(self.dataset, self.size, **given) as loader:
            if states is not None:
                loader.load_state_dict(json.loads(json.dumps(states)))
                self.counts["states loaded"] += 1
            before = self.given(loader)
            for batch in islice(loader, count):
                now = self.given(loader)
                if loader.epoch and not self.steps:
                    break  # the epoch before had no batch left
                (part,) = (part for part in now if now[part] != before.get(part, 0))
                found, expected = self.read_batch(batch), self.expected(part, now[part] - 1)
                if found != expected:
                    raise Difference(
                        f"rank {rank} of {ranks}, batch {now[part] - 1} of part {part}: {found}, not {expected}"
                    )
                before = now
                self.counts["batches compared"] += 1
            return loader.state_dict()

    def given(self, loader: Any) -> dict[int, int]:
        parts = loader.state_dict()["parts"]
        return dict(zip(parts["number"], parts["batches"], strict=True))


class Numbers(list[int]):
    """Samples by index: some fail, and some kill the worker that reads them, once."""

    def __init__(self, length: int, tokenizer: Tokenizer) -> None:
        super().__init__(range(length))
        self.tokenizer = tokenizer

    def __getitem__(self, index: Any) -> Any:
        return self.tokenizer(str(index))[0]


class Filtered(Phases):
    """``keep=`` and ``on_error="refill"``, on ranks that read one after the other."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        Program.__init__(self, seed, processes)
        rng, self.folder = self.rng, tempfile.TemporaryDirectory()
        self.parts, self.size, self.steps = rng.choice([1, 2, 3, 6, 8]), rng.randint(1, 5), rng.choice([1, 5, 17])
        length, self.factor, bad = rng.randint(12, 150), rng.randint(2, 5), rng.randrange(12)
        deadly = set(map(str, rng.sample(range(length), 2))) - {str(bad)}
        self.numbers = Numbers(length, Tokenizer(str(bad), self.folder.name, deadly))
        sampler = RandomSampler(length, seed=rng.randrange(9)) if rng.random() < 0.7 else SequentialSampler(length)
        self.arguments = {"sampler": sampler, "keep": self.keep, "on_error": "refill"}
        self.is_left = lambda index: index != bad and self.keep(index)
        self.sequences = {part: self.sequence(part) for part in range(self.parts)}
        self.known = defaultdict(list)

    dataset = property(lambda self: self.numbers)
    read_batch = staticmethod(lambda batch: batch.tolist())

    def __str__(self) -> str:
        shown = f"{len(self.numbers)} numbers, parts={self.parts}, size={self.size}, steps={self.steps}"
        return f"{self.arguments['sampler']}, {shown}"

    def keep(self, number: int) -> bool:
        return number % self.factor > 0

    def sequence(self, part: int) -> Iterator[Any]:
        indices = itertools.chain.from_iterable(map(self.arguments["sampler"].iter_epoch, itertools.count()))
        batch = list[int]()
        for place, index in enumerate(indices):
            turn, number = divmod(place, self.parts)
            if number == (part + turn) % self.parts and self.is_left(index):
                batch.append(index)
            if len(batch) == self.size:
                yield batch
                batch = []
