"""The order of a loader: every epoch's batches, for this rank, as a pure function of the epoch.

    sampler, batch_size, last_batch  or  batch_sampler
        -> MapOrder.epoch(number, position) -> MapEpoch

The samplers that the user gave belong to the user. The order reads them as functions of (seed, epoch) and changes
nothing in them, so several loaders may share one. If a sampler has no seed of its own and the loader has one, the order
reads a copy of it.

Also the one place that knows which epoch comes next: the one that the loader counts, unless the user has called
``set_epoch`` on a sampler, as timm, Lightning and accelerate do. On a sampler of another library ``set_epoch`` is
replaced, on that object alone, by a function that notes the call and passes it on.

All ranks read one global order, so they must agree on its seed, and every rank gets the same number of items. The end
is padded by wrapping round to the beginning of the epoch, or cut off. The arithmetic is that of
`sharded_loader.sampling.tables.Dealt`.

What can go wrong: arguments that contradict each other; a state that belongs to another order. If ranks have different
seeds, each reads its own order, and no rank can notice it.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

from sharded_loader.base.checks import check_int
from sharded_loader.base.imports import provided
from sharded_loader.base.notices import warn
from sharded_loader.data.seeding import told_in
from sharded_loader.engine.epoch_requests import EpochRequests
from sharded_loader.engine.order import Order, Position, process_group, resolve_replicas
from sharded_loader.sampling.base import (
    DrawnSeed,
    Sampler,
    WrapperSampler,
    check_sampler,
    find_foreign,
    for_ranks,
    is_own,
    is_wrapper,
    nested,
    ranks_of,
)
from sharded_loader.sampling.epoch import MapEpoch, SamplerSource
from sharded_loader.sampling.foreign import known_length, len_epoch, rank_of, read_twice, table_of, undisturbed
from sharded_loader.sampling.own import BatchSampler, RandomSampler, RepeatedSampler, SequentialSampler
from sharded_loader.sampling.state import (
    Signature,
    arguments_of,
    differences,
    has_weights,
    kind_of,
    other_arguments,
    out_of_epoch,
    parse,
    seed_of,
    shifted,
    weights_set,
)
from sharded_loader.sampling.tables import Dealt, Ranges, StepCount, Table, bytes_of, check_skip, merged, parts

LEFT_OUT = "--------"
"""Stands for a step that is left out among `MapOrder.checksums`."""


def step_checksum(batches: Iterable[Any]) -> str:
    """8 digits that depend on the indices of the batches of all ranks in a step."""
    return f"{zlib.crc32(b''.join(map(bytes_of, batches))):08x}"


class _Since(NamedTuple):
    """Where an order goes on since a state was loaded, or since the ranks have changed.

    Attributes:
        epoch, first: the epoch, and the number of its first batch there.
        position: the same as a position; None: the beginning of the epoch.
        is_known: whether the batches before that were those of this order, as far as anybody knows.
    """

    epoch: int
    first: int
    position: Position | None
    is_known: bool


class MapOrder(Order[Signature]):
    """Builds the samplers that a loader's arguments ask for, and reads their epochs.

    The arguments are the loader's, and ``length``: samples in the dataset. The calls of its ``set_epoch`` count too.

    Raises:
        ValueError, TypeError: arguments that contradict each other (Gluon's three among them).
    """

    def __init__(
        self,
        length: int | None,
        dataset: Any = None,
        *,
        batch_size: Any,
        shuffle: bool,
        sampler: Any,
        last_batch: str | None,
        batch_sampler: Any,
        num_replicas: Any,
        rank: Any,
        seed: int | None,
        steps_per_epoch: int | None = None,
        costs: Any = None,
        evaluate: bool = False,
        skip: Any = None,
    ) -> None:
        _check_arguments(batch_size, shuffle, sampler, last_batch, batch_sampler)
        _check_costs(costs, sampler, last_batch, batch_sampler)
        if evaluate and (last_batch not in (None, "keep") or steps_per_epoch is not None):
            given = "steps_per_epoch" if steps_per_epoch is not None else f"last_batch={last_batch!r}"
            raise ValueError(f"evaluate gives each sample once, and {given} does not: leave out one of them")
        super().__init__(last_batch, num_replicas, rank, seed, steps_per_epoch)
        if self._replicas != (1, 0):
            refuse_distributed_sampler([sampler, batch_sampler])
        self._last_batch = last_batch or "keep"
        self.rolls_over = last_batch == "rollover" or self.steps is not None
        self._batch_size, self._costs = batch_size, costs
        self._shuffle, self._evaluates = shuffle, bool(evaluate)
        self._shift = 0  # of the epochs' beginnings
        self._since = _Since(0, 0, None, True)
        self.given_skip, self._count = check_skip(skip), StepCount(self.steps)
        self.skip = self.given_skip
        # The epoch of a state, and the ranks that its order is made for.
        self._step_ranks: tuple[int, int] | None = None
        # The epoch of a state that was saved before the dataset grew, and the number of samples then.
        self._before_growth: tuple[int, int] | None = None
        self.given_batches = batch_sampler is not None
        self._given_sampler = batch_sampler if self.given_batches else sampler
        self.is_given = self._given_sampler is not None
        if self.is_given:
            check_sampler(self._given_sampler, "batch_sampler" if self.given_batches else "sampler")
        if getattr(batch_sampler, "grows", False) and steps_per_epoch is not None:
            raise ValueError(
                f"steps_per_epoch needs epochs of equally many batches: leave it out, a {type(batch_sampler).__name__} "
                "has others"
            )
        self.drops_last = last_batch == "discard" or bool(getattr(batch_sampler, "drop_last", False))
        self._read_sampler = self._given_sampler  # or a copy with other seeds
        # Per sampler, outermost first: True if it takes the seed of the loader or of a state.
        self._takes_seed = [isinstance(getattr(one, "seed", None), DrawnSeed) for one in self._samplers]
        if self.has_seed:
            seeds = [self.seed if takes_seed else None for takes_seed in self._takes_seed]
            self._read_sampler = with_seeds(self._read_sampler, seeds)
        self._arguments = arguments_of(self._samplers)
        self._settled = False
        self._of_first = lru_cache(1)(self._sampler_of_first)
        self._requests, self._dataset = EpochRequests(), dataset
        self.resize(length)
        self._check_skip()

    @property
    def settings(self) -> tuple[Any, ...]:
        """What `rescale` changes: ``batch_size``, the ranks, and what follows from them."""
        sampler = self._given_sampler, self._read_sampler, self._arguments
        return self._batch_size, self._replicas, self.replicated, self._shift, self._step_ranks, self._since, sampler

    @settings.setter
    def settings(self, before: tuple[Any, ...]) -> None:
        self._batch_size, self._replicas, self.replicated, self._shift, self._step_ranks, self._since, sampler = before
        self._given_sampler, self._read_sampler, self._arguments = sampler
        self.resize(self.dataset_length)

    @property
    def _samplers(self) -> list[Any]:
        """The samplers that the user gave, as they are read: the outermost first."""
        return [] if self._read_sampler is None else list(nested(self._read_sampler))

    def resize(self, length: int | None) -> None:
        """Make the loader's samplers again, for a dataset of this length; the epoch that comes next stays."""
        for sampler in self._samplers:
            if length is not None and hasattr(sampler, "check_dataset"):
                sampler.check_dataset(length)
        self._next_epoch = self.next_epoch
        self._count.forget(self._next_epoch)
        self.dataset_length = length
        if self.given_batches:
            self.batch_sampler = self._read_sampler
            self._sampler = self._samplers[-1] if len(self._samplers) > 1 else None
        else:
            given = self._read_sampler
            self._sampler = indices = self._make_sampler(length) if takes_order(given) else given
            if given is not None and indices is not given:
                self._sampler = indices = given.over(indices)
            if self._costs is not None:
                self._arguments = arguments_of([self._sampler])
                # The samples of a batch keep their order where the last ones may be fillers.
                self.shard_costs = None if self._evaluates else self._sampler.costs
            if self.replicated:
                indices = ReplicaSampler(self._sampler, self.replicas, self._last_batch == "discard", self.seed)
            self.batch_sampler = BatchSampler(indices, self._batch_size, self._last_batch, seed=self.seed)
        # The sampler of the global order: of batches, or of samples.
        self._items = self.batch_sampler if self.given_batches else self._sampler
        self._of_first.cache_clear()
        # set_epoch may be called on the samplers that the user gave, and on those that the loader shows.
        self._requests.listen([*nested(self._given_sampler), *nested(self.batch_sampler), *told_in(self._dataset)])

    def _make_sampler(self, length: int | None) -> Sampler[int]:
        if length is None:
            raise TypeError("the dataset has no __len__: give it one, or give the loader a sampler of its indices")
        if self._costs is not None:
            costs = self._costs if callable(self._costs) or length == self.dataset_length else self._costs[:length]
            made = provided("sampler", "costs")
            found: Sampler[int] = made(costs, self._batch_size, length, self.seed, self.steps is not None)
            return found
        return RandomSampler(length, seed=self.seed) if self._shuffle else SequentialSampler(length)

    def _sampler_of_first(self, length: int) -> Any:
        """The sampler of the global order for the first samples, as it was before the dataset grew."""
        given = self._read_sampler
        if self.given_batches or not takes_order(given):
            return _of_first(given, length, self.dataset_length)
        indices = self._make_sampler(length)
        return indices if given is None else given.over(indices)

    def undisturbed(self, but: Any) -> AbstractContextManager[None]:
        """Inside, the samplers may be read. Those of other libraries are put back. ``but``, the dataset, stays."""
        return undisturbed([sampler for sampler in nested(self.batch_sampler) if not is_own(sampler)], but)

    # -- state ----------------------------------------------------------------------------------------------

    def signature(self, epoch: int, step_ranks: int | None = None) -> Signature:
        """What a position in this order is a position in. ``step_ranks``: as a state has it; None: as the loader."""
        items = self._items_of(epoch, step_ranks)
        made_for = ranks_of(items)
        return Signature(
            seed=self.seed,
            dataset_length=self._length_in(epoch),
            sampler=kind_of(self._items),
            # Samplers of other libraries may have another length when they are read.
            sampler_length=known_length(items, epoch) if find_foreign(self._items, 0)[0] is None else None,
            sampler_seeds=tuple(map(seed_of, self._samplers)),
            batch_size=None if self.given_batches else self.batch_sampler.batch_size,
            last_batch=None if self.given_batches else self._last_batch,
            sampler_arguments=self._arguments + weights_set(self._samplers),
            steps_per_epoch=self.steps,
            num_replicas=self.replicas()[0] if self.replicated or self.steps is not None else None,
            step_ranks=None if made_for == 1 else made_for,
            shift=self._shift,
            skip=self.skip,
        )

    def _items_of(self, epoch: int, step_ranks: int | None = None) -> Any:
        """The sampler of the global order in an epoch: the order may be made for a number of ranks."""
        if self._step_ranks is not None and self._step_ranks[0] == epoch:
            step_ranks = self._step_ranks[1]
        if self._evaluates:
            step_ranks = 1  # for more ranks some batches would come twice
        ranks, items, length = self.replicas()[0], self._items, self._length_in(epoch)
        if length is not None and length != self.dataset_length:
            items = self._of_first(length)
        return for_ranks(items, ranks if step_ranks is None or ranks_of(items) is None else step_ranks)

    def _length_in(self, epoch: int) -> int | None:
        """The number of samples that an epoch has."""
        before = self._before_growth
        return before[1] if before is not None and before[0] == epoch else self.dataset_length

    def _growth(self, saved: Signature, position: Position) -> tuple[int, int] | None:
        """The epoch of a state whose rest is read as before the dataset grew, and the number of samples then."""
        was, now = saved.dataset_length, self.dataset_length
        if was is None or now is None or was >= now or self.rolls_over or not position.done:
            return None
        return position.epoch, was

    def _text_of_length(self, saved: Signature, position: Position, strict: bool) -> str | None:
        """What to do about a dataset that has another length than it had."""
        was, now, then = saved.dataset_length, self.dataset_length, position.epoch + 1
        if was is None or now is None or was == now:
            return None
        if was > now:
            return f"Samples {now} to {was - 1} are missing: give them back, or begin with set_epoch({then})"
        if strict and not self._differences(saved, position, strict=False):
            return f"With strict=False, the rest of the epoch is of the first {was}, and the next one of all"
        return f"Read the epoch to its end with the first {was} samples, or begin one with all, set_epoch({then})"

    def _parsed(self, state: Any) -> tuple[Position, Signature]:
        return self.regrouped(*parse(state))

    def regrouped(self, position: Position, saved: Signature) -> tuple[Position, Signature]:
        """A position that was saved with batches of another size, as it counts in those of this sampler.

        R ranks with batches of B samples read the same steps as R * B / b ranks with batches of b samples.

        Raises:
            ValueError: some samples would come again, or be lost.
        """
        cutter = next((one for one in self._samplers if is_own(one) and one.cut_by), None)
        is_other = saved.sampler != kind_of(self._items) or saved.dataset_length != self.dataset_length
        if cutter is None or saved.batch_size is not None or is_other or self._is_cut_as(saved, cutter):
            return position, saved
        factor, ranks, number, twin = Fraction(1), saved.num_replicas or 1, position.epoch, cutter
        if position.done or self.steps is not None:
            factor, twin = self._factor(saved, cutter)
        done, step_ranks, shift = (one * factor for one in (position.done, saved.step_ranks or 1, saved.shift))
        items = for_ranks(self._items, 1 if self._evaluates else max(int(step_ranks), 1))
        before, length = known_length(twin, number), known_length(items, number)
        if self.steps is None:
            is_over = position.done == saved.sampler_length or (position.mark is not None and position.mark.finished)
            # At its end an epoch may have fewer rows than batches, and rows that were left out are not read now.
            if twin.counts_by_pass and (twin.last_batch == "discard" or done.denominator > 1):
                twin.note_landmark(number, position.landmark or twin.known(number)[0])
                is_over = twin.epoch_table(number).upto(position.done, position.done + 1) <= position.done
                length = cutter.len_epoch(number) if is_over else None
            if is_over:
                done = Fraction(math.ceil(done) if length is None else length)
        elif (ranks * factor).denominator * shift.denominator > 1 or (before and length != before * factor):
            raise self._other_batches(saved)  # passes over the sampler would end in other steps
        if done.denominator > 1:
            raise self._other_batches(saved, done % 1 * cutter.samples_in_batch)
        keeps_step = ranks * factor == self.replicas()[0] or not position.done
        return replace(position, done=int(done)), replace(
            saved,
            sampler_length=None if twin.counts_by_pass or find_foreign(self._items, 0)[0] is not None else length,
            num_replicas=saved.num_replicas and max(int(ranks * factor), 1),
            step_ranks=int(step_ranks) if step_ranks > 1 else None,
            shift=int(shift),
            sampler_arguments=self._arguments if keeps_step else saved.sampler_arguments,
        )

    def _is_cut_as(self, saved: Signature, cutter: Any) -> bool:
        """Whether a batch sampler cuts its order into batches as the one that a state was saved with."""
        was, names = dict(saved.sampler_arguments), {f"{type(cutter).__name__}.{name}" for name in cutter.cut_by}
        return all(was.get(name, now) == now for name, now in arguments_of([cutter]) if name in names)

    def _factor(self, saved: Signature, cutter: Any) -> tuple[Fraction, Any]:
        """How many batches of this sampler are one of a state's, and a sampler with those."""
        was, is_for_ranks = dict(saved.sampler_arguments), ranks_of(self._items) is not None
        factor = Fraction(self.replicas()[0], saved.num_replicas or 1)  # of steps with as many samples as before
        size = next((name for name, attribute in cutter.decided_by if (attribute,) == cutter.sized_by[:1]), None)
        if isinstance(before := was.get(f"{type(cutter).__name__}.{size}"), int) and before > 0:
            factor = Fraction(before, getattr(cutter, cutter.sized_by[0]))
        ranks = (saved.step_ranks or 1) * factor if is_for_ranks else Fraction(1)
        if ranks.denominator == 1 and (ranks == 1 or not self._evaluates):
            own = for_ranks(cutter, int(ranks))
            twin = for_ranks(own.resized(factor.numerator, factor.denominator), saved.step_ranks or 1)
            if twin is not None and self._is_cut_as(saved, twin) and twin.plan == own.plan:
                return factor, twin
        raise self._other_batches(saved)

    def _other_batches(self, saved: Signature, again: Any = None) -> ValueError:
        """The error for a state of other batches. ``again``: the samples, or rows, that come again; None: unknown."""
        found = other_arguments(saved, replace(saved, sampler_arguments=self._arguments))
        lost = f"up to {self.dataset_length} samples" if again is None else f"{again} samples, or rows,"
        return ValueError(
            f"load_state_dict: the state was saved with other batches: {', '.join(found)}. Here {lost} would come "
            "again, or be lost. Make the sampler as it was then, or with batches with which all ranks together read as "
            "many samples in a step as before"
        )

    def _differences(self, saved: Signature, position: Position, strict: bool) -> list[str]:
        before = self._step_ranks, self._before_growth
        self._step_ranks, self._before_growth = None, None if strict else self._growth(saved, position)
        try:
            own = self.signature(position.epoch, saved.step_ranks or 1)
        finally:
            self._step_ranks, self._before_growth = before
        text = self._text_of_length(saved, position, strict)
        if text is not None and not (strict or position.done or self.rolls_over or "missing" in text):
            own = replace(own, dataset_length=saved.dataset_length, sampler_length=saved.sampler_length)  # it begins
        phrases = differences(saved, own, strict, self._is_endless, position)
        if phrases and text is not None:
            lengths = f"the dataset had {saved.dataset_length} samples, and has {self.dataset_length}"
            phrases = [lengths, *(one for one in phrases if one != lengths), f"{text}."]
        if self._costs is not None and position.done and saved.step != own.step:
            phrases.append(f"a step of all ranks had {saved.step} samples, and has {own.step}: costs= needs it to stay")
        if saved.skip and self.steps is None and _counts_others(saved, own):
            phrases.append("skip= counts steps, and the ranks or the batch size were others then")
        if not phrases and own.sampler_length is None and own.last_batch == "rollover":
            outside = out_of_epoch(saved, len_epoch(self.sampler, position.epoch), position.epoch, position.done)
            phrases += [] if outside is None else [f"the state has {outside}"]
        if strict and position.done:
            phrases += other_arguments(saved, own)
        if not phrases and len(saved.sampler_seeds) != len(self._samplers):
            phrases.append("the sampler was made by the loader, and is given; or the other way round")
        if not phrases:
            for sampler, takes_seed, seed in zip(self._samplers, self._takes_seed, saved.sampler_seeds, strict=True):
                if seed_of(sampler) != seed and (seed is None or not takes_seed):
                    phrases.append(f"the seed of the {type(sampler).__name__} was {seed}, and is {seed_of(sampler)}")
        return phrases

    @property
    def _is_endless(self) -> bool:
        return self.steps is not None and known_length(self._items, 0) is None

    def moved(self, position: Position, saved: Signature) -> Position:
        own = self.signature(position.epoch)
        same_step = saved.items_in_step == own.items_in_step
        if self.steps is None or same_step or shifted(position, saved, own, self._is_endless) is None:
            return position
        return replace(position, done=position.done // saved.items_in_step * own.items_in_step)

    def _adopt(self, saved: Signature, position: Position) -> bool:
        if self.steps is not None:
            self._shift = shifted(position, saved, self.signature(position.epoch), self._is_endless) or 0
        self._step_ranks = (position.epoch, saved.step_ranks or 1) if position.done else None
        self._before_growth = self._growth(saved, position)
        for sampler in filter(has_weights, self._samplers):
            sampler.adopt(dict(saved.sampler_arguments))
        self.skip = merged(self.given_skip, saved.skip)
        present = [seed_of(sampler) for sampler in self._samplers]
        seeds = [None if seed == before else seed for before, seed in zip(present, saved.sampler_seeds, strict=True)]
        if saved.seed == self.seed and not any(seed is not None for seed in seeds):
            return False
        self.seed = saved.seed
        self._count.forget()
        self._read_sampler = with_seeds(self._read_sampler, seeds)
        self.resize(self.dataset_length)
        return True

    # -- replicas -------------------------------------------------------------------------------------------

    def settle_replicas(self) -> None:
        """An epoch begins: what ``"auto"`` means is not asked again; ranks that would repeat each other are warned."""
        super().settle_replicas()
        self._follow_given()
        if not self._settled:
            self._settled = True
            if not self.replicated and (text := text_if_ranks_repeat(nested(self.batch_sampler))) is not None:
                warn(f'{text}give num_replicas="auto" to share it out, or num_replicas=1 if that is meant')

    def _follow_given(self) -> None:
        """Take over what the user has set in the given samplers, such as ``batch_size``, where copies are read."""
        for given, read in zip(nested(self._given_sampler), self._samplers, strict=False):
            if given is not read and is_own(given):
                own = {"seed", "epoch_request", "_epoch", getattr(given, "_wraps", "")}
                vars(read).update((name, value) for name, value in vars(given).items() if name not in own)
                if not isinstance(getattr(given, "seed", None), DrawnSeed):
                    read.seed = given.seed
        self._arguments = arguments_of(self._samplers if self._costs is None else [self._sampler])

    def rescale(self, num_replicas: Any, rank: Any, batch_size: Any) -> str | None:
        """Make the order for other ranks. Returns what to say of a step that gets larger or smaller without a word."""
        replicas = resolve_replicas(num_replicas, rank)
        refuse_distributed_sampler([self._given_sampler])
        before, size = self.replicas()[0], self._batch_size
        if self.given_batches:
            size = getattr(self._read_sampler, "samples_in_batch", None)
        if batch_size is not None:
            batch_size = check_int("batch_size", batch_size, 1, "give the number of samples per rank and step")
            if self.given_batches:
                self._read_sampler = self._given_sampler = _resized(self._read_sampler, batch_size, size)
                self._arguments = arguments_of(self._samplers)
            else:
                self._batch_size = batch_size
        self._replicas, self.replicated = replicas, True
        self._since = _Since(self.next_epoch, 0, None, False)  # unless a state is loaded: then that is where
        self.resize(self.dataset_length)
        is_meant = batch_size is not None or before == replicas[0]
        return None if is_meant else _text_of_step(size, before, replicas[0])

    # -- epochs ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that comes next."""
        super().set_epoch(epoch)
        if not self.given_batches:
            self.batch_sampler.epoch = self._next_epoch  # for those who iterate over it themselves

    def epoch(self, number: int, position: Position | None = None) -> MapEpoch:
        """An epoch's batches for this rank, from a position on. What it reads is settled now: `resize` may come."""
        return self._epoch(number, position, self._count.within(self.skip, number, self._whole_length))

    def _epoch(
        self,
        number: int,
        position: Position | None,
        skips: tuple[range, ...] = (),
        rank: int | None = None,
        of_all: bool = False,
    ) -> MapEpoch:
        replicas, own_rank = self.replicas()
        settled = SamplerSource(
            self._items_of(number),
            self.signature(number),
            replicas,
            own_rank if rank is None else rank,
            self.replicated,
            self.arrays,
            self.max_shards,
            self._evaluates,
            skips,
        )
        if of_all:  # one rank reads the steps of all ranks
            size = settled.batch_size and settled.batch_size * replicas
            signature = replace(settled.signature, batch_size=size)
            settled = replace(settled, signature=signature, replicas=1, rank=0, dealt=False)
        return MapEpoch(settled, number, position)

    def facts(self, number: int) -> Any:
        """What decides an epoch's batches: with equal facts they are equal. None: a sampler is not this library's."""
        are_own = all(type(sampler).__module__.startswith("sharded_loader.") for sampler in nested(self.batch_sampler))
        return (self.signature(number), arguments_of(self._samplers), self.replicas(), self.arrays) if are_own else None

    def length(self, number: int) -> int:
        """The number of batches in the epoch for this rank."""
        return self.epoch(number).length()

    # -- steps ----------------------------------------------------------------------------------------------

    def _whole_length(self, number: int) -> int:
        """The number of steps in an epoch, also those that are left out."""
        return self._epoch(number, None).length()

    def add_skip(self, skip: Any) -> None:
        self.given_skip = merged(self.given_skip, check_skip(skip))
        self._check_skip()

    def _check_skip(self) -> None:
        """Refuse steps to leave out that do not fit the epochs, as far as the lengths of these are known now."""
        if self.given_skip and self.steps is None and known_length(self._items, 0) is None:
            raise ValueError(
                "skip counts the steps of all epochs, and the sampler has no length that is known without a pass over "
                "it: give steps_per_epoch="
            )
        # The seed of a state may give other lengths, and "auto" other ranks.
        if self.steps is not None or not (any(self._takes_seed) or "auto" in self._replicas):
            self._count.check(self.given_skip, self._whole_length)

    def goes_on(self, position: Position, saved: Signature) -> None:
        own, before = self.signature(position.epoch), self._since
        first = self._epoch(position.epoch, position).first
        is_known = not (saved.shift or _counts_others(saved, own) or other_arguments(saved, own))
        if before[:2] < (position.epoch, first):
            is_known = is_known and before.is_known
        self._since = _Since(position.epoch, first, position, is_known)
        if self.given_skip:
            done = self._count.before(position.epoch, self._whole_length) + first
            warn_of_done_steps(self.given_skip, saved.skip, done)

    def look_up(self, number: Any, step: Any, rank: Any = None) -> MapEpoch:
        """An epoch whose batch ``step`` is looked up. It is `MapEpoch.ready`; nothing in the order changes.

        Args:
            number, step: which batch. Steps that are left out are looked up too.
            rank: as this rank reads it; None: as this one.

        Raises:
            TypeError, ValueError: a number is no integer or is negative, or the order of that step is unknown.
            IndexError: the epoch has no such step.
        """
        number = check_int("epoch", number, 0, "epochs count from 0")
        step = check_int("step", step, 0, "steps count from 0 in each epoch")
        epoch = self._epoch_at(number, step, self._checked_rank(rank))
        found = _read_twice(epoch, lambda one: one.read_to(step))
        if found is None:
            raise IndexError(f"epoch {number} has no step {step}: it has {_steps_of(epoch)}, which count from 0")
        self._check_weights(epoch, step)
        return epoch

    def _epoch_at(self, number: int, step: int, rank: int | None) -> MapEpoch:
        """The epoch as it is read, or was read, at a step."""
        since = self._since
        is_before = (number, step) < since[:2]
        if is_before and not since.is_known:
            raise ValueError(
                f"step {step} of epoch {number} was read by other ranks, or in other batches: this loader goes on from "
                f"step {since.first} of epoch {since.epoch}. Ask a loader that is made as it was then"
            )
        return self._epoch(number, None if is_before or number != since.epoch else since.position, (), rank)

    def checksums(self, number: Any) -> list[str]:
        """Of each step of an epoch 8 digits that depend on the samples of all ranks together, and on their order.

        They are the same for any number of ranks that together read as many samples in a step. Of a step that is left
        out they are `LEFT_OUT`. Of a sampler that has the samples of one rank only, that rank counts.

        Raises:
            TypeError, ValueError: as of `look_up`.
        """
        number = check_int("epoch", number, 0, "epochs count from 0")
        self._check_weights(self._epoch_at(number, 0, None), 0)
        skips = self._count.within(self.skip, number, self._whole_length)
        replicas, given = self.replicas()[0], self.given_batches
        # Each pass over the samples is dealt to the ranks by itself, so the steps of all ranks are no batches of one.
        by_rank = self.rolls_over and self.replicated and replicas > 1
        in_step = replicas if given and not by_rank else 1

        def read(epoch: MapEpoch) -> list[Any]:
            found: list[Any] = []
            while batches := [
                batch
                for batch, _ in filter(None, map(epoch.batch, range(len(found) * in_step, (len(found) + 1) * in_step)))
            ]:
                found.append(batches[0] if by_rank else checksum(len(found), batches))
                if epoch.keeps:
                    epoch.forget(len(found) * in_step)
            return found

        def checksum(step: int, batches: Sequence[Any]) -> str:
            return LEFT_OUT if any(step in one for one in skips) else step_checksum(batches)

        if not by_rank:
            return _read_twice(self._epoch(number, None, of_all=True), read)  # type: ignore[no-any-return]
        steps = zip(*(_read_twice(self._epoch(number, None, (), rank), read) for rank in range(replicas)), strict=True)
        dealt = (batches if given else [[*chain(*zip(*batches, strict=True))]] for batches in steps)
        return [checksum(step, batches) for step, batches in enumerate(dealt)]

    def _checked_rank(self, rank: Any) -> int | None:
        shared, replicas = rank_of(self._items), self.replicas()[0]
        if rank is None or rank == shared:
            return None
        number = check_int("rank", rank, 0, "ranks count from 0")
        if shared is not None:
            raise ValueError(f"the sampler has the samples of rank {shared} only: ask the loader of rank {number}")
        if number >= replicas:
            raise ValueError(f"rank is {number}, and this loader knows {replicas} ranks: give num_replicas and rank")
        return number

    def _check_weights(self, epoch: MapEpoch, step: int) -> None:
        """Refuse an epoch of a mixture whose weights are not known any more."""
        for sampler in filter(has_weights, self._samplers):
            if epoch.reached(step)[0] <= sampler.forgotten:
                raise ValueError(
                    f"the weights of the mixture in epoch {epoch.number} are not known: the loaded state has those "
                    f"that were set later. Ask a loader with the state of that epoch"
                )


def _read_twice(epoch: MapEpoch, read: Callable[[MapEpoch], Any]) -> Any:
    """What a function reads of an epoch. Of a sampler of another library it must be the same when it is read again."""
    foreign = epoch.foreign
    if foreign is None:
        return read(epoch)
    return read_twice(lambda turn: read(epoch if turn == 1 else epoch.again()), foreign, epoch.number)


def warn_of_done_steps(given: Ranges, saved: Ranges, done: int) -> None:
    """Warn if steps that are to be left out were done before a state was saved, which does not leave them out."""
    late = [one for one in given if merged(saved, [one]) != saved]
    if late and late[0][0] < done:
        warn(
            f"skip has the steps {late[0]}, and some of them were done before the state was saved: load a state "
            f"that was saved before step {late[0][0]}"
        )


def _counts_others(saved: Signature, own: Signature) -> bool:
    """Whether steps, or their batches, were others than they are now."""
    rolls_over = own.last_batch == "rollover" and (saved.num_replicas or 1) != (own.num_replicas or 1)
    return rolls_over or saved.items_in_step != own.items_in_step


def _resized(sampler: Any, size: int, before: Any) -> Any:
    """A batch sampler with batches of another size."""
    twin = sampler.resized(size, before) if isinstance(before, int) else None
    if twin is None:
        raise ValueError(
            f"rescale: the batch_sampler decides the batches, and the {type(sampler).__name__} cannot have batches of "
            f"{size} in the same order: leave out batch_size"
        )
    return twin


def _of_first(sampler: Any, length: int, now: int | None) -> Any:
    """A sampler of the first samples, as far as it knows nothing of them but how many there are ``now``."""
    if is_wrapper(sampler):
        return sampler.over(_of_first(sampler.inner, length, now))
    if type(sampler) in (RandomSampler, SequentialSampler) and len(sampler) == now:
        sampler = copy.copy(sampler)
        sampler._length = length
    return sampler


def _text_of_step(size: Any, before: int, ranks: int) -> str:
    """What to say if a step of all ranks gets larger or smaller. ``size``: of a rank's batch, if it is a number."""
    if not isinstance(size, int):
        return f"rescale: all ranks together read {ranks} batches in a step from now on, and {before} before"
    whole = size * before
    hint = f"give batch_size={whole // ranks}" if whole % ranks == 0 else f"take a number of ranks that divides {whole}"
    return (
        f"rescale: all ranks together read {size * ranks} samples in a step from now on, and {whole} before. To keep "
        f"the {whole}, {hint}"
    )


def _steps_of(epoch: MapEpoch) -> str:
    try:
        return f"{epoch.length()} steps"
    except Exception:  # the sampler has no length
        return "fewer steps"


# -- ranks -------------------------------------------------------------------------------------------------------------


class ReplicaSampler(WrapperSampler[Any]):
    """What one rank reads of another sampler's order: the items [rank::num_replicas], equally many for every rank.

    Args:
        sampler: any sampler of indices or of batches, the same on all ranks.
        ask: a function that returns the number of ranks, and which is this one. It is asked whenever that matters,
            because the process group may not be up yet.
        truncate: leave out the end of the epoch that not all ranks get a share of; otherwise pad it by
            wrapping round to the beginning.
        seed: starts ``sampler`` if another library made it; the same on all ranks.

    Example:
        >>> from sharded_loader import SequentialSampler
        >>> [list(ReplicaSampler(SequentialSampler(5), lambda: (2, rank))) for rank in range(2)]
        [[0, 2, 4], [1, 3, 0]]

    Source of the idea: `torch.utils.data.DistributedSampler`.
    """

    shown = (("num_replicas", "num_replicas"), ("rank", "rank"), ("truncate", "_truncate"))
    sampler: Iterable[Any]

    def __init__(
        self, sampler: Iterable[Any], ask: Callable[[], tuple[int, int]], truncate: bool = False, seed: int = 0
    ) -> None:
        super().__init__(sampler, seed)
        self._ask, self._truncate = ask, truncate

    @property
    def num_replicas(self) -> int:
        """The number of ranks, as far as is known now."""
        return self._ask()[0]

    @property
    def rank(self) -> int:
        """Which of them this is, as far as is known now."""
        return self._ask()[1]

    def epoch_table(self, epoch: int) -> Table:
        replicas, rank = self._ask()
        table = table_of(for_ranks(self.sampler, replicas), epoch, self.seed)
        return Dealt(table, replicas, rank, truncate=self._truncate)

    def len_epoch(self, epoch: int) -> int:
        replicas = self.num_replicas
        return parts(len_epoch(for_ranks(self.sampler, replicas), epoch), replicas, self._truncate)


def text_if_ranks_repeat(samplers: Iterable[Any], environ: Mapping[str, str] = os.environ) -> str | None:
    """What to say if the ranks of a process group, or of WORLD_SIZE, would all read the same samples; otherwise None.

    Example:
        >>> text_if_ranks_repeat([], {"WORLD_SIZE": "2"})
        'this process is one of 2 ranks (WORLD_SIZE), and each reads the whole dataset: '
    """
    distributed, known_from = process_group(), "(torch.distributed)"
    if distributed is not None:
        ranks = int(distributed.get_world_size())
    else:
        given, known_from = environ.get("WORLD_SIZE", ""), "(WORLD_SIZE)"
        ranks = int(given) if given.strip().isdecimal() else 1
    counts = ("num_replicas", "num_processes")  # of Accelerate's samplers
    shares = (
        rank_of(sampler) is not None
        or getattr(sampler, "is_part", False)
        or any(hasattr(sampler, name) for name in counts)
        for sampler in samplers
    )
    if ranks <= 1 or any(shares):
        return None
    return f"this process is one of {ranks} ranks {known_from}, and each reads the whole dataset: "


def refuse_distributed_sampler(samplers: Iterable[Any]) -> None:
    """Reject a sampler of torch's that shares out the samples, where the loader does."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DistributedSampler", ())
    if any(isinstance(one, kind) for sampler in samplers for one in nested(sampler)):
        raise ValueError(
            "num_replicas and a torch DistributedSampler would share out the samples twice: leave out one of the two"
        )


# -- what the user gives -----------------------------------------------------------------------------------------------


def _check_arguments(batch_size: Any, shuffle: Any, sampler: Any, last_batch: Any, batch_sampler: Any) -> None:
    if batch_sampler is not None:
        if isinstance(batch_sampler, int):
            raise TypeError(
                f"batch_sampler is {batch_sampler!r}, a number. Here this position is that of batch_sampler, as in "
                "Gluon; in torch it is that of another argument: write the names, such as num_workers="
            )
        if batch_size is not None or shuffle or sampler is not None or last_batch is not None:
            raise ValueError(
                "batch_size, shuffle, sampler and last_batch must not be specified if batch_sampler is specified: "
                "it decides all of that. drop_last is torch's name for last_batch"
            )
        return
    if getattr(sampler, "yields_batches", False):
        kind = type(sampler).__name__
        raise TypeError(f"sampler is a {kind}, which yields batches: give it as batch_sampler=, without batch_size")
    if last_batch not in (None, "keep", "discard", "rollover"):
        raise ValueError(f'last_batch is {last_batch!r}; it must be "keep", "discard" or "rollover"')
    if batch_size is None:
        raise ValueError(
            "batch_size must be specified unless batch_sampler is specified. For single samples, as in torch with "
            "batch_size=None: from sharded_loader.torch import DataLoader"
        )
    if isinstance(shuffle, str) or callable(shuffle):
        raise TypeError(f"shuffle is {shuffle!r}; it must be True or False. An order of your own is a sampler=")
    if shuffle and not takes_order(sampler):
        raise ValueError("shuffle must not be specified if sampler is specified: the sampler decides the order")


def takes_order(sampler: Any) -> bool:
    """Whether the loader makes the order: without a sampler, or with one that repeats the loader's order."""
    return sampler is None or (isinstance(sampler, RepeatedSampler) and sampler.sampler is None)


def _check_costs(costs: Any, sampler: Any, last_batch: Any, batch_sampler: Any) -> None:
    if costs is None:
        return
    if sampler is not None or batch_sampler is not None:
        name = "sampler" if batch_sampler is None else "batch_sampler"
        raise ValueError(f"costs= and {name}= both decide the order: leave out one of them")
    if last_batch == "rollover":
        raise ValueError(
            'costs= makes whole steps, and last_batch="rollover" would cut them elsewhere: give last_batch="discard", '
            "or steps_per_epoch="
        )


def with_seeds(sampler: Any, seeds: Sequence[int | None]) -> Any:
    """The sampler with other seeds. What the user gave is not changed, because other loaders may read it too.

    Args:
        sampler: any sampler, or None.
        seeds: the new seeds of the sampler and of those inside it, in the order of `nested`; None: its own.

    Returns:
        The sampler itself, or a copy where it or one inside it has got another seed. Only a sampler of ours inside a
        sampler of another library is changed itself: that library's sampler cannot be copied safely.
    """
    if not seeds:
        return sampler
    seed, *inner_seeds = seeds
    twin = sampler
    if is_wrapper(sampler):
        inner = with_seeds(sampler.inner, inner_seeds)
        if inner is not sampler.inner:
            twin = sampler.over(inner)
    else:
        for inner_sampler, inner_seed in zip(islice(nested(sampler), 1, None), inner_seeds, strict=True):
            if inner_seed is not None:
                inner_sampler.seed = inner_seed
    if seed is not None:
        twin = copy.copy(sampler) if twin is sampler else twin
        twin.seed = seed
    return twin
