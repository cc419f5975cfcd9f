"""One batch: read in bulk or one by one, with errors that name their sample; and what travels to and from a worker."""

from __future__ import annotations

import gc
import itertools
import pickle
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from calls import calls_of

from sharded_loader import ArrayDataset, SampleReadError, empty, sample_rng
from sharded_loader.base.errors import notes_of
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.engine import heartbeat as beats
from sharded_loader.engine import messages
from sharded_loader.engine.heartbeat import IN_BATCHIFY, IN_BULK, ONE_BY_ONE, SAMPLE, SHARD, UNUSED
from sharded_loader.engine.messages import NOTHING, BatchTimes, Job, PartBatch, PartIndices, PartPoint, Result, Task
from sharded_loader.engine.reader import BatchScope, Reader
from sharded_loader.memory.codec import SlotWriter, decode, encode
from sharded_loader.randomness.rng import OF_BATCH, reading

WORKER = "worker 0 (pid 1)"


def task_of(*shards: Any, sharded: bool = False, epoch: int = 0, seq: int = 4) -> Task:
    return Task(0, seq, epoch, 0, shards, sharded or len(shards) > 1)


def read(
    dataset: Any, *shards: Any, worker: str | None = WORKER, heartbeat: Any = None, notes: bool = False, **job: Any
) -> Result:
    reader = Reader(Job(dataset, job.pop("batchify_fn", None), 7, notes_samples=notes, **job))
    return reader.read(task_of(*shards), worker, heartbeat=heartbeat)


