"""TensorBoard, Lightning and tqdm take the numbers of an epoch as they are."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from indices import BOTH, IN_FRAMEWORKS

from sharded_loader import LoaderStats, ShardedDataLoader

pytestmark = IN_FRAMEWORKS


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of a folder, as TensorBoard itself reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder)).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@BOTH
@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "tensorboardX"])
def test_tensorboard_has_every_number_of_every_epoch(make: Any, module: str, tmp_path: Path) -> None:
    if module == "torch.utils.tensorboard":
        pytest.importorskip("tensorboard")
    loader = make(range(10), 4)
    writer = pytest.importorskip(module).SummaryWriter(str(tmp_path))
    for epoch in range(2):
        list(loader)
        for name, value in loader.stats(epoch).as_dict(prefix="data/").items():
            writer.add_scalar(name, value, epoch)
    writer.close()
    found = scalars(tmp_path)
    assert set(found) >= set(LoaderStats().as_dict(prefix="data/"))
    assert found["data/samples"] == [(0, 10.0), (1, 10.0)]
    for name, values in found.items():
        for epoch, value in values:
            assert value == pytest.approx(loader.stats(epoch).as_dict(prefix="data/")[name])


@pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::Warning:torch", "ignore:.*num_workers.*")
def test_lightning_logs_every_number_in_one_line(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    import recorder

    loader = ShardedDataLoader(range(10), 4)
    logged = []

    class Model(recorder.Recorder):
        def on_train_epoch_end(self) -> None:
            self.log_dict(loader.stats(self.current_epoch).as_dict(prefix="data/"))

        def on_train_end(self) -> None:
            logged.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path, **options
    )
    trainer.fit(Model(), loader)
    expected = loader.stats(1).as_dict(prefix="data/")
    assert [{name: one[name] for name in expected} for one in logged] == [pytest.approx(expected)]


@BOTH
def test_a_progress_bar_shows_the_numbers_while_the_epoch_runs(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that stays
    screen, shown = io.StringIO(), []
    loader = make(range(10), 4)
    with tqdm(loader, file=screen, mininterval=0, miniters=1) as bar:
        assert bar.total == 3
        for _batch in bar:
            bar.set_postfix(loader.stats(0).as_dict("batches", "waiting_share"))
            shown.append(bar.postfix)
    assert [text.partition(",")[0] for text in shown] == ["batches=1", "batches=2", "batches=3"]
    assert "waiting_share=" in screen.getvalue()
