"""A dataset with a shared value. Workers import it without torch and pytest, which take two seconds."""

from __future__ import annotations

import multiprocessing


class Counting:
    """Counts how often it was read, in all processes together."""

    def __init__(self, method: str) -> None:
        self.count = multiprocessing.get_context(method).Value("i", 0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        with self.count.get_lock():
            self.count.value += 1
        return index
