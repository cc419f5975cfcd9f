"""Reads one batch: samples from the dataset, then batchify. The same code in every pool.

    Task -> Reader.read -> Result (NumPy arrays and tensors, or the error with its place noted)

In bulk where the dataset can: as a finished batch (``get_batch``, columns: see `data.arrays`; only with the
default batchify), then ``__getitems__(indices)``, then one ``__getitem__`` per sample. A bulk read that raises is
done again one by one, to name the sample. The batch is put together in memory from the caller's ``empty``; while
``batchify_fn`` or ``get_batch`` runs, `sharded_loader.empty` gives the user's code the same.

A reader keeps nothing of a batch, so several threads may use one. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import BatchifyError, Empty, assemble
from sharded_loader.data.arrays import NOT_IN_BULK, as_bulk, as_items, takes_arrays
from sharded_loader.engine.board import IN_BATCHIFY, IN_BULK, SAMPLE, SHARD, Board, new_board, sample_in
from sharded_loader.engine.messages import NOTHING, Job, Result, Task
from sharded_loader.errors import Location, SampleError, add_note, as_exception, notes_of, set_notes, without_frames
from sharded_loader.interrupts import is_from_outside
from sharded_loader.rng import NO_SAMPLE, OfBatch, SampleScope, philox, reading

_BAD: Any = object()

_KEPT = (
    "sharded_loader: no sample of its batch or shard could be read, and with num_replicas none is left out, as all "
    'ranks take the same steps with the same shards: on_error="replace" fills a shard from the others of the batch'
)


class Reader:
    """Makes batches of one job, one after the other.

    Args:
        job: dataset, batchify function, seed, what to do about bad samples.
        tells_epoch: call the dataset's ``set_epoch`` when a task's epoch differs from the last one's (where
            the dataset is this reader's own).
    """

    def __init__(self, job: Job, *, tells_epoch: bool = False) -> None:
        self._job = job
        self._dataset = job.dataset
        self._batchify = default_batchify_fn if job.batchify_fn is None else job.batchify_fn
        self._gather = as_bulk(job.dataset) if job.batchify_fn is None else None
        self._get_items = as_items(job.dataset)
        self._set_epoch = getattr(job.dataset, "set_epoch", None) if tells_epoch else None
        self._takes_arrays = job.batchify_fn is None and takes_arrays(job.dataset)
        self._epoch: int | None = None

    def read(
        self, task: Task, worker: str | None = None, empty: Empty = np.empty, board: Board | None = None
    ) -> Result:
        """The batch that ``task`` asks for.

        Args:
            task: what to read.
            worker: how errors name who reads (``worker 2 (pid 4711)``); None in the caller's own thread.
            empty: gives the memory that the batch is put together in.
            board: where to note what is being read.

        Exceptions become part of the result. Only in the caller's own thread a KeyboardInterrupt passes, and what a
        signal handler raises (`sharded_loader.interrupts.is_from_outside`).
        """
        began = time.perf_counter()
        if not self._takes_arrays and type(task.shards[0]) is np.ndarray:
            task = task._replace(shards=tuple(map(_as_list, task.shards)))
        skipped: list[tuple[Any, BaseException]] = []
        batches: list[Any] = []
        lost: tuple[int, ...] = ()
        error: BaseException | None = None
        count = 0
        if board is None:
            board = new_board()
        before, scope = reading.scope, SampleScope(self._job.seed, task.epoch)
        try:
            reading.scope = scope
            self._tell_epoch(task, worker)
            if self._job.on_error == "raise":
                batches, count = self._read_strict(task, scope, worker, empty, board)
            else:
                batches, count, lost = self._read_tolerant(task, scope, worker, empty, skipped, board)
        except BaseException as raised:
            if passes(raised, worker):
                raise
            if isinstance(raised, KeyboardInterrupt):
                raised = self._placed(raised, *_at(task, worker, board))
            error = raised
        finally:
            reading.scope = before
        batch: Any = NOTHING if not batches else batches if task.sharded else batches[0]
        seconds = time.perf_counter() - began
        try:
            return Result(task.run, task.seq, batch, count, error, tuple(skipped), lost, seconds)
        finally:
            del error  # else error -> traceback -> this frame -> error, and whoever it passes waits for the collector

    def _tell_epoch(self, task: Task, worker: str | None) -> None:
        if self._set_epoch is None or task.epoch == self._epoch:
            return
        try:
            self._set_epoch(task.epoch)
        except BaseException as error:
            add_note(error, f"raised by dataset.set_epoch({task.epoch})")
            raise self._placed(error, _place(task, 0, worker), None, task.shards[0])  # noqa: B904 - the same object
        self._epoch = task.epoch

    def read_sample(self, index: Any, epoch: int) -> Any:
        """One sample, with its generator; exceptions pass as they are."""
        before, scope = reading.scope, SampleScope(self._job.seed, epoch)
        try:
            reading.scope = scope
            scope.index, scope.drawn = index, None
            return self._dataset[index]
        finally:
            reading.scope = before

    def probe(self, task: Task, board: Board) -> None:
        """Read the samples of a task one by one and drop them, where they are else read in bulk.

        For a task over which a worker has died in bulk: the next one that dies has noted at which sample. Who calls
        this seeds the global generators after it.
        """
        gather, get_items = self._gather, self._get_items
        if gather is None and get_items is None:
            return
        before = reading.scope
        try:
            reading.scope = SampleScope(self._job.seed, task.epoch)
            for number, indices in enumerate(task.shards):
                board[SHARD] = number
                for ordinal, index in enumerate(_as_list(indices)):
                    board[SAMPLE] = ordinal
                    with contextlib.suppress(Exception):  # it comes again when the batch is read
                        if gather is not None:
                            gather([index], np.empty)
                        elif get_items is not None:
                            get_items([index])
        finally:
            reading.scope = before

    def _read_strict(
        self, task: Task, scope: SampleScope, worker: str | None, empty: Empty, board: Board
    ) -> tuple[list[Any], int]:
        batches = []
        count = 0
        for number, indices in enumerate(task.shards):
            place = _place(task, number, worker)
            board[SHARD] = number
            batches.append(self._read_shard(indices, task, scope, empty, place, board))
            count += len(indices)
        return batches, count

    def _read_shard(
        self, indices: Any, task: Task, scope: SampleScope, empty: Empty, place: Location, board: Board
    ) -> Any:
        samples: list[Any] | None = None
        if self._gather is not None or self._get_items is not None:
            scope.index, scope.drawn = NO_SAMPLE, None
            board[SAMPLE] = IN_BULK
            try:
                if self._gather is not None:
                    batch = self._gather(indices, empty)
                    if batch is not NOT_IN_BULK:
                        return batch
                    indices = _as_list(indices)
                if self._get_items is not None:
                    samples = _checked(self._get_items(indices), indices)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if passes(error, place.worker):
                    raise
                self._name_culprit(_as_list(indices), scope, place, board, error)
        if samples is None:
            samples = self._read_one_by_one(indices, scope, place, board)
        board[SAMPLE] = IN_BATCHIFY
        return self._make_batch(samples, task, scope, empty, place, indices)

    def _read_one_by_one(self, indices: Sequence[Any], scope: SampleScope, place: Location, board: Board) -> list[Any]:
        dataset = self._dataset
        samples = []
        index: Any = None
        try:
            for ordinal, index in enumerate(indices):
                board[SAMPLE] = ordinal  # 40 ns in shared memory, 15 in a list
                scope.index = index
                scope.drawn = None
                samples.append(dataset[index])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._placed(error, place, [index])  # noqa: B904 - the same object, or its cause is set
        return samples

    def _name_culprit(
        self, indices: Sequence[Any], scope: SampleScope, place: Location, board: Board, error: BaseException
    ) -> None:
        """Raise the error of the sample that made a bulk read fail; of the bulk read if none does alone."""
        self._read_one_by_one(indices, scope, place, board)
        raise self._placed(error, place, None, indices)

    def _make_batch(
        self,
        samples: list[Any],
        task: Task,
        scope: SampleScope,
        empty: Empty,
        place: Location,
        indices: Sequence[Any],
    ) -> Any:
        scope.index, scope.drawn = OfBatch(task.seq, place.shard or 0), None
        try:
            return assemble(self._batchify, list(samples), empty)  # a list that it may change
        except KeyboardInterrupt:
            raise
        except BatchifyError as error:
            self._note_misfit(error, place, samples, _as_list(indices))
            raise
        except BaseException as error:
            raise self._placed(error, place, None, indices)  # noqa: B904 - as above

    def _note_misfit(self, error: BatchifyError, place: Location, samples: list[Any], indices: Sequence[Any]) -> None:
        """Name the first sample that cannot be in a batch, or in none with the first sample; all if none is such."""
        for index, sample in zip(indices, samples, strict=True):
            if not self._fits([sample]):
                return place.note(error, [index])
            if not self._fits([samples[0], sample]):
                return place.note(error, misfit=(indices[0], index))
        return place.note(error, samples=indices)

    def _fits(self, samples: list[Any]) -> bool:
        try:
            assemble(self._batchify, samples, np.empty)
        except BatchifyError:
            return False
        except Exception as error:  # a function of the user's that wants whole batches
            if is_from_outside(error):
                raise
            return True
        return True

    @staticmethod
    def _placed(
        error: BaseException, place: Location, sample: list[Any] | None, samples: Sequence[Any] = ()
    ) -> BaseException:
        if passes(error, place.worker):
            return error
        error = as_exception(error, "by the dataset or batchify_fn")
        place.note(error, sample, samples=samples)
        return error

    # -- on_error other than "raise" ------------------------------------------------------------------------

    def _read_tolerant(
        self,
        task: Task,
        scope: SampleScope,
        worker: str | None,
        empty: Empty,
        skipped: list[tuple[Any, BaseException]],
        board: Board,
    ) -> tuple[list[Any], int, tuple[int, ...]]:
        """In bulk where the dataset can; else, and if that fails, sample by sample.

        Every sample is read before any bad one is replaced or left out: a replacement may come from any shard.
        """
        if self._gather is not None or self._get_items is not None:
            try:
                return (*self._read_strict(task, scope, worker, empty, board), ())
            except Exception as raised:
                if passes(raised, worker):
                    raise
                # Otherwise the samples are read again, with the same random numbers
        shards = [
            self._read_good(_as_list(indices), task, scope, _place(task, number, worker), number, skipped, board)
            for number, indices in enumerate(task.shards)
        ]
        good = [(n, i) for n, shard in enumerate(shards) for i, sample in enumerate(shard) if sample is not _BAD]
        replaces = self._job.on_error == "replace" and bool(good)
        if self._job.keep_batch and not replaces:
            bad = 0
            for shard in shards:
                before, bad = bad, bad + sum(sample is _BAD for sample in shard)
                if bad - before == len(shard):
                    # It is raised, not skipped. `loader.skipped` would keep its frames, and with them the iterator.
                    _, error = skipped.pop(bad - 1)
                    set_notes(error, [_KEPT, *notes_of(error)])
                    raise error
        read_at = [list(_as_list(indices)) for indices in task.shards]
        if replaces:
            for number, shard in enumerate(shards):
                for i, sample in enumerate(shard):
                    if sample is _BAD:
                        rng = philox(self._job.seed, "replace", task.epoch, task.seq, number, i)
                        n, j = good[int(rng.integers(len(good)))]
                        shard[i], read_at[number][i] = shards[n][j], read_at[n][j]
        batches = []
        lost = []
        count = 0
        for number, shard in enumerate(shards):
            kept = [sample for sample in shard if sample is not _BAD]
            if kept:
                place = _place(task, number, worker)
                board[SHARD], board[SAMPLE] = number, IN_BATCHIFY
                indices = [index for index, sample in zip(read_at[number], shard, strict=True) if sample is not _BAD]
                batches.append(self._make_batch(kept, task, scope, empty, place, indices))
                count += len(kept)
            else:
                lost.append(number)
        return batches, count, tuple(lost)

    def _read_good(
        self,
        indices: Sequence[Any],
        task: Task,
        scope: SampleScope,
        place: Location,
        shard: int,
        skipped: list[tuple[Any, BaseException]],
        board: Board,
    ) -> list[Any]:
        """The samples of a shard; `_BAD` where one could not be read and no callable mended it."""
        samples: list[Any] = []
        board[SHARD] = shard
        for ordinal, index in enumerate(indices):
            board[SAMPLE] = ordinal
            scope.index, scope.drawn = index, None
            try:
                samples.append(self._dataset[index])
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failed = self._placed(error, place, [index])
                if not isinstance(error, Exception) or passes(error, place.worker):
                    raise failed  # noqa: B904 - its cause is set; a SystemExit is not a bad sample
                samples.append(self._mend(index, task, shard, failed, place))
                skipped.append((index, without_frames(failed)))
        return samples

    def _mend(self, index: Hashable, task: Task, shard: int, error: BaseException, place: Location) -> Any:
        on_error = self._job.on_error
        if not callable(on_error):
            return _BAD
        failed = SampleError(index, task.epoch, task.seq, shard if task.sharded else None, error)
        try:
            return on_error(failed)
        except KeyboardInterrupt:
            raise
        except BaseException as again:
            if passes(again, place.worker):
                raise
            raise self._placed(again, place, [index]) from error


def passes(error: BaseException, worker: str | None) -> bool:
    """Whether an exception is no error of the batch, but is meant for the loop that reads in its own thread."""
    return worker is None and is_from_outside(error, reads=True)


def _place(task: Task, shard: int, worker: str | None) -> Location:
    return Location(task.epoch, task.seq, shard if task.sharded else None, worker)


def _at(task: Task, worker: str | None, board: Board) -> tuple[Location, list[Any] | None, Sequence[Any]]:
    """Where the board says that a task is: place, sample (in a list of one) or None, samples of the shard."""
    number = min(board[SHARD], len(task.shards) - 1)
    return _place(task, number, worker), sample_in(task, board) or None, task.shards[number]


def _as_list(indices: Any) -> Any:
    """Python ints of an array of indices: what datasets and users see."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


def _checked(samples: Any, indices: Sequence[Any]) -> list[Any]:
    found = list(samples)
    if len(found) != len(indices):
        raise ValueError(
            f"__getitems__ was asked for {len(indices)} samples and returned {len(found)}: "
            f"return one sample per index, in the order of the indices"
        )
    return found
