"""Samples shared by workers: `Dataset.cache` and `GroupReads`.

    dataset.py       `StoredDataset`: the samples of a dataset, stored when first read
    store.py         their bytes: columns in shared memory or a file, and a log
    groups.py        `GroupReads`: samples of a group, read together for the batches of a window
    shared.py        memory and files shared by processes: locking and rendezvous

For: decoded samples that fit into memory or onto the disk, and are read more than once; samples whose group
is costly to open, such as frames of videos.
Costs: about 870 lines. The core has `Dataset.cache`, which imports it by name.
Tests: tests/caching.
It goes when: decoding no longer limits anybody's epochs.
"""
