"""Tar shards, as WebDataset writes them: the members of one sample have one name.

    Tar().index(file) -> arrays: where each member's bytes lie
    Tar().read(file, index, rows) -> [{"__key__": "000017", "jpg": b"...", "cls": b"3"}, ...]

A sample is the bytes of its members by their extensions: all behind the first dot of the file name. A transform decodes
them. Extensions are in lower case, as in WebDataset. The members of a sample need not stand together, and samples are
in the order of their first members. Directories and devices have no bytes, and are skipped. So are names that begin
with a dot, such as the ``._000.jpg`` of macOS.

tarfile ends at the first header that it does not understand, as if the file ended there. So this module checks where
tarfile has stopped: the end mark must stand there, and then zeros up to the end of the file, no more than writers add.

The index has a checksum of each member's header, which is read and compared with the member. So an index with wrong
offsets gives no wrong samples.

What can go wrong: no tar file, a tar file that is compressed as a whole (it can only be read from its beginning), a
damaged or cut one. An extension that comes twice in one sample, a link or a sparse file in the place of a member. All
are a `ShardError` that names the shard and the offset. Damage in the bytes of members, and in names that are too
long for a header, is not noticed: a tar file has no checksums of them.
"""

from __future__ import annotations

import posixpath
import struct
import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from sharded_loader.storage.files import ShardError, ShardFile
from sharded_loader.storage.indexes import Index, packed, unpacked

BLOCK = 512

RECORDS = (10_240, *(BLOCK << power for power in range(13)))
"""A writer fills its last record with zeros. tarfile, GNU tar and libarchive have records of 10,240 bytes, others of
one block. With `tar -b` a record has up to 2 MB."""

NOTES = (b"V", b"D", b"N", b"A")
"""Members that are no files: GNU's label of a volume, lists of a folder and of long names, Solaris' access rights."""

_DAMAGE = (
    *(tarfile.TarError, ValueError, ArithmeticError, LookupError),
    *(TypeError, AttributeError, EOFError, MemoryError, RecursionError, struct.error),
)
"""What tarfile raises for damaged headers."""

COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""The first bytes of compressed files, and the program that decompresses them."""

_Span = tuple[int, int, int]
"""Where the bytes of a member begin, how many they are, and the checksum of the header before them."""


class Tar:
    """The format of ``.tar`` shards."""

    name = "tar"
    suffixes: tuple[str, ...] = (".tar",)
    scans = True

    def index(self, file: ShardFile) -> Index:
        """Where the members of each sample lie. Reads the headers of the whole file, once."""
        keys: dict[str, tuple[int, str]] = {}
        extensions: dict[str, int] = {}
        members: dict[tuple[int, int], _Span] = {}  # by the numbers of their samples and extensions
        for member, header in _members(file):
            folder, slash, base = member.name.rpartition("/")
            key, dot, extension = base.partition(".")
            if not dot or not key or (base.startswith("__") and base.endswith("__")) or not _has_bytes(file, member):
                continue
            key, extension = folder + slash + key, extension.lower()
            sample, _ = keys.setdefault(posixpath.normpath(key), (len(keys), key))
            place = sample, extensions.setdefault(extension, len(extensions))
            if place in members:
                problem = f"the sample {key!r} has two members .{extension}, one at offset {member.offset}"
                raise ShardError(f"{file.name}: {problem}: write the shard again, with one of them")
            members[place] = member.offset_data, member.size, zlib.crc32(header)
        table = np.array([(*place, *span) for place, span in members.items()], np.int64).reshape(-1, 5)
        samples, kinds, offsets, sizes, headers = table[table[:, 0].argsort(kind="stable")].T.copy()
        return {
            "firsts": samples.searchsorted(np.arange(len(keys) + 1)),
            "offsets": offsets,
            "sizes": sizes,
            "headers": headers.astype(np.uint32),
            "kinds": kinds.astype(np.int32),
            "keys": packed([key for _, key in keys.values()]),
            "extensions": packed(list(extensions)),
            "length": np.array(len(keys)),
        }

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[dict[str, object]]:
        """The samples at these rows of the shard."""
        extensions = unpacked(index["extensions"])
        where = np.array(rows, np.int64)
        firsts = index["firsts"][where]
        counts = index["firsts"][where + 1] - firsts
        # Of each sample its members, one after the other.
        members = np.repeat(firsts + counts - np.cumsum(counts), counts) + np.arange(counts.sum())
        begins = index["offsets"][members]
        heads, begin, end = (part.tolist() for part in (begins - BLOCK, begins, begins + index["sizes"][members]))
        found = file.ranges(heads + begin, begin + end)
        parts = iter(found[len(begin) :])
        for header, checksum, head in zip(found, index["headers"][members].tolist(), heads, strict=False):
            if zlib.crc32(header) != checksum:
                advice = "If it has an index file, write that again (sharded-loader index). Make the dataset again"
                raise ShardError(f"{file.name}, offset {head}: not the header that its index names. {advice}")
        kinds = iter(index["kinds"][members].tolist())
        keys = unpacked(index["keys"], rows)
        samples = []
        for key, count in zip(keys, counts.tolist(), strict=True):
            sample: dict[str, object] = {"__key__": key}
            for _ in range(count):
                sample[extensions[next(kinds)]] = next(parts)
            samples.append(sample)
        return samples


def _has_bytes(file: ShardFile, member: tarfile.TarInfo) -> bool:
    """Whether a member is a file. One whose bytes are elsewhere is an error."""
    kind = ""
    if member.islnk() or member.issym():
        kind = f"a link to {member.linkname!r}"
    elif member.type == b"M":
        kind = "a part of a file of several volumes"
    elif member.issparse() or any(name.startswith("GNU.sparse.") for name in member.pax_headers):
        kind = "a sparse file"
    if kind:
        problem = f"{file.name}, offset {member.offset}: {member.name!r} is {kind}"
        advice = "which is not read. Write the shard again, with tar -h --hard-dereference and without -M and -S"
        raise ShardError(f"{problem}, {advice}")
    return member.isfile() or member.type not in (*tarfile.SUPPORTED_TYPES, *NOTES)  # POSIX: unknown ones are files


def _members(file: ShardFile) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """What tarfile finds, with its own header. That nothing follows the last member is checked."""
    end = 0
    try:
        with file.stream() as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if member.size < 0 or not end < tar.offset <= file.size:
                    raise tarfile.ReadError(f"the member {member.name!r} goes past the end of the file")
                stream.seek(member.offset_data - BLOCK)
                yield member, stream.read(BLOCK)
                end = tar.offset
            _check_end(stream, end, file.size)
    except _DAMAGE as error:
        if not end:
            kind, advice = _kind(file.ranges([0], [min(file.size, 6)])[0])
            raise ShardError(f"{file.name} is no plain tar file (offset 0: {kind or error}): {advice}") from None
        advice = "it is damaged or cut. Copy or write it again"
        raise ShardError(f"{file.name} is no whole tar file (offset {end}: {error}): {advice}") from None


def _kind(begin: bytes) -> tuple[str, str]:
    """What a file is that is no tar file, by its first bytes, and what to do; an empty text if it is not known."""
    if not begin:
        return "it is empty", "copy or write it again, or leave it out"
    for sign, name in COMPRESSED.items():
        if begin.startswith(sign):
            return f"it is compressed with {name}", f"decompress it with {name} -d. Shards are read by index"
    return "", "give format= if it has another format; otherwise copy or write it again"


def _check_end(stream: BinaryIO, offset: int, size: int) -> None:
    """Check that a tar file ends here: two blocks of zeros, and zeros that fill the last record."""
    stream.seek(offset)
    while piece := stream.read(1 << 16):
        if piece.strip(b"\0"):
            raise tarfile.ReadError("neither the header of a member nor the end mark is there")
    zeros = size - offset
    if zeros < 2 * BLOCK:
        raise tarfile.ReadError("the end mark is not whole")
    if not any(zeros - 2 * BLOCK < record and size % record == 0 for record in RECORDS):
        raise tarfile.ReadError(f"{zeros:,} bytes of zeros are there, more than a writer adds")
