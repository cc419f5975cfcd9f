"""`PackStream`: rows of tokens, packed from documents of unknown lengths as they are read. Iterable data for a loader.

    part i of n --windows i, i + n, ...--> documents, tokenised and cut --PackSampler--> rows --Pack--> dicts of arrays
    PackedRows.state_dict() -> window and row            load_state_dict reads and packs that window again

A *window* is a number of documents that are packed together. Of a dataset that is read by index, it is a stretch of the
epoch's permutation, and parts take turns: an epoch has each document once, and a row follows from (seed, epoch,
window), for any number of parts. Of iterable data, each part packs its own documents, in the order they come, and a
state also has the point of the source at which the window begins.

An iterator owns the rows of its window, and the documents of the next one that it has read so far: with each row it
reads its share of the next window, because parts begin together, and would all read a whole one at the same time. A
document that fails takes the place of a row, at the beginning of its window; the others are packed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sharded_loader.extend import Array
from sharded_loader.extend.data import announce_epoch, await_value
from sharded_loader.extend.order import Bijection, derive_key, parts
from sharded_loader.extend.tools import add_note, call_of, check_choice, check_function, check_int, entries
from sharded_loader.mixing import in_order
from sharded_loader.mixing.in_order import BEGINNING, SourcePoint
from sharded_loader.samplers.packing import IGNORED, Pack, PackSampler, fields_of

_DATA = "PackStream: the dataset"

Document = dict[str, Array]
"""``input_ids`` and ``labels`` of a document, or of a piece of one."""


def tokenised(document: Any, tokenize: Callable[[Any], Any] | None) -> Document:
    """Return tokens and labels of a document; see `PackStream`. ValueError: it has none.

    Example:
        >>> tokenised("ab", lambda text: {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]})["labels"].tolist()
        [-100, 6, 7]
    """
    found = document if tokenize is None else tokenize(document)
    names = ("input_ids", "labels", "assistant_masks")
    arrays = fields_of(found, names, f"a document {'is' if tokenize is None else 'became'}")
    ids = arrays["input_ids"]
    masked = np.where(arrays["assistant_masks"], ids, np.int64(IGNORED)) if "assistant_masks" in arrays else ids
    return {"input_ids": ids, "labels": arrays.get("labels", masked)}


# -- the data ----------------------------------------------------------------------------------------------------------


class PackStream(in_order.InOrder):
    """Rows of ``tokens`` tokens, packed from documents as they are read: lengths need not be known beforehand.

    A loader takes it as iterable data, whose samples are rows, and its workers tokenise. Each window of documents is
    packed by best fit, as in `PackSampler`, and its rows are shuffled. Rows are the same for any number of workers, and
    a loader's state has two numbers per part: window and row.

    Args:
        dataset: documents. Read by index, they come in a random order, each once per epoch. Iterable data comes in its
            own order; each part of it is packed on its own.
        tokens: tokens per row.
        rows: rows per batch of a `ShardedDataLoader` without ``batch_size``.
        window: documents that are packed together. Larger windows leave less padding, and take more memory and longer
            to resume. Default: ``tokens // 8``, from 1,024 to 16,384.
        tokenize: function of a document. It returns token ids (list, array or 1-D tensor), or a mapping with
            ``input_ids`` and perhaps ``labels``, or ``assistant_masks`` as from ``apply_chat_template(...,
            return_assistant_tokens_mask=True)``: other tokens then get the label -100. None: documents are such values.
        shuffle: shuffle documents (only of data that is read by index), and the rows of a window.
        seed: decides the order, together with the epoch.
        long: treatment of documents longer than a row: ``"cut"`` them into pieces of ``tokens`` tokens and a rest,
            ``"drop"`` them, or ``"error"``.
        max_documents: maximum number of documents in a row; None: no limit.
        pad_id: padding of ``input_ids``.

    Yields:
        Rows: dicts of int64 arrays of shape (tokens,), with the fields ``input_ids``, ``position_ids``,
        ``segment_ids`` and ``labels`` of `batchify.Pack`. With ``batchify_fn=Pack(tokens)``, batches also have
        ``cu_seqlens``.

    Raises:
        TypeError, ValueError: Arguments are wrong. When iterated: a document has no tokens, or is too long for
            ``long="error"``, and a note names it; or ``long="drop"`` leaves no document of a part. With the loader's
            ``on_error="skip"``, a document is left out, and takes the place of a row in a batch.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> lines = ["to be", "or not to be", "that is", "the question"]
        >>> rows = PackStream(lines, 8, rows=2, tokenize=lambda line: [*map(len, line.split())])
        >>> for batch in ShardedDataLoader(rows):
        ...     print(batch["input_ids"].tolist())
        [[4, 2, 0, 0, 0, 0, 0, 0], [3, 8, 2, 3, 2, 2, 2, 2]]

    Source of the idea: best-fit packing (Ding et al., "Fewer truncations improve language modeling", ICML 2024), as
    TRL and Grain pack streams; windows of a pure order in place of a buffer.
    """

    def __init__(
        self,
        dataset: Any,
        tokens: int = 8192,
        rows: int = 4,
        window: int | None = None,
        tokenize: Callable[[Any], Any] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        long: Literal["cut", "drop", "error"] = "cut",
        max_documents: int | None = None,
        pad_id: int = 0,
    ) -> None:
        dataset, self.is_indexed = in_order.check_source(dataset, _DATA), in_order.is_indexed(dataset)
        super().__init__((), () if self.is_indexed else (dataset,))
        check_function("tokenize", tokenize, "of a document -> token ids")
        self.tokens = check_int("tokens", tokens, 1, "give the number of tokens in a row")
        self.rows = check_int("rows", rows, 1, "give the number of rows in a batch")
        usual = min(max(self.tokens // 8, 1024), 16384)
        self.window = usual if window is None else check_int("window", window, 1, "give the number of documents")
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer")
        self.long: str = check_choice("long", long, ("cut", "drop", "error"), "PackStream")
        check_int("max_documents", 1 if max_documents is None else max_documents, 1, "count the documents of a row")
        self.max_documents, self.shuffle, self.epoch = max_documents, bool(shuffle), 0
        self.pack = Pack(tokens, pad_id)
        self._dataset, self._tokenize = in_order.held(dataset), in_order.SharedByParts(tokenize)
        self.length = len(dataset) if self.is_indexed else 0
        if self.is_indexed:
            self.num_shards = parts(self.length, self.window, cut=False)

    @property
    def dataset(self) -> Any:
        """Documents, as they are read."""
        return self._dataset.dataset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator, also for the dataset if it has ``set_epoch``."""
        self.epoch = epoch
        announce_epoch(self.dataset, epoch)

    def __iter__(self) -> PackedRows:
        return PackedRows(self)

    def order(self, epoch: int) -> Callable[[Any], Any]:
        """Return a function from positions in an epoch to documents, for data that is read by index."""
        return Bijection(self.length, self.seed, "pack stream", epoch) if self.shuffle and self.length else np.asarray

    def pieces_of(self, document: Any) -> list[Document]:
        """Tokenise a document, and cut it into pieces that fit into a row."""
        made, size = tokenised(document, self._tokenize.dataset), self.tokens
        length = len(made["input_ids"])
        if length > size and self.long == "error":
            text = f"a document has {length} tokens, and a row has {size}"
            raise ValueError(f'{text}: cut it with long="cut", leave it out with "drop", or give more tokens')
        if length > size and self.long == "drop":
            return []
        return [{name: made[name][n : n + size] for name in made} for n in range(0, length, size)]

    def packed(self, pieces: list[Document], *key: Any) -> list[list[Document]]:
        """Return the rows of a window, which ``key`` shuffles."""
        lengths = np.array([len(one["input_ids"]) for one in pieces], np.int64)
        columns, limits = {"tokens": lengths}, {"tokens": self.tokens}
        if self.max_documents is not None:
            columns["documents"], limits["documents"] = np.ones_like(lengths), self.max_documents
        seed = derive_key(self.seed, "pack stream rows", *key)
        sampler = PackSampler(columns, limits=limits, window=max(1, len(lengths)), shuffle=self.shuffle, seed=seed)
        return [[pieces[number] for number in row] for row in sampler.iter_epoch(0)]

    def __repr__(self) -> str:
        names = ("tokens", "window", "seed", "long", "shuffle", "max_documents")
        options = {name: (getattr(self, name), None) for name in names}
        return call_of(self, [self.length] if self.is_indexed else [], **options)


