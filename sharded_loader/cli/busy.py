"""Do other programs disturb a measurement? `cores_of_others` looks, `busy_text` says it in a sentence."""

from __future__ import annotations

import os

BUSY = 0.3
"""Cores. Measurements vary visibly if workers lack more than this."""


def cores_of_others(seconds: float = 0.1) -> float | None:
    """How many cores other programs use; None if psutil is not installed.

    Args:
        seconds: how long to look. This process must do nothing meanwhile.
    """
    try:
        import psutil
    except ImportError:
        return None
    return float(psutil.cpu_percent(interval=seconds)) / 100 * (os.cpu_count() or 1)


def busy_text(others: float | None, cores: int, usable: int) -> str | None:
    """A sentence about other programs, if they use cores that workers need; otherwise None.

    Args:
        others: as `cores_of_others` returns it.
        cores: the cores of the machine.
        usable: how many of them workers may use.

    Example:
        >>> busy_text(1.7, cores=2, usable=2), busy_text(1.7, cores=64, usable=8)
        ('Other programs use 1.7 of 2 cores.', None)
    """
    if others is None or others + usable < cores + BUSY:
        return None
    return f"Other programs use {others:.1f} of {cores} cores."
