"""Shards behind a slow network: ``python -m benchmarks.remote``. Up to 8 minutes. Half a minute: ``--opening``.

    a server in a process of its own: HTTP, 20 ms per request, and so many MB/s for each connection

The first table shows what it costs to make a dataset, and to ask for its length: seconds, requests, and bytes of all
bytes. Without pyarrow, Parquet and Arrow are left out. With ``--opening``, it is the only one.

    cold          no index is kept; a list of URLs
    index file    the same, with the file of ``sharded-loader index`` beside the shards
    100 heads     the same as cold, for 100 shards that are indexed: the sizes are asked for, and nothing else

The second table shows samples per second of one epoch, cold, and how many bytes were sent for each byte there is.

    bare          whole shards by four connections, and nothing else: the limit
    read ahead    ShardDataset with a cache of two windows, read by ShardedDataLoader in windows
    on demand     the same, and nobody fetches ahead
    in parts      no cache: the bytes of each sample are requested

The third and the fourth table show ours beside litdata, MosaicML's streaming and WebDataset, where they are installed:
two epochs, and what happens if the server has a fault (`benchmarks.remote_beside`). With ``--beside``, these are all.

With ``--tables``, only a table of rows per second is printed: Parquet and Arrow files of this machine, in windows of 16
groups, beside the same table in memory.

    in memory     `ArrayDataset`
    columns       `ShardDataset`, as it is
    rows          the same with a transform, which needs a dict of each row

With ``--connections``, only a table of megabytes per second over 16 connections of 50 MB/s each is printed: medians of
five rounds, each measured one after the other, and the processor time of the main process.

    bare          `http.client` in 16 threads, into files, and nothing else
    inline        an epoch in windows of 16 shards, which are fetched ahead; samples are read by the main process
    2 workers     the same, read by two workers

With ``--sizes``, only a table of an epoch in shards of several sizes is printed, 1 GB in all. With ``--ray``, only one
of epochs with two workers of `ProcessPool` and of `RayPool`, at 20 MB/s per connection.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.range_server import serving
from benchmarks.remote_beside import beside, failures
from benchmarks.remote_loaders import write_members
from sharded_loader import (
    ArrayDataset,
    ProcessPool,
    RayPool,
    ShardCache,
    ShardDataset,
    ShardedDataLoader,
    ShardShuffleSampler,
)
from sharded_loader.engine.messages import Task
from sharded_loader.recordio import MXRecordIO
from sharded_loader.storage.stores import CONNECTIONS, ObjectStore

SHARDS, SAMPLES, SIZE = 32, 512, 10_000
OPENED = 8
"""Shards of the first table."""

WINDOW, BATCH = 4, 256
SPEEDS = (None, 50e6)
"""Bytes per second of a connection; None: as fast as this machine copies."""


SLOW = 20e6
"""The same, where pools are compared."""


# -- shards ------------------------------------------------------------------------------------------------------------


def samples_of(number: int, count: int = SAMPLES, size: int = SIZE) -> list[bytes]:
    """The random samples of a shard."""
    rng = np.random.default_rng(number)
    return [rng.bytes(size) for _ in range(count)]


def write_tar(path: Path, number: int, count: int = SAMPLES, size: int = SIZE) -> None:
    """A tar file."""
    members = enumerate(samples_of(number, count, size))
    write_members(path, ((f"{number:03}{i:04}.bin", sample) for i, sample in members))


def write_rec(path: Path, number: int) -> None:
    """A RecordIO file."""
    with MXRecordIO(str(path), "w") as file:
        for sample in samples_of(number):
            file.write(sample)


def write_mds(path: Path, number: int) -> None:
    """An MDS file."""
    columns = {"column_names": ["bin"], "column_encodings": ["bytes"], "column_sizes": [None]}
    text, sizes = json.dumps(columns).encode(), [SIZE + 4] * SAMPLES
    offsets = np.cumsum([4 * (SAMPLES + 2) + len(text), *sizes]).astype("<u4")
    samples = [np.array(SIZE, "<u4").tobytes() + sample for sample in samples_of(number)]
    path.write_bytes(b"".join([np.array(SAMPLES, "<u4").tobytes(), offsets.tobytes(), text, *samples]))


def write_table(path: Path, number: int) -> None:
    """A Parquet or an Arrow file of four groups."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"bin": samples_of(number)})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=SAMPLES // 4)
        return
    with pyarrow.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=SAMPLES // 4)


