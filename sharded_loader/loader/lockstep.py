"""`Lockstep`: several loaders that are read together, one batch of each in a step, with one state.

    next(iterator):   ask each loader for its next batch     -> found: batches, ends, errors
                      does the epoch end?  (`stop`)          -> StopIteration, or a loader that has ended starts over
                      the step is done                       -> a tuple of batches, or the first error

Batch k of one loader always meets batch k of the others. So if a loader raises an error, the batches of the others in
this step are dropped with it. If the program is interrupted in the middle of a step, what was found is kept: the next
``next`` asks only the loaders that are missing, and a state that is saved meanwhile lies before the step.

Each loader owns its position, its workers and its batches. A `Lockstep` owns how many steps were done, and which
loaders have ended. What can go wrong: loaders without batches, which would start over without end (ValueError); a state
of other loaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sharded_loader.base.checks import refuse_class
from sharded_loader.base.described import an
from sharded_loader.base.entries import (
    anything,
    differing,
    entry,
    instance,
    integer,
    list_of,
    parsed,
    string,
    true_or_false,
    written,
)
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.loader.loader import ShardedDataLoader

SHORTEST, LONGEST = "shortest", "longest"

_ADVICE = "give what state_dict() of a Lockstep returned"
_END: Any = object()


class _Failed(NamedTuple):
    """A batch that is an error."""

    error: Exception


@dataclass
class _LockedSteps:
    """How far one epoch of all loaders is.

    Attributes:
        step: the number of steps that are done.
        ended: of each loader, whether it has given all its batches at least once.
        over: the epoch has ended.
        found: what was found in the step that is under way, by the number of the loader.
    """

    step: int
    ended: list[bool]
    over: bool = False
    found: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Saved:
    """The entries of a state. ``loaders`` are the loaders' own states."""

    stop: str = entry(string, "stop was {was!r}, and is {now!r}")
    epoch: int = entry(integer(0))
    step: int = entry(integer(0))
    over: bool = entry(true_or_false)
    ended: tuple[bool, ...] = entry(list_of(true_or_false), write=list)
    loaders: tuple[Any, ...] = entry(list_of(anything), write=list)


