"""`lengths_of`: the number of tokens of each document, found by the workers of a loader in one pass, kept in a file.

    dataset --ShardedDataLoader, _lengths--> lengths, in order --> path.part --os.replace--> path

``path.part`` is the array's header, and the lengths so far: its size is the position. A process that is killed at any
moment leaves a file that the next call continues. One process writes, under the lock of ``path.lock``; others on this
machine wait for it, and take over if it dies. A full disk is an OSError, after which a call goes on as well.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader import ShardedDataLoader
from sharded_loader.extend.data import check_dataset
from sharded_loader.extend.order import reading
from sharded_loader.extend.tools import add_note, pass_on
from sharded_loader.recordio.positioned import lock_at
from sharded_loader.text.stream import tokenised

AT_ONCE = 256
"""Documents in a batch, which are lost if the process is killed."""


def _lengths(tokenize: Callable[[Any], Any] | None, documents: list[Any]) -> npt.NDArray[np.int32]:
    """Collate documents into an array of their numbers of tokens."""
    lengths, scope = np.empty(len(documents), np.int32), reading.get()
    for place, document in enumerate(documents):
        try:
            lengths[place] = len(tokenised(document, tokenize)["input_ids"])
        except Exception as error:
            pass_on(error)
            add_note(error, f"raised for document {scope.indices[place] if scope else place} in lengths_of")
            raise
    return lengths


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
    count = len(dataset)
    if not path.exists():
        with lock_at(f"{path}.lock"):
            if not path.exists():
                _write(dataset, path, num_workers, partial(_lengths, tokenize))
        Path(f"{path}.lock").unlink(missing_ok=True)  # those that wait for it find the finished file
    try:
        lengths: npt.NDArray[np.int32] = np.load(path, mmap_mode="r" if count else None)
    except (ValueError, EOFError) as error:
        raise ValueError(f"lengths_of: {path} is no file of lengths: give another path, or delete it") from error
    if lengths.shape != (count,):
        text = f"lengths_of: {path} has {lengths.size} lengths, and the dataset {count} documents"
        raise ValueError(f"{text}: give the dataset that the file was made from, another path, or delete the file")
    return lengths


def _write(dataset: Any, path: Path, num_workers: int, batchify_fn: Callable[[list[Any]], Any]) -> None:
    """Write the file, from where an earlier process has stopped."""
    count, part, made = len(dataset), Path(f"{path}.part"), io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": "<i4", "fortran_order": False, "shape": (count,)})
    header = made.getvalue()
    part.touch()
    with open(part, "r+b", buffering=0) as file:
        found = file.read(len(header))
        if not header.startswith(found):
            text = f"lengths_of: {part} was begun for other data than these {count} documents"
            raise ValueError(f"{text}: give the dataset that it was begun for, another path, or delete it")
        file.seek(0)
        file.write(header)
        done = max(0, os.fstat(file.fileno()).st_size - len(header)) // 4
        file.truncate(file.seek(len(header) + 4 * done))
        given: dict[str, Any] = {"batchify_fn": batchify_fn, "num_workers": num_workers, "seed": 0}
        with ShardedDataLoader(dataset, AT_ONCE, sampler=range(done, count), **given) as loader:
            for lengths in loader:
                data = memoryview(np.asarray(lengths, "<i4").tobytes())
                while data:
                    data = data[file.write(data) :]
    os.replace(part, path)
