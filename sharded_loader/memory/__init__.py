"""Transport of batches and datasets between processes."""
