"""Placement of batches: host memory, one device, or shard i on device i."""
