"""Orders for special data: of similar length, of equal cost, in packed rows, in shards. No loader needs one of them.

    bucket_samplers.py    `FixedBucketSampler`, `GroupedBatchSampler`: batches from one bucket
    costs.py              `CostSampler`: ranks with equal work, ``costs=`` of the loader
    packing.py, pack.py   `PackSampler` and `batchify.Pack`: documents side by side in rows of tokens
    shard_shuffle.py      `ShardShuffleSampler`: shards in shuffled order, a few at a time

For: samples of different lengths, and shards that do not all fit on a machine.
Costs: about 800 lines. The core takes them as it takes a sampler of yours, and asks for ``costs=`` by name.
Tests: tests/samplers, and with all other samplers tests/sampling.
It goes when: models take samples of any length at the same price.
"""