WRITERS = {"tar": write_tar, "rec": write_rec, "mds": write_mds, "parquet": write_table, "arrow": write_table}


# -- opening -----------------------------------------------------------------------------------------------------------


def cost(sent: Any, whole: int, work: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, str]:
    """What a piece of work gives, and its cells: seconds, requests, bytes."""
    before, began = list(sent), time.perf_counter()
    found = work(*arguments, **named)
    seconds, (nbytes, requests) = (
        time.perf_counter() - began,
        (now - then for now, then in zip(sent, before, strict=True)),
    )
    return found, f"{seconds:.2f} | {requests} | {100 * nbytes / whole:.3f} %"


def opening(url: str, folder: Path, sent: Any) -> None:
    """Print a row for each format and way."""
    print("| shards | way | opening, s | requests | bytes | `len`, s | requests | bytes |")
    print("|---|---|---|---|---|---|---|---|")
    store = ObjectStore()
    store.stat(f"{url}/{next(folder.iterdir()).name}")  # the modules of the client are loaded now
    store.close()
    kinds = [kind for kind in WRITERS if kind not in ("parquet", "arrow") or importlib.util.find_spec("pyarrow")]
    for kind in kinds:
        names = [f"{number:03}.{kind}" for number in range(OPENED)]
        for name in names:
            if not (folder / name).exists():
                WRITERS[kind](folder / name, int(name[:3]))
        urls, whole = [f"{url}/{name}" for name in names], sum((folder / name).stat().st_size for name in names)
        for way in ("cold", "index file"):
            with tempfile.TemporaryDirectory() as kept:
                dataset, opened = cost(sent, whole, ShardDataset, urls, index_folder=kept)
                length, counted = cost(sent, whole, len, dataset)
                print(f"| {OPENED} {kind}, {whole / 1e6:.0f} MB | {way} | {opened} | {counted} |", flush=True)
                assert length == OPENED * SAMPLES
                if way == "cold":
                    dataset.write_index(folder / "written.index")
                    (folder / "written.index").rename(folder / "shards.index")
                dataset.close()
        (folder / "shards.index").unlink()
    heads(url, folder, sent)


def heads(url: str, folder: Path, sent: Any) -> None:
    """Print the row of 100 shards whose indexes are kept."""
    for number in range(100):
        (folder / f"{number:03}.txt").write_text("a line\n")
    urls = [f"{url}/{number:03}.txt" for number in range(100)]
    with tempfile.TemporaryDirectory() as kept:
        first = ShardDataset(urls, index_folder=kept)
        assert len(first) == 100
        first.close()
        dataset, opened = cost(sent, 700, ShardDataset, urls, index_folder=kept)
        _, counted = cost(sent, 700, len, dataset)
        print(f"| 100 text | 100 heads | {opened} | {counted} |", flush=True)
        dataset.close()


# -- an epoch ----------------------------------------------------------------------------------------------------------


def bare(urls: list[str], folder: Path) -> float:
    """Seconds to fetch every shard into a file."""
    store = ObjectStore()
    stats = {url: store.stat(url) for url in urls}

    def fetch(url: str) -> None:
        with open(folder / url.rpartition("/")[2], "wb") as file:
            store.fetch(url, file, stats[url])

    began = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(fetch, urls))
    seconds = time.perf_counter() - began
    store.close()
    return seconds


