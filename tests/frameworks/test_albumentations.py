"""albumentations: every image of an epoch is augmented in its own way, the same with any number of workers."""

from __future__ import annotations

from typing import Any

import augmented
import pytest
from indices import BOTH, IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def library() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # it would ask the network for its latest version
        return pytest.importorskip("albumentations")


class Noise:
    """A pipeline of two transforms."""

    def __init__(self, library: Any) -> None:
        self.pipeline = library.Compose([library.GaussNoise(p=1.0), library.HorizontalFlip(p=0.5)])

    def __call__(self, image: Any) -> Any:
        return self.pipeline(image=image)["image"]


@BOTH
def test_seeded_augmentations_differ_within_an_epoch_and_not_with_the_workers(library: Any, make: Any) -> None:
    found = [
        augmented.epoch(make(augmented.images(Noise(library)), batch_size=4, seed=1, num_workers=count))
        for count in (0, 1, 3)
    ]
    assert len(set(found[0])) == augmented.LENGTH
    assert found[0] == found[1] == found[2]


@BOTH
def test_every_epoch_has_other_augmentations(library: Any, make: Any) -> None:
    loader = make(augmented.images(Noise(library)), batch_size=4, shuffle=True, seed=1, num_workers=2)
    assert not set(augmented.epoch(loader)) & set(augmented.epoch(loader))
