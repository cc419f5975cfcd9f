"""The specialists of the jobs of `benchmarks.jobs`, each in its own format, as its documentation recommends.

    python -m benchmarks.jobs_others NAME FOLDER SCALE CONTENDERS      makes a job, and what these read it from

    Mosaic, litdata     shards of JPEGs; decoded by their dataset, read by their loader, which has a state
    webdataset          tar files of JPEGs, a buffer of 1,000 samples to shuffle
    Grain               `MapDataset` over the files, `mp_prefetch`; its iterator has a state
    SPDL                a pipeline of threads; its own decoder needs FFmpeg's libraries, so this is the tuned torch's
    TurboLoader         a tar file of JPEGs, its own decoder and crops
    TRL                 rows packed beforehand (`pack_dataset`, bfd) and its flattening of positions
    lhotse              cuts of WAV files, `DynamicBucketingSampler`
    datasets            Hugging Face's, of Parquet files, as tensors
    of a server         `benchmarks.remote_loaders`

What makes a format is not timed. All decode pictures as the tuned torch does, unless they bring a decoder.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import jobs_data as jobs
from benchmarks.jobs_data import Job, raw_samples
from benchmarks.jobs_loaders import CONTENDERS as TORCH_AND_OURS
from benchmarks.jobs_loaders import SEED, Contender, Opened, picture, rank_here, room_of, rows_of, with_boxes
from benchmarks.ranks_tokens import without_operators

PICTURES = (jobs.PICTURES, jobs.LARGE, jobs.DETECTION)
PER_SHARD, BUFFER = 64, 1000


def decoded(job: Job, raw: bytes, boxes: str, number: int) -> Any:
    """A sample of a format of JPEGs."""
    image = jobs.decode_fast(raw)
    if job.name == jobs.DETECTION:
        return image, np.array(json.loads(boxes), np.float32).reshape(-1, 4), number
    return jobs.crop(image, np.random.default_rng()), number


def collate_of(job: Job) -> Any:
    """torch's collate function of a job with pictures; None: its default."""
    return with_boxes if job.name == jobs.DETECTION else None


# -- Mosaic, litdata, webdataset ---------------------------------------------------------------------------------------


def write_mosaic(job: Job, folder: Path) -> None:
    """Shards of JPEGs."""
    kept = without_operators()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "boxes": "str", "id": "int"}) as writer:
        for number, raw, boxes in raw_samples(job):
            writer.write({"jpg": raw, "boxes": boxes, "id": number})
    del kept


def mosaic(job: Job, own: Path, workers: int) -> Opened:
    """MosaicML's streaming."""
    kept = without_operators()
    import streaming

    class Data(streaming.StreamingDataset):  # type: ignore[misc, name-defined, unused-ignore]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return decoded(job, sample["jpg"], sample["boxes"], sample["id"])

    streaming.base.util.clean_stale_shared_memory()
    size = job.kind.batch_size
    data = Data(local=str(job.path("mosaic")), shuffle=True, batch_size=size)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "collate_fn": collate_of(job)}
    loader = streaming.StreamingDataLoader(data, batch_size=size, **options)
    return Opened(lambda _: iter(loader), lambda: kept and None, lambda *_: loader.state_dict(), loader.load_state_dict)


def write_litdata(job: Job, folder: Path) -> None:
    """Chunks of JPEGs."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, raw, boxes in raw_samples(job):
        writer[number] = {"jpg": raw, "boxes": boxes, "id": number}
    writer.done()
    writer.merge()


def litdata(job: Job, own: Path, workers: int) -> Opened:
    """litdata."""
    import litdata

    class Data(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return decoded(job, sample["jpg"], sample["boxes"], sample["id"])

    data = Data(str(job.path("litdata")), shuffle=True)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "collate_fn": collate_of(job)}
    loader = litdata.StreamingDataLoader(data, batch_size=job.kind.batch_size, **options)
    return Opened(lambda _: iter(loader), state=lambda *_: loader.state_dict(), load=loader.load_state_dict)


def write_tars(job: Job, folder: Path) -> None:
    """Tar files of pictures and their boxes."""
    folder.mkdir()
    for number, raw, boxes in raw_samples(job):
        with tarfile.open(folder / f"{number // PER_SHARD:03}.tar", "a") as tar:
            for suffix, content in (("jpg", raw), ("json", boxes.encode())):
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def webdataset(job: Job, own: Path, workers: int) -> Opened:
    """WebDataset."""
    import webdataset as wds

    def sample_of(sample: dict[str, Any]) -> Any:
        return decoded(job, sample["jpg"], sample["json"].decode(), int(sample["__key__"]))

    urls = sorted(str(path) for path in job.path("tar").iterdir())
    data = wds.WebDataset(urls, shardshuffle=len(urls), seed=SEED).shuffle(BUFFER).map(sample_of)
    batched = data.batched(job.kind.batch_size, collation_fn=with_boxes if collate_of(job) else stacked)
    loader = wds.WebLoader(batched, batch_size=None, num_workers=workers, persistent_workers=True)
    return Opened(lambda _: iter(loader))


def stacked(samples: list[Any]) -> Any:
    """A batch of crops, as tensors."""
    import torch

    images, numbers = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(numbers)


# -- Grain, SPDL, TurboLoader ------------------------------------------------------------------------------------------


class Reads:
    """A source for Grain: a sample by its index."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return self.job.count

    def __getitem__(self, index: Any) -> Any:
        image, *rest = picture(self.job, jobs.decode_fast, int(index))
        return (jobs.crop(image, np.random.default_rng()) if len(rest) == 1 else image, *rest)


