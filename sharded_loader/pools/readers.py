"""Which reader a job needs. That of iterable data is imported only where there is such data: a worker starts faster."""

from __future__ import annotations

from collections.abc import Callable

from sharded_loader.engine.messages import Job
from sharded_loader.engine.reader import Reader


def reader_for(
    job: Job,
    *,
    tells_epoch: bool = False,
    notes_samples: bool = False,
    readers: int = 1,
    alone: bool = False,
    seed: Callable[[int, int], None] | None = None,
) -> Reader:
    """The reader of a job.

    Args:
        job: what is read.
        tells_epoch, notes_samples: see `Reader`.
        readers: how many readers share the parts of iterable data; see `StreamReader`.
        alone, seed: see `StreamReader`.
    """
    if job.stream is None and not job.keeps_state:
        return Reader(job, tells_epoch=tells_epoch, notes_samples=notes_samples)
    from sharded_loader.data.inspection import keeps_place
    from sharded_loader.streams.reader import StatefulReader, StreamReader

    if job.stream is None:
        return StatefulReader(job, notes_samples=notes_samples)
    # The drop-in (which tells no epoch) has one iterator at a time, and reads the user's own object, as torch does.
    several = job.stream.parts > readers or (job.stream.tells_epoch and keeps_place(job.dataset))
    return StreamReader(job, notes_samples=notes_samples, several=several, alone=alone, seed=seed)
