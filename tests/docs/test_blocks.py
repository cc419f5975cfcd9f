"""What the code blocks of the README and of the documentation show is what happens.

A page in docs/recipes/ has two Python blocks: the recipe, which is ``train.py``, and in a collapsible block the program
that makes data to try it with. The recipe is started by the commands of the page; without any, by ``python train.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import WITH_LIBRARIES, blocks, kept, promised, run_block, run_together

ROOT = Path(__file__).resolve().parents[2]


def is_script(block: str) -> bool:
    """Whether a block runs as it stands: nothing in it is left out as ``...``."""
    return not any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(ast.parse(block)))


README = blocks(ROOT / "README.md", "python")
SCRIPTS = [block for block in README if is_script(block)]
SKETCHES = [block for block in README if not is_script(block)]
APART = ("import ray\n", "import pyarrow\n", "import ArrayRecordReader")
"""What blocks with other libraries import: pools/ray/test_cluster.py and storage/test_storage_dataset.py run them."""

DOCS = {
    f"{page.relative_to(ROOT / 'docs').with_suffix('').as_posix()}-{number}": block
    for page in sorted((ROOT / "docs").rglob("*.md"))
    # Run below, and by cli/test_main.py.
    if page.name not in ("integrations.md", "command.md") and page.parent.name != "recipes"
    for number, block in enumerate(blocks(page, "python"))
    if not any(line in block for line in APART)
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_of_the_readme_run_as_they_stand(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", promised(script))


@pytest.mark.parametrize("loops", SKETCHES)
def test_loops_of_the_readme_run_on_any_dataset(loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    names: dict[str, Any] = {"dataset": [(torch.zeros(3), 0)] * 300}
    exec(loops.replace('"cuda"', '"cpu"').replace("num_workers=8", "num_workers=0"), names)
    assert chosen == ([0] if "torchrun" in loops else [])  # otherwise all ranks would use GPU 0


# All blocks in one process, each as its own ``__main__``: to import torch for every one would take a minute.
RUN = """
import contextlib, io, json, sys, traceback, types
ours = sys.modules["__main__"]
done = []
for block in json.load(sys.stdin):
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            exec(block, module.__dict__)
        except BaseException:
            traceback.print_exc()
    done.append([printed.getvalue(), errors.getvalue()])
