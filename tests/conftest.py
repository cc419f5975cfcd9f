"""What every test promises: it leaves no process, thread, descriptor or shared-memory name behind."""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import logging
import math
import mmap
import multiprocessing.resource_tracker
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # pytest does so; `python -m tests.fuzz` does not

import hypothesis
import injection
import multiprocess.resource_tracker
import numpy as np
import psutil
import pytest
import pytest_timeout
from _pytest.doctest import DoctestModule

from sharded_loader import InlinePool, OnError, Placement, ProcessPool, RayPool, ShardedDataLoader, ThreadPool
from sharded_loader.base import host_clock
from sharded_loader.base.errors import LoaderClosedError
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.process.start import start_forkserver

# Exempt: the standard library's own helpers, which live as long as the program, and Ray's own processes.
# Those of our actors are called ray::Loader...; what else runs there belongs to Ray.
HELPERS = ("resource_tracker", "forkserver", "/ray/", "moto.server")
# Exempt: CUDA's driver keeps its devices and event counters open until the process ends, matplotlib its fonts.
KEPT_OPEN = re.compile(r"^/dev/nvidia|^anon_inode:\[eventfd\]|^/(proc|sys)/.*nvidia|\.ttf$")
PATIENCE = 60.0

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no reason to fail
hypothesis.settings.register_profile("quick", deadline=None, max_examples=12)
hypothesis.settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs behind it: `make test &`
    signal.signal(signal.SIGINT, signal.default_int_handler)

WITH_RAY = os.environ.get("SHARDED_LOADER_TEST_POOLS") == "ray"
"""Run the tests of all pools over `RayPool`, and no other: ``make test-ray``."""

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PORTABLE = os.environ.get("SHARDED_LOADER_TEST_PORTABLE")
"""The system that this one stands in for: see ``tests/portable``."""

PROCESS_POOLS: tuple[str, ...] = ("fork", "forkserver", "spawn") if sys.platform != "win32" else ("spawn",)
POOLS: tuple[str, ...] = ("inline", "thread", *PROCESS_POOLS)
if WITH_RAY:
    PROCESS_POOLS, POOLS = (), ("inline", "ray")

# Every start method, by name; those to which the program's memory has to be sent; for what is harder under spawn.
METHODS = pytest.mark.parametrize("method", PROCESS_POOLS)
SPAWNED = pytest.mark.parametrize("method", [name for name in PROCESS_POOLS[::-1] if name != "fork"])
SPAWN_FIRST = pytest.mark.parametrize("method", PROCESS_POOLS[::-1])

_quick = False  # whether only the quick tests run


