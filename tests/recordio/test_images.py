"""Images in records: with ``iscolor=-1`` exactly what is stored, or an error; never other values without a word."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from typing import Any

import numpy as np
import pytest

from sharded_loader.recordio import IRHeader, pack, pack_img, unpack_img

pytest.importorskip("PIL")
from PIL import Image

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6


def png(pixels: np.ndarray[Any, Any], color: int, *chunks: bytes) -> bytes:
    """A PNG written by hand: Pillow writes no 16-bit channels."""
    depth = 16 if pixels.dtype == np.uint16 else 8
    rows = b"".join(b"\0" + row.astype(">u2" if depth == 16 else "u1").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, color, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def saved(pixels: np.ndarray[Any, Any], form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def unpacked(payload: bytes, iscolor: int = -1) -> np.ndarray[Any, Any]:
    return unpack_img(pack((0, 1.0, 7, 0), payload), iscolor)[1]


def numbers(*shape: int, dtype: Any = np.uint16) -> np.ndarray[Any, Any]:
    largest = np.iinfo(dtype).max
    array = np.random.default_rng(1).integers(0, largest, shape, dtype, endpoint=True)
    array.reshape(-1)[:3] = 0, 255, largest
    return array


STORED = {
    "grey of 16 bits": (numbers(3, 4), lambda a: png(a, GREY)),
    "grey of 16 bits, TIFF": (numbers(3, 4), lambda a: saved(a, "TIFF")),
    "grey of 16 bits, big-endian TIFF": (numbers(3, 4), lambda a: tiff(a)),
    "grey of 32 bits": (numbers(3, 4, dtype=np.int32), lambda a: saved(a, "TIFF")),
    "float": (np.linspace(-2, 700, 12, dtype=np.float32).reshape(3, 4), lambda a: saved(a, "TIFF")),
    "grey": (numbers(3, 4, dtype=np.uint8), lambda a: png(a, GREY)),
    "grey and alpha": (numbers(3, 4, 2, dtype=np.uint8), lambda a: png(a, GREY_ALPHA)),
    "RGB": (numbers(3, 4, 3, dtype=np.uint8), lambda a: png(a, RGB)),
    "RGBA": (numbers(3, 4, 4, dtype=np.uint8), lambda a: png(a, RGBA)),
}


def tiff(pixels: np.ndarray[Any, Any]) -> bytes:
    """A big-endian TIFF of one strip."""
    data = pixels.astype(">u2").tobytes()
    fields = {256: pixels.shape[1], 257: pixels.shape[0], 258: 16, 259: 1, 262: 1, 277: 1, 278: pixels.shape[0]}
    begin = 8 + 2 + 12 * (len(fields) + 2) + 4
    entries = [struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in fields.items()]
    entries += [struct.pack(">HHII", tag, 4, 1, value) for tag, value in ((273, begin), (279, len(data)))]
    return b"MM\0*" + struct.pack(">IH", 8, len(entries)) + b"".join(sorted(entries)) + bytes(4) + data


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_is_what_is_unpacked_and_what_does_not_fit_8_bits_is_refused_for_them(name: str) -> None:
    pixels, encoded = STORED[name]
    found = unpacked(encoded(pixels))
    assert found.dtype == pixels.dtype and found.shape == pixels.shape and found.dtype.isnative
    assert (found == pixels).all()
    if name in ("grey of 32 bits", "float"):  # they would be clipped
        for iscolor in (0, 1):
            with pytest.raises(ValueError, match=f"pixels of {pixels.dtype}, which do not fit 8 bits: give iscolor=-1"):
                unpacked(encoded(pixels), iscolor)


def test_of_16_grey_bits_the_upper_8_are_kept_and_turned_if_the_user_asks_for_8() -> None:
    pixels = numbers(3, 4)
    grey, color = unpacked(png(pixels, GREY), 0), unpacked(png(pixels, GREY), 1)
    assert grey.dtype == color.dtype == np.uint8 and color.shape == (3, 4, 3)
    assert (grey == pixels >> 8).all() and (color == grey[..., None]).all()
    data = png(pixels, GREY, chunk(b"eXIf", oriented(6).removeprefix(b"Exif\0\0")))
    assert (unpacked(data, 0) == np.rot90(pixels >> 8, -1)).all() and (unpacked(data) == pixels).all()


def test_colors_of_a_palette_keep_their_alpha() -> None:
    palette, alpha = chunk(b"PLTE", bytes([10, 20, 30, 40, 50, 60])), chunk(b"tRNS", bytes([255, 9]))
    indices = np.array([[0, 1]], np.uint8)
    assert unpacked(png(indices, PALETTE, palette)).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert unpacked(png(indices, PALETTE, palette, alpha)).tolist() == [[[10, 20, 30, 255], [40, 50, 60, 9]]]


def with_exif(pixels: np.ndarray[Any, Any], form: str, exif: bytes) -> bytes:
    return saved(pixels, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


UPRIGHT: dict[int, Any] = {
    **dict.fromkeys((0, 1, 9), lambda a: a),
    2: lambda a: a[:, ::-1],
    3: lambda a: np.rot90(a, 2),
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: np.rot90,
}
"""What OpenCV makes of each EXIF orientation."""


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_an_image_is_turned_by_its_orientation_unless_what_is_stored_is_asked_for(form: str, orientation: int) -> None:
    pixels = np.kron(numbers(3, 5, 3, dtype=np.uint8), np.ones((16, 16, 1), np.uint8))
    if form == "WEBP":
        pytest.importorskip("PIL._webp")
    stored, plain = with_exif(pixels, form, oriented(orientation)), with_exif(pixels, form, oriented(1))
    for iscolor in (0, 1):
        found = unpacked(stored, iscolor)
        assert (found == UPRIGHT[orientation](unpacked(plain, iscolor))).all() and found.flags.c_contiguous
    if form != "TIFF":  # whose orientation is no EXIF: OpenCV and Pillow follow it in any case
        assert (unpacked(stored) == unpacked(plain)).all()


TAG = b"II*\0\x08\0\0\0\x01\0\x12\x01"  # one field, the orientation


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize(
    "exif",
    [b"garbage", b"", b"II*\0\x08\0\0\0", b"MM\0*\xff\xff\xff\xff", TAG, TAG + b"\x02\0\x02\0\0\0x\0\0\0" + bytes(4)],
)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Metadata Warning")
def test_damaged_exif_turns_nothing_and_is_no_error(form: str, exif: bytes) -> None:
    pixels = numbers(3, 4, 3, dtype=np.uint8)
    data = with_exif(pixels, form, b"Exif\0\0" + exif)
    assert (unpacked(data, 1) == unpacked(data)).all()


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_images_come_back(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    header, decoded = unpack_img(pack_img(IRHeader(0, [1, 2], 4, 0), image, quality=3, img_fmt=".png"))
    assert (header.flag, header.id) == (2, 4)
    assert (decoded == image).all() and decoded.dtype == np.uint8
    decoded[0] = 0  # writable
    smooth = np.full(shape, 90, np.uint8)
    smooth[:, 3:] = 120
    packed = pack_img((0, 1.0, 4, 0), smooth)
    assert np.abs(unpack_img(packed)[1].astype(int) - smooth).max() < 10
    assert [unpack_img(packed, iscolor=iscolor)[1].shape for iscolor in (1, 0)] == [(5, 7, 3), (5, 7)]


def test_quality_is_that_of_the_jpeg_and_loses_nothing_in_a_png() -> None:
    image = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    sizes = [len(pack_img((0, 1.0, 4, 0), image, quality=quality)) for quality in (10, 50, 95)]
    assert sizes == sorted(set(sizes))
    for quality in (0, 9, 95):
        assert (unpack_img(pack_img((0, 1.0, 4, 0), image, quality, ".PNG"))[1] == image).all()


def test_what_is_no_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for image in (np.zeros((2, 2)), np.zeros((2, 2, 5), np.uint8), np.zeros((0, 2), np.uint8)):
        with pytest.raises(ValueError, match="an image is uint8 of shape"):
            pack_img((0, 1.0, 0, 0), image)
    with pytest.raises(ValueError, match=r"unknown image format '\.gif'"):
        pack_img((0, 1.0, 0, 0), np.zeros((2, 2), np.uint8), img_fmt=".gif")
    with pytest.raises(ValueError, match="unknown iscolor 2"):
        unpack_img(b"", iscolor=2)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install pillow"):
        pack_img((0, 1.0, 0, 0), np.zeros((2, 2), np.uint8))
