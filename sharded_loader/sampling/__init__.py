"""The order of samples: samplers, batch samplers, buckets, shards and ranks. `sharded_loader` has their names. From the
bottom up:

    tables.py            one epoch as a table; batches and ranks as arithmetic on positions
    sorting.py           sorting by keys of any kind
    base.py              Sampler: what every sampler is, and what ``set_epoch`` has asked of it
    state.py             what `state_dict` returns
    foreign.py           any sampler at all as a table: the one place that reads samplers of other libraries
    index_samplers.py    orders of single indices
    shard_shuffle.py     shards in shuffled order, samples shuffled within a window of shards
    weighted.py          indices drawn by weight
    batch_samplers.py    batches of indices, and the arithmetic of rollover
    bucket_schemes.py    buckets for lengths
    bucket_samplers.py   batches by fixed buckets of lengths
    shards.py            a batch split over devices
    replicas.py          the share of one rank; one part of a dataset
    reading.py           one epoch's batches for a rank, from any position on
    order.py             a loader's order: which epoch is next, and what a state is compared with

Everything here is a pure function of (seed, epoch, position); nothing imports torch until a seed has to be
drawn from its generator.
"""
