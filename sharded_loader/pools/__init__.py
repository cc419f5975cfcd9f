"""Who reads the samples: the caller itself, threads, or processes. Each pool is an `engine.pool.Pool`."""
