"""Checks and conversions of a loader's arguments: pure functions, called by the constructor.

Each error names the argument, its value, and what to write instead.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from os import PathLike
from typing import Any, Generic, Literal

import torch
from typing_extensions import TypedDict, TypeVar

from sharded_loader.base.checks import check_function, check_int, refuse_arguments, refuse_async_iterable, refuse_class
from sharded_loader.base.described import an
from sharded_loader.base.imports import names_of, provided
from sharded_loader.base.interrupts import pass_on
from sharded_loader.base.notices import logger
from sharded_loader.batching.default import Batchify, default_batchify_fn
from sharded_loader.batching.protocol import elide
from sharded_loader.data.columns import as_dataset, named_columns
from sharded_loader.data.datasets import Dataset
from sharded_loader.data.inspection import has_own, is_stream, takes_named, takes_two
from sharded_loader.devices.names import DeviceLike
from sharded_loader.devices.transform import BatchTransform
from sharded_loader.engine.messages import ErrorAction
from sharded_loader.engine.pipeline import Pipeline
from sharded_loader.engine.pool import Pool, check_init_fn, owners
from sharded_loader.engine.split import Split, check_shares
from sharded_loader.pools.local import InlinePool, ThreadPool
from sharded_loader.pools.process.pool import ProcessPool

Batch = TypeVar("Batch", default=Any)

INSTEAD = {
    "generator": "write seed= (an int) instead",
    "multiprocessing_context": 'write pool=ProcessPool(n, start_method="spawn") instead',
    "pin_memory_device": "write device= or devices= instead",
    "in_order": "leave it out, because batches always come in order",
    "snapshot_every_n_steps": "leave it out, because state_dict() is exact after every batch",
    "pin_device_id": "write device= or devices= instead",
    "try_nopython": "leave it out",
    "start_method": 'write pool=ProcessPool(n, start_method="spawn") instead',
    "shm_size": "leave it out: shared memory grows with the batches. ProcessPool(n, max_bytes=) limits it",
    "num_threads": "write num_workers= and thread_pool=True instead",
    "ctx_list": "write devices= instead",
    "ctx": "write device= or devices= instead",
    "world_size": "write num_replicas= instead",
    "auto_reload": "leave it out, or set loader.prefetch_epochs: worker processes prefetch the next epoch",
    "prefetch_epochs": "set loader.prefetch_epochs instead",
    "max_skipped": 'write on_error=OnError("skip", limit=) instead',
    **{name: f"write pool=ProcessPool(n, {name}=) instead" for name in ("max_bytes", "max_worker_memory", "restarts")},
    **dict.fromkeys(
        ("shard_weights", "resident", "device_transform", "host_fields"),
        "give it to Placement instead: device=Placement(device, ...), or devices=Placement(devices, ...)",
    ),
}
"""Arguments of other loaders (PyTorch, torchdata, MXNet), and their replacements here."""


FLAGS = {"shuffle", "pin_memory", "thread_pool", "evaluate", "drop_last", "persistent_workers", "with_source"}
"""Arguments that are True or False."""


@dataclass(frozen=True)
class Placement:
    """Options of batches on devices: a value of ``device=`` or ``devices=``.

    Args:
        device: As the loader's argument: one device for ``device=``, a list or ``"auto"`` for ``devices=``. None leaves
            batches where the other arguments put them, by default in host memory.
        shard_weights: Relative sizes of the shards, such as ``[2, 1]``, as in `ShardedBatchSampler`. Shards with a
            positive weight get at least one sample while there are enough. Weights of 0 must come last.
        resident: Rows to keep on the devices, which then gather batches without workers: True (all), a fraction such as
            0.6, or ``"auto"`` (as many as fit). Other rows are copied batch by batch. The dataset must be an array, a
            tensor, a ``TensorDataset``, an `ArrayDataset`, or a part of one. With True or a fraction, any other dataset
            is an error, and insufficient memory a warning. Free memory is measured once, before the first batch: move
            your model to the device first, or give a fraction.
        device_transform: Function ``fn(batch)`` or ``fn(batch, rng)``, applied to each batch (or shard) on its device,
            or on the CPU without devices. ``rng`` is a NumPy generator keyed by seed, epoch, batch and shard. Must
            return dense tensors.
        host_fields: Fields of a batch that stay in host memory: dict keys, field names, or positions in a tuple or
            list.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> placement = Placement(shard_weights=[2, 1])
        >>> loader = ShardedDataLoader(range(6), 3, num_shards=2, device=placement)
        >>> [[shard.tolist() for shard in shards] for shards in loader]
        [[[0, 1], [2]], [[3, 4], [5]]]
    """

    device: str | torch.device | Sequence[DeviceLike] | None = None
    shard_weights: Sequence[float] | None = None
    resident: bool | float | Literal["auto"] = False
    device_transform: Callable[..., Any] | None = None
    host_fields: Sequence[str | int] | str | int | None = None


@dataclass(frozen=True)
class OnError:
    """Treatment of samples that raise an error, with a limit: a value of ``on_error=``.

    Args:
        action: ``"skip"``, ``"replace"``, ``"refill"`` or a function ``(SampleError) -> sample``, as the loader's
            ``on_error``.
        limit: Maximum number of samples skipped or replaced per epoch in this process; the next one raises
            `TooManySkippedError`. None: unlimited.

    Raises:
        ValueError, TypeError: ``action`` is unknown. ``limit`` is not an integer from 0, or goes with ``"raise"``,
            which skips nothing.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> loader = ShardedDataLoader(range(4), 2, on_error=OnError("skip", limit=1))
    """

    action: ErrorAction = "skip"
    limit: int | None = None

    def __post_init__(self) -> None:
        if callable(self.action):
            check_function("on_error", self.action, "(SampleError) -> sample")
        elif self.action not in ("raise", "skip", "replace", "refill"):
            text = f'on_error is {self.action!r}; it must be "raise", "skip", "replace"'
            raise ValueError(f'{text}, "refill", or a callable (SampleError) -> sample')
        if self.limit is not None:
            check_int("limit", self.limit, 0, "give the number of samples in an epoch that may be skipped, or None")
            if self.action == "raise":
                text = 'limit needs the action "skip", "replace" or a function'
                raise ValueError(f'{text}: with "raise" no sample is skipped')


class OtherNames(TypedDict, Generic[Batch], total=False):
    """Keyword arguments that stand for another argument of the loader, or for an option; and those of few programs."""

    collate_fn: Callable[[list[Any]], Batch] | None
    drop_last: bool | None
    prefetch_factor: int | None
    persistent_workers: bool | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float | None
    mesh: Any
    global_batch: int | None
    micro_batch: int | None
    keep: Callable[[Any], Any] | None
    with_source: bool


def refuse_names(names: Iterable[str], init: Callable[..., None]) -> None:
    """Reject keywords that are neither arguments of a loader's constructor nor in `OtherNames`."""
    known = OtherNames.__annotations__
    refuse_arguments("ShardedDataLoader", [name for name in names if name not in known], init, INSTEAD, known)


