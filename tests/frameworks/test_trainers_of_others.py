"""fastai, Ignite, Keras (with torch's backend), Opacus and skorch train on the loaders as a plain loop does."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, epochs, numbers, seen

from sharded_loader import LoaderStats, ShardedDataLoader
from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS

OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}


def library(name: str) -> Any:
    """A fixture, which is the library where it is installed."""

    @pytest.fixture(scope="module")
    def found() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KERAS_BACKEND", "torch")
            return pytest.importorskip(name)

    return found


fastai, ignite, keras = map(library, ("fastai.learner", "ignite.engine", "keras"))
opacus, skorch = map(library, ("opacus", "skorch"))

# -- the epochs of a plain loop ----------------------------------------------------------------------------------------


def learner(fastai: Any, make: Any, **options: Any) -> Any:
    from fastai.data.core import DataLoaders

    loaders = DataLoaders(make(Numbered(), **options), make(Numbered(8), batch_size=4))
    made = fastai.Learner(loaders, torch.nn.Linear(1, 1), loss_func=torch.nn.MSELoss())
    made.logger = lambda *_: None
    return made


def with_fastai(fastai: Any, make: Any, found: list[list[int]], **options: Any) -> None:
    class Note(fastai.Callback):  # type: ignore[misc]
        def before_batch(self) -> None:
            if self.training:
                found.append(numbers(self.xb))

    made = learner(fastai, make, **options)
    made.add_cb(Note())
    made.fit(3, lr=1e-4)
    assert seen(made.dls.valid) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def with_ignite(ignite: Any, make: Any, found: list[list[int]], **options: Any) -> None:
    ignite.Engine(lambda _, batch: found.append(numbers(batch))).run(make(Numbered(), **options), max_epochs=3)


def compiled(keras: Any, found: list[list[int]]) -> Any:
    assert keras.backend.backend() == "torch"

    class Model(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            found.append(numbers(data))
            return super().train_step(data)

    model = Model([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1e-3), loss="mse", jit_compile=False)
    return model


def with_keras(keras: Any, make: Any, found: list[list[int]], **options: Any) -> None:
    history = compiled(keras, found).fit(make(Numbered(), **options), epochs=3, verbose=0)
    assert history.history["loss"][2] < history.history["loss"][0]


def private(opacus: Any, loader: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(1, 1)
    found: tuple[Any, Any, Any] = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    return found


def train(model: Any, optimizer: Any, loader: Any) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(numbers(batch))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return found


def with_opacus(opacus: Any, make: Any, found: list[list[int]], **options: Any) -> None:
    loader = make(Numbered(), **options)
    model, optimizer, kept = private(opacus, loader, poisson_sampling=False)
    assert kept is loader
    for _ in range(3):
        found += train(model, optimizer, kept)


X = np.arange(24, dtype=np.float32).reshape(-1, 1)


def net(skorch: Any, make: Any, found: list[list[int]], **options: Any) -> Any:
    class Net(skorch.NeuralNetRegressor):  # type: ignore[misc]
        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            found.append(numbers(batch))
            return super().train_step(batch, **fit_params)

    usual = {"batch_size": 4, "max_epochs": 3, "lr": 1e-3, "train_split": None, "verbose": 0}
    return Net(torch.nn.Linear(1, 1), iterator_train=make, iterator_valid=make, **usual, **options)


def with_skorch(skorch: Any, make: Any, found: list[list[int]], **options: Any) -> None:
    """skorch makes one loader for a fit, and iterates over it once per epoch."""
    del options["batch_size"]
    net(skorch, make, found, **{f"iterator_train__{name}": value for name, value in options.items()}).fit(X, 2 * X)


TRAINERS: dict[str, Callable[..., None]] = {
    "fastai": with_fastai,
    "ignite": with_ignite,
    "keras": with_keras,
    "opacus": with_opacus,
    "skorch": with_skorch,
}


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("library", TRAINERS)
def test_it_trains_on_the_epochs_of_a_plain_loop(
    library: str, make: Any, num_workers: int, request: pytest.FixtureRequest
) -> None:
    if library == "keras" and make is ShardedDataLoader:
        pytest.skip("Keras takes loaders of torch only")
    found: list[list[int]] = []
    TRAINERS[library](request.getfixturevalue(library), make, found, num_workers=num_workers, **OPTIONS)
    expected = epochs(make, 4, **OPTIONS)
    if library == "keras":  # it begins one epoch before, for the shapes of the first batch
        del expected[0]
    assert found == sum(expected[:3], [])
    assert found[:6] != found[6:12]


# -- what else each of them does ---------------------------------------------------------------------------------------


@BOTH
def test_batches_are_shown_and_learners_exported_with_loaders_of_fastai_only(
    fastai: Any, make: Any, tmp_path: Path
) -> None:
    made = learner(fastai, make, batch_size=4)
    with pytest.raises(AttributeError, match="show_batch"):
        made.dls.show_batch()
    with pytest.raises(AttributeError, match="new"):
        made.export(tmp_path / "learner.pkl")


def test_keras_evaluates_and_predicts_every_sample_once_with_loaders_of_torch_only(keras: Any) -> None:
    model = compiled(keras, [])
    expected = sum((2 * i) ** 2 for i in range(10)) / 10
    assert model.evaluate(DataLoader(Numbered(10), batch_size=4), verbose=0) == pytest.approx(expected)
    assert model.predict(DataLoader(Numbered(10), batch_size=4), verbose=0).shape == (10, 1)
    with pytest.raises(ValueError, match="Unrecognized data type"):
        model.fit(ShardedDataLoader(Numbered(), 4), verbose=0)


@BOTH
def test_with_poisson_sampling_opacus_makes_a_loader_whose_batches_ours_can_read(opacus: Any, make: Any) -> None:
    model, optimizer, theirs = private(opacus, make(Numbered(), **OPTIONS))
    assert type(theirs).__module__ == "opacus.data_loader"
    ours = make(Numbered(), batch_sampler=theirs.batch_sampler, collate_fn=theirs.collate_fn, num_workers=2)
    found = train(model, optimizer, ours)
    assert len(found) == len(theirs) == 6
    assert all(sorted(set(batch)) == sorted(batch) for batch in found)


@BOTH
def test_predictions_of_skorch_are_in_order(skorch: Any, make: Any) -> None:
    trained = net(skorch, make, [], iterator_valid__num_workers=2).initialize()
    expected = trained.module_(torch.from_numpy(X)).detach().numpy()
    assert np.allclose(trained.predict(X), expected)


# -- the numbers of an epoch in TensorBoard, Lightning and tqdm --------------------------------------------------------


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
