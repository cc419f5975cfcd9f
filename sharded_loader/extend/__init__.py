"""The seam: what you build on to give the loader something of your own, and what its own satellites build on.

    Sampler, WrapperSampler, Table       an order of your own: give an object as ``sampler=`` or ``batch_sampler=``
    Pool, WorkerPool                     readers of your own: give an object as ``pool=``
      Job, Task, Result, PoolBroken        what the pool is given, and what it gives back
      SupervisedPool, Transport, Worker    a pool whose workers may die, over a way to reach them
      reader_for, TaskReader               what reads one task, here or in a worker
    Order, Epoch, Position               batches that no sampler can yield
      Pipeline, Run, Entry, Split          what has them read, in order
    Observer, BatchTimes                 called for each batch, with its times
    Dataset, Wrapper, Cache              datasets around others; what ``dataset.cache()`` makes
    Batchify, BatchifyError              what makes a batch of samples
    provide                              has the loader use your class by its name

And what they are called with: Array, BatchifyFn, Death, DeviceLike, Dtype, Empty, ErrorAction, Indices, Int64s,
NOTHING, Nothing, Notices, PartPoint, Register, Samples, Selection.

These names are stable, and their docstrings say when they are called and with which arguments. The names on the second
shelf are used by the library's own satellites only, and may change in any version:

    extend.tools      checks, errors, texts, limits of the machine, files
    extend.data       datasets, and how batches are made of samples
    extend.order      random numbers, tables, states, samplers of other libraries
    extend.engine     messages, pools, memory, devices, streams, the loader's own parts

The names stand in stubs (``__init__.pyi``, ``tools.pyi``, ...), which type checkers read; so do these modules. Each is
looked up when it is used: a worker process imports what it needs. Satellites import nothing else of the core, so the
stubs show what a change of the core may break.

Example:
    >>> class OddsFirst(Sampler[int]):
    ...     def __init__(self, length): self._length = length
    ...     def len_epoch(self, epoch): return self._length
    ...     def iter_epoch(self, epoch, start=0):
    ...         return iter([*range(1, self._length, 2), *range(0, self._length, 2)][start:])
    >>> from sharded_loader import ShardedDataLoader
    >>> [batch.tolist() for batch in ShardedDataLoader(range(6), 3, sampler=OddsFirst(6))]
    [[1, 3, 5], [0, 2, 4]]
"""

from sharded_loader import listed

__all__, __dir__, __getattr__ = listed(__name__, __file__)
