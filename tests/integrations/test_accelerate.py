"""Loaders under the real Accelerate: ranks, devices, the last step, metrics, states, skipped batches.

What Accelerate makes of torch's own loader is the yardstick.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharded_loader import Placement, ShardedDataLoader
from sharded_loader.torch import DataLoader

accelerate = pytest.importorskip("accelerate")
ours = importlib.import_module("sharded_loader.integrations.accelerate")
pytestmark = pytest.mark.frameworks

PROGRAM = Path(__file__).with_name("accelerated.py")
LOADERS = ("drop-in", "sharded", "drop-in, workers", "sharded, workers")


def run(ranks: int) -> list[str]:
    """What the program says, which compares every loader with Accelerate's own, in so many processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, str(PROGRAM)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("ok "))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(300)
def test_a_prepared_loader_is_what_accelerate_makes_of_torchs(ranks: int) -> None:
    said = run(ranks)
    checks = ["as torch's", "passes prepare", "skipped", "resumed", "shuffled", "skipped, shuffled", "uneven"]
    checks += ["skipped by Trainer", "split_batches", "even_batches"]
    checks += ["iterable data, gathered", "iterable data, resumed"]
    assert said == sorted(f"ok {rank}: {name}: {what}" for rank in range(ranks) for name in LOADERS for what in checks)


CLASSES = {"drop-in": DataLoader, "sharded": ShardedDataLoader}


def on_ranks(make: Any, ranks: int, **options: Any) -> list[Any]:
    """What `prepare` makes for each rank."""
    usual = {"split_batches": False, "even_batches": True, "dispatch_batches": None}
    one: Any = dict(num_processes=ranks, device_placement=False, device=torch.device("cpu"), **{**usual, **options})
    return [ours.prepare(make(), SimpleNamespace(**one, process_index=rank, _dataloaders=[])) for rank in range(ranks)]


def kept(loaders: list[Any]) -> list[int]:
    """The samples of an epoch of all ranks, without what was filled up, as `gather_for_metrics` finds it."""
    samples: list[int] = []
    for batches in zip(*loaders, strict=True):
        assert len({len(batch) for batch in batches}) == 1
        whole = [sample for batch in batches for sample in batch.tolist()]
        counts = loaders[0].end_of_dataloader or loaders[0]._is_shared
        samples += whole[: loaders[0].remainder] if counts and loaders[0].remainder > 0 else whole
    return samples


class Numbers(torch.utils.data.IterableDataset[Any]):
    """Numbers without a length, which do not ask which part to read."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = range(numbers) if isinstance(numbers, int) else numbers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [1, 18, 24, 25])
@pytest.mark.filterwarnings("ignore:.* has left out .* samples")  # ``drop_last`` does what it is asked for
def test_what_was_filled_up_is_known(make: Any, ranks: int, split: bool, length: int) -> None:
    for data in (Numbers(length), range(length)):
        loaders = on_ranks(lambda data=data: make(data, batch_size=6), ranks, split_batches=split)
        assert sorted(kept(loaders)) == list(range(length))
    loaders = on_ranks(lambda: make(range(100), 6, sampler=range(length)), ranks, split_batches=split)
    assert sorted(kept(loaders)) == list(range(length))
    whole = 6 if split else 6 * ranks
    loaders = on_ranks(lambda: make(Numbers(length), 6, drop_last=True), ranks, split_batches=split)
    assert sorted(kept(loaders)) == list(range(length // whole * whole))


def test_split_batches_keeps_the_global_batch_of_iterable_data() -> None:
    for make in CLASSES.values():
        loaders = on_ranks(lambda make=make: make(Numbers(16), 4), 2, split_batches=True)
        assert [[len(batch) for batch in loader] for loader in loaders] == [[2] * 4] * 2
        with pytest.raises(ValueError, match="cannot split a batch of 4 among 3 ranks"):
            on_ranks(lambda make=make: make(Numbers(16), 4), 3, split_batches=True)


def test_samples_that_roll_over_are_not_counted() -> None:
    loaders = on_ranks(lambda: ShardedDataLoader(range(23), 4, last_batch="rollover"), 2)
    assert [len(kept(loaders)) for _ in range(2)] == [20, 24]


def test_batches_of_the_dataset_are_shared_out() -> None:
    loaders = on_ranks(lambda: DataLoader(Numbers(torch.arange(10).reshape(5, 2)), batch_size=None), 2)
    assert kept(loaders) == list(range(10))


class Parts(Numbers):
    """A part of the numbers for each worker and rank."""

    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        return iter(self.numbers[info.id :: info.num_workers])


def test_data_that_divides_itself_may_keep_its_parts() -> None:
    (loader,) = on_ranks(lambda: ShardedDataLoader(Parts(8), 2, num_replicas=2, rank=0, steps_per_epoch=2), 1)
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


def test_dispatch_batches_warns_that_it_has_no_effect() -> None:
    with pytest.warns(UserWarning, match="dispatch_batches=True has no effect"):
        on_ranks(lambda: DataLoader(range(8), 2), 2, dispatch_batches=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(lambda: DataLoader(range(8), 2), 1, dispatch_batches=True)
        on_ranks(lambda: DataLoader(range(8), 2), 2, dispatch_batches=False)


def test_threads_may_read_for_several_ranks() -> None:
    loaders = on_ranks(lambda: ShardedDataLoader(range(8), 2, num_workers=1, thread_pool=True), 2)
    assert sorted(kept(loaders)) == list(range(8))
    for loader in loaders:
        loader.close()


def prepared(loader: Any) -> Any:
    return ours.prepare(loader, accelerate.Accelerator(cpu=True))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: prepared(torch.utils.data.DataLoader(range(4))), TypeError, r"accelerator\.prepare"),
        (
            lambda: prepared(ShardedDataLoader(range(4), 2, num_replicas=2, rank=0)),
            ValueError,
            "leave out num_replicas",
        ),
        (lambda: ours.skip_first_batches(torch.utils.data.DataLoader(range(4)), 1), TypeError, "prepare"),
    ],
    ids=["of another library", "dealt to ranks twice", "not prepared"],
)
def test_what_cannot_be_prepared_or_skipped_is_rejected(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("length", [10, None])
def test_in_the_place_of_torchs_class_accelerates_own_functions_keep_it(
    length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=r"makes a PyTorch DataLoader"):
        accelerate.Accelerator(cpu=True).prepare(DataLoader(range(4)))
    monkeypatch.setattr(accelerate.data_loader, "DataLoader", DataLoader)
    loader = DataLoader(range(10) if length else Numbers(10), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loader = accelerate.Accelerator(cpu=True).prepare(loader)
    assert type(loader.base_dataloader) is DataLoader
    rest = accelerate.skip_first_batches(loader, 1)
    assert [batch.tolist() for batch in rest] == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("name", ["device", "devices"])
def test_options_of_devices_go_to_the_device_of_accelerate(name: str) -> None:
    given: Any = {name: Placement(device_transform=lambda batch: batch + 1)}
    loader = ShardedDataLoader(range(4), 2, num_workers=1, thread_pool=True, **given)
    loader.prefetch_epochs = True
    with ours.prepare(loader, accelerate.Accelerator(cpu=True)) as made:
        assert made.arguments["device"].device == torch.device("cpu") and made.prefetch_epochs
        assert [batch.tolist() for batch in made] == [[1, 2], [3, 4]]
