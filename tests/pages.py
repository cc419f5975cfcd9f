"""The code on Markdown pages: how it is found, how it runs, and what it must print.

blocks(page, "python")            -> the code blocks of one language
promised(block)                   -> the lines that it prints, as its comments ``# -> ...`` say
run_block(block, folder)          -> what it prints, as a program of its own
run_together(commands, folder)    -> what commands print that run side by side
"""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

# What the first word of a command stands for.
LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
# Goes before a block that imports torchvision, or a library that does: see tests/frameworks/indices.py.
WITH_LIBRARIES = "import indices\n"


def blocks(page: Path | str, language: str) -> list[str]:
    """The code blocks of a page, or of a part of its text."""
    text = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
    return [textwrap.dedent(block) for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def promised(block: str) -> list[str]:
    """What a block prints: the comment below a print says it."""
    return re.findall(r"^ *# -> (.*)$", block, re.MULTILINE)


def start(command: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command of a page in a folder, with more environment variables."""
    search = [str(Path(__file__).with_name("frameworks")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [*LAUNCHERS[command[0]], *command[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def run_together(commands: Sequence[Sequence[str]], folder: Path, timeout: float = 280, **variables: str) -> list[str]:
    """Run commands side by side, as on several machines; the lines that they print to stdout, one after the other."""
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            running.append(stack.enter_context(start(command, folder, **variables)))
            stack.callback(running[-1].terminate)  # only if another one has failed or hangs
        printed = [program.communicate(timeout=timeout) for program in running]
    assert [program.returncode for program in running] == [0] * len(running), "\n".join(err for _, err in printed)
    return [line for out, _ in printed for line in out.splitlines()]


def run_block(block: str, folder: Path, before: str = "", **variables: str) -> list[str]:
    """Run a block as a program of its own, with lines before it; the lines that it prints to stdout."""
    (folder / "program.py").write_text(before + block, encoding="utf-8")
    return run_together([["python", "-W", "ignore", "program.py"]], folder, **variables)


def kept(block: str, printed: Sequence[str]) -> list[str]:
    """Of the lines that were printed, those that the block promises: libraries print lines of their own."""
    return [line for line in printed if line in promised(block)]
