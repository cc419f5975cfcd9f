"""skorch: `iterator_train` and `iterator_valid` are either loader; `fit` and `predict` work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS

X = np.arange(24, dtype=np.float32).reshape(-1, 1)
Y = 2 * X


@pytest.fixture(scope="module", autouse=True)
def skorch() -> Any:
    return pytest.importorskip("skorch")


def net(skorch: Any, make: Any, seen: list[list[int]], **options: Any) -> Any:
    class Net(skorch.NeuralNetRegressor):  # type: ignore[misc]
        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            seen.append([int(number) for number in batch[0].flatten()])
            return super().train_step(batch, **fit_params)

    return Net(
        torch.nn.Linear(1, 1),
        batch_size=4,
        max_epochs=3,
        lr=1e-3,
        train_split=None,
        verbose=0,
        iterator_train=make,
        iterator_valid=make,
        **options,
    )


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_fit_trains_on_the_epochs_of_a_plain_loop(skorch: Any, make: Any, num_workers: int) -> None:
    seen: list[list[int]] = []
    net(
        skorch,
        make,
        seen,
        iterator_train__shuffle=True,
        iterator_train__seed=3,
        iterator_train__num_workers=num_workers,
    ).fit(X, Y)
    # skorch makes one loader for a fit, and iterates over it once per epoch.
    loader = make(X, batch_size=4, shuffle=True, seed=3)
    assert seen == [[int(number) for number in batch.flatten()] for _ in range(3) for batch in loader]
    assert seen[:6] != seen[6:12]


@BOTH
def test_predictions_are_in_order(skorch: Any, make: Any) -> None:
    trained = net(skorch, make, [], iterator_valid__num_workers=2).initialize()
    expected = trained.module_(torch.from_numpy(X)).detach().numpy()
    assert np.allclose(trained.predict(X), expected)
