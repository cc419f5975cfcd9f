"""`Instruments`: the reporting methods of a loader.

    loader.report(), loader.report("rank0.html")  -> `page.text_of`, printed; `page.page_of`, one file
    loader.trace("trace.json")                    -> `page.trace_of`, one file
    loader.stats_of_ranks()                       -> statistics of all ranks -> `page.compared` -> `RankStats`

Reports are built on request, so batches pay nothing for them. Files are replaced atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sharded_loader.extend import BatchTimes, Pool
from sharded_loader.extend.data import mixture_of
from sharded_loader.extend.engine import KnownSteps, process_group, resolve_replicas
from sharded_loader.extend.order import MapOrder
from sharded_loader.extend.tools import check_int, write_whole
from sharded_loader.instruments import page
from sharded_loader.instruments.check import Fingerprint, LoaderCheck, check_loader, fingerprint_of_epoch
from sharded_loader.instruments.stats import LoaderStats, Meter
from sharded_loader.samplers.inverse import SamplePlace, places_of


class RankStats(NamedTuple):
    """Statistics of all ranks, returned by ``loader.stats_of_ranks()``. ``print`` shows ``text``: advice, and a table.

    Attributes:
        stats: ``loader.stats()`` of each rank, by rank.
        slowest: Rank that the others wait for, or None.
        text: Advice, and a row for each rank.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> loader = ShardedDataLoader(range(10), 4)
        >>> for batch in loader: pass
        >>> "Ranks: 1" in str(loader.stats_of_ranks())
        True
    """

    stats: dict[int, LoaderStats]
    slowest: int | None
    text: str

    def __str__(self) -> str:
        return self.text


class Instruments:
    """Reporting methods of a loader, over its `Meter`."""

    _meter: Meter
    _given: Callable[[], Mapping[str, Any]]  # the arguments of the loader, by name
    _inspected: Callable[[], tuple[KnownSteps, int, Pool]]  # its steps, the number of its epoch, and its pool

    def _replicas(self) -> tuple[int, int]:
        with contextlib.suppress(ValueError):  # incomplete environment variables must not prevent a report
            return resolve_replicas("auto")
        return 1, 0

    def _name(self) -> str:
        ranks, rank = self._replicas()
        return f"{type(self).__name__}, rank {rank} of {ranks}"

    @property
    def skipped(self) -> list[tuple[Any, BaseException]]:
        """``(index, error)`` of the last 1,000 samples that ``on_error`` skipped or replaced."""
        return self._meter.skipped

    @property
    def num_skipped(self) -> int:
        """Number of samples that ``on_error`` has skipped or replaced."""
        return self._meter.notices.counts["skipped_samples"]

    def stats(self, epoch: int | None = None) -> LoaderStats:
        """Return throughput, the share of time spent waiting for data, and where the time went. Safe at any time.

        Args:
            epoch: One of the last 1,000 epochs; the newest iterator over it counts, from a loaded position on. None:
                all epochs together.

        Returns:
            A `LoaderStats`; all zeros if no batch has been delivered.

        Raises:
            TypeError, ValueError: ``epoch`` is not an integer of at least 0.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> for epoch in range(2):
            ...     for batch in loader: pass
            ...     print(loader.stats(epoch).as_dict("batches", "samples"))
            {'batches': 3.0, 'samples': 10.0}
            {'batches': 3.0, 'samples': 10.0}
            >>> loader.stats().samples
            20
        """
        return self._meter.stats(None if epoch is None else check_int("epoch", epoch, 0, "epochs count from 0"))

    def report(self, path: str | os.PathLike[str] | None = None) -> None:
        """Explain why training waits, and what to do about it: causes, stages, workers, slowest samples.

        Args:
            path: None to print the report, or the name of an ``.html`` file, which adds a plot of the last 1,000
                batches. With several ranks, `stats_of_ranks` names the slow one.

        Raises:
            ValueError: the name of the file does not end in ``.html``.
            RuntimeError: the loader has delivered no batch yet.
            OSError: the file cannot be written. An existing file is preserved.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> for batch in loader: pass
            >>> loader.report()
            10 samples in 3 batches, ...
        """
        if path is not None and Path(path).suffix != ".html":
            raise ValueError(
                f"report: {os.fspath(path)!r} does not end in .html: give such a name, or none to print it"
            )
        rows, stats = self._rows("report"), self.stats()
        if path is None:
            print(page.text_of(stats, self._given()))
        else:
            about = f"{self._name()}, on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M')}"
            _write(path, page.page_of(about, stats, self._given(), rows))

    def stats_of_ranks(self, group: object = None) -> RankStats:
        """Gather the statistics of all ranks, and find the rank that slows down the others.

        **Every rank of the group must call it**: it is a collective operation, in which each sends 20 KB per worker.

        Args:
            group: a process group of ``torch.distributed``, which for NCCL needs ``torch.cuda.set_device`` before.
                None: the default one, or this process alone.

        Raises:
            RuntimeError: a rank, which is named, has delivered no batch yet. Raised on all ranks.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> for batch in loader: pass
            >>> found = loader.stats_of_ranks()
            >>> found.slowest, found.stats[0].samples
            (None, 10)
        """
        distributed, own = process_group(), (self.stats(), platform.node())
        found: list[Any] = [(0, own)]
        if distributed:
            found = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(found, (distributed.get_rank(), own), group)
        for rank, (stats, _) in found:
            if not stats.batches:
                raise RuntimeError(
                    f"stats_of_ranks: rank {rank} has delivered no batch yet: iterate over its loader first"
                )
        return RankStats({rank: stats for rank, (stats, _) in found}, *page.compared(dict(found)))

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace of the last 1,000 batches, for https://ui.perfetto.dev or ``chrome://tracing``.

        It shows when each was read, waited for and delivered, in lanes of the main process and the workers. Batches
        that take less than 1 ms are sampled.

        Args:
            path: the file, such as ``trace.json``.

        Raises:
            RuntimeError: the loader has delivered no batch yet.
            OSError: the file cannot be written. An existing file is preserved.

        Example:
            >>> import json, tempfile
            >>> from pathlib import Path
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> for batch in loader: pass
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = Path(folder, "trace.json")
            ...     loader.trace(path)
            ...     events = json.loads(path.read_text())["traceEvents"]
            >>> events[0]["args"]["name"]
            'ShardedDataLoader, rank 0 of 1'

        Source of the idea: the traces of ``torch.profiler``.
        """
        _write(path, json.dumps(page.trace_of(self._rows("trace"), self._name()), allow_nan=False))

    def fingerprint(self, epoch: int | None = None) -> Fingerprint:
        """Return a short hash of the order of an epoch and of three of its samples, to compare two runs.

        It is equal on every rank, for any number of ranks with the same global batch, and in every pool, process and
        version of Python. The samples are read here, twice; irreproducible ones are skipped (`check` explains them).
        From this call on, `state_dict` holds their digests, so `load_state_dict` rejects the state over other data.

        Args:
            epoch: Default: `epoch`. Its whole order is computed: two seconds for 100,000 steps of 64 samples.

        Returns:
            A `Fingerprint`. ``str`` of it is the hash. Save ``as_dict()`` as JSON, and ``sharded-loader diff`` names
            the first step in which two runs differ.

        Raises:
            TypeError: The dataset is iterable data.
            ValueError: The order is not known, as in `indices`.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(8), 4, shuffle=True, seed=1)
            >>> str(loader.fingerprint(epoch=0)), loader.fingerprint(0).steps
            ('33aedb4a09a1b621', '8d3898173fc69c89')
        """
        steps, now, _ = self._inspected()
        return fingerprint_of_epoch(steps, now if epoch is None else epoch)

    def when(self, index: Any, epoch: int | None = None) -> list[SamplePlace]:
        """Return the steps and ranks that read a sample in an epoch, past or to come, from the order alone.

        Takes 0.1 ms for 10**10 samples where the order is a keyed bijection; shorter orders (up to 2**24 samples), and
        lists, are searched. Steps left out by ``skip``, and the padding of ``evaluate``, do not count.

        Args:
            index: Index of the sample; for a mixture (`interleave`), (number of the dataset, index in it).
            epoch: From 0. Default: `epoch`.

        Returns:
            A list of `SamplePlace`, by step and rank. Empty if the sample is not read; several places if it is
            repeated, or fills up a rank.

        Raises:
            IndexError: The dataset has no such sample.
            TypeError: The order has no known inverse: draws by weight, ``costs``, samplers of batches other than
                `BatchSampler`, samplers of other libraries, iterable data, torch's own order in the drop-in.
            ValueError: Only other ranks have read the sample, before `rescale` or before the loaded state was saved.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10**10), 256, shuffle=True, num_replicas=64, rank=0, seed=1)
            >>> place, = loader.when(1234567890, epoch=5)
            >>> place
            SamplePlace(epoch=5, step=408543, rank=8, place=106)
            >>> loader.indices(place.epoch, place.step, place.rank)[place.place]
            1234567890
        """
        steps, now, _ = self._inspected()
        order = getattr(steps, "order", None)
        if not isinstance(order, MapOrder):
            text = "when needs data that are read by index, in the order of ShardedDataLoader"
            raise TypeError(f"{text}: in the drop-in, give num_replicas=1. Parts of iterable data have no indices")
        return places_of(order, mixture_of(steps.dataset), index, now if epoch is None else epoch)

    def check(self, samples: int = 12) -> LoaderCheck:
        """Read some samples twice here, and once in a temporary worker; report which of them differ, and why.

        Args:
            samples: Number of samples, from the first, middle and last step of `epoch`.

        Returns:
            A `LoaderCheck` to ``print``: samples that differ, with the generator they draw from if it is global or held
            by the dataset; the size of the pickled dataset; the worker's memory. Errors of samples are not raised, and
            the loader, its epoch and its workers do not change.

        Raises:
            TypeError: The dataset is iterable data.
            ValueError: ``samples`` is not a positive integer, or the order is not known, as in `indices`.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader([3, 1, 2], 2, num_workers=2, thread_pool=True)
            >>> print(loader.check())
            3 samples were read twice here, and by ThreadPool(1).
            All are the same each time.
            The pickled dataset has ... bytes.
        """
        steps, now, pool = self._inspected()
        return check_loader(steps, now, samples, pool)

    def _rows(self, method: str) -> list[BatchTimes]:
        if not self.stats().batches:
            raise RuntimeError(f"{method}: the loader has delivered no batch yet: iterate over it first")
        return self._meter.rows()


def _write(path: str | os.PathLike[str], text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        advice = "give a file in a folder that exists, that may be written to, and that has space"
        raise OSError(error.errno, f"{os.fspath(path)} cannot be written ({error.strerror}): {advice}") from None
