"""Tar shards as WebDataset writes them: members with the same name form a sample.

    Tar().read(file, index, rows) -> [{"__key__": "000017", "jpg": b"...", "cls": b"3"}, ...]

A sample maps lower-case extensions, from the first dot of the file name, to undecoded bytes. Its members need not be
adjacent; samples are in the order of their first members. Directories, devices and names that begin with a dot (macOS
writes ``._000.jpg``) are skipped.

tarfile takes any header that it cannot parse for the end. So this module checks that the end mark stands there,
followed only by as many zeros as writers add. The index has a checksum of each member's header, which is compared at
each read: wrong offsets yield no wrong samples.

Errors are a `ShardError` with the offset: no tar file, compressed as a whole, damaged, truncated; duplicate extensions
in a sample, links, sparse files. Tar has no checksums of members' bytes or long names: damage there goes unnoticed.
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
from sharded_loader.storage.indexes import Index, decode_texts, encode_texts

BLOCK = 512

RECORDS = (10_240, *(BLOCK << power for power in range(13)))
"""Writers fill the last record with zeros. Records of tarfile, GNU tar and libarchive have 10,240 bytes, others one
block, and up to 2 MB with `tar -b`."""

NON_FILE_TYPES = (b"V", b"D", b"N", b"A")
"""Types of members that are not files: GNU volume labels, directory and long-name lists, Solaris access control
lists."""

_DAMAGE = (
    *(tarfile.TarError, ValueError, ArithmeticError, LookupError),
    *(TypeError, AttributeError, EOFError, MemoryError, RecursionError, struct.error),
)
"""Exceptions of tarfile for damaged headers."""

SIGNS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
SIGNS |= {b"PK\3\4": "zip", b"\x04\x22\x4d\x18": "lz4", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""First bytes of files that are compressed, or texts of another encoding."""


class Tar:
    """Format of ``.tar`` shards."""

    name = "tar"
    suffixes: tuple[str, ...] = (".tar",)

    def index(self, file: ShardFile) -> Index:
        """Read all headers, once."""
        keys: dict[str, tuple[int, str]] = {}
        extensions: dict[str, int] = {}
        # Offset, size and checksum of the header of each member, by the numbers of its sample and extension.
        members: dict[tuple[int, int], tuple[int, int, int]] = {}
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
            "keys": encode_texts([key for _, key in keys.values()]),
            "extensions": encode_texts(list(extensions)),
            "length": np.array(len(keys)),
        }

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[dict[str, object]]:
        extensions = decode_texts(index["extensions"])
        where = np.array(rows, np.int64)
        firsts = index["firsts"][where]
        counts = index["firsts"][where + 1] - firsts
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
        keys = decode_texts(index["keys"], rows)
        samples = []
        for key, count in zip(keys, counts.tolist(), strict=True):
            sample: dict[str, object] = {"__key__": key}
            for _ in range(count):
                sample[extensions[next(kinds)]] = next(parts)
            samples.append(sample)
        return samples


def _has_bytes(file: ShardFile, member: tarfile.TarInfo) -> bool:
    """Return True if a member is a file. Raise an error if its bytes are elsewhere."""
    kind = ""
    if member.islnk() or member.issym():
        kind = f"a link to {member.linkname!r}"
    elif member.type == b"M":
        kind = "a part of a file of several volumes"
    elif member.issparse() or any(name.startswith("GNU.sparse.") for name in member.pax_headers):
        kind = "a sparse file"
    if kind:
        problem = f"{file.name}, offset {member.offset}: {member.name!r} is {kind}"
        advice = "which is not supported. Write the shard again, with tar -h --hard-dereference and without -M and -S"
        raise ShardError(f"{problem}, {advice}")
    # By POSIX, unknown types are files.
    return member.isfile() or member.type not in (*tarfile.SUPPORTED_TYPES, *NON_FILE_TYPES)


def _members(file: ShardFile) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield tarfile's members, each with its own header, and check that nothing follows the last one."""
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
            kind, advice = kind_of(file), "give format= if it has another format; otherwise copy or write it again"
            why, advice = (f"it is {kind}", "decompress it") if kind else (error, advice)
            raise ShardError(f"{file.name} is not a plain tar file (offset 0: {why}): {advice}") from None
        advice = "it is damaged or cut. Copy or write it again"
        raise ShardError(f"{file.name} is not a complete tar file (offset {end}: {error}): {advice}") from None


def kind_of(file: ShardFile) -> str:
    """Return the kind of file that the first bytes show, from `SIGNS`, or an empty text."""
    [begin] = file.ranges([0], [min(file.size, 14)])
    if file.name.startswith("http") and begin.lower().startswith((b"<!doctype html", b"<html>")):
        raise ShardError(f"{file.name} is a web page: see what it says, such as an error, or a form to log in")
    return next((name for sign, name in SIGNS.items() if begin.startswith(sign)), "")


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
