"""Lightning trains on both loaders as a plain loop does, and goes on from each of its checkpoints without a difference.

Every epoch, wherever a checkpoint may fall: after a step, after the last step of an epoch,
where ``limit_train_batches`` ends it, at its end, after a validation in its middle. And Fabric.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, LongStream, Stream, recorder, seen
from torch.utils.data import BatchSampler
from torch.utils.data import RandomSampler as TorchsSampler

from sharded_loader import RandomSampler, ShardedDataLoader, SimpleDataset, sample_rng
from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS

LENGTH, SIZE, EPOCHS, STEPS = 24, 4, 3, 6
SHUFFLED: dict[str, Any] = {"batch_size": SIZE, "shuffle": True, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def lightning() -> Any:
    found = pytest.importorskip("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return found


@pytest.fixture
def model() -> Any:
    """Makes models that note their batches."""
    return recorder()


def trainer(root: Path, **options: Any) -> Any:
    import lightning

    usual = {"max_epochs": EPOCHS, "enable_checkpointing": False, "num_sanity_val_steps": 0, "default_root_dir": root}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", **{**usual, **quiet, **options})


def plain_loop(make: Any, steps: int = STEPS, **options: Any) -> list[tuple[int, int, list[int]]]:
    """What a model sees in a loop over the epochs, of whose batches ``steps`` are used."""
    loader, found = make(range(LENGTH), **options), list[Any]()
    for epoch in range(EPOCHS):
        found += [(epoch, len(found) + step, batch) for step, batch in enumerate(seen(loader)[:steps])]
    return found


IN_ORDER = [list(range(begin, begin + SIZE)) for begin in range(0, LENGTH, SIZE)]


# -- one run -----------------------------------------------------------------------------------------------------------

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "workers": ({"num_workers": 2}, {}, STEPS),
    "a sampler": ({"shuffle": False, "seed": None, "num_workers": 2}, {}, STEPS),
    "validation in between": ({}, {"val_check_interval": 2}, STEPS),
    "validation before": ({}, {"val_check_interval": 2, "num_sanity_val_steps": 2}, STEPS),
    "one batch": ({}, {"limit_train_batches": 1}, 1),
    "all but one": ({}, {"limit_train_batches": STEPS - 1}, STEPS - 1),
    "half": ({}, {"limit_train_batches": 0.5}, STEPS // 2),
}
"""Options of the loader and of the trainer, and how many batches of each epoch are used."""


@BOTH
@pytest.mark.parametrize("kind", RUNS)
def test_every_epoch_has_the_order_of_a_plain_loop_from_its_beginning(
    model: Any, make: Any, kind: str, tmp_path: Path
) -> None:
    options, how, steps = RUNS[kind]

    def given() -> dict[str, Any]:
        return SHUFFLED | options | ({"sampler": RandomSampler(LENGTH, seed=5)} if kind == "a sampler" else {})

    trained, validation = model(), [make(range(LENGTH), SIZE)] if "validation" in kind else []
    trainer(tmp_path, **how).fit(trained, make(range(LENGTH), **given()), *validation)
    assert trained.seen == plain_loop(make, steps, **{**given(), "num_workers": 0})
    epochs = [[batch for at, _, batch in trained.seen if at == epoch] for epoch in range(EPOCHS)]
    assert epochs[0] != epochs[1] != epochs[2]
    times = EPOCHS * STEPS // 2 if validation else 0
    assert trained.validated == IN_ORDER[: how.get("num_sanity_val_steps", 0)] + IN_ORDER * times


@BOTH
def test_a_step_knows_the_share_of_its_batch_in_the_global_one(model: Any, make: Any, tmp_path: Path) -> None:
    loader, found = make(range(25), global_batch=10, num_replicas=2, rank=0), list[Any]()

    class Shares(model):  # type: ignore[misc]
        def training_step(self, batch: Any, number: int) -> Any:
            found.append((len(batch), loader.share))
            return super().training_step(batch, number)

    trainer(tmp_path, max_epochs=2, use_distributed_sampler=False).fit(Shares(), loader)
    assert found == [(5, 1.0), (5, 1.0), (3, 2 * 3 / 5)] * 2


def test_overfit_batches_repeats_the_same_batches(model: Any, tmp_path: Path) -> None:
    trained = model()
    trainer(tmp_path, overfit_batches=2).fit(trained, DataLoader(range(LENGTH), **SHUFFLED))
    assert [batch for _, _, batch in trained.seen] == IN_ORDER[:2] * EPOCHS


@BOTH
def test_predictions_are_in_the_order_of_the_dataset(model: Any, make: Any, tmp_path: Path) -> None:
    """And a writer of predictions is given the indices of the drop-in."""
    from lightning.pytorch.callbacks import BasePredictionWriter

    written: list[list[int]] = []

    class Model(model):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_index: int) -> list[int]:
            return batch.tolist()

    class Writer(BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, *args: Any) -> None:
            written.append(list(args[3]))

    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert trainer(tmp_path).predict(Model(), make(range(10), SIZE)) == expected
    if make is DataLoader:
        loader = make(range(10), SIZE, num_workers=2)
        trainer(tmp_path, callbacks=[Writer("batch")]).predict(Model(), loader, return_predictions=False)
        assert written == expected


def test_every_number_of_an_epoch_is_logged_in_one_line(model: Any, tmp_path: Path) -> None:
    loader, logged = ShardedDataLoader(range(10), 4), list[dict[str, float]]()

    class Model(model):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            self.log_dict(loader.stats(self.current_epoch).as_dict(prefix="data/"))

        def on_train_end(self) -> None:
            logged.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    trainer(tmp_path, max_epochs=2).fit(Model(), loader)
    expected = loader.stats(1).as_dict(prefix="data/")
    assert [{name: one[name] for name in expected} for one in logged] == [pytest.approx(expected)]


# -- Fabric ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fabric(lightning: Any) -> Any:
    return lightning.Fabric(accelerator="cpu", devices=1)


def test_fabric_leaves_the_order_alone_and_loads_a_saved_state(fabric: Any, tmp_path: Path) -> None:
    loader, other = DataLoader(range(LENGTH), **SHUFFLED), DataLoader(range(LENGTH), **SHUFFLED)
    made = fabric.setup_dataloaders(loader)
    expected = [batch for _, _, batch in plain_loop(DataLoader, **SHUFFLED)]
    assert seen(made) + seen(made) == expected[: 2 * STEPS]
    batches = iter(made)
    next(batches)
    fabric.save(tmp_path / "state.ckpt", {"loader": loader.state_dict()})
    other.load_state_dict(fabric.load(tmp_path / "state.ckpt")["loader"])
    assert seen(fabric.setup_dataloaders(other)) == seen(batches)


def test_loaders_that_are_not_of_torch_are_refused_by_fabric_and_overfit_batches(
    fabric: Any, model: Any, tmp_path: Path
) -> None:
    """Both build another loader from the one they get."""
    loader = ShardedDataLoader(range(LENGTH), **SHUFFLED)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders(loader)
    with pytest.raises(ValueError, match="needs to subclass"):
        trainer(tmp_path, overfit_batches=2).fit(model(), loader)


# -- checkpoints -------------------------------------------------------------------------------------------------------


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


def with_a_random_number(index: int) -> int:
    """It depends on the seed, the epoch and the sample."""
    return index * 1000 + int(sample_rng().integers(1000))


RANDOM = SimpleDataset(range(LENGTH)).transform(with_a_random_number)


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Any] = {
    "drop-in": lambda: DataLoader(range(LENGTH), SIZE, shuffle=True, seed=3),
    "drop-in, workers": lambda: DataLoader(range(LENGTH), SIZE, shuffle=True, seed=3, num_workers=2),
    "drop-in, in order": lambda: DataLoader(range(LENGTH), SIZE),
    "drop-in, in order, random": lambda: DataLoader(RANDOM, SIZE, seed=3),
    "drop-in, shuffled, random": lambda: DataLoader(RANDOM, SIZE, shuffle=True, seed=3, num_workers=2),
    "drop-in, a generator": lambda: DataLoader(range(LENGTH), SIZE, shuffle=True, generator=drawn()),
    "drop-in, batches of a sampler": lambda: DataLoader(
        range(LENGTH), batch_sampler=BatchSampler(TorchsSampler(range(LENGTH), generator=drawn()), SIZE, False)
    ),
    "drop-in, iterable": lambda: DataLoader(Stream(), SIZE),
    "drop-in, iterable, workers": lambda: DataLoader(Stream(), SIZE, num_workers=2, streams=1),
    "drop-in, iterable with a length": lambda: DataLoader(LongStream(), SIZE),
    "drop-in, iterable with a state": lambda: DataLoader(Counted(), SIZE),
    "sharded": lambda: ShardedDataLoader(range(LENGTH), SIZE, shuffle=True, seed=3),
    "sharded, in order": lambda: ShardedDataLoader(range(LENGTH), SIZE),
    "sharded, in order, random": lambda: ShardedDataLoader(RANDOM, SIZE, seed=3),
    "sharded, iterable, random": lambda: ShardedDataLoader(LongStream(with_a_random_number), SIZE, seed=3),
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

NOT_TOLD = {"drop-in, a generator", "drop-in, batches of a sampler", "sharded, iterable", "sharded, iterable, workers"}
"""At the end of an epoch Lightning loads no position of a loader, and says the epoch: too late, or to nobody."""


def saving(root: Path, **options: Any) -> dict[str, Any]:
    """Options of a trainer that saves checkpoints below a folder."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(root / "saved", "{step}-{epoch}", save_top_k=-1, **options)
    return {"enable_checkpointing": True, "callbacks": [callback]}


