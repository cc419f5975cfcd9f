"""`PackStream`: rows of tokens, packed from documents of unknown lengths as they are read. Iterable data for a loader.

    part i of n --windows i, i + n, ...--> documents, tokenised --PackSampler--> rows, shuffled --Pack--> dict of arrays
    PackedRows.state_dict() -> window and row            load_state_dict reads and packs that window again

A *window* is a number of documents that are packed together. Of a dataset that is read by index, it is a stretch of the
epoch's permutation, and parts take turns: an epoch has each document once, and a row follows from (seed, epoch,
window), for any number of parts. Of iterable data, each part packs its own documents, in the order they come, and a
state also has the point of the source at which the window begins.

An iterator owns the documents of its window, and those of the next one that it has read so far: with each row it reads
its share of the next window, so that only the first batch waits for a whole one. A document that fails takes the place
of a row, at the beginning of its window; the others are packed without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sharded_loader.extend import Array
from sharded_loader.extend.data import announce_epoch, as_array, bulk_method, read_many
from sharded_loader.extend.engine import current_part
from sharded_loader.extend.order import Bijection, SampleScope, parts, reading, shuffled
from sharded_loader.extend.tools import add_note, an, brief, call_of, check_choice, check_int, entries, pass_on
from sharded_loader.mixing import in_order
from sharded_loader.samplers.packing import IGNORED, Pack, Packed, PackSampler

_DATA = "PackStream: the dataset"
_ADVICE = "give what state_dict() of an iterator of a PackStream returned"

Document = dict[str, Array]
"""``input_ids`` and ``labels`` of one document."""


# -- one document ------------------------------------------------------------------------------------------------------


def tokenised(document: Any, tokenize: Callable[[Any], Any] | None) -> Document:
    """Return tokens and labels of a document; see `PackStream`. TypeError or ValueError: it has none.

    Example:
        >>> tokenised("ab", lambda text: {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]})["labels"].tolist()
        [-100, 6, 7]
    """
    found = document if tokenize is None else tokenize(document)
    if isinstance(found, tuple) and len(found) == 2 and not all(map(np.isscalar, found)):
        found = dict(zip(("input_ids", "labels"), found, strict=True))
    fields = found if isinstance(found, Mapping) else {"input_ids": found}
    ids, labels, mask = (_row_of(fields.get(name), name) for name in ("input_ids", "labels", "assistant_masks"))
    if ids is None:
        text = f"has no input_ids, but is {brief(found)}" if tokenize is None else f"became {brief(found)} by tokenize="
        raise TypeError(f"a document {text}: give token ids, a pair (ids, labels), or a mapping with 'input_ids'")
    lengths = [len(ids) if one is None else len(one) for one in (labels, mask)]
    if lengths != [len(ids)] * 2:
        text = f"a document has {len(ids)} input_ids, and {lengths[0]} labels or {lengths[1]} assistant_masks"
        raise ValueError(f"{text}: give equally many")
    if labels is None:
        labels = ids if mask is None else np.where(mask, ids, IGNORED)
    return {"input_ids": ids, "labels": labels}


def _row_of(value: Any, name: str) -> Array | None:
    if value is None:
        return None
    array = as_array(np.array(value) if isinstance(value, str | bytes) else value)
    if not array.size:
        raise ValueError("a document has no tokens: leave it out of the dataset, or let tokenize= add special tokens")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        text = f"the {name} of a document, {an(type(value))}, have shape {array.shape} and dtype {array.dtype}"
        raise ValueError(f"{text}: give a list or 1-D array of integers. Tokenise texts with tokenize=")
    return array


# -- the data ----------------------------------------------------------------------------------------------------------


class PackStream(in_order.InOrder):
    """Rows of ``tokens`` tokens, packed from documents as they are read: lengths need not be known beforehand.

    A loader takes it as iterable data, whose samples are rows, and its workers tokenise.
    Each window of documents is packed by best fit, as in `PackSampler`, and its rows are shuffled. Rows are the same
    for any number of workers, and a loader's state has two numbers per part: window and row.

    Args:
        dataset: documents. Read by index, they come in a random order, each once per epoch. Iterable data comes in its
            own order; each part of it is packed on its own.
        tokens: tokens per row.
        rows: rows per batch of a `ShardedDataLoader` without ``batch_size``.
        window: documents that are packed together. Larger windows leave less padding, and take more memory and longer
            to resume. Default: ``tokens // 8``, from 1,024 to 16,384.
        tokenize: function of a document. It returns token ids (list, array or 1-D tensor), a pair (ids, labels), or a
            mapping with ``input_ids`` and perhaps ``labels``, or ``assistant_masks`` as from ``apply_chat_template(...,
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
            ``long="error"``; a note names it. With the loader's ``on_error="skip"``, it is left out, and takes the
            place of a row in a batch.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> lines = ["to be", "or not to be", "that is", "the question"]
        >>> rows = PackStream(lines, 8, rows=2, tokenize=lambda line: [*map(len, line.split())])
        >>> for batch in ShardedDataLoader(rows):
        ...     print(batch["input_ids"].tolist())
        [[4, 2, 0, 0, 0, 0, 0, 0], [2, 2, 3, 8, 2, 3, 2, 2]]

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
        if tokenize is not None and not callable(tokenize):
            raise TypeError(f"tokenize is {brief(tokenize)}; it must be a function of a document -> token ids")
        self.tokens = check_int("tokens", tokens, 1, "give the number of tokens in a row")
        self.rows = check_int("rows", rows, 1, "give the number of rows in a batch")
        usual = min(max(self.tokens // 8, 1024), 16384)
        self.window = usual if window is None else check_int("window", window, 1, "give the number of documents")
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer")
        self.long: str = check_choice("long", long, ("cut", "drop", "error"), "PackStream")
        most = 1 if max_documents is None else max_documents
        check_int("max_documents", most, 1, "give the number of documents in a row")
        self.max_documents = max_documents
        self.shuffle, self.pad_id, self.epoch = bool(shuffle), pad_id, 0
        self.pack = Pack(tokens, pad_id)
        self._dataset, self._tokenize = in_order.held(dataset), in_order.SharedByParts(tokenize)
        if self.is_indexed and len(dataset):
            self.num_shards = parts(len(dataset), self.window, cut=False)

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

    def tokenised(self, document: Any) -> Document | None:
        """Return tokens and labels of a document; None if it is left out."""
        made = tokenised(document, self._tokenize.dataset)
        if self.long == "cut" or (length := len(made["input_ids"])) <= self.tokens:
            return made
        if self.long == "drop":
            return None
        text = f"a document has {length} tokens, and a row has {self.tokens}"
        raise ValueError(f'{text}: cut long documents with long="cut", leave them out with "drop", or give more tokens')

    def packed(self, documents: list[Document], key: tuple[Any, ...]) -> list[Packed]:
        """Plan the rows of a window, which ``key`` shuffles."""
        if not documents:
            return []
        lengths = np.array([len(one["input_ids"]) for one in documents])
        columns, limits = {"tokens": lengths}, {"tokens": self.tokens}
        if self.max_documents is not None:
            columns["documents"], limits["documents"] = np.ones_like(lengths), min(self.max_documents, len(lengths))
        sampler = PackSampler(columns, limits=limits, window=len(lengths), long="cut", shuffle=False)
        rows: list[Any] = list(sampler.iter_epoch(0))
        order = shuffled(len(rows), self.seed, "pack stream rows", *key) if self.shuffle else range(len(rows))
        return [rows[place] for place in order]

    def __repr__(self) -> str:
        names = ("tokens", "window", "seed", "long", "shuffle", "max_documents")
        documents = [len(self.dataset)] if self.is_indexed else []
        return call_of(self, documents, **{name: (getattr(self, name), None) for name in names})


# -- one iteration -----------------------------------------------------------------------------------------------------


_read_source = entries.optional(entries.dict_of(in_order.SourcePoint))


@dataclass(frozen=True)
class _PackPosition:
    """State of `PackedRows`: a window, and the rows of it that were yielded."""

    packing: str = entries.entry(entries.string, "it was {was}, and is {now}")
    epoch: int = entries.entry(entries.integer(0))
    window: int = entries.entry(entries.integer(0))
    row: int = entries.entry(entries.integer(0))
    source: Any = entries.entry(_read_source, write=entries.to_state, default=None)  # noqa: RUF009 - it makes a field


class _Window:
    """Documents of a window that were read so far.

    Attributes:
        source: point at which iterable data begins; None: it is read by index.
        left: documents that are still to be read.
        errors: those of documents that failed.
    """

    def __init__(self, number: int, left: int, source: in_order.SourcePoint | None) -> None:
        self.number, self.left, self.source = number, left, source
        self.documents, self.errors, self.is_empty = list[Document](), list[Exception](), True


class PackedRows(Iterator[dict[str, Array]]):
    """Iteration over a `PackStream`."""

    def __init__(self, stream: PackStream) -> None:
        self._stream, self._epoch = stream, stream.epoch
        # Others call it themselves.
        self._worker = in_order.this_worker() if in_order.is_divided(stream.dataset) else None
        part, self._parts = self._worker or (0, 1)
        self._part = getattr(current_part(), "number", part)
        begin = self._length = self._windows = 0
        self._order: Callable[[Any], Any] = np.asarray
        if stream.is_indexed:
            self._length = len(stream.dataset)
            self._windows = parts(self._length, stream.window, cut=False)
            if stream.shuffle and self._length:
                key = stream.seed, "pack stream", self._epoch
                self._order = Bijection(self._length, *key)
            # Windows are counted over all epochs, so that parts that begin again have equally many.
            begin = (part - self._epoch * self._windows) % self._parts
        self._has_rows = False
        self._begin_at(begin, in_order.BEGINNING)

    def _begin_at(self, window: int, source: in_order.SourcePoint) -> None:
        self._source = in_order.Source(_DATA, self._stream.dataset, source, self._worker)
        self._row, self._items = 0, list[Packed | Exception]()
        self._now = self._next = self._opened(window)

    def _opened(self, number: int) -> _Window:
        if not self._stream.is_indexed:
            return _Window(number, self._stream.window, copy.deepcopy(self._source.state()))
        begin = number * self._stream.window
        return _Window(number, max(0, min(self._stream.window, self._length - begin)), None)

    def __next__(self) -> dict[str, Array]:
        while self._row == len(self._items):
            self._start_window()
        # A share of the next window for each row, so that no row waits for a whole window.
        self._read(self._next, -(-self._next.left // (len(self._items) - self._row)))
        item, self._row = self._items[self._row], self._row + 1
        if isinstance(item, Exception):
            raise item
        before, scope = reading.get(), SampleScope(0, 0)
        scope.indices = item  # `Pack` finds the plan there
        try:
            reading.set(scope)
            batch = self._stream.pack.assemble([self._now.documents[number] for number in item], np.empty)
        finally:
            reading.set(before)
        return {name: batch[name][0] for name in batch if name != "cu_seqlens"}

    def _start_window(self) -> None:
        """Start to yield the next window; StopIteration after the last one."""
        window, stream = self._next, self._stream
        self._read(window, window.left)
        if window.is_empty:
            if not self._has_rows and self._now is not window:
                text = f"all documents of part {self._part} have more than {stream.tokens} tokens"
                raise ValueError(f'{text}, and are left out. Give more tokens=, or cut them with long="cut"')
            raise StopIteration
        key = self._epoch, window.number, None if stream.is_indexed else self._part
        self._now, self._row, self._items = window, 0, [*window.errors, *stream.packed(window.documents, key)]
        self._has_rows = self._has_rows or bool(self._items)
        self._next = self._opened(window.number + (self._parts if stream.is_indexed else 1))

    def _read(self, window: _Window, count: int) -> None:
        """Read and tokenise documents of a window, at most ``count``. Each has random numbers of its own."""
        outer, stream = reading.get(), self._stream
        try:
            reading.set(self._scope_of(None, outer))
            read, names = self._reader(window, min(count, window.left))
            for name in names:
                reading.set(self._scope_of(name, outer))
                try:
                    document = read(name)
                    if document is in_order.END:
                        window.left = 0
                        return
                    if (made := stream.tokenised(document)) is not None:
                        window.documents.append(made)
                except Exception as error:
                    pass_on(error)
                    where = f"document {name}" if stream.is_indexed else f"document {name[1]} of part {name[0]}"
                    add_note(error, f"raised for {where} of epoch {self._epoch}, window {window.number} of PackStream")
                    window.errors.append(error)
                window.left, window.is_empty = window.left - 1, False
        finally:
            reading.set(outer)

    def _scope_of(self, name: Any, outer: SampleScope | None) -> SampleScope | None:
        return outer and SampleScope(outer.seed, self._epoch, name, outer.owners, outer.is_cached)

    def _reader(self, window: _Window, count: int) -> tuple[Callable[[Any], Any], Iterable[Any]]:
        """Return a function that reads a document by its name, and the names of the next ones."""
        source, size, dataset = self._source, self._stream.window, self._stream.dataset
        if not self._stream.is_indexed:
            return lambda name: source.read(), ((self._part, source.taken, self._epoch) for _ in range(count))
        begin = min((window.number + 1) * size, self._length) - window.left
        names = self._order(np.arange(begin, begin + count)).tolist()
        if count and bulk_method(dataset, "__getitems__") is not None:
            try:
                return dict(zip(names, read_many(dataset, names), strict=True)).__getitem__, names
            except Exception as error:  # that of one document, which is found when they are read one by one
                pass_on(error)
        return dataset.__getitem__, names

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a small dict, without documents."""
        window = self._now
        return entries.to_state(_PackPosition(repr(self._stream), self._epoch, window.number, self._row, window.source))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position, reading its window again; raise TypeError or ValueError for unfit states."""
        given = entries.instance(Mapping, "a dict")("the state", state, _ADVICE)
        place = entries.from_state(_PackPosition, given, _ADVICE)
        now = _PackPosition(repr(self._stream), place.epoch, 0, 0)
        if found := entries.differences(place, now):
            raise ValueError(f"PackStream: the state is that of another one: {', '.join(found.values())}")
        self._begin_at(place.window, place.source or in_order.BEGINNING)
        if place.row:
            self._start_window()
        if place.row > len(self._items):
            raise ValueError(
                f"{_DATA} has {len(self._items)} rows in window {place.window} of part {self._part}, and the state was "
                f"saved after {place.row}: give the documents, and the tokenizer, that it was saved with"
            )
        self._row, self._has_rows = place.row, True
