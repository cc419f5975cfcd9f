"""Data-parallel training in one process: run copies of a model, join the gradients.

    shards[i] on devices[i] -> Replicas.run -> outputs and gradients per replica
          -> reduce_grads (replica 0 has the gradient of the whole batch) -> optimizer -> broadcast

Shards come from a loader with ``devices=``, or from `parallel.split.split_and_load`.

`Replicas` owns copies 1.. of the model; replica 0 is the user's own model, moved to ``devices[0]``, so that an
optimizer made from ``model.parameters()`` keeps working. On several accelerators each device has a thread for
the length of one `run`, with that device, the caller's streams, grad mode and autocast. On CPU the replicas run one
after the other, because torch already uses all cores there and the default generator is shared.

What can go wrong: more shards than replicas, sizes that are not as many as the shards, an absent device: ValueErrors.
An exception in one replica is raised by `run` after all threads have ended.

Source of the idea: ``mxnet.gluon.Trainer``.
"""

from __future__ import annotations

import contextvars
import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from sharded_loader.base.described import an
from sharded_loader.base.private import copy_each
from sharded_loader.devices.names import DeviceLike, device_list


class Replicas:
    """Copies of a model on several devices, trained as one.

    Args:
        model: becomes replica 0, moved to ``devices[0]`` in place. Tied parameters stay tied in the copies.
        devices: a list of devices (one may stand twice), or ``"auto"``.

    Attributes:
        model: replica 0, which is the model that was given.
        models: all replicas, in the order of the devices.
        devices: where they are.

    Raises:
        TypeError: ``model`` is no `torch.nn.Module`.
        ValueError: no devices, a device that is not there, a model whose lazy parameters have no shape yet.

    Example:
        >>> from sharded_loader import split_and_load
        >>> model = torch.nn.Linear(2, 1)
        >>> replicas = Replicas(model, ["cpu", "cpu"])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> shards = split_and_load(torch.ones(5, 2), replicas.devices, even_split=False)
        >>> def step(replica, x):
        ...     loss = replica(x).square().mean()
        ...     loss.backward()
        ...     return loss.item()
        >>> losses = replicas.run(step, shards)
        >>> replicas.reduce_grads([len(x) for x in shards])
        >>> optimizer.step()
        >>> replicas.zero_grad()
        >>> replicas.broadcast()

    Buffers (batch statistics) of replica 0 win at each `broadcast`, as in DistributedDataParallel. Modes
    (``model.train()``, ``model.eval()``) and ``requires_grad`` set on the model reach the copies at the next `run`.
    """

    def __init__(self, model: torch.nn.Module, devices: Sequence[DeviceLike] | str) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Replicas was given {an(type(model))} as model: give a torch.nn.Module")
        self.devices = device_list(devices)
        if any(torch.nn.parameter.is_lazy(p) for p in [*model.parameters(), *model.buffers()]):
            raise ValueError("the model has lazy parameters without a shape: run it once before making Replicas")
        copies = [_copied(model, device) for device in self.devices[1:]]
        self._ran: int | None = None
        self.model = model.to(self.devices[0])
        self.models = [self.model, *copies]
        for replica in self.models[1:]:
            replica.zero_grad(set_to_none=True)

    def run(self, fn: Callable[[torch.nn.Module, Any], Any], shards: Sequence[Any]) -> list[Any]:
        """Call ``fn(model, shard)`` for each shard, shard i with replica i.

        Args:
            fn: runs forward, and backward when training; on several accelerators in one thread per device.
            shards: at most as many as replicas; with fewer the last replicas do nothing.

        Returns:
            What ``fn`` returned, in the order of the shards.

        Raises:
            ValueError: no shards, or more than replicas.

        Example:
            >>> replicas = Replicas(torch.nn.Identity(), ["cpu", "cpu"])
            >>> replicas.run(lambda model, shard: model(shard) + 1, [1, 10])
            [2, 11]
        """
        if not 1 <= len(shards) <= len(self.models):
            raise ValueError(
                f"{len(shards)} shards for {len(self.models)} replicas: give 1..{len(self.models)} shards, "
                "for instance from a loader with the same devices"
            )
        self._follow_modes()
        self._ran = len(shards)
        outputs: list[Any] = [None] * len(shards)
        set_up_on = _thread_state(self.devices[: len(shards)])

        def work(positions: list[int]) -> None:
            for i in positions:
                with set_up_on(self.devices[i]):
                    outputs[i] = fn(self.models[i], shards[i])

        lanes = _lanes(self.devices[: len(shards)])
        if len(lanes) == 1:
            work(lanes[0])
            return outputs
        with ThreadPoolExecutor(len(lanes), thread_name_prefix="replica") as threads:
            running = [threads.submit(contextvars.copy_context().run, work, positions) for positions in lanes]
        for one in running:
            one.result()
        return outputs

    def _follow_modes(self) -> None:
        for replica in self.models[1:]:
            for module, mirror in zip(self.model.modules(), replica.modules(), strict=True):
                if mirror.training != module.training:
                    mirror.training = module.training
            for parameter, other in zip(self.model.parameters(), replica.parameters(), strict=True):
                if other.requires_grad != parameter.requires_grad:
                    other.requires_grad_(parameter.requires_grad)

    @torch.no_grad()
    def reduce_grads(self, sizes: Sequence[float]) -> None:
        """Sum the replicas' gradients into replica 0, each weighted by its share of ``sizes``.

        With a mean loss per shard and ``sizes`` the samples per shard, replica 0 then has exactly the gradient of the
        mean loss over the whole batch. The other replicas' gradients are cleared. Call it once per optimizer step:
        a second call would weigh replica 0's sum again.

        Args:
            sizes: one positive number per shard of the last `run`: samples, or tokens where the loss is a mean over
                tokens.

        Raises:
            ValueError: not as many sizes as shards, or one that is not a positive number.

        Example:
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> replicas = Replicas(model, ["cpu", "cpu"])
            >>> shards = [torch.ones(3, 1), torch.full((1, 1), 5.0)]
            >>> _ = replicas.run(lambda m, x: m(x).mean().backward(), shards)
            >>> replicas.reduce_grads([3, 1])
            >>> model.weight.grad.item()
            2.0
        """
        if self._ran is not None and len(sizes) != self._ran:
            raise ValueError(
                f"{len(sizes)} sizes were given, but the last run had {self._ran} shards: give one size per shard, "
                f"[len(shard) for shard in shards]"
            )
        shares = _shares(sizes, len(self.models))
        columns = list(zip(*(replica.parameters() for replica in self.models), strict=True))
        for bucket in _buckets([column[0] for column in columns]):
            trained = [columns[number] for number in bucket if columns[number][0].requires_grad]
            device = columns[bucket[0]][0].device
            rows = [_moved([column[replica].grad for column in trained], device) for replica in range(len(shares))]
            for (parameter, *_), grads in zip(trained, zip(*rows, strict=True), strict=True):
                _reduce(parameter, grads, shares)
            for number in bucket:
                for other in columns[number][1:]:
                    other.grad = None

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copy the parameters and buffers of replica 0 to the others, in place.

        Call it after each optimizer step, and after loading a checkpoint into the model.

        Example:
            >>> replicas = Replicas(torch.nn.Linear(1, 1), ["cpu", "cpu"])
            >>> _ = torch.nn.init.ones_(replicas.model.weight)
            >>> replicas.broadcast()
            >>> replicas.models[1].weight.item()
            1.0
        """
        sources, *others = ([*replica.parameters(), *replica.buffers()] for replica in self.models)
        for bucket in _buckets(sources):
            tensors = [sources[number] for number in bucket]
            for replica in others:
                targets = [replica[number] for number in bucket]
                copy_each(targets, _moved(tensors, targets[0].device))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all replicas.

        Example:
            >>> Replicas(torch.nn.Linear(1, 1), ["cpu"]).zero_grad()
        """
        for replica in self.models:
            replica.zero_grad(set_to_none=set_to_none)

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        return f"Replicas({type(self.model).__name__} on {', '.join(map(str, self.devices))})"


