"""transformers' `Trainer` with a loader of ours: the batches of a plain loop, with resumes too.

Packed rows hold what its collator makes of the same documents, and train a model as they do alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, LongStream, Stream

from sharded_loader import PackSampler, ShardedDataLoader, SimpleDataset, sample_rng
from sharded_loader.batchify import Pack

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


def sentence(index: int, third: int = 2) -> dict[str, Any]:
    """A sentence of four tokens, the first of which is the sample's index."""
    tokens = torch.tensor([index, 1, third, 3])
    return {"input_ids": tokens, "labels": tokens}


SENTENCES = SimpleDataset(range(LENGTH)).transform(sentence)
DRAWN = SimpleDataset(range(LENGTH)).transform(lambda index: sentence(index, int(sample_rng().integers(32))))
"""The third token of a sample is drawn anew in each epoch."""


class KilledError(Exception):
    """The program ends here, as if it had been killed."""


def run(
    transformers: Any,
    root: Path,
    loader: Any,
    resume: Any = None,
    stop_at: int | None = None,
    prepared: bool = False,
    tokens: Any = 0,
    **how: Any,
) -> Any:
    """Train a tiny model, and return the first token of each sample of each batch."""
    from sharded_loader.integrations.accelerate import prepare

    seen: list[list[int]] = []

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return prepare(loader, self.accelerator) if prepared else loader

        def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            if self.state.global_step == stop_at:
                raise KilledError
            seen.append(inputs["input_ids"][:, tokens].tolist())
            return super().training_step(model, inputs, *args, **options)

    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    how = {"save_strategy": "no", "num_train_epochs": EPOCHS, "per_device_train_batch_size": 4} | quiet | how
    arguments = transformers.TrainingArguments(str(root), **how)
    trainer = Trainer(model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=SENTENCES)
    with contextlib.suppress(KilledError):
        trainer.train(resume_from_checkpoint=resume)
    return seen


def plain(make: Any) -> list[list[int]]:
    loader = make(SENTENCES, **OPTIONS)
    return [batch["input_ids"][:, 0].tolist() for _ in range(EPOCHS) for batch in loader]


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_trainer_sees_the_epochs_of_a_plain_loop(
    transformers: Any, make: Any, num_workers: int, tmp_path: Path
) -> None:
    seen = run(transformers, tmp_path, make(SENTENCES, num_workers=num_workers, **OPTIONS))
    assert seen == plain(make)
    assert seen[:STEPS] != seen[STEPS : 2 * STEPS]


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


@BOTH
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("stop_at", [4, STEPS, STEPS + 3])
def test_a_resumed_run_trains_on_the_batches_of_one_that_was_not_interrupted(
    transformers: Any, make: Any, prepared: bool, stop_at: int, tmp_path: Path
) -> None:
    load = lambda: make(SENTENCES, **OPTIONS)  # noqa: E731
    killed = run(transformers, tmp_path, load(), stop_at=stop_at, prepared=prepared, **SAVING)
    saved = str(tmp_path / f"checkpoint-{stop_at}")
    resumed = run(transformers, tmp_path, load(), resume=saved, prepared=prepared)
    assert killed + resumed == plain(make)


@BOTH
def test_random_numbers_go_on_too(transformers: Any, make: Any, tmp_path: Path) -> None:
    """They would not if torch's loader read the rest of the epoch."""

    def train(**how: Any) -> Any:
        loader = make(DRAWN, num_workers=1, **OPTIONS)
        return run(transformers, tmp_path, loader, prepared=True, tokens=slice(0, 3, 2), **how)

    whole, killed = train(), train(stop_at=STEPS + 3, **SAVING)
    assert killed + train(resume=str(tmp_path / f"checkpoint-{STEPS + 3}")) == whole


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop_at", [4, STEPS, STEPS + 3])
def test_iterable_data_is_resumed_exactly(
    transformers: Any, make: Any, num_workers: int, stop_at: int, tmp_path: Path
) -> None:
    def train(**how: Any) -> Any:
        # One part: the length of a loader of several is not known, and Trainer resumes by the length.
        loader = make(LongStream(sentence), batch_size=4, num_workers=num_workers, streams=1)
        return run(transformers, tmp_path, loader, prepared=True, **how)

    whole, killed = train(), train(stop_at=stop_at, **SAVING)
    assert len(whole) == EPOCHS * STEPS
    assert whole[:STEPS] != whole[STEPS : 2 * STEPS]
    assert killed + train(resume=str(tmp_path / f"checkpoint-{stop_at}")) == whole


