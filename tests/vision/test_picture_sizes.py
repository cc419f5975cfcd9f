"""``size=``: pictures of every kind have the shape that torchvision's Resize gives them, and nearly its values."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_vision import BROKEN, OTHERS, PLAIN, encoded, folder_of, loader_of, pixels_of, records_of, tar_of

from sharded_loader import ImageFolderDataset, ImageRecordDataset, ShardDataset, ShardedDataLoader, vision

Image = pytest.importorskip("PIL.Image")

SIXTEEN_BITS = np.arange(0, 65536, 16, np.uint16).reshape(64, 64)


def smooth(width: int, height: int, mode: str = "RGB") -> Any:
    """A picture without sharp edges."""
    small = np.random.default_rng(width).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.BICUBIC).convert(mode)


def saved(image: Any, kind: str = "JPEG", turn: int = 1, **options: Any) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x112] = turn
    image.save(file, kind, exif=exif, **options)
    return file.getvalue()


def decoded(data: bytes, size: Any, flag: int = 1) -> np.ndarray[Any, Any]:
    picture = vision.PictureDecoder("cpu", flag, size)(data, "a picture")
    assert picture.dtype == torch.uint8 and picture.is_contiguous()
    return picture.numpy()


def png_of_16_bits() -> bytes:
    """Pillow before 11 writes none."""
    height, width = SIXTEEN_BITS.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in SIXTEEN_BITS)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 0, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts.items())
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


KINDS = (
    PLAIN
    | OTHERS
    | {
        "large": saved(smooth(500, 375)),
        "large, turned": saved(smooth(500, 375), turn=8),
        "large, progressive": saved(smooth(375, 500), progressive=True),
        "large, grey": saved(smooth(500, 375, "L")),
        "large, CMYK": saved(smooth(500, 375, "CMYK")),
        "PNG with a palette": saved(smooth(90, 70).quantize(16), "PNG", transparency=3),
        "PNG of 16 bits": png_of_16_bits(),
        "PNG of one bit": saved(smooth(90, 70, "1"), "PNG"),
    }
)


@pytest.mark.parametrize(
    ("stored", "size", "shape"),
    [
        ((400, 300), 256, (256, 341)),  # 341.3: torchvision rounds down
        ((300, 400), 256, (341, 256)),
        ((399, 300), 50, (50, 66)),
        ((401, 400), 50, (50, 50)),  # decoded as 51 x 50
        ((399, 400), 50, (50, 50)),
        ((40, 30), 60, (60, 80)),
        ((30, 30), 30, (30, 30)),
        ((400, 300), (64, 64), (64, 64)),
        ((400, 300), (50, 300), (50, 300)),
        ((400, 300), [300, 50], (300, 50)),
        ((400, 300), (np.int64(500), 1), (500, 1)),
        ((5, 4), (7, 9), (7, 9)),
        ((5000, 1), (2, 2), (2, 2)),
    ],
)
@pytest.mark.parametrize("turn", [1, 6])
def test_the_shape_is_that_of_resize(stored: tuple[int, int], size: Any, shape: tuple[int, int], turn: int) -> None:
    expected = shape[::-1] if turn == 6 and isinstance(size, int) else shape
    assert decoded(saved(smooth(*stored), turn=turn), size).shape == (3, *expected)


@pytest.mark.parametrize(
    ("size", "computed"),
    [
        (93, (125, 94)),
        (94, (250, 188)),  # an eighth is 93.75
        (187, (250, 188)),
        (188, (500, 375)),
        (375, (500, 375)),
        (376, (1000, 750)),
        (751, (1000, 750)),
        ((50, 90), (125, 94)),
        ((50, 125), (250, 188)),
    ],
)
def test_no_more_is_decoded_than_the_size_needs(size: Any, computed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resize, seen = torch.nn.functional.interpolate, []
    monkeypatch.setattr(
        torch.nn.functional,
        "interpolate",
        lambda planes, *args, **how: seen.append(planes.shape) or resize(planes, *args, **how),
    )
    decoded(saved(smooth(1000, 750)), size)
    assert seen == [(1, 3, *computed[::-1])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", [1, 0])
@pytest.mark.parametrize("size", [40, (40, 30)])
def test_values_are_those_of_resizing_the_whole_picture(kind: str, flag: int, size: Any) -> None:
    found = decoded(KINDS[kind], size, flag)
    whole = pixels_of(KINDS[kind], flag)
    expected = np.stack(
        [np.asarray(Image.fromarray(band).resize(found.shape[:0:-1], Image.BILINEAR)) for band in whole]
    )
    difference = np.abs(found.astype(int) - expected)
    assert difference.mean() < 2.5 and np.quantile(difference, 0.99) <= 12
    if not kind.startswith("large"):  # and so not scaled by the decoder
        assert difference.max() <= 1  # torch rounds otherwise than Pillow


def test_16_bits_keep_the_upper_8() -> None:
    assert (decoded(png_of_16_bits(), 64)[0] == SIXTEEN_BITS >> 8).all()
    assert (pixels_of(png_of_16_bits(), 1)[2] == SIXTEEN_BITS >> 8).all()


@pytest.mark.parametrize("name", ["folder", "records", "tar"])
def test_every_dataset_takes_a_size(name: str, tmp_path: Path) -> None:
    if name == "folder":
        pictures = [picture for picture, _ in ImageFolderDataset(folder_of(tmp_path, KINDS), size=(20, 30))]
    elif name == "records":
        pictures = [picture for picture, _ in ImageRecordDataset(records_of(tmp_path, KINDS), size=(20, 30))]
    else:
        shards = ShardDataset(tar_of(tmp_path, KINDS), decode="cpu", size=(20, 30), index_folder=tmp_path)
        pictures = [sample["left.jpg"] for sample in shards]
    expected = [decoded(KINDS[kind], (20, 30)) for kind in sorted(KINDS)]
    assert all((found.numpy() == picture).all() for found, picture in zip(pictures, expected, strict=True))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "thread_pool": True}, {"num_workers": 2}], ids=str)
def test_broken_pictures_are_named_and_left_out(workers: Any, tmp_path: Path) -> None:
    pictures = BROKEN | {f"good {number}": encoded(number) for number in range(6)}
    dataset = ImageFolderDataset(folder_of(tmp_path, pictures), size=(20, 30))
    with ShardedDataLoader(dataset, len(dataset), on_error="skip", **workers) as loader:
        [(found, _)] = loader
        named = {index: str(error) for index, error in loader.skipped}
    assert found.shape == (6, 3, 20, 30)
    assert list(named) == [number for number, name in enumerate(sorted(pictures)) if name in BROKEN]
    assert all(f"{number:03}.jpg: its " in text for number, text in named.items())


def test_the_drop_in_names_a_broken_picture(tmp_path: Path) -> None:
    dataset = ImageFolderDataset(folder_of(tmp_path, BROKEN), size=256)
    with pytest.raises(ValueError, match=r"class.000\.jpg: its \d+ bytes do not decode as an image"):
        next(iter(loader_of("drop-in processes", dataset)))


def test_the_error_of_other_bytes_says_so_without_an_address() -> None:
    for data in (b"", b"text"):
        with pytest.raises(ValueError, match=rf"a.jpg: its {len(data)} bytes .* \(no format that Pillow knows\)$"):
            vision.PictureDecoder("cpu", 1, 10)(data, "a.jpg")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "class" / "1.jpg").mkdir(parents=True)
    with pytest.raises(OSError, match=r"1\.jpg"):
        ImageFolderDataset(tmp_path, size=10)[0]


def test_a_strip_that_would_become_very_long_is_an_error(tmp_path: Path) -> None:
    dataset = ImageFolderDataset(folder_of(tmp_path, {"strip": saved(smooth(3000, 1), "PNG")}), size=256)
    text = (
        r"000\.jpg: the PNG image has 3000 x 1 pixels, and would have 768000 x 256 with size=256: leave it out, or give"
    )
    with pytest.raises(ValueError, match=text):
        dataset[0]


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "256", b"12", (), (1,), (1, 2, 3), (0, 5), (5, 2.0), {}])
def test_an_unknown_size_is_an_error(size: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"size.*: give the length of the shorter side in pixels, or \(height, width\)"
    ):
        ImageFolderDataset(tmp_path, size=size)


def test_only_workers_resize(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='size=256: .* give decode="cpu", or leave it out and resize in device_transf'):
        ImageFolderDataset(tmp_path, decode="cuda", size=256)
    with pytest.raises(ValueError, match='size=256 is for pictures of tar shards: give decode="cpu"'):
        ShardDataset(tar_of(tmp_path, PLAIN), size=256, index_folder=tmp_path)


def test_a_run_resumes_in_the_middle_with_the_same_pictures(tmp_path: Path) -> None:
    dataset = ImageFolderDataset(folder_of(tmp_path, KINDS), size=(24, 24))

    def shuffled(**workers: Any) -> ShardedDataLoader:
        return ShardedDataLoader(dataset, 3, shuffle=True, seed=5, **workers)

    with shuffled() as whole, shuffled(num_workers=2) as first, shuffled(num_workers=1, thread_pool=True) as second:
        expected = [pictures.clone() for pictures, _ in whole]
        batches = iter(first)
        found = [next(batches)[0].clone() for _ in range(3)]
        second.load_state_dict(first.state_dict())
        found += [pictures.clone() for pictures, _ in second]
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
