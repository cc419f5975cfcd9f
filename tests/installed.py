"""Environments of users: the package installed as they install it, beside only what it requires.

    the files of the checkout -> sdist -> wheel -> an environment

Nothing is fetched: an environment links to the packages of the one that runs the tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ON_LINKS = pytest.mark.skipif(sys.platform == "win32", reason="the environments are made of symbolic links")
NOT_OURS = (".git", ".venv*", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist", "site", "__pycache__", "*.pyc")
"""What lies in a checkout and in no repository; it is in .gitignore too."""


def attempt(*command: str | Path, where: Path, limit: float = 100) -> subprocess.CompletedProcess[str]:
    """Run a command, which imports nothing of the checkout."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=where,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=limit,
    )


def run(*command: str | Path, where: Path, limit: float = 100) -> str:
    """What a command prints; it must end well."""
    done = attempt(*command, where=where, limit=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files() -> list[str]:
    """The files of the repository. An unpacked sdist has no list of them: all that belongs to it."""
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", where=ROOT).split("\0")
        return sorted(name for name in set(listed) if (ROOT / name).is_file())
    ignored = shutil.ignore_patterns(*NOT_OURS, "PKG-INFO")
    found = []
    for folder, folders, names in os.walk(ROOT):
        left_out = ignored(folder, [*folders, *names])
        folders[:] = {*folders} - left_out
        found += [Path(folder, name).relative_to(ROOT).as_posix() for name in {*names} - left_out]
    return sorted(found)


def copy(folder: Path) -> Path:
    """The files of the repository, in a folder of their own: a build leaves something beside what it reads."""
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build an ``sdist`` or a ``wheel`` as pip does, with the setuptools that is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    call = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", call, folder, where=source)
    (built,) = folder.iterdir()
    return built


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def metadata(wheel: Path) -> importlib.metadata.Distribution:
    """What a wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    return importlib.metadata.PathDistribution(zipfile.Path(wheel, f"{name}/"))


def required(wheel: Path, extras: Iterable[str] = ()) -> set[str]:
    """The names of the packages that a wheel needs here, and what these need."""
    own = metadata(wheel)
    ours = canonicalize_name(own.metadata["Name"])
    found = [(ours, extra) for extra in ("", *extras)]
    for name, extra in found:  # also of those that are added on the way
        package = own if name == ours else importlib.metadata.distribution(name)
        for requirement in map(Requirement, package.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = [(canonicalize_name(requirement.name), one) for one in ("", *requirement.extras)]
                found += [one for one in needed if one not in found]
    return {name for name, _ in found} - {ours}


class Environment:
    """A virtual environment without pip, which has the packages of this one that are named."""

    def __init__(self, folder: Path, packages: Iterable[str]) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder, where=folder.parent)
        self.folder, self.python = folder, folder / "bin" / "python"
        site = Path(sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"])
        for package in map(importlib.metadata.distribution, packages):  # its files and folders, metadata among them
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                target = Path(str(package.locate_file(top)))
                if not (site / top).exists():
                    (site / top).symlink_to(target, target_is_directory=target.is_dir())

    def install(self, *what: str | Path) -> None:
        """``pip install`` without a network: whatever is required must be there."""
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        run(*pip, "install", "--no-index", "--no-build-isolation", *what, where=self.folder, limit=200)

    def run(self, *command: str | Path, limit: float = 100) -> str:
        """What a program of the environment prints; it must end well."""
        program, *arguments = command
        return run(self.folder / "bin" / program, *arguments, where=self.folder, limit=limit)

    def packages(self) -> set[str]:
        """The names of all that is installed."""
        text = "import importlib.metadata as m; print(*(d.metadata['Name'] for d in m.distributions()))"
        return {canonicalize_name(name) for name in self.run("python", "-c", text).split()}
