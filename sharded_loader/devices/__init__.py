"""Where batches end up: host memory, one device, or shard i on device i."""
