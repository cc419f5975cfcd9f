"""Two ranks on gloo: a training that goes on from a checkpoint has the batches of one that was not interrupted.

    torchrun test_two_ranks.py LIBRARY FOLDER        trains with each loader, and saves after the steps in STOPS
    torchrun test_two_ranks.py LIBRARY FOLDER resume trains from each of these checkpoints, after other random numbers

Each rank writes the batches that it has trained on: {loader: {step it began with: [[sample, ...], ...]}}. Checkpoints
are of the middle of the first and the second epoch, and of the last step of each. The expected order is that of torch's
loader with a `DistributedSampler`, where there is one.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from indices import IN_FRAMEWORKS, Numbered, numbers, recorder
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS

LENGTH, SIZE, EPOCHS = 48, 4, 3
STEPS = LENGTH // SIZE // 2
STOPS = (STEPS // 2, STEPS, STEPS + 2, 2 * STEPS)
SHUFFLED: dict[str, Any] = {"batch_size": SIZE, "shuffle": True}


class Run:
    """One training: what it reads, and where its checkpoints lie.

    It loads the checkpoint after ``start`` steps; 0: none.
    """

    def __init__(self, folder: Path, loader: str, start: int) -> None:
        self.folder, self.loader, self.start, self.step = folder, loader, start, start
        self.seen: list[list[int]] = []
        self.epoch, self.saves = start // STEPS, False  # of the next step; whether this one has to be saved

    def note(self, batch: Any) -> bool:
        """Count a step; whether it has to be saved."""
        self.seen.append(numbers(batch))
        self.step += 1
        self.epoch, self.saves = self.step // STEPS, not self.start and self.step in STOPS
        return self.saves

    def checkpoint(self, step: int | str) -> str:
        return str(self.folder / f"{self.loader}-{step}")

    def save(self, **parts: Any) -> None:
        """Save states of this rank 0; all ranks load them."""
        if dist.get_rank() == 0:
            torch.save(parts, self.checkpoint(self.step))

    def load(self) -> Any:
        return torch.load(self.checkpoint(self.start), weights_only=False) if self.start else None


def dealt() -> Any:
    """The sampler of torch for ranks."""
    return DistributedSampler(Numbered(LENGTH), seed=3)  # type: ignore[arg-type]


def train(model: Any, batch: Any) -> None:
    """A step of a model on all ranks: none of them can be ahead."""
    model(batch[0]).mean().backward()


WITH_TORCH: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.utils.data.DataLoader(Numbered(LENGTH), SIZE, sampler=dealt()),  # type: ignore[arg-type]
    "drop-in": lambda: DataLoader(Numbered(LENGTH), SIZE, sampler=dealt()),
    "drop-in, workers": lambda: DataLoader(Numbered(LENGTH), SIZE, sampler=dealt(), num_workers=1),
    "drop-in, workers that stay": lambda: DataLoader(
        Numbered(LENGTH), SIZE, sampler=dealt(), num_workers=1, persistent_workers=True, seed=3
    ),
    "sharded, that sampler": lambda: ShardedDataLoader(Numbered(LENGTH), SIZE, sampler=dealt(), num_workers=1),
    "sharded": lambda: ShardedDataLoader(Numbered(LENGTH), seed=3, num_replicas="auto", num_workers=1, **SHUFFLED),
}


def with_torch(run: Run) -> None:
    """torch alone: ``set_epoch``, and a loop."""
    loader, model = WITH_TORCH[run.loader](), DistributedDataParallel(torch.nn.Linear(1, 1))
    state = run.load()
    if state is not None:
        loader.load_state_dict(state["loader"])
    for epoch in range(run.epoch, EPOCHS):
        (loader if run.loader == "sharded" else loader.sampler).set_epoch(epoch)
        for batch in loader:
            train(model, batch)
            if run.note(batch) and run.loader != "torch":
                run.save(loader=loader.state_dict())


WITH_FABRIC: dict[str, Callable[[], Any]] = {
    "drop-in": lambda: DataLoader(Numbered(LENGTH), num_workers=1, **SHUFFLED),
    "drop-in, a seed": lambda: DataLoader(Numbered(LENGTH), seed=3, **SHUFFLED),
    "drop-in, a sampler": lambda: DataLoader(Numbered(LENGTH), SIZE, sampler=dealt(), num_workers=1),
}


def with_fabric(run: Run) -> None:
    """Fabric counts the epochs itself. A checkpoint of an epoch's end is saved in the loop, or behind it."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, loader = fabric.setup(torch.nn.Linear(1, 1)), fabric.setup_dataloaders(WITH_FABRIC[run.loader]())
    state = {"loader": loader}
    if run.start:
        fabric.load(run.checkpoint(run.start), state)
    saves_inside = run.loader == "drop-in, a sampler"
    first = (run.start - 1) // STEPS if run.start and saves_inside else run.epoch  # what is left of it is nothing
    for _ in range(first, EPOCHS):
        for batch in loader:
            fabric.backward(model(batch[0]).mean())
            if run.note(batch) and (saves_inside or run.step % STEPS):
                fabric.save(run.checkpoint(run.step), state)
        if run.saves and not saves_inside:
            fabric.save(run.checkpoint(run.step), state)


