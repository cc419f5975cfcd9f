"""The jobs of `benchmarks.cached`: samples that are dear to decode, made from a fixed seed.

    make(name, folder, count) -> Job      writes the files, decodes each once, and notes what it should be
    load(folder) -> Job                   the same job, in another process
    Job[index] -> (array, index)          decodes: any loader reads this dataset

    500 x 375, 1,024 x 768    JPEGs of these sizes, to 224 x 224 pixels
    audio                     1 to 5 seconds of sound of 16 bits, to a spectrogram: another length for each sample
    rows                      lines of 40 numbers as text, to float32
    object store              10 KB of a server that answers after 20 ms (`benchmarks.range_server`), as they are

A job's folder holds what was made: `job.json`, `arrays.npy` if all samples have one shape, and the files.
"""

from __future__ import annotations

import http.client
import json
import os
import tarfile
import wave
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

RATE, BANDS = 16_000, 64
"""Of the sound: values per second, and bands of its spectrogram."""

FIELDS = 40
SIZE = 10_000
"""Of a sample in the object store."""


@dataclass(frozen=True)
class Job:
    """A dataset of samples that are decoded when they are read.

    Attributes:
        name: a key of `KINDS`.
        keys: what each sample is decoded from.
        sums: a checksum of each sample.
        shape, dtype: of each sample. None as the shape: each has its own length.
        nbytes: what all samples take.
        folder: of its files.
    """

    name: str
    keys: list[str]
    sums: list[int]
    shape: list[int] | None
    dtype: str
    nbytes: int
    folder: str

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return KINDS[self.name].decode(self.keys[index]), index

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return KINDS[self.name].batch_size

    @property
    def tar(self) -> Path:
        """The photographs in one file, for libraries that read tar files only."""
        return Path(self.folder, "photos.tar")

    def arrays(self) -> Any:
        """All samples as one array, mapped."""
        return np.load(Path(self.folder, "arrays.npy"), mmap_mode="r")


@dataclass(frozen=True)
class Kind:
    """How the files of a job are made and decoded.

    Attributes:
        make: called with a folder and a number of samples, returns the keys.
        decode: called with a key, returns the array.
        count: how many samples the benchmark takes.
        batch_size: samples per batch.
    """

    make: Callable[[Path, int], list[str]]
    decode: Callable[[str], Any]
    count: int
    batch_size: int


def make(name: str, folder: Path, count: int, url: str = "") -> Job:
    """Write the files of a job, and decode each sample once. The keys of an object store begin with its URL."""
    kind = KINDS[name]
    keys = [url + key for key in kind.make(folder, count)]
    arrays = [kind.decode(key) for key in keys]
    one_shape = len({array.shape for array in arrays}) == 1
    if one_shape:
        np.save(folder / "arrays.npy", np.stack(arrays))
    shape = list(arrays[0].shape) if one_shape else None
    nbytes = sum(array.nbytes for array in arrays)
    job = Job(name, keys, [sum_of(array) for array in arrays], shape, arrays[0].dtype.str, nbytes, str(folder))
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    return job


def load(folder: Path) -> Job:
    """The job that was made in this folder."""
    return Job(**json.loads((folder / "job.json").read_text()))


def sum_of(array: Any) -> int:
    """A checksum of a sample. Rows of zeros at its end count as padding."""
    array = np.ascontiguousarray(array)
    if array.ndim == 2 and not array[-1].any():
        array = array[: np.flatnonzero(array.any(1))[-1] + 1]
    return zlib.crc32(array.data)


# -- photographs -------------------------------------------------------------------------------------------------------


def photo_maker(size: tuple[int, int]) -> Callable[[Path, int], list[str]]:
    """A function that writes JPEGs of this size, with large and small shapes as photographs have."""

    def write(folder: Path, count: int) -> list[str]:
        from PIL import Image

        rng, paths = np.random.default_rng(0), []
        with tarfile.open(folder / "photos.tar", "w") as tar:
            for number in range(count):
                layers = [
                    Image.fromarray(rng.integers(0, 255, (edge, edge, 3), np.uint8)).resize(size)
                    for edge in (5, 20, 100)
                ]
                path = folder / f"{number:06}.jpg"
                Image.blend(Image.blend(layers[0], layers[1], 0.4), layers[2], 0.2).save(path, quality=85)
                tar.add(path, path.name)
                paths.append(str(path))
        return paths

    return write


def decode_photo(path: str) -> Any:
    """A photograph as an array of 224 x 224 pixels."""
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((224, 224)))


# -- sound -------------------------------------------------------------------------------------------------------------


def make_sounds(folder: Path, count: int) -> list[str]:
    """Write chords of random tones, of 1 to 5 seconds."""
    rng, paths = np.random.default_rng(0), []
    for number in range(count):
        moments = np.arange(rng.integers(RATE, 5 * RATE)) / RATE
        tones = np.sin(2 * np.pi * rng.uniform(80, 4000, (4, 1)) * moments).mean(0) + rng.normal(0, 0.01, len(moments))
        paths.append(str(folder / f"{number:06}.wav"))
        with wave.open(paths[-1], "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((tones * 30_000).clip(-32_000, 32_000).astype("<i2").tobytes())
    return paths


def decode_sound(path: str) -> Any:
    """The logarithm of its energy in 64 bands, 100 times per second."""
    with wave.open(path, "rb") as file:
        values = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(values, 400)[::160] * np.hanning(400).astype(np.float32)
    energy = np.abs(np.fft.rfft(windows, 512)) ** 2
    return np.log(energy[:, : 4 * BANDS].reshape(len(energy), BANDS, 4).sum(2) + 1e-3).astype(np.float32)


# -- rows and objects --------------------------------------------------------------------------------------------------


def make_rows(folder: Path, count: int) -> list[str]:
    """Lines of a table."""
    rng = np.random.default_rng(0)
    return [",".join(f"{value:.6g}" for value in row) for row in rng.normal(size=(count, FIELDS))]


def decode_row(line: str) -> Any:
    """The numbers of a line."""
    return np.array([float(field) for field in line.split(",")], np.float32)


_connections: dict[int, http.client.HTTPConnection] = {}
"""Of this process, by its number: a forked worker has its own."""


def make_objects(folder: Path, count: int) -> list[str]:
    """Files of random bytes, and their paths on a server of the folder."""
    for number in range(count):
        (folder / f"{number:06}.bin").write_bytes(np.random.default_rng(number).bytes(SIZE))
    return [f"/{number:06}.bin" for number in range(count)]


def fetch(url: str) -> Any:
    """The bytes of an object."""
    parts = urlsplit(url)
    connection = _connections.get(os.getpid())
    if connection is None:
        connection = _connections[os.getpid()] = http.client.HTTPConnection(parts.netloc)
    connection.request("GET", parts.path)
    return np.frombuffer(connection.getresponse().read(), np.uint8)


KINDS = {
    "500 x 375": Kind(photo_maker((500, 375)), decode_photo, 1000, 32),
    "1,024 x 768": Kind(photo_maker((1024, 768)), decode_photo, 500, 32),
    "audio": Kind(make_sounds, decode_sound, 1000, 32),
    "rows": Kind(make_rows, decode_row, 40_000, 256),
    "object store": Kind(make_objects, fetch, 400, 32),
}
