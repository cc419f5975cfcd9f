"""Ranks that leave, join and resume while they read, against the order that they share.

    python -m tests.fuzz_ranks --cases 5000 [--seed N]
    python -m tests.fuzz_ranks --case SEED              one case alone, as a difference names it

    seed -> a `Job`: an order, and what its global sequence must be
         -> events: steps of all ranks; a state that goes through JSON to other ranks; rescale; the next epoch
         -> after each step: each rank has exactly what stands at its places of the sequence

The expected sequence of an epoch is a list, made by one sampler without ranks. A place counts items: samples, or
batches of a batch sampler. With ``evaluate`` only real samples count. With ``costs`` a step has the samples of its
place, in any order. Prints a line with counts at the end. Exit status 1: there was a difference.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.utils.data as torch_data

from sharded_loader import (
    BoundedBudgetSampler,
    FixedBucketSampler,
    RandomSampler,
    ShardedDataLoader,
    SortedBucketSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    interleave,
)
from sharded_loader.sampling.costs import CostSampler
from sharded_loader.sampling.foreign import table_of


class Difference(AssertionError):
    """A rank has read something else."""


@dataclass
class Job:
    """An order, and how it is checked.

    Attributes:
        name: of the order.
        dataset: makes what is read; a sample is its index, or holds it.
        arguments: makes the loader's arguments, by the number of ranks and the batch size.
        sequence: the items of an epoch, by its number, the ranks that it is made for and the batch size.
        in_batches: the items are batches.
        by_step: the samples of a step come in any order, and a step must not change its size.
        evaluate: iteration gives ``(batch, real)``.
    """

    name: str
    dataset: Callable[[], Any]
    arguments: Callable[[int], dict[str, Any]]
    sequence: Callable[[int, int, int], list[Any]]
    in_batches: bool = False
    by_step: bool = False
    evaluate: bool = False


def samples_of(batch: Any) -> Any:
    return batch.tolist() if hasattr(batch, "tolist") else batch


def draw_job(rng: random.Random) -> Job:
    """Any order."""
    length, seed = rng.choice([1, 5, 23, 40, 64, 97]), rng.randrange(1000)
    lengths = [rng.randint(1, 60) for _ in range(length)]
    size, keys = rng.randint(1, 4), sorted({min(lengths), max(lengths)})
    by_sampler: dict[str, Callable[[], Any]] = {
        "random": lambda: RandomSampler(length, seed=seed),
        "subset": lambda: SubsetRandomSampler(range(0, length, 2), seed=seed),
        "weighted": lambda: WeightedRandomSampler(lengths, length, seed=seed),
        "list": lambda: list(range(length))[::-1],
        "torch": lambda: torch_data.SequentialSampler(range(length)),
    }
    by_batches: dict[str, Callable[[], Any]] = {
        "fixed buckets": lambda: FixedBucketSampler(lengths, size, bucket_keys=keys, shuffle=True, seed=seed),
        "sorted buckets": lambda: SortedBucketSampler(lengths, size, mult=3, shuffle=True, seed=seed),
        "budget": lambda: BoundedBudgetSampler(lengths, max_num_tokens=120, seed=seed),
    }
    kind = rng.choice(["sampler", "sampler", "batches", "batches", "costs", "mixture"])
    evaluate = rng.random() < 0.4
    if kind == "sampler":
        name = rng.choice(sorted(by_sampler))
        make = by_sampler[name]
        return Job(
            name,
            lambda: range(length),
            lambda size: {"batch_size": size, "sampler": make()},
            lambda epoch, ranks, size: list(table_of(make(), epoch, 0).items()),
            evaluate=evaluate,
        )
    if kind == "batches":
        name = rng.choice(sorted(by_batches))
        make = by_batches[name]
        return Job(
            name,
            lambda: range(length),
            lambda size: {"batch_sampler": make()},
            lambda epoch, ranks, size: list(make().for_ranks(1 if evaluate else ranks).iter_epoch(epoch)),
            in_batches=True,
            evaluate=evaluate,
        )
    if kind == "costs":
        return Job(
            "costs",
            lambda: range(length),
            lambda size: {"batch_size": size, "costs": lengths},
            lambda epoch, ranks, size: list(CostSampler(lengths, size * ranks, length, 7).iter_epoch(epoch)),
            by_step=True,
            evaluate=evaluate,
        )
    weights = [rng.randint(1, 5), rng.randint(1, 5)]

    def mixture() -> Any:
        sources = [list(range(0, 2 * length, 2)), list(range(1, length, 2)) or [1]]
        return interleave(sources, weights, seed=seed)

    return Job(
        "mixture",
        mixture,
        lambda size: {"batch_size": size},
        lambda epoch, ranks, size: list(mixture()),
        evaluate=evaluate,
    )


class Run:
    """One case: the ranks that there are, and where they must be."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.job = draw_job(self.rng)
        self.counts: Counter[str] = Counter()
        self.epoch = self.done = 0
        self.step_size = self.rng.choice([2, 4, 6, 12])  # samples of all ranks, where that must not change
        self.replicas, self.size = self.draw_ranks()
        self.ranks = [self.joined(rank, None) for rank in range(self.replicas)]
        self.begin()

    def draw_ranks(self) -> tuple[int, int]:
        if self.job.by_step:
            replicas = self.rng.choice([n for n in range(1, self.step_size + 1) if self.step_size % n == 0])
            return replicas, self.step_size // replicas
        return self.rng.randint(1, 6), self.rng.randint(1, 4)

    def joined(self, rank: int, state: Any) -> tuple[ShardedDataLoader[Any], Iterator[Any]]:
        given = {"seed": 7, "evaluate": self.job.evaluate, **self.job.arguments(self.size)}
        if self.rng.random() < 0.05:
            given |= {"num_workers": 1, "thread_pool": True}
        loader = ShardedDataLoader(self.job.dataset(), num_replicas=self.replicas, rank=rank, **given)
        if state is not None:
            loader.load_state_dict(state, strict=False)
        return loader, iter(loader)

    def begin(self) -> None:
        """An epoch begins, or the ranks are others at its beginning."""
        self.expected = self.job.sequence(self.epoch, self.replicas, self.size)

    def run(self) -> None:
        """Some events, then the rest of the epoch."""
        try:
            for _ in range(self.rng.randint(1, 12)):
                event = self.rng.choice(["step", "step", "step", "resume", "rescale", "rest"])
                getattr(self, event)()
                self.counts[event] += 1
            self.rest()
        finally:
            for loader, _ in self.ranks:
                loader.close()

    def rest(self) -> None:
        """The rest of the epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            self.step()

    def step(self) -> None:
        """One step of all ranks; at the end of the epoch its end, and the next one begins."""
        if self.done >= len(self.expected):
            for _, iterator in self.ranks:
                if (more := next(iterator, None)) is not None:
                    raise Difference(f"epoch {self.epoch} is over, but a rank has {more}")
            self.follow([iter(loader) for loader, _ in self.ranks])
            return
        found = [next(iterator, None) for _, iterator in self.ranks]
        if any(one is None for one in found):
            raise Difference(f"epoch {self.epoch} ended at {self.done} of {len(self.expected)}: {found}")
        self.check([samples_of(one[0] if self.job.evaluate else one) for one in found], found)
        self.counts["batches"] += len(found)
        self.done = min(self.done + self.replicas * self.items, len(self.expected))

    def follow(self, iterators: list[Iterator[Any]]) -> None:
        """The next epoch begins."""
        self.ranks = [(loader, iterator) for (loader, _), iterator in zip(self.ranks, iterators, strict=True)]
        self.epoch, self.done = self.epoch + 1, 0
        self.begin()

    @property
    def items(self) -> int:
        """How many items of the sequence a rank takes in a step."""
        return 1 if self.job.in_batches else self.size

    def places(self, rank: int) -> list[int]:
        """The places of a rank in this step. Behind the end the sequence begins again, unless that is for fillers."""
        end = len(self.expected)
        places = [self.done + number * self.replicas + rank for number in range(self.items)]
        if self.job.evaluate:
            return [place for place in places if place < end]
        mine = -(-(end - self.done) // self.replicas)
        return [place % end if place >= end else place for place in places[:mine]]

    def check(self, batches: list[Any], found: list[Any]) -> None:
        if self.job.by_step:
            self.check_step(batches, found)
            return
        for rank, (batch, one) in enumerate(zip(batches, found, strict=True)):
            wanted = [self.expected[place] for place in self.places(rank)]
            if self.job.in_batches:
                wanted = wanted[0] if wanted else []
            real = one[1] if self.job.evaluate else len(batch)
            if batch[:real] != wanted or (self.job.evaluate and not self.job.in_batches and len(batch) != self.size):
                raise Difference(f"epoch {self.epoch}, {self.done}, rank {rank}: {one}, not {wanted}")

    def check_step(self, batches: list[Any], found: list[Any]) -> None:
        wanted = self.expected[self.done : self.done + self.step_size]
        real = [one[1] for one in found] if self.job.evaluate else [len(batch) for batch in batches]
        read = [index for batch, count in zip(batches, real, strict=True) for index in batch[:count]]
        if self.job.evaluate or len(wanted) == self.step_size:
            same = sorted(read) == sorted(wanted)
        else:
            same = set(read) >= set(wanted) and len(read) - len(wanted) < self.replicas
        if not same:
            raise Difference(f"epoch {self.epoch}, {self.done}: {found}, not {wanted}")

    def state(self) -> Any:
        """A state of any rank, as it comes back from a file."""
        return json.loads(json.dumps(self.rng.choice(self.ranks)[0].state_dict()))

    def resume(self) -> None:
        """Other processes go on from a state."""
        state, over = self.state(), self.done >= len(self.expected)
        for loader, _ in self.ranks:
            loader.close()
        self.replicas, self.size = self.draw_ranks()
        self.ranks = [self.joined(rank, state) for rank in range(self.replicas)]
        if over:
            self.follow([iterator for _, iterator in self.ranks])
        elif not self.done:
            self.begin()

    def rescale(self) -> None:
        """Ranks leave or join between two steps."""
        state, stayed = self.state(), list(self.ranks)
        over = self.done >= len(self.expected)
        self.replicas, self.size = self.draw_ranks()
        for loader, _ in stayed[self.replicas :]:
            loader.close()
        for rank, (loader, iterator) in enumerate(stayed[: self.replicas]):
            loader.rescale(self.replicas, rank, None if self.job.in_batches else self.size)
            if over and next(iterator, None) is not None:
                raise Difference(f"epoch {self.epoch} is over, and goes on after rescale")
        joined = [self.joined(rank, state) for rank in range(len(stayed), self.replicas)]
        self.ranks = stayed[: self.replicas] + joined
        if over:
            self.follow([iter(loader) for loader, _ in self.ranks])
        elif not self.done:
            self.begin()


def run_cases(seeds: Any) -> tuple[Counter[str], int]:
    """What was done in all cases, and how many differences there were."""
    counts: Counter[str] = Counter()
    wrong = 0
    for seed in seeds:
        case = None
        try:
            case = Run(seed)
            case.run()
        except Exception:
            wrong += 1
            print(f"--case {seed}: {case and case.job.name}\n{traceback.format_exc()}", flush=True)
        counts["cases"] += 1
        if case is not None:
            counts += case.counts
            counts[case.job.name] += 1
    return counts, wrong


def main() -> int:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_ranks", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--case", type=int)
    given = parser.parse_args()
    began = time.monotonic()
    seeds = range(given.seed, given.seed + given.cases) if given.case is None else [given.case]
    counts, wrong = run_cases(seeds)
    for name, count in sorted(counts.items()):
        print(f"{name:40}{count:>10,}")
    print(f"{wrong} differences in {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
