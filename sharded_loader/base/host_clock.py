"""Monotonic clock of the package, shared by all threads and processes of a machine: seconds from an arbitrary start.

Import the module rather than the function, so that tests can replace `now` for the whole package at once. File times
and the command line use the system's clocks directly.
"""

import time

now = time.perf_counter
