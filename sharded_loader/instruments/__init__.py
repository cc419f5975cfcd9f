"""What tells how a loader does: numbers, reports, traces, checks, fingerprints, and ``num_workers="auto"``.

For: ``loader.stats()``, ``report()``, ``trace()``, ``stats_of_ranks()``, ``check()`` and ``fingerprint()``.
Costs: ten modules of about 1,250 lines, and some calls of each ``next()``.
Tests: tests/instruments.
It goes when: a profiler tells why training waits for data.
"""
