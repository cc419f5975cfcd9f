"""The order of samples: samplers, batch samplers, shards and ranks. `sharded_loader` has their names. From the
bottom up:

    tables.py            one epoch as a table; batches and ranks as arithmetic on positions
    base.py              Sampler: what every sampler is, and what ``set_epoch`` has asked of it
    state.py             what `state_dict` returns
    foreign.py           any sampler at all as a table: the one place that reads samplers of other libraries
    own.py               what a loader makes itself: indices in turn or shuffled, batches, also with rollover
    epoch.py             one epoch's batches for a rank, from any position on
    order.py             a loader's order: which epoch is next, what a state is compared with, the share of one rank

Everything here is a pure function of (seed, epoch, position); nothing imports torch until a seed has to be
drawn from its generator.
"""
