"""MXNet's RecordIO files, read and written byte for byte: sequentially, by key, and as a dataset.

    train.rec    | magic | flag << 29 | length | payload | zeros up to a multiple of 4 |  and so on
    train.idx    key <TAB> offset of the record in train.rec, one line each

Classes and functions are those of ``mxnet.recordio`` and ``mxnet.gluon.data``. `files` has the format, `images` MXNet's
label header (`pack`, `unpack`), `vision` the datasets of pictures. A reader serves any number of threads through one
descriptor, and opens its own in each process. A writer belongs to the process that opened it. A damaged file raises
`RecordIOError` at the damaged record; all records before it stay readable.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from sharded_loader.extend import Dataset, Empty, Indices
from sharded_loader.extend.data import bulk, checked_index, checked_indices
from sharded_loader.extend.tools import warn
from sharded_loader.recordio import files
from sharded_loader.recordio.files import MAX_LENGTH, Closable, RecordFile, RecordIOError, Writer
from sharded_loader.recordio.images import IRHeader, pack, pack_img, unpack, unpack_img

__all__ = [
    "IRHeader",
    "MXIndexedRecordIO",
    "MXRecordIO",
    "RecordFileDataset",
    "RecordIOError",
    "pack",
    "pack_img",
    "unpack",
    "unpack_img",
]


class MXRecordIO(Closable):
    """Sequential reader or writer of a ``.rec`` file.

    Threads may share it: each record is read by one of them, and written as a whole. A copy in another process (pickled
    or forked) opens the file itself and reads from the beginning. Writers cannot be pickled.

    Args:
        uri: path of the file.
        flag: ``"r"`` to read, or ``"w"`` to write, which empties an existing file.

    Raises:
        ValueError: ``flag`` is unknown, or the file is used after `close`.
        OSError: The file cannot be opened.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "letters.rec")
        >>> with MXRecordIO(path, "w") as file:
        ...     for record in (b"a", b"bc"):
        ...         file.write(record)
        >>> with MXRecordIO(path, "r") as file:
        ...     file.read(), file.read(), file.read()
        (b'a', b'bc', None)
        >>> folder.cleanup()

    Source: ``mxnet.recordio.MXRecordIO``.
    """

    def __init__(self, uri: str | os.PathLike[str], flag: str) -> None:
        if flag not in ("r", "w"):
            raise ValueError(f"{os.fspath(uri)}: unknown flag {flag!r}, use 'r' to read or 'w' to write")
        self.uri = os.fspath(uri)
        self._path = os.path.abspath(self.uri)  # the working directory may change before it is reopened
        self.flag, self.writable = flag, flag == "w"
        self._file: RecordFile | Writer | None = None
        self._pid = 0
        self.open()

    def _reset_after_fork(self) -> None:
        """In another process, reset the lock: a forked child may inherit one that is locked for ever."""
        if self._pid != os.getpid():
            self._turn = threading.RLock()
            self._position = 0
            self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """True until `close` is called."""
        return self._file is not None

    def open(self) -> None:
        """Reopen the file after `close`, at the beginning; a writer empties it."""
        self.close()
        self._position = 0
        self._file = Writer(self._path) if self.writable else RecordFile(self._path)

    def close(self) -> None:
        """Close the file. Repeated calls have no effect."""
        self._reset_after_fork()
        with self._turn:  # wait for a write in another thread
            if self._file is not None:
                self._file.close()
            self._file = None

    def reset(self) -> None:
        """Return to the first record; a writer empties its file, as MXNet's does."""
        file = self._opened("write" if self.writable else "read")
        if self.writable:
            file.check()
            self.open()
        self._position = 0

    def read(self) -> bytes | None:
        """Return the next record, or None after the last one. A damaged record is a `RecordIOError`, at each call."""
        file: RecordFile = self._opened("read")
        with self._turn:
            if self._position == file.size:
                return None
            record, self._position = file.read(self._position)
            return record

    def write(self, buf: bytes | bytearray | memoryview) -> None:
        """Append ``buf`` as one record.

        Raises:
            ValueError, TypeError: The record has 2**29 bytes or more, or is not bytes.
            RuntimeError: The process is a forked child of the one that opened the file.
        """
        if not isinstance(buf, bytes | bytearray | memoryview):
            raise TypeError(f"{self.uri}: a record is bytes, not {type(buf).__name__} (a str needs .encode())")
        size = memoryview(buf).nbytes
        if size > MAX_LENGTH:
            text = f"a record of {size} bytes is too long, RecordIO has room for {MAX_LENGTH}: split it"
            raise ValueError(f"{self.uri}: {text}")
        file = self._opened("write")
        with self._turn:
            file.write(files.framed(bytes(buf)))

    def tell(self) -> int:
        """Return the offset of the next record to write, or to `read`."""
        file = self._opened("write" if self.writable else "read")
        return int(file.offset) if self.writable else self._position

    def _opened(self, verb: str) -> Any:
        self._reset_after_fork()
        if self.writable != (verb == "write"):
            raise io.UnsupportedOperation(f"{self.uri} was opened with flag {self.flag!r}, which cannot {verb}")
        if self._file is None:
            raise ValueError(f"{self.uri} is closed: {verb} before close(), or call open()")
        return self._file

    def __getstate__(self) -> dict[str, object]:
        if self.writable:
            raise TypeError(f"{self.uri}: a writer belongs to its process and cannot be pickled; pickle a reader")
        return {**self.__dict__, "_turn": None, "_pid": 0}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r}, {self.flag!r}{'' if self.is_open else ', closed'})"


