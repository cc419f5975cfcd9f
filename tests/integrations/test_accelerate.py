"""Loaders under the real Accelerate: ranks, devices, the last step, metrics, states, skipped batches.

What Accelerate makes of torch's own loader is the yardstick.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.frameworks

PROGRAM = Path(__file__).with_name("accelerated.py")
LOADERS = ("drop-in", "sharded", "drop-in, workers", "sharded, workers")


def run(ranks: int) -> list[str]:
    """What the program says, which compares every loader with Accelerate's own, in so many processes."""
    launch = [sys.executable, str(PROGRAM)]
    if ranks > 1:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(PROGRAM),
        ]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("ok "))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(300)
def test_a_prepared_loader_is_what_accelerate_makes_of_torchs(ranks: int) -> None:
    said = run(ranks)
    checks = ["as torch's", "passes prepare", "skipped", "resumed", "shuffled", "skipped, shuffled", "uneven"]
    checks += [
        "skipped by Trainer",
        "split_batches",
        "even_batches",
        "iterable data, gathered",
        "iterable data, resumed",
    ]
    assert said == sorted(f"ok {rank}: {name}: {what}" for rank in range(ranks) for name in LOADERS for what in checks)


def prepared(loader: Any) -> Any:
    from sharded_loader.integrations.accelerate import prepare

    return prepare(loader, accelerate.Accelerator(cpu=True))


def on_ranks(make: Any, ranks: int, **options: Any) -> list[Any]:
    """What `prepare` makes for each rank."""
    from sharded_loader.integrations.accelerate import prepare

    usual = {"split_batches": False, "even_batches": True, "dispatch_batches": None}
    one: Any = dict(num_processes=ranks, device_placement=False, device=torch.device("cpu"), **{**usual, **options})
    return [prepare(make(), SimpleNamespace(**one, process_index=rank, _dataloaders=[])) for rank in range(ranks)]


def kept(loaders: list[Any]) -> list[int]:
    """The samples of an epoch of all ranks, without what was filled up, as `gather_for_metrics` finds it."""
    samples: list[int] = []
    for batches in zip(*loaders, strict=True):
        assert len({len(batch) for batch in batches}) == 1
        whole = [sample for batch in batches for sample in batch.tolist()]
        counts = loaders[0].end_of_dataloader or loaders[0]._is_shared
        samples += whole[: loaders[0].remainder] if counts and loaders[0].remainder > 0 else whole
    return samples


