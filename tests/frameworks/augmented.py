"""What the tests of augmentation libraries share: the augmentations of one epoch, by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sharded_loader import SimpleDataset

LENGTH = 16


def blank(_: int) -> np.ndarray:
    """A grey image: what differs between two of them is their augmentation."""
    return np.full((8, 8, 3), 128, dtype=np.uint8)


def images(transform: Callable[[Any], Any], seeded: bool = True) -> Any:
    """Grey images, augmented."""
    return SimpleDataset(range(LENGTH)).transform(blank).transform(transform, seeded=seeded)


def epoch(loader: Any) -> list[bytes]:
    """The images of one epoch."""
    return [np.asarray(image).tobytes() for batch in loader for image in batch]
