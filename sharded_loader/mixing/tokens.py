"""`TokenWindows`: windows of files of token ids, by index. What language models are pretrained on.

    paths or arrays --_part_of--> parts: dtype, number of tokens, documents
    index --search in the sums of windows--> part, window --_starts--> its first token
    first tokens --one gather per part--> (windows, length + 1) tokens --cast--> inputs, targets: int64

A part is one file or one array. A window has ``length + 1`` tokens of one part: the inputs are all but the last one,
the targets all but the first one. Windows begin at every ``stride``-th token, so no table of windows is needed. Windows
inside documents have a table of one number for `BLOCK` documents. The search goes on in the documents of one block.

The dataset owns no tokens of files. A process maps a file when it first reads one of its windows, and keeps the last
`OPEN` ones mapped. Maps have no position, so threads and forked processes share them. The dataset travels to spawned
workers as its paths, and its tables.

The time, size and inode of a file are compared before and after each read. So windows of two versions never mix. If
another program cuts a file during a read, the system ends the process (SIGBUS). A cut before the read is an error.

What can go wrong: a file that is cut or has no tokens, an index of another file (ValueError when the dataset is made).
A file that has changed (OSError when it is read). Token ids beyond ``vocab_size`` (ValueError that names the id).
"""

from __future__ import annotations

import os
import platform
import stat
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sharded_loader.base.checks import check_int, refuse_arguments
from sharded_loader.base.described import an
from sharded_loader.batching.protocol import Array, Empty, new_array
from sharded_loader.data.bulk import Indices, Int64s, bulk, checked_index, checked_indices
from sharded_loader.data.datasets import Dataset
from sharded_loader.data.files import is_rewritten, settled, tag_of

OPEN = 64
"""Mapped arrays that a process keeps. Each holds a descriptor."""

ADVICE = "give a number of tokens, such as 1024"

BLOCK, CHUNK = 64, 1 << 18
"""Documents for which the table has one number, and documents that are looked at together when it is made."""

