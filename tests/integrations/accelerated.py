"""Compares prepared loaders with what Accelerate makes of torch's, on one rank or several; run by test_accelerate."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate import skip_first_batches as accelerate_skip
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list

from sharded_loader import ShardedDataLoader
from sharded_loader.integrations.accelerate import prepare, skip_first_batches
from sharded_loader.torch import DataLoader

LENGTH, SIZE = 23, 4


class Numbers(torch.utils.data.IterableDataset[int]):
    """Numbers from 0 to 17, without a length. Workers divide them."""

    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        return iter(range(18) if info is None else range(info.id, 18, info.num_workers))


def make(name: str, data: Any = range(LENGTH), **order: Any) -> Any:
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
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    rank = accelerator.process_index
    expected = look(accelerator.prepare(torch.utils.data.DataLoader(range(LENGTH), batch_size=SIZE)), accelerator)
    folder = broadcast_object_list([tempfile.mkdtemp() if rank == 0 else None])[0]
    for name in ("drop-in", "sharded", "drop-in, workers", "sharded, workers"):

        def say(what: str, name: str = name) -> None:
            sys.stdout.write(f"ok {rank}: {name}: {what}\n")  # at once: the ranks share the stream
            sys.stdout.flush()

        loader = prepare(make(name), accelerator)
        assert look(loader, accelerator) == expected
        say("as torch's")
        assert accelerator.prepare(loader) is loader
        say("passes prepare")
        assert look(skip_first_batches(loader, 2), accelerator)[0] == expected[0][2:]
        say("skipped")
        batches = iter(loader)
        next(batches)
        accelerator.save_state(folder)
        rest = [batch.tolist() for batch in batches]
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        assert [batch.tolist() for batch in loader] == rest
        say("resumed")
        accelerator.free_memory()

        torch.manual_seed(rank)  # the ranks agree all the same
        shuffled = prepare(make(name, shuffle=True), accelerator)
        first, second = look(shuffled, accelerator), look(shuffled, accelerator)
        assert first[1] == second[1] == list(range(LENGTH))
        assert first[0] != second[0]
        assert first[2] == expected[2]
        say("shuffled")
        shuffled.set_epoch(1)
        assert look(skip_first_batches(shuffled, 1), accelerator)[0] == second[0][1:]
        say("skipped, shuffled")
        rest = accelerate_skip(shuffled, 1)  # as transformers' Trainer reads the rest of a resumed epoch
        inside = rest.batch_sampler.batch_sampler
        if hasattr(inside, "set_epoch"):
            inside.set_epoch(1)
        assert [batch.tolist() for batch in rest] == second[0][1:]
        say("skipped by Trainer")
        dropped = prepare(make(name, drop_last=True), accelerator)
        assert all(len(batch) == SIZE for batch in look(dropped, accelerator)[0])
        say("uneven")
        accelerator.free_memory()
        stream = prepare(make(name, Numbers()), accelerator)
        batches, gathered, ends = look(stream, accelerator)
        assert gathered == list(range(18))
        assert ends == [False] * (len(ends) - 1) + [True]
        say("iterable data, gathered")
        assert look(skip_first_batches(stream, 1), accelerator)[0] == batches[1:]
        reading = iter(stream)
        next(reading)
        state = stream.state_dict()
        rest = [batch.tolist() for batch in reading]
        stream.load_state_dict(state)
        assert [batch.tolist() for batch in stream] == rest == batches[1:]
        say("iterable data, resumed")
        accelerator.free_memory()
        for one in (loader, shuffled, dropped, stream):
            if isinstance(one, ShardedDataLoader):
                one.close()

        for option, value in (("split_batches", True), ("even_batches", False)):
            other = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{option: value}))
            yardstick = other.prepare(torch.utils.data.DataLoader(range(LENGTH), batch_size=SIZE))
            assert [batch.tolist() for batch in prepare(make(name), other)] == [one.tolist() for one in yardstick]
            say(option)
            other.free_memory()
    accelerator.wait_for_everyone()
    if rank == 0:
        shutil.rmtree(folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