print(json.dumps(done))
"""


@pytest.mark.lint
def test_nothing_is_left_out_in_blocks_of_the_documentation() -> None:
    assert SCRIPTS and SKETCHES and DOCS
    assert [name for name, block in DOCS.items() if not is_script(block) or not promised(block)] == []


@pytest.mark.slow
def test_blocks_of_the_documentation_run_as_they_stand(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        input=json.dumps(list(DOCS.values())),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "written by a worker"
    ran = dict(zip(DOCS, json.loads(done.stdout), strict=True))
    assert {name: err for name, (_, err) in ran.items() if err} == {}
    assert {name: out.splitlines() for name, (out, _) in ran.items()} == {n: promised(DOCS[n]) for n in DOCS}


# -- docs/integrations.md ----------------------------------------------------------------------------------------------

INTEGRATIONS = {
    section.partition("\n")[0]: block
    for section in (ROOT / "docs/integrations.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for block in blocks(section, "python")
}


def libraries(block: str) -> set[str]:
    """What a block imports."""
    return set(re.findall(r"^ *(?:import|from) (\w+)", block, re.MULTILINE))


@pytest.mark.frameworks
@pytest.mark.parametrize("section", INTEGRATIONS)
def test_the_code_about_other_libraries_runs(section: str, tmp_path: Path) -> None:
    assert len(INTEGRATIONS) > 10
    block = INTEGRATIONS[section]
    missing = [name for name in libraries(block) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    assert kept(block, run_block(block, tmp_path, before=WITH_LIBRARIES)) == promised(block)


# -- recipes -----------------------------------------------------------------------------------------------------------

FOLDER = ROOT / "docs/recipes"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md")) if page.stem != "index"}
FRAMEWORKS = {"accelerate", "av", "datasets", "pandas", "pyarrow", "torchmetrics", "torchvision", "transformers"}
"""What needs the extra ``frameworks``. The other recipes need the extra ``test``."""


def is_apart(name: str) -> bool:
    """Whether a recipe runs in the environment of other libraries."""
    return any(FRAMEWORKS & libraries(block) for block in blocks(PAGES[name], "python"))


def commands(name: str) -> list[list[str]]:
    """The commands of a page, started here instead of on several machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    here = PAGES[name].replace("--master-addr 10.0.0.1", f"--master-addr 127.0.0.1 --master-port {port}")
    found = [line[2:] for block in blocks(here, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(command) for command in found] or [["python", "train.py"]]


def run(commands: list[list[str]], folder: Path) -> list[str]:
    """What commands print. The caches of libraries are in the folder, and no server is asked for anything."""
    caches = {"HF_HOME": str(folder / "hugging-face"), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    return run_together(commands, folder, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", **caches)


def make_data(name: str, folder: Path) -> None:
    """What the reader of a page does first: save the recipe, and make the data."""
    for program, block in zip(("train.py", "data.py"), blocks(PAGES[name], "python"), strict=True):
        (folder / program).write_text((WITH_LIBRARIES if is_apart(name) else "") + block, encoding="utf-8")
    run([["python", "data.py"]], folder)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=getattr(pytest.mark, "frameworks" if is_apart(one) else "slow")) for one in PAGES]
)
def test_the_recipe_prints_what_its_page_says(name: str, tmp_path: Path) -> None:
    make_data(name, tmp_path)
    recipe, _ = blocks(PAGES[name], "python")
    assert kept(recipe, run(commands(name), tmp_path)) == promised(recipe)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_machines_that_start_again_read_what_is_left_also_if_there_are_fewer(tmp_path: Path) -> None:
    make_data("several-machines", tmp_path)
    assert run(commands("several-machines"), tmp_path)[-1] == "epoch 1: 160 samples"
    assert run(commands("several-machines"), tmp_path) == ["epoch 1: 40 samples"]
    one_machine = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    assert run([one_machine], tmp_path) == ["epoch 1: 40 samples"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_go_on_with_the_global_batches_of_three(tmp_path: Path) -> None:
    make_data("any-cluster", tmp_path)
    three, two = (["torchrun", "--standalone", f"--nproc-per-node={n}", "train.py"] for n in (3, 2))
    assert run([three], tmp_path) == run([two], tmp_path) == promised(blocks(PAGES["any-cluster"], "python")[0])


@pytest.mark.lint
@pytest.mark.parametrize("name", PAGES)
def test_a_recipe_is_short_and_its_page_complete(name: str) -> None:
    recipe, _ = blocks(PAGES[name], "python")
    assert len(recipe.splitlines()) <= 30
    assert promised(recipe)
    headings = re.findall(r"^## (.*)$", PAGES[name], re.MULTILINE)
    assert headings == ["Change it for your data", "Pitfalls", "Read more"]
    before_code = PAGES[name].partition("```python")[0].partition("\n\n")[2]
    assert re.match(r"You get [^.]+\.\s", before_code)
    assert '??? example "Make some data to try it with"' in PAGES[name]


@pytest.mark.lint
def test_the_index_leads_to_every_recipe() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(([\w-]+)\.md\)", index)) == sorted(PAGES)


FOUND_BY = {
    "images": "ImageFolder",
    "hugging-face": "collate",
    "detection": "collate",
    "tar-shards": "webdataset|S3",
    "parquet": "parquet",
    "lightning": "Lightning",
}


@pytest.mark.lint
@pytest.mark.parametrize("page", FOUND_BY)
def test_a_search_for_the_words_of_the_field_finds_the_recipe(page: str) -> None:
    for word in FOUND_BY[page].split("|"):
        assert re.search(rf"\b{word}\b", PAGES[page], re.IGNORECASE if word.islower() else 0)