def check_flags(given: Mapping[str, Any]) -> None:
    """Reject texts where a bool is expected: "False" would count as True. And a class or function as ``shuffle``."""
    for name in given.keys() & FLAGS:
        if isinstance(given[name], str) or callable(given[name]):
            advice = " An order of your own is a sampler=" if name == "shuffle" else ""
            raise TypeError(f"{name} is {given[name]!r}; it must be True or False.{advice}")


def one_of(name: str, value: object, alias: str, other: object) -> Any:
    """Return the value of an argument that has two names; ``alias`` is torch's. A ValueError if both were given."""
    if value is not None and other is not None:
        raise ValueError(f"{alias} is torch's name for {name}, and both were given: leave out one of them")
    return other if value is None else value


def last_batch_of(last_batch: str | None, drop_last: object) -> str | None:
    """Return ``last_batch``, or the equivalent of torch's ``drop_last``; False is the default, as in torch."""
    if drop_last is None or not drop_last:
        return last_batch
    if last_batch not in (None, "discard"):
        raise ValueError(f"last_batch={last_batch!r} and drop_last={drop_last!r} contradict each other: leave out one")
    return "discard"


def prefetch_of(prefetch: object, prefetch_factor: object, num_workers: int) -> Any:
    """Return ``prefetch``, or the equivalent of torch's ``prefetch_factor``, which counts batches per worker."""
    given = one_of("prefetch (which counts batches in all)", prefetch, "prefetch_factor", prefetch_factor)
    if prefetch_factor is None:
        return given
    factor = check_int("prefetch_factor", prefetch_factor, 1, "give the number of batches to prefetch per worker")
    if not num_workers:
        raise ValueError("prefetch_factor needs workers: give num_workers=, or leave prefetch_factor out")
    return factor * num_workers


