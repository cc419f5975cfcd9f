"""`StoredDataset`: a dataset that caches samples in shared memory or in a file; made by `Dataset.cache`.

Hits come from the store, which owns the bytes (`sharded_loader.caching.store`); misses are read once, and stored.
Workers inherit the store, or open it when they unpickle the dataset. A worker that cannot open it, for example on
another machine, reads uncached. Every read copies, so modifying a sample in place changes no other one.

Samples below ``cache(...)`` that draw random numbers or depend on ``set_epoch`` are an error, when the cache is made or
filled; so is a dataset whose length has changed since.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from sharded_loader import default_batchify_fn
from sharded_loader.caching.shared import tally
from sharded_loader.caching.store import MISSING, Node, Path, batched, open_store
from sharded_loader.extend import Array, Cache, Empty, Indices
from sharded_loader.extend import data as core
from sharded_loader.extend.order import SampleScope, reading
from sharded_loader.extend.tools import LOCAL_RANKS, add_note, brief

KEPT = SampleScope(0, 0, is_cached=True)
"""Scope while a sample is read that several batches get: drawing random numbers is an error."""


class ReadOnce(Cache):
    """Base of the caches here: ``_samples`` returns samples, those that are not there by `_read`."""

    _samples: Callable[[list[int]], list[Any]]

    def _checked(self) -> int:
        return len(self)

    def __getitem__(self, index: object) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self._samples([core.checked_index(index, self._checked())])[0]

    @core.bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples; those that are not there are read together."""
        return self._samples(core.checked_indices(indices, self._checked()).tolist())

    @cached_property
    def _is_awaited(self) -> bool:
        return core.is_awaited(self._dataset)

    def _read(self, indices: list[int]) -> list[object]:
        """Read samples of the dataset inside; drawing random numbers meanwhile is an error."""
        before = reading.get()
        try:
            reading.set(KEPT)
            if len(indices) == 1 and not self._is_awaited:  # to find out how many are read takes 0.1 ms
                return [self._dataset[indices[0]]]
            return core.read_many(self._dataset, indices)
        finally:
            reading.set(before)