class Numbers(torch.utils.data.IterableDataset[int]):
    """Numbers without a length, which do not ask which part to read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def loader_of(name: str, *args: Any, **kwargs: Any) -> Any:
    from sharded_loader import ShardedDataLoader
    from sharded_loader.torch import DataLoader

    return (DataLoader if name == "drop-in" else ShardedDataLoader)(*args, **kwargs)


@pytest.mark.parametrize("name", ["drop-in", "sharded"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [1, 18, 24, 25])
@pytest.mark.filterwarnings("ignore:.* has left out .* samples")  # ``drop_last`` does what it is asked for
def test_what_was_filled_up_is_known(name: str, ranks: int, split: bool, length: int) -> None:
    for data in (Numbers(length), range(length)):
        loaders = on_ranks(lambda data=data: loader_of(name, data, batch_size=6), ranks, split_batches=split)
        assert sorted(kept(loaders)) == list(range(length))
    loaders = on_ranks(lambda: loader_of(name, range(100), 6, sampler=range(length)), ranks, split_batches=split)
    assert sorted(kept(loaders)) == list(range(length))
    whole = 6 if split else 6 * ranks
    loaders = on_ranks(lambda: loader_of(name, Numbers(length), 6, drop_last=True), ranks, split_batches=split)
    assert sorted(kept(loaders)) == list(range(length // whole * whole))


def test_split_batches_keeps_the_global_batch_of_iterable_data() -> None:
    for name in ("drop-in", "sharded"):
        loaders = on_ranks(lambda name=name: loader_of(name, Numbers(16), 4), 2, split_batches=True)
        assert [[len(batch) for batch in loader] for loader in loaders] == [[2] * 4] * 2
        with pytest.raises(ValueError, match="cannot split a batch of 4 among 3 ranks"):
            on_ranks(lambda name=name: loader_of(name, Numbers(16), 4), 3, split_batches=True)


def test_samples_that_roll_over_are_not_counted() -> None:
    loaders = on_ranks(lambda: loader_of("sharded", range(23), 4, last_batch="rollover"), 2)
    assert [len(kept(loaders)) for _ in range(2)] == [20, 24]


def test_batches_of_the_dataset_are_shared_out() -> None:
    class Batches(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.arange(2 * self.length).reshape(self.length, 2))

    loaders = on_ranks(lambda: loader_of("drop-in", Batches(5), batch_size=None), 2)
    assert kept(loaders) == list(range(10))


def test_data_that_divides_itself_may_keep_its_parts() -> None:
    loaders = on_ranks(lambda: loader_of("sharded", Parts(), 2, num_replicas=2, rank=0, steps_per_epoch=2), 1)
    assert [batch.tolist() for batch in loaders[0]] == [[0, 2], [4, 6]]


class Parts(torch.utils.data.IterableDataset[int]):
    """Numbers from 0 to 7, a part of them for each worker and rank."""

    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        return iter(range(info.id, 8, info.num_workers))


def test_dispatch_batches_warns_that_it_has_no_effect() -> None:
    with pytest.warns(UserWarning, match="dispatch_batches=True has no effect"):
        on_ranks(lambda: loader_of("drop-in", range(8), 2), 2, dispatch_batches=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(lambda: loader_of("drop-in", range(8), 2), 1, dispatch_batches=True)
        on_ranks(lambda: loader_of("drop-in", range(8), 2), 2, dispatch_batches=False)


def test_threads_may_read_for_several_ranks() -> None:
    loaders = on_ranks(lambda: loader_of("sharded", range(8), 2, num_workers=1, thread_pool=True), 2)
    assert sorted(kept(loaders)) == list(range(8))
    for loader in loaders:
        loader.close()


def test_loaders_of_other_libraries_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"accelerator\.prepare"):
        prepared(torch.utils.data.DataLoader(range(4)))


def test_samples_are_not_dealt_to_ranks_twice() -> None:
    from sharded_loader import ShardedDataLoader

    with pytest.raises(ValueError, match="leave out num_replicas"):
        prepared(ShardedDataLoader(range(4), 2, num_replicas=2, rank=0))


def test_only_prepared_loaders_skip_batches() -> None:
    from sharded_loader.integrations.accelerate import skip_first_batches

    with pytest.raises(TypeError, match="prepare"):
        skip_first_batches(torch.utils.data.DataLoader(range(4)), 1)


@pytest.mark.parametrize("length", [10, None])
def test_in_the_place_of_torchs_class_accelerates_own_functions_keep_it(
    length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sharded_loader.torch import DataLoader

    monkeypatch.setattr(accelerate.data_loader, "DataLoader", DataLoader)
    loader = DataLoader(range(10) if length else Numbers(10), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loader = accelerate.Accelerator(cpu=True).prepare(loader)
    assert type(loader.base_dataloader) is DataLoader
    rest = accelerate.skip_first_batches(loader, 1)
    assert [batch.tolist() for batch in rest] == [[4, 5, 6, 7], [8, 9]]


def test_accelerates_own_prepare_warns() -> None:
    from sharded_loader.torch import DataLoader

    with pytest.warns(UserWarning, match=r"makes a PyTorch DataLoader"):
        accelerate.Accelerator(cpu=True).prepare(DataLoader(range(4)))


@pytest.mark.parametrize("name", ["device", "devices"])
def test_options_of_devices_go_to_the_device_of_accelerate(name: str) -> None:
    from sharded_loader import Placement, ShardedDataLoader
    from sharded_loader.integrations.accelerate import prepare

    given: Any = {name: Placement(device_transform=lambda batch: batch + 1)}
    loader = ShardedDataLoader(range(4), 2, num_workers=1, thread_pool=True, **given)
    loader.prefetch_epochs = True
    with prepare(loader, accelerate.Accelerator(cpu=True)) as made:
        assert made.arguments["device"].device == torch.device("cpu") and made.prefetch_epochs
        assert [batch.tolist() for batch in made] == [[1, 2], [3, 4]]