# -- one iteration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PackPosition:
    """State of `PackedRows`: a window, the rows of it that were yielded, and where iterable data begins it."""

    packing: str = entries.entry(entries.string, "it was {was}, and is {now}")
    epoch: int = entries.entry(entries.integer(0))
    window: int = entries.entry(entries.integer(0))
    given: int = entries.entry(entries.integer(0), name="row")
    source: Any = entries.entry(entries.dict_of(SourcePoint), write=entries.to_state, default=BEGINNING)  # noqa: RUF009


class PackedRows(in_order.Windows):
    """Iteration over a `PackStream`."""

    def __init__(self, stream: PackStream) -> None:
        super().__init__("PackStream", stream.dataset)
        self._stream, self._is_empty = stream, True
        part, self._turns = self._worker or (0, 1) if stream.is_indexed else (0, 1)
        self._part = None if stream.is_indexed else in_order.part_here()
        # Windows are counted over all epochs, so that parts that begin again have equally many.
        window = (part - stream.epoch * parts(stream.length, stream.window, cut=False)) % self._turns
        self._begin_at(_PackPosition(repr(stream), stream.epoch, window, 0))

    def names_of(self, at: _PackPosition) -> Sequence[int]:
        stream = self._stream
        if not stream.is_indexed:
            return range(at.source.taken, at.source.taken + stream.window)
        places = np.arange(at.window * stream.window, min((at.window + 1) * stream.window, stream.length))
        found: list[int] = stream.order(at.epoch)(places).tolist()
        return found

    def scope_of(self, name: int, outer: Any, part: int) -> tuple[int, Any]:
        return self._at.epoch, name if self._stream.is_indexed else (self._part, name)

    def read(self, name: int) -> Any:
        document = await_value(self._dataset[name]) if self._stream.is_indexed else self._source.read()
        return document if document is in_order.END else self._stream.pieces_of(document)

    def items_of(self, read: list[Any]) -> list[Any]:
        at, errors, pieces = self._at, list[Any](), list[Document]()
        for name, one in zip(self._names, read, strict=False):  # iterable data may end in the window
            if isinstance(one, in_order.FailedRead):
                epoch, index = self.scope_of(name, None, 0)
                add_note(one.error, f"raised for document {index} of PackStream in epoch {epoch}")
                errors.append(one)
            else:
                pieces += one
        return [*errors, *self._stream.packed(pieces, at.epoch, at.window, self._part)]

    def following(self, source: SourcePoint) -> _PackPosition:
        following: _PackPosition = replace(self._at, window=self._at.window + self._turns, source=source)
        return following

    def __next__(self) -> dict[str, Array]:
        batch = self._stream.pack.assemble(super().__next__(), np.empty)
        return {name: batch[name][0] for name in batch if name != "cu_seqlens"}

    def _start(self) -> bool:
        if super()._start():
            self._is_empty = self._is_empty and not self._items
            return True
        is_empty, self._is_empty = self._is_empty and self._at is not self._next, False
        if is_empty:
            text = f"all documents of a part have more than {self._stream.tokens} tokens, and are left out"
            raise ValueError(f'{text}: give PackStream more tokens=, or cut them with long="cut"')
        return False
