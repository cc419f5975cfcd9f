"""Programs of the user's, each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def run_script(path: Path, text: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a user's script in a process of its own; it must end well and print nothing to stderr.

    Except the loader's notices: many scripts kill workers.
    """
    path.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=100, check=False, **options
    )
    assert (done.returncode, without_notices(done.stderr)) == (0, ""), done
    return done


def without_notices(stderr: str) -> str:
    """What a program has written, without the loader's lines on what it has dealt with."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "(shown once; the logger 'sharded_" not in line)
