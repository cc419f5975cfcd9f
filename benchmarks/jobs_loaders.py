"""Who does the jobs of `benchmarks.jobs`: torch as its tutorials say, torch tuned, our drop-in, and ours.

    CONTENDERS[name].open(job, own, workers) -> Opened      ``own``: a folder that is there again after a kill

torch tutorial      a map-style dataset that reads a file, or an iterable one, `DataLoader(shuffle=True, num_workers=2)`
torch tuned         faster decoders, workers that live on, batches read in bulk, rows packed and buckets made before,
                    more connections; and a batch sampler of a dozen lines that begins at any batch
drop-in             `sharded_loader.torch.DataLoader` with what the tuned one reads, and its own resume
ours                as our recipes have it: pictures are decoded once, into a file

`benchmarks.jobs_others` has the specialists. On several ranks, RANK and WORLD_SIZE say which one this is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import tarfile
import urllib.request
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import jobs_data as jobs
from benchmarks.jobs_data import Job

SEED = 0


@dataclass(frozen=True)
class Opened:
    """A loader that was made.

    Attributes:
        batches: the batches of an epoch, by its number.
        close: ends its processes.
        state: what it needs to go on, as JSON, after so many batches of an epoch; None: it begins the epoch again.
        load: makes the next epoch begin where the state was taken.
    """

    batches: Callable[[int], Iterator[Any]]
    close: Callable[[], None] = lambda: None
    state: Callable[[int, int], Any] | None = None
    load: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Contender:
    """A row of the tables.

    Attributes:
        open: makes the loader; NotImplementedError: it has no form for this job.
        modules: that have to be there.
        jobs: names of the jobs that it does; none: all.
    """

    open: Callable[[Job, Path, int], Opened]
    modules: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()

    @property
    def missing(self) -> str:
        """What is not installed, or nothing."""
        return next((name for name in self.modules if importlib.util.find_spec(name.split(".")[0]) is None), "")


def rank_here() -> tuple[int, int]:
    """Rank of this process, and number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def picture(job: Job, decode: Callable[[bytes], Any], index: int) -> Any:
    """A decoded picture and its number; in detection with its boxes between them."""
    image = decode(jobs.picture_path(job.folder, index).read_bytes())
    return (image, index) if job.name != jobs.DETECTION else (image, boxes_of(job)[index], index)


@functools.lru_cache(1)
def boxes_of(job: Job) -> list[Any]:
    """The boxes of all pictures, each an array of shape (boxes, 4)."""
    boxes = json.loads(job.path("boxes.json").read_text())
    return [np.array(one, np.float32).reshape(-1, 4) for one in boxes]


# -- torch -------------------------------------------------------------------------------------------------------------


class Samples:
    """A map-style dataset: a function of the index."""

    def __init__(self, read: Callable[[int], Any], count: int) -> None:
        self.read, self.count = read, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class Order:
    """A batch sampler whose epochs depend on their number, and that begins at any batch."""

    def __init__(self, batches: Callable[[int], Any]) -> None:
        self.batches, self.epoch, self.start = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches(self.epoch))

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        yield from self.batches(self.epoch)[start:]

    def resume(self, state: Any) -> None:
        """Begin the next epoch where a state says."""
        self.epoch, self.start = state


def shuffled(count: int, size: int, epoch: int) -> list[Any]:
    """Batches of a random order."""
    order = np.random.default_rng((SEED, epoch)).permutation(count).tolist()
    return [order[begin : begin + size] for begin in range(0, count, size)]


def in_buckets(lengths: Any, size: int, epoch: int) -> list[Any]:
    """Batches of this rank: neighbours in length with some noise, as fairseq's and many recipes make them."""
    rng, (rank, ranks) = np.random.default_rng((SEED, epoch)), rank_here()
    order = np.argsort(lengths * rng.uniform(0.9, 1.1, len(lengths)))
    batches = [order[begin : begin + size].tolist() for begin in range(0, len(order), size)]
    steps = [batches[begin : begin + ranks] for begin in range(0, len(batches), ranks)]
    steps[-1] += batches[: ranks - len(steps[-1])]
    return [steps[step][rank] for step in rng.permutation(len(steps)).tolist()]


