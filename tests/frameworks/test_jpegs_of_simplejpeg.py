"""Simplejpeg decodes what Pillow decodes, to the same pixels, and leaves to it what it does not take."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sharded_loader.recordio import images

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("simplejpeg")  # without it, Pillow would be compared with itself
pytestmark = pytest.mark.frameworks
SIZES = (None, 1, 40, 100, 300, (30, 200))


def jpeg(rng: np.random.Generator, number: int) -> bytes:
    """A random JPEG: all kinds of color, some turned, every other one cut or damaged."""
    width, height = (int(rng.integers(1, 20 if number % 7 == 0 else 700)) for _ in range(2))
    blocks = rng.integers(0, 255, (1 + height // 8, 1 + width // 8, 3), np.uint8)
    mode = ("RGB", "RGB", "L", "CMYK")[number % 4]
    image, file, exif = Image.fromarray(blocks).resize((width, height)).convert(mode), io.BytesIO(), Image.Exif()
    exif[0x112] = int(rng.integers(1, 9)) if rng.random() < 0.3 else 1
    options: dict[str, Any] = {"subsampling": int(rng.integers(3)), "progressive": rng.random() < 0.3}
    if mode == "RGB" and rng.random() < 0.1:
        options = {"keep_rgb": True, "subsampling": 0}
    image.save(file, "JPEG", quality=int(rng.integers(5, 101)), exif=exif, **options)
    data = bytearray(file.getvalue())
    match number // 4 % 4:
        case 0:
            del data[int(rng.integers(2, len(data))) :]
        case 1:
            for _ in range(int(rng.integers(1, 20))):
                data[int(rng.integers(2, len(data)))] = int(rng.integers(256))
    return bytes(data)


def result(decode: Callable[[], Any]) -> str | tuple[tuple[int, ...], str, bytes]:
    try:
        pixels = decode()
    except ValueError as error:
        return str(error)
    return pixels.shape, pixels.dtype.str, pixels.tobytes()


@pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged files
def test_pixels_and_errors_are_those_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, taken, decode = np.random.default_rng(0), list[bool](), images.decode_upright_jpeg

    def counted(*arguments: Any) -> Any:
        pixels = decode(*arguments)
        taken.append(pixels is not None)
        return pixels

    for number in range(160):
        data = jpeg(rng, number)
        for flag in (-1, 0, 1):
            for size in SIZES if flag >= 0 else (None,):
                decoded = functools.partial(images.decode_image, data, flag, "it", size=size)
                monkeypatch.setattr(images, "decode_upright_jpeg", counted)
                found = result(decoded)
                monkeypatch.setattr(images, "decode_upright_jpeg", lambda *_: None)
                assert found == result(decoded), (number, flag, size)
    assert 200 < sum(taken) < len(taken) - 200


def test_an_image_of_this_size_is_decoded_at_a_reduced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = io.BytesIO(), list[tuple[int, ...]]()
    Image.effect_noise((1001, 801), 50).convert("RGB").save(file, "JPEG")
    decode = images.fast_decoder()

    def watched(*arguments: Any, **named: Any) -> Any:
        pixels = decode(*arguments, **named)
        seen.append(pixels.shape)
        return pixels

    monkeypatch.setattr(images, "fast_decoder", lambda: watched)
    for size in (150, 400, 500):
        assert images.decode_image(file.getvalue(), 1, "it", size=size).shape[0] == size
    assert seen == [(201, 251, 3), (401, 501, 3), (801, 1001, 3)]


@pytest.mark.parametrize("side", range(1, 18))
def test_tiny_images_of_which_several_scales_give_one_size_are_equal_too(
    monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(side).integers(0, 255, (side, side, 3), np.uint8)).save(file, "JPEG")
    for size in range(1, 6):
        found = images.decode_image(file.getvalue(), 1, "it", size=size)
        with monkeypatch.context() as patch:
            patch.setattr(images, "fast_decoder", lambda: None)
            assert np.array_equal(found, images.decode_image(file.getvalue(), 1, "it", size=size))
