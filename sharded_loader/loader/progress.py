"""Where a loader is: the position that `epoch`, `position`, `state_dict` and ``repr`` tell.

    iter(loader)                                                       nothing
    the first next(iterator): begin() -> Epoch -> Run, then begun(run)
    each next(iterator): shown = its run                               the position is that run's
    load_state_dict: load(state)                                       the position is pending until an epoch begins

The position is the first of these that exists: a loaded position that is pending; the run that began or delivered
last, if its iterator is alive or its epoch was the last one begun (after a ``break``); the beginning of the next epoch.

Owns the pending position and the table of live iterators. The order knows which epoch is next, a run how much of it was
delivered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from sharded_loader.base.private import fetched_by_lightning
from sharded_loader.data.inspection import warn_of_other_data
from sharded_loader.engine.epoch import Epoch, Position
from sharded_loader.engine.run import Run, ShownRun
from sharded_loader.sampling.order import MapOrder
from sharded_loader.streams.order import StreamOrder

Mark = tuple[int, Position | None, Run | None]
"""The next epoch, the pending position in it, and the run that is shown."""


class Progress(ShownRun):
    """The position of one loader.

    Args:
        order: the loader's.
        fingerprint: what tells other data; see `data.inspection`. It is asked for with the first state.

    Attributes:
        live: the iterators that have begun an epoch and are alive, by the numbers of their runs.
    """

    def __init__(self, order: MapOrder | StreamOrder, fingerprint: Callable[[], str | None] = lambda: None) -> None:
        self._fingerprint = fingerprint
        self._order = order
        self.live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._pending: Position | None = None
        self._length: int | None = None
        self._restarts = False

    def live_runs(self) -> list[Run]:
        """The runs of the iterators that are alive."""
        # A list of references is made in one step. Iterating would fail while another thread begins an epoch.
        iterators = [reference() for reference in self.live.valuerefs()]
        return [run for one in iterators if one is not None and (run := one.run) is not None]

    def mark(self) -> Mark:
        """What `go_back` goes back to."""
        return self._order.next_epoch, self._pending, self.shown

    def go_back(self, mark: Mark, run: Run) -> None:
        """The first ``next`` of a run was interrupted: its epoch has not begun."""
        self.live.pop(run.number, None)
        epoch, self._pending, self.shown = mark
        self._order.set_epoch(epoch)

    def begun(self, run: Run, iterator: Any) -> None:
        """An epoch has begun, with its first batch: the one after it is next."""
        self.live[run.number] = iterator
        self._pending = run.epoch.carry
        self._order.set_epoch(run.epoch.number + 1)

    def was_over(self, run: Run) -> bool:
        """The end of a run was seen. Whether its epoch was over already where the loaded position was.

        `load` notices this where the sampler has a length. The next epoch is the one after it. If ``set_epoch`` has
        asked for the run's epoch since, that epoch begins again.
        """
        epoch = run.epoch
        if not epoch.in_mid_epoch or epoch.batches(run.delivered) != epoch.first:
            return False
        if self._restarts and self._order.next_epoch == epoch.number + 1:
            self._order.set_epoch(epoch.number)
        return True

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; if another was, the loaded position is dropped."""
        self._order.set_epoch(epoch)
        self._loaded()
        self._restarts = True

    def begin(self) -> Epoch:
        """The epoch that begins now.

        Raises:
            ValueError: the dataset has changed its length since a position in it was loaded.
        """
        position = self._loaded()
        moved = position is not None and (position != Position(position.epoch) or self._order.rolls_over)
        if position is not None and moved and self._length != self._order.dataset_length:
            raise ValueError(
                f"the loaded state is a position in a dataset of {self._length} samples, and loader.refresh() found "
                f"{self._order.dataset_length}: drop the position with "
                f"set_epoch({position.epoch + 1}), and begin any epoch"
            )
        coming = self.coming()
        if position is None and self.shown is not None:
            coming.go_on_from(self.shown.epoch)
        return coming

    def coming(self) -> Epoch:
        """The epoch that begins next, from the loaded position on if there is one."""
        position = self._loaded()
        return self._order.epoch(self._order.next_epoch, position)

    def _loaded(self) -> Position | None:
        """The loaded position, as long as its epoch is the next one."""
        if self._pending is not None and self._pending.epoch != self._order.next_epoch:
            self._pending = None
        return self._pending

    @property
    def resumes(self) -> bool:
        """Whether the next epoch continues at a loaded position."""
        return self._loaded() is not None

    def run(self) -> Run | None:
        """The run that is at the position, if one is."""
        run = self.shown
        if run is None or run.ended or self.resumes:
            return None
        alive = run.epoch.number + 1 == self._order.next_epoch or self.live.get(run.number) is not None
        return run if alive else None

    def at(self) -> tuple[int, int]:
        """Epoch, and batches delivered in it."""
        run = self.run()
        if run is not None:
            return run.epoch.number, run.epoch.batches(run.delivered)
        if not self.resumes:
            return self._order.next_epoch, 0
        return self._order.next_epoch, self.coming().first

    def length(self) -> int:
        """Batches in the epoch of `at`."""
        run = self.run()
        if run is not None and run.epoch.resumed:
            return run.epoch.length()
        return self.coming().length() if self.resumes else self._order.length(self.at()[0])

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The position as a state."""
        run = self.run()
        epoch = self.coming() if run is None else run.epoch
        ahead, is_over = fetched_by_lightning()
        if run is not None and is_over and self._order.stream is not None:
            run, epoch = None, self._order.epoch(epoch.number + 1)
        position = epoch.position(epoch.first if run is None else max(epoch.first, run.delivered - ahead))
        ended = self.shown
        if run is None and ended is not None and ended.ended and ended.epoch.number + 1 == position.epoch:
            position = ended.epoch.after(position)
        state = epoch.state(position)
        data = self._fingerprint()
        return state if data is None else {**state, "data": data}

    def load(self, state: Any, strict: bool) -> bool:
        """Continue at the position of a state.

        Returns:
            Whether the loader's seeds have changed with it.

        Raises:
            TypeError, ValueError: the state does not fit. Nothing has changed then.
        """
        position, changed = self._order.load(state, strict)
        if strict:
            one = state[0] if isinstance(state, list | tuple) else state
            warn_of_other_data(one.get("data"), self._fingerprint())
        self._order.set_epoch(position.epoch)
        self.shown = None
        self._restarts = False
        self._pending = position
        self._length = self._order.dataset_length
        return changed
