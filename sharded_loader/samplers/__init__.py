"""Orders that no loader makes by itself: by length, label, weight or cost, in packed rows, in shards.

    index_samplers.py     orders of single indices: filtered, in parts, sorted, by weight, of equal cost, of few shards,
                          each several times
    batch_samplers.py     batches in shards, of similar length, of some classes each
    bucket_samplers.py    `FixedBucketSampler`, `GroupedBatchSampler`: batches from one bucket
    packing.py            `PackSampler` and `batchify.Pack`: documents side by side in rows of tokens

For: samples of different lengths and kinds, and shards that do not all fit on a machine.
Costs: about 1,300 lines. The core takes them as it takes a sampler of yours, and asks for ``costs=`` by name.
Tests: tests/samplers, and with all other samplers tests/sampling.
It goes when: models take samples of any length at the same price.
"""