def epoch(
    urls: list[str], folder: Path, cache: ShardCache | None, ahead: bool, pool: Any = None, batch: int = BATCH
) -> tuple[float, float]:
    """Seconds to read all samples once, and until the first batch. The workers have started."""
    dataset = ShardDataset(urls, cache=cache, index_folder=folder / "indexes")
    if not ahead:
        dataset.follow = lambda *_: None  # type: ignore[method-assign]
    order = ShardShuffleSampler(dataset.lengths, WINDOW, seed=1)
    loader = ShardedDataLoader(dataset.transform(_first_byte), batch, sampler=order, pool=pool)
    if pool is not None:
        pool.start(loader._epochs.job_now())
        pool.submit([Task(-1, 0, 0, 0, ([0],), False)])
        while not pool.wait():
            pass
    began = time.perf_counter()
    batches = iter(loader)
    count, first = len(next(batches)), time.perf_counter() - began
    count += sum(len(batch) for batch in batches)
    seconds = time.perf_counter() - began
    assert count == len(dataset)
    loader.close()
    dataset.close()
    return seconds, first


def _first_byte(sample: dict[str, Any]) -> int:
    return int(sample["bin"][0])


def ways(urls: list[str], folder: Path, speed: float | None, size: int) -> dict[str, Callable[[], float]]:
    """What is measured, by name. On a slow network the requests for single samples are left out."""
    room = 2 * WINDOW * size
    found: dict[str, Callable[[], float]] = {
        "bare": lambda: bare(urls, folder),
        "read ahead": lambda: epoch(urls, folder, ShardCache(folder / "ahead", room), True)[0],
        "on demand": lambda: epoch(urls, folder, ShardCache(folder / "demand", room), False)[0],
        "in parts": lambda: epoch(urls, folder, None, False)[0],
    }
    return {way: measure for way, measure in found.items() if way != "in parts" or speed is None}


