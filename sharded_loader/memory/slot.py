"""`Slot`: what the arena hands out and a task carries. Apart from the arena, which workers do not import."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, unsafe_hash=True)
class Slot:
    """A stretch of a segment, while one batch lives in it.

    Attributes:
        segment, offset, nbytes: where it is.
        lent: the batch is handed out, and the slot comes back by its lease; until then whoever took it gives it.
    """

    segment: int
    offset: int
    nbytes: int
    lent: bool = field(default=False, compare=False)
