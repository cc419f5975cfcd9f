"""MosaicML streaming: MDS shards on the disk are read by several workers, each sample once.

Its datasets keep shared memory until their process ends, so each test is a program of its own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from indices import BOTH, IN_FRAMEWORKS

pytestmark = [
    *IN_FRAMEWORKS,
    pytest.mark.skipif(importlib.util.find_spec("streaming") is None, reason="needs mosaicml-streaming"),
]

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
from indices import LOADERS
import streaming

if __name__ == "__main__":
    folder, name, num_workers = sys.argv[2], sys.argv[3], int(sys.argv[4])
    with streaming.MDSWriter(out=folder, columns={"x": "int"}, size_limit=128) as writer:
        for index in range(24):
            writer.write({"x": index})
    data = streaming.StreamingDataset(local=folder, batch_size=4)
    loader = LOADERS[name](data, batch_size=4, num_workers=num_workers)
    print(json.dumps([[batch["x"].tolist() for batch in loader] for _ in range(2)]))
"""


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_comes_once(make: Any, num_workers: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    name = "drop-in" if make.__name__ == "DataLoader" else "sharded"
    command = [sys.executable, "program.py", str(Path(__file__).parent), str(tmp_path / "mds"), name, str(num_workers)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=100)
    assert done.returncode == 0, done.stderr
    for batches in json.loads(done.stdout.splitlines()[-1]):
        assert sorted(sum(batches, [])) == list(range(24))
        assert name == "drop-in" or sum(batches, []) == list(range(24))  # by index
