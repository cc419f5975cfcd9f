"""The clock that engine, pools, devices, storage and instruments read.

    host_clock.now() -> seconds, as a float, from an arbitrary start

Every threshold in seconds is compared with differences of this clock, and every time that ``stats()`` reports is one.
All threads and processes of a machine share it. Tests put a clock of their own in the place of `now`, for the whole
package at once: modules import this one, and not the function.
"""

from __future__ import annotations

import time

now = time.perf_counter
