"""Each thread is told of the part that it reads, and torch of nothing else."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch.utils.data as torch_data
from refusing import in_child
from torch.utils.data import get_worker_info

from sharded_loader.streams.worker_info import Part, here, patch_torch, set_current_part

OF_TORCH = torch_data._utils.worker


def told() -> tuple[int, int] | None:
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def test_this_thread_is_told_and_others_are_not() -> None:
    assert told() is None
    before = set_current_part(Part(2, 5, 77, "the dataset"))
    try:
        assert told() == (2, 5)
        info = torch_data.get_worker_info()
        assert type(info) is OF_TORCH.WorkerInfo
        assert info is not None and (info.seed, info.dataset) == (77, "the dataset")
        assert in_a_thread(told) is None
    finally:
        here.part = before
    assert told() is None and before is None


def test_what_was_told_before_comes_back() -> None:
    outer = set_current_part(Part(0, 2, 1, None))
    inner = set_current_part(Part(3, 4, 1, None))
    assert told() == (3, 4)
    nobody = set_current_part(None)
    assert told() is None
    here.part = nobody
    assert told() == (3, 4)
    here.part = inner
    assert told() == (0, 2)
    here.part = outer
    assert told() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_worker_alone_in_its_process_tells_the_threads_of_the_dataset_too() -> None:
    def work() -> Any:
        before, found = set_current_part(Part(1, 3, 0, None), alone=True), []
        thread = threading.Thread(target=lambda: found.append(get_worker_info().id))
        thread.start()
        thread.join()
        here.part = before
        return found, get_worker_info()

    patch_torch()
    assert in_child(work) == "([1], None)"


def test_the_answer_of_torch_s_own_workers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OF_TORCH.WorkerInfo(id=6, num_workers=7, seed=0, dataset=None)
    patch_torch()
    monkeypatch.setattr(OF_TORCH, "_worker_info", own)
    assert get_worker_info() is own
    before = set_current_part(Part(0, 2, 0, None))
    assert told() == (0, 2)
    here.part = before
    assert get_worker_info() is own


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_reads_no_part() -> None:
    before = set_current_part(Part(0, 2, 0, None))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if get_worker_info() is None else 1)
    here.part = before
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_torch_without_that_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OF_TORCH, "get_worker_info", len)
    here.part, before = None, set_current_part(Part(0, 2, 0, None))
    here.part = before
    monkeypatch.delattr(OF_TORCH, "get_worker_info")
    patch_torch()


def in_a_thread(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]
