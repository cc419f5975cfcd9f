"""`lengths_of`: the number of tokens of each document, found by the workers of a loader in one pass, kept in a file.

    dataset --_Lengths, ShardedDataLoader--> lengths, in order --> path.part, zeros before --os.replace--> path

A document has at least one token, so ``path.part`` says by its zeros where the pass has stopped. A process that is
killed at any moment leaves a file that the next call continues. One process writes, under the lock of ``path.lock``;
others on this machine wait for it, and take over if it dies. The file has its full size from the beginning: a full disk
is an OSError then, after which a call goes on as well.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader import ShardedDataLoader
from sharded_loader.extend.data import check_dataset
from sharded_loader.recordio.positioned import lock_at, regular
from sharded_loader.text.stream import tokenised

AT_ONCE = 256
"""Documents in a batch, which are lost if the process is killed."""


@dataclass(frozen=True)
class _Lengths:
    """The lengths of documents, as a dataset, so that the loader names the document that fails."""

    documents: Any
    tokenize: Callable[[Any], Any] | None

    def __getitem__(self, index: int) -> int:
        return len(tokenised(self.documents[index], self.tokenize)["input_ids"])


def lengths_of(
    dataset: Any, path: str | os.PathLike[str], num_workers: int = 0, tokenize: Callable[[Any], Any] | None = None
) -> npt.NDArray[np.int32]:
    """Return the number of tokens of each document, from a file, or else by one pass of workers that writes the file.

    For samplers that need lengths: `PackSampler`, `BoundedBudgetSampler`, a loader's ``costs``. A pass that was
    interrupted continues where it stopped. If several processes of a machine call it at once, one of them reads.

    Args:
        dataset: documents, read by index.
        path: the file, usually named ``.npy``. Delete it if documents or tokenizer change.
        num_workers: worker processes of the pass; 0: this process reads.
        tokenize: as in `PackStream`; None: documents are token ids, or mappings with ``input_ids``.

    Returns:
        int32 array of shape (len(dataset),), memory-mapped and read-only.

    Raises:
        TypeError: The dataset is not read by index.
        ValueError: The file has another length than the dataset, or is no such file; or a document has no tokens.
        OSError, NotImplementedError: The file cannot be written, or its file system has no locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lengths_of([[5, 2, 9], [7, 1]], f"{folder}/lengths.npy")
        memmap([3, 2], dtype=int32)
    """
    dataset, path = check_dataset(dataset, "lengths_of"), Path(path)
    if not path.exists():
        with lock_at(f"{path}.lock"):
            if not path.exists():
                _write(_Lengths(dataset, tokenize), len(dataset), path, num_workers)
        with contextlib.suppress(OSError):  # on Windows, one that waits for it may have it open
            Path(f"{path}.lock").unlink()  # those that wait for it find the finished file
    return _opened(path, len(dataset), "r")


def _opened(path: Path, count: int, mode: Any) -> npt.NDArray[np.int32]:
    try:
        lengths: npt.NDArray[np.int32] = np.load(regular(path), mmap_mode=mode if count else None)
    except (ValueError, EOFError):
        lengths = np.empty((0, 0), np.int32)
    is_right = getattr(lengths, "shape", None) == (count,) and lengths.dtype == np.int32
    if not is_right or (mode == "r" and not lengths.all()):  # zeros: the power failed before it was on disk
        text = f"lengths_of: {path} is no file of {count} lengths, one for each document of the dataset"
        raise ValueError(f"{text}: give the dataset that the file was made from, another path, or delete the file")
    return lengths


def _write(dataset: _Lengths, count: int, path: Path, num_workers: int) -> None:
    """Write the file, from where an earlier process has stopped."""
    part, new = Path(f"{path}.part"), Path(f"{path}.new.npy")
    if not part.exists():
        try:
            np.save(new, np.zeros(count, "<i4"))
        except OSError as error:
            new.unlink(missing_ok=True)
            raise OSError(f"{new} cannot be written ({error}): free some space, or give another path") from None
        os.replace(new, part)
    lengths = _opened(part, count, "r+")
    try:
        done = count if lengths.all() else int(lengths.argmin())  # the first zero
        with ShardedDataLoader(dataset, AT_ONCE, sampler=range(done, count), num_workers=num_workers, seed=0) as loader:
            for batch in loader:
                lengths[done : done + len(batch)] = batch.numpy()  # NumPy warns if it is to copy a tensor of torch 2.6
                done += len(batch)
    finally:
        del lengths  # Windows renames no file that is mapped, also by the traceback of an error
    os.replace(part, path)
