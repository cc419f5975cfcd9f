"""MXNet's record header: a label and two numbers in 24 bytes before a payload, usually an image.

    | flag   | label   | id     | id2    | `flag` x float32, if flag > 0 | payload |
      uint32   float32   uint64   uint64                                             all little-endian

A single label is stored in its field, with ``flag`` 0; an array of n numbers follows the header, with ``flag`` n.
Errors are a ValueError with the header's ``id``, if known. Damaged EXIF data is ignored.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import struct
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sharded_loader.extend.data import check_unmasked


class IRHeader(NamedTuple):
    """Header of a record, as ``mxnet.recordio.IRHeader``.

    Attributes:
        flag: length of an array label, 0 for a single number; set by `pack`.
        label: number, or float32 array.
        id: usually the key of the record, 0 to 2**64 - 1.
        id2: a second id.

    Example:
        >>> record = pack(IRHeader(0, [0.5, 2.0], 7, 0), b"image")
        >>> header, image = unpack(record)
        >>> header.flag, header.label.tolist(), header.id, image
        (2, [0.5, 2.0], 7, b'image')
    """

    flag: int
    label: Any
    id: int
    id2: int


_HEADER = struct.Struct("<IfQQ")
Pixels = npt.NDArray[Any]
Size = int | tuple[int, int] | None

MOST_PIXELS = 1 << 26
"""Pixels of the largest picture that is made by resizing, or decoded by a GPU. Of larger ones, Pillow warns."""

_ORIENTATION = 0x112
"""A tag of EXIF."""


def pack(header: IRHeader | tuple[int, object, int, int], s: bytes) -> bytes:
    """Combine header and payload to the bytes of a record, as ``mxnet.recordio.pack``.

    Args:
        header: `IRHeader` or tuple of its fields. A label is stored as float32: a number in the header, a list or array
            behind it. Fractions are rounded.
        s: payload.

    Raises:
        ValueError: A field does not fit, or float32 cannot hold a label: a whole number above 16,777,216 would be
            changed, or a number become infinite.

    Example:
        >>> record = pack(IRHeader(0, 4.0, 2574, 0), b"image")
        >>> len(record), unpack(record)
        (29, (IRHeader(flag=0, label=4.0, id=2574, id2=0), b'image'))
    """
    header = IRHeader(*header)
    try:
        check_unmasked(header.label)
        with np.errstate(over="ignore"):
            array = np.asarray(header.label, dtype=np.float32)
        _check_exact(np.asarray(header.label), array)
        if isinstance(header.label, Number):
            fields, label = header._replace(flag=0), b""
        else:
            fields, label = header._replace(flag=array.size, label=0.0), array.tobytes()
        packed = _HEADER.pack(*fields)
    except (struct.error, OverflowError, TypeError, ValueError) as error:
        rule = "the label is a number that float32 holds or an array of them, id and id2 are integers below 2**64"
        advice = "Give a large whole number as id2, or in parts as an array"
        raise ValueError(f"{header!r} does not fit ({error}): {rule}. {advice}") from error
    return packed + label + s


def _check_exact(values: Any, stored: Any) -> None:
    large = np.abs(stored) >= 1 << 24
    for value, number in zip(values[large].tolist(), stored[large].tolist(), strict=True):
        # All floats from 2**53 on are whole.
        is_whole = isinstance(value, int) or (abs(value) < 1 << 53 and value % 1 == 0)
        if number != value and (is_whole or math.isinf(number)):
            raise ValueError(f"the label {value} would be stored as {number:.15g}")


def unpack(s: bytes) -> tuple[IRHeader, bytes]:
    """Split ``s``, a record made by `pack`, into header and payload, as ``mxnet.recordio.unpack``.

    The label is a float, or a writable float32 array of shape (flag,). A record that is too short for its header or
    label is a ValueError.

    Example:
        >>> header, payload = unpack(pack((0, [1.5, 2.5], 9, 0), b"body"))
        >>> header.flag, header.label.tolist(), payload
        (2, [1.5, 2.5], b'body')
    """
    if len(s) < _HEADER.size:
        raise ValueError(f"a record of {len(s)} bytes has no IRHeader (of {_HEADER.size}): was it written by pack()?")
    header = IRHeader(*_HEADER.unpack_from(s))
    begin = _HEADER.size + 4 * header.flag
    if begin > len(s):
        text = f"a label of {header.flag} numbers, but only {len(s) - _HEADER.size} bytes follow"
        raise ValueError(f"record with id {header.id}: its header promises {text}: was it written by pack()?")
    if header.flag:
        label = np.frombuffer(s, dtype="<f4", count=header.flag, offset=_HEADER.size)
        header = header._replace(label=label.astype(np.float32))
    return header, s[begin:]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("pack_img and unpack_img need Pillow: pip install pillow") from error
    return Image


def pack_img(
    header: IRHeader | tuple[int, object, int, int], img: npt.ArrayLike, quality: int = 95, img_fmt: str = ".jpg"
) -> bytes:
    """Encode an image behind a header, as ``mxnet.recordio.pack_img``. Needs Pillow (extra ``images``).

    Args:
        header: as in `pack`.
        img: uint8, shape (height, width) or (height, width, 3) in RGB order; anything else is a ValueError. MXNet takes
            BGR (``img[..., ::-1]``), with the same encoded result.
        quality: of a JPEG, 1 to 100; of a PNG, the compression level up to 9.
        img_fmt: ``".jpg"``, ``".jpeg"`` or ``".png"``.

    Example:
        >>> grey = np.full((2, 3), 128, dtype=np.uint8)
        >>> header, image = unpack_img(pack_img(IRHeader(0, 1.0, 5, 0), grey, img_fmt=".png"))
        >>> header.id, image.tolist()
        (5, [[128, 128, 128], [128, 128, 128]])
    """
    pillow = _pillow()
    formats = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}
    if img_fmt.lower() not in formats:
        raise ValueError(f"unknown image format {img_fmt!r}, use one of {', '.join(formats)}")
    check_unmasked(img)
    array = np.asarray(img)
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        wanted = "uint8 of shape (height, width) or (height, width, 3)"
        raise ValueError(f"an image is {wanted}, not {array.dtype} of shape {array.shape}")
    name = formats[img_fmt.lower()]
    settings = {"quality": quality} if name == "JPEG" else {"compress_level": max(0, min(quality, 9))}
    encoded = io.BytesIO()
    pillow.fromarray(np.ascontiguousarray(array)).save(encoded, format=name, **settings)
    return pack(header, encoded.getvalue())


def unpack_img(s: bytes, iscolor: int = -1) -> tuple[IRHeader, Pixels]:
    """Split a record into header and decoded image, as ``mxnet.recordio.unpack_img``. Needs Pillow (extra ``images``).

    Args:
        s: record made by `pack_img` or MXNet, in any format that Pillow reads.
        iscolor: 1 for RGB, 0 for grey, -1 for the stored channels. With 1 and 0, the image is rotated by its EXIF
            orientation, as in OpenCV.

    Returns:
        Header and array of shape (height, width) or (height, width, channels), RGB (MXNet: BGR). With ``iscolor`` 0 or
        1 it is uint8, the upper 8 of 16 bits as in OpenCV. With -1 it has the stored dtype (uint16, int32 or float32
        for such grey images; of several 16-bit channels Pillow reads the upper 8), and alpha as last channel.

    Raises:
        ValueError: The payload does not decode, or ``iscolor`` is unknown. With 0 or 1, pixels have more than 16 bits.
        ImportError: Pillow is not installed.

    Example:
        >>> record = pack_img((0, 1.0, 5, 0), np.zeros((2, 3, 3), dtype=np.uint8))
        >>> unpack_img(record)[1].shape, unpack_img(record, iscolor=0)[1].shape
        ((2, 3, 3), (2, 3))
    """
    if iscolor not in (-1, 0, 1):
        raise ValueError(f"unknown iscolor {iscolor!r}, use 1 for RGB, 0 for grey, -1 for what is stored")
    header, payload = unpack(s)
    return header, decode_image(payload, iscolor, f"record with id {header.id}", ". Was it written by pack_img()?")


def decode_image(payload: bytes, iscolor: int, name: str, advice: str = "", size: Size = None) -> Pixels:
    """Decode an image as `unpack_img` does; ``name`` and ``advice`` are for its errors.

    With ``size``, and an ``iscolor`` of 0 or 1, the image has the shape of torchvision's ``Resize(size)``. Of a JPEG,
    libjpeg then computes a half, a quarter or an eighth of each side, if no side gets shorter than ``size``.
    Simplejpeg decodes JPEGs if it is installed, to equal pixels: one of 500 x 375 takes 1.3 ms with ``size=256``, and
    with Pillow alone 1.8.
    """
    pillow = _pillow()
    try:
        image = pillow.open(io.BytesIO(payload))
        stored = image.size
        if size is not None:
            image.draft(None, (max(size),) * 2 if isinstance(size, tuple) else (size, size))
        pixels = decode_upright_jpeg(image, payload, iscolor)
        if pixels is None:
            image.load()
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, ... on bad bytes
        cause = "no format that Pillow knows" if isinstance(error, pillow.UnidentifiedImageError) else error
        text = f"its {len(payload)} bytes do not decode as an image ({cause}){advice}"
        raise ValueError(f"{name}: {text}") from error
    name = f"{name}: the {image.format} image"
    if pixels is None:
        return _pixels(image, iscolor, name, stored, size)
    return pixels if size is None else _resized(pixels, name, stored, size)


def decode_upright_jpeg(image: Any, payload: bytes, iscolor: int) -> Pixels | None:
    """Return the pixels of an upright JPEG from simplejpeg, or None: Pillow treats all others, and finds the errors."""
    if image.format != "JPEG" or image.mode != {1: "RGB", 0: "L"}.get(iscolor) or (decode := fast_decoder()) is None:
        return None
    with contextlib.suppress(Exception):  # at less than 8 pixels, several scales give one size
        if image.getexif().get(_ORIENTATION, 1) == 1 and min(image.size) >= 8:
            (width, height), is_grey = image.size, image.mode == "L"  # simplejpeg takes the scale that `draft` took
            pixels: Pixels = decode(payload, "GRAY" if is_grey else "RGB", min_height=height, min_width=width)
            return pixels[:, :, 0] if is_grey else pixels
    return None


@functools.cache
def fast_decoder() -> Any:
    with contextlib.suppress(Exception):  # such as a ValueError: it was built for another NumPy
        from simplejpeg import decode_jpeg

        return decode_jpeg
    return None


def _pixels(image: Any, iscolor: int, name: str, stored: tuple[int, int], size: Size) -> Pixels:
    from PIL import Image, ImageOps

    mode, is_png = image.mode, image.format == "PNG"
    if iscolor >= 0:
        with contextlib.suppress(Exception):  # ignore damaged EXIF data
            if image.getexif().get(_ORIENTATION, 1) != 1:  # exif_transpose copies every image
                image = ImageOps.exif_transpose(image)
    if mode.startswith("I") or mode == "F":  # more than 8 bits: Pillow's convert() clips them
        pixels = np.array(image)
        if mode == "I" and is_png:  # 16 bits in Pillow before 11
            pixels = pixels.astype(np.uint16)
        pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
        if iscolor == -1:
            return pixels
        if pixels.dtype != np.uint16:
            advice = "give iscolor=-1 for what is stored, and scale it"
            raise ValueError(f"{name} has pixels of {pixels.dtype}, which do not fit 8 bits: {advice}")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    if iscolor >= 0:
        wanted = "RGB" if iscolor else "L"
        pixels = np.array(image if image.mode == wanted else image.convert(wanted))
        return pixels if size is None else _resized(pixels, name, stored, size)
    if mode not in ("L", "LA", "RGB", "RGBA"):  # such as indices into a palette
        has_alpha = mode in ("PA", "La", "RGBa") or (mode == "P" and "transparency" in image.info)
        image = image.convert("RGBA" if has_alpha else "RGB")
    return np.array(image)


def _resized(pixels: Pixels, name: str, stored: tuple[int, int], size: int | tuple[int, int]) -> Pixels:
    """Resize as torchvision does. Of a picture of 500 x 375 it takes 0.6 ms, where Pillow takes 1.3."""
    import torch

    short, long = sorted(stored)  # the exact ratio; ``pixels`` are upright, and may have rounded sides
    height, width = size if isinstance(size, tuple) else (size, size * long // short)
    if not isinstance(size, tuple) and pixels.shape[1] < pixels.shape[0]:
        height, width = width, height
    if height * width > MOST_PIXELS:
        text = f"has {stored[0]} x {stored[1]} pixels, and would have {width} x {height} with size={size}"
        raise ValueError(f"{name} {text}: leave it out, or give (height, width)")
    planes = torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)
    planes = torch.nn.functional.interpolate(planes[None], (height, width), mode="bilinear", antialias=True)[0]
    return planes.permute(1, 2, 0).numpy() if pixels.ndim == 3 else planes[0].numpy()