class Squares:
    """Sample i is ``(array of i, i * i)``; samples in ``bad`` raise."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad = bad
        self.asked: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.sample(index)

    def sample(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"bad {index}")
        return np.full(3, index, np.int16), index * index

    def __len__(self) -> int:
        return 100


class InItems(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(list(indices))
        return [self.sample(index) for index in indices]


class InBatches(Squares):
    def get_batch(self, indices: list[int]) -> Any:
        self.asked.append(list(indices))
        samples = [self.sample(index) for index in indices]
        batch = empty((len(samples), 3), np.int16)
        batch[...] = [first for first, _ in samples]
        return [batch, np.array([second for _, second in samples])]


KINDS = pytest.mark.parametrize("kind", [Squares, InItems, InBatches])


@KINDS
def test_a_batch_has_the_samples_in_their_order(kind: type[Squares]) -> None:
    result = read(kind(), [3, 1])
    assert [field.tolist() for field in result.batch] == [[[3] * 3, [1] * 3], [9, 1]]
    assert result.batch[0].dtype == np.int16
    assert (result.run, result.seq, result.samples, result.error) == (0, 4, 2, None)
    assert result.skipped == () and result.lost_shards == () and result.seconds > 0
    result = read(kind(), [3, 1], [2])  # each shard is a batch of its own
    assert [fields[1].tolist() for fields in result.batch] == [[9, 1], [4]] and result.samples == 3


def test_a_batchify_fn_of_the_users_gets_the_samples_in_a_list_of_its_own() -> None:
    for kind in (Squares, InItems, InBatches):
        assert read(kind(), [3, 1], batchify_fn=lambda samples: [samples.pop()[1] for _ in range(2)]).batch == [1, 9]


def test_the_samples_are_asked_for_in_the_fastest_way_once_and_by_plain_ints() -> None:
    for kind, asked in ((Squares, [3, 1]), (InItems, [[3, 1]]), (InBatches, [[3, 1]])):
        for given in ([3, 1], np.array([3, 1])):
            dataset = kind()
            assert read(dataset, given).batch[1].tolist() == [9, 1]
            assert repr(dataset.asked) == repr(asked)  # not np.int64(3)
    error = read(Squares([1]), np.array([3, 1])).error
    assert error is not None and "sample 1," in notes_of(error)[0]


def test_columns_are_gathered_in_the_memory_that_is_given() -> None:
    given: list[Any] = []

    def allocator(shape: Any, dtype: Any) -> Any:
        given.append(np.empty(shape, dtype))
        return given[-1]

    reader, task = Reader(Job(ArrayDataset(np.arange(10.0), np.arange(10)), None, 0)), task_of([4, 2])
    result = reader.read(task, empty=allocator)
    assert [field.tolist() for field in result.batch] == [[4.0, 2.0], [4, 2]]
    assert [id(field) for field in result.batch] == [id(array) for array in given]
    names = calls_of(lambda: reader.read(task))
    assert "gather_rows" in names and not {"samples", "collate", "assemble"} & set(names)


def test_random_numbers_belong_to_the_sample_and_to_the_batch() -> None:
    class Draws(Squares):
        def sample(self, index: int) -> Any:
            return int(sample_rng().integers(1 << 40))

    def batchify(samples: list[Any]) -> Any:
        return samples, int(sample_rng().integers(1 << 40))

    samples, own = read(Draws(), [3, 1], batchify_fn=batchify).batch
    again = read(Draws(), [1], [3], batchify_fn=batchify).batch
    assert [again[1][0], again[0][0]] == [samples[:1], samples[1:]]
    assert again[0][1] == own != again[1][1]  # shard 0 of this batch, shard 1
    reader = Reader(Job(Draws(), None, 7))
    assert reader.read_sample(3, 2) == reader.read(task_of([5, 3], epoch=2)).batch[1]  # alone as in a batch
    assert reading.get() is None


class Waits(Squares):
    """Sample i takes i times the unit."""

    now, unit = 0.0, 1.0

    def sample(self, index: int) -> Any:
        Waits.now += index * self.unit
        return super().sample(index)


@pytest.fixture
def clock_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waits, "now", 0.0)
    monkeypatch.setattr("sharded_loader.base.host_clock.now", lambda: Waits.now)


@pytest.mark.usefixtures("clock_of_samples")
def test_a_slow_sample_is_told_on_a_machine_on_which_the_first_batch_waited_for_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = itertools.count()
    monkeypatch.setattr("sharded_loader.engine.reader.core_seconds", lambda: (0.0, 100.0 * next(waited)))
    monkeypatch.setattr(Waits, "unit", 0.001)
    reader = Reader(Job(Waits(), None, 7))
    reader.read(task_of([0, 1, 2]), WORKER)
    times = reader.read(task_of([1, 30, 2], seq=5), WORKER).times
    assert times is not None and times.slow[0] == (1, pytest.approx(0.03))


@pytest.mark.usefixtures("clock_of_samples")
def test_the_slowest_samples_are_those_of_an_epoch() -> None:
    reader = Reader(Job(Waits(), None, 7))
    reader.read(task_of(list(range(60, 90))), WORKER)
    for epoch, seq, slow in ((0, 5, ()), (1, 0, ((0, 4.0),))):
        times = reader.read(task_of([4], epoch=epoch, seq=seq), WORKER).times
        assert times is not None and times.slow == slow


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.usefixtures("clock_of_samples")
def test_a_worker_was_idle_from_the_end_of_its_last_batch_on(number: int) -> None:
    reader, found = Reader(Job(Waits(), None, 7)), []
    for _ in range(2):
        found.append(result := reader.read(task_of([1, 2]), WORKER, number=number))
        assert result.worker == number and result.retries == 0
        Waits.now += 5.0
    times = [(result.times.idle, result.times.is_first, result.times.weight) for result in found if result.times]
    assert times == [(0.0, True, 1), (5.0, False, 1)]


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.usefixtures("clock_of_samples")
def test_a_sample_that_cannot_be_read_takes_its_own_time(bad: int) -> None:
    times = read(Waits([bad]), [1, 2, 4], on_error="skip").times
    assert times is not None and times.slow == ((2, 4.0), (1, 2.0), (0, 1.0))


@pytest.fixture
def measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader measures its first batch, and no other one, on a machine of any speed."""
    for name in ("MEASURED_SECONDS", "SAMPLE_SECONDS"):
        monkeypatch.setattr(f"sharded_loader.engine.reader.{name}", 1e9)


@pytest.mark.usefixtures("measures_once")
def test_the_road_of_a_batch_is_short() -> None:
    reader, task = Reader(Job(Squares(), None, 0)), task_of([3, 1, 2])
    reader.read(task)
    assert len(calls_of(lambda: reader.read(task))) <= 13  # and two that give the memory
    many = task_of(list(range(100)))
    assert len(calls_of(lambda: reader.read(many))) <= 13


# -- what fails -----------------------------------------------------------------------------------------------------