WITH_LIGHTNING: dict[str, Callable[[], Any]] = {
    "drop-in": WITH_FABRIC["drop-in"],
    "drop-in, a seed": WITH_FABRIC["drop-in, a seed"],
    "sharded": WITH_TORCH["sharded"],
}


def with_lightning(run: Run) -> None:
    """Lightning deals the samples of a loader of torch's class to the ranks itself."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(recorder()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_index: int) -> Any:
            run.note(batch)
            return self.layer(batch[0]).mean()

        def train_dataloader(self) -> Any:
            return WITH_LIGHTNING[run.loader]()

    saving = ModelCheckpoint(run.folder, f"{run.loader}-{{step}}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = {"enable_checkpointing": not run.start, "callbacks": [] if run.start else [saving]}
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy="ddp", **quiet, **saves)
    trainer.fit(Model(), ckpt_path=run.checkpoint(f"step={run.start}.ckpt") if run.start else None)


WITH_BOTH: dict[str, Callable[[], Any]] = {
    "drop-in": lambda: DataLoader(Numbered(LENGTH), num_workers=2, **SHUFFLED),
    "drop-in, a seed": lambda: DataLoader(Numbered(LENGTH), seed=3, num_workers=1, **SHUFFLED),
    "sharded": lambda: ShardedDataLoader(Numbered(LENGTH), seed=3, num_workers=2, **SHUFFLED),
}


def with_accelerate(run: Run) -> None:
    """Accelerate saves and loads the states of the loaders that it knows."""
    from accelerate import Accelerator

    from sharded_loader.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    loader = prepare(WITH_BOTH[run.loader](), accelerator)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    if run.start:
        accelerator.load_state(run.checkpoint(run.start))
    for epoch in range(run.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            accelerator.backward(model(batch[0]).mean())
            if run.note(batch):
                accelerator.save_state(run.checkpoint(run.step))
    accelerator.free_memory()


def with_trainer(run: Run) -> None:
    """transformers' `Trainer` leaves out the batches that it has trained on."""
    import transformers

    from sharded_loader.integrations.accelerate import prepare

    class Model(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return {"loss": super().forward(x.reshape(-1, 1)).mean()}

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return prepare(WITH_BOTH[run.loader](), self.accelerator)

        def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            run.note(inputs)
            return super().training_step(model, {"x": inputs[0]}, *args, **options)

    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    saves: dict[str, Any] = {"save_strategy": "no"} if run.start else {"save_strategy": "steps", "save_steps": 1}
    arguments = transformers.TrainingArguments(
        run.checkpoint(0), per_device_train_batch_size=SIZE, num_train_epochs=EPOCHS, **quiet, **saves
    )
    trainer = Trainer(model=Model(1, 1), args=arguments, train_dataset=Numbered(LENGTH))
    trainer.train(resume_from_checkpoint=f"{run.checkpoint(0)}/checkpoint-{run.start}" if run.start else None)


def with_ignite(run: Run, deterministic: bool = False) -> None:
    """An `Engine` tells the sampler the epoch. A deterministic one makes the loader again, and leaves batches out."""
    from ignite.engine import Engine, Events
    from ignite.engine.deterministic import DeterministicEngine

    loader, model = WITH_TORCH[run.loader](), DistributedDataParallel(torch.nn.Linear(1, 1))
    loads = not deterministic and run.loader != "torch"

    def step(engine: Any, batch: Any) -> None:
        train(model, batch)
        if run.note(batch):
            run.save(
                engine={**engine.state_dict(), "iteration": run.step}, loader=loader.state_dict() if loads else None
            )

    engine = DeterministicEngine(step) if deterministic else Engine(step)
    told = loader if isinstance(loader, ShardedDataLoader) else loader.sampler
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: told.set_epoch(engine.state.epoch - 1))
    state = run.load()
    if state is not None:
        engine.load_state_dict(state["engine"])
        if loads:
            loader.load_state_dict(state["loader"])
    engine.run(loader, max_epochs=EPOCHS)


