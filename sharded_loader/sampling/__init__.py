"""The order of samples: samplers, batch samplers, shards and ranks. From the bottom up:

    tables.py        one epoch as a table; batches and ranks as arithmetic on positions
    base.py          Sampler: the base class of samplers, and their calls of ``set_epoch``
    state.py         contents of `state_dict`
    third_party.py       any sampler as a table; the only module that reads samplers of other libraries
    own.py           samplers that a loader makes: sequential or shuffled indices, batches, also with rollover
    epoch.py         one epoch's batches for a rank, from any position on
    order.py         a loader's order: the next epoch, comparison with states, one rank's share

Everything here is a pure function of (seed, epoch, position). torch is imported only to draw a seed.
"""
