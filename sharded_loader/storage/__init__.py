"""Shards: files of many samples, on local disks or in object stores. From the bottom up:

    files.py         a shard as randomly accessible bytes, and the errors of shards
    parts.py         byte ranges of remote files, checked against the expected version
    stores.py        files of this machine and of everything that fsspec reaches
    indexes.py       sample offsets of a shard: built once, saved and checked
    tar.py, ...      formats: tar; RecordIO, MDS and text (`records`); Parquet and Arrow (`tables`)
    cache.py         `ShardCache`: whole shards of an object store on a local disk
    read_ahead.py    prefetching of shards
    lists.py         discovery of shards and their format
    dataset.py       `ShardDataset`
    frames.py        `FrameWindows`: windows of frames of local videos

Nothing here imports torch, pyarrow, fsspec or a decoder before it is needed.
"""
