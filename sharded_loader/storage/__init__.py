"""Shards: files of many samples, on this machine or in an object store. From the bottom up:

stores.py                               the bytes of files: local, or wherever fsspec reaches
files.py                                one shard as bytes by their place, wherever it lies
indexes.py                              where the samples of a shard lie; made once, kept, and checked
tar.py, records.py, parquet.py, mds.py  the formats
dataset.py                              `ShardDataset`
"""
