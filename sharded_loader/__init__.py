"""Batches in order, split over devices, read by processes or threads: an MXNet-Gluon-style loader for PyTorch.

    from sharded_loader import ShardedDataLoader

    for shards in ShardedDataLoader(dataset, 256, shuffle=True, num_workers=8, devices="auto"):
        ...

The names stand in the stub ``__init__.pyi``, for type checkers too. They are looked up when they are used: a worker
process imports its own few modules and never pays for torch.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__version__ = "1.0.0rc1"

PROVIDED = {
    ("batch", "shares"): "sharded_loader.parallel.shares:make_shares",
    ("batches", "sources"): "sharded_loader.mixing.sources:Sources",
    ("column", "values"): "sharded_loader.storage.tables:column_values",
    ("dataset", "cache"): "sharded_loader.caching.dataset:StoredDataset",
    ("dataset", "groups"): "sharded_loader.caching.groups:GroupReads",
    ("dataset", "refill"): "sharded_loader.mixing.refill:refilled",
    ("function", "gather"): "sharded_loader.parallel:gather",
    ("methods", "instruments"): "sharded_loader.instruments.report:Instruments",
    ("methods", "leases"): "sharded_loader.leases:Leasing",
    ("num_workers", "auto"): "sharded_loader.instruments.auto:Tuner",
    ("observer", "instruments"): "sharded_loader.instruments.stats:Meter",
    ("pinner", "thread"): "sharded_loader.drop_in.pinning:Pinner",
    ("pool on devices", "resident"): "sharded_loader.resident:make_resident",
    ("pool", "ray"): "sharded_loader.ray.pool:RayPool",
    ("ranks", "mesh"): "sharded_loader.parallel:ranks_of_mesh",
    ("sampler", "costs"): "sharded_loader.samplers.costs:sampler_of",
    ("sampler", "grown"): "sharded_loader.samplers.growth:GrownSampler",
    ("sampler", "mixture"): "sharded_loader.mixing.interleave:sampler_of",
    ("trainer", "fetched"): "sharded_loader.drop_in.trainers:fetched_by_lightning",
    ("trainer", "named"): "sharded_loader.drop_in.trainers:name_epoch",
    ("trainer", "skipping"): "sharded_loader.drop_in.trainers:refuse_skipping",
}
"""Objects of the satellites that the core looks up by kind and name, instead of importing them: `base.imports`."""


def listed(module: str, file: str) -> tuple[list[str], Callable[[], list[str]], Callable[[str], Any]]:
    """Return ``__all__``, ``__dir__`` and ``__getattr__`` of a module whose names stand in the stub beside its file."""
    with open(f"{os.path.splitext(file)[0]}.pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub]
    home_of = {words[3]: words[1] for words in lines if words[:1] == ["from"]}

    def look_up(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if home_of[name] == module:  # a module of this package
            return importlib.import_module(f"{module}.{name}")
        # A collection of what torch has left takes 100 ms, as long as this import. Other threads may fork meanwhile.
        is_put_off = gc.isenabled() and threading.active_count() == 1
        try:
            if is_put_off:
                gc.disable()
            value = getattr(__import__(home_of[name], fromlist=[name]), name)
        finally:
            if is_put_off:
                gc.enable()
                if gc.get_count()[2] and gc.get_freeze_count() < 1000:  # not the user's; Python 3.12 begins with 375
                    gc.freeze()  # makes all objects old, so that it does not come with the next import instead
                    gc.unfreeze()
        setattr(sys.modules[module], name, value)
        return value

    return sorted(home_of), lambda: sorted({*vars(sys.modules[module]), *home_of}), look_up


__all__, __dir__, __getattr__ = listed(__name__, __file__)