class MXIndexedRecordIO(MXRecordIO):
    """Reader or writer of a ``.rec`` file by key, through an ``.idx`` file.

    Any number of threads may call `read_idx` at once. If the ``.idx`` is missing, the ``.rec`` is scanned, and its
    records get the keys 0, 1, 2, ...; nothing is written. A damaged record ends the scan: it has the last key, and
    reading it raises an error. Source: ``mxnet.recordio.MXIndexedRecordIO``.

    Args:
        idx_path: path of the index.
        uri: path of the records.
        flag: ``"r"`` or ``"w"``, as in `MXRecordIO`.
        key_type: converts the text of a key.

    Attributes:
        idx: dict from key to offset.
        keys: list of the keys in the order of the index.

    Raises:
        ValueError: A line of the index is malformed.
        RecordIOError: The index is missing, and the file is not a RecordIO file.
        OSError: A file cannot be opened.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> paths = [os.path.join(folder.name, name) for name in ("d.idx", "d.rec")]
        >>> with MXIndexedRecordIO(*paths, "w") as file:
        ...     file.write_idx(7, b"seven")
        ...     file.write_idx(-1, b"minus one")
        >>> with MXIndexedRecordIO(*paths, "r") as file:
        ...     file.keys, file.read_idx(-1)
        ([7, -1], b'minus one')
        >>> folder.cleanup()
    """

    def __init__(
        self,
        idx_path: str | os.PathLike[str],
        uri: str | os.PathLike[str],
        flag: str,
        key_type: Callable[[str], object] = int,
    ) -> None:
        self.idx_path = os.fspath(idx_path)
        self._path_of_index = os.path.abspath(self.idx_path)
        self.key_type = key_type
        self._index_writer: Writer | None = None
        super().__init__(uri, flag)

    def open(self) -> None:
        super().open()
        self.idx: dict[Any, int] = {}
        self.keys: list[Any] = []
        try:
            if self.writable:
                self._index_writer = Writer(self._path_of_index)
            else:
                self.keys, offsets = self._opened("read").index(self._path_of_index, self.key_type)
                self.idx = dict(zip(self.keys, offsets, strict=True))
            if len(self.idx) < len(self.keys):
                text = "keys occur more than once: read_idx gives the last record of a key, as MXNet does"
                warn(f"{self.idx_path}: {len(self.keys) - len(self.idx)} {text}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        if self._index_writer is not None:
            self._index_writer.close()
        self._index_writer = None

    def _offset(self, key: Hashable) -> int:
        try:
            return self.idx[key]
        except (KeyError, TypeError):  # TypeError: unhashable
            known = f"it has {len(self.idx)} keys, the first are " + ", ".join(map(repr, self.keys[:5]))
            raise KeyError(f"{self.idx_path}: no key {key!r} of type {type(key).__name__}; {known}") from None

    def seek(self, idx: Hashable) -> None:
        """Make the record of key ``idx`` the next one to `read`. Unknown keys, also negative ones, are a KeyError."""
        self._opened("read")
        self._position = self._offset(idx)

    def read_idx(self, idx: Hashable) -> bytes:
        """Return the record of key ``idx``. The next `read` returns the one after it.

        Raises:
            KeyError: The key is unknown. Negative numbers are ordinary keys.
            RecordIOError: The record is damaged, or the file was replaced or rewritten. It may grow.
        """
        file: RecordFile = self._opened("read")
        record, self._position = file.read(self._offset(idx))
        file.check()
        return record

    def write_idx(self, idx: Any, buf: bytes | bytearray | memoryview) -> None:
        """Append ``buf`` as one record under the key ``key_type(idx)``.

        A key that exists, contains a tab or line end, or is changed by ``key_type`` (5.7 to 5) is a ValueError. Also
        raises what `write` does.
        """
        file: Writer = self._opened("write")
        file.check()
        with self._turn:
            offset = file.offset
            try:
                key = self.key_type(idx)
                why = f"it was written before, at offset {self.idx[key]}" if key in self.idx else ""
                if isinstance(idx, float) and key != idx and not isinstance(key, str):
                    why = f"it would become {key!r}"
                if any(mark in str(key) for mark in "\t\r\n") or not str(key).strip():
                    why = "it is blank, or has a tab or a line end"
            except (ValueError, TypeError) as error:
                why = str(error)
            if why:
                name, advice = getattr(self.key_type, "__name__", self.key_type), "give another key, or key_type=str"
                raise ValueError(f"{self.idx_path}: {idx!r} cannot be a key of type {name}: {why}: {advice}")
            self.write(buf)
            assert self._index_writer is not None
            self._index_writer.write(files.index_line(key, offset).encode("utf-8", "surrogateescape"))
            self.idx[key] = offset
            self.keys.append(key)


class RecordFileDataset(Closable, Dataset):
    """Map-style dataset over a ``.rec`` file: ``dataset[i]`` is the i-th record of its index, as bytes.

    The index is the ``.idx`` file beside it (``train.rec``, ``train.idx``). Without one, the file is scanned once, and
    workers receive the offsets. Records that the index does not list are not read: delete the ``.idx`` of joined files.
    Keys are ignored, so records with equal keys are all read. The dataset can be shared by threads, forked and pickled.
    Source: ``mxnet.gluon.data.RecordFileDataset``.

    Args:
        filename: path of the ``.rec`` file.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The index is malformed, or empty although the file is not.
        RecordIOError: It is not a RecordIO file. Reading raises it for damaged records, and if the file was replaced or
            rewritten. Records may be appended; the dataset ignores them.

    Example:
        >>> import os, tempfile
        >>> from sharded_loader.recordio import MXRecordIO, RecordFileDataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "letters.rec")
        >>> with MXRecordIO(path, "w") as file:
        ...     for record in (b"a", b"b", b"c"):
        ...         file.write(record)
        >>> with RecordFileDataset(path) as dataset:
        ...     len(dataset), dataset[0], dataset[-1], dataset.get_batch([2, 0])
        (3, b'a', b'c', [b'c', b'a'])
        >>> folder.cleanup()
    """

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        self.filename = os.fspath(filename)
        self._file = RecordFile(self.filename)
        idx_path = os.path.splitext(self.filename)[0] + ".idx"
        _, offsets = self._file.index(idx_path, str)
        if not offsets and self._file.size:  # a scan would have found a record, or raised an error
            text = f"{self.filename} has {self._file.size} bytes: delete the .idx to have it rebuilt"
            raise ValueError(f"{idx_path} is empty, {text}")
        self._offsets = np.array(offsets, dtype=np.int64)
        self._sizes = files.guessed_sizes(self._offsets, self._file.size)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> bytes:
        record, _ = self._file.read(int(self._offsets[checked_index(index, len(self))]))
        self._file.check()
        return record

    @bulk
    def __getitems__(self, indices: Iterable[int]) -> list[bytes]:
        return RecordFileDataset.get_batch(self, list(indices))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty | None = None) -> list[bytes]:
        """Return the same as ``[dataset[i] for i in indices]``; for small records this is several times as fast.

        ``empty``, a loader's allocator, is unused, because a batch of bytes is a list. Subclasses that override
        ``__getitem__`` have no ``get_batch`` unless they define one. Raises `RecordIOError` for the first damaged
        record, or an IndexError.
        """
        numbers = checked_indices(indices, len(self))
        records = files.read_records(self._file, self._offsets[numbers], self._sizes[numbers])
        self._file.check()
        return records

    def close(self) -> None:
        """Close the file in this process. Repeated calls have no effect."""
        self._file.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.filename!r}, {len(self)} records)"
