"""Windows of 1,025 tokens by shuffled index: `TokenWindows` beside nanoGPT's loop, litdata and MosaicML's streaming.

    python -m benchmarks.ranks_tokens [--quick]

Every contestant gives pairs (inputs, targets) of int64 with 1,024 tokens each, from two workers, out of the same random
tokens in files of its own format. They are measured in turns, each in a process of its own; a row has the median of the
rounds. A library that is not installed has no rate.

nanoGPT has no loader: a function cuts a batch out of a memory map, window by window. "per window" is that loop as a
dataset of torch's DataLoader, which collates. "per batch" is the function itself, called once for a batch by a worker.
litdata gives windows of its own dtype. The program shifts and casts them, as litgpt does.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TITLE = "Windows of 1,025 tokens per second, two workers"

LENGTH, WORKERS = 1024, 2
OURS, BAR = "TokenWindows", "nanoGPT per window"
TIMEOUT = 180

Batches = Callable[[Path, int], Iterator[Any]]


# -- contestants: folder of the data, windows in a batch -> endless batches --------------------------------------------


def ours(folder: Path, batch: int) -> Iterator[Any]:
    from sharded_loader import ShardedDataLoader, TokenWindows

    dataset = TokenWindows(folder / "tokens.bin", LENGTH, dtype="uint16")
    with ShardedDataLoader(dataset, batch, shuffle=True, num_workers=WORKERS) as loader:
        while True:
            yield from loader


class PerWindow:
    """nanoGPT's way to cut one window, as a dataset."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> Any:
        import torch

        begin = index * LENGTH
        x = torch.from_numpy(self.tokens[begin : begin + LENGTH].astype(np.int64))
        y = torch.from_numpy(self.tokens[begin + 1 : begin + 1 + LENGTH].astype(np.int64))
        return x, y


class PerBatch(PerWindow):
    """nanoGPT's function ``get_batch``: it maps the file for each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path)

    def __getitem__(self, indices: Any) -> Any:
        import torch

        tokens = np.memmap(self.path, np.uint16, "r")
        begins = [index * LENGTH for index in indices]
        x = torch.stack([torch.from_numpy(tokens[i : i + LENGTH].astype(np.int64)) for i in begins])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in begins])
        return x, y


def per_window(folder: Path, batch: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    data: Any = PerWindow(folder / "tokens.bin")
    loader = DataLoader(data, batch, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader


def per_batch(folder: Path, batch: int) -> Iterator[Any]:
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    data: Any = PerBatch(folder / "tokens.bin")
    order: Any = BatchSampler(RandomSampler(data), batch, drop_last=True)
    loader = DataLoader(data, None, sampler=order, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader


def litdata(folder: Path, batch: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    data = StreamingDataset(str(folder / "litdata"), item_loader=TokensLoader(LENGTH + 1), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(data, batch_size=batch, num_workers=WORKERS, persistent_workers=True)
    while True:
        for windows in loader:
            yield windows[:, :-1].contiguous().long(), windows[:, 1:].contiguous().long()


def without_operators() -> Any:
    """What lets torchvision, which MosaicML's library imports, be imported beside a torch of another build."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # they are there
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def shifted(samples: list[Any]) -> Any:
    import torch

    windows = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def mosaic(folder: Path, batch: int) -> Iterator[Any]:
    kept = without_operators()  # as long as batches are read
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    data: Any = StreamingDataset(local=str(folder / "mosaic"), shuffle=True, batch_size=batch)
    loader = DataLoader(data, batch, num_workers=WORKERS, persistent_workers=True, collate_fn=shifted)
    while kept:
        yield from loader


CONTESTANTS: dict[str, Batches] = {
    OURS: ours,
    BAR: per_window,
    "nanoGPT per batch": per_batch,
    "litdata TokensLoader": litdata,
    "MosaicML streaming": mosaic,
}


# -- data --------------------------------------------------------------------------------------------------------------


def write(folder: Path, windows: int) -> None:
    """The same random tokens in all formats whose libraries are installed."""
    tokens = np.random.default_rng(0).integers(0, 50_257, windows * (LENGTH + 1), np.uint16)
    tokens.tofile(folder / "tokens.bin")
    for name, function in (("litdata", _write_litdata), ("mosaic", _write_mosaic)):
        try:
            function(folder / name, tokens)
        except ImportError:
            continue


def _documents(path: str) -> Iterator[Any]:
    import torch

    tokens = np.fromfile(path, np.uint16).astype(np.int32)
    for begin in range(0, len(tokens), 1 << 20):
        yield torch.from_numpy(tokens[begin : begin + (1 << 20)])


def _write_litdata(folder: Path, tokens: Any) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        _documents,
        [str(folder.parent / "tokens.bin")],
        str(folder),
        chunk_size=(LENGTH + 1) * 8192,
        item_loader=TokensLoader(),
        num_workers=1,
        verbose=False,
    )


def _write_mosaic(folder: Path, tokens: Any) -> None:
    kept = without_operators()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
        for window in tokens.reshape(-1, LENGTH + 1):
            writer.write({"tokens": window})
    del kept


# -- measuring ---------------------------------------------------------------------------------------------------------


def rate(name: str, folder: Path, batch: int, span: float) -> float:
    """Windows per second of one contestant, in this process."""
    batches = CONTESTANTS[name](folder, batch)
    begun = time.perf_counter()
    while time.perf_counter() - begun < span / 2:
        x, y = next(batches)
        assert x.shape[1] == LENGTH and str(x.dtype) == str(y.dtype) == "torch.int64", (x.shape, x.dtype)
    begun, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < span:
        count += len(next(batches)[0])
    return count / spent


def measured(name: str, folder: Path, batch: int, span: float) -> float | None:
    """The same in a process of its own; None if it fails, as where the library is missing."""
    command = [sys.executable, "-m", "benchmarks.ranks_tokens", "--one", name, str(folder), str(batch), str(span)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])


def rows(quick: bool) -> list[dict[str, object]]:
    """One row for each contestant and batch size."""
    windows, rounds, span, sizes = (8_192, 1, 1.0, (64,)) if quick else (65_536, 5, 3.0, (16, 64))
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, windows)
        for batch in sizes:
            rates: dict[str, list[float | None]] = {one: [] for one in CONTESTANTS}
            for number in range(rounds):
                order = list(CONTESTANTS)
                for one in order[number % len(order) :] + order[: number % len(order)]:
                    rates[one].append(measured(one, folder, batch, span))
            for one, all_found in rates.items():
                whole = [value for value in all_found if value is not None]
                ratios = [a / b for a, b in zip(rates[OURS], all_found, strict=True) if a and b]
                found.append(
                    {
                        "loader": one,
                        "batch": batch,
                        "windows/s": round(statistics.median(whole)) if whole else "not installed",
                        "TokenWindows is faster by": round(statistics.median(ratios), 1) if ratios else "",
                    }
                )
    return found


def main() -> None:
    """Print the table, or measure one contestant."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "FOLDER", "BATCH", "SPAN"))
    given = parser.parse_args()
    if given.one:
        name, folder, batch, span = given.one
        print(rate(name, Path(folder), int(batch), float(span)), flush=True)
        return
    print(TITLE)
    for row in rows(given.quick):
        print("  ".join(f"{value!s:>22}" for value in row.values()))


if __name__ == "__main__":
    main()
