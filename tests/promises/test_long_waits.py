"""Where ``next`` waits for long, one message tells for which batch, which worker is at which sample, and its stack."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import PROCESS_POOLS, ahead, covering, make_pool, until
from waiting_samples import Collates, InBulk, Starts, Waits

from sharded_loader import InlinePool, ShardedDataLoader
from sharded_loader.engine import pipeline
from sharded_loader.pools import deaths
from sharded_loader.pools.process import worker as process_worker
from sharded_loader.torch import DataLoader

SEES = [name for name in PROCESS_POOLS if name != "forkserver"]
"""Of a fork server's workers the output goes where its own goes."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "LOOK_SECONDS", 0.02)


class Said:
    """What the program writes to stderr while ``next`` waits. A thread opens the gate when it has seen a text.

    Attributes:
        text: what was written.
    """

    def __init__(self, gate: Path, capfd: pytest.CaptureFixture[str], last: str = "in wait_for") -> None:
        self.text, self._gate, self._capfd, self._last = "", gate, capfd, last

    def _watch(self) -> None:
        until(self._has_come)
        self._gate.touch()

    def _has_come(self) -> bool:
        self.text += self._capfd.readouterr().err
        return self._last in self.text

    def during(self, waits: Callable[[], Any]) -> Any:
        """What ``waits()`` returns. It tells of waits after a short time."""
        thread = begin_thread(self._watch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "PATIENCE", 0.05)
            try:
                return waits()
            finally:
                self._gate.touch()
                thread.join()
                self.text += self._capfd.readouterr().err

    def in_epoch(self, batches: Iterable[Any]) -> list[Any]:
        """The batches of an epoch. Both workers have started when it begins to tell."""
        iterator = iter(batches)
        return [next(iterator), next(iterator), *self.during(lambda: list(iterator))]


def begin_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@covering(pool=["thread", *SEES], timeout=[None, 60])
def test_one_message_names_the_batch_the_sample_and_the_stack(
    pool: str, timeout: float | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "open"
    said = Said(gate, capfd)
    with ShardedDataLoader(Waits(gate), 2, pool=make_pool(pool, 2, timeout=timeout)) as loader:
        found = said.in_epoch(loader)
    assert [batch.tolist() for batch in found] == [[n, n + 1] for n in range(0, 12, 2)]
    who = r"thread \d" if pool == "thread" else r"worker \d \(pid \d+\)"
    text = (
        rf"sharded_loader: next\(\) has waited 0 s for epoch 0, batch 2, which {who} has\. Its stack:\n"
        r"It is reading sample 5 of epoch 0, batch 2, (for \d+ s|which it began \d+ s ago)\.\n"
        r"The thread that reads \(most recent call last\):\n"
    )
    assert re.search(text, said.text), said.text
    assert said.text.count("has waited") == said.text.count("in wait_for") == 1


@covering(pool=["thread", *SEES], where=["bulk", "collate"])
def test_what_is_no_single_sample_is_named_too(
    pool: str, where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "open"
    said = Said(gate, capfd)
    dataset, collate = (InBulk(gate), None) if where == "bulk" else (range(12), Collates(gate))
    with ShardedDataLoader(dataset, 2, collate_fn=collate, pool=make_pool(pool, 2)) as loader:
        assert len(said.in_epoch(loader)) == 6
    doing = "reading several samples at once" if where == "bulk" else r"making the batch \(collate_fn\)"
    assert re.search(rf"It is {doing} of epoch 0, batch 2, which it began \d+ s ago\.\n", said.text), said.text


@covering(pool=["thread", *SEES])
def test_a_batch_that_is_held_behind_another_names_that_one(
    pool: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "open"
    said = Said(gate, capfd)
    with ShardedDataLoader(Waits(gate), 2, pool=make_pool(pool, 1), prefetch=3) as loader:
        iterator = iter(loader)
        next(iterator)
        second = iter(loader)
        assert said.during(lambda: next(second)).tolist() == [0, 1]
        assert len(list(iterator)) == 5
    who = "thread 0" if pool == "thread" else r"worker 0 \(pid \d+\)"
    has = rf"(\. No worker has it yet: all are busy, such as {who}|, which {who} has)"
    assert re.search(rf"for epoch 1, batch 0{has}\. Its stack:", said.text)
    assert "It is reading sample 5 of epoch 0, batch 2" in said.text


@covering(pool=["thread", *SEES])
def test_the_drop_in_tells_it_too(pool: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gate = tmp_path / "open"
    said = Said(gate, capfd)
    given: dict[str, Any] = {"thread_pool": True} if pool == "thread" else {"start_method": pool}
    assert len(said.in_epoch(DataLoader(Waits(gate), 2, num_workers=2, **given))) == 6
    assert re.search(
        r"for epoch 0, batch 2, which (thread|worker) \d.* has\. Its stack:\nIt is reading sample 5", said.text
    )


@covering(method=SEES)
def test_a_worker_that_has_not_started_is_named(method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gate = tmp_path / "open"
    said = Said(gate, capfd, last="Its stack:")
    with ShardedDataLoader(range(4), 2, pool=make_pool(method, 1, worker_init_fn=Starts(gate))) as loader:
        assert len(said.during(lambda: list(loader))) == 2
    assert "worker 0 (pid" in said.text and "It is not ready: it imports modules, unpickles the dataset" in said.text


@pytest.mark.parametrize("pool", ["thread", "fork"])
def test_quick_batches_say_nothing_and_iterations_after_a_message_say_it_again(
    pool: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "open"
    # In the second epoch a worker keeps batch 1, and begins batch 2, which waits for the gate.
    monkeypatch.setattr(process_worker, "GROUP_SECONDS", 60.0)
    with ahead(ShardedDataLoader(Waits(gate), 2, pool=make_pool(pool, 2)), False) as loader:
        for _ in range(2):
            gate.unlink(missing_ok=True)
            said = Said(gate, capfd)
            said.in_epoch(loader)
            assert said.text.count("has waited") == 1
        monkeypatch.setattr(pipeline, "PATIENCE", 30.0)
        list(loader)
        assert capfd.readouterr().err == ""


def test_a_pool_of_the_users_own_needs_to_know_nothing_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert InlinePool().tell_of_wait("next() has waited", None) is None
    assert capfd.readouterr().err == "next() has waited\n"
