"""Workers that would share the position of an open file: the loader says so before it reads wrong samples."""

from __future__ import annotations

import io
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sharded_loader import ProcessPool, ShardedDataLoader, SubsetDataset, ThreadPool
from sharded_loader.data.inspection import open_file
from sharded_loader.engine.pool import Pool


class Numbers:
    """Reads number i at place i of a file, which is open all the time."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __getitem__(self, index: int) -> int:
        self.file.seek(index)
        return self.file.read(1)[0]

    def __len__(self) -> int:
        return 20


class Holds(Numbers):
    """Does not read its file: what threads would read is a matter of luck."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[Numbers]:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(20)))
    dataset = Numbers(path)
    with dataset.file:
        yield dataset


@pytest.mark.parametrize("pool", [lambda: ProcessPool(2, start_method="fork"), lambda: ThreadPool(2)])
def test_workers_that_share_an_open_file_are_warned_of(numbers: Numbers, pool: Any) -> None:
    pool, dataset = pool(), Holds(Path(numbers.file.name))
    warned = pytest.warns(RuntimeWarning, match=r"dataset\.file is an open file.*share its position.*os\.pread")
    with dataset.file, warned as caught, ShardedDataLoader(dataset, 5, pool=pool) as loader:
        list(loader)
        list(loader)
    assert len(caught) == 1


@pytest.mark.parametrize("pool", [ProcessPool(1, start_method="fork"), ThreadPool(1), None])
def test_a_single_worker_may_have_an_open_file(numbers: Numbers, pool: Pool | None) -> None:
    with warnings.catch_warnings(), ShardedDataLoader(numbers, 5, pool=pool) as loader:
        warnings.simplefilter("error")
        assert np.concatenate([batch.numpy() for batch in loader]).tolist() == list(range(20))


def test_a_file_inside_wrappers_lists_and_dicts_is_found(numbers: Numbers) -> None:
    assert open_file(SubsetDataset(SubsetDataset(numbers, [0]), [0])) is not None
    assert open_file(SimpleNamespace(files={"a": [numbers.file]})) == "dataset.files['a'][0]"
    assert open_file([numbers]) == "dataset[0].file"


def test_what_has_no_position_that_is_read_is_not_found(numbers: Numbers, tmp_path: Path) -> None:
    numbers.file.close()
    logger = logging.Logger("alone")
    logger.addHandler(logging.FileHandler(tmp_path / "log"))
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    for harmless in (numbers, SimpleNamespace(file=io.BytesIO(b"x")), SimpleNamespace(logger=logger), loop, io, 3):
        assert open_file(harmless) is None
    logger.handlers[0].close()


def test_a_lock_beside_the_file_is_taken_to_guard_it_from_threads(numbers: Numbers) -> None:
    numbers.lock = threading.Lock()  # type: ignore[attr-defined]
    assert open_file(numbers, in_threads=True) is None
    assert open_file(numbers) == "dataset.file"


def test_nothing_of_the_users_is_called() -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    assert open_file(SimpleNamespace(inside=Touchy())) is None
