"""Ignite: an `Engine` runs over the loaders, from any epoch, and after an interruption from a saved state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, epochs, numbers

from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS

OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def engine() -> Any:
    return pytest.importorskip("ignite.engine")


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_engine_sees_the_epochs_of_a_plain_loop(engine: Any, make: Any, num_workers: int) -> None:
    seen: list[list[int]] = []
    engine.Engine(lambda _, batch: seen.append(numbers(batch))).run(
        make(Numbered(), num_workers=num_workers, **OPTIONS), max_epochs=3
    )
    assert seen == sum(epochs(make, 3, **OPTIONS), [])


@BOTH
def test_a_handler_sets_the_epoch(engine: Any, make: Any) -> None:
    seen: list[list[int]] = []
    loader = make(Numbered(), **OPTIONS)
    run = engine.Engine(lambda _, batch: seen.append(numbers(batch)))

    @run.on(engine.Events.EPOCH_STARTED)  # type: ignore[untyped-decorator]
    def choose() -> None:
        loader.set_epoch(run.state.epoch + 4)

    run.run(loader, max_epochs=2)
    expected = epochs(make, 7, **OPTIONS)
    assert seen in (sum(expected[5:7], []), expected[5] + expected[6])


@BOTH
def test_training_goes_on_from_a_saved_state(engine: Any, make: Any) -> None:
    saved: dict[str, Any] = {}
    seen: list[list[int]] = []
    loader = make(Numbered(), **OPTIONS)
    run = engine.Engine(lambda _, batch: seen.append(numbers(batch)))

    @run.on(engine.Events.ITERATION_COMPLETED(once=8))  # type: ignore[untyped-decorator]
    def stop() -> None:
        saved.update(loader.state_dict())
        run.terminate()

    run.run(loader, max_epochs=3)
    again = make(Numbered(), **OPTIONS)
    again.load_state_dict(saved)
    # An epoch of Ignite has as many batches as it is told, or as the first one has.
    for length, count in ((4, 1), (6, 1)):
        engine.Engine(lambda _, batch: seen.append(numbers(batch))).run(again, max_epochs=count, epoch_length=length)
    assert seen == sum(epochs(make, 3, **OPTIONS), [])


@pytest.mark.parametrize("stop_at", [4, 6, 8])
def test_the_deterministic_engine_goes_on_exactly(engine: Any, stop_at: int) -> None:
    """It seeds every epoch itself, and builds the loader again from its attributes."""
    from ignite.engine.deterministic import DeterministicEngine

    def run(state: Any = None) -> tuple[list[list[int]], dict[str, Any]]:
        torch.manual_seed(1)
        seen: list[list[int]] = []
        saved: dict[str, Any] = {}
        trainer = DeterministicEngine(lambda _, batch: seen.append(numbers(batch)))
        trainer.add_event_handler(
            engine.Events.ITERATION_COMPLETED(once=stop_at), lambda: saved.update(trainer.state_dict())
        )
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run(DataLoader(Numbered(), batch_size=4, shuffle=True, num_workers=2), max_epochs=3)
        return seen, saved

    whole, state = run()
    assert run(state)[0] == whole[stop_at:]
