"""One process per GPU: which part of the global order belongs to this rank.

    resolve_replicas(num_replicas, rank)     ints, "auto" or None -> (num_replicas, rank)
    ReplicaSampler                           the indices [rank::num_replicas] of a sampler's order
    ReplicaBatchSampler                      the batches [rank::num_replicas] of a batch sampler's order

All ranks read one global order, so they must agree on its seed, and every rank gets the same number of
items: the end is padded by wrapping round to the beginning of the epoch, or cut off. A run that resumes may
have another number of ranks: with ``offset`` the first items of the global order are left out and the rest
is dealt out anew.

What can go wrong: ranks with different seeds (each then reads its own order, and nobody can notice); a rank
outside its number of replicas.

Source of the idea: `torch.utils.data.DistributedSampler`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np

from sharded_loader.environment import integer
from sharded_loader.sampling.base import Indices, Item_co, check_int, check_start
from sharded_loader.sampling.foreign import WrapperSampler, has_chunks, is_own, iter_epoch, len_epoch
from sharded_loader.sampling.tracing import untraced

Count = int | Callable[[], int]


def resolve_replicas(num_replicas: Any, rank: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """How many replicas there are, and which one this process is.

    Args:
        num_replicas: an integer; ``"auto"``: torch.distributed if it is initialised, else WORLD_SIZE and
            RANK, else 1 and 0; None: 1.
        rank: an integer; None (or ``"auto"``) with ``num_replicas="auto"``, None or 1.
        environ: where to look for WORLD_SIZE and RANK.

    Returns:
        (num_replicas, rank).

    Raises:
        ValueError: for one without the other, a rank outside 0 .. num_replicas - 1, and what is no number.

    Example:
        >>> resolve_replicas(4, 1), resolve_replicas(None), resolve_replicas("auto", environ={})
        ((4, 1), (1, 0), (1, 0))
    """
    if num_replicas == "auto":
        if rank not in (None, "auto"):
            raise ValueError(
                f"num_replicas is 'auto', but rank is {rank!r}: give both as integers, or num_replicas='auto' alone"
            )
        num_replicas, rank = _from_surroundings(environ)
    if num_replicas is None and rank is not None:
        raise ValueError(f"rank is {rank!r}, but num_replicas is missing: give both, or num_replicas='auto' alone")
    if num_replicas is None:
        return 1, 0
    replicas = check_int("num_replicas", num_replicas, 1, "give the number of processes, or 'auto'", ValueError)
    if rank is None:
        if replicas > 1:
            raise ValueError(f"num_replicas is {replicas}, but rank is missing: give both, or num_replicas='auto'")
        return 1, 0
    number = check_int("rank", rank, 0, "ranks count from 0", ValueError)
    if number >= replicas:
        raise ValueError(f"rank is {number}, but there are {replicas} replicas: give 0 to {replicas - 1}")
    return replicas, number


def _from_surroundings(environ: Mapping[str, str]) -> tuple[Any, Any]:
    # Looked up, not imported: a process that has not imported torch has no process group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    advice = "start with torchrun, or give num_replicas and rank"
    replicas = integer("WORLD_SIZE", 1, least=1, advice=advice, environ=environ)
    rank = integer("RANK", 0, least=0, advice=advice, environ=environ)
    if replicas > 1 and not environ.get("RANK"):
        raise ValueError(f"WORLD_SIZE is {replicas}, but RANK is missing: start with torchrun, or set both")
    if rank >= replicas:
        known = (
            f"WORLD_SIZE is {replicas}: give 0 to {replicas - 1}"
            if environ.get("WORLD_SIZE")
            else ("WORLD_SIZE is missing: set both")
        )
        raise ValueError(f"the environment variable RANK is {rank}, but {known}, or {advice}")
    return replicas, rank


class _Dealt(WrapperSampler[Item_co]):
    """Items [rank::num_replicas] of another sampler's order, equally many for every rank."""

    deals = True
    shown = (("num_replicas", "num_replicas"), ("rank", "rank"), ("truncate", "_truncate"))

    def __init__(
        self, sampler: Iterable[Any], num_replicas: Count, rank: Count, truncate: bool, seed: int | None, name: str
    ) -> None:
        super().__init__(sampler, seed, name)
        self._asked = (num_replicas, rank)
        self._truncate = bool(truncate)
        if not callable(num_replicas) and not callable(rank):
            self._resolve()

    def _resolve(self) -> tuple[int, int]:
        replicas, rank = (asked() if callable(asked) else asked for asked in self._asked)
        return resolve_replicas(replicas, rank)

    @property
    def num_replicas(self) -> int:
        """How many ranks there are (asks a callable every time)."""
        return self._resolve()[0]

    @property
    def rank(self) -> int:
        """Which of them this is (asks a callable every time)."""
        return self._resolve()[1]

    def iter_epoch(self, epoch: int, start: int = 0, *, offset: int = 0) -> Iterator[Any]:
        """This rank's items from its position ``start`` on.

        Args:
            epoch: which epoch.
            start: how many of this rank's items to leave out.
            offset: how many items of the global order to leave out before the rest is dealt out.
        """
        check_start(start)
        check_start(offset)
        begin = start * self.num_replicas + offset
        items = self._inner_items(epoch, begin)
        if is_own(self._inner):
            return self._deal(items, begin, self._again(epoch))
        return self._deal_foreign(items, begin, epoch)

    def _again(self, epoch: int) -> Callable[[int], Any]:
        """Reads one item of the epoch by its global position, for the padding."""
        length = len_epoch(self._inner, epoch)

        def read(position: int) -> Any:
            with untraced():
                return next(iter_epoch(self._inner, epoch, self.seed, position % length))

        return read

    def _deal(self, items: Iterator[Any], begin: int, again: Callable[[int], Any]) -> Iterator[Any]:
        """Items of an own sampler, which can be read again at the beginning of the epoch."""
        replicas, rank = self._resolve()
        while group := list(islice(items, replicas)):
            if rank < len(group):
                if len(group) < replicas and self._truncate:
                    return
                yield group[rank]
            elif not self._truncate:
                yield again(begin + rank)
            begin += replicas

    def _deal_foreign(self, items: Iterator[Any], begin: int, epoch: int) -> Iterator[Any]:
        """Items of a foreign sampler, which is read once: what padding may need is kept.

        Begun in mid-epoch, the sampler is started once more for the padding, after the end.
        """
        replicas, rank = self._resolve()
        head: list[Any] = []
        group: list[Any] = []
        seen = begin
        for item in items:
            if seen < replicas and not begin:
                head.append(item)
            seen += 1
            group.append(item)
            if len(group) == replicas:
                yield group[rank]
                group = []
        if group and not self._truncate:
            if rank < len(group):
                yield group[rank]
                return
            if begin:
                with untraced():
                    head = list(islice(self._inner_items(epoch), replicas))
            yield head[(seen + rank - len(group)) % seen]

    def len_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """How many items this rank has (all ranks the same), after ``offset`` items of the global order."""
        rest = max(len_epoch(self._inner, epoch) - offset, 0)
        return rest // self.num_replicas if self._truncate else -(-rest // self.num_replicas)


