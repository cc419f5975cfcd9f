"""Loaders under the real Accelerate: ranks, devices, the last step, metrics, states, skipped batches.

What Accelerate makes of torch's own loader is the yardstick. As a program, it compares them on one rank or several.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharded_loader import Placement, ShardedDataLoader
from sharded_loader.torch import DataLoader

accelerate = pytest.importorskip("accelerate")
accelerates_skip = accelerate.skip_first_batches  # before ours takes its place
ours = importlib.import_module("sharded_loader.integrations.accelerate")
pytestmark = pytest.mark.frameworks

LENGTH, SIZE = 23, 4
LOADERS = ("drop-in", "sharded", "drop-in, workers", "sharded, workers")


class Numbers(torch.utils.data.IterableDataset[Any]):
    """Numbers without a length, which do not ask which part to read."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = range(numbers) if isinstance(numbers, int) else numbers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


class Parts(Numbers):
    """Workers and ranks divide the numbers."""

    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        return iter(self.numbers if info is None else self.numbers[info.id :: info.num_workers])


def loader_of(name: str, data: Any = range(LENGTH), **order: Any) -> Any:
    """A loader by name, by default of numbers from 0 to 22, in batches of 4."""
    workers = 2 if "workers" in name else 0
    if name.startswith("drop-in"):
        return DataLoader(data, batch_size=SIZE, num_workers=workers, **order)
    return ShardedDataLoader(data, SIZE, num_workers=workers, **order)


def look(loader: Any, accelerator: Any) -> tuple[list[Any], list[int], list[bool]]:
    """The batches of an epoch; all samples that `gather_for_metrics` gives; after each batch, whether it was last."""
    batches, gathered, ends = [], [], []
    for batch in loader:
        batches.append(batch.tolist())
        gathered += accelerator.gather_for_metrics(batch).tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    return batches, sorted(gathered), ends


def main() -> None:
    """Print a line for each check that has passed."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    rank = accelerator.process_index
    expected = look(accelerator.prepare(torch.utils.data.DataLoader(range(LENGTH), batch_size=SIZE)), accelerator)
    folder = accelerate.utils.broadcast_object_list([tempfile.mkdtemp() if rank == 0 else None])[0]
    for name in LOADERS:

        def check(what: str, holds: bool, name: str = name) -> None:
            assert holds, (name, what)
            sys.stdout.write(f"ok {rank}: {name}: {what}\n")  # at once: the ranks share the stream
            sys.stdout.flush()

        loader = ours.prepare(loader_of(name), accelerator)
        check("as torch's", look(loader, accelerator) == expected)
        check("passes prepare", accelerator.prepare(loader) is loader)
        check("skipped", look(ours.skip_first_batches(loader, 2), accelerator)[0] == expected[0][2:])
        batches = iter(loader)
        next(batches)
        accelerator.save_state(folder)
        rest = [batch.tolist() for batch in batches]
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        check("resumed", [batch.tolist() for batch in loader] == rest)
        accelerator.free_memory()

        torch.manual_seed(rank)  # the ranks agree all the same
        shuffled = ours.prepare(loader_of(name, shuffle=True), accelerator)
        first, second = look(shuffled, accelerator), look(shuffled, accelerator)
        assert first[0] != second[0]
        check("shuffled", first[1] == second[1] == list(range(LENGTH)) and first[2] == expected[2])
        shuffled.set_epoch(1)
        check("skipped, shuffled", look(ours.skip_first_batches(shuffled, 1), accelerator)[0] == second[0][1:])
        rest = accelerates_skip(shuffled, 1)  # as transformers' Trainer reads the rest of a resumed epoch
        inside = rest.batch_sampler.batch_sampler
        if hasattr(inside, "set_epoch"):
            inside.set_epoch(1)
        check("skipped by Trainer", [batch.tolist() for batch in rest] == second[0][1:])
        dropped = ours.prepare(loader_of(name, drop_last=True), accelerator)
        check("uneven", all(len(batch) == SIZE for batch in look(dropped, accelerator)[0]))
        accelerator.free_memory()
        stream = ours.prepare(loader_of(name, Parts(18)), accelerator)
        batches, gathered, ends = look(stream, accelerator)
        ended = ends == [False] * (len(ends) - 1) + [True]
        check("iterable data, gathered", ended and gathered == list(range(18)))
        assert look(ours.skip_first_batches(stream, 1), accelerator)[0] == batches[1:]
        reading = iter(stream)
        next(reading)
        state = stream.state_dict()
        rest = [batch.tolist() for batch in reading]
        stream.load_state_dict(state)
        check("iterable data, resumed", [batch.tolist() for batch in stream] == rest == batches[1:])
        accelerator.free_memory()
        for one in (loader, shuffled, dropped, stream):
            if isinstance(one, ShardedDataLoader):
                one.close()

        for option, value in (("split_batches", True), ("even_batches", False)):
            config = accelerate.utils.DataLoaderConfiguration(**{option: value})
            other = accelerate.Accelerator(cpu=True, dataloader_config=config)
            yardstick = other.prepare(torch.utils.data.DataLoader(range(LENGTH), batch_size=SIZE))
            found = [batch.tolist() for batch in ours.prepare(loader_of(name), other)]
            check(option, found == [one.tolist() for one in yardstick])
            other.free_memory()
    accelerator.wait_for_everyone()
    if rank == 0:
        shutil.rmtree(folder)
    accelerator.end_training()


def run(ranks: int) -> list[str]:
    """What the program says, which compares every loader with Accelerate's own, in so many processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, __file__], capture_output=True, text=True, timeout=240)
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


