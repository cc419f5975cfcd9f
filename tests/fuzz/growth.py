"""Datasets that grow and lose samples while ranks read them, leave, join and resume: each sample once in each epoch.

events: steps of all ranks; grow; without; a state that goes through JSON to other ranks; rescale; the next epoch
     -> each step is found again by ``indices`` and ``when``
     -> at the end of an epoch: all samples that belong to it were read, no removed one after its removal, and with
        ``evaluate``, where no rank is filled up, none twice
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sharded_loader import LoaderWarning, ShardedDataLoader
from tests import conftest
from tests.fuzz.steps import Difference, Program


class Growing(Program):
    """One case: the samples that there are, and those that each epoch must have."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng = self.rng
        self.total, self.size, self.shuffle = rng.randint(1, 40), rng.randint(1, 5), rng.random() < 0.7
        self.evaluate, self.pool = rng.random() < 0.5, rng.choice([*[None] * 8, "thread", "fork"])
        self.epoch, self.gone, self.log = 0, set[int](), list[str]()
        self.begun = False  # the iterators have given a batch
        self.ranks = self.joined(range(rng.randint(1, 4)))
        self.begin()

    def __str__(self) -> str:
        return f"{self.size} x {len(self.ranks)}, shuffle={self.shuffle}, evaluate={self.evaluate}: {self.log}"

    def begin(self) -> None:
        self.seen, self.must = Counter[int](), {*range(self.total)} - self.gone

    def joined(self, ranks: range, state: Any = None) -> list[tuple[Any, Iterator[Any]]]:
        found = []
        for rank in ranks:
            given: dict[str, Any] = {"shuffle": self.shuffle, "seed": 5, "evaluate": self.evaluate}
            if self.pool in conftest.PROCESS_POOLS or self.pool == "thread":
                given["pool"] = conftest.make_pool(self.pool if self.processes else "thread", 1)
            data = range(self.total)
            loader = ShardedDataLoader(data, self.size, num_replicas=ranks.stop, rank=rank, **given)
            if state is not None:
                loader.load_state_dict(state, strict=False)
            found.append((loader, iter(loader)))
        return found

    def run(self) -> None:
        try:
            for _ in range(self.rng.randint(1, 30)):
                event = self.rng.choice(["step", "step", "step", "grow", "without", "resume", "rescale"])
                getattr(self, event)()
                self.log.append(event)
                self.counts[f"event: {event}"] += 1
            epoch = self.epoch
            while self.epoch == epoch:
                self.step()
        finally:
            self.close(self.ranks)

    @staticmethod
    def close(ranks: list[tuple[Any, Any]]) -> None:
        for loader, _ in ranks:
            loader.close()

    def state(self) -> Any:
        return json.loads(json.dumps(self.rng.choice(self.ranks)[0].state_dict()))

    def grow(self) -> None:
        more = self.rng.randint(0, 10)
        for loader, _ in self.ranks:
            loader.grow(range(self.total + more))
        self.must |= {*range(self.total, self.total + more)}
        self.total += more

    def without(self) -> None:
        removed = {self.rng.randrange(self.total) for _ in range(self.rng.randint(0, 3))}
        if len(self.gone | removed) == self.total:
            return
        for loader, _ in self.ranks:
            loader.without(removed)
        self.gone |= removed
        self.must -= {index for index in removed if not self.seen[index]}

    def resume(self) -> None:
        state = self.state()
        self.close(self.ranks)
        self.ranks, self.begun = self.joined(range(self.rng.randint(1, 4)), state), False
        if self.ranks[0][0].epoch != self.epoch:
            self.follow()

    def rescale(self) -> None:
        count, state = self.rng.randint(1, 4), self.state()
        self.close(self.ranks[count:])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LoaderWarning)  # of another number of samples in a step
            for rank, (loader, _) in enumerate(self.ranks[:count]):
                loader.rescale(count, rank)
        stayed = self.ranks[:count]
        joined = self.joined(range(count), state)
        self.close(joined[: len(stayed)])
        self.ranks = stayed + joined[len(stayed) :]
        is_over = joined[-1][0].epoch != self.epoch
        if is_over and self.begun and any(next(iterator, None) is not None for _, iterator in stayed):
            raise Difference(f"epoch {self.epoch} is over by its state, and a rank that stayed reads on")
        if is_over:
            self.ranks = [(loader, iter(loader)) for loader, _ in self.ranks]
            self.follow()

    def step(self) -> None:
        found = [next(iterator, None) for _, iterator in self.ranks]
        self.begun = True
        ahead = [loader for (loader, _), one in zip(self.ranks, found, strict=True) if one is not None]
        if None in found and ahead and all(loader.epoch == self.epoch + 1 for loader in ahead):
            # They joined, and nothing is left behind their position: the others follow into the next epoch.
            both = zip(self.ranks, found, strict=True)
            self.ranks = [(rank[0], iter(rank[0])) if one is None else rank for rank, one in both]
            found = [next(rank[1], None) if one is None else one for rank, one in zip(self.ranks, found, strict=True)]
        if None in found:
            if any(one is not None for one in found):
                raise Difference(f"epoch {self.epoch} is over for some ranks only: {found}")
            self.ranks, self.begun = [(loader, iter(loader)) for loader, _ in self.ranks], False
            self.follow()
            return
        if self.ranks[0][0].epoch != self.epoch:  # nothing was left behind a loaded position
            self.follow()
        for rank, ((loader, _), one) in enumerate(zip(self.ranks, found, strict=True)):
            batch, real = (one[0].tolist(), one[1]) if self.evaluate else (one.tolist(), len(one))
            self.look_up((self.epoch, loader.position - 1, rank), batch, real)
            wrong = self.gone.intersection(batch[:real])
            if wrong and not wrong <= self.must:
                raise Difference(f"epoch {self.epoch}: {batch} has samples that were removed: {wrong}")
            self.seen.update(batch[:real])
        self.counts["batches compared"] += len(found)

    def look_up(self, step: tuple[int, int, int], batch: list[int], real: int) -> None:
        other = self.rng.choice(self.ranks)[0]
        if other.indices(*step) != ((batch, real) if self.evaluate else batch):
            raise Difference(f"{step} has {batch}, and looked up {other.indices(*step)}")
        for place in range(real)[:1]:
            try:
                places = other.when(batch[place], step[0])
            except ValueError:  # a copy was read by the ranks before
                continue
            if (*step, place) not in places:
                raise Difference(f"{step} has {batch}, and when({batch[place]}) says {places}")

    def follow(self) -> None:
        twice = {index for index, count in self.seen.items() if count > 1}
        if self.must - {*self.seen} or (self.evaluate and twice) or {*self.seen} - self.must - self.gone:
            text = f"epoch {self.epoch}: {self.must - {*self.seen}} are missing, and {twice} came twice"
            raise Difference(f"{text}, of {sorted(self.must)}")
        self.epoch += 1
        self.counts["epochs"] += 1
        self.begin()
