"""Ranks that are processes: they leave and join while an epoch is read. `test_rescale` starts this program.

python rescaled_ranks.py spawn
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections import Counter
from typing import Any

from sharded_loader import ShardedDataLoader


def serve(channel: Any) -> None:
    """One rank: a process that joins with a state, takes steps, and leaves."""
    replicas, rank, state = channel.recv()
    loader = ShardedDataLoader(
        range(48), 2, shuffle=True, seed=5, num_replicas=replicas, rank=rank, num_workers=1, prefetch=3
    )
    if state is not None:
        loader.load_state_dict(state)
    iterator = iter(loader)
    for command, *given in iter(channel.recv, None):
        if command == "step":
            batch = next(iterator, None)
            channel.send(None if batch is None else batch.tolist())
        elif command == "state":
            channel.send(pickle.dumps(loader.state_dict()))
        else:
            loader.rescale(*given)
            channel.send(None)
    loader.close()


class Ranks:
    """The ranks that there are: processes, each with the way to it."""

    def __init__(self, method: str) -> None:
        self._context: Any = multiprocessing.get_context(method)
        self._ranks: list[tuple[Any, Any]] = []

    def ask(self, *command: Any) -> list[Any]:
        """What each rank answers."""
        for _, channel in self._ranks:
            channel.send(command)
        return [channel.recv() for _, channel in self._ranks]

    def scale(self, replicas: int) -> None:
        """Ranks leave or join."""
        state = pickle.loads(self.ask("state")[0]) if self._ranks else None
        while len(self._ranks) > replicas:
            process, channel = self._ranks.pop()
            channel.send(None)
            process.join()
            assert process.exitcode == 0
        for rank, (_, channel) in enumerate(self._ranks):
            channel.send(("rescale", replicas, rank))
            channel.recv()
        for rank in range(len(self._ranks), replicas):
            channel, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(theirs,))
            process.start()
            channel.send((replicas, rank, state))
            self._ranks.append((process, channel))


def main(method: str) -> None:
    ranks, found = Ranks(method), Counter[int]()
    for replicas in (2, 3, 1, 2):
        ranks.scale(replicas)
        for _ in range(2):
            for batch in ranks.ask("step"):
                found.update(batch)
    while None not in (batches := ranks.ask("step")):
        for batch in batches:
            found.update(batch)
    ranks.scale(0)
    assert found == Counter(range(48)), found
    print("each sample once")


if __name__ == "__main__":
    main(sys.argv[1])
