"""Datasets of other data: `interleave`, `ShuffleBuffer` and `TokenWindows`.

    interleave.py        several datasets as one, by index or in order
    sampler.py           the order of a mixture in a loader
    schedule.py          which of them gives the sample at a position
    shuffle_buffer.py    iterable data in a shuffled order
    tokens.py            windows of files of token ids

For: pretraining, and data from several sources.
Costs: about 1,100 lines. The core knows a mixture by its base class, and asks for its order by name.
Tests: tests/mixing.
It goes when: the data sets of a training are mixed before they are stored.
"""
