"""Samples that are kept: `Dataset.cache` and `share`.

    dataset.py       `StoredDataset`: the samples of a dataset, stored when they are first read
    store.py         its bytes: columns of one memory or file, and a log
    locks.py         one process at a time: of a file, or of a name
    shared.py        `share`: one object in memory that all ranks of a machine have, and how they find it

For: decoded samples that fit into memory or onto the disk, and are read more than once.
Costs: about 750 lines. The core gives `Dataset.cache`, which asks for it by name.
Tests: tests/caching.
It goes when: nobody's epochs are limited by decoding any more.
"""
