"""fastai: `DataLoaders` takes the drop-in, and a `Learner` fits on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, epochs, numbers, seen

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def fastai() -> Any:
    pytest.importorskip("fastai")
    from fastai import learner

    return learner


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_learner_fits_on_the_epochs_of_a_plain_loop(fastai: Any, make: Any, num_workers: int) -> None:
    from fastai.data.core import DataLoaders

    found: list[list[int]] = []

    class Note(fastai.Callback):  # type: ignore[misc]
        def before_batch(self) -> None:
            if self.training:
                found.append(numbers(self.xb))

    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    loaders = DataLoaders(make(Numbered(), num_workers=num_workers, **options), make(Numbered(8), batch_size=4))
    learner = fastai.Learner(loaders, torch.nn.Linear(1, 1), loss_func=torch.nn.MSELoss(), cbs=Note())
    learner.logger = lambda *_: None
    learner.fit(3, lr=1e-4)
    assert found == sum(epochs(make, 3, **options), [])
    assert seen(loaders.valid) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@BOTH
def test_batches_are_shown_and_learners_exported_with_loaders_of_fastai_only(
    fastai: Any, make: Any, tmp_path: Path
) -> None:
    from fastai.data.core import DataLoaders

    loaders = DataLoaders(make(Numbered(), batch_size=4), make(Numbered(8), batch_size=4))
    learner = fastai.Learner(loaders, torch.nn.Linear(1, 1), loss_func=torch.nn.MSELoss())
    with pytest.raises(AttributeError, match="show_batch"):
        loaders.show_batch()
    with pytest.raises(AttributeError, match="new"):
        learner.export(tmp_path / "learner.pkl")
