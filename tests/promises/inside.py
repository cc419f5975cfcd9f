"""What tests of this room see of a loader and of a pool that has no public name."""

from __future__ import annotations

from typing import Any


def pipeline_of(loader: Any) -> Any:
    return loader._pipeline


def transport_of(pool: Any) -> Any:
    return pool._transport


def zygote_pids(pool: Any) -> list[int]:
    """The process that replaced workers are forked from, if there is one yet."""
    zygote = transport_of(pool).zygote
    return [] if zygote is None else [zygote._process.pid]