BUCKET_BYTES = 32 << 20
"""What is copied to another device in one go. Each copy makes the streams of two devices wait for each other, which
takes microseconds. By the bandwidth of PCIe 4 (25 GB/s) 32 MiB take 1.3 ms, so larger copies would gain little. While
a bucket is copied, it lies on both devices once more."""


def _copied(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A copy of a model, made on its device: on the model's own there may be no room for another one."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if type(tensor) is torch.nn.Parameter or (type(tensor) is torch.Tensor and not tensor.__dict__):
                made = tensor.detach().clone() if tensor.device == device else tensor.detach().to(device)
                if type(tensor) is torch.nn.Parameter:
                    made = torch.nn.Parameter(made, tensor.requires_grad)
                memo[id(tensor)] = made
    return copy.deepcopy(model, memo).to(device)  # with tensors of other classes


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of the tensors in groups of one dtype and device, of `BUCKET_BYTES` or one tensor.

    Example:
        >>> _buckets([torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(4)])
        [[0, 2], [1]]
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[list[int]]] = defaultdict(list)
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for number, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        sizes[kind] += tensor.nbytes
        if not groups[kind] or sizes[kind] > BUCKET_BYTES:
            groups[kind].append([])
            sizes[kind] = tensor.nbytes
        groups[kind][-1].append(number)
    return list(itertools.chain.from_iterable(groups.values()))


