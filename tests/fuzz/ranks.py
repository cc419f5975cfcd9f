"""Ranks that leave, join and resume while they read, against the order that they share.

    draw_job(rng) -> a `Job`: a loader's arguments, and what its global sequence must be; with discard, steps_per_epoch
         -> events: steps of all ranks; a state that goes through JSON to other ranks; rescale; weights that are set;
            the next epoch
         -> after each step: each rank has exactly what stands at its places of the sequence; some steps are looked up,
            and found again from one of their samples
         -> at the end of an epoch: each sample, or each token, was read as often as it must be

The expected sequence of an epoch is a list that one sampler without ranks has made, or that a few lines of Python
count. A place counts items: samples, or batches. With ``evaluate`` only real samples count. With ``costs`` a step has
the samples of its place, in any order. With ``steps_per_epoch`` all epochs are one endless sequence.
"""

import copy
import itertools
import json
import math
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch.utils.data as torch_data
from samples import Drawing, NoLength

import sharded_loader as ours
from sharded_loader import LoaderWarning, ShardedDataLoader
from sharded_loader.batchify import Pack
from sharded_loader.samplers.bijections import uniforms
from sharded_loader.samplers.costs import sampler_of
from sharded_loader.sampling.third_party import table_of
from tests import conftest
from tests.fuzz.steps import Difference, Program

SEED = 7  # the loaders' own


@dataclass
class Job:
    """An order, and how it is checked."""

    name: str
    dataset: Callable[[], Any]
    arguments: Callable[[int], dict[str, Any]]  # of the loader, by the batch size
    # The items of an epoch, by its number, the ranks that it is made for and the batch size.
    sequence: Callable[[int, int, int], list[Any]]
    in_batches: bool = False  # the items are batches
    by_step: bool = False  # the samples of a step come in any order
    evaluate: bool = False  # iteration gives ``(batch, real)``
    in_epoch: Callable[[Any, int], Any] = lambda item, epoch: item  # and the loader's epoch -> what is read
    # A batch, or a shard -> its samples, which may be their indices.
    read: Callable[[Any], list[Any]] = lambda batch: batch.tolist() if hasattr(batch, "tolist") else batch
    units: Callable[[Any], list[Any]] = lambda sample: [sample]  # what is counted
    whole: Counter[Any] | None = None  # all that an epoch has, each once; None: it repeats or leaves out
    discards: bool = False  # the last incomplete step is left out
    steps: int | None = None  # ``steps_per_epoch``
    endless: Callable[[int, int], Iterator[Any]] | None = None  # the items of all epochs, by ranks and batch size
    # The samples of all ranks in a step, if that must not change: other ranks have batches of another size.
    step_size: int | None = None
    divides: int = 0  # the ranks must divide it
    fixed: bool = False  # the ranks and the batch size must not change
    shards: int | None = None  # ``num_shards``
    log: list[tuple[int, int, Any]] | None = None  # weights that were set, where; None: they cannot be set
    draw_weights: Callable[[random.Random], Any] = lambda rng: [1]
    set_weights: Callable[[Any, Any], None] = lambda loader, weights: loader.set_weights(weights)
    length: int = 0  # of an epoch of the sampler, under ``steps_per_epoch``

    def allows(self, replicas: int) -> bool:
        return (self.step_size or 0) % replicas == 0 and self.divides % replicas == 0


