"""`TokenWindows`: random access to windows over files of token ids, for pretraining of language models.

    paths or arrays --_tokens_of--> parts (one file or array each): tokens, and bounds of documents
    index --search in cumulative windows--> part, window --search in those of its documents--> its first token
    first tokens --one gather per part--> (windows, length + 1) tokens --cast--> inputs, targets: int64

Windows are computed, not stored; documents take two numbers each. A process maps a file at its first read and keeps the
last `OPEN` maps, which threads and forked processes share. Pickling sends paths and tables.

Time, size and inode of a file are compared before and after each read, so windows of two versions never mix. If another
program truncates a file during a read, the system kills the process (SIGBUS); before a read, that is an OSError.
"""

from __future__ import annotations

import os
import platform
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from sharded_loader.extend import Array, Dataset, Empty, Indices, Int64s
from sharded_loader.extend.data import bulk, checked_index, checked_indices, new_array
from sharded_loader.extend.tools import an, check_int, refuse_arguments
from sharded_loader.recordio.positioned import is_rewritten, regular, stable_stat, tag_of

OPEN = 64
"""Maximum number of mapped files per process. Each holds a descriptor."""

ADVICE = "give a number of tokens, such as 1024"


@dataclass(frozen=True)
class _TokenFile:
    """Tokens in a file. ``tag`` identifies its version on ``machine``; copies elsewhere have other times and inodes."""

    path: str
    dtype: str
    offset: int
    length: int
    nbytes: int
    tag: str
    machine: str

    def __len__(self) -> int:
        return self.length


class _TokenPart(NamedTuple):
    """One file or array.

    Attributes:
        ends: cumulative number of windows, for each document that has any.
        begins: first token of a document's windows minus ``stride`` times the windows before it.
    """

    name: str
    tokens: _TokenFile | Array
    ends: Int64s
    begins: Int64s


