"""Opacus: `make_private` keeps either loader without Poisson sampling. With it, Opacus makes a loader of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, epochs, numbers

pytestmark = IN_FRAMEWORKS

OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def opacus() -> Any:
    return pytest.importorskip("opacus")


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
    seen = []
    for batch in loader:
        seen.append(numbers(batch))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return seen


@BOTH
def test_without_poisson_sampling_the_loader_stays(opacus: Any, make: Any) -> None:
    loader = make(Numbered(), num_workers=2, **OPTIONS)
    model, optimizer, kept = private(opacus, loader, poisson_sampling=False)
    assert kept is loader
    assert train(model, optimizer, kept) == epochs(make, 1, **OPTIONS)[0]


@BOTH
def test_the_batches_of_poisson_sampling_can_be_read_by_both_loaders(opacus: Any, make: Any) -> None:
    model, optimizer, theirs = private(opacus, make(Numbered(), **OPTIONS))
    assert type(theirs).__module__ == "opacus.data_loader"
    ours = make(Numbered(), batch_sampler=theirs.batch_sampler, collate_fn=theirs.collate_fn, num_workers=2)
    found = train(model, optimizer, ours)
    assert len(found) == len(theirs) == 6
    assert all(sorted(set(batch)) == sorted(batch) for batch in found)