class Drawn:
    """What several orders are drawn from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.length, self.seed = rng, rng.choice([1, 5, 23, 40, 64, 97]), rng.randrange(1000)
        self.lengths = [rng.randint(1, 60) for _ in range(self.length)]
        self.size, self.evaluate = rng.randint(1, 4), rng.random() < 0.4
        self.all = Counter(range(self.length))
        # The second column, of ``costs=`` or of ``limits=``, is 0 for some samples, but not for all.
        self.others = [rng.choice([0, 0, rng.randint(1, 30)]) for _ in self.lengths[1:]] + [7]
        self.has_others = rng.random() < 0.5
        self.costs: Any = {"length": self.lengths, "other": self.others} if self.has_others else self.lengths


def indices(drawn: Drawn) -> Job:
    """A sampler of single indices."""
    length, seed = drawn.length, drawn.seed
    name = drawn.rng.choice(["random", "subset", "list", "torch"])
    make: Callable[[], Any] = {
        "random": lambda: ours.RandomSampler(length, seed=seed),
        "subset": lambda: ours.SubsetRandomSampler(range(0, length, 2), seed=seed),
        "list": lambda: list(range(length))[::-1],
        "torch": lambda: torch_data.SequentialSampler(range(length)),
    }[name]
    whole = {"subset": Counter(range(0, length, 2))}.get(name, drawn.all)
    return Job(
        name,
        lambda: range(length),
        lambda size: {"batch_size": size, "sampler": make()},
        lambda epoch, ranks, size: list(table_of(make(), epoch, 0).items()),
        whole=whole,
    )


def weighted(drawn: Drawn) -> Job:
    """`WeightedRandomSampler`, whose weights change. Those of a place are the first ones, changed one by one."""
    length, first, seed, rng = drawn.length, list(map(float, drawn.lengths)), drawn.seed, drawn.rng
    replacement, around = rng.random() < 0.5, rng.choice(["", "", "batches", "copies"])
    size_of_batch, copies, log = drawn.size, rng.randint(1, 3), []
    per_item = {"batches": size_of_batch, "copies": copies}.get(around, 1)
    draws = rng.randint(1, length * 2) if replacement else rng.randint(1, length)

    def make() -> Any:
        return ours.WeightedRandomSampler(first, draws, replacement, seed)

    def given(size: int) -> dict[str, Any]:
        if around == "batches":
            return {"batch_sampler": ours.BatchSampler(make(), size_of_batch)}
        return {"batch_size": size, "sampler": ours.RepeatedSampler(copies, make()) if around else make()}

    def draw_weights(rng: random.Random) -> tuple[list[int], list[float]]:
        least = 0.5 if not replacement or length == 1 else 0
        some = [rng.randrange(length) for _ in range(rng.randint(1, 5))]
        return some, [rng.choice([max(rng.randint(0, 3), least), rng.random() + 0.1]) for _ in some]

    def weights_at(epoch: int, place: int) -> list[float]:
        now = list(first)
        for number, at, (indices, values) in log:
            at = at * per_item if around == "batches" else -(-at // per_item)
            if (number, at) <= (epoch, place):
                for index, value in zip(indices, values, strict=True):
                    now[index] = value
        return now

    def drawn_at(epoch: int) -> Iterator[int]:
        """One draw after the other, each from the weights at its place."""
        begins = {at * per_item if around == "batches" else -(-at // per_item) for e, at, _ in log if e == epoch}
        left, race = set(range(length)), uniforms(length, seed, "weighted", epoch)
        for place in range(draws):
            now = weights_at(epoch, place)
            if replacement:
                yield list(ours.WeightedRandomSampler(now, draws, True, seed).iter_epoch(epoch))[place]
                continue
            if place in begins and place:
                race = uniforms(length, seed, "weighted", epoch, place)
            left.remove(winner := min(left, key=lambda n: -math.log1p(-race[n]) / now[n] if now[n] else math.inf))
            yield winner

    def sequence(epoch: int, ranks: int, size: int) -> list[Any]:
        found = list(drawn_at(epoch))
        if around == "batches":
            return [found[n : n + size_of_batch] for n in range(0, draws, size_of_batch)]
        return [index for index in found for _ in range(per_item)]

    return Job(
        f"weighted, {'repeatedly' if replacement else 'once'} {around}",
        lambda: range(length),
        given,
        sequence,
        in_batches=around == "batches",
        log=log,
        draw_weights=draw_weights,
        set_weights=lambda loader, change: nested_last(loader).update(*change),
    )


def nested_last(loader: Any) -> Any:
    """The innermost sampler of a loader."""
    sampler = loader.sampler if loader.sampler is not None else loader.batch_sampler
    return sampler.sampler if isinstance(sampler, ours.RepeatedSampler) else sampler


def costs(drawn: Drawn) -> Job:
    """``costs=``, of one column or of two."""
    length = drawn.length
    return Job(
        "costs",
        lambda: range(length),
        lambda size: {"batch_size": size, "costs": drawn.costs},
        lambda epoch, ranks, size: list(cost_sampler(drawn, size * ranks).iter_epoch(epoch)),
        by_step=True,
        whole=drawn.all,
        step_size=drawn.rng.choice([2, 4, 6, 12]),
    )


def cost_sampler(drawn: Drawn, size: int, whole_steps: bool = False) -> Any:
    return sampler_of(drawn.costs, size, drawn.length, SEED, whole_steps, drawn.length)


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
    most = rng.choice([7, 20, 60])  # of the second limit
    long = rng.choice(["cut", "drop"]) if max(lengths) > tokens else "error"
    if drawn.has_others:
        long = "drop" if max(lengths) > tokens or max(drawn.others) > most else "error"
    documents = [list(range(1000 * n, 1000 * n + count)) for n, count in enumerate(lengths)]
    last = rng.choice(["keep", "keep", "discard"])
    window, at_once, shuffle = rng.choice([None, 4, 16]), rng.choice([1, 3, 20]), rng.random() < 0.8

    step_size = None if rng.random() < 0.4 else rng.choice([4, 8, 12])
    options: dict[str, Any] = {"window": window, "long": long, "shuffle": shuffle, "seed": drawn.seed}
    in_parts = rng.random() < 0.3
    if in_parts:
        options["multiple"] = 4
    pack = Parts(tokens) if in_parts else Pack(tokens, pad_id=-1)

    def of_size(size: int) -> int:
        return drawn.size if step_size is None else size

    def make(rows: int, last: str) -> ours.PackSampler:
        if drawn.has_others:
            limits = {"tokens": tokens, "others": most}
            columns = {"tokens": lengths, "others": drawn.others}
            sampler = ours.PackSampler(columns, rows=rows, last_batch=last, limits=limits, **options)
        else:
            sampler = ours.PackSampler(lengths, tokens, rows, last_batch=last, **options)
        sampler.at_once = at_once
        return sampler

    def pieces(batch: Any) -> list[Any]:
        rows = batch.places[:, 0].tolist()
        firsts = [n == 0 or row != rows[n - 1] for n, row in enumerate(rows)]
        if drawn.has_others and max(np.bincount(rows, [drawn.others[document] for document in batch])) > most:
            raise Difference(f"the rows of {list(batch)} have more than {most} of the second limit")
        return [
            (document, begin, end, first)
            for document, (_, begin, end, _), first in zip(batch, batch.places.tolist(), firsts, strict=True)
        ]

    def all_epochs(ranks: int, size: int) -> Iterator[Any]:
        """The rows of all epochs, one behind the other, some of them at a time."""
        rows = (pieces(row) for epoch in itertools.count() for row in make(1, "keep").iter_epoch(epoch))
        while True:
            yield list(itertools.chain.from_iterable(itertools.islice(rows, of_size(size))))

    kept = [len(d) <= tokens and (not drawn.has_others or drawn.others[n] <= most) for n, d in enumerate(documents)]
    whole = Counter(token for n, d in enumerate(documents) for token in d if long != "drop" or kept[n])
    return Job(
        "packed",
        lambda: documents,
        lambda size: {"batch_sampler": make(of_size(size), last), "batchify_fn": pack},
        lambda epoch, ranks, size: [pieces(batch) for batch in make(of_size(size), last).iter_epoch(epoch)],
        in_batches=True,
        step_size=step_size,
        read=unpacked,
        units=lambda piece: list(range(1000 * piece[0] + piece[1], 1000 * piece[0] + piece[2])),
        whole=whole,
        discards=last == "discard",
        endless=all_epochs if whole else None,
    )


class Parts:
    """The parts of two ranks that share rows, put together as `Pack` would have made the rows without ``context``."""

    def __init__(self, tokens: int) -> None:
        self._packs = [Pack(tokens, pad_id=-1, context=(rank, 2)) for rank in range(2)]
        self._tokens = tokens

    def __call__(self, samples: Any) -> Any:
        parts = [pack(samples) for pack in self._packs]
        shape = len(parts[0]["input_ids"]), self._tokens
        whole = {
            name: np.full(shape, fill)
            for name, fill in (("input_ids", -1), ("position_ids", 0), ("segment_ids", 0), ("labels", -100))
        }
        bounds, used, done = parts[0]["cu_seqlens_padded"].tolist(), [0] * shape[0], [0, 0]
        for (begin, end), size in zip(itertools.pairwise(bounds), parts[0]["cu_seqlens"].diff().tolist(), strict=True):
            row, half = begin // self._tokens, (end - begin) // 4
            for name, value in whole.items():
                mine = [part[name].flatten()[n : n + 2 * half].numpy() for part, n in zip(parts, done, strict=True)]
                document = np.concatenate([mine[0][:half], *np.split(mine[1], [half]), mine[0][half:]])
                if name == "labels":
                    document = np.append(-100, document)
                value[row, used[row] : used[row] + size] = document[:size]
            used[row] += size
            done = [n + 2 * half for n in done]
        return {**whole, "cu_seqlens": parts[0]["cu_seqlens"]}


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


def draw_job(rng: random.Random) -> Job:
    """Any order."""
    drawn = Drawn(rng)
    kinds = [*[indices] * 2, *[weighted] * 2, costs, repeated, windows, endless]
    kinds += [*[batches] * 3, *[packed] * 2, *[mixture] * 2]
    job = rng.choice(kinds)(drawn)
    job.evaluate = drawn.evaluate and job.steps is None
    vary(job, drawn)
    if rng.random() < 0.15:
        job.shards = rng.randint(1, 3)
    return job


def vary(job: Job, drawn: Drawn) -> None:
    """Make it discard, or give it ``steps_per_epoch``, or leave it as it is."""
    rng, chance = drawn.rng, drawn.rng.random()
    if job.steps is not None or job.evaluate or chance > 0.45:
        return
    if chance < 0.15:
        job.discards |= not job.in_batches
        return
    length = min(len(job.sequence(0, ranks, 1)) for ranks in (range(1, 7) if job.in_batches else [1]))
    if not length or (job.name == "packed" and job.endless is None) or (job.by_step and job.step_size > length):
        return
    job.steps, job.discards, job.whole = rng.randint(1, 6), False, None
    if job.by_step:

        def whole_steps(ranks: int, size: int) -> Iterator[Any]:
            sampler = cost_sampler(drawn, size * ranks, True)
            return itertools.chain.from_iterable(map(sampler.iter_epoch, itertools.count()))

        job.endless = whole_steps
    elif job.in_batches and job.step_size is not None and job.name != "batches":
        pass  # the steps stay what they are
    elif job.in_batches or job.name in ("list", "torch") or rng.random() < 0.5:  # a foreign one may change its length
        job.fixed = True
    else:
        job.step_size, job.divides = rng.choice([2, 4, 6, 12]), length
    if job.endless is None:
        job.endless, job.length = padded(job.sequence), length


def padded(sequence: Callable[[int, int, int], list[Any]]) -> Callable[[int, int], Iterator[Any]]:
    """All epochs, each filled up from its beginning so that all ranks have as many."""

    def found(ranks: int, size: int) -> Iterator[Any]:
        for epoch in itertools.count():
            items = sequence(epoch, ranks, size)
            yield from (items[n % len(items)] for n in range(-(-len(items) // ranks) * ranks))

    return found


class Track:
    """Where all ranks are in one order, and what they must read there."""

    def __init__(self, job: Job) -> None:
        self.job, self.epoch, self.done = job, 0, 0  # how many items of which epoch were read
        self.replicas = self.size = 0  # the ranks, and the batch size, as they are now
        # The items of the epoch; under ``steps_per_epoch`` those of all epochs, as far as they were needed.
        self.expected: list[Any] = []
        self.seen: Counter[Any] = Counter()  # what was read of the epoch

    def begin(self) -> None:
        """An epoch begins, or the ranks are others at its beginning, or the weights are."""
        if self.job.steps is None:
            self.expected = self.job.sequence(self.epoch, self.replicas, self.size)
        else:
            self.expected, self._coming = [], self.job.endless(self.replicas, self.size)

    def regroup(self, replicas: int) -> None:
        """Other ranks read the same steps, in batches of another size."""
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
        shards = [job.read(batch)] if job.shards is None else list(map(job.read, batch))
        if job.shards is not None and (len(shards) > job.shards or not all(shards)):
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
        has_fillers = not self.job.evaluate and len(wanted) < size
        fits = set(read) >= set(wanted) and len(read) - len(wanted) < self.replicas
        if not (fits if has_fillers else sorted(read) == sorted(wanted)):
            raise Difference(f"epoch {self.epoch}, {self.done}: {read}, not {wanted}")

    def set_weights(self, rng: random.Random) -> Any:
        """Other weights from here on."""
        job, weights = self.job, self.job.draw_weights(rng)
        if job.steps is None:
            epoch, position = self.epoch, self.done
        else:
            in_pass = -(-job.length // self.replicas) * self.replicas
            epoch, position = divmod(self.epoch * self.end + self.done, in_pass)
        job.log.append((epoch, position, weights))
        self.begin()
        return weights


def flat_indices(indices: list[Any]) -> list[Any]:
    """Indices of a batch, with its shards joined."""
    return [one for part in indices for one in part] if indices and isinstance(indices[0], list) else indices


class Ranks(Program):
    """One case: the ranks that there are, and where they must be."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        self.look_rng = random.Random(seed)  # looking up changes no case
        self.track = Track(draw_job(self.rng))
        self.replicas, self.pool = 0, self.draw_pool()
        self.sourced = self.look_rng.random() < 0.3  # ``with_source``
        self.draw_ranks()
        self.ranks = [self.joined(rank, None) for rank in range(self.replicas)]
        self.track.begin()

    def __str__(self) -> str:
        job = self.track.job
        more = {"evaluate": job.evaluate, "steps": job.steps, "discard": job.discards, "shards": job.shards}
        return ", ".join([job.name, *(name for name, is_so in {**more, f"{self.pool}": self.pool}.items() if is_so)])

    def draw_pool(self) -> str | None:
        chance = self.rng.random()
        name = "thread" if chance < 0.08 else "fork" if chance < 0.12 else "spawn" if 0.5 < chance < 0.501 else None
        return name if name == "thread" or (self.processes and name in conftest.PROCESS_POOLS) else None

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
        given = {"seed": SEED, "evaluate": job.evaluate, "steps_per_epoch": job.steps, "num_shards": job.shards}
        given |= {"with_source": True} if self.sourced else {}
        given |= {"last_batch": "discard"} if job.discards and not job.in_batches else {}
        given |= job.arguments(self.track.size)
        if self.pool is not None and self.rng.random() < 0.6:
            given["pool"] = conftest.make_pool(self.pool, 1)
        loader = ShardedDataLoader(job.dataset(), num_replicas=self.replicas, rank=rank, **given)
        if state is not None:
            loader.load_state_dict(state, strict=False)
        return loader, self.opened(loader)

    def opened(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch; their sources are compared with the indices, and left out."""
        return self.without_sources(loader) if self.sourced else iter(loader)

    def without_sources(self, loader: Any) -> Iterator[Any]:
        for batch, sources in loader:
            indices = loader.indices(loader.epoch, loader.position - 1)
            named = sources if isinstance(sources, list) else [sources]
            found = [one for each in named for one in zip(each.source.tolist(), each.index.tolist(), strict=True)]
            known = flat_indices(indices[0] if self.track.job.evaluate else indices)
            wanted = [one if isinstance(one, tuple) else (0, one) for one in known]
            # Costs also decide which shard a sample goes to.
            if wanted != found if not self.track.job.by_step else sorted(wanted) != sorted(found):
                raise Difference(f"epoch {loader.epoch}, batch {loader.position - 1}: {indices}, and sources {found}")
            self.counts["sources"] += 1
            yield batch

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
            self.ranks = [(owner, self.opened(owner)) for owner, _ in self.ranks]
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
        again = again[0] if self.sourced else again
        if repr(again) != repr(read):
            raise Difference(f"epoch {epoch}, batch {step}, rank {rank}: {read}, and looked up {again}")
        if other.indices(epoch, step, rank) != indices:
            raise Difference(f"epoch {epoch}, batch {step}: rank {rank} has {indices}, another one knows other ones")
        flat, known = (read[0], indices[0]) if job.evaluate else (read, indices)
        if job.name != "packed" and job.shards is None and len(job.read(flat)) != len(known):
            raise Difference(f"epoch {epoch}, batch {step}, rank {rank}: {indices} are not the samples of {flat}")
        self.counts["looked up"] += 1
        real = flat_indices(known)[: indices[1] if job.evaluate else None]
        if real:
            place = self.look_rng.randrange(len(real))
            self.find(other, (epoch, step, rank, place), real[place])

    def find(self, loader: Any, place: tuple[int, int, int, int], index: Any) -> None:
        """The step again, from one of its samples: its order inverted. No other step that is named lacks the sample."""
        try:
            found = loader.when(index, place[0])
        except (TypeError, ValueError) as error:  # there is no inverse, or a copy was read by the ranks before
            if not re.search("no inverse|by other ranks|weights of", str(error)):
                raise
            self.counts["not found, and told why"] += 1
            return
        if place not in found:
            raise Difference(f"sample {index} was read at {place}, and when() says {found}")
        for one in self.look_rng.sample(found, min(3, len(found))):
            indices = loader.indices(*one[:3])
            if flat_indices(indices[0] if self.track.job.evaluate else indices)[one.place] != index:
                raise Difference(f"sample {index} is not at {one}, as when() says: {indices}")
        self.counts["found"] += 1

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
            self.ranks = [(owner, self.opened(owner)) for owner, _ in self.ranks]
            self.follow()
        if not self.track.done:  # it may be another order for other ranks
            self.track.begin()

    def set_weights(self) -> None:
        """The program sets other weights of the mixture, on all ranks."""
        if self.track.job.log is not None:
            weights = self.track.set_weights(self.rng)
            for owner, _ in self.ranks:
                self.track.job.set_weights(owner, weights)
            self.counts["weights set"] += 1