def epochs(urls: list[str], speed: float | None, size: int, sent: Any) -> None:
    """Print the rows of one server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = ShardDataset(urls, index_folder=folder / "indexes")
        assert len(first) == SHARDS * SAMPLES  # they are indexed now
        first.close()
        limit = 0.0
        for way, measure in ways(urls, folder, speed, size).items():
            before = sent[0]
            rate = SHARDS * SAMPLES / measure()
            limit = limit or rate
            what = f"{speed / 1e6:.0f} MB/s per connection" if speed else "20 ms per request"
            share = (sent[0] - before) / (SHARDS * size)
            print(f"| {what} | {way} | {rate:,.0f} | {rate / limit:.2f} | {share:.2f} |", flush=True)


# -- other tables of epochs --------------------------------------------------------------------------------------------


def pools(folder: Path) -> None:
    """Print how long an epoch takes with two workers of each pool, and a cache for half of the shards."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    (folder / "shards").mkdir()
    names = shards(folder / "shards", size=16_000)
    room = SHARDS // 2 * (folder / "shards" / names[0]).stat().st_size
    print("| pool | epoch, s | first batch, s |\n|---|---|---|")
    with serving(folder / "shards", SLOW) as (url, _):
        for turn in range(3):
            for pool in (ProcessPool(2), RayPool(2, num_cpus=0)):
                name = type(pool).__name__
                cache, urls = ShardCache(folder / f"{turn} {name}", room), [f"{url}/{tar}" for tar in names]
                seconds, first = epoch(urls, folder, cache, True, pool, BATCH // 4)
                print(f"| {name} | {seconds:.1f} | {first:.1f} |", flush=True)


MEGABYTES = 1024
"""Of all shards in the table of sizes."""


def sizes() -> None:
    """Print what an epoch costs in shards of several sizes, with an index file. Samples have 100 KB."""
    print("| shards | requests | first batch, s | epoch, s |\n|---|---|---|---|")
    for megabytes in (4, 64, 256):
        with tempfile.TemporaryDirectory() as name:
            folder, count = Path(name), MEGABYTES // megabytes
            (folder / "shards").mkdir()
            for number in range(count):
                write_tar(folder / "shards" / f"{number:03}.tar", number, megabytes * 10, 100_000)
            ShardDataset(f"{folder}/shards/*.tar", index_folder=folder / "local").write_index()
            with serving(folder / "shards", SPEEDS[-1]) as (url, sent):
                before = sent[1]
                cache = ShardCache(folder / "cache", 2 * MEGABYTES << 20)
                seconds, first = epoch([f"{url}/shards.index"], folder, cache, True, batch=BATCH // 8)
                print(f"| {count} of {megabytes} MB | {sent[1] - before} | {first:.2f} | {seconds:.1f} |", flush=True)


# -- many connections --------------------------------------------------------------------------------------------------

MANY, ROUNDS = 16, 5


def over_http(urls: list[str], folder: Path) -> None:
    """Fetch every shard into a file by threads of `http.client`: as little as Python can do."""
    host = urls[0].split("/")[2]
    rest = queue.SimpleQueue[str | None]()
    for url in [*urls, *[None] * MANY]:
        rest.put(url)

    def fetch() -> None:
        connection, buffer = http.client.HTTPConnection(host), memoryview(bytearray(1 << 20))
        while (url := rest.get()) is not None:
            name = url.rpartition("/")[2]
            connection.request("GET", f"/{name}")
            answer = connection.getresponse()
            with open(folder / name, "wb", buffering=0) as file:
                while size := answer.readinto(buffer):
                    file.write(buffer[:size])
        connection.close()

    with ThreadPoolExecutor(MANY) as threads:
        for done in [threads.submit(fetch) for _ in range(MANY)]:
            done.result()


def all_batches(urls: list[str], folder: Path, workers: int, room: int) -> None:
    """Read an epoch of shards that are fetched ahead."""
    dataset = ShardDataset(urls, cache=ShardCache(folder / "cache", room), index_folder=folder / "indexes")
    order = ShardShuffleSampler(dataset.lengths, MANY, seed=1)
    with ShardedDataLoader(dataset.transform(_first_byte), 64, sampler=order, num_workers=workers) as loader:
        assert sum(map(len, loader)) == len(dataset)
    dataset.close()


def connections() -> None:
    """Print the table of many connections."""
    found: dict[str, list[tuple[float, float]]] = {}  # by way: MB/s, and milliseconds of processor time for a MB
    with tempfile.TemporaryDirectory() as name:
        (shards_in := Path(name) / "shards").mkdir()
        for number in range(4 * MANY):
            write_tar(shards_in / f"{number:03}.tar", number, MEGABYTES // (4 * MANY) * 10, 100_000)
        ShardDataset(f"{shards_in}/*.tar", index_folder=Path(name) / "local").write_index()
        nbytes = sum(path.stat().st_size for path in shards_in.glob("*.tar"))
        with serving(shards_in, SPEEDS[-1]) as (url, _):
            urls, index = [f"{url}/{number:03}.tar" for number in range(4 * MANY)], [f"{url}/shards.index"]
            ways: dict[str, Callable[[Path], None]] = {
                "bare": lambda folder: over_http(urls, folder),
                "inline": lambda folder: all_batches(index, folder, 0, nbytes * 5 // 8),
                "2 workers": lambda folder: all_batches(index, folder, 2, nbytes * 5 // 8),
            }
            for _ in range(ROUNDS):
                for way, read in ways.items():
                    with tempfile.TemporaryDirectory(dir=name) as own:
                        began, used = time.perf_counter(), time.process_time()
                        read(Path(own))
                        seconds, cpu = time.perf_counter() - began, time.process_time() - used
                    found.setdefault(way, []).append((nbytes / 1e6 / seconds, cpu * 1e9 / nbytes))
    print("| how | MB/s | of bare | main process, ms of processor time per MB |\n|---|---|---|---|")
    limit = statistics.median(rate for rate, _ in found["bare"])
    for way, rounds in found.items():
        rate, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {way} | {rate:.0f} | {rate / limit:.2f} | {cpu:.2f} |", flush=True)


# -- tables ------------------------------------------------------------------------------------------------------------

ROWS, GROUP = 50_000, 5_000
"""Rows of a file of the last table, and of a group."""


def rows_per_second(dataset: Any, order: ShardShuffleSampler) -> float:
    """The best of three epochs."""
    best = 0.0
    with ShardedDataLoader(dataset, BATCH, sampler=order) as loader:
        for _ in range(3):
            began = time.perf_counter()
            rows = sum(len(batch["id"]) for batch in loader)
            best = max(best, rows / (time.perf_counter() - began))
    return best


def tables(folder: Path) -> None:
    """Print the table of rows per second."""
    import pyarrow
    import pyarrow.parquet

    rng, count = np.random.default_rng(0), OPENED * ROWS
    columns = {"id": np.arange(count), "x": rng.random(count, np.float32), "label": rng.integers(0, 10, count)}
    table = pyarrow.table({**columns, "y": rng.random(count)})
    for number in range(OPENED):
        part = table.slice(number * ROWS, ROWS)
        pyarrow.parquet.write_table(part, folder / f"{number}.parquet", row_group_size=GROUP)
        with pyarrow.ipc.new_file(folder / f"{number}.arrow", part.schema) as file:
            file.write_table(part, max_chunksize=GROUP)
    print("| format | in memory | columns | rows |\n|---|---|---|---|")
    for kind in ("parquet", "arrow"):
        dataset = ShardDataset(str(folder / f"*.{kind}"), index_folder=folder)
        order = ShardShuffleSampler(dataset.group_lengths, seed=1)
        of = [rows_per_second(one, order) for one in (ArrayDataset(table), dataset, dataset.transform(dict))]
        print(f"| {kind} |", " | ".join(f"{rate:,.0f}" for rate in of), "|", flush=True)
        dataset.close()


def shards(folder: Path, count: int = SHARDS, size: int = SIZE) -> list[str]:
    """Write tar files, and return their names."""
    names = [f"{number:03}.tar" for number in range(count)]
    for number, name in enumerate(names):
        write_tar(folder / name, number, size=size)
    return names


def remote_epochs(is_only_opening: bool) -> None:
    """Print the tables of our own ways."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = shards(folder, OPENED if is_only_opening else SHARDS)
        with serving(folder, SPEEDS[-1]) as (url, sent):
            opening(url, folder, sent)
        if is_only_opening:
            return
        print("\n| server | how | samples/s | of bare | bytes sent, of all shards |\n|---|---|---|---|---|")
        for speed in SPEEDS:
            with serving(folder, speed) as (url, sent):
                epochs([f"{url}/{tar}" for tar in names], speed, (folder / names[0]).stat().st_size, sent)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description="Shards behind a slow network.")
    only = parser.add_mutually_exclusive_group()
    for name, shown in {
        "opening": "the table of opening",
        "beside": "the tables with other libraries",
        "tables": "the table of Parquet and Arrow files",
        "connections": "the table of 16 connections",
        "sizes": "the table of the size of shards",
        "ray": "the table of epochs over Ray",
    }.items():
        only.add_argument(f"--{name}", action="store_true", help=f"only {shown}")
    parser.add_argument("--scale", type=float, default=1.0, help="beside others: the size of samples, a multiple")
    parser.add_argument("--rounds", type=int, default=2, help="beside others: rounds, one loader after the other")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if given.tables:
            tables(Path(name))
        elif given.connections:
            connections()
        elif given.sizes:
            sizes()
        elif given.ray:
            pools(Path(name))
        else:
            if not given.beside:
                remote_epochs(given.opening)
            if not given.opening:
                beside(given.scale, given.rounds, SPEEDS[-1])
                failures(SPEEDS[-1])


if __name__ == "__main__":
    main()
