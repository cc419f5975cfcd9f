"""Global batches: each rank's share of a batch that all ranks read together, and the micro-batches of a rank.

    arguments of a loader -> make_shares -> Shares     checked once
    Shares.cut -> Shares of one rank                   when an epoch begins
    Shares(task of a global batch) -> task             indices of the share, and the factor for its loss

The order of the loader is that of one process with batches of all ranks. So positions, states and lengths count whole
steps, and do not depend on the ranks: another number of ranks only cuts other shares. Rank r of R has the items r,
r + R, r + 2R, ... of the epoch, as without global batches; of packed rows, as many adjacent rows; of shards, a share of
each. With ``costs=`` it has as many samples, such that all ranks have nearly equal costs. Sizes differ by at most one.

A batch with fewer samples than ranks, such as the last one of an epoch, gives the other ranks copies of its samples,
whose share is 0: all ranks take equally many steps, no batch is empty, and the mean over all is exact.

What can go wrong: arguments that contradict each other, and a global batch smaller than the ranks. ValueErrors say so
when the loader is made, or by `rescale`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from sharded_loader.extend import Task
from sharded_loader.extend.data import is_stream
from sharded_loader.extend.engine import shard_sizes, split_batch
from sharded_loader.extend.order import parts
from sharded_loader.extend.tools import check_int


@dataclass(frozen=True)
class Shares:
    """Function from the task of a global batch to the task of a rank's share.

    Attributes:
        batch_size: of the loader's order; None: a batch sampler decides it.
        is_global: batches are of all ranks. Otherwise they are only cut into micro-batches.
        micro: maximum number of samples in a micro-batch; None: batches are not lists.
        ranks, rank, costs: of the share; cost of each sample of the dataset, or None.
    """

    batch_size: int | None
    is_global: bool
    micro: int | None
    ranks: int = 1
    rank: int = 0
    costs: Any = None

    def cut(self, replicas: tuple[int, int], rank: int | None, size: object, costs: Any) -> Shares:
        """Return the shares of a rank (None: this one). ``size``: samples in a batch; not an int if they vary."""
        if not self.is_global:
            return self
        if isinstance(size, int) and size < replicas[0]:
            raise ValueError(f"global_batch is {size}, and there are {replicas[0]} ranks: give each of them a sample")
        return replace(self, ranks=replicas[0], rank=replicas[1] if rank is None else rank, costs=costs)

    def __call__(self, task: Task, counted: int | None = None) -> Task:
        """Return the task of a share. The first ``counted`` samples of the whole batch are no padding; None: all."""
        sizes = [shard.rows if hasattr(shard, "cut") else len(shard) for shard in task.shards]
        total, own = sum(sizes), list[Any]()
        # By the position in the epoch, as items are divided among ranks; so ranks take turns with the larger shares.
        turn, count = (self.rank - task.position) % self.ranks, min(self.ranks, total)
        for shard, begin in zip(task.shards, accumulate(sizes, initial=0), strict=False):
            own += _share(shard, count, (turn - begin) % count, None if task.sharded else self.costs)
        if self.micro is not None:
            if task.sharded:
                raise ValueError(f"epoch {task.epoch}, batch {task.seq} is a list of shards: leave out micro_batch")
            # As many for the largest share, so that ranks stay in step inside a batch.
            own = split_batch(own[0], parts(parts(total, self.ranks, cut=False), self.micro, cut=False))
        real = total if counted is None else min(counted, total)
        mine = len(range(turn, real, self.ranks))
        position, sharded = task.position * self.ranks + self.rank, task.sharded or self.micro is not None
        share = mine, mine * self.ranks / max(real, 1)  # a rank may have padding alone
        return replace(task, position=position, shards=tuple(own), sharded=sharded, share=share)


def _share(shard: Any, count: int, number: int, costs: Any) -> list[Any]:
    """Return one of ``count`` shares of a shard, in a list, which is empty if the share is.

    By costs, from the most expensive sample down, each ``count`` samples go to different shares: the most expensive of
    them to the share that is cheapest so far.

    Example:
        >>> costs = np.array([9.0, 1, 5, 4, 2])
        >>> [_share([0, 1, 2, 3, 4], 2, number, costs) for number in (0, 1)]
        [[[0, 1, 4]], [[2, 3]]]
    """
    if hasattr(shard, "cut"):
        return list(shard.cut(shard_sizes(shard.rows, count))[number : number + 1])
    places = np.arange(number, len(shard), count)
    if costs is not None:
        own, loads = costs[np.asarray(shard)], np.zeros(count)
        order, chosen = np.argsort(-own, kind="stable"), []
        for some in np.split(order, range(count, len(order), count)):
            shares = np.argsort(loads[: len(some)], kind="stable")  # the first shares are larger
            loads[shares] += own[some]
            chosen.append(some[shares == number])
        places = np.sort(np.concatenate(chosen))
    found = shard[places] if isinstance(shard, np.ndarray) else [shard[place] for place in places.tolist()]
    return [found] if len(found) else []


def make_shares(dataset: object, batch_size: Any, batch_sampler: object, names: Any, is_list: bool) -> Shares:
    """Check the arguments of a loader, ``global_batch`` and ``micro_batch`` by their names.

    ``is_list``: other arguments make lists of shards, or keep data on the device.
    """
    size, micro, given = names.get("global_batch"), names.get("micro_batch"), type(batch_sampler).__name__
    if is_stream(dataset):
        raise ValueError("each rank reads parts of iterable data, as with keep=: leave out global_batch, micro_batch")
    if micro is not None:
        check_int("micro_batch", micro, 1, "give the maximum number of samples in a micro-batch")
        if is_list:
            raise ValueError("micro_batch makes batches for one device: leave out devices, num_shards and resident")
    if size is not None and batch_size is not None:
        raise ValueError(f"batch_size={batch_size!r} is of one rank, and global_batch={size!r} of all: give one")
    if size is not None and batch_sampler is None:
        advice = "give the number of samples in a step of all ranks. True is for a batch_sampler="
        batch_size = check_int("global_batch", size, 1, advice)
    elif size not in (None, True, samples := getattr(batch_sampler, "samples_in_batch", None)):
        text = f"global_batch is {size!r}, but the {given} makes batches of {samples}"
        raise ValueError(f"{text}: give global_batch=True")
    return Shares(batch_size, size is not None, micro)
