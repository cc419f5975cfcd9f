"""Shards: files of many samples, on this machine or in an object store. From the bottom up:

    files.py         a shard as bytes by their position, and the errors of shards
    parts.py         a part of a remote file, and whether it is of the version that was found first
    stores.py        the bytes of files: local, or wherever fsspec reaches
    indexes.py       where the samples of a shard lie; built once, kept, and checked
    tar.py, ...      the formats: tar; RecordIO and MDS (`records`); Parquet and Arrow (`tables`)
    cache.py         whole shards of an object store on this machine's disk, checked: `ShardCache`
    read_ahead.py    fetches shards before they are needed
    dataset.py       `ShardDataset`; which shards there are, and of which format

Nothing here imports torch, pyarrow or fsspec before a shard needs it.
"""
