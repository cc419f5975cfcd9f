"""Requests that are tried again are counted, from any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sharded_loader.data import retried


def test_every_one_counts_whoever_notes_it() -> None:
    before = retried.total()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: retried.note(), range(800)))
    assert retried.total() - before == 800
