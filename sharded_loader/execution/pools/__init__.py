"""Who reads the samples: the caller itself, threads, or processes.

A pool takes tasks and gives results, in any order, and knows nothing of epochs, order or devices. Another
kind of worker (a cluster's actors, say) is another subclass of `base.Pool` here and touches nothing else.
Empty on purpose: a worker process imports `link` without the pools.
"""
