"""A run of Lightning goes on from each of its checkpoints with the batches of a run that was not interrupted.

Both loaders, one process and two ranks, every epoch, wherever a checkpoint may fall: after a step, after the last step
of an epoch, where ``limit_train_batches`` ends it, at its end, after a validation in its middle.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from indices import IN_FRAMEWORKS
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from sharded_loader import ShardedDataLoader, sample_rng
from sharded_loader.torch import DataLoader

pytestmark = [*IN_FRAMEWORKS, pytest.mark.slow]

LENGTH, SIZE, EPOCHS = 24, 4, 3


class Stream(IterableDataset[int]):
    """Iterable data without a length, in another order in each epoch that it is told of."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index * 5 + self.epoch) % LENGTH for index in range(LENGTH)])


class LongStream(Stream):
    def __len__(self) -> int:
        return LENGTH


class Counted(Stream):
    """It knows how far it was read."""

    done = start = 0

    def __iter__(self) -> Iterator[int]:
        self.done, self.start = self.start, 0
        while self.done < LENGTH:
            self.done += 1
            yield self.done - 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class Random:
    """A sample's random number depends on the seed, the epoch and the sample."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index * 1000 + int(sample_rng().integers(1000))


class RandomStream(LongStream):
    def __iter__(self) -> Iterator[int]:
        return (index * 1000 + int(sample_rng().integers(1000)) for index in super().__iter__())


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Any] = {
    "drop-in": lambda: DataLoader(range(LENGTH), SIZE, shuffle=True, seed=3),
    "drop-in, workers": lambda: DataLoader(range(LENGTH), SIZE, shuffle=True, seed=3, num_workers=2),
    "drop-in, in order": lambda: DataLoader(range(LENGTH), SIZE),
    "drop-in, in order, random": lambda: DataLoader(Random(), SIZE, seed=3),
    "drop-in, shuffled, random": lambda: DataLoader(Random(), SIZE, shuffle=True, seed=3, num_workers=2),
    "drop-in, a generator": lambda: DataLoader(range(LENGTH), SIZE, shuffle=True, generator=drawn()),
    "drop-in, batches of a sampler": lambda: DataLoader(
        range(LENGTH), batch_sampler=BatchSampler(RandomSampler(range(LENGTH), generator=drawn()), SIZE, False)
    ),
    "drop-in, iterable": lambda: DataLoader(Stream(), SIZE),
    "drop-in, iterable, workers": lambda: DataLoader(Stream(), SIZE, num_workers=2, streams=1),
    "drop-in, iterable with a length": lambda: DataLoader(LongStream(), SIZE),
    "drop-in, iterable with a state": lambda: DataLoader(Counted(), SIZE),
    "sharded": lambda: ShardedDataLoader(range(LENGTH), SIZE, shuffle=True, seed=3),
    "sharded, in order": lambda: ShardedDataLoader(range(LENGTH), SIZE),
    "sharded, in order, random": lambda: ShardedDataLoader(Random(), SIZE, seed=3),
    "sharded, iterable, random": lambda: ShardedDataLoader(RandomStream(), SIZE, seed=3),
    "sharded, iterable": lambda: ShardedDataLoader(Stream(), SIZE),
    "sharded, iterable, workers": lambda: ShardedDataLoader(Stream(), SIZE, num_workers=1),
    "sharded, iterable with a length": lambda: ShardedDataLoader(LongStream(), SIZE),
    "sharded, iterable with a state": lambda: ShardedDataLoader(Counted(), SIZE),
    "sharded, iterable, in steps": lambda: ShardedDataLoader(Stream(), SIZE, steps_per_epoch=5),
}

PLACES: dict[str, dict[str, Any]] = {
    "after each step": {"every_n_train_steps": 1},
    "at the end of an epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "after validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "the last": {"every_n_train_steps": 5, "save_last": True},
}


def fit(model: Any, loader: Any, root: Path, resume: Any = None, **options: Any) -> None:
    lightning = pytest.importorskip("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    validation = DataLoader(range(8), SIZE) if "val_check_interval" in options else None
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=root,
        **({"max_epochs": EPOCHS, "enable_checkpointing": False} | options),
    )
    trainer.fit(model, loader, validation, ckpt_path=resume)


def steps_of(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


NOT_TOLD = {
    "drop-in, a generator",
    "drop-in, batches of a sampler",
    "sharded, iterable",
    "sharded, iterable, workers",
}
"""At the end of an epoch Lightning loads no position of a loader, and says the epoch: too late, or to nobody."""


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOADERS)
def test_every_checkpoint_is_resumed_exactly(name: str, place: str, limit: int | None, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from recorder import Recorder

    if name in NOT_TOLD and place in ("at the end of an epoch", "after validation"):
        pytest.skip("the page says so")
    options: dict[str, Any] = {} if limit is None else {"limit_train_batches": limit}
    options |= {"val_check_interval": 2} if place == "after validation" else {}
    whole = Recorder()
    saving = ModelCheckpoint(tmp_path / "saved", "{step}-{epoch}", save_top_k=-1, **PLACES[place])
    fit(whole, LOADERS[name](), tmp_path, enable_checkpointing=True, callbacks=[saving], **options)
    saved = sorted((tmp_path / "saved").glob("*.ckpt"), key=steps_of)
    per_epoch = len(whole.seen) // EPOCHS
    if place == "after each step":  # those in the middle of the first epoch, and around its end and the next one's
        near = {2, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch}
        saved = [one for one in saved if steps_of(one) in near]
    assert len(saved) >= 2
    for one in saved:
        resumed = Recorder()
        fit(resumed, LOADERS[name](), tmp_path, one, **options)
        assert resumed.seen == whole.seen[steps_of(one) :], one.name


@pytest.mark.parametrize("name", ["drop-in", "drop-in, iterable", "sharded", "sharded, iterable with a length"])
def test_a_finished_run_is_made_longer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from recorder import Recorder

    whole, first, second = Recorder(), Recorder(), Recorder()
    fit(whole, LOADERS[name](), tmp_path)
    saving = ModelCheckpoint(tmp_path / "saved", save_last=True)
    fit(first, LOADERS[name](), tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[saving])
    fit(second, LOADERS[name](), tmp_path, tmp_path / "saved/last.ckpt")
    assert first.seen + second.seen == whole.seen


def test_an_epoch_that_lightning_says_too_late_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from recorder import Recorder

    saving = ModelCheckpoint(tmp_path / "saved", save_last=True)
    make = LOADERS["sharded, iterable"]
    fit(Recorder(), make(), tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    with pytest.warns(UserWarning, match="loads no position at the end of an epoch"):
        fit(Recorder(), make(), tmp_path, tmp_path / "saved/last.ckpt", max_epochs=2)


PROGRAM = """
import json, logging, os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import indices
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from recorder import Recorder
from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
root, options = Path(sys.argv[2]), json.loads(sys.argv[4])

