"""Which actor reads the tasks of which lane: the parts of iterable data, and workers that take turns.

    Lanes.holder(lane, ready) -> the actor; chosen at the first task, and again where it has gone
    Lanes.share(ready)           an actor has come: nobody keeps more lanes than its share

An actor keeps the parts of its lanes open. To give a lane to another actor costs the opening of a part, and changes no
batch. Nothing goes wrong here.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharded_loader.pools.ray.members import Member


class Lanes:
    """Who has which lane."""

    def __init__(self) -> None:
        self._holders: dict[int, Member] = {}

    def holder(self, lane: int, ready: Sequence[Member]) -> Member | None:
        """The actor that reads a lane; None if no actor is ready.

        Args:
            lane: number of the lane.
            ready: the actors that read. One that has died is not among them.
        """
        member = self._holders.get(lane)
        if member is None or member not in ready:
            held = list(self._holders.values())
            member = min(ready, key=held.count, default=None)
            if member is None:
                return None
            self._holders[lane] = member
        return member

    def share(self, ready: Sequence[Member]) -> None:
        """Take away what an actor has beyond its share. Others get it with its next task."""
        share = -(-len(self._holders) // max(1, len(ready)))
        for member in ready:
            for lane in [lane for lane, one in self._holders.items() if one is member][share:]:
                del self._holders[lane]

    def clear(self) -> None:
        """Forget all."""
        self._holders.clear()