@KINDS
def test_an_error_names_its_sample_however_it_was_read(kind: Callable[..., Any]) -> None:
    for worker in (None, WORKER):
        result = read(kind([1]), [3, 4], [2, 1, 0], worker=worker)
        assert str(result.error) == "bad 1" and result.batch is NOTHING and result.samples == 0
        assert result.error is not None
        where, again = notes_of(result.error)
        of_worker = "" if worker is None else f", {worker}"
        assert where == f"sharded_loader: in epoch 0, batch 4, shard 1, sample 1{of_worker}"
        assert again.endswith("loader.read(1, epoch=0)")


def test_a_bulk_read_that_fails_alone_names_all_samples() -> None:
    def fails(dataset: Any, indices: list[int]) -> Any:
        raise RuntimeError("no items")

    for reads, message in (
        (fails, "no items"),
        (lambda *_: None, "__getitems__ returned a NoneType: return a list of samples"),
        (lambda *_: [1], "asked for 2 samples and returned 1: return one sample per"),
        (lambda *_: {"x": [1, 2], "y": [3, 4]}, "__getitems__ returned a dict: return a list of samples"),
    ):
        error = read(type("Items", (Squares,), {"__getitems__": reads})(), [3, 1]).error
        assert error is not None and message in str(error)
        assert "it was no single sample" in notes_of(error)[1] and "for i in (3, 1)" in notes_of(error)[1]


@pytest.mark.parametrize("kind", [Squares, InItems])
def test_samples_that_do_not_fit_are_named(kind: type[Squares]) -> None:
    class Ragged(kind):  # type: ignore[valid-type, misc]
        def sample(self, index: int) -> Any:
            super().sample(index)
            return np.zeros(2 if index == 5 else 3)

    error = read(Ragged(), [3, 4, 5]).error
    assert isinstance(error, BatchifyError)
    assert "sample 5 (it does not fit sample 3)" in notes_of(error)[0] and "(3, 5)" in notes_of(error)[1]
    error = read(Ragged([3]), [3, 4, 5], on_error="skip").error
    assert error is not None and "sample 5 (it does not fit sample 4)" in notes_of(error)[0]  # of those that are left


def test_a_sample_that_is_in_no_batch_is_named_alone_and_batchify_fn_s_error_names_all_of_the_shard() -> None:
    error = read([1, 2**70], [0, 1]).error
    assert isinstance(error, BatchifyError) and "batch 4, sample 1, worker 0" in notes_of(error)[0]
    error = read(Squares(), [3], [1, 2], batchify_fn=lambda samples: {}["x"]).error
    assert isinstance(error, KeyError)
    assert "shard 0" in notes_of(error)[0] and "(it was no single sample that failed)" in notes_of(error)[1]


class Raises(Squares):
    """Sample i raises, as ``bad`` says."""

    def sample(self, index: int) -> Any:
        raise self.bad  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Raises, type("RaisesInItems", (Raises, InItems), {})])
@pytest.mark.parametrize("ends", [SystemExit(3), KeyboardInterrupt(), StopIteration("x")])
def test_what_would_end_the_loop_or_the_program_is_an_error_that_names_its_sample(kind: Any, ends: Any) -> None:
    error = read(kind(ends), [3, 1]).error
    assert isinstance(error, SampleReadError) and "sample 3" in notes_of(error)[0]
    if isinstance(ends, KeyboardInterrupt):  # in the caller's own thread it passes
        with pytest.raises(KeyboardInterrupt):
            read(kind(ends), [3, 1], worker=None)
        assert reading.get() is None


def test_an_error_that_is_dropped_leaves_nothing_for_the_collector() -> None:
    dataset = Squares([1])
    gone = weakref.ref(dataset)
    gc.disable()
    try:
        error = read(dataset, [3, 1]).error
        del error, dataset
        assert gone() is None
    finally:
        gc.enable()


