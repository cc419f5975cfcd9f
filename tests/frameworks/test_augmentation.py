"""albumentations and MONAI augment each image of an epoch in its own way, the same with any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import augmented
import pytest
from indices import BOTH, IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS


class Albumentations:
    """A pipeline of two transforms of albumentations."""

    module = "albumentations"

    def __init__(self, library: Any) -> None:
        self.pipeline = library.Compose([library.GaussNoise(p=1.0), library.HorizontalFlip(p=0.5)])

    def __call__(self, image: Any) -> Any:
        return self.pipeline(image=image)["image"]


class Monai:
    """A pipeline of two transforms of MONAI."""

    module = "monai.transforms"

    def __init__(self, library: Any) -> None:
        self.pipeline = library.Compose([library.RandGaussianNoise(prob=1.0), library.RandFlip(prob=0.5)])

    def __call__(self, image: Any) -> Any:
        return self.pipeline(image.astype("float32"))


@pytest.fixture(scope="module", params=[Albumentations, Monai])
def noise(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A new pipeline of one of the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise albumentations asks the network for its latest version.
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
        library = pytest.importorskip(request.param.module)
        yield lambda: request.param(library)


@BOTH
def test_seeded_augmentations_differ_within_an_epoch_and_not_with_the_workers(noise: Any, make: Any) -> None:
    found = [
        augmented.epoch(make(augmented.images(noise()), batch_size=4, seed=1, num_workers=count)) for count in (0, 1, 3)
    ]
    assert len(set(found[0])) == augmented.LENGTH
    assert found[0] == found[1] == found[2]


@BOTH
def test_every_epoch_has_other_augmentations(noise: Any, make: Any) -> None:
    loader = make(augmented.images(noise()), batch_size=4, shuffle=True, seed=1, num_workers=2)
    assert not set(augmented.epoch(loader)) & set(augmented.epoch(loader))
