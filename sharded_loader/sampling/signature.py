"""What a place in an epoch is a place in: by this a state is refused that belongs to another loader.

    EpochOrder.signature(epoch) -> Signature -> state_dict
    differences(saved, own) -> phrases for the error of load_state_dict; none if the state fits

Nothing of the rank, the pool or the devices is in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharded_loader.sampling.base import Sampler
from sharded_loader.sampling.foreign import find_foreign, is_own, len_epoch, nested


@dataclass(frozen=True, slots=True)
class Signature:
    """What a state is a place in. Two loaders with the same signature have the same stream.

    Attributes:
        seed, dataset_length, sampler, sampler_length, sampler_seeds, batch_size, last_batch, sampler_arguments: see
            `sharded_loader.state`.
    """

    seed: int
    dataset_length: int | None
    sampler: str
    sampler_length: int | None
    sampler_seeds: tuple[int | None, ...]
    batch_size: int | None
    last_batch: str | None
    sampler_arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def unit(self) -> str:
        """What a place counts."""
        return "batches" if self.batch_size is None else "samples"


def differences(saved: Signature, own: Signature, strict: bool = True) -> list[str]:
    """Why a state does not fit a loader, one phrase each; none if it fits. Seeds are the samplers' affair.

    Args:
        saved: of the state.
        own: of the loader.
        strict: whether another batch size matters.

    Example:
        >>> one = Signature(7, 100, "RandomSampler", 100, (), 8, "keep")
        >>> other = Signature(7, 90, "RandomSampler", 90, (), 4, "keep")
        >>> for phrase in differences(one, other): print(phrase)
        the dataset had 100 samples, and has 90
        batch_size was 8, and is 4
    """
    found = []
    if saved.dataset_length != own.dataset_length:
        found.append(f"the dataset had {_some(saved.dataset_length)} samples, and has {_some(own.dataset_length)}")
    if saved.sampler != own.sampler:
        found.append(f"the sampler was {saved.sampler}, and is {own.sampler}")
    elif saved.sampler_length != own.sampler_length and saved.dataset_length == own.dataset_length:
        had, has = _some(saved.sampler_length), _some(own.sampler_length)
        found.append(f"the sampler had {had} {own.unit} in the epoch, and has {has}")
    kinds_differ = (saved.batch_size is None) != (own.batch_size is None)
    if saved.batch_size != own.batch_size and (strict or kinds_differ):
        found.append(f"batch_size was {saved.batch_size}, and is {own.batch_size}")
    if saved.last_batch != own.last_batch:
        found.append(f"last_batch was {saved.last_batch!r}, and is {own.last_batch!r}")
    return found


def out_of_epoch(saved: Signature, length: int | None, epoch: int, done: int) -> str | None:
    """Why a place lies outside of its epoch, in words; None if it does not.

    With rollover an epoch may begin with samples of the epochs before it. How many they are depends on the batch sizes
    and ranks of those epochs, which the state does not tell: at most all samples of them.

    Args:
        saved: of the state.
        length: items in an epoch; None: unknown.
        epoch, done: the place.

    Example:
        >>> saved = Signature(7, 10, "SequentialSampler", 10, (), 3, "rollover")
        >>> out_of_epoch(saved, 10, 5, -2), out_of_epoch(saved, 10, 0, -2)
        (None, 'samples -2, but epoch 0 begins at 0 at the earliest (sampler_length 10)')
    """
    if length is None:
        return None
    if done > length:
        return f"{saved.unit} {done}, but the epoch has only {length} (sampler_length)"
    first = -length * epoch if saved.last_batch == "rollover" else 0
    if done >= first:
        return None
    return f"{saved.unit} {done}, but epoch {epoch} begins at {first} at the earliest (sampler_length {length})"


def other_arguments(saved: Signature, own: Signature) -> list[str]:
    """Which arguments of the samplers that were given are others than then, one phrase each.

    Example:
        >>> one = Signature(7, 9, "IntervalSampler", 9, (), 8, "keep", (("IntervalSampler.interval", 3),))
        >>> other = Signature(7, 9, "IntervalSampler", 9, (), 8, "keep", (("IntervalSampler.interval", 2),))
        >>> other_arguments(one, other)
        ['interval of the IntervalSampler was 3, and is 2']
    """
    now = dict(own.sampler_arguments)
    found = []
    for name, was in saved.sampler_arguments:
        if name in now and now[name] != was:
            sampler, _, argument = name.partition(".")
            if isinstance(was, str) and was.startswith(_SUM):
                found.append(f"{argument} of the {sampler}: others than then")
            else:
                found.append(f"{argument} of the {sampler} was {was!r}, and is {now[name]!r}")
    return found


def arguments(samplers: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    """What decides the order of our own samplers beside seed and length: numbers and words; of arrays a checksum."""
    return tuple(
        (f"{type(one).__name__}.{name}", _told(getattr(one, attribute)))
        for one in samplers
        if isinstance(one, Sampler) and is_own(one)
        for name, attribute in one.decided_by
    )


_SUM = "crc32 "


def _told(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    parts = value if isinstance(value, list) and value and isinstance(value[0], np.ndarray) else [value]
    checksum = 0
    for part in parts:
        array = np.asarray(part)
        # The same for equal numbers of another dtype; 3 ms for a million weights, once.
        checksum = zlib.crc32(array.astype("<f8" if array.dtype.kind == "f" else "<i8", copy=False).tobytes(), checksum)
    return f"{_SUM}{checksum:08x}"


def _some(number: int | None) -> Any:
    return "an unknown number of" if number is None else number


def own_length(sampler: Any, epoch: int) -> int | None:
    """Items in an epoch; None for foreign samplers, which may have another length when they are read."""
    try:
        return len_epoch(sampler, epoch) if find_foreign(sampler) is None else None
    except (TypeError, NotImplementedError):
        return None


def kind(sampler: Any) -> str:
    """The classes of a sampler and those inside it; of torch's, with the name of the package: they order otherwise."""
    names = []
    for one in nested(sampler):
        package = type(one).__module__.partition(".")[0]
        names.append(f"torch.{type(one).__name__}" if package == "torch" else type(one).__name__)
    return "(".join(names) + ")" * (len(names) - 1)
