"""What a device gets: bytes, steps and samples per second. Each part is a function of a `Run`.

part(run)  opens its contestants, measures them in turn, round after round -> run.records
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_feeds import Depth, Feed, Images, copied_ahead, ours, settle
from benchmarks.gpu_feeds import torch_loader as torchs
from benchmarks.gpu_run import MB, ROW_BYTES, Run, Values, size_name


def bus(run: Run) -> None:
    """Bytes per second to the device, from memory that the workers have touched before."""
    for nbytes in run.scale.sizes:
        bus_at(run, nbytes)


def bus_at(run: Run, nbytes: int) -> None:
    """The same, for one size of batches."""
    data, size, depth = run.blocks(nbytes)
    name, device, settled = size_name(nbytes), run.device.device, set[Feed]()
    nbytes = size * ROW_BYTES

    def bare() -> Callable[[int], float]:
        copies = run.device.copies(nbytes)
        copies(3)
        return copies

    def take(one: Any) -> Values:
        if not isinstance(one, Feed):
            single = one(3) / 3
            count = max(3, min(20_000, int(run.scale.span / max(single, 1e-6))))
            return count * nbytes / float(one(count))
        warmth: dict[str, float | str] = {}
        if one not in settled:
            settled.add(one)
            warmth = settle(one, nbytes / mmap.PAGESIZE, depth, run.scale.patience)
        found = {f"warm {name}, {what}": value for what, value in warmth.items()}
        return found | {f"bus {name}": run.rate(one, 2 * depth.batches) * nbytes}

    mine, theirs = functools.partial(ours, data, size, depth), functools.partial(torchs, data, size, depth, device)
    run.in_turn(
        f"bus {name}",
        {
            "ours": functools.partial(mine, device=device),
            "ours, threads": functools.partial(mine, threads=True, device=device),
            "torch": theirs,
            "torch, ahead": functools.partial(theirs, copied_ahead),
            "workers": mine,
            "workers, threads": functools.partial(mine, threads=True),
            "limit": bare,
        },
        take,
    )


class Network(torch.nn.Module):
    """Convolutions, in the proportions of a small residual network."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        inputs = 3
        for width, stride in ((32, 2), (64, 2), (128, 2), (128, 1), (128, 1), (256, 2), (256, 1), (256, 1)):
            layers += [torch.nn.Conv2d(inputs, width, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(width)]
            layers.append(torch.nn.ReLU(inplace=True))
            inputs = width
        self.features = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(inputs, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


def trainer(device: torch.device) -> Callable[[Any], None]:
    """A training step, as a function of a batch of `Images`."""
    torch.backends.cudnn.benchmark = True
    model = Network().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> None:
        images, labels = batch
        scaled = images.to(torch.bfloat16).div_(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(scaled), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step(run: Run) -> None:
    """Training steps per second."""
    device, scale = run.device, run.scale
    train = trainer(device.device)
    data = Images(scale.side)

    def fixed(size: int) -> Feed:
        images, labels = data.get_batch(range(size))
        return Feed([[torch.from_numpy(images).to(device.device), torch.from_numpy(labels).to(device.device)]])

    size = scale.images
    while size < 1024:
        seconds = 1 / run.rate(fixed(size), 5, train)
        if seconds >= scale.step:
            break
        size *= 2
    run.say(f"steps of {size} images")
    run.keep("step batch", "size", 0, size)
    depth = run.depth(size * 3 * scale.side**2)
    warm = 2 * depth.batches
    run.in_turn(
        "step",
        {
            "ours": functools.partial(ours, data, size, depth, device=device.device),
            "torch": functools.partial(torchs, data, size, depth, device.device),
            "torch, ahead": functools.partial(torchs, data, size, depth, device.device, copied_ahead),
            "ideal": functools.partial(fixed, size),
        },
        lambda feed: run.rate(feed, warm, train),
    )


def resident(run: Run) -> None:
    """Samples per second of data that stays on the device, and of the same data streamed."""
    from sharded_loader import ArrayDataset, Placement

    rng, count = np.random.default_rng(0), run.scale.samples
    data = ArrayDataset(rng.integers(0, 256, (count, 3, 32, 32), np.uint8), rng.integers(0, 10, count))
    device, depth = run.device.device, Depth(run.workers, 2)
    shuffled: dict[str, Any] = {"shuffle": True, "seed": 0, "device": device, "last_batch": "discard"}

    def kept(size: int) -> Feed:
        feed = ours(data, size, Depth(0, 0), **shuffled | {"device": Placement(device, resident=True)})
        next(feed)
        return feed

    for size in run.scale.gathered:
        run.in_turn(
            f"resident {size}",
            {
                "ours": functools.partial(kept, size),
                "streamed": functools.partial(ours, data, size, depth, **shuffled),
                "inline": functools.partial(ours, data, size, Depth(0, 0), **shuffled),
            },
            lambda feed, size=size: run.rate(feed, 2 * depth.batches) * size,  # type: ignore[misc]
        )


def shards(run: Run) -> None:
    """Bytes per second of batches for one device, in one piece and in two shards."""
    data, size, depth = run.blocks(16 * MB if run.device.is_gpu else 16 * ROW_BYTES)  # an even number of rows
    device = run.device.device
    run.in_turn(
        "shards",
        {
            "ours": functools.partial(ours, data, size, depth, devices=[device, device]),
            "one": functools.partial(ours, data, size, depth, device=device),
        },
        lambda feed: run.rate(feed, 2 * depth.batches) * size * ROW_BYTES,
    )
