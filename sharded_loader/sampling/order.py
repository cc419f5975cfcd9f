"""The order of a loader: every epoch's batches for this rank, as a pure function of the epoch.

    Sampling: sampler, batch_size, last_batch  or  batch_sampler
        -> MapOrder.epoch(number, position) -> MapEpoch
    look_up(order, epoch, step), checksums(order, epoch)    steps of any epoch

The order reads the user's samplers as functions of (seed, epoch) and never changes them, so loaders may share them. It
also decides the next epoch: by the loader's count, unless ``set_epoch`` was called on a sampler, as timm, Lightning and
accelerate do. On third-party samplers that method is wrapped, per object, to record the call.

All ranks read one global order, so they must agree on its seed, which none of them can check. Each gets the same number
of items; the end is padded or dropped as in `sharded_loader.sampling.tables.StridedTable`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from sharded_loader.base.checks import check_int
from sharded_loader.base.notices import warn
from sharded_loader.data.seeding import epoch_listeners
from sharded_loader.engine.order import Order, Position, resolve_replicas
from sharded_loader.sampling import state as states
from sharded_loader.sampling import third_party
from sharded_loader.sampling.base import find_third_party, for_ranks, is_own, nested, ranks_of
from sharded_loader.sampling.epoch import MapEpoch, SamplerSource
from sharded_loader.sampling.own import Sampling, with_seeds
from sharded_loader.sampling.state import Signature, arguments_of, has_weights, other_arguments, seed_of, shifted
from sharded_loader.sampling.tables import Ranges, StepCount, bytes_of, check_skip, merged
from sharded_loader.sampling.third_party import Found, known_length, read_twice, text_if_ranks_repeat

LEFT_OUT = "--------"
"""Placeholder for a skipped step in `checksums`."""


class _Rest(NamedTuple):
    """Rest of a state's epoch: the ranks its order is made for, and its number of samples (None: the whole dataset)."""

    epoch: int
    ranks: int
    length: int | None


def _rest_of(saved: Signature, position: Position, now: int | None) -> _Rest:
    """Return the rest of a state's epoch. If the dataset has grown to ``now`` samples, it has the old ones."""
    was = saved.dataset_length
    has_grown = position.done > 0 and was is not None and now is not None and was < now
    return _Rest(position.epoch, saved.step_ranks or 1, was if has_grown else None)


@dataclass(frozen=True)
class _ResumePoint:
    """Loaded state, or state before a change of ranks: the ``epoch`` and batch from which the order continues.

    Attributes:
        position: the same as a position; None: the beginning of the epoch.
        is_known: the batches before it were in this order, as far as known.
        shift: offset of epoch starts in items.
    """

    epoch: int = 0
    first: int = 0
    position: Position | None = None
    is_known: bool = True
    shift: int = 0
    rest: _Rest | None = None


