"""`PackSampler` and `Pack`: documents of known lengths, packed into rows of a fixed number of tokens.

    lengths, seed --shuffle--> windows of documents --best fit decreasing--> rows, shuffled in their window --> batches
    Packed: documents of a batch and their places  -> a task -> the reader's scope
    Pack(samples) -> dict of arrays, at the places found there; called alone, it fills row by row

Windows are packed independently, so a row follows from (seed, epoch, window); `GROUP` documents are packed in one pass.
How many rows a window has depends on its lengths, so a sampler caches *row checkpoints*: the number of rows before a
window, per packed group. A state contains that of its position, so that no rank repacks what came before. ``len`` and
jumps ahead take one pass over the lengths in between. ``steps_per_epoch`` reads all windows endlessly (`EVERY`).
"""

from __future__ import annotations

import zlib
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Array, Batchify, BatchifyError, Empty, Int64s, Sampler, Table
from sharded_loader.extend.data import as_array, check_not_empty, common_dtype, stack_arrays
from sharded_loader.extend.order import EVERY, IN_MEMORY, SUM, parts, reading, resolve_seed, shuffle, shuffled
from sharded_loader.extend.tools import brief, call_of, check_choice, check_int
from sharded_loader.samplers.context import context_of, multiple_of, part_of
from sharded_loader.samplers.index_samplers import Numbers, integers

GROUP = 2**17
"""Documents to pack at once, unless windows are larger: 20 ms."""
KEPT = 4
"""Packed groups that a table caches, 6 MB each; one rank of thousands crosses several groups in a few steps."""
ROWS = 64
"""Minimum rows per window by default. About half a row of a window stays empty."""

Places = npt.NDArray[np.int64]
"""For each document: row, first token, end token, and length of the whole document."""

RowCheckpoint = tuple[int, int]
"""Number of rows before a window, and the window's number, counted over all epochs."""

Order = Callable[[Int64s], Int64s]
"""Function from positions in an epoch to documents."""

Layout = tuple[Int64s, Places, Int64s]
"""Documents of a window by row, their places (see `Packed`), and where each row begins, with the end."""

Group = tuple[Int64s, Callable[[int], Layout]]
"""Cumulative rows of windows that were packed together, and a function that computes the layout of one."""


