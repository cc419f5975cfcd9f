"""Keras with torch's backend: `model.fit`, `evaluate` and `predict` take the drop-in."""

from __future__ import annotations

from typing import Any

import pytest
from indices import IN_FRAMEWORKS, Numbered, epochs, numbers

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def keras() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        found = pytest.importorskip("keras")
    assert found.backend.backend() == "torch"
    return found


def compiled(keras: Any, seen: list[list[int]]) -> Any:
    class Model(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            seen.append(numbers(data))
            return super().train_step(data)

    model = Model([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1e-3), loss="mse", jit_compile=False)
    return model


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fit_trains_on_the_epochs_of_a_plain_loop(keras: Any, num_workers: int) -> None:
    """Keras begins one epoch more, for the shapes of its first batch."""
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    found: list[list[int]] = []
    loader = DataLoader(Numbered(), num_workers=num_workers, **options)
    history = compiled(keras, found).fit(loader, epochs=3, verbose=0)
    assert history.history["loss"][2] < history.history["loss"][0]
    assert found == sum(epochs(DataLoader, 4, **options)[1:], [])


def test_evaluate_and_predict_read_every_sample_once(keras: Any) -> None:
    model = compiled(keras, [])
    expected = sum((2 * i) ** 2 for i in range(10)) / 10
    assert model.evaluate(DataLoader(Numbered(10), batch_size=4), verbose=0) == pytest.approx(expected)
    assert model.predict(DataLoader(Numbered(10), batch_size=4), verbose=0).shape == (10, 1)


def test_a_loader_that_is_not_of_torch_is_not_recognized(keras: Any) -> None:
    with pytest.raises(ValueError, match="Unrecognized data type"):
        compiled(keras, []).fit(ShardedDataLoader(Numbered(), 4), verbose=0)
