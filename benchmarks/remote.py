"""Shards behind a slow network: ``python -m benchmarks.remote``. About a minute.

    a server in a process of its own: HTTP, 20 ms per request, and so many MB/s for each connection
    bare          whole shards by four connections, and nothing else: the limit
    read ahead    ShardDataset with a cache of two windows, read by ShardedDataLoader in windows
    on demand     the same, and nobody fetches ahead
    in parts      no cache: the bytes of each sample are requested

The table shows samples per second of one epoch, cold, and how many shards were requested for each shard there is.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.range_server import RangeHandler
from sharded_loader import ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler
from sharded_loader.storage.stores import CONNECTIONS, ObjectStore

SHARDS, SAMPLES, SIZE = 32, 512, 10_000
WINDOW, BATCH = 4, 256
LATENCY = 0.02
SPEEDS = (None, 50e6)
"""Bytes per second of a connection; None: as fast as this machine copies."""


def shard(number: int) -> bytes:
    """A tar file of random samples."""
    rng, file = np.random.default_rng(number), io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for i in range(SAMPLES):
            member = tarfile.TarInfo(f"{number:03}{i:04}.bin")
            member.size = SIZE
            tar.addfile(member, io.BytesIO(rng.bytes(SIZE)))
    return file.getvalue()


def serve(speed: float | None, ports: Any, asked: Any) -> None:
    """Answer requests for shards until the process is ended."""
    shards = {f"/{number:03}.tar": shard(number) for number in range(SHARDS)}

    class Handler(RangeHandler):
        def answer(self, with_bytes: bool) -> None:
            content = memoryview(shards[self.path])
            size = len(content)
            begin, end = self.asked(size) or (0, size)
            self.head(206 if (begin, end) != (0, size) else 200, end - begin, f"{begin}-{end - 1}/{size}")
            if with_bytes:
                with asked.get_lock():
                    asked.value += end - begin
                time.sleep(LATENCY)
                for at in range(begin, end, 1 << 18):
                    piece = content[at : min(at + (1 << 18), end)]
                    self.wfile.write(piece)
                    if speed:
                        time.sleep(len(piece) / speed)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ports.put(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def serving(speed: float | None) -> Iterator[tuple[list[str], Any]]:
    """The URLs of the shards, and the number of bytes that were sent."""
    context = multiprocessing.get_context("spawn")
    ports, asked = context.SimpleQueue(), context.Value("q", 0)
    server = context.Process(target=serve, args=(speed, ports, asked), daemon=True)
    server.start()
    port = ports.get()
    try:
        yield [f"http://127.0.0.1:{port}/{number:03}.tar" for number in range(SHARDS)], asked
    finally:
        server.terminate()
        server.join()


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


def epoch(urls: list[str], folder: Path, cache: ShardCache | None, ahead: bool) -> float:
    """Seconds to read all samples once."""
    dataset = ShardDataset(urls, cache=cache, index_folder=folder / "indexes")
    if not ahead:
        dataset.follow = lambda *_: None  # type: ignore[method-assign]
    order = ShardShuffleSampler(dataset.lengths, WINDOW, seed=1)
    loader = ShardedDataLoader(dataset.transform(_first_byte), BATCH, sampler=order)
    began = time.perf_counter()
    count = sum(len(batch) for batch in loader)
    seconds = time.perf_counter() - began
    assert count == SHARDS * SAMPLES
    loader.close()
    dataset.close()
    return seconds


def _first_byte(sample: dict[str, Any]) -> int:
    return int(sample["bin"][0])


def ways(urls: list[str], folder: Path, speed: float | None) -> dict[str, Callable[[], float]]:
    """What is measured, by name. On a slow network the requests for single samples are left out."""
    room = 2 * WINDOW * len(shard(0))
    found: dict[str, Callable[[], float]] = {
        "bare": lambda: bare(urls, folder),
        "read ahead": lambda: epoch(urls, folder, ShardCache(folder / "ahead", room), True),
        "on demand": lambda: epoch(urls, folder, ShardCache(folder / "demand", room), False),
        "in parts": lambda: epoch(urls, folder, None, False),
    }
    return {way: measure for way, measure in found.items() if way != "in parts" or speed is None}


def main() -> None:
    """Print the table."""
    print("| server | how | samples/s | of bare | bytes sent, of all shards |\n|---|---|---|---|---|")
    whole = SHARDS * len(shard(0))
    for speed in SPEEDS:
        with serving(speed) as (urls, asked), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ShardDataset(urls, index_folder=folder / "indexes").close()
            limit = 0.0
            for way, measure in ways(urls, folder, speed).items():
                before = asked.value
                rate = SHARDS * SAMPLES / measure()
                limit = limit or rate
                what = f"{speed / 1e6:.0f} MB/s per connection" if speed else "20 ms per request"
                sent = (asked.value - before) / whole
                print(f"| {what} | {way} | {rate:,.0f} | {rate / limit:.2f} | {sent:.2f} |", flush=True)


if __name__ == "__main__":
    main()
