"""Libraries augment each image of an epoch in its own way, the same with any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

from sharded_loader import SimpleDataset

pytestmark = IN_FRAMEWORKS

LENGTH = 16


def of_albumentations() -> Any:
    library = pytest.importorskip("albumentations")
    pipeline = library.Compose([library.GaussNoise(p=1.0), library.HorizontalFlip(p=0.5)])
    return lambda image: pipeline(image=image)["image"]


def of_monai() -> Any:
    library = pytest.importorskip("monai.transforms")
    pipeline = library.Compose([library.RandGaussianNoise(prob=1.0), library.RandFlip(prob=0.5)])
    return lambda image: pipeline(image.astype("float32"))


def of_torchvision() -> Any:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32), v2.GaussianNoise(0, 0.1, False)])


def of_timm() -> Any:
    image, data = pytest.importorskip("PIL.Image"), pytest.importorskip("timm.data")
    transform = data.create_transform(8, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=1.0, re_mode="pixel")
    noise = image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    return lambda _: transform(noise)


@pytest.fixture(scope="module", params=[of_albumentations, of_monai, of_torchvision, of_timm])
def images(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Makes grey images that one of the libraries augments: what differs between two of them is their augmentation."""
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise albumentations asks the network for its latest version.
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
        request.param()
        grey = SimpleDataset([np.full((8, 8, 3), 128, dtype=np.uint8)] * LENGTH)
        yield lambda: grey.transform(request.param(), seeded=True)


def epoch(loader: Any) -> list[bytes]:
    """The images of one epoch."""
    return [np.asarray(image).tobytes() for batch in loader for image in batch]


@BOTH
def test_augmentations_differ_within_an_epoch_and_not_with_the_workers(images: Any, make: Any) -> None:
    found = [epoch(make(images(), batch_size=4, seed=1, num_workers=count)) for count in (0, 1, 3)]
    assert len(set(found[0])) == LENGTH
    assert found[0] == found[1] == found[2]


@BOTH
def test_every_epoch_has_other_augmentations(images: Any, make: Any) -> None:
    loader = make(images(), batch_size=4, shuffle=True, seed=1, num_workers=2)
    assert not set(epoch(loader)) & set(epoch(loader))
