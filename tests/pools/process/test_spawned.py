"""The first lines of a new interpreter: what a forkserver imports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sharded_loader.base.system import ONE_THREAD
from sharded_loader.pools.process import spawned
from sharded_loader.pools.process.spawned import PRELOAD

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")


def test_a_forkserver_imports_what_it_is_told_with_one_thread_and_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanted_module.py").write_text("import os\nthreads = os.environ['OMP_NUM_THREADS']\n")
    (tmp_path / "broken_module.py").write_text("raise SystemExit(3)\n")
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    request = {"modules": ["broken_module", "no_such_module", "wanted_module"], "path": [str(tmp_path), *sys.path]}
    monkeypatch.setenv(PRELOAD, json.dumps(request))
    before = list(sys.path)
    spawned._preload()
    assert sys.modules.pop("wanted_module").threads == "1"
    assert sys.path == before and PRELOAD not in os.environ
    assert {name: os.environ[name] for name in ONE_THREAD if name in os.environ} == {"OMP_NUM_THREADS": "7"}
