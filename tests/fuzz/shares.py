"""Ranks that share global batches, while they are killed, leave and join, against one process without shares.

draw_job(rng) -> a `ranks.Job`, read by a plain loader with ``batch_size``: the steps that all ranks must take
     -> events: steps; a kill, and on from the last state that was saved, on other ranks; a state of now; rescale
     -> after each step: the samples that count are those of the step, each once; sizes, shares, states, look-ups
     -> at the end of an epoch, over all kills: each sample, or each token, was read as often as it must be
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sharded_loader import ShardedDataLoader
from tests import conftest
from tests.fuzz import ranks as orders
from tests.fuzz.steps import Difference, Program


def draw_job(rng: random.Random) -> tuple[orders.Job, dict[str, Any], int | None]:
    """An order, the arguments that a plain loader reads it with, and the most ranks that may share its batches."""
    drawn = orders.Drawn(rng)
    drawn.size = size = rng.choice([1, 3, 8, 20, 48])
    kinds = [orders.indices, orders.costs, orders.repeated, orders.windows, orders.endless, orders.batches]
    job = rng.choice([*kinds, orders.batches, orders.packed, orders.mixture])(drawn)
    given = {"seed": orders.SEED, **job.arguments(size)}
    if job.steps is not None or (job.whole != {} and rng.random() < 0.15):  # documents may all be left out
        given["steps_per_epoch"] = job.steps or rng.randint(1, 6)
    elif drawn.evaluate:
        given["evaluate"] = True
    elif not job.in_batches and rng.random() < 0.3:
        given["last_batch"] = rng.choice(["discard", "rollover"] if "costs" not in given else ["discard"])
    if given.keys() & {"steps_per_epoch", "last_batch"} or job.discards:
        job.whole = None
    of_sampler = getattr(given.get("batch_sampler"), "samples_in_batch", None)
    return job, given, of_sampler if job.in_batches else size


class Shares(Program):
    """One case: the ranks that there are, and the step that they come to."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng = self.rng
        self.job, self.given, most = draw_job(rng)
        self.counting = [n for n in (1, 2, 3, 5, 7, 8, 12, 24) if not isinstance(most, int) or n <= most]
        self.pool = rng.choice([None] * 8 + ["thread", "fork" if processes else "thread"])
        plain = ShardedDataLoader(self.job.dataset(), **self.given)
        self.coming = iter(lambda: [self.counted(batch) for batch in plain], None)
        self.steps: list[list[list[Any]]] = []  # of each epoch so far
        self.epoch = self.done = 0
        self.members: list[tuple[Any, Iterator[Any]]] = []
        self.join(None)
        self.saved = self.now()
        self.seen: dict[int, list[list[Any]]] = {}  # the steps of each epoch as they were read the last time

    def __str__(self) -> str:
        return f"{self.job.name}, {len(self.members)} ranks, epoch {self.epoch}, step {self.done}, {sorted(self.given)}"

    def expected(self) -> list[list[Any]]:
        while len(self.steps) <= self.epoch:
            self.steps.append(next(self.coming))
        return self.steps[self.epoch]

    def rows_of(self, batch: Any) -> list[Any]:
        """The samples of a batch, or its rows of documents; of a list of batches, of all."""
        if self.is_list and isinstance(batch, list):
            return [row for one in batch for row in self.samples_of(one)]
        return self.samples_of(batch)

    def samples_of(self, batch: Any) -> list[Any]:
        samples = self.job.read(batch)
        if self.job.name != "packed":
            return samples
        rows: list[list[Any]] = []
        for *piece, begins in samples:
            rows = [*rows, []] if begins else rows
            rows[-1].append(tuple(piece))
        return list(map(tuple, rows))

    is_list = False  # ``micro_batch`` or ``num_shards``

    def counted(self, batch: Any) -> list[Any]:
        return sorted(self.samples_of(batch[0])[: batch[1]] if "evaluate" in self.given else self.samples_of(batch))

    # -- ranks ----------------------------------------------------------------------------------------------

    def member(self, rank: int, replicas: int, state: Any) -> tuple[Any, Iterator[Any]]:
        given = {**self.given, **self.form}
        size = given.pop("batch_size", None)
        if self.pool is not None and self.rng.random() < 0.3:
            given["pool"] = conftest.make_pool(self.pool, 1)
        loader = ShardedDataLoader(
            self.job.dataset(), num_replicas=replicas, rank=rank, global_batch=size or True, **given
        )
        if state is not None:
            loader.load_state_dict(state)
        return loader, iter(loader)

    def join(self, state: Any) -> None:
        """Other processes begin, or go on from a state."""
        self.close()
        chance, limit = self.rng.random(), self.rng.randint(2, 9)
        self.form = {"micro_batch": limit} if chance < 0.25 else {"num_shards": 2} if chance < 0.4 else {}
        self.is_list, replicas = bool(self.form), self.rng.choice(self.counting)
        self.members = [self.member(rank, replicas, state) for rank in range(replicas)]

    def close(self) -> None:
        for loader, _ in self.members:
            loader.close()
        self.members = []

    def now(self) -> tuple[Any, int, int]:
        """A state of any rank, as it comes back from a file, and the step that it stands for."""
        states = [json.loads(json.dumps(loader.state_dict())) for loader, _ in self.members]
        # Where to look for the position is known better by some.
        facts = [{name: state[name] for name in state.keys() - {"landmark", "passed"}} for state in states]
        if any(one != facts[0] for one in facts):
            raise Difference(f"ranks have different states: {states}")
        return self.rng.choice(states), self.epoch, self.done

    # -- events ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.counts[f"order: {self.job.name}"] += 1
        try:
            for _ in range(self.rng.randint(2, 14)):
                event = self.rng.choice(["step", "step", "step", "save", "kill", "resume", "rescale"])
                getattr(self, event)()
                self.counts[f"event: {event}"] += 1
            for _ in range(len(self.expected()) + 1):
                self.step()
        finally:
            self.close()

    def save(self) -> None:
        self.saved = self.now()

    def kill(self) -> None:
        """All ranks are lost, with what they did since the last state that was saved."""
        state, self.epoch, self.done = self.saved
        self.join(state)
        self.follow_if_over()

    def resume(self) -> None:
        self.join(self.now()[0])
        self.follow_if_over()

    def follow_if_over(self) -> None:
        """A state of the end of an epoch is one of the next epoch's beginning, unless the epoch has no steps."""
        if self.done == len(self.expected()) > 0:
            self.follow()

    def rescale(self) -> None:
        replicas, (state, *_) = self.rng.choice(self.counting), self.now()
        for loader, _ in self.members[replicas:]:
            loader.close()
        del self.members[replicas:]
        for rank, (loader, _) in enumerate(self.members):
            loader.rescale(replicas, rank)
        if self.done == len(self.expected()) > 0:
            self.check_end()
            self.members = [(loader, iter(loader)) for loader, _ in self.members]
            self.follow()
        self.members += [self.member(rank, replicas, state) for rank in range(len(self.members), replicas)]

    def check_end(self) -> None:
        for loader, iterator in self.members:
            if (more := next(iterator, None)) is not None:
                raise Difference(f"epoch {self.epoch} is over, but a rank has {more}; {loader}")

    def follow(self) -> None:
        """The next epoch begins. This one was read to its end, perhaps by several generations of ranks."""
        if self.job.whole is not None:
            read = [unit for rows in self.seen.get(self.epoch, []) for row in rows for unit in self.units(row)]
            if Counter(read) != self.job.whole:
                raise Difference(f"epoch {self.epoch}: {Counter(read)}, not {self.job.whole}")
        self.epoch, self.done = self.epoch + 1, 0
        self.counts["epochs"] += 1

    def units(self, row: Any) -> list[Any]:
        pieces = row if self.job.name == "packed" else [row]
        return [unit for piece in pieces for unit in self.job.units(piece)]

    def step(self) -> None:
        expected = self.expected()
        if self.done == len(expected):
            self.check_end()
            self.members = [(loader, iter(loader)) for loader, _ in self.members]
            self.follow()
            return
        found = [next(iterator, None) for _, iterator in self.members]
        if any(batch is None for batch in found):
            raise Difference(f"epoch {self.epoch} ended at step {self.done} of {len(expected)}: {found}")
        evaluates, ranks = "evaluate" in self.given, len(self.members)
        batches = [self.rows_of(batch[0] if evaluates else batch) for batch in found]
        sizes, shares = list(map(len, batches)), [loader.share for loader, _ in self.members]
        mine = [
            batch[1] if evaluates else size * (share > 0)
            for batch, size, share in zip(found, sizes, shares, strict=True)
        ]
        rows = sorted(row for batch, count in zip(batches, mine, strict=True) for row in batch[:count])
        if evaluates and self.job.name == "packed":  # documents are counted
            rows = sorted(row for batch, share in zip(batches, shares, strict=True) if share for row in batch)
        elif any(abs(share - count * ranks / len(rows)) > 1e-9 for share, count in zip(shares, mine, strict=True)):
            raise Difference(f"epoch {self.epoch}, step {self.done}: shares {shares} of {mine}")
        if rows != expected[self.done] or max(sizes) - min(sizes) > 1:
            raise Difference(f"epoch {self.epoch}, step {self.done}: {batches}, not {expected[self.done]}")
        if "micro_batch" in self.form and len({len(batch[0] if evaluates else batch) for batch in found}) > 1:
            raise Difference(f"epoch {self.epoch}, step {self.done}: micro-batches {found}")
        self.seen.setdefault(self.epoch, [])[self.done :] = [rows]
        self.look_up()
        self.done += 1
        self.counts["batches compared"] += ranks

    def look_up(self) -> None:
        """What another rank knows of the share of one."""
        (loader, _), rank = self.rng.choice(self.members), self.rng.randrange(len(self.members))
        epoch, step = loader.epoch, loader.position - 1
        if (epoch, step) != (self.epoch, self.done):
            raise Difference(f"epoch {self.epoch}, step {self.done}: {loader}")
        known, own = loader.indices(epoch, step, rank), self.members[rank][0].indices(epoch, step)
        if known != own:
            raise Difference(f"epoch {epoch}, step {step}: rank {rank} has {own}, and another one knows {known}")
