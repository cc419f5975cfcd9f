"""The engine of a loader: tasks and results, pools, the order of an epoch, batches in flight, the reader."""
