"""Shards: files of many samples, on this machine or in an object store. From the bottom up:

    errors.py        the errors of shards, and what messages show of a URL
    parts.py         a part of a remote file, and whether it is of the version that was found first
    stores.py        the bytes of files: local, or wherever fsspec reaches
    files.py         one shard as bytes by their place, wherever it lies
    indexes.py       where the samples of a shard lie; made once, kept, and checked
    tar.py, ...      the formats: tar, RecordIO, Parquet and Arrow, MDS
    formats.py       which of them a file has; files that list shards
    cache.py         whole shards of an object store on this machine's disk, checked: `ShardCache`
    read_ahead.py    fetches shards before they are needed
    dataset.py       `ShardDataset`

Nothing here imports torch, pyarrow or fsspec before a shard needs it.
"""