def packed(lengths: Any, epoch: int) -> list[Any]:
    """Batches of rows of documents: best fit decreasing, over windows of 1,024 documents."""
    order = np.random.default_rng((SEED, epoch)).permutation(len(lengths))
    rows: list[list[int]] = []
    for begin in range(0, len(order), 1024):
        spare: list[tuple[int, int]] = []
        for document in sorted(order[begin : begin + 1024].tolist(), key=lambda document: -lengths[document]):
            place = bisect_left(spare, (lengths[document], -1))
            left, row = spare.pop(place) if place < len(spare) else (jobs.TOKENS, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(document)
            insort(spare, (left - lengths[document], row))
    return [rows[begin : begin + jobs.ROWS] for begin in range(0, len(rows), jobs.ROWS)]


class Rows:
    """A row of packed documents, or a batch of them: fields as language models take them."""

    def __init__(self, job: Job) -> None:
        self.documents = jobs.Documents(job)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, rows: Any) -> Any:
        return rows_of([[self.documents[document] for document in row] for row in rows])


def rows_of(rows: Any) -> dict[str, Any]:
    """A batch of rows of documents."""
    import torch

    shape = len(rows), jobs.TOKENS
    batch = {"input_ids": np.zeros(shape, np.int64), "position_ids": np.zeros(shape, np.int64)}
    batch["labels"] = np.full(shape, -100)
    for number, row in enumerate(rows):
        at = 0
        for tokens in row:
            end = at + len(tokens)
            batch["input_ids"][number, at:end] = tokens
            batch["position_ids"][number, at:end] = np.arange(len(tokens))
            batch["labels"][number, at + 1 : end] = tokens[1:]
            at = end
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def padded(samples: list[Any]) -> Any:
    """A batch of utterances."""
    import torch

    parts = [torch.from_numpy(values.copy()) for values, *_ in samples]
    of_rest = (torch.tensor(column) for column in list(zip(*samples, strict=True))[1:])
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), *of_rest


def with_boxes(samples: list[Any]) -> Any:
    """A batch of pictures with a list of boxes."""
    import torch

    images, boxes, numbers = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)), [torch.from_numpy(one) for one in boxes], torch.tensor(numbers)