class Lockstep:
    """Several loaders as one: in each step a tuple with one batch of each.

    Args:
        *loaders: `ShardedDataLoader` objects, each at most once.
        stop: ``"shortest"``: an epoch ends when one of the loaders has no batch left; the others drop theirs.
            ``"longest"``: it ends when each loader has given all its batches; shorter ones start their next epochs.

    Attributes:
        loaders: the loaders.
        epoch: the epoch in progress, or the one that begins next.

    Raises:
        TypeError: an argument is no `ShardedDataLoader`.
        ValueError: there are no loaders, one comes twice, or ``stop`` is unknown. While iterating: with ``"longest"``,
            a loader has no batches.

    Every epoch begins with the first batch of each loader's next epoch.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> images, texts = ShardedDataLoader(range(6), 2), ShardedDataLoader([*"abcd"], 2)
        >>> both = Lockstep(images, texts, stop="longest")
        >>> for image, text in both:
        ...     print(image.tolist(), text)
        [0, 1] ['a', 'b']
        [2, 3] ['c', 'd']
        [4, 5] ['a', 'b']

    Source of the idea: ``CombinedLoader`` of Lightning, whose modes are ``min_size`` and ``max_size_cycle``.
    """

    def __init__(self, *loaders: ShardedDataLoader[Any], stop: str = SHORTEST) -> None:
        if stop not in (SHORTEST, LONGEST):
            raise ValueError(f'Lockstep(stop={stop!r}): give "{SHORTEST}" or "{LONGEST}"')
        if not loaders:
            raise ValueError("Lockstep was given no loaders: give at least one, Lockstep(first, second)")
        for number, loader in enumerate(loaders):
            refuse_class(f"Lockstep: loader {number}", loader)
            if not isinstance(loader, ShardedDataLoader):
                raise TypeError(f"Lockstep: loader {number} is {an(type(loader))}: give ShardedDataLoader objects")
        if len(set(map(id, loaders))) < len(loaders):
            raise ValueError("Lockstep was given one loader twice, which has one position: make a loader for each")
        self.loaders = loaders
        self._stop = stop
        self._epoch = 0
        self._at = self._beginning()
        self._resumes = False

    def _beginning(self) -> _LockedSteps:
        return _LockedSteps(0, [False] * len(self.loaders))

    @property
    def epoch(self) -> int:
        return self._epoch + self._at.over

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that begins next, in each of the loaders. A loaded position in it stays."""
        if self._resumes and epoch == self._epoch:
            return
        for loader in self.loaders:
            loader.set_epoch(epoch)
        self._epoch, self._at, self._resumes = epoch, self._beginning(), True

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return LockstepIterator(self)

    def __len__(self) -> int:
        """The number of steps in an epoch.

        Raises:
            TypeError: a loader has no length.
        """
        return (min if self._stop == SHORTEST else max)(map(len, self.loaders))

    def _begin(self) -> _LockedSteps:
        """The epoch that an iterator begins: the next one, or the rest of one that was loaded."""
        if not self._resumes:
            begun = self._at.over or self._at.step or self._at.found
            self._epoch, self._at = self._epoch + bool(begun), self._beginning()
        self._resumes = False
        return self._at

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of all loaders after the last step that was done.

        Returns:
            A dict; JSON-serializable if the states of the loaders are. With several ranks: if a loader reads iterable
            data, each rank saves its own.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> both = Lockstep(ShardedDataLoader(range(6), 2), ShardedDataLoader(range(8), 2))
            >>> first = next(iter(both))
            >>> both.state_dict()["step"]
            1
        """
        at = self._at
        # A loader that has given a batch of a step that was interrupted is one batch ahead.
        ahead = [number for number, one in at.found.items() if one is not _END]
        states = [loader._progress.state(back=n in ahead) for n, loader in enumerate(self.loaders)]
        ended = [one or at.found.get(n) is _END for n, one in enumerate(at.ended)]
        over = at.over or (self._stop == SHORTEST and any(ended))
        return written(_Saved(self._stop, self._epoch, at.step, over, tuple(ended), tuple(states)))

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        """Let the next epoch continue where `state_dict` was taken.

        Args:
            state: What `state_dict` returned; or a list of the states of all ranks, for loaders of iterable data.
            strict: As in `ShardedDataLoader.load_state_dict`.

        Raises:
            TypeError, ValueError: no state, or one of other loaders; says what differs. Nothing has changed then.
        """
        saved = self._parsed(state)
        pairs = list(zip(self.loaders, saved.loaders, strict=True))
        befores = [loader.state_dict() for loader in self.loaders]
        try:
            for loader, own in pairs:
                loader.load_state_dict(own, strict)
        except BaseException:
            for loader, before in zip(self.loaders, befores, strict=True):
                loader.load_state_dict(before)
            raise
        firsts = [own[0] if isinstance(own, list) else own for _, own in pairs]
        # A loader that had given its last batch is in its next epoch.
        passed = [loader.epoch > own["epoch"] for loader, own in zip(self.loaders, firsts, strict=True)]
        ended = [one or other for one, other in zip(saved.ended, passed, strict=True)]
        over = saved.over or (any if self._stop == SHORTEST else all)(ended)
        self._epoch, self._resumes = saved.epoch + over, True
        self._at = self._beginning() if over else _LockedSteps(saved.step, ended)
        for loader, own, is_next in zip(self.loaders, firsts, passed, strict=True):
            if over and not is_next and own.get("samples", own.get("batches", 0)) > 0:
                loader.set_epoch(loader.epoch + 1)

    def _parsed(self, state: Any) -> _Saved:
        states = state if isinstance(state, list | tuple) and state else [state]
        a_dict = instance(Mapping, "a dict")
        found = [parsed(_Saved, a_dict("the state", one, _ADVICE), _ADVICE) for one in states]
        first = found[0]
        wrong = list(differing(first, replace(first, stop=self._stop)).values())
        if any(len(one.loaders) != len(self.loaders) or len(one.ended) != len(one.loaders) for one in found):
            wrong.append(f"there were {len(first.loaders)} loaders, and are {len(self.loaders)}")
        if len({(one.epoch, one.step) for one in found}) > 1:
            wrong.append("the states of the ranks lie after different steps")
        if wrong:
            raise ValueError(f"the state does not fit this Lockstep: {', '.join(wrong)}. Make it as it was then")
        columns = zip(self.loaders, *(one.loaders for one in found), strict=True)
        several = len(found) > 1
        own = (list(row) if several and loader._order.stream is not None else row[0] for loader, *row in columns)
        return replace(first, loaders=tuple(own))

    # -- life -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all loaders."""
        for loader in self.loaders:
            loader.close()

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Lockstep({', '.join(map(repr, self.loaders))}, stop={self._stop!r})"


class LockstepIterator(Iterator[tuple[Any, ...]]):
    """One epoch of a `Lockstep`; it begins when its first step is asked for."""

    def __init__(self, owner: Lockstep) -> None:
        self._owner = owner
        self._at: _LockedSteps | None = None
        self._batches: list[Iterator[Any]] = []

    def __next__(self) -> tuple[Any, ...]:
        if self._at is None:
            self._at = self._owner._begin()
            self._batches = list(map(iter, self._owner.loaders))
        at = self._at
        if at.over:
            raise StopIteration
        for number in range(len(self._batches)):
            if number not in at.found:
                at.found[number] = self._ask(number)
        self._settle_ends(at)
        found, at.found, at.step = at.found, {}, at.step + (not at.over)
        error = next((one.error for one in found.values() if isinstance(one, _Failed)), None)
        try:
            if error is not None:
                raise error
        finally:
            del error  # otherwise error -> traceback -> this frame -> error
        if at.over:
            raise StopIteration
        return tuple(found[number] for number in range(len(self._batches)))

    def _ask(self, number: int) -> Any:
        """The next batch of a loader, its error, or its end."""
        try:
            return next(self._batches[number])
        except StopIteration:
            return _END
        except Exception as error:
            if is_from_outside(error):
                raise
            return _Failed(error)

    def _settle_ends(self, at: _LockedSteps) -> None:
        """All loaders were asked: the epoch is over, or those that have ended start over."""
        owner = self._owner
        for number in [number for number, one in at.found.items() if one is _END]:
            at.ended[number] = True
        at.over = (any if owner._stop == SHORTEST else all)(at.ended)
        for number, one in list(at.found.items()):
            if one is _END and not at.over:
                self._batches[number] = iter(owner.loaders[number])
                at.found[number] = self._ask(number)
                if at.found[number] is _END:
                    at.over = True
                    raise ValueError(f"Lockstep: loader {number} has no batches, so it cannot start over: leave it out")
