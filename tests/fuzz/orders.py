"""The orders of `tests.fuzz.ranks`: a loader's arguments, and what all ranks together must read.

    draw_job(rng) -> Job: an order, drawn at random -> varied: discard, steps_per_epoch, shards

What must be read is a list that one sampler without ranks has made, or that a few lines of Python count. A `Job` also
knows the units of an epoch (samples, or tokens of documents), each of which must come once.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch.utils.data as torch_data
from samples import Drawing, NoLength

import sharded_loader as ours
from sharded_loader.batchify import Pack
from sharded_loader.samplers.index_samplers import CostSampler
from sharded_loader.sampling.third_party import table_of
from tests.fuzz.steps import Difference

SEED = 7
"""The loaders' own."""


def plain(batch: Any) -> list[Any]:
    """The samples of a batch that are their indices."""
    found: list[Any] = batch.tolist() if hasattr(batch, "tolist") else batch
    return found


def itself(sample: Any) -> list[Any]:
    return [sample]


@dataclass
class Job:
    """An order, and how it is checked.

    Attributes:
        dataset: makes what is read.
        arguments: makes the loader's arguments, by the batch size.
        sequence: the items of an epoch, by its number, the ranks that it is made for and the batch size.
        in_batches: the items are batches.
        by_step: the samples of a step come in any order.
        evaluate: iteration gives ``(batch, real)``.
        in_epoch: an item, and the loader's epoch that it is read in -> what is read.
        read: a batch, or a shard -> its samples.
        units, whole: a sample -> what is counted; all that an epoch has, each once. None: it repeats or leaves out.
        discards: the last incomplete step is left out.
        steps, endless: ``steps_per_epoch``; the items of all epochs, by the ranks and the batch size.
        step_size: the samples of all ranks in a step, if that must not change. Of batches: then ranks that change have
            batches of another size.
        divides: the ranks must divide it.
        fixed: the ranks and the batch size must not change.
        shards: ``num_shards``.
        log: weights that were set, as (epoch of the sampler, position, weights); None: they cannot be set.
        draw_weights: draws weights to set.
        length: of an epoch of the sampler, under ``steps_per_epoch``.
    """

    name: str
    dataset: Callable[[], Any]
    arguments: Callable[[int], dict[str, Any]]
    sequence: Callable[[int, int, int], list[Any]]
    in_batches: bool = False
    by_step: bool = False
    evaluate: bool = False
    in_epoch: Callable[[Any, int], Any] = lambda item, epoch: item
    read: Callable[[Any], list[Any]] = plain
    units: Callable[[Any], list[Any]] = itself
    whole: Counter[Any] | None = None
    discards: bool = False
    steps: int | None = None
    endless: Callable[[int, int], Iterator[Any]] | None = None
    step_size: int | None = None
    divides: int = 0
    fixed: bool = False
    shards: int | None = None
    log: list[tuple[int, int, list[int]]] | None = None
    draw_weights: Callable[[random.Random], list[int]] = lambda rng: [1]
    length: int = 0

    def allows(self, replicas: int) -> bool:
        return (self.step_size or 0) % replicas == 0 and self.divides % replicas == 0


