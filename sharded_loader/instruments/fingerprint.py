"""The fingerprint of an epoch, and the first step in which two runs differ.

    fingerprint_of_epoch(steps, number) -> Fingerprint     checksums of all steps, digests of three samples, a state
    Fingerprint.as_dict()                                  for a file of JSON: 8 bytes for each step
    SavedRun.read(path) -> SavedRun                        such a file, or a state that was saved as JSON
    first_difference(one, other) -> (epoch, step) | None   the first step that differs
    other_facts(one, other) -> phrases                     what else does

The order of a loader without a sampler of the user's is a function of what a state says. So two states are enough to
compare two runs of that kind, step by step. Nothing is kept here. What can go wrong: a file that is no JSON, or neither
state nor fingerprint; two fingerprints of different epochs; a state that does not tell the order.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharded_loader.base.described import brief
from sharded_loader.base.private import blake2b
from sharded_loader.loader.lookup import KnownSteps
from sharded_loader.sampling.order import LEFT_OUT, MapOrder, checksums
from sharded_loader.sampling.state import Signature, differences, other_arguments, parse

DIGITS = len(LEFT_OUT)


@dataclass(frozen=True)
class Fingerprint:
    """What tells the data and the order of one epoch; see `ShardedDataLoader.fingerprint`.

    As a text it is 16 hexadecimal digits, the same for the same order and samples, on any number of ranks.

    Attributes:
        epoch: The number of the epoch.
        steps: 8 hexadecimal digits for each step of all ranks; ``--------`` for a step that is left out.
        state: A state at the beginning of the epoch. Its ``"digests"`` are those of the samples: a list of lists
            [epoch, index, digest].

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
        """The fingerprint as a dict for JSON."""
        return {"fingerprint": str(self), **self.__dict__}


def fingerprint_of_epoch(known_steps: KnownSteps, number: int) -> Fingerprint:
    """The fingerprint of an epoch of a loader over data that are read by index. Its samples are read here.

    Raises:
        TypeError, ValueError, IndexError: as of `KnownSteps`.
    """
    steps, known = known_steps.checksums(number), known_steps.known
    chosen = sorted({0, len(steps) // 2, len(steps) - 1} if steps else ())
    known.look(known_steps.some_indices(number, chosen, each=1), number, known_steps.digest)
    return Fingerprint(number, "".join(steps), {**known_steps.state_of(number), **known.entries()})


# -- two runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRun:
    """What a file says of a run.

    Attributes:
        name: of the file.
        epoch: up to which epoch the order counts.
        signature: in what.
        state: of the loader.
        steps: the checksums of a fingerprint; None: the file has a state alone.
    """

    name: str
    epoch: int
    signature: Signature
    state: dict[str, Any]
    steps: str | None

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Read a fingerprint or a state.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is neither.
        """
        content: Any = None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            kept = content if isinstance(content, dict) and "fingerprint" in content else {"state": content}
            position, signature = parse(kept.get("state"))
            steps = kept.get("steps")
            if steps is not None and (type(steps) is not str or len(steps) % DIGITS):
                raise ValueError(f"its 'steps' is {brief(steps)}")
        except (TypeError, ValueError) as error:
            advice = "give a file with json.dumps(loader.fingerprint().as_dict())"
            if not (isinstance(content, dict) and "_num_yielded" in content):  # a state of the drop-in tells no order
                advice += ", or json.dumps(loader.state_dict())"
            raise ValueError(f"{path} has no state and no fingerprint ({error}): {advice}") from None
        return cls(str(path), position.epoch, signature, kept["state"], steps)

    def checksums(self, epoch: int) -> list[str]:
        """Those of the steps of an epoch.

        Raises:
            ValueError: the file does not tell.
        """
        if self.steps is not None:
            return [self.steps[i : i + DIGITS] for i in range(0, len(self.steps), DIGITS)]
        one = self.signature
        if one.sampler not in ("RandomSampler", "SequentialSampler") or one.sampler_seeds or one.batch_size is None:
            raise ValueError(
                f"{self.name}: a state does not tell the order of the {one.sampler}. Give a file with "
                f"json.dumps(loader.fingerprint({epoch}).as_dict()) of each run"
            )
        given = {name: getattr(one, name) for name in ("batch_size", "seed", "num_replicas", "steps_per_epoch")}
        given |= {
            "shuffle": one.sampler == "RandomSampler",
            "last_batch": None if one.steps_per_epoch else one.last_batch,
        }
        rank = None if one.num_replicas is None else 0
        order = MapOrder(one.dataset_length, sampler=None, batch_sampler=None, rank=rank, **given)
        order.load(self.state, strict=True)
        return checksums(order, epoch)


def first_difference(one: SavedRun, other: SavedRun) -> tuple[int, int] | None:
    """The epoch and the number of the first step that differs; None: no step does.

    Two states count up to the epoch that both have reached; a fingerprint counts for its epoch.

    Raises:
        ValueError: the files do not tell the order, or tell it of different epochs.
    """
    known = {run.epoch for run in (one, other) if run.steps is not None}
    if len(known) > 1:
        raise ValueError(
            f"{one.name} has the fingerprint of epoch {one.epoch}, and {other.name} of epoch {other.epoch}: call "
            f"loader.fingerprint(epoch) with the same epoch in both runs"
        )
    for epoch in known or range(min(one.epoch, other.epoch) + 1):
        pairs = itertools.zip_longest(one.checksums(epoch), other.checksums(epoch))
        step = next((step for step, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if step is not None:
            return epoch, step
        if one.signature == other.signature:
            break  # the order is a function of that
    return None


def other_facts(one: SavedRun, other: SavedRun) -> list[str]:
    """What else differs, one phrase each: the data, and the arguments of the loaders."""
    was, now = one.signature, other.signature
    pairs = [(f"the {name}", getattr(was, name), getattr(now, name)) for name in ("seed", "sampler_seeds", "skip")]
    pairs.append(("the fingerprint of the dataset", one.state.get("data"), other.state.get("data")))
    if was.seed == now.seed:
        digests = {(epoch, index): digest for epoch, index, digest in one.state.get("digests", ())}
        for epoch, index, digest in other.state.get("digests", ()):
            pairs.append((f"the digest of sample {index}", digests.get((epoch, index), digest), digest))
    found = [f"{text} was {first}, and is {second}" for text, first, second in pairs if first != second]
    return [*differences(was, now), *other_arguments(was, now), *found]
