"""Datasets made of other data: `interleave`, `ShuffleBuffer` and `TokenWindows`.

interleave.py        several datasets as one, and its order in a loader
in_order.py          iterable data, mixed or shuffled
schedule.py          which dataset of a mixture yields the sample at a position
tokens.py            windows over files of token ids
"""
