"""Samplers for special orders: by length, label, weight or cost, in packed rows, in shards.

    index_samplers.py     single indices: filtered, split, sorted, by shards, repeated
    weighted.py           `WeightedRandomSampler`: single indices by weights that may change during training
    costs.py              ``costs=``: equal work for all ranks in each step, by one cost of each sample or several
    batch_samplers.py     batches split among devices, of similar length, or of balanced classes
    bucket_samplers.py    `FixedBucketSampler`, `GroupedBatchSampler`: batches from one bucket
    bijections.py         many small shuffles at once, for the samplers above
    packing.py            `PackSampler` and `batchify.Pack`: documents packed into rows of tokens
    context.py            the part of packed rows that one rank reads under context parallelism

The core treats them like a user's own sampler; it looks up ``costs=`` by name.
"""