@KINDS
def test_a_bad_sample_is_skipped_or_replaced_or_on_error_itself_fails(kind: Callable[..., Any]) -> None:
    shards = [3, 1], [1, 5], [1]
    skipped = read(kind([1]), *shards, on_error="skip")
    assert [fields[1].tolist() for fields in skipped.batch] == [[9], [25]]
    assert skipped.samples == 2 and skipped.lost_shards == (2,)
    assert [(index, str(error)) for index, error in skipped.skipped] == [(1, "bad 1")] * 3
    replaced = read(kind([1]), *shards, on_error="replace")
    assert [len(fields[1]) for fields in replaced.batch] == [2, 2, 1] and replaced.samples == 5
    assert {second for fields in replaced.batch for second in fields[1].tolist()} == {9, 25}
    given = read(kind([1]), *shards, on_error=lambda failed: (np.zeros(3, np.int16), -failed.index - 10 * failed.shard))
    assert [fields[1].tolist() for fields in given.batch] == [[9, -1], [-11, 25], [-21]]
    assert len(given.skipped) == 3 and given.lost_shards == ()
    raises = read(kind([1]), [3, 1], on_error=lambda failed: {}["no other"]).error
    assert isinstance(raises, KeyError) and "sample 1" in notes_of(raises)[0] and str(raises.__context__) == "bad 1"


def test_bad_samples_without_a_good_one_leave_nothing_or_an_error() -> None:
    for on_error in ("skip", "replace"):
        left = read(Squares([1, 2]), [1, 2], on_error=on_error)
        assert left.batch is NOTHING and left.error is None and left.lost_shards == (0,) and left.samples == 0
        kept = read(Squares([1, 2]), [1, 2], on_error=on_error, keep_batch=True)
        assert str(kept.error) == "bad 2" and [index for index, _ in kept.skipped] == [1] and kept.lost_shards == ()
        assert kept.error is not None and "with num_replicas none is left out" in notes_of(kept.error)[0]
        assert kept.error.__traceback__ is None


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("notes", [False, True])
def test_which_sample_is_read_is_known_at_every_moment(on_error: str, notes: bool) -> None:
    seen: list[Any] = []

    class Asks(Squares):
        def sample(self, index: int) -> Any:
            scope = reading.get()
            assert scope is not None
            seen.append((scope.indices[scope.place], scope.place, sample_rng() is sample_rng()))
            inner = Reader(Job(range(50), None, 7)).read(task_of([7, 8]), WORKER)  # a loader inside the dataset
            assert inner.error is None and reading.get() is scope
            seen.append((scope.indices[scope.place], scope.place, sample_rng().integers(1 << 60)))
            return index

    assert read(Asks(), [5, 3, 5], [9], notes=notes, on_error=on_error).error is None
    assert [one[:2] for one in seen] == [one for one in [(5, 0), (3, 1), (5, 2), (9, 0)] for _ in range(2)]
    assert all(one[2] is True for one in seen[::2])
    drawn = [one[2] for one in seen[1::2]]
    assert drawn[0] == drawn[2] and len(set(drawn)) == 3  # by the index, not by the place


@pytest.mark.usefixtures("measures_once")
def test_nothing_is_done_for_a_sample_but_to_read_it() -> None:
    def calls(count: int) -> list[str]:
        reader, task = Reader(Job(Squares(), len, 7)), task_of(list(range(count)))
        reader.read(task, WORKER)
        return calls_of(lambda: reader.read(task, WORKER))

    assert calls(200) == calls(100)


@pytest.mark.usefixtures("host_time")  # on a busy machine, a cheap sample may take long
def test_the_heartbeat_says_where_the_reader_is() -> None:
    heartbeat, seen = list(UNUSED), []

    def look(samples: list[Any] | None = None) -> Any:
        seen.append((heartbeat[SHARD], heartbeat[SAMPLE]))
        return samples

    class Looks(Squares):
        def sample(self, index: int) -> Any:
            return look() or index

    def seen_by(reader: Reader, **options: Any) -> list[tuple[int, int]]:
        seen.clear()
        reader.read(replace(task_of([3, 1], [2]), **options), WORKER, heartbeat=heartbeat)
        return seen

    noted = [(0, 0), (0, 1), (0, IN_BATCHIFY), (1, 0), (1, IN_BATCHIFY)]
    for notes in (False, True):  # the first batch: its samples are timed
        assert seen_by(Reader(Job(Looks(), look, 7, notes_samples=notes))) == noted
        skips = Reader(Job(Looks(), look, 7, notes_samples=notes, on_error="skip"))
        assert sorted(seen_by(skips)) == sorted(noted)  # it reads every sample before it makes the first batch
    reader = Reader(Job(Looks(), look, 7))
    assert seen_by(reader) == noted
    alone = [(0, ONE_BY_ONE), (0, ONE_BY_ONE), (0, IN_BATCHIFY), (1, ONE_BY_ONE), (1, IN_BATCHIFY)]
    assert seen_by(reader) == alone  # later ones are cheap, and are not timed
    assert seen_by(reader, is_suspect=True) == noted
    noting = Reader(Job(Looks(), look, 7, notes_samples=True))
    assert seen_by(noting) == noted and seen_by(noting) == noted
    in_items = type("LooksInItems", (InItems, Looks), {})
    in_bulk = [(0, IN_BULK), (0, IN_BULK), (0, IN_BATCHIFY), (1, IN_BULK), (1, IN_BATCHIFY)]
    assert seen_by(Reader(Job(in_items(), look, 7))) == in_bulk