class StoredDataset(ReadOnce):
    """A dataset whose samples are cached in one memory or file for all workers; made by `Dataset.cache`.

    Sample 0 is read twice at construction, to find the structure of samples and to detect randomness.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        max_bytes, path, key: see `Dataset.cache`.
    """

    _reads = ("get_batch",)

    def __init__(self, dataset: Any, max_bytes: int | str | None, path: Path = None, key: str | None = None) -> None:
        self._dataset = core.check_dataset(dataset, "StoredDataset")
        if not isinstance(key, (str, type(None))):
            raise TypeError(f"cache(key={key!r}): give a text, such as the version of your decoder")
        if core.epoch_setter(dataset) is not None:
            text = f"cache(...) keeps samples for all epochs, and {brief(dataset)} has set_epoch"
            raise ValueError(f"{text}, so they depend on the epoch: cache the datasets inside it")
        self._length = len(dataset)
        first, job = self._first_sample() if self._length else None, job_of_ranks()
        text = re.sub(" at 0x[0-9a-fA-F]+", "", brief(dataset))  # the same in all processes
        shared = None if job is None else f"{job} {core.fingerprint_of(dataset)} {text}"
        self._store = open_store(path, max_bytes, self._length, key, first, shared)
        self._shown = [] if max_bytes is None else [str(self._store.max_bytes)]
        self._shown += [] if path is None else [f"path={self._store.path!r}"]

    def _first_sample(self) -> object:
        """Return sample 0. It is read twice, because a random sample is an error."""
        moved, samples = [], []
        for _ in range(2):
            before = global_states()
            try:
                samples.append(self._read([0])[0])
            except Exception as error:
                advice = "If it is broken, leave it out: dataset[1:].cache(...)"
                add_note(error, f"sharded_loader: raised as cache(...) read sample 0. {advice}")
                raise
            moved.append(drawn_since(before))
        drawn = ", ".join(name for name in moved[0] if name in moved[1])
        if not drawn and core.exact(samples[0]) != core.exact(samples[1]):
            held = ", ".join(path for path, _ in islice(core.generators(self._dataset, "dataset"), 3))
            drawn = f"the generator of {held}" if held else "something of its own: two reads give two samples"
        if drawn:
            text = f"cache(...) keeps samples for all epochs, and sample 0 draws from {drawn}"
            advice = "move the transform that draws after the cache, dataset.cache(...).transform(fn)"
            raise ValueError(f"{text}: {advice}")
        return samples[0]

    def _checked(self) -> int:
        length = len(self._dataset)
        if length != self._length:
            text = f"{brief(self._dataset)} has {length} samples, and had {self._length} when it was cached"
            raise ValueError(f"{text}: call cache(...) again after a change")
        return length

    @property
    def cached(self) -> int:
        """Number of samples stored."""
        return int(np.count_nonzero(self._store.places))

    @property
    def structure(self) -> Node:
        """Node of the samples stored in columns, as in `caching.store`."""
        return self._store.node

    @property
    def counts(self) -> tuple[int, int, int]:
        """Hits, misses and stored bytes of all processes that share this object."""
        hits, misses = self._store.session.counts.sum(0).tolist()
        return hits, misses, self._store.used_bytes

    def _samples(self, where: list[int]) -> list[object]:
        store = self._store
        found = [store.read(index) for index in where]  # a separate object for each position: the user may modify it
        places = [place for place, sample in enumerate(found) if sample is MISSING]
        missing = [where[place] for place in places]
        tally(store.session.counts, len(where) - len(missing), len(missing))
        for place, index, sample in zip(places, missing, self._read(missing) if missing else (), strict=True):
            found[place] = sample
            try:
                store.write(index, sample)
            except TypeError as error:
                raise TypeError(f"sample {index} cannot be cached: {error}") from None
        return found

    def _in_columns(self, indices: Indices, empty: Empty) -> object:
        """Return a collated batch, or `NOT_IN_BULK` if some samples are not rows of the store."""
        where, store = core.checked_indices(indices, self._checked()), self._store
        if (rows := store.rows(where)) is None:
            return core.NOT_IN_BULK
        tally(store.session.counts, len(where), 0)
        return batched(store.node, iter(core.gather_rows(store.columns, rows, empty)), len(where))

    @core.bulk
    def get_batch(self, indices: Indices, empty: Empty = core.new_array) -> Any:
        """Return a collated batch, in memory from ``empty``."""
        batch = self._in_columns(indices, empty)
        if batch is core.NOT_IN_BULK:
            where = core.checked_indices(indices, self._checked()).tolist()
            batch = default_batchify_fn.assemble(self._samples(where), empty)
        return batch

    def _routes(self) -> Iterable[tuple[Any, core.Translate]]:
        return [(self._dataset, self._missing)]

    def _missing(self, indices: Indices) -> Array:
        where = core.checked_indices(indices, self._length)
        missing: Array = where[self._store.places[where] == 0]
        return missing

    def __repr__(self) -> str:
        return f"{brief(self._dataset)}.cache({', '.join(self._shown)})"


def global_states() -> dict[str, bytes]:
    """Return the state of each global generator, by name; equal unless numbers were drawn in between.

    Example:
        >>> before = global_states()
        >>> _ = random.random()
        >>> [name for name, state in global_states().items() if state != before[name]]
        ['random']
    """
    found = {"random": repr(random.getstate()).encode()}
    if "numpy.random" in sys.modules:  # importing it takes 8 ms
        of_numpy = np.random.get_state(legacy=False)["state"]
        found["numpy.random"] = repr(of_numpy["pos"]).encode() + of_numpy["key"].tobytes()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        found["torch"] = generator.get_state().numpy().tobytes()
    return found


def drawn_since(before: dict[str, bytes]) -> list[str]:
    """Return the names of the global generators that have drawn since `global_states` returned these."""
    return [name for name, state in global_states().items() if state != before.get(name, state)]


JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that are equal on all ranks of a job, and differ between jobs."""


def job_of_ranks(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a text shared by the ranks of a job on this machine; None if this process does not seem to be a rank.

    Ranks have variables of torchrun, SLURM or MPI, or are children of multiprocessing, as with ``mp.spawn``.

    Example:
        >>> job_of_ranks({"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
        'localhost 29500'
        >>> job_of_ranks({}) is None
        True
    """
    parent_process: Any = getattr(sys.modules.get("multiprocessing.process"), "parent_process", None)
    is_child = parent_process is not None and parent_process() is not None
    if not is_child and not any(environ.get(name) for name in ("RANK", *LOCAL_RANKS)):
        return None
    return " ".join(environ[name] for name in JOB if environ.get(name)) or f"of {os.getppid()}"
