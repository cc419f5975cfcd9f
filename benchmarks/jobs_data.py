"""The eight jobs of `benchmarks.jobs`: their files, made from fixed seeds, and how to tell which samples a batch has.

    make(name, folder, scale) -> Job      writes the files of a job, and `job.json`
    load(folder) -> Job                   the same job, in another process
    job.ids(batch), job.content(batch)    numbers of the samples in a batch of any loader, and a sum over what they hold

A batch is a tuple whose last item has the numbers, or a dict with ``id`` or ``index``. Packed rows have no such item:
each document begins with token 1 and two tokens that spell its number. The sum is exact, so another value, a lost
token or a wrong row changes it; random crops have none. A sample of the jobs with pictures has a number as its name.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHORT, CROP = 256, 224
"""Pixels of a picture's shorter side after decoding, and of the random crop."""

KINDS_OF_PICTURES = 48
"""Different pictures of a job; its other files are copies of these."""

BASE = 60_000
"""A document's number is spelled in two digits of this base, each plus 2: token 0 is padding, 1 begins a document."""

RATE, RANKS = 16_000, 4
"""Values per second of speech, and ranks that read it."""

SHARD, NOISE = 512, 16_000
"""Samples of a shard of the object store, and bytes of a sample."""


@dataclass(frozen=True)
class Job:
    """A job, whose files are in a folder.

    Attributes:
        name: a key of `KINDS`.
        folder: of its files.
        count: number of samples; in packed rows, of documents.
        total: what `content` of all batches of an epoch adds up to; None: it is not compared.
        url: of the server, for the object store.
    """

    name: str
    folder: str
    count: int
    total: int | None
    url: str = ""

    @property
    def kind(self) -> Kind:
        """What the job is like."""
        return KINDS[self.name]

    def path(self, *parts: str) -> Path:
        """A file or folder of the job."""
        return Path(self.folder, *parts)

    def ids(self, batch: Any) -> Any:
        """The numbers of the samples in a batch."""
        if self.name == "packed rows":
            tokens = np.asarray(batch["input_ids"]).ravel()
            begins = np.flatnonzero(tokens == 1)
            return (tokens[begins + 1].astype(np.int64) - 2) * BASE + tokens[begins + 2] - 2
        if isinstance(batch, dict):
            return np.asarray(batch["id"] if "id" in batch else batch["index"]).astype(np.int64)
        return np.asarray(batch[-1]).astype(np.int64)

    def content(self, batch: Any) -> int:
        """A sum over what the samples of a batch hold, 0 where none is compared."""
        return 0 if self.total is None else self.kind.content(batch)


@dataclass(frozen=True)
class Kind:
    """What jobs of a name are like.

    Attributes:
        title: of its table.
        make: writes the files: (folder, count) -> `Job.total`.
        count, batch_size, epochs: samples of the whole job, samples per batch, and epochs that are timed.
        content: of a batch, as an integer.
        needs: module without which the job cannot be made.
        smallest: number of samples that the job has at least.
    """

    title: str
    make: Callable[[Path, int], int | None]
    count: int
    batch_size: int
    epochs: int = 2
    content: Callable[[Any], int] = lambda batch: 0
    needs: str | None = None
    smallest: int = 64


def make(name: str, folder: Path, scale: float = 1.0) -> Job:
    """Write the files of a job with ``scale`` times as many samples as it has as a whole."""
    kind = KINDS[name]
    count = max(kind.smallest, int(kind.count * scale)) // kind.smallest * kind.smallest
    job = Job(name, str(folder), count, kind.make(folder, count))
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    return job


def load(folder: Path) -> Job:
    """The job that was made in this folder."""
    return Job(**json.loads((folder / "job.json").read_text()))


# -- pictures ----------------------------------------------------------------------------------------------------------


def make_pictures(size: tuple[int, int], folder: Path, count: int) -> None:
    """Write JPEGs into ten folders of classes; ``pictures/3/000013.jpg`` is picture 13."""
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for _ in range(min(count, KINDS_OF_PICTURES)):
        layers = [Image.fromarray(rng.integers(0, 255, (edge, edge, 3), np.uint8)).resize(size) for edge in (5, 20, 99)]
        file = io.BytesIO()
        Image.blend(Image.blend(layers[0], layers[1], 0.4), layers[2], 0.2).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    for number in range(count):
        path = picture_path(folder, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[number % len(files)])


def picture_path(folder: str | Path, number: int) -> Path:
    """Where picture ``number`` is."""
    return Path(folder, "pictures", str(number % 10), f"{number:06}.jpg")


