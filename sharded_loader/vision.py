"""Pictures, decoded by the workers or on a GPU: ``decode="cpu"`` and ``decode="cuda"``.

    ImageRecordDataset, ImageFolderDataset, ShardDataset --PictureDecoder(data, name)--> sample
        "cpu"               tensor (channels, height, width) of uint8
        "cuda", with CUDA   `Picture`: the bytes of a JPEG. A batch is `EncodedPictures`: one buffer, with offsets
        "cuda", without     `Picture`: the pixels. A batch is `Pictures`: a list of tensors

    EncodedPictures.to(device) -> Pictures      a loader with ``device=`` calls it in the background (`devices.copies`)

Only JPEGs that GPUs decode like Pillow travel as bytes: grey or YCbCr, of 8 bits per channel. Before, the worker checks
them as far as Pillow's decoder would reject them (`is_common_jpeg`), and decodes all other pictures. So ``on_error``
treats the same pictures as with "cpu". In the main process the decoder of the GPU comes first, then Pillow for what it
rejects. If a picture passes the check and both reject it, that is the error of its batch.

Workers import no torch for ``decode="cuda"``. The decoders read host memory, and work on the current stream.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pkgutil
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Dataset, Empty
from sharded_loader.extend import engine as core
from sharded_loader.extend.data import bulk, checked_index, elide
from sharded_loader.extend.tools import check_int
from sharded_loader.recordio import RecordFileDataset
from sharded_loader.recordio.images import MOST_PIXELS, Size, decode_image, unpack
from sharded_loader.recordio.positioned import regular

if TYPE_CHECKING:
    import torch

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Endings of picture files."""

Bytes = npt.NDArray[np.uint8]

# -- decoders of GPUs --------------------------------------------------------------------------------------------------


def _torchcodec(parts: list[Bytes], device: torch.device) -> list[torch.Tensor | None]:
    """Decode a batch with one call. It raises if one picture is rejected: halves find that one."""
    import torch
    from torchcodec.decoders import decode_jpeg

    try:
        return list(decode_jpeg(list(map(torch.from_numpy, parts)), mode="RGB", device=device))
    except core.OUT_OF_MEMORY:
        raise
    except RuntimeError:
        half = len(parts) // 2
        return [*_torchcodec(parts[:half], device), *_torchcodec(parts[half:], device)] if half else [None]


def _nvimgcodec(parts: list[Bytes], device: torch.device) -> list[torch.Tensor | None]:
    import torch
    from nvidia import nvimgcodec
    from torch.utils.dlpack import from_dlpack

    with torch.cuda.device(device), _ONE_AT_A_TIME:
        decoder, stream = _nvimgcodec_decoder(torch.cuda.current_device()), torch.cuda.current_stream().cuda_stream
        images = decoder.decode(parts, params=nvimgcodec.DecodeParams(), cuda_stream=stream)
        # Copied into memory of torch, which can wait for other streams before it is reused.
        return [None if one is None else from_dlpack(one).permute(2, 0, 1).contiguous() for one in images]


@functools.cache
def _nvimgcodec_decoder(index: int) -> Any:
    from nvidia import nvimgcodec

    # With its default options, colors are not interpolated: on a CPU, values differed from libjpeg's by up to 108.
    return nvimgcodec.Decoder(device_id=index, options=":fancy_upsampling=1")


_ONE_AT_A_TIME = threading.Lock()
"""For the decoder of nvImageCodec, which does not promise to serve several threads."""

Decode = Callable[[list[Bytes], Any], "list[torch.Tensor | None]"]

DECODERS: dict[str, dict[str, Decode]] = {
    "cuda": {"torchcodec.decoders:decode_jpeg": _torchcodec, "nvidia.nvimgcodec:Decoder": _nvimgcodec}
}
"""Decoders of a kind of device, the preferred one first, by the attribute of the library that they call. They take
JPEGs in host memory, and return tensors (3, height, width) on the device; None for one that they reject."""

