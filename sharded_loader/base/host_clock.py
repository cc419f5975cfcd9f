"""The clock that engine, pools, devices, storage and instruments read.

    host_clock.now() -> seconds, as a float, from an arbitrary start

Thresholds in seconds are compared with differences of this clock, and the times that ``stats()`` reports are such
differences. All threads and processes of a machine share it. Modules import this module, and not the function, so tests
replace `now` for the whole package at once. File times and the command line read the system's clocks themselves.
"""

from __future__ import annotations

import time

now = time.perf_counter