class TokenWindows(Dataset):
    """Windows of token ids from files or arrays: each sample is a pair (inputs, targets), shifted by one token.

    Windows never cross files, nor documents if those are given. The rest after the last whole window is unused: with 10
    tokens and ``length=4``, windows begin at tokens 0 and 4, and token 9 is left.

    Args:
        tokens: file of token ids, array, or list of either. ``.npy`` files are NumPy's, others are plain tokens, as
            nanoGPT and Megatron-LM write them. Files are memory-mapped.
        length: number of tokens in the inputs, and in the targets; a window reads ``length + 1`` tokens.
        stride: distance between the beginnings of windows; by default ``length``, so that each token but the first is a
            target once.
        dtype: dtype of plain files, such as ``"uint16"``.
        documents: number of tokens of each document, as an array; for a list of files, a list of arrays. By default,
            windows cross documents.
        vocab_size: number of token ids. If given, each batch is checked, which reveals a wrong ``dtype``.

    Raises:
        TypeError: Tokens are not integers, or a plain file has no ``dtype``.
        ValueError: ``length`` or ``stride`` is below 1; a file is empty, truncated, or shorter than a window; document
            lengths do not add up; token ids do not fit ``vocab_size``.
        OSError: A file is missing (FileNotFoundError), or was changed after the dataset was made.

    Example:
        >>> dataset = TokenWindows(np.arange(10, dtype=np.uint16), length=4)
        >>> len(dataset), dataset[1]
        (2, (array([4, 5, 6, 7]), array([5, 6, 7, 8])))
        >>> inputs, targets = TokenWindows(np.arange(10), 4, documents=[3, 7]).get_batch([0])
        >>> inputs, targets
        (array([[3, 4, 5, 6]]), array([[4, 5, 6, 7]]))

    Source of the idea: the data loop of nanoGPT.
    """

    def __init__(
        self,
        tokens: object,
        length: int,
        stride: int | None = None,
        dtype: DTypeLike | None = None,
        documents: object = None,
        vocab_size: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_arguments("TokenWindows", unknown, type(self).__init__)
        self._length = check_int("length", length, 1, ADVICE)
        self._stride = self._length if stride is None else check_int("stride", stride, 1, ADVICE)
        self._vocab_size = None if vocab_size is None else check_int("vocab_size", vocab_size, 1, "give len(tokenizer)")
        self._maps: dict[_TokenFile, Array] = {}
        given = tokens if isinstance(tokens, (list, tuple)) else [tokens]
        ends = documents if given is tokens and isinstance(documents, (list, tuple)) else [documents]
        if documents is None:
            ends = [None] * len(given)
        if not given or len(given) != len(ends):
            raise ValueError(f"{len(given)} files and documents of {len(ends)}: give files, and an array for each")
        self._parts = [self._part_of(one, dtype, lengths) for one, lengths in zip(given, ends, strict=True)]
        self._ends: Int64s = np.cumsum([part.ends[-1] for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: object) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self.__getitems__([checked_index(index, len(self))])[0]

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Array, Array]]:
        """Return many samples, read as one batch."""
        return list(zip(*TokenWindows.get_batch(self, indices), strict=True))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> list[Array]:
        """Return a batch: inputs and targets, two int64 arrays of shape (windows, ``length``).

        Args:
            indices: numbers of the windows; negative ones count from the end.
            empty: allocator ``empty(shape, dtype) -> array``, passed by a loader.

        Raises:
            IndexError, OSError, ValueError: An index is out of range; a file was changed; a token id exceeds
                ``vocab_size``.
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
        """Unmap the files. Later reads map them again."""
        self._maps.clear()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_maps": {}}

    @property
    def _fingerprint(self) -> str:
        """Identity of the data for `data.inspection`: names and sizes of files, a few tokens of arrays."""
        known = [
            (os.path.basename(tokens.path), tokens.length)
            if isinstance(tokens, _TokenFile)
            else zlib.crc32(tokens[:1024].tobytes())
            for _, tokens, *_ in self._parts
        ]
        return repr((known, self._length, self._stride, self._ends.tolist()))

    def __repr__(self) -> str:
        return f"TokenWindows({len(self):,} windows of {self._length:,} tokens, files: {len(self._parts)})"

    # -- one part -------------------------------------------------------------------------------------------------

    def _part_of(self, given: object, dtype: DTypeLike | None, documents: ArrayLike | None) -> _TokenPart:
        """Return a file or array as a part with at least one window."""
        name, tokens, bounds = _tokens_of(given, dtype, documents)
        counts = np.maximum(0, (np.diff(bounds) - 1 - self._length) // self._stride + 1)
        ends = np.cumsum(counts)
        begins = bounds[:-1] - (ends - counts) * self._stride
        part = _TokenPart(name, tokens, ends[counts > 0], begins[counts > 0])
        if not len(part.ends):
            what = f"only {len(tokens):,} tokens" if documents is None else "no document that is long enough"
            raise ValueError(f"{name} has {what}; a window needs {self._length + 1:,}. Give a smaller length")
        if self._vocab_size is not None:
            if np.iinfo(tokens.dtype).max < self._vocab_size - 1:
                found = np.dtype(tokens.dtype)
                raise ValueError(
                    f"{name} is of {found}, too small for vocab_size={self._vocab_size:,}: write it as uint32"
                )
            self._read(part, np.zeros(1, np.int64))
        return part

    def _read(self, part: _TokenPart, windows: Int64s) -> Array:
        """Return the tokens of windows, shape (windows, ``length + 1``)."""
        _check(part.tokens)
        tokens = self._array(part.tokens)
        shape, step = (len(tokens) - self._length, self._length + 1), tokens.strides[0]
        # Fancy indexing, because `take` would copy the whole view first.
        every: Array = np.lib.stride_tricks.as_strided(tokens, shape, (step, step), writeable=False)
        documents = np.searchsorted(part.ends, windows, side="right")
        block: Array = every[part.begins[documents] + windows * self._stride]
        _check(part.tokens)
        if self._vocab_size is not None and (block.max() >= self._vocab_size or block.min() < 0):
            found = block[(block >= self._vocab_size) | (block < 0)][0]
            text = f"{part.name} has the token id {found}, and vocab_size is {self._vocab_size:,}"
            raise ValueError(f"{text}: it was written with another dtype than {block.dtype}, or by another tokenizer")
        return block

    def _array(self, tokens: _TokenFile | Array) -> Array:
        if not isinstance(tokens, _TokenFile):
            return tokens
        found = self._maps.get(tokens)
        if found is None:
            found = np.asarray(np.memmap(tokens.path, tokens.dtype, "r", tokens.offset, (tokens.length,)))
            self._maps[tokens] = found
            for oldest in list(self._maps)[:-OPEN]:
                self._maps.pop(oldest, None)
        return found


def _check(file: _TokenFile | Array) -> None:
    """Raise an error if a file has changed since the dataset was made."""
    if isinstance(file, _TokenFile):
        found = os.stat(file.path)
        is_here = file.machine == platform.node()
        if found.st_size != file.nbytes or (is_here and is_rewritten(file.tag, tag_of(found))):
            raise OSError(f"{file.path} was changed since the dataset was made: make the dataset again")


# -- what a user gives -------------------------------------------------------------------------------------------------


def _tokens_of(given: object, dtype: DTypeLike | None, documents: Any) -> tuple[str, _TokenFile | Array, Int64s]:
    """Return the name and tokens of a file or array, and the bounds of its documents."""
    tokens = _file(os.path.abspath(given), dtype) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(tokens, (_TokenFile, np.ndarray)):
        raise TypeError(f"tokens is {an(type(given))}: give a path, a NumPy array of integers, or a list of them")
    if isinstance(tokens, np.ndarray) and tokens.ndim != 1:
        raise ValueError(f"tokens has the shape {tokens.shape}: give one dimension, tokens.reshape(-1)")
    name = tokens.path if isinstance(tokens, _TokenFile) else f"the array of {len(tokens):,} tokens"
    found = np.dtype(tokens.dtype)
    if found.kind not in "iu" or found == np.uint64:
        raise TypeError(f"{name} is of {found}: token ids are uint16, uint32, int32 or int64. Write it as one")
    if dtype is not None and np.dtype(dtype) != found:
        raise ValueError(f"{name} is of {found}, and dtype={dtype!r} was given: leave dtype out")
    if documents is None:
        return name, tokens, np.array([0, len(tokens)])
    lengths = np.asarray(documents)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.min(initial=0) < 0:
        raise ValueError(f"documents of {name} must be a flat list of lengths, integers of at least 0")
    bounds: Int64s = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if bounds[-1] != len(tokens):
        raise ValueError(f"the documents have {bounds[-1]:,} tokens, and {name} has {len(tokens):,}")
    return name, tokens, bounds


def _file(path: str, dtype: DTypeLike | None) -> _TokenFile:
    if path.endswith(".npy"):
        try:
            array = np.lib.format.open_memmap(regular(path), mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a complete .npy file ({error}): copy or write it again") from None
        if array.ndim != 1:
            raise ValueError(f"{path} has the shape {array.shape}: give one dimension, tokens.reshape(-1)")
        return _described(path, array.dtype, array.offset, len(array))
    if dtype is None:
        raise TypeError(f"{path} does not say the dtype of its tokens: give dtype=, such as dtype='uint16'")
    return _described(path, np.dtype(dtype))


def _described(path: str, dtype: np.dtype[Any], offset: int = 0, length: int | None = None) -> _TokenFile:
    """Describe the tokens from ``offset`` on, by default to the end of the file."""
    found = stable_stat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size <= offset:
        raise ValueError(f"{path} is empty, or no file: give files of token ids")
    if length is None and (found.st_size - offset) % dtype.itemsize:
        raise ValueError(f"{path} has {found.st_size:,} bytes, no whole number of {dtype}: another dtype, or cut")
    length = (found.st_size - offset) // dtype.itemsize if length is None else length
    return _TokenFile(path, dtype.str, offset, length, found.st_size, tag_of(found), platform.node())
