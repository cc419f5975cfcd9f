"""The training run: its accuracy, what it depends on, and how it goes on from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sharded_loader.demo.train import CheckpointFile, Options, train_and_test

CPU_TWICE = (torch.device("cpu"), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_accuracy_is_no_luck(seed: int) -> None:
    assert train_and_test(Options(CPU_TWICE, seed=seed)).accuracy > 0.97


def trained(pool: str, workers: int, seed: int = 5) -> tuple[float, tuple[float, ...]]:
    report = train_and_test(Options(CPU_TWICE, pool=pool, workers=workers, epochs=2, seed=seed))
    return report.accuracy, report.losses


@pytest.mark.slow
def test_same_seed_same_training_whoever_reads() -> None:
    inline = trained("inline", 0)
    for pool, workers in (("thread", 3), ("process", 1), ("process", 2)):
        assert trained(pool, workers) == inline, (pool, workers)
    assert trained("inline", 0, seed=6) != inline


@pytest.mark.slow
def test_the_demo_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic
    trained("inline", 0)
    assert before == (torch.get_num_threads(), torch.backends.cudnn.deterministic)


def test_each_batch_is_shown_once() -> None:
    shown: list[tuple[int, float]] = []
    report = train_and_test(
        Options(CPU_TWICE, pool="inline", workers=0, epochs=2), lambda epoch, loss: shown.append((epoch, loss))
    )
    assert len(shown) == report.stats.batches
    assert [epoch for epoch, _ in shown] == sorted(epoch for epoch, _ in shown)


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    checkpoint = CheckpointFile(tmp_path / "checkpoint.pt", save_at=30)
    whole = train_and_test(Options(CPU_TWICE, pool="inline", workers=0, epochs=2), checkpoint=checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    shown: list[int] = []
    rest = train_and_test(
        Options(CPU_TWICE, pool="thread", workers=2, epochs=2),
        lambda epoch, loss: shown.append(epoch),
        CheckpointFile(checkpoint.path),
    )
    assert (rest.accuracy, rest.losses) == (whole.accuracy, whole.losses)
    assert shown == [1] * 16  # 46 steps in all