def test_a_probe_notes_each_sample_that_is_otherwise_read_in_bulk() -> None:
    heartbeat = list(UNUSED)
    for kind in (InItems, InBatches):
        seen: list[Any] = []

        class Looks(kind):  # type: ignore[valid-type, misc]
            def sample(self, index: int, seen: list[Any] = seen) -> Any:
                seen.append((index, heartbeat[SHARD], heartbeat[SAMPLE]))
                return super().sample(index)

        Reader(Job(Looks([1]), None, 0)).probe(task_of([3, 1], [2]), heartbeat)
        assert list(dict.fromkeys(seen)) == [(3, 0, 0), (1, 0, 1), (2, 1, 0)]
    Reader(Job(alone := Squares(), None, 0)).probe(task_of([3, 1]), heartbeat)
    assert alone.asked == []


def test_a_dataset_is_told_each_epoch_once() -> None:
    told, dataset = list[int](), Squares()

    def set_epoch(epoch: int) -> None:
        told.append(epoch)
        if epoch == 2:
            raise RuntimeError("no epoch 2")

    dataset.set_epoch = set_epoch  # type: ignore[attr-defined]
    reader = Reader(Job(dataset, None, 0), sets_epoch=True)
    *fine, failed, again = [reader.read(task_of([1], epoch=epoch), WORKER).error for epoch in (0, 0, 1, 2, 2)]
    assert told == [0, 1, 2, 2] and fine == [None] * 3
    assert failed is not None and again is not None and notes_of(again)[0] == "raised by dataset.set_epoch(2)"
    Reader(Job(dataset, None, 0)).read(task_of([1]))
    assert len(told) == 4  # the dataset is the loader's own, which has told it


# -- where it is, for errors and for the loop around it ---------------------------------------------------------------


def scope_of(*shards: Any) -> BatchScope:
    at = BatchScope(7, 2)
    at.task = Task(0, 4, 2, 0, shards, len(shards) > 1)
    at.worker, at.empty, at.heartbeat = None, np.empty, list(UNUSED)
    at.indices = shards[0]
    return at


def test_samples_of_a_part_are_named_by_part_and_place() -> None:
    at = scope_of(PartIndices(3, range(8, 12)))
    at.items = iter(range(4))
    next(at.items), next(at.items), next(at.items)
    assert "sample (3, 10)" in notes_of(at.locate_error(KeyError("x")))[0]
    at.items, at.index, at.drawn = None, OF_BATCH, None
    where, again = notes_of(at.locate_error(KeyError("x")))
    assert "sample" not in where.partition("batch 4")[2]
    assert again.endswith("[loader.read(i, epoch=2) for i in ((3, 8), (3, 9), (3, 10), (3, 11))]")


def test_a_handler_that_raises_inside_the_dataset_is_the_dataset_s() -> None:
    class TimeIsUp(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGTERM, handler)
    try:
        signal.raise_signal(signal.SIGTERM)
    except TimeIsUp as error:
        assert not scope_of([1]).is_for_caller(error)
    finally:
        signal.signal(signal.SIGTERM, before)


# -- what travels between the main process and a worker arrives as it was sent -----------------------------------------


def test_only_results_of_plain_arrays_alone_travel_without_their_classes() -> None:
    with_class: list[Any] = [{"x": np.ones(2)}, [np.ones(2), 1], [np.ones(5000)] * 2]  # one array twice
    plain = Result(0, 0, np.ones(2))
    failed = replace(plain, error=ValueError()), replace(plain, skipped=((1, ValueError()),))
    for result in (*failed, replace(plain, lost_shards=(1,)), *(replace(plain, batch=batch) for batch in with_class)):
        assert messages.pack_result(result, SlotWriter(None)) is None
    assert messages.pack_result(replace(plain, point=PartPoint(state={"at": 3})), SlotWriter(None)) is None
    for result in (plain, replace(plain, point=PartPoint(3))):
        assert messages.pack_result(result, SlotWriter(None)) is not None