def with_text(rows: list[Any]) -> Any:
    """A batch of tokenized lines, padded."""
    import torch

    parts = [torch.as_tensor(row["input_ids"]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return {"input_ids": ids, "id": torch.tensor([int(row["id"]) for row in rows])}


def same(batch: Any) -> Any:
    """What was read is a batch."""
    return batch


def cropped(job: Job, decode: Callable[[bytes], Any], index: int) -> Any:
    """A random crop of a picture, and its number."""
    image, number = picture(job, decode, index)
    return jobs.crop(image, np.random.default_rng()), number


COLLATE: dict[str, Any] = {jobs.SPEECH: padded, jobs.DETECTION: with_boxes, jobs.TEXT: with_text}


def read_by_index(job: Job, own: Path, is_tuned: bool) -> Any:
    """The map-style dataset of a job."""
    decode = jobs.decode_fast if is_tuned else jobs.decode_plainly
    if job.name == jobs.TEXT:
        return text_of(job, own).with_format("numpy" if is_tuned else "torch")
    if job.name in (jobs.TABLE, jobs.PACKED):
        return table_of(job) if job.name == jobs.TABLE else Rows(job)
    reads = {
        jobs.SPEECH: functools.partial(jobs.read_speech, job),
        jobs.DETECTION: functools.partial(picture, job, decode),
    }
    return Samples(reads.get(job.name, functools.partial(cropped, job, decode)), job.count)


def text_of(job: Job, own: Path) -> Any:
    """The text, tokenized once: `map` finds its result in a file."""
    import datasets

    datasets.disable_progress_bars()
    text = datasets.load_from_disk(str(job.path("text")))
    cache = str(own / "tokens.arrow")
    return text.map(jobs.tokenized, batched=True, remove_columns="text", cache_file_name=cache)


def table_of(job: Job) -> Any:
    """The table as tensors."""
    import pyarrow.parquet
    import torch

    table = pyarrow.parquet.read_table(job.path("table"))
    floats = np.stack([table[f"x{column}"].to_numpy() for column in range(12)], 1)
    rest = (torch.from_numpy(np.array(table[name].to_numpy())) for name in ("label", "id"))
    return torch.utils.data.TensorDataset(torch.from_numpy(floats), *rest)


def shared_number() -> Any:
    """An epoch that workers which live on see as well: a plain attribute would stay as it was at their start."""
    import torch

    return torch.zeros(1, dtype=torch.int64).share_memory_()


class Greedy:
    """Rows of documents in a random order, each row filled until the next document does not fit."""

    def __init__(self, job: Job) -> None:
        self.documents, self.epoch = jobs.Documents(job), shared_number()

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        info, row, used = get_worker_info(), list[Any](), 0
        order = np.random.default_rng((SEED, int(self.epoch))).permutation(len(self.documents))
        for document in order[info.id :: info.num_workers].tolist():
            tokens = self.documents[document]
            if used + len(tokens) > jobs.TOKENS:
                yield row
                row, used = [], 0
            row.append(tokens)
            used += len(tokens)
        yield row


class OfServer:
    """The members of tar files of a server, one file after the other."""

    def __init__(self, job: Job) -> None:
        self.urls = [f"{job.url}/data/tar/{shard:03}.tar" for shard in range(job.count // jobs.SHARD)]
        self.epoch = shared_number()

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        info, rng = get_worker_info(), np.random.default_rng((SEED, int(self.epoch)))
        for shard in rng.permutation(len(self.urls))[info.id :: info.num_workers].tolist():
            with urllib.request.urlopen(self.urls[shard]) as answer, tarfile.open(fileobj=answer, mode="r|") as tar:
                samples = [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
            for place in rng.permutation(len(samples)).tolist():
                name, content = samples[place]
                yield np.frombuffer(content, np.uint8), int(name[:6])


STREAMS: dict[str, Any] = {jobs.PACKED: (Greedy, rows_of), jobs.REMOTE: (OfServer, None)}


def of_torch(is_tuned: bool, package: str, job: Job, own: Path, workers: int) -> Opened:
    """torch's loader or one that is used like it."""
    make: Any = importlib.import_module(package).DataLoader
    is_drop_in, size = package != TORCH, job.kind.batch_size
    own.mkdir(exist_ok=True)
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": COLLATE.get(job.name)}
    if is_tuned:
        options |= {"persistent_workers": True, "prefetch_factor": 4}
    if job.name == jobs.REMOTE or (job.name == jobs.PACKED and not is_tuned):
        kind, options["collate_fn"] = STREAMS[job.name]
        options["num_workers"] = 8 if is_tuned else workers
        stream = type(kind.__name__, (kind, importlib.import_module(TORCH).IterableDataset), {})(job)
        return of_loader(make(stream, size, **options), is_drop_in)
    data = read_by_index(job, own, is_tuned)
    if is_tuned and (job.name in PLANNED or not is_drop_in):
        return of_order(make, data, job, options)
    if job.name != jobs.SPEECH:
        return of_loader(make(data, size, shuffle=True, **options), is_drop_in)
    rank, ranks = rank_here()
    sampler = importlib.import_module(TORCH).DistributedSampler(data, ranks, rank, shuffle=True, seed=SEED)
    return of_loader(make(data, size, sampler=sampler, **options), is_drop_in, sampler)


TORCH = "torch.utils.data"

PLANNED = (jobs.TABLE, jobs.PACKED, jobs.SPEECH)
"""Jobs whose tuned form has batches of its own, so the drop-in gets them, too."""


def of_order(make: Any, data: Any, job: Job, options: dict[str, Any]) -> Opened:
    """torch's loader over batches that are planned before, and that begin anywhere."""
    size, batches = job.kind.batch_size, functools.partial(shuffled, job.count, job.kind.batch_size)
    if job.name in (jobs.PACKED, jobs.SPEECH):
        lengths = np.load(job.path("lengths.npy"))
        plan = functools.partial(in_buckets, lengths, size)
        if job.name == jobs.PACKED:
            plan = functools.partial(packed, lengths.tolist())
        batches = functools.lru_cache(2)(plan)  # type: ignore[assignment]
    order = Order(batches)
    if job.name == jobs.TABLE:  # tensors are read in bulk, here: workers would copy what is in memory already
        options = {}
    if job.name in (jobs.TABLE, jobs.PACKED):
        loader = make(data, None, sampler=order, **{**options, "collate_fn": same})
    else:
        loader = make(data, batch_sampler=order, **options)

    def begin(epoch: int) -> Iterator[Any]:
        order.epoch = epoch
        return iter(loader)

    return Opened(begin, state=lambda epoch, done: [epoch, done], load=order.resume)


def of_loader(loader: Any, keeps: bool, sampler: Any = None) -> Opened:
    """A loader like torch's; ``keeps``: with a state."""

    def begin(epoch: int) -> Iterator[Any]:
        if sampler is not None:
            sampler.set_epoch(epoch)
        elif hasattr(loader.dataset, "epoch"):
            loader.dataset.epoch.fill_(epoch)
        return iter(loader)

    if not keeps:
        return Opened(begin)
    return Opened(begin, state=lambda *_: loader.state_dict(), load=loader.load_state_dict)


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(job: Job, own: Path, workers: int) -> Opened:
    """Our loader, as our recipes have it."""
    from sharded_loader import ShardedDataLoader

    own.mkdir(exist_ok=True)
    dataset, options = OURS[job.name](job, own)
    options = {"num_workers": workers, "seed": SEED, **options}
    if "batch_sampler" not in options:
        options |= {"batch_size": job.kind.batch_size, "shuffle": "sampler" not in options}
    loader = ShardedDataLoader(dataset, **options)
    return Opened(lambda _: iter(loader), loader.close, lambda *_: loader.state_dict(), loader.load_state_dict)


def _pictures(job: Job, own: Path) -> Any:
    from sharded_loader import ImageFolderDataset, SimpleDataset

    read = functools.partial(_of_folder, ImageFolderDataset(job.path("pictures"), size=jobs.SHORT), job)
    decoded = SimpleDataset(range(job.count)).transform(read).cache(path=own / "it.cache")
    return (decoded if job.name == jobs.DETECTION else decoded.transform(_crop)), {}


def _of_folder(folder: Any, job: Job, index: int) -> Any:
    """A picture of an `ImageFolderDataset` that scales, with the number in its name."""
    image, number = folder[index][0].numpy(), int(Path(folder.items[index][0]).stem)
    return (image, number) if job.name != jobs.DETECTION else (image, boxes_of(job)[number], number)


def _crop(image: Any, number: int) -> Any:
    from sharded_loader import sample_rng

    rng, (height, width), side = sample_rng(), image.shape[1:], jobs.CROP
    top, left = rng.integers(height - side + 1), rng.integers(width - side + 1)
    square = image[:, top : top + side, left : left + side]
    return (square[:, :, ::-1] if rng.random() < 0.5 else square), number


def _detection(job: Job, own: Path) -> Any:
    from sharded_loader import batchify

    collate = batchify.Tuple(batchify.Stack(), batchify.List(), batchify.Stack())
    return _pictures(job, own)[0], {"collate_fn": collate}


def _packed(job: Job, own: Path) -> Any:
    from sharded_loader import PackSampler
    from sharded_loader.batchify import Pack

    order = PackSampler(np.load(job.path("lengths.npy")), tokens=jobs.TOKENS, rows=jobs.ROWS, seed=SEED)
    return jobs.Documents(job), {"batch_sampler": order, "batchify_fn": Pack(jobs.TOKENS)}


def _speech(job: Job, own: Path) -> Any:
    from sharded_loader import SimpleDataset, SortedBucketSampler, batchify

    order = SortedBucketSampler(np.load(job.path("lengths.npy")), job.kind.batch_size, shuffle=True, seed=SEED)
    collate = batchify.Tuple(batchify.Pad(), batchify.Stack(), batchify.Stack())
    options = {"batch_sampler": order, "collate_fn": collate, "num_replicas": "auto"}
    return SimpleDataset(range(job.count)).transform(functools.partial(jobs.read_speech, job)), options


def _table(job: Job, own: Path) -> Any:
    import pyarrow.parquet

    from sharded_loader import ArrayDataset

    return ArrayDataset(pyarrow.parquet.read_table(job.path("table"))), {"num_workers": 0}


def _remote(job: Job, own: Path) -> Any:
    from sharded_loader import ShardCache, ShardDataset, ShardShuffleSampler

    shards = ShardDataset(f"{job.url}/data/tar/shards.index", cache=ShardCache(own, room_of(job)))
    order = ShardShuffleSampler(shards.lengths, 4, seed=SEED)
    return shards.transform(_of_tar), {"sampler": order}


def room_of(job: Job) -> int:
    """Bytes of a cache for half of the shards."""
    return job.count * jobs.NOISE * 53 // 100


def _of_tar(sample: dict[str, Any]) -> Any:
    return np.frombuffer(sample["bin"], np.uint8), int(sample["__key__"])


def _text(job: Job, own: Path) -> Any:
    from sharded_loader import batchify

    collate = batchify.Dict({"input_ids": batchify.Pad(), "id": batchify.Stack()})
    return text_of(job, own), {"collate_fn": collate}


OURS: dict[str, Callable[[Job, Path], Any]] = {
    jobs.PICTURES: _pictures,
    jobs.LARGE: _pictures,
    jobs.PACKED: _packed,
    jobs.SPEECH: _speech,
    jobs.TABLE: _table,
    jobs.REMOTE: _remote,
    jobs.TEXT: _text,
    jobs.DETECTION: _detection,
}

TUTORIAL, TUNED, OUR_NAME = "torch tutorial", "torch tuned", "ours"

CONTENDERS = {
    TUTORIAL: Contender(functools.partial(of_torch, False, TORCH), ("torch",)),
    TUNED: Contender(functools.partial(of_torch, True, TORCH), ("torch",)),
    "drop-in": Contender(functools.partial(of_torch, True, "sharded_loader.torch"), ("torch",)),
    OUR_NAME: Contender(ours),
}
