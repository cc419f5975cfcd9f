"""Ranks that leave, join and resume while they read, against the order that they share.

    seed -> a `Job` (`orders`): an order, and what its global sequence must be
         -> events: steps of all ranks; a state that goes through JSON to other ranks; rescale; weights that are set;
            the next epoch
         -> after each step: each rank has exactly what stands at its places of the sequence; some steps are looked up
         -> at the end of an epoch: each sample, or each token, was read as often as it must be

The expected sequence of an epoch is a list, made by one sampler without ranks. A place counts items: samples, or
batches of a batch sampler. With ``evaluate`` only real samples count. With ``costs`` a step has the samples of its
place, in any order. With ``steps_per_epoch`` all epochs are one endless sequence. Some cases read with threads or
processes.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sharded_loader import LoaderWarning, ShardedDataLoader
from tests import conftest
from tests.fuzz.orders import SEED, Job, draw_job
from tests.fuzz.steps import Difference, Program


class Track:
    """Where all ranks are in one order, and what they must read there.

    Attributes:
        replicas, size: the ranks, and the batch size, as they are now.
        epoch, done: how many items of which epoch were read.
        expected: the items of the epoch; under ``steps_per_epoch`` those of all epochs, as far as they were needed.
        seen: what was read of the epoch.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.epoch, self.done, self.replicas, self.size = job, 0, 0, 0, 0
        self.expected, self.seen = list[Any](), Counter[Any]()

    # -- the order --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An epoch begins, or the ranks are others at its beginning, or the weights are."""
        if self.job.steps is None:
            self.expected = self.job.sequence(self.epoch, self.replicas, self.size)
        else:
            assert self.job.endless is not None
            self.expected, self._coming = [], self.job.endless(self.replicas, self.size)

    def regroup(self, replicas: int) -> None:
        """Other ranks read the same steps, in batches of another size."""
        assert self.job.step_size is not None
        steps, is_over = self.done // self.replicas, 0 < self.end <= self.done
        is_compared = self.job.steps is None and self.done < self.end and not self.job.discards
        before = self.rest_in_steps() if is_compared else []
        self.replicas, self.size = replicas, self.job.step_size // replicas
        self.begin()
        self.done = self.end if is_over else steps * replicas
        now = self.rest_in_steps() if is_compared else []
        fits = [one <= other or other <= one for one, other in zip(now, before, strict=False)]  # some have fillers
        if len(now) != len(before) or not all(fits):
            raise Difference(f"epoch {self.epoch}, {self.done}: steps of {now}, and before of {before}")

    def rest_in_steps(self) -> list[set[Any]]:
        """The samples of the steps that are left, all ranks together."""
        begins = range(self.done, self.end, self.replicas)
        return [set(sum(self.expected[n : n + self.replicas], [])) for n in begins]

    def follow(self, whole: bool) -> None:
        """The next epoch begins. ``whole``: this one was read to its end."""
        if whole and self.job.whole is not None:
            self.check_whole(self.job.whole)
        self.seen.clear()
        self.epoch, self.done = self.epoch + 1, 0
        self.begin()

    def check_whole(self, whole: Counter[Any]) -> None:
        missing, more = whole - self.seen, self.seen - whole
        if (missing and not self.job.discards) or (more and (self.job.evaluate or set(more) - set(whole))):
            raise Difference(f"epoch {self.epoch}: {missing} were not read, and {more} too often")

    @property
    def items(self) -> int:
        """How many items of the sequence a rank takes in a step."""
        return 1 if self.job.in_batches else self.size

    @property
    def end(self) -> int:
        """How many items an epoch has."""
        return len(self.expected) if self.job.steps is None else self.job.steps * self.replicas * self.items

    def item(self, place: int) -> Any:
        """What must be read at a place of the epoch."""
        if self.job.steps is None:
            place %= len(self.expected)
        else:
            place += self.epoch * self.end
            while len(self.expected) <= place:
                self.expected.append(next(self._coming))
        return self.job.in_epoch(self.expected[place], self.epoch)

    def has_step(self) -> bool:
        """Whether the epoch has another step for the ranks that there are now."""
        if self.job.discards and not self.job.in_batches:
            return (self.end - self.done) // self.replicas >= self.items
        return self.done < self.end

    def places(self, rank: int) -> list[int]:
        """The places of a rank in this step. Behind the end the sequence begins again, unless that is for fillers."""
        places = [self.done + number * self.replicas + rank for number in range(self.items)]
        if self.job.evaluate:
            return [place for place in places if place < self.end]
        return places[: -(-(self.end - self.done) // self.replicas)]

    # -- what was read ----------------------------------------------------------------------------------------

    def read(self, found: list[Any]) -> None:
        """All ranks have read a step."""
        real = [one[1] if self.job.evaluate else None for one in found]
        batches = [self.samples_of(one[0] if self.job.evaluate else one) for one in found]
        for batch, count in zip(batches, real, strict=True):
            self.seen.update(unit for sample in batch[:count] for unit in self.job.units(sample))
        if self.job.by_step:
            self.check_step([index for batch, count in zip(batches, real, strict=True) for index in batch[:count]])
        else:
            for rank, (batch, count) in enumerate(zip(batches, real, strict=True)):
                self.check_rank(rank, batch, count)
        self.done = min(self.done + self.replicas * self.items, self.end)

    def samples_of(self, batch: Any) -> list[Any]:
        job = self.job
        if job.shards is None:
            return job.read(batch)
        shards = list(map(job.read, batch))
        if len(shards) > job.shards or not all(shards):
            raise Difference(f"epoch {self.epoch}, {self.done}: {len(shards)} shards, or an empty one: {batch}")
        return [sample for shard in shards for sample in shard]

    def check_rank(self, rank: int, batch: list[Any], real: int | None) -> None:
        job, wanted = self.job, [self.item(place) for place in self.places(rank)]
        if job.in_batches:
            wanted = wanted[0] if wanted else []
        if batch[:real] != wanted or (job.evaluate and not job.in_batches and len(batch) != self.size):
            raise Difference(f"epoch {self.epoch}, {self.done}, rank {rank}: {batch[:real]} of {batch}, not {wanted}")

    def check_step(self, read: list[Any]) -> None:
        size = self.replicas * self.size
        wanted = [self.item(self.done + n) for n in range(min(size, self.end - self.done))]
        if self.job.evaluate or len(wanted) == size:
            same = sorted(read) == sorted(wanted)
        else:
            same = set(read) >= set(wanted) and len(read) - len(wanted) < self.replicas
        if not same:
            raise Difference(f"epoch {self.epoch}, {self.done}: {read}, not {wanted}")

    def set_weights(self, rng: random.Random) -> list[int]:
        """Other weights from here on."""
        job, weights = self.job, self.job.draw_weights(rng)
        assert job.log is not None
        if job.steps is None:
            epoch, position = self.epoch, self.done
        else:
            in_pass = -(-job.length // self.replicas) * self.replicas
            epoch, position = divmod(self.epoch * self.end + self.done, in_pass)
        job.log.append((epoch, position, weights))
        self.begin()
        return weights


class Ranks(Program):
    """One case: the ranks that there are, and where they must be."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        self.look_rng = random.Random(seed)  # looking up changes no case
        self.track = Track(draw_job(self.rng))
        self.replicas, self.pool = 0, self.draw_pool()
        self.draw_ranks()
        self.ranks = [self.joined(rank, None) for rank in range(self.replicas)]
        self.track.begin()

    def __str__(self) -> str:
        job = self.track.job
        more = {"evaluate": job.evaluate, "steps": job.steps, "discard": job.discards, "shards": job.shards}
        return ", ".join([job.name, *(name for name, is_so in {**more, f"{self.pool}": self.pool}.items() if is_so)])

    def draw_pool(self) -> str | None:
        chance = self.rng.random()
        if chance < 0.08:
            return "thread"
        if chance < 0.12 and "fork" in conftest.PROCESS_POOLS:
            return "fork" if self.processes else None
        return "spawn" if self.processes and 0.5 < chance < 0.501 else None

    def draw_ranks(self) -> None:
        """Other ranks, as far as the orders allow it."""
        track, job = self.track, self.track.job
        if not self.replicas or not job.fixed:
            self.replicas = self.rng.choice([n for n in range(1, 13 if job.step_size else 7) if job.allows(n)])
        if job.in_batches and job.step_size is not None and track.replicas:
            self.counts["batches of another size"] += track.replicas != self.replicas
            track.regroup(self.replicas)
            return
        track.replicas = self.replicas
        if job.step_size is not None:
            track.size = job.step_size // self.replicas
        elif not (track.size and job.fixed):
            track.size = self.rng.randint(1, 4)

    def joined(self, rank: int, state: Any) -> tuple[Any, Iterator[Any]]:
        """A rank that begins, or goes on from a state."""
        job = self.track.job
        given = {"seed": SEED, "evaluate": job.evaluate, **job.arguments(self.track.size)}
        if self.pool is not None and self.rng.random() < 0.6:
            given["pool"] = conftest.make_pool(self.pool, 1)
        loader = ShardedDataLoader(job.dataset(), num_replicas=self.replicas, rank=rank, **given)
        if state is not None:
            loader.load_state_dict(state, strict=False)
        return loader, iter(loader)

    # -- events -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Some events, then the rest of the epoch."""
        self.counts[f"order: {self}"] += 1
        try:
            for _ in range(self.rng.randint(1, 12)):
                event = self.rng.choice(["step", "step", "step", "resume", "rescale", "rest", "set_weights"])
                getattr(self, event)()
                self.counts[f"event: {event}"] += 1
            self.rest()
        finally:
            self.close()

    def close(self) -> None:
        for owner, _ in self.ranks:
            owner.close()

    def rest(self) -> None:
        """The rest of the epoch."""
        ends = self.counts["epochs"]
        while self.counts["epochs"] == ends:
            self.step()

    def is_passed(self) -> bool:
        """Whether a state of now is that of the next epoch. An epoch without any step is not passed by loading."""
        return not self.track.has_step() and self.track.done > 0

    def step(self) -> None:
        """One step of all ranks; at the end of the epoch its end, and the next one begins."""
        if not self.track.has_step():
            self.check_end(self.ranks)
            self.ranks = [(owner, iter(owner)) for owner, _ in self.ranks]
            self.follow()
            return
        self.last_sign = time.monotonic()
        found, track = [next(iterator, None) for _, iterator in self.ranks], self.track
        if any(one is None for one in found):
            raise Difference(f"epoch {track.epoch} ended at {track.done} of {track.end}: {found}")
        track.read(found)
        if self.look_rng.random() < 0.3:
            self.look_up(found)
        self.counts["batches compared"] += len(found)

    def check_end(self, ranks: list[tuple[Any, Any]]) -> None:
        for _, iterator in ranks:
            if (more := next(iterator, None)) is not None:
                raise Difference(f"epoch {self.track.epoch} is over, but a rank has {more}")

    def look_up(self, found: list[Any]) -> None:
        """The step that was read, once more: each rank's batch, and its indices as another rank knows them."""
        rank = self.look_rng.randrange(len(self.ranks))
        (mine, _), (other, _) = self.ranks[rank], self.look_rng.choice(self.ranks)
        epoch, step, job, read = mine.epoch, mine.position - 1, self.track.job, found[rank]
        again, indices = mine.batch(epoch, step), mine.indices(epoch, step)
        if repr(again) != repr(read):
            raise Difference(f"epoch {epoch}, batch {step}, rank {rank}: {read}, and looked up {again}")
        if other.indices(epoch, step, rank) != indices:
            raise Difference(f"epoch {epoch}, batch {step}: rank {rank} has {indices}, another one knows other ones")
        if job.name != "packed" and job.shards is None:
            count = len(job.read(read[0] if job.evaluate else read))
            if len(indices[0] if job.evaluate else indices) != count:
                raise Difference(f"epoch {epoch}, batch {step}, rank {rank}: {indices} are not {count} samples")
        self.counts["looked up"] += 1

    def follow(self) -> None:
        """The next epoch begins."""
        self.track.follow(not self.track.has_step())
        self.counts["epochs"] += 1

    def state(self) -> Any:
        """A state of any rank, as it comes back from a file."""
        return json.loads(json.dumps(self.rng.choice(self.ranks)[0].state_dict()))

    def resume(self) -> None:
        """Other processes go on from a state."""
        state = self.state()
        self.close()
        self.draw_ranks()
        self.ranks = [self.joined(rank, state) for rank in range(self.replicas)]
        if self.is_passed():
            self.follow()
        if not self.track.done:  # it may be another order for other ranks
            self.track.begin()

    def rescale(self) -> None:
        """Ranks leave or join between two steps."""
        track, is_sized = self.track, not self.track.job.in_batches or self.track.job.step_size is not None
        state, stayed = self.state(), list(self.ranks)
        self.draw_ranks()
        for owner, _ in stayed[self.replicas :]:
            owner.close()
        for rank, (owner, _) in enumerate(stayed[: self.replicas]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LoaderWarning)  # of another number of samples in a step
                owner.rescale(self.replicas, rank, track.size if is_sized else None)
        over = self.is_passed()
        if over:
            self.check_end(stayed[: self.replicas])
        joined = [self.joined(rank, state) for rank in range(len(stayed), self.replicas)]
        self.ranks = stayed[: self.replicas] + joined
        if over:
            self.ranks = [(owner, iter(owner)) for owner, _ in self.ranks]
            self.follow()
        if not self.track.done:  # it may be another order for other ranks
            self.track.begin()

    def set_weights(self) -> None:
        """The program sets other weights of the mixture, on all ranks."""
        if self.track.job.log is not None:
            weights = self.track.set_weights(self.rng)
            for owner, _ in self.ranks:
                owner.set_weights(weights)
            self.counts["weights set"] += 1
