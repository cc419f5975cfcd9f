"""Lightning trains on the drop-in as on torch's loader: another order each epoch, exact resume, ranks, predictions.

`test_lightning.py` has the same for `ShardedDataLoader`. The expected order is that of a plain loop.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, epochs, numbers, seen

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS

OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def lightning() -> Any:
    found = pytest.importorskip("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return found


@pytest.fixture
def model(lightning: Any) -> Any:
    """Makes models that note their batches."""
    import recorder

    class Model(recorder.Recorder):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_index: int) -> Any:
            return super().training_step(batch[0], batch_index)

        def validation_step(self, batch: Any, batch_index: int) -> None:
            super().validation_step(batch[0], batch_index)

        def predict_step(self, batch: Any, batch_index: int) -> list[int]:
            return numbers(batch)

    return Model


def trainer(lightning: Any, root: Path, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **({"max_epochs": 3, "enable_checkpointing": False} | options),
    )


def batches(model: Any) -> list[list[int]]:
    return [batch for _, _, batch in model.seen]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_has_the_order_of_a_plain_loop(
    lightning: Any, model: Any, num_workers: int, tmp_path: Path
) -> None:
    trained = model()
    trainer(lightning, tmp_path).fit(trained, DataLoader(Numbered(), num_workers=num_workers, **OPTIONS))
    expected = epochs(DataLoader, 3, **OPTIONS)
    assert batches(trained) == sum(expected, [])
    assert expected[0] != expected[1] != expected[2]


PLACES: dict[str, dict[str, Any]] = {
    "mid-epoch": {"every_n_train_steps": 4},
    "last batch": {"every_n_train_steps": STEPS},  # before Lightning ends the epoch
    "end of the epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "after validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "after validation in mid-epoch": {"every_n_train_steps": None, "every_n_epochs": 1, "val_check_interval": 2},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_trains_every_batch_once(
    lightning: Any, model: Any, place: str, num_workers: int, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from recorder import KilledError

    options = dict(PLACES[place])
    interval = options.pop("val_check_interval", 1.0)
    make = lambda: DataLoader(Numbered(), num_workers=num_workers, **OPTIONS)  # noqa: E731
    validation = [DataLoader(Numbered(8), batch_size=4)] if "validation" in place else []
    saving = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, filename="{step}", **options)
    killed = model(stop_at=STEPS + 3)
    how: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saving], "val_check_interval": interval}
    with pytest.raises(KilledError):
        trainer(lightning, tmp_path, **how).fit(killed, make(), *validation)
    last = max((tmp_path / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    done = torch.load(last, weights_only=False)["global_step"]
    resumed = model()
    trainer(lightning, tmp_path, val_check_interval=interval).fit(resumed, make(), *validation, ckpt_path=last)
    assert done > 0
    assert batches(killed)[:done] + batches(resumed) == sum(epochs(DataLoader, 3, **OPTIONS), [])


def test_overfit_batches_repeats_the_same_batches(lightning: Any, model: Any, tmp_path: Path) -> None:
    trained = model()
    trainer(lightning, tmp_path, overfit_batches=2).fit(trained, DataLoader(Numbered(), **OPTIONS))
    assert batches(trained) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


@BOTH
def test_predictions_are_in_the_order_of_the_dataset(lightning: Any, model: Any, make: Any, tmp_path: Path) -> None:
    predictions = trainer(lightning, tmp_path).predict(model(), make(Numbered(10), batch_size=4))
    assert predictions == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_writer_of_predictions_gets_the_indices(lightning: Any, model: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import BasePredictionWriter

    written: list[tuple[list[int], list[int]]] = []

    class Writer(BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, *args: Any) -> None:
            prediction, indices = args[2:4]
            written.append((prediction, list(indices)))

    loader = DataLoader(Numbered(10), batch_size=4, num_workers=2)
    trainer(lightning, tmp_path, callbacks=[Writer("batch")]).predict(model(), loader, return_predictions=False)
    assert [indices for _, indices in written] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [prediction for prediction, _ in written] == [indices for _, indices in written]


PROGRAM = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
from indices import LOADERS, Numbered
import lightning
from recorder import Recorder

class Model(Recorder):
    def training_step(self, batch, batch_index):
        return super().training_step(batch[0], batch_index)

    def train_dataloader(self):
        options = {"num_replicas": "auto"} if sys.argv[3] == "sharded" else {}
        return LOADERS[sys.argv[3]](Numbered(), batch_size=4, shuffle=True, seed=3, num_workers=1, **options)

model = Model()
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, default_root_dir=sys.argv[2],
)
trainer.fit(model)
with open(os.path.join(sys.argv[2], f"rank{trainer.global_rank}.json"), "w") as file:
    json.dump(model.seen, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drop-in", "sharded"])
def test_two_ranks_share_every_epoch(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "program.py", str(Path(__file__).parent), str(tmp_path), name]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for epoch in range(3):
        parts = [[index for at, _, batch in rank if at == epoch for index in batch] for rank in ranks]
        assert len(parts[0]) == len(parts[1]) == 12
        assert sorted(parts[0] + parts[1]) == list(range(24))
    assert ranks[0][:3] != ranks[0][3:6]


def test_fabric_leaves_the_order_alone_and_each_epoch_is_another(lightning: Any) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(DataLoader(Numbered(), **OPTIONS))
    assert [seen(loader) for _ in range(3)] == epochs(DataLoader, 3, **OPTIONS)


def test_a_loader_of_fabric_is_saved_and_loaded(lightning: Any, tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    loader = DataLoader(Numbered(), **OPTIONS)
    batches = iter(fabric.setup_dataloaders(loader))
    next(batches)
    fabric.save(tmp_path / "state.ckpt", {"loader": loader.state_dict()})
    rest = seen(batches)
    other = DataLoader(Numbered(), **OPTIONS)
    other.load_state_dict(fabric.load(tmp_path / "state.ckpt")["loader"])
    assert seen(fabric.setup_dataloaders(other)) == rest


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("options", [OPTIONS, OPTIONS | {"seed": None}], ids=["a seed", "no seed"])
def test_fabric_goes_on_in_a_later_epoch(lightning: Any, options: Any, ends: bool, tmp_path: Path) -> None:
    """It saves no count of epochs, and begins with epoch 0 again. Without a seed, later epochs are drawn anew."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    loader, other = (fabric.setup_dataloaders(DataLoader(Numbered(), num_workers=1, **options)) for _ in range(2))
    seen(loader)
    batches = iter(loader)
    for _ in range(STEPS if ends else 2):
        next(batches)
    if ends:
        assert not seen(batches)
    fabric.save(tmp_path / "state.ckpt", {"loader": loader})
    rest = [seen(loader) if ends else seen(batches), seen(loader), seen(loader)]
    torch.manual_seed(7)
    fabric.load(tmp_path / "state.ckpt", {"loader": other})
    again = [seen(other) for _ in rest]
    assert again == rest if options["seed"] is not None else again[0] == rest[0]


def test_loaders_that_are_not_of_torch_are_refused_by_fabric_and_overfit_batches(
    lightning: Any, model: Any, tmp_path: Path
) -> None:
    """Both build another loader from the one they get."""
    loader = ShardedDataLoader(Numbered(), **OPTIONS)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    with pytest.raises(ValueError, match="needs to subclass"):
        trainer(lightning, tmp_path, overfit_batches=2).fit(model(), loader)