def decode_plainly(raw: bytes) -> Any:
    """A picture as Pillow decodes it, scaled to 256 pixels: what a tutorial does."""
    from PIL import Image

    image = Image.open(io.BytesIO(raw)).convert("RGB")
    ratio = SHORT / min(image.size)
    return np.asarray(image.resize((round(image.width * ratio), round(image.height * ratio))))


def decode_fast(raw: bytes) -> Any:
    """The same, decoded at a reduced size, by simplejpeg and OpenCV where they are installed."""
    try:
        import cv2
        import simplejpeg
    except ImportError:
        from PIL import Image

        image = Image.open(io.BytesIO(raw))
        image.draft("RGB", (SHORT, SHORT))
        ratio = SHORT / min(image.size)
        size = round(image.width * ratio), round(image.height * ratio)
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))
    cv2.setNumThreads(1)
    array = simplejpeg.decode_jpeg(raw, min_height=SHORT, min_width=SHORT)
    ratio = SHORT / min(array.shape[:2])
    return cv2.resize(
        array, (round(array.shape[1] * ratio), round(array.shape[0] * ratio)), interpolation=cv2.INTER_AREA
    )


def crop(image: Any, rng: Any) -> Any:
    """A random square of a decoded picture, perhaps mirrored."""
    top, left = rng.integers(image.shape[0] - CROP + 1), rng.integers(image.shape[1] - CROP + 1)
    square = image[top : top + CROP, left : left + CROP]
    return np.ascontiguousarray(square[:, ::-1] if rng.random() < 0.5 else square)


def make_detection(folder: Path, count: int) -> int:
    """Pictures, and up to 12 boxes of whole numbers for each."""
    make_pictures((640, 480), folder, count)
    rng = np.random.default_rng(1)
    boxes = [rng.integers(0, 240, (rng.integers(0, 13), 4)).tolist() for _ in range(count)]
    (folder / "boxes.json").write_text(json.dumps(boxes))
    return sum(map(sum, itertools.chain(*boxes)))


def of_boxes(batch: Any) -> int:
    """The sum of all boxes of a batch: a list of arrays, or one array for all, padded with 0."""
    boxes = batch["boxes"] if isinstance(batch, dict) else batch[1]
    parts = boxes if isinstance(boxes, (list, tuple)) else [boxes]
    return sum(int(np.asarray(part).astype(np.int64).sum()) for part in parts)


# -- tokens, speech and text -------------------------------------------------------------------------------------------

TOKENS, ROWS = 2048, 8
"""Tokens of a row, and rows of a batch."""