def test_ranks_have_shares_of_a_global_batch_and_the_factor_of_the_batch_that_was_handed_out() -> None:
    for ranks in (1, 2, 3):
        loaders = on_ranks(lambda: ShardedDataLoader(range(25), global_batch=10, shuffle=True, seed=1), ranks)
        assert {loader.total_batch_size for loader in loaders} == {10}
        for batches, total in zip(zip(*loaders, strict=True), (10, 10, 5), strict=True):
            assert [loader.share for loader in loaders] == [len(batch) * ranks / total for batch in batches]
            assert sum(map(len, batches)) == total


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


def test_what_is_shared_out_among_the_ranks_is_counted_once() -> None:
    rolling = on_ranks(lambda: ShardedDataLoader(range(23), 4, last_batch="rollover"), 2)
    assert [len(kept(rolling)) for _ in range(2)] == [20, 24]
    batched = on_ranks(lambda: DataLoader(Numbers(torch.arange(10).reshape(5, 2)), batch_size=None), 2)
    assert kept(batched) == list(range(10))
    (divides_itself,) = on_ranks(lambda: ShardedDataLoader(Parts(8), 2, num_replicas=2, rank=0, steps_per_epoch=2), 1)
    assert [batch.tolist() for batch in divides_itself] == [[0, 2], [4, 6]]
    threads = on_ranks(lambda: ShardedDataLoader(range(8), 2, num_workers=1, thread_pool=True), 2)
    assert sorted(kept(threads)) == list(range(8))
    for loader in threads:
        loader.close()


def test_dispatch_batches_warns_that_it_has_no_effect() -> None:
    with pytest.warns(UserWarning, match="dispatch_batches=True has no effect"):
        on_ranks(lambda: DataLoader(range(8), 2), 2, dispatch_batches=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(lambda: DataLoader(range(8), 2), 1, dispatch_batches=True)
        on_ranks(lambda: DataLoader(range(8), 2), 2, dispatch_batches=False)


def test_what_cannot_be_prepared_or_skipped_is_rejected() -> None:
    theirs, dealt = torch.utils.data.DataLoader(range(4)), ShardedDataLoader(range(4), 2, num_replicas=2, rank=0)
    with pytest.raises(TypeError, match=r"accelerator\.prepare"):
        ours.prepare(theirs, accelerate.Accelerator(cpu=True))
    with pytest.raises(ValueError, match="leave out num_replicas"):
        ours.prepare(dealt, accelerate.Accelerator(cpu=True))
    with pytest.raises(TypeError, match="prepare"):
        ours.skip_first_batches(theirs, 1)


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


if __name__ == "__main__":
    main()
