"""Shards of consecutive samples: RecordIO, MDS of MosaicML's streaming library, and lines of text.

An index has the offset of each sample and the end of the last one, so a sample is one byte range.

RecordIO shards are those of MXNet and of `sharded_loader.recordio`, indexed by their record headers; ``.idx`` files are
ignored. An MDS sample is a dict of its columns. Pickled columns are rejected, because unpickling runs code from the
shard. An MDS file is::

    uint32 count | uint32 offsets[count + 1] | JSON: names, encodings, sizes | samples
    sample: uint32 sizes of the columns without a fixed size | the columns' bytes

A line ends with LF, CR LF or the file; empty lines are samples. Missing, damaged or compressed shards and unknown
encodings are a `ShardError` that names the sample or byte offset.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.recordio.files import RecordBytes, RecordIOError, is_written, read_record, scan_records
from sharded_loader.storage.files import ShardError, ShardFile
from sharded_loader.storage.indexes import Index, decode_texts, encode_texts
from sharded_loader.storage.tar import kind_of


def _samples_at(file: ShardFile, index: Index, rows: list[int]) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield row, begin, end and bytes of each sample."""
    offsets, where = index["offsets"], np.array(rows, np.int64)
    begins, ends = offsets[where].tolist(), offsets[where + 1].tolist()
    return zip(rows, begins, ends, file.ranges(begins, ends), strict=True)


# -- RecordIO ----------------------------------------------------------------------------------------------------------


class RecordIO:
    """Format of ``.rec`` shards; a sample is the bytes of a record."""

    name = "records"
    suffixes: tuple[str, ...] = (".rec",)

    def index(self, file: ShardFile) -> Index:
        try:
            with file.stream() as stream:
                offsets = list(scan_records(RecordBytes(file.name, file.size), stream))
        except RecordIOError as error:
            raise ShardError(str(error)) from None
        return {"offsets": np.array([*offsets, file.size], np.int64), "length": np.array(len(offsets))}

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[bytes]:
        records = []
        for _, begin, end, part in _samples_at(file, index, rows):
            try:
                record, _ = read_record(RecordBytes(file.name, end, part), begin)
            except RecordIOError as error:
                raise ShardError(str(error)) from None
            if not is_written(part, record):
                problem = "the record is not as a writer leaves it: its length is damaged, or what follows it"
                raise ShardError(f"{file.name}, offset {begin}: {problem}. Copy or write the shard again")
            records.append(record)
        return records


# -- MDS ---------------------------------------------------------------------------------------------------------------


_DTYPES = {
    width + number: f"{kind}{width}"
    for width in (8, 16, 32, 64)
    for number, kind in enumerate(("uint", "int") if width == 8 else ("uint", "int", "float"))
}
"""dtypes of scalars, by the code at the beginning of an array with its own dtype."""


class MDS:
    """Format of ``.mds`` shards."""

    name = "mds"
    suffixes: tuple[str, ...] = (".mds",)
    scans = False

    def index(self, file: ShardFile) -> Index:
        offset = 0
        try:
            [head] = file.ranges([0], [file.guess])
            count, first = np.frombuffer(head, "<u4", 2).tolist()
            offset, table = 4, 4 * (count + 2)
            if not table <= first <= file.size:
                raise ValueError(f"{count} samples in {file.size} bytes")
            if first > len(head):
                head += file.ranges([len(head)], [first])[0]
            offsets = np.frombuffer(head, "<u4", count + 1, 4).astype(np.int64)
            if (np.diff(offsets) < 0).any() or offsets[-1] != file.size:
                raise ValueError(f"the offsets of its samples do not fit its {file.size} bytes")
            offset = table
            columns = json.loads(head[table:first])
            names, encodings, sizes = (columns[f"column_{what}"] for what in ("names", "encodings", "sizes"))
            for name, encoding, size in zip(names, encodings, sizes, strict=True):
                decoder(encoding, f"{file.name}, at byte {offset},")
                if not (size is None or 0 <= size < 1 << 32):
                    raise ValueError(f"its column {name!r} of {encoding} has {size} bytes")
            if len(set(names)) < len(names):
                raise ValueError("two of its columns have the same name")
            packed_names = encode_texts(names)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            advice = "give its format, decompress it, or copy it again"
            raise ShardError(f"{file.name} is not an MDS file ({error}; byte {offset}): {advice}") from None
        return {
            "offsets": offsets,
            "names": packed_names,
            "encodings": encode_texts(encodings),
            "sizes": np.array([size or -1 for size in sizes], np.int64),
            "length": np.array(count),
        }

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[dict[str, object]]:
        names, fixed = decode_texts(index["names"]), index["sizes"].tolist()
        decoders = [decoder(encoding, file.name) for encoding in decode_texts(index["encodings"])]
        samples = []
        for row, begin, end, data in _samples_at(file, index, rows):
            try:
                columns = zip(names, decoders, _cut(data, fixed), strict=True)
                samples.append({name: decode(value) for name, decode, value in columns})
            except ImportError:
                raise
            except Exception as error:  # a decoder may raise anything
                problem = f"{file.name} is damaged: sample {row}, bytes {begin} to {end}, cannot be read"
                raise ShardError(f"{problem} ({type(error).__name__}: {error}). Copy it again") from error
        return samples


