"""Tar shards, as WebDataset writes them: the members of one sample have one name, and stand together.

    Tar().index(file) -> arrays: where each member's bytes lie
    Tar().read(file, index, rows) -> [{"__key__": "000017", "jpg": b"...", "cls": b"3"}, ...]

A sample is the bytes of its members by their extensions: all behind the first dot of the file name. A transform decodes
them. Extensions are in lower case, as in WebDataset.

What can go wrong: no tar file, a tar file that is compressed as a whole (it can only be read from its beginning), an
extension that comes twice in one sample. All are a `ShardError` that names the shard.
"""

from __future__ import annotations

import tarfile
from typing import Any

import numpy as np

from sharded_loader.storage.files import ShardFile
from sharded_loader.storage.indexes import Index, packed, unpacked
from sharded_loader.storage.stores import ShardError


class Tar:
    """The format of ``.tar`` shards."""

    name = "tar"
    suffixes: tuple[str, ...] = (".tar",)

    def index(self, file: ShardFile) -> Index:
        """Where the members of each sample lie. Reads the headers of the whole file, once."""
        keys: list[str] = []
        extensions: dict[str, int] = {}
        firsts: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        kinds: list[int] = []
        seen: set[str] = set()
        try:
            with tarfile.open(fileobj=file.stream(), mode="r:") as tar:
                for member in tar:
                    folder, slash, base = member.name.rpartition("/")
                    key, dot, extension = base.partition(".")
                    if not member.isfile() or not dot or (base.startswith("__") and base.endswith("__")):
                        continue
                    key, extension = folder + slash + key, extension.lower()
                    if not keys or key != keys[-1]:
                        keys.append(key)
                        firsts.append(len(offsets))
                        seen = set()
                    if extension in seen:
                        raise ShardError(f"{file.name}: the sample {key!r} has two members .{extension}")
                    seen.add(extension)
                    offsets.append(member.offset_data)
                    sizes.append(member.size)
                    kinds.append(extensions.setdefault(extension, len(extensions)))
        except tarfile.TarError as error:
            raise ShardError(
                f"{file.name} is no plain tar file ({error}): decompress it if its name ends in .gz, or give its format"
            ) from None
        return {
            "firsts": np.array([*firsts, len(offsets)], np.int64),
            "offsets": np.array(offsets, np.int64),
            "sizes": np.array(sizes, np.int64),
            "kinds": np.array(kinds, np.int32),
            "keys": packed(keys),
            "extensions": packed(list(extensions)),
            "length": np.array(len(keys)),
        }

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[Any]:
        """The samples at these rows of the shard."""
        extensions = unpacked(index["extensions"])
        where = np.array(rows, np.int64)
        firsts = index["firsts"][where]
        counts = index["firsts"][where + 1] - firsts
        # Of each sample its members, one after the other.
        members = np.repeat(firsts + counts - np.cumsum(counts), counts) + np.arange(counts.sum())
        begins = index["offsets"][members]
        parts = iter(file.ranges(begins.tolist(), (begins + index["sizes"][members]).tolist()))
        kinds = iter(index["kinds"][members].tolist())
        keys = unpacked(index["keys"], rows)
        samples: list[Any] = []
        for key, count in zip(keys, counts.tolist(), strict=True):
            sample: dict[str, Any] = {"__key__": key}
            for _ in range(count):
                sample[extensions[next(kinds)]] = next(parts)
            samples.append(sample)
        return samples