class Model(Recorder):
    def train_dataloader(self):
        if sys.argv[3] == "sharded":
            return ShardedDataLoader(range(48), 4, shuffle=True, seed=3, num_workers=1, num_replicas="auto")
        seed = 3 if sys.argv[3] == "drop-in" else None
        return DataLoader(range(48), 4, shuffle=True, num_workers=1, seed=seed)

def fit(resume=None, **how):
    torch.manual_seed(1 if resume is None else 7)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=root, **options, **({"enable_checkpointing": False} | how),
    )
    trainer.fit(model, ckpt_path=resume)
    return trainer.global_rank, model.seen

saving = ModelCheckpoint(root / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
rank, whole = fit(enable_checkpointing=True, callbacks=[saving])
per_epoch = len(whole) // 3
wrong = []
for step in (2, per_epoch, per_epoch + 2, 2 * per_epoch, 2 * per_epoch + 3):
    if fit(root / "saved" / f"step={step}.ckpt")[1] != whole[step:]:
        wrong.append(step)
(root / f"rank{rank}.json").write_text(json.dumps({"wrong": wrong, "seen": whole}))
"""


@pytest.mark.parametrize("name", ["drop-in", "drop-in without a seed", "sharded"])
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 4}])
@pytest.mark.timeout(400)
def test_two_ranks_are_resumed_in_every_epoch(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "program.py", str(Path(__file__).parent), str(tmp_path), name, json.dumps(options)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert [rank["wrong"] for rank in ranks] == [[], []]
    for epoch in range(EPOCHS):
        read = [index for rank in ranks for at, _, batch in rank["seen"] if at == epoch for index in batch]
        assert len(read) == len(set(read)) == (32 if options else 48)
