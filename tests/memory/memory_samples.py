"""Datasets and batches for the tests of memory. Torch-free, so that a spawned worker starts fast."""

import os
import signal

import numpy as np

SHAPE = 16 << 10


class DiesInTheMiddle:
    """Batchify that kills its worker, once in the program, when half of the batch that holds ``bad`` is written."""

    def __init__(self, bad, flag):
        self.bad = bad
        self.flag = flag

    def __call__(self, samples):
        return self.assemble(samples, np.empty)

    def assemble(self, samples, empty):
        out = empty((len(samples), samples[0].size), samples[0].dtype)
        half = len(samples) // 2
        out[:half] = -1
        if any(int(sample[0]) == self.bad for sample in samples) and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        out[:] = samples
        return out


class Diary:
    """Writes to itself: how often this process has read each sample."""

    def __init__(self, length, width=4096):
        self.rows = np.zeros((length, width), np.int32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.rows[index] += 1
        return index, self.rows[index, -1], os.getpid()


def arena_of(loader):
    found = loader.pool._transport.arena
    return found


def allow_no_more(number):
    """As a ``worker_init_fn``: this process has all the descriptors that it may have."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # also if another thread closes one in this moment