@BOTH
def test_iterable_data_without_a_length_is_resumed_in_the_first_epoch_only(
    transformers: Any, make: Any, tmp_path: Path
) -> None:
    def train(**how: Any) -> Any:
        return run(transformers, tmp_path, make(Stream(sentence), batch_size=4), prepared=True, max_steps=9, **how)

    whole = train(**SAVING)
    assert whole[:4] + train(resume=str(tmp_path / "checkpoint-4")) == whole
    with pytest.raises(ValueError, match="has only 6"):
        train(resume=str(tmp_path / "checkpoint-8"))


@BOTH
def test_iterable_data_is_not_resumed_with_torchs_loader(transformers: Any, make: Any, tmp_path: Path) -> None:
    def train(**how: Any) -> Any:
        return run(transformers, tmp_path, make(LongStream(sentence), batch_size=4), **how)

    train(stop_at=4, **SAVING)
    with pytest.raises(TypeError, match=r"prepare\(\) of sharded_loader"):
        train(resume=str(tmp_path / "checkpoint-4"))


# -- packed rows -------------------------------------------------------------------------------------------------------

LENGTHS = np.random.default_rng(0).integers(2, 30, 60)


def documents(labels: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    found: list[dict[str, Any]] = [{"input_ids": rng.integers(3, 32, length).tolist()} for length in LENGTHS]
    for document in found if labels else ():
        document["labels"] = [-100] * (len(document["input_ids"]) // 2)
        document["labels"] += document["input_ids"][len(document["labels"]) :]
    return found


@pytest.mark.parametrize("labels", [False, True])
def test_the_values_are_those_of_the_flattening_collator(transformers: Any, labels: bool) -> None:
    data = documents(labels)
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    sampler = PackSampler(LENGTHS, tokens=32, rows=4, seed=0)
    loader = ShardedDataLoader(data, batch_sampler=sampler, batchify_fn=Pack(tokens=32))
    for indices, batch in zip(sampler.iter_epoch(0), loader, strict=True):
        expected = flatten([data[index] for index in indices])
        is_real = batch["segment_ids"] > 0
        for name in ("input_ids", "labels", "position_ids"):
            assert batch[name][is_real].equal(expected[name][0]) and batch[name].dtype == expected[name].dtype
        assert batch["cu_seqlens"].equal(expected["cu_seq_lens_q"])
        assert (batch["labels"][~is_real] == -100).all()


def test_packed_rows_give_the_loss_of_the_documents_alone(transformers: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=1,
        use_cache=False,  # with a cache, transformers does not look for documents in a row
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    data = documents(labels=False)
    sampler = PackSampler(LENGTHS, tokens=32, rows=4, seed=0)
    loader = ShardedDataLoader(data, batch_sampler=sampler, batchify_fn=Pack(tokens=32))
    batch, indices = next(iter(loader)), next(sampler.iter_epoch(0))
    with torch.no_grad():
        packed = model(**{name: batch[name] for name in ("input_ids", "position_ids", "labels")}).loss
        alone = [torch.tensor([data[index]["input_ids"]]) for index in indices]
        losses = [model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) for ids in alone]
    mean = torch.stack(losses).sum() / sum(ids.shape[1] - 1 for ids in alone)
    torch.testing.assert_close(packed, mean)