def arrays(samples: Any) -> Any:
    """A batch of Grain's."""
    images, *boxes, numbers = zip(*samples, strict=True)
    return (np.stack(images), *map(list, boxes), np.array(numbers))


def grain(job: Job, own: Path, workers: int) -> Opened:
    """Grain."""
    import grain

    loaded: dict[str, Any] = {}

    def begin(epoch: int) -> Iterator[Any]:
        data = grain.MapDataset.source(Reads(job)).seed(SEED + epoch).shuffle()
        data = data.batch(job.kind.batch_size, batch_fn=arrays).to_iter_dataset(grain.ReadOptions(num_threads=1))
        batches = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=4))
        loaded["batches"] = found = iter(batches)
        if "state" in loaded:
            found.set_state(loaded.pop("state"))
        return found

    def state(*_: int) -> Any:
        found: dict[str, Any] = loaded["batches"].get_state()
        return json.loads(json.dumps(found, default=lambda value: value.tolist()))

    return Opened(begin, state=state, load=lambda state: loaded.update(state=state))


def spdl(job: Job, own: Path, workers: int) -> Opened:
    """SPDL: threads that decode."""
    import spdl.pipeline
    import torch

    torch.set_num_threads(1)

    def begin(epoch: int) -> Iterator[Any]:
        order = np.random.default_rng((SEED, epoch)).permutation(job.count).tolist()
        builder = spdl.pipeline.PipelineBuilder().add_source(order)
        builder = builder.pipe(Reads(job).__getitem__, concurrency=workers).aggregate(job.kind.batch_size)
        pipeline = builder.pipe(collate_of(job) or stacked).add_sink(4).build(num_threads=workers)
        with pipeline.auto_stop():
            yield from pipeline

    return Opened(begin)


def write_tar(job: Job, folder: Path) -> None:
    """One tar file of JPEGs."""
    with tarfile.open(folder, "w") as tar:
        for number in range(job.count):
            tar.add(jobs.picture_path(job.folder, number), f"{number:06}.jpg")


def turbo(job: Job, own: Path, workers: int) -> Opened:
    """TurboLoader: its own decoder, crops and flips."""
    import turboloader

    loader = turboloader.DataLoader(
        str(job.path("all.tar")),
        batch_size=job.kind.batch_size,
        num_workers=workers,
        shuffle=True,
        image_size=jobs.CROP,
        output_format="numpy",
        train_aug=True,
    )

    def begin(epoch: int) -> Iterator[Any]:
        loader.set_epoch(epoch)
        for images, about in loader:
            yield images, about["indices"]

    return Opened(begin)


# -- tokens, speech, tables, a server ----------------------------------------------------------------------------------


def write_packed(job: Job, folder: Path) -> None:
    """Documents as a Hugging Face dataset."""
    import datasets

    documents = jobs.Documents(job)

    def each() -> Iterator[Any]:
        for number in range(len(documents)):
            yield {"input_ids": documents[number].astype(np.int32)}

    datasets.disable_progress_bars()
    datasets.Dataset.from_generator(each, cache_dir=str(folder / "cache")).save_to_disk(str(folder))


def trl(job: Job, own: Path, workers: int) -> Opened:
    """TRL: the dataset is packed when the run begins, as its trainer does, and found in a file after a kill."""
    kept = without_operators()  # transformers imports torchvision
    import datasets
    import torch
    from trl.data_utils import pack_dataset

    own.mkdir(exist_ok=True)
    datasets.disable_progress_bars()
    data = datasets.load_from_disk(str(job.path("documents")))
    rows = pack_dataset(data, jobs.TOKENS, "bfd", {"cache_file_name": str(own / "rows.arrow")}).with_format("numpy")
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "collate_fn": unpacked}
    loader = torch.utils.data.DataLoader(rows, jobs.ROWS, shuffle=True, **options)
    del kept
    return Opened(lambda _: iter(loader))


def unpacked(samples: list[Any]) -> Any:
    """A batch of TRL's rows with the fields of ours."""
    return rows_of([np.split(one["input_ids"], np.cumsum(one["seq_lengths"])[:-1]) for one in samples])


def write_cuts(job: Job, folder: Path) -> None:
    """A manifest of the WAV files."""
    from lhotse import CutSet, Recording

    paths = [job.path("speech", f"{number:06}.wav") for number in range(job.count)]
    CutSet.from_cuts(Recording.from_file(path).to_cut() for path in paths).to_file(str(folder))