class Drawn:
    """What several orders are drawn from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.length, self.seed = rng, rng.choice([1, 5, 23, 40, 64, 97]), rng.randrange(1000)
        self.lengths = [rng.randint(1, 60) for _ in range(self.length)]
        self.size, self.evaluate = rng.randint(1, 4), rng.random() < 0.4
        self.all = Counter(range(self.length))


# -- plain orders ------------------------------------------------------------------------------------------------------


def indices(drawn: Drawn) -> Job:
    """A sampler of single indices."""
    length, seed, lengths = drawn.length, drawn.seed, drawn.lengths
    name = drawn.rng.choice(["random", "subset", "weighted", "list", "torch"])
    make: Callable[[], Any] = {
        "random": lambda: ours.RandomSampler(length, seed=seed),
        "subset": lambda: ours.SubsetRandomSampler(range(0, length, 2), seed=seed),
        "weighted": lambda: ours.WeightedRandomSampler(lengths, length, seed=seed),
        "list": lambda: list(range(length))[::-1],
        "torch": lambda: torch_data.SequentialSampler(range(length)),
    }[name]
    whole = {"weighted": None, "subset": Counter(range(0, length, 2))}.get(name, drawn.all)
    return Job(
        name,
        lambda: range(length),
        lambda size: {"batch_size": size, "sampler": make()},
        lambda epoch, ranks, size: list(table_of(make(), epoch, 0).items()),
        whole=whole,
    )


def costs(drawn: Drawn) -> Job:
    """``costs=``."""
    length, lengths = drawn.length, drawn.lengths
    return Job(
        "costs",
        lambda: range(length),
        lambda size: {"batch_size": size, "costs": lengths},
        lambda epoch, ranks, size: list(CostSampler(lengths, size * ranks, length, SEED).iter_epoch(epoch)),
        by_step=True,
        whole=drawn.all,
        step_size=drawn.rng.choice([2, 4, 6, 12]),
    )


def repeated(drawn: Drawn) -> Job:
    """`RepeatedSampler`: copies with random numbers of their own."""
    length, seed, copies = drawn.length, drawn.seed, drawn.rng.randint(1, 4)
    of_loader = drawn.rng.random() < 0.5

    def given() -> dict[str, Any]:
        inner = [] if of_loader else [ours.RandomSampler(length, seed=seed)]
        return {"sampler": ours.RepeatedSampler(copies, *inner), "shuffle": of_loader or None}

    @cache
    def numbers(epoch: int) -> list[int]:
        """The random number of each copy of each sample in an epoch, as one process reads them in order."""
        found = []
        with ours.ShardedDataLoader(Drawing(length), 5, seed=SEED, sampler=ours.RepeatedSampler(copies)) as loader:
            loader.set_epoch(epoch)
            for place, (index, number) in enumerate(row for batch in loader for row in batch.tolist()):
                found += [number] * (index == place // copies)
        if len(set(found)) != copies * length:
            raise Difference(f"epoch {epoch}: copies of the same sample have the same random numbers: {found}")
        return found

    def sequence(epoch: int, ranks: int, size: int) -> list[Any]:
        order = ours.RandomSampler(length, seed=SEED if of_loader else seed).iter_epoch(epoch)
        return [(index, copy) for index in order for copy in range(copies)]

    return Job(
        "repeated",
        lambda: Drawing(length),
        lambda size: {"batch_size": size, **given()},
        sequence,
        read=lambda batch: list(map(tuple, batch.tolist())),
        in_epoch=lambda item, epoch: (item[0], numbers(epoch)[item[0] * copies + item[1]]),
        units=lambda sample: [sample[0]],
        whole=Counter(dict.fromkeys(range(length), copies)),
    )


def windows(drawn: Drawn) -> Job:
    """`TokenWindows`: the tokens count up, so a sample shows where it begins."""
    rng, length, stride = drawn.rng, drawn.rng.randint(1, 8), drawn.rng.randint(1, 8)
    sizes = [length + 1 + rng.randint(0, 30), *(rng.randint(1, 30) for _ in range(rng.randint(0, 5)))]
    inside = rng.random() < 0.5
    begins = np.cumsum([0, *sizes]).tolist()
    documents = list(itertools.pairwise(begins)) if inside else [(0, begins[-1])]
    starts = [start for low, high in documents for start in range(low, high - length, stride)]
    wanted = [(tuple(range(n, n + length)), tuple(range(n + 1, n + length + 1))) for n in starts]
    tokens = np.arange(begins[-1], dtype=np.uint16)

    sampler = ours.RandomSampler(len(wanted), seed=drawn.seed)
    return Job(
        "token windows",
        lambda: ours.TokenWindows(tokens, length, stride, documents=np.array(sizes) if inside else None),
        lambda size: {"batch_size": size, "sampler": copy.copy(sampler)},
        lambda epoch, ranks, size: [wanted[n] for n in sampler.iter_epoch(epoch)],
        read=lambda batch: list(zip(*[map(tuple, part.tolist()) for part in batch], strict=True)),
        whole=Counter(wanted),
    )


def endless(drawn: Drawn) -> Job:
    """A sampler without an end and without a length."""
    length, factor = drawn.length, drawn.rng.randint(1, 50)

    def numbers(*_: Any) -> Iterator[int]:
        return (number * number * factor % length for number in itertools.count())

    return Job(
        "endless",
        lambda: range(length),
        lambda size: {"batch_size": size, "sampler": NoLength(numbers)},
        lambda epoch, ranks, size: [],
        steps=drawn.rng.randint(1, 6),
        endless=numbers,
        step_size=drawn.rng.choice([2, 4, 6, 12]),
    )


# -- batches -----------------------------------------------------------------------------------------------------------


def batches(drawn: Drawn) -> Job:
    """A sampler of batches."""
    rng, length, seed, lengths = drawn.rng, drawn.length, drawn.seed, drawn.lengths
    keys, kinds = sorted({min(lengths), max(lengths)}), [f"kind {n % 3}" for n in lengths]
    step_size = None if drawn.evaluate or rng.random() < 0.4 else rng.choice([4, 8, 12])
    last = rng.choice(["keep", "keep", "discard"])
    number = rng.randint(1, 12)
    labels = [n % 4 for n in range(max(length, 8))]
    makers: dict[str, Callable[[int], Any]] = {
        "batches": lambda size: ours.BatchSampler(ours.RandomSampler(length, seed=seed), size),
        "fixed buckets": lambda size: ours.FixedBucketSampler(
            lengths, size, bucket_keys=keys, shuffle=True, seed=seed, last_batch=last
        ),
        "sorted buckets": lambda size: ours.SortedBucketSampler(lengths, size, mult=3, shuffle=True, seed=seed),
        "budget": lambda size: ours.BoundedBudgetSampler(lengths, max_num_tokens=120, seed=seed),
        "one kind": lambda size: ours.GroupedBatchSampler(kinds, size, seed=seed, last_batch=last),
        "classes": lambda size: ours.ClassBalancedBatchSampler(labels, classes=3, samples=2, batches=number, seed=seed),
    }
    name = rng.choice(sorted(makers))
    if name in ("budget", "classes") or length < 20:  # few samples may be batches of any size
        step_size = None

    def make(size: int) -> Any:
        return makers[name](size if step_size is not None else drawn.size)

    def sequence(epoch: int, ranks: int, size: int) -> list[Any]:
        ranks = 1 if drawn.evaluate else ranks
        found = list(make(size).for_ranks(ranks).iter_epoch(epoch))
        for batch in found:
            several = name == "one kind" and len({kinds[n] for n in batch}) > 1
            if several or (name == "classes" and sorted(Counter(labels[n] for n in batch).values()) != [2, 2, 2]):
                raise Difference(f"epoch {epoch}: {batch} are of several kinds, or not two of three classes")
        return found

    has_last = name in ("fixed buckets", "one kind")
    return Job(
        name,
        lambda: range(len(labels) if name == "classes" else length),
        lambda size: {"batch_sampler": make(size)},
        sequence,
        in_batches=True,
        step_size=step_size,
        whole=None if name == "classes" else drawn.all,
        discards=has_last and last == "discard",
    )


def packed(drawn: Drawn) -> Job:
    """`PackSampler` and `Pack`. A token says its document and its place there."""
    rng, lengths, tokens = drawn.rng, drawn.lengths, drawn.rng.choice([20, 60, 100])
    long = rng.choice(["cut", "drop"]) if max(lengths) > tokens else "error"
    documents = [list(range(1000 * n, 1000 * n + count)) for n, count in enumerate(lengths)]
    last = rng.choice(["keep", "keep", "discard"])
    window, at_once, shuffle = rng.choice([None, 4, 16]), rng.choice([1, 3, 20]), rng.random() < 0.8

    step_size = None if rng.random() < 0.4 else rng.choice([4, 8, 12])
    options = {"window": window, "long": long, "shuffle": shuffle, "seed": drawn.seed}

    def of_size(size: int) -> int:
        return drawn.size if step_size is None else size

    def make(rows: int, last: str) -> ours.PackSampler:
        sampler = ours.PackSampler(lengths, tokens, rows, last_batch=last, **options)
        sampler.at_once = at_once
        return sampler

    def pieces(batch: Any) -> list[Any]:
        rows = batch.places[:, 0].tolist()
        firsts = [n == 0 or row != rows[n - 1] for n, row in enumerate(rows)]
        return [
            (document, begin, end, first)
            for document, (_, begin, end, _), first in zip(batch, batch.places.tolist(), firsts, strict=True)
        ]

    def all_epochs(ranks: int, size: int) -> Iterator[Any]:
        """The rows of all epochs, one behind the other, some of them at a time."""
        rows = (pieces(row) for epoch in itertools.count() for row in make(1, "keep").iter_epoch(epoch))
        while True:
            yield list(itertools.chain.from_iterable(itertools.islice(rows, of_size(size))))

    whole = Counter(token for document in documents for token in document if long != "drop" or len(document) <= tokens)
    return Job(
        "packed",
        lambda: documents,
        lambda size: {"batch_sampler": make(of_size(size), last), "batchify_fn": Pack(tokens, pad_id=-1)},
        lambda epoch, ranks, size: [pieces(batch) for batch in make(of_size(size), last).iter_epoch(epoch)],
        in_batches=True,
        step_size=step_size,
        read=unpacked,
        units=lambda piece: list(range(1000 * piece[0] + piece[1], 1000 * piece[0] + piece[2])),
        whole=whole,
        discards=last == "discard",
        endless=all_epochs if whole else None,
    )


def unpacked(batch: Any) -> list[Any]:
    """The pieces of documents in a batch, as (document, begin, end, whether a row begins); all entries are checked."""
    found, bounds = [], [0]
    names = ["input_ids", "position_ids", "segment_ids", "labels"]
    for row in zip(*(batch[name].tolist() for name in names), strict=True):
        ids, segments, whole = row[0], row[2], [list[int]() for _ in names]
        for segment in range(1, max(segments) + 1):
            low, length = segments.index(segment), segments.count(segment)
            piece = list(range(ids[low], ids[low] + length))
            columns = piece, range(length), [segment] * length, [-100, *piece[1:]]
            whole = [[*column, *more] for column, more in zip(whole, columns, strict=True)]
            document, begin = divmod(piece[0], 1000)
            found.append((document, begin, begin + length, segment == 1))
            bounds.append(bounds[-1] + length)
        filler = segments.count(0)
        whole = [[*column, *[pad] * filler] for column, pad in zip(whole, (-1, 0, 0, -100), strict=True)]
        if [*row] != whole:
            raise Difference(f"a row of a packed batch has {row}, not {whole}")
    if batch["cu_seqlens"].tolist() != bounds:
        raise Difference(f"cu_seqlens are {batch['cu_seqlens'].tolist()}, not {bounds}")
    return found


# -- mixtures ----------------------------------------------------------------------------------------------------------


def mixture(drawn: Drawn) -> Job:
    """`interleave`: a schedule of weights, shuffled passes, each way to stop, weights that are set while training."""
    rng, length = drawn.rng, drawn.length
    sources = [list(range(0, 2 * length, 2)), list(range(1, length, 2)) or [1]]
    sources += [list(range(1000, 1003))] * (rng.random() < 0.5)
    stop = rng.choice(["first_exhausted", "all_exhausted", "each_once", "each_once", rng.randint(1, 3 * length)])
    shuffle = rng.random() < 0.5
    can_be_zero = isinstance(stop, int)

    def draw_weights(rng: random.Random) -> list[int]:
        weights = [rng.randint(1, 5) for _ in sources]
        if can_be_zero and rng.random() < 0.3:
            weights[rng.randrange(len(weights))] = 0
        return weights

    changes = [(0, [rng.randint(1, 5) for _ in sources])]
    if rng.random() < 0.4:
        changes = [(0, draw_weights(rng)), (rng.randint(1, 2 * length), changes[0][1])]
    is_planned = shuffle or len(changes) > 1 or stop == "each_once" or can_be_zero
    log: list[tuple[int, int, list[int]]] | None = [] if is_planned else None

    def make(changes: Any, stop: Any) -> Any:
        weights = changes if len(changes) > 1 else changes[0][1]
        return ours.interleave(sources, weights, seed=drawn.seed, stop=stop, shuffle=shuffle)

    def sequence(epoch: int, ranks: int, size: int) -> list[Any]:
        return of_epoch(epoch, tuple((*when, tuple(weights)) for *when, weights in log or []))

    @cache
    def of_epoch(epoch: int, log: tuple[Any, ...]) -> list[Any]:
        """An epoch with weights that were set: its schedule is that of a mixture which is made with them."""
        here, whole = list(changes), make(changes, stop)
        for number, position, given in log:
            weights = list(given)
            if number < epoch:
                here = [(0, weights)]
            elif number == epoch:
                here = [one for one in here if one[0] < position] + [(position, weights)]
        if log:
            # All datasets must have a weight at some place, as they have in the mixture.
            here += [(1 << 40, changes[-1][1])] if 0 in here[-1][1] else []
            whole = make(here, "each_once" if stop == "each_once" else len(whole))
        if shuffle:
            whole.set_epoch(epoch)
        return list(whole)

    once = Counter(itertools.chain.from_iterable(sources)) if stop == "each_once" else None
    return Job(
        f"mixture, {'a number' if can_be_zero else stop}",
        lambda: make(changes, stop),
        lambda size: {"batch_size": size},
        sequence,
        whole=once,
        log=log,
        draw_weights=draw_weights,
    )


# -- any of them -------------------------------------------------------------------------------------------------------


def draw_job(rng: random.Random) -> Job:
    """Any order."""
    drawn = Drawn(rng)
    kinds = [*[indices] * 2, costs, repeated, windows, endless, *[batches] * 3, *[packed] * 2, *[mixture] * 2]
    job = rng.choice(kinds)(drawn)
    job.evaluate = drawn.evaluate and job.steps is None
    job = varied(job, drawn)
    if rng.random() < 0.15:
        job = with_arguments(job, num_shards=rng.randint(1, 3))
        job.shards = job.arguments(1)["num_shards"]
    return job


def with_arguments(job: Job, **more: Any) -> Job:
    arguments = job.arguments
    return replace(job, arguments=lambda size: {**arguments(size), **more})


def varied(job: Job, drawn: Drawn) -> Job:
    """The order with ``last_batch="discard"``, with ``steps_per_epoch``, or as it is."""
    rng, chance = drawn.rng, drawn.rng.random()
    if job.steps is not None:
        return with_arguments(job, steps_per_epoch=job.steps)
    if job.evaluate or chance > 0.45:
        return job
    if not job.in_batches and chance < 0.15:
        return replace(with_arguments(job, last_batch="discard"), discards=True)
    length = min(len(job.sequence(0, ranks, 1)) for ranks in (range(1, 7) if job.in_batches else [1]))
    if chance < 0.15 or not length or (job.name == "packed" and job.endless is None):
        return job
    if job.by_step and job.step_size > length:
        return job
    job = replace(job, steps=rng.randint(1, 6), discards=False, whole=None)
    job = with_arguments(job, steps_per_epoch=job.steps)
    if job.by_step:

        def whole_steps(ranks: int, size: int) -> Iterator[Any]:
            sampler = CostSampler(drawn.lengths, size * ranks, drawn.length, SEED, True)
            return itertools.chain.from_iterable(map(sampler.iter_epoch, itertools.count()))

        return replace(job, endless=whole_steps)
    if job.in_batches and job.step_size is not None and job.name != "batches":
        pass  # the steps stay what they are
    elif job.in_batches or job.name in ("list", "torch") or rng.random() < 0.5:  # a foreign one may change its length
        job = replace(job, fixed=True)
    else:
        job = replace(job, step_size=rng.choice([2, 4, 6, 12]), divides=length)
    return job if job.endless is not None else replace(job, endless=padded(job.sequence), length=length)


def padded(sequence: Callable[[int, int, int], list[Any]]) -> Callable[[int, int], Iterator[Any]]:
    """All epochs, each filled up from its beginning so that all ranks have as many."""

    def found(ranks: int, size: int) -> Iterator[Any]:
        for epoch in itertools.count():
            items = sequence(epoch, ranks, size)
            yield from (items[n % len(items)] for n in range(-(-len(items) // ranks) * ranks))

    return found