class PackSampler(Sampler[list[int]]):
    """Pack documents into rows of at most ``tokens`` tokens, and rows into batches.

    Use it as ``batch_sampler``, together with `batchify.Pack`. Each window of the documents' shuffled order is packed
    by best fit, longest first, and its rows are shuffled. Each document comes exactly once per epoch. Batches depend
    only on seed and epoch, for any number of ranks. Source of the idea: best-fit packing (Ding et al., "Fewer
    truncations improve language modeling", ICML 2024), as in TRL and Grain, applied to windows of a shuffled order.

    Args:
        lengths: number of tokens of each document, 1-D integers. An array is not copied, so it may be memory-mapped:
            ``np.load("lengths.npy", mmap_mode="r")``. With ``limits``, a dict with one such array for each limit.
        tokens: tokens per row.
        rows: rows per batch.
        window: documents that are packed together; larger windows leave less space in rows. By default enough for about
            64 rows, from 1,024 to 16,384.
        long: treatment of documents longer than a row: ``"error"``; ``"cut"`` them into pieces of ``tokens`` tokens and
            a rest, packed like documents; or ``"drop"`` them.
        shuffle: shuffle documents and rows. Otherwise windows follow the order of the dataset.
        last_batch: ``"keep"`` or ``"discard"`` a smaller last batch. With ``steps_per_epoch``, there is none.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator.
        limits: several limits of a row in the place of ``tokens``, such as ``{"tokens": 8192, "patches": 4096}``.
            Documents with the greatest share of a limit come first. A document may have 0 of all but tokens. Only
            tokens are cut: each piece counts with all that its document has of the other limits.
        multiple: number of tokens to a multiple of which documents are filled up: 2 * size for `Pack` with
            ``context=(rank, size)``.

    Raises:
        TypeError, ValueError: An argument is invalid, or a length is not above 0, or above ``tokens`` with
            ``long="error"``. Beyond 2**24 (16 M) documents, lengths are checked when their window is packed.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> from sharded_loader.batchify import Pack
        >>> documents = [[1] * 3, [2] * 5, [3] * 2, [4] * 4]
        >>> sampler = PackSampler([3, 5, 2, 4], tokens=7, rows=2, seed=0)
        >>> pack = Pack(tokens=7)
        >>> loader = ShardedDataLoader(documents, batch_sampler=sampler, batchify_fn=pack)
        >>> sorted(map(sorted, next(iter(loader))["input_ids"].tolist()))
        [[1, 1, 1, 4, 4, 4, 4], [2, 2, 2, 2, 2, 3, 3]]
    """

    shown = tuple((name, name) for name in ("tokens", "rows", "window", "long", "shuffle", "last_batch"))
    decided_by = (("lengths", "_checksum"), *shown)
    fixed = ("tokens", "window", "long", "shuffle")
    cut_by, sized_by = ("tokens", "rows", "window", "long", "limits", "multiple"), ("rows",)
    counts_by_pass = yields_batches = True

    def __init__(
        self,
        lengths: Numbers | Mapping[str, Numbers],
        tokens: int | None = None,
        rows: int = 1,
        *,
        window: int | None = None,
        long: Literal["error", "cut", "drop"] = "error",
        shuffle: bool = True,
        last_batch: str = "keep",
        seed: int | None = None,
        limits: Mapping[str, int] | None = None,
        multiple: int = 1,
    ) -> None:
        if len({tokens is None, limits is not None, isinstance(lengths, Mapping), isinstance(limits, Mapping)}) > 1:
            text = "PackSampler packs to tokens=, or to several limits=, where both limits and lengths are dicts"
            raise TypeError(f"{text}: {_LIMITS}")
        given: Any = {"tokens": lengths} if limits is None else lengths
        most: Any = {"tokens": tokens} if limits is None else limits
        if limits is not None:
            self._limits = ", ".join(f"{name} {most}" for name, most in limits.items())
            self._add("limits", "_limits")
        self._columns = _columns(given, most)
        self._most = np.array([most[name] for name in self._columns], np.int64)
        self._lengths, self.tokens = self._columns["tokens"], int(self._most[0])
        self.dataset_length = len(self._lengths)
        self.rows = check_int("rows", rows, 1, "give the number of rows in a batch")
        self._multiple = check_int("multiple", multiple, 1, "give 2 * the number of ranks that share a row")
        if self.tokens % self._multiple:
            text = f"multiple is {multiple}, and a row of {self.tokens} tokens is no multiple of it"
            raise ValueError(f"{text}: give such a number of tokens")
        if self._multiple > 1:
            self._add("multiple", "_multiple")
        self.long: str = check_choice("long", long, ("error", "cut", "drop"), "PackSampler")
        self.last_batch = check_choice("last_batch", last_batch, ("keep", "discard"), "PackSampler")
        self.shuffle = bool(shuffle)
        self._checksum = self._checked_sum()
        self.window = self._default_window() if window is None else check_int("window", window, 1, "count documents")
        self.windows = parts(len(self._lengths), self.window, cut=False)
        self.at_once = max(min(GROUP // self.window, self.windows), 1)  # at most one epoch of a small dataset
        self.seed = resolve_seed(seed) if shuffle or seed is not None else None
        self._row_checkpoints: dict[Any, list[RowCheckpoint]] = {}

    def _add(self, name: str, attribute: str) -> None:
        """Add an argument to those that decide the order. Without it, states stay what they were."""
        for names in ("decided_by", "shown"):
            vars(self)[names] = (*getattr(self, names), (name, attribute))

    @property
    def _shown_length(self) -> int:
        return len(self._lengths)  # counting batches may take a pass

    def _checked_sum(self) -> str:
        """Check the lengths and return their checksum. Beyond 16 M, only some are read: the file may be on a disk."""
        count, checksum = len(self._lengths), self._multiple - 1  # with another multiple, rows are others
        step = GROUP if count <= IN_MEMORY else count // 64
        for begin in range(0, count, step):
            blocks = [column[begin : begin + GROUP].astype("<i8", copy=False) for column in self._columns.values()]
            if count <= IN_MEMORY:
                self._check(blocks, range(begin, begin + GROUP))
            for block in blocks:
                checksum = zlib.crc32(block.tobytes(), checksum)
        return f"{SUM}{checksum:08x}"

    def _check(self, lengths: list[Int64s], documents: Int64s | range) -> None:
        for name, values, most in zip(self._columns, lengths, self._most.tolist(), strict=True):
            least, fits = int(name == "tokens"), self.long == "drop" or (name == "tokens" and self.long == "cut")
            if values.min(initial=least) < least or (values.max(initial=most) > most and not fits):
                place = int(np.flatnonzero((values < least) | ((values > most) & (not fits)))[0])
                text = f"document {documents[place]} has {values[place]} {name}, and a row has {least} to {most}"
                advice = 'leave it out of the dataset, leave long ones out with long="drop", or give a higher limit'
                raise ValueError(f'{text}: {advice}. long="cut" cuts those with many tokens')

    def _default_window(self) -> int:
        wanted = 1 << 62
        for column, most in zip(self._columns.values(), self._most.tolist(), strict=True):
            some = column[:: max(len(column) // 1024, 1)].astype(np.int64)
            wanted = min(wanted, ROWS * most * len(some) // max(int(some.sum()), 1))
        return 1 << min(max(wanted.bit_length(), 10), 14)

    # -- epochs ---------------------------------------------------------------------------------------------

    def epoch_table(self, epoch: int) -> Table:
        return _PackTable(self, epoch)

    def len_epoch(self, epoch: int) -> int:
        """Number of batches in an epoch. The first call takes a pass over the lengths, at 2 M per second."""
        return _PackTable(self, epoch).upto(0, 1 << 60)

    def known(self, epoch: int) -> list[RowCheckpoint]:
        """Return the known row checkpoints of an epoch, ascending; those of the last epochs are cached."""
        key = self.seed, epoch
        if key not in self._row_checkpoints:
            while len(self._row_checkpoints) >= 4:
                self._row_checkpoints.pop(next(iter(self._row_checkpoints)))
            self._row_checkpoints[key] = [(0, max(epoch, 0) * self.windows)]
        return self._row_checkpoints[key]

    def row_checkpoint(self, epoch: int, batch: int) -> RowCheckpoint:
        """Return the nearest known row checkpoint before a batch, for a state."""
        found = self.known(epoch)
        return found[bisect_right(found, (batch * self.rows, 1 << 62)) - 1]

    def add_row_checkpoint(self, epoch: int, row_checkpoint: RowCheckpoint) -> None:
        if row_checkpoint not in (found := self.known(epoch)):
            insort(found, row_checkpoint)

    # -- packing --------------------------------------------------------------------------------------------

    def order(self, epoch: int) -> Order:
        return shuffle(len(self._lengths), self.seed, "pack", epoch) if self.shuffle else lambda positions: positions

    def pack(self, order: Callable[[int], Order], last: int, window: int) -> Group:
        """Pack up to `at_once` windows, from ``window`` on and before ``last``, numbered over all epochs."""
        end = min(window + self.at_once, last)
        documents, windows = self._documents(window, end, order)
        found = [column[documents].astype(np.int64) for column in self._columns.values()]
        self._check(found, documents)
        lengths, *more = found
        pieces: Any = -(-lengths // self.tokens)
        if self.long == "drop":
            pieces = (np.stack(found, axis=1) <= self._most).all(axis=1).astype(np.int64)
        begins = self.tokens * (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces))
        documents, windows, lengths = (np.repeat(one, pieces) for one in (documents, windows, lengths))
        ends, windows = np.minimum(begins + self.tokens, lengths), windows - window
        sizes = (-(-(ends - begins) // self._multiple) * self._multiple).astype(np.int32)
        columns = [sizes, *(np.repeat(one, pieces) for one in more)]
        rows, counts = best_fit(columns, windows, end - window, self._most.tolist())
        borders = np.searchsorted(windows, np.arange(len(counts) + 1))

        def layout(n: int) -> Layout:
            here, row = slice(borders[n], borders[n + 1]), rows[borders[n] : borders[n + 1]]
            if self.shuffle:
                row = shuffled(int(counts[n]), self.seed, "pack rows", window + n)[row]
            by_row = np.argsort(row, kind="stable")
            places = np.stack([row, begins[here], ends[here], lengths[here]], axis=1)[by_row]
            return documents[here][by_row], places, np.searchsorted(places[:, 0], np.arange(counts[n] + 1))

        return np.cumsum([0, *counts]), lru_cache(KEPT)(layout)

    def _documents(self, window: int, end: int, order: Callable[[int], Order]) -> tuple[Int64s, Int64s]:
        documents, windows = [], []
        for epoch in range(window // self.windows, parts(end, self.windows, cut=False)):
            first, behind = (min(max(one - epoch * self.windows, 0), self.windows) for one in (window, end))
            positions = np.arange(first * self.window, min(behind * self.window, len(self._lengths)))
            documents.append(order(epoch)(positions))
            windows.append(positions // self.window + epoch * self.windows)
        return np.concatenate(documents), np.concatenate(windows)


def best_fit(
    columns: Sequence[npt.NDArray[Any]], windows: Int64s, count: int, limits: Sequence[int]
) -> tuple[Int64s, Int64s]:
    """Pack many windows at once by best fit decreasing: greatest document first, into the fullest row that has room.

    ``columns`` are sizes, one for each limit of a row. Documents come by their greatest share of a limit, and rows are
    as full as the first column says. It is 1 to its limit, others from 0; ``windows`` ascend from 0 to below ``count``.
    Returns the row of each document in its window, and the number of rows of each window.

    Example:
        >>> sizes, windows = np.array([3, 5, 2, 4, 7], np.int32), np.array([0, 0, 0, 0, 1])
        >>> rows, counts = best_fit([sizes], windows, 2, [7])
        >>> rows.tolist(), counts.tolist()
        ([1, 0, 0, 1, 0], [2, 1])
    """
    tokens = limits[0]
    per_window = np.bincount(windows, minlength=count)
    begin = np.cumsum(per_window) - per_window
    nth = np.arange(len(windows)) - np.repeat(begin, per_window)
    greatest = columns[0].astype(np.int64)
    for sizes, limit in zip(columns[1:], limits[1:], strict=True):
        greatest = np.maximum(greatest, np.rint(sizes * (tokens / limit)).astype(np.int64))
    # Smaller windows have fewer documents; the others have size 0.
    keys = np.full((count, int(per_window.max(initial=0))), tokens << 31, np.int64)
    keys[windows, nth] = (tokens - greatest) << 31 | nth
    keys.sort(axis=1)
    real = keys < tokens << 31
    documents = (begin[:, None] + (keys & (2**31 - 1)))[real]
    tables = [np.zeros(keys.shape[::-1], np.int32) for _ in columns]  # n-th greatest document, window
    for one, sizes in zip(tables, columns, strict=True):
        one.T[real] = sizes[documents]
    chosen = np.empty(keys.shape[::-1], np.int64)
    least = [one.sum(axis=0, dtype=np.int64) // limit for one, limit in zip(tables, limits, strict=True)]
    width = int(np.max([*least, (tables[0] > tokens // 2).sum(axis=0)], initial=0))
    while True:
        width += width // 8 + 8
        spare, first = [np.full((count, width), limit, np.int32) for limit in limits], np.arange(count) * width
        rest = np.empty_like(spare[0])
        unsigned, flat = rest.view(np.uint32), [one.reshape(-1) for one in spare]
        for n, (longest, *others) in enumerate(zip(*tables, strict=True)):
            # Rows without room have a negative rest, large as an unsigned number. Empty rows come last.
            np.subtract(spare[0], longest[:, None], out=rest)
            for one, sizes in zip(spare[1:], others, strict=True):
                rest[one < sizes[:, None]] = -1
            place = unsigned.argmin(axis=1, out=chosen[n]) + first
            for one, sizes in zip(flat, (longest, *others), strict=True):
                one[place] -= sizes
        if spare[0].min(initial=0) >= 0:  # otherwise there were too few rows
            break
    rows = np.empty(len(windows), np.int64)
    rows[documents] = chosen.T[real]
    return rows, (spare[0] < tokens).sum(axis=1)


_LIMITS = 'PackSampler({"tokens": lengths, "patches": patches}, limits={"tokens": 8192, "patches": 4096})'


def _columns(lengths: Any, limits: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the lengths of documents by name, tokens first. Check them and the limits."""
    if "tokens" not in limits or lengths.keys() != limits.keys():
        text = f"there are limits for {sorted(limits)} and lengths for {sorted(lengths)}"
        raise ValueError(f"{text}: give both for the same names, 'tokens' among them: {_LIMITS}")
    found: dict[str, npt.NDArray[Any]] = {}
    for name in sorted(limits, key=lambda name: name != "tokens"):
        if check_int(name, limits[name], 1, "give the most that a row has") >= 2**31:
            raise ValueError(f"the limit of {name} in a row is {limits[name]}: give a number below 2**31")
        advice = f"give the number of {name} of each document"
        found[name] = integers(f"lengths of {name}", lengths[name], "integers of shape (n,)", advice)
    if len({*map(len, found.values())}) > 1:
        counts = {name: len(one) for name, one in found.items()}
        raise ValueError(f"lengths have different numbers of documents, {counts}")
    return found


FARTHEST = 1 << 30
"""Maximum rows to pack on the way to a position: 10 minutes. The state of an endless sequence may be damaged."""


class _PackTable(Table):
    """Batches of one epoch, or of all epochs (`EVERY`)."""

    _block = 4

    def __init__(self, sampler: PackSampler, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._end = (epoch + 1) * sampler.windows if epoch != EVERY else (1 << 62) * bool(sampler.windows)
        self._group = lru_cache(KEPT)(partial(sampler.pack, lru_cache(1)(sampler.order), self._end))

    def upto(self, begin: int, end: int) -> int:
        rows = self._sampler.rows
        total, window = self._find_group(max(end * rows - 1, 0))
        if window < self._end:
            return end
        return min(end, parts(total, rows, cut=self._sampler.last_batch == "discard"))

    def at(self, positions: Int64s) -> list[Packed]:
        return list(map(self._batch, positions.tolist()))

    def _batch(self, number: int) -> Packed:
        wanted, found = self._sampler.rows, 0
        documents, places = list[int](), []
        while found < wanted:
            before, window = self._find_group(row := number * wanted + found)
            if window >= self._end:
                break
            totals, layout = self._group(window)
            n = int(np.searchsorted(totals, row - before, side="right")) - 1
            if n + 1 == len(totals):
                text = f"a loaded state has counted more rows behind window {window} of PackSampler than there are"
                raise ValueError(f"{text}: load it with the original lengths, or begin an epoch with set_epoch")
            indices, where, bounds = layout(n)
            begin = row - before - int(totals[n])
            end = min(begin + wanted - found, len(bounds) - 1)
            first, last = bounds[[begin, end]].tolist()
            documents += indices[first:last].tolist()
            places.append(where[first:last].copy())
            places[-1][:, 0] -= begin - found
            found += end - begin
        return Packed(documents, np.concatenate(places), found)

    def _find_group(self, row: int) -> RowCheckpoint:
        """Return the row checkpoint of the group that contains a row; beyond the last row, end and number of rows."""
        known, step = self._sampler.known(self._epoch), self._sampler.at_once
        n = bisect_right(known, (row, 1 << 62)) - 1
        if self._epoch == EVERY and row - known[n][0] > FARTHEST:
            text = f"PackSampler cannot be resumed at row {row:,}, or begin there: it would pack all rows from"
            raise ValueError(f"{text} {known[n][0]:,} on. Is the number of the epoch right?")
        while True:
            before, window = known[n]
            if window >= self._end or (n + 1 < len(known) and known[n + 1][1] - window <= step):
                return before, window
            following = before + int(self._group(window)[0][-1]), min(window + step, self._end)
            insort(known, following)
            if row < following[0]:
                return before, window
            if self._epoch == EVERY and not following[0] and following[1] > self._sampler.windows:
                text = f"PackSampler leaves out all documents: each has more than {self._sampler.tokens} tokens"
                raise ValueError(f'{text}. Give a greater tokens=, or cut documents with long="cut"')
            n = bisect_right(known, following) - 1


# -- rows ------------------------------------------------------------------------------------------------------------


FIELDS = "input_ids", "labels"
IGNORED = -100
"""Label that PyTorch's losses ignore."""


class Packed(list[int]):
    """Indices of documents packed into rows, in the order of the rows; cut documents come several times.

    ``places`` has shape (documents, 4), see `Places`; ``rows`` is the number of rows.

    Example:
        >>> batch = Packed([7, 3, 5], np.array([[0, 0, 4, 4], [0, 0, 2, 2], [1, 0, 6, 6]]), 2)
        >>> batch.cut([1, 1]), batch.taken([0, 2]).places[:, 0].tolist()
        ([[7, 3], [5]], [0, 1])
    """

    __slots__ = ("places", "rows")

    def __init__(self, documents: Iterable[int], places: Places, rows: int) -> None:
        super().__init__(documents)
        self.places, self.rows = places, rows

    def taken(self, positions: Sequence[int]) -> Packed:
        return Packed([self[position] for position in positions], self.places[positions], self.rows)

    def cut(self, sizes: Iterable[int]) -> list[Packed]:
        found: list[Packed] = []
        for begin, end in pairwise(accumulate(sizes, initial=0)):
            first, last = np.searchsorted(self.places[:, 0], [begin, end]).tolist()
            if begin < end:
                places = self.places[first:last].copy()
                places[:, 0] -= begin
                found.append(Packed(self[first:last], places, end - begin))
        return found

    def __reduce__(self) -> Any:
        return Packed, (list(self), self.places, self.rows)


class Pack(Batchify):
    """Collate documents side by side into rows of ``tokens`` tokens, as planned by `PackSampler`.

    A document is a 1-D array, list or tensor of token ids, or a mapping with ``"input_ids"`` and optionally
    ``"labels"``, as in tokenised Hugging Face datasets. Rows of `PackStream` are stacked. Pass `Pack` as
    ``batchify_fn`` with ``batch_sampler=PackSampler(...)``, or call it in a function of your own with all samples.
    Outside a loader, a document that does not fit begins the next row. Source of the idea:
    ``transformers.DataCollatorWithFlattening``, which yields the same values.

    Args:
        tokens: length of a row, the same as in `PackSampler`.
        pad_id: padding of ``input_ids``.
        media: names of fields of a document that are joined along their first axis, such as ``("pixel_values",
            "image_grid_thw")``: arrays of shape (patches, values) and (images, 3). Documents without pictures have
            arrays of length 0, None, or no such field.
        context: rank and size of a group whose ranks share each row, or a `DeviceMesh` with the dimension ``"cp"``. The
            batch is the part of this rank. Pass ``PackSampler(..., multiple=2 * size)``.

    Returns:
        Calling it returns a dict of tensors. The first four are int64, of shape (rows, tokens). Pieces of documents
        that `PackSampler` has cut count as documents:

        - ``input_ids``: the tokens.
        - ``position_ids``: 0, 1, 2, ... in each document; 0 in padding.
        - ``segment_ids``: number of the document in its row, from 1; 0 in padding.
        - ``labels``: the document's labels, or its tokens; -100 in padding and at the first token of each document.
          They are not shifted, because models of transformers do that.
        - ``cu_seqlens``: int32, shape (documents + 1,): where each document begins in ``input_ids[segment_ids > 0]``,
          and the end of the last one.
        - each field of ``media``: of all documents in the order of ``input_ids``, as Qwen2-VL takes it; left out if no
          document has it. Its name with ``_per_row``: int64, shape (rows,): its length in each row, to cut it.

        With ``context``, the first four have shape (rows, tokens / size): chunks ``rank`` and ``2 * size - 1 - rank``
        of each document, which is filled up to a multiple of ``2 * size``. ``labels`` are shifted: each position has
        the next token of its document. ``cu_seqlens`` is that of whole rows. ``cu_seqlens_padded`` (int32, shape
        (documents + 1,)) says where documents begin in whole rows, as Transformer Engine takes it. With one rank, the
        part is the whole row.

    Raises:
        TypeError, ValueError: An argument is wrong, such as a row that ``context`` cannot cut into equal chunks. When
            called: a document is empty, too long, not integers, or does not match its length in `PackSampler`.

    Example:
        >>> batch = Pack(tokens=6)([[11, 12, 13], [21, 22], [31, 32, 33, 34]])
        >>> batch["input_ids"]
        tensor([[11, 12, 13, 21, 22,  0],
                [31, 32, 33, 34,  0,  0]])
        >>> [batch[name][0].tolist() for name in ("labels", "position_ids", "segment_ids")]
        [[-100, 12, 13, -100, 22, -100], [0, 1, 2, 0, 1, 0], [1, 1, 1, 2, 2, 0]]
        >>> batch["cu_seqlens"]
        tensor([0, 3, 5, 9], dtype=torch.int32)
    """

    def __init__(self, tokens: int, pad_id: int = 0, media: Sequence[str] = (), context: Any = None) -> None:
        self._tokens = check_int("tokens", tokens, 1, "give the number of tokens in a row")
        if isinstance(media, str) or not (isinstance(media, Iterable) and all(isinstance(name, str) for name in media)):
            raise TypeError(f"media is {media!r}: give names of fields, such as ('pixel_values', 'image_grid_thw')")
        self._media = tuple(media)
        self._context = None if context is None else context_of(context, self._tokens)
        if media and context is not None:
            raise ValueError("media cannot be cut among the ranks of context=: leave out one of them")
        self._pad_id = check_int("pad_id", pad_id, -(2**63), "give the token that fills up a row")

    def assemble(self, samples: Sequence[object], empty: Empty) -> dict[str, Array]:
        check_not_empty(samples)
        if isinstance(samples[0], Mapping) and "segment_ids" in samples[0]:
            return _stacked(samples, empty)
        documents = [fields_of(sample, FIELDS, "sample {} of the batch is", n) for n, sample in enumerate(samples)]
        tokens = [document["input_ids"] for document in documents]
        scope = reading.get()
        planned = None if scope is None else scope.indices
        if isinstance(planned, Packed) and len(planned) == len(samples):
            _check_lengths(tokens, planned)
        else:
            planned = _planned_in_order(tokens, self._tokens, self._multiple)
        row, begin, end, _ = planned.places.T
        sizes = end - begin
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        padded = -(-sizes // self._multiple) * self._multiple
        filled = np.bincount(row, padded, planned.rows).astype(np.int64)
        if (most := int(filled.max())) > self._tokens:
            multiple = "" if self._multiple == 1 else f"multiple={self._multiple}, "
            advice = f"write the same number in both, PackSampler(lengths, tokens={self._tokens}, {multiple}...)"
            text = f"PackSampler has planned a row of {most} tokens, and Pack makes rows of {self._tokens}"
            raise BatchifyError(text, advice)
        ids = _concatenated(tokens, begin, end)
        labels = ids.copy()
        if any("labels" in document for document in documents):
            labels = _concatenated(
                [document.get("labels", document["input_ids"]) for document in documents], begin, end
            )
        labels[bounds[:-1]] = IGNORED
        in_row = np.arange(len(row)) - np.searchsorted(row, row)
        values = {
            "input_ids": (self._pad_id, ids),
            "position_ids": (0, np.arange(len(labels)) - np.repeat(bounds[:-1], sizes)),
            "segment_ids": (0, np.repeat(in_row + 1, sizes)),
            "labels": (IGNORED, labels),
        }
        if self._context is not None:  # each position has the next label
            values["labels"] = IGNORED, np.append(labels[1:], IGNORED)
            return part_of(values, row, sizes, (planned.rows, self._tokens), self._context, empty)
        batch: dict[str, Array] = {}
        for name, (fill, value) in values.items():
            batch[name], done = empty((planned.rows, self._tokens), np.dtype(np.int64)), 0
            for line, count in zip(batch[name], filled.tolist(), strict=True):
                line[:count], line[count:] = value[done : done + count], fill
                done += count
        batch["cu_seqlens"] = empty(bounds.shape, np.dtype(np.int32))
        batch["cu_seqlens"][...] = bounds
        for name in self._media:
            batch |= _joined(name, samples, planned, empty)
        return batch

    @property
    def _multiple(self) -> int:
        return 1 if self._context is None else multiple_of(self._context[1])

    def __repr__(self) -> str:
        usual = {"tokens": None, "pad_id": 0, "media": (), "context": None}
        return call_of(self, **{name: (getattr(self, f"_{name}"), value) for name, value in usual.items()})


def _joined(name: str, samples: Sequence[Any], planned: Packed, empty: Empty) -> dict[str, Array]:
    """Return a field of all documents one after the other, and its length in each row."""
    given = [sample.get(name) if isinstance(sample, Mapping) else None for sample in samples]
    arrays = [None if value is None else np.atleast_1d(as_array(value)) for value in given]
    sizes = np.array([0 if array is None else len(array) for array in arrays])
    is_cut = planned.places[:, 2] - planned.places[:, 1] < planned.places[:, 3]
    for position in np.flatnonzero(is_cut & (sizes > 0))[:1].tolist():
        text = f"document {planned[position]} is cut, and it has {name}, which may belong to another piece"
        raise BatchifyError(text, 'leave long documents out with PackSampler(..., long="drop")')
    batch = {f"{name}_per_row": empty((planned.rows,), np.dtype(np.int64))}
    batch[f"{name}_per_row"][...] = np.bincount(planned.places[:, 0], sizes, planned.rows)
    # An empty list has no shape, and counts only if there is nothing else.
    some = [array for array in arrays if array is not None]
    if found := [array for array in some if len(array)] or some[:1]:
        batch[name] = empty((int(sizes.sum()), *found[0].shape[1:]), common_dtype(found))
        try:
            np.concatenate(found, out=batch[name], casting="unsafe")
        except ValueError as error:
            advice = "give each document an array of shape (n, ...), with the same axes after the first"
            raise BatchifyError(f"{name} of the documents cannot be joined: {error}", advice) from None
    return batch


def _stacked(rows: Sequence[Any], empty: Empty) -> dict[str, Array]:
    """Stack rows of `PackStream`."""
    names = ("input_ids", "position_ids", "segment_ids", "labels")
    batch = {name: stack_arrays([row[name] for row in rows], empty) for name in names}
    is_begin = batch["position_ids"][batch["segment_ids"] > 0] == 0
    bounds = np.append(np.flatnonzero(is_begin), len(is_begin))
    batch["cu_seqlens"] = empty(bounds.shape, np.dtype(np.int32))
    batch["cu_seqlens"][...] = bounds
    return batch


def fields_of(document: Any, names: Sequence[str], what: str, number: int = 0) -> dict[str, Array]:
    """Return token ids of a document, and those other fields that it has, of as many integers.

    Example:
        >>> fields_of({"input_ids": [5, 6], "labels": [-100, 6], "text": "to be"}, ("input_ids", "labels"), "it is")
        {'input_ids': array([5, 6]), 'labels': array([-100,    6])}
    """
    fields = document if isinstance(document, Mapping) else {"input_ids": document}
    arrays: dict[str, Array] = {}
    size, are_alike = -1, True
    for name in names:
        if (given := fields.get(name)) is not None:
            arrays[name] = array = as_array(() if isinstance(given, (str, bytes)) else given)
            size = array.size if size < 0 else size
            are_alike = are_alike and array.shape == (size,) and array.dtype.kind in "iu"
    if not (size > 0 and are_alike and "input_ids" in arrays):
        shapes = {name: (one.shape, one.dtype.name) for name, one in arrays.items()}
        advice = "give token ids (1-D, at least one), or a mapping with 'input_ids' and perhaps as many 'labels'"
        raise BatchifyError(f"{what.format(number)} {brief(document)}, with {shapes}", f"{advice}, no text")
    return arrays


def _concatenated(arrays: Sequence[Array], begin: Places, end: Places) -> Array:
    pieces = [array[first:last] for array, first, last in zip(arrays, begin.tolist(), end.tolist(), strict=True)]
    return np.concatenate(pieces, dtype=np.int64, casting="unsafe")


def _check_lengths(tokens: Sequence[Array], planned: Packed) -> None:
    for document, ids, length in zip(planned, tokens, planned.places[:, 3].tolist(), strict=True):
        if len(ids) != length:
            text = f"document {document} has {len(ids)} tokens, and PackSampler has the length {length} for it"
            raise BatchifyError(text, "give PackSampler the lengths of this dataset's documents, in their order")


def _planned_in_order(tokens: Sequence[Array], most: int, multiple: int) -> Packed:
    """Plan documents row after row: one that does not fit begins the next row."""
    places, row, used = np.zeros((len(tokens), 4), np.int64), 0, 0
    for document, ids in enumerate(tokens):
        if len(ids) > most:
            advice = 'cut it, or let PackSampler(..., long="cut") do so and give Pack itself as batchify_fn'
            raise BatchifyError(f"sample {document} of the batch has {len(ids)} tokens, and a row has {most}", advice)
        size = -(-len(ids) // multiple) * multiple
        row, used = (row, used + size) if used + size <= most else (row + 1, size)
        places[document] = row, 0, len(ids), len(ids)
    return Packed(range(len(tokens)), places, row + 1)
