"""What users install: the metadata that a package index shows, the files of sdist and wheel, what works after it."""

from __future__ import annotations

import configparser
import html
import re
import runpy
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import installed
import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement

from sharded_loader import __version__

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = runpy.run_path(str(ROOT / "setup.py"))
long_description: Callable[[str, str | None], str] = SETUP["long_description"]
source_address: Callable[[str], str | None] = SETUP["source_address"]
SOURCE = "https://git.example/team/project"

pytestmark = pytest.mark.timeout(400)


def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


# -- the README where its files are not --------------------------------------------------------------------------


class Targets:
    """The links and pictures of a page, and its text."""

    def __init__(self, markdown: str) -> None:
        page = MarkdownIt("commonmark").enable("table").render(markdown)
        self.found = re.findall(r' (?:href|src|srcset)="([^"]*)"', page)
        self.relative = [target for target in self.found if not re.match(r"https?:|mailto:|#", target)]
        self.text = html.unescape(re.sub(r"<[^>]+>", "", page))


def test_without_an_address_a_package_index_shows_no_dead_link() -> None:
    assert Targets(README).relative
    shown = Targets(long_description(README, None))
    assert shown.relative == []
    pictures = re.findall(r"!\[([^\]]+)\]", README)
    assert pictures
    assert [text for text in pictures if text not in shown.text] == []


def test_with_an_address_every_link_of_the_readme_leads_to_a_file_of_the_repository() -> None:
    found = Targets(long_description(README, SOURCE)).found
    ours = [re.fullmatch(rf"{SOURCE}/(blob|raw)/HEAD/([^#]+)(#.*)?", target) for target in found]
    assert len([one for one in ours if one]) == len(Targets(README).relative)
    assert [one[2] for one in ours if one and not (ROOT / one[2]).exists()] == []
    assert Targets(long_description(README, SOURCE)).relative == []


def test_the_text_and_the_code_of_the_readme_stay() -> None:
    assert Targets(long_description(README, SOURCE)).text == Targets(README).text
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
        (
            "[![a](b.png)](https://c.example)",
            f"[![a]({SOURCE}/raw/HEAD/b.png)](https://c.example)",
            "[a](https://c.example)",
        ),
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
        (
            "one ` [a](b.md)\n\nand ` another",
            f"one ` [a]({SOURCE}/blob/HEAD/b.md)\n\nand ` another",
            "one ` a\n\nand ` another",
        ),
    ],
)
def test_links_to_files_are_changed_and_nothing_else(markdown: str, linked: str, plain: str) -> None:
    assert long_description(markdown, SOURCE) == linked
    assert long_description(markdown, SOURCE + "/") == linked
    assert long_description(markdown, None) == plain


def test_the_address_is_set_in_one_place() -> None:
    assert source_address(
        "[metadata]\nproject_urls =\n    Docs = https://a.example\n    Source = https://b.example/?x=1"
    ) == ("https://b.example/?x=1")
    assert source_address("[metadata]\nproject_urls =\n    Docs = https://a.example\n") is None
    assert source_address("[metadata]\nname = a") is None


# -- metadata --------------------------------------------------------------------------------------------------


def test_versions_and_licences_are_told_alike_everywhere() -> None:
    citation = dict(
        re.findall(r"^([\w-]+): (\S.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    )
    metadata = config()["metadata"]
    assert metadata["version"] == citation["version"] == __version__
    assert metadata["license_expression"] == citation["license"]
    assert metadata["name"] == citation["title"]
    assert metadata["author"] in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


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


# -- what is built ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    packed = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    expected = set(installed.files()) - {".gitignore"}
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
    assert names == {name for name in installed.files() if name.startswith("sharded_loader/")}


@pytest.mark.slow
def test_the_wheel_says_what_a_package_index_shows(wheel: Path) -> None:
    said = installed.metadata(wheel).metadata
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
def test_an_address_in_setup_cfg_is_enough(sdist: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(sdist, tmp_path / "source"))
    changed = config()
    changed["metadata"]["project_urls"] = f"\nSource = {SOURCE}"
    with (source / "setup.cfg").open("w", encoding="utf-8") as file:
        changed.write(file)
    said = installed.metadata(installed.build("wheel", source, tmp_path / "built")).metadata
    assert said.get_all("Project-URL") == [f"Source, {SOURCE}"]
    assert said["Description"].strip() == long_description(README, SOURCE).strip()


# -- what works after it ---------------------------------------------------------------------------------------


@installed.ON_LINKS
@pytest.mark.slow
def test_a_wheel_works_beside_what_it_requires(wheel: Path, installed_wheel: installed.Environment) -> None:
    script = installed_wheel.folder / "script.py"
    script.write_text(
        "import sharded_loader\n"
        "from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader\n"
        "pool = ProcessPool(2, start_method='spawn')\n"
        "print(sharded_loader.__file__)\n"
        "print([batch.tolist() for batch in ShardedDataLoader(range(5), 2, pool=pool)])\n"
    )
    where, batches = installed_wheel.run("python", script).splitlines()
    assert where.startswith(str(installed_wheel.folder))
    assert batches == "[[0, 1], [2, 3], [4]]"
    others = installed_wheel.packages() - {"sharded-loader"}
    assert others == installed.required(wheel)
    assert "pytest" not in others


@installed.ON_LINKS
@pytest.mark.slow
def test_the_command_without_extras_runs_or_says_what_to_install(installed_wheel: installed.Environment) -> None:
    command = installed_wheel.folder / "bin" / "sharded-loader"
    done = installed.attempt(command, "--version", where=installed_wheel.folder)
    if done.returncode == 0:
        assert __version__ in done.stdout
    else:
        assert re.fullmatch(r"sharded-loader: .*pip install .*\n", done.stderr)


@installed.ON_LINKS
@pytest.mark.slow
def test_in_an_unpacked_sdist_the_commands_of_the_readme_work(editable_sdist: installed.Environment) -> None:
    assert __version__ in editable_sdist.run("sharded-loader", "--version")
    assert editable_sdist.run("sharded-loader", "demo", limit=200)
    where = editable_sdist.run("python", "-c", "import sharded_loader; print(sharded_loader.__file__)").strip()
    root = Path(where).parents[1]
    assert root != ROOT
    assert (root / "PKG-INFO").exists(), "not the sdist"
    some = [
        "tests/test_structure.py",
        "tests/sampling/test_golden_sampling.py",
        "tests/docs/test_docs.py",
        "tests/test_packaging.py",
    ]
    said = installed.run(editable_sdist.python, "-m", "pytest", "-q", "-m", "not slow", *some, where=root, limit=300)
    assert re.search(r"^\d{2,} passed", said.splitlines()[-1]), said