class MapOrder(Order[Signature]):
    """Order of a loader: makes the samplers for its arguments (`Sampling`), and reads their epochs.

    Calls of the dataset's ``set_epoch`` count too.

    Attributes:
        make_epoch: makes an epoch of a source, a number and a position. Leases replace it.
    """

    make_epoch: Callable[[SamplerSource, int, Position | None], MapEpoch] = MapEpoch

    def __init__(
        self,
        length: int | None,
        dataset: object = None,
        *,
        num_replicas: Any,
        rank: Any,
        seed: Any,
        skip: Any = None,
        shares: Any = None,
        **given: Any,
    ) -> None:
        self.sampling = sampling = Sampling(**given)
        self._shares, self._is_global = shares, shares is not None and shares.is_global
        inner = [getattr(one, "last_batch", getattr(one, "_last_batch", None)) for one in sampling.samplers]
        last_batch = "rollover" if sampling.steps_per_epoch is not None and "rollover" in inner else given["last_batch"]
        super().__init__(last_batch, num_replicas, rank, seed, sampling.steps_per_epoch)
        if self._replicas not in (None, (1, 0)):
            third_party.refuse_distributed_sampler(sampling.given)
        self.drops_last |= bool(getattr(sampling.given, "drop_last", False)) and sampling.given_batches
        self._resume, self._dataset = _ResumePoint(), dataset
        self._count, self._has_begun = StepCount(self.steps), False
        seeds = seed is not None or self.replicated  # passed by the user, or shared by all ranks
        sampling.read = with_seeds(sampling.read, [self.seed if seeds and one else None for one in sampling.takes_seed])
        self.resize(length)
        self.add_skip(skip)
        self.skip = self.given_skip

    @property
    def sampler(self) -> Any:
        return self.sampling.sampler

    def resize(self, length: int | None) -> None:
        if self.skip:  # the steps of the epochs before stay what they were
            self._count.before(self.next_epoch, self._length_with_skipped)
        self._count.forget(self.next_epoch)
        self.dataset_length, sampling = length, self.sampling
        sampling.make(length, self.seed, self.order_ranks if self.replicated else None)
        self._cut()  # an error if it cannot be cut
        self.batch_sampler = sampling.batch_sampler
        # Padding must stay at the end of a batch, so its samples keep their order.
        self.shard_costs = None if sampling.costs is None or sampling.evaluate else sampling.sampler.costs
        # set_epoch may be called on the user's samplers, and on those that the loader exposes.
        self._requests.listen([*nested(sampling.given), *nested(self.batch_sampler), *epoch_listeners(self._dataset)])

    def undisturbed(self, but: object) -> AbstractContextManager[None]:
        return third_party.undisturbed([sampler for sampler in nested(self.batch_sampler) if not is_own(sampler)], but)

    # -- state ----------------------------------------------------------------------------------------------

    def signature(self, epoch: int, rest: _Rest | None = None) -> Signature:
        """Return the signature of positions in an epoch. ``rest`` defaults to that of the last state."""
        sampling, rest = self.sampling, rest or self._resume.rest
        items, length = self._items_of(epoch, rest)
        made_for = ranks_of(items)
        return Signature(
            seed=self.seed,
            dataset_length=length,
            sampler=states.kind_of(sampling.items),
            # The length of a third-party sampler may change when it is read.
            sampler_length=known_length(items, epoch) if find_third_party(sampling.items, 0)[0] is None else None,
            sampler_seeds=tuple(map(seed_of, sampling.samplers)),
            batch_size=None if sampling.given_batches else self.batch_sampler.batch_size,
            last_batch=None if sampling.given_batches else sampling.last_batch or "keep",
            sampler_arguments=sampling.arguments + states.weights_set(sampling.samplers) + sampling.grown,
            steps_per_epoch=self.steps,
            num_replicas=self.order_ranks()[0] if self.replicated or self.steps is not None else None,
            step_ranks=None if made_for == 1 else made_for,
            shift=self._resume.shift,
            skip=self.skip,
        )

    def _items_of(self, epoch: int, rest: _Rest | None) -> tuple[Any, int | None]:
        """Return the sampler of the global order in an epoch, and its number of samples."""
        length, ranks = self.dataset_length, self.order_ranks()[0]
        if rest is not None and rest.epoch != epoch:
            rest = None
        if rest is not None and rest.length is not None:
            length = rest.length
        items = self.sampling.items_of(length, self.seed)
        if ranks_of(items) is not None:  # evaluation: with several ranks some batches would be repeated
            ranks = 1 if self.sampling.evaluate else ranks if rest is None else rest.ranks
        return for_ranks(items, ranks), length

    def _parsed(self, state: object) -> tuple[Position, Signature]:
        return self.regrouped(*states.parse(state))

    def regrouped(self, position: Position, saved: Signature) -> tuple[Position, Signature]:
        """Convert a position saved with another batch size. ValueError if samples would be repeated, or lost."""
        sampling = self.sampling
        cutter = next((one for one in sampling.samplers if is_own(one) and one.cut_by), None)
        is_other = saved.sampler != states.kind_of(sampling.items) or saved.dataset_length != self.dataset_length
        if cutter is None or saved.batch_size is not None or is_other or _cuts_alike(saved, cutter):
            return position, saved
        return _convert_batches(self, position, saved, cutter)

    def _differences(self, saved: Signature, position: Position, strict: bool) -> list[str]:
        sampling, was, now = self.sampling, saved.dataset_length, self.dataset_length
        can_grow = not (strict or self.rolls_over)
        own = self.signature(position.epoch, _rest_of(saved, position, now if can_grow else None))
        text = None
        if was is not None and now is not None and was != now:
            is_readable = strict and was < now and not self._differences(saved, position, strict=False)
            text = _length_advice(was, now, position.epoch + 1, is_readable)
        if text is not None and not (strict or position.done or self.rolls_over or "missing" in text):
            own = replace(own, dataset_length=saved.dataset_length, sampler_length=saved.sampler_length)  # it begins
        phrases = states.differences(saved, own, strict, sampling.is_endless, position)
        if phrases and text is not None:
            lengths = f"the dataset had {was} samples, and has {now}"
            phrases = [lengths, *(one for one in phrases if one != lengths), f"{text}."]
        if sampling.costs is not None and position.done and saved.items_in_step != own.items_in_step:
            was_step, step = saved.items_in_step, own.items_in_step
            phrases.append(f"a step of all ranks had {was_step} samples, and has {step}: costs= needs it to stay")
        if saved.skip and self.steps is None and (_steps_differ(saved, own) or (was != now and position.epoch)):
            phrases.append("skip= counts steps, and the ranks, the batch size or the length were different")
        length = own.sampler_length
        if length is None and self.rolls_over:
            length = known_length(sampling.items, position.epoch)
        if self.steps is None and length is not None and not -length * position.epoch <= position.done <= length:
            phrases.append(f"it has {saved.unit} {position.done}, but the epoch has only {length}")
        if (steps := saved.steps_per_epoch) is not None and position.done > (steps + 1) * saved.items_in_step:
            phrases.append(f"it has {saved.unit} {position.done}, but the epoch has only {steps} steps")
        if strict and position.done:
            phrases += other_arguments(saved, own)
        if phrases:
            return phrases
        if len(saved.sampler_seeds) != len(sampling.samplers):
            return ["the sampler was made by the loader, and is now passed by the user, or vice versa"]
        return [
            f"the seed of the {type(sampler).__name__} was {seed}, and is {seed_of(sampler)}"
            for sampler, takes, seed in zip(sampling.samplers, sampling.takes_seed, saved.sampler_seeds, strict=True)
            if seed_of(sampler) != seed and (seed is None or not takes)
        ]

    def moved(self, position: Position, saved: Signature) -> Position:
        own = self.signature(position.epoch)
        same_step = saved.items_in_step == own.items_in_step
        if self.steps is None or same_step or shifted(position, saved, own, self.sampling.is_endless) is None:
            return position
        return replace(position, done=position.done // saved.items_in_step * own.items_in_step)

    def _adopt(self, saved: Signature, position: Position) -> bool:
        sampling, shift = self.sampling, self._resume.shift
        for sampler in filter(has_weights, sampling.samplers):
            sampler.adopt(dict(saved.sampler_arguments))
        if self.steps is not None:
            shift = shifted(position, saved, self.signature(position.epoch), sampling.is_endless) or 0
        rest = _rest_of(saved, position, None if self.rolls_over else self.dataset_length)
        self._resume = replace(self._resume, shift=shift, rest=rest if position.done else None)
        self.skip = merged(self.given_skip, saved.skip)
        present = [seed_of(sampler) for sampler in sampling.samplers]
        seeds = [None if seed == before else seed for before, seed in zip(present, saved.sampler_seeds, strict=True)]
        if saved.seed == self.seed and not any(seed is not None for seed in seeds):
            return False
        self.seed = saved.seed
        self._count.forget()
        sampling.read = with_seeds(sampling.read, seeds)
        self.resize(self.dataset_length)
        return True

    def goes_on(self, position: Position, saved: Signature) -> None:
        own, before = self.signature(position.epoch), self._resume
        first = MapEpoch(self.source(position.epoch), position.epoch, position).first
        is_known = not (saved.shift or _steps_differ(saved, own) or other_arguments(saved, own))
        if (before.epoch, before.first) < (position.epoch, first):
            # After a short batch in mid-epoch, because the dataset has grown, steps begin elsewhere.
            cut = position.epoch == before.epoch and before.position and before.position.done % own.items_in_step
            is_known = is_known and before.is_known and (self.rolls_over or not cut)
        self._resume = replace(before, epoch=position.epoch, first=first, position=position, is_known=is_known)
        if self.given_skip:
            done = self._count.before(position.epoch, self._length_with_skipped) + first
            warn_of_done_steps(self.given_skip, saved.skip, done)

    def grow(self, grown: tuple[tuple[str, str], ...], dataset: object, length: int | None, position: Position) -> None:
        """Continue from a position in the order of `Sampling.grown`, over another dataset."""
        saved, is_known = self.signature(position.epoch), self._resume.is_known
        self.sampling.grown, self._dataset, self._resume = grown, dataset, replace(self._resume, rest=None)
        self.resize(length)
        self._count.forget(position.epoch)
        if position.done:
            self.goes_on(position, replace(saved, sampler_arguments=self.signature(position.epoch).sampler_arguments))
            self._resume = replace(self._resume, is_known=is_known and self._resume.is_known)

    # -- replicas -------------------------------------------------------------------------------------------

    def order_ranks(self) -> tuple[int, int]:
        """Return the number of ranks that divide the order, and this rank: (1, 0) if they divide global batches."""
        return (1, 0) if self._is_global else self.replicas()

    def _cut(self, rank: int | None = None) -> Any:
        """Return the function that cuts the share of a rank, by default this one, out of a task. None: no shares."""
        return self._shares and self._shares.cut(self.replicas(), rank, self.sampling.size, self.shard_costs)

    def settle_replicas(self) -> None:
        """Fix the value of ``"auto"`` at the start of an epoch, and warn if ranks would read the same samples."""
        super().settle_replicas()
        self.sampling.follow_given()
        if not self._has_begun:
            self._has_begun = True
            if not self.replicated and (text := text_if_ranks_repeat(nested(self.batch_sampler))) is not None:
                warn(f'{text}give num_replicas="auto" to share it out, or num_replicas=1 if that is intended')

    def rescale(self, num_replicas: object, rank: object, batch_size: object, then: Callable[[], Found]) -> Found:
        """Change the ranks, and return ``then()``. On an error all changes are undone."""
        before, ranks, size = (self._replicas, self._resume, self.sampling), self.replicas()[0], self.sampling.size
        replicas = resolve_replicas(num_replicas, rank)
        third_party.refuse_distributed_sampler(self.sampling.given)
        if batch_size is not None:
            batch_size = check_int("batch_size", batch_size, 1, "give the number of samples per rank and step")
            if self._is_global:
                raise ValueError("rescale: the global_batch stays, and ranks have shares of it: leave out batch_size")
        # The order continues here, unless then() loads a state. With global batches it stays the same.
        is_known = self._is_global and self._resume.is_known
        resume = replace(self._resume, epoch=self.next_epoch, first=0, position=None, is_known=is_known)
        try:
            self._replicas, self._resume, self.sampling = replicas, resume, self.sampling.resized(batch_size)
            self.resize(self.dataset_length)
            found = then()
            if batch_size is None and ranks != replicas[0] and not self._is_global:
                warn(_step_size_warning(size, ranks, replicas[0]))
        except BaseException:
            self._replicas, self._resume, self.sampling = before
            self.resize(self.dataset_length)
            raise
        return found

    # -- epochs ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if not self.sampling.given_batches:
            self.batch_sampler.epoch = self._next_epoch  # for users who iterate over it directly

    def source(self, number: int, rank: int | None = None, skips: tuple[range, ...] = ()) -> SamplerSource:
        """Return the source of an epoch for a rank, by default this one. Without ``skips`` no step is skipped."""
        (items, _), (replicas, own) = self._items_of(number, self._resume.rest), self.order_ranks()
        cut, rank = self._cut(rank), own if rank is None or self._is_global else rank
        form = self.arrays, self.max_shards, self.sampling.evaluate
        return SamplerSource(items, self.signature(number), replicas, rank, self.replicated, *form, skips, cut)

    def epoch(self, number: int, position: Position | None = None) -> MapEpoch:
        skips = self._count.within(self.skip, number, self._length_with_skipped)
        return self.make_epoch(self.source(number, skips=skips), number, position)

    def epoch_at(self, number: int, step: int, rank: int | None = None) -> MapEpoch:
        """Return the epoch as a rank reads, or has read, it at a step. Skipped steps are included."""
        past = self._resume
        is_before = (number, step) < (past.epoch, past.first)
        if is_before and not past.is_known:
            text = f"step {step} of epoch {number} was read by other ranks, or in other batches: this loader goes on"
            advice = "Use a loader with the original arguments to look up that step"
            raise ValueError(f"{text} from step {past.first} of epoch {past.epoch}. {advice}")
        return MapEpoch(self.source(number, rank), number, None if is_before or number != past.epoch else past.position)

    def facts(self, number: int) -> tuple[object, ...] | None:
        if any(not type(sampler).__module__.startswith("sharded_loader.") for sampler in nested(self.batch_sampler)):
            return None
        made = seed_of(self.sampler)  # the signature has the seeds of samplers that were given
        return self.signature(number), arguments_of(self.sampling.samplers), made, self.replicas(), self.arrays

    def length(self, number: int) -> int:
        return self.epoch(number).length()

    # -- steps ----------------------------------------------------------------------------------------------

    def _length_with_skipped(self, number: int) -> int:
        return MapEpoch(self.source(number), number, None).length()

    def add_skip(self, skip: object) -> None:
        sampling, self.given_skip = self.sampling, merged(self.given_skip, check_skip(skip))
        if self.given_skip and self.steps is None and known_length(sampling.items, 0) is None:
            text = "skip counts the steps of all epochs, and the sampler has no length that is known without a pass"
            raise ValueError(f"{text} over it: give steps_per_epoch=")


def warn_of_done_steps(requested: Ranges, saved: Ranges, done: int) -> None:
    """Warn if steps to skip were done before a state was saved that does not skip them."""
    unsaved = [one for one in requested if merged(saved, [one]) != saved]
    if unsaved and unsaved[0][0] < done:
        text = f"skip has the steps {unsaved[0]}, and some of them were done before the state was saved"
        warn(f"{text}: load a state that was saved before step {unsaved[0][0]}")


def _steps_differ(saved: Signature, own: Signature) -> bool:
    """Return True if steps were counted in different batches than now."""
    rolls_over = own.last_batch == "rollover" and (saved.num_replicas or 1) != (own.num_replicas or 1)
    return rolls_over or saved.items_in_step != own.items_in_step


def _length_advice(was: int, now: int, following: int, is_readable: bool) -> str:
    if was > now:
        return f"Samples {now} to {was - 1} are missing: give them back, or begin with set_epoch({following})"
    if is_readable:
        text = f"With strict=False, the rest of the epoch is of the first {was}, and the next one of all"
        return f"{text}; loader.grow() after that mixes the new ones into the rest"
    return f"Read the epoch to its end with the first {was} samples, or begin one with all, set_epoch({following})"


def _step_size_warning(size: object, before: int, ranks: int) -> str:
    """Return a warning about a changed step size of all ranks. ``size`` is a rank's batch size, if it is a number."""
    if not isinstance(size, int):
        return f"rescale: all ranks together read {ranks} batches in a step from now on, and {before} before"
    whole = size * before
    hint = f"give batch_size={whole // ranks}" if whole % ranks == 0 else f"take a number of ranks that divides {whole}"
    text = f"rescale: all ranks together read {size * ranks} samples in a step from now on, and {whole} before"
    return f"{text}. To keep the {whole}, {hint}"


# -- batches of another size -------------------------------------------------------------------------------------------


def _convert_batches(order: MapOrder, position: Position, saved: Signature, cutter: Any) -> tuple[Position, Signature]:
    """Convert a position, and the signature of its state, to the batches of a batch sampler.

    R ranks with batches of B samples read the same steps as R * B / b ranks with batches of b samples. ``cutter`` is
    the sampler of the order that cuts it into batches.
    """
    sampling, number, has_steps = order.sampling, position.epoch, order.steps is not None
    ranks, step_ranks, own_ranks = saved.num_replicas or 1, saved.step_ranks or 1, order.order_ranks()[0]
    before = now = 1  # ``now`` batches of the state equal ``before`` batches of this sampler
    twin = cutter
    if position.done or has_steps:
        before, now = _batch_sizes(saved, cutter) or (own_ranks, ranks)
        step_ranks, rest = divmod(step_ranks * before, now)
        if ranks_of(sampling.items) is None:
            step_ranks, rest = 1, 0
        cut = for_ranks(cutter, step_ranks)
        twin = for_ranks(cut.resized(before, now), saved.step_ranks or 1)
        is_other = rest or twin is None or not _cuts_alike(saved, twin) or twin.plan != cut.plan
        if is_other or (step_ranks > 1 and sampling.evaluate):
            raise _other_batches_error(saved, sampling)
    own = order.signature(number, _Rest(number, step_ranks, None))
    own_items = for_ranks(sampling.items, 1 if sampling.evaluate else step_ranks)
    (done, rest), (shift, shifted_rest) = divmod(position.done * before, now), divmod(saved.shift * before, now)
    was_length, length = known_length(twin, number), known_length(own_items, number)
    if not has_steps:
        is_over = position.done == saved.sampler_length or (position.mark is not None and position.mark.finished)
        # An epoch may end with fewer rows than batches; dropped rows are not read.
        if twin.counts_by_pass and (rest or twin.last_batch == "discard"):
            twin.add_row_checkpoint(number, position.row_checkpoint or twin.known(number)[0])
            is_over = twin.epoch_table(number).upto(position.done, position.done + 1) <= position.done
            length = cutter.len_epoch(number) if is_over else None
        if is_over:
            done, rest = done + (rest > 0) if length is None else length, 0
    elif ranks * before % now or shifted_rest or (was_length and was_length * before != (length or 0) * now):
        raise _other_batches_error(saved, sampling)  # passes would end in different steps
    if rest:
        size = cutter.samples_in_batch
        again = f"{rest * size // now} samples, or rows," if isinstance(size, int) else None
        raise _other_batches_error(saved, sampling, again)
    keeps_step = ranks * before == own_ranks * now or not position.done
    return replace(position, done=done), replace(
        saved,
        sampler_length=own.sampler_length,
        num_replicas=saved.num_replicas and max(ranks * before // now, 1),
        step_ranks=step_ranks if step_ranks > 1 else None,
        shift=shift,
        sampler_arguments=own.sampler_arguments if keeps_step else saved.sampler_arguments,
    )


def _batch_sizes(saved: Signature, cutter: Any) -> tuple[int, int] | None:
    """Return the batch sizes of a state and of this sampler; None if batches vary in size."""
    size = next((name for name, attribute in cutter.decided_by if (attribute,) == cutter.sized_by[:1]), None)
    before = dict(saved.sampler_arguments).get(f"{type(cutter).__name__}.{size}")
    return (before, getattr(cutter, cutter.sized_by[0])) if isinstance(before, int) and before > 0 else None


def _other_batches_error(saved: Signature, sampling: Sampling, again: str | None = None) -> ValueError:
    """Return the error for a state of different batches. ``again``: the repeated samples; None: unknown."""
    found = other_arguments(saved, replace(saved, sampler_arguments=sampling.arguments))
    return ValueError(
        f"load_state_dict: the state was saved with other batches: {', '.join(found)}. Here "
        f"{again or f'up to {saved.dataset_length} samples'} would come again, or be lost. Use the original "
        "sampler, or batches with which all ranks together read as many samples in a step as before"
    )


def _cuts_alike(saved: Signature, cutter: Any) -> bool:
    """Return True if a batch sampler cuts its order into the same batches as when the state was saved."""
    was, names = dict(saved.sampler_arguments), {f"{type(cutter).__name__}.{name}" for name in cutter.cut_by}
    return all(was.get(name, now) == now for name, now in arguments_of([cutter]) if name in names)


# -- steps of any epoch ------------------------------------------------------------------------------------------------


def look_up(order: MapOrder, number: object, step: object, rank: object = None) -> MapEpoch:
    """Return an epoch in which batch ``step`` is ready, even a skipped one. The order does not change.

    Raises:
        TypeError, ValueError: a number is not an integer or is negative, or the order of that step is unknown.
        IndexError: the epoch has no such step.
    """
    number = check_int("epoch", number, 0, "epochs count from 0")
    step = check_int("step", step, 0, "steps count from 0 in each epoch")
    if rank is not None and rank != (shared := third_party.rank_of(order.sampling.items)):
        rank, replicas = check_int("rank", rank, 0, "ranks count from 0"), order.replicas()[0]
        if shared is not None:
            raise ValueError(f"the sampler has the samples of rank {shared} only: ask the loader of rank {rank}")
        if rank >= replicas:
            raise ValueError(f"rank is {rank}, and this loader knows {replicas} ranks: give num_replicas and rank")
    else:
        rank = None
    epoch = order.epoch_at(number, step, rank)
    if _read_twice(epoch, lambda one: one.read_to(step)) is None:
        try:
            steps = f"{epoch.length()} steps"
        except Exception:  # the sampler has no length
            steps = "fewer steps"
        raise IndexError(f"epoch {number} has no step {step}: it has {steps}, which count from 0")
    _check_weights(epoch, step)
    return epoch


def step_checksum(batches: Iterable[object]) -> str:
    """Return 8 digits that depend on the indices of the batches of all ranks in a step."""
    return f"{zlib.crc32(b''.join(map(bytes_of, batches))):08x}"


def checksums(order: MapOrder, number: object) -> list[str]:
    """Return 8 digits for each step of an epoch that depend on the samples of all ranks and on their order.

    They are equal for any number of ranks that read as many samples per step. Skipped steps give `LEFT_OUT`. If a
    sampler yields one rank's samples, only that rank counts.
    """
    number = check_int("epoch", number, 0, "epochs count from 0")
    _check_weights(order.epoch_at(number, 0), 0)
    skips, is_batched, replicas = order.epoch(number).source.skips, order.sampling.given_batches, order.order_ranks()[0]
    # Each pass is split among the ranks separately, so steps of all ranks are not batches of a single rank.
    by_rank = order.rolls_over and order.replicated and replicas > 1
    in_step = replicas if is_batched and not by_rank else 1

    def checksum(step: int, batches: Iterable[object]) -> str:
        return LEFT_OUT if any(step in one for one in skips) else step_checksum(batches)

    def read(epoch: MapEpoch) -> list[Any]:
        found: list[Any] = []
        while batches := list(filter(None, map(epoch.batch, range(len(found) * in_step, (len(found) + 1) * in_step)))):
            found.append(batches[0][0] if by_rank else checksum(len(found), [batch for batch, _ in batches]))
            if epoch.keeps:
                epoch.forget(len(found) * in_step)
        return found

    if not by_rank:  # one rank reads the steps of all ranks
        source = order.source(number)
        signature = replace(source.signature, batch_size=(source.signature.batch_size or 0) * replicas or None)
        source = replace(source, signature=signature, replicas=1, rank=0, strided=False)
        return _read_twice(MapEpoch(source, number, None), read)
    epochs = (MapEpoch(order.source(number, rank), number, None) for rank in range(replicas))
    steps = zip(*(_read_twice(epoch, read) for epoch in epochs), strict=True)
    steps_in_order = (batches if is_batched else [[*chain(*zip(*batches, strict=True))]] for batches in steps)
    return [checksum(step, batches) for step, batches in enumerate(steps_in_order)]


def _check_weights(epoch: MapEpoch, step: int) -> None:
    """Reject a step whose weights are no longer known."""
    samplers = list(nested(epoch.source.items))
    for depth, sampler in enumerate(samplers):
        if has_weights(sampler) and sampler.forgets(samplers[:depth], *epoch.reached(step)):
            text = f"the weights of step {step} in epoch {epoch.number} are not known: the loader has later ones only"
            raise ValueError(f"{text}. Ask a loader with a state of that epoch")


def _read_twice(epoch: MapEpoch, read: Callable[[MapEpoch], Found]) -> Found:
    """Read an epoch with a function, twice for a third-party sampler to verify that the result is reproducible."""
    if epoch.third_party is None:
        return read(epoch)
    return read_twice(lambda turn: read(epoch if turn == 1 else epoch.again()), epoch.third_party, epoch.number)
