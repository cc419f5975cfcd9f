"""The process that forked workers come from may be killed as they may."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from sharded_loader import ProcessPool, ShardedDataLoader

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forked workers")


def test_a_template_that_is_killed_with_a_worker_changes_nothing() -> None:
    pool = ProcessPool(2, start_method="fork", restarts=100)
    with ShardedDataLoader(range(400), 4, pool=pool) as loader:
        got = []
        for batch in loader:
            got += batch.tolist()
            # At once, so that its pipe ends while the process itself has not: both orders occur.
            assert pool._crew.template is not None
            pool._crew.template._process.kill()
            os.kill(pool.pids[len(got) // 4 % 2], signal.SIGKILL)
        assert got == list(range(400))