def _moved(tensors: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor | None]:
    """The tensors of a bucket, the dense ones on a device, by one copy for all."""
    moved = list(tensors)
    dense = [n for n, t in enumerate(tensors) if t is not None and t.device != device and t.layout is torch.strided]
    if dense:
        for number, part in zip(dense, _sent([tensors[number] for number in dense], device), strict=True):
            moved[number] = part
    return moved


def _sent(tensors: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """Dense tensors of one dtype and device on another device, by one copy.

    Example:
        >>> [part.tolist() for part in _sent([torch.ones(2), torch.zeros(1, 1)], torch.device("cpu"))]
        [[1.0, 1.0], [[0.0]]]
    """
    # To the host an asynchronous copy would be read before it has arrived.
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device, non_blocking=device.type != "cpu")
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _reduce(parameter: torch.Tensor, grads: Sequence[torch.Tensor | None], shares: Sequence[float]) -> None:
    """Make the sum of the gradients, each times its share, the gradient of the parameter, whose own is the first."""
    own, device = grads[0], parameter.device
    # In bf16 every step of the sum would round to 8 bits.
    wide = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
    # In place, but for those narrow ones.
    total = None if own is None else own.to(wide).mul_(shares[0])
    for grad, share in zip(grads[1:], shares[1:], strict=True):
        if grad is None:
            continue
        moved = grad.to(device, wide, non_blocking=device.type != "cpu")
        if total is None:
            # Not in place: on one device ``moved`` is still the other replica's own gradient.
            total = moved * share
        elif moved.is_sparse == total.is_sparse:
            total.add_(moved, alpha=share)
        else:
            dense, sparse = (moved * share, total) if total.is_sparse else (total, moved * share)
            total = dense + sparse
    if total is None or total is own:
        return
    if own is None or own.is_sparse or total.is_sparse:
        parameter.grad = total.to(parameter.dtype)
    else:
        own.copy_(total)


def _shares(sizes: Sequence[float], num_replicas: int) -> list[float]:
    """Each shard's share of the batch."""
    numbers = [float(size) for size in sizes]
    if not 1 <= len(numbers) <= num_replicas:
        raise ValueError(
            f"reduce_grads was given {len(numbers)} sizes for {num_replicas} replicas: give one per shard of the "
            "last run"
        )
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"reduce_grads(sizes={list(sizes)}): give positive numbers, the samples of each shard")
    total = math.fsum(numbers)
    return [number / total for number in numbers]


def _lanes(devices: Sequence[torch.device]) -> list[list[int]]:
    """Which replicas run in which thread: one thread per device, or one for all if there are no two accelerators."""
    lanes: dict[torch.device, list[int]] = {}
    for position, device in enumerate(devices):
        lanes.setdefault(device, []).append(position)
    accelerators = [device for device in lanes if device.type != "cpu"]
    return list(lanes.values()) if len(accelerators) > 1 else [list(range(len(devices)))]


def _thread_state(devices: Sequence[torch.device]) -> Callable[[torch.device], AbstractContextManager[None]]:
    """What sets up the calling thread's state, as far as torch keeps it per thread, in another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = {kind for kind in ("cpu", *(d.type for d in devices)) if torch.amp.is_autocast_available(kind)}
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    cache = torch.is_autocast_cache_enabled()
    streams = {d: getattr(torch, d.type).current_stream(d) for d in devices if d.type in ("cuda", "xpu")}

    @contextmanager
    def set_up_on(device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            if device in streams:
                module = getattr(torch, device.type)
                stack.enter_context(module.device(device))
                module.set_device(device)  # gives a new thread its context; without one, cuBLAS warns that it makes one
                stack.enter_context(module.stream(streams[device]))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, (enabled, dtype) in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return set_up_on