class Cuts:
    """The dataset of lhotse's sampler: a batch of cuts, padded."""

    def __getitem__(self, cuts: Any) -> Any:
        from lhotse.dataset.collation import collate_audio

        audio, lengths = collate_audio(cuts)
        return (audio * 32768).short(), lengths, [int(cut.recording_id) for cut in cuts]


def lhotse(job: Job, own: Path, workers: int) -> Opened:
    """lhotse, with batches of the same mean duration."""
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from torch.utils.data import DataLoader

    rank, ranks = rank_here()
    seconds = float(np.load(job.path("lengths.npy")).mean()) / jobs.RATE * job.kind.batch_size
    where = {"world_size": ranks, "rank": rank, "num_buckets": 10, "shuffle": True, "seed": SEED}
    cuts = CutSet.from_file(str(job.path("cuts.jsonl.gz")))
    sampler = DynamicBucketingSampler(cuts, max_duration=seconds, **where)
    data: Any = Cuts()
    loader = DataLoader(data, None, sampler=sampler, num_workers=workers, persistent_workers=True)

    def begin(epoch: int) -> Iterator[Any]:
        sampler.set_epoch(epoch)
        return iter(loader)

    return Opened(begin)


def of_datasets(job: Job, own: Path, workers: int) -> Opened:
    """Hugging Face's datasets, of Parquet files, as tensors."""
    import datasets
    import torch

    datasets.disable_progress_bars()
    own.mkdir(exist_ok=True)
    files = [str(path) for path in job.path("table").iterdir()]
    data = datasets.load_dataset("parquet", data_files=files, cache_dir=str(own), split="train").with_format("torch")
    size = job.kind.batch_size
    order = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), size, drop_last=False)
    loader = torch.utils.data.DataLoader(data, None, sampler=order, num_workers=workers, persistent_workers=True)
    return Opened(lambda _: iter(loader))


def of_server(name: str, job: Job, own: Path, workers: int) -> Opened:
    """A loader of `benchmarks.remote_loaders`."""
    from benchmarks.remote_loaders import LOADERS

    remote = LOADERS[name]
    kept = [remote.load()]
    opened = remote.open(job.url, own, room_of(job))
    loader = opened.batches

    def ends() -> None:
        opened.close()
        del kept[:]

    if not hasattr(loader, "load_state_dict"):
        return Opened(lambda _: iter(loader), ends)
    return Opened(lambda _: iter(loader), ends, lambda *_: loader.state_dict(), loader.load_state_dict)


SERVED = {"Mosaic": "MosaicML streaming, MDS", "litdata": "litdata", "webdataset": "WebDataset, tar"}


def or_served(name: str, here: Callable[[Job, Path, int], Opened]) -> Callable[[Job, Path, int], Opened]:
    """A library over files of this machine, or over a server."""

    def open_it(job: Job, own: Path, workers: int) -> Opened:
        return of_server(SERVED[name], job, own, workers) if job.name == jobs.REMOTE else here(job, own, workers)

    return open_it


SERVES, LOCAL = (*PICTURES, jobs.REMOTE), (jobs.PICTURES, jobs.LARGE)

CONTENDERS = {
    **TORCH_AND_OURS,
    "Mosaic": Contender(or_served("Mosaic", mosaic), ("torch", "streaming"), SERVES),
    "litdata": Contender(or_served("litdata", litdata), ("torch", "litdata"), SERVES),
    "webdataset": Contender(or_served("webdataset", webdataset), ("torch", "webdataset"), SERVES),
    "Grain": Contender(grain, ("grain",), PICTURES),
    "SPDL": Contender(spdl, ("torch", "spdl"), PICTURES),
    "TurboLoader": Contender(turbo, ("turboloader",), LOCAL),
    "TRL": Contender(trl, ("torch", "trl"), (jobs.PACKED,)),
    "lhotse": Contender(lhotse, ("torch", "lhotse"), (jobs.SPEECH,)),
    "datasets": Contender(of_datasets, ("torch", "datasets"), (jobs.TABLE,)),
}

WRITERS: dict[str, tuple[Callable[[Job, Path], None], str]] = {
    "Mosaic": (write_mosaic, "mosaic"),
    "litdata": (write_litdata, "litdata"),
    "webdataset": (write_tars, "tar"),
    "TurboLoader": (write_tar, "all.tar"),
    "TRL": (write_packed, "documents"),
    "lhotse": (write_cuts, "cuts.jsonl.gz"),
}
"""Contender -> what makes its format, and the name of the file or folder."""


def main(name: str, folder: str, scale: str, *contenders: str) -> None:
    """Make a job, and the formats of these contenders."""
    job = jobs.make(name, Path(folder), float(scale))
    for contender in contenders:
        if contender in WRITERS and name != jobs.REMOTE and not CONTENDERS[contender].missing:
            write, where = WRITERS[contender]
            write(job, job.path(where))


if __name__ == "__main__":
    main(*sys.argv[1:])