def test_several_replies_lie_one_behind_the_other_and_nothing_is_itself_in_every_process() -> None:
    timed = messages.pack_reply(4, 5, 60, encode(NOTHING), BatchTimes(seconds=0.5))
    rest = memoryview(messages.pack_reply(1, 2, 30, encode("a")) + timed)
    found, seconds = [], []
    while len(rest):
        run, seq, wanted, buffers, pickled, rest, times = messages.unpack_reply(rest)
        found.append((run, seq, wanted, buffers, decode(pickled, [])))
        seconds.append(times and times.seconds)
    assert found == [(1, 2, 30, 0, "a"), (4, 5, 60, 0, NOTHING)] and found[1][-1] is NOTHING
    assert seconds == [None, 0.5]


def test_indices_of_a_part_are_a_sequence_and_slices_are_again_and_travel_in_few_bytes() -> None:
    indices = PartIndices(2, range(8, 12))
    assert list(indices) == [(2, 8), (2, 9), (2, 10), (2, 11)] and len(indices) == 4
    assert indices[-1] == (2, 11) and (2, 9) in indices and indices.index((2, 10)) == 2
    part = indices[1:3]
    assert type(part) is PartIndices and list(part) == [(2, 9), (2, 10)]
    assert list(indices[4:]) == [] and not indices[4:]
    pickled = pickle.dumps(PartIndices(3, range(1 << 20)), protocol=5)
    assert len(pickled) < 120
    assert ((found := pickle.loads(pickled)).part, found.places) == (3, range(1 << 20))


def test_a_part_begins_before_its_first_sample_and_its_batches_in_one_reading_are_of_the_same_part() -> None:
    assert PartPoint() == PartPoint(batches=0, passes=0, samples=0, checksum=0, ended=False, state=None)
    assert messages.Stream(3, 8)[:4] == (3, 8, False, False)
    batch = PartBatch(stream=4, oldest=2, number=1, batch=7, point=PartPoint())
    assert batch.is_same(batch._replace(batch=9, oldest=3, point=PartPoint(3)))
    assert not any(map(batch.is_same, (batch._replace(stream=5), batch._replace(number=0), None)))


TASK = Task(4, 5, 0, 0, ([70, 80], [90]), True)


def test_a_heartbeat_is_at_the_task_of_its_run_and_number_until_it_is_idle() -> None:
    assert not beats.is_at(list(UNUSED), Task(0, 0, 0, 0, ([1],), False))
    assert beats.is_at([4, 5, 0, beats.BEGINNING], TASK)
    assert not any(beats.is_at(at, TASK) for at in ([4, 6, 0, 0], [3, 5, 0, 0], [4, 5, 0, beats.IDLE]))


def test_the_sample_is_told_by_its_place_in_its_shard_where_a_single_one_is_read_and_every_phase_has_words() -> None:
    assert [beats.sample_in(TASK, [4, 5, *at]) for at in [(0, 0), (0, 1), (1, 0)]] == [[70], [80], [90]]
    assert beats.sample_in(TASK, [4, 5, 2, 0]) == beats.sample_in(TASK, [4, 5, 1, 1]) == []  # places that do not exist
    (index,) = beats.sample_in(replace(TASK, shards=(np.array([3, 4]),)), [4, 5, 0, 1])
    assert type(index) is int
    phases = (IN_BULK, IN_BATCHIFY, beats.SENDING, beats.IDLE, beats.BEGINNING)
    assert [beats.sample_in(TASK, [4, 5, 0, at]) for at in phases] == [[]] * 5
    assert len({beats.phase([0, 0, 0, at]) for at in phases} | {"reading a sample"}) == 6
    assert beats.phase([0, 0, 0, 7]) == "reading a sample"


def test_heartbeats_in_shared_memory_do_not_touch_each_other() -> None:
    memory = bytearray(8 * beats.WORDS * 2)
    first, second = beats.heartbeat_in(memory, 0), beats.heartbeat_in(memory, 1)
    first[:4] = memoryview(np.array([1, 2, 3, 4])).cast("B").cast("q")
    assert (list(first[:4]), list(second[:4])) == ([1, 2, 3, 4], [0, 0, 0, 0])
