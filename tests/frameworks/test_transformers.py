"""transformers' `Trainer` with a loader of ours: the batches of a plain loop, with resumes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS

LENGTH, EPOCHS, STEPS = 24, 3, 6
OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # no thread that watches progress bars
    from accelerate import PartialState

    PartialState()  # it looks for the devices, once in a process
    return found


class Sentences:
    """Sample i is a sentence of four tokens, the first of which is i."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.tensor([index, 1, 2, 3])
        return {"input_ids": tokens, "labels": tokens}


class KilledError(Exception):
    """The program ends here, as if it had been killed."""


def run(transformers: Any, root: Path, loader: Any, resume: Any = None, stop_at: int | None = None, **how: Any) -> Any:
    """Train a tiny model, and return the first token of each sample of each batch."""
    seen: list[list[int]] = []

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return loader

        def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            if self.state.global_step == stop_at:
                raise KilledError
            seen.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *args, **options)

    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(root),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **({"save_strategy": "no"} | how),
    )
    trainer = Trainer(model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=Sentences())
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KilledError:
        pass
    return seen


def plain(make: Any) -> list[list[int]]:
    loader = make(Sentences(), **OPTIONS)
    return [batch["input_ids"][:, 0].tolist() for _ in range(EPOCHS) for batch in loader]


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_trainer_sees_the_epochs_of_a_plain_loop(
    transformers: Any, make: Any, num_workers: int, tmp_path: Path
) -> None:
    seen = run(transformers, tmp_path, make(Sentences(), num_workers=num_workers, **OPTIONS))
    assert seen == plain(make)
    assert seen[:STEPS] != seen[STEPS : 2 * STEPS]


@BOTH
@pytest.mark.parametrize("stop_at", [4, STEPS, STEPS + 3])
def test_a_resumed_run_trains_on_the_batches_of_one_that_was_not_interrupted(
    transformers: Any, make: Any, stop_at: int, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    killed = run(transformers, tmp_path, make(Sentences(), **OPTIONS), stop_at=stop_at, **saving)
    saved = tmp_path / f"checkpoint-{stop_at}"
    resumed = run(transformers, tmp_path, make(Sentences(), **OPTIONS), resume=str(saved))
    assert killed + resumed == plain(make)
