"""The tests for a GPU, run to their ends where one is only pretended: a slip in them would waste a real one's time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHOSEN = "not (spawn or forkserver or thread or inline) or thread_gets or threads_put or beside_threads"
HERE = Path(__file__).resolve().parent.parent
PARTS = sorted(path.stem.removeprefix("test_gpu_") for path in (HERE / "gpu").glob("test_gpu_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", PARTS)
def test_the_tests_for_a_gpu_pass_on_a_pretended_one(part: str) -> None:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "simulated_cuda", "-p", "no:cacheprovider"]
    command += [str(HERE / "gpu" / f"test_gpu_{part}.py"), "-k", CHOSEN]
    gpus = "2" if part == "processes" else "1"
    env = {**os.environ, "PYTHONPATH": path, "GPU_TESTS_PART": "100", "PRETENDED_GPUS": gpus}
    done = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