def length(dataset: Any, *, needed: bool = False) -> int | None:
    """Return the number of samples, or None if there is no length: an error that names the cause if ``needed``."""
    # A dataset with a sampler may have no length yet, whatever its __len__ raises: torch never asks for it.
    missing: tuple[type[Exception], ...] = (TypeError, NotImplementedError, ValueError) if needed else (Exception,)
    try:
        return len(dataset)
    except missing as error:
        pass_on(error)
        if not needed or not hasattr(type(dataset), "__len__"):
            return None
        text = f"the dataset, {an(type(dataset))}, has no length: its __len__ raised {type(error).__name__}: {error}"
        raise TypeError(f"{text}. Correct it, or give the loader a sampler that knows the indices") from error


def dataset_given(dataset: Any, has_sampler: bool = False) -> Any:
    """Return the dataset, read by position (see `as_dataset`); reject objects that cannot be read by index."""
    kind = type(dataset)
    if isinstance(dataset, str | PathLike):
        raise TypeError(
            f"the dataset is the {kind.__name__} {str(dataset)!r}, not an object that reads samples: give such an "
            f"object, or list(text) for the characters of a text. The recipes show how to read files"
        )
    refuse_class("the dataset", dataset)
    refuse_async_iterable(dataset)
    if isinstance(dataset, Iterator) and kind.__module__ in ("builtins", "itertools"):
        text = f"the dataset is {an(kind)}, which can be read once, and every epoch reads it from its beginning"
        raise TypeError(f"{text}: give the function that makes it, or an object whose __iter__ does")
    if isinstance(dataset, AbstractSet):
        raise TypeError(f"the dataset is {an(kind)}, whose order is not defined: give sorted(dataset)")
    if is_stream(dataset):
        return dataset
    if not has_own(kind, "__getitem__") or kind.__getitem__ is Dataset.__getitem__:
        raise TypeError(
            f"a dataset needs __getitem__ and __len__, or __iter__ for iterable data; {kind.__name__} has neither"
        )
    if isinstance(dataset, Mapping) and not has_sampler and named_columns(dataset) is not None:
        raise TypeError(
            f"the dataset is {an(kind)} with the keys {elide(list(map(repr, dataset)))}, and the default order "
            f"asks for the keys 0 to {len(dataset) - 1}: give ArrayDataset(data) for a dict of columns, or "
            f"sampler=list(data)"
        )
    dataset = as_dataset(dataset, "ShardedDataLoader", needs_length=not has_sampler)
    return provided("dataset", "groups")(dataset) if callable(getattr(dataset, "group_of", None)) else dataset


def check_stream(dataset: object, **given: object) -> None:
    """Reject arguments that choose an order, such as ``shuffle``, for iterable data."""
    wrong = ", ".join(name for name, value in given.items() if value is not None and value is not False)
    if wrong and hasattr(dataset, "leaves_out"):  # users do not know the name `Refill`
        raise ValueError(f"keep= and on_error='refill' read the order in parts: leave out {wrong}, or filter the data")
    if wrong:
        raise ValueError(
            f"the dataset, {an(type(dataset))}, is iterable data, which comes in its own order: leave out {wrong}. To "
            f"shuffle it, shuffle its files and give ShuffleBuffer(dataset, size), or give one with __getitem__"
        )