def steps_of(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOADERS)
def test_every_checkpoint_is_resumed_exactly(
    model: Any, name: str, place: str, limit: int | None, tmp_path: Path
) -> None:
    if name in NOT_TOLD and place in ("at the end of an epoch", "after validation"):
        pytest.skip("the page says so")
    options: dict[str, Any] = {} if limit is None else {"limit_train_batches": limit}
    options |= {"val_check_interval": 2} if place == "after validation" else {}
    validation = [DataLoader(range(8), SIZE)] if place == "after validation" else []
    whole = model()
    trainer(tmp_path, **saving(tmp_path, **PLACES[place]), **options).fit(whole, LOADERS[name](), *validation)
    saved = sorted((tmp_path / "saved").glob("*.ckpt"), key=steps_of)
    per_epoch = len(whole.seen) // EPOCHS
    if place == "after each step":  # those in the middle of the first epoch, and around its end and the next one's
        near = {2, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch}
        saved = [one for one in saved if steps_of(one) in near]
    assert len(saved) >= 2
    for one in saved:
        resumed = model()
        trainer(tmp_path, **options).fit(resumed, LOADERS[name](), *validation, ckpt_path=one)
        assert resumed.seen == whole.seen[steps_of(one) :], one.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drop-in", "drop-in, iterable", "sharded", "sharded, iterable with a length"])
def test_a_finished_run_is_made_longer(model: Any, name: str, tmp_path: Path) -> None:
    whole, first, second = model(), model(), model()
    trainer(tmp_path).fit(whole, LOADERS[name]())
    trainer(tmp_path, max_epochs=2, **saving(tmp_path, save_last=True)).fit(first, LOADERS[name]())
    trainer(tmp_path).fit(second, LOADERS[name](), ckpt_path=tmp_path / "saved/last.ckpt")
    assert first.seen + second.seen == whole.seen


def test_an_epoch_that_lightning_says_too_late_is_a_warning(model: Any, tmp_path: Path) -> None:
    make = LOADERS["sharded, iterable"]
    trainer(tmp_path, max_epochs=1, **saving(tmp_path, save_last=True)).fit(model(), make())
    with pytest.warns(UserWarning, match="loads no position at the end of an epoch"):
        trainer(tmp_path, max_epochs=2).fit(model(), make(), ckpt_path=tmp_path / "saved/last.ckpt")
