"""What users install: the metadata that a package index shows, the files of sdist and wheel, what works after it.

Type checkers find the package after ``pip install`` and ``pip install -e``, and know what a user's loader yields.
"""

import configparser
import html
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sharded_loader import __version__

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = runpy.run_path(str(ROOT / "setup.py"))
long_description: Callable[[str, str | None], str] = SETUP["long_description"]
source_address: Callable[[str], str | None] = SETUP["source_address"]
SOURCE = "https://git.example/team/project"

pytestmark = pytest.mark.timeout(400)
ON_LINKS = pytest.mark.skipif(sys.platform == "win32", reason="the environments are made of symbolic links")


def attempt(*command: str | Path, where: Path, limit: float = 100) -> subprocess.CompletedProcess[str]:
    """Run a command, which imports nothing of the checkout."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    options = {"cwd": where, "env": env, "timeout": limit, "text": True, "encoding": "utf-8"}
    return subprocess.run([str(part) for part in command], capture_output=True, **options)


def run(*command: str | Path, where: Path, limit: float = 100) -> str:
    """What a command prints; it must end well."""
    done = attempt(*command, where=where, limit=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files() -> list[str]:
    """The files of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked sdist has no list of its files")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", where=ROOT).split("\0")
    return sorted(name for name in set(listed) if (ROOT / name).is_file())


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build an ``sdist`` or a ``wheel`` as pip does, with the setuptools that is installed."""
    call = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", call, folder, where=source)
    return next(folder.iterdir())


def metadata(wheel: Path) -> importlib.metadata.Distribution:
    """What a wheel says of itself."""
    name = next(path.name for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
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


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the sdist of this checkout is unpacked into. A build leaves something beside what it reads."""
    source, unpacked = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("unpacked")
    for name in files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    with tarfile.open(build("sdist", source, tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built of the sdist."""
    source = Path(shutil.copytree(sdist, tmp_path_factory.mktemp("source") / "sdist"))
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel, and with nothing but what it requires."""
    made = Environment(tmp_path_factory.mktemp("normal"), required(wheel))
    made.install(wheel)
    return made


@pytest.fixture(scope="session")
def editable_sdist(sdist: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with an editable install of the sdist and what the tests require."""
    source = Path(shutil.copytree(sdist, tmp_path_factory.mktemp("source") / "sdist"))
    packages = {"setuptools", *required(wheel, ["test"])}
    made = Environment(tmp_path_factory.mktemp("editable"), packages)
    made.install("-e", f"{source}[test]")
    return made


def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def targets(markdown: str) -> tuple[list[str], list[str], str]:
    """The links and pictures of a page, those of them that are relative, and the text."""
    page = MarkdownIt("commonmark").enable("table").render(markdown)
    found = re.findall(r' (?:href|src|srcset)="([^"]*)"', page)
    relative = [target for target in found if not re.match(r"https?:|mailto:|#", target)]
    return found, relative, html.unescape(re.sub(r"<[^>]+>", "", page))


def test_without_an_address_a_package_index_shows_no_dead_link() -> None:
    _, relative, text = targets(long_description(README, None))
    assert relative == []
    pictures = re.findall(r"!\[([^\]]+)\]", README)
    assert pictures and [one for one in pictures if one not in text] == []


def test_with_an_address_links_of_the_readme_lead_to_files_of_the_repository_and_its_text_and_code_stay() -> None:
    _, before, text_before = targets(README)
    found, relative, text = targets(long_description(README, SOURCE))
    ours = [re.fullmatch(rf"{SOURCE}/(blob|raw)/HEAD/([^#]+)(#.*)?", target) for target in found]
    assert len([one for one in ours if one]) == len(before) > 0
    assert [one[2] for one in ours if one and not (ROOT / one[2]).exists()] == []
    assert (relative, text) == ([], text_before)
    fences = re.findall(r"^```.*?^```$", README, re.DOTALL | re.MULTILINE)
    assert fences
    for source in (SOURCE, None):
        assert re.findall(r"^```.*?^```$", long_description(README, source), re.DOTALL | re.MULTILINE) == fences


@pytest.mark.parametrize(
    ("markdown", "linked", "plain"),
    [
        ("[a](b.md)", f"[a]({SOURCE}/blob/HEAD/b.md)", "a"),
        ("[a](./b/c.md#d)", f"[a]({SOURCE}/blob/HEAD/b/c.md#d)", "a"),
        ('[a](b.md "title")', f'[a]({SOURCE}/blob/HEAD/b.md "title")', "a"),
        ("[`a[0]`](b.md)", f"[`a[0]`]({SOURCE}/blob/HEAD/b.md)", "`a[0]`"),
        ("![a](b.png)", f"![a]({SOURCE}/raw/HEAD/b.png)", "a"),
        ("[![a](b.png)](c.md)", f"[![a]({SOURCE}/raw/HEAD/b.png)]({SOURCE}/blob/HEAD/c.md)", "a"),
        ("[![a](b.png)](https://c.de)", f"[![a]({SOURCE}/raw/HEAD/b.png)](https://c.de)", "[a](https://c.de)"),
        *[
            (same, same, same)
            for same in (
                "[a](https://b.example)",
                "![a](https://b.example/c.png)",
                "[a](#b)",
                "[a](mailto:b@c.example)",
                "`shards[0](x)`",
                "``a ` [b](c.md)``",
                "x[0] (y)",
                "```python\nf[a](b)\n```",
                "~~~\n[a](b.md)\n```\n[a](b.md)\n~~~",
                "  ```\n  [a](b.md)\n  ```",
            )
        ],
        ("` [a](b.md)\n\nand ` b", f"` [a]({SOURCE}/blob/HEAD/b.md)\n\nand ` b", "` a\n\nand ` b"),
    ],
)
def test_links_to_files_are_changed_and_nothing_else(markdown: str, linked: str, plain: str) -> None:
    assert long_description(markdown, SOURCE) == linked
    assert long_description(markdown, SOURCE + "/") == linked
    assert long_description(markdown, None) == plain


def test_versions_and_licences_are_told_alike_everywhere() -> None:
    cff, metadata = (ROOT / "CITATION.cff").read_text(encoding="utf-8"), config()["metadata"]
    citation = dict(re.findall(r"^([\w-]+): (\S.*)$", cff, re.MULTILINE))
    assert metadata["version"] == citation["version"] == __version__
    assert metadata["license_expression"] == citation["license"]
    assert metadata["name"] == citation["title"]
    assert metadata["author"] in cff


def test_classifiers_name_the_pythons_that_are_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)$", config()["metadata"]["classifiers"], re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tested = re.search(r"^PYTHONS = (.*)$", makefile, re.MULTILINE)
    assert tested is not None
    assert named == [name.removeprefix("python") for name in tested[1].split()]
    assert config()["options"]["python_requires"] == f">={named[0]}"


def test_lower_bounds_are_the_versions_that_make_test_lowest_installs() -> None:
    required = [Requirement(line) for line in config()["options"]["install_requires"].split("\n") if line]
    bounds = {one.name: str(one.specifier).removeprefix(">=") for one in required}
    assert [name for name, bound in bounds.items() if not bound] == []
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    installed = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert installed == {name: bound for name, bound in bounds.items() if name != "torch"}


@pytest.mark.slow
def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    packed = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    expected = set(files()) - {".gitignore"}
    assert {"CHANGELOG.md", "Makefile", "mkdocs.yml", "constraints-ray.txt", "tests/golden/plain.rec"} <= expected
    assert sorted(expected - packed) == []
    made = {name for name in packed - expected if not name.startswith("sharded_loader.egg-info/")}
    assert made == {"PKG-INFO"}


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert "sharded_loader/py.typed" in names
    assert {"sharded_loader/instruments/page.css", "sharded_loader/instruments/page.html"} <= names
    assert names == {name for name in files() if name.startswith("sharded_loader/")}


@pytest.mark.slow
def test_the_wheel_says_what_a_package_index_shows(wheel: Path) -> None:
    said = metadata(wheel).metadata
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said.get_all("License") is None
    assert said["Author"] == "The sharded_loader authors"
    assert [line for line in said.get_all("Classifier") or () if "License" in line or "OS Independent" in line] == []
    assert said["Description-Content-Type"] == "text/markdown"
    address = source_address((ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert said["Description"].strip() == long_description(README, address).strip()
    assert said.get_all("Project-URL", []) == ([f"Source, {address}"] if address else [])


@pytest.mark.slow
def test_an_address_in_setup_cfg_is_enough(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = Path(shutil.copytree(sdist, tmp_path_factory.mktemp("source") / "sdist"))
    changed = config()
    changed["metadata"]["project_urls"] = f"\nSource = {SOURCE}"
    with (source / "setup.cfg").open("w", encoding="utf-8") as file:
        changed.write(file)
    said = metadata(build("wheel", source, tmp_path_factory.mktemp("built"))).metadata
    assert said.get_all("Project-URL") == [f"Source, {SOURCE}"]
    assert said["Description"].strip() == long_description(README, SOURCE).strip()


@ON_LINKS
@pytest.mark.slow
def test_a_wheel_works_beside_what_it_requires(wheel: Path, installed_wheel: Environment) -> None:
    where, batches = installed_wheel.run(
        "python",
        "-c",
        "import sharded_loader\n"
        "from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader\n"
        "pool = ProcessPool(2, start_method='spawn')\n"
        "print(sharded_loader.__file__)\n"
        "print([batch.tolist() for batch in ShardedDataLoader(range(5), 2, pool=pool)])\n",
    ).splitlines()
    assert where.startswith(str(installed_wheel.folder))
    assert batches == "[[0, 1], [2, 3], [4]]"
    others = installed_wheel.packages() - {"sharded-loader"}
    assert others == required(wheel)
    assert "pytest" not in others

    # Its command runs, or says what to install.
    done = attempt(installed_wheel.folder / "bin" / "sharded-loader", "--version", where=installed_wheel.folder)
    said = re.escape(f"sharded-loader {__version__}") if done.returncode == 0 else "sharded-loader: .*pip install .*"
    assert re.search(said, done.stdout + done.stderr)


@ON_LINKS
@pytest.mark.slow
def test_in_an_unpacked_sdist_the_commands_of_the_readme_work(editable_sdist: Environment) -> None:
    assert __version__ in editable_sdist.run("sharded-loader", "--version")
    assert editable_sdist.run("sharded-loader", "demo", limit=200)
    where = editable_sdist.run("python", "-c", "import sharded_loader; print(sharded_loader.__file__)").strip()
    root = Path(where).parents[1]
    assert root != ROOT
    assert (root / "PKG-INFO").exists(), "not the sdist"
    some = [f"tests/{one}.py" for one in ("test_structure", "sampling/test_golden_sampling", "docs/test_docs")]
    pytest_quickly = [editable_sdist.python, "-m", "pytest", "-q", "-m", "not slow"]
    said = run(*pytest_quickly, *some, "tests/test_packaging.py", where=root, limit=300)
    assert re.search(r"^\d{2,} passed", said.splitlines()[-1]), said


SCRIPT = """
from __future__ import annotations

import numpy as np
import torch

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.torch import DataLoader


def collate(samples: list[int]) -> tuple[torch.Tensor, int]:
    return torch.tensor(samples), len(samples)


loader = ShardedDataLoader(range(10), 4, batchify_fn=collate, last_batch="discard")
for tensor, count in loader:
    a: torch.Tensor = tensor
    b: int = count
    wrong_from_batchify_fn: str = count
by_torchs_name = ShardedDataLoader(range(10), 4, collate_fn=collate, timeout=3)
for tensor, count in by_torchs_name:
    wrong_from_torchs_name: str = count
declared: ShardedDataLoader[list[torch.Tensor]] = ShardedDataLoader(ArrayDataset(np.zeros(4), np.zeros(4)), 2)
for x, y in declared:
    c: torch.Tensor = x
wrong_from_declaration: int = declared.peek()
plain = ShardedDataLoader(range(4), 2, pool=ProcessPool(2), num_replicas="auto", on_error="skip", timeout=3)
for batch in plain:
    batch.anything()
drop_in = DataLoader(range(4), batch_size=2, collate_fn=collate)
for tensor, count in drop_in:
    wrong_from_collate_fn: str = count
for batch in DataLoader(range(4), batch_size=2):
    batch.anything()
wrong_word = ShardedDataLoader(range(4), 2, last_batch="drop")
wrong_pool = ShardedDataLoader(range(4), 2, pool="processes")
wrong_argument = ShardedDataLoader(range(4), batchsize=2)
wrong_timeout = ShardedDataLoader(range(4), 2, timeout="long")
wrong_argument_of_drop_in = DataLoader(range(4), batchsize=2)
wrong_method = ProcessPool(2, start_method="forks")
wrong_method_of_drop_in = DataLoader(range(4), num_workers=1, start_method="forks")
"""


@ON_LINKS
@pytest.mark.parametrize("how", ["installed_wheel", "editable_sdist"])
@pytest.mark.parametrize(
    "checker", [pytest.param("mypy", marks=pytest.mark.slow), pytest.param("pyright", marks=pytest.mark.frameworks)]
)
def test_type_checkers_know_what_a_loader_yields(
    checker: str, how: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Outside of the checkout: they have to find the package as a user's do."""
    environment: Environment = request.getfixturevalue(how)
    (tmp_path / "script.py").write_text(SCRIPT)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--python-executable"]
    pyright = [Path(sysconfig.get_path("scripts")) / "basedpyright", "--level", "error", "--pythonpath"]
    command = [*(mypy if checker == "mypy" else pyright), environment.python, "script.py"]
    found = attempt(*command, where=tmp_path, limit=300)
    wrong = {int(line.split(":")[1]) for line in found.stdout.splitlines() if " error: " in line}
    lines = SCRIPT.splitlines()
    assert wrong == {n + 1 for n in range(len(lines)) if "wrong_" in lines[n]}, found.stdout + found.stderr
