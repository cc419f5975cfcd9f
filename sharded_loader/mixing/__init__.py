"""Datasets of other data: `interleave`, `ShuffleBuffer` and `TokenWindows`.

    interleave.py        several datasets as one, and their order in a loader
    in_order.py          iterable data, mixed or shuffled
    schedule.py          which dataset of a mixture gives the sample at a position
    tokens.py            windows of files of token ids

For: pretraining, and data from several sources.
Costs: about 900 lines. The core knows a mixture by its base class, and asks for its order by name.
Tests: tests/mixing.
It goes when: the data sets of a training are mixed before they are stored.
"""
