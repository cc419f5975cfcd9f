"""Programs of the user's, each in an interpreter of its own."""

import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from pathlib import Path
from typing import Any


def run_script(path: Path, text: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a user's script in a process of its own; it must end well and print nothing to stderr but notices."""
    path.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert (done.returncode, without_notices(done.stderr)) == (0, ""), done
    return done


def run_forked(text: str) -> subprocess.CompletedProcess[str]:
    """Run a user's program in a fork of this process, in a session of its own. It need not import torch: 2 s less."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                sys.stdout, sys.stderr = out, err
                os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
                sys.modules["__main__"] = module = types.ModuleType("__main__")
                exec(compile(textwrap.dedent(text), "program", "exec"), module.__dict__)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush(), err.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess("program", code, out.read(), err.read())


def without_notices(stderr: str) -> str:
    """What a program has written, without the loader's lines on what it has dealt with."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "(shown once; the logger 'sharded_" not in line)
