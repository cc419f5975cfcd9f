"""Leases that are finished, refused and put back at random, on ranks that are killed and come back in other numbers.

seed -> an order, its batches by a few lines of Python; ranks, each with a loader of its own, some with workers
     -> events: leases are taken, done, refused, put back; all ranks save; all are killed and go on from what was saved
        last, on as many or other ranks; a worker is killed; a sample fails once
     -> each lease has the samples, and the random numbers, of its name
     -> in the end: each batch of each epoch was finished once, after all that was lost with a kill is left out
"""

import json
import os
import signal
import time
from collections import Counter
from typing import Any

import numpy as np
from samples import Drawing

import sharded_loader as ours
from sharded_loader import ShardedDataLoader
from tests import conftest
from tests.fuzz.steps import Difference, Program

SEED = 7
EVENTS = ["take"] * 8 + ["done"] * 5 + ["refuse", "again"] * 2 + ["save"] * 2 + ["kill", "kill_worker"]


class Failing(Drawing):
    """Samples that draw a number. One of them fails the next time that it is read in this process."""

    fails: int = -1

    def __getitem__(self, index: int) -> Any:
        if index == self.fails:
            self.fails = -1
            raise OSError(f"sample {index}")
        return super().__getitem__(index)


class Leased(Program):
    """One case."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng = self.rng
        self.length, self.size = rng.choice([0, 1, 5, 23, 40, 97]), rng.randint(1, 5)
        self.discards, self.name = rng.random() < 0.2, rng.choice(["shuffled", "in order", "groups", "buckets"])
        self.pool = rng.choice([*["inline"] * 12, *["thread"] * 2, *(["fork"] if processes else [])])
        self.known: dict[int, list[list[int]]] = {}  # the batches of epochs
        self.numbers: dict[Any, Any] = {}  # what the samples of a lease were when it was read first, by its name
        self.finished: Counter[Any] = Counter()  # (epoch, number) of what is done or refused
        self.open: list[Any] = []
        self.ranks: list[Any] = []
        self.saved: tuple[str, Counter[Any]] = "null", Counter()  # states of all ranks, and what was finished
        self.has_failed = False  # a batch stays open until a state is loaded
        self.begin(rng.randint(1, 5), None)

    def __str__(self) -> str:
        return f"{self.name}, {self.length} samples in batches of {self.size}, {self.pool}, {len(self.ranks)} ranks"

    def arguments(self) -> dict[str, Any]:
        if self.name == "buckets":
            lengths = [(7 * n) % 31 + 1 for n in range(self.length)]
            return {"batch_sampler": ours.SortedBucketSampler(lengths, self.size, shuffle=True, seed=3)}
        given: dict[str, Any] = {"batch_size": self.size, "shuffle": self.name != "in order"}
        given |= {"sampler": ours.RepeatedSampler(self.size)} if self.name == "groups" else {}
        return given | ({"last_batch": "discard"} if self.discards else {})

    def batches_of(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, as one sampler without ranks yields them."""
        if epoch not in self.known:
            given = self.arguments()
            if "batch_sampler" in given:
                found = [list(map(int, batch)) for batch in given["batch_sampler"].iter_epoch(epoch)]
            else:
                order: Any = ours.RandomSampler(self.length, seed=SEED).iter_epoch(epoch)
                order = range(self.length) if self.name == "in order" else order
                items = [index for index in order for _ in range(self.size if self.name == "groups" else 1)]
                found = [items[n : n + self.size] for n in range(0, len(items), self.size)]
                found = [batch for batch in found if len(batch) == self.size or not self.discards]
            self.known[epoch] = found
        return self.known[epoch]

    def begin(self, ranks: int, states: Any) -> None:
        """Other processes begin; each may load its own state alone if there are as many as before."""
        for loader in self.ranks:
            loader.close()
        self.has_failed = False
        alone, self.open, self.ranks = states is not None and len(states) == ranks and self.rng.random() < 0.5, [], []
        for rank in range(ranks):
            pool = conftest.make_pool(self.pool, 1)
            given = {"num_replicas": ranks, "rank": rank, "seed": SEED, "pool": pool, **self.arguments()}
            self.ranks.append(ShardedDataLoader(Failing(self.length), **given))
            if states is not None:
                self.ranks[-1].load_state_dict(states[rank] if alone else states)

    def run(self) -> None:
        self.counts[f"order: {self.name}"] += 1
        try:
            for _ in range(self.rng.randint(10, 60)):
                event = self.rng.choice(EVENTS)
                getattr(self, event)()
                self.counts[f"event: {event}"] += 1
                self.last_sign = time.monotonic()
            self.finish_all()
        finally:
            for loader in self.ranks:
                loader.close()

    # -- events ---------------------------------------------------------------------------------------------

    def take(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            loader = self.rng.choice(self.ranks)
            if self.pool == "inline" and self.length and self.rng.random() < 0.03:
                loader.dataset.fails = self.rng.randrange(self.length)
            self.lease_of(loader)

    def lease_of(self, loader: Any) -> Any:
        """A lease, which is open then; None at the end of an epoch, "failed" if a sample has failed."""
        try:
            lease = loader.lease()
        except OSError:
            self.counts["samples that failed"] += 1
            self.has_failed = True
            return "failed"
        if lease is None:
            self.counts["epochs of a rank"] += 1
            return None
        epoch, number = self.place(lease)
        batches, found = self.batches_of(epoch), np.asarray(lease.batch).tolist()
        if lease.epoch != epoch or number >= len(batches) or lease.indices != batches[number]:
            raise Difference(f"{lease}, and the order has {batches[number : number + 1]}")
        if [row[0] for row in found] != lease.indices or self.numbers.setdefault(lease.name, found) != found:
            raise Difference(f"{lease} has the samples {found}, and had {self.numbers[lease.name]}")
        if (epoch, number) in self.finished or any(self.place(other) == (epoch, number) for other in self.open):
            raise Difference(f"{lease} comes, and it is open or finished")
        self.open.append(lease)
        self.counts["batches compared"] += 1
        return lease

    def place(self, lease: Any) -> tuple[int, int]:
        epoch, position = map(int, lease.name.split("-"))
        return epoch, position // (1 if self.name == "buckets" else self.size)

    def end(self, verb: str) -> None:
        if self.open:
            lease = self.open.pop(self.rng.randrange(len(self.open)))
            getattr(lease, verb)()
            self.finished.update([] if verb == "again" else [self.place(lease)])
            self.counts[f"leases: {verb}"] += 1

    def done(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.end("done")

    def refuse(self) -> None:
        self.end("refuse")

    def again(self) -> None:
        self.end("again")

    def save(self) -> None:
        states = [loader.state_dict() for loader in self.ranks]
        if all("leases" in state for state in states):  # each rank has asked for one
            self.saved = json.dumps(states), Counter(self.finished)

    def kill(self) -> None:
        """All processes are killed, and others go on from what was saved, on as many ranks or on others."""
        text, finished = self.saved
        self.counts["leases lost with a kill"] += len(self.open)
        self.finished = Counter(finished)
        self.resume(json.loads(text))

    def resume(self, states: Any) -> None:
        before = len(self.ranks)
        ranks = self.rng.choice([before if states is None else len(states), self.rng.randint(1, 6)])
        self.begin(ranks, states)
        self.counts["other ranks"] += ranks != before

    def kill_worker(self) -> None:
        pids = [pid for loader in self.ranks for pid in getattr(loader.pool, "pids", ())]
        if pids:
            os.kill(self.rng.choice(pids), signal.SIGKILL)
            self.counts["fault: worker killed"] += 1

    # -- the end --------------------------------------------------------------------------------------------

    def finish_all(self) -> None:
        """Finish everything up to the newest epoch of all ranks, and count."""
        newest = max(loader.epoch for loader in self.ranks)
        is_first = True
        while is_first or self.has_failed:
            if not is_first:
                self.save()
                self.resume(json.loads(self.saved[0]))
            is_first = False
            for loader in self.ranks:
                while self.lease_of(loader) is not None or loader.epoch <= newest:
                    self.last_sign = time.monotonic()
            while self.open:
                self.end("done")
        places = {(epoch, number) for epoch in range(newest + 1) for number in range(len(self.batches_of(epoch)))}
        if (missing := places - self.finished.keys()) or max(self.finished.values(), default=1) > 1:
            twice = [place for place, count in self.finished.items() if count > 1]
            raise Difference(f"(epoch, number) {missing} were lost, and {twice} were finished twice")
        self.counts["finished once"] += len(places)