def ranks_given(num_replicas: object, rank: object, mesh: object) -> tuple[Any, Any]:
    """Return ``num_replicas`` and ``rank``, taken from a mesh if one is given as ``mesh`` or as ``num_replicas``."""
    if hasattr(num_replicas, "get_coordinate"):
        num_replicas, mesh = None, one_of("num_replicas", num_replicas, "mesh", mesh)
    if mesh is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError(
                "the mesh says how many ranks there are, and which this is: leave out num_replicas and rank"
            )
        num_replicas, rank = provided("ranks", "mesh")(mesh)
    return num_replicas, rank


def placement_given(device: object, devices: object) -> tuple[Any, Any, Placement]:
    """Return ``device``, ``devices``, and the options, if one of the two is a `Placement`."""
    if isinstance(device, Placement):
        if isinstance(devices, Placement):
            raise ValueError("device and devices are both a Placement: give one")
        return device.device, devices, device
    return (device, devices.device, devices) if isinstance(devices, Placement) else (device, devices, Placement())


def check_evaluate(evaluate: object, on_error: object) -> None:
    if evaluate and on_error in ("skip", "replace"):
        text = f"evaluate=True counts each sample once, and on_error={on_error!r} leaves samples out"
        raise ValueError(f"{text}: leave it out, or give a function (SampleError) -> sample")


def refuse_streams(streams: object, dataset: object) -> None:
    if streams is not None:
        text = f"streams={streams!r} is for iterable data, and the dataset, {an(type(dataset))}, is read by index"
        raise ValueError(f"{text}: leave it out. A batch may come from anywhere in the dataset")


def collate_function(batchify_fn: object, collate_fn: object) -> Any:
    """Return the collate function given by either name. None stands for the default, which can also read in bulk."""
    given = one_of("batchify_fn", batchify_fn, "collate_fn", collate_fn)
    check_function("the collate function", given, "of a list of samples")
    if isinstance(given, type) and issubclass(given, Batchify):
        raise TypeError(f"the collate function is the class {given.__name__}; give an object: {given.__name__}()")
    return None if given is default_batchify_fn else given


def transform_of(
    options: Placement, seed: Callable[[], int], *, devices: object, pin_memory: bool
) -> BatchTransform | None:
    """Return the transform for ``device_transform`` and ``host_fields``, or None if neither is given."""
    fn: Any = options.device_transform
    given: Any = options.host_fields
    check_function("device_transform", fn, "of a batch, or of a batch and a generator")
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
    fields = [] if given is None else list(given) if several else [given]
    for field in fields:
        if not isinstance(field, (str, int)) or isinstance(field, bool):
            raise TypeError(f"host_fields has {field!r}; it must have names of fields, or numbers in a tuple")
    if fn is None and not fields:
        return None
    if pin_memory and devices is None:
        name = "host_fields" if fn is None else "device_transform"
        raise ValueError(f"{name} is for batches on devices: give device= or devices= instead of pin_memory")
    if fields and options.resident is not False:
        raise ValueError("host_fields keeps fields on the host, and resident keeps all on devices: leave out one")
    called = fn.forward if isinstance(fn, torch.nn.Module) else fn  # what has the arguments
    by_position = fn is not None and takes_two(called)
    by_name = fn is not None and not by_position and takes_named(called, "rng")
    made = (lambda batch, rng: fn(batch, rng=rng)) if by_name else fn
    return BatchTransform(made, by_position or by_name, fields, seed)


def action_and_limit(on_error: Any) -> tuple[Any, int | None]:
    """Return the action for a sample that fails, and the maximum number per epoch (None: unlimited)."""
    given = on_error if isinstance(on_error, OnError) else OnError(on_error)
    return given.action, given.limit


def make_split(devices: list[Any] | None, sharded: bool, num_shards: Any, weights: Any = None) -> Split:
    """Return the `Split` of batches into shards. ``sharded``: shard i belongs to device i."""
    most = None if devices is None else len(devices)
    if num_shards is None:
        num_shards = most if sharded else None
    else:
        num_shards = check_int("num_shards", num_shards, 1, "give how many shards a batch is split into")
        if devices is not None and not sharded:
            raise ValueError("num_shards makes lists of shards, device makes plain batches: use devices=[...]")
        if most is not None and num_shards > most:
            raise ValueError(f"num_shards is {num_shards}, but there are only {most} devices")
    split = Split(num_shards, most)
    split.weights = check_shard_weights(weights, split)
    return split