class ReplicaSampler(_Dealt[Any]):
    """The indices [rank::num_replicas] of another sampler's order.

    Args:
        sampler: any sampler, the same on all ranks.
        num_replicas: how many ranks, or a function without arguments that says so, asked whenever it matters.
        rank: which of them this is, from 0, or such a function.
        truncate: leave out the end of the epoch that not all ranks get a share of; otherwise pad it by
            wrapping round to the beginning.
        seed: starts ``sampler`` if it is foreign; must be the same on all ranks. None means 0, so that
            ranks agree.

    Raises:
        ValueError: for a rank outside 0 .. num_replicas - 1.

    Example:
        >>> from sharded_loader.sampling import SequentialSampler
        >>> [list(ReplicaSampler(SequentialSampler(5), 2, rank)) for rank in range(2)]
        [[0, 2, 4], [1, 3, 0]]

    Source of the idea: `torch.utils.data.DistributedSampler`.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        num_replicas: Count,
        rank: Count,
        *,
        truncate: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(sampler, num_replicas, rank, truncate, 0 if seed is None else seed, "sampler")
        self.sampler = sampler

    @property
    def chunkable(self) -> bool:
        """Whether `chunks` can be used: the inner sampler has chunks."""
        return has_chunks(self.sampler)

    def iter_epoch(self, epoch: int, start: int = 0, *, offset: int = 0) -> Iterator[Any]:
        if not self.chunkable:
            return super().iter_epoch(epoch, start, offset=offset)
        chunks = self.chunks(epoch, check_start(start), offset=offset)
        return (index for chunk in chunks for index in chunk.tolist())

    def chunks(self, epoch: int, start: int = 0, *, offset: int = 0) -> Iterator[Indices]:
        """This rank's indices from its position ``start`` on, as int64 arrays (inner index samplers only)."""
        check_start(offset)
        count = self.len_epoch(epoch, offset=offset)
        if start >= count:
            return iter(())
        replicas, rank = self._resolve()
        length = len_epoch(self.sampler, epoch)
        begin = offset + start * replicas
        last = offset + (count - 1) * replicas + rank
        dealt = _stride(self._inner_chunks(epoch, begin), rank, replicas, min(last + 1, length) - begin)
        # At most the last index of a rank lies past the end: it wraps round.
        return chain(
            dealt, (last_one[:1] for last_one in islice(self._inner_chunks(epoch, last % length), last >= length))
        )


def _stride(chunks: Iterator[Indices], first: int, step: int, end: int) -> Iterator[Indices]:
    """Positions ``first``, ``first + step``, ... below ``end`` of the concatenated chunks."""
    for chunk in chunks:
        taken = chunk[first : max(end, 0) : step]
        if len(taken):
            yield np.ascontiguousarray(taken)
        first += len(taken) * step - len(chunk)
        end -= len(chunk)


class ReplicaBatchSampler(_Dealt[Any]):
    """The batches [rank::num_replicas] of another batch sampler's order, equally many for every rank.

    Args:
        batch_sampler: any batch sampler, the same on all ranks.
        num_replicas: how many ranks, or a function without arguments that says so, asked whenever it matters.
        rank: which of them this is, from 0, or such a function.
        truncate: leave out batches that not all ranks get a share of; otherwise the first batches of the
            epoch come again.
        seed: starts ``batch_sampler`` if it is foreign. None means 0, so that ranks agree.

    Raises:
        ValueError: for a rank outside 0 .. num_replicas - 1.

    Example:
        >>> batches = [[0, 1], [2, 3], [4]]
        >>> [list(ReplicaBatchSampler(batches, 2, rank)) for rank in range(2)]
        [[[0, 1], [4]], [[2, 3], [0, 1]]]

    Source of the idea: `torch.utils.data.DistributedSampler`.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        num_replicas: Count,
        rank: Count,
        *,
        truncate: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_sampler, num_replicas, rank, truncate, 0 if seed is None else seed, "batch_sampler")
        self.batch_sampler = batch_sampler
