"""Samples that are kept: `Dataset.cache`.

    dataset.py       `StoredDataset`: the samples of a dataset, stored when they are first read
    store.py         its bytes: columns of one memory or file, and a log
    shared.py        memory and files of several processes: one writes at a time, and how they find each other's

For: decoded samples that fit into memory or onto the disk, and are read more than once.
Costs: about 680 lines. The core gives `Dataset.cache`, which asks for it by name.
Tests: tests/caching.
It goes when: nobody's epochs are limited by decoding any more.
"""