def pytest_configure(config: pytest.Config) -> None:
    """The quick tests try an eighth of the examples. Tests may set a number of their own."""
    global _quick
    _quick = "not slow" in config.option.markexpr
    if _quick:
        hypothesis.settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, Any, list[pytest.Collector]]:
    """No doctests of the tests: there are none, and to look for them takes a second."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing that imports make is garbage: a fifth of the time would go into collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `frameworks`, `ray` or `stores` run where ``-m`` names these."""
    apart = {name for name in ("frameworks", "ray", "stores") if name not in config.option.markexpr}
    left_out = {item: None for item in items if not apart.isdisjoint(mark.name for mark in item.iter_markers())}
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, Any, None]:
    """Choose the quick ones of a test's combinations of arguments. The quick tests do not even make the slow ones.

    Of a test that is marked `costly`, as many combinations stay quick as the mark says, evenly spread. Of several
    `parametrize` of a test, so many that each value of each argument is among them. `covering` asks for more.
    """
    yield
    calls, whole = metafunc._calls, [*metafunc.definition.iter_markers()]

    def mark(call: Any, name: str) -> pytest.Mark | None:
        return next((one for one in [*whole, *call.marks] if one.name == name), None)

    first: dict[str, str] = {}
    for call in calls:
        if not mark(call, "slow") and _starts_late(call.id, first, mark(call, "also_spawned") is not None):
            call.marks.append(pytest.mark.slow.mark)
    costly = [] if WITH_RAY else [call for call in calls if mark(call, "costly") and not mark(call, "slow")]
    keep = next(iter(mark(costly[0], "costly").args), 1) if costly else 0  # evenly spread
    quick = {len(costly) * (2 * number + 1) // (2 * keep) for number in range(keep)}
    for call in (call for number, call in enumerate(costly) if number not in quick):
        call.marks.append(pytest.mark.slow.mark)
    quickly = [call for call in calls if not mark(call, "slow")]
    chosen = _cover([{*call.indices.items()} for call in quickly])
    for call in (call for number, call in enumerate(quickly) if number not in chosen and not WITH_RAY):
        call.marks.append(pytest.mark.slow.mark)
    if _quick:
        metafunc._calls = [call for call in calls if not mark(call, "slow")] or calls[:1]


def _cover(parts: list[set[Any]]) -> set[int]:
    """Numbers of few sets that have together what all of them have."""
    missing, chosen = set().union(*parts), set()
    while missing:
        best = max(range(len(parts)), key=lambda number: len(parts[number] & missing))
        chosen.add(best)
        missing -= parts[best]
    return chosen


def _starts_late(names: str, first: dict[str, str], also_spawned: bool) -> bool:
    """Whether a test of several start methods is slow: under all but its first one, or spawn if it is marked so."""
    method = next((name for name in names.split("-") if name in PROCESS_POOLS), None)
    chosen = first.setdefault(re.sub(rf"\b({'|'.join(PROCESS_POOLS) or '(?!)'})\b", "any", names), method or "")
    return method is not None and method != chosen and not (method == "spawn" and also_spawned)


def covering(strength: int = 1, spawned: bool = False, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test with all combinations. Those that bring no new value are slow.

    With strength 0 all but one are slow, with 2 those that bring no new pair of values together, with 3 no new three.
    Those that start an interpreter are slow too, unless one of them is ``spawned`` quickly all the same.
    """
    rows = list(itertools.product(*parameters.values()))
    late = {"forkserver"} if spawned or "fork" not in PROCESS_POOLS else {"forkserver", "spawn"}
    parts = [
        {tuple((i, id(row[i])) for i in columns) for columns in itertools.combinations(range(len(row)), strength)}
        if late.isdisjoint(value for value in row if isinstance(value, str))
        else set()
        for row in rows
    ]
    quick = _cover(parts)
    slow = () if _quick and quick else pytest.mark.slow
    marked = [pytest.param(*row, marks=() if n in quick else slow) for n, row in enumerate(rows) if n in quick or slow]
    return pytest.mark.parametrize(tuple(parameters), marked)


def pytest_collection_finish() -> None:
    _tidy_memory()


_forks: list[None] = []  # since the pages were joined
_modules = 0  # that were imported when the memory was frozen
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _forks.append(None))


def _tidy_memory() -> None:
    """Leave what imports made out of collections: one takes 20 ms instead of 400. Join the pages that forks split."""
    global _modules
    if len(sys.modules) > _modules + 100:
        _modules = len(sys.modules)
        # Torch's fifty loggers pass their records on to the root: pytest adds six handlers to each that does not.
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger) and not logger.name.startswith("sharded_loader"):
                logger.propagate = True
        gc.collect()
        gc.freeze()
    elif len(_forks) < 100:
        return
    _forks.clear()
    _join_pages()


def _join_pages() -> None:
    """Move the memory so far into huge pages, where Linux does. A fork copies entries: half of what its test costs."""
    huge, collapse = 1 << 21, 25  # MADV_COLLAPSE, Linux 6.1
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, name = [*line.split(maxsplit=5), ""][:6]
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, size = -(-begin // huge) * huge, end // huge * huge - -(-begin // huge) * huge
        if rights == "rw-p" and name in ("", "[heap]") and size > 0:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), collapse)  # without it all is as before


_due: tuple[float, Any, Any] | None = None  # when the test that runs has had its time


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Let one thread watch the time of all tests. To start and end one for each takes a tenth of a small test.

    A forked child touches every thread that its parent has had and not forgotten. Thousands of them cost it 30 ms.
    """
    global _due
    if settings.method != "thread":
        return None
    if _due is None:
        threading.Thread(target=_watch, daemon=True).start()
    _due = time.monotonic() + settings.timeout, item, settings
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> None:
    global _due
    if _due is not None:
        _due = math.inf, None, None


def _watch() -> None:
    while True:
        time.sleep(1)
        due, item, settings = _due or (math.inf, None, None)
        if time.monotonic() > due:
            pytest_timeout.timeout_timer(item, settings)  # prints the stacks of all threads, and ends the process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Skip a test that asks by itself for what the other system lacks. If the package asks for it, the test fails."""
    try:
        return (yield)
    except (AttributeError, ValueError) as error:
        asked = [
            frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(ROOT)
        ]
        if "this platform has 'spawn'" in str(error) or (f" on {PORTABLE}" in str(error) and "/tests/" in asked[-2]):
            pytest.skip(f"POSIX: {error}")
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        _tidy_memory()


def make_pool(name: str, num_workers: int = 2, **options: Any) -> Pool:
    """A pool by the name that tests are parametrised with."""
    if name == "inline":
        return InlinePool()
    if name in ("ray", "thread"):
        return RayPool(num_workers, num_cpus=0, **options) if name == "ray" else ThreadPool(num_workers, **options)
    return ProcessPool(num_workers, start_method="spawn" if sys.platform == "win32" else name, **options)


def made(*args: Any, prefetch_epochs: bool | None = None, **options: Any) -> ShardedDataLoader:
    """A loader from options in one dict, those of `Placement` and `OnError` among them."""
    of_devices = {field.name for field in dataclasses.fields(Placement)} & {*options} - {"device"}
    if of_devices:
        name = "device" if options.get("devices") is None else "devices"
        options[name] = Placement(options.get(name), **{option: options.pop(option) for option in of_devices})
    if (limit := options.pop("max_skipped", None)) is not None:
        options["on_error"] = OnError(options.get("on_error", "raise"), limit)
    return ahead(ShardedDataLoader(*args, **options), prefetch_epochs)


def with_errors(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of an iterator, and its errors in their places."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except Exception as error:
            yield error


def let_workers_finish(loader: Any, batches: Any, at_least: int = 0) -> None:
    """Wait until all batches in flight, and so many, are finished, and begin no copy."""
    while len(batches.run.window) < at_least or any(entry.result is None for entry in batches.run.window):
        loader._pipeline.runs.store(loader._pipeline.pool.wait(True))


def ahead(loader: ShardedDataLoader, prefetch_epochs: bool | None) -> ShardedDataLoader:
    """A loader that reads the next epoch ahead, or not. None: by its pool."""
    loader.prefetch_epochs = prefetch_epochs
    return loader


@contextlib.contextmanager
def ray_environment() -> Iterator[None]:
    """Inside, Ray is started so that actors import what tests import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield


@pytest.fixture(params=injection.HANDLERS)
def signal_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Signals whose handlers raise; the handlers are in place."""
    number = getattr(signal, request.param)
    before = signal.signal(number, injection.HANDLERS[request.param][1])
    yield request.param
    signal.signal(number, before)


@pytest.fixture(scope="session" if WITH_RAY else "module", autouse=WITH_RAY)
def ray_here(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Ray of this machine."""
    import ray

    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    with ray_environment():
        ray.init(num_cpus=4, object_store_memory=300 << 20, _node_ip_address="127.0.0.1", **quiet)
    yield ray
    ray.shutdown()


def until(condition: Callable[[], Any], seconds: float = 120.0) -> bool:
    """Wait for something that no event tells of, such as the end of another program's process; whether it has come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class HostClock:
    """A clock that stands still until a test moves it. The workers that are forked later share it."""

    def __init__(self) -> None:
        self._now = np.frombuffer(mmap.mmap(-1, 8), np.float64)
        self._now[0] = 1.0
        self._lock = multiprocessing.get_context("fork" if "fork" in PROCESS_POOLS else None).Lock()

    def __call__(self) -> float:
        return float(self._now[0])

    def move(self, seconds: float) -> None:
        with self._lock:
            self._now[0] += seconds


@pytest.fixture
def host_time(monkeypatch: pytest.MonkeyPatch) -> HostClock:
    """The clock of the whole package, which stands still. What waits for a deadline would wait for ever."""
    clock = HostClock()
    monkeypatch.setattr(host_clock, "now", clock)
    return clock


def begin(batches: Iterable[Any]) -> threading.Thread:
    """Ask for the first batch in a thread of its own, and do not wait for it. The loader may be closed meanwhile."""

    def ask() -> None:
        with contextlib.suppress(LoaderClosedError):
            next(iter(batches))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def _made_pool(request: pytest.FixtureRequest) -> Pool:
    return make_pool(request.param)


# Every pool and start method, one after the other, with two workers; those that have workers; every start method.
pool = pytest.fixture(_made_pool, params=POOLS, name="pool")
worker_pool = pytest.fixture(_made_pool, params=POOLS[1:], name="worker_pool")
process_pool = pytest.fixture(_made_pool, params=PROCESS_POOLS, name="process_pool")


@pytest.fixture(params=POOLS)
def new_pool(request: pytest.FixtureRequest) -> Callable[..., Pool]:
    """Makes pools of one kind, for tests that need several."""
    return lambda num_workers=2, **options: make_pool(request.param, num_workers, **options)


def _descendants() -> list[int]:
    """As the kernel lists them, where it does so: psutil looks at all processes, which takes 15 ms."""
    if not os.path.exists(f"/proc/self/task/{threading.get_native_id()}/children"):
        return [child.pid for child in psutil.Process().children(recursive=True)]
    found = [os.getpid()]
    for pid in found:  # also of those that are added on the way
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found[1:]


_helpers: list[int] = []  # all that ran at the last look, if they were helpers; no other has got one's number since


def _processes() -> set[int]:
    global _helpers
    pids, found = _descendants(), set()
    if pids == _helpers:
        return found
    _helpers = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            command = " ".join(child.cmdline())
            if any(name in command for name in HELPERS) or re.match(r"ray::(?!Loader)", command):
                _helpers.append(pid)
            elif child.status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def _with_ray() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _threads() -> set[threading.Thread]:
    # Ray calls back from threads of its own, which Python has not started.
    ray_calls = threading._DummyThread if _with_ray() else ()
    return {thread for thread in threading.enumerate() if thread.is_alive() and not isinstance(thread, ray_calls)}


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    if _with_ray():
        return found  # connections of Ray's to whom it has talked
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {name: to for name, to in found.items() if not KEPT_OPEN.search(to)}


def shared_memory_names() -> set[str]:
    """Names that the library made in this process, or in one that has ended: those of one that runs are its own affair.

    They hold the number of the process that made them: ``sharded_loader-123-...``.
    """
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    ours = {name for name in names if name.startswith("sharded_loader-")}
    makers = {name: name.split("-")[1] for name in ours}
    running = {pid for pid in makers.values() if pid.isdecimal() and psutil.pid_exists(int(pid))} - {f"{os.getpid()}"}
    return {name for name in ours if makers[name] not in running}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves a process, a thread, a descriptor or a shared-memory name."""
    start_helpers()
    before = here()
    yield
    deadline = time.monotonic() + PATIENCE
    rounds = itertools.count()
    while left := remains(*before):
        if time.monotonic() > deadline:
            for pid in _processes():
                psutil.Process(pid).kill()  # or the next test would be blamed too
            pytest.fail(f"left behind: {left}")
        # What is ending may still be in the process table. A collection is dear, and mostly not what it needs.
        time.sleep(0.01)
        if next(rounds) % 10 == 2:
            gc.collect()


def here() -> tuple[set[threading.Thread], dict[int, str], set[str]]:
    """Threads, descriptors and shared-memory names of this process."""
    return _threads(), _descriptors(), shared_memory_names()


def remains(threads: set[threading.Thread], descriptors: dict[int, str], shared_memory: set[str]) -> dict[str, Any]:
    left = {
        "processes": _processes(),
        "threads": _threads() - threads,
        "descriptors": {fd: to for fd, to in _descriptors().items() if descriptors.get(fd) != to},
        "shared memory": shared_memory_names() - shared_memory,
    }
    return {kind: items for kind, items in left.items() if items}


@functools.cache
def start_helpers() -> None:
    """Start the forkservers and the resource trackers once, so that no test is blamed for their descriptors."""
    if "forkserver" in PROCESS_POOLS:
        start_forkserver()
    if multiprocessing.get_all_start_methods()[0] == "forkserver":  # as since Python 3.14, for torch too
        from multiprocessing.forkserver import ensure_running  # fails where there is none

        ensure_running()
    if os.name == "posix" or PORTABLE:
        multiprocess.resource_tracker.ensure_running()
        multiprocessing.resource_tracker.ensure_running()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two accelerators that do their work late, in the place of those that torch knows."""
    import simulated

    from sharded_loader import resident
    from sharded_loader.devices import copies, names, placement
    from sharded_loader.extend import engine

    made = simulated.Machine()
    for module in (engine, names):  # engine looks its names up once, so the real one first
        monkeypatch.setattr(module, "accelerators", lambda: made.devices)
    monkeypatch.setattr(placement, "streams_of", made.streams_of)
    monkeypatch.setattr(placement, "indexed", lambda device: device)
    monkeypatch.setattr(copies, "Background", made.background)
    for name, function in made.of_rows().items():
        monkeypatch.setattr(resident, name, function)
    yield made
    for background in made.backgrounds:
        background.close()
    assert made.faults == []


@pytest.fixture(scope="session")
def cuda() -> Any:
    """The first GPU; what CUDA opens and starts at its first use is there before a test is watched."""
    import torch

    from sharded_loader.devices.accelerator import Registrar, Streams

    device = torch.device("cuda", 0)
    with torch.cuda.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cuBLAS, in the thread of the backward pass: once in a process
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)).to(device)
        pinned = torch.ones(8, 3, 8, 8).pin_memory()
        with torch.cuda.stream(torch.cuda.Stream(device)), torch.autocast("cuda", dtype=torch.bfloat16):
            model(pinned.to(device, non_blocking=True)).sum().backward()
        torch.cuda.synchronize(device)
        with mmap.mmap(-1, 1 << 16) as locked:
            (Registrar(Streams(device), lambda: None).register(locked) or (lambda: None))()
    return device
