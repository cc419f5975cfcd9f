"""What tells how a loader does: numbers, reports, traces, checks, fingerprints, and ``num_workers="auto"``.

For: ``loader.stats()``, ``report()``, ``trace()``, ``stats_of_ranks()``, ``check()`` and ``fingerprint()``.
Costs: six modules of about 1,100 lines, and some calls in each ``next()``. The core asks for them by name, where the
class of the loader is made, and where a loader is. Its own `engine.pipeline.Observer` measures nothing.
Tests: tests/instruments.
It goes when: a profiler tells why training waits for data.
"""
