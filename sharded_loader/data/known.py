"""What a loader knows of its data, in its states: so that a state is not taken on over other data of the same length.

    Known(dataset)                         of one loader
      look(indices, epoch, read)           a few samples are read; from then on states have their digests
      entries() -> dict                    what a state has of the data
      check(state, read)                   a ValueError that says how the data differ

What is known without a read (`data.inspection.fingerprint_of`) is in every state. Samples are not read for a state: in
the main process a dataset would open the files that its workers are to open, and a sample may take seconds.
``loader.fingerprint()`` reads a few, and from then on states have their digests. `check` reads these again, with the
seed of the state. A sample that is another one each time says nothing, and is left out.

What can go wrong: a library of another version decodes or augments differently, and the digests differ though the data
are the same. Then ``strict=False`` loads the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sharded_loader.base.described import brief
from sharded_loader.base.errors import text_of
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.limits import private_bytes
from sharded_loader.data.digests import exact
from sharded_loader.data.inspection import fingerprint_of

Digests = list[list[Any]]
"""Of each sample the epoch, the index and the digest."""

Read = Callable[[Any, int, int | None], str]
"""Reads the sample of an index in an epoch, with a seed (None: the loader's), and returns its digest."""


def digest_of_read(read: Callable[[], Any]) -> str:
    """The digest of the sample that a function reads; or its error as a text."""
    try:
        return exact(read())
    except Exception as error:
        if is_from_outside(error):
            raise
        return text_with_type(error)


def text_with_type(error: BaseException) -> str:
    """What stands in the place of a digest."""
    return f"{type(error).__name__}: {text_of(error)}"


def look_in_worker(samples: list[Any]) -> list[Any]:
    """A collate function: a digest of each sample, and the memory of this process, or None."""
    found: list[Any] = [exact(sample) for sample in samples]
    try:
        return [*found, private_bytes()]
    except ImportError:
        return [*found, None]


class Known:
    """What a loader knows of its data.

    Args:
        dataset: what is read.

    Attributes:
        data: what is known without a read; "": it was not asked for.
        digests: those that states have, of samples whose index JSON can have.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.forget()

    def forget(self) -> None:
        """The data have changed."""
        self.data: str | None = ""
        self.digests: Digests = []

    def look(self, indices: list[Any], epoch: int, read: Read) -> None:
        """Read some samples, for states. One that is another one when it is read again is left out."""
        found = [[epoch, index, read(index, epoch, None)] for index in indices if type(index) in (int, str)]
        self.digests = [one for one in found if read(one[1], epoch, None) == one[2]]

    def entries(self) -> dict[str, Any]:
        """What a state has of the data: a new dict."""
        if self.data == "":
            self.data = fingerprint_of(self._dataset)
        found = {"data": self.data, "digests": list(map(list, self.digests))}
        return {name: value for name, value in found.items() if value}

    def check(self, state: Mapping[str, Any], read: Read) -> None:
        """Reject a state that fits the loader, but was saved with other data.

        Raises:
            ValueError: the data differ.
        """
        saved, own, how = state.get("data"), self.entries().get("data"), ""
        if isinstance(saved, str) and own is not None and saved != own:
            how = f"the fingerprint of the dataset was {saved}, and is {own}"
        digests = state.get("digests", ())
        for one in digests if isinstance(digests, list | tuple) else [digests]:
            if type(one) not in (list, tuple) or [type(part) for part in one] not in ([int, int, str], [int, str, str]):
                raise ValueError(f"the state's 'digests' has {brief(one)}: give what state_dict() returned")
            (epoch, index, digest), seed = one, state["seed"]
            own = read(index, epoch, seed)
            if own != digest and read(index, epoch, seed) == own:  # not another one each time
                how = f"the digest of sample {index} was {digest}, and is {own}"
        if how:
            raise ValueError(
                f"load_state_dict: the state was saved with other data: {how}. Load the original data. If you mean the "
                f"change, call load_state_dict(state, strict=False)"
            )