def _cut(data: bytes, fixed: list[int]) -> list[bytes]:
    """Split a sample into the bytes of its columns; size -1 stands for one that is stored in the sample."""
    free = fixed.count(-1)
    given = iter(np.frombuffer(data, "<u4", free).tolist())
    ends = np.cumsum([4 * free, *(next(given) if size < 0 else size for size in fixed)]).tolist()
    if ends[-1] != len(data):
        raise ValueError(f"its columns need {ends[-1]} bytes, and it has {len(data)}")
    return [data[begin:end] for begin, end in pairwise(ends)]


def decoder(encoding: str, name: str) -> Callable[[bytes], object]:
    """Return the function that decodes a column's bytes; ``name`` is the shard, for errors.

    Example:
        >>> decoder("int", "x.mds")((7).to_bytes(8, "little")), decoder("ndarray:uint8:2,1", "x.mds")(b"ab").tolist()
        (7, [[97], [98]])
    """
    kind, _, rest = encoding.partition(":")
    if kind in _DTYPES.values():
        return lambda data: np.frombuffer(data, np.dtype(kind).newbyteorder("<"))[0]
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        fixed = tuple(map(int, shape.split(","))) if shape else None
        return lambda data: _array(data, np.dtype(dtype) if dtype else None, fixed)
    found = _DECODERS.get(kind)
    if found is None:
        why = "it is pickled, and to read it would run code from the shard" if kind == "pkl" else "it is unknown"
        raise ShardError(f"{name} has a column of unsupported encoding {encoding!r}: {why}. Write it as bytes")
    return found


def _array(data: bytes, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    begin = 0
    if dtype is None:
        dtype, begin = np.dtype(_DTYPES[data[0]]), 1
    if shape is None:
        dimensions, width = data[begin] >> 2, 1 << (data[begin] & 3)
        begin += 1
        shape = tuple(np.frombuffer(data, f"<u{width}", dimensions, begin).tolist())
        begin += width * dimensions
    return np.frombuffer(data, dtype.newbyteorder("<"), offset=begin).astype(dtype).reshape(shape)


def _raw_image(data: bytes) -> object:
    from PIL import Image

    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    return Image.frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _image(data: bytes) -> object:
    from PIL import Image

    return Image.open(io.BytesIO(data))


_DECODERS: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": lambda data: json.loads(data.decode()),
    "pil": _raw_image,
    "jpeg": _image,
    "png": _image,
}


# -- lines of text -----------------------------------------------------------------------------------------------------


PIECE = 1 << 20
"""Bytes to search for line ends at a time."""

HOLE = bytes(512)
"""Zeros that no text contains: of a copy that was interrupted, or a disk that lost power."""


class Lines:
    """Format of text files; a sample is a line without its line end."""

    name = "lines"
    suffixes: tuple[str, ...] = (".txt", ".tsv", ".jsonl", ".ndjson")

    def index(self, file: ShardFile) -> Index:
        if kind := kind_of(file):
            raise ShardError(f"{file.name} is {kind}, no plain text: decompress it, or write it as UTF-8")
        dtype = np.dtype("<u4" if file.size < 1 << 32 else "<i8")
        found, offset = [np.zeros(1, dtype)], 0
        with file.stream() as stream:
            while piece := stream.read(PIECE):
                if (hole := piece.find(HOLE)) >= 0:
                    text = "zeros are there in place of text: it is damaged, or only a part of it was copied"
                    raise ShardError(f"{file.name}, offset {offset + hole}: {text}. Copy it again")
                found.append((np.flatnonzero(np.frombuffer(piece, np.uint8) == 10) + (offset + 1)).astype(dtype))
                offset += len(piece)
        offsets = np.concatenate(found)
        if offsets[-1] < file.size:  # the last line has no line end
            offsets = np.append(offsets, np.array([file.size], dtype))
        return {"offsets": offsets, "length": np.array(len(offsets) - 1)}

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[str]:
        lines = []
        for row, begin, _, data in _samples_at(file, index, rows):
            line = data[:-2] if data.endswith(b"\r\n") else data.removesuffix(b"\n")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                where = f"{file.name}, line {row + 1}, offset {begin + error.start}"
                advice = "Convert the file: iconv -f latin1 -t utf-8"
                raise ShardError(f"{where}: this is not UTF-8 ({error.reason}). {advice}") from None
            lines.append(text if row else text.removeprefix("\ufeff"))  # byte order mark
        return lines
