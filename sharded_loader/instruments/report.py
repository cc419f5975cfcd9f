"""`Instruments`: the methods of a loader that tell what it does: numbers, reports, a trace, checks.

    loader.report()               -> `page.text_of`, printed
    loader.report("rank0.html")   -> `page.page_of`, one file
    loader.trace("trace.json")    -> `page.trace_of`, one file
    loader.stats_of_ranks()       -> those of all ranks of the process group -> `page.compared` -> `RankStats`

Reports are made when they are asked for: no batch is slower for them. What can go wrong: no batch was delivered, or a
file cannot be written. Each is an error that says what to do. A file is written whole or not at all, so an older one of
its name stays, and the loader goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sharded_loader.extend import BatchTimes, Pool
from sharded_loader.extend.engine import KnownSteps, process_group, resolve_replicas
from sharded_loader.extend.tools import check_int, write_whole
from sharded_loader.instruments import page
from sharded_loader.instruments.check import Fingerprint, LoaderCheck, check_loader, fingerprint_of_epoch
from sharded_loader.instruments.stats import LoaderStats, Meter


class RankStats(NamedTuple):
    """The numbers of all ranks: what `stats_of_ranks` of a loader returns. ``print`` shows a table of the ranks.

    Attributes:
        stats: what ``loader.stats()`` says in each rank, by rank.
        slowest: the rank that the others wait for; None: no rank holds up the others.
        text: what to do, and a row of each rank.

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
    """The methods of a loader that tell what it does, and what its `Meter` has measured."""

    _meter: Meter

    @abstractmethod
    def _given(self) -> Mapping[str, Any]:
        """The arguments of the loader, by name."""

    def _inspected(self) -> tuple[KnownSteps, int, Pool]:
        """The steps of the loader, the number of its epoch, and its pool."""
        raise NotImplementedError

    def _replicas(self) -> tuple[int, int]:
        """The number of ranks, and which one this is."""
        with contextlib.suppress(ValueError):  # half of the environment variables: no reason to tell nothing
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
        """The number of samples that ``on_error`` has skipped or replaced."""
        return self._meter.notices.counts["skipped_samples"]

    def stats(self, epoch: int | None = None) -> LoaderStats:
        """Samples per second, the share of time spent waiting for data, where the time went.

        You can call it at any time: in the middle of an epoch, after its end, from another thread.

        Args:
            epoch: The epoch to tell about. None: all epochs together. If you read an epoch several times, the newest
                iterator counts. After `load_state_dict`, an epoch counts from the loaded position on. The loader
                keeps the numbers of the last 1,000 epochs.

        Returns:
            The numbers, all zeros if the epoch has delivered no batch yet. `LoaderStats.as_dict` makes a dict of them.

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
        """Tell why training waits, and what to do about it: causes, stages, workers, the slowest samples.

        Call it at any time, also in the middle of an epoch.

        Args:
            path: None: it is printed. A name that ends in ``.html``: it is written to this file, with a plot of the
                last 1,000 batches. The file needs no network. With several ranks, `stats_of_ranks` names the slow one.

        Raises:
            ValueError: the name of the file does not end in ``.html``.
            RuntimeError: the loader has delivered no batch yet.
            OSError: the file cannot be written. An older file of this name stays.

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
        """The numbers of all ranks, and which rank holds up the others, over the process group.

        **Every rank of the group must call it**: it is a collective call, such as a barrier, and a rank that calls it
        waits for the others. Each rank gets the same result. Each sends 20 KB for each of its workers.

        Args:
            group: a process group of ``torch.distributed``. None: the default one. NCCL needs ``torch.cuda.set_device``
                before. A process without a process group gets its own numbers.

        Raises:
            RuntimeError: a rank has delivered no batch yet. All ranks raise it, and it names the rank.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> for batch in loader: pass
            >>> found = loader.stats_of_ranks()
            >>> found.slowest, found.stats[0].samples
            (None, 10)
        """
        distributed, stats = process_group(), self.stats()
        ranks, rank = (distributed.get_world_size(group), distributed.get_rank()) if distributed else (1, 0)
        found: list[Any] = [(rank, (stats, platform.node()))]
        if distributed:
            own, found = found[0], [None] * ranks
            distributed.all_gather_object(found, own, group)
        for rank, (stats, _) in found:
            if not stats.batches:
                raise RuntimeError(
                    f"stats_of_ranks: rank {rank} has delivered no batch yet: iterate over its loader first"
                )
        return RankStats({rank: stats for rank, (stats, _) in found}, *page.compared(dict(found)))

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write when each of the last 1,000 batches was read, waited for and handed out, as a Chrome trace.

        Open the file in https://ui.perfetto.dev, or in ``chrome://tracing``. The main process and each worker have a
        lane. Each slice has the epoch and the step of its batch. Of batches that take less than 0.2 ms, only some are
        noted.

        Args:
            path: the file, such as ``trace.json``.

        Raises:
            RuntimeError: the loader has delivered no batch yet.
            OSError: the file cannot be written. An older file of this name stays.

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
        """A short hash of the order of an epoch and of three of its samples, to compare two runs with.

        It is the same on every rank, for any number of ranks that together read as many samples in a step, and in every
        pool, process and version of Python. The samples are read here, twice, with their random numbers, which depend
        on ``seed``. One that is another one when it is read again is left out; `check` says why. From this call on,
        `state_dict` has the digests of the samples. `load_state_dict` then reads these samples, and rejects the state
        over other data.

        Args:
            epoch: Which epoch. Default: `epoch`. The order of the whole epoch is computed: two seconds for 100,000
                steps of 64 samples.

        Returns:
            A `Fingerprint`. ``str`` of it is the hash. With ``as_dict()`` in a file of JSON, the command
            ``sharded-loader diff`` names the first step in which two runs differ.

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

    def check(self, samples: int = 12) -> LoaderCheck:
        """Read some samples again and again, and tell which of them differ, and why.

        They are read twice here, the second time in the reverse order, and once by a worker, which is started for this
        and ended. The loader, its epoch and its workers stay what they are.

        Args:
            samples: How many samples of `epoch`: from its first, its middle and its last step.

        Returns:
            A `LoaderCheck`, which ``print`` shows: the samples that differ, the size of the pickled dataset, and the
            memory of the worker. Of each sample it names the source of the randomness, if that is a global generator or
            one of the dataset. What the samples raise is no error here.

        Raises:
            TypeError: The dataset is iterable data.
            ValueError: ``samples`` is no positive integer. The order is not known, as in `indices`.

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
    """Write a file whole or not at all."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        advice = "give a file in a folder that exists, that may be written to, and that has space"
        raise OSError(error.errno, f"{os.fspath(path)} cannot be written ({error.strerror}): {advice}") from None
