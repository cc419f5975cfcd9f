"""Find samples that differ between two reads, and explain the cause; fingerprints of epochs.

    check_loader(steps, number, samples, pool) -> LoaderCheck
        some samples --read by one worker, in reverse order--> digests, memory
                     --read here, in order and in reverse--> digests
        differing ones --read here again, one source of randomness fixed at a time--> an explanation each

The worker belongs to a temporary pool, so loader, epoch and state do not change. If it cannot start or read, the result
says so. An error raised by a sample counts as its value.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharded_loader import ProcessPool, ThreadPool, WorkerDiedError, WorkerTimeoutError
from sharded_loader.extend import Pool, PoolBroken, Result, Task
from sharded_loader.extend.data import digest_of_read, exact, generators, look_in_worker, text_with_type
from sharded_loader.extend.engine import KnownSteps, publish
from sharded_loader.extend.order import LEFT_OUT, WEIGHTS_SET, differences, other_arguments, parse, seeded_globals
from sharded_loader.extend.tools import blake2b, brief, check_int, is_from_outside

DIGITS = len(LEFT_OUT)


# -- samples that differ -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoaderCheck:
    """Result of `ShardedDataLoader.check`. ``str`` of it is a report of a few lines.

    Attributes:
        samples: Number of samples read.
        worker: Pool that read them besides the main process.
        differing: Index and explanation of each sample that differs.
        failed: Reason why the worker could not read; None if it could.
        pickled: Size of the pickled dataset in bytes, or the reason why it cannot be pickled.
        worker_bytes: Private memory of the worker process after these samples; None if unknown.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> found = ShardedDataLoader(range(8), 4, num_workers=2, thread_pool=True).check()
        >>> found.differing, found.failed
        ((), None)
    """

    samples: int
    worker: str
    differing: tuple[tuple[Any, str], ...]
    failed: str | None
    pickled: int | str
    worker_bytes: int | None

    def __str__(self) -> str:
        lines = ["The epoch has no samples to read."]
        if self.samples:
            lines = [f"{self.samples} samples were read twice here, and by {self.worker}."]
        for why in dict.fromkeys(why for _, why in self.differing):
            alike = ", ".join(str(index) for index, of_index in self.differing if of_index == why)
            lines.append(f"Other values each time: {alike}. {why}.")
        if self.failed is not None:
            lines.append(f"The worker could not read: {self.failed}")
        elif self.samples and not self.differing:
            lines.append("All are the same each time.")
        is_pickled = isinstance(self.pickled, int)
        lines.append(f"The pickled dataset has {self.pickled:,} bytes." if is_pickled else f"Pickled: {self.pickled}.")
        if self.worker_bytes is not None:
            lines.append(f"After these samples the worker had {self.worker_bytes:,} bytes of its own.")
        return "\n".join(lines)


def check_loader(steps: KnownSteps, number: int, samples: int, own: Pool) -> LoaderCheck:
    """Read some samples repeatedly and compare them. ``own`` is the loader's pool, or an unstarted one."""
    samples, last = check_int("samples", samples, 1, "give the number of samples to read"), 0
    with contextlib.suppress(TypeError):  # length unknown
        last = max(steps.length(number) - 1, 0)
    indices = steps.some_indices(number, sorted({0, last // 2, last}), -(-samples // 3))[:samples]
    # A worker of the loader's kind; a process if it has no workers, or remote ones.
    like: dict[str, Any] = {"worker_init_fn": own.worker_init_fn, "timeout": own.timeout}
    threads, method = isinstance(own, ThreadPool), getattr(own, "start_method", None)
    pool = ThreadPool(1, **like) if threads else ProcessPool(1, start_method=method, **like)
    # Before reading here: a forked worker would share the files that a dataset opens when it is read.
    there, worker_bytes, failed = _read_there(steps, pool, indices[::-1], number)
    ends = failed is not None and failed.startswith((WorkerDiedError.__name__, WorkerTimeoutError.__name__))
    here = [] if ends else indices  # otherwise this process would end, or hang
    first = {index: steps.digest(index, number) for index in here}
    second = {index: steps.digest(index, number, key=2) for index in reversed(here)}
    differing = tuple(
        (index, _why(steps, index, number, first[index] == second[index]))
        for index in here
        if len({first[index], second[index], there.get(index, first[index])}) > 1
    )
    pickled: int | str
    try:
        encoded = publish(steps.dataset, dataset=steps.dataset)
        pickled = len(encoded.pickled) + sum(buffer.nbytes for buffer in encoded.buffers)
    except TypeError as error:
        pickled = str(error).partition(". What to do")[0]
    return LoaderCheck(len(indices), repr(pool), differing, failed, pickled, worker_bytes)


def _read_there(
    steps: KnownSteps, pool: Pool, indices: list[Any], number: int
) -> tuple[dict[Any, str], int | None, str | None]:
    """Read samples in a worker. Returns digests by index, the worker's memory in bytes, and an error text."""
    results: Sequence[Result] = ()
    try:
        if not indices:
            return {}, None, None
        with steps.in_epoch(number):
            pool.start(replace(steps.job_now(), batchify_fn=look_in_worker, on_error="raise"))
            pool.submit([Task(0, 0, number, 0, (indices,), False)])
            while not results:
                results = pool.wait()
        if results[0].error is not None:
            raise results[0].error
        *digests, nbytes = results[0].batch
        return dict(zip(indices, digests, strict=True)), None if pool.shares_dataset else nbytes, None
    except Exception as raised:
        error = raised.error if isinstance(raised, PoolBroken) else raised
        if is_from_outside(error):
            raise
        return {}, None, text_with_type(error)
    finally:
        pool.close()


def _why(steps: KnownSteps, index: object, number: int, same_here: bool) -> str:
    """Explain why a sample differs. ``same_here``: two reads in this process agree."""
    shared: dict[str, Any] = {"Python's random": random, "NumPy's global generator": np.random}  # imported only here
    shared["torch's global generator"] = torch.default_generator
    known = shared | dict(generators(steps.dataset, "dataset"))
    with seeded_globals(1):
        before = {name: exact(_state_of(one)) for name, one in known.items()}
        first = digest_of_read(lambda: steps.sample(index, number))
        drawn = [name for name, one in known.items() if exact(_state_of(one)) != before[name]]
    is_random = first != steps.digest(index, number)
    if sources := [name for name in drawn if (name not in shared) is is_random]:
        advice = "Draw from sample_rng(), or use dataset.transform(fn, seeded=True)"
        return f"Each draws from {' and '.join(sources)}. {advice}"
    if not is_random and same_here:
        return "The worker reads others. They depend on the process: its number, hash() of a text, the environment"
    what = "a new generator without a seed, the time, a counter, a file"
    return f"Each depends on what was read before it, or on something that changes: {what}"


def _state_of(generator: Any) -> object:
    for name in ("getstate", "get_state"):
        if hasattr(generator, name):
            return getattr(generator, name)()
    return generator.bit_generator.state


# -- the fingerprint of an epoch ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the data and the order of one epoch, on any number of ranks; ``str`` of it is 16 hexadecimal digits.

    Attributes:
        epoch: The number of the epoch.
        steps: 8 hexadecimal digits for each step of all ranks; ``--------`` for a step that is left out.
        state: A state at the start of the epoch; its ``"digests"`` are lists [epoch, index, digest].

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> one, other = (ShardedDataLoader(range(8), 4, seed=seed) for seed in (1, 2))
        >>> str(one.fingerprint()) == str(other.fingerprint())  # the order is the same
        True
    """

    epoch: int
    steps: str
    state: dict[str, Any]

    def __str__(self) -> str:
        told = json.dumps([self.steps, self.state.get("digests"), self.state.get("data")])
        return blake2b(told.encode(), digest_size=8).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the fingerprint as a dict for JSON."""
        return {"fingerprint": str(self), **self.__dict__}


def fingerprint_of_epoch(known_steps: KnownSteps, number: int) -> Fingerprint:
    """Return the fingerprint of an epoch of a map-style dataset, whose samples are read here."""
    steps, known = known_steps.checksums(number), known_steps.known
    chosen = sorted({0, len(steps) // 2, len(steps) - 1} if steps else ())
    known.look(known_steps.some_indices(number, chosen, each=1), number, known_steps.digest)
    return Fingerprint(number, "".join(steps), {**known_steps.state_of(number), **known.entries()})


# -- two runs ----------------------------------------------------------------------------------------------------------


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a fingerprint from a JSON file. Raises OSError, or ValueError if it holds none."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = Fingerprint(int(kept["epoch"]), kept["steps"], kept["state"])
        parse(found.state)
        if type(found.steps) is not str or len(found.steps) % DIGITS:
            raise ValueError(f"its 'steps' is {brief(found.steps)}")
    except (KeyError, TypeError, ValueError) as error:
        advice = "give a file with json.dumps(loader.fingerprint().as_dict())"
        raise ValueError(f"{path} has no fingerprint ({type(error).__name__}: {error}): {advice}") from None
    return found


def first_difference(one: Fingerprint, other: Fingerprint) -> int | None:
    """Return the first step that differs, or None. Raises ValueError if the epochs are different."""
    if one.epoch != other.epoch:
        text = f"one fingerprint is of epoch {one.epoch}, and the other of epoch {other.epoch}"
        raise ValueError(f"{text}: call loader.fingerprint(epoch) with the same epoch in both runs")
    pieces = ([run.steps[i : i + DIGITS] for i in range(0, len(run.steps), DIGITS)] for run in (one, other))
    differs = (step for step, (was, now) in enumerate(itertools.zip_longest(*pieces)) if was != now)
    return next(differs, None)


def other_facts(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Describe the other differences, in data and loader arguments, one phrase each."""
    (_, was), (_, now) = parse(one.state), parse(other.state)
    pairs = [(f"the {name}", getattr(was, name), getattr(now, name)) for name in ("seed", "sampler_seeds", "skip")]
    pairs.append(("the fingerprint of the dataset", one.state.get("data"), other.state.get("data")))
    if was.seed == now.seed:
        digests = {(epoch, index): digest for epoch, index, digest in one.state.get("digests", ())}
        for epoch, index, digest in other.state.get("digests", ()):
            pairs.append((f"the digest of sample {index}", digests.get((epoch, index), digest), digest))
    found = [f"{text} was {first}, and is {second}" for text, first, second in pairs if first != second]
    for sampler, _, name in {name.partition(".") for name, _ in {*was.sampler_arguments} ^ {*now.sampler_arguments}}:
        if name == WEIGHTS_SET and one.steps != other.steps:  # otherwise one run may only have gone further
            advice = "make the same changes after the same steps, on all ranks"
            found.append(f"the weights of the {sampler} were not changed alike during training: {advice}")
    return [*differences(was, now), *other_arguments(was, now), *found]