_MISSING = (
    'decode="{}" needs a library that decodes JPEGs on GPUs, and none can be imported ({}): pip install '
    'torchcodec>=0.16, or nvidia-nvimgcodec-cu12[all] (cu13 for CUDA 13). decode="cpu" decodes in the workers'
)


def first_importable(names: Iterable[str], missing: str) -> str:
    """Return the first name that can be imported, such as ``json:loads``.

    Raises:
        ImportError: None can be imported. The message is ``missing``, with the reasons in place of its ``{}``.
    """
    reasons = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
            return name
        except (ImportError, AttributeError, OSError, RuntimeError) as error:  # also if a shared library is missing
            reasons.append(f"{name.partition(':')[0]}: {error}".partition("\n")[0])
    raise ImportError(missing.format("; ".join(reasons)))


_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker in or behind the data of a scan; those of restarts belong to the data."""


def is_common_jpeg(data: bytes) -> bool:
    """Return True for a JPEG that Pillow decodes, is grey or YCbCr and has 8 bits per channel.

    Pillow accepts damage in the data of scans, and no other. So this decodes the file without them, as a picture of
    8 x 8 pixels. Measured (500 x 375 pixels, 84 KB): 140 us; decoding takes 2 ms.

    Example:
        >>> is_common_jpeg(b"GIF89a")
        False
    """
    at, is_common, kept = 2, False, [data[:2]]
    while data.startswith(b"\xff\xd8") and at + 2 <= len(data) and data[at] == 0xFF:
        marker, begin = data[at + 1], at + 4
        if marker == 0xD9:
            return is_common and _decodes(b"".join((*kept, b"\xff\xd9")))
        end = at + 2 + int.from_bytes(data[at + 2 : begin], "big")
        part = data[at:end]
        if len(part) < 4 or (marker == 0xEE and part[4:9] == b"Adobe" and part[15:16] == b"\0"):  # RGB or CMYK
            return False
        if marker in (0xC0, 0xC1, 0xC2) and len(part) > 9:
            height, width = (int.from_bytes(part[place : place + 2], "big") for place in (5, 7))
            is_common = part[4] == 8 and part[9] in (1, 3) and part[10:17:3] != b"RGB"
            is_common = is_common and 0 < height * width <= MOST_PIXELS
            part = b"%b\0\x08\0\x08%b" % (part[:5], part[9:])
        kept.append(part)
        if marker == 0xDA:
            found = _MARKER.search(data, end)
            end = found.start() if found else len(data)
        at = end
    return False


def _decodes(data: bytes) -> bool:
    try:
        return bool(_decoded(data, 1, "").size)
    except ValueError:
        return False


# -- samples and batches -----------------------------------------------------------------------------------------------


def _packed(pixels: Bytes) -> bytearray:
    """Return pixels as bytes that no JPEG begins with: the shape in 12 bytes, then the values."""
    return bytearray().join((np.array(pixels.shape, "<u4").tobytes(), pixels.tobytes()))


def _unpacked(part: Bytes) -> Bytes:
    return part[12:].reshape(part[:12].view("<u4"))


class Picture:
    """Sample of ``decode="cuda"``. ``picture.to(device)`` decodes it.

    Attributes:
        data: a JPEG, or pixels that the worker has decoded (`_packed`).
        name: of the sample, for errors.
        decoder: a key of `DECODERS`. Empty: this machine has no such device, and ``data`` are pixels.
    """

    def __init__(self, data: bytes | bytearray, name: str, decoder: str) -> None:
        self.data, self.name, self.decoder = data, name, decoder

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        """Return the pixels on a device, as `EncodedPictures.to` does."""
        return _encoded([self], np.empty).to(device, non_blocking)[0]

    @staticmethod
    def assemble_samples(samples: Sequence[Picture], empty: Empty) -> EncodedPictures | Pictures:
        """Return the batch, its bytes in memory from ``empty``. The default batchify calls it."""
        if samples[0].decoder:
            return _encoded(samples, empty)
        return Pictures(_unpacked(np.frombuffer(sample.data, np.uint8)) for sample in samples)


def _encoded(samples: Sequence[Picture], empty: Empty) -> EncodedPictures:
    parts = [np.frombuffer(sample.data, np.uint8) for sample in samples]
    ends = np.cumsum(list(map(len, parts)))
    buffer = np.concatenate(parts, out=empty((int(ends[-1]),), np.dtype(np.uint8)))
    return EncodedPictures(buffer, ends, "\0".join(sample.name for sample in samples), samples[0].decoder)


class Pictures(list[Any]):
    """Batch of decoded pictures: a list of tensors (channels, height, width), whatever their sizes are."""

    def to(self, device: Any, non_blocking: bool = False) -> Pictures:
        """Return the pictures on a device."""
        return Pictures(picture.to(device, non_blocking=non_blocking) for picture in self)


class EncodedPictures(Sequence[Any]):
    """Batch of pictures in host memory, which ``to(device)`` decodes there.

    Indexing and iterating decode on the CPU, without keeping the result.

    Args:
        buffer: the bytes of all pictures, one after the other.
        ends: offset of the end of each.
        names: of the samples, separated by zero characters.
        decoder: a key of `DECODERS`.
    """

    def __init__(self, buffer: Bytes, ends: npt.NDArray[np.int64], names: str, decoder: str) -> None:
        self.buffer, self._ends, self._names, self._decoder = buffer, ends, names, decoder

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Pictures(self[number] for number in range(len(self))[index])
        number = checked_index(index, len(self))
        return self._on_cpu(self._parts()[number], number, "")

    def to(self, device: Any, non_blocking: bool = False) -> Pictures:
        """Return the decoded pictures: on a GPU decoded by it, on other devices by Pillow.

        Args:
            device: as for a tensor.
            non_blocking: for pictures that are decoded on the CPU.

        Raises:
            ValueError: A picture does not decode.
        """
        import torch

        device, parts = torch.device(device), self._parts()
        decode, decoded = DECODERS.get(device.type, {}).get(self._decoder), dict[int, torch.Tensor | None]()
        tried = "" if decode is None else self._decoder.partition(":")[0]
        if decode is not None and (numbers := [n for n, part in enumerate(parts) if part[0] == 0xFF]):
            decoded = dict(zip(numbers, decode([parts[n] for n in numbers], device), strict=True))
        for n, part in enumerate(parts):
            if decoded.get(n) is None:
                decoded[n] = self._on_cpu(part, n, tried).to(device, non_blocking=non_blocking)
        return Pictures(decoded[n] for n in range(len(parts)))

    def record_stream(self, stream: object) -> None:
        """Do nothing: no device has the bytes. With this method, the loader moves the pictures in the background."""

    def _parts(self) -> list[Bytes]:
        return [self.buffer[begin:end] for begin, end in pairwise((0, *self._ends.tolist()))]

    def _on_cpu(self, part: Bytes, number: int, tried: str) -> torch.Tensor:
        import torch

        if part[0] != 0xFF:
            return torch.from_numpy(_unpacked(part))
        name = self._names.split("\0")[number]
        try:
            return torch.from_numpy(_decoded(part.tobytes(), 1, name))
        except ValueError as error:
            advice = 'The workers find such a picture, and on_error treats it, with decode="cpu"'
            raise ValueError(f"{error}, nor for {tried}. {advice}" if tried else str(error)) from error


def _decoded(data: bytes, flag: int, name: str, size: Size = None) -> Bytes:
    """Decode a picture on the CPU."""
    pixels = decode_image(data, flag, name, size=size)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def _checked_size(size: Any) -> int | tuple[int, int]:
    advice = "give the length of the shorter side in pixels, or (height, width)"
    if not isinstance(size, tuple | list):
        return check_int("size", size, 1, advice, ValueError)
    if len(size) != 2:
        raise ValueError(f"size={size!r}: {advice}")
    height, width = (check_int("size", side, 1, advice, ValueError) for side in size)
    return height, width


class PictureDecoder:
    """Makes samples of encoded pictures.

    Args:
        decode: ``"cpu"`` or ``"cuda"``.
        flag: 1 for RGB, 0 for grey, which the workers decode.
        size: as in `ImageFolderDataset`.

    Raises:
        ValueError: ``decode``, ``flag`` or ``size`` is unknown, or the decoder cannot resize.
        ImportError: No decoder is installed.

    Example:
        >>> from sharded_loader.recordio import pack_img, unpack
        >>> _, data = unpack(pack_img((0, 1.0, 5, 0), np.zeros((2, 3, 3), np.uint8)))
        >>> PictureDecoder("cpu", 1)(data, "a picture").shape
        torch.Size([3, 2, 3])
    """

    def __init__(self, decode: str, flag: int = 1, size: Size = None) -> None:
        if decode != "cpu" and decode not in DECODERS:
            advice = 'give "cpu" or "cuda". The loader\'s device= says which GPU'
            raise ValueError(f"decode={decode!r} is unknown: {advice}")
        if flag not in (0, 1):
            raise ValueError(f"flag={flag!r} is unknown: give 1 for RGB, 0 for grey")
        if size is not None:
            size = _checked_size(size)
            if decode != "cpu":
                instead = 'give decode="cpu", or leave it out and resize in device_transform='
                raise ValueError(f"size={size!r}: GPUs decode pictures of any size as they are; {instead}")
        if importlib.util.find_spec("PIL") is None:
            raise ImportError(f"decode={decode!r} needs Pillow: pip install pillow")
        self._flag, self._size, self._is_lazy = flag, size, decode != "cpu"
        has_device = self._is_lazy and any(device.type == decode for device in core.accelerators())
        self._decoder = first_importable(DECODERS[decode], _MISSING.format(decode, "{}")) if has_device else ""

    def __call__(self, data: bytes, name: str) -> Any:
        """Return the sample for a picture; a ValueError names it if it does not decode."""
        if self._decoder and self._flag and is_common_jpeg(data):
            return Picture(data, name, self._decoder)
        pixels = _decoded(data, self._flag, name, self._size)
        if self._is_lazy:
            return Picture(_packed(pixels), name, self._decoder)
        import torch

        return torch.from_numpy(pixels)

    def in_fields(self, sample: dict[str, Any], place: str) -> dict[str, Any]:
        """Decode the fields of a tar sample whose names end like picture files; ``place`` is its shard."""
        name = f"{place}, sample {sample['__key__']!r}, field"
        return {
            field: self(value, f"{name} {field!r}") if f".{field}".endswith(SUFFIXES) else value
            for field, value in sample.items()
        }


# -- datasets ----------------------------------------------------------------------------------------------------------


class ImageRecordDataset(RecordFileDataset):
    """Map-style dataset over the images of a ``.rec`` file: ``dataset[i]`` is (picture, label).

    A picture is a uint8 tensor (channels, height, width), rotated by its EXIF orientation. With ``decode="cuda"``, a
    batch of pictures is a list of such tensors on the loader's device.

    Args:
        filename: path of the ``.rec`` file, whose records `pack_img` or MXNet has made.
        flag: 1 for RGB, 0 for grey.
        decode: ``"cpu"``: the workers decode. ``"cuda"``: the loader's GPU does; without CUDA, the workers.
        size: as in `ImageFolderDataset`.

    Raises:
        ImportError: Pillow, or the decoder for CUDA, is not installed; the message says what to install.
        ValueError: An argument is unknown. Reading raises it for a picture that does not decode.
        OSError, RecordIOError: As `RecordFileDataset`.

    Example:
        >>> import os, tempfile
        >>> from sharded_loader.recordio import MXRecordIO, pack_img
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "train.rec")
        >>> with MXRecordIO(path, "w") as file:
        ...     file.write(pack_img((0, 7.0, 0, 0), np.zeros((4, 6, 3), np.uint8)))
        >>> with ImageRecordDataset(path) as dataset:
        ...     picture, label = dataset[0]
        >>> picture.shape, label
        (torch.Size([3, 4, 6]), 7.0)
        >>> folder.cleanup()

    Source: ``mxnet.gluon.data.vision.ImageRecordDataset``.
    """

    def __init__(self, filename: str | os.PathLike[str], flag: int = 1, decode: str = "cpu", size: Size = None) -> None:
        self._decode = PictureDecoder(decode, flag, size)
        super().__init__(filename)

    def __getitem__(self, index: int) -> Any:
        return self._sample(index, super().__getitem__(index))

    @bulk
    def __getitems__(self, indices: Iterable[int]) -> list[Any]:
        numbers = list(indices)
        return list(map(self._sample, numbers, RecordFileDataset.get_batch(self, numbers)))

    def _sample(self, index: int, record: bytes) -> tuple[Any, Any]:
        header, data = unpack(record)
        return self._decode(data, f"{self.filename}, record {index} with id {header.id}"), header.label


class ImageFolderDataset(Dataset):
    """Map-style dataset over a folder with a subfolder for each class: ``dataset[i]`` is (picture, label).

    Pictures are as in `ImageRecordDataset`, labels are ints. Files that do not end in ``.jpg``, ``.jpeg``, ``.png`` or
    ``.webp`` are ignored, and so are deeper folders and names that begin with a dot.

    Args:
        root: path of the folder.
        flag: 1 for RGB, 0 for grey.
        decode: as in `ImageRecordDataset`.
        size: resize to exactly this many pixels, as torchvision's ``Resize(size)`` does: an int is the shorter side,
            and the ratio stays; (height, width) is the whole shape. Smaller pictures are enlarged. Large JPEGs are
            decoded at a half, a quarter or an eighth of their sides, but not below ``size``, which takes less than half
            of the time. Only with ``decode="cpu"``.

    Attributes:
        synsets: names of the subfolders, sorted; a label is a position in it.
        items: path and label of each picture.

    Raises:
        ImportError: As `ImageRecordDataset`.
        ValueError: The folder has no subfolders, or these have no pictures; or an argument is unknown.
        OSError: The folder, or later a file, cannot be read.

    Example:
        >>> import os, tempfile
        >>> from PIL import Image
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("cat", "dog"):
        ...     os.mkdir(os.path.join(folder.name, name))
        ...     Image.new("RGB", (6, 4)).save(os.path.join(folder.name, name, "1.jpg"))
        >>> dataset = ImageFolderDataset(folder.name)
        >>> dataset.synsets, dataset[1][0].shape, dataset[1][1]
        (['cat', 'dog'], torch.Size([3, 4, 6]), 1)
        >>> ImageFolderDataset(folder.name, size=2)[1][0].shape
        torch.Size([3, 2, 3])
        >>> folder.cleanup()

    Source: ``mxnet.gluon.data.vision.ImageFolderDataset``.
    """

    def __init__(self, root: str | os.PathLike[str], flag: int = 1, decode: str = "cpu", size: Size = None) -> None:
        self._decode = PictureDecoder(decode, flag, size)
        self.root = os.path.expanduser(os.fspath(root))
        shown = [entry for entry in os.scandir(self.root) if not entry.name.startswith(".")]
        self.synsets = sorted(entry.name for entry in shown if entry.is_dir())
        if not self.synsets:
            raise ValueError(f"{self.root} has no subfolders: give a folder with a subfolder for each class")
        self.items = [
            (os.path.join(self.root, folder, name), label)
            for label, folder in enumerate(self.synsets)
            for name in sorted(os.listdir(os.path.join(self.root, folder)))
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
        if not self.items:
            kinds = ", ".join(SUFFIXES)
            raise ValueError(f"{self.root}: no subfolder ({elide(self.synsets)}) has pictures ({kinds})")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        path, label = self.items[checked_index(index, len(self))]
        with open(regular(path), "rb") as file:
            return self._decode(file.read(), path), label

    def __repr__(self) -> str:
        return f"ImageFolderDataset({self.root!r}, {len(self)} pictures in {len(self.synsets)} classes)"
