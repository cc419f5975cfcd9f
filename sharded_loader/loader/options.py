"""Options of a loader that it takes as one object, and the names of torch that it knows.

    device=Placement("cuda", resident=True)    -> what happens to batches on their devices
    on_error=OnError("skip", limit=10)         -> what happens to samples that cannot be read
    collate_fn=, timeout=, ...                 -> `OtherNames`: arguments of torch's ``DataLoader``, by name only

Owns nothing. What can go wrong: options that contradict each other, which the loader's constructor rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal

import torch
from typing_extensions import TypedDict

from sharded_loader.base.checks import check_int
from sharded_loader.devices.names import DeviceLike
from sharded_loader.engine.messages import ErrorAction

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch = TypeVar("Batch", default=Any)
else:
    from typing import TypeVar

    Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Placement:
    """The devices of batches, and what happens to the batches there: a value of ``device=`` or ``devices=``.

    Args:
        device: As the loader's argument: one device for ``device=``, a list or ``"auto"`` for ``devices=``. None: the
            batches are where the other arguments say, in host memory by default.
        shard_weights: The shares of the shards, such as ``[2, 1]``. A positive weight gets at least one sample, while
            there are enough samples. Weights of 0 must come last. `ShardedBatchSampler` follows the same rule.
        resident: Which rows to keep on the devices, which then gather batches, without workers: True (all), a fraction
            such as 0.6, or ``"auto"`` (those that fit). The other rows of a batch are sent. The dataset is an array,
            a tensor, a ``TensorDataset``, an `ArrayDataset`, or a part of one. With True or a fraction, any other
            dataset is an error, and too little room a warning. ``"auto"`` looks for room again after the first step.
        device_transform: A function ``fn(batch)`` or ``fn(batch, rng)`` that each batch (each shard) goes through on
            its device, ahead of your program. ``rng`` is a NumPy generator, keyed by the seed, the epoch, the batch and
            the shard. The function must return dense tensors. Without devices it runs on the CPU.
        host_fields: The fields of a batch that stay in host memory: keys of a dict, names of fields, or numbers in a
            tuple or list.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> placement = Placement(shard_weights=[2, 1])
        >>> loader = ShardedDataLoader(range(6), 3, num_shards=2, device=placement)
        >>> [[shard.tolist() for shard in shards] for shards in loader]
        [[[0, 1], [2]], [[3, 4], [5]]]
    """

    device: str | torch.device | Sequence[DeviceLike] | None = None
    shard_weights: Sequence[float] | None = None
    resident: bool | float | Literal["auto"] = False
    device_transform: Callable[..., Any] | None = None
    host_fields: Sequence[str | int] | str | int | None = None


@dataclass(frozen=True)
class OnError:
    """What to do with samples that raise an error, and how many of them are allowed: a value of ``on_error=``.

    Args:
        action: ``"skip"``, ``"replace"`` or a function ``(SampleError) -> sample``, as the loader's ``on_error``.
        limit: The number of samples that may be skipped or replaced in each epoch of this process. One more raises
            `TooManySkippedError`. None: any number.

    Raises:
        ValueError: ``limit`` is negative, or the action is ``"raise"``, which skips nothing.
        TypeError: ``limit`` is no integer.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> loader = ShardedDataLoader(range(4), 2, on_error=OnError("skip", limit=1))
    """

    action: ErrorAction = "skip"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is None:
            return
        if self.action == "raise":
            raise ValueError(
                'limit needs the action "skip", "replace" or a function: with "raise" no sample is skipped'
            )
        check_int("limit", self.limit, 0, "give the number of samples in an epoch that may be skipped, or None")


class OtherNames(TypedDict, Generic[Batch], total=False):
    """Arguments by name that mean another argument of the loader, or an option of its pool: torch's, and ``mesh``."""

    collate_fn: Callable[[list[Any]], Batch] | None
    drop_last: bool | None
    prefetch_factor: int | None
    persistent_workers: bool | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float | None
    mesh: Any