def number_of_workers(num_workers: object) -> tuple[bool, Any]:
    """Return whether ``num_workers`` is ``"auto"``, and the number of workers to start with."""
    if isinstance(num_workers, str) and num_workers == "auto":
        return True, provided("num_workers", "auto").workers
    return False, check_int("num_workers", num_workers, -math.inf, 'give the number of workers, or "auto"')


def make_pool(
    pool: Any, num_workers: Any, thread_pool: bool, worker_init_fn: Any = None, timeout: float | None = None
) -> Pool:
    is_auto, num_workers = number_of_workers(num_workers)
    if is_auto and (pool == "ray" or (isinstance(pool, Pool) and not isinstance(pool, ThreadPool | ProcessPool))):
        raise ValueError(
            f'num_workers="auto" is for threads and processes on this machine, and the pool is {pool!r}: leave out one'
        )
    count = max(0, num_workers)
    if num_workers < 0:
        logger.warning("num_workers is %d, which means 0, as in MXNet Gluon: the main process reads", num_workers)
    timeout = timeout or None  # 0 is torch's default, and means never
    given = {"worker_init_fn": worker_init_fn, "timeout": timeout}
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(pool, Pool):
        if (count and not is_auto) or thread_pool or options:
            text = f"pool={pool!r} has its own workers: leave out num_workers and thread_pool"
            raise ValueError(f"{text}, and give {' and '.join(given)} to the pool")
        return pool
    kind = _kind_of_pool(pool, count, thread_pool)
    if kind == "inline":
        check_init_fn(worker_init_fn)  # it is not called, as in torch
        if timeout is not None:
            raise ValueError(f"timeout={timeout!r} needs workers: give num_workers=, or leave timeout out")
        return InlinePool()
    make = {"thread": ThreadPool, "process": ProcessPool}.get(kind) or provided("pool", kind)
    return make(count, **options)  # type: ignore[no-any-return]


def _kind_of_pool(pool: object, count: int, thread_pool: bool) -> Any:
    if pool is None:
        pool = "inline" if count == 0 else "thread" if thread_pool else "process"
    elif thread_pool and pool != "thread":
        raise ValueError(f"pool={pool!r} and thread_pool=True contradict each other: leave out one of them")
    known = ["inline", "thread", "process", *names_of("pool")]
    if pool not in known:
        names = ", ".join([f'"{name}"' for name in known])
        example = f'ProcessPool({max(count, 1)}, start_method="spawn")'
        raise ValueError(f"pool is {pool!r}; it must be {names}, or a pool object, such as {example}")
    if count == 0 and (thread_pool or pool != "inline"):
        asked = "thread_pool=True" if thread_pool else f"pool={pool!r}"
        raise ValueError(
            f"{asked} needs workers: give num_workers=, at least 1, or leave {asked} out to read without workers"
        )
    return pool


def claim(pool: Pool, pipeline: Pipeline) -> None:
    """Give a pool to a loader. After that loader is closed or collected, another one may claim the pool."""
    owner = owners.get(pool)
    other = None if owner is None else owner()
    if other is not None and not other.is_shut:
        text = f"{pool!r} belongs to another loader, which is not closed"
        raise ValueError(f"{text}: make a pool for each, {pool!r}, or call close() on that loader first")
    if owner is not None:
        pool.close()  # a loader that was collected has ended the workers, and left the rest
    owners[pool] = weakref.ref(pipeline)


def check_count(name: str, count: object) -> int:
    return max(0, check_int(name, count, -math.inf, "give the number of batches in flight"))


def check_shard_weights(weights: Sequence[float] | None, split: Split) -> list[float] | None:
    if weights is None:
        return None
    if split.num_shards is None:
        raise ValueError("shard_weights need shards: give devices=[...] or num_shards= as well")
    return check_shares(weights, split.num_shards)