MAGIC = b"MMIDIDX\0\0"
HEAD = np.dtype([("magic", "V9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""The head of an index of Megatron, and its codes of dtypes. After the head it has the sizes of sequences (int32), the
bytes at which they begin (int64), and the sequences at which documents begin (int64)."""


class _MappedArray(NamedTuple):
    """An array in a file.

    Attributes:
        path: of the file, absolute.
        dtype: of the array.
        offset: of its first byte.
        length: the number of its items.
        bytes: of the whole file.
        tag: of the file, as of `tag_of`.
        machine: on which the tag was read. Another one has a copy of the file, with other times and inode.
    """

    path: str
    dtype: str
    offset: int
    length: int
    bytes: int
    tag: str
    machine: str


class _TokenPart(NamedTuple):
    """One file or one array.

    Attributes:
        tokens: where they are.
        bounds: where documents begin, and where the last one ends, in tokens. Or two arrays of Megatron's index: the
            sequences at which documents begin, and the bytes at which sequences begin. None: windows go across.
        documents: how many there are.
        table: of each block of documents, how many windows it and the blocks before it have.
    """

    tokens: _MappedArray | Array
    bounds: Int64s | tuple[_MappedArray, _MappedArray] | None = None
    documents: int = 0
    table: Int64s | None = None

    @property
    def name(self) -> str:
        return (
            self.tokens.path if isinstance(self.tokens, _MappedArray) else f"the array of {len(self.tokens):,} tokens"
        )

    @property
    def length(self) -> int:
        return self.tokens.length if isinstance(self.tokens, _MappedArray) else len(self.tokens)


class TokenWindows(Dataset):
    """Windows of token ids, from files or arrays: each sample is a pair (inputs, targets), shifted by one token.

    Args:
        tokens: A file of token ids, an array of them, or a list of files or arrays. A name that ends in ``.npy`` is
            NumPy's format. A file with an ``.idx`` of the same name beside it is Megatron's ``.bin``; you may leave
            out ``.bin``. Any other file has nothing but tokens, as nanoGPT writes it. Files are mapped, arrays stay in
            memory.
        length: The number of tokens in the inputs, and in the targets. A window reads ``length + 1`` tokens.
        stride: The number of tokens from the beginning of a window to the next one. None: ``length``, so that each
            token but the first of a file is a target once.
        dtype: The dtype of a file that has nothing but tokens, such as ``"uint16"``. Other files say their own.
        documents: Whether windows stay inside documents. False: they go across. True: the ``.idx`` says where
            documents end. Or the number of tokens of each document, as an array; for a list of files, a list of arrays.
        vocab_size: The number of token ids. If you give it, each batch is checked: a wrong ``dtype`` then is an error.

    A window never reaches into a second file. Tokens after the last whole window of a file, or with ``documents`` of a
    document, are in no window. Example: 10 tokens, ``length=4``: windows begin at tokens 0 and 4, and token 9 is left.

    Raises:
        TypeError: The tokens are no integers, or a file needs ``dtype``.
        ValueError: ``length`` or ``stride`` is below 1. A file is empty, cut, or shorter than a window. Its ``.idx``
            is damaged or of another file. The lengths of documents do not add up. Token ids do not fit the dtype.
        FileNotFoundError: A file is missing.
        OSError: A file was changed after the dataset was made.

    Example:
        >>> dataset = TokenWindows(np.arange(10, dtype=np.uint16), length=4)
        >>> len(dataset), dataset[1]
        (2, (array([4, 5, 6, 7]), array([5, 6, 7, 8])))
        >>> inputs, targets = TokenWindows(np.arange(10), 4, documents=[3, 7]).get_batch([0])
        >>> inputs, targets
        (array([[3, 4, 5, 6]]), array([[4, 5, 6, 7]]))

    Source of the idea: the data loop of nanoGPT; the file format of Megatron-LM's ``IndexedDataset``.
    """

    def __init__(
        self,
        tokens: Any,
        length: int,
        stride: int | None = None,
        dtype: Any = None,
        documents: Any = False,
        vocab_size: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_arguments("TokenWindows", unknown, type(self).__init__)
        self._length = check_int("length", length, 1, ADVICE)
        self._stride = self._length if stride is None else check_int("stride", stride, 1, ADVICE)
        self._vocab_size = None if vocab_size is None else check_int("vocab_size", vocab_size, 1, "give len(tokenizer)")
        self._maps: dict[_MappedArray, Array] = {}
        given = tokens if isinstance(tokens, (list, tuple)) else [tokens]
        ends = documents if given is tokens and isinstance(documents, (list, tuple)) else [documents]
        if documents is None or isinstance(documents, bool):
            ends = [bool(documents)] * len(given)
        if not given or len(given) != len(ends):
            raise ValueError(f"{len(given)} files and documents of {len(ends)}: give files, and an array for each")
        parts = [_part_of(one, dtype, lengths) for one, lengths in zip(given, ends, strict=True)]
        self._parts = [part._replace(table=self._table(part)) for part in parts]
        self._ends: Int64s = np.cumsum([self._windows(part) for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self.__getitems__([checked_index(index, len(self))])[0]

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples, read as one batch."""
        return list(zip(*TokenWindows.get_batch(self, indices), strict=True))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch: inputs and targets, two int64 arrays of shape (windows, ``length``).

        Args:
            indices: of the windows; negative ones count from the end.
            empty: gives the memory: ``empty(shape, dtype)`` returns an array. A loader gives its own.

        Raises:
            IndexError: one is out of range.
            OSError: a file was changed.
            ValueError: a token id is not below ``vocab_size``.
        """
        where = checked_indices(indices, len(self))
        shape, dtype = (len(where), self._length), np.dtype(np.int64)
        inputs, targets = empty(shape, dtype), empty(shape, dtype)
        parts = np.searchsorted(self._ends, where, side="right")
        for number in dict.fromkeys(parts.tolist()):
            rows = slice(None) if len(self._parts) == 1 else np.flatnonzero(parts == number)
            block = self._read(self._parts[number], where[rows] - (self._ends[number - 1] if number else 0))
            inputs[rows], targets[rows] = block[:, :-1], block[:, 1:]
        return [inputs, targets]

    def close(self) -> None:
        """Unmap the files. A window that is read later maps its file again."""
        self._maps.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": {}}

    @property
    def _fingerprint(self) -> str:
        """For `data.inspection`: names and sizes of files, a few tokens of arrays. Folders and times may change."""
        known = [
            (os.path.basename(part.name), part.length)
            if isinstance(part.tokens, _MappedArray)
            else zlib.crc32(part.tokens[:1024].tobytes())
            for part in self._parts
        ]
        return repr((known, self._length, self._stride, self._ends.tolist()))

    def __repr__(self) -> str:
        return f"TokenWindows({len(self):,} windows of {self._length:,} tokens, files: {len(self._parts)})"

    # -- windows of one part --------------------------------------------------------------------------------------

    def _fitting(self, tokens: Any) -> Any:
        """How many windows fit into these numbers of tokens."""
        return np.maximum(0, (tokens - 1 - self._length) // self._stride + 1)

    def _windows(self, part: _TokenPart) -> int:
        """How many windows a part has: at least one, of token ids below ``vocab_size``."""
        found = int(self._fitting(part.length) if part.table is None else part.table[-1])
        if not found:
            what = f"only {part.length:,} tokens" if part.table is None else "no document that is long enough"
            raise ValueError(f"{part.name} has {what}; a window needs {self._length + 1:,}. Give a smaller length")
        dtype = np.dtype(part.tokens.dtype)
        if self._vocab_size is not None:
            if np.iinfo(dtype).max < self._vocab_size - 1:
                raise ValueError(
                    f"{part.name} is of {dtype}, too small for vocab_size={self._vocab_size:,}: write it as uint32"
                )
            self._read(part, np.zeros(1, np.int64))
        return found

    def _table(self, part: _TokenPart) -> Int64s | None:
        """The table of a part, if windows stay inside documents."""
        if part.bounds is None:
            return None
        found = [np.zeros(0 if part.documents else 1, np.int64)]
        for first in range(0, part.documents, CHUNK):
            bounds = self._bounds(part, np.arange(first, min(first + CHUNK, part.documents) + 1))
            sizes = np.diff(bounds)
            if sizes.min() < 0 or bounds[0] < 0 or bounds[-1] > part.length:
                raise ValueError(f"{part.name}: the .idx has documents that do not lie in the .bin: copy both again")
            found.append(np.add.reduceat(self._fitting(sizes), np.arange(0, len(sizes), BLOCK)))
        table: Int64s = np.cumsum(np.concatenate(found))
        return table

    def _bounds(self, part: _TokenPart, numbers: Int64s) -> Int64s:
        """The tokens at which documents begin. The last document ends where a further one would begin."""
        if not isinstance(part.bounds, tuple) or not isinstance(part.tokens, _MappedArray):
            given: Int64s = np.asarray(part.bounds)[numbers]
            return given
        # Not `take`: these arrays do not begin at a multiple of 8 bytes, and it would copy them first.
        firsts, begins = map(self._array, part.bounds)
        sequences = np.where(numbers < len(firsts), firsts[np.minimum(numbers, len(firsts) - 1)], len(begins))
        found = begins[np.clip(sequences, 0, len(begins) - 1)] // np.dtype(part.tokens.dtype).itemsize
        return np.where(sequences < len(begins), found, part.length)

    def _starts(self, part: _TokenPart, windows: Int64s) -> Int64s:
        """The first token of each window."""
        if part.table is None:
            return windows * self._stride
        blocks = np.searchsorted(part.table, windows, side="right")
        rows = (windows - np.append(0, part.table)[blocks])[:, None]
        bounds = self._bounds(part, np.minimum(blocks[:, None] * BLOCK + np.arange(BLOCK + 1), part.documents))
        counts = self._fitting(np.diff(bounds))
        ends = np.cumsum(counts, axis=1)
        which = (ends <= rows).sum(1)[:, None]
        earlier = np.take_along_axis(ends - counts, which, 1)
        starts: Int64s = np.take_along_axis(bounds, which, 1) + (rows - earlier) * self._stride
        return starts[:, 0]

    def _read(self, part: _TokenPart, windows: Int64s) -> Array:
        """The tokens of windows, one window in a row."""
        _check(part)
        tokens = self._array(part.tokens)
        shape, step = (len(tokens) - self._length, self._length + 1), tokens.strides[0]
        # Not `take`, which would copy the whole view first.
        every: Array = np.lib.stride_tricks.as_strided(tokens, shape, (step, step), writeable=False)
        block: Array = every[self._starts(part, windows)]
        _check(part)
        if self._vocab_size is not None and (block.max() >= self._vocab_size or block.min() < 0):
            found = block[(block >= self._vocab_size) | (block < 0)][0]
            raise ValueError(
                f"{part.name} has the token id {found}, and vocab_size is {self._vocab_size:,}: it was written with "
                f"another dtype than {block.dtype}, or by another tokenizer"
            )
        return block

    def _array(self, array: _MappedArray | Array) -> Array:
        """An array of a file, mapped; another one as it is."""
        if not isinstance(array, _MappedArray):
            return array
        found = self._maps.get(array)
        if found is None:
            found = np.asarray(np.memmap(array.path, array.dtype, "r", array.offset, (array.length,)))
            self._maps[array] = found
            for oldest in list(self._maps)[:-OPEN]:
                self._maps.pop(oldest, None)
        return found


def _check(part: _TokenPart) -> None:
    """Raise if the files of a part have changed since the dataset was made."""
    for file in (part.tokens, *(part.bounds[:1] if isinstance(part.bounds, tuple) else ())):
        if isinstance(file, _MappedArray):
            found = os.stat(file.path)
            is_here = file.machine == platform.node()
            if found.st_size != file.bytes or (is_here and is_rewritten(file.tag, tag_of(found))):
                raise OSError(f"{file.path} was changed since the dataset was made: make the dataset again")


# -- what a user gives -------------------------------------------------------------------------------------------------


def _part_of(given: Any, dtype: Any, documents: Any) -> _TokenPart:
    """A file or an array, checked.

    Args:
        given: path or array.
        dtype: as the user gave it.
        documents: False, True, or the lengths of the documents.
    """
    part = _file(os.path.abspath(given), dtype) if isinstance(given, (str, os.PathLike)) else _TokenPart(given)
    if not isinstance(part.tokens, (_MappedArray, np.ndarray)):
        raise TypeError(f"tokens is {an(type(given))}: give a path, a NumPy array of integers, or a list of them")
    if isinstance(part.tokens, np.ndarray) and part.tokens.ndim != 1:
        raise ValueError(f"tokens has the shape {part.tokens.shape}: give one dimension, tokens.reshape(-1)")
    found = np.dtype(part.tokens.dtype)
    if found.kind not in "iu" or found == np.uint64:
        raise TypeError(f"{part.name} is of {found}: token ids are uint16, uint32, int32 or int64. Write it as one")
    if dtype is not None and np.dtype(dtype) != found:
        raise ValueError(f"{part.name} is of {found}, and dtype={dtype!r} was given: leave dtype out")
    if documents is False:
        return part._replace(bounds=None)
    if (documents is True) != (part.bounds is not None):
        raise ValueError(f"{part.name}: give documents=True if there is an .idx, otherwise the lengths of documents")
    if documents is True:
        return part
    lengths = np.asarray(documents)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.min(initial=0) < 0:
        raise ValueError(f"documents of {part.name} must be a flat list of lengths, integers of at least 0")
    bounds: Int64s = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if bounds[-1] != part.length:
        raise ValueError(f"the documents have {bounds[-1]:,} tokens, and {part.name} has {part.length:,}")
    return part._replace(bounds=bounds, documents=len(lengths))


def _file(path: str, dtype: Any) -> _TokenPart:
    if not os.path.exists(path) and os.path.exists(path + ".bin"):  # Megatron's programs take the name without it
        path += ".bin"
    beside = os.path.splitext(path)[0] + ".idx"
    if path.endswith(".npy"):
        return _TokenPart(_of_npy(path))
    if os.path.exists(beside):
        return _of_megatron(path, beside)
    if dtype is None:
        raise TypeError(f"{path} does not say the dtype of its tokens: give dtype=, such as dtype='uint16'")
    return _TokenPart(_mapped(path, np.dtype(dtype)))


def _mapped(path: str, dtype: np.dtype[Any], offset: int = 0, length: int | None = None) -> _MappedArray:
    """An array in a file. ``length=None``: up to its end."""
    found = settled(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size <= offset:
        raise ValueError(f"{path} is empty, or no file: give files of token ids")
    if length is None and (found.st_size - offset) % dtype.itemsize:
        raise ValueError(f"{path} has {found.st_size:,} bytes, no whole number of {dtype}: it was cut. Copy it again")
    length = (found.st_size - offset) // dtype.itemsize if length is None else length
    return _MappedArray(path, dtype.str, offset, length, found.st_size, tag_of(found), platform.node())


def _of_npy(path: str) -> _MappedArray:
    try:
        array = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no whole .npy file of numbers ({error}): copy or write it again") from None
    if array.ndim != 1:
        raise ValueError(f"{path} has the shape {array.shape}: give one dimension, tokens.reshape(-1)")
    return _mapped(path, array.dtype, array.offset, len(array))


def _of_megatron(path: str, beside: str) -> _TokenPart:
    """A ``.bin``, and where documents begin by its ``.idx``."""

    def number(dtype: str, offset: int) -> int:
        return int(np.fromfile(beside, dtype, 1, offset=offset)[0])

    size, head = os.stat(beside).st_size, np.fromfile(beside, HEAD, 1)
    if not len(head) or head[0]["magic"].tobytes() != MAGIC:
        raise ValueError(f"{beside} is no index of Megatron: if {path} is without an index, move the .idx elsewhere")
    _, version, code, sequences, documents = head[0].tolist()
    begins = HEAD.itemsize + 4 * sequences
    firsts, end = begins + 8 * sequences, begins + 8 * (sequences + documents)
    if version != 1 or code not in DTYPES or size not in (end, end + sequences) or not sequences or not documents:
        raise ValueError(
            f"{beside} was cut or damaged: it has {size:,} bytes, version {version}, dtype {code}, {sequences:,} "
            f"sequences and {documents:,} documents, which do not fit together. Copy or write it again"
        )
    tokens = _mapped(path, np.dtype(DTYPES[code]))
    described = number("<i8", firsts - 8) + number("<i4", begins - 4) * np.dtype(tokens.dtype).itemsize
    if described != tokens.bytes:
        raise ValueError(
            f"{path} has {tokens.bytes:,} bytes, and its .idx describes {described:,}: the .bin was cut, or the .idx "
            "is of another file. Copy both again"
        )
    index = [_mapped(beside, np.dtype("<i8"), *where) for where in ((firsts, documents), (begins, sequences))]
    documents -= number("<i8", end - 8) == sequences  # some writers leave out where the last one ends
    return _TokenPart(tokens, (index[0], index[1]), documents)
