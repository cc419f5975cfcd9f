"""The other libraries, without torch's own loaders: how each is opened on a `Plan`.

    open_spdl(plan) -> Stream       SPDL; likewise Grain, seqtools, TensorFlow and Ray
    ..._refuses(workload)           why a workload is not for a library, or None

A library is imported when it is used.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.plans import (
    BatchReader,
    BulkColumns,
    Plan,
    SampleReader,
    SingleThreaded,
    Stream,
    keep_nothing,
    tensor_of,
)
from benchmarks.workloads import Workload, order, pad, stack

# -- SPDL -----------------------------------------------------------------------------------------------------


SPDL_PICKLED_BYTES = 200_000


def open_spdl(plan: Plan) -> Stream:
    return _open_spdl_threads(plan) if plan.workload.pool == "thread" else _open_spdl_processes(plan)


def _open_spdl_processes(plan: Plan) -> Stream:
    from spdl.dataloader import get_pytorch_dataloader
    from torch.utils.data import default_collate

    # Tensors travel through shared memory, one file each: below some 200 KB, pickled arrays are two to three times
    # faster (tiny rows 46 k samples/s against 20 k), above slower (large samples 0.5 k against 2.0 k).
    small = plan.workload.padded or BatchReader(plan)[0].nbytes < SPDL_PICKLED_BYTES
    collate: Callable[[Any], Any]
    if small:
        collate = pad if plan.workload.padded else stack
    else:
        collate = tensor_of if plan.is_columns else default_collate
    loader = get_pytorch_dataloader(
        BulkColumns(plan.source.columns) if plan.is_columns else plan.source.rows,
        plan.workload.batch_size,
        sampler=plan.sampler,
        num_workers=plan.workers,
        collate_fn=SingleThreaded(collate),
        multiprocessing_context=plan.workload.start_method,
        in_order=True,
    )

    def batches(loader: Any) -> Iterator[Any]:
        for batch in loader:
            yield tensor_of(batch) if small else batch

    def close(loader: Any) -> None:
        # It never removes the pickled dataset: without this 154 MB may stay in shared memory after the process.
        shared = getattr(loader, "_shmem", None)
        if shared is not None:
            shared.close()
            shared.unlink()

    return Stream(loader, batches, close)


def _open_spdl_threads(plan: Plan) -> Stream:
    from spdl.pipeline import PipelineBuilder

    builder = (
        PipelineBuilder()
        .add_source(plan.sampler)
        .pipe(plan.source.rows.__getitem__, concurrency=plan.workers, output_order="input")
        .aggregate(plan.workload.batch_size)
        .pipe(lambda samples: tensor_of(stack(samples)))
        .add_sink(2 * plan.workers)
    )
    pipeline = builder.build(num_threads=plan.workers)

    def batches(pipeline: Any) -> Iterator[Any]:
        with pipeline.auto_stop():
            yield from pipeline

    return Stream(pipeline, batches, keep_nothing)


# -- Grain ----------------------------------------------------------------------------------------------------


def open_grain(plan: Plan) -> Stream:
    import grain

    workload = plan.workload
    if workload.pool == "thread":
        options = grain.ReadOptions(num_threads=plan.workers, prefetch_buffer_size=4 * plan.workers)
        samples = grain.MapDataset.source(SampleReader(plan))
        dataset = samples.to_iter_dataset(options).batch(workload.batch_size)
    else:
        # No threads inside the workers: the documentation advises against them for data in memory.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = grain.MapDataset.source(BatchReader(plan)).to_iter_dataset(options)
        if workload.pool == "process":
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=plan.workers, per_worker_buffer_size=2)
            )

    def batches(dataset: Any) -> Iterator[Any]:
        iterator = iter(dataset)
        try:
            for batch in iterator:
                yield tensor_of(batch)
        finally:
            iterator.close()

    return Stream(dataset, batches, keep_nothing)


# -- seqtools -------------------------------------------------------------------------------------------------


def open_seqtools(plan: Plan) -> Stream:
    import seqtools

    workload = plan.workload
    if workload.pool == "thread":
        samples = seqtools.prefetch(SampleReader(plan), plan.workers, "thread", max_buffered=4 * plan.workers)

        def batched(samples: Any) -> Iterator[Any]:
            size = workload.batch_size
            for start in range(0, len(samples), size):
                yield tensor_of(stack([samples[at] for at in range(start, start + size)]))

        return Stream(samples, batched, keep_nothing)

    multiprocessing.set_start_method(workload.start_method, force=True)  # it always takes the default
    reader = BatchReader(plan)
    buffered = 10  # its default
    largest = max(reader[number].nbytes for number in range(3)) * (3 if workload.padded else 1)
    batches = seqtools.prefetch(
        reader, plan.workers, "process", max_buffered=buffered, shm_size=buffered * (largest + 4096)
    )
    return Stream(batches, lambda batches: (tensor_of(batches[at]) for at in range(len(batches))), keep_nothing)


def grain_refuses(workload: Workload) -> str | None:
    """Why a workload is not for Grain, or None."""
    if workload.kind == "first" and workload.start_method != "spawn":
        return "only spawns"
    return _NO_EPOCHS if workload.kind == "gap" else None


def spdl_refuses(workload: Workload) -> str | None:
    """Why a workload is not for SPDL, or None."""
    return _NO_INLINE if workload.pool == "inline" else None


def seqtools_refuses(workload: Workload) -> str | None:
    """Why a workload is not for seqtools, or None."""
    return _NO_EPOCHS if workload.kind == "gap" else spdl_refuses(workload)


_NO_EPOCHS = "has no epochs"
_NO_INLINE = "has no inline form"


# -- TensorFlow -----------------------------------------------------------------------------------------------


def open_tensorflow(plan: Plan) -> Stream:
    """A `tf.data.Dataset` of batches of indices, mapped to finished batches by threads.

    A generator of samples, the shorter form, is more than ten times slower.
    """
    import tensorflow as tf

    reader = BatchReader(plan)
    epoch = tf.data.Dataset.from_tensor_slices(order(len(plan.source.rows), plan.workload.shuffled))
    indices = epoch.repeat().batch(plan.workload.batch_size)
    read: Callable[[Any], Any]
    if plan.is_columns:
        columns = tf.constant(plan.source.columns)

        def read(batch: Any) -> Any:
            return tf.gather(columns, batch)

    else:
        dtype = tf.as_dtype(plan.source.rows[0].dtype)

        def read(batch: Any) -> Any:
            return tf.numpy_function(reader.read, [batch], dtype)

    dataset = indices.map(read, num_parallel_calls=plan.workers, deterministic=True).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.threading.private_threadpool_size = max(plan.workers, 2)  # otherwise as many as there are cores
    dataset = dataset.with_options(options)

    def batches(dataset: Any) -> Iterator[Any]:
        return (tensor_of(batch.numpy()) for batch in dataset)

    return Stream(dataset, batches, keep_nothing)


def tensorflow_refuses(workload: Workload) -> str | None:
    """Why a workload is not for tf.data, or None."""
    if workload.kind not in ("rate", "memory"):
        return "has no worker processes"
    return _NO_INLINE if workload.pool == "inline" else None


# -- Ray ------------------------------------------------------------------------------------------------------


RAY_BLOCKS = 2000
"""Blocks of the dataset: enough for every stretch."""

RAY_BLOCK_SAMPLES = 4096
"""Samples of a block, as a multiple of the batch, where a block of them has at most `RAY_BLOCK_BYTES`."""

RAY_BLOCK_BYTES = 64 << 20


def open_ray(plan: Plan) -> Stream:
    """A Ray dataset of positions, mapped to samples block by block, read with `iter_torch_batches`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import ray.data

    ray.init(num_cpus=plan.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    logging.getLogger("ray").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False

    workload = plan.workload
    epoch = order(len(plan.source.rows), workload.shuffled)
    source = ray.put(plan.source.columns if plan.is_columns else plan.source.rows)
    is_columns, is_padded = plan.is_columns, workload.padded

    def read(positions: Any) -> dict[str, Any]:
        indices = epoch[positions["id"] % len(epoch)]
        data = ray.get(source)
        if is_columns:
            return {"samples": data[indices]}
        samples = [data[index] for index in indices.tolist()]
        if not is_padded:
            return {"samples": stack(samples)}
        ragged = np.empty(len(samples), object)
        ragged[:] = samples
        return {"samples": ragged}

    def padded(batch: Any) -> Any:
        return tensor_of(pad(batch["samples"]))

    largest = RAY_BLOCK_BYTES // plan.source.rows[0].nbytes
    block = max(1, min(RAY_BLOCK_SAMPLES, largest) // workload.batch_size) * workload.batch_size
    dataset = ray.data.range(RAY_BLOCKS * block, override_num_blocks=RAY_BLOCKS).map_batches(read, batch_size=None)

    def batches(dataset: Any) -> Iterator[Any]:
        finished = dataset.iter_torch_batches(
            batch_size=workload.batch_size, prefetch_batches=2 * plan.workers, collate_fn=padded if is_padded else None
        )
        return (batch if is_padded else batch["samples"] for batch in finished)

    # Ray ends its cluster when the program ends. Ended before, a thread that still prefetches would end the program.
    return Stream(dataset, batches, keep_nothing)


def ray_refuses(workload: Workload) -> str | None:
    """Why a workload is not for Ray Data, or None."""
    if workload.kind != "rate":
        return "starts a cluster, not workers of a loader"
    return "has only processes" if workload.pool != "process" else None