def make_tokens(folder: Path, count: int) -> int:
    """Documents of lognormal lengths, mean 550, as uint16 in one file; and their lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.0, 0.8, count).clip(8, TOKENS).astype(np.int32)
    tokens = rng.integers(2, BASE, lengths.sum(), np.uint16)
    begins, numbers = np.cumsum(lengths) - lengths, np.arange(count)
    tokens[begins], tokens[begins + 1], tokens[begins + 2] = 1, numbers // BASE + 2, numbers % BASE + 2
    tokens.tofile(folder / "tokens.bin")
    np.save(folder / "lengths.npy", lengths)
    return int(tokens.sum(dtype=np.int64))


class Documents:
    """The documents of a file of tokens, each an int64 array."""

    def __init__(self, job: Job) -> None:
        lengths = np.load(job.path("lengths.npy"))
        self.ends, self.path = np.cumsum(lengths), str(job.path("tokens.bin"))

    @functools.cached_property
    def tokens(self) -> Any:
        """All tokens, mapped."""
        return np.memmap(self.path, np.uint16, "r")

    def __getstate__(self) -> dict[str, Any]:
        return {"ends": self.ends, "path": self.path}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]].astype(np.int64)


def make_speech(folder: Path, count: int) -> int:
    """WAV files of 1 to 10 seconds of noise, most of them short; and their lengths."""
    rng, total = np.random.default_rng(0), 0
    lengths = (RATE * rng.lognormal(1.0, 0.6, count).clip(1, 10)).astype(np.int64)
    noise = rng.integers(-20_000, 20_000, 11 * RATE).astype("<i2")
    (folder / "speech").mkdir()
    for number, length in enumerate(lengths.tolist()):
        values = noise[number % RATE : number % RATE + length]
        with wave.open(str(folder / "speech" / f"{number:06}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(values.tobytes())
        total += int(values.sum(dtype=np.int64))
    np.save(folder / "lengths.npy", lengths)
    return total


def read_speech(job: Job, index: int) -> tuple[Any, int, int]:
    """An utterance as int16, its length and its number."""
    with wave.open(str(job.path("speech", f"{index:06}.wav")), "rb") as file:
        values = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return values, len(values), index


def make_text(folder: Path, count: int) -> int:
    """A Hugging Face dataset of lines of text."""
    import datasets

    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(3000)]
    lines = [" ".join(words[word] for word in rng.integers(0, 3000, rng.integers(5, 80))) for _ in range(count)]
    datasets.Dataset.from_dict({"text": lines, "id": list(range(count))}).save_to_disk(str(folder / "text"))
    return sum(sum(tokenize(line)) for line in lines)


def tokenize(line: str) -> list[int]:
    """Numbers of the words of a line, as a tokenizer gives them."""
    return [sum(map(ord, word)) for word in line.split(" ")]


def tokenized(rows: dict[str, Any]) -> dict[str, Any]:
    """What `datasets.Dataset.map` calls with many lines."""
    return {"input_ids": [tokenize(line) for line in rows["text"]]}


# -- tables and shards -------------------------------------------------------------------------------------------------

FILES = 8


def make_table(folder: Path, count: int) -> int:
    """Parquet files of 12 float32 columns, a number, and a class."""
    import pyarrow
    import pyarrow.parquet

    rng, total = np.random.default_rng(0), 0
    (folder / "table").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(count), FILES)):
        columns = {f"x{column}": rng.random(len(rows), np.float32) for column in range(12)}
        labels = rng.integers(0, 1000, len(rows))
        total += int(labels.sum())
        table = pyarrow.table({**columns, "label": labels, "id": rows})
        pyarrow.parquet.write_table(table, folder / "table" / f"{number}.parquet", row_group_size=1 << 14)
    return total


def make_shards(folder: Path, count: int) -> int:
    """Shards of noise, in the format of each library that is installed."""
    from benchmarks.remote_loaders import Noise, write

    samples = Noise(count, NOISE)
    write(folder, samples, SHARD)  # type: ignore[arg-type]
    (folder / "sizes").write_text(json.dumps([count // SHARD, SHARD, NOISE]))
    return int(np.load(folder / "sums.npy").sum(dtype=np.uint64))


def of_noise(batch: Any) -> int:
    """The sum of 64-bit words of noise, modulo 2**64."""
    samples = batch["x"] if isinstance(batch, dict) else batch[0]
    return int(np.ascontiguousarray(samples).view(np.uint64).sum(dtype=np.uint64))


def _sum(batch: Any) -> int:
    return int(np.asarray(batch[0] if isinstance(batch, (tuple, list)) else batch["input_ids"]).sum(dtype=np.int64))


def _labels(batch: Any) -> int:
    return int(np.asarray(batch["label"] if isinstance(batch, dict) else batch[1]).sum(dtype=np.int64))


PICTURES, LARGE = "pictures", "large pictures"
PACKED, SPEECH, TABLE, REMOTE, TEXT, DETECTION = (
    "packed rows",
    "speech",
    "table",
    "object store",
    "text",
    "detection",
)

KINDS = {
    PICTURES: Kind(
        "a folder of JPEGs of 500 x 375, random crop", functools.partial(make_pictures, (500, 375)), 5000, 32, 3
    ),
    LARGE: Kind("a folder of JPEGs of 2,000 x 1,500", functools.partial(make_pictures, (2000, 1500)), 2000, 32, 3),
    PACKED: Kind(f"documents packed into rows of {TOKENS:,} tokens", make_tokens, 40_000, ROWS, content=_sum),
    SPEECH: Kind(f"ragged speech in buckets, {RANKS} ranks of one machine", make_speech, 4000, 16, content=_sum),
    TABLE: Kind("a Parquet table", make_table, 1_000_000, 1024, content=_labels, needs="pyarrow", smallest=1024),
    REMOTE: Kind(
        "shards behind 20 ms and 50 MB/s, cache for half", make_shards, 16 * 1024, 256, content=of_noise, smallest=4096
    ),
    TEXT: Kind("a Hugging Face dataset with a map", make_text, 50_000, 32, content=_sum, needs="datasets"),
    DETECTION: Kind("detection, ragged boxes", make_detection, 3000, 16, content=of_boxes),
}


def raw_samples(job: Job) -> Iterator[tuple[int, bytes, str]]:
    """Number, JPEG and boxes (as JSON) of each picture: what formats store."""
    boxes: list[Any] = [[]] * job.count
    with suppress(FileNotFoundError):
        boxes = json.loads(job.path("boxes.json").read_text())
    for number in range(job.count):
        yield number, picture_path(job.folder, number).read_bytes(), json.dumps(boxes[number])
