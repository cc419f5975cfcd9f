"""Statistics, reports, traces, checks, fingerprints, and ``num_workers="auto"``.

For: ``loader.stats()``, ``report()``, ``trace()``, ``stats_of_ranks()``, ``check()`` and ``fingerprint()``.
Costs: six modules of about 1,000 lines, and a few calls in each ``next()``. The core imports them by name where the
loader's class and each loader are made; its own `engine.pipeline.Observer` measures nothing.
Tests: tests/instruments.
It goes when: a profiler explains why training waits for data.
"""