DROP_INS = [name for name in WITH_TORCH if name.startswith("drop-in")]

LIBRARIES: dict[str, tuple[Callable[[Run], None], list[str]]] = {
    "torch": (with_torch, list(WITH_TORCH)),
    "fabric": (with_fabric, list(WITH_FABRIC)),
    "lightning": (with_lightning, list(WITH_LIGHTNING)),
    "accelerate": (with_accelerate, list(WITH_BOTH)),
    "transformers": (with_trainer, list(WITH_BOTH)),
    "ignite": (with_ignite, list(WITH_TORCH)),
    "ignite, deterministic": (functools.partial(with_ignite, deterministic=True), ["torch", *DROP_INS]),
}
"""What trains, and with which loaders."""


def main(library: str, folder: str, *resume: str) -> None:
    """Train with every loader, and write what each training has read."""
    warnings.simplefilter("ignore")
    if library not in ("fabric", "lightning"):
        dist.init_process_group("gloo")
    how, loaders = LIBRARIES[library]
    starts = STOPS if resume else (0,)
    found: dict[str, dict[int, list[list[int]]]] = {}
    for loader in loaders:
        for start in starts if loader != "torch" or not resume else ():
            torch.manual_seed(7 if resume else 1)
            run = Run(Path(folder), loader, start)
            how(run)
            found.setdefault(loader, {})[start] = run.seen
            dist.barrier()
    kind = "resumed" if resume else "whole"
    Path(folder, f"{kind}{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


NEEDED = {"fabric": "lightning"} | {name: name for name in ("lightning", "accelerate", "transformers", "ignite")}


def launched(library: str, folder: Path, *resume: str) -> list[dict[str, dict[str, Any]]]:
    """What each rank has read."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [__file__, library, str(folder), *resume]
    done = subprocess.run([sys.executable, *launch, *program], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
    kind = "resumed" if resume else "whole"
    return [json.loads((folder / f"{kind}{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_ranks_go_on_exactly_in_every_epoch(library: str, tmp_path: Path) -> None:
    needed = NEEDED.get(library.partition(",")[0], "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    whole, resumed = launched(library, tmp_path), launched(library, tmp_path, "resume")
    for loader in LIBRARIES[library][1]:
        ranks = [rank[loader]["0"] for rank in whole]
        for epoch in range(EPOCHS):
            steps = slice(epoch * STEPS, (epoch + 1) * STEPS)
            parts = [sum(rank[steps], []) for rank in ranks]
            assert [len(part) for part in parts] == [STEPS * SIZE] * 2
            assert sorted(parts[0] + parts[1]) == list(range(LENGTH))
        assert ranks[0][:STEPS] != ranks[0][STEPS : 2 * STEPS]
        if "torch" in whole[0] and loader != "sharded":
            assert ranks == [rank["torch"]["0"] for rank in whole]
        for before, after in zip(ranks, resumed, strict=True):
            assert loader == "torch" or after[loader] == {str(stop): before[stop:] for stop in STOPS}, loader


if __name__ == "__main__":
    main(*sys.argv[1:])
