"""One contender does one job of `benchmarks.jobs`, in a process of its own: ``python -m benchmarks.jobs_child``.

    stdin   {"contender", "folder", "own", "workers", "step", "kill", "state"}
    stdout  a line of JSON for each event, from the first line of this module on:
            {"first": seconds}              the first batch is there; modules were imported, too
            {"epoch": 1, "seconds", "batches", "verdict"}
            {"ready": seconds}              half of the epoch after them was read: the state and what was seen are in
                                            ``own``, and the parent kills the process
            {"new": seconds, "again": n}    after a kill: the first batch that had not been read, and how many samples
                                            were read again before it
            {"steps": n, "seconds"}         the end

The clock of a step stands for a device: the process sleeps. Several ranks are processes below this one, which meet
before and after each epoch; times are those of the slowest, and what they saw is added up.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402
from queue import Empty  # noqa: E402
from typing import Any  # noqa: E402

MODULUS = 1 << 64
"""Of sums over what samples hold."""


class Alone:
    """A rank that meets nobody: it says its events itself."""

    ranks = 1

    def say(self, **event: Any) -> None:
        """Write an event."""
        print("\n" + json.dumps(event), flush=True)

    def meet(self) -> None:
        """Wait for the other ranks."""


class OneOfSeveral(Alone):
    """A rank of several, whose parent gathers the events."""

    def __init__(self, ranks: int, queue: Any, barrier: Any) -> None:
        self.ranks, self.queue, self.barrier = ranks, queue, barrier

    def say(self, **event: Any) -> None:
        self.queue.put(event)

    def meet(self) -> None:
        self.barrier.wait(600)


class Tally:
    """How often each sample of an epoch came, and what all held.

    Args:
        job: whose epoch.
    """

    def __init__(self, job: Any) -> None:
        import numpy as np

        self.job, self.counts, self.content, self.add = job, np.zeros(job.count, np.int64), 0, np.add.at

    def see(self, batch: Any) -> int:
        """Take a batch; return its number of samples."""
        ids = self.job.ids(batch)
        self.add(self.counts, ids, 1)
        self.content = (self.content + self.job.content(batch)) % MODULUS
        return len(ids)


def verdict(counts: Any, content: int, total: int | None) -> str:
    """What is wrong with an epoch, or ``same``; a sample that comes twice, to make ranks equal, is only counted."""
    missing, twice = int((counts == 0).sum()), int((counts > 1).sum())
    if missing:
        return f"{missing} SAMPLES MISSING" + (f", {twice} TWICE" if twice else "")
    if twice:
        return f"same, {twice} twice"
    return "same" if total is None or total % MODULUS == content else "OTHER CONTENT"


def main() -> None:
    """Do what stdin says."""
    warnings.simplefilter("ignore")
    request = json.loads(sys.stdin.read())
    ranks = request.pop("ranks")
    if ranks == 1:
        work(Alone(), **request)
    else:
        several(ranks, request)


def work(team: Alone, contender: str, folder: str, own: str, workers: int, step: float, kill: bool, state: Any) -> None:
    """Do the job; ``state``: what was there at a kill, to go on from."""
    from benchmarks.jobs_data import load
    from benchmarks.jobs_others import CONTENDERS

    job, rank = load(Path(folder)), os.environ.get("RANK", "")
    kept = Path(own + f"-{rank}.json")
    opened = CONTENDERS[contender].open(job, Path(own), workers)
    if state:
        go_on(team, job, opened, kept, step)
        opened.close()
        return
    steps = 0
    for epoch in range(job.kind.epochs):
        team.meet()
        began, tally, batches = time.perf_counter(), Tally(job), 0
        for batch in opened.batches(epoch):
            if steps == 0:
                team.say(first=time.perf_counter() - BEGAN)
            batches, steps = batches + 1, steps + 1
            tally.see(batch)
            if step:
                time.sleep(step)
        seconds = time.perf_counter() - began
        seen = (tally.counts, tally.content) if team.ranks > 1 else verdict(tally.counts, tally.content, job.total)
        team.say(epoch=epoch + 1, seconds=seconds, batches=batches, verdict=seen)
    team.say(steps=steps, seconds=time.perf_counter() - BEGAN)
    if kill:
        team.meet()
        be_killed(team, job, opened, kept, batches)
    opened.close()


def be_killed(team: Alone, job: Any, opened: Any, kept: Path, batches: int) -> None:
    """Read half of an epoch, keep the state, and wait for the parent to kill this process."""
    epoch, done, tally, state = job.kind.epochs, 0, Tally(job), None
    reading = opened.batches(epoch)  # until the end: workers read on
    for done, batch in enumerate(reading, 1):
        tally.see(batch)
        state = opened.state and opened.state(epoch, done)
        if done >= batches // 2:
            break
    before = {"state": state, "done": done, "counts": tally.counts.tolist(), "epoch": epoch}
    kept.write_text(json.dumps(before, default=_plain))
    team.say(ready=time.perf_counter() - BEGAN)
    threading.Event().wait()


def _plain(value: Any) -> Any:
    """Arrays and tensors of a state, as lists."""
    return value.tolist()


def go_on(team: Alone, job: Any, opened: Any, kept: Path, step: float) -> None:
    """Read until the first batch that had not been read before the kill, then the rest of the epoch."""
    import numpy as np

    before = json.loads(kept.read_text())
    counts, again = np.array(before["counts"]), 0
    if before["state"] is not None:
        opened.load(before["state"])
    seen, new = Tally(job), None
    for batches, batch in enumerate(opened.batches(before["epoch"]), 1):
        is_new = batches > before["done"] if before["state"] is None else True
        if not is_new:
            again += len(job.ids(batch))
            if step:
                time.sleep(step)
        elif new is None:
            new = time.perf_counter() - BEGAN
            team.say(new=new, again=again)
        seen.see(batch)
    whole = counts + seen.counts if before["state"] is not None else seen.counts
    seen_by = (whole, 0) if team.ranks > 1 else verdict(whole, 0, None)
    team.say(resumed=seen_by)


# -- several ranks -----------------------------------------------------------------------------------------------------


def one_rank(rank: int, ranks: int, began: float, queue: Any, barrier: Any, request: dict[str, Any]) -> None:
    """A rank, in a process of its own."""
    global BEGAN
    warnings.simplefilter("ignore")
    BEGAN = began
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    work(OneOfSeveral(ranks, queue, barrier), **request)


def several(ranks: int, request: dict[str, Any]) -> None:
    """Start the ranks, and say their events as one."""
    import multiprocessing

    from benchmarks.jobs_data import load

    total = load(Path(request["folder"])).total
    context = multiprocessing.get_context("spawn")
    queue, barrier, alone = context.Queue(), context.Barrier(ranks), Alone()
    processes = [
        context.Process(target=one_rank, args=(rank, ranks, BEGAN, queue, barrier, request)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    waiting: dict[str, list[dict[str, Any]]] = {}
    while any(process.is_alive() for process in processes) or not queue.empty():
        try:
            event = queue.get(timeout=0.2)
        except Empty:
            if any(process.exitcode for process in processes):
                sys.exit("a rank has failed")
            continue
        key = next(iter(event))
        waiting.setdefault(key, []).append(event)
        if len(waiting[key]) == ranks:
            alone.say(**joined(waiting.pop(key), total))


def joined(events: list[dict[str, Any]], total: int | None) -> dict[str, Any]:
    """The events of all ranks as one: the slowest one's times, and what all have seen."""
    found = {name: max(event[name] for event in events) for name in events[0] if name not in ("verdict", "resumed")}
    for name in {"verdict", "resumed"} & set(events[0]):
        counts, contents = zip(*(event[name] for event in events), strict=True)
        twice = total if name == "verdict" and sum(counts).max() == 1 else None
        found[name] = verdict(sum(counts), sum(contents) % MODULUS, twice)
    return found


if __name__ == "__main__":
    main()
