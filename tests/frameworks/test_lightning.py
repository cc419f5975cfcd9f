"""Real Lightning trains on a loader as a plain loop does: epochs 0, 1, 2, and every step once, resumes included.

The expected order is that of a plain loop, not of our code: for every epoch, `set_epoch`, and all its batches.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROCESS_POOLS, covering, make_pool

from sharded_loader import RandomSampler, ShardedDataLoader

LENGTH, BATCH, EPOCHS = 24, 4, 3
STEPS = LENGTH // BATCH

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::Warning:torch", "ignore:.*num_workers.*")


class Ordered:
    """A dataset whose samples are their own indices."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        return float(index)


@pytest.fixture
def recorder() -> Any:
    """The module with the model."""
    pytest.importorskip("lightning")
    import recorder

    return recorder


def make_loader(pool: str = "inline", **options: Any) -> ShardedDataLoader:
    options = {"shuffle": True, "seed": 3} | options
    return ShardedDataLoader(Ordered(), BATCH, pool=make_pool(pool, 1), **options)


def plain_loop(steps: int = STEPS, **options: Any) -> list[tuple[int, int, list[int]]]:
    """What a model sees in a loop over the epochs, of whose batches ``steps`` are used."""
    seen: list[tuple[int, int, list[int]]] = []
    for epoch in range(EPOCHS):
        loader = make_loader(**options)
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number < steps:
                seen.append((epoch, len(seen), [int(index) for index in batch]))
    return seen


def fit(model: Any, loader: Any, root: Path, *, validation: Any = None, resume: Any = None, **options: Any) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **({"enable_checkpointing": False} | options),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, loader, validation, ckpt_path=resume)


@covering(1, pool=["inline", "thread", *PROCESS_POOLS[:1]], sampler=["shuffle", "given"])
@pytest.mark.slow
def test_the_model_sees_the_epochs_of_a_plain_loop(recorder: Any, pool: str, sampler: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if sampler == "given":
        options = {"shuffle": False, "sampler": RandomSampler(LENGTH, seed=5)}
    model = recorder.Recorder()
    with make_loader(pool, **options) as loader:
        fit(model, loader, tmp_path)
    assert model.seen == plain_loop(**options)


@pytest.mark.slow
@pytest.mark.parametrize("sanity", [0, 2])
def test_validation_in_between_changes_nothing(recorder: Any, sanity: int, tmp_path: Path) -> None:
    model = recorder.Recorder()
    fit(
        model,
        make_loader(),
        tmp_path,
        validation=make_loader(shuffle=False),
        num_sanity_val_steps=sanity,
        val_check_interval=2,
    )
    assert model.seen == plain_loop()
    in_order = [list(range(begin, begin + BATCH)) for begin in range(0, LENGTH, BATCH)]
    assert model.validated == in_order[:sanity] + in_order * (EPOCHS * STEPS // 2)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, STEPS - 1, 0.5])
def test_a_limit_of_batches_begins_every_epoch_at_its_own_beginning(
    recorder: Any, limit: float, tmp_path: Path
) -> None:
    model = recorder.Recorder()
    fit(model, make_loader(), tmp_path, limit_train_batches=limit)
    assert model.seen == plain_loop(int(limit * STEPS) if isinstance(limit, float) else limit)


PLACES = {
    "at an epoch's end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "after every step": {"every_n_train_steps": 1},
    "after every second step": {"every_n_train_steps": 2},
    "on the last batch": {"every_n_train_steps": STEPS},
    "in mid-epoch": {"every_n_train_steps": 4},
}


@pytest.mark.slow
@covering(1, place=PLACES, stop_at=[4, STEPS - 1, STEPS, STEPS + 1, STEPS + 4, 2 * STEPS])
def test_a_run_that_was_killed_trains_every_step_once(recorder: Any, place: str, stop_at: int, tmp_path: Path) -> None:
    """From the last checkpoint on, the steps are those of a run that was never interrupted."""
    check_resume(recorder, place, stop_at, tmp_path, make_loader)


def check_resume(recorder: Any, place: str, stop_at: int, root: Path, make: Any, **options: Any) -> None:
    steps = options.get("limit_train_batches", STEPS)
    from lightning.pytorch import callbacks

    model = recorder.Recorder(stop_at)
    saving = callbacks.ModelCheckpoint(root / "saved", save_top_k=-1, filename="{step}", **PLACES[place])
    with pytest.raises(recorder.KilledError):
        fit(model, make(), root, enable_checkpointing=True, callbacks=[saving], **options)
    saved = sorted((root / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    last = saved[-1] if saved else None
    done = torch.load(last, weights_only=False)["global_step"] if last else 0
    assert done or stop_at < max(PLACES[place].get("every_n_train_steps", 0), STEPS)
    resumed = recorder.Recorder()
    fit(resumed, make(), root, resume=last, **options)
    assert model.seen[:done] + resumed.seen == plain_loop(steps), (done, resumed.seen[:2])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["after every step", "after every second step", "in mid-epoch"])
@pytest.mark.parametrize("stop_at", range(1, 3 * 4))
def test_a_killed_run_with_a_limit_of_batches_trains_every_step_once(
    recorder: Any, place: str, stop_at: int, tmp_path: Path
) -> None:
    """Four of six batches per epoch: a checkpoint after the fourth is at an epoch's end for Lightning alone."""
    check_resume(recorder, place, stop_at, tmp_path, make_loader, limit_train_batches=4)
